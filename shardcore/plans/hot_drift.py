"""How hot the hot rows of a problem still are, and what other hot ids would bring and move.

Shapes: R rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import PAYLOADS
from shardcore.core.types import PRECISION_BYTES, Problem
from shardcore.io.hot_ids import HotIds
from shardcore.io.row_counts import RowCounts
from shardcore.step.id_bytes import lookup_bytes
from shardcore.tables.hot_rows import COLD, HOT


@dataclass(frozen=True)
class HotDrift:
    """How hot the hot rows of a table still are.

    table: its name, without that of a part.
    rows: that are hot.
    still_hot: share of them that are as hot as the last of as many hottest rows now.
    planned_share: share of lookups that the problem says they have.
    share: share of lookups that they have now.
    best_share: share of lookups that as many hottest rows have now.
    new: the hot ids that have it. Of equally hot ids, those that are hot stay.
    entering: rows that are hot only in `new`. As many others leave.
    saved_bytes: that leave devices in a step less with `new`, all devices together: ids, outputs, gradients.
    moved_bytes: of weights that enter, once to each device, and that leave, to one.
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
    names = [
        name.removesuffix(HOT)
        for name in tables
        if name.endswith(HOT) and name.removesuffix(HOT) + COLD in tables
    ]
    if not names:
        raise ShardCoreError(
            f"problem {problem.name!r} has no tables NAME{HOT} and NAME{COLD}; it needs to be one that hot-rows wrote"
        )
    if unknown := sorted(set(hot) - set(names)):
        raise ShardCoreError(
            f"there are hot ids of table {unknown[0]!r}, which has no hot rows in problem "
            f"{problem.name!r}; it has of {sorted(names)[:5]}"
        )
    found, job = [], problem.job
    for name in names:
        hot_part, cold_part = tables[name + HOT], tables[name + COLD]
        rows = hot_part.rows + cold_part.rows
        if name not in hot:
            raise ShardCoreError(
                f"there are no hot ids of table {name!r}; problem {problem.name!r} has {hot_part.rows} hot rows of it"
            )
        now = hot[name]
        if (now.rows, len(now.ids)) != (rows, hot_part.rows):
            raise ShardCoreError(
                f"table {name!r} was given {len(now.ids)} hot ids of {now.rows} rows; problem {problem.name!r} has "
                f"{hot_part.rows} of {rows}: they are of another table or version"
            )
        of_rows = counts.of(name, rows)
        if not (total := int(of_rows.sum())):
            raise ShardCoreError(
                f"table {name!r} has no access statistics: its row counts are all 0; it needs some lookups"
            )
        new = _hottest(now, of_rows)
        entering = len(np.setdiff1d(new.ids, now.ids, assume_unique=True))
        share, best = (float(of_rows[h.ids].sum()) / total for h in (now, new))
        planned = hot_part.pooling + cold_part.pooling
        lookups = (best - share) * total / counts.samples * problem.global_batch
        devices, row = len(problem.topology), hot_part.dim * PRECISION_BYTES[hot_part.precision]
        payloads = PAYLOADS[job.forward_payload] + PAYLOADS[job.backward_payload]
        each = lookup_bytes(cold_part, job) + hot_part.dim * payloads
        found.append(
            HotDrift(
                name,
                hot_part.rows,
                new=new,
                entering=entering,
                still_hot=float(np.mean(of_rows[now.ids] >= max(1, of_rows[new.ids].min()))),
                planned_share=hot_part.pooling / planned if planned else 0.0,
                share=share,
                best_share=best,
                saved_bytes=lookups * each * (devices - 1) / devices,
                moved_bytes=entering * row * (devices + 1),
            )
        )
    return sorted(found, key=lambda x: -x.saved_bytes)


def _hottest(now: HotIds, counts: np.ndarray) -> HotIds:
    """As many hot ids as there are, those with the most lookups. Of equal ones, those that are hot stay."""
    was = np.zeros(len(counts), dtype=bool)
    was[now.ids] = True
    order = np.lexsort((~was, -counts))
    return HotIds(now.table, now.rows, np.sort(order[: len(now.ids)]))
