"""Packing: find some plan that fits, at any cost. Used when a search's own order of placing fails.

`free` holds bytes per device. It may have more entries than the problem has devices.
These are further devices, where tables that are not pinned may go.

Shapes: D devices.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.layouts import WHOLE_ROWS, even_share, shards_on
from shardcore.memory import Lookups, columns_bytes
from shardcore.search.best_fit import best_fit
from shardcore.search.free_memory import FreeMemory, bundle_bytes, bytes_alone, freedom
from shardcore.search.shards import bundles, equal_parts, halve_columns
from shardcore.search.shards import division as divided
from shardcore.types import MIN_WIDTH, Placement, Problem, Shard, Table

NODES = 20_000
"""The most steps of best fit with backtracking. A step assigns one bundle."""
MOST_DIVIDED = 64
"""The most tables whose rows are divided in one step although their columns fit."""

Placed = list[tuple[Shard, int]]
"""Shards and their devices."""


@dataclass(frozen=True)
class Packing:
    """shards[i] fits on devices[i]."""

    shards: tuple[Shard, ...]
    devices: tuple[int, ...]


def least_bytes(problem: Problem) -> int:
    """A lower bound on the bytes of any plan without replicas: cutting only adds to them."""
    return sum_bytes(problem.tables, problem)


def sum_bytes(tables: Sequence[Table], problem: Problem) -> int:
    """Bytes of whole tables."""
    return int(_each_bytes(tables, problem).sum())


def _each_bytes(tables: Sequence[Table], problem: Problem, narrowest: bool = False) -> np.ndarray:
    """[T] `table_bytes` of many tables, of all columns or of the fewest that a shard may have."""
    rows, dim = np.array([(t.rows, t.dim) for t in tables], dtype=float).reshape(-1, 2).T
    lookups = Lookups.of_all(tables, problem)
    width = np.array([problem.unit_width(t) for t in tables], dtype=float) if narrowest else dim
    return columns_bytes(lookups, rows, width, dim, problem)


def largest_free(problem: Problem, tables: Sequence[Table], free: Sequence[int]) -> list[int]:
    """For each table, the most free bytes of a device where it may live."""
    largest = {devices: max(free[d] for d in devices) for devices in set(problem.pinned.values())}
    largest[None], pinned = max(free), problem.pinned
    return [largest[pinned.get(t.name)] for t in tables]


@dataclass(frozen=True)
class Division:
    """Which tables have their rows divided.

    rows: row ranges of the divided tables, with their devices.
    tables: all others.
    free: [D] bytes left for these.
    """

    rows: tuple[tuple[Shard, int], ...]
    tables: tuple[Table, ...]
    free: tuple[int, ...]


def divisions(problem: Problem, free: Sequence[int]) -> Iterator[Division]:
    """Ways to divide the rows of tables, those with fewest first.

    First, tables that are too tall (`too_tall`).
    Then also the tallest of the others, 1, 2, 4, ... more: their columns are the coarsest to pack.
    It ends where a table that has to be divided cannot be, or where too little memory is left.
    """
    now, more = Division((), problem.tables, tuple(free)), 1
    while True:
        while needed := too_tall(problem, now.tables, now.free):
            now, n = _with(now, needed, problem)
            if n < len(needed):
                return
        if sum_bytes(now.tables, problem) > sum(max(0, f) for f in now.free):
            return
        yield now
        now, n = _with(now, sorted(now.tables, key=lambda t: -t.rows), problem, more)
        if n == 0 or more > MOST_DIVIDED:
            return
        more *= 2


def too_tall(problem: Problem, tables: Sequence[Table], free: Sequence[int]) -> list[Table]:
    """Tables that may be cut, but that fit no device where they may live, however narrow their columns.

    Columns of a sequence are cut only if its rows cannot be divided: TorchRec needs them equally wide.
    """
    # Cut, ids are sent again: a few columns may take more than the whole table.
    least, whole = _each_bytes(tables, problem, narrowest=True), _each_bytes(tables, problem)
    too_large = np.flatnonzero(np.minimum(least, whole) > largest_free(problem, tables, free))
    also = {i for i, table in enumerate(tables if problem.kinds_of else ())
            if not problem.may_run(WHOLE_ROWS, table)}
    also |= {i for i in np.flatnonzero(whole > largest_free(problem, tables, free))
             if tables[i].sequence and divided(tables[i], problem)}
    return [tables[i] for i in sorted(also.union(too_large)) if tables[i].name not in problem.whole]


def _with(division: Division, tables: Sequence[Table], problem: Problem,
          most: int | None = None) -> tuple[Division, int]:
    """The division with up to `most` further tables divided by rows, and how many those are.

    Tables whose rows cannot be divided, or do not fit, are passed over.
    """
    rows, left, done = list(division.rows), list(division.free), set()
    for table in tables:
        if len(done) == most:
            break
        whole = divided(table, problem)
        ranges = [] if whole is None else [(s, d)
                                           for d, s in shards_on(_on_further(whole, len(left), problem))]
        needs = {d: bytes_alone(s, problem) for s, d in ranges}
        if needs and all(n <= left[d] for d, n in needs.items()):
            left = [f - needs.get(d, 0) for d, f in enumerate(left)]
            rows += ranges
            done.add(table.name)
    return (Division(tuple(rows), tuple(t for t in division.tables if t.name not in done), tuple(left)),
            len(done))


def _on_further(whole: Placement, n_devices: int, problem: Problem) -> Placement:
    """Extend a division over all devices to the further ones, if the number of rows allows it."""
    if len(whole.devices) < len(problem.topology) or not even_share(whole.shard.rows, n_devices):
        return whole
    return replace(whole, devices=(*whole.devices, *range(len(whole.devices), n_devices)))


def cut(problem: Problem, free: Sequence[int]) -> list[Shard] | None:
    """All tables as shards: whole, halved by columns, or divided by rows, as far as the memory requires.

    None if a table that must stay whole is too large, or rows cannot be divided.
    """
    division = next(divisions(problem, free), None)
    halved = _halved(problem, division) if division else None
    return None if halved is None else [*(s for s, _ in division.rows), *halved]


def _halved(problem: Problem, division: Division) -> list[Shard] | None:
    """The other tables, halved by columns as far as needed. None if that does not suffice."""
    shards: list[Shard] = []
    most = largest_free(problem, division.tables, division.free)
    fits = _each_bytes(division.tables, problem) <= most
    fits &= np.array([t.dim <= problem.topology.most_columns for t in division.tables], dtype=bool)
    cut = [(t, n) for t, fit, n in zip(division.tables, fits, most, strict=True) if t.sequence and not fit]
    widths = {name: _equal_width([of for of in cut if of[0].collection == name], problem)
              for name in {t.collection for t, _ in cut}}
    for table, whole_fits, largest in zip(division.tables, fits, most, strict=True):
        waiting = [Shard.whole(table)]
        if whole_fits:
            shards += waiting
            continue
        if table.sequence and table.name not in problem.whole:
            if not (width := widths[table.collection]):
                return None
            shards += equal_parts(table, table.dim // width)
            continue
        while waiting:
            shard = waiting.pop()
            if bytes_alone(shard, problem) <= largest:
                shards.append(shard)
                continue
            halves = None if table.name in problem.whole else halve_columns(shard, problem.unit_width(table))
            if halves is None:
                return None
            waiting += reversed(halves)
    return shards


def _equal_width(cut: Sequence[tuple[Table, int]], problem: Problem) -> int:
    """The most columns of which all of a collection's sequences that are cut may have parts. 0 if none fit.

    TorchRec needs them equally wide. cut: the tables, and the most bytes of a part.
    """
    first = min(cut, key=lambda of: of[0].dim)[0]
    for width in range(first.dim, 0, -MIN_WIDTH):
        if all(t.dim % width == 0 and width % problem.unit_width(t) == 0
               and t.dim // width <= len(problem.allowed_devices(t.name))
               and bytes_alone(Shard(t, 0, t.rows, 0, width), problem) <= most for t, most in cut):
            return width
    return 0


def pack(problem: Problem, free: Sequence[int], nodes: int = NODES) -> Packing | None:
    """A packing into `free` bytes per device, or None.

    For each division of rows, two ways are tried:

    1. Best fit by falling size, with backtracking up to `nodes`. Tables are cut only if no device holds one.
    2. Best fit for the tables that must stay whole. The others are poured into the gaps:
       they are cut by columns wherever a device is full. With pinned tables, a second try packs those first.
    """
    if least_bytes(problem) > sum(max(0, f) for f in free):
        return None
    for division in divisions(problem, free):
        placed = _packed(problem, division, nodes)
        if placed is not None and _equally_wide(placed):
            placed = [*division.rows, *placed]
            return Packing(tuple(shard for shard, _ in placed), tuple(device for _, device in placed))
    return None


def _equally_wide(placed: Placed) -> bool:
    """Tell if the columns of each sequence are cut into equal parts, once those of a device are joined."""
    widths: dict[Table, dict[int, int]] = {}
    for shard, device in placed:
        if shard.table.sequence and shard.width < shard.table.dim:
            on = widths.setdefault(shard.table, {})
            on[device] = on.get(device, 0) + shard.width
    return all(len(set(on.values())) == 1 for on in widths.values())


def _packed(problem: Problem, division: Division, nodes: int) -> Placed | None:
    """A packing of the tables whose rows are not divided."""
    tables, free, halved = division.tables, division.free, _halved(problem, division)
    whole = None if halved is None else _whole(problem, halved, free, nodes)[0]
    if whole is not None:
        return whole
    pinned = [t for t in tables if t.name in problem.pinned]
    rest = [t for t in tables if t.name not in problem.pinned]
    if halved is None and any(t.sequence for t in tables):
        return None  # it is not known how to cut them
    parts = [shard for shard in halved or () if shard.table.sequence]
    placed = _poured(problem, free, nodes, [tables], parts)
    return _poured(problem, free, nodes, [pinned, rest], parts) if placed is None and pinned else placed


def surely_fits(problem: Problem) -> Callable[[Sequence[int]], bool]:
    """A test whether `pack` is certain to succeed with `free` bytes per device. It uses sums only.

    A table, or MIN_WIDTH columns of it, finds no memory only if every device has less than that left.
    That takes earlier tables to fill all but this much of each device.
    The test never says yes if tables are pinned or in bundles, or only some kinds or widths may run them.
    """
    asked, most = problem.constraints, problem.topology.most_columns
    if problem.pinned or problem.bundle_of or asked.kinds or asked.min_widths or any(
            t.dim > most for t in problem.tables):
        return lambda free: False
    rows, dim, whole = np.array([(t.rows, t.dim, t.sequence or t.name in problem.whole)
                                 for t in problem.tables], dtype=float).T
    # as they are packed, or nearly so
    order = np.lexsort((-dim, np.where(whole > 0, -rows * dim, -rows), -whole))
    rows, dim, whole = rows[order], dim[order], whole[order] > 0
    lookups = Lookups(*(of[order] for of in Lookups.of_all(problem.tables, problem)))
    table = columns_bytes(lookups, rows, dim, dim, problem)
    narrowest = columns_bytes(lookups, rows, np.full(len(rows), float(MIN_WIDTH)), dim, problem)
    # A shard's bytes are convex in its columns: at most a line from none to all columns, as if cut.
    all_columns, no_columns = (columns_bytes(lookups, rows, width, dim + 1, problem)
                               for width in (dim, 0 * dim))

    def fits(free: Sequence[int]) -> bool:
        n, available = len(free), sum(max(0, f) for f in free) * (1 - 1e-9)
        # What its shards add to the whole. Each takes a part of the line, and begins at `no_columns`.
        extra = all_columns - table + no_columns * (np.minimum(dim // MIN_WIDTH, n) - 1)
        cut = np.zeros(len(rows), dtype=bool)
        while True:
            left = available - np.cumsum(table + cut * extra)
            more = left + table + cut * extra < n * table  # may find no device with room for all of it
            if (more & whole).any() or (left[more] < n * narrowest[more]).any():
                return False
            if not (more & ~cut).any():
                return True
            cut |= more

    return fits


def whole_impossible(problem: Problem, free: Sequence[int], nodes: int = NODES) -> bool:
    """Whether the tables that must stay whole certainly do not fit together: all assignments were tried."""
    placed, exhausted = _whole(problem, _uncut(problem, problem.tables), free, nodes)
    return placed is None and exhausted


def _uncut(problem: Problem, tables: Sequence[Table]) -> list[Shard]:
    """The tables that must stay whole."""
    return [Shard.whole(t) for t in tables if t.name in problem.whole]


def _whole(problem: Problem, shards: Sequence[Shard], free: Sequence[int],
           nodes: int) -> tuple[Placed | None, bool]:
    """Devices for shards as they are, and whether the answer is certain."""
    of = [(freedom(b, problem), -bundle_bytes(b, problem), b) for b in bundles(shards, problem)]
    of.sort(key=lambda x: x[:2])
    sizes, ordered = [-less for _, less, _ in of], [bundle for *_, bundle in of]
    allowed = [problem.pinned.get(bundle[0].table.name) for bundle in ordered] if problem.pinned else ()
    devices, exhausted = best_fit(sizes, free, nodes, allowed)
    if devices is None:
        return None, exhausted
    return [(shard, d) for bundle, d in zip(ordered, devices, strict=True) for shard in bundle], exhausted


def _poured(problem: Problem, free: Sequence[int], nodes: int,
            groups: Sequence[Sequence[Table]], parts: Sequence[Shard]) -> Placed | None:
    """Pack groups of tables, one after another. In each, tables that must stay whole go first.

    parts: of sequences. They are not cut further.
    """
    room = FreeMemory(problem, free)
    placed: Placed = []
    for tables in groups:
        names = {t.name for t in tables if t.sequence and t.name not in problem.whole}
        uncut = [*_uncut(problem, tables), *(part for part in parts if part.table.name in names)]
        fixed, _ = _whole(problem, uncut, room.left.tolist(), nodes)
        if fixed is None:
            return None
        for shard, device in fixed:
            room.put(shard, device)
            placed.append((shard, device))
        # Tables whose columns are largest go first: small columns fill the gaps that large ones leave.
        rest = sorted((Shard.whole(t) for t in tables if t.name not in problem.whole and not t.sequence),
                      key=lambda s: (freedom((s,), problem), -s.rows, -s.width))
        gaps = _gaps(room)
        for whole in rest:
            n_bytes = bytes_alone(whole, problem)
            i = len(gaps) if problem.pinned else bisect_left(gaps, (n_bytes, -1))
            if i < len(gaps):  # it fits whole: the quick form of `_pour`
                left, device = gaps.pop(i)
                insort(gaps, (left - n_bytes, device))
                room.left[device] = left - n_bytes
                placed.append((whole, device))
                continue
            poured = _pour(whole, room)
            if poured is None:
                return None
            placed, gaps = placed + poured, _gaps(room)
    return placed


def _gaps(room: FreeMemory) -> list[tuple[int, int]]:
    """Free bytes and device, in rising order."""
    return sorted(zip(room.left.tolist(), range(len(room.left)), strict=True))


def _pour(whole: Shard, room: FreeMemory) -> Placed | None:
    """Put a table on the fullest device that takes it whole.

    Otherwise the emptiest device takes as many columns as it can, and the rest is poured again.
    """
    waiting, placed = [whole], []
    while waiting:
        shard = waiting.pop()
        if len(fits := np.flatnonzero(room.fits(shard))):
            device, first, rest = int(fits[np.argmin(room.left[fits])]), shard, []
        else:
            allowed = room.allowed(shard)
            device = int(np.argmax(room.left if allowed is None
                                   else np.where(allowed, room.left, np.iinfo(np.int64).min)))
            both = _first_columns(shard, room, device)
            if both is None:
                return None
            first, rest = both[0], [both[1]]
        room.put(first, device)
        placed.append((first, device))
        waiting += rest
    return placed


def _first_columns(shard: Shard, room: FreeMemory, device: int) -> tuple[Shard, Shard] | None:
    """The most columns that the device takes, and the rest. None if it takes none."""
    unit = room.problem.unit_width(shard.table)

    def first(units: int) -> Shard:
        return replace(shard, col_hi=shard.col_lo + units * unit)
    units = _most(shard.width // unit, lambda n: bool(room.fits(first(n))[device]))
    return (first(units), replace(shard, col_lo=first(units).col_hi)) if units else None


def _most(end: int, fits: Callable[[int], bool]) -> int:
    """The largest n below `end` that fits, or 0. Bisection: what fits, fits with less."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
