"""Memory tiers: which share of each table's rows lies in device memory, if not all tables fit there.

A table is run by one of TorchRec's kernels: `fused` with all rows in device memory, `fused_uvm_caching` with
all rows in host memory and a cache of some in device memory, or `fused_uvm` with none.

Bytes that cross the slow link each step:

- cached: a row that misses is fetched, and written back later. Of a row that is touched, the optimizer's
  state of cells is read and written, for FBGEMM does not cache it. State of rows is always in device memory.
- in host memory alone: each lookup reads its row, and the update reads and writes each row that it touches.

Memory goes where a byte of it keeps most bytes off the link (RecShard, arXiv 2201.10095). It is counted over
all devices together: a decision before the search for places, which it does not replace.

Shapes: N sizes of a cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.errors import Infeasible, ShardCoreError
from shardcore.layouts import WHOLE_ROWS
from shardcore.memory import STATE_BYTES, bytes_as, free_bytes, gib
from shardcore.tables import access
from shardcore.tables.heat import Heat, heat_of
from shardcore.types import PRECISION_BYTES, Problem, Shard, Table

CACHED_ROW_BYTES = 16
"""Bytes a cached row beside its weights: its id and its last batch, 8 each (lxu_cache_state and lxu_state in
FBGEMM's split_table_batched_embeddings_ops_training.py)."""
KNOWN_ROW_BYTES = 4
"""Bytes a row of a cached table in device memory, whether it is cached: FBGEMM's map of rows to tables."""
_SIZES = 129
"""Sizes of a cache that are weighed for each table."""


@dataclass(frozen=True)
class SlowLink:
    """Between a device and its host's memory.

    gbps: GB/s of each device. Given, not measured.
    host_bytes: of all hosts together that tables may take.
    """

    gbps: float
    host_bytes: float

    def __post_init__(self) -> None:
        for name, unit in (("gbps", "GB/s"), ("host_bytes", "bytes")):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ShardCoreError(f"slow link has {name} {value}; it needs {unit} above 0")


@dataclass(frozen=True)
class Tier:
    """Where a table's rows lie.

    cached_rows: in device memory. All of them: the table is run as if there were no other.
    device_bytes: of weights, and optimizer state of cells, in device memory.
    host_bytes: of those in host memory.
    slow_bytes: that cross the slow link in a step.
    """

    table: Table
    cached_rows: int
    device_bytes: int
    host_bytes: int
    slow_bytes: float

    @property
    def load_factor(self) -> float:
        return self.cached_rows / self.table.rows

    @property
    def kernel(self) -> str:
        """TorchRec's compute kernel."""
        if self.cached_rows == self.table.rows:
            return "fused"
        return "fused_uvm_caching" if self.cached_rows else "fused_uvm"


@dataclass(frozen=True)
class Tiers:
    """The tiers of a problem's tables, in its order.

    link: which they were decided for.
    devices: that share its load.
    """

    tiers: tuple[Tier, ...]
    link: SlowLink
    devices: int

    @property
    def slow_bytes(self) -> float:
        return sum(tier.slow_bytes for tier in self.tiers)

    @property
    def slow_ms(self) -> float:
        """Of a step, if all devices have as much of it: no plan has less."""
        return self.slow_bytes / self.devices / self.link.gbps / 1e6

    @property
    def device_bytes(self) -> int:
        return sum(tier.device_bytes for tier in self.tiers)


def decide(problem: Problem, link: SlowLink, more_bytes: float = 0) -> Tiers:
    """The tiers of a problem's tables with the least bytes over the slow link.

    more_bytes: of device memory, all devices together, beyond what the problem has.

    Raises Infeasible if device memory does not even hold the inputs and outputs of a step, and if host memory
    does not hold the tables that are cached. Raises ShardCoreError as `heat_of` does.
    """
    budget = tier_bytes(problem) + more_bytes
    whole = [_whole(table, problem) for table in problem.tables]
    if sum(tier.device_bytes for tier in whole) <= budget:
        return Tiers(tuple(whole), link, len(problem.topology))
    left = _beside_maps(problem, budget)
    tiers = water_filled([_choices(table, problem) for table in problem.tables], left)
    return _within_host(tiers, problem, link)


def gains_ms(problem: Problem, link: SlowLink, gibs: Sequence[float]) -> list[float]:
    """ms of slow link that so many GiB more of device memory would save in a step, all devices together."""
    now = decide(problem, link).slow_ms
    return [now - decide(problem, link, more * 2**30).slow_ms for more in gibs]


def largest_to_host(problem: Problem, link: SlowLink) -> Tiers:
    """What is usual instead: the largest tables go to host memory until the others fit.

    Raises Infeasible if host memory does not hold them.
    """
    left, tiers = tier_bytes(problem), {}
    for table in sorted(problem.tables, key=lambda t: t.bytes):
        whole = _whole(table, problem)
        tiers[table.name] = whole if whole.device_bytes <= left else _choices(table, problem)[0]
        left = left - whole.device_bytes if whole.device_bytes <= left else 0
    return _within_host([tiers[table.name] for table in problem.tables], problem, link)


def one_load_factor(problem: Problem, link: SlowLink) -> Tiers:
    """What is simple instead: every table is cached, with the largest load factor of all that fits.

    Raises Infeasible as `decide` does.
    """
    left = _beside_maps(problem, tier_bytes(problem))
    choices = [_choices(table, problem) for table in problem.tables]

    def at(factor: float) -> list[Tier]:
        return [max((tier for tier in of if tier.load_factor <= factor), key=lambda t: t.cached_rows)
                for of in choices]

    factors = sorted({tier.load_factor for of in choices for tier in of})
    fits = bisect_right(factors, left, key=lambda f: sum(tier.device_bytes for tier in at(f)))
    return _within_host(at(factors[max(0, fits - 1)]), problem, link)


def tier_bytes(problem: Problem) -> float:
    """Bytes of device memory that weights, and state of cells, may take, on all devices together."""
    held = sum(_whole(table, problem).device_bytes for table in problem.tables)
    taken = sum(bytes_as(WHOLE_ROWS, Shard.whole(table), problem) for table in problem.tables)
    return sum(max(0, free) for free in free_bytes(problem)) - (taken - held)


def _beside_maps(problem: Problem, budget: float) -> float:
    """What is left of a budget of device bytes, all maps of rows set aside: any table may end up cached."""
    left = budget - KNOWN_ROW_BYTES * sum(table.rows for table in problem.tables)
    if left < 0:
        raise Infeasible(f"problem {problem.name!r} lacks at least {gib(-left)} of device memory for rows, "
                         "beside the inputs and outputs of a step and FBGEMM's maps of rows: it needs more "
                         "devices, more memory, or a smaller batch")
    return left


def _within_host(tiers: Sequence[Tier], problem: Problem, link: SlowLink) -> Tiers:
    in_host = sum(tier.host_bytes for tier in tiers)
    if in_host > link.host_bytes:
        raise Infeasible(f"problem {problem.name!r} would have {gib(in_host)} of tables in host memory, "
                         f"which may hold {gib(link.host_bytes)}; it needs "
                         f"{gib(in_host - link.host_bytes)} more of it, or more device memory")
    return Tiers(tuple(tiers), link, len(problem.topology))


def water_filled(choices: Sequence[Sequence[Tier]], budget: float) -> list[Tier]:
    """One tier of each table, with the least slow bytes together under a budget of device bytes.

    choices: of each table, the first without device bytes.

    Exact but for one step of one table: steps are taken in the order of bytes saved a byte, along each
    table's lower convex hull, and the first that does not fit is taken in part.
    """
    hulls = [_hull(of) for of in choices]
    steps = sorted(((of[i].slow_bytes - of[i + 1].slow_bytes)
                    / (of[i + 1].device_bytes - of[i].device_bytes), -table, -i)
                   for table, of in enumerate(hulls) for i in range(len(of) - 1))[::-1]
    found, left, stuck = [of[0] for of in hulls], budget, set[int]()
    for _, table, i in steps:
        now, then = found[-table], hulls[-table][1 - i]
        if -table in stuck:
            continue
        if then.device_bytes - now.device_bytes > left:
            stuck.add(-table)
            then = min((tier for tier in choices[-table] if tier.device_bytes <= now.device_bytes + left),
                       key=lambda tier: tier.slow_bytes)
            if then.slow_bytes >= now.slow_bytes:
                continue
        left -= then.device_bytes - now.device_bytes
        found[-table] = then
    return found


def _hull(tiers: Sequence[Tier]) -> list[Tier]:
    """The lower convex hull of slow bytes over device bytes."""
    hull: list[Tier] = []
    for tier in sorted(tiers, key=lambda t: (t.device_bytes, t.slow_bytes)):
        if hull and tier.slow_bytes >= hull[-1].slow_bytes:
            continue
        while len(hull) > 1 and _saved(hull[-2], tier) >= _saved(hull[-2], hull[-1]):
            hull.pop()
        hull.append(tier)
    return hull


def _saved(a: Tier, b: Tier) -> float:
    return (a.slow_bytes - b.slow_bytes) / (b.device_bytes - a.device_bytes)


def _whole(table: Table, problem: Problem) -> Tier:
    a_cell, _ = STATE_BYTES[problem.optimizer]
    return Tier(table, table.rows, table.bytes + table.rows * table.dim * a_cell, 0, 0.0)


def _choices(table: Table, problem: Problem) -> list[Tier]:
    """What a table may take: nothing, a cache of some size, or all."""
    whole = _whole(table, problem)
    lookups = access.lookups(table, problem.global_batch)
    if lookups == 0:  # nothing crosses the link
        return [Tier(table, 0, 0, whole.device_bytes, 0.0), whole]
    row = table.dim * PRECISION_BYTES[table.precision]
    a_cell, _ = STATE_BYTES[problem.optimizer]
    heat: Heat = heat_of([table], problem.global_batch, unseen=True)[0]
    sizes = np.unique(np.geomspace(1, table.rows, _SIZES).astype(int))
    sizes = sizes[sizes < table.rows]
    state = heat.unique_rows * table.dim * a_cell
    cached = 2 * (heat.misses(sizes) * row + state)
    alone = (lookups / table.dedup + 2 * heat.unique_rows) * row + 2 * state
    return [Tier(table, 0, 0, whole.device_bytes, alone),
            *(Tier(table, int(size), int(size) * (row + CACHED_ROW_BYTES), whole.device_bytes, float(slow))
              for size, slow in zip(sizes, cached, strict=True)), whole]
