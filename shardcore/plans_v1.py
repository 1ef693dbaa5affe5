"""Plan files of version 1 (until November 2026): placements without a kind of sharding.

The kind followed from the geometry. A shard on several devices was a replica on each. Row ranges lay one on
each device. They ran as if divided over all devices, even if they lay on one host only. The latter are now
read as the kind that TorchRec runs for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcore.errors import ShardCoreError
from shardcore.layouts import (
    LAYOUTS,
    WHOLE_ROWS,
    device_names,
    even_rows,
    group_of,
    layout_of,
    shards_on,
    ways,
)
from shardcore.types import Placement, Plan, Problem, Shard, Table


@dataclass(frozen=True)
class PlacedShard:
    """A placement in a plan's file.

    table: the table's name.
    rows: [low, high).
    columns: [low, high).
    devices: their indices.
    """

    table: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class PlanFile:
    """A plan's file.

    problem: the problem's name.
    problem_digest: its digest.
    provenance: who made the plan, and how.
    placements: one entry per shard.
    """

    problem: str
    problem_digest: str
    provenance: Mapping[str, Any]
    placements: tuple[PlacedShard, ...]


def placements(file: PlanFile, problem: Problem) -> tuple[Placement, ...]:
    """The same plan with kinds. The tables of the file must be the problem's.

    Raises ShardCoreError for row ranges of no known kind, and for a shard outside its table.
    """
    tables, found = {t.name: t for t in problem.tables}, []
    ranges: dict[tuple[Table, int, int], list[tuple[Shard, int]]] = defaultdict(list)
    replicated = next((k for k in ways(problem.topology) if not k.divides_rows), WHOLE_ROWS)
    for p in file.placements:
        shard = Shard(tables[p.table], *p.rows, *p.columns)
        if len(p.devices) > 1:
            # Replicas on all devices get the canonical order, so that equal plans are equal.
            everywhere = problem.topology.ranks
            same = sorted(p.devices) == sorted(everywhere)
            found.append(Placement(replicated.name, shard, everywhere if same else p.devices))
        elif shard.full_rows:
            found.append(Placement(WHOLE_ROWS.name, shard, p.devices))
        else:
            ranges[shard.table, shard.col_lo, shard.col_hi] += [(shard, d) for d in p.devices]
    found += [_divided(shards, problem) for shards in ranges.values()]
    return tuple(sorted(found, key=lambda p: (p.shard.table.name, p.shard.col_lo, p.shard.col_hi, p.devices)))


def placed_shards(plan: Plan) -> list[dict[str, Any]]:
    """The plan's shards as a file of version 1 had them.

    Replays identify plans by this, whoever made them. So it must never change.
    """
    found = []
    for p in plan.placements:
        if layout_of(p.kind).divides_rows:
            found += [(shard, (d,)) for d, shard in shards_on(p)]
        else:
            found.append((p.shard, tuple(sorted(p.devices))))
    found.sort(key=lambda x: (x[0].table.name, x[0].row_lo, x[0].row_hi, x[0].col_lo, x[0].col_hi, x[1]))
    return [{"table": s.table.name, "rows": [s.row_lo, s.row_hi], "columns": [s.col_lo, s.col_hi],
             "devices": list(devices)}
            for s, devices in found]


def _divided(shards: Sequence[tuple[Shard, int]], problem: Problem) -> Placement:
    """Row ranges as one placement. In a table that is not ordered, it does not matter which device had which
    range."""
    first, devices = shards[0][0], {d for _, d in shards}
    table, sizes = first.table, sorted(s.rows for s, _ in shards)
    for layout in LAYOUTS.values():
        group = group_of(layout, problem.topology).get(frozenset(devices)) if layout.divides_rows else None
        even = even_rows(table.rows, len(group)) if group and len(shards) == len(group) else None
        if group and even:
            found = Placement(layout.name, Shard(table, 0, table.rows, first.col_lo, first.col_hi), group)
            same_sizes = sizes == sorted(hi - lo for lo, hi in even) and sum(sizes) == table.rows
            if same_sizes and not table.ordered or set(shards) == {(s, d) for d, s in shards_on(found)}:
                return found
    raise ShardCoreError(f"plan has rows of table {table.name!r} in {len(shards)} ranges of {sizes[:4]} on "
                         f"{device_names(sorted(devices))}; TorchRec divides rows evenly, "
                         "over all devices or "
                         "those of one host: plan again")
