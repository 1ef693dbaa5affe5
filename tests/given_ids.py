"""Bytes of ids that devices exchange for a given batch, as TorchRec counts them.

Shapes: D devices.
"""

from collections.abc import Callable, Iterator

import numpy as np

from shardcore.core.types import Plan, Problem, Shard
from shardcore.step.id_bytes import id_bytes_per_lookup, stride_bytes
from shardcore.step.kinds import ShardingKind, merged_placements, sharding_kind_for_table, shards_by_device

COUNT_BYTES = 8
"""Bytes of a number by which a device announces what it sends."""
Lookups = Callable[[Shard], np.ndarray]
"""shard -> [D] ids of its rows that the samples of each device look up in a step."""


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
        lengths = round(problem.local_batch * shard.table.mean_bags)
        of_each = id_bytes_per_lookup(shard.table, job) * lookups(shard) + job.length_bytes * lengths
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


def _inputs(plan: Plan) -> Iterator[tuple[ShardingKind, int, Shard]]:
    """Runs and devices that ids go to, with the shard."""
    for placement in merged_placements(plan.placements):
        run = sharding_kind_for_table(placement.kind, placement.shard.table)
        yield from ((run, device, shard) for device, shard in shards_by_device(placement) if run.ids)
