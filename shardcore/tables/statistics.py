"""Statistics of a pool: the published ones of dlrm_datasets, and the same ones of any pool.

Shapes: K = REUSE_BINS, U unique rows of a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardcore.core.access_statistics import REUSE_BINS
from shardcore.core.types import Table
from shardcore.step import access

PUBLISHED = "2021-856"
"""The release of dlrm_datasets that the generator is calibrated to."""
# The order is a contract: `published`, `pool_statistics` and generate._statistics all keep it.
_STATISTICS = ("rows mean", "rows sd", "pooling mean", "pooling sd", "lookups", "unique rows") + tuple(
    f"{name}, bin {k}"
    for name in ("reuse mean", "reuse sd", "access share", "unique row share")
    for k in range(REUSE_BINS)
)


def read_published_release() -> dict:
    """Public figures of the dlrm_datasets release, from dlrm_datasets_stats.json."""
    path = Path(__file__).parent / "dlrm_datasets_stats.json"
    return json.loads(path.read_text(encoding="utf-8"))[PUBLISHED]


def published_statistics() -> dict[str, float]:
    """Published statistics of dlrm_datasets (2021, 856 tables, batch 65,536), named as in `pool_statistics`."""
    data = read_published_release()
    values = [
        data["rows"]["mean"],
        data["rows"]["sd"],
        data["pooling"]["mean"],
        data["pooling"]["sd"],
        data["lookups"],
        data["unique_rows"],
        *data["reuse_bins"]["mean"],
        *data["reuse_bins"]["sd"],
        *data["access_share_by_reuse_bin"],
        *data["unique_row_share_by_reuse_bin"],
    ]
    return dict(zip(_STATISTICS, values, strict=True))


def pool_statistics(
    tables: tuple[Table, ...], counts_of: Callable[[Table], np.ndarray] = access.reference_row_counts
) -> dict[str, float]:
    """Statistics of a pool of tables with Reuse access, from their histograms or from measured counts.

    counts_of: function from a table to [U] lookups of each unique row, in any order. Empty without lookups.

    Means and population standard deviations are over all tables. Empty tables count as 0.
    """
    rows_in_bin, lookups_in_bin = np.zeros((len(tables), REUSE_BINS)), np.zeros((len(tables), REUSE_BINS))
    for i, table in enumerate(tables):
        counts = counts_of(table)
        k = access.reuse_bin_index(counts)
        # Rows in each bin, and their lookups: the latter are weighted by the counts.
        rows_in_bin[i] = np.bincount(k, minlength=REUSE_BINS)
        lookups_in_bin[i] = np.bincount(k, counts, minlength=REUSE_BINS)
    unique, lookups = rows_in_bin.sum(1), lookups_in_bin.sum(1)
    rows = np.array([t.rows for t in tables], dtype=float)
    pooling = lookups / np.array([t.reuse.batch for t in tables])
    # An empty table has no rows to divide by.
    bins = rows_in_bin / np.maximum(unique, 1)[:, None]
    values = [
        rows.mean(),
        rows.std(),
        pooling.mean(),
        pooling.std(),
        lookups.sum(),
        unique.sum(),
        *bins.mean(0),
        *bins.std(0),
        # A pool of empty tables has no lookups to divide by.
        *(lookups_in_bin.sum(0) / max(lookups.sum(), 1)),
        *(rows_in_bin.sum(0) / max(unique.sum(), 1)),
    ]
    return dict(zip(_STATISTICS, map(float, values), strict=True))
