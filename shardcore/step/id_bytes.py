"""Input distribution: the ids that devices send each other before the lookups of a step.

A batch arrives divided evenly over the devices. So each device has ids for shards that others hold.
TorchRec sends each shard its ids (KJTAllToAll), by one all-to-all over all devices for each kind and
collection:

- A device that holds columns gets all ids of the table, once. A table on k devices sends its ids k times.
- A device that holds a row range gets only the ids in it. Each device puts its own in buckets before.
- Each shard also gets a length for each sample and feature, even if it is 0: how many ids it has.
- Weights of lookups travel with the ids, in FP32.
- A kind that runs over a device's own samples needs nothing from others.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from shardcore.core.job import Job
from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem, Shard, Table
from shardcore.step.access import access_share
from shardcore.step.kinds import Layout, merged, run_of, shards_on

COUNT_BYTES = 8
"""Bytes of a number by which a device announces what it sends."""
STRIDE_BYTES = 8
"""Bytes of a feature's stride in TorchRec's variable batches: int64 (KeyedJaggedTensor.dist_tensors)."""
WEIGHT_BYTES = 4
"""Bytes of the weight of a lookup: FP32."""
Lookups = Callable[[Shard], np.ndarray]
"""shard -> [D] ids of its rows that the samples of each device look up in a step."""


class Step(Protocol):
    """A Problem, or a Workload of one."""

    @property
    def global_batch(self) -> int: ...
    @property
    def job(self) -> Job: ...
    @property
    def topology(self) -> Topology: ...


def received_bytes(shard: Shard, step: Step) -> int:
    """Bytes of ids and lengths that a device with this shard receives in a step, by the table's statistics.

    The shard's columns do not matter. Its own ids from itself are included.
    """
    # Whole bytes, so that searches can add and subtract them exactly.
    of_samples = step.global_batch * sample_bytes(shard.table, step.job, access_share(shard))
    # Few tables have strides, and searches ask often.
    strides = len(step.topology) * stride_bytes(shard.table) if shard.table.strides else 0
    return round(of_samples) + strides


def sample_bytes(table: Table, job: Job, share: float = 1.0, ranges: int = 1) -> float:
    """Mean bytes of a table's ids and lengths for one sample.

    share: share of its lookups. ranges: number of ranges of its rows, each with separate lengths.
    """
    # Each range sends a length for every bag, even where it has none of the bag's ids.
    lengths = table.bags * ranges
    return lookup_bytes(table, job) * table.looked_up * share + job.length_bytes * lengths


def stride_bytes(table: Table) -> int:
    """Bytes by which each device tells the batch of each feature, where features have batches of their own.

    Of sequences TorchRec pads lengths to one batch instead (pad_vbe_kjt_lengths in its embedding.py).
    """
    return STRIDE_BYTES * len(table.strides) * (not table.sequence)


def lookup_bytes(table: Table, job: Job) -> int:
    """Bytes of an id, with its weight where lookups have one."""
    return job.id_bytes + (WEIGHT_BYTES if table.weighted else 0)


def input_bytes(plan: Plan, problem: Problem, lookups: Lookups) -> np.ndarray:
    """[2, D] bytes of ids and lengths that each device sends and receives, its own to itself included.

    All runs together.

    lookups: lookups of a given batch.
    """
    n, job = len(problem.topology), problem.job
    # Ids of a given batch: devices may send different numbers of them, unlike in a Workload.
    sent, received = np.zeros((2, n))
    for _, device, shard in _inputs(plan):
        # A local batch is the same size everywhere, so lengths are, too.
        lengths = round(problem.local_batch * shard.table.bags)
        of_each = lookup_bytes(shard.table, job) * lookups(shard) + job.length_bytes * lengths
        of_each = of_each + stride_bytes(shard.table)
        # `of_each` [D]: what each device sends to this shard. The shard's device receives all of it.
        sent += of_each
        received[device] += of_each.sum()
    return np.stack([sent, received])


def count_bytes(plan: Plan, problem: Problem) -> int:
    """Bytes by which each device announces how much it sends. All runs together.

    For each device and run these are numbers of samples, lengths, ids, and weights where lookups have them.
    TorchRec runs sequences cut by columns apart from others.

    Traffic does not contain them: measured exchanges of ids do, in their latency.
    """
    # A run is one exchange, but cut sequences are a second one.
    numbers = {
        (run, shard.table.sequence and shard.width < shard.table.dim): 3 + shard.table.weighted
        for run, _, shard in _inputs(plan)
    }
    return COUNT_BYTES * len(problem.topology) * sum(numbers.values())


def _inputs(plan: Plan) -> Iterator[tuple[Layout, int, Shard]]:
    """Runs and devices that ids go to, with the shard."""
    for placement in merged(plan.placements):
        run = run_of(placement.kind, placement.shard.table)
        yield from ((run, device, shard) for device, shard in shards_on(placement) if run.ids)
