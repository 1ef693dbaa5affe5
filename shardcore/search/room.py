"""Room: what is still free on each device while pieces are placed one by one.

Shapes: D devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from shardcore import memory
from shardcore.search.pieces import RowRange, row_range
from shardcore.types import Problem, Shard


def piece_bytes(shard: Shard, problem: Problem) -> int:
    """Bytes of a piece on a device that holds nothing else of its row range."""
    return memory.shard_bytes(shard, problem.global_batch, problem.optimizer)


class Room:
    """left [D]: bytes free per device, starting from `free` (default: what the problem allows)."""

    def __init__(self, problem: Problem, free: Sequence[int] | None = None) -> None:
        self.problem = problem
        self.left = np.array(memory.free_bytes(problem) if free is None else free, dtype=np.int64)
        self._widths: dict[RowRange, dict[int, int]] = defaultdict(dict)

    def extra_bytes(self, shard: Shard) -> np.ndarray:
        """[D] bytes that the shard adds on each device: less where it widens a shard that is there already."""
        extra = np.full(len(self.left), piece_bytes(shard, self.problem), dtype=np.int64)
        for device, width in self._widths[row_range(shard)].items():
            extra[device] = self._bytes(shard, width + shard.width) - self._bytes(shard, width)
        return extra

    def fits(self, shard: Shard) -> np.ndarray:
        """[D] bool: the devices that can take the shard."""
        return self.extra_bytes(shard) <= self.left

    def put(self, shard: Shard, device: int) -> None:
        self.left[device] -= self.extra_bytes(shard)[device]
        widths = self._widths[row_range(shard)]
        widths[device] = widths.get(device, 0) + shard.width

    def _bytes(self, shard: Shard, width: int) -> int:
        table, row_lo, row_hi = row_range(shard)
        return piece_bytes(Shard(table, row_lo, row_hi, 0, width), self.problem)
