"""A hash table as MPZCH fills it, simulated: FBGEMM's kernel inserts on CUDA only."""

import numpy as np

from shardcore.core.types import Table
from shardcore.tables.streams import _zipf_ranks


def stream(table: Table, lookups: int, seed: int) -> np.ndarray:
    """[lookups] ids by the table's power law."""
    return _zipf_ranks(table, lookups, np.random.default_rng([seed, 8]))


def counted(ids: np.ndarray, rows: int, buckets: int, probes: int, seed: int) -> float:
    """Share of a stream's lookups whose ids found no slot of their own.

    An id hashes to a slot of a bucket, and takes the first free one of `probes` in turn, around the bucket's end.
    """
    rng, size = np.random.default_rng([seed, 9]), rows // buckets
    known, first, of_lookup = np.unique(ids, return_index=True, return_inverse=True)
    bucket, start = rng.integers(0, buckets, len(known)), rng.integers(0, size, len(known))
    taken, lost = np.zeros((buckets, size), dtype=bool), np.zeros(len(known), dtype=bool)
    turns = np.arange(min(probes, size))
    for i in np.argsort(first):
        slots = (start[i] + turns) % size
        free = np.flatnonzero(~taken[bucket[i], slots])
        lost[i] = not len(free)
        if len(free):
            taken[bucket[i], slots[free[0]]] = True
    return float(lost[of_lookup].mean())
