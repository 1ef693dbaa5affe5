"""Planning from a TorchRec model: its tables as a Problem, and a drop-in planner.

planner = ShardCorePlanner(topology, batch_size=512, constraints=constraints, model=load_model("model/"))
plan = planner.collective_plan(module, sharders, dist.group.WORLD)
module = DistributedModelParallel(module, plan=plan, sharders=sharders)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardcore.core.catalog import PRECISIONS, named
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.core.validation import require, require_type
from shardcore.cost.model import CostModel
from shardcore.search import DEFAULT_SHARDER, Budget, known, sharder
from shardcore.step.kinds import LAYOUTS, layout_of, layout_of_torchrec, ways
from shardcore.step.lower import lower
from shardcore.tables.hot_rows import with_hot_rows
from shardcore.torchrec import constraints as constrained
from shardcore.torchrec import fields, optimizers
from shardcore.torchrec import lookups as torchrec_lookups
from shardcore.torchrec import topology as torchrec_topology
from shardcore.torchrec.modules import (
    ModelTable,
    require_all,
    require_sharders,
    sharders_of,
    tables_of,
    unpriced_wrappers,
)
from shardcore.torchrec.row_shares import with_row_shares
from shardcore.torchrec.settings import payloads_of, unpriced, unpriced_hardware
from shardcore.torchrec.sharding_plan import to_torchrec
from shardcore.torchrec.topology import our_topology

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.distributed.types import ModuleSharder, ShardingPlan

    from shardcore.torchrec.lookups import Lookups

BATCH_SIZE = 512
"""Samples per rank, if none are given. The default of TorchRec's planner."""
RESERVED = 0.15
"""The share of device memory that TorchRec keeps free of embeddings by default."""


def problem_for(
    module: nn.Module,
    topology: Topology | TheirTopology,
    global_batch: int,
    lookups: Lookups,
    optimizer: str | None = None,
    constraints: Constraints | None = None,
    name: str = "model",
    job: Job | None = None,
    deduplicated: Sequence[Sequence[str]] = (),
) -> Problem:
    """The tables of a model's collections (see `tables_of`) as a Problem.

    Hot rows of a HotColdEmbeddingCollection are taken for the hottest ones.

    topology: ours, or TorchRec's. Of the latter's memory RESERVED stays free.
    global_batch: samples per step over all devices.
    lookups: one of three. Mean lookups per sample by feature, or by (table, feature): ids then follow
      DEFAULT_ACCESS. Batches of the model's data, a global batch or more of each feature, in one
      KeyedJaggedTensor or several: pooling and reuse are read from them, and where ids lie if that is uneven
      (Table.row_shares). One whose features differ in samples (VBE) is a step of all ranks; its tables get
      no replicas, for TorchRec fails with them. A path of FBGEMM's reports (a folder or a file): reuse is
      then an estimate (see `fbgemm_statistics`).
    optimizer: None: the one that the model's weights have (apply_optimizer_in_backward), or else exact_sgd.
    job: how a step runs around the embeddings.
    deduplicated: groups of features that share an inverse index (see Table.dedup). Their tables stay together
      on a device. Lookups have to be batches of data, not deduplicated.

    Raises ShardCoreError for a feature without lookups, ids out of range, too few samples, a data type
    without a cost model, another optimizer than the weights have, and settings of tables that are refused
    (see `torchrec_fields`).
    """
    theirs = tables_of(module, whole=True)
    require_type(global_batch, int, "global_batch", "a whole number, the samples of a step")
    if not theirs:
        raise ShardCoreError(
            "the model has no EmbeddingBagCollection or EmbeddingCollection; there is nothing to place"
        )
    for key, table in theirs.items():
        fields.require_treated(table.config, f"config of table {key!r}")
    own = optimizers.optimizer_of(module, theirs)
    if optimizer is not None and own and optimizer != own:
        raise ShardCoreError(
            f"optimizer is {optimizer!r}; the model's weights have {own!r} in backward: leave it out"
        )
    lookups = list(lookups) if isinstance(lookups, Iterator) else lookups
    statistics = torchrec_lookups.statistics_of(theirs, lookups, global_batch)
    ours = topology if isinstance(topology, Topology) else our_topology(topology, RESERVED)
    torchrec_topology.require_no_pods(len(ours.on_hosts[0]))
    factors, groups = torchrec_lookups.deduplicated_of(
        theirs, lookups, deduplicated, global_batch // len(ours)
    )
    precision = {key: named(t.config.data_type.name, PRECISIONS) for key, t in theirs.items()}
    for key, table in theirs.items():
        if precision[key] is None:
            raise ShardCoreError(
                f"table {key!r} has data type {table.config.data_type.name}; known are "
                f"{', '.join(p.theirs for p in PRECISIONS.values())}"
            )
    tables = tuple(
        Table(
            key,
            t.config.num_embeddings,
            t.config.embedding_dim,
            *statistics[key],
            precision=precision[key],
            features=len(t.config.feature_names),
            weighted=t.weighted,
            sequence=not t.pooled,
            dedup=factors.get(key, 1.0),
            collection=t.path,
            managed_collision=t.managed_collision,
        )
        for key, t in theirs.items()
    )
    tables = with_row_shares(tables, theirs, lookups, len(ours))
    if optimizer is None:
        optimizer = own or "exact_sgd"
    problem = Problem(name, tables, ours, global_batch, optimizer, job=job or Job())
    problem = with_hot_rows(problem, _hot_rows(module, theirs))
    constraints = constraints or Constraints()
    kinds = dict(constraints.kinds) | dict(problem.constraints.kinds)
    kinds |= _only_kinds(theirs, kinds, ours)
    widths = dict(constraints.min_widths)
    if variable := torchrec_lookups.variable_features(lookups):
        kinds |= _kinds_of_variable(tables, kinds, variable)
        # TorchRec's grid_shard is host_row that is cut.
        widths |= {t.name: t.dim for t in tables if set(kinds[t.name]) <= _GRID}
    return replace(
        problem,
        constraints=replace(
            constraints,
            together=(*constraints.together, *groups),
            kinds=tuple(kinds.items()),
            min_widths=tuple(widths.items()),
        ),
    )


def _hot_rows(module: nn.Module, theirs: Mapping[str, ModelTable]) -> dict[str, int]:
    """How many rows of tables are hot. theirs: whole tables."""
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
    model: CostModel,
    lookups: Lookups,
    algorithm: str = DEFAULT_SHARDER,
    seed: int = 0,
    budget: Budget | None = None,
    constraints: Constraints | None = None,
    global_batch: int | None = None,
    job: Job | None = None,
) -> tuple[Plan, Problem]:
    """A plan of a module's tables, and the problem that it solves.

    global_batch: samples of a step over all devices. None: the cost model's.
    job: how a step runs around the embeddings. None: the default.

    The optimizer is the one that the model's weights have, or else that of the cost model. Raises as
    `problem_for` and all sharders do, and for an unknown algorithm.
    """
    _require_model(model)
    search = sharder(algorithm)
    batch = model.setting.batch if global_batch is None else global_batch
    optimizer = optimizers.optimizer_of(module, tables_of(module)) or model.setting.optimizer
    problem = problem_for(module, topology, batch, lookups, optimizer, constraints, job=job)
    priced = optimizers.under(model, problem.optimizer).for_problem(problem)
    return search(problem, priced, seed=seed, budget=budget), problem


class ShardCorePlanner:
    """A drop-in for TorchRec's EmbeddingShardingPlanner. It is a torchrec ShardingPlanner.

    topology: TorchRec's or ours. Bandwidths of TorchRec's are used where they are not its defaults.
    batch_size: samples per rank.
    constraints: TorchRec's, by table. How each field is treated: `fields.FIELDS`.
    model: the cost model.
    algorithm, seed, budget: of the search.
    lookups: as in `problem_for`, instead of pooling_factors.
    reserved: share of HBM kept free of embeddings.
    job: how a step runs around the embeddings: pipeline, dense part, payloads. None: the default, with the
      payloads of the sharders' codecs.

    The optimizer that counts is the one that the module's weights or the sharders have, or else that of the
    cost model.

    After a plan, `problem` and `found` are the problem and our plan. `unpriced` has a line for each setting
    that the price leaves out, for defaults that nobody may have meant, and for what lies beyond the measured
    range.
    """

    def __init__(
        self,
        topology: TheirTopology | Topology,
        batch_size: int | None = BATCH_SIZE,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        model: CostModel,
        algorithm: str = DEFAULT_SHARDER,
        seed: int = 0,
        budget: Budget | None = None,
        lookups: Lookups | None = None,
        reserved: float = RESERVED,
        job: Job | None = None,
    ) -> None:
        from torchrec.distributed.types import ShardingPlanner

        _require_model(model)
        algorithm = known(algorithm)
        # Registering avoids importing TorchRec with this module.
        ShardingPlanner.register(type(self))
        self.compute_device = getattr(topology, "compute_device", "cuda")
        self.batch_size = BATCH_SIZE if batch_size is None else batch_size
        require_type(self.batch_size, int, "batch_size", "a whole number, the samples of a rank")
        require(self.batch_size > 0, f"batch_size is {self.batch_size}; it needs 1 or more samples of a rank")
        constrained.require_constraints(constraints)
        self.constraints = dict(constraints or {})
        self.lookups = list(lookups) if isinstance(lookups, Iterator) else lookups
        in_host = constrained.uses_host_memory(self.constraints)
        self.theirs = None if isinstance(topology, Topology) else topology
        self.reserved = reserved
        self.topology = (
            topology if isinstance(topology, Topology) else our_topology(topology, reserved, in_host)
        )
        require(
            self.theirs is not None or reserved == RESERVED,
            f"reserved is {reserved}; it is a share of "
            "TorchRec's topology. Beside ShardCore's, give its devices less memory",
        )
        if self.compute_device == "cpu" and model.setting.hardware.startswith("cpu"):
            self.topology = replace(self.topology, hardware=model.setting.hardware)
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
        all_sharders, sharders = sharders or (), sharders_of(module, theirs, sharders or ())
        notes = constrained.require_possible(self.constraints, theirs, self.compute_device)
        for name, table in theirs.items():
            notes += fields.require_treated(table.config, f"config of table {name!r}")
        own = optimizers.optimizer_of(module, theirs, sharders)
        self.problem = self._problem(
            module, theirs, own or self.model.setting.optimizer, payloads_of(sharders)
        )
        model = optimizers.under(self.model, self.problem.optimizer)
        try:
            model = model.for_problem(self.problem)
        except SettingMismatch as error:
            raise SettingMismatch(
                f"batch_size {self.batch_size} on {len(self.topology)} devices: {error}"
            ) from None
        self.found = self._search(theirs, model)
        made = to_torchrec(
            self.found,
            self.problem,
            module,
            self.compute_device,
            constrained.settings_of(self.constraints, theirs),
        )
        notes += constrained.as_asked(made, self.constraints, theirs)
        if self.lookups is not None and torchrec_lookups.variable_features(self.lookups):
            constrained.require_no_grid(made)
        require_all(made, module, all_sharders)
        self.unpriced = [
            *unpriced(made, sharders, self.problem),
            *notes,
            *optimizers.notes(self.model, own, self.problem.optimizer, sharders),
            *unpriced_wrappers(theirs),
            *self._notes_of_lookups(theirs),
            *(
                []
                if self.theirs is None
                else torchrec_topology.notes(self.theirs, bool(self.topology.memory))
            ),
            *unpriced_hardware(self.model.setting, self.compute_device),
            *(f"extrapolated: {line}" for line in model.out_of_range(lower(self.found, self.problem))),
        ]
        return made

    def _problem(
        self, module: nn.Module, theirs: Mapping[str, ModelTable], optimizer: str, payloads: tuple[str, str]
    ) -> Problem:
        lookups = (
            self.lookups if self.lookups is not None else constrained.pooling_of(self.constraints, theirs)
        )
        job = self.job or Job(forward_payload=payloads[0], backward_payload=payloads[1])
        problem = problem_for(
            module,
            self.topology,
            self.batch_size * len(self.topology),
            lookups,
            optimizer,
            constrained.ours(self.constraints, theirs, self.topology, self.compute_device),
            job=job,
        )
        return replace(
            problem, tables=constrained.applied(problem.tables, self.constraints, theirs, self.topology)
        )

    def _notes_of_lookups(self, theirs: Mapping[str, ModelTable]) -> list[str]:
        if self.lookups is None:
            return constrained.default_pooling(self.constraints, theirs)
        variable = torchrec_lookups.variable_features(self.lookups)
        shown = ", ".join(map(repr, variable[:5])) + ", ..." * (len(variable) > 5)
        of_vbe = (
            f"features {shown} have batches of their own sizes (VBE): their lookups are those of the "
            f"data, their outputs count as those of batch_size {self.batch_size}"
        )
        return [*constrained.unused_pooling(self.constraints, theirs), *([of_vbe] if variable else [])]

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
                return self.plan(module, sharders)
            except Exception as error:
                return error

        # An exception is broadcast like a plan. Raising it on rank 0 only would leave the others waiting.
        result = invoke_on_rank_and_broadcast_result(pg or dist.GroupMember.WORLD, 0, attempt)
        if isinstance(result, Exception):
            raise result
        return result

    def _search(self, theirs: Mapping[str, ModelTable], model: CostModel) -> Plan:
        """A plan that keeps the constraints.

        The search knows kinds. Where sharding_types allow a kind with columns cut only, or only without, and
        the plan has the other, it runs again without that kind for that table.
        """
        while True:
            try:
                found = sharder(self.algorithm)(self.problem, model, seed=self.seed, budget=self.budget)
            except Infeasible as error:
                if self.theirs is None:
                    raise
                taken = (
                    torchrec_topology.default_memory(self.theirs),
                    f"of a device's memory, {self.reserved:.0%} stays free (reserved)",
                )
                raise Infeasible("; ".join([str(error), *filter(None, taken)])) from None
            refused = constrained.broken(found, self.constraints, theirs, self.topology)
            if not refused:
                return found
            constraints = self.problem.constraints
            kinds = constrained.without(dict(constraints.kinds), refused, self.constraints, theirs)
            self.problem = replace(self.problem, constraints=replace(constraints, kinds=tuple(kinds.items())))


def _only_kinds(
    theirs: Mapping[str, ModelTable], asked: Mapping[str, tuple[str, ...]], topology: Topology
) -> dict[str, tuple[str, ...]]:
    """Kinds of the tables for whose wrapper TorchRec has some sharding types only.

    asked: kinds that may run tables.

    Raises ShardCoreError if they leave a table none, or if the topology does not have the only one.
    """
    found = {}
    for name, table in theirs.items():
        if not table.sharding_types:
            continue
        able = {layout.name for t in table.sharding_types if (layout := layout_of_torchrec(t))}
        kinds = tuple(kind for kind in asked.get(name, LAYOUTS) if kind in able)
        what = (
            f"table {name!r} is in {table.path!r}, a {table.within}, which TorchRec shards "
            f"{' or '.join(table.sharding_types)} only"
        )
        if not kinds:
            raise ShardCoreError(
                f"{what}; constraints have it run by {', '.join(asked[name])}: allow {', '.join(sorted(able))}"
            )
        if name not in asked and len(kinds) == 1 and layout_of(kinds[0]) not in ways(topology):
            raise ShardCoreError(
                f"{what}; the topology has {len(topology)} device, and it needs 2 or more to divide rows"
            )
        if kinds != tuple(LAYOUTS):
            found[name] = kinds
    return found


_GRID = {layout.name for layout in LAYOUTS.values() if layout.divides_rows and layout.cuts_columns}


def _kinds_of_variable(
    tables: Sequence[Table], asked: Mapping[str, tuple[str, ...]], variable: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Kinds that run tables whose features have batches of their own sizes (VBE): those that TorchRec has.

    It fails with data_parallel, and has no grid_shard. So rows are divided over a host only where nothing
    else may run a table.

    Raises ShardCoreError if they leave a table none.
    """
    found = {}
    for table in tables:
        able = tuple(kind for kind in asked.get(table.name, LAYOUTS) if kind not in constrained.REPLICAS)
        found[table.name] = tuple(kind for kind in able if kind not in _GRID) or able
        if not able:
            raise ShardCoreError(
                f"table {table.name!r} may run data_parallel only, and feature {variable[0]!r} has batches of a size "
                "of its own (VBE), with which TorchRec fails: allow another kind"
            )
    return found


def _require_model(model: CostModel) -> None:
    if not isinstance(model, CostModel):
        raise ShardCoreError(
            f"model is {model!r}; it needs a cost model, as shardcore.load_model(FOLDER) gives"
        )
