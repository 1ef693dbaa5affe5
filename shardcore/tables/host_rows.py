"""Traffic between a device and its host's memory, for tables with rows there.

Bytes that cross it in each step:

- with a cache: a row that misses is fetched, and written back later. Of a row that is touched, the
  optimizer's state of cells is read and written, for FBGEMM does not cache it.
- without: each lookup reads its row, and the update reads and writes each row that it touches, with its state
  of cells.

State of rows is always in device memory.

Shapes: N sizes of a cache.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.types import PRECISION_BYTES, Shard, Table
from shardcore.step import access
from shardcore.tables.heat import Heat, heat_of


def link_bytes(table: Table, cached: np.ndarray, batch: int, optimizer: str) -> np.ndarray:
    """[N, 2] bytes of a batch that cross the link forward and backward, if so many rows [N] are cached.

    A row that misses is written back when another takes its place, so forward.

    Raises ShardCoreError as `heat_of` does.
    """
    # Columns: forward and backward.
    found = np.zeros((len(cached), 2))
    if (lookups := access.lookups(table, batch)) == 0:
        return found
    heat = _heat(table, batch)
    row = table.dim * PRECISION_BYTES[table.precision]
    # Read and written, so twice. FBGEMM does not cache state of cells.
    state = 2 * heat.unique_rows * table.dim * OPTIMIZERS[optimizer].state_bytes("cell")
    has_cache = cached > 0
    # A miss fetches a row and writes back the one that it replaces.
    found[has_cache, 0] = 2 * row * heat.misses(cached[has_cache])
    found[has_cache, 1] = state
    # Without a cache, each distinct value's lookups read over the link, and the update reads and writes.
    found[~has_cache] = lookups / table.dedup * row, 2 * heat.unique_rows * row + state
    return found


def link_bytes_of(shard: Shard, batch: int, optimizer: str) -> np.ndarray:
    """[2] the same of a shard, with the load factor of its table.

    A shard has its share of columns. A range of rows has its share of lookups, and misses as often as all.
    """
    if not shard.table.in_host_memory:
        return np.zeros(2)
    # Columns scale bytes. A range of rows takes part of the lookups.
    share = shard.width / shard.table.dim * access.access_share(shard)
    return share * np.array(_of_table(shard.table, batch, optimizer))


# Cached by table: searches encode many shards of one table.
@lru_cache(maxsize=1 << 16)
def _of_table(table: Table, batch: int, optimizer: str) -> tuple[float, float]:
    [(forward, backward)] = link_bytes(table, np.array([table.cached(table.rows)]), batch, optimizer)
    return float(forward), float(backward)


@lru_cache(maxsize=1 << 10)
def _heat(table: Table, batch: int) -> Heat:
    # unseen: data looks up rows that one batch never saw, and these are what a cache misses.
    return heat_of([table], batch, unseen=True)[0]
