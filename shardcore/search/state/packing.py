"""Packing: plans that fit, at any cost. For problems where a search's order of placing finds none.

A way to run a table says how it is cut or shared. With a way chosen for each table, a device's memory in a phase
of a step is a sum of bytes: of its shards, and of a local batch, which is the same on all devices
(step/memory_account.py). So shards are vectors of bytes, to be packed into devices (vector_packing.py).

Few tables are tried in all combinations of ways. Of many, whole tables come first, then more and more of the
largest are divided.

Shapes: D devices, P phases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from shardcore.core.progress import ticking
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.search.state.cuts import bytes_by_columns, cuts_of
from shardcore.search.state.shards import Bundle, bundles, equal_parts, shared_groups, why_not
from shardcore.search.state.vector_packing import VectorPacking
from shardcore.step import memory
from shardcore.step.id_bytes import sample_bytes
from shardcore.step.kinds import LAYOUTS, WHOLE_ROWS, Group, run_of, shards_on
from shardcore.step.memory import Caches, held_bytes
from shardcore.step.memory_account import account_of, own_peaks, sums_of
from shardcore.step.op_limits import TooManyInOneOp, require_ops

_MOST_CHOICES = 1500
"""Combinations of ways for all tables: if there are no more than these, each is tried."""
_SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
"""Shares of a device's room that one shard may take, in further tries."""
_LEAST_SLACK = 1.1
"""Fewer parts are chosen if they take at most this multiple of the least bytes."""
LARGE = 1 << 16
"""Devices × tables of a large problem: it gets few tries."""
_IMPROVED_WITHIN = 0.1
"""A packing is improved, one table at a time, if it lacks at most this share of a device."""
_IMPROVING_TRIES = 20_000
"""Packings tried for that, times tables: one of many tables takes longer."""
_NEAR_MEAN = 1.01
"""Tries for a large problem end once a device lacks at most this multiple of what devices lack in the mean."""


@dataclass(frozen=True)
class Way:
    """A way to run a table.

    kind: of sharding.
    parts: number of shards by columns, with all rows, each on another device.
    devices: the group that shares the table. Empty if devices have shards by columns.
    """

    kind: str = WHOLE_ROWS.name
    parts: int = 1
    devices: Group = ()


@lru_cache(maxsize=8)
def roomiest(problem: Problem, quick: bool = False) -> tuple[Plan | None, int]:
    """A plan that fits, or the plan that lacks least of those tried, and the bytes that some device lacks.

    quick: try few ways.

    The bytes are 0 or less if it fits. No plan: constraints leave a table no kind.
    """
    packings, best = _Packings(problem), None
    if len(packings.firsts) < len(packings.bundles):
        return None, 0
    for ways in packings.choices(quick):
        best = packings.better(ways, best) or best
        # No other way has much less to pack.
        if best and (best.lacks <= 0 or (packings.large and best.lacks <= _NEAR_MEAN * packings.short)):
            break
    if best is None:
        return None, 0
    if best.lacks > 0 and not quick and not packings.large:
        best = packings.improved(best)
        if best.lacks > 0 and (poured := packings.poured()):
            return poured, 0
    return best.plan, best.lacks


def lacking(plan: Plan, problem: Problem) -> int:
    """The most bytes that a device with a shard takes more than it may."""
    lacks = np.subtract(memory.used_bytes(plan, problem), held_bytes(problem))
    return int(max(lacks[d] for placement in plan.placements for d in placement.devices))


def within_ops(plan: Plan, problem: Problem) -> bool:
    """Tell if no op has more than FBGEMM runs."""
    try:
        require_ops(plan, problem)
    except TooManyInOneOp:
        return False
    return True


class _Packing(NamedTuple):
    """A plan of some ways, and the bytes that it lacks. 0 or less: it fits."""

    ways: tuple[Way, ...]
    plan: Plan
    lacks: int


class _Packings:
    """Packings of a problem.

    n: number of devices.
    bundles: tables that go together.
    firsts: the first way of each bundle. One is missing where constraints leave it none.
    ways: number of a bundle -> all its ways.
    large: whether the problem gets few tries.
    room: most bytes that a device has left for shards by columns, in the last packing.
    short: bytes that devices lack in the mean in the last packing, in the phase in which they lack most.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.n = problem, len(problem.topology)
        tables = self.bundles = bundles(map(Shard.whole, problem.tables), problem)
        # Only the first way of each: with very many tables, listing all takes long.
        firsts = [next(_ways(bundle, problem), None) for bundle in ticking(self.bundles)]
        self.firsts = [way for way in firsts if way]
        self.large = len(self.bundles) * self.n > LARGE
        self.room = self.short = 0.0
        self.ways = cache(lambda i: list(_ways(tables[i], problem)))
        self._peak_of, self._sums_of = own_peaks(problem), cache(partial(sums_of, problem=problem))
        self._bytes_of: dict[tuple[int, Way], int] = {}

    def choices(self, quick: bool) -> Iterator[tuple[Way, ...]]:
        """A way for each bundle, and then others."""
        n = range(len(self.bundles))
        # Few tables: all choices, with the simplest ways first.
        if len(n) <= 20 and prod(len(self.ways(i)) for i in n) <= _MOST_CHOICES:
            ranked = product(*(enumerate(self.ways(i)) for i in n))
            for choice in sorted(ranked, key=lambda choice: sum(rank for rank, _ in choice)):
                yield tuple(way for _, way in choice)
            return
        # Few and large shards first. With less room for each, tables are cut further, or shared.
        most_room = max(held_bytes(self.problem))
        if self.large:
            # Cuts do not help where whole tables take more than there is. They only add ids and state of rows.
            whole = sum(self._bytes(i, self.firsts[i]) for i in ticking(n)) / self.n
            most_room = most_room if whole <= most_room else 2 * whole
        ways = tuple(self._within(i, most_room, 1.0) for i in n)
        yield ways
        # Where a local batch leaves no room, as much as if all tables were divided evenly.
        even = sum(self._bytes(i, ways[i]) for i in n if not ways[i].devices) / self.n
        room = max(self.room, 2 * even)
        # Smaller shares cut more tables, which leaves smaller gaps, but sends ids more often.
        for share in _SHARES:
            before, ways = ways, tuple(self._within(i, room, share) for i in ticking(n))
            if ways != before:
                yield ways
        if quick or self.large:
            return
        # Tables that take less memory on all devices than on one, and more and more of the largest in rows.
        copied = [self._copied(i) or way for i, way in enumerate(ways)]
        largest = sorted(n, key=lambda i: -self._bytes(i, self.firsts[i]))
        for n_divided in (0, *(8**k for k in range(4))):
            divided = {
                i: next((way for way in self.ways(i) if LAYOUTS[way.kind].divides_rows), None)
                for i in largest[:n_divided]
            }
            yield tuple(divided.get(i) or way for i, way in enumerate(ways))
            yield tuple(divided.get(i) or way for i, way in enumerate(copied))

    def _within(self, i: int, room: float, share: float) -> Way:
        """The fewest columns' shards of a bundle that take no more than a share of the room.

        If none do, those that take about least. Groups share a bundle only where its columns do not fit.
        """
        first = self.firsts[i]
        if not first.devices and self._bytes(i, first) <= share * room:
            return first
        cut, shared = ([w for w in self.ways(i) if bool(w.devices) == several] for several in (False, True))
        # More parts send ids again, and do not sort fewer.
        least = _LEAST_SLACK * min((self._bytes(i, way) for way in cut), default=np.inf)
        enough = max(share * room, least) if least <= room else share * room
        for ways, most in ((cut, enough), (shared, room)):
            if way := next((way for way in ways if self._bytes(i, way) <= most), None):
                return way
        return min(self.ways(i), key=lambda way: self._bytes(i, way))

    def _copied(self, i: int) -> Way | None:
        """The replicas of a table, if all together take less than it does whole."""
        ways = [way for way in self.ways(i) if LAYOUTS[way.kind].local_batch]
        most = self._bytes(i, self.firsts[i])
        return next((way for way in ways if self.n * self._bytes(i, way) < most), None)

    def _bytes(self, i: int, way: Way) -> int:
        """Estimated bytes that a device has of a bundle."""
        if (i, way) not in self._bytes_of:
            # The last part is the widest where units do not divide evenly.
            shards = self._parts(i, way)[-1]
            if LAYOUTS[way.kind].divides_rows:
                shards = [next(s for _, s in shards_on(Placement(way.kind, shards[0], way.devices)))]
            self._bytes_of[i, way] = sum(self._peak_of(run_of(way.kind, s.table), s) for s in shards)
        return self._bytes_of[i, way]

    def _parts(self, i: int, way: Way) -> list[Bundle]:
        """Parts of a bundle by columns, each for another device."""
        bundle = self.bundles[i]
        if way.parts == 1:
            return [bundle]
        unit = self.problem.unit_width(bundle[0].table)
        return [(part,) for part in equal_parts(bundle[0], way.parts, unit)]

    def improved(self, best: _Packing) -> _Packing:
        """The packing, with other ways of one table at a time while it lacks less so."""
        # Far from fitting, one table at a time does not get there.
        if best.lacks > _IMPROVED_WITHIN * max(held_bytes(self.problem)):
            return best
        # Large tables first: another way of one changes most.
        largest = sorted(range(len(best.ways)), key=lambda i: -self._bytes(i, self.firsts[i]))
        before, n_tries = None, _IMPROVING_TRIES // len(self.bundles)
        while best is not before:
            before = best
            for i in largest:
                for way in self.ways(i):
                    if best.lacks <= 0 or n_tries <= 0:
                        return best
                    if way != best.ways[i]:
                        n_tries -= 1
                        best = self.better((*best.ways[:i], way, *best.ways[i + 1 :]), best) or best
        return best

    def better(self, ways: tuple[Way, ...], best: _Packing | None) -> _Packing | None:
        """A packing of these ways, if it lacks less than the best one."""
        packed = self._packed(ways, best.lacks if best else np.inf)
        if packed is None:
            return None
        plan, lacks = packed
        # Parts of a table that meet on a device are one shard, so the packing may have counted too much.
        exact = lacking(plan, self.problem)
        if not within_ops(plan, self.problem):
            exact = max(exact, math.ceil(lacks), 1)
        return None if best and exact >= best.lacks else _Packing(ways, plan, exact)

    def _packed(self, ways: Sequence[Way], most: float) -> tuple[Plan, float] | None:
        """A plan of these ways, and the bytes that it lacks. None if it lacks `most` or more."""
        shared, parts = [], []
        for i, way in enumerate(ways):
            if way.devices:
                shared += [Placement(way.kind, s, way.devices) for s in self.bundles[i]]
            else:
                parts += self._parts(i, way)
        # TorchRec refuses such a plan.
        if not equally_wide(parts):
            return None
        # The account needs every shard, but not its device.
        anywhere = _placements(parts, [i % self.n for i in range(len(parts))])
        account = account_of((*shared, *anywhere), self.problem)
        caches = Caches.of(
            (run_of(p.kind, s.table), s) for p in (*shared, *anywhere) for _, s in shards_on(p)
        )

        def vector(kind: str, shard: Shard) -> np.ndarray:
            run = run_of(kind, shard.table)
            n_bytes = account.vector(run, shard, self._sums_of(run, shard))
            return np.append(n_bytes, caches.total([(run, shard)])) if len(caches) else n_bytes

        n_limits = len(account.base)
        # [D, P + C] of tables that groups share. They are there before any shard is packed.
        load = np.zeros((self.n, n_limits + len(caches)))
        for placement in shared:
            for device, shard in shards_on(placement):
                load[device] += vector(placement.kind, shard)
        may_hold = account.limits - account.base
        self.room = float((may_hold - load[:, :n_limits]).min(1).max())
        vectors = np.zeros((len(parts), load.shape[1]))
        for i, bundle in enumerate(ticking(parts)):
            vectors[i] = sum(vector(WHOLE_ROWS.name, s) for s in bundle)
        # However shards are packed, in each phase all devices together take at least their sum.
        needed = (load.sum(0) + vectors.sum(0))[:n_limits] + self.n * account.base
        self.short = float((needed - np.maximum(account.limits, 0).sum(0)).max()) / self.n
        # No packing can lack less than the mean, so none need be tried.
        if shared and self.short >= most:
            return None
        names = [bundle[0].table.name for bundle in parts]
        allowed = list(map(self.problem.allowed_devices, names))
        lacks, devices = VectorPacking(account, caches, load, vectors, allowed, names).best(most)
        if devices is None:
            return None
        return Plan((*shared, *_placements(parts, devices))), lacks

    def poured(self) -> Plan | None:
        """A plan by columns that fits, with tables cut to the widths of the gaps. None if none is found.

        The largest first, each whole where it leaves least room. If that is nowhere, each device in turn
        takes as many columns as it has room for.
        """
        problem, cuts = self.problem, cuts_of(self.problem)
        if not all(why_not(WHOLE_ROWS, s.table, problem) is None for bundle in cuts.bundles for s in bundle):
            return None
        # As if every run had a cut table, as it is not known yet which tables are cut.
        account, room = cuts.cut_account, cuts.room(cuts.cut_account)

        vector = partial(bytes_by_columns, account=account)

        def rank(bundle: Bundle) -> tuple[int, float]:
            largest = sum(vector((s,)).max() for s in bundle)
            return len(problem.allowed_devices(bundle[0].table.name)), -largest

        # Tables with least freedom first, then the largest.
        placements = list(cuts.fixed)
        for bundle in sorted(cuts.bundles, key=rank):
            table, needs = bundle[0].table, vector(bundle)
            may = np.isin(np.arange(self.n), problem.allowed_devices(table.name))
            left = np.where(may, (room - needs).min(1), -1.0)
            if (left >= 0).any() and table.dim <= problem.topology.most_columns:
                device = int(np.where(left >= 0, left, np.inf).argmin())
                room[device] -= needs
                placements += _placements([bundle], [device])
                continue
            unit, lo = problem.unit_width(table), 0
            if len(bundle) > 1 or table.sequence or table.name in problem.whole or table.dim == unit:
                return None
            ids = problem.local_batch * sample_bytes(table, problem.job) * account.sent
            one, two = (vector((Shard(table, 0, table.rows, 0, n * unit),)) for n in (1, 2))
            a_unit = two - one  # bytes are linear in columns; ids, and state of rows, do not depend on them
            while lo < table.dim:
                # [D, P] units beyond the first that fit in each phase. Any number if they add nothing there.
                with np.errstate(divide="ignore", invalid="ignore"):
                    more = np.where(a_unit > 0, (room - one) / a_unit, np.where(room >= one, np.inf, -1.0))
                # [D] units that fit in all phases. -1 where the table may not be.
                most = np.where(may, np.floor(more.min(1) + 1), -1.0)
                device = int(most.argmax())
                if most[device] < 1:
                    return None
                # As wide as the gap, the rest of the table, and FBGEMM allow.
                units = min(most[device], (table.dim - lo) // unit, problem.most_width(table) // unit)
                part = (Shard(table, 0, table.rows, lo, lo + int(units) * unit),)
                placements += _placements([part], [device])
                # A second part there would be one shard with the first.
                may[device] = False
                room[device] -= vector(part)
                if lo:
                    room -= ids  # each further part sends the ids once more, to all
                lo = part[0].col_hi
        # The account counted cut tables in every run, so the exact one decides.
        plan = Plan(tuple(placements))
        return plan if memory.fits(plan, problem) and within_ops(plan, problem) else None


def _placements(bundles: Sequence[Bundle], devices: Sequence[int]) -> list[Placement]:
    """bundles[i] by columns on devices[i]."""
    pairs = zip(bundles, devices, strict=True)
    return [Placement(WHOLE_ROWS.name, s, (d,)) for bundle, d in pairs for s in bundle]


# --- ways to run tables -------------------------------------------------------------------------------------


def _ways(bundle: Bundle, problem: Problem) -> Iterator[Way]:
    """The ways that constraints allow, whole tables first."""
    table = bundle[0].table
    if all(why_not(WHOLE_ROWS, s.table, problem) is None for s in bundle):
        most = min(table.dim // problem.unit_width(table), len(problem.allowed_devices(table.name)))
        most = 1 if table.name in problem.whole else most
        # Few of the possible numbers, as the ways of all tables multiply.
        numbers = dict.fromkeys([1, 2, 3, *(1 << k for k in range(2, most.bit_length())), most])
        yield from (Way(parts=n) for n in numbers if n <= most and _may_be_parts(table, n, problem))
    for layout in LAYOUTS.values() if len(bundle) == 1 else ():
        if layout is not WHOLE_ROWS and why_not(layout, table, problem) is None:
            yield from (Way(layout.name, devices=group) for group in shared_groups(layout, table, problem))


def _may_be_parts(table: Table, n: int, problem: Problem) -> bool:
    """Tell if FBGEMM runs n parts of a table. Those of a sequence have to be equally wide."""
    unit, units = problem.unit_width(table), table.dim // problem.unit_width(table)
    widest = -(-units // n) * unit
    return widest <= problem.topology.most_columns and not (table.sequence and units % n)


def equally_wide(parts: Sequence[Bundle]) -> bool:
    """Tell if all cut sequences of a collection have parts of one width, as TorchRec needs them."""
    widths: dict[str, int] = {}
    return all(
        widths.setdefault(s.table.collection, s.width) == s.width
        for bundle in parts
        for s in bundle
        if s.table.sequence and s.width < s.table.dim
    )
