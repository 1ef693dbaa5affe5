"""Memory tiers: the rows of each table that lie in device memory, if not all tables fit there.

The load factor of a table says it (types.Table): 1 has all rows in device memory, a share has all rows in
host memory and a cache of so many on the device, 0 has none there. TorchRec calls the kernels `fused`,
`fused_uvm_caching` and `fused_uvm`. tables/host_rows.py tells what then crosses the link to host memory.

Memory goes where a byte of it keeps most bytes off the link (RecShard, arXiv 2201.10095). It is counted over
all devices together, before the search for places. At first less of it is shared out than there is, which
leaves searches room to even out devices. After the search, a device's free memory goes to its tables.

Shapes: N sizes of a cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.tiers import BELOW, TIERS
from shardcore.core.types import PRECISION_BYTES, Plan, Problem, Shard, Table
from shardcore.core.validation import require
from shardcore.cost.model import CostModel
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.search.decisions.driver import Decision, Found, Outcome, Proposal
from shardcore.search.decisions.towers import as_planned
from shardcore.search.state.shards import priced
from shardcore.step import access
from shardcore.step.kinds import WHOLE_ROWS, Layout, layout_of
from shardcore.step.memory import gib, held_bytes, host_bytes, require_fits, resident_bytes, used_bytes
from shardcore.step.memory_account import local_batch_bytes, table_bytes
from shardcore.tables.host_rows import link_bytes

SHARES = (1.0, 0.97, 0.9, 0.75, 0.5)
"""Shares of the memory for rows that are given to tables before the search."""
_SIZES = 129
"""Sizes of a cache that are weighed for each table."""


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
                share_of.setdefault(tiered(problem, (share - 1) * for_rows), share)
            # Smaller shares fit even less.
            except Infeasible:
                if not share_of:
                    raise
                break
        for i, (proposed, share) in enumerate(share_of.items()):
            words = f"{share:.0%} of the memory for rows shared out first"
            yield Proposal(words=words, problem=proposed, more=len(share_of) - 1 - i)

    def adopt(self, proposal: Proposal, found: Found | None, model: CostModel) -> Found | None:
        if found is None:
            return None
        # Towers are in the plan, not in the problem: load factors need to fit with them.
        filled_up, plan = filled(found.plan, as_planned(found.plan, found.problem), model)
        problem = replace(found.problem, tables=filled_up.tables)
        return replace(found, problem=problem, plan=plan, ms=plan.provenance["predicted_ms"])

    def facts(self, outcome: Outcome) -> Mapping[str, Any]:
        problem = outcome.found.problem if outcome.found else outcome.proposal.problem
        return {
            "tables in host memory": sum(table.in_host_memory for table in problem.tables),
            "MB over the link": sum(tier.link_bytes for tier in tiers_of(problem)) / 1e6,
        }


@dataclass(frozen=True)
class Tier:
    """The memories of a table's rows.

    table: the table with its load factor.
    device_bytes: bytes of weights, cache and optimizer state in device memory.
    host_bytes: bytes of weights and state in host memory.
    link_bytes: bytes that cross the link in a step.
    """

    table: Table
    device_bytes: int
    host_bytes: int
    link_bytes: float


def tiers_of(problem: Problem) -> list[Tier]:
    """The tiers of a problem's tables by their load factors, in its order."""
    return [_tier_of(table, problem) for table in problem.tables]


def link_ms(problem: Problem) -> float:
    """ms of a step in which rows cross the link, if all devices have as much of it: no plan has less."""
    gbps = {memory.tier: memory.gbps for memory in problem.topology.memory}
    total = sum(tier.link_bytes / gbps[tier.table.tier] for tier in tiers_of(problem) if tier.link_bytes)
    return total / len(problem.topology) / 1e6


def gains_ms(problem: Problem, gibs: Sequence[float]) -> list[float]:
    """ms of link that so many GiB more of device memory would save in a step, all devices together."""
    now = link_ms(tiered(problem))
    return [now - link_ms(tiered(problem, more * 2**30)) for more in gibs]


def tiered(problem: Problem, more_bytes: float = 0) -> Problem:
    """The problem with the load factors that make the least bytes cross the link. It forgets its own.

    more_bytes: device memory, all devices together, beyond what the problem has. Negative: less.

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
    # Rows of all caches are as wide as the widest: any table may have one.
    cached = with_load_factors(problem, {table.name: 0.5 for table in problem.tables})
    choices = [choices_of(table, cached) for table in problem.tables]
    try:
        _require_budget(choices, budget, problem)
        return _on_hosts(water_filled(choices, budget), problem)
    except Infeasible as error:
        # A cache leaves its whole table in host memory. So what has no room there may fit without caches.
        try:
            return _on_hosts(_without_caches(problem, budget), problem)
        except Infeasible:
            raise error from None


def _without_caches(problem: Problem, budget: float) -> list[Tier]:
    """The largest tables leave device memory as a whole, until the others fit."""
    choices = {table.name: choices_of(table, problem) for table in problem.tables}
    _require_budget(list(choices.values()), budget, problem)
    # From no rows of any table, the smallest tables enter first.
    tiers = {name: rising[0] for name, rising in choices.items()}
    left = budget - sum(tier.device_bytes for tier in tiers.values())
    for table in sorted(problem.tables, key=lambda t: t.bytes):
        none, whole = choices[table.name][0], choices[table.name][-1]
        left -= whole.device_bytes - none.device_bytes
        if left < 0:
            break
        tiers[table.name] = whole
    return list(tiers.values())


def _require_budget(choices: Sequence[Sequence[Tier]], budget: float, problem: Problem) -> None:
    """Raise Infeasible if device memory does not even hold tables that have no rows there."""
    if (missing := sum(rising[0].device_bytes for rising in choices) - budget) > 0:
        raise Infeasible(
            f"problem {problem.name!r} lacks at least {gib(missing)} of device memory for "
            "inputs, outputs and optimizer state of rows, with all rows in host memory: it "
            "needs more devices, more memory, or a smaller batch"
        )


def _on_hosts(tiers: Sequence[Tier], problem: Problem) -> Problem:
    """The problem with these tiers. Raises Infeasible if host memory does not hold them."""
    in_host, memory = sum(tier.host_bytes for tier in tiers), problem.topology.memory[0]
    if in_host > (capacity := len(problem.topology.hosts) * memory.bytes):
        raise Infeasible(
            f"problem {problem.name!r} would have {gib(in_host)} of tables in {TIERS[memory.tier].words}, "
            f"which may hold {gib(capacity)}; it needs {gib(in_host - capacity)} more of it, or "
            "more device memory"
        )
    return with_load_factors(problem, {tier.table.name: tier.table.load_factor for tier in tiers})


def in_device_memory(problem: Problem) -> Problem:
    """The problem with all rows in device memory. Those that leave it go to the fastest tier below."""
    tier = next((memory.tier for memory in problem.topology.memory), BELOW[0])
    return replace(problem, tables=tuple(replace(t, load_factor=1.0, tier=tier) for t in problem.tables))


def with_load_factors(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """The problem with load factors of some tables, by name."""
    tables = (replace(t, load_factor=factors.get(t.name, t.load_factor)) for t in problem.tables)
    return replace(problem, tables=tuple(tables))


def tier_bytes(problem: Problem) -> float:
    """Bytes of device memory that weights, caches and state may take, on all devices together."""
    # A table's peak has buffers, too. These are needed wherever its rows are.
    rows = sum(_rows_bytes(table, problem) for table in problem.tables)
    peaks, local = sum(table_bytes(t, problem) for t in problem.tables), local_batch_bytes(problem)
    return sum(max(0, capacity - local) for capacity in held_bytes(problem)) - (peaks - rows)


def _tier_of(table: Table, problem: Problem) -> Tier:
    link = 0.0
    if table.in_host_memory:
        cached = np.array([table.cached(table.rows)])
        link = float(link_bytes(table, cached, problem.global_batch, problem.optimizer).sum())
    kinds = _kinds_of(table, problem)
    # Kinds over local batches are replicas: every device has the table.
    copies = len(problem.topology) if kinds and all(layout.local_batch for layout in kinds) else 1
    on_host = host_bytes(Shard.whole(table), problem)
    return Tier(table, copies * _rows_bytes(table, problem), on_host, link)


def _rows_bytes(table: Table, problem: Problem) -> int:
    """Bytes of a whole table in device memory, if its device has the widest table of its op, too."""
    resident = sum(resident_bytes(WHOLE_ROWS, Shard.whole(table), problem))
    if not 0 < table.load_factor < 1:
        return resident
    # All rows of an op's cache are as wide as its widest table.
    columns = _cache_widths(problem).get(_op_of(table), table.dim) - table.dim
    return resident + table.cached(table.rows) * columns * PRECISION_BYTES[table.precision]


@lru_cache(maxsize=4)
def _cache_widths(problem: Problem) -> Mapping[tuple[str, bool, str], int]:
    """Dim of the widest table with a cache, by op."""
    # By rising dim, so that the widest of each op is the one that stays.
    cached = sorted((t for t in problem.tables if 0 < t.load_factor < 1), key=lambda t: t.dim)
    return {_op_of(table): table.dim for table in cached}


def _op_of(table: Table) -> tuple[str, bool, str]:
    return table.collection, table.sequence, table.precision


def _kinds_of(table: Table, problem: Problem) -> list[Layout]:
    """The kinds that the problem's constraints ask for. Empty if they ask for none."""
    return [layout_of(kind) for kind in problem.kinds_of.get(table.name, ())]


def choices_of(table: Table, problem: Problem) -> list[Tier]:
    """The tiers that a table may have, by rising device bytes: no rows, a cache of some size, or all.

    All only, if the problem asks for kinds that TorchRec does not cache.
    """
    whole = _tier_of(replace(table, load_factor=1.0), problem)
    if (kinds := _kinds_of(table, problem)) and not any(layout.caches for layout in kinds):
        return [whole]
    # By ratio: the first cached rows are the hottest, so they save most.
    sizes = np.unique(np.geomspace(1, table.rows, _SIZES).astype(int))
    least = [0] * bool(TIERS[table.tier].kernel)
    # Nothing crosses the link for a table without lookups, so it needs no cache.
    used = access.lookups(table, problem.global_batch)
    sizes = np.append(least, sizes[sizes < table.rows] if used else [])
    link = link_bytes(table, sizes, problem.global_batch, problem.optimizer).sum(1)
    choices = []
    for size, n_bytes in zip(sizes.tolist(), link.tolist(), strict=True):
        cached = replace(table, load_factor=size / table.rows)
        on_host = host_bytes(Shard.whole(cached), problem)
        choices.append(Tier(cached, _rows_bytes(cached, problem), on_host, n_bytes))
    return [*choices, whole]


def water_filled(choices: Sequence[Sequence[Tier]], budget: float) -> list[Tier]:
    """One tier of each table, with the least bytes over the link together under a budget of device bytes.

    choices: tiers of each table, the first with the fewest device bytes.

    Exact but for one step of one table: steps go by bytes saved a byte, along each table's lower
    convex hull. Of the first that does not fit, a part is used.
    """
    hulls = [_hull(tiers) for tiers in choices]
    # One list over all tables, to take the steps that save most a byte first.
    steps = [
        (-_saved(hull[i], hull[i + 1]), table, i)
        for table, hull in enumerate(hulls)
        for i in range(len(hull) - 1)
    ]
    filled, stuck = [hull[0] for hull in hulls], set[int]()
    left = budget - sum(tier.device_bytes for tier in filled)
    for _, table, i in sorted(steps):
        now, then = filled[table], hulls[table][i + 1]
        if table in stuck:
            continue
        if then.device_bytes - now.device_bytes > left:
            # Later steps of this table need this one first.
            stuck.add(table)
            fitting = [tier for tier in choices[table] if tier.device_bytes <= now.device_bytes + left]
            then = min(fitting, key=lambda tier: tier.link_bytes)
            if then.link_bytes >= now.link_bytes:
                continue
        left -= then.device_bytes - now.device_bytes
        filled[table] = then
    return filled


def _hull(tiers: Sequence[Tier]) -> list[Tier]:
    """The lower convex hull of link bytes over device bytes."""
    hull: list[Tier] = []
    for tier in sorted(tiers, key=lambda t: (t.device_bytes, t.link_bytes)):
        if hull and tier.link_bytes >= hull[-1].link_bytes:  # more memory for nothing
            continue
        # Drop tiers above the line from their neighbour before to this one.
        while len(hull) > 1 and _saved(hull[-2], tier) >= _saved(hull[-2], hull[-1]):
            hull.pop()
        hull.append(tier)
    return hull


def _saved(a: Tier, b: Tier) -> float:
    """Bytes off the link that a byte of device memory saves."""
    return (a.link_bytes - b.link_bytes) / (b.device_bytes - a.device_bytes)


def filled(plan: Plan, problem: Problem, model: CostModel) -> tuple[Problem, Plan]:
    """The problem and plan after a device's free memory went to tables that are only there.

    Load factors of other tables stay. If the step is not predicted faster, nothing changes.
    """
    homes: dict[str, set[int]] = defaultdict(set)
    for placement in plan.placements:
        homes[placement.shard.table.name].update(placement.devices)
    tables = {table.name: table for table in problem.tables}
    on_device: dict[int, list[Table]] = defaultdict(list)
    for name, devices in homes.items():
        # A table on several devices would need the same load factor on all of them.
        if len(devices) == 1 and tables[name].in_host_memory:
            on_device[min(devices)].append(tables[name])
    free = [may - used for may, used in zip(held_bytes(problem), used_bytes(plan, problem), strict=True)]
    factors: dict[str, float] = {}
    for device, here in on_device.items():
        budget = sum(_rows_bytes(table, problem) for table in here) + free[device]
        tiers = water_filled([choices_of(table, problem) for table in here], budget)
        factors |= {tier.table.name: tier.table.load_factor for tier in tiers}
    # Placements name tables, so they change with them.
    better = with_load_factors(problem, factors)
    moved = rebind_tables(plan, better).placements
    kept = {k: v for k, v in plan.provenance.items() if k not in ("setting", "predicted_ms")}
    # Larger caches make larger buffers, so what is free alone does not say that it fits.
    try:
        require_fits(Plan(moved), better)
        faster = priced(moved, better, model.for_problem(better), **kept)
    except Infeasible:
        return problem, plan
    is_faster = faster.provenance["predicted_ms"] < plan.provenance["predicted_ms"]
    return (better, faster) if is_faster else (problem, plan)
