"""What an op's batch and outputs look like, before ids are drawn.

Shapes: T features.
"""

from __future__ import annotations

from typing import NamedTuple

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import OUTPUT_BYTES
from shardcore.io.measurements import ComputeRequest
from shardcore.measure.fused_op import even_parts
from shardcore.step import access
from shardcore.step.lower import is_sequence


class OpShape(NamedTuple):
    """Of a batch, and what an op makes of it.

    values: [T] distinct values of each feature.
    rows: of outputs: one for each lookup of sequences, as expected, or for each sample.
    width: columns of a row.
    several: whether features have different numbers of values. All outputs are one row then.
    """

    values: list[int]
    rows: int
    width: int
    several: bool


def op_shape(request: ComputeRequest, most_bytes: int) -> OpShape:
    """The shape of a request.

    most_bytes: of its ids and outputs.

    Raises ShardCoreError for a larger one, and for an op that FBGEMM cannot run.
    """
    sequence = is_sequence(request.shards)
    values = [
        n
        for s in request.shards
        for n in even_parts(access.distinct_values(s.table, request.batch), s.table.features)
    ]
    looked_up = sum(round(request.batch * s.table.looked_up) for s in request.shards)
    several = not sequence and any(s.table.dedup > 1 for s in request.shards)
    widths = [s.width for s in request.shards for _ in range(s.table.features)]
    if sequence:
        rows, width = looked_up, widths[0]
    elif several:
        rows, width = 1, sum(n * w for n, w in zip(values, widths, strict=True))
    else:
        rows, width = request.batch, sum(widths)
    if (takes := 8 * (looked_up + sum(values)) + 2 * OUTPUT_BYTES * rows * width) > most_bytes:
        raise ShardCoreError(
            f"a batch of {request.batch} has {takes / 2**30:.1f} GiB of ids and "
            f"outputs; on this machine it may have {most_bytes / 2**30:.1f}: it "
            "needs fewer samples, or lookups of each"
        )
    return OpShape(values, rows, width, several)
