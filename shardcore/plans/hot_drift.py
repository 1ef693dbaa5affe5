"""Drift of hot rows: their share of lookups now, and the gain and moves of other hot ids.

Shapes: R rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.payloads import FP32_BYTES
from shardcore.core.types import Problem, Table
from shardcore.core.validation import require
from shardcore.io.hot_ids import HotIds
from shardcore.io.row_counts import RowCounts
from shardcore.step.id_bytes import id_bytes_per_lookup
from shardcore.tables.hot_rows import COLD, HOT, cold_part_names


@dataclass(frozen=True)
class HotDrift:
    """Drift of a table's hot rows: how far the ids held as hot still are the hottest.

    still_hot: share of them that are as hot as the last of as many hottest rows now.
    planned_share: their share of lookups in the problem.
    share: their share of lookups now.
    best_share: share of lookups that as many hottest rows have now.
    new: the ids of the hottest rows of the whole table. Of equally hot ids, those that are hot stay.
    entering: rows that are hot only in `new`. As many others leave.
    saved_bytes: bytes that no longer leave devices in a step with `new`, over all devices: ids, outputs,
      gradients.
    moved_bytes: weights that enter, once to each device, and that leave, to one.
    """

    still_hot: float
    planned_share: float
    share: float
    best_share: float
    new: HotIds
    entering: int
    saved_bytes: float
    moved_bytes: int


def hot_row_drifts(problem: Problem, hot: Mapping[str, HotIds], counts: RowCounts) -> list[HotDrift]:
    """Drift of each table with hot rows, sorted by the bytes that newer hot ids would save.

    problem: with hot rows (see `with_hot_rows`).
    hot: the ids that are hot now, by table.
    counts: lookups of each row, in samples of now. Lookups are scaled to the problem's global batch.

    Raises ShardCoreError for a problem without hot rows, hot ids or counts of other tables, and a table
    without lookups.
    """
    cold = cold_part_names(problem)
    require(
        bool(cold),
        f"problem {problem.name!r} has no tables NAME{HOT} and NAME{COLD}; it needs to be one that hot-rows wrote",
    )
    if differ := sorted(hot.keys() ^ cold.keys()):
        name = differ[0]
        raise ShardCoreError(
            f"there are {'no ' * (name not in hot)}hot ids of table {name!r}, which has "
            f"{'no ' * (name not in cold)}hot rows in problem {problem.name!r}; it has them of {sorted(cold)[:5]}"
        )
    tables = {table.name: table for table in problem.tables}
    drifts = [
        _table_drift(hot[name], tables[name + HOT], tables[cold[name]], counts, problem) for name in cold
    ]
    return sorted(drifts, key=lambda x: -x.saved_bytes)


def _table_drift(
    hot_ids: HotIds, hot_part: Table, cold_part: Table, counts: RowCounts, problem: Problem
) -> HotDrift:
    # Hot ids of another version would count other rows as hot.
    """Drift of one table's hot rows."""
    name, rows = hot_ids.table, hot_part.rows + cold_part.rows
    require(
        (hot_ids.rows, len(hot_ids.ids)) == (rows, hot_part.rows),
        f"table {name!r} was given {len(hot_ids.ids)} hot ids of {hot_ids.rows} rows; problem {problem.name!r} has "
        f"{hot_part.rows} of {rows}: they are of another table or version",
    )
    # [R] lookups of each row in the samples of now.
    of_rows = counts.table_counts(name, hot_ids.rows)
    total = int(of_rows.sum())
    require(
        total > 0,
        f"table {name!r} has no access statistics: its row counts are all 0; it needs some lookups",
    )
    new, n_devices = _hottest_ids(hot_ids, of_rows), len(problem.topology)
    # As many rows leave as enter: the number of hot rows stays.
    entering = len(np.setdiff1d(new.ids, hot_ids.ids, assume_unique=True))
    share, best_share = (float(of_rows[hot.ids].sum()) / total for hot in (hot_ids, new))
    planned = hot_part.pooling + cold_part.pooling
    payload_bytes = hot_part.dim * FP32_BYTES * sum(codec.size_ratio for codec in problem.payload_codecs)
    # Lookups in a step that `new` makes hot. Of a cold one, (D - 1) / D come from another device.
    saved_lookups = (best_share - share) * total / counts.samples * problem.global_batch
    sent_share = (n_devices - 1) / n_devices
    return HotDrift(
        new=new,
        entering=entering,
        # The last of the hottest rows is the threshold: rows with equally many lookups are as hot.
        still_hot=float(np.mean(of_rows[hot_ids.ids] >= max(1, of_rows[new.ids].min()))),
        planned_share=hot_part.pooling / planned if planned else 0.0,
        share=share,
        best_share=best_share,
        saved_bytes=saved_lookups
        * (id_bytes_per_lookup(cold_part, problem.job) + payload_bytes)
        * sent_share,
        # A row that enters goes to every device. One that leaves goes to one.
        moved_bytes=entering * hot_part.bytes // hot_part.rows * (n_devices + 1),
    )


def _hottest_ids(hot_ids: HotIds, counts: np.ndarray) -> HotIds:
    """The table's hottest ids, as many as it holds as hot rows now. Ties favour ids that are hot now."""
    was = np.zeros(len(counts), dtype=bool)
    was[hot_ids.ids] = True
    # lexsort sorts by its last key first: most lookups, then those that are hot now.
    order = np.lexsort((~was, -counts))
    return HotIds(hot_ids.table, hot_ids.rows, np.sort(order[: len(hot_ids.ids)]))
