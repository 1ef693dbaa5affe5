"""TorchRec's own planner (EmbeddingShardingPlanner, wheel 1.8.0) as a baseline: the sharder `torchrec`.

By default the planner never cuts tables up to 128 columns wide. A careful user would sweep its options.
So it runs with min_partition (the narrowest column cut) as it is, 4, 8, 16, 32 and 64. Each runs with
table- and column-wise sharding only, and with all sharding types. Each run keeps the plan that TorchRec's own
cost ranks first. The cheapest of these stays, under the model that all sharders are compared with. It plans
for CUDA, but needs no GPU.

It learns this through its extension points:

- Links: the topology's, or else the model's.
- Memory bandwidth: chosen so that its cost of all tables equals the model's.
- Bytes of each shard, in its own largest phase. It plans again with less memory if its plans do not fit.
- Memory of each device. A custom topology is no way: with one, it proposes uneven row ranges, untrainable.
- Speed: compute counts for less on a faster device, when it places shards and when it ranks plans.

Rows are not cut where the last rank would get none.

It cannot know of pins and bundles. Such tables are placed before it runs, as a greedy baseline places them.
TorchRec plans the rest around them. It sees hosts of unequal size as one host. A packing takes over if no run
finds a plan that fits.

Its exhaustive proposer runs up to 1,000 combinations, not 10,000. Either limit is met at about ten tables.

Shapes: D devices.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np

from shardcore.core.catalog import PRECISIONS
from shardcore.core.errors import ShardCoreError
from shardcore.core.extras import TORCHREC
from shardcore.core.links import LEVELS, ROWS_OVER
from shardcore.core.progress import OutOfTime, stopped_clock, tick
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS
from shardcore.core.types import OUTPUT_BYTES, Placement, Plan, Problem, Shard, Table
from shardcore.core.validation import require
from shardcore.cost.model import CostModel
from shardcore.search import greedy
from shardcore.search.budget import Budget, Meter
from shardcore.search.state.feasible import feasible_shards, find_fitting_plan
from shardcore.search.state.packing import are_parts_equally_wide, excess_bytes
from shardcore.search.state.shards import cheapest_plan, priced_plan
from shardcore.step.exchange_lines import total_linear_cost
from shardcore.step.kinds import (
    SHARDING_KINDS,
    kind_of_torchrec_type,
    kind_on_one_device,
    pod_size,
    row_domain_of,
    sharding_kind_for_table,
    shards_by_device,
)
from shardcore.step.memory import local_batch_bytes, peak_bytes_function, plan_fits, usable_bytes
from shardcore.step.ways import fixed_placements, reason_not_runnable
from shardcore.torchrec.placements import placements_from_torchrec

_HOST_TYPES = dict.fromkeys(
    t for x in SHARDING_KINDS.values() for t in (x.torchrec if x.rows_over else x.torchrec[2:])
)
"""For several hosts. On one host they equal row- and column-wise sharding."""
_COLUMN_TYPES = [
    t for x in SHARDING_KINDS.values() if x.is_on_one_device for t in x.torchrec if t not in _HOST_TYPES
]
_TYPES = sorted(
    {t: None for x in SHARDING_KINDS.values() for t in x.torchrec}, key=lambda t: t in _HOST_TYPES
)
_GRID = 1000
"""Combinations that TorchRec's exhaustive proposer may try."""
_EVEN_COLUMNS = 256
"""Columns of each device where a further one is priced."""
_FINISHING = 2.0
"""Seconds from TorchRec's last proposal to a priced plan, relative to those of pricing it."""
_TRIES = 4
"""Sweeps, at most, each with less memory, until a plan fits."""


@dataclass(frozen=True)
class TorchRecConfig:
    """Options of TorchRec's planner that the baseline sweeps.

    min_partition: the fewest columns of a shard; None for TorchRec's own, 128.
    all_types: True for all sharding types, False for table- and column-wise only.
    """

    min_partition: tuple[int | None, ...] = (None, 4, 8, 16, 32, 64)
    all_types: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        require(
            bool(self.min_partition) and bool(self.all_types),
            f"{self} needs one or more of what is swept",
        )


def missing_torchrec_message() -> str:
    """Import error text for the first of FBGEMM and TorchRec that is not installed; "" if both are."""
    # A folder of the same name has no origin.
    missing = [n for n in ("fbgemm_gpu", "torchrec") if not ((spec := find_spec(n)) and spec.origin)]
    return f"No module named {missing[0]!r}" if missing else ""


def require_torchrec_installed(what: str) -> None:
    """Raise ShardCoreError, with the command that installs TorchRec, unless TorchRec is installed.

    what: the caller that needs TorchRec, for the message.
    """
    require(
        not missing_torchrec_message(),
        f"{what}, and it is not installed ({missing_torchrec_message()}): {TORCHREC}",
    )


@contextmanager
def silence_torchrec_logging() -> Iterator[None]:
    """Context in which TorchRec logs nothing: its planner warns of each topology and of many tables."""
    theirs, root = logging.getLogger("torchrec"), logging.getLogger()
    level = theirs.level
    theirs.setLevel(logging.CRITICAL + 1)
    # The warning about replicas comes from the root logger.
    root.addFilter(_is_not_replica_warning)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        theirs.setLevel(level)
        root.removeFilter(_is_not_replica_warning)


def _is_not_replica_warning(record: logging.LogRecord) -> bool:
    """Logging filter that drops the root logger's warning about replicated tables."""
    return not str(record.msg).startswith("Sharding spec not found")


def search_with_torchrec_planner(
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    config: TorchRecConfig = TorchRecConfig(),
) -> Plan:
    """Cheapest plan that TorchRec's own planner finds in a sweep of its options. Deterministic: the seed is only
    recorded.

    One evaluation is one proposal of TorchRec's planner.
    A budget in seconds ends a run after the proposal that uses it up, and the sweep anywhere, once there is a plan.

    Raises ShardCoreError if TorchRec is not installed.
    Raises Infeasible (see `feasible_shards`) and SettingMismatch.
    """
    require_torchrec_installed("sharder 'torchrec' runs TorchRec's planner")
    problem.require_setting(model.setting)
    feasible_shards(problem)  # for its refusals
    with stopped_clock():  # it takes seconds to import
        import torchrec.distributed.planner  # noqa: F401  # pyright: ignore[reportUnusedImport]
    meter = (budget or Budget()).start()

    def price(placements: Sequence[Placement], **provenance: Any) -> Plan:
        return priced_plan(placements, problem, model, algorithm="torchrec", seed=seed, **provenance)

    given = _placements_before_planner(problem, model)
    if len({p.shard.table for p in given}) == len(problem.tables):
        plans = [price(given, packed=False)]
    else:
        with silence_torchrec_logging():
            plans = _sweep_planner_settings(_TorchRecProblem(problem, model, given), config, meter, price)
    if not any(plan_fits(plan, problem) for plan in plans):
        plans = [price(find_fitting_plan(problem).placements, packed=True)]
    # Each run ranks by TorchRec's own cost. Across runs our model decides.
    best = cheapest_plan(plans, problem)
    return replace(best, provenance={**best.provenance, "evals": meter.evals, "config": asdict(config)})


def _placements_before_planner(problem: Problem, model: CostModel) -> list[Placement]:
    """Placements made before TorchRec's planner runs: of pinned tables, of bundles, and of tables with one possible
    place.
    """
    bound = {*problem.pinned_devices, *problem.group_by_table}
    # A greedy plan of all tables leaves room for the others.
    of_all = greedy.ORDERS["lookup_greedy"](problem, model).placements if bound else ()
    return [*fixed_placements(problem), *(p for p in of_all if p.shard.table.name in bound)]


def _sweep_planner_settings(
    translation: _TorchRecProblem, config: TorchRecConfig, meter: Meter, price: Callable[..., Plan]
) -> list[Plan]:
    """Plans of TorchRec's planner under all settings to sweep, repeated with less memory until a plan fits."""
    from torchrec.distributed.planner.types import PlannerError

    problem, plans = translation.problem, list[Plan]()
    # TorchRec adds up bytes. That is too much for some plans, and too little for others.
    spare_bytes, spare_s = local_batch_bytes(problem), 0.0
    for _ in range(_TRIES):
        for setting in translation.planner_settings(config):
            if plans and not meter.has_budget_left():
                break
            # To list the options of all types takes seconds on many devices.
            with suppress(OutOfTime, PlannerError), meter.enforced_deadline() if plans else nullcontext():
                placements = translation.plan_placements(*setting, spare_bytes, meter, spare_s)
                before_s = meter.elapsed_s()
                # TorchRec knows no widest shard, and may cut unevenly.
                with suppress(ShardCoreError):
                    plan = price(placements, packed=False, swept=list(setting))
                    if are_parts_equally_wide([(p.shard,) for p in plan.placements]):
                        plans.append(plan)
                        spare_s = _FINISHING * (meter.elapsed_s() - before_s)
        # Fewer bytes help only where plans exist and none fits.
        if not plans or any(plan_fits(plan, problem) for plan in plans):
            break
        # At least double the reduction, so that few sweeps are enough.
        spare_bytes += max(min(excess_bytes(plan, problem) for plan in plans), spare_bytes)
    return plans


def _meta_embedding_bags(tables: Mapping[str, Table]) -> Any:
    """TorchRec EmbeddingBagCollection on the meta device, with tables named by the mapping's keys."""
    import torch
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=t.rows,
            embedding_dim=t.dim,
            feature_names=[name],
            data_type=DataType[PRECISIONS[t.precision].theirs],
        )
        for name, t in tables.items()
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=configs)


class _TorchRecProblem:
    """A problem in TorchRec's terms: a module, a topology, constraints.

    given: placements of tables that TorchRec does not place.
    left: [D] bytes that they leave, before a local batch.
    busy: [D] ms of their work.
    tables: the others by the module's names. Our own names might not be valid there.
    types: sharding types that may run each, by these names.
    ranks: the device of each rank, host by host.
    per_host: ranks of a host.
    bandwidths: arguments of TorchRec's Topology, in bytes per ms.
    """

    def __init__(self, problem: Problem, model: CostModel, given: Sequence[Placement]) -> None:
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

        topology, placed = problem.topology, {p.shard.table for p in given}
        self.problem, self.given = problem, given
        self.tables = {f"t{i}": t for i, t in enumerate(t for t in problem.tables if t not in placed)}
        self.module = _meta_embedding_bags(self.tables)
        self.sharders: list[Any] = [EmbeddingBagCollectionSharder()]
        self.ranks = topology.ranks
        # TorchRec knows hosts of equal size only. Others count as one host.
        self.per_host = len(self.ranks) // (len(topology.hosts) if topology.equal_hosts else 1)
        self.types = {
            name: [x for x in _TYPES if self._is_type_allowed(x, t)] for name, t in self.tables.items()
        }
        lookup, exchange = lookup_ms_per_element(problem, model), exchange_ms_per_column(problem, model)
        self.left, self.busy = np.array(usable_bytes(problem)), np.zeros(len(topology))
        self._count_fixed_placements(lookup, exchange)
        self.bandwidths: dict[str, Any] = self._link_bandwidths(exchange)
        self.bandwidths |= self._memory_bandwidth(lookup)

    def _count_fixed_placements(self, lookup: float, exchange: float) -> None:
        """Subtract the fixed placements' bytes from `left`, and add their work to `busy`.

        lookup: ms of one element (`lookup_ms_per_element`).
        exchange: ms of one column (`exchange_ms_per_column`).
        """
        bytes_of, devices = peak_bytes_function(self.problem), self.problem.topology.devices
        for placement in self.given:
            run = sharding_kind_for_table(placement.kind, placement.shard.table)
            for device, shard in shards_by_device(placement):
                self.left[device] -= bytes_of(run, shard)
                # Replicas look up their own samples. They are on all devices, so they do not count.
                if not run.local_batch:
                    compute_ms = greedy.looked_up_elements(shard) * lookup / devices[device].speed
                    self.busy[device] += compute_ms + shard.width * exchange

    def _is_type_allowed(self, sharding_type: str, table: Table) -> bool:
        """Tell if TorchRec may shard a table by a sharding type on the problem's topology and constraints."""
        topology = self.problem.topology
        # Table-row-wise over domains of one device each would divide nothing.
        if sharding_type in _HOST_TYPES and not 1 < self.per_host * pod_size(topology) < len(self.ranks):
            return False
        sharding_kind = kind_of_torchrec_type(sharding_type, topology)
        if sharding_kind is None or reason_not_runnable(sharding_kind, table, self.problem):
            return False
        return table.name not in self.problem.uncut_tables or sharding_type == sharding_kind.torchrec_type(
            cut=False
        )

    def _link_bandwidths(self, column_ms: float) -> dict[str, Any]:
        """Link bandwidths as keyword arguments of TorchRec's Topology, without unknown ones.

        column_ms: ms that one more column adds to exchanges.
        """
        topology, n, known = self.problem.topology, len(self.ranks), dict[str, Any]()
        # A column's outputs and gradients. A device keeps its own share of the batch: (n - 1) / n leave.
        column_bytes = 2 * self.problem.global_batch * OUTPUT_BYTES * (n - 1) / n
        for level in LEVELS.values():
            if level.torchrec is None:
                continue
            # Its inner links are those of the domain that rows are divided over.
            inner = level.name in ROWS_OVER.values()
            link = topology.link(ROWS_OVER[row_domain_of(topology)] if inner else level.name)
            if link.gbps:
                # TorchRec's links belong to each device, so a shared one is divided over the devices of a domain.
                sharing = len(topology.devices_sharing_link(link.level)[0]) if link.shared else 1
                known[level.torchrec[0]] = link.gbps * BYTES_PER_MS_PER_GBPS / sharing
            elif column_ms > 0:
                # Without a given link, what a column costs in the model stands for it.
                known[level.torchrec[0]] = column_bytes / column_ms
        return known

    def _memory_bandwidth(self, lookup: float) -> dict[str, float]:
        """HBM bandwidth under which TorchRec and the cost model predict the same total lookup time for whole tables.

        lookup: ms of one element (`lookup_ms_per_element`).
        """
        topology = self.planner_topology()
        constraints = self.parameter_constraints({n: _COLUMN_TYPES[:1] for n in self.tables}, None)
        options = self.option_enumerator(topology, constraints).enumerate(self.module, self.sharders)
        theirs_ms = sum(s.perf.fwd_compute + s.perf.bwd_compute for o in options for s in o.shards)
        # TorchRec prices lookups by bytes over bandwidth, so bandwidth is the one free number.
        ours_ms = lookup * sum(greedy.looked_up_elements(Shard.whole(t)) for t in self.tables.values())
        if theirs_ms <= 0 or ours_ms <= 0:
            return {}
        return {"hbm_mem_bw": topology.hbm_mem_bw * theirs_ms / ours_ms}

    def planner_topology(self, spare_bytes: int = 0) -> Any:
        """TorchRec planner Topology with the problem's memory, speed and prior work of each device.

        spare_bytes: bytes of each device that stay free.
        """
        from torchrec.distributed.planner.types import Topology

        topology = Topology(
            len(self.ranks),
            "cuda",
            ddr_cap=0,
            ssd_cap=0,
            local_world_size=self.per_host,
            pod_size=pod_size(self.problem.topology),
            **self.bandwidths,
        )
        # Memory differs by device; TorchRec's constructor takes one value for all.
        for device, d in zip(topology.devices, self.ranks, strict=True):
            device.storage.hbm = max(0, int(self.left[d]) - spare_bytes)
            speed = self.problem.topology.devices[d].speed
            device.perf = DeviceWork(speed, float(self.busy[d]))  # type: ignore[assignment]  # as Perf
        return topology

    def parameter_constraints(
        self, types: Mapping[str, list[str]], min_partition: int | None
    ) -> dict[str, Any]:
        """TorchRec ParameterConstraints of each table.

        types: sharding types that each table may have.
        min_partition: fewest columns of a shard. None: TorchRec's default.
        """
        from torchrec.distributed.planner import ParameterConstraints

        least = dict(self.problem.constraints.min_widths)
        return {
            name: ParameterConstraints(
                sharding_types=types[name],
                compute_kernels=["fused", "dense"],  # dense: what data_parallel runs
                pooling_factors=[t.pooling],
                min_partition=max(min_partition or 0, least.get(t.name, 0)) or None,
            )
            for name, t in self.tables.items()
        }

    def option_enumerator(self, topology: Any, constraints: dict[str, Any]) -> Any:
        """TorchRec EmbeddingEnumerator of sharding options, with storage counted by ShardCore."""
        from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
        from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator

        of_time = EmbeddingPerfEstimator(topology, constraints)
        estimator: Any = PeakStorageEstimator(of_time, self.problem, self.tables)
        return EmbeddingEnumerator(topology, self.problem.local_batch, constraints, estimator=estimator)

    def planner_settings(self, config: TorchRecConfig) -> Iterable[tuple[bool, int | None]]:
        """Pairs (all_types, min_partition) to sweep, without those that cut columns in the same way as an earlier
        pair.
        """
        from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets as cut

        found: dict[tuple[int, ...], tuple[bool, int | None]] = {}
        weights: list[Any] = [bag.weight for bag in self.module.embedding_bags.values()]
        for all_types, least in product(config.all_types, config.min_partition):
            # Two settings with as many shards of each table give the same search space.
            n_shards = (len(cut(w, 1, 1, "column_wise", least)[0]) for w in weights)
            found.setdefault((all_types, *n_shards), (all_types, least))
        return found.values()

    def plan_placements(
        self, all_types: bool, min_partition: int | None, spare_bytes: int, meter: Meter, spare_s: float
    ) -> list[Placement]:
        """Placements of all tables in the best plan of TorchRec's planner. Raises PlannerError if there is none.

        spare_bytes: as in `topology`.
        spare_s: as in BudgetedProposer.
        """
        from torchrec.distributed.planner import EmbeddingShardingPlanner
        from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
        from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

        types = self.types
        if not all_types:
            # Where no columns may be, the other types are all there is.
            types = {name: [x for x in of if x in _COLUMN_TYPES] or of for name, of in types.items()}
        topology, constraints = (
            self.planner_topology(spare_bytes),
            self.parameter_constraints(types, min_partition),
        )
        # TorchRec's default proposers, with a smaller grid.
        by_depth, by_sum = GreedyProposer(), GreedyProposer(use_depth=False)
        proposers = [GridSearchProposer(_GRID), by_depth, by_sum, UniformProposer()]
        proposer: Any = BudgetedProposer(proposers, meter, spare_s)
        rating: Any = BusiestDevicePerfModel(topology)
        planner = EmbeddingShardingPlanner(
            topology,
            self.problem.local_batch,
            self.option_enumerator(topology, constraints),
            constraints=constraints,
            stats=[],
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
            performance_model=rating,
            proposer=proposer,
            debug=False,
        )
        plan: Any = planner.plan(self.module, self.sharders)
        return [*self.given, *placements_from_torchrec(plan.plan[""], self.tables, self.problem.topology)]


# --- what TorchRec's extension points take --------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceWork:
    """Work of a device in ms, divided by its speed. It stands in for TorchRec's Perf, to which all devices are equally
    fast.
    """

    speed: float
    total: float

    def __add__(self, other: Any) -> DeviceWork:
        # Speed divides compute, not communication.
        compute = (other.fwd_compute + other.bwd_compute) / self.speed
        return DeviceWork(self.speed, self.total + compute + other.fwd_comms + other.bwd_comms)


@dataclass(frozen=True)
class BusiestDevicePerfModel:
    """A PerfModel: the work of the busiest device."""

    topology: Any

    def rate(self, plan: Sequence[Any]) -> float:
        """ms of the busiest device under a plan of sharding options; lower is better."""
        # Work of tables placed before is what devices start with.
        busy = [device.perf for device in self.topology.devices]
        for shard in (shard for option in plan for shard in option.shards):
            busy[shard.rank] += shard.perf
        return max(work.total for work in busy)


@dataclass(frozen=True)
class PeakStorageEstimator:
    """A ShardEstimator: TorchRec's time, and each shard's own largest phase as its storage.

    It runs option by option, so that a budget may end it: it takes seconds.
    It also sorts the options. TorchRec takes them from sets of strings, whose order varies by process.
    """

    of_time: Any
    problem: Problem
    tables: Mapping[str, Table]

    def estimate(self, sharding_options: list[Any], sharder_data_map: Any = None) -> None:
        """Set the time and the peak storage of each shard of TorchRec sharding options, in place."""
        from torchrec.distributed.planner.types import Storage

        # Names are t0, t1, ... in the order of the problem's tables.
        sharding_options.sort(key=lambda o: (int(o.name[1:]), _TYPES.index(o.sharding_type)))
        # TorchRec adds storage up, so each shard counts with its own peak.
        bytes_of = peak_bytes_function(self.problem)
        for option in sharding_options:
            tick()
            self.of_time.estimate([option], sharder_data_map)
            table = self.tables[option.name]
            sharding_kind = kind_of_torchrec_type(option.sharding_type, self.problem.topology)
            divided = sharding_kind if option.num_shards > 1 else None
            run = sharding_kind_for_table((divided or kind_on_one_device(table)).name, table)
            for shard in option.shards:
                (row, column), (rows, columns) = shard.offset, shard.size
                shard.storage = Storage(hbm=0, ddr=0)
                # The last ranks may get no rows.
                if rows and columns:
                    shard.storage.hbm = bytes_of(run, Shard(table, row, row + rows, column, column + columns))


@dataclass
class BudgetedProposer:
    """TorchRec proposer that runs several proposers in turn until the budget is used up.

    It continues beyond the budget until some proposal can be placed.

    spare_s: seconds of the budget that are kept for what follows the last proposal.
    """

    waiting: list[Any]
    meter: Meter
    spare_s: float
    placeable: bool = False

    def load(self, **search_space: Any) -> None:
        """Load a search space into all proposers that wait for their turn."""
        for proposer in self.waiting:
            proposer.load(**search_space)

    def propose(self) -> Any:
        """Next proposal of TorchRec's proposers, or None once they are exhausted or the budget is used up."""
        while self.waiting and (
            not self.placeable or (self.meter.has_budget_left() and self.meter.has_time(self.spare_s))
        ):
            if proposal := self.waiting[0].propose():
                self.meter.evals += 1
                return proposal
            # This proposer is exhausted.
            self.waiting.pop(0)
        return None

    def feedback(self, partitionable: bool, **rest: Any) -> None:
        """Tell the proposer that made the last proposal whether the proposal could be placed."""
        self.placeable |= partitionable
        # The proposer that made the proposal learns from it.
        self.waiting[0].feedback(partitionable=partitionable, **rest)


# --- rates, for planners with cost formulas of their own ------------------------------------------------------
#
# Published planners take bandwidths from a data sheet. Here they come from the model under which all sharders are
# compared, so that no peer is misinformed. The model's rates also follow the topology's links.


def lookup_ms_per_element(problem: Problem, model: CostModel) -> float:
    """ms to look up one element for each sample of the global batch; 0 if no table has lookups.

    Forward + backward at speed 1, with all tables as one op.
    """
    # One op with all tables: launches of single ops would hide the rate.
    shards = [Shard.whole(t) for t in problem.tables]
    elements = sum(map(greedy.looked_up_elements, shards))
    return float(model.op_ms(model.encode(shards).sum(0, keepdims=True))[0]) / elements if elements else 0.0


def exchange_ms_per_column(problem: Problem, model: CostModel) -> float:
    """ms that one more table column on a device adds to its exchanges, forward + backward.

    All devices start with the same number of columns.
    """
    column_bytes = problem.global_batch * OUTPUT_BYTES
    channels = dict.fromkeys(kind_on_one_device(problem.tables[0]).channels, 1.0)
    even = float(_EVEN_COLUMNS * column_bytes)
    own, busiest, host, mean, _ = total_linear_cost(model, channels, problem.topology, (even, even)).tolist()
    # A device's bytes are a part of its host's, and of all.
    n = len(problem.topology)
    return column_bytes * (own + busiest + host * len(problem.topology.hosts) / n + mean / n)
