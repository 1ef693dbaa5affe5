"""Memory tiers: the rows of each table that lie in device memory, if not all tables fit there.

The load factor of a table says it (types.Table): 1 has all rows in device memory, a share has all rows in a
tier below (core/tiers.py) and a cache of so many on the device, 0 has none there. tables/host_rows.py tells
what then crosses the link to that tier. A table goes to a slower one where the fastest does not hold it.

Memory goes where a byte of it keeps most bytes off the link (RecShard, arXiv 2201.10095). It is counted over
all devices together, before the search for places. At first less of it is shared out than there is, which
leaves searches room to even out devices. After the search, a device's free memory goes to its tables.

An op has one cache (tables/host_rows.py), in which a row stays as long as any other. So cached tables get the
shares that a cache of one memory gives them, and every device has those, whichever of the tables it has. What
such a cache holds in vain, rows that rarely recur, is better left out of it, without a cache.

Where caches fetch ahead (model.fetch_wait_ms), a step is the longer of two chains, and each has its own best
tiers. So tiers are chosen by a weighted mean of both, with the weight that makes the longer one shortest.

Shapes: M memories of a cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.tiers import BELOW, TIERS
from shardcore.core.types import PRECISION_BYTES, Plan, Problem, Shard, Table
from shardcore.core.validation import require
from shardcore.cost.model import CostModel, fetched_ms
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.search.decisions.driver import Decision, Found, Outcome, Proposal
from shardcore.search.decisions.towers import as_planned
from shardcore.search.state.shards import priced
from shardcore.search.ties import least, sort_by_cost
from shardcore.step import access
from shardcore.step.kinds import WHOLE_ROWS, Layout, layout_of, run_of
from shardcore.step.lower import traffic_of_outputs
from shardcore.step.memory import (
    CACHE_SET_ROWS,
    CACHED_ROW_BYTES,
    gib,
    held_bytes,
    host_bytes,
    require_fits,
    resident_bytes,
    used_bytes,
)
from shardcore.step.memory_account import local_batch_bytes, table_bytes
from shardcore.step.output_bytes import output_bytes
from shardcore.tables.host_rows import held_rows, link_bytes

SHARES = (1.0, 0.97, 0.9, 0.75, 0.5)
"""Shares of the memory for rows that are given to tables before the search."""
_EVERY = 4
"""One of so many known memories of a cache is weighed. Between two of them cost is linear."""
_STEPS = (8, 2, 1)
"""Memories of a cache are weighed in steps of the first, then around the best in smaller ones."""
_HALVINGS = 30
"""Bisections of the price of host memory, until hosts hold the tables that are in it."""
_WEIGHINGS = 6
"""Bisections of the weight of fetches and updates."""


class MemoryTiers(Decision):
    """Choose the rows of tables that lie in device memory, and those in that of hosts."""

    name: ClassVar[str] = "memory tiers"
    level: ClassVar[int] = 4
    changes: ClassVar[str] = "load factors"

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Proposal, Outcome, None]:
        """A problem with load factors for each of SHARES. Equal ones are proposed once.

        Raises Infeasible and ShardCoreError as `tiered` does.
        """
        # Problems are hashable, so shares that lead to the same load factors are found as equal keys.
        share_of: dict[Problem, float] = {}
        for_rows = tier_bytes(in_device_memory(problem))
        for share in SHARES:
            try:
                share_of.setdefault(tiered(problem, (share - 1) * for_rows, model), share)
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

    def adopt(self, proposal: Proposal, found: Found | None, model: CostModel) -> Found | None:
        if found is None:
            return None
        # Towers are in the plan, not in the problem: load factors need to fit with them.
        filled_up, plan = filled(found.plan, as_planned(found.plan, found.problem), model)
        return replace(
            found,
            problem=replace(found.problem, tables=filled_up.tables),
            plan=plan,
            ms=plan.provenance["predicted_ms"],
        )

    def facts(self, outcome: Outcome) -> Mapping[str, Any]:
        problem = outcome.found.problem if outcome.found else outcome.proposal.problem
        return {
            **{
                f"tables in {TIERS[memory.tier].words}": sum(
                    t.in_host_memory and t.tier == memory.tier for t in problem.tables
                )
                for memory in problem.topology.memory
            },
            "MB over the link": sum(tier.link_bytes for tier in tiers_of(problem)) / 1e6,
        }


@dataclass(frozen=True)
class Tier:
    """The memories of a table's rows.

    table: the table with its load factor.
    device_bytes: bytes of weights, cache and optimizer state in device memory.
    host_bytes: bytes of weights and state in the fastest tier below the devices.
    link_bytes: bytes that cross the link in a step.
    cost: what is to be least. Where no model tells ms: link_bytes, those of slower links as so many more.
    chains_ms: ms that it adds to the rest of a step, and to fetches and updates. (): caches fetch nothing
        ahead.
    """

    table: Table
    device_bytes: int
    host_bytes: int
    link_bytes: float
    cost: float
    chains_ms: tuple[float, ...] = ()


def tiers_of(problem: Problem) -> list[Tier]:
    """The tiers of a problem's tables by their load factors, in its order."""
    return [_tier_of(table, problem) for table in problem.tables]


def link_ms(problem: Problem) -> float:
    """ms of a step in which rows cross the link, if all devices have as much of it: no plan has less."""
    gbps = {memory.tier: memory.gbps for memory in problem.topology.memory}
    total = sum(tier.link_bytes / gbps[tier.table.tier] for tier in tiers_of(problem) if tier.link_bytes)
    return total / len(problem.topology) / 1e6


def gains_ms(problem: Problem, gibs: Sequence[float]) -> list[float]:
    """ms of link that more device memory would save in a step.

    gibs: GiB more of all devices together, rising.
    """
    found = [link_ms(tiered(problem, more * 2**30)) for more in (0, *gibs)]
    # What is found with less memory may be better, and fits more, too.
    return (found[0] - np.minimum.accumulate(found)[1:]).tolist()


def tiered(problem: Problem, more_bytes: float = 0, model: CostModel | None = None) -> Problem:
    """The problem with the load factors of the fastest lookups. It forgets its own.

    more_bytes: device memory, all devices together, beyond what the problem has. Negative: less.
    model: cost model for any problem. None: those that make the least bytes cross the link.

    Raises Infeasible if device memory does not even hold the inputs and outputs of a step, and if host memory
    does not hold the tables that are there. Raises ShardCoreError for a problem without host memory, and as
    `heat_of` does.
    """
    # From all rows on devices: load factors that the problem has would change what is counted.
    problem = in_device_memory(problem)
    budget = tier_bytes(problem) + more_bytes
    if sum(tier.device_bytes for tier in tiers_of(problem)) <= budget:
        return problem
    require(
        bool(problem.topology.memory),
        f"problem {problem.name!r} does not say what hosts have; its topology needs "
        f"memory of tier {' or '.join(map(repr, BELOW))}",
    )
    # Rows of all caches of an op are as wide as the widest: any table may have one.
    fastest = TIERS[problem.topology.memory[0].tier]
    free = [t for t in problem.tables if t.fixed_tiers is None]
    reasons = {t.name: fastest.why_not(t.precision, problem.optimizer) for t in free}
    able = {name: min(0.5, fastest.most_cached) for name, reason in reasons.items() if not reason}
    require(
        bool(able or not free),
        f"problem {problem.name!r} has memory of tier {fastest.name!r}, and {max(reasons.values())}",
    )
    cached = with_load_factors(problem, able)
    choices = choices_of(cached.tables, cached, model)
    least_bytes = (min(tier.device_bytes for tier in choice.at(0)) for choice in choices)
    if (missing := sum(least_bytes) - budget) > 0:
        raise Infeasible(
            f"problem {problem.name!r} lacks at least {gib(missing)} of device memory for "
            "inputs, outputs and optimizer state of rows, with all rows below device memory: it "
            "needs more devices, more memory, or a smaller batch"
        )
    n_hosts = len(problem.topology.hosts)
    capacity = n_hosts * problem.topology.memory[0].bytes
    if model is None or not problem.job.fetches_ahead:
        tiers = _within_hosts(choices, budget, capacity)
    else:
        tiers = _tiers_of_both(choices, budget, capacity, problem, model.for_problem(cached))
    for i, memory in enumerate(problem.topology.memory, 1):
        there = (tier.table for tier in tiers if tier.table.tier == memory.tier)
        used, capacity = sum(host_bytes(Shard.whole(t), problem) for t in there), n_hosts * memory.bytes
        if used > capacity:
            # A slower tier would take them, but for its kernels.
            slower = [TIERS[other.tier] for other in problem.topology.memory[i:]]
            unable = (tier.why_not(t.precision, problem.optimizer) for tier in slower for t in free)
            reason = max(unable, default="")
            raise Infeasible(
                f"problem {problem.name!r} would have {gib(used)} of tables in {TIERS[memory.tier].words}, "
                f"which may hold {gib(capacity)}; it needs {gib(used - capacity)} more of it, or "
                f"more device memory{reason and f'; {reason}'}"
            )
    return replace(problem, tables=tuple(tier.table for tier in tiers))


def in_device_memory(problem: Problem) -> Problem:
    """The problem with all rows in device memory. Those that leave it go to the fastest tier below."""
    tier = next((memory.tier for memory in problem.topology.memory), BELOW[0])
    return replace(
        problem,
        tables=tuple(
            t if t.fixed_tiers is not None else replace(t, load_factor=1.0, tier=tier) for t in problem.tables
        ),
    )


def with_load_factors(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """The problem with load factors of some tables, by name."""
    return replace(
        problem,
        tables=tuple(replace(t, load_factor=factors.get(t.name, t.load_factor)) for t in problem.tables),
    )


def tier_bytes(problem: Problem) -> float:
    """Bytes of device memory that weights, caches and state may take, on all devices together."""
    # A table's peak has buffers, too. These are needed wherever its rows are.
    rows = sum(_rows_bytes(table, problem) for table in problem.tables)
    peaks, local = sum(table_bytes(t, problem) for t in problem.tables), local_batch_bytes(problem)
    return sum(max(0, capacity - local) for capacity in held_bytes(problem)) - (peaks - rows)


def _tier_of(table: Table, problem: Problem) -> Tier:
    kinds = _kinds_of(table, problem)
    # Kinds over local batches are replicas: every device has the table.
    copies = len(problem.topology) if kinds and all(layout.local_batch for layout in kinds) else 1
    device_bytes = copies * _rows_bytes(table, problem)
    if not table.in_host_memory:
        return Tier(table, device_bytes, 0, 0.0, 0.0)
    cached = np.array([table.cached(table.rows)])
    link = float(link_bytes(table, cached, problem.global_batch, problem.optimizer).sum())
    fastest, own = problem.topology.memory[0], problem.topology.memory_of(table.tier)
    assert own is not None  # a problem has the tiers of its tables
    on_host = host_bytes(Shard.whole(table), problem) * (own is fastest)
    return Tier(table, device_bytes, on_host, link, fastest.gbps / own.gbps * link)


def _rows_bytes(table: Table, problem: Problem) -> int:
    """Bytes of a whole table in device memory, if its device has the widest table of its op, too."""
    resident = sum(resident_bytes(WHOLE_ROWS, Shard.whole(table), problem))
    if not table.shares_cache:
        return resident
    # All rows of an op's cache are as wide as its widest table.
    columns = _cache_widths(problem).get(_op_of(table), table.dim) - table.dim
    return resident + table.cached(table.rows) * columns * PRECISION_BYTES[table.precision]


@lru_cache(maxsize=4)
def _cache_widths(problem: Problem) -> Mapping[tuple[str, bool, str], int]:
    """Dim of the widest table with a cache, by op."""
    # By rising dim, so that the widest of each op is the one that stays.
    cached = sorted((t for t in problem.tables if t.shares_cache), key=lambda t: t.dim)
    return {_op_of(table): table.dim for table in cached}


def _op_of(table: Table) -> tuple[str, bool, str]:
    return table.collection, table.sequence, table.precision


def _kinds_of(table: Table, problem: Problem) -> list[Layout]:
    """The kinds that the problem's constraints ask for. Empty if they ask for none."""
    return [layout_of(kind) for kind in problem.kinds_of.get(table.name, ())]


@dataclass(frozen=True)
class Choices:
    """The tiers that a table may have.

    plain: without a cache: no rows in device memory, and all of them there.
    cached: [M] with a cache of the op, by its memory. (): it needs none.
    own: by tier, with caches of the table's own, by rising size.
    """

    plain: tuple[Tier, ...]
    cached: tuple[Tier, ...] = ()
    own: tuple[tuple[Tier, ...], ...] = ()

    def at(self, memory: int) -> list[Tier]:
        """Those where caches of ops have one memory."""
        return [*self.plain, *self.cached[memory : memory + 1], *(tier for of in self.own for tier in of)]


def choices_of(
    tables: Sequence[Table], problem: Problem, model: CostModel | None, moves: bool = True
) -> list[Choices]:
    """The tiers that each table may have. moves: False if those below device memory stay in theirs."""
    every = tuple(memory.tier for memory in problem.topology.memory)
    choices = [_choices_of(table, problem, every if moves else (table.tier,)) for table in tables]
    return choices if model is None else _in_ms(choices, problem, model.for_problem(problem))


# Cached, as each share of the memory asks for the same.
@lru_cache(maxsize=1 << 12)
def _choices_of(table: Table, problem: Problem, among: tuple[str, ...]) -> Choices:
    """The tiers that a table may have, of some below the devices, by bytes over the link.

    All of its rows in device memory only, if the problem asks for kinds that TorchRec does not cache.
    """
    if table.fixed_tiers is not None:
        return Choices((_tier_of(table, problem),))
    plain = [_tier_of(replace(table, load_factor=1.0), problem)]
    if (kinds := _kinds_of(table, problem)) and not any(layout.caches for layout in kinds):
        return Choices(tuple(plain))
    cached, own, sizes = (), [], np.ones(1, int)
    # Nothing crosses the link for a table without lookups, so it needs no cache. One row is none or whole.
    if is_cached := table.rows > 1 and access.lookups(table, problem.global_batch) > 0:
        sizes = held_rows(table, problem.global_batch)[::_EVERY].astype(int)
    for name in among:
        tier = TIERS[name]
        if tier.why_not(table.precision, problem.optimizer):
            continue
        if tier.kernel:
            plain.insert(0, _tier_of(replace(table, load_factor=0.0, tier=name), problem))
        if not tier.shares_cache:
            within = np.unique(np.clip(sizes, 1, max(int(tier.most_cached * table.rows), 1))).tolist()
            shares = (min(n / table.rows, tier.most_cached) for n in within)
            own.append(tuple(_tier_of(replace(table, load_factor=x, tier=name), problem) for x in shares))
        elif is_cached:
            cached = _cached_of(replace(table, tier=name), problem, sizes)
    return Choices(tuple(plain), cached, tuple(own))


def _cached_of(table: Table, problem: Problem, sizes: np.ndarray) -> tuple[Tier, ...]:
    """[M] tiers of a table with so many rows [M] in the cache of its op."""
    sizes = np.clip(sizes, 1, table.rows - 1)
    link = link_bytes(table, sizes, problem.global_batch, problem.optimizer).sum(1)
    least, most = (_tier_of(replace(table, load_factor=n / table.rows), problem) for n in (1, table.rows - 1))
    # Device bytes are linear in cached rows.
    n_bytes = (
        np.interp(sizes, (1, table.rows - 1), (least.device_bytes, most.device_bytes)).round().astype(int)
    )
    slower = least.cost / least.link_bytes if least.link_bytes else 1.0
    return tuple(
        replace(
            least,
            table=replace(table, load_factor=n / table.rows),
            device_bytes=b,
            link_bytes=x,
            cost=slower * x,
        )
        for n, b, x in zip(sizes.tolist(), n_bytes.tolist(), link.tolist(), strict=True)
    )


def _in_ms(choices: Sequence[Choices], problem: Problem, model: CostModel) -> list[Choices]:
    """The choices by what they add to the ms of an op with an even share of all tables."""
    beside = model.encode([Shard.whole(t) for t in problem.tables]).sum(0, keepdims=True) / len(
        problem.topology
    )
    # Those that stand for all: ms of other caches are linear in what crosses the link.
    some = [
        tier
        for c in choices
        for tier in (
            *c.plain,
            *(end for caches in (c.cached, *c.own) if caches for end in (caches[0], caches[-1])),
        )
    ]
    codes = model.encode([Shard.whole(tier.table) for tier in some])
    chains = [model.head(beside + codes) - model.head(beside)]
    if problem.job.fetches_ahead:
        chains.append(np.subtract(*(fetched_ms(model, x, model.head(x)) for x in (beside + codes, beside))))
    all_ms = iter(np.transpose(chains).tolist())

    def priced_caches(caches: tuple[Tier, ...]) -> tuple[Tier, ...]:
        if not caches:
            return ()
        ends = [(caches[i].link_bytes, *next(all_ms)) for i in (0, -1)]
        crossing, *known = zip(*sorted(ends), strict=True)
        ms = [np.interp([tier.link_bytes for tier in caches], crossing, of_chain) for of_chain in known]
        return tuple(map(_adding, caches, np.transpose(ms).tolist()))

    return [
        Choices(
            tuple(_adding(tier, next(all_ms)) for tier in c.plain),
            priced_caches(c.cached),
            tuple(map(priced_caches, c.own)),
        )
        for c in choices
    ]


def _adding(tier: Tier, chains_ms: Sequence[float]) -> Tier:
    return replace(tier, cost=chains_ms[0], chains_ms=tuple(chains_ms))


def _weighed(choices: Sequence[Choices], weight: float) -> list[Choices]:
    """The choices by a weighted mean of what they add to both chains. weight: of fetches and updates."""

    def mean(tier: Tier) -> Tier:
        return replace(tier, cost=tier.chains_ms[0] * (1 - weight) + tier.chains_ms[1] * weight)

    return [
        Choices(
            tuple(map(mean, c.plain)),
            tuple(map(mean, c.cached)),
            tuple(tuple(map(mean, caches)) for caches in c.own),
        )
        for c in choices
    ]


def _tiers_of_both(
    choices: Sequence[Choices], budget: float, capacity: float, problem: Problem, model: CostModel
) -> list[Tier]:
    """The tiers of the shortest step if caches fetch ahead, with all work divided evenly.

    Where hosts hold none, as `_within_hosts`.
    """
    outputs: dict[Layout, np.ndarray] = defaultdict(lambda: np.zeros(len(problem.topology)))
    for table in problem.tables:
        whole = output_bytes(Shard.whole(table), problem.global_batch)
        outputs[run_of(WHOLE_ROWS.name, table)] += whole / len(problem.topology)
    comm = model.comm(traffic_of_outputs(outputs, problem), np.zeros(len(problem.topology)), problem.topology)
    # Exchanges and the dense part are in one chain only.
    once_ms = np.array([comm.total_ms.max() + problem.job.dense_ms, 0.0])

    def chains_ms(tiers: Sequence[Tier]) -> list[float]:
        return (once_ms + np.sum([t.chains_ms for t in tiers], 0) / len(problem.topology)).tolist()

    def at(weight: float) -> list[Tier]:
        return _within_hosts(_weighed(choices, weight), budget, capacity)

    # A little weight even where all is hidden: what is fetched is not divided evenly, and memory may be left.
    low, high = 0.01, 1.0
    tried = [at(low)]
    if np.diff(chains_ms(tried[0]))[0] > 0:
        tried.append(at(1.0))
        for _ in range(_WEIGHINGS):
            middle = (low + high) / 2
            tried.append(at(middle))
            waits = np.diff(chains_ms(tried[-1]))[0] > 0
            low, high = (middle, high) if waits else (low, middle)
    # Tiers that hosts do not hold come last.
    return min(tried, key=lambda x: (max(0, sum(t.host_bytes for t in x) - capacity), max(chains_ms(x))))


def shared_out(choices: Sequence[Choices], budget: float, host_price: float = 0.0) -> list[Tier]:
    """One tier of each table, with the least cost together under a budget of device bytes.

    host_price: cost of a byte of host memory.

    Caches have one memory. The best of all memories is found as if cost fell up to it and rose after it.
    """
    n = max((len(choice.cached) for choice in choices), default=0)

    @cache
    def at(memory: int) -> tuple[float, list[Tier]]:
        found = _remembered(choices, memory, budget, host_price)
        return sum(_cost(tier, host_price) for tier in found), found

    best, low, high = 0, 0, max(n, 1)
    for step in _STEPS:
        best = least((*range(low, high, step), best), lambda memory: at(memory)[0])
        low, high = max(best - step, 0), min(best + step + 1, max(n, 1))
    return at(best)[1]


def _remembered(choices: Sequence[Choices], memory: int, budget: float, host_price: float) -> list[Tier]:
    """The best tiers with a memory of caches from this one up to the next, as far as the budget goes."""
    filled = water_filled([choice.at(memory) for choice in choices], budget, host_price)
    more = {
        i: choice.cached[memory + 1]
        for i, (choice, tier) in enumerate(zip(choices, filled, strict=True))
        if memory + 1 < len(choice.cached) and tier is choice.cached[memory]
    }
    grows = sum(tier.device_bytes - filled[i].device_bytes for i, tier in more.items())
    left = budget - sum(tier.device_bytes for tier in filled)
    part = min(1.0, left / grows) if grows > 0 else 0.0
    for i, tier in more.items():
        filled[i] = _between(filled[i], tier, part)
    return filled


def _between(less: Tier, more: Tier, part: float) -> Tier:
    """A cache of a size between two, in whole rows. Its misses are linear in rows."""
    rows = less.table.rows
    few, many = less.table.cached(rows), more.table.cached(rows)
    size = int(few + part * (many - few))
    part = (size - few) / max(many - few, 1)
    return replace(
        less,
        table=replace(less.table, load_factor=size / rows),
        device_bytes=round(less.device_bytes + part * (more.device_bytes - less.device_bytes)),
        link_bytes=less.link_bytes + part * (more.link_bytes - less.link_bytes),
        cost=less.cost + part * (more.cost - less.cost),
        chains_ms=tuple(a + part * (b - a) for a, b in zip(less.chains_ms, more.chains_ms, strict=True)),
    )


def _within_hosts(choices: Sequence[Choices], budget: float, capacity: float) -> list[Tier]:
    """The best tiers that hosts hold. If none is found, those that come nearest to it."""
    wanted = tiers = shared_out(choices, budget)
    low, high = -18.0, 6.0
    # The least price of host memory, by its logarithm, at which tables that are not worth it leave it.
    for _ in range(_HALVINGS if sum(tier.host_bytes for tier in tiers) > capacity else 0):
        middle = (low + high) / 2
        found = shared_out(choices, budget, 10**middle)
        if sum(tier.host_bytes for tier in found) <= capacity:
            tiers, high = found, middle
        else:
            wanted, low = found, middle
    return _refilled(tiers, wanted, budget, capacity)


def _refilled(tiers: list[Tier], wanted: Sequence[Tier], budget: float, capacity: float) -> list[Tier]:
    """The tiers with tables back from slower ones, as far as memories go.

    At a price of host memory, equal tables leave it together.
    """
    tiers, on_device = list(tiers), sum(tier.device_bytes for tier in tiers)
    on_host = sum(tier.host_bytes for tier in tiers)
    back = [
        (i, now, then)
        for i, (now, then) in enumerate(zip(tiers, wanted, strict=True))
        if now.table.in_host_memory and then.host_bytes > now.host_bytes
    ]
    for i, now, then in sort_by_cost(back, lambda x: (x[2].cost - x[1].cost) / x[2].host_bytes):
        more_device, more_host = then.device_bytes - now.device_bytes, then.host_bytes - now.host_bytes
        if then.cost < now.cost and on_device + more_device <= budget and on_host + more_host <= capacity:
            tiers[i], on_device, on_host = then, on_device + more_device, on_host + more_host
    return tiers


def water_filled(choices: Sequence[Sequence[Tier]], budget: float, host_price: float = 0.0) -> list[Tier]:
    """One tier of each table, with the least cost together under a budget of device bytes.

    choices: tiers of each table, the first with the fewest device bytes.
    host_price: cost of a byte of host memory.

    Exact but for one step of one table: steps go by cost saved a byte, along each table's lower
    convex hull. Of the first that does not fit, a part is used.
    """
    hulls = [_hull(tiers, host_price) for tiers in choices]
    # One list over all tables, to take the steps that save most a byte first.
    steps = [
        (-_saved(hull[i], hull[i + 1], host_price), table, i)
        for table, hull in enumerate(hulls)
        for i in range(len(hull) - 1)
    ]
    filled, stuck = [hull[0] for hull in hulls], set[int]()
    left = budget - sum(tier.device_bytes for tier in filled)
    for _, table, i in sort_by_cost(steps, lambda step: step[0]):
        now, then = filled[table], hulls[table][i + 1]
        if table in stuck:
            continue
        if then.device_bytes - now.device_bytes > left:
            # Later steps of this table need this one first.
            stuck.add(table)
            fitting = [tier for tier in choices[table] if tier.device_bytes <= now.device_bytes + left]
            then = least(fitting, lambda tier: _cost(tier, host_price))
            if _cost(then, host_price) >= _cost(now, host_price):
                continue
        left -= then.device_bytes - now.device_bytes
        filled[table] = then
    return filled


def _hull(tiers: Sequence[Tier], host_price: float) -> list[Tier]:
    """The lower convex hull of cost over device bytes."""
    hull: list[Tier] = []
    for tier in sorted(tiers, key=lambda t: (t.device_bytes, _cost(t, host_price))):
        if hull and _cost(tier, host_price) >= _cost(hull[-1], host_price):  # more memory for nothing
            continue
        # Drop tiers above the line from their neighbour before to this one.
        while len(hull) > 1 and _saved(hull[-2], tier, host_price) >= _saved(hull[-2], hull[-1], host_price):
            hull.pop()
        hull.append(tier)
    return hull


def _cost(tier: Tier, host_price: float) -> float:
    return tier.cost + host_price * tier.host_bytes


def _saved(a: Tier, b: Tier, host_price: float) -> float:
    """Cost that a byte of device memory saves."""
    return (_cost(a, host_price) - _cost(b, host_price)) / (b.device_bytes - a.device_bytes)


def filled(plan: Plan, problem: Problem, model: CostModel) -> tuple[Problem, Plan]:
    """The problem and plan after a device's free memory went to tables that are only there.

    Load factors of other tables stay. If the step is not predicted faster, nothing changes.
    """
    tables = {table.name: table for table in problem.tables}
    on_device: dict[int, list[Table]] = defaultdict(list)
    for name, placements in plan.by_table().items():
        devices = {d for p in placements for d in p.devices}
        # A table on several devices would need the same load factor on all of them.
        if len(devices) == 1 and tables[name].in_host_memory:
            on_device[min(devices)].append(tables[name])
    # A device waits for fetches or not, and its tiers follow from that. The plan that is faster counts.
    weights = (None, 1.0) if problem.job.fetches_ahead else (None,)
    found = [_filled(plan, problem, model, on_device, weight) for weight in weights]
    return least(found, lambda x: x[1].provenance["predicted_ms"])


def _filled(
    plan: Plan,
    problem: Problem,
    model: CostModel,
    on_device: Mapping[int, Sequence[Table]],
    weight: float | None,
) -> tuple[Problem, Plan]:
    """The problem and plan of `filled`, with tables by the one device that they are on.

    weight: of fetches and updates.
    """
    free = [may - used for may, used in zip(held_bytes(problem), used_bytes(plan, problem), strict=True)]
    factors: dict[str, float] = {}
    for device, here in on_device.items():
        # Caches are allocated in whole sets: less than one of each op's is empty.
        widest = {
            _op_of(t): CACHE_SET_ROWS * (t.dim * PRECISION_BYTES[t.precision] + CACHED_ROW_BYTES)
            for t in sorted(here, key=lambda t: t.dim)
        }
        budget = sum(_rows_bytes(table, problem) for table in here) + free[device] - sum(widest.values())
        choices = choices_of(here, problem, model, moves=False)
        tiers = shared_out(choices if weight is None else _weighed(choices, weight), budget)
        factors |= {tier.table.name: tier.table.load_factor for tier in tiers}
    # Placements name tables, so they change with them.
    better = with_load_factors(problem, factors)
    moved = rebind_tables(plan, better).placements
    # Larger caches make larger buffers, so what is free alone does not say that it fits.
    try:
        require_fits(Plan(moved), better)
        faster = priced(moved, better, model.for_problem(better), **plan.provenance)
    except Infeasible:
        return problem, plan
    is_faster = faster.provenance["predicted_ms"] < plan.provenance["predicted_ms"]
    return (better, faster) if is_faster else (problem, plan)
