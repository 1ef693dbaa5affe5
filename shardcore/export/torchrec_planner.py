"""Planning from a TorchRec model: its tables as a Problem, and a drop-in planner.

    planner = ShardCorePlanner(topology, batch_size=512, constraints=constraints, model=load_model("model/"))
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    module = DistributedModelParallel(module, plan=plan, sharders=sharders)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcore.access_statistics import Reuse, Zipf
from shardcore.constraints import Constraints
from shardcore.cost.mixed import out_of_range
from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.export import fbgemm_statistics
from shardcore.export import torchrec_constraints as constrained
from shardcore.export.row_shares import with_row_shares
from shardcore.export.torchrec import to_torchrec
from shardcore.export.torchrec_modules import (
    ModelTable,
    require_all,
    require_sharders,
    tables_of,
    unpriced_wrappers,
)
from shardcore.export.torchrec_settings import unpriced, unpriced_hardware, unpriced_optimizers
from shardcore.fused import PRECISIONS, named
from shardcore.job import Job
from shardcore.layouts import layout_of_torchrec, ways
from shardcore.search import DEFAULT_SHARDER, SPACE_OF, Budget, known, sharder
from shardcore.tables import access
from shardcore.tables.deduplication import dedup_of
from shardcore.tables.hot_rows import with_hot_rows
from shardcore.tables.public import DEFAULT_ACCESS
from shardcore.topology import Device, Topology
from shardcore.types import Plan, Problem, Table
from shardcore.workload import lower

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.distributed.types import ModuleSharder, ShardingPlan
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    Lookups = Mapping[str, float] | Iterable[KeyedJaggedTensor] | KeyedJaggedTensor | str | Path

BATCH_SIZE = 512
"""Samples per rank, if none are given. The default of TorchRec's planner."""
RESERVED = 0.15
"""The share of device memory that TorchRec keeps free of embeddings by default."""


def problem_for(module: nn.Module, topology: Topology | TheirTopology, global_batch: int, lookups: Lookups,
                optimizer: str = "exact_sgd", constraints: Constraints | None = None,
                name: str = "model", job: Job | None = None,
                deduplicated: Sequence[Sequence[str]] = ()) -> Problem:
    """The tables of a model's collections (see `tables_of`) as a Problem.

    Hot rows of a HotColdEmbeddingCollection are taken for the hottest ones.

    topology: ours, or TorchRec's. Of the latter's memory RESERVED stays free.
    global_batch: samples per step over all devices.
    lookups: one of three. Mean lookups per sample by feature: ids then follow DEFAULT_ACCESS. Batches of the
      model's data, a global batch or more of each feature, in one KeyedJaggedTensor or several: pooling and
      reuse are read from them, and where ids lie if that is uneven (Table.row_shares). A path of FBGEMM's
      reports (a folder or a file): reuse is then an estimate (see `fbgemm_statistics`).
    job: how a step runs around the embeddings.
    deduplicated: groups of features that share an inverse index (see Table.dedup). Their tables stay together
      on a device. Lookups have to be batches of data, not deduplicated.

    Raises ShardCoreError for a feature without lookups, ids out of range, too few samples, or a data type
    without a cost model.
    """
    theirs = tables_of(module, whole=True)
    if not theirs:
        raise ShardCoreError("the model has no EmbeddingBagCollection or EmbeddingCollection; there is "
                             "nothing to place")
    lookups = list(lookups) if isinstance(lookups, Iterator) else lookups
    statistics = _statistics(theirs, lookups, global_batch)
    ours = topology if isinstance(topology, Topology) else our_topology(topology, RESERVED)
    factors, groups = _deduplicated(theirs, lookups, deduplicated, global_batch // len(ours))
    precision = {key: named(t.config.data_type.name, PRECISIONS) for key, t in theirs.items()}
    for key, table in theirs.items():
        if precision[key] is None:
            raise ShardCoreError(f"table {key!r} has data type {table.config.data_type.name}; known are "
                                 f"{', '.join(p.theirs for p in PRECISIONS.values())}")
    tables = tuple(Table(key, t.config.num_embeddings, t.config.embedding_dim, *statistics[key],
                         precision=precision[key], features=len(t.config.feature_names),
                         weighted=t.weighted, sequence=not t.pooled, dedup=factors.get(key, 1.0),
                         collection=t.path, managed_collision=t.managed_collision)
                   for key, t in theirs.items())
    tables = with_row_shares(tables, theirs, lookups, len(ours))
    problem = Problem(name, tables, ours, global_batch, optimizer, job=job or Job())
    problem = with_hot_rows(problem, _hot_rows(module, theirs))
    constraints = constraints or Constraints()
    kinds = dict(constraints.kinds) | dict(problem.constraints.kinds)
    kinds |= dict(_only_kinds(theirs, kinds, ours))
    return replace(problem, constraints=replace(
        constraints, together=(*constraints.together, *groups), kinds=tuple(kinds.items())))


def _hot_rows(module: nn.Module, theirs: Mapping[str, ModelTable]) -> dict[str, int]:
    """How many rows of tables are hot. theirs: whole tables."""
    from shardcore.export.hot_cold import hot_cold_modules  # loads torch

    hot = {(path, name): len(ids.ids) for path, collection in hot_cold_modules(module)
           for name, ids in collection.hot_ids.items()}
    return {key: hot[t.path, t.name] for key, t in theirs.items() if (t.path, t.name) in hot}


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

    A table whose sharding_types never cut it stays whole. One whose types are of one kind on all devices gets
    that kind. A plan that breaks other sharding_types is searched again with columns only, then refused. A
    table that was cut below its min_partition is kept whole in another search. The first compute kernel that
    is not dense is used.

    After a plan, `problem` and `found` are the problem and our plan. `unpriced` has a line for each setting
    that the price leaves out, and for what lies beyond the measured range.
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

        Raises as `plan_for` and `to_torchrec` do, for a collection that no sharder takes, and for constraints
        that no plan can keep.
        """
        theirs = tables_of(module)
        if sharders:
            require_sharders(module, sharders)
        constrained.require_possible(self.constraints, theirs)
        lookups = (self.lookups if self.lookups is not None
                   else constrained.pooling_of(self.constraints, theirs))
        kinds = dict(constrained.kinds(self.constraints, theirs, self.topology))
        whole = tuple(n for n in constrained.whole(self.constraints, theirs) if n not in kinds)
        batch = self.batch_size * len(self.topology)
        self.problem = problem_for(module, self.topology, batch, lookups, self.model.setting.optimizer,
                                   Constraints(unsplit=whole, kinds=tuple(kinds.items())), job=self.job)
        try:
            model = self.model.for_problem(self.problem)
        except SettingMismatch as error:
            raise SettingMismatch(f"batch_size {self.batch_size} on {len(self.topology)} devices: "
                                  f"{error}") from None
        self.found = self._search(theirs)
        made = to_torchrec(self.found, self.problem, module, self.compute_device,
                           constrained.settings_of(self.constraints, theirs))
        require_all(made, module, sharders or ())
        self.unpriced = [
            *unpriced(made, sharders or (), self.problem.optimizer, self.problem.job),
            *unpriced_optimizers(module, self.problem.optimizer), *unpriced_wrappers(theirs),
            *(constrained.default_pooling(self.constraints, theirs) if self.lookups is None else ()),
            *unpriced_hardware(self.model.setting, self.compute_device),
            *(f"extrapolated: {line}" for line in out_of_range(model, lower(self.found, self.problem)))]
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

    def _search(self, theirs: Mapping[str, ModelTable]) -> Plan:
        """A plan that keeps the constraints. The search knows neither sharding_types nor min_partition.

        So its plan is checked. It is searched again with tables whole that were cut too narrow, and with
        columns only if it has a sharding type that was not asked for.
        """
        for algorithm in (self.algorithm, *_narrower(self.algorithm)):
            search, problem = sharder(algorithm), self.problem
            found = search(problem, self.model.for_problem(problem), seed=self.seed, budget=self.budget)
            whole: tuple[str, ...] = ()
            while narrow := constrained.too_narrow(found, self.constraints, theirs):
                whole = (*whole, *narrow)
                unsplit = (*self.problem.constraints.unsplit, *whole)
                problem = replace(problem, constraints=replace(problem.constraints, unsplit=unsplit))
                try:
                    found = search(problem, self.model.for_problem(problem), seed=self.seed,
                                   budget=self.budget)
                except Infeasible as error:
                    raise Infeasible(f"{constrained.kept_whole(whole, self.constraints, theirs)}, and then "
                                     f"no plan was found: {error}") from None
            refused = constrained.broken(found, self.constraints, theirs, self.topology)
            if not refused:
                return found
        raise ShardCoreError(refused)


def our_topology(topology: TheirTopology, reserved: float = 0.0) -> Topology:
    """TorchRec's devices and hosts as ours. On a CPU, DDR counts as HBM. The cost model has the links."""
    cuda = topology.compute_device == "cuda"
    return Topology(tuple(
        Device(int((d.storage.hbm if cuda else d.storage.ddr) * (1 - reserved)),
               host=f"host-{d.rank // topology.local_world_size}") for d in topology.devices))


def _only_kinds(theirs: Mapping[str, ModelTable], asked: Container[str],
                topology: Topology) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Tables that TorchRec runs by one kind of sharding, and that kind; without those asked for already.

    Raises ShardCoreError if the topology does not have that kind.
    """
    for name, table in theirs.items():
        kinds = {layout for of in table.sharding_types if (layout := layout_of_torchrec(of))}
        if len(kinds) == 1 and name not in asked:
            kind = kinds.pop()
            if kind not in ways(topology):
                raise ShardCoreError(f"table {name!r} is in {table.path!r}, a {table.within}, which TorchRec "
                                     f"shards {' or '.join(table.sharding_types)} only; the topology has "
                                     f"{len(topology)} device, and it needs 2 or more to divide rows")
            yield name, (kind.name,)


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
    samples: dict[str, int] = defaultdict(int)
    for batch in batches:
        if not isinstance(batch, KeyedJaggedTensor):
            raise ShardCoreError(f"lookups has {batch!r:.80}; it needs KeyedJaggedTensors, or mean lookups "
                                 "by feature, or the path of FBGEMM's reports")
        # Weighted, plain and sequence features may come in tensors of their own.
        for feature, values in batch.to_dict().items():
            samples[feature] += batch.stride()
            ids[feature].append(values.values().cpu().numpy())
    found = {}
    for name, table in theirs.items():
        features = table.config.feature_names
        for feature in features:
            if feature not in ids:
                raise ShardCoreError(f"feature {feature!r} of table {name!r} is not in the data; there are "
                                     f"{list(ids)[:5]}")
            # Fewer samples would show too little reuse of ids in a batch.
            if samples[feature] < global_batch:
                raise ShardCoreError(f"lookups has {samples[feature]} samples of feature {feature!r}; it "
                                     f"needs a global batch of the model's data, {global_batch}, or more")
            if samples[feature] != samples[features[0]]:
                raise ShardCoreError(f"lookups has {samples[feature]} samples of feature {feature!r} and "
                                     f"{samples[features[0]]} of {features[0]!r}; table {name!r} needs as "
                                     "many of each")
            for values in ids[feature]:
                _require_rows(values, feature, name, table.config.num_embeddings)
        all_ids, n = np.concatenate([of for f in features for of in ids[f]]), samples[features[0]]
        found[name] = len(all_ids) / n, access.reuse_of(all_ids, n)
    return found


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
