"""Hot rows: sequence tables as two, of which the first is small enough to be on every device (FlexShard,
arXiv 2301.02959).

Lookups of hot rows need no exchange. Instead, their gradients are all-reduced. A row in G devices that a
global batch looks up n times costs n exchanges of a row each way, of which 1 / G stay on a device. Its
all-reduce costs 2 (G - 1) rows, whatever n is. Both costs, and the memory that a replica takes, are in
proportion to the row's bytes. So one threshold on n serves all tables.

Only sequences are divided so. Pooled tables send one output a bag, however few of its rows are cold.

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
from shardcore.step.kinds import LAYOUTS
from shardcore.tables.heat import Heat, heat_of

HOT, COLD = "_hot", "_cold"
"""Endings of the names of a table's parts."""
INSIDE = ".cold"
"""Ending of the path of a collection's cold tables (HotColdEmbeddingCollection.cold)."""
REPLICA = next(kind for kind in LAYOUTS.values() if kind.dense_gradient)
"""The kind of hot rows."""


def hot_counts(problem: Problem, least_lookups: float) -> dict[str, int]:
    """Number of hot rows by table: a global batch looks each up so often or more, on average.

    Tables without any are left out, and those of which no row would be cold.

    Raises ShardCoreError for a threshold that is not above 0, and as `heat_of` does.
    """
    if not 0 < least_lookups < float("inf"):
        raise ShardCoreError(
            f"hot rows were asked for from {least_lookups} lookups a batch on; it needs a number above 0"
        )
    found = {}
    for table, heat in heats(problem):
        # One threshold for all tables: exchanges and replicas both cost in proportion to a row's bytes.
        rows = int(heat.rows[heat.lookups >= least_lookups].sum())
        # Both parts need rows (see _require_divisible).
        if 0 < rows < table.rows:
            found[table.name] = rows
    return found


def heats(problem: Problem) -> list[tuple[Table, Heat]]:
    """The tables that may be divided, and how hot their rows are."""
    # A table whose kinds a user has fixed stays as it is.
    fixed, batch = problem.kinds_of, problem.global_batch
    tables = [
        table
        for table in problem.tables
        if table.sequence and table.name not in fixed and access.lookups(table, batch)
    ]
    return list(zip(tables, heat_of(tables, problem.global_batch), strict=True))


def with_hot_rows(problem: Problem, rows: Mapping[str, int]) -> Problem:
    """The problem with so many hot rows of some tables as separate tables, on every device.

    rows: by table. Their parts are named NAME_hot and NAME_cold.

    Raises ShardCoreError for tables that are not in the problem, pool their lookups, or have fewer rows.
    """
    known = {table.name: table for table in problem.tables}
    for name, n in rows.items():
        if name not in known:
            raise ShardCoreError(
                f"hot rows were asked for of table {name!r}, which problem {problem.name!r} does not have"
            )
        _require_divisible(known[name], n)
    parts = {name: divided(known[name], n, problem.global_batch) for name, n in rows.items()}
    within = {known[name].collection for name in rows} - {""}
    tables = [
        # Hot parts stay in the collection. What is not hot moves to its `cold` module.
        part if part.name == name + HOT else _within(part, within)
        for name, table in known.items()
        for part in parts.get(name, (table,))
    ]
    return replace(problem, tables=tuple(tables), constraints=_renamed(problem.constraints, rows))


def divided(table: Table, rows: int, batch: int) -> tuple[Table, Table]:
    """The hottest rows of a table, and the others, as two tables.

    rows: how many are hot. batch: samples for which lookups are computed.

    Ids of each part keep their order. With measured row shares, the others keep those of unique rows:
    they are looked up about equally often.

    Raises ShardCoreError for a number of rows that leaves a part empty.
    """
    _require_divisible(table, rows)
    # share: of lookups that are hot, then access of hot rows, then of cold ones.
    share = access_of_hottest(table, rows, batch)
    # A replica is whole in device memory.
    hot = replace(
        table,
        name=table.name + HOT,
        rows=rows,
        pooling=table.pooling * share[0],
        access=share[1],
        load_factor=1.0,
        ordered=table.ordered and not table.row_shares,
        row_shares=None,
    )
    # Cold rows are looked up about equally often, so lookups follow unique rows.
    shares = table.row_shares and RowShares(table.row_shares.unique, table.row_shares.unique)
    cold = replace(
        table,
        name=table.name + COLD,
        rows=table.rows - rows,
        pooling=table.pooling * (1 - share[0]),
        access=share[2],
        row_shares=shares,
    )
    return hot, cold


def access_of_hottest(table: Table, rows: int, batch: int) -> tuple[float, Reuse | Zipf, Reuse | Zipf]:
    """The share of lookups of the so many hottest rows, their access statistics, and those of the others."""
    if isinstance(table.access, Zipf):
        heat = heat_of([table], batch)[0]
        # Relative to the same classes, so that the shares of both parts sum to 1.
        share = float(heat.hottest_lookups(rows)) / float(heat.hottest_lookups(table.rows))
        # The first ranks of a power law are one too.
        return share, table.access, _reuse_of_others(heat, rows)
    # In the batch of the histogram itself, where its counts are exact.
    bins, sums = (of[0] for of in access.bins_of([table]))
    # Fill hot rows from the bin with the highest mean count down. The last bin may be cut.
    hot, left = np.zeros(len(bins)), float(rows)
    for k in np.argsort(-np.where(bins > 0, sums / np.maximum(bins, 1), -1)):
        hot[k] = min(left, bins[k])
        left -= hot[k]
    # Without a cold row that was looked up, all lookups are hot.
    share = float(hot @ (sums / np.maximum(bins, 1))) / sums.sum() if (hot < bins).any() else 1.0
    hottest, others = (Reuse(tuple(of / max(of.sum(), 1.0)), table.reuse.batch) for of in (hot, bins - hot))
    return share, hottest, others


def _reuse_of_others(heat: Heat, rows: int) -> Reuse:
    """The reuse histogram that a batch is expected to give of all but the so many hottest rows."""
    before = np.concatenate([[0.0], np.cumsum(heat.rows)])
    # Rows of each class beyond the hot ones: clipping the cumulative counts removes the hottest.
    left = np.diff(np.clip(before - rows, 0, None))
    return Reuse(access.expected_bins(left, heat.lookups), heat.batch)


def _within(table: Table, collections: set[str]) -> Table:
    """In the collection of what is not hot, if its own has hot rows (see HotColdEmbeddingCollection)."""
    inside = table.sequence and table.collection in collections
    return replace(table, collection=table.collection + INSIDE) if inside else table


def is_hot(table: Table, problem: Problem) -> bool:
    """Tell if a table holds hot rows of `with_hot_rows`."""
    return (
        table.name.endswith(HOT)
        and problem.kinds_of.get(table.name) == (REPLICA.name,)
        # The name alone could be a user's. Its kind and a cold part tell.
        and any(other.name == table.name.removesuffix(HOT) + COLD for other in problem.tables)
    )


def cold_names(problem: Problem) -> dict[str, str]:
    """Names of the cold parts in a problem of `with_hot_rows`, by the names of the whole tables."""
    return {
        table.name.removesuffix(HOT): table.name.removesuffix(HOT) + COLD
        for table in problem.tables
        if is_hot(table, problem)
    }


def as_cold(plan: Plan, problem: Problem) -> Plan:
    """A plan whose tables have the names of their cold parts, where the problem has these instead.

    So a plan without hot rows can be a start for one with them.
    """
    cold, known = cold_names(problem), {table.name for table in problem.tables}

    def renamed(p: Placement) -> Placement:
        name = p.shard.table.name
        # A plan of the divided problem needs no renaming.
        if name in known or name not in cold:
            return p
        return replace(p, shard=replace(p.shard, table=replace(p.shard.table, name=cold[name])))

    return replace(plan, placements=tuple(map(renamed, plan.placements)))


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


def _renamed(asked: Constraints, rows: Mapping[str, int]) -> Constraints:
    """Constraints of tables, on their cold parts."""
    cold = {name: name + COLD for name in rows}
    return replace(
        asked,
        unsplit=tuple(cold.get(name, name) for name in asked.unsplit),
        pinned=tuple((cold.get(name, name), where) for name, where in asked.pinned),
        together=tuple(tuple(cold.get(name, name) for name in group) for group in asked.together),
        min_widths=tuple((cold.get(name, name), width) for name, width in asked.min_widths),
        kinds=(
            *((cold.get(name, name), kinds) for name, kinds in asked.kinds),
            # Hot rows are replicas by constraint, so no search moves them.
            *((name + HOT, (REPLICA.name,)) for name in rows),
        ),
    )
