"""What moves when one plan of a problem replaces another, and how to move less. Pure.

Shapes: D devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.layouts import WHOLE_ROWS, layout_of, shards_on
from shardcore.types import PRECISION_BYTES, Placement, Plan, Problem, Shard, Table


@dataclass(frozen=True)
class Move:
    """A table with cells that move to a device which did not have them.

    table: its name.
    bytes: weights of those cells, summed over devices.
    old: its placements before.
    new: its placements after.
    """

    table: str
    bytes: int
    old: tuple[Placement, ...]
    new: tuple[Placement, ...]


@dataclass(frozen=True)
class Diff:
    """What differs between two plans. A table whose shape changed is both added and removed.

    moves: tables that move, largest first.
    added: tables only in the new plan. Their bytes do not count.
    removed: tables only in the old plan. Their bytes do not count.
    """

    moves: tuple[Move, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of weights that move."""
        return sum(m.bytes for m in self.moves)

    def __bool__(self) -> bool:
        return bool(self.moves or self.added or self.removed)


def diff(old: Plan, new: Plan) -> Diff:
    """What moves from an old plan to a new one. A table is the same if its name, rows and dim are."""
    before, after = _by_table(old), _by_table(new)
    moves = [Move(table.name, n, tuple(before[_key(table)]), tuple(placements)) for table, placements in
             ((p[0].shard.table, p) for key, p in after.items() if key in before)
             if (n := _moved_cells(before[_key(table)], placements) * PRECISION_BYTES[table.precision])]
    added, removed = (tuple(sorted(key[0] for key in keys))
                      for keys in (after.keys() - before.keys(), before.keys() - after.keys()))
    return Diff(tuple(sorted(moves, key=lambda m: (-m.bytes, m.table))), added, removed)


def rebind_tables(plan: Plan, problem: Problem) -> Plan:
    """The plan with the problem's tables in place of its own. Their statistics may differ.

    A table that the problem lacks in that shape is left as it is. `lower` then refuses the plan.
    """
    tables = {_key(t): t for t in problem.tables}
    return Plan(tuple(replace(p, shard=replace(p.shard, table=tables.get(_key(p.shard.table), p.shard.table)))
                      for p in plan.placements), plan.provenance)


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
    exchanged = tuple(replace(p, devices=(place[p.devices[0]],)) if len(p.devices) == 1 else p
                      for p in new.placements)
    # The assignment ignores column order, so it can lose to the plan as it was.
    return min(as_it_is, reorder_columns(Plan(exchanged, new.provenance), old),
               key=lambda plan: diff(old, plan).bytes)


def reorder_columns(new: Plan, old: Plan) -> Plan:
    """The new plan with each table's columns in the old plan's order of devices, where that moves less.

    It costs the same, since every device keeps as many columns. Tables that are divided by rows or replicated
    stay as they are.
    """
    before, placements = _by_table(old), []
    for key, own in _by_table(new).items():
        if key in before and len(own) > 1 and all(layout_of(p.kind) is WHOLE_ROWS for p in own):
            first, column, ordered = {p.devices[0]: p.shard.col_lo for p in before[key]}, 0, []
            # Devices without an old shard come last.
            for p in sorted(own, key=lambda p: (first.get(p.devices[0], p.shard.table.dim), p.shard.col_lo)):
                ordered.append(replace(p, shard=replace(p.shard, col_lo=column,
                                                        col_hi=column + p.shard.width)))
                column += p.shard.width
            own = min(own, ordered, key=lambda found: _moved_cells(before[key], found))
        placements += own
    return Plan(tuple(placements), new.provenance)


def _staying_bytes(old: Plan, new: Plan, n_devices: int) -> np.ndarray:
    """[D, D] bytes of weights on device i of the new plan and on device j of the old plan."""
    found, before = np.zeros((n_devices, n_devices)), _by_table(old)
    for key, own in _by_table(new).items():
        had = [(d, s) for q in before.get(key, ()) for d, s in shards_on(q) if d < n_devices]
        for now, shard in (found_on for p in own for found_on in shards_on(p)):
            for was, old_shard in had:
                found[now, was] += _shared_cells(shard, old_shard) * PRECISION_BYTES[shard.table.precision]
    return found


def _key(table: Table) -> tuple[str, int, int]:
    return table.name, table.rows, table.dim


def _by_table(plan: Plan) -> Mapping[tuple[str, int, int], list[Placement]]:
    found: dict[tuple[str, int, int], list[Placement]] = defaultdict(list)
    for p in plan.placements:
        found[_key(p.shard.table)].append(p)
    return found


def _moved_cells(old: Sequence[Placement], new: Sequence[Placement]) -> int:
    """Cells that move to a device which did not have them, counted once per device."""
    had: dict[int, list[Shard]] = defaultdict(list)
    for p in old:
        for device, shard in shards_on(p):
            had[device].append(shard)
    return sum(shard.rows * shard.width - sum(_shared_cells(shard, s) for s in had[device])
               for p in new for device, shard in shards_on(p))


def _shared_cells(a: Shard, b: Shard) -> int:
    rows = min(a.row_hi, b.row_hi) - max(a.row_lo, b.row_lo)
    columns = min(a.col_hi, b.col_hi) - max(a.col_lo, b.col_lo)
    return max(0, rows) * max(0, columns)
