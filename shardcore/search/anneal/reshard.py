"""Re-sharding: annealing from an existing plan, with limits on what may move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.step.kinds import (
    Group,
    device_names,
    possible_groups,
    sharding_kind_by_name,
    shards_by_device,
)
from shardcore.step.ways import row_division, searched_tables


def rebind_tables(plan: Plan, problem: Problem) -> Plan:
    """Plan with its tables replaced by the problem's tables of the same names. Statistics and shapes may differ.

    Shards of all rows keep all rows. New columns go to the part that had a table's last ones, and parts
    without columns are left out. A table that the problem lacks, or whose part cannot be kept, is left as it
    is. `lower` then refuses the plan.
    """
    tables = {t.name: t for t in problem.tables}
    rebound = (_rebind_placement(p, tables.get(p.shard.table.name, p.shard.table)) for p in plan.placements)
    return Plan(tuple(placement for several in rebound for placement in several), plan.provenance)


def _rebind_placement(placement: Placement, table: Table) -> Sequence[Placement]:
    """Placement for a new shape of its table, as a list of one; empty if all of its columns are gone."""
    shard, was = placement.shard, placement.shard.table
    if (table.rows, table.dim) == (was.rows, was.dim):
        return [replace(placement, shard=replace(shard, table=table))]
    # TorchRec needs the parts of a sequence equally wide.
    if not shard.has_all_rows or (table.sequence and table.dim != was.dim and shard.width < was.dim):
        return [placement]
    # The last part takes new columns. If columns are gone, others end with the table.
    high = table.dim if shard.col_hi == was.dim else min(shard.col_hi, table.dim)
    if shard.col_lo >= high:
        return []
    return [replace(placement, shard=Shard(table, 0, table.rows, shard.col_lo, high))]


@dataclass(frozen=True)
class Reshard:
    """Improve an existing plan, and limit what moves.

    plan: the plan to start from.
    tables: the most tables that come to devices that did not have them. None: any number.
    bytes: the most bytes of weights that do so. None: any number.

    A table whose statistics or shape have changed is the same table.
    New or disallowed tables are placed freely, outside the limits.
    With a limit, the tables that groups share stay the same.
    """

    plan: Plan
    tables: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("tables", "bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ShardCoreError(
                    f"re-sharding may move at most {value} {name}; it needs 0 or more, or None for any number"
                )

    @property
    def limits_moves(self) -> bool:
        """True if the tables or bytes that may move are limited."""
        return self.tables is not None or self.bytes is not None

    def tables_in_old_plan(self, problem: Problem) -> OldPlacements:
        """Problem's tables as the old plan places them, without tables of `fixed_placements`.

        Raises ShardCoreError if the plan places only some cells of a table.
        Raises it too if a shard of whole rows is on several devices.
        """
        tables = {t.name: t for t in searched_tables(problem)}
        had: dict[str, list[Placement]] = {name: [] for name in tables}
        for p in rebind_tables(self.plan, problem).placements:
            # A part that could not be bound to the problem's table is missing here. Its table counts as new.
            if tables.get(p.shard.table.name) == p.shard.table:
                had[p.shard.table.name].append(p)
        old = OldPlacements([], {}, [])
        for name, placements in had.items():
            _require_all_cells_placed(tables[name], placements, problem)
            # Constraints go before the plan: a table that it has where it may not be is placed anew.
            free = name not in problem.uncut_tables and name not in problem.pinned_devices
            shared = len(placements) == 1 and _may_group_share_table(placements[0], problem)
            if not placements or not (free or shared or _are_placements_allowed(placements, problem)):
                old.new.append(tables[name])
            elif all(sharding_kind_by_name(p.kind).is_on_one_device for p in placements):
                old.placed.extend((p.shard, p.devices[0]) for p in placements)
            elif shared:
                old.shared.setdefault((placements[0].kind, placements[0].devices), []).append(tables[name])
            # Divided rows that no group may share here stay row ranges, each on its device.
            elif placements == [row_division(tables[name], problem)]:
                old.placed.extend((shard, d) for d, shard in shards_by_device(placements[0]))
            else:
                old.new.append(tables[name])
        # -1: still to be placed.
        home = dict.fromkeys((t.name for t in old.new), -1) | {s.table.name: d for s, d in old.placed}
        # Bundles that the plan splits are placed anew.
        split = (group for group in problem.constraints.together if len({home[n] for n in group}) > 1)
        apart = {name for group in split for name in group}
        placed = [(s, d) for s, d in old.placed if s.table.name not in apart]
        # Tables at -1 are among the new ones already.
        more_new = [tables[name] for name in sorted(apart) if home[name] >= 0]
        return replace(old, placed=placed, new=[*old.new, *more_new])


@dataclass(frozen=True)
class OldPlacements:
    """Where an old plan has its tables: placed shards, and tables that device groups share.

    placed: shards on one device each.
    shared: tables that a group of devices shares, by kind and group.
    new: tables still to be placed.
    """

    placed: list[tuple[Shard, int]]
    shared: dict[tuple[str, Group], list[Table]]
    new: list[Table]


def _require_all_cells_placed(table: Table, placements: Sequence[Placement], problem: Problem) -> None:
    """Raise ShardCoreError unless a plan places all cells of a table, on devices that exist."""
    cells = sum(p.shard.rows * p.shard.width for p in placements)
    if placements and cells != table.rows * table.dim:
        raise ShardCoreError(
            f"the plan to start from places {cells} of the {table.rows * table.dim} "
            f"cells of table {table.name!r}"
        )
    for p in placements:
        has = f"the plan to start from has {p.shard.label}"
        if sharding_kind_by_name(p.kind).is_on_one_device and len(p.devices) > 1:
            raise ShardCoreError(f"{has} by {p.kind} on {device_names(p.devices)}; such a shard lives on one")
        if not set(p.devices) <= set(problem.topology.ranks):
            raise ShardCoreError(
                f"{has} on {device_names(p.devices)}; the problem has devices 0 to {len(problem.topology) - 1}"
            )


def _may_group_share_table(placement: Placement, problem: Problem) -> bool:
    """Tell if a placement's group of devices exists, and constraints let the group share the table by the placement's
    kind.
    """
    shared_kind, table = sharding_kind_by_name(placement.kind), placement.shard.table
    if table.name in problem.pinned_devices or table.name in problem.group_by_table:
        return False
    groups = possible_groups(shared_kind, table.rows, problem.topology, None)
    cuts = shared_kind.divides_rows and (table.ordered or table.name in problem.uncut_tables)
    return placement.devices in groups and not cuts


def _are_placements_allowed(placements: Sequence[Placement], problem: Problem) -> bool:
    """Tell if constraints still allow a table's placements in a plan."""
    name = placements[0].shard.table.name
    on_one = len(placements) == 1 and len(placements[0].devices) == 1
    return (on_one or name not in problem.uncut_tables) and all(
        set(p.devices) <= set(problem.allowed_devices(name)) for p in placements
    )
