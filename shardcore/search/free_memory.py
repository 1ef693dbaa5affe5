"""FreeMemory: what is free on each device while shards are placed one by one.

Shapes: D devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from shardcore import memory
from shardcore.layouts import WHOLE_ROWS
from shardcore.search.shards import Bundle, RowRange, devices_of, layout_of_shard, row_range
from shardcore.types import Problem, Shard

IMPOSSIBLE = 1 << 51
"""Bytes of shards that may not be on a device at all: more than any has."""


def may_be_on_a_device(shard: Shard, problem: Problem) -> bool:
    """Tell if a device may have so many columns of a table, with all rows. It may have any range of rows."""
    table = shard.table
    if not shard.full_rows:
        return True
    if table.dim > problem.topology.most_columns and shard.width > problem.most_width(table):
        return False
    return not problem.kinds_of or problem.may_run(WHOLE_ROWS, table)


def bytes_alone(shard: Shard, problem: Problem) -> int:
    """Bytes of a shard on a device that holds nothing else of its row range. IMPOSSIBLE if it may not."""
    if not may_be_on_a_device(shard, problem):
        return IMPOSSIBLE
    return memory.bytes_as(layout_of_shard(shard, problem), shard, problem)


def bundle_bytes(bundle: Sequence[Shard], problem: Problem) -> int:
    """Bytes of all shards of a bundle."""
    return sum(bytes_alone(shard, problem) for shard in bundle)


def freedom(bundle: Bundle, problem: Problem) -> int:
    """The number of devices that a bundle may choose from.

    Bundles with least freedom are placed first, as others could take their memory and go elsewhere.
    This is the rule of the least flexible job (Pinedo, Scheduling, 5.1).
    """
    return len(devices_of(bundle[0], problem))


class FreeMemory:
    """Free bytes on each device.

    left: [D] bytes free.

    It starts from `free`, by default what the problem allows.
    `free` may have more entries than the problem has devices: further devices, without pinned tables.
    Of tables kept together, the first takes the bytes of all. The others then take none on that device.
    """

    def __init__(self, problem: Problem, free: Sequence[int] | None = None) -> None:
        self.problem = problem
        self.left = np.array(memory.free_bytes(problem) if free is None else free, dtype=np.int64)
        # Columns of each row range on each device.
        self._widths: dict[RowRange, dict[int, int]] = defaultdict(dict)
        # The device of each set of tables kept together, once one is placed.
        self._home: dict[tuple[str, ...], int] = {}
        self._together_bytes: dict[tuple[str, ...], int] = defaultdict(int)
        for table in problem.tables if problem.bundle_of else ():
            if group := problem.bundle_of.get(table.name):
                self._together_bytes[group] += bytes_alone(Shard.whole(table), problem)

    def extra_bytes(self, shard: Shard) -> np.ndarray:
        """[D] bytes that the shard adds. Fewer where it widens a shard that is already there."""
        if self._together_bytes and (group := self.problem.bundle_of.get(shard.table.name)):
            extra = 0 if group in self._home else self._together_bytes[group]
            return np.full(len(self.left), extra, dtype=np.int64)
        extra = np.full(len(self.left), bytes_alone(shard, self.problem), dtype=np.int64)
        for device, width in self._widths.get(row_range(shard), {}).items():
            extra[device] = self._bytes(shard, width + shard.width) - self._bytes(shard, width)
        return extra

    def fits(self, shard: Shard) -> np.ndarray:
        """[D] bool: the devices that can take the shard, with its bundle."""
        # Most shards are the first of their row range: then one comparison is enough.
        if self._together_bytes or row_range(shard) in self._widths:
            fits = self.extra_bytes(shard) <= self.left
        else:
            fits = bytes_alone(shard, self.problem) <= self.left
        allowed = self.allowed(shard)
        return fits if allowed is None else fits & allowed

    def allowed(self, shard: Shard) -> np.ndarray | None:
        """[D] bool: where the shard may go, with its bundle. None for everywhere."""
        home = self._home.get(self.problem.bundle_of.get(shard.table.name, ())) if self._home else None
        if home is None and shard.full_rows and shard.table.name not in self.problem.pinned:
            return None
        allowed = np.zeros(len(self.left), dtype=bool)
        allowed[list(devices_of(shard, self.problem)) if home is None else home] = True
        return allowed

    def put(self, shard: Shard, device: int) -> None:
        """Take the memory of a shard that is placed on a device."""
        widths = self._widths[row_range(shard)]
        width = widths.get(device, 0)
        if self._together_bytes and (group := self.problem.bundle_of.get(shard.table.name)):
            self.left[device] -= self.extra_bytes(shard)[device]
            self._home[group] = device
        elif width:
            self.left[device] -= self._bytes(shard, width + shard.width) - self._bytes(shard, width)
        else:
            self.left[device] -= bytes_alone(shard, self.problem)
        widths[device] = width + shard.width

    def _bytes(self, shard: Shard, width: int) -> int:
        """Bytes of a shard widened to `width` columns."""
        table, row_lo, row_hi = row_range(shard)
        return bytes_alone(Shard(table, row_lo, row_hi, 0, width), self.problem)
