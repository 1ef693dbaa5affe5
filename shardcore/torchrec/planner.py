"""Planning from a TorchRec model: its tables as a Problem, and a drop-in planner.

planner = ShardCorePlanner(topology, batch_size=512, constraints=constraints, model=load_model("model/"))
plan = planner.collective_plan(module, sharders, dist.group.WORLD)
module = DistributedModelParallel(module, plan=plan, sharders=sharders)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore.core.catalog import PRECISIONS, named
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.core.validation import require, require_type
from shardcore.cost.known_errors import profile_of
from shardcore.cost.model import CostModel
from shardcore.search import DEFAULT_SHARDER, Budget, known, sharder
from shardcore.search.state.packing import roomiest
from shardcore.search.state.refusal import refusal
from shardcore.step.kinds import LAYOUTS, even_share, layout_of, possible_groups
from shardcore.step.lower import lower
from shardcore.tables.hot_rows import with_hot_rows
from shardcore.torchrec import constraints as constrained
from shardcore.torchrec import fields, optimizers, topologies
from shardcore.torchrec.cost_models import model_of
from shardcore.torchrec.lookups import (
    Data,
    deduplicated_of,
    read_lookups,
    statistics_of,
    strides_of,
    with_row_shares,
)
from shardcore.torchrec.modules import (
    ModelTable,
    few,
    require_all,
    require_sharders,
    sharders_of,
    tables_of,
    unpriced_wrappers,
)
from shardcore.torchrec.settings import payloads_of, unpriced, unpriced_hardware
from shardcore.torchrec.sharding_plan import to_torchrec
from shardcore.torchrec.topologies import our_topology

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.distributed.types import ModuleSharder, ShardingPlan

    from shardcore.torchrec.lookups import Lookups

    Kinds = Mapping[str, tuple[str, ...]]

BATCH_SIZE = 512
"""Samples per rank, if none are given. The default of TorchRec's planner."""
RESERVED = 0.15
"""The share of device memory that TorchRec keeps free of embeddings by default."""


def problem_for(
    module: nn.Module,
    topology: Topology | TheirTopology,
    global_batch: int,
    lookups: Lookups | Data,
    optimizer: str | None = None,
    constraints: Constraints | None = None,
    name: str = "model",
    job: Job | None = None,
    deduplicated: Sequence[Sequence[str]] = (),
    bags: Mapping[str, float] | None = None,
) -> Problem:
    """The tables of a model's collections (see `tables_of`) as a Problem.

    Hot rows of a HotColdEmbeddingCollection count as the hottest ones.

    topology: ours, or TorchRec's. Of the latter's memory RESERVED stays free, or nothing if the job has the memory
      of its dense part (dense_memory.py).
    global_batch: samples per step over all devices.
    lookups: one of three. Mean lookups per sample by feature, or by (table, feature): ids then follow
      DEFAULT_ACCESS. Batches of the model's data, a global batch or more of each feature, in one
      KeyedJaggedTensor or several: pooling and reuse are read from them, and where ids lie if that is uneven
      (Table.row_shares). One whose features differ in samples (VBE) says of how many ranks it is
      (stride_per_key_per_rank); its tables get their features' strides, and no replicas, for TorchRec fails
      with them. Weights of ids travel, whether the collection uses them or not. A path of FBGEMM's reports
      (a folder or a file): reuse is then an estimate (see `fbgemm_statistics`).
    optimizer: None: the one that the model's weights have (apply_optimizer_in_backward), or else exact_sgd.
    job: properties of a step around the embeddings.
    deduplicated: groups of features that share an inverse index (see Table.dedup). Their tables stay together
      on a device. Lookups have to be batches of data, not deduplicated.
    bags: bags of features, for a sample, where features have batches of their own. None: as the data have them.

    Raises ShardCoreError for a feature without lookups, ids out of range, too few samples, a data type
    without a cost model, another optimizer than the weights have, and settings of tables that are refused
    (see `fields.FIELDS`).
    """
    # Whole tables, as hot rows are divided from them below.
    theirs = tables_of(module, whole=True)
    require_type(global_batch, int, "global_batch", "a whole number, the samples of a step")
    if not theirs:
        raise ShardCoreError(
            "the model has no EmbeddingBagCollection or EmbeddingCollection; there is nothing to place"
        )
    for key, table in theirs.items():
        # Settings of tables are checked before lookups are read, which takes long.
        fields.require_treated(table.config, f"config of table {key!r}")
    set_optimizer = optimizers.optimizer_of(module, theirs)
    if optimizer is not None and set_optimizer and optimizer != set_optimizer:
        raise ShardCoreError(
            f"optimizer is {optimizer!r}; the model's weights have {set_optimizer!r} in backward: leave it out"
        )
    ours = topology if isinstance(topology, Topology) else our_topology(topology, default_share(job))
    ours = topologies.as_job(ours)
    data = read_lookups(lookups, max(1, global_batch // len(ours)))
    statistics = statistics_of(theirs, data, global_batch)
    # Deduplication happens on a device, so within its share of the batch.
    factors, groups = deduplicated_of(theirs, data, deduplicated, global_batch // len(ours))
    bags = data.bags if isinstance(data, Data) and data.variable else bags or {}
    strides = strides_of(theirs, bags)
    weighted = data.weighted if isinstance(data, Data) else frozenset[str]()
    tables = tuple(
        Table(
            key,
            t.config.num_embeddings,
            t.config.embedding_dim,
            *statistics[key],
            precision=_precision(key, t.config.data_type.name),
            features=len(t.config.feature_names),
            weighted=t.weighted or not weighted.isdisjoint(t.config.feature_names),
            sequence=not t.pooled,
            dedup=factors.get(key, 1.0),
            collection=t.path,
            managed_collision=t.managed_collision,
            strides=strides.get(key, ()),
        )
        for key, t in theirs.items()
    )
    if isinstance(data, Data):
        tables = with_row_shares(tables, theirs, data, len(ours))
    if optimizer is None:
        optimizer = set_optimizer or "exact_sgd"
    problem = Problem(name, tables, ours, global_batch, optimizer, job=job or Job())
    # Tables are read whole and divided here, so hot and cold rows share statistics.
    problem = with_hot_rows(problem, _hot_rows(module, theirs))
    constraints = constraints or Constraints()
    kinds = dict(constraints.kinds) | dict(problem.constraints.kinds)
    # TorchRec's wrappers support some sharding types only.
    kinds |= _kinds_in_wrappers(theirs, kinds, ours)
    widths = dict(constraints.min_widths)
    if bags:
        kinds |= _kinds_of_variable(tables, kinds, tuple(bags))
        # TorchRec's grid_shard is host_row that is cut.
        widths |= {t.name: t.dim for t in tables if set(kinds[t.name]) <= _GRID}
    constraints = replace(
        constraints,
        together=(*constraints.together, *groups),
        kinds=tuple(kinds.items()),
        min_widths=tuple(widths.items()),
    )
    return replace(problem, constraints=constraints)


def default_share(job: Job | None) -> float:
    """The share of memory that stays free by default: RESERVED, as in TorchRec's planner, or 0 with a measured job."""
    return 0.0 if job and job.dense_bytes else RESERVED


def _precision(table: str, data_type: str) -> str:
    precision = named(data_type, PRECISIONS)
    if precision is None:
        raise ShardCoreError(
            f"table {table!r} has data type {data_type}; known are {', '.join(p.theirs for p in PRECISIONS.values())}"
        )
    return precision


def _hot_rows(module: nn.Module, theirs: Mapping[str, ModelTable]) -> dict[str, int]:
    """Number of hot rows of tables. theirs: whole tables."""
    from shardcore.torchrec.hot_cold import hot_cold_modules  # loads torch

    hot = {
        (path, name): len(ids.ids)
        for path, collection in hot_cold_modules(module)
        for name, ids in collection.hot_ids.items()
    }
    return {key: hot[t.path, t.name] for key, t in theirs.items() if (t.path, t.name) in hot}


def plan_for(
    module: nn.Module,
    topology: Topology | TheirTopology,
    model: CostModel | str | Path,
    lookups: Lookups,
    algorithm: str = DEFAULT_SHARDER,
    seed: int = 0,
    budget: Budget | None = None,
    constraints: Constraints | None = None,
    global_batch: int | None = None,
    job: Job | None = None,
) -> tuple[Plan, Problem]:
    """A plan of a module's tables, and the problem that it solves.

    model: the cost model, or the name or file of a profile.
    global_batch: samples of a step over all devices. None: the cost model's.
    job: properties of a step around the embeddings. None: the default.

    The optimizer is the one that the model's weights have, or else that of the cost model. Raises as
    `problem_for` and all sharders do, and for an unknown algorithm.
    """
    # The search is looked up first, so that an unknown name fails before anything is read.
    model, search = model_of(model), sharder(algorithm)
    batch = model.setting.batch if global_batch is None else global_batch
    optimizer = optimizers.optimizer_of(module, tables_of(module)) or model.setting.optimizer
    problem = problem_for(module, topology, batch, lookups, optimizer, constraints, job=job)
    # The optimizer's state counts in memory even where the model prices another one.
    priced = optimizers.under(model, problem.optimizer).for_problem(problem)
    return search(problem, priced, seed=seed, budget=budget), problem


class ShardCorePlanner:
    """A drop-in for TorchRec's EmbeddingShardingPlanner. It is a torchrec ShardingPlanner.

    topology: TorchRec's or ours. Bandwidths of TorchRec's are used where they are not its defaults.
    batch_size: samples per rank.
    constraints: TorchRec's, by table. How each field is treated: `fields.FIELDS`.
    model: the cost model, or the name or file of a profile of published measurements. None: the profile of the
      job's GPU.
    algorithm, seed, budget: of the search.
    lookups: as in `problem_for`, instead of pooling_factors.
    reserved: share of HBM kept free of embeddings. None: 15%, or nothing if the job has the memory of its dense
      part (`dense_memory.measured_job`).
    job: how a step runs around the embeddings: pipeline, dense part, payloads. None: the default, with the
      payloads of the sharders' codecs.

    The optimizer that counts is the one that the module's weights or the sharders have, or else that of the
    cost model.

    After a plan, `problem` and `our_plan` are the problem and our plan. `unpriced` has a line for each setting
    that the price leaves out, for defaults that nobody may have meant, and for what lies beyond the measured
    range.
    """

    def __init__(
        self,
        topology: TheirTopology | Topology,
        batch_size: int | None = BATCH_SIZE,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        model: CostModel | str | Path | None = None,
        algorithm: str = DEFAULT_SHARDER,
        seed: int = 0,
        budget: Budget | None = None,
        lookups: Lookups | None = None,
        reserved: float | None = None,
        job: Job | None = None,
    ) -> None:
        from torchrec.distributed.types import ShardingPlanner

        algorithm = known(algorithm)
        # Registering avoids importing TorchRec with this module.
        ShardingPlanner.register(type(self))
        self.compute_device = getattr(topology, "compute_device", "cuda")
        model = model_of(model, self.compute_device)
        self.batch_size = BATCH_SIZE if batch_size is None else batch_size
        require_type(self.batch_size, int, "batch_size", "a whole number, the samples of a rank")
        require(self.batch_size > 0, f"batch_size is {self.batch_size}; it needs 1 or more samples of a rank")
        constrained.require_constraints(constraints)
        self.constraints = dict(constraints or {})
        # An iterator is consumed once, but several plans may be made.
        self.lookups = list(lookups) if isinstance(lookups, Iterator) else lookups
        # Kernels with rows below device memory need its size and link.
        kernels = {constrained.kernel_of(c) for c in self.constraints.values()}
        below = {tier for kernel, (tier, _) in constrained.KERNELS.items() if kernel in kernels}
        self.their_topology = None if isinstance(topology, Topology) else topology
        self.reserved = default_share(job) if reserved is None else reserved
        self.topology = (
            topology if isinstance(topology, Topology) else our_topology(topology, self.reserved, below)
        )
        require(
            self.their_topology is not None or reserved is None,
            f"reserved is {reserved}; it is a share of TorchRec's topology. With ShardCore's, give its devices less "
            "memory",
        )
        # TorchRec's topology says CPU, but not which one.
        if self.compute_device == "cpu" and model.setting.hardware.startswith("cpu"):
            self.topology = replace(self.topology, hardware=model.setting.hardware)
        self.model, self.algorithm, self.seed, self.budget, self.job = model, algorithm, seed, budget, job
        self.problem: Problem | None = None
        self.our_plan: Plan | None = None
        self.unpriced: list[str] = []

    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None = None) -> ShardingPlan:
        """A plan for the module's collections.

        sharders: sharders of DistributedModelParallel. None or empty: its defaults.

        Raises as `plan_for` and `to_torchrec` do, for a collection that no sharder takes, and for constraints
        that no plan can keep.
        """
        theirs = tables_of(module)
        if sharders:
            require_sharders(module, sharders)
        # Sharders without a module to take have settings that do not matter.
        used = sharders_of(module, theirs, sharders or ())
        fused_params = optimizers.fused_params_of(module, theirs, used)
        constraints, notes = constrained.by_our_names(
            self.constraints, theirs, self.compute_device, fused_params
        )
        notes += optimizers.fused_params_notes(used)
        for key, table in theirs.items():
            notes += fields.require_treated(table.config, f"config of table {key!r}")
        optimizer = optimizers.optimizer_of(module, theirs, used)
        job = self._job(constraints, payloads_of(used), notes)
        # FBGEMM's own default trains tables of which nobody says more.
        replicas = optimizers.replicas_train_alike(optimizer or "exact_sgd", job)
        if not replicas and len(self.topology) > 1:
            notes.append(optimizers.replicas_note(optimizer or "exact_sgd", job))
        # Ranks have equal batches.
        global_batch = self.batch_size * len(self.topology)
        bags = constrained.bags_of(constraints, theirs, self.batch_size)
        lookups = constrained.pooling_of(constraints, theirs, bags) if self.lookups is None else self.lookups
        data = read_lookups(lookups, self.batch_size)
        problem = problem_for(
            module,
            self.topology,
            global_batch,
            data,
            optimizer or self.model.setting.optimizer,
            constrained.search_constraints(
                constraints, theirs, self.topology, self.compute_device, replicas or len(self.topology) == 1
            ),
            job=job,
            bags=bags,
        )
        # Constraints add weights of lookups, and memory tiers.
        tables = constrained.with_constraints(problem.tables, constraints, self.topology)
        plan, problem = self._search(replace(problem, tables=tables), constraints)
        settings = constrained.settings_of(constraints, theirs)
        # Settings that our plan does not decide are passed on as given.
        sharding_plan = to_torchrec(plan, problem, module, self.compute_device, settings)
        notes += constrained.write_allowed_types(sharding_plan, constraints, theirs)
        if any(t.strides for t in problem.tables):
            # Only the written plan says which host_row tables are cut.
            constrained.require_no_grid(sharding_plan)
        require_all(sharding_plan, module, sharders or ())
        notes += optimizers.notes(self.model.for_problem(problem), optimizer, problem.optimizer)
        notes += unpriced_wrappers(theirs)
        notes += constrained.pooling_notes(constraints, has_lookups=self.lookups is not None)
        if note := topologies.rows_note(problem.topology):
            notes.append(note)
        if self.their_topology is not None:
            notes += topologies.notes(self.their_topology, self.topology.memory)
        notes += unpriced_hardware(self.model.setting, self.compute_device)
        # A price beyond the measured range is a guess, so it is named.
        beyond = self._model_for(problem).out_of_range(lower(plan, problem))
        notes += [f"extrapolated: {line}" for line in beyond]
        self.problem, self.our_plan = problem, plan
        has_update = profile_of(self.model) is not None
        self.unpriced = [*unpriced(sharding_plan, used, problem, has_update), *notes]
        return sharding_plan

    def _job(
        self, constraints: Mapping[str, ParameterConstraints], payloads: tuple[str, str], notes: list[str]
    ) -> Job:
        """The job: the one that is given, or what sharders and constraints say of it. It adds to notes."""
        flags = constrained.prefetch_flags(constraints)
        names = {
            value: few([name for name, flag in flags.items() if flag is value]) for value in flags.values()
        }
        if (job := self.job) is None:
            # Rows of all caches are fetched ahead, or of none.
            pipeline = "prefetch" if True in names else Job.pipeline
            job = Job(pipeline, forward_payload=payloads[0], backward_payload=payloads[1])
        if job.fetches_ahead and False in names:
            raise ShardCoreError(
                f"tables {names[False]} have prefetch_pipeline False, and pipeline {job.pipeline!r} fetches rows of "
                "all caches ahead: set it to True, or leave it out"
            )
        if True in names and not job.fetches_ahead:
            notes.append(
                f"tables {names[True]} have prefetch_pipeline True; they are priced under the job's pipeline "
                f"{job.pipeline!r}, which fetches no rows ahead: Job(pipeline='prefetch')"
            )
        return job

    def _model_for(self, problem: Problem) -> CostModel:
        try:
            return optimizers.under(self.model, problem.optimizer).for_problem(problem)
        except SettingMismatch as error:
            raise SettingMismatch(
                f"batch_size {self.batch_size} on {len(self.topology)} devices: {error}"
            ) from None

    def _search(
        self, problem: Problem, constraints: Mapping[str, ParameterConstraints]
    ) -> tuple[Plan, Problem]:
        """A plan that keeps the constraints, and the problem that it solves.

        The search knows kinds. Where sharding_types allow a kind only with columns cut, or only without, and
        the plan has the other, it runs again without that kind for that table.
        """
        model = self._model_for(problem)
        # Each round removes a kind from a table, so this ends.
        while True:
            try:
                plan = sharder(self.algorithm)(problem, model, seed=self.seed, budget=self.budget)
            except Infeasible as error:
                if self.their_topology is None:
                    raise
                # Memory that is added has its share that stays free.
                lacks = roomiest(problem)[1] > 0
                reasons = (
                    refusal(problem, self.reserved) if lacks else str(error),
                    # Name defaults that nobody may have meant.
                    topologies.default_memory(self.their_topology),
                    f"of a device's memory, {100 * self.reserved:.6g}% stays free (reserved)",
                )
                raise Infeasible("; ".join(filter(None, reasons))) from None
            if not (violated := constrained.violations(plan, constraints, self.topology)):
                return plan, problem
            kinds = constrained.without(dict(problem.constraints.kinds), violated, constraints)
            problem = replace(problem, constraints=replace(problem.constraints, kinds=tuple(kinds.items())))

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Rank 0's plan on all ranks. If rank 0 fails, all ranks raise its error instead of waiting."""
        import torch.distributed as dist
        from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result

        def attempt() -> ShardingPlan | Exception:
            try:
                found = self.plan(module, sharders)
                assert self.our_plan is not None and self.problem is not None
                topologies.require_job(self.problem.topology, self.our_plan.placements)
                return found
            except Exception as error:
                # Any error, as all ranks need to hear of it.
                return error

        group = pg or dist.GroupMember.WORLD
        require(group is not None, "collective_plan needs a process group; call init_process_group before")
        # An exception is broadcast like a plan. Raising it on rank 0 only would leave the others waiting.
        result = invoke_on_rank_and_broadcast_result(group, 0, attempt)  # type: ignore[arg-type]  # not None
        if isinstance(result, Exception):
            raise result
        return result


def _kinds_in_wrappers(
    theirs: Mapping[str, ModelTable], allowed: Kinds, topology: Topology
) -> dict[str, tuple[str, ...]]:
    """Kinds of the tables for whose wrapper TorchRec has some sharding types only.

    allowed: kinds that may run tables.

    Raises ShardCoreError if they leave a table none, or if the topology does not have the only one.
    """
    restricted = {}
    for name, table in theirs.items():
        if not table.sharding_types:
            continue
        # Types that only TorchRec knows have no kind of ours.
        able = {layout.name for t in table.sharding_types for layout in constrained.BY_TYPE.get(t, ())}
        kinds = tuple(kind for kind in allowed.get(name, LAYOUTS) if kind in able)
        what = (
            f"table {name!r} is in {table.path!r}, a {table.within}, which TorchRec shards "
            f"{' or '.join(table.sharding_types)} only"
        )
        if not kinds:
            raise ShardCoreError(
                f"{what}; constraints have it run by {', '.join(allowed[name])}: allow {', '.join(sorted(able))}"
            )
        if len(topology) == 1 and all(layout_of(kind).divides_rows for kind in kinds):
            raise ShardCoreError(
                f"{what}; the topology has {len(topology)} device, and it needs 2 or more to divide rows"
            )
        rows, n = table.config.num_embeddings, len(topology)
        if not any(possible_groups(layout_of(kind), rows, topology, None) for kind in kinds):
            right = next(more for more in count(rows) if even_share(more, n))
            raise ShardCoreError(
                f"{what}; it divides {rows} rows evenly, and the last of {n} devices would have none: give it {right} "
                "rows, or another number of devices"
            )
        if kinds != tuple(LAYOUTS):
            restricted[name] = kinds
    return restricted


_GRID = {layout.name for layout in LAYOUTS.values() if layout.divides_rows and layout.cuts_columns}


def _kinds_of_variable(
    tables: Sequence[Table], allowed: Kinds, variable: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Kinds that TorchRec has for tables whose features have batches of their own sizes (VBE).

    It fails with data_parallel, and has no grid_shard. So rows are divided over a host only where nothing
    else may run a table.

    Raises ShardCoreError if they leave a table none.
    """
    kinds = {}
    for table in tables:
        # Replicas fail with batches of different sizes.
        able = tuple(kind for kind in allowed.get(table.name, LAYOUTS) if kind not in constrained.REPLICAS)
        kinds[table.name] = tuple(kind for kind in able if kind not in _GRID) or able
        if not able:
            raise ShardCoreError(
                f"table {table.name!r} may run data_parallel only, and feature {variable[0]!r} has batches of a "
                "size of its own (VBE), with which TorchRec fails: allow another kind"
            )
    return kinds
