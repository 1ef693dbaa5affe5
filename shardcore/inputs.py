"""Input distribution: the ids that devices send each other before the lookups of a step.

A batch arrives divided evenly over the devices. So each device has ids for shards that others hold.
TorchRec sends each shard its ids (KJTAllToAll), by one all-to-all over all devices for each kind and
collection:

- A device that holds columns gets all ids of the table, once. A table on k devices sends its ids k times.
- A device that holds a row range gets only the ids in it. They are put in buckets before.
- Each shard also gets a length for each sample, even if it is 0: how many ids the sample has for it.
- A kind that runs over a device's own samples needs nothing from others.

Costs leave this out so far: TorchRec's pipeline overlaps it with the previous batch.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardcore.layouts import layout_of, shards_on
from shardcore.tables.access import access_share
from shardcore.types import Plan, Problem, Shard

Lookups = Callable[[Shard], np.ndarray | float]
"""shard -> [D] ids of its rows that the samples of each device look up in a step. A number: all the same."""


@dataclass(frozen=True)
class InputTypes:
    """What a job's KeyedJaggedTensor holds.

    id_bytes: bytes of an id: 8 for int64, 4 for int32.
    length_bytes: bytes of a length.
    """

    id_bytes: int = 8
    length_bytes: int = 4


def expected_lookups(problem: Problem) -> Lookups:
    """Lookups by the statistics of the tables. All devices have the same."""
    return lambda shard: problem.local_batch * shard.table.pooling * access_share(shard)


def input_bytes(plan: Plan, problem: Problem, types: InputTypes = InputTypes(),
                lookups: Lookups | None = None) -> np.ndarray:
    """[2, D] bytes of ids and lengths that each device sends and receives, its own to itself included.

    lookups: those of a given batch. Default: what the tables' statistics make us expect.
    """
    lookups = lookups or expected_lookups(problem)
    n = len(problem.topology)
    # A number as long as all devices send the same: with thousands of devices, arrays would take long.
    sent_bytes, received_bytes = 0.0, np.zeros(n)
    # Several columns of a table on a device are one shard in TorchRec.
    wanted = {(device, shard.table, shard.row_lo, shard.row_hi): shard for placement in plan.placements
              if not layout_of(placement.kind).local_batch for device, shard in shards_on(placement)}
    for (device, *_), shard in wanted.items():
        of_each = types.id_bytes * lookups(shard) + types.length_bytes * problem.local_batch
        sent_bytes = sent_bytes + of_each
        received_bytes[device] += n * np.mean(of_each)
    return np.stack([np.broadcast_to(sent_bytes, n), received_bytes])
