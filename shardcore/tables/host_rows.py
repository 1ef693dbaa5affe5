"""Traffic between a device and a tier of its host's memory, for tables with rows there.

Bytes that cross their link in each step:

- With a cache, a row that misses is fetched, and written back later. Optimizer state with a value for each cell is not
  cached by FBGEMM, so it is read and written for each row that is touched, where the tier has it.
- Without a cache, each lookup reads its row. The update reads and writes each row that it touches, and its state of
  cells.

Optimizer state with a value for each row is always in device memory.

An op of FBGEMM has one cache. Its rows are those of all its tables' load factors together, and all compete for them.
On SSD each table has a cache of its own. It is as FBGEMM's other caches are: sets of 32 rows, LRU.

Shapes: M memories of a cache (heat.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.tiers import BELOW
from shardcore.core.types import PRECISION_BYTES, Shard, Table
from shardcore.step import access
from shardcore.tables.heat import TableHeat, heat_of_tables


def link_bytes_of_shard(shard: Shard, batch: int, optimizer: str) -> np.ndarray:
    """[2] bytes that a shard's batch moves over the link to host memory, forward and backward, by its load factor.

    They are in proportion to the shard's columns and to its lookups: a row range has the miss ratio of the table.

    Raises ShardCoreError as `heat_of_tables` does.
    """
    if not shard.table.in_host_memory:
        return np.zeros(2)
    share = shard.width / shard.table.dim * access.access_share(shard)
    return share * np.array(_link_bytes(shard.table, batch, optimizer))


# Cached by table: searches encode many shards of one table.
@lru_cache(maxsize=1 << 16)
def _link_bytes(table: Table, batch: int, optimizer: str) -> tuple[float, float]:
    """Bytes that a table's batch moves over the link to host memory, forward and backward.

    A row is written back when another takes its place, so in the forward pass.

    Raises ShardCoreError as `heat_of_tables` does.
    """
    if (lookups := access.lookup_count(table, batch)) == 0:
        return 0.0, 0.0
    heat = _heat_with_unseen_rows(_as_in_device_memory(table), batch)
    a_cell, a_row = (OPTIMIZERS[optimizer].state_bytes(each) for each in ("cell", "row"))
    row = table.dim * PRECISION_BYTES[table.precision]
    # Read and written, so twice.
    state = 2 * heat.unique_rows * table.dim * a_cell * table.lower_tier.holds_cells
    if table.lower_tier.holds_state:
        # State comes and goes with its row.
        row, state = row + table.dim * a_cell + a_row, 0.0
    if cached := table.cached_rows(table.rows):
        # A miss fetches a row and writes back the one that it replaces.
        return 2 * row * float(heat.missed_rows(cached)), state
    # Deduplicated values are looked up, and so read, once.
    return lookups / table.dedup * row, 2 * heat.unique_rows * row + state


def cached_rows_by_memory(table: Table, batch: int) -> np.ndarray:
    """[M] rows of a table in a cache, by how long the cache remembers a row; the same memories for all tables."""
    return _heat_with_unseen_rows(_as_in_device_memory(table), batch).cached_rows_by_memory


def with_shared_cache_load_factors(shards: Sequence[Shard], batch: int) -> tuple[Shard, ...]:
    """Shards of an op with the load factors that result when all of its tables share one cache."""
    caches: dict[str, list[int]] = defaultdict(list)
    for i, shard in enumerate(shards):
        # Rows without lookups never enter.
        if shard.table.shares_cache and access.lookup_count(shard.table, batch):
            caches[shard.table.precision].append(i)
    found = list(shards)
    for of_cache in caches.values():
        cached = [shards[i] for i in of_cache]
        # A range of rows is as hot as its table.
        held = np.array([cached_rows_by_memory(s.table, batch) * (s.rows / s.table.rows) for s in cached])
        size = sum(s.table.cached_rows(s.rows) for s in cached)
        memories = np.arange(held.shape[1])
        memory = np.interp(size, held.sum(0), memories)
        for i, shard, rows in zip(of_cache, cached, held, strict=True):
            share = float(np.interp(memory, memories, rows)) / shard.rows
            # Rows that a cache holds are not those of a table without one, be they all or none.
            share = min(max(share, 1e-12), 1 - 1e-12)
            found[i] = replace(shard, table=replace(shard.table, load_factor=share))
    return tuple(found)


def with_highest_load_factors(tables: Sequence[Table], batch: int, parts: int) -> tuple[Table, ...]:
    """Tables with upper bounds of their load factors, whichever tables share a cache.

    A cache of several tables remembers no longer than the longest of their own would.
    parts: devices that may divide rows. Each rounds the size of its cache.
    """
    memories = {}
    for i, table in enumerate(tables):
        if table.shares_cache and access.lookup_count(table, batch):
            held = cached_rows_by_memory(table, batch)
            memories[i] = np.interp(table.cached_rows(table.rows) + parts, held, np.arange(len(held)))
    longest, found = max(memories.values(), default=0.0), list(tables)
    for i in memories:
        held = cached_rows_by_memory(tables[i], batch)
        share = float(np.interp(longest, np.arange(len(held)), held)) / tables[i].rows
        found[i] = replace(tables[i], load_factor=min(max(share, tables[i].load_factor), 1 - 1e-12))
    return tuple(found)


def _as_in_device_memory(table: Table) -> Table:
    """The table as if all rows were in device memory: one cache key for all load factors."""
    return (
        replace(table, load_factor=1.0, tier=BELOW[0], managed_collision=None)
        if table.in_host_memory
        else table
    )


@lru_cache(maxsize=1 << 10)
def _heat_with_unseen_rows(table: Table, batch: int) -> TableHeat:
    # Data looks up rows that a histogram's batch never saw. These are what a cache misses.
    return heat_of_tables([table], batch, unseen=True)[0]
