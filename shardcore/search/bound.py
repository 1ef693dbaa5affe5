"""A lower bound on the cost of any plan, where the model allows a proof, and an estimate.

A step takes max over devices of (compute + backward exchange), plus the longest forward exchange. Each way to
cut a table adds work to devices and bytes to exchanges. Both add up over tables. So no plan is cheaper than
the least work of all tables divided by the devices' speeds, with exchanges of evenly divided bytes. The
cheapest way to cut a table is a shortest path over widths.

Nor is a plan cheaper than its most expensive shard. So the bound is the least time T in which the work fits
when no shard takes longer than T.

The proof counts a shard at its cost alone, less the launch that fusing saves (model.BoundableCostModel). For
plans of one kind it counts more: the rate of an op with the mean load. Some device has at least that.

The estimate prices all tables as one op, divided evenly over the devices. It is higher where shards contend.
It is no bound: a device may hold tables that contend less than the mean.

Memory is ignored. So are constraints, except those that keep tables whole, together or on some devices.

A shard is (table, kind, units of MIN_WIDTH columns). What each device of a group has is one unit.
Shapes: T tables, N shards, F features, D devices; K kinds: whole rows, and those that groups share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.layouts import CHANNELS, LAYOUTS, WHOLE_ROWS, Layout, even_share
from shardcore.topology import Topology
from shardcore.types import MIN_WIDTH, Problem, Shard, Table

MOST_SHARDS = 150_000
"""With more possible shards, only widths of powers of two are considered."""
_EVEN_BYTES = 2.0**24
"""Bytes of each device at which exchanges are priced."""
_PRECISION = 1e-3  # relative, of a bisection


@dataclass(frozen=True)
class Bound:
    """A bound on the plans of a space.

    proved_ms: no plan costs less. None if nothing is proved.
    estimate_ms: about what plans reach that divide all work evenly.
    limit: what prevents cheaper plans.
    space: the plans considered, in words.
    """

    proved_ms: float | None
    estimate_ms: float
    limit: str
    space: str


def bound(problem: Problem, model: CostModel, shared: Sequence[Layout] | None = None) -> Bound:
    """A bound over plans that cut tables by columns, or let groups of devices share them.

    shared: the kinds of sharing to consider; None for all. Raises SettingMismatch.
    """
    problem.require_setting(model.setting)
    kinds = shared_layouts(problem.topology) if shared is None else shared
    shards, lower, proved_ms = _Shards(problem, model, kinds), model.lower, None
    if lower is not None and lower.even_is_least(problem.topology):
        least = shards if lower is model else _Shards(problem, lower, kinds)
        # Subtract a trace for rounding errors.
        proved_ms = _least_ms(least, _proved(least), lower.takes_all_alike(problem.topology))[0] * (1 - 1e-9)
    estimate_ms, limit = _least_ms(shards, _estimated(shards), True)
    return Bound(proved_ms, max(estimate_ms, proved_ms or 0.0), limit, shards.space())


# --- shards -------------------------------------------------------------------------------------------------


class _Shards:
    """What one device may hold of each table.

    kinds: [K] kinds of sharding. The first is that of whole rows; groups share the others.
    n_groups, group_size: [K] groups of the kind, and devices in each.
    table, kind: [N] numbers.
    codes: [N, F] encodings.
    copies: [N] number of devices that have one.
    alone_ms: [N] cost of the shard alone at speed 1.
    fastest: [N] the highest speed it may find. For a group, the speed of its slowest device.
    exchange_ms: [N] what it adds to even exchanges, forward + backward.
    large: [N] whether it is at least an even share of the table. Every plan has such a shard.
    at: for each kind [T, U + 1], the shard of a number of units of a table; -1 for none.
    size: [T, K] units of the whole table.
    whole: [T] the uncut shards.
    latency_ms: [K] of a kind's collectives, whatever they carry.
    mixes: sets of kinds that plans may use.
    """

    def __init__(self, problem: Problem, model: CostModel, shared: Sequence[Layout]) -> None:
        self.problem, self.model, self.kinds = problem, model, (WHOLE_ROWS, *shared)
        self.speed = np.array([d.speed for d in problem.topology.devices])
        groups = [layout.groups(problem.topology) for layout in self.kinds]
        self.n_groups, self.group_size = np.array([(len(g), len(g[0])) for g in groups]).T
        n, tables = len(self.speed), problem.tables
        columns = np.array([t.dim // MIN_WIDTH for t in tables])
        whole = np.array([t.name in problem.whole for t in tables])
        self.any_width = columns.sum() <= MOST_SHARDS
        self.size = np.stack([columns, *[np.ones_like(columns)] * len(shared)], 1)
        self.at = [np.full((len(tables), int(u) + 1), -1) for u in self.size.max(0)]
        shards: list[Shard] = []
        for i, t in enumerate(tables):
            for u in [columns[i]] if whole[i] or n == 1 else self._widths(int(columns[i])):
                self.at[0][i, u] = len(shards)
                shards.append(Shard(t, 0, t.rows, 0, int(u) * MIN_WIDTH))
        codes = [np.asarray(model.encode(shards), dtype=float)]
        for kind, layout in enumerate(shared, 1):
            size = int(self.group_size[kind])
            least = [_least_share(layout, t, size, bool(whole[i])) for i, t in enumerate(tables)]
            some = [i for i, shard in enumerate(least) if shard is not None]
            self.at[kind][some, 1] = len(shards) + np.arange(len(some))
            if some:
                added = [least[i] for i in some]
                codes.append(np.asarray(model.encode(added, layout.batch(problem)), dtype=float))
                shards += added
        self.codes = np.concatenate(codes)
        self.kind = np.zeros(len(shards), dtype=int)
        for kind, at in enumerate(self.at):
            self.kind[at[at >= 0]] = kind
        self.whole = self.at[0][np.arange(len(tables)), columns]
        self.table = np.empty(len(shards), dtype=int)
        units = np.empty(len(shards), dtype=int)
        for at in self.at:
            i, u = np.nonzero(at >= 0)
            self.table[at[i, u]], units[at[i, u]] = i, u
        allowed = [list(problem.allowed_devices(t.name)) for t in tables]
        n_devices, fastest = np.array([(len(d), self.speed[d].max()) for d in allowed]).T
        self.large = (self.kind > 0) | (units * n_devices[self.table] >= self.size[self.table, self.kind])
        of_kind = np.array([max(self.speed[list(group)].min() for group in of) for of in groups])
        self.fastest = np.where(self.kind > 0, of_kind[self.kind], fastest[self.table])
        self.alone_ms = np.asarray(model.head(self.codes), dtype=float)
        self.copies = self.group_size[self.kind]
        first = [next(iter(layout.channels.values())) for layout in self.kinds]
        carried = np.array([first[k](float(s.rows), s.width, problem)
                            for s, k in zip(shards, self.kind, strict=True)], dtype=float)
        self.latency_ms, per_byte = self._exchanges()
        self.exchange_ms = self.copies * carried * per_byte[self.kind]
        kinds = [k for k in range(len(self.kinds)) if (self.at[k] >= 0).any()]
        self.mixes = [list(mix) for n in range(1, len(kinds) + 1) for mix in combinations(kinds, n)]

    def _widths(self, columns: int) -> list[int]:
        """The widths in units that a shard may have."""
        if self.any_width:
            return list(range(1, columns + 1))
        return sorted({columns, *(2**k for k in range(columns.bit_length()) if 2**k < columns)})

    def _exchanges(self) -> tuple[np.ndarray, np.ndarray]:
        """[K] ms of a kind's channels at least, and [K] ms per byte in the first of them.

        The first holds if any group of the kind is used.
        The second includes the bytes in other channels, with all devices having equally many.
        """
        n = len(self.speed)
        if n == 1:
            return np.zeros(1), np.zeros(1)
        once, twice = np.zeros(len(self.kinds)), np.zeros(len(self.kinds))
        for k, layout in enumerate(self.kinds):
            # Bytes of all channels are proportional to those of the first.
            entering = np.array([bytes_of(1.0, 1.0, self.problem) for bytes_of in layout.channels.values()])
            for ms, each in ((once, _EVEN_BYTES), (twice, 2 * _EVEN_BYTES)):
                traffic = np.zeros((len(CHANNELS), n))
                rows = [CHANNELS.index(c) for c in layout.channels]
                traffic[rows] = each * (entering / entering[0])[:, None]
                ms[k] = self.model.comm(traffic, np.zeros(n), self.problem.topology).total_ms.max()
        # At least one group is used. Devices of other groups may not wait at all.
        used = np.where(np.arange(len(self.kinds)) > 0, 1 / self.n_groups, 1.0)
        # A line through two points: its value at 0, and its slope.
        return used * (2 * once - twice), (twice - once) / (n * _EVEN_BYTES)

    def cheapest(self, price: np.ndarray, kinds: list[int]) -> tuple[float, np.ndarray | None]:
        """The least total price of shards of these kinds that make up all tables.

        price: [N] with copies included.
        Also returns how often each shard is taken, [N]. inf and None if there is no such set.
        """
        sums, ways = zip(*(_compositions(self.at[k], price, self.size[:, k]) for k in kinds), strict=True)
        best, least = np.argmin(sums, axis=0), float(np.min(sums, axis=0).sum())
        return least, sum(way(best == i) for i, way in enumerate(ways)) if np.isfinite(least) else None

    def within(self, some: np.ndarray) -> np.ndarray:
        """[N] bool: those of `some` shards that can be in a plan.

        A table and kind without any of its large shards is impossible: its devices need at least one.
        """
        possible = np.zeros(self.size.shape, dtype=bool)
        chosen = some & self.large
        possible[self.table[chosen], self.kind[chosen]] = True
        return some & possible[self.table, self.kind]

    def space(self) -> str:
        """The plans for which a bound holds, in words."""
        widths = f"multiples of {MIN_WIDTH}" if self.any_width else f"{MIN_WIDTH} times powers of two"
        others = [layout.words for at, layout in zip(self.at[1:], self.kinds[1:], strict=True)
                  if (at >= 0).any()]
        return ", or with ".join([f"each table whole or cut by columns ({widths})", *others])


def shared_layouts(topology: Topology) -> tuple[Layout, ...]:
    """The kinds by which groups of several devices share tables."""
    return tuple(k for k in LAYOUTS.values() if any(len(group) > 1 for group in k.groups(topology)))


def _least_share(layout: Layout, table: Table, n: int, whole: bool) -> Shard | None:
    """The smallest shard that any of n devices has of a table. None if they cannot share it.

    whole: whether the table must stay whole.
    """
    if not layout.divides_rows:
        return Shard.whole(table)
    each = None if table.ordered or whole else even_share(table.rows, n)
    # The last device has the remaining rows, which are the fewest.
    return each and Shard(table, (n - 1) * each, table.rows, 0, table.dim)


def _compositions(at: np.ndarray, price: np.ndarray, size: np.ndarray):
    """[T] the least price of shards that make up `size` units of each table.

    Also returns a function: from chosen tables [T] bool to how often each shard [N] is taken.
    """
    rows = np.arange(len(at))
    of = np.where(at >= 0, price[at], np.inf)
    best, last = np.full(at.shape, np.inf), np.zeros(at.shape, dtype=int)
    best[:, 0] = 0.0
    # Dynamic programming over units, for all tables at once: best price, and the last shard taken.
    for u in range(1, at.shape[1]):
        candidates = of[:, 1 : u + 1] + best[:, u - 1 :: -1] if u > 1 else of[:, 1:2]
        last[:, u] = 1 + np.argmin(candidates, axis=1)
        best[:, u] = candidates[rows, last[:, u] - 1]

    def taken(chosen: np.ndarray) -> np.ndarray:
        """How often each shard is taken: follow `last` back to 0."""
        counts, left = np.zeros(len(price), dtype=int), np.where(chosen, size, 0)
        while left.any():
            live = rows[left > 0]
            np.add.at(counts, at[live, last[live, left[live]]], 1)
            left[live] -= last[live, left[live]]
        return counts

    return best[rows, size], taken


# --- bounds -------------------------------------------------------------------------------------------------

Price = Callable[[list[int], np.ndarray], float]
"""ms of plans of a mix of kinds, using only some shards [N] bool. inf if there are none."""
_EVENLY = "the work of all tables, divided evenly"


def _proved(shards: _Shards) -> Price:
    """A price that no plan undercuts: the least work, divided by all speeds.

    A shared table brings a launch on each device of its group. Columns bring one on at least one device.
    """
    launch_ms, total_speed = shards.model.launch_ms, shards.speed.sum()
    work = shards.copies * np.maximum(0.0, shards.alone_ms - launch_ms) / total_speed + shards.exchange_ms

    def price(mix: list[int], some: np.ndarray) -> float:
        shared = sum(int(shards.group_size[k]) for k in mix if k)
        launches = (shared + (0 in mix)) / total_speed if shared else 1 / shards.speed.max()
        least, _ = shards.cheapest(np.where(some, work, np.inf), mix)
        ms = launch_ms * launches + least + shards.latency_ms[mix].sum()
        return max(ms, _at_mean_load(shards, mix[0], some)) if len(mix) == 1 and alike else ms

    alike = shards.model.takes_all_alike(shards.problem.topology)
    return price


def _at_mean_load(shards: _Shards, kind: int, some: np.ndarray) -> float:
    """A higher price for plans of one kind, which run one op on each device.

    Some device has at least the mean load by speed. Its drivers raise the rates at which loads count.
    """
    model, some, total_speed = shards.model, some & (shards.kind == kind), shards.speed.sum()
    rates = model.rates(shards.codes[shards.whole].sum(0) / len(shards.speed))
    # Rates and least loads depend on each other. Any number of rounds gives a valid bound.
    for _ in range(4):
        load = shards.codes @ rates
        least, _ = shards.cheapest(np.where(some, shards.copies * load, np.inf), [kind])
        if not np.isfinite(least):
            return np.inf
        now = model.rates(_least_codes(shards, load, some, least * shards.speed.min() / total_speed))
        counted, rates = rates, now
    # Where rates fell in the last round, count only the share that they surely reach.
    share = min(1.0, (now[counted > 0] / counted[counted > 0]).min(initial=1.0))
    work = share * shards.copies * (shards.codes @ counted) / total_speed + shards.exchange_ms
    least, _ = shards.cheapest(np.where(some, work, np.inf), [kind])
    return model.launch_ms / shards.speed.max() + least + float(shards.latency_ms[kind])


def _least_codes(shards: _Shards, load: np.ndarray, some: np.ndarray, wanted: float) -> np.ndarray:
    """[F] the least that a device can have of each feature, if the loads of its shards sum to `wanted`.

    load: [N] of each shard. A device holds at most one shard of each table.
    """
    some = some & (load > 0)
    room, each = np.zeros(len(shards.size)), np.full((len(shards.size), shards.codes.shape[1]), np.inf)
    np.maximum.at(room, shards.table[some], load[some])
    np.minimum.at(each, shards.table[some], shards.codes[some] / load[some][:, None])
    room, each = room[room > 0], each[room > 0]
    found = np.zeros(shards.codes.shape[1])
    # A fractional knapsack: take load first from tables that bring least of the feature.
    for f in range(len(found)):
        order = np.argsort(each[:, f])
        taken = np.clip(wanted - np.concatenate([[0.0], np.cumsum(room[order])[:-1]]), 0.0, room[order])
        found[f] = taken @ each[order, f]
    return found


def _estimated(shards: _Shards) -> Price:
    """An estimate of the price.

    Shared tables count as one op of each kind, alike on all devices.
    Columns count as one op, divided over the devices by speed.
    The cheapest cuts follow from the slope of the head at this point.
    """
    n, total_speed, codes = len(shards.speed), shards.speed.sum(), shards.codes
    shares = (shards.speed / total_speed)[:, None]

    def price(mix: list[int], some: np.ndarray) -> float:
        sums, found = codes[shards.whole].sum(0), []
        # The slope depends on the cuts, so refine once.
        for _ in range(2):
            work = shards.copies * (codes @ _slope(shards.model, sums / n)) / total_speed + shards.exchange_ms
            _, taken = shards.cheapest(np.where(some, work, np.inf), mix)
            if taken is None:
                return np.inf
            columns, *shared = ((taken * (shards.kind == k)) @ codes / shards.n_groups[k] ** (k > 0)
                                for k in range(len(shards.kinds)))
            ms = shards.model.head(np.concatenate([columns * shares, *([e] * n for e in shared)])).sum()
            found.append(float(ms / total_speed + taken @ shards.exchange_ms))
            sums = columns + n * sum(shared)
        return min(found) + shards.latency_ms[mix].sum()

    return price


def _least_ms(shards: _Shards, price: Price, alike: bool) -> tuple[float, str]:
    """The least ms over all mixes of kinds, and what prevents less.

    No shard may take longer than the result. Each kind in a mix adds its own launches and latencies.
    alike: whether the device with any one shard waits for the same exchanges as all others.
    """
    together_ms, together = _together(shards)
    found: list[tuple[float, str, list[int], float]] = []
    for mix in shards.mixes:
        waits_ms = shards.cheapest(shards.exchange_ms, mix)[0] + shards.latency_ms[mix].sum()
        exchange_ms = waits_ms if alike else 0.0
        evenly_ms = price(mix, shards.within(np.full(len(shards.kind), True)))
        low, limit = max((evenly_ms, _EVENLY), (together_ms + exchange_ms, together))
        found.append((low, limit, mix, exchange_ms))
    best = (np.inf, "")
    # From the lowest on: once a mix starts above the best, all later ones do.
    for low, limit, mix, exchange_ms in sorted(found):
        if low >= best[0]:
            break
        shard_ms = shards.alone_ms / shards.fastest + exchange_ms
        above = price(mix, shards.within(shard_ms <= low))
        if above > low:
            dearest = shards.problem.tables[int(np.argmax(shard_ms[shards.whole]))]
            limit = f"table {dearest.name!r}, too dear for one device, and to cut it costs more"
            high = min(above, float(shard_ms.max()))
            low = _crossing(lambda ms, m=mix, p=shard_ms: price(m, shards.within(p <= ms)), low, high)
        best = min(best, (float(low), limit))
    return best


def _crossing(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function equals its argument, from below.

    Requires falling(low) > low and falling(high) <= high.
    """
    while high > low * (1 + _PRECISION):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if falling(middle) <= middle else (middle, high)
    return low


def _together(shards: _Shards) -> tuple[float, str]:
    """ms of the most expensive bundle on a device, and its name in words."""
    index, found = {t.name: i for i, t in enumerate(shards.problem.tables)}, [(0.0, "")]
    for group in shards.problem.constraints.together:
        chosen = shards.whole[[index[name] for name in group]]
        shown = ", ".join(map(repr, group[:3])) + ", ..." * (len(group) > 3)
        ms = shards.model.head(shards.codes[chosen].sum(0, keepdims=True))[0] / shards.fastest[chosen].max()
        found.append((float(ms), f"tables {shown}, kept together on one device"))
    return max(found)


def _slope(model: CostModel, sums: np.ndarray) -> np.ndarray:
    """[F] growth of the head with each feature, in ms, at sums [F]. By finite differences."""
    step = 1e-4 * np.maximum(sums, 1e-9)
    heads = model.head(np.concatenate([sums[None], sums + np.diag(step)]))
    return np.maximum(0.0, (heads[1:] - heads[0]) / step)
