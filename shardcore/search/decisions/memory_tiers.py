"""Memory tiers: the rows of each table that lie in device memory, if not all tables fit there.

The load factor of a table says it (types.Table): 1 has all rows in device memory, a share has all rows in a
tier below (core/tiers.py) and a cache of so many on the device, 0 has none there. tables/host_rows.py tells
what then crosses the link to that tier. A table goes to a slower one where the fastest does not hold it.

Memory goes where a byte of it makes a step shorter by most (RecShard, arXiv 2201.10095): a linear program over
the options of each table, rounded. Memory is counted over all devices together, before the search for places. At
first less of it is shared out than there is, which leaves searches room to even out devices. After the search, a
device's free memory goes to its tables.

An op has one cache (tables/host_rows.py), in which a row stays as long as any other. So cached tables get the
shares that a cache of one memory gives them, and every device has those, whichever of the tables it has. What
such a cache holds in vain, rows that rarely recur, is better left out of it, without a cache.

Where caches fetch ahead (model.fetch_wait_ms), a step is the longer of two chains of work.

Shapes: T tables, O options of all tables; R memories, that of devices and of each tier below; C chains of work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.tiers import BELOW, TIERS
from shardcore.core.types import PRECISION_BYTES, Plan, Problem, Shard, Table
from shardcore.core.validation import require
from shardcore.cost.model import (
    CostModel,
    first_argmin,
    is_less,
    round_encodings,
    with_predicted_dense_ms,
)
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.search.decisions.driver import Decision, FoundPlan, Proposal, ProposalOutcome
from shardcore.search.decisions.towers import with_towers_of_plan
from shardcore.search.state.shards import priced_plan
from shardcore.search.ties import min_by_cost
from shardcore.step import access
from shardcore.step.kinds import ShardingKind, kind_on_one_device, sharding_kind_by_name
from shardcore.step.memory import (
    CACHE_SET_ROWS,
    CACHED_ROW_BYTES,
    host_tier_bytes,
    local_batch_bytes,
    require_fits,
    resident_bytes,
    size_text,
    table_peak_bytes,
    usable_bytes,
    used_bytes,
)
from shardcore.tables.host_rows import cached_rows_by_memory, link_bytes_of_shard

SHARES = (1.0, 0.97, 0.9, 0.75, 0.5)
"""Shares of the memory for rows that are given to tables before the search."""
_EVERY = 4
"""One of so many known memories of a cache is an option. Between two of them cost is linear."""
_MEMORIES, _STEPS = 64, (8, 2, 1)
"""Memories of a shared cache. They are tried in steps of the first, then around the best in smaller ones."""
_HIDDEN = 0.01
"""Weight of all chains of work, also of those that the longest one hides: what is fetched is not even, and memory
may be left."""
_OVERFULL = 1e6 * 1e-2 ** np.arange(len(TIERS))
"""[R] ms of a step for exceeding a memory, by its whole size: rather a slow tier than a fast one."""


class MemoryTiers(Decision):
    """Choose which rows of tables lie in device memory, and which in host memory."""

    name: ClassVar[str] = "memory tiers"
    level: ClassVar[int] = 4
    changes: ClassVar[str] = "load factors"

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Proposal, ProposalOutcome, None]:
        """Problems with load factors for each share of device memory in SHARES. Equal problems are proposed once.

        Raises Infeasible and ShardCoreError as `with_fastest_tiers` does.
        """
        # Problems are hashable, so shares that lead to the same load factors are found as equal keys.
        share_of: dict[Problem, float] = {}
        for_rows = device_bytes_for_tables(with_all_rows_in_device_memory(problem))
        for share in SHARES:
            try:
                share_of.setdefault(with_fastest_tiers(problem, (share - 1) * for_rows, model), share)
            # Smaller shares fit even less.
            except Infeasible:
                if not share_of:
                    raise
                break
        for i, (proposed, share) in enumerate(share_of.items()):
            yield Proposal(
                words=f"{share:.0%} of the memory for rows shared out first",
                problem=proposed,
                more=len(share_of) - 1 - i,
            )

    def adopt(self, proposal: Proposal, found: FoundPlan, problem: Problem, model: CostModel) -> FoundPlan:
        # Towers are in the plan, not in the problem: load factors need to fit with them.
        filled_up, plan = fill_free_memory(found.plan, with_towers_of_plan(found.plan, found.problem), model)
        return replace(
            found,
            problem=replace(found.problem, tables=filled_up.tables),
            plan=plan,
            ms=plan.provenance["predicted_ms"],
        )

    def ledger_facts(self, outcome: ProposalOutcome) -> Mapping[str, Any]:
        problem = outcome.found.problem if outcome.found else outcome.proposal.problem
        return {
            **{
                f"tables in {TIERS[memory.tier].words}": sum(
                    t.in_host_memory and t.tier == memory.tier for t in problem.tables
                )
                for memory in problem.topology.memory
            },
            "MB over the link": sum(tier.link_bytes for tier in tier_of_each_table(problem)) / 1e6,
        }


@dataclass(frozen=True)
class TableTier:
    """Which memories hold a table's rows: the device's, the host's, or the host's with a cache on the device.

    table: the table with its load factor.
    device_bytes: bytes of weights, cache and optimizer state in device memory.
    host_bytes: bytes of weights and state in the tier below the devices.
    link_bytes: bytes that cross the link in a step.
    """

    table: Table
    device_bytes: int
    host_bytes: int
    link_bytes: float


def tier_of_each_table(problem: Problem) -> list[TableTier]:
    """Memory tier of each of a problem's tables, by its load factor, in the order of the tables."""
    return [_tier_of_table(table, problem) for table in problem.tables]


def least_link_ms(problem: Problem) -> float:
    """Lower bound on ms of a step in which rows cross the link to host memory: as if all devices had equal shares."""
    gbps = {memory.tier: memory.gbps for memory in problem.topology.memory}
    total = sum(
        tier.link_bytes / gbps[tier.table.tier] for tier in tier_of_each_table(problem) if tier.link_bytes
    )
    return total / len(problem.topology) / 1e6


def link_ms_savings(problem: Problem, gibs: Sequence[float]) -> list[float]:
    """ms of host-link time that more device memory would save in a step.

    gibs: GiB more of all devices together, rising.
    """
    found = [least_link_ms(with_fastest_tiers(problem, more * 2**30)) for more in (0, *gibs)]
    # What is found with less memory may be better, and fits more, too.
    return (found[0] - np.minimum.accumulate(found)[1:]).tolist()


def with_fastest_tiers(problem: Problem, more_bytes: float = 0, model: CostModel | None = None) -> Problem:
    """Problem with the load factors under which lookups are fastest. Load factors that the problem has are ignored.

    more_bytes: device memory, all devices together, beyond what the problem has. Negative: less.
    model: cost model for any problem. None: those that make the least bytes cross the link.

    Raises Infeasible if device memory does not even hold the inputs and outputs of a step, and if host memory
    does not hold the tables that are there. Raises ShardCoreError for a problem without host memory, and as
    `heat_of` does.
    """
    # From all rows on devices: load factors that the problem has would change what is counted.
    problem = with_all_rows_in_device_memory(problem)
    budget = device_bytes_for_tables(problem) + more_bytes
    if sum(tier.device_bytes for tier in tier_of_each_table(problem)) <= budget:
        return problem
    require(
        bool(problem.topology.memory),
        f"problem {problem.name!r} does not say what hosts have; its topology needs "
        f"memory of tier {' or '.join(map(repr, BELOW))}",
    )
    fastest = TIERS[problem.topology.memory[0].tier]
    free = [t for t in problem.tables if t.hash_table_tiers is None]
    reasons = [fastest.why_unsupported(t.precision, problem.optimizer) for t in free]
    require(
        not free or not all(reasons),
        f"problem {problem.name!r} has memory of tier {fastest.name!r}, and {max(reasons, default='')}",
    )
    cached = _with_all_tables_cached(problem)
    capacities = {m.tier: len(problem.topology.hosts) * m.bytes for m in problem.topology.memory}
    options = (tier_options(table, cached, tuple(capacities), 0) for table in cached.tables)
    least_bytes = (min(tier.device_bytes for tier in of_table) for of_table in options)
    if (missing := sum(least_bytes) - budget) > 0:
        raise Infeasible(
            f"problem {problem.name!r} lacks at least {size_text(missing)} of device memory for "
            "inputs, outputs and optimizer state of rows, with all rows below device memory: it "
            "needs more devices, more memory, or a smaller batch"
        )
    own = model and model.for_problem(cached)
    tiers = choose_tiers(cached, cached.tables, budget, capacities, len(problem.topology), own)
    for i, memory in enumerate(problem.topology.memory, 1):
        used = sum(tier.host_bytes for tier in tiers if tier.table.tier == memory.tier)
        if used > (capacity := capacities[memory.tier]):
            # A slower tier would take them, but for its kernels.
            slower = [TIERS[other.tier] for other in problem.topology.memory[i:]]
            unable = (tier.why_unsupported(t.precision, problem.optimizer) for tier in slower for t in free)
            reason = max(unable, default="")
            raise Infeasible(
                f"problem {problem.name!r} would have {size_text(used)} of tables in {TIERS[memory.tier].words}, "
                f"which may hold {size_text(capacity)}; it needs {size_text(used - capacity)} more of it, or "
                f"more device memory{reason and f'; {reason}'}"
            )
    return replace(problem, tables=tuple(tier.table for tier in tiers))


def with_all_rows_in_device_memory(problem: Problem) -> Problem:
    """Problem with all rows in device memory. Rows that later leave device memory go to the fastest tier below."""
    tier = next((memory.tier for memory in problem.topology.memory), BELOW[0])
    return replace(
        problem,
        tables=tuple(
            t if t.hash_table_tiers is not None else replace(t, load_factor=1.0, tier=tier)
            for t in problem.tables
        ),
    )


# Cached, so that all shares of the memory have one problem, by which options are cached.
@lru_cache(maxsize=4)
def _with_all_tables_cached(problem: Problem) -> Problem:
    """Problem with a cache for each table that may have one in the fastest tier below the devices.

    Rows of all caches of an op are as wide as the widest.

    problem: with all rows in device memory.
    """
    fastest = TIERS[problem.topology.memory[0].tier]
    able = (
        t
        for t in problem.tables
        if t.hash_table_tiers is None and not fastest.why_unsupported(t.precision, problem.optimizer)
    )
    return with_load_factors(problem, {t.name: min(0.5, fastest.most_cached) for t in able})


def with_load_factors(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """Problem with new load factors for some tables, by name."""
    return replace(
        problem,
        tables=tuple(replace(t, load_factor=factors.get(t.name, t.load_factor)) for t in problem.tables),
    )


def device_bytes_for_tables(problem: Problem) -> float:
    """Bytes of device memory available to weights, caches and optimizer state, on all devices together."""
    # A table's peak has buffers, too. These are needed wherever its rows are.
    rows = sum(_device_bytes_of_table(table, problem) for table in problem.tables)
    peaks, local = sum(table_peak_bytes(t, problem) for t in problem.tables), local_batch_bytes(problem)
    return sum(max(0, capacity - local) for capacity in usable_bytes(problem)) - (peaks - rows)


# Cached, as all shares of the memory ask for the same.
@lru_cache(maxsize=1 << 17)
def _tier_of_table(table: Table, problem: Problem) -> TableTier:
    whole, kinds = Shard.whole(table), _requested_kinds(table, problem)
    # Kinds over local batches are replicas: every device has the table.
    copies = (
        len(problem.topology) if kinds and all(sharding_kind.local_batch for sharding_kind in kinds) else 1
    )
    link = link_bytes_of_shard(whole, problem.global_batch, problem.optimizer)
    return TableTier(
        table,
        copies * _device_bytes_of_table(table, problem),
        host_tier_bytes(whole, problem),
        float(link.sum()),
    )


def _device_bytes_of_table(table: Table, problem: Problem) -> int:
    """Bytes of a whole table in device memory, with cached rows as wide as the widest table of the same op."""
    resident = sum(resident_bytes(kind_on_one_device(table), Shard.whole(table), problem))
    if not table.shares_cache:
        return resident
    # All rows of an op's cache are as wide as its widest table.
    columns = _widest_cached_dims(problem).get(_op_key(table), table.dim) - table.dim
    return resident + table.cached_rows(table.rows) * columns * PRECISION_BYTES[table.precision]


@lru_cache(maxsize=4)
def _widest_cached_dims(problem: Problem) -> Mapping[tuple[str, bool, str], int]:
    """Dim of the widest table with a cache, by op."""
    # By rising dim, so that the widest of each op is the one that stays.
    cached = sorted((t for t in problem.tables if t.shares_cache), key=lambda t: t.dim)
    return {_op_key(table): table.dim for table in cached}


def _op_key(table: Table) -> tuple[str, bool, str]:
    """Key of the fused op that a table runs in."""
    return table.collection, table.sequence, table.precision


def _requested_kinds(table: Table, problem: Problem) -> list[ShardingKind]:
    """Kinds of sharding that a problem's constraints request for a table; empty without a request."""
    return [sharding_kind_by_name(kind) for kind in problem.restricted_kinds_by_table.get(table.name, ())]


# Cached, as all shares of the memory ask for the same.
@lru_cache(maxsize=1 << 17)
def tier_options(table: Table, problem: Problem, among: tuple[str, ...], memory: float) -> list[TableTier]:
    """Memory tiers that a table may have, in the same order for all memories of the shared cache.

    among: tiers below the devices that have room.
    memory: of the cache that tables share, 0 to _MEMORIES.
    """
    if table.hash_table_tiers is not None:
        return [_tier_of_table(table, problem)]
    kinds = _requested_kinds(table, problem)
    # TorchRec does not cache tables of all kinds.
    may_leave = not kinds or any(sharding_kind.may_cache_rows for sharding_kind in kinds)
    able = [TIERS[name] for name in among if may_leave]
    # Nothing crosses the link for a table without lookups, so it needs no cache. One row is none or whole.
    needs_cache = table.rows > 1 and access.lookup_count(table, problem.global_batch) > 0
    held = (
        cached_rows_by_memory(table, problem.global_batch)[::_EVERY].astype(int)
        if needs_cache
        else np.ones(1, int)
    )
    factors = [(1.0, table.tier)]
    for tier in able:
        if tier.why_unsupported(table.precision, problem.optimizer):
            continue
        if tier.kernel:
            factors.append((0.0, tier.name))
        if not tier.shares_cache:
            most = max(int(tier.most_cached * table.rows), 1)
            sizes = np.unique(np.clip(held, 1, most)).tolist()
            factors += [(min(n / table.rows, tier.most_cached), tier.name) for n in sizes]
        elif needs_cache:
            n = int(np.interp(memory, np.arange(len(held)), np.clip(held, 1, table.rows - 1)))
            factors.append((n / table.rows, tier.name))
    return [_tier_of_table(replace(table, load_factor=x, tier=name), problem) for x, name in factors]


def choose_tiers(
    problem: Problem,
    tables: Sequence[Table],
    device_bytes: float,
    tier_bytes: Mapping[str, float],
    n_devices: int,
    model: CostModel | None,
) -> list[TableTier]:
    """Choose one memory tier for each table, for the shortest step within memory if all work is divided evenly.

    Those that exceed memory least, the slowest tier first, where none keep within it.

    device_bytes, tier_bytes: memory of the devices together, and of each tier below them.
    model: cost model of the problem. None: ms of a step are those of the links.

    The best memory of the shared cache is found as if the step shortened up to it and lengthened after it.
    """
    problem = with_predicted_dense_ms(problem, model) if model else problem
    among = tuple(tier_bytes)
    limits = np.maximum([device_bytes, *tier_bytes.values()], 1.0)  # [R]
    whole = [Shard.whole(table) for table in problem.tables]
    even = model.encode(whole).sum(0, keepdims=True) / len(problem.topology) if model else None
    table_of = [i for i, table in enumerate(tables) for _ in tier_options(table, problem, among, 0)]

    def options_of_all_tables(memory: float) -> list[TableTier]:
        return [tier for table in tables for tier in tier_options(table, problem, among, memory)]

    @cache
    def resource_use(memory: int) -> np.ndarray:
        """[O, R + C] use of each memory, as shares, and ms of each chain, by each option."""
        tiers = options_of_all_tables(memory)
        n_bytes = [
            [tier.device_bytes, *(tier.host_bytes * (tier.table.tier == name) for name in among)]
            for tier in tiers
        ]
        ms = _added_ms(tiers, problem, model, even) / n_devices
        # The first chain has the dense part, whatever is chosen: each table has a part of it.
        ms[:, 0] += problem.job.dense_ms / len(tables)
        return np.hstack([n_bytes / limits, round_encodings(ms)])

    @cache
    def best_at(memory: int) -> tuple[float, np.ndarray, float]:
        """Shortest step at a memory of the shared cache: its ms, options [T], and fraction of the way to the next
        memory.
        """
        found = []
        for chosen in _choose_options(resource_use(memory), np.array(table_of), len(limits)):
            total, longer = (resource_use(m)[chosen].sum(0) for m in (memory, memory + 1))
            # Device memory that is left goes to the cache.
            left, grows = 1 - total[0], longer[0] - total[0]
            part = np.clip(left / grows, 0.0, 1.0) if grows > 0 else 0.0
            found.append(
                (float(_penalized_step_ms(total + part * (longer - total), len(limits))), chosen, part)
            )
        return min_by_cost(found, lambda x: x[0])

    best, low, high = 0, 0, _MEMORIES
    for step in _STEPS:
        best = min_by_cost((*range(low, high, step), best), lambda memory: best_at(memory)[0])
        low, high = max(best - step + 1, 0), min(best + step, _MEMORIES)
    _, chosen, part = best_at(best)
    tiers = options_of_all_tables(best + part)
    return [tiers[i] for i in chosen]


def _added_ms(
    tiers: Sequence[TableTier], problem: Problem, model: CostModel | None, even: np.ndarray | None
) -> np.ndarray:
    """[N, C] ms that tables in tiers add to an op, and to its fetches and updates if caches prefetch.

    even: [1, F] summed encodings of the op, which has an even share of all tables.
    Without a model, [N, 1] ms on their links.
    """
    if model is None or even is None:
        gbps = {memory.tier: memory.gbps for memory in problem.topology.memory}
        return np.array([[t.link_bytes and t.link_bytes / gbps[t.table.tier] / 1e6] for t in tiers])
    sums = np.concatenate([even, even + model.encode([Shard.whole(tier.table) for tier in tiers])])
    op_ms = model.op_ms(sums)
    chains = [op_ms, model.op_part_ms(sums)[..., 1:].sum(-1)] if problem.job.fetches_ahead else [op_ms]
    return np.stack([ms[1:] - ms[0] for ms in chains], 1)


def _penalized_step_ms(total: np.ndarray, n_memories: int) -> np.ndarray:
    """[...] ms of steps with totals [..., R + C], plus a penalty where totals exceed memory."""
    chains, excess = total[..., n_memories:], np.maximum(total[..., :n_memories] - (1 + 1e-9), 0.0)
    return chains.max(-1) + _HIDDEN * chains.sum(-1) + (excess + (excess > 0)) @ _OVERFULL[:n_memories]


def _choose_options(use: np.ndarray, table_of: np.ndarray, n_memories: int) -> Iterator[np.ndarray]:
    """[T] option of each table for the shortest step, chosen in two ways.

    Both are those of a linear program, rounded, in which one table after another gets the option that makes the
    step shortest. In the first, memory that is left counts by its price in the program. In the second, it does
    not count.

    use: [O, R + C] shares of each memory, and ms of each chain.
    table_of: [O].
    """
    from scipy import optimize, sparse

    (n, n_uses), n_tables = use.shape, table_of[-1] + 1
    is_memory = np.arange(n_uses) < n_memories
    # Variables: a share of each option, the excess of each memory, and ms of the longest chain.
    one_each = sparse.coo_array((np.ones(n), (table_of, np.arange(n))), (n_tables, n + n_memories + 1))
    others = -np.eye(n_uses, n_memories + 1)
    others[~is_memory, -1] = -1
    found = optimize.linprog(
        [*_HIDDEN * use[:, ~is_memory].sum(1), *_OVERFULL[:n_memories], 1.0],
        np.hstack([use.T, others]),
        is_memory,
        one_each,
        np.ones(n_tables),
        method="highs",
    )
    # The largest share of each table comes last, and so stays.
    order, chosen = np.argsort(found.x[:n], kind="stable"), np.zeros(n_tables, dtype=int)
    chosen[table_of[order]] = order
    for prices in (-found.ineqlin.marginals * is_memory, np.zeros(n_uses)):
        while True:
            total = use[chosen].sum(0)
            changed = total - use[chosen][table_of] + use
            ms = _penalized_step_ms(changed, n_memories) + changed @ prices
            best = first_argmin(ms)
            if not is_less(ms[best], _penalized_step_ms(total, n_memories) + total @ prices):
                break
            chosen[table_of[best]] = best
        yield chosen.copy()


def fill_free_memory(plan: Plan, problem: Problem, model: CostModel) -> tuple[Problem, Plan]:
    """Problem and plan after each device's free memory is given to tables that are on that device only.

    Load factors of other tables stay. If the step is not predicted faster, nothing changes.
    """
    tables = {table.name: table for table in problem.tables}
    on_device: dict[int, list[Table]] = defaultdict(list)
    for name, placements in plan.placements_by_table().items():
        devices = {d for p in placements for d in p.devices}
        # A table on several devices would need the same load factor on all of them.
        if len(devices) == 1 and tables[name].in_host_memory:
            on_device[min(devices)].append(tables[name])
    if not on_device:
        return problem, plan
    free = [may - used for may, used in zip(usable_bytes(problem), used_bytes(plan, problem), strict=True)]
    cached = _with_all_tables_cached(with_all_rows_in_device_memory(problem))
    able, tables_now = {table.name: table for table in cached.tables}, dict[str, Table]()
    for device, here in on_device.items():
        # Caches are allocated in whole sets: less than one of each op's is empty.
        widest = {
            _op_key(t): CACHE_SET_ROWS * (t.dim * PRECISION_BYTES[t.precision] + CACHED_ROW_BYTES)
            for t in sorted(here, key=lambda t: t.dim)
        }
        budget = (
            sum(_device_bytes_of_table(table, problem) for table in here)
            + free[device]
            - sum(widest.values())
        )
        # Tables may change tiers, but not take more of any.
        below = {
            name: sum(host_tier_bytes(Shard.whole(t), problem) for t in here if t.tier == name)
            for name in dict.fromkeys(t.tier for t in here)
        }
        movable = [able[table.name] for table in here]
        tiers = choose_tiers(cached, movable, budget, below, 1, model.for_problem(cached))
        tables_now |= {tier.table.name: tier.table for tier in tiers}
    better = replace(problem, tables=tuple(tables_now.get(t.name, t) for t in problem.tables))
    # Placements name tables, so they change with them.
    moved = rebind_tables(plan, better).placements
    # Larger caches make larger buffers, so what is free alone does not say that it fits.
    try:
        require_fits(Plan(moved), better)
        faster = priced_plan(moved, better, model.for_problem(better), **plan.provenance)
    except Infeasible:
        return problem, plan
    # Of equal costs the plan that there was stays.
    return min_by_cost(((problem, plan), (better, faster)), lambda of: of[1].provenance["predicted_ms"])
