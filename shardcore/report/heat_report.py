"""Tables of the hot rows of a problem's tables, and of collisions in its hash tables."""

from __future__ import annotations

from dataclasses import replace

from shardcore.core.types import Problem, Shard
from shardcore.core.validation import require
from shardcore.report.text import records_table
from shardcore.step.access import lookups
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.memory import gib, resident_bytes
from shardcore.tables.hash_tables import collided_share, imbalance, rows_for
from shardcore.tables.heat import heat_of

_MOST = 0.8


def heat_table(problem: Problem, held: float) -> str:
    """Tables by the rows that a batch touches, most first: hot rows, and what a cache misses.

    held: share of each table's rows that the cache has.
    """
    require(0 <= held <= 1, f"the cache holds a share of {held:g} of the rows; it needs to be within 0 and 1")
    heats, batch = [], problem.global_batch
    for table in problem.tables:
        if lookups(table, batch) == 0:
            heats.append((0.0, 0.0, table, 0.0))
            continue
        [heat] = heat_of([table], batch, unseen=True)
        heats.append((heat.unique_rows, float(heat.misses(held * table.rows)), table, heat.rows_of(_MOST)))
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
            f"misses with {held:.0%} held": f"{missed / touched:.0%}" if touched else "-",
            # Where rows are divided, in the order of ids or as a hash table's routing sends them.
            **({f"busiest of {n_devices} ranges": f"{imbalance(table, n_devices):.2f}x"} if uneven else {}),
        }
        for touched, missed, table, hot in heats
    ]
    all_touched, all_missed = (sum(x[i] for x in heats) for i in (0, 1))
    share = all_missed / all_touched if all_touched else 0.0
    return "\n".join(
        [
            records_table(rows),
            "",
            f"A batch of {batch:,} samples touches {all_touched:,.0f} rows; a cache of {held:.0%} of each "
            f"table (LRU) has to fetch {all_missed:,.0f} of them ({share:.0%}).",
        ]
    )


def collision_table(problem: Problem, ids: int, lookups_of_stream: int, most: float) -> str:
    """Collisions of hash tables at the rows that they have, and the fewest rows for a share of them.

    ids: raw ids that may come, of each table.
    lookups_of_stream: in each table, which begins empty.
    most: share of lookups that may collide.

    Raises ShardCoreError for a problem without hash tables, and as `rows_for` does.
    """
    rows = []
    for table in (t for t in problem.tables if t.managed_collision):
        step = table.managed_collision.buckets if table.managed_collision else 1
        # The law is over all ids that may come, in whole buckets as a table has them.
        universe = replace(table, rows=-(-ids // step) * step)
        needed = replace(table, rows=rows_for(universe, most, lookups_of_stream))
        rows.append(
            {
                "table": table.name,
                "rows": f"{table.rows:,}",
                "lookups that collide": f"{collided_share(universe, table.rows, lookups_of_stream):.2%}",
                f"rows for {most:.2%}": f"{needed.rows:,}",
                **{
                    words: gib(sum(resident_bytes(WHOLE_ROWS, Shard.whole(one), problem)))
                    for words, one in (("memory", table), ("memory then", needed))
                },
            }
        )
    require(
        bool(rows),
        f"problem {problem.name!r} has no hash tables; it needs tables with managed_collision",
    )
    return records_table(rows)
