"""FBGEMM's cache of rows, simulated row by row: estimates of misses are checked against it.

Its sets have 32 ways. Source: lru_cache_populate.cu and lfu_cache_populate.cu of FBGEMM.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

WAYS = 32


def cache_misses(
    batches: Iterable[np.ndarray], n_ids: int, rows: int, warm: int, policy: str = "lru"
) -> tuple[np.ndarray, np.ndarray]:
    """[n_ids] number of batches that touch each id, and of those that miss it, in a cache of `rows` rows.

    rows: rounded up to whole sets.
    n_ids: of all tables of the cache, one after another.
    warm: first batches, which fill the cache and are not counted.
    policy: lru or lfu.

    LRU drops no row of the current batch, and LFU none that was looked up more often than the one that comes.
    """
    sets = -(-rows // WAYS)
    set_of = _hashed(np.arange(n_ids), sets)
    held = np.full((sets, WAYS), -1)
    rank = np.full((sets, WAYS), -1)  # of what is held: last batch, or number of lookups
    cached = np.zeros(n_ids, dtype=bool)
    looked_up, seen, missed = (np.zeros(n_ids, dtype=np.int64) for _ in range(3))
    for now, ids in enumerate(batches):
        # FBGEMM takes each row of a batch once, however often it is looked up.
        unique, counts = np.unique(ids, return_counts=True)
        looked_up[unique] += counts
        arriving = unique[~cached[unique]]
        if now >= warm:
            seen[unique] += 1
            missed[arriving] += 1
        worth = np.full(n_ids, now) if policy == "lru" else looked_up
        touched = np.isin(held, unique)
        rank[touched] = worth[held[touched]]
        # The most valuable of those that arrive come first in each set.
        order = np.lexsort((-worth[arriving], set_of[arriving]))
        arriving = arriving[order]
        into, first, of_set = np.unique(set_of[arriving], return_index=True, return_inverse=True)
        nth = np.arange(len(arriving)) - first[of_set]
        arriving, of_set, nth = (x[nth < WAYS] for x in (arriving, of_set, nth))
        way = np.argsort(rank[into], 1, kind="stable")[of_set, nth]
        goes = rank[into[of_set], way]
        enters = goes < now if policy == "lru" else goes <= worth[arriving]
        at = into[of_set[enters]], way[enters]
        dropped = held[at]
        cached[dropped[dropped >= 0]] = False
        held[at], rank[at] = arriving[enters], worth[arriving[enters]]
        cached[arriving[enters]] = True
    return seen, missed


def _hashed(ids: np.ndarray, sets: int) -> np.ndarray:
    """[L] set of each id: MurmurHash3's finaliser, as FBGEMM's cache_slot."""
    x = ids.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(33))) % np.uint64(sets)).astype(np.int64)
