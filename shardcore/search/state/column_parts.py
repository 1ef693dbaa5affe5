"""Tables cut into parts by columns, each part a table like any other.

Annealing lets groups of devices share whole tables only. Where a table is too hot for one host, its parts may be shared
by the groups of several (TorchRec's grid_shard). Annealing never cuts sequences that fit whole, either: their parts
have to be equally wide. Parts of one that is too hot for a device are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardcore.core.types import Placement, Plan, Problem, Table
from shardcore.core.validation import MOST_NAME
from shardcore.search.state.packing import are_parts_equally_wide
from shardcore.step.kinds import SHARDING_KINDS, sharding_kind_by_name
from shardcore.step.ways import consolidate_placements

_CUT = tuple(name for name, sharding_kind in SHARDING_KINDS.items() if sharding_kind.cuts_columns)
"""Kinds of sharding that may run some of a table's columns."""


@dataclass(frozen=True, eq=False)
class ColumnParts:
    """A problem with some tables in parts.

    problem: with the parts in place of these tables.
    tables: of each part, by its name: the whole table, and the part's first column there.
    """

    problem: Problem
    tables: Mapping[str, tuple[Table, int]]

    def are_runnable(self, placements: Sequence[Placement]) -> bool:
        """Tell if TorchRec can run placements: parts of a table by one kind, cut sequences in parts of one width."""
        kinds = {
            (self.tables[p.shard.table.name][0].name, p.kind)
            for p in placements
            if p.shard.table.name in self.tables
        }
        return len(kinds) == len({whole for whole, _ in kinds}) and are_parts_equally_wide(
            [tuple(p.shard for p in self.with_whole_tables(placements))]
        )

    def with_whole_tables(self, placements: Iterable[Placement]) -> tuple[Placement, ...]:
        """Placements with whole tables in place of their column parts."""
        return consolidate_placements(
            moved
            for p in placements
            for moved in (
                _shifted_placements(p, *self.tables[p.shard.table.name])
                if p.shard.table.name in self.tables
                else [p]
            )
        )

    def split_plan(self, plan: Plan) -> Plan:
        """Plan of whole tables rewritten as a plan of column parts."""
        parts: dict[str, list[tuple[Table, int]]] = defaultdict(list)
        for part in (t for t in self.problem.tables if t.name in self.tables):
            whole, column = self.tables[part.name]
            parts[whole.name].append((part, -column))
        placements = (
            moved
            for p in plan.placements
            for part, columns in parts.get(p.shard.table.name, [(p.shard.table, 0)])
            for moved in _shifted_placements(p, part, columns)
        )
        return replace(plan, placements=tuple(placements))


def with_tables_in_parts(problem: Problem, cuts: Mapping[str, Sequence[int]]) -> ColumnParts:
    """Problem with some tables cut into column parts. cuts: first columns of the parts, by name of the table (see
    `may_cut_table`).
    """
    # Of each such table: the parts, and their first columns.
    parts = {
        t: [
            (replace(t, name=_part_name(t, low, high), dim=high - low), low)
            for low, high in pairwise((0, *cuts[t.name], t.dim))
        ]
        for t in problem.tables
        if cuts.get(t.name)
    }
    tables = tuple(part for t in problem.tables for part, _ in parts.get(t, [(t, 0)]))
    wholes = {part.name: (t, column) for t, several in parts.items() for part, column in several}
    if not wholes:
        return ColumnParts(problem, {})
    # A part is a table here, but kinds that need all columns of the real one cannot run it.
    kinds = (*problem.constraints.kinds, *((name, _CUT) for name in wholes))
    return ColumnParts(
        replace(problem, tables=tables, constraints=replace(problem.constraints, kinds=kinds)), wholes
    )


def may_cut_table(table: Table, problem: Problem) -> bool:
    """Tell if a table may be cut into column parts.

    No constraint names it, FBGEMM, files and codecs take parts of it, and no other table is named like one.
    """
    constraints = problem.constraints
    pairs = (*constraints.pinned, *constraints.kinds, *constraints.min_widths)
    named = {*constraints.unsplit, *problem.group_by_table, *(name for name, _ in pairs)}
    # A part is whole blocks, which the job's codecs take.
    longest = _part_name(table, table.dim, table.dim)
    fits = table.dim >= 2 * problem.column_block_width(table) and len(longest) <= MOST_NAME
    is_new = not any(other.name.startswith(f"{table.name}[") for other in problem.tables)
    # TorchRec needs each map of ids once.
    return table.managed_collision is None and fits and is_new and table.name not in named


def even_cut_columns(table: Table, n: int, problem: Problem) -> list[int]:
    """Columns before which to cut a table into n even parts, if it has n column blocks. A sequence has equal parts."""
    block = problem.column_block_width(table)
    n_blocks = table.dim // block
    n = next(m for m in range(min(n, n_blocks), n_blocks + 1) if n_blocks % m == 0 or not table.sequence)
    return [n_blocks * i // n * block for i in range(1, n)]


def parts_of_plan(plan: Plan, problem: Problem) -> ColumnParts:
    """Problem with tables cut into column parts as in a plan, where device groups share column parts.

    plan: of the problem's tables.
    """
    cuts: dict[str, list[int]] = {}
    for name, placements in plan.placements_by_table().items():
        table = placements[0].shard.table
        shared = any(sharding_kind_by_name(p.kind).divides_rows and p.kind in _CUT for p in placements)
        columns = sorted({p.shard.col_lo for p in placements} - {0})
        if (
            shared
            and may_cut_table(table, problem)
            and all(c % problem.column_block_width(table) == 0 for c in columns)
        ):
            cuts[name] = columns
    return with_tables_in_parts(problem, cuts)


def _part_name(table: Table, low: int, high: int) -> str:
    return f"{table.name}[{low}:{high}]"


def _shifted_placements(placement: Placement, table: Table, columns: int) -> list[Placement]:
    """Placement of a column part as one of its whole table; empty if its columns are outside the table."""
    shard = placement.shard
    low, high = max(0, shard.col_lo + columns), min(table.dim, shard.col_hi + columns)
    if low >= high:
        return []
    return [replace(placement, shard=replace(shard, table=table, col_lo=low, col_hi=high))]
