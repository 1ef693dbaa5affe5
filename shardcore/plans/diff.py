"""Moves of tables when one plan of a problem replaces another, and ways to move less. Pure.

A checkpoint may lose data where a table changes its kind of sharding. Tried by saving with
torch.distributed.checkpoint and loading under another plan, on two gloo ranks (TorchRec 1.8;
tests/plans/test_checkpoints.py does it again):

- Weights load from any kind into any other. `load_state_dict` alone loads them from replicas only, or into
  the same shards.
- The optimizer of replicas is not the fused one, and each names its state otherwise (TorchRec issue 2394). A
  fused table that was a replica finds no state, and loading fails. A replica that was fused starts afresh.
- State with one number a row is kept for each range of columns. With another number of ranges its size
  differs, and loading fails.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from shardcore.core.catalog import DENSE_OPTIMIZERS, OPTIMIZERS
from shardcore.core.types import Placement, Plan, Problem, Shard
from shardcore.step.kinds import sharding_kind_by_name, shards_by_device

NOTHING = "nothing, as the optimizer keeps no state"
ALL_LOADS = "nothing"
FROM_REPLICAS = "its optimizer state, which fails to load, for replicas name theirs otherwise"
TO_REPLICAS = "its optimizer state without a word, for replicas name theirs otherwise"
OTHER_PARTS = "its optimizer state, which fails to load, for it has one number a row of each part of columns"


@dataclass(frozen=True)
class TableMove:
    """A table with cells that move to a device which did not have them, or with another kind of sharding.

    table: its name.
    bytes: weights of those cells, summed over devices. New rows and columns do not count.
    old: its placements before.
    new: its placements after.
    forced: True if it could not stay.
    loses: loss of a checkpoint by another kind of sharding or number of parts. "": neither changes.
    """

    table: str
    bytes: int
    old: tuple[Placement, ...]
    new: tuple[Placement, ...]
    forced: bool = False
    loses: str = ""


@dataclass(frozen=True)
class PlanDiff:
    """The difference of two plans. Tables are matched by name.

    moves: tables that move, largest first.
    added: tables only in the new plan. Their bytes do not count.
    removed: tables only in the old plan. Their bytes do not count.
    resized: tables whose rows or dim changed, and bytes of weights of cells that they did not have before, summed
      over devices, most first. They may be in `moves` too.
    """

    moves: tuple[TableMove, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    resized: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of weights that move between devices."""
        return sum(m.bytes for m in self.moves)

    @property
    def forced_moves(self) -> PlanDiff:
        """Moves of a plan difference that could not be avoided."""
        return PlanDiff(tuple(m for m in self.moves if m.forced), (), ())

    @property
    def voluntary_moves(self) -> PlanDiff:
        """Moves of a plan difference that could be avoided."""
        return PlanDiff(tuple(m for m in self.moves if not m.forced), (), ())

    @property
    def new_cell_bytes(self) -> int:
        """Bytes of weights in new rows and columns of resized tables."""
        return sum(self.resized.values())

    def to_json(self) -> dict[str, Any]:
        """Moves as JSON, for a plan's provenance."""
        chosen, forced = (
            {"tables": [m.table for m in of_kind.moves], "bytes": of_kind.bytes}
            for of_kind in (self.voluntary_moves, self.forced_moves)
        )
        return {
            "chosen": chosen,
            "forced": forced,
            "added": list(self.added),
            "removed": list(self.removed),
            "resized": list(self.resized),
            "new_bytes": self.new_cell_bytes,
            "checkpoint_loses": {m.table: m.loses for m in self.moves if m.loses},
        }

    def __bool__(self) -> bool:
        return bool(self.moves or self.added or self.removed or self.resized)


def diff_plans(
    old: Plan, new: Plan, problem: Problem | None = None, forced: Collection[str] = ()
) -> PlanDiff:
    """Difference between two plans: the moves from the old plan to the new one.

    problem: has the optimizers, whose state a checkpoint may lose (see `checkpoint_loss_text`).
    forced: names of tables that could not stay.
    """
    # Matched by name, as shapes and statistics of a table may change between plans.
    before, after = old.placements_by_table(), new.placements_by_table()
    moves, resized = [], {}
    for name in before.keys() & after.keys():
        was, now = before[name], after[name]
        old_table, new_table = was[0].shard.table, now[0].shard.table
        moved = _moved_bytes(was, now)
        # Another kind changes a checkpoint even where no cell moves.
        if moved or {p.kind for p in was} != {p.kind for p in now}:
            loses = checkpoint_loss_text(was, now, problem)
            moves.append(TableMove(name, moved, tuple(was), tuple(now), name in forced, loses))
        if (old_table.rows, old_table.dim) != (new_table.rows, new_table.dim):
            # Weights that the old table did not have, counted once per device.
            known = common_cells([(0, Shard.whole(old_table))], device_shard_pairs(now))
            resized[name] = sum(s.bytes for _, s in device_shard_pairs(now)) - sum(
                cells.bytes for _, _, cells in known
            )
    return PlanDiff(
        moves=tuple(sorted(moves, key=lambda m: (-m.bytes, m.table))),
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        # Names break ties, so the same plans give the same diff.
        resized=dict(sorted(resized.items(), key=lambda table: (-table[1], table[0]))),
    )


def checkpoint_loss_text(old: Sequence[Placement], new: Sequence[Placement], problem: Problem | None) -> str:
    """Text of the state that a checkpoint of a table loses between its old and new placements; "" if it loses none.

    problem: has the optimizers. None: state by rows is assumed, which loses most.
    """
    # [old, new]: True if some placement is a replica, whose state is in the dense optimizer.
    replicas = [any(sharding_kind_by_name(p.kind).dense_gradient for p in plan) for plan in (old, new)]
    # Parts of columns: one for each group of devices. State by rows is kept for each part.
    parts = [len({p.devices for p in plan}) for plan in (old, new)]
    if {p.kind for p in old} == {p.kind for p in new} and parts[0] == parts[1]:
        return ""
    fused = OPTIMIZERS[problem.optimizer].states if problem else ("row",)
    dense = DENSE_OPTIMIZERS[problem.replica_optimizer].states if problem else ("row",)
    # Without any state there is nothing that another kind could lose.
    if not fused and not (any(replicas) and dense):
        return NOTHING
    if any(replicas):
        return FROM_REPLICAS if replicas[0] else TO_REPLICAS
    return OTHER_PARTS if "row" in fused and parts[0] != parts[1] else ALL_LOADS


def relabel_devices(new: Plan, old: Plan, problem: Problem) -> Plan:
    """New plan with equal devices renumbered, at the same cost, so that most weights stay in place.

    The renumbering is an assignment problem. Columns are reordered too (see `reorder_columns`).
    Devices keep their numbers if tables are pinned. They also keep them if rows are divided, because row
    shards follow the order of devices.
    """
    from scipy.optimize import linear_sum_assignment

    # Columns may be reordered in any case. Devices may be renumbered only if none is special.
    unchanged = reorder_columns(new, old)
    if problem.pinned_devices or any(sharding_kind_by_name(p.kind).divides_rows for p in new.placements):
        return unchanged
    # stay[i, j] is the gain of giving new device i the number j: maximize the sum.
    devices, before = problem.topology.devices, old.placements_by_table()
    stay = np.zeros((len(devices), len(devices)))
    for name, placements in new.placements_by_table().items():
        for was, now, cells in common_cells(
            device_shard_pairs(before.get(name, ())), device_shard_pairs(placements)
        ):
            if was < len(devices):  # others are gone
                stay[now, was] += cells.bytes
    place = np.arange(len(devices))
    for kind in dict.fromkeys(devices):
        # Devices that differ in speed or memory cannot be exchanged.
        # One assignment problem for each group of equal devices.
        equal = np.array([d for d, device in enumerate(devices) if device == kind])
        given, numbers = linear_sum_assignment(stay[np.ix_(equal, equal)], maximize=True)
        place[equal[given]] = equal[numbers]
    exchanged = tuple(
        replace(p, devices=(place[p.devices[0]],)) if len(p.devices) == 1 else p for p in new.placements
    )
    # The assignment ignores column order, so it can lose to the plan as it was.
    relabelled = reorder_columns(Plan(exchanged, new.provenance), old)
    return min(unchanged, relabelled, key=lambda plan: diff_plans(old, plan).bytes)


def reorder_columns(new: Plan, old: Plan) -> Plan:
    """New plan with each table's columns in the old plan's order of devices, where that moves fewer bytes.

    It costs the same, since every device keeps as many columns. Tables that are divided by rows or replicated
    stay as they are.
    """
    before, placements = old.placements_by_table(), list[Placement]()
    for name, now in new.placements_by_table().items():
        was = before.get(name, [])
        if was and len(now) > 1 and all(sharding_kind_by_name(p.kind).is_on_one_device for p in now):
            # Columns are interchangeable in cost, so only their order on devices matters for moves.
            # Devices without an old shard come last.
            first, last = {p.devices[0]: p.shard.col_lo for p in was}, now[0].shard.table.dim
            in_order = sorted(now, key=lambda p: (first.get(p.devices[0], last), p.shard.col_lo))
            ends = np.cumsum([p.shard.width for p in in_order]).tolist()
            ordered = [
                replace(p, shard=replace(p.shard, col_lo=end - p.shard.width, col_hi=end))
                for p, end in zip(in_order, ends, strict=True)
            ]
            now = min(now, ordered, key=lambda table: _moved_bytes(was, table))
        placements += now
    return Plan(tuple(placements), new.provenance)


def _moved_bytes(old: Sequence[Placement], new: Sequence[Placement]) -> int:
    """Bytes of a table's weights that move to a device which did not have them, counted once per device."""
    # Cells that are new in the table do not move: nobody had them.
    known = common_cells([(0, Shard.whole(old[0].shard.table))], device_shard_pairs(new))
    stay = (
        cells.bytes
        for was, now, cells in common_cells(device_shard_pairs(old), device_shard_pairs(new))
        if was == now
    )
    return sum(cells.bytes for _, _, cells in known) - sum(stay)


def device_shard_pairs(placements: Iterable[Placement]) -> list[tuple[int, Shard]]:
    """Pairs of a device and its shard, of several placements."""
    return [pair for p in placements for pair in shards_by_device(p)]


def common_cells(
    old: Iterable[tuple[int, Shard]], new: Sequence[tuple[int, Shard]]
) -> Iterator[tuple[int, int, Shard]]:
    """Cells of a table that are both in an old shard and in a new one: the old device, the new device, and the cells.

    The table is the new one: shapes and precisions may differ.
    """
    # Pairs of shards of one table: few, as a table is on few devices.
    for (was, had), (now, has) in product(old, new):
        rows = max(had.row_lo, has.row_lo), min(had.row_hi, has.row_hi)
        columns = max(had.col_lo, has.col_lo), min(had.col_hi, has.col_hi)
        if rows[0] < rows[1] and columns[0] < columns[1]:
            yield was, now, Shard(has.table, *rows, *columns)
