"""Memory of devices as planners count it that add up numbers: each shard's own largest phase.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.core.types import Problem
from shardcore.step.kinds import sharding_kind_for_table, shards_by_device
from shardcore.step.memory import local_batch_bytes, peak_bytes_function, usable_bytes
from shardcore.step.ways import (
    ShardBundle,
    allowed_devices_of_shard,
    fits_single_device_by_width,
    fixed_placements,
    sharding_kind_of_shard,
)


def free_bytes(problem: Problem) -> list[int]:
    """Free bytes [D] on each device, after `fixed_placements`."""
    bytes_of, local = peak_bytes_function(problem), local_batch_bytes(problem)
    left = [may_hold - local for may_hold in usable_bytes(problem)]
    for placement in fixed_placements(problem):
        for device, shard in shards_by_device(placement):
            left[device] -= bytes_of(sharding_kind_for_table(placement.kind, shard.table), shard)
    return left


class Room:
    """Free memory of each device while bundles of shards are placed.

    left: [D].
    """

    def __init__(self, problem: Problem, free: Sequence[int] | None = None) -> None:
        self.problem, self._bytes_of = problem, peak_bytes_function(problem)
        self.left = np.array(free_bytes(problem) if free is None else free, dtype=np.int64)

    def bytes_of(self, bundle: ShardBundle) -> int:
        return sum(self._bytes_of(sharding_kind_of_shard(shard, self.problem), shard) for shard in bundle)

    def fitting_devices(self, bundle: ShardBundle) -> np.ndarray:
        """Mask [D] of devices that are allowed to hold a bundle and have the memory."""
        allowed = np.zeros(len(self.left), dtype=bool)
        if all(fits_single_device_by_width(shard, self.problem) for shard in bundle):
            allowed[list(allowed_devices_of_shard(bundle[0], self.problem))] = True
        return allowed & (self.left >= self.bytes_of(bundle))

    def place_bundle(self, bundle: ShardBundle, device: int) -> None:
        self.left[device] -= self.bytes_of(bundle)
