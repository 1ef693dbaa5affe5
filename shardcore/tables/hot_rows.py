"""Hot rows of sequence tables: the hot rows become a small table on every device (FlexShard, arXiv 2301.02959).

Lookups of hot rows need no exchange. Instead, their gradients are all-reduced. On G devices, a row that a global batch
looks up n times costs n exchanges of a row each way, of which 1 / G stay on a device. As a replica, its all-reduce
costs 2 (G - 1) rows, whatever n is. Both costs, and the memory of a replica, are in proportion to the row's bytes. So
one threshold on n serves all tables.

Only sequences are divided so. A pooled table sends one output a bag, even if only one of its rows is cold.

Shapes: K classes of rows (see heat.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shardcore.core.access_statistics import Reuse, RowShares, Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Placement, Plan, Problem, Table
from shardcore.step import access
from shardcore.step.kinds import SHARDING_KINDS
from shardcore.tables.heat import TableHeat, heat_of_tables

HOT, COLD = "_hot", "_cold"
"""Suffixes of the names of a table's parts."""
INSIDE = ".cold"
"""Suffix of the path of a collection's cold tables (HotColdEmbeddingCollection.cold)."""
REPLICA = next(kind for kind in SHARDING_KINDS.values() if kind.dense_gradient)
"""Kind of sharding of hot rows."""


def hot_row_counts(problem: Problem, least_lookups: float) -> dict[str, int]:
    """Number of hot rows by table: rows with `least_lookups` or more expected lookups in a global batch.

    Tables without hot rows or without cold ones are left out.

    Raises ShardCoreError for a threshold that is not above 0, and as `heat_of_tables` does.
    """
    if not 0 < least_lookups < float("inf"):
        raise ShardCoreError(
            f"hot rows were asked for from {least_lookups} lookups a batch on; it needs a number above 0"
        )
    counts = {}
    for table, heat in heat_of_divisible_tables(problem):
        rows = int(heat.rows[heat.lookups >= least_lookups].sum())
        # Both parts need rows (see _require_divisible).
        if 0 < rows < table.rows:
            counts[table.name] = rows
    return counts


def heat_of_divisible_tables(problem: Problem) -> list[tuple[Table, TableHeat]]:
    """Sequence tables that may be divided into hot and cold rows, each with its heat."""
    # A table whose kinds a user has fixed stays as it is.
    fixed, batch = problem.restricted_kinds_by_table, problem.global_batch
    tables = [
        table
        for table in problem.tables
        if table.sequence and table.name not in fixed and access.lookup_count(table, batch)
    ]
    return list(zip(tables, heat_of_tables(tables, problem.global_batch), strict=True))


def with_hot_rows(problem: Problem, rows: Mapping[str, int]) -> Problem:
    """Problem in which the hot rows of some tables are separate tables, replicated on every device.

    rows: number of hot rows, by table. The parts are named NAME_hot and NAME_cold.

    Raises ShardCoreError for tables that are not in the problem, pool their lookups, or have fewer rows.
    """
    known = {table.name: table for table in problem.tables}
    for name in rows:
        if name not in known:
            raise ShardCoreError(
                f"hot rows were asked for of table {name!r}, which problem {problem.name!r} does not have"
            )
    parts = {name: split_hot_and_cold(known[name], n, problem.global_batch) for name, n in rows.items()}
    within = {known[name].collection for name in rows} - {""}
    tables = [
        # Hot parts stay in the collection. Other tables of it move to its `cold` module.
        part if part.name == name + HOT else _move_to_cold_module(part, within)
        for name, table in known.items()
        for part in parts.get(name, (table,))
    ]
    return replace(
        problem, tables=tuple(tables), constraints=_constraints_on_cold_parts(problem.constraints, rows)
    )


def split_hot_and_cold(table: Table, rows: int, batch: int) -> tuple[Table, Table]:
    """Divide a table into two: its hottest rows, and all others.

    rows: number of hot rows. batch: samples for which lookups are computed.

    Ids of each part keep their order. If row shares were measured, cold rows are taken to be looked up equally often,
    so their shares are those of unique rows.

    Raises ShardCoreError for a number of rows that leaves a part empty.
    """
    _require_divisible(table, rows)
    hot_share, hot_access, cold_access = split_access_statistics(table, rows, batch)
    # A replica is whole in device memory, so its load factor is 1.
    hot = replace(
        table,
        name=table.name + HOT,
        rows=rows,
        pooling=table.pooling * hot_share,
        access=hot_access,
        load_factor=1.0,
        ordered=table.ordered and not table.row_shares,
        row_shares=None,
    )
    shares = table.row_shares and RowShares(table.row_shares.unique, table.row_shares.unique)
    cold = replace(
        table,
        name=table.name + COLD,
        rows=table.rows - rows,
        pooling=table.pooling * (1 - hot_share),
        access=cold_access,
        row_shares=shares,
    )
    return hot, cold


def split_access_statistics(table: Table, rows: int, batch: int) -> tuple[float, Reuse | Zipf, Reuse | Zipf]:
    """Share of lookups in the `rows` hottest rows, and the access statistics of hot and of cold rows."""
    if isinstance(table.access, Zipf):
        heat = heat_of_tables([table], batch)[0]
        # Relative to the same classes, so that the shares of both parts sum to 1.
        share = float(heat.hottest_lookups(rows)) / float(heat.hottest_lookups(table.rows))
        # The first ranks of a power law follow it, too. The others do not.
        return share, table.access, _reuse_of_cold_rows(heat, rows)
    # Rows and lookups in each bin, in the histogram's batch, in which counts are exact.
    bins, sums = (of_tables[0] for of_tables in access.reuse_bin_sizes([table]))
    # Hot rows are taken from the bin with the highest mean count down. Of the last bin some may be left.
    hot, left = np.zeros(len(bins)), float(rows)
    for k in np.argsort(-np.where(bins > 0, sums / np.maximum(bins, 1), -1)):
        hot[k] = min(left, bins[k])
        left -= hot[k]
    # Exactly 1 if no row that was looked up is cold.
    share = float(hot @ (sums / np.maximum(bins, 1))) / sums.sum() if (hot < bins).any() else 1.0
    hottest, others = (Reuse(tuple(of / max(of.sum(), 1.0)), table.reuse.batch) for of in (hot, bins - hot))
    return share, hottest, others


def _reuse_of_cold_rows(heat: TableHeat, rows: int) -> Reuse:
    """Expected reuse histogram of all but the `rows` hottest rows."""
    before = np.concatenate([[0.0], np.cumsum(heat.rows)])
    # Rows of each class that are not hot: clipping the cumulative counts removes the hottest.
    left = np.diff(np.clip(before - rows, 0, None))
    return Reuse(access.expected_reuse_histogram(left, heat.lookups), heat.batch)


def _move_to_cold_module(table: Table, collections: set[str]) -> Table:
    """Table with its collection's `cold` module as its collection, if the collection has hot rows."""
    inside = table.sequence and table.collection in collections
    return replace(table, collection=table.collection + INSIDE) if inside else table


def is_hot_table(table: Table, problem: Problem) -> bool:
    """Tell if a table of a problem holds the hot rows of another table."""
    return (
        table.name.endswith(HOT)
        and problem.restricted_kinds_by_table.get(table.name) == (REPLICA.name,)
        # A user's table may have such a name. Only a hot part also has this kind, and a cold part beside it.
        and any(other.name == table.name.removesuffix(HOT) + COLD for other in problem.tables)
    )


def cold_part_names(problem: Problem) -> dict[str, str]:
    """Names of the cold parts of tables with hot rows, by the names of the whole tables."""
    return {
        table.name.removesuffix(HOT): table.name.removesuffix(HOT) + COLD
        for table in problem.tables
        if is_hot_table(table, problem)
    }


def rename_to_cold_parts(plan: Plan, problem: Problem) -> Plan:
    """Plan with each divided table renamed to the cold part that `problem` has of it.

    So a plan without hot rows can be the start of a search with them.
    """
    cold, known = cold_part_names(problem), {table.name for table in problem.tables}

    def as_cold_part(p: Placement) -> Placement:
        name = p.shard.table.name
        # Tables that the problem has need no other name.
        if name in known or name not in cold:
            return p
        return replace(p, shard=replace(p.shard, table=replace(p.shard.table, name=cold[name])))

    return replace(plan, placements=tuple(map(as_cold_part, plan.placements)))


def _require_divisible(table: Table, rows: int) -> None:
    if not table.sequence:
        raise ShardCoreError(
            f"hot rows were asked for of table {table.name!r}, which pools its lookups; it "
            "needs to be a sequence, for a pooled output travels if one of its rows is cold"
        )
    if not 1 <= rows < table.rows:
        raise ShardCoreError(
            f"table {table.name!r} was asked for {rows} hot rows; it has {table.rows} rows, "
            f"so 1 to {table.rows - 1} would be right"
        )


def _constraints_on_cold_parts(constraints: Constraints, rows: Mapping[str, int]) -> Constraints:
    """Constraints of divided tables, moved to their cold parts."""
    cold = {name: name + COLD for name in rows}
    return replace(
        constraints,
        unsplit=tuple(cold.get(name, name) for name in constraints.unsplit),
        pinned=tuple((cold.get(name, name), where) for name, where in constraints.pinned),
        together=tuple(tuple(cold.get(name, name) for name in group) for group in constraints.together),
        min_widths=tuple((cold.get(name, name), width) for name, width in constraints.min_widths),
        kinds=(
            *((cold.get(name, name), kinds) for name, kinds in constraints.kinds),
            # Hot rows are replicas by constraint, so no search moves them.
            *((name + HOT, (REPLICA.name,)) for name in rows),
        ),
    )
