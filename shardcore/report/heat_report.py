"""A table of the hot rows of a problem's tables."""

from __future__ import annotations

from shardcore.core.types import Problem, Table
from shardcore.core.validation import require
from shardcore.report.text import records_table
from shardcore.step.access import lookup_count
from shardcore.tables.hash_tables import row_division_imbalance
from shardcore.tables.heat import heat_of_tables

_MOST = 0.8


def heat_table(problem: Problem, cached_fraction: float) -> str:
    """Tables by the rows that a batch touches, most first, with hot rows and the misses of a cache.

    cached_fraction: share of each table's rows that the cache has.
    """
    require(
        0 <= cached_fraction <= 1,
        f"the cache holds a share of {cached_fraction:g} of the rows; it needs to be within 0 and 1",
    )
    batch = problem.global_batch
    heats = [(*_touched_missed_hot(table, batch, cached_fraction), table) for table in problem.tables]
    n_devices = len(problem.topology)
    uneven = any(t.row_shares for t in problem.tables) and n_devices > 1
    heats.sort(key=lambda x: -x[0])
    rows = [
        {
            "table": table.name,
            "rows": f"{table.rows:,}",
            "lookups a sample": f"{table.pooling:.1f}",
            f"rows with {_MOST:.0%} of them": f"{hot:,.0f}",
            "of all": f"{hot / table.rows:.1%}",
            "rows a batch touches": f"{touched:,.0f}",
            f"misses with {cached_fraction:.0%} held": f"{missed / touched:.0%}" if touched else "-",
            # Where rows are divided, in the order of ids or as a hash table's routing sends them.
            **(
                {f"busiest of {n_devices} ranges": f"{row_division_imbalance(table, n_devices):.2f}x"}
                if uneven
                else {}
            ),
        }
        for touched, missed, hot, table in heats
    ]
    all_touched, all_missed = sum(x[0] for x in heats), sum(x[1] for x in heats)
    share = all_missed / all_touched if all_touched else 0.0
    return "\n".join(
        [
            records_table(rows),
            "",
            f"A batch of {batch:,} samples touches {all_touched:,.0f} rows; a cache of {cached_fraction:.0%} of each "
            f"table (LRU) has to fetch {all_missed:,.0f} of them ({share:.0%}).",
        ]
    )


def _touched_missed_hot(table: Table, batch: int, cached_fraction: float) -> tuple[float, float, float]:
    """Rows that a batch touches, those of them that a cache has to fetch, and the fewest with _MOST of the lookups."""
    if lookup_count(table, batch) == 0:
        return 0.0, 0.0, 0.0
    [heat] = heat_of_tables([table], batch, unseen=True)
    return (
        heat.unique_rows,
        float(heat.missed_rows(cached_fraction * table.rows)),
        heat.fewest_rows_with_share(_MOST),
    )
