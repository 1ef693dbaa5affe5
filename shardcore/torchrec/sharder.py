"""TorchRec's own planner (EmbeddingShardingPlanner, wheel 1.8.0), with a sweep of its options, as a sharder.

TorchRec depends on the CUDA build of FBGEMM by name. So no extra of ours can ask for it on a CPU machine
(`core.extras.TORCHREC` installs it).

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

It cannot know of pins and bundles. Such tables are placed before it runs, whole. Those with fewest devices go
first, each where it is done first. TorchRec plans the rest around them. It sees hosts of unequal size as one
host. A packing takes over if no run finds a plan that fits.

Its exhaustive proposer runs up to 1,000 combinations, not 10,000. Either limit is met at about ten tables.

Shapes: D devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np

from shardcore.core.catalog import PRECISIONS
from shardcore.core.errors import ShardCoreError
from shardcore.core.extras import TORCHREC
from shardcore.core.links import LEVELS, ROWS_OVER
from shardcore.core.progress import OutOfTime, stopped_clock
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost.model import CostModel, first_least
from shardcore.search.budget import Budget, Meter
from shardcore.search.greedy import looked_up
from shardcore.search.state.feasible import feasible_shards, fitting
from shardcore.search.state.packing import equally_wide, lacking
from shardcore.search.state.placement_state import PlacementState
from shardcore.search.state.shard_cost_cache import ShardCostCache
from shardcore.search.state.shards import (
    Bundle,
    bundles,
    cheapest,
    consolidate,
    fixed_placements,
    freedom,
    placed,
    priced,
    searched_tables,
)
from shardcore.step.kinds import LAYOUTS, WHOLE_ROWS, even_rows, layout_of_torchrec, pod_size, row_unit_of
from shardcore.step.lower import require_plan
from shardcore.step.memory import fits, held_bytes
from shardcore.step.memory_account import local_batch_bytes
from shardcore.torchrec.placements import placements_of
from shardcore.torchrec.planner_pieces import (
    ALL_TYPES,
    COLUMN_TYPES,
    HOST_TYPES,
    Busy,
    Metered,
    OurBytes,
    Slowest,
    Ticking,
    quiet,
)
from shardcore.torchrec.rates import column_bytes, exchange_ms, lookup_ms

_FINISHING = 2.0
"""Seconds from TorchRec's last proposal to a priced plan, relative to those of pricing it."""
_TRIES = 4
"""Sweeps, at most, each with less memory, until a plan fits."""


@dataclass(frozen=True)
class TorchRecConfig:
    """Options to sweep.

    min_partition: the fewest columns of a shard; None for TorchRec's own, 128.
    all_types: True for all sharding types, False for table- and column-wise only.
    grid: combinations that its exhaustive proposer may try. Not swept.
    """

    min_partition: tuple[int | None, ...] = (None, 4, 8, 16, 32, 64)
    all_types: tuple[bool, ...] = (False, True)
    grid: int = 1000

    def __post_init__(self) -> None:
        if not self.min_partition or not self.all_types or self.grid < 0:
            raise ShardCoreError(f"{self} needs one or more of what is swept, and a grid of 0 or more")


def missing_package() -> str:
    """Python's words for what TorchRec's planner lacks of TorchRec and FBGEMM. "" if both are installed."""
    # A folder of the same name has no origin.
    return next(
        (
            f"No module named {name!r}"
            for name in ("fbgemm_gpu", "torchrec")
            if not ((spec := find_spec(name)) and spec.origin)
        ),
        "",
    )


def require_installed(what: str) -> None:
    """Raise ShardCoreError unless TorchRec is installed, with how to install it. what: what needs it."""
    if missing_package():
        raise ShardCoreError(f"{what}, and it is not installed ({missing_package()}): {TORCHREC}")


def torchrec(
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    config: TorchRecConfig = TorchRecConfig(),
) -> Plan:
    """The cheapest plan of the sweep. Deterministic: the seed is only recorded.

    One evaluation is one proposal of TorchRec's planner.
    A budget in seconds ends a run after the proposal that uses it up, and the sweep anywhere, once there is a plan.

    Raises ShardCoreError if TorchRec is not installed.
    Raises Infeasible (see `feasible_shards`) and SettingMismatch.
    """
    require_installed("sharder 'torchrec' runs TorchRec's planner")
    problem.require_setting(model.setting)
    feasible_shards(problem)  # for its refusals
    with stopped_clock():  # it takes seconds to import
        import torchrec.distributed.planner  # noqa: F401  # pyright: ignore[reportUnusedImport]
    meter, plans = (budget or Budget()).start(), list[Plan]()

    def priced_plan(placements: Sequence[Placement], **settings: Any) -> Plan:
        return priced(placements, problem, model, algorithm="torchrec", seed=seed, **settings)

    given = _constrained_first(problem, model)
    # Tables that nothing fixed are TorchRec's to place.
    rest = [t for t in problem.tables if t not in given.tables] if given else []
    if given and not rest:
        plans.append(priced_plan(given.placements, packed=False))
    # TorchRec adds up bytes. That is too much for some plans, and too little for others.
    more = -local_batch_bytes(problem)
    for _ in range(_TRIES):
        if given is None or not rest:
            break
        with quiet():
            # The local batch is memory that TorchRec does not know.
            theirs = _Theirs(problem, model, rest, replace(given, left=np.maximum(given.left + more, 0)))
            for all_types, min_partition in theirs.distinct(config):
                if plans and not meter.left():
                    break
                # To list the options of all types takes seconds on many devices.
                with suppress(OutOfTime), meter.enforced() if plans else nullcontext():
                    placements = theirs.plan(all_types, min_partition, config.grid, meter)
                    if placements is None or not _allowed([*given.placements, *placements], problem):
                        continue
                    before_s = meter.seconds()
                    plans.append(
                        priced_plan(
                            [*given.placements, *placements], packed=False, swept=[all_types, min_partition]
                        )
                    )
                    theirs.spare_s = _FINISHING * (meter.seconds() - before_s)
        # Fewer bytes help only where plans exist and none fits.
        if not plans or any(fits(plan, problem) for plan in plans):
            break
        # At least double the reduction, so that few sweeps are enough.
        more -= max(min(lacking(plan, problem) for plan in plans), -more)
    if not any(fits(plan, problem) for plan in plans):
        plans = [priced_plan(fitting(problem).placements, packed=True)]
    # Each run ranks by TorchRec's own cost. Across runs our model decides.
    best = cheapest(plans, problem)
    return replace(best, provenance={**best.provenance, "evals": meter.evals, "config": asdict(config)})


def _allowed(placements: Iterable[Placement], problem: Problem) -> bool:
    """Tell if a plan respects all constraints. TorchRec knows no widest shard, and may cut unevenly."""
    plan = Plan(consolidate(placements))
    try:
        require_plan(plan, problem, fits=False)
    except ShardCoreError:
        return False
    return equally_wide([(p.shard,) for p in plan.placements])


@dataclass(frozen=True)
class _Given:
    """Tables placed before TorchRec plans.

    tables: the tables.
    placements: their placements.
    left: [D] bytes that they leave.
    busy: [D] ms of their work.
    """

    tables: frozenset[Table]
    placements: list[Placement]
    left: np.ndarray
    busy: np.ndarray


def _constrained_first(problem: Problem, model: CostModel) -> _Given | None:
    """Place pinned tables and bundles, whole. None if one finds no memory."""
    fixed = fixed_placements(problem)
    tables = searched_tables(problem)
    chosen = [t for t in tables if t.name in problem.pinned or t.name in problem.bundle_of]
    speed = np.array([d.speed for d in problem.topology.devices])
    lookup, exchange = lookup_ms(problem, model), exchange_ms(problem, model)
    busy, devices = np.zeros(len(speed)), list[int]()
    if not tables:
        return _Given(frozenset(problem.tables), [*fixed], busy, busy)

    def load(bundle: Bundle) -> np.ndarray:
        """[D] ms of a bundle on each device."""
        # The same cost formula that TorchRec gets, from the model's rates.
        lookups, columns = sum(map(looked_up, bundle)), sum(s.width for s in bundle)
        return lookups * lookup / speed + columns * exchange

    shards = list(map(Shard.whole, tables))
    cache = ShardCostCache(problem, model, shards)
    keys = cache.keys(shards)
    cache.add(keys)
    state = PlacementState(cache, keys, priced=False)
    # Bundles with the fewest devices first, then the longest, then the largest.
    order = sorted(
        bundles(map(Shard.whole, chosen), problem),
        key=lambda b: (freedom(b, problem), -load(b).min(), -sum(s.bytes for s in b)),
    )
    for bundle in order:
        roomy = state.fits(*cache.key(bundle[0]))
        if not roomy.any():
            return None
        # The device that is done first, of those with room.
        device = first_least(np.where(roomy, busy + load(bundle), np.inf))
        devices.append(device)
        busy[device] += load(bundle)[device]
        state.place(*cache.key(bundle[0]), device)
    given = frozenset([*chosen, *(p.shard.table for p in fixed)])
    # Memory before the local batch, of which TorchRec knows nothing.
    return _Given(
        given, [*placed(order, devices, problem), *fixed], np.array(held_bytes(problem)) - state.used, busy
    )


class _Theirs:
    """The problem in TorchRec's terms: a module, a topology, constraints.

    names: our tables by the module's names. Our own names might not be valid there.
    ranks: the device of each rank, host by host.
    per_host: ranks of a host.
    spare_s: seconds of a budget that a run leaves for what follows its last proposal.
    """

    spare_s = 0.0

    def __init__(self, problem: Problem, model: CostModel, tables: Sequence[Table], given: _Given) -> None:
        import torch
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        self.problem, self.given, self.names = problem, given, {f"t{i}": t for i, t in enumerate(tables)}
        self.sharders: list[Any] = [EmbeddingBagCollectionSharder()]
        self.module = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=n,
                    num_embeddings=t.rows,
                    embedding_dim=t.dim,
                    feature_names=[n],
                    data_type=DataType[PRECISIONS[t.precision].theirs],
                )
                for n, t in self.names.items()
            ],
        )
        devices, hosts = problem.topology.devices, problem.topology.hosts
        self.ranks = problem.topology.ranks
        per_host = Counter(d.host for d in devices)
        # TorchRec knows hosts of equal size only. Others count as one host.
        self.per_host = len(devices) // len(hosts) if len(set(per_host.values())) == 1 else len(devices)
        self.hosts_of_pod = pod_size(problem.topology)
        self.bandwidths = self._bandwidths(model)

    def _bandwidths(self, model: CostModel) -> dict[str, Any]:
        """Bandwidths in bytes per ms, by TorchRec's names. Unknown ones are left out."""
        known: dict[str, Any] = {}
        one_ms = exchange_ms(self.problem, model)
        for level in LEVELS.values():
            if level.torchrec is None:
                continue
            # Its inner links are those of the unit that rows are divided over.
            inner = level.name in ROWS_OVER.values()
            topology = self.problem.topology
            link = topology.link(ROWS_OVER[row_unit_of(topology)] if inner else level.name)
            # TorchRec's links belong to each device, so a shared one is divided over the devices of a unit.
            gbps = link.gbps and link.gbps / (len(topology.sharing(link.level)[0]) if link.shared else 1)
            if gbps or one_ms > 0:
                # Without a given link, what a column costs in the model stands for it.
                known[level.torchrec[0]] = (
                    gbps * BYTES_PER_MS_PER_GBPS if gbps else column_bytes(self.problem) / one_ms
                )
        topology = self.topology(known)
        options = self.enumerator(topology, self.constraints(False, None)).enumerate(
            self.module, self.sharders
        )
        # Scale memory bandwidth so that both sides agree on the cost of all tables.
        theirs_ms = sum(
            s.perf.fwd_compute + s.perf.bwd_compute
            for o in options
            if o.sharding_type == WHOLE_ROWS.torchrec_whole
            for s in o.shards
        )
        # TorchRec prices lookups by bytes over bandwidth, so bandwidth is the one free number.
        ours_ms = lookup_ms(self.problem, model) * sum(looked_up(Shard.whole(t)) for t in self.names.values())
        if theirs_ms > 0 and ours_ms > 0:
            known["hbm_mem_bw"] = topology.hbm_mem_bw * theirs_ms / ours_ms
        return known

    def topology(self, bandwidths: Mapping[str, Any]) -> Any:
        """TorchRec's Topology with our devices' memory, speed and work given before."""
        from torchrec.distributed.planner.types import Topology

        # Memory differs by device; TorchRec's constructor takes one value for all.
        left = [int(self.given.left[d]) for d in self.ranks]
        topology = Topology(
            len(left),
            "cuda",
            hbm_cap=left[0],
            ddr_cap=0,
            ssd_cap=0,
            local_world_size=self.per_host,
            # TorchRec knows pods since 1.8.
            **({"pod_size": self.hosts_of_pod} if self.hosts_of_pod > 1 else {}),
            **bandwidths,
        )
        for device, d in zip(topology.devices, self.ranks, strict=True):
            device.storage.hbm = int(self.given.left[d])
            device.perf = Busy(  # type: ignore[assignment]  # as Perf
                self.problem.topology.devices[d].speed, float(self.given.busy[d])
            )
        return topology

    def constraints(self, all_types: bool, min_partition: int | None) -> dict[str, Any]:
        """TorchRec's ParameterConstraints of each table."""
        from torchrec.distributed.planner import ParameterConstraints

        # Table-row-wise over units of one device each would divide nothing.
        several = 1 < self.per_host * self.hosts_of_pod < len(self.ranks)
        every_type = (*ALL_TYPES, *(HOST_TYPES if several else ()))
        types = every_type if all_types else COLUMN_TYPES
        # Devices over which a type divides rows.
        over = {
            name: len(group)
            for layout in LAYOUTS.values()
            if layout.divides_rows
            for group in layout.groups(self.problem.topology)[:1]
            for name in layout.torchrec
        }
        least = dict(self.problem.constraints.min_widths)

        def runs(name: str, table: Table) -> bool:
            layout = layout_of_torchrec(name, self.problem.topology)
            return bool(
                layout
                and self.problem.may_run(layout, table)
                and (name not in over or even_rows(table.rows, over[name]))
                and (layout.caches or not table.in_host_memory)
                and (layout.as_sequence is not None or not table.sequence)
            )

        def types_of(table: Table) -> list[str]:
            if table.name in self.problem.whole:
                # Replicas are not cut. Kinds of `types` only, but for whole tables on one device.
                return [
                    layout.torchrec_whole
                    for layout in LAYOUTS.values()
                    if layout is WHOLE_ROWS
                    or (
                        (layout.local_batch and layout.torchrec_whole in types)
                        and runs(layout.torchrec_whole, table)
                    )
                ]
            return [k for k in types if runs(k, table)] or [k for k in every_type if runs(k, table)]

        return {
            n: ParameterConstraints(
                sharding_types=types_of(t),
                compute_kernels=["fused", "dense"],  # dense: what data_parallel runs
                pooling_factors=[t.pooling],
                min_partition=max(min_partition or 0, least.get(t.name, 0)) or None,
            )
            for n, t in self.names.items()
        }

    def enumerator(self, topology: Any, constraints: dict[str, Any]) -> Any:
        """Its enumerator of sharding options, with our bytes."""
        from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
        from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator

        estimators: list[Any] = [
            Ticking(EmbeddingPerfEstimator(topology, constraints)),
            OurBytes(self.problem, self.names),
        ]
        return EmbeddingEnumerator(topology, self.problem.local_batch, constraints, estimator=estimators)

    def distinct(self, config: TorchRecConfig) -> Iterator[tuple[bool, int | None]]:
        """The settings to sweep. Those with the same column cuts as an earlier one are skipped."""
        from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets

        seen = set()
        weights: list[Any] = [bag.weight for bag in self.module.embedding_bags.values()]
        for all_types, min_partition in product(config.all_types, config.min_partition):
            # Two settings with as many shards of each table give the same search space.
            shards = (
                calculate_shard_sizes_and_offsets(w, 1, 1, "column_wise", min_partition)[0] for w in weights
            )
            key = (all_types, *map(len, shards))
            if key not in seen:
                seen.add(key)
                yield all_types, min_partition

    def plan(
        self, all_types: bool, min_partition: int | None, grid: int, meter: Meter
    ) -> list[Placement] | None:
        """The planner's best plan. None if it finds none."""
        from torchrec.distributed.planner import EmbeddingShardingPlanner
        from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
        from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
        from torchrec.distributed.planner.types import PlannerError

        topology, constraints = self.topology(self.bandwidths), self.constraints(all_types, min_partition)
        # TorchRec's default proposers, with a smaller grid.
        greedy = GreedyProposer(), GreedyProposer(use_depth=False)
        rating: Any = Slowest(topology)
        proposer: Any = Metered([GridSearchProposer(grid), *greedy, UniformProposer()], meter, self.spare_s)
        planner = EmbeddingShardingPlanner(
            topology,
            self.problem.local_batch,
            self.enumerator(topology, constraints),
            constraints=constraints,
            stats=[],
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
            performance_model=rating,
            proposer=proposer,
            debug=False,
        )
        try:
            plan: Any = planner.plan(self.module, self.sharders)
        except PlannerError:
            return None
        return placements_of(plan.plan[""], self.names, self.problem.topology)
