"""Memory of devices as planners count it that add up numbers: each shard's own largest phase.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.core.types import Problem
from shardcore.step.kinds import run_of, shards_on
from shardcore.step.memory import held_bytes, local_batch_bytes, own_peaks
from shardcore.step.ways import Bundle, devices_of, fixed_placements, layout_of_shard, may_be_on_a_device


def free_bytes(problem: Problem) -> list[int]:
    """[D] bytes that shards may take, beside those of `fixed_placements`."""
    bytes_of, local = own_peaks(problem), local_batch_bytes(problem)
    left = [may_hold - local for may_hold in held_bytes(problem)]
    for placement in fixed_placements(problem):
        for device, shard in shards_on(placement):
            left[device] -= bytes_of(run_of(placement.kind, shard.table), shard)
    return left


class Room:
    """Bytes left on each device while bundles are placed.

    left: [D].
    """

    def __init__(self, problem: Problem, free: Sequence[int] | None = None) -> None:
        self.problem, self._bytes_of = problem, own_peaks(problem)
        self.left = np.array(free_bytes(problem) if free is None else free, dtype=np.int64)

    def bytes_of(self, bundle: Bundle) -> int:
        return sum(self._bytes_of(layout_of_shard(shard, self.problem), shard) for shard in bundle)

    def fits(self, bundle: Bundle) -> np.ndarray:
        """[D] devices that may have the bundle, and have the memory."""
        allowed = np.zeros(len(self.left), dtype=bool)
        if all(may_be_on_a_device(shard, self.problem) for shard in bundle):
            allowed[list(devices_of(bundle[0], self.problem))] = True
        return allowed & (self.left >= self.bytes_of(bundle))

    def put(self, bundle: Bundle, device: int) -> None:
        self.left[device] -= self.bytes_of(bundle)
