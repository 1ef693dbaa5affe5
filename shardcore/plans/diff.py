"""What moves when one plan of a problem replaces another, and how to move less. Pure.

Shapes: D devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardcore.core.types import PRECISION_BYTES, Placement, Plan, Problem, Shard, Table
from shardcore.plans import checkpoints
from shardcore.step.kinds import WHOLE_ROWS, layout_of, shards_on


@dataclass(frozen=True)
class Move:
    """A table with cells that move to a device which did not have them, or with another kind of sharding.

    table: its name.
    bytes: weights of those cells, summed over devices. New rows and columns do not count.
    old: its placements before.
    new: its placements after.
    forced: whether it could not stay.
    loses: what a checkpoint loses by another kind of sharding or number of parts. "": neither changes.
    """

    table: str
    bytes: int
    old: tuple[Placement, ...]
    new: tuple[Placement, ...]
    forced: bool = False
    loses: str = ""


@dataclass(frozen=True)
class Resized:
    """A table whose rows or dim changed.

    old, new: the table before and after.
    new_bytes: weights of cells that it did not have before, summed over devices.
    """

    old: Table
    new: Table
    new_bytes: int


@dataclass(frozen=True)
class Diff:
    """The difference of two plans. Tables are matched by name.

    moves: tables that move, largest first.
    added: tables only in the new plan. Their bytes do not count.
    removed: tables only in the old plan. Their bytes do not count.
    resized: tables whose shape changed, most new bytes first. They may be in `moves` too.
    """

    moves: tuple[Move, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    resized: tuple[Resized, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of weights that move."""
        return sum(m.bytes for m in self.moves)

    @property
    def forced(self) -> Diff:
        """The moves that could not be avoided."""
        return Diff(tuple(m for m in self.moves if m.forced), (), ())

    @property
    def chosen(self) -> Diff:
        """The moves that could."""
        return Diff(tuple(m for m in self.moves if not m.forced), (), ())

    @property
    def new_bytes(self) -> int:
        """Bytes of weights of new rows and columns."""
        return sum(r.new_bytes for r in self.resized)

    def document(self) -> dict[str, Any]:
        """The moves as JSON, for a plan's provenance."""
        return {
            **{
                name: {"tables": [m.table for m in found.moves], "bytes": found.bytes}
                for name, found in (("chosen", self.chosen), ("forced", self.forced))
            },
            "added": list(self.added),
            "removed": list(self.removed),
            "resized": [r.new.name for r in self.resized],
            "new_bytes": self.new_bytes,
            "checkpoint_loses": {m.table: m.loses for m in self.moves if m.loses},
        }

    def __bool__(self) -> bool:
        return bool(self.moves or self.added or self.removed or self.resized)


def diff(old: Plan, new: Plan, problem: Problem | None = None, forced: Collection[str] = ()) -> Diff:
    """The moves from an old plan to a new one.

    problem: has the optimizers, whose state a checkpoint may lose (see checkpoints.lost).
    forced: names of tables that could not stay.
    """
    before, after = _by_table(old), _by_table(new)
    moves, resized = [], []
    for name, now in after.items():
        if not (was := before.get(name)):
            continue
        tables, cell = (was[0].shard.table, now[0].shard.table), PRECISION_BYTES[now[0].shard.table.precision]
        moved = _moved_cells(was, now) * cell
        if moved or {p.kind for p in was} != {p.kind for p in now}:
            moves.append(
                Move(name, moved, tuple(was), tuple(now), name in forced, checkpoints.lost(was, now, problem))
            )
        if len({(t.rows, t.dim) for t in tables}) > 1:
            resized.append(Resized(*tables, _new_cells(was, now) * cell))
    added, removed = (
        tuple(sorted(names)) for names in (after.keys() - before.keys(), before.keys() - after.keys())
    )
    return Diff(
        tuple(sorted(moves, key=lambda m: (-m.bytes, m.table))),
        added,
        removed,
        tuple(sorted(resized, key=lambda r: (-r.new_bytes, r.new.name))),
    )


def relabel_devices(new: Plan, old: Plan, problem: Problem) -> Plan:
    """The new plan with equal devices renumbered, so that most weights stay in place. It costs the same.

    The renumbering is an assignment problem. Columns are reordered too (see `reorder_columns`).
    Devices keep their numbers if tables are pinned. They also keep them if rows are divided, because row
    shards follow the order of devices.
    """
    from scipy.optimize import linear_sum_assignment

    as_it_is = reorder_columns(new, old)
    if problem.pinned or any(layout_of(p.kind).divides_rows for p in new.placements):
        return as_it_is
    # stay[i, j] is the gain of giving new device i the number j: maximize the sum.
    stay, devices = _staying_bytes(old, new, len(problem.topology)), problem.topology.devices
    place = np.arange(len(devices))
    for kind in dict.fromkeys(devices):
        # Devices that differ in speed or memory cannot be exchanged.
        equal = np.array([d for d, device in enumerate(devices) if device == kind])
        given, taken = linear_sum_assignment(stay[np.ix_(equal, equal)], maximize=True)
        place[equal[given]] = equal[taken]
    exchanged = tuple(
        replace(p, devices=(place[p.devices[0]],)) if len(p.devices) == 1 else p for p in new.placements
    )
    # The assignment ignores column order, so it can lose to the plan as it was.
    return min(
        as_it_is,
        reorder_columns(Plan(exchanged, new.provenance), old),
        key=lambda plan: _moved_bytes(old, plan),
    )


def reorder_columns(new: Plan, old: Plan) -> Plan:
    """The new plan with each table's columns in the old plan's order of devices, where that moves less.

    It costs the same, since every device keeps as many columns. Tables that are divided by rows or replicated
    stay as they are.
    """
    before, placements = _by_table(old), []
    for name, own in _by_table(new).items():
        if name in before and len(own) > 1 and all(layout_of(p.kind) is WHOLE_ROWS for p in own):
            first, column, ordered = {p.devices[0]: p.shard.col_lo for p in before[name]}, 0, []
            # Devices without an old shard come last.
            for p in sorted(own, key=lambda p: (first.get(p.devices[0], p.shard.table.dim), p.shard.col_lo)):
                ordered.append(
                    replace(p, shard=replace(p.shard, col_lo=column, col_hi=column + p.shard.width))
                )
                column += p.shard.width
            own = min(own, ordered, key=lambda found: _moved_cells(before[name], found))
        placements += own
    return Plan(tuple(placements), new.provenance)


def _staying_bytes(old: Plan, new: Plan, n_devices: int) -> np.ndarray:
    """[D, D] bytes of weights on device i of the new plan and on device j of the old plan."""
    found, before = np.zeros((n_devices, n_devices)), _by_table(old)
    for name, own in _by_table(new).items():
        had = [(d, s) for q in before.get(name, ()) for d, s in shards_on(q) if d < n_devices]
        for now, shard in (found_on for p in own for found_on in shards_on(p)):
            for was, old_shard in had:
                found[now, was] += _shared_cells(shard, old_shard) * PRECISION_BYTES[shard.table.precision]
    return found


def _by_table(plan: Plan) -> Mapping[str, list[Placement]]:
    found: dict[str, list[Placement]] = defaultdict(list)
    for p in plan.placements:
        found[p.shard.table.name].append(p)
    return found


def _moved_bytes(old: Plan, new: Plan) -> int:
    before = _by_table(old)
    return sum(
        _moved_cells(before[name], now) * PRECISION_BYTES[now[0].shard.table.precision]
        for name, now in _by_table(new).items()
        if name in before
    )


def _moved_cells(old: Sequence[Placement], new: Sequence[Placement]) -> int:
    """Old cells that move to a device which did not have them, counted once per device."""
    had: dict[int, list[Shard]] = defaultdict(list)
    for p in old:
        for device, shard in shards_on(p):
            had[device].append(shard)
    known = Shard.whole(old[0].shard.table)
    return sum(
        _shared_cells(shard, known) - sum(_shared_cells(shard, s) for s in had[device])
        for p in new
        for device, shard in shards_on(p)
    )


def _new_cells(old: Sequence[Placement], new: Sequence[Placement]) -> int:
    """Cells that the old table did not have, counted once per device."""
    known = Shard.whole(old[0].shard.table)
    return sum(
        shard.rows * shard.width - _shared_cells(shard, known) for p in new for _, shard in shards_on(p)
    )


def _shared_cells(a: Shard, b: Shard) -> int:
    rows = min(a.row_hi, b.row_hi) - max(a.row_lo, b.row_lo)
    columns = min(a.col_hi, b.col_hi) - max(a.col_lo, b.col_lo)
    return max(0, rows) * max(0, columns)
