"""Row ids of shards in a batch, to compare with what kernels look up."""

import numpy as np

from shardcore.core.types import Shard
from shardcore.tables.streams import draw_lookups


def shard_stream(shard: Shard, batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The stream of a shard's table, restricted to the shard's rows. Ids count from its first row."""
    ids, offsets = draw_lookups(shard.table, batch, seed)
    if shard.has_all_rows:
        return ids, offsets
    inside = (ids >= shard.row_lo) & (ids < shard.row_hi)
    # [L + 1] ids inside before each id. Indexed by an offset in all ids, it gives the offset among those inside.
    kept = np.concatenate([[0], np.cumsum(inside)])
    return ids[inside] - shard.row_lo, kept[offsets]
