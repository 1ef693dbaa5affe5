"""Drift of hot rows: their share of lookups now, and the gain and moves of other hot ids.

Shapes: R rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.payloads import FP32_BYTES
from shardcore.core.types import PRECISION_BYTES, Problem, Table
from shardcore.io.hot_ids import HotIds
from shardcore.io.row_counts import RowCounts
from shardcore.step.id_bytes import lookup_bytes
from shardcore.tables.hot_rows import COLD, HOT


@dataclass(frozen=True)
class HotDrift:
    """Drift of the hot rows of a table.

    table: its name, without the ending of hot or cold rows.
    rows: hot rows.
    still_hot: share of them that are as hot as the last of as many hottest rows now.
    planned_share: their share of lookups in the problem.
    share: their share of lookups now.
    best_share: share of lookups that as many hottest rows have now.
    new: the ids of the hottest rows. Of equally hot ids, those that are hot stay.
    entering: rows that are hot only in `new`. As many others leave.
    saved_bytes: bytes that no longer leave devices in a step with `new`, over all devices: ids, outputs,
      gradients.
    moved_bytes: weights that enter, once to each device, and that leave, to one.
    """

    table: str
    rows: int
    still_hot: float
    planned_share: float
    share: float
    best_share: float
    new: HotIds
    entering: int
    saved_bytes: float
    moved_bytes: int


def hot_drift(problem: Problem, hot: Mapping[str, HotIds], counts: RowCounts) -> list[HotDrift]:
    """The drift of each table with hot rows, those first that other hot ids would save most.

    problem: with hot rows (see `with_hot_rows`).
    hot: the ids that are hot now, by table.
    counts: lookups of each row, in samples of now. Lookups are scaled to the problem's global batch.

    Raises ShardCoreError for a problem without hot rows, hot ids or counts of other tables, and a table
    without lookups.
    """
    tables = {table.name: table for table in problem.tables}
    names = [name.removesuffix(HOT) for name in tables if name.endswith(HOT)]
    names = [name for name in names if name + COLD in tables]
    if not names:
        raise ShardCoreError(
            f"problem {problem.name!r} has no tables NAME{HOT} and NAME{COLD}; it needs to be one that hot-rows wrote"
        )
    if unknown := sorted(set(hot) - set(names)):
        raise ShardCoreError(
            f"there are hot ids of table {unknown[0]!r}, which has no hot rows in problem "
            f"{problem.name!r}; it has of {sorted(names)[:5]}"
        )
    drifts = []
    for name in names:
        hot_part, cold_part = tables[name + HOT], tables[name + COLD]
        rows = hot_part.rows + cold_part.rows
        if name not in hot:
            raise ShardCoreError(
                f"there are no hot ids of table {name!r}; problem {problem.name!r} has {hot_part.rows} hot rows of it"
            )
        now = hot[name]
        # Hot ids of another version would count other rows as hot.
        if (now.rows, len(now.ids)) != (rows, hot_part.rows):
            raise ShardCoreError(
                f"table {name!r} was given {len(now.ids)} hot ids of {now.rows} rows; problem {problem.name!r} has "
                f"{hot_part.rows} of {rows}: they are of another table or version"
            )
        drifts.append(_drift(name, hot_part, cold_part, now, counts, problem))
    return sorted(drifts, key=lambda x: -x.saved_bytes)


def _drift(
    name: str, hot_part: Table, cold_part: Table, now: HotIds, counts: RowCounts, problem: Problem
) -> HotDrift:
    # [R] lookups of each row in the samples of now.
    of_rows = counts.of(name, now.rows)
    if not (total := int(of_rows.sum())):
        raise ShardCoreError(
            f"table {name!r} has no access statistics: its row counts are all 0; it needs some lookups"
        )
    new, job, n_devices = _hottest(now, of_rows), problem.job, len(problem.topology)
    # As many rows leave as enter: the number of hot rows stays.
    entering = len(np.setdiff1d(new.ids, now.ids, assume_unique=True))
    share, best_share = (float(of_rows[hot.ids].sum()) / total for hot in (now, new))
    planned = hot_part.pooling + cold_part.pooling
    row_bytes = hot_part.dim * PRECISION_BYTES[hot_part.precision]
    shares = (codec.share for codec in problem.codecs)
    payload_bytes = hot_part.dim * FP32_BYTES * sum(shares)
    # Lookups in a step that `new` makes hot. Of a cold one, (D - 1) / D come from another device.
    saved_lookups = (best_share - share) * total / counts.samples * problem.global_batch
    sent_share = (n_devices - 1) / n_devices
    return HotDrift(
        table=name,
        rows=hot_part.rows,
        new=new,
        entering=entering,
        # The last of the hottest rows is the threshold: rows with equally many lookups are as hot.
        still_hot=float(np.mean(of_rows[now.ids] >= max(1, of_rows[new.ids].min()))),
        planned_share=hot_part.pooling / planned if planned else 0.0,
        share=share,
        best_share=best_share,
        saved_bytes=saved_lookups * (lookup_bytes(cold_part, job) + payload_bytes) * sent_share,
        # A row that enters goes to every device. One that leaves goes to one.
        moved_bytes=entering * row_bytes * (n_devices + 1),
    )


def _hottest(now: HotIds, counts: np.ndarray) -> HotIds:
    """The ids with the most lookups, as many as are hot now. Of equal ones, those that are hot stay."""
    was = np.zeros(len(counts), dtype=bool)
    was[now.ids] = True
    # lexsort sorts by its last key first: most lookups, then those that are hot now.
    order = np.lexsort((~was, -counts))
    return HotIds(now.table, now.rows, np.sort(order[: len(now.ids)]))
