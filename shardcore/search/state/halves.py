"""Tables cut into halves by columns, each half a table like any other.

Annealing lets groups of devices share whole tables only. Where a table is too hot for one host, its halves may be
shared by the groups of two (TorchRec's grid_shard). Annealing never cuts sequences that fit whole, either: their parts
have to be equally wide. Halves of one that is too hot for a device are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardcore.core.types import Placement, Plan, Problem, Table
from shardcore.core.validation import MOST_NAME
from shardcore.search.state.packing import equally_wide
from shardcore.step.kinds import LAYOUTS, layout_of
from shardcore.step.ways import consolidate

_CUT = tuple(name for name, layout in LAYOUTS.items() if layout.cuts_columns)
"""Kinds of sharding that may run some of a table's columns."""


@dataclass(frozen=True, eq=False)
class Halves:
    """A problem with some tables in halves.

    problem: with the halves in place of these tables.
    tables: of each half, by its name: the whole table, and the half's first column there.
    """

    problem: Problem
    tables: Mapping[str, tuple[Table, int]]

    def may_run(self, placements: Sequence[Placement]) -> bool:
        """Tell if TorchRec runs the placements: halves of a table by one kind, cut sequences in parts of one width."""
        kinds = {
            (self.tables[p.shard.table.name][0].name, p.kind)
            for p in placements
            if p.shard.table.name in self.tables
        }
        return len(kinds) == len({whole for whole, _ in kinds}) and equally_wide(
            [tuple(p.shard for p in self.joined(placements))]
        )

    def joined(self, placements: Iterable[Placement]) -> tuple[Placement, ...]:
        """The placements with whole tables in place of halves."""
        return consolidate(
            part
            for p in placements
            for part in (
                _moved(p, *self.tables[p.shard.table.name]) if p.shard.table.name in self.tables else [p]
            )
        )

    def split(self, plan: Plan) -> Plan:
        """A plan of whole tables as one of halves."""
        halves: dict[str, list[tuple[Table, int]]] = defaultdict(list)
        for half in (t for t in self.problem.tables if t.name in self.tables):
            whole, column = self.tables[half.name]
            halves[whole.name].append((half, -column))
        placements = (
            part
            for p in plan.placements
            for half, columns in halves.get(p.shard.table.name, [(p.shard.table, 0)])
            for part in _moved(p, half, columns)
        )
        return replace(plan, placements=tuple(placements))


def halved(problem: Problem, names: Collection[str]) -> Halves:
    """A problem with tables of some names in halves. Each has to be one of `may_halve`."""
    # Of each such table: both halves, and their first columns.
    halves = {
        t: [(replace(t, name=_half_name(t, column), dim=t.dim // 2), column) for column in (0, t.dim // 2)]
        for t in problem.tables
        if t.name in names
    }
    tables = tuple(half for t in problem.tables for half, _ in halves.get(t, [(t, 0)]))
    wholes = {half.name: (t, column) for t, both in halves.items() for half, column in both}
    if not wholes:
        return Halves(problem, {})
    # A half is a table here, but kinds that need all columns of the real one cannot run it.
    kinds = (*problem.constraints.kinds, *((name, _CUT) for name in wholes))
    return Halves(
        replace(problem, tables=tables, constraints=replace(problem.constraints, kinds=kinds)), wholes
    )


def may_halve(table: Table, problem: Problem) -> bool:
    """Tell if a table may be in halves.

    No constraint names it, FBGEMM, files and codecs take halves of it, and no other table has the name of one.
    """
    constraints = problem.constraints
    pairs = (*constraints.pinned, *constraints.kinds, *constraints.min_widths)
    named = {*constraints.unsplit, *problem.bundle_of, *(name for name, _ in pairs)}
    halves = {_half_name(table, column) for column in (0, table.dim // 2)}
    # A half is whole units, which the job's codecs take.
    fits = table.dim % (2 * problem.unit_width(table)) == 0 and max(map(len, halves)) <= MOST_NAME
    is_new = not any(other.name in halves for other in problem.tables)
    # TorchRec needs each map of ids once.
    return table.managed_collision is None and fits and is_new and table.name not in named


def halves_of(plan: Plan, problem: Problem) -> Halves:
    """The problem with those tables in halves of which groups of devices share a half in a plan.

    plan: of the problem's tables.
    """
    shared = {
        p.shard.table.name
        for p in plan.placements
        if layout_of(p.kind).divides_rows and p.kind in _CUT and 2 * p.shard.width == p.shard.table.dim
    }
    return halved(problem, [t.name for t in problem.tables if t.name in shared and may_halve(t, problem)])


def _half_name(table: Table, column: int) -> str:
    return f"{table.name}[{column}:{column + table.dim // 2}]"


def _moved(placement: Placement, table: Table, columns: int) -> list[Placement]:
    """A placement with its shard in another table, so many columns further. Empty if that has none of them."""
    shard = placement.shard
    low, high = max(0, shard.col_lo + columns), min(table.dim, shard.col_hi + columns)
    if low >= high:
        return []
    return [replace(placement, shard=replace(shard, table=table, col_lo=low, col_hi=high))]
