"""Memory tiers: which share of each table's rows lies in device memory, if not all tables fit there.

The load factor of a table decides it (types.Table): 1 has all rows in device memory, a share has all rows in
host memory and a cache of so many on the device, 0 has none there. TorchRec calls the kernels `fused`,
`fused_uvm_caching` and `fused_uvm`. What then crosses the link to host memory is in tables/host_rows.py.

Memory goes where a byte of it keeps most bytes off the link (RecShard, arXiv 2201.10095). It is counted over
all devices together: a decision before the search for places. search/decisions/tiers.py does both.

Shapes: N sizes of a cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.tiers import BELOW, TIERS
from shardcore.core.types import Problem, Shard, Table
from shardcore.step import access
from shardcore.step.kinds import WHOLE_ROWS, Layout, layout_of
from shardcore.step.memory import gib, held_bytes, host_bytes, resident_bytes
from shardcore.step.memory_account import local_batch_bytes, table_bytes
from shardcore.tables.host_rows import link_bytes

_SIZES = 129
"""Sizes of a cache that are weighed for each table."""


@dataclass(frozen=True)
class Tier:
    """Where a table's rows lie.

    table: with the load factor.
    device_bytes: of weights, cache and optimizer state in device memory.
    host_bytes: of weights and state in host memory.
    link_bytes: that cross the link in a step.
    """

    table: Table
    device_bytes: int
    host_bytes: int
    link_bytes: float


@dataclass(frozen=True)
class Tiers:
    """The tiers of a problem's tables, in its order.

    problem: with their load factors.
    """

    problem: Problem
    tiers: tuple[Tier, ...]

    @property
    def link_bytes(self) -> float:
        return sum(tier.link_bytes for tier in self.tiers)

    @property
    def link_ms(self) -> float:
        """Of a step, if all devices have as much of it: no plan has less."""
        topology = self.problem.topology
        return (
            sum(
                tier.link_bytes / topology.memory_of(tier.table.tier).gbps
                for tier in self.tiers
                if tier.link_bytes
            )
            / len(topology)
            / 1e6
        )

    @property
    def device_bytes(self) -> int:
        return sum(tier.device_bytes for tier in self.tiers)


def decide(problem: Problem, more_bytes: float = 0) -> Tiers:
    """The tiers of a problem's tables with the least bytes over the link. It forgets their load factors.

    more_bytes: of device memory, all devices together, beyond what the problem has. Negative: less.

    Raises Infeasible if device memory does not even hold the inputs and outputs of a step, and if host memory
    does not hold the tables that are there. Raises ShardCoreError for a problem without host memory, and as
    `heat_of` does.
    """
    problem = below(in_device_memory(problem))
    budget = tier_bytes(problem) + more_bytes
    whole = [tier_of(table, problem) for table in problem.tables]
    if sum(tier.device_bytes for tier in whole) <= budget:
        return Tiers(problem, tuple(whole))
    _require_host_memory(problem)
    # Rows of all caches are as wide as the widest: any table may have one.
    cached = with_load_factors(problem, {table.name: 0.5 for table in problem.tables})
    choices = [choices_of(table, cached) for table in problem.tables]
    try:
        return _within_host(water_filled(choices, _beside_none(problem, choices, budget)), problem)
    except Infeasible as error:
        # A cache leaves its whole table in host memory. So what has no room there may fit without caches.
        try:
            return _largest_to_host(problem, budget)
        except Infeasible:
            raise error from None


def tiers_of(problem: Problem) -> Tiers:
    """The tiers by the load factors that the problem has."""
    return Tiers(problem, tuple(tier_of(table, problem) for table in problem.tables))


def gains_ms(problem: Problem, gibs: Sequence[float]) -> list[float]:
    """ms of link that so many GiB more of device memory would save in a step, all devices together."""
    now = decide(problem).link_ms
    return [now - decide(problem, more * 2**30).link_ms for more in gibs]


def largest_to_host(problem: Problem) -> Tiers:
    """What is usual instead: the largest tables go to host memory until the others fit.

    Raises as `decide` does.
    """
    problem = below(in_device_memory(problem))
    _require_host_memory(problem)
    return _largest_to_host(problem, tier_bytes(problem))


def _largest_to_host(problem: Problem, budget: float) -> Tiers:
    """budget: of device memory."""
    choices = {table.name: choices_of(table, problem) for table in problem.tables}
    left = _beside_none(problem, list(choices.values()), budget)
    found = {name: of[0] for name, of in choices.items()}
    left -= sum(tier.device_bytes for tier in found.values())
    for table in sorted(problem.tables, key=lambda t: t.bytes):
        none, whole = choices[table.name][0], choices[table.name][-1]
        left -= whole.device_bytes - none.device_bytes
        if left < 0:
            break
        found[table.name] = whole
    return _within_host(list(found.values()), problem)


def one_load_factor(problem: Problem) -> Tiers:
    """What is simple instead: every table is cached, with the largest load factor of all that fits.

    Raises as `decide` does.
    """
    problem = below(in_device_memory(problem))
    _require_host_memory(problem)
    choices = [choices_of(table, problem) for table in problem.tables]
    left = _beside_none(problem, choices, tier_bytes(problem))

    def at(factor: float) -> list[Tier]:
        return [
            max(
                (tier for tier in of if tier.table.load_factor <= factor),
                key=lambda t: t.table.load_factor,
                default=of[0],
            )
            for of in choices
        ]

    factors = sorted({tier.table.load_factor for of in choices for tier in of})
    fits = bisect_right(factors, left, key=lambda f: sum(tier.device_bytes for tier in at(f)))
    return _within_host(at(factors[max(0, fits - 1)]), problem)


def in_device_memory(problem: Problem) -> Problem:
    """The problem with all rows in device memory."""
    return with_load_factors(problem, {table.name: 1.0 for table in problem.tables})


def below(problem: Problem) -> Problem:
    """The problem with the fastest tier that its topology gives, for all rows that leave device memory."""
    tier = next((memory.tier for memory in problem.topology.memory), BELOW[0])
    if all(table.tier == tier for table in problem.tables):
        return problem
    return replace(problem, tables=tuple(replace(table, tier=tier) for table in problem.tables))


def with_load_factors(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """The problem with load factors of some tables, by name."""
    return replace(
        problem,
        tables=tuple(
            replace(t, load_factor=factors[t.name])
            if factors.get(t.name, t.load_factor) != t.load_factor
            else t
            for t in problem.tables
        ),
    )


def tier_bytes(problem: Problem) -> float:
    """Bytes of device memory that weights, caches and state may take, on all devices together."""
    held = sum(_rows_bytes(table, problem) for table in problem.tables)
    taken, local = sum(table_bytes(t, problem) for t in problem.tables), local_batch_bytes(problem)
    return sum(max(0, may_hold - local) for may_hold in held_bytes(problem)) - (taken - held)


def tier_of(table: Table, problem: Problem) -> Tier:
    """Where its rows lie by the load factor that it has."""
    shard = Shard.whole(table)
    cached = np.array([table.cached(table.rows)])
    link = (
        link_bytes(table, cached, problem.global_batch, problem.optimizer).sum()
        if table.in_host_memory
        else 0.0
    )
    asked = _kinds_of(table, problem)
    on_devices = len(problem.topology) if asked and all(layout.local_batch for layout in asked) else 1
    return Tier(table, on_devices * _rows_bytes(table, problem), host_bytes(shard, problem), float(link))


def _rows_bytes(table: Table, problem: Problem) -> int:
    return sum(resident_bytes(WHOLE_ROWS, Shard.whole(table), problem))


def _kinds_of(table: Table, problem: Problem) -> list[Layout]:
    """The kinds that the problem's constraints ask for. Empty if they ask for none."""
    return [layout_of(kind) for kind in problem.kinds_of.get(table.name, ())]


def choices_of(table: Table, problem: Problem) -> list[Tier]:
    """What a table may have in device memory: no rows, a cache of some size, or all, in this order.

    All only, if the problem asks for kinds that TorchRec does not cache.
    """
    whole = replace(table, load_factor=1.0)
    if (asked := _kinds_of(table, problem)) and not any(layout.caches for layout in asked):
        return [tier_of(whole, problem)]
    sizes = np.unique(np.geomspace(1, table.rows, _SIZES).astype(int))
    # Nothing crosses the link for a table without lookups, so it needs no cache.
    least = [0] * bool(TIERS[table.tier].kernel)
    sizes = np.append(least, sizes[sizes < table.rows] if access.lookups(table, problem.global_batch) else [])
    link = link_bytes(table, sizes, problem.global_batch, problem.optimizer).sum(1)
    found = []
    for size, n_bytes in zip(sizes.tolist(), link.tolist(), strict=True):
        tiered = replace(table, load_factor=size / table.rows)
        shard = Shard.whole(tiered)
        found.append(Tier(tiered, _rows_bytes(tiered, problem), host_bytes(shard, problem), n_bytes))
    return [*found, tier_of(whole, problem)]


def _require_host_memory(problem: Problem) -> None:
    if not problem.topology.memory:
        raise ShardCoreError(
            f"problem {problem.name!r} does not say what hosts have; its topology needs "
            f"memory of tier {' or '.join(map(repr, BELOW))}"
        )


def _beside_none(problem: Problem, choices: Sequence[Sequence[Tier]], budget: float) -> float:
    """A budget of device bytes. Raises Infeasible if it does not even hold tables that have no rows there."""
    if (missing := sum(of[0].device_bytes for of in choices) - budget) > 0:
        raise Infeasible(
            f"problem {problem.name!r} lacks at least {gib(missing)} of device memory for "
            "inputs, outputs and optimizer state of rows, with all rows in host memory: it "
            "needs more devices, more memory, or a smaller batch"
        )
    return budget


def _within_host(tiers: Sequence[Tier], problem: Problem) -> Tiers:
    in_host, hosts = sum(tier.host_bytes for tier in tiers), len(problem.topology.hosts)
    memory = problem.topology.memory[0]
    if in_host > (may_hold := hosts * memory.bytes):
        raise Infeasible(
            f"problem {problem.name!r} would have {gib(in_host)} of tables in "
            f"{TIERS[memory.tier].words}, "
            f"which may hold {gib(may_hold)}; it needs {gib(in_host - may_hold)} more of it, or "
            "more device memory"
        )
    factors = {tier.table.name: tier.table.load_factor for tier in tiers}
    return Tiers(with_load_factors(problem, factors), tuple(tiers))


def water_filled(choices: Sequence[Sequence[Tier]], budget: float) -> list[Tier]:
    """One tier of each table, with the least bytes over the link together under a budget of device bytes.

    choices: of each table, the first with the fewest device bytes.

    Exact but for one step of one table: steps are taken in the order of bytes saved a byte, along each
    table's lower convex hull, and the first that does not fit is taken in part.
    """
    hulls = [_hull(of) for of in choices]
    steps = sorted(
        (
            (of[i].link_bytes - of[i + 1].link_bytes) / (of[i + 1].device_bytes - of[i].device_bytes),
            -table,
            -i,
        )
        for table, of in enumerate(hulls)
        for i in range(len(of) - 1)
    )[::-1]
    found, stuck = [of[0] for of in hulls], set[int]()
    left = budget - sum(tier.device_bytes for tier in found)
    for _, table, i in steps:
        now, then = found[-table], hulls[-table][1 - i]
        if -table in stuck:
            continue
        if then.device_bytes - now.device_bytes > left:
            stuck.add(-table)
            then = min(
                (tier for tier in choices[-table] if tier.device_bytes <= now.device_bytes + left),
                key=lambda tier: tier.link_bytes,
            )
            if then.link_bytes >= now.link_bytes:
                continue
        left -= then.device_bytes - now.device_bytes
        found[-table] = then
    return found


def _hull(tiers: Sequence[Tier]) -> list[Tier]:
    """The lower convex hull of link bytes over device bytes."""
    hull: list[Tier] = []
    for tier in sorted(tiers, key=lambda t: (t.device_bytes, t.link_bytes)):
        if hull and tier.link_bytes >= hull[-1].link_bytes:
            continue
        while len(hull) > 1 and _saved(hull[-2], tier) >= _saved(hull[-2], hull[-1]):
            hull.pop()
        hull.append(tier)
    return hull


def _saved(a: Tier, b: Tier) -> float:
    return (a.link_bytes - b.link_bytes) / (b.device_bytes - a.device_bytes)
