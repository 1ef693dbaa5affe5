"""Packing: some plan that fits, whatever it costs, for when a search's own order of placing runs into a wall.

`free` bytes per device may have entries beyond the problem's devices: more devices, where tables that are not pinned may go.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.search.pieces import halve_columns, halve_rows, items
from shardcore.search.room import Room, freedom, item_bytes, piece_bytes
from shardcore.types import MIN_WIDTH, Problem, Shard, Table

NODES = 20_000
"""Assignments of a single piece that best fit with backtracking may try."""


@dataclass(frozen=True)
class Packing:
    """pieces[i] fits on devices[i]."""

    pieces: tuple[Shard, ...]
    devices: tuple[int, ...]


def least_bytes(problem: Problem) -> int:
    """Bytes that any plan takes at least: cutting and replicating only add to them."""
    return sum(piece_bytes(Shard.whole(t), problem) for t in problem.tables)


def largest_free(problem: Problem, free: Sequence[int]) -> list[int]:
    """For each table, the most bytes that a device where it may live has free."""
    largest = {devices: max(free[d] for d in devices) for devices in set(problem.pinned.values())}
    largest[None] = max(free)
    return [largest[problem.pinned.get(t.name)] for t in problem.tables]


def cut(problem: Problem, free: Sequence[int]) -> list[Shard] | None:
    """The tables, those above the largest of `free` bytes (where they may live) in halves: columns first, rows where four columns
    are too much.

    None where a table that must stay whole, or one row of four columns, is above it; or where the row ranges alone, each with
    its own outputs, come to more than all devices have.
    """
    left_for_rows = sum(max(0, f) for f in free)
    pieces: list[Shard] = []
    for table, largest in zip(problem.tables, largest_free(problem, free), strict=True):
        waiting = [Shard.whole(table)]
        while waiting:
            shard = waiting.pop()
            if piece_bytes(shard, problem) <= largest:
                left_for_rows -= 0 if shard.full_rows else piece_bytes(shard, problem)
                if left_for_rows < 0:
                    return None
                pieces.append(shard)
                continue
            halves = None if table.name in problem.whole else halve_columns(shard) or halve_rows(shard)
            if halves is None:
                return None
            waiting += reversed(halves)
    return pieces


def pack(problem: Problem, free: Sequence[int], nodes: int = NODES) -> Packing | None:
    """Pieces and devices that fit into `free` bytes per device, or None where neither of two ways finds any:

    1. the tables, cut only where no device holds one, by best fit in falling size, with backtracking up to `nodes`;
    2. the tables that must stay whole in that way, the others poured into the gaps, cut wherever a device is full; where tables
       are pinned, also these first in both ways, then the rest.
    """
    if least_bytes(problem) > sum(max(0, f) for f in free):
        return None
    pieces = cut(problem, free)
    whole = None if pieces is None else _whole(problem, pieces, free, nodes)[0]
    if whole:
        return whole
    pinned = [t for t in problem.tables if t.name in problem.pinned]
    rest = [t for t in problem.tables if t.name not in problem.pinned]
    return _poured(problem, free, nodes, [problem.tables]) or (_poured(problem, free, nodes, [pinned, rest]) if pinned else None)


def whole_impossible(problem: Problem, free: Sequence[int], nodes: int = NODES) -> bool:
    """Whether it is certain, every assignment tried, that the tables that must stay whole do not fit together."""
    packing, exhausted = _whole(problem, _uncut(problem, problem.tables), free, nodes)
    return packing is None and exhausted


def _uncut(problem: Problem, tables: Sequence[Table]) -> list[Shard]:
    return [Shard.whole(t) for t in tables if t.name in problem.whole]


def _whole(problem: Problem, pieces: Sequence[Shard], free: Sequence[int], nodes: int) -> tuple[Packing | None, bool]:
    """A packing of uncut pieces, and whether the answer is certain."""
    ordered = sorted(items(pieces, problem), key=lambda item: (freedom(item, problem), -item_bytes(item, problem)))
    allowed = [problem.pinned.get(item[0].table.name) for item in ordered]
    devices, exhausted = best_fit([item_bytes(item, problem) for item in ordered], free, nodes, allowed)
    if devices is None:
        return None, exhausted
    placed = [(shard, device) for item, device in zip(ordered, devices, strict=True) for shard in item]
    return Packing(tuple(s for s, _ in placed), tuple(d for _, d in placed)), exhausted


def best_fit(sizes: Sequence[int], free: Sequence[int], nodes: int,
             allowed: Sequence[tuple[int, ...] | None] = ()) -> tuple[list[int] | None, bool]:
    """Devices for items, the fullest device that takes it first; on a dead end, back and the next fullest. allowed: for each item
    the devices it may go to, None for all (left out: all for all).

    Depth-first with at most `nodes` steps; a state (next item, sorted room) is entered once, devices counting as equal that the
    items which are left may use alike. Returns the devices or None, and whether that is certain: False where the steps ran out.
    """
    left = list(free)
    devices: list[int] = []
    seen: set[tuple] = set()
    alike = _alike(allowed, len(left)) if any(allowed) else []

    def rooms(i: int) -> Sequence:
        """[D] the room on each device, beside what tells it apart for items from i on."""
        return list(zip(left, alike[i], strict=True)) if alike and alike[i] else left

    def options(i: int) -> Iterator[int]:
        room, where = rooms(i + 1), allowed[i] if allowed and allowed[i] is not None else range(len(left))
        by_room = {room[d]: d for d in reversed(where) if left[d] >= sizes[i]}  # of equal devices, one will do
        return iter([by_room[r] for r in sorted(by_room)])

    levels = [options(0)] if sizes else []
    while levels and nodes > 0:
        if len(devices) == len(levels):  # back from below: undo
            left[devices[-1]] += sizes[len(devices) - 1]
            devices.pop()
        device = next(levels[-1], None)
        if device is None:
            levels.pop()
            continue
        nodes -= 1
        left[device] -= sizes[len(devices)]
        devices.append(device)
        if len(devices) == len(sizes):
            return devices, True
        state = (len(devices), *sorted(rooms(len(devices))))
        if state not in seen:
            seen.add(state)
            levels.append(options(len(devices)))
    return ([], True) if not sizes else (None, not levels)


def _alike(allowed: Sequence[tuple[int, ...] | None], n_devices: int) -> list[list[int]]:
    """For items from i on, each device's class: devices of one class may be used by the same ones of them. Empty: all alike."""
    classes: list[int] = []
    result, met = [classes], set()
    for devices in reversed(allowed):
        if devices is not None and devices not in met:
            met.add(devices)
            inside, numbers = set(devices), {}
            classes = [numbers.setdefault((c, d in inside), len(numbers)) for d, c in enumerate(classes or [0] * n_devices)]
        result.append(classes)
    return result[::-1]


def _poured(problem: Problem, free: Sequence[int], nodes: int, groups: Sequence[Sequence[Table]]) -> Packing | None:
    """One group of tables after the other: those that must stay whole by best fit, then the others poured."""
    room = Room(problem, free)
    placed: list[tuple[Shard, int]] = []
    for tables in groups:
        fixed, _ = _whole(problem, _uncut(problem, tables), room.left.tolist(), nodes)
        if fixed is None:
            return None
        for shard, device in zip(fixed.pieces, fixed.devices, strict=True):
            room.put(shard, device)
            placed.append((shard, device))
        # Tables whose columns are largest go first: small columns fill the gaps that large ones leave.
        rest = sorted((Shard.whole(t) for t in tables if t.name not in problem.whole),
                      key=lambda s: (freedom((s,), problem), -s.rows, -s.width))
        for whole in rest:
            parts = _pour(whole, room)
            if parts is None:
                return None
            placed += parts
    return Packing(tuple(shard for shard, _ in placed), tuple(device for _, device in placed))


def _pour(whole: Shard, room: Room) -> list[tuple[Shard, int]] | None:
    """Put a table where it fits whole, best fit; else as many of its columns, else of its rows, as the emptiest device takes,
    and the rest likewise."""
    waiting, placed = [whole], []
    while waiting:
        shard = waiting.pop()
        fits = np.flatnonzero(room.fits(shard))
        if len(fits):
            device, part, rest = int(fits[np.argmin(room.left[fits])]), shard, []
        else:
            allowed = room.allowed(shard)
            device = int(np.argmax(room.left if allowed is None else np.where(allowed, room.left, np.iinfo(np.int64).min)))
            parts = _first_columns(shard, room, device) or _first_rows(shard, room, device)
            if parts is None:
                halves = halve_columns(shard)  # narrower: fewer output bytes for each row range
                if halves is None:
                    return None
                waiting += halves
                continue
            part, rest = parts[0], [parts[1]]
        room.put(part, device)
        placed.append((part, device))
        waiting += rest
    return placed


def _first_columns(shard: Shard, room: Room, device: int) -> tuple[Shard, Shard] | None:
    """The most columns that the device takes, and the rest; None where it takes none."""
    def part(units: int) -> Shard:
        return replace(shard, col_hi=shard.col_lo + units * MIN_WIDTH)
    units = _most(shard.width // MIN_WIDTH, lambda n: bool(room.fits(part(n))[device]))
    return (part(units), replace(shard, col_lo=part(units).col_hi)) if units else None


def _first_rows(shard: Shard, room: Room, device: int) -> tuple[Shard, Shard] | None:
    """The most rows that the device takes, and the rest; None where it takes none."""
    def part(rows: int) -> Shard:
        return replace(shard, row_hi=shard.row_lo + rows)
    rows = _most(shard.rows, lambda n: bool(room.fits(part(n))[device]))
    return (part(rows), replace(shard, row_lo=part(rows).row_hi)) if rows else None


def _most(end: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 1 .. end - 1 that fits, 0 if none does; what fits, fits with less."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
