"""Outputs of a shard: what its lookups give, and what its gradients come back to."""

from __future__ import annotations

from typing import Any

from shardcore.core.payloads import payload_of
from shardcore.core.types import OUTPUT_BYTES, Shard, Table
from shardcore.step.access import access_share, distinct_values


def output_rows(shard: Shard, batch: int) -> int:
    """Rows of its outputs for `batch` samples.

    Pooled: one for each distinct value of a feature. A sequence: one for each lookup of the shard's rows, by
    the table's statistics.
    """
    return table_output_rows(shard.table, batch, access_share(shard) if shard.table.sequence else 1.0)


def table_output_rows(table: Table, batch: int, share: float = 1.0) -> int:
    """Rows of outputs of rows that get a share of the table's lookups. Faster than to create a Shard."""
    # Whole rows, so that searches can add and subtract their bytes exactly. At least one: there is an op.
    if not table.sequence:
        return distinct_values(table, batch)
    return max(1, round(batch * table.looked_up * share))


def output_bytes(shard: Shard, batch: int) -> int:
    """Bytes of its outputs for `batch` samples, or of their gradients."""
    # FBGEMM returns FP32 outputs, whatever type the weights have.
    return OUTPUT_BYTES * shard.width * output_rows(shard, batch)


def payload_bytes(n_bytes: Any, payload: str) -> Any:
    """Bytes that outputs or gradients take on their way, if they take `n_bytes` in FP32. Without padding."""
    return n_bytes * payload_of(payload).share
