"""FBGEMM's cache of rows, simulated: estimates of misses are checked against it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def lru_misses(batches: Iterable[np.ndarray], table_rows: int, rows: int, warm: int) -> tuple[int, int]:
    """Unique rows that batches of ids touch, and those of them that an LRU cache of `rows` rows misses.

    warm: first batches, which fill the cache and are not counted.

    Rows of the current batch are never dropped for others of it, as in FBGEMM.
    """
    rng = np.random.default_rng(0)
    last = np.full(table_rows, -1)  # last batch that touched each row; -1: none did
    cached = np.zeros(table_rows, dtype=bool)
    seen = missed = 0
    for now, ids in enumerate(batches):
        # FBGEMM takes each row of a batch once, however often it is looked up.
        unique = np.unique(ids)
        arriving = unique[~cached[unique]]
        if now >= warm:
            seen, missed = seen + len(unique), missed + len(arriving)
        last[unique] = now
        # The latest rows stay; of these, cached ones before arriving ones. Which arriving ones stay is chance.
        rows_now = np.concatenate([np.flatnonzero(cached), rng.permutation(arriving)])
        arrives = np.arange(len(rows_now)) >= len(rows_now) - len(arriving)
        cached[:] = False
        cached[rows_now[np.lexsort((arrives, -last[rows_now]))[:rows]]] = True
    return seen, missed
