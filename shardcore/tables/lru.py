"""A cache of rows, simulated as FBGEMM runs it: what estimates of misses are checked against."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shardcore.core.errors import ShardCoreError

WAYS = 32
"""Rows of a set of FBGEMM's cache on a GPU (its warp size)."""


def lru_misses(
    batches: Iterable[np.ndarray],
    table_rows: int,
    rows: int,
    warm: int = 0,
    ways: int | None = None,
    seed: int = 0,
) -> tuple[int, int]:
    """Unique rows that batches of ids touch, and those of them that an LRU cache of so many rows misses.

    warm: first batches, which are not counted.
    ways: rows of a set of the cache. A row's set is random. Default: one set.
    seed: of the sets, and of which rows enter a set that one batch overfills.

    Rows of the current batch are never dropped for others of it, as in FBGEMM. Raises ShardCoreError for a
    cache that is larger than the table.
    """
    if not 0 <= rows <= table_rows:
        raise ShardCoreError(
            f"a table was given a cache of {rows} rows; it has {table_rows}, so 0 to "
            f"{table_rows} would be right"
        )
    rng = np.random.default_rng(seed)
    # Without ways the cache is one set of all rows.
    sets = max(1, rows // ways) if ways else 1
    # FBGEMM hashes rows to sets. A random set stands for the hash.
    set_of, room = rng.integers(0, sets, table_rows), rows if ways is None else min(ways, rows)
    # -1: never touched.
    last = np.full(table_rows, -1)  # the last batch that touched a row
    cached = np.zeros(table_rows, dtype=bool)
    seen = missed = 0
    for now, ids in enumerate(batches):
        # FBGEMM takes each row of a batch once, however often it is looked up.
        unique = np.unique(ids)
        hit = cached[unique]
        # Warm-up batches fill the cache, and do not count.
        if now >= warm:
            seen, missed = seen + len(unique), missed + int((~hit).sum())
        # Hits are as recent as arrivals: FBGEMM drops rows by the last batch that touched them.
        last[unique[hit]] = now
        arriving = unique[~hit]
        last[arriving] = now
        # Those that are cached go before those that arrive, and old ones last.
        # A random order among arrivals: which of them enter an overfull set is chance.
        those = np.concatenate([np.flatnonzero(cached), rng.permutation(arriving)])
        # Sorted by set, then latest batch first, then rows that were cached before arrivals.
        order = np.lexsort((np.arange(len(those)) >= len(those) - len(arriving), -last[those], set_of[those]))
        those = those[order]
        # First position of each set, so that a row's rank within its set is a difference.
        starts = np.searchsorted(set_of[those], np.arange(sets))
        # A set keeps as many rows as it has room for.
        kept = np.arange(len(those)) - starts[set_of[those]] < room
        cached[:] = False
        cached[those[kept]] = True
    return seen, missed
