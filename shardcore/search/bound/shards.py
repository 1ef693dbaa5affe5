"""What one device may hold of each table, and what it adds to a step: the parts that a bound is made of.

A shard is (table, kind, units of MIN_WIDTH columns). What each device of a group has is one unit.
Shapes: T tables, N shards, F features, D devices; K kinds: whole rows, and those that groups share.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from shardcore.core.topology import Topology
from shardcore.core.types import MIN_WIDTH, Problem, Shard, Table
from shardcore.cost.model import CostModel
from shardcore.step.id_bytes import received_bytes
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, LAYOUTS, WHOLE_ROWS, Channel, Layout, even_share
from shardcore.step.output_bytes import output_bytes

MOST_SHARDS = 150_000
"""With more possible shards, only widths of powers of two are considered."""
_EVEN_BYTES, _STEP, _ROUNDING = 2.0**24, 2.0**-20, 1e-9
_MORE_BYTES = _EVEN_BYTES * (1 + _STEP)
"""Bytes of each device at which exchanges are priced."""


class BoundShards:
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
    latency_ms: [K] of a kind's collectives of outputs and gradients, whatever they carry.
    ids_ms: of each channel of ids, whatever it carries. Empty where ids are not counted.
    mixes: sets of kinds that plans may use.
    """

    def __init__(self, problem: Problem, model: CostModel, shared: Sequence[Layout], ids: bool) -> None:
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
        first = [next(iter(layout.channels_in(problem.job).values())) for layout in self.kinds]
        carried = np.array(
            [
                first[k](float(s.bytes), output_bytes(s, problem.global_batch), problem)
                for s, k in zip(shards, self.kind, strict=True)
            ],
            dtype=float,
        )
        self.latency_ms, per_byte = self._exchanges()
        self.exchange_ms = self.copies * carried * per_byte[self.kind]
        self.ids_ms, per_id_byte = self._ids() if ids else ({}, np.zeros(len(self.kinds)))
        if per_id_byte.any():
            n_bytes = np.array([received_bytes(s, problem) for s in shards], dtype=float)
            self.exchange_ms += self.copies * n_bytes * per_id_byte[self.kind]
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
        once, more = np.zeros(len(self.kinds)), np.zeros(len(self.kinds))
        for k, layout in enumerate(self.kinds):
            # Bytes of all channels are proportional to those of the first.
            channels = layout.channels_in(self.problem.job)
            entering = np.array([bytes_of(1.0, 1.0, self.problem) for bytes_of in channels.values()])
            for ms, each in ((once, _EVEN_BYTES), (more, _MORE_BYTES)):
                traffic = np.zeros((len(CHANNELS), n))
                rows = [CHANNELS.index(c) for c in channels]
                traffic[rows] = each * (entering / entering[0])[:, None]
                ms[k] = self.model.comm(traffic, np.zeros(n), self.problem.topology).total_ms.max()
        at_0, slope = _tangent(once, more)
        # At least one group is used. Devices of other groups may not wait at all.
        used = np.where((np.arange(len(self.kinds)) > 0) & (at_0 > 0), 1 / self.n_groups, 1.0)
        return used * at_0, slope / n

    def _ids(self) -> tuple[dict[Channel, float], np.ndarray]:
        """ms of each channel of ids at least, and [K] ms per byte, if all devices receive equally many."""
        n, least, per_byte = len(self.speed), {}, np.zeros(len(self.kinds))
        for channel in ID_CHANNELS if n > 1 else ():
            traffic = np.zeros((2, len(CHANNELS), n))
            traffic[:, CHANNELS.index(channel)] = [[_EVEN_BYTES], [_MORE_BYTES]]
            once, more = (
                float(self.model.comm(x, np.zeros(n), self.problem.topology).input_ms.max()) for x in traffic
            )
            least[channel], slope = _tangent(once, more)
            per_byte[[layout.ids == channel for layout in self.kinds]] = slope / n
        return least, per_byte

    def latencies_ms(self, mix: list[int]) -> float:
        """ms of the collectives of plans with these kinds, whatever they carry."""
        channels = {self.kinds[k].ids for k in mix}
        return float(self.latency_ms[mix].sum() + sum(self.ids_ms.get(c, 0.0) for c in channels))

    def cheapest(self, price: np.ndarray, kinds: list[int]) -> tuple[float, np.ndarray | None]:
        """The least total price of shards of these kinds that make up all tables.

        price: [N] with copies included.
        Also returns how often each shard is taken, [N]. inf and None if there is no such set.
        """
        sums, ways = zip(*(_compositions(self.at[k], price, self.size[:, k]) for k in kinds), strict=True)
        best, least = np.argmin(sums, axis=0), float(np.min(sums, axis=0).sum())
        return least, sum(way(best == i) for i, way in enumerate(ways)) if np.isfinite(least) else None

    def least_of_each(self, price: np.ndarray, kinds: list[int]) -> np.ndarray:
        """[T] the least total price of shards of these kinds that make up each table. inf for none."""
        return np.min([_compositions(self.at[k], price, self.size[:, k])[0] for k in kinds], axis=0)

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
        others = [
            layout.words for at, layout in zip(self.at[1:], self.kinds[1:], strict=True) if (at >= 0).any()
        ]
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


def _tangent(once: np.ndarray | float, more: np.ndarray | float) -> tuple[Any, Any]:
    """Its value at 0 and its slope per byte, from ms at _EVEN_BYTES and _MORE_BYTES.

    The law of exchanges is convex, so a tangent is never above it. It is lowered a trace, for rounding.
    """
    slope = (more - once) / (_EVEN_BYTES * _STEP)
    return once * (1 - _ROUNDING) - slope * _EVEN_BYTES, slope


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
