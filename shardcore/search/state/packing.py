"""Packing: plans that fit, at any cost. For where a search's own order of placing finds none.

Once it is known how each table runs, what a device holds in a phase of a step is a sum: of its shards' bytes
then, and of a local batch's, which are the same on all devices (step/memory_account.py). So shards are
vectors of bytes, to be packed into devices. How tables run is tried in turn: all ways if there are few
tables, else whole tables first, and then more and more of the largest divided.

Shapes: D devices, P phases.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import prod

import numpy as np

from shardcore.core.progress import ticking
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.search.state.shards import Bundle, bundles, fixed_placements, shared_groups, why_not
from shardcore.search.state.vector_packing import VectorPacking
from shardcore.step import memory
from shardcore.step.id_bytes import sample_bytes
from shardcore.step.kinds import LAYOUTS, WHOLE_ROWS, Group, Layout, run_of, shards_on
from shardcore.step.memory_account import Account, Sums, account_of, own_peaks, sums_of
from shardcore.step.memory_timeline import IDS_ALIVE
from shardcore.step.op_limits import TooManyInOneOp, require_ops
from shardcore.step.shard_memory import run_batches

_ALL = 1500
"""With fewer ways to run all tables, each is tried."""
_SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
"""Share of the room on a device that a shard may take in further tries."""
_MOVES = 5000
"""Moves that repair a plan, at most."""
_NEARLY = 1.1
"""Parts that take so much more than the least are as good, if they are fewer."""
_LARGE = 1 << 16
"""Devices × tables of a large problem: it gets few tries."""


@dataclass(frozen=True)
class Way:
    """How a table runs.

    kind: of sharding.
    parts: shards of all rows by columns, each for a device of its own.
    devices: the group that shares the table. Empty for such shards.
    """

    kind: str = WHOLE_ROWS.name
    parts: int = 1
    devices: Group = ()


@lru_cache(maxsize=8)
def roomiest(problem: Problem, quick: bool = False) -> tuple[Plan | None, int]:
    """The plan found that fits, or the one that lacks least, and the bytes that it lacks on some device.

    quick: try few ways.

    The bytes are 0 or less if it fits. None: constraints leave a table no kind.
    """
    found, search = (None, 0), _Search(problem)
    if not all(search.ways):
        return found
    for ways in search.choices(quick):
        plan, lacks = search.packed(ways, found)
        if plan is not None and (found[0] is None or lacks < found[1]):
            # Parts of a table that meet on a device are one shard, so the packing may have counted too much.
            exact = lacking(plan, problem)
            found = plan, exact if within_ops(plan, problem) else max(exact, math.ceil(lacks), 1)
            if found[1] <= 0:
                break
    few = not quick and len(search.bundles) * search.n <= _LARGE
    if found[0] is not None and found[1] > 0 and few and (plan := search.poured()):
        return plan, 0
    return found


def lacking(plan: Plan, problem: Problem) -> int:
    """The most bytes that a device with a shard takes more than it may."""
    holding = {d for placement in plan.placements for d in placement.devices}
    used, may_hold = memory.used_bytes(plan, problem), memory.held_bytes(problem)
    return max(used[d] - may_hold[d] for d in holding)


def repaired(plan: Plan, problem: Problem) -> Plan | None:
    """The plan with shards moved away from devices that they do not fit, to others. None if some stay.

    Each move is one that leaves the fuller of two devices least full. Tables keep their kinds and widths.
    """
    account = account_of(plan.placements, problem)
    may_hold = account.limits
    load = np.tile(account.base, (len(may_hold), 1))
    placements, movable = list(plan.placements), defaultdict(set)
    where = defaultdict(set)
    for i, p in enumerate(placements):
        for device, shard in shards_on(p):
            load[device] += account.vector(run_of(p.kind, shard.table), shard)
            where[shard.table.name].add(device)
        if p.kind == WHOLE_ROWS.name and p.shard.table.name not in problem.bundle_of:
            movable[p.devices[0]].add(i)
    used = np.isin(np.arange(len(load)), [d for p in placements for d in p.devices])
    for _ in range(_MOVES):
        lacks = np.where(used, (load - may_hold).max(1), -np.inf)
        device = int(lacks.argmax())
        if lacks[device] <= 0:
            found = Plan(tuple(placements))
            return found if memory.fits(found, problem) and within_ops(found, problem) else None
        at = sorted(movable[device])
        if not at:
            return None
        shards = [placements[i].shard for i in at]
        vectors = np.array([account.vector(run_of(WHOLE_ROWS.name, s.table), s) for s in shards])
        stay = (load[device] - vectors - may_hold[device]).max(1)
        come = np.full((len(at), len(load)), np.inf)
        for k, s in enumerate(shards):
            targets = [d for d in problem.allowed_devices(s.table.name) if d not in where[s.table.name]]
            come[k, targets] = (load[targets] + vectors[k] - may_hold[targets]).max(1)
        after = np.maximum(stay[:, None], come)
        # Of moves after which both fit, the smallest shard.
        after = np.where(after <= 0, vectors.max(1)[:, None] - vectors.max() - 1, after)
        k, target = np.unravel_index(int(after.argmin()), after.shape)
        if after[k, target] >= lacks[device]:
            return None
        i, name = at[k], shards[k].table.name
        placements[i] = replace(placements[i], devices=(int(target),))
        load[device] -= vectors[k]
        load[target] += vectors[k]
        used[target] = True
        movable[device].remove(i)
        movable[int(target)].add(i)
        where[name] = where[name] - {device} | {int(target)}
    return None


def within_ops(plan: Plan, problem: Problem) -> bool:
    """Tell if no op has more than FBGEMM runs."""
    try:
        require_ops(plan, problem)
    except TooManyInOneOp:
        return False
    return True


class _Search:
    """Packings of a problem.

    bundles: tables that go together.
    ways: of each bundle, those that constraints allow.
    room: most bytes that a device has left for shards by columns, in the last packing.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.n = problem, len(problem.topology)
        self.may_hold = np.array(memory.held_bytes(problem), dtype=float)
        self.bundles = bundles(map(Shard.whole, problem.tables), problem)
        self.ways = [_ways(bundle, problem) for bundle in ticking(self.bundles)]
        self.room = 0.0
        self._own_peak = own_peaks(problem)
        self._about: dict[tuple[int, Way], int] = {}
        self._sums: dict[tuple[Layout, Shard], Sums] = {}

    def choices(self, quick: bool) -> Iterator[tuple[Way, ...]]:
        """A way for each bundle, and then others."""
        if prod(len(ways) for ways in self.ways[:20]) <= _ALL and len(self.ways) <= 20:
            ranked = product(*(enumerate(ways) for ways in self.ways))
            for choice in sorted(ranked, key=lambda choice: sum(rank for rank, _ in choice)):
                yield tuple(way for _, way in choice)
            return
        # Few and large shards first. With less room for each, tables are cut further, or shared.
        n = range(len(self.bundles))
        ways = tuple(self._within(i, self.may_hold.max(), 1.0) for i in n)
        yield ways
        # Where a local batch leaves no room, as much as if all tables were divided evenly.
        room = max(self.room, 2 * sum(self._bytes(i, ways[i]) for i in n if not ways[i].devices) / self.n)
        for share in _SHARES:
            before, ways = ways, tuple(self._within(i, room, share) for i in ticking(n))
            if ways != before:
                yield ways
        if quick or len(ways) * self.n > _LARGE:
            return
        # Tables that take less memory on all devices than on one, and more and more of the largest in rows.
        copied = [self._copied(i) or way for i, way in enumerate(ways)]
        order = np.argsort([-self._bytes(i, of[0]) for i, of in enumerate(self.ways)], kind="stable").tolist()
        for n in (0, *(8**k for k in range(4))):
            divided = {i: self._divided(i) for i in order[:n]}
            yield tuple(divided.get(i) or way for i, way in enumerate(ways))
            yield tuple(divided.get(i) or way for i, way in enumerate(copied))

    def _within(self, i: int, room: float, share: float) -> Way:
        """The fewest columns' shards of a bundle that take no more than a share of the room.

        If none do, those that take about least. Groups share a bundle only where its columns do not fit.
        """
        cut, shared = ([w for w in self.ways[i] if bool(w.devices) == several] for several in (False, True))
        # More parts send ids again, and do not sort fewer.
        least = _NEARLY * min((self._bytes(i, way) for way in cut), default=np.inf)
        enough = max(share * room, least) if least <= room else share * room
        for ways, most in ((cut, enough), (shared, room)):
            if way := next((way for way in ways if self._bytes(i, way) <= most), None):
                return way
        return min(self.ways[i], key=lambda way: self._bytes(i, way))

    def _copied(self, i: int) -> Way | None:
        """The replicas of a table, if all together take less than it does whole."""
        ways = [way for way in self.ways[i] if LAYOUTS[way.kind].local_batch]
        most = self._bytes(i, self.ways[i][0])
        return next((way for way in ways if self.n * self._bytes(i, way) < most), None)

    def _divided(self, i: int) -> Way | None:
        return next((way for way in self.ways[i] if LAYOUTS[way.kind].divides_rows), None)

    def _bytes(self, i: int, way: Way) -> int:
        """About the bytes that a device has of a bundle."""
        if (i, way) not in self._about:
            shards = self.bundles[i]
            if way.parts > 1:
                shards = _parts(shards[0].table, way.parts, self.problem)[-1:]
            if LAYOUTS[way.kind].divides_rows:
                shards = [next(s for _, s in shards_on(Placement(way.kind, shards[0], way.devices)))]
            self._about[i, way] = sum(self._own_peak(run_of(way.kind, s.table), s) for s in shards)
        return self._about[i, way]

    def poured(self) -> Plan | None:
        """A plan by columns that fits, with tables cut to the widths of the gaps. None if none is found.

        The largest first, each whole where it leaves least room. If that is nowhere, each device in turn
        takes as many columns as it has room for.
        """
        fixed, problem = fixed_placements(self.problem), self.problem
        kept = {p.shard.table.name for p in fixed}
        poured = [bundle for bundle in self.bundles if bundle[0].table.name not in kept]
        if not all(why_not(WHOLE_ROWS, s.table, problem) is None for bundle in poured for s in bundle):
            return None
        found = [Placement(WHOLE_ROWS.name, s, (0,)) for bundle in poured for s in bundle]
        batches = run_batches([*found, *fixed], problem)
        account = Account.of(
            {run: replace(batch, cut=not run.local_batch) for run, batch in batches.items()}, problem
        )
        room, found = account.limits - account.base - account.loads(fixed), list(fixed)

        def vector(shard: Shard) -> np.ndarray:
            return account.vector(run_of(WHOLE_ROWS.name, shard.table), shard)

        for bundle in sorted(
            poured,
            key=lambda b: (len(problem.allowed_devices(b[0].table.name)), -sum(vector(s).max() for s in b)),
        ):
            table, needs = bundle[0].table, sum(map(vector, bundle))
            allowed = list(problem.allowed_devices(table.name))
            left = np.where(np.isin(np.arange(self.n), allowed), (room - needs).min(1), -1.0)
            if (left >= 0).any() and table.dim <= problem.topology.most_columns:
                device = int(np.where(left >= 0, left, np.inf).argmin())
                room[device] -= needs
                found += [Placement(WHOLE_ROWS.name, s, (device,)) for s in bundle]
                continue
            if len(bundle) > 1 or table.sequence or table.name in problem.whole:
                return None
            unit, lo = problem.unit_width(table), 0
            if table.dim == unit:
                return None
            ids = IDS_ALIVE * problem.local_batch * sample_bytes(table, problem.job)
            one, two = (vector(Shard(table, 0, table.rows, 0, n * unit)) for n in (1, 2))
            a_unit = two - one  # bytes are linear in columns; ids, and state of rows, do not depend on them
            while lo < table.dim:
                most = np.full(self.n, -1.0)
                with np.errstate(divide="ignore", invalid="ignore"):
                    more = np.where(a_unit > 0, (room - one) / a_unit, np.where(room >= one, np.inf, -1.0))
                most[allowed] = np.floor(more.min(1) + 1)[allowed]
                device = int(most.argmax())
                if most[device] < 1:
                    return None
                units = min(most[device], (table.dim - lo) // unit, problem.most_width(table) // unit)
                shard = Shard(table, 0, table.rows, lo, lo + int(units) * unit)
                found.append(Placement(WHOLE_ROWS.name, shard, (device,)))
                allowed.remove(device)
                room[device] -= vector(shard)
                if lo:
                    room -= ids  # a part more sends the ids once more, to all
                lo = shard.col_hi
        plan = Plan(tuple(found))
        return plan if memory.fits(plan, problem) and within_ops(plan, problem) else None

    def packed(self, ways: Sequence[Way], best: tuple[Plan | None, int]) -> tuple[Plan | None, float]:
        """A plan of these ways, and the bytes that it lacks. None if that is no better than the best."""
        shared, parts = [], []
        for bundle, way in zip(self.bundles, ways, strict=True):
            if way.devices:
                shared += [Placement(way.kind, s, way.devices) for s in bundle]
            elif way.parts == 1:
                parts.append(bundle)
            else:
                parts += [(part,) for part in _parts(bundle[0].table, way.parts, self.problem)]
        if not equally_wide(parts):
            return None, 0
        some = [
            Placement(WHOLE_ROWS.name, s, (i % self.n,)) for i, bundle in enumerate(parts) for s in bundle
        ]
        account = account_of((*shared, *some), self.problem)
        may_hold = account.limits

        def vector(run: Layout, shard: Shard) -> np.ndarray:
            if (run, shard) not in self._sums:
                self._sums[run, shard] = sums_of(run, shard, self.problem)
            return account.vector(run, shard, self._sums[run, shard])

        load = np.tile(account.base, (self.n, 1))
        for placement in shared:
            for device, shard in shards_on(placement):
                load[device] += vector(run_of(placement.kind, shard.table), shard)
        self.room = (may_hold - load).min(1).max()
        vectors = np.array(
            [sum(vector(run_of(WHOLE_ROWS.name, s.table), s) for s in bundle) for bundle in ticking(parts)]
        ).reshape(len(parts), load.shape[1])
        most = best[1] if best[0] is not None else np.inf
        # However shards are packed, in each phase all devices together take their sum.
        together = (load.sum(0) + vectors.sum(0) - np.maximum(may_hold, 0).sum(0)).max()
        if len(shared) and together / self.n >= most:
            return None, 0
        packing = VectorPacking(
            may_hold,
            load,
            bool(shared),
            vectors,
            [self.problem.allowed_devices(b[0].table.name) for b in parts],
            [b[0].table.name for b in parts],
        )
        lacks, devices = packing.best(most)
        if devices is None:
            return None, 0
        return Plan(
            (
                *shared,
                *(
                    Placement(WHOLE_ROWS.name, s, (d,))
                    for bundle, d in zip(parts, devices, strict=True)
                    for s in bundle
                ),
            )
        ), lacks


# --- ways to run tables -------------------------------------------------------------------------------------


def _ways(bundle: Bundle, problem: Problem) -> list[Way]:
    """The ways that constraints allow, whole tables first."""
    table, found = bundle[0].table, []
    if all(why_not(WHOLE_ROWS, s.table, problem) is None for s in bundle):
        whole = table.name in problem.whole
        most = (
            1
            if whole
            else min(table.dim // problem.unit_width(table), len(problem.allowed_devices(table.name)))
        )
        numbers = dict.fromkeys([1, 2, 3, *(1 << k for k in range(2, most.bit_length())), most])
        found = [Way(parts=n) for n in numbers if n <= most and _may_be_parts(table, n, problem)]
    if len(bundle) > 1:
        return found
    for layout in LAYOUTS.values():
        if layout is not WHOLE_ROWS and why_not(layout, table, problem) is None:
            found += [Way(layout.name, devices=group) for group in shared_groups(layout, table, problem)]
    return found


def _may_be_parts(table: Table, n: int, problem: Problem) -> bool:
    unit = problem.unit_width(table)
    return -(-table.dim // unit // n) * unit <= problem.topology.most_columns and not (
        table.sequence and table.dim // unit % n
    )


def _parts(table: Table, n: int, problem: Problem) -> list[Shard]:
    """The table in n shards by columns, as equal as its unit allows."""
    unit = problem.unit_width(table)
    ends = [table.dim // unit * i // n * unit for i in range(n + 1)]
    return [Shard(table, 0, table.rows, lo, hi) for lo, hi in pairwise(ends)]


def equally_wide(parts: Sequence[Bundle]) -> bool:
    """Tell if all cut sequences of a collection have parts of one width, as TorchRec needs them."""
    widths: dict[str, int] = {}
    return all(
        widths.setdefault(s.table.collection, s.width) == s.width
        for bundle in parts
        for s in bundle
        if s.table.sequence and s.width < s.table.dim
    )
