"""Input distribution: the ids that devices send each other before the lookups of a step.

A batch arrives divided evenly over the devices. So each device has ids for shards that others hold.
TorchRec sends each shard its ids (KJTAllToAll), by one all-to-all over all devices for each kind and
collection:

- A device that holds columns gets all ids of the table, once. A table on k devices sends its ids k times.
- A device that holds a row range gets only the ids in it. Each device puts its own in buckets before.
- Each shard also gets a length for each sample and feature, even if it is 0: how many ids it has.
- Weights of lookups travel with the ids, in FP32.
- A kind that runs over a device's own samples needs nothing from others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcore.core.job import Job
from shardcore.core.types import Problem, Shard, Table
from shardcore.step.access import access_share

if TYPE_CHECKING:
    from shardcore.step.lower import Workload

STRIDE_BYTES = 8
"""Bytes of a feature's stride in TorchRec's variable batches: int64 (KeyedJaggedTensor.dist_tensors)."""
WEIGHT_BYTES = 4
"""Bytes of the weight of a lookup: FP32."""


def received_id_bytes(shard: Shard, step: Problem | Workload) -> int:
    """Bytes of ids and lengths that a device with a shard receives in a step, by the table's statistics.

    The shard's columns do not matter. Its own ids from itself are included.
    """
    # Whole bytes, so that searches can add and subtract them exactly.
    of_samples = step.global_batch * id_bytes_per_sample(shard.table, step.job, access_share(shard))
    # Few tables have strides, and searches ask often.
    strides = len(step.topology) * stride_bytes(shard.table) if shard.table.strides else 0
    return round(of_samples) + strides


def id_bytes_per_sample(table: Table, job: Job, fraction: float = 1.0, ranges: int = 1) -> float:
    """Mean bytes of a table's ids and lengths for one sample.

    fraction: share of its lookups. ranges: number of ranges of its rows, each with separate lengths.
    """
    # Each range sends a length for every bag, even where it has none of the bag's ids.
    lengths = table.mean_bags * ranges
    return id_bytes_per_lookup(table, job) * table.lookups_per_sample * fraction + job.length_bytes * lengths


def stride_bytes(table: Table) -> int:
    """Bytes in which a device states the batch size of each feature of a table with variable batches.

    Of sequences TorchRec pads lengths to one batch instead (pad_vbe_kjt_lengths in its embedding.py).
    """
    return STRIDE_BYTES * len(table.strides) * (not table.sequence)


def id_bytes_per_lookup(table: Table, job: Job) -> int:
    """Bytes of an id, and of its weight if lookups of the table are weighted."""
    return job.id_bytes + (WEIGHT_BYTES if table.weighted else 0)
