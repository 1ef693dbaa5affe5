"""Outputs of a shard: what its lookups give, and what its gradients come back to."""

from __future__ import annotations

from shardcore.tables.access import access_share
from shardcore.types import OUTPUT_BYTES, Shard


def output_rows(shard: Shard, batch: int) -> int:
    """Rows of its outputs for `batch` samples.

    Pooled: one for each sample and feature. A sequence: one for each lookup of the shard's rows, by the
    table's statistics.
    """
    table = shard.table
    if not table.sequence:
        return batch * table.features
    # Whole rows, so that searches can add and subtract their bytes exactly. At least one: there is an op.
    return max(1, round(batch * table.pooling * access_share(shard)))


def output_bytes(shard: Shard, batch: int) -> int:
    """Bytes of its outputs for `batch` samples, or of their gradients."""
    return OUTPUT_BYTES * shard.width * output_rows(shard, batch)
