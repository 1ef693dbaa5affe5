"""Planning from a TorchRec model: its tables as a Problem, and a drop-in planner.

    planner = ShardCorePlanner(topology, batch_size=512, constraints=constraints, model=load_model("model/"))
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    module = DistributedModelParallel(module, plan=plan, sharders=sharders)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcore.constraints import Constraints
from shardcore.cost.model import CostModel
from shardcore.errors import SettingMismatch, ShardCoreError
from shardcore.export import fbgemm_statistics
from shardcore.export.torchrec import sharded, to_torchrec
from shardcore.export.torchrec_modules import (
    ModelTable,
    require_all,
    require_sharders,
    tables_of,
    unpriced_wrappers,
)
from shardcore.export.torchrec_settings import unpriced
from shardcore.fused import PRECISIONS, named
from shardcore.job import Job
from shardcore.layouts import LAYOUTS, WHOLE_ROWS, layout_of_torchrec
from shardcore.search import DEFAULT_SHARDER, Budget, known, sharder
from shardcore.search.anneal.sharder import SPACE_OF
from shardcore.tables import access
from shardcore.tables.deduplication import dedup_of
from shardcore.tables.public import DEFAULT_ACCESS
from shardcore.topology import Device, Topology
from shardcore.types import Plan, Problem, Reuse, Table, Zipf

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.distributed.types import ModuleSharder, ShardingPlan
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    Lookups = Mapping[str, float] | Iterable[KeyedJaggedTensor] | KeyedJaggedTensor | str | Path

WHOLE_TYPES = {layout.torchrec_whole for layout in LAYOUTS.values() if not layout.divides_rows}
"""TorchRec's sharding types that do not cut a table."""
BATCH_SIZE = 512
"""Samples per rank, if none are given. The default of TorchRec's planner."""
RESERVED = 0.15
"""The share of device memory that TorchRec keeps free of embeddings by default."""


def problem_for(module: nn.Module, topology: Topology | TheirTopology, global_batch: int, lookups: Lookups,
                optimizer: str = "exact_sgd", constraints: Constraints | None = None,
                name: str = "model", job: Job | None = None,
                deduplicated: Sequence[Sequence[str]] = ()) -> Problem:
    """The tables of a model's collections (see `tables_of`) as a Problem.

    topology: ours, or TorchRec's. Of the latter's memory RESERVED stays free.
    global_batch: samples per step over all devices.
    lookups: one of three. Mean lookups per sample by feature: ids then follow DEFAULT_ACCESS. Batches of the
      model's data, a global batch or more in all: pooling and reuse are read from them. A path of FBGEMM's
      reports (a folder or a file): reuse is then an estimate (see `fbgemm_statistics`).
    job: how a step runs around the embeddings.
    deduplicated: groups of features that share an inverse index (see Table.dedup). Their tables stay together
      on a device. Lookups have to be batches of data, not deduplicated.

    Raises ShardCoreError for a feature without lookups, ids out of range, too few samples, or a data type
    without a cost model.
    """
    theirs = tables_of(module)
    if not theirs:
        raise ShardCoreError("the model has no EmbeddingBagCollection or EmbeddingCollection; there is "
                             "nothing to place")
    lookups = list(lookups) if deduplicated and isinstance(lookups, Iterator) else lookups
    statistics = _statistics(theirs, lookups, global_batch)
    ours = topology if isinstance(topology, Topology) else our_topology(topology, RESERVED)
    factors, groups = _deduplicated(theirs, lookups, deduplicated, global_batch // len(ours))
    constraints = constraints or Constraints()
    constraints = replace(constraints, together=(*constraints.together, *groups),
                          kinds=(*constraints.kinds, *_only_kinds(theirs, dict(constraints.kinds))))
    precision = {key: named(t.config.data_type.name, PRECISIONS) for key, t in theirs.items()}
    for key, table in theirs.items():
        if precision[key] is None:
            raise ShardCoreError(f"table {key!r} has data type {table.config.data_type.name}; known are "
                                 f"{', '.join(p.theirs for p in PRECISIONS.values())}")
    tables = tuple(Table(key, t.config.num_embeddings, t.config.embedding_dim, *statistics[key],
                         precision=precision[key], features=len(t.config.feature_names),
                         weighted=t.weighted, sequence=not t.pooled, dedup=factors.get(key, 1.0),
                         collection=t.path)
                   for key, t in theirs.items())
    return Problem(name, tables, ours, global_batch, optimizer, constraints, job or Job())


def plan_for(module: nn.Module, topology: Topology | TheirTopology, model: CostModel, lookups: Lookups,
             algorithm: str = DEFAULT_SHARDER, seed: int = 0, budget: Budget | None = None,
             constraints: Constraints | None = None,
             global_batch: int | None = None, job: Job | None = None) -> tuple[Plan, Problem]:
    """A plan of a module's tables, and the problem that it solves.

    global_batch: samples of a step over all devices. None: the cost model's.
    job: how a step runs around the embeddings. None: the default.

    The optimizer is that of the cost model. Raises as `problem_for` and all sharders do, and for an
    unknown algorithm.
    """
    _require_model(model)
    search = sharder(algorithm)
    batch = global_batch or model.setting.batch
    problem = problem_for(module, topology, batch, lookups, model.setting.optimizer, constraints, job=job)
    return search(problem, model.for_problem(problem), seed=seed, budget=budget), problem


class ShardCorePlanner:
    """A drop-in for TorchRec's EmbeddingShardingPlanner. It is a torchrec ShardingPlanner.

    topology: TorchRec's or ours. TorchRec's bandwidths are ignored, because the cost model measured its own.
    batch_size: samples per rank.
    constraints: TorchRec's, by table: pooling_factors, sharding_types, compute_kernels and kernel settings.
    model: the cost model.
    algorithm, seed, budget: of the search.
    lookups: as in `problem_for`, instead of pooling_factors.
    reserved: share of HBM kept free of embeddings.
    job: how a step runs around the embeddings: pipeline, dense part, payloads. None: the default.

    A table whose sharding_types never cut it stays whole. A plan that breaks other sharding_types is searched
    again with columns only, then refused. The first compute kernel that is not dense is used.

    After a plan, `problem` and `found` are the problem and our plan. `unpriced` has a line for each setting
    that the price leaves out.
    """

    def __init__(self, topology: TheirTopology | Topology, batch_size: int | None = BATCH_SIZE,
                 constraints: Mapping[str, ParameterConstraints] | None = None, *, model: CostModel,
                 algorithm: str = DEFAULT_SHARDER, seed: int = 0, budget: Budget | None = None,
                 lookups: Lookups | None = None, reserved: float = RESERVED, job: Job | None = None) -> None:
        from torchrec.distributed.types import ShardingPlanner

        _require_model(model)
        algorithm = known(algorithm)
        # Registering avoids importing TorchRec with this module.
        ShardingPlanner.register(type(self))
        self.compute_device = getattr(topology, "compute_device", "cuda")
        self.topology = topology if isinstance(topology, Topology) else our_topology(topology, reserved)
        self.batch_size, self.constraints, self.lookups = (batch_size or BATCH_SIZE, dict(constraints or {}),
                                                           lookups)
        self.model, self.algorithm, self.seed, self.budget, self.job = model, algorithm, seed, budget, job
        self.problem: Problem | None = None
        self.found: Plan | None = None
        self.unpriced: list[str] = []

    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None = None) -> ShardingPlan:
        """A plan for the module's collections.

        sharders: those of DistributedModelParallel. None or empty: its defaults.

        Raises as `plan_for` and `to_torchrec` do, and for a collection that no sharder takes.
        """
        theirs = tables_of(module)
        if sharders:
            require_sharders(module, sharders)
        lookups = self.lookups if self.lookups is not None else self._pooling(theirs)
        whole = tuple(name for name, t in theirs.items() if (asked := self._asked(t))
                      and set(asked) <= WHOLE_TYPES)
        batch = self.batch_size * len(self.topology)
        self.problem = problem_for(module, self.topology, batch, lookups, self.model.setting.optimizer,
                                   Constraints(unsplit=whole), job=self.job)
        try:
            model = self.model.for_problem(self.problem)
        except SettingMismatch as error:
            raise SettingMismatch(f"batch_size {self.batch_size} on {len(self.topology)} devices: "
                                  f"{error}") from None
        # The search does not know sharding_types. So check its plan, and retry with columns only.
        for algorithm in (self.algorithm, *_narrower(self.algorithm)):
            self.found = sharder(algorithm)(self.problem, model, seed=self.seed, budget=self.budget)
            if not (refused := self._refused(theirs)):
                break
        else:
            raise ShardCoreError(refused)
        made = to_torchrec(self.found, self.problem, module, self.compute_device, self._settings(theirs))
        require_all(made, module, sharders or ())
        self.unpriced = [*unpriced(made, sharders or (), self.problem.optimizer, self.problem.job),
                         *unpriced_wrappers(theirs)]
        return made

    def collective_plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None = None,
                        pg: dist.ProcessGroup | None = None) -> ShardingPlan:
        """Rank 0's plan on all ranks. If rank 0 fails, all ranks raise its error instead of waiting."""
        import torch.distributed as dist
        from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result

        def attempt() -> ShardingPlan | Exception:
            try:
                return self.plan(module, sharders)
            except Exception as error:
                return error

        # An exception is broadcast like a plan. Raising it on rank 0 only would leave the others waiting.
        result = invoke_on_rank_and_broadcast_result(pg or dist.GroupMember.WORLD, 0, attempt)
        if isinstance(result, Exception):
            raise result
        return result

    def _asked(self, table: ModelTable) -> list[str] | None:
        found = self.constraints.get(table.name)
        return found.sharding_types if found else None

    def _pooling(self, theirs: Mapping[str, ModelTable]) -> dict[str, float]:
        """Lookups by feature. A single factor holds for every feature of its table."""
        pooling: dict[str, float] = {}
        for table in theirs.values():
            found, features = self.constraints.get(table.name), table.config.feature_names
            if found is None:
                raise ShardCoreError(f"table {table.name!r} has no constraints; it needs "
                                     f"ParameterConstraints(pooling_factors=[mean lookups per sample of "
                                     f"{', '.join(features)}]), or give the planner `lookups`")
            factors = (found.pooling_factors * len(features) if len(found.pooling_factors) == 1
                       else found.pooling_factors)
            if len(factors) != len(features):
                raise ShardCoreError(f"table {table.name!r} has {len(factors)} pooling_factors for its "
                                     f"{len(features)} features")
            pooling |= dict(zip(features, factors, strict=True))
        return pooling

    def _refused(self, theirs: Mapping[str, ModelTable]) -> str:
        """Why the plan breaks a sharding_types constraint. "": it breaks none."""
        placed = defaultdict(list)
        for p in self.found.placements:
            placed[p.shard.table.name].append(p)
        for name, table in theirs.items():
            asked, kind = self._asked(table), sharded(placed[name], self.topology).sharding_type
            # Whoever allows cuts by columns takes a whole table too.
            taken = kind == WHOLE_ROWS.torchrec_whole and WHOLE_ROWS.torchrec_cut
            if asked and kind not in asked and taken not in asked:
                return (f"the plan found shards table {name!r} {kind}; its constraints ask for "
                        f"{', '.join(asked)}: allow it, or only {WHOLE_ROWS.torchrec_whole} to keep it whole")
        return ""

    def _settings(self, theirs: Mapping[str, ModelTable]) -> ShardingPlan:
        """The constraints' kernel settings, in the form of a plan."""
        from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

        modules: dict[str, Any] = {}
        for table in theirs.values():
            if c := self.constraints.get(table.name):
                # Dense kernels are for replicas, which to_torchrec chooses itself.
                kernel = next((k for k in c.compute_kernels or () if k != "dense"), "fused")
                modules.setdefault(table.path, EmbeddingModuleShardingPlan())[table.name] = ParameterSharding(
                    "", kernel, cache_params=c.cache_params, enforce_hbm=c.enforce_hbm,
                    stochastic_rounding=c.stochastic_rounding,
                    bounds_check_mode=c.bounds_check_mode, output_dtype=c.output_dtype,
                    key_value_params=c.key_value_params)
        return ShardingPlan(modules)


def our_topology(topology: TheirTopology, reserved: float = 0.0) -> Topology:
    """TorchRec's devices and hosts as ours. On a CPU, DDR counts as HBM. The cost model has the links."""
    cuda = topology.compute_device == "cuda"
    return Topology(tuple(
        Device(int((d.storage.hbm if cuda else d.storage.ddr) * (1 - reserved)),
               host=f"host-{d.rank // topology.local_world_size}") for d in topology.devices))


def _only_kinds(theirs: Mapping[str, ModelTable], asked: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Tables that TorchRec runs by one kind of sharding, and that kind; without those asked for already."""
    for name, table in theirs.items():
        kinds = {layout_of_torchrec(of).name for of in table.sharding_types if layout_of_torchrec(of)}
        if len(kinds) == 1 and name not in asked:
            yield name, kinds.pop()


def _narrower(algorithm: str) -> list[str]:
    """Sharders to try next if a plan breaks constraints: those that only cut columns."""
    return ([name for name, space in SPACE_OF.items() if space == "columns"]
            if SPACE_OF.get(algorithm) == "all" else [])


def _require_model(model: CostModel) -> None:
    if not hasattr(model, "setting"):
        raise ShardCoreError(f"model is {model!r}; it needs a cost model, as shardcore.load_model(FOLDER) "
                             "gives")


def _statistics(theirs: Mapping[str, ModelTable], lookups: Lookups,
                global_batch: int) -> dict[str, tuple[float, Reuse | Zipf]]:
    """Pooling and access of each table."""
    if isinstance(lookups, (str, Path)):
        return _reported(theirs, lookups)
    if isinstance(lookups, Mapping):
        return _given(theirs, lookups)
    # A single KeyedJaggedTensor is not an Iterable.
    return _measured(theirs, lookups if isinstance(lookups, Iterable) else [lookups], global_batch)


def _given(theirs: Mapping[str, ModelTable], lookups: Mapping[str, float]) -> dict[str, tuple[float, Zipf]]:
    for name, table in theirs.items():
        for feature in table.config.feature_names:
            if feature not in lookups:
                raise ShardCoreError(f"feature {feature!r} of table {name!r} has no lookups; given are "
                                     f"{sorted(lookups)[:5]}")
            if not isinstance(lookups[feature], Real):
                raise ShardCoreError(f"feature {feature!r} of table {name!r} has lookups "
                                     f"{lookups[feature]!r}; it needs a number, the mean of a sample")
    return {name: (sum(lookups[f] for f in t.config.feature_names), DEFAULT_ACCESS)
            for name, t in theirs.items()}


def _reported(theirs: Mapping[str, ModelTable], path: str | Path) -> dict[str, tuple[float, Reuse]]:
    return fbgemm_statistics.matched(fbgemm_statistics.read_statistics(path), {
        name: (t.path, t.name, t.config.num_embeddings, t.config.embedding_dim)
        for name, t in theirs.items()})


def _measured(theirs: Mapping[str, ModelTable], batches: Iterable[KeyedJaggedTensor],
              global_batch: int) -> dict[str, tuple[float, Reuse]]:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    ids: dict[str, list[np.ndarray]] = defaultdict(list)
    samples = 0
    for batch in batches:
        if not isinstance(batch, KeyedJaggedTensor):
            raise ShardCoreError(f"lookups has {batch!r:.80}; it needs KeyedJaggedTensors, or mean lookups "
                                 "by feature, or the path of FBGEMM's reports")
        samples += batch.stride()
        by_feature = batch.to_dict()
        for name, table in theirs.items():
            for feature in table.config.feature_names:
                if feature not in by_feature:
                    raise ShardCoreError(f"feature {feature!r} of table {name!r} is not in the data; there "
                                         f"are {list(by_feature)[:5]}")
                values = by_feature[feature].values().cpu().numpy()
                _require_rows(values, feature, name, table.config.num_embeddings)
                ids[name].append(values)
    # Fewer samples would show too little reuse of ids in a batch.
    if samples < global_batch:
        raise ShardCoreError(f"lookups has {samples} samples; it needs a global batch of the model's data, "
                             f"{global_batch}, or more")
    found = {name: np.concatenate(parts) for name, parts in ids.items()}
    return {name: (len(values) / samples, access.reuse_of(values, samples)) for name, values in found.items()}


def _deduplicated(theirs: Mapping[str, ModelTable], lookups: Lookups, groups: Sequence[Sequence[str]],
                  batch: int) -> tuple[dict[str, float], list[tuple[str, ...]]]:
    """The dedup of the tables of some groups of features, and the tables of each group of several."""
    if not groups:
        return {}, []
    if isinstance(lookups, (str, Path, Mapping)):
        raise ShardCoreError(f"deduplicated has {list(groups[0])}; its factor is read from batches of data, "
                             "so lookups need to be KeyedJaggedTensors")
    group_of = {feature: tuple(group) for group in groups for feature in group}
    tables: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, table in theirs.items():
        found = {group_of.get(f) for f in table.config.feature_names}
        if len(found) > 1:
            raise ShardCoreError(f"table {name!r} has features {table.config.feature_names}; deduplicated "
                                 "needs all of them in one group, or none")
        if (group := found.pop()) is not None:
            tables[group].append(name)
    for group in map(tuple, groups):
        if group not in tables:
            raise ShardCoreError(f"deduplicated has {list(group)}; no table has these features")
    batches = lookups if isinstance(lookups, Iterable) else [lookups]
    of: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for jagged in batches:
        for feature, values in jagged.to_dict().items():
            of[feature].append((values.values().cpu().numpy(), values.lengths().cpu().numpy()))
    joined = {f: tuple(map(np.concatenate, zip(*parts, strict=True))) for f, parts in of.items()}
    factors = {group: dedup_of([joined[f] for f in group], batch) for group in tables}
    return ({name: factors[group] for group, names in tables.items() for name in names},
            [tuple(names) for names in tables.values() if len(names) > 1])


def _require_rows(ids: np.ndarray, feature: str, table: str, rows: int) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < rows:
        raise ShardCoreError(f"feature {feature!r} has ids {ids.min()} to {ids.max()}, table {table!r} rows "
                             f"0 to {rows - 1}; give ids as the collection gets them")
