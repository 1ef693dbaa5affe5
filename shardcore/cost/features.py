"""Features of a shard in a fused FBGEMM op.

Drivers are additive measures of work. Conditions change the price of that work.

Shapes: N shards, K drivers, C conditions, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardcore.core.types import PRECISION_BYTES, Shard
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.step import access
from shardcore.step.access import output_rows

WIDTH_CLASSES = (32, 64, 128, 256)
"""Columns at which FBGEMM's CUDA kernels change. They choose by the widest table of an op."""
DRIVERS = (
    "shards",
    "bags",
    "output_cells",
    "lookups",
    "lookup_cells",
    "unique_rows",
    "unique_cells",
    *(f"wider_than_{w}" for w in WIDTH_CLASSES),
    "unpooled_cells",
    "unpooled_unique_rows",
)
"""Work for one shard. Drivers add up over the shards of an op.

shards: 1, the table to set up.
bags: offsets read, one a sample and feature of the table; one a lookup of a sequence.
output_cells: bags × width, written.
lookups: ids read.
lookup_cells: lookups × width, summed; backward, gradients applied.
unique_rows: distinct rows touched.
unique_cells: unique_rows × width, fetched from memory.
wider_than_W: 1 if it is. Their sums tell the class of the op's widest shard, and stay sums in a search.
unpooled_cells, unpooled_unique_rows: output_cells and unique_rows of a sequence once more. FBGEMM has other
    kernels for it, with other rates: on a CPU, backward finds each distinct row in a hash map, which takes
    twenty times as long as in a pooled op.
"""

CONDITIONS = (
    "width",
    "lines",
    "pooling",
    "unique_share",
    "unique_rows",
    "unique_bytes",
    "rows",
    "bytes",
    "batch",
)
"""Conditions that change the price of the drivers. All are natural logarithms.

width, rows, batch: of the shard and the op.
lines: bytes of the cache lines that a row occupies, over the row's own bytes.
pooling: lookups per bag that hit the shard's rows.
unique_share: unique rows per lookup.
unique_rows, unique_bytes: touched by a batch, against the reach of caches and TLB.
bytes: all weights, against the same.
"""
_LINE_BYTES = 64


def shard_features(shards: Sequence[Shard], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """DRIVERS [N, K] and CONDITIONS [N, C] of shards in an op over `batch` samples, as float64."""
    columns = np.zeros((len(shards), len(DRIVERS) + len(CONDITIONS)))
    if len(shards):
        width, height, element_bytes, pooling, bags, dedup, unpooled = np.array(
            [
                (
                    s.width,
                    s.rows,
                    PRECISION_BYTES[s.table.precision],
                    # A row range serves only part of the lookups, so pooling is scaled first.
                    s.table.lookups_per_sample * access.access_share(s),
                    # Bags: one for each distinct value of a feature, or each lookup of a sequence.
                    output_rows(s, batch),
                    # Samples for each bag of a feature.
                    s.table.features / s.table.mean_bags,
                    # A flag, 1 for sequences: what only they take is a product with it.
                    s.table.sequence,
                )
                for s in shards
            ],
            dtype=float,
        ).T
        # Lookups scale with the share that hits the shard's rows.
        unique, lookups = access.unique_rows_of_shards(shards, batch), pooling * batch
        # Bytes of a row as it is stored, in the weights' type.
        row_bytes = width * element_bytes
        # The offsets keep the logarithms finite for shards that no lookup hits.
        unique_share = (unique + 1) / (lookups + 1)
        # Memory is read in cache lines, so a narrow row costs a whole line.
        lines = np.ceil(row_bytes / _LINE_BYTES) * _LINE_BYTES / row_bytes
        # The order is that of DRIVERS. Cells are numbers read or written, whatever their type.
        additive = (
            1.0,
            bags,
            bags * width,
            lookups,
            lookups * width,
            unique,
            unique * width,
            *(width > w for w in WIDTH_CLASSES),
            unpooled * bags * width,
            unpooled * unique,
        )
        # The order is that of CONDITIONS. Small constants keep logarithms finite.
        conditions = (
            width,
            lines,
            # 1 for a sequence, which has a bag for each lookup.
            lookups / bags + 0.1,
            unique_share,
            unique + 1,
            # Bytes touched by a batch decide which cache can hold them.
            unique * row_bytes + 1,
            height,
            height * row_bytes,
            # Deduplication, and strides below 1, look up as if fewer samples came.
            batch / dedup,
        )
        # Unlike numpy's, Python's logarithm depends on no processor. So a search finds the same plan everywhere.
        logs = [np.fromiter(map(math.log, x.tolist()), float, len(x)) for x in conditions]
        # Column by column: scalars are broadcast over all shards.
        for k, values in enumerate((*additive, *logs)):
            columns[:, k] = values
    return columns[:, : len(DRIVERS)], columns[:, len(DRIVERS) :]


def op_features(requests: Sequence[ComputeRequest]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features of the N shards of S ops: [N, K] quantities that time grows with (DRIVERS), [N, C] properties that
    change the rate (CONDITIONS), and [S + 1] the first shard of each op, then N.
    """
    shards = [shard for request in requests for shard in request.shards]
    starts = np.cumsum([0, *(len(request.shards) for request in requests)])
    batches = np.repeat([request.batch for request in requests], np.diff(starts))
    columns = np.zeros((len(shards), len(DRIVERS) + len(CONDITIONS)))
    # All shards of a batch at once: thousands of calls take seconds.
    for batch in set(batches.tolist()):
        rows = np.flatnonzero(batches == batch)
        columns[rows] = np.concatenate(shard_features([shards[i] for i in rows], batch), 1)
    return columns[:, : len(DRIVERS)], columns[:, len(DRIVERS) :], starts


def measured_ms(samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S, 2] measured ms, forward and backward, of samples without an error."""
    return np.array([[part.median_ms for part in (s.forward, s.backward) if part] for s in samples]).reshape(
        -1, 2
    )
