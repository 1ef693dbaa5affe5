"""The least costs of shards and ops: the parts that a lower bound is made of.

A shard is (table, kind, units of MIN_WIDTH columns). Each device of a group has one unit.

An op's shards slow each other down, the more the larger its load. Ops of a load may have little of one
feature or of another, but not of all: tables that bring few lookups for their load bring many rows, and so
on. So branch and bound over boxes of features gives the least rates (`least_rates`).

Shapes: T tables, N shards, n shards of a kind, F features, D devices; K kinds: whole rows, and those that
groups share; G intervals of load, W loads, B boxes, C ways to divide a box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from shardcore.core.topology import Topology
from shardcore.core.types import MIN_WIDTH, Problem, Shard, Table
from shardcore.cost.model import BoundableCostModel, CostModel
from shardcore.step.id_bytes import received_bytes
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, LAYOUTS, WHOLE_ROWS, Channel, Layout, even_share
from shardcore.step.output_bytes import output_bytes
from shardcore.step.scopes import WORLD, groups_of
from shardcore.tables.host_rows import longest_held

MOST_SHARDS = 150_000
"""With more possible shards, only widths of powers of two are considered."""
_EVEN_BYTES, _LEAST_BYTES, _STEP, _ROUNDING = 2.0**24, 2.0**-10, 2.0**-20, 1e-9
"""Bytes of each device at which exchanges are priced, and how near two such points are (`_points`)."""
_INTERVALS = 80
"""Intervals of load, at most."""
_FROM, _TO = 0.02, 3.0
"""Between these loads, relative to a usual op's, intervals are short."""
_DIVISIONS = 40
"""Divisions of boxes of features. More give higher rates, and so a nearer bound."""
_WEIGHTS = np.array([0.1, 0.3, 1.0, 3.0, 10.0])
"""Weights of the second feature of a pair, each counted in the mean shard's."""
_CUTS = (0.25, 0.5, 0.75)
"""Places to divide a box, from its low to its high end, by logarithm."""
_TRACE = 1e-9
"""Rounding errors of features, in mean shards."""


# --- shards -------------------------------------------------------------------------------------------------


class BoundShards:
    """All shards of each table that one device may hold.

    kinds: [K] kinds of sharding. The first is that of whole rows; groups share the others.
    n_groups, group_size: [K] groups of the kind, and devices in each.
    table, kind: [N] numbers.
    codes: [N, F] encodings.
    copies: [N] number of devices that have one.
    alone_ms: [N] cost of the shard alone at speed 1.
    fastest: [N] the highest speed it may find. For a group, the speed of its slowest device.
    exchange_ms: [N] time that it adds to even exchanges, forward + backward, in the mean of devices by speed.
    wait_ms: [N] the same for every device: without what other groups may wait for by themselves, backward.
    part: [N] its fraction of the table. A kind's groups share a table as one.
    large: [N] True if it is at least an even share of the table. Every plan has such a shard.
    at: for each kind [T, U + 1], the shard of a number of units of a table; -1 for none.
    size: [T, K] units of the whole table.
    whole: [T] the uncut shards.
    latency_ms: [2, K] ms of a kind's collectives of outputs and gradients, whatever they carry: in that mean,
      and for every device.
    ids_ms: ms of each channel of ids, whatever it carries. Empty where ids are not counted.
    mixes: sets of kinds that plans may use.
    """

    def __init__(
        self,
        problem: Problem,
        model: CostModel,
        shared: Sequence[Layout],
        ids: bool,
        tables: Sequence[Table] | None = None,
    ) -> None:
        self.problem, self.model, self.tables = problem, model, problem.tables if tables is None else tables
        kinds = (WHOLE_ROWS, *shared)
        # The runs of sequences have other channels.
        self.kinds = (
            tuple(k for k in (x.as_sequence for x in kinds) if k) if tables and tables[0].sequence else kinds
        )
        shared = self.kinds[1:]
        self.speed = np.array([d.speed for d in problem.topology.devices])
        groups = [layout.groups(problem.topology) for layout in self.kinds]
        self.n_groups, self.group_size = np.array([(len(g), len(g[0])) for g in groups]).T
        n, tables = len(self.speed), self.tables
        columns = np.array([t.dim // MIN_WIDTH for t in tables])  # [T] in units
        whole = [t.name in problem.whole for t in tables]
        # The sum is the number of shards, so it limits time and memory.
        self.any_width = columns.sum() <= MOST_SHARDS
        self.size = np.stack([columns, *[np.ones_like(columns)] * len(shared)], 1)
        self.at = [np.full((len(tables), int(u) + 1), -1) for u in self.size.max(0)]
        shards: list[Shard] = []
        # Columns come first, in all widths. Kinds that groups share follow, one shard a table.
        for i, t in enumerate(tables):
            for u in [columns[i]] if whole[i] or n == 1 else self._widths(int(columns[i])):
                self.at[0][i, u] = len(shards)
                shards.append(Shard(t, 0, t.rows, 0, int(u) * MIN_WIDTH))
        # No plan has tables share caches in which their rows stay longer.
        longest = dict(zip(tables, longest_held(tables, problem.global_batch, n), strict=True))

        def encoded(of: Iterable[Shard], batch: int | None = None) -> np.ndarray:
            held = [replace(s, table=longest[s.table]) for s in of]
            return np.asarray(model.encode(held, batch), dtype=float)

        codes = [encoded(shards)]
        for kind, layout in enumerate(shared, 1):
            size = int(self.group_size[kind])
            # The smallest share of any device: what others of the group have costs no less.
            least = {i: _least_share(layout, t, size, whole[i]) for i, t in enumerate(tables)}
            added = {i: shard for i, shard in least.items() if shard}
            self.at[kind][list(added), 1] = len(shards) + np.arange(len(added))
            if added:
                codes.append(encoded(added.values(), layout.batch(problem)))
                shards += added.values()
        self.shards, self.codes = shards, np.concatenate(codes)
        self.whole = self.at[0][np.arange(len(tables)), columns]
        self.kind, self.table, units = np.zeros((3, len(shards)), dtype=int)
        for kind, at in enumerate(self.at):
            i, u = np.nonzero(at >= 0)
            # The inverse of `at`: from a shard to its kind, table and units.
            self.kind[at[i, u]], self.table[at[i, u]], units[at[i, u]] = kind, i, u
        self.part = units / self.size[self.table, self.kind]
        allowed = [list(problem.allowed_devices(t.name)) for t in tables]
        # Of a table on n devices, some shard has an n-th of it or more: a `large` one.
        n_devices, fastest = np.array([(len(d), self.speed[d].max()) for d in allowed]).T
        self.large = (self.kind > 0) | (units * n_devices[self.table] >= self.size[self.table, self.kind])
        # The slowest device of a group ends last, so the best group is that whose slowest is fastest.
        of_kind = np.array([max(self.speed[list(group)].min() for group in of) for of in groups])
        self.fastest = np.where(self.kind > 0, of_kind[self.kind], fastest[self.table])
        self.alone_ms = np.asarray(model.head(self.codes), dtype=float)
        self.copies = self.group_size[self.kind]
        # Exchanges are priced by the bytes in a kind's first channel (see `_exchanges`).
        first = [
            next(iter(layout.channels_in(problem.job, problem.topology).values())) for layout in self.kinds
        ]
        n_bytes = [
            first[k](float(s.bytes), output_bytes(s, problem.global_batch), problem)
            for s, k in zip(shards, self.kind, strict=True)
        ]
        all_bytes = self.all_bytes = self.copies * np.array(n_bytes, dtype=float)
        self.latency_ms, per_byte = self._exchanges(all_bytes)
        self.exchange_ms, self.wait_ms = all_bytes * per_byte[:, self.kind]
        self.ids_ms: dict[Channel | None, float] = {}
        if ids:
            self.id_bytes = id_bytes = self.copies * np.array(
                [received_bytes(s, problem) for s in shards], dtype=float
            )
            self.ids_ms, per_id_byte = self._ids(id_bytes)
            self.id_ms = id_bytes * per_id_byte[self.kind]
            self.exchange_ms += self.id_ms
            self.wait_ms += self.id_ms
        # Plans differ in which kinds they use at all: each costs its launches and latencies.
        kinds = [k for k in range(len(self.kinds)) if (self.at[k] >= 0).any()]
        self.mixes = [list(mix) for n in range(1, len(kinds) + 1) for mix in combinations(kinds, n)]

    def _widths(self, columns: int) -> list[int]:
        """The widths in units that a shard may have."""
        powers = (1 << k for k in range((columns - 1).bit_length()))
        return [*(range(1, columns) if self.any_width else powers), columns]

    def _exchanges(self, all_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[2, K] ms of a kind's channels at least, and [2, K] ms per byte in the first of them.

        Each for the mean of devices by speed, and for every device.
        all_bytes: [N] such bytes of a shard, of all devices.
        The first holds if any group of the kind is used.
        The second includes the bytes in other channels, with all devices having equally many.
        """
        n, topology = len(self.speed), self.problem.topology
        least, slope = np.zeros((2, 2, len(self.kinds)))
        for k, layout in enumerate(self.kinds if n > 1 else ()):  # one device exchanges nothing
            # Bytes of all channels are proportional to those of the first.
            channels = layout.channels_in(self.problem.job, topology)
            entering = np.array([bytes_of(1.0, 1.0, self.problem) for bytes_of in channels.values()])
            rows = [CHANNELS.index(c) for c in channels]
            # Groups within units exchange by themselves: backward, devices of others do not wait for them.
            within = [
                i for i, c in zip(rows, channels, strict=True) if c.group != WORLD and not c.scope.across
            ]
            groups = groups_of(CHANNELS[within[0]].group if within else WORLD, topology)
            # [T] bytes of each device if all of a table is of the kind. One of several groups may have all
            # tables.
            of_table, own = np.zeros(len(self.size)), self.kind == k
            of_table[self.table[own]] = (all_bytes / self.part)[own] / n
            points, ms = self._points(of_table[of_table > 0], float(of_table.sum()) * len(groups)), []
            for point in points:
                traffic = np.zeros((2, len(CHANNELS), n))
                traffic[0, rows] = point * (entering / entering[0])[:, None]
                traffic[1, within] = traffic[0, within]
                of_all, of_groups = (self.model.comm(x, np.zeros(n), topology) for x in traffic)
                within_ms = of_groups.forward_ms.max(), of_groups.backward_ms.max()
                ms.append(np.array([of_all.total_ms.max(), *within_ms]))
            least[:, k], slope[:, k] = self._apart(groups, *_line(points, *ms))
        return least, slope / n

    def _apart(
        self, groups: np.ndarray, once: np.ndarray, slope: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """[2] ms at least and [2] ms per byte: in the mean by speed, for every device; however groups divide
        the bytes.

        once, slope: [3] of even bytes: all ms, those forward within groups, and backward.
        Forward all wait for the group with most bytes, backward each for itself. So slow groups may have
        more.
        """
        n, (_, forward, backward) = len(groups), slope
        # [2, G] of each group, the smallest first. A single device may be of the group that has nothing.
        weight = np.stack([np.sort(self.speed[groups].sum(1)) / self.speed.sum(), np.arange(n) == n - 1])
        # The least is where the first groups have equally many bytes, and the others none.
        number = np.arange(1, n + 1)
        apart = ((forward + backward * weight.cumsum(1)) * n / number).min(1)
        sure = once[0] - once[2] * (1 - weight[:, 0])
        # At least one group is used. Devices of other groups may not wait at all.
        sure = np.minimum(sure, once[0] / n)
        if self.problem.job.tower_ratio is not None:
            # Several kinds exchange within groups, and differ in which has most.
            apart, sure = forward + n * backward * weight[:, 0], (once[0] - once[2] * (1 - weight[:, 0])) / n
        return np.where(once[0] > 0, sure, once[0]), slope[0] - np.maximum(0.0, forward + backward - apart)

    def _ids(self, all_bytes: np.ndarray) -> tuple[dict[Channel | None, float], np.ndarray]:
        """ms of each channel of ids at least, and [K] ms per byte, if all devices receive equally many.

        all_bytes: [N] such bytes of a shard, of all devices.
        """
        n, per_byte = len(self.speed), np.zeros(len(self.kinds))
        least: dict[Channel | None, float] = {}
        # No device receives more than all ids of all tables.
        most = float(sum(received_bytes(Shard.whole(t), self.problem) for t in self.tables))
        for channel in ID_CHANNELS if n > 1 else ():
            of_channel = np.array([layout.ids == channel for layout in self.kinds])
            points = self._points(all_bytes[of_channel[self.kind]] / n, most)
            traffic = np.zeros((2, len(CHANNELS), n))
            traffic[:, CHANNELS.index(channel)] = np.array(points)[:, None]
            comms = [self.model.comm(x, np.zeros(n), self.problem.topology) for x in traffic]
            least[channel], slope = _line(points, *(float(comm.input_ms.max()) for comm in comms))
            per_byte[of_channel] = slope / n
        return least, per_byte

    def _points(self, each: np.ndarray, most: float) -> tuple[float, float]:
        """Bytes of each device between which the line through the law of exchanges is not above it.

        each: those of the shards or tables of which some are exchanged. most: of all plans.
        A convex law is above all its tangents. A concave one is above the chord of all that plans may have.
        """
        lower = self.model.lower
        if lower is None or not lower.has_concave_exchanges or not len(each):
            return _EVEN_BYTES, _EVEN_BYTES * (1 + _STEP)
        least = max(float(each.min()), _LEAST_BYTES)
        return least, max(most, least * (1 + _STEP))

    def latencies_ms(self, mix: list[int], every: bool = False) -> float:
        """ms of the collectives of plans with these kinds, whatever they carry.

        every: True for those that every device waits for. False: in the mean of devices by speed.
        """
        channels = {self.kinds[k].ids for k in mix}
        return float(self.latency_ms[int(every), mix].sum() + sum(self.ids_ms.get(c, 0.0) for c in channels))

    def cheapest(self, price: np.ndarray, kinds: list[int]) -> tuple[float, np.ndarray | None]:
        """The least total price of shards of these kinds that make up all tables.

        price: [N] with copies included.
        Also returns the count of each shard, [N]. inf and None if there is no such set.
        """
        # [K, T] by kind. Each table takes the cheapest kind.
        sums, ways = zip(*(_compositions(self.at[k], price, self.size[:, k]) for k in kinds), strict=True)
        best, least = np.argmin(sums, axis=0), float(np.min(sums, axis=0).sum())
        if not np.isfinite(least):
            return least, None
        return least, np.sum([way(best == i) for i, way in enumerate(ways)], axis=0)

    def within(self, usable: np.ndarray) -> np.ndarray:
        """[N] bool: those of the usable shards that can be in a plan.

        A table and kind without any of its large shards is impossible: its devices need at least one.
        """
        possible = np.zeros(self.size.shape, dtype=bool)
        chosen = usable & self.large
        possible[self.table[chosen], self.kind[chosen]] = True
        return usable & possible[self.table, self.kind]

    def space(self) -> str:
        """The plans for which a bound holds, in words."""
        widths = f"multiples of {MIN_WIDTH}" if self.any_width else f"{MIN_WIDTH} times powers of two"
        shared = zip(self.at[1:], self.kinds[1:], strict=True)
        # Groups share whole tables here. Searches also let them share halves (state/halves.py).
        others = [
            layout.words + " (no halves)" * layout.cuts_columns for at, layout in shared if (at >= 0).any()
        ]
        return ", or with ".join([f"each table whole or cut by columns ({widths})", *others])


def shared_layouts(topology: Topology) -> tuple[Layout, ...]:
    """The kinds by which groups of several devices share tables."""
    return tuple(k for k in LAYOUTS.values() if any(len(group) > 1 for group in k.groups(topology)))


def _least_share(layout: Layout, table: Table, n: int, whole: bool) -> Shard | None:
    """The smallest shard that any of n devices has of a table. None if they cannot share it.

    whole: True if the table must stay whole.
    """
    if not layout.divides_rows:
        return Shard.whole(table)
    each = None if table.ordered or whole else even_share(table.rows, n)
    # The last device has the remaining rows, which are the fewest.
    return Shard(table, (n - 1) * each, table.rows, 0, table.dim) if each else None


def _line(points: tuple[float, float], once: Any, more: Any) -> tuple[Any, Any]:
    """Value at 0 and slope per byte, from ms at two points. Lowered a trace, for rounding."""
    slope = (more - once) / (points[1] - points[0])
    return once * (1 - _ROUNDING) - slope * points[0], slope


def _compositions(
    at: np.ndarray, price: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """[T] the least price of shards that make up `size` units of each table.

    Also returns a function: from chosen tables [T] bool to the count of each shard [N].
    """
    rows = np.arange(len(at))
    # (-1 reads the last price, which is then replaced.)
    by_units = np.where(at >= 0, price[at], np.inf)  # [T, U + 1]
    best, last = np.full(at.shape, np.inf), np.zeros(at.shape, dtype=int)
    best[:, 0] = 0.0
    # Dynamic programming over units, for all tables at once: best price, and the last shard taken.
    for u in range(1, at.shape[1]):
        candidates = by_units[:, 1 : u + 1] + best[:, u - 1 :: -1]
        last[:, u] = 1 + np.argmin(candidates, axis=1)
        best[:, u] = candidates[rows, last[:, u] - 1]

    def counts_of(chosen: np.ndarray) -> np.ndarray:
        """Count shards: follow `last` back to 0."""
        counts, left = np.zeros(len(price), dtype=int), np.where(chosen, size, 0)
        while left.any():
            live = rows[left > 0]  # tables with units left
            np.add.at(counts, at[live, last[live, left[live]]], 1)
            # One shard of each table a round, until no units are left.
            left[live] -= last[live, left[live]]
        return counts

    return best[rows, size], counts_of


# --- ops ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Curve:
    """The least ms of ops of one kind by their load, without the launch.

    alone: [N] ms that each shard adds at least, whatever else an op has. 0 for those of other kinds.
    load: [N] load of each shard: about the ms that it adds to a usual op.
    ends: [G + 1] loads, rising from 0 to that of all tables.
    slowdown: [G] from ends[g] on, an op takes at least slowdown[g] × its load. Rising.
    """

    alone: np.ndarray
    load: np.ndarray
    ends: np.ndarray
    slowdown: np.ndarray

    def most(self, ms: np.ndarray) -> np.ndarray:
        """The largest load of an op that takes at most `ms`. 0 for less than 0 ms."""
        ms = np.maximum(0.0, ms)
        # Slowdowns and ends both rise, so the last interval that such an op may begin in has the most load.
        g = np.searchsorted(self.slowdown * self.ends[:-1], ms, side="right") - 1
        return np.minimum(ms / self.slowdown[g], self.ends[g + 1])


def op_curve(shards: BoundShards, model: BoundableCostModel, kind: int) -> Curve:
    """The curve of ops of a kind. Any loads give valid bounds. Those at the rates of a usual op give near ones."""
    number = np.flatnonzero(shards.kind == kind)
    # A usual op has an even part of the tables. Of a kind that groups share, about half of the tables.
    whole = np.isin(number, shards.at[kind][np.arange(len(shards.size)), shards.size[:, kind]])
    n_ops = 2 * shards.n_groups[kind] if kind else len(shards.speed)
    codes, table = shards.codes[number], shards.table[number]

    def least(load: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """[W, F] rates of any op of these loads [W] or more, if its shards have loads [n]."""
        busy = load > 0
        if not busy.any():  # no lookups, so no contention
            return model.rates(np.zeros((len(wanted), codes.shape[1])))
        return least_rates(model, codes[busy], load[busy], table[busy], wanted)

    usual = codes[whole].sum(0) / n_ops
    # Loads count at the least rates of a usual load, so that such an op's slowdown is near 1.
    rates = model.rates(usual)
    rates = least(codes @ rates, np.array([usual @ rates]))[0]
    load = codes @ rates
    # Slowdowns change fast near a usual load, so intervals there are a few per cent.
    inner = max(float(usual @ rates), 1e-12) * np.geomspace(_FROM, _TO, _INTERVALS - 1)
    # An op has at most one shard of a table.
    most = np.zeros(int(table.max(initial=-1)) + 1)
    np.maximum.at(most, table, load)
    top = max(float(most.sum()), 1e-12) * (1 + 1e-9)
    ends = np.concatenate([[0.0], inner[inner < top], [top]])
    own, busy, slowdown = model.rates(codes), load > 0, np.ones(len(ends) - 1)
    if busy.any():
        # Rates of an interval hold for all ops in it, as they are those at its lower end. A shard counts at these, or
        # at those of its own features if they are higher. One interval after the other: together they are too many.
        slowdown = np.array(
            [
                ((np.maximum(own, interval) * codes).sum(-1)[busy] / load[busy]).min()
                for interval in least(load, ends[:-1])
            ]
        )
    alone, loads = np.zeros((2, len(shards.kind)))
    # Whatever else an op has, its features are at least these.
    alone[number], loads[number] = (own * codes).sum(1), load
    # An op of a later interval has at least the load of all earlier ones, so their slowdowns hold, too.
    return Curve(alone, loads, ends, np.maximum.accumulate(slowdown))


# --- contention ---------------------------------------------------------------------------------------------


def least_rates(
    model: BoundableCostModel, codes: np.ndarray, load: np.ndarray, table: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """[W, F] rates no higher than those of any op whose shards' loads sum to `wanted` [W] or more.

    In a box of features, rates are no lower than at its lower corner. The corner is raised by pairs of
    features, of which ops of that load have a least weighted sum: where there is at most so much of one,
    there is at least so much of the other. The box with the lowest rates is divided next, by the feature and
    value that raise them most. Any boxes that cover all ops give a valid bound, so the number of divisions
    only decides how near it is.

    codes: [N, F]. load: [N], more than 0. table: [N], rising. An op has at most one shard of a table.
    """
    ranges = _Ranges(model, codes, load, table, wanted)
    # The ms of all shards at a box's rates say which box to raise, as one number for F rates.
    total, n = codes.sum(0), np.arange(len(wanted))
    # All boxes: low, high [B, W, F], and the ms of all shards at their lower corners, [B, W].
    low, high = ranges.low[None], ranges.high[None]
    ms = ranges.ms(ranges.low, total)[None]
    for _ in range(_DIVISIONS if ranges.features else 0):
        # [W] for each load its own box: the one that limits its bound.
        box = ms.argmin(0)
        below, above, value, feature = ranges.division(low[box, n], high[box, n])
        # The box below takes the place of the one that is divided.
        upper, low, high = high[box, n], low.copy(), high.copy()
        low[box, n], high[box, n, feature] = below, value
        ms[box, n] = ranges.box_ms(below, high[box, n], total)
        low, high = np.concatenate([low, above[None]]), np.concatenate([high, upper[None]])
        ms = np.concatenate([ms, ranges.box_ms(above, upper, total)[None]])
    # An op is in some box, so the least rates of all boxes hold. Empty boxes do not count.
    rates = model.rates(low * ranges.unit)
    return np.where(np.isfinite(ms)[..., None], rates, np.inf).min(0)


class _Ranges:
    """Features that ops of given loads can have, counted in the mean shard's.

    unit: [F] features of the mean shard. 1 for those that no shard has.
    low, high: [W, F] the least and the most of each feature.
    pairs: [P, F, F, W] the least of feature i + _WEIGHTS[p] × feature j.
    features: those on which rates depend.
    """

    def __init__(
        self,
        model: BoundableCostModel,
        codes: np.ndarray,
        load: np.ndarray,
        table: np.ndarray,
        wanted: np.ndarray,
    ) -> None:
        unit = codes.mean(0)
        self.model, self.unit = model, np.where(unit > 0, unit, 1.0)
        # Features differ by orders of magnitude. In mean shards one set of weights serves all pairs.
        codes = codes / self.unit
        # An op of more load has no less of anything than a part of it that has just this load.
        self.low = least_sums(codes, load, table, wanted)
        # The most of a feature is the least of its negative.
        self.high = -least_sums(-codes, load, table, wanted)
        n_features = len(unit)
        # All pairs at once, as columns of one call: [N, F × F].
        sums = ((codes[:, :, None] + x * codes[:, None]).reshape(len(codes), -1) for x in _WEIGHTS)
        pairs = np.stack([least_sums(of_pairs, load, table, wanted).T for of_pairs in sums])
        self.pairs = pairs.reshape(len(_WEIGHTS), n_features, n_features, len(wanted))
        self.features = [f for f in range(n_features) if self._counts(f)]

    def _counts(self, feature: int) -> bool:
        """Tell if rates depend on a feature."""
        # From the most of everything to the least of this feature.
        less = self.high.copy()
        less[:, feature] = self.low[:, feature]
        return bool((self.model.rates(less * self.unit) != self.model.rates(self.high * self.unit)).any())

    def ms(self, low: np.ndarray, total: np.ndarray) -> np.ndarray:
        """[...] ms of `total` [F] at the rates of lower corners [..., F]: the value to raise."""
        return self.model.rates(low * self.unit) @ total

    def box_ms(self, low: np.ndarray, high: np.ndarray, total: np.ndarray) -> np.ndarray:
        """[...] the same as `ms`, but inf for boxes in which there are no ops."""
        return np.where((low > high + 2 * _TRACE).any(-1), np.inf, self.ms(low, total))

    def division(
        self, low: np.ndarray, high: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The best way to divide boxes (low, high [W, F]).

        Returns lower corners [W, F] of both parts, and the value [W] and the feature [W] that divide them.
        """
        # The mean shard in place of all N: the ms are an N-th, and rank the ways in the same order.
        total = np.ones(low.shape[1]) * self.unit
        # All ways at once, [C, W]: each of the features, at each part of its side.
        feature, part = np.repeat(self.features, len(_CUTS)), np.tile(_CUTS, len(self.features))[:, None]
        way, n = np.arange(len(feature)), np.arange(len(low))
        least, most = low.T[feature], high.T[feature]
        # By logarithm. The low end may be 0, so a thousandth of the high end stands for it.
        value = np.maximum(least, np.maximum(least, 1e-3 * most) ** (1 - part) * most**part)
        # With at most so much of the feature, others are at least what the pairs leave.
        others = self.pairs[:, :, feature] - _WEIGHTS[:, None, None, None] * value
        below = np.maximum(low, others.max(0).transpose(1, 2, 0) - _TRACE)
        below[way, :, feature] = low.T[feature]
        above = np.repeat(low[None], len(feature), 0)
        # Above the value only this feature's lower end rises.
        above[way, :, feature] = value
        ms = np.minimum(self.box_ms(below, high, total), self.box_ms(above, high, total))
        # The lower of both parts limits the rates: the best way raises it most.
        best = ms.argmax(0)
        return below[best, n], above[best, n], value[best, n], feature[best]


def least_sums(values: np.ndarray, load: np.ndarray, table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """[W, J] the least sums of each of `values` [N, J] that ops have whose loads sum to `wanted` [W].

    A fractional knapsack: it takes load first from tables that bring least of the value.
    """
    first = np.flatnonzero(np.diff(table, prepend=-1))
    # Relaxed: the most load of any shard of a table, at the least value a load of any.
    room = np.maximum.reduceat(load, first)
    each = np.minimum.reduceat(values / load[:, None], first)
    # [T, J] tables by value per load, each column of values in its own order.
    order = np.argsort(each, axis=0)
    start = np.zeros((1, values.shape[1]))
    # Piecewise linear curves: load taken so far, and the value that came with it.
    filled = np.concatenate([start, np.cumsum(room[order], axis=0)])
    brought = np.concatenate([start, np.cumsum(room[order] * np.take_along_axis(each, order, 0), axis=0)])
    # np.interp of all columns at once: each lies beyond the one before.
    column = np.arange(values.shape[1])
    beyond = column * (filled[-1].max() + 1.0)
    wanted = np.minimum(wanted[:, None], filled[-1])
    at = np.searchsorted((filled + beyond).T.ravel(), wanted + beyond) - column * len(filled)
    at = np.clip(at, 1, len(filled) - 1)
    less, more = filled[at - 1, column], filled[at, column]
    # A load may be too small to tell the two apart.
    part = np.divide(wanted - less, more - less, out=np.zeros_like(wanted), where=more > less)
    return brought[at - 1, column] + part * (brought[at, column] - brought[at - 1, column])
