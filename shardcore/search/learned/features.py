"""What policies know of a shard: the 21 features of DreamShard and AutoShard.

Shapes: N shards, F = 21 features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.core.access_statistics import REUSE_BINS
from shardcore.core.types import Shard
from shardcore.step import access

FEATURES = ("dim", "rows", "pooling", "size", *(f"reuse_{k}" for k in range(REUSE_BINS)))
"""Names, in the published order. The first four are natural logarithms.

dim: columns of the shard.
rows: of the shard.
pooling: lookups a sample that hit the shard's rows.
size: bytes of weights.
reuse_k: share of a batch's unique rows in bin k of a reuse histogram, of the whole table.
"""
_OFFSET = 0.1
"""Keeps logarithms finite where nothing is looked up."""


def features(shards: Sequence[Shard], batch: int) -> np.ndarray:
    """[N, F] float32 features of shards that a batch of so many samples looks up."""
    sizes = np.array(
        [(s.width, s.rows, s.table.looked_up * access.access_share(s) + _OFFSET, s.bytes) for s in shards],
        dtype=float,
    ).reshape(-1, 4)
    bins = np.array([access.reuse_bins(s.table, batch) for s in shards]).reshape(-1, REUSE_BINS)
    return np.concatenate([np.log(sizes), bins], 1).astype(np.float32)
