"""Hash tables of ids: the ranges of rows to which raw ids go.

A managed-collision table (access_statistics.ManagedCollision) gives each raw id a row when it first comes. TorchRec
divides its rows over ranks, by buckets: equal ranges of rows, as many to each rank. Raw ids go to buckets by a rule
(ROUTINGS). Ids that share a factor with the number of buckets then leave most of them idle.

Shapes: L ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shardcore.core.access_statistics import MOST_RANGES, ManagedCollision, RowShares
from shardcore.core.types import Table


def _contiguous_buckets(ids: np.ndarray, buckets: int, input_size: int) -> np.ndarray:
    # Ids beyond the size that was promised go round, as FBGEMM's block_bucketize_sparse_features sends them.
    bucket = ids // -(-input_size // buckets)
    return np.where(bucket < buckets, bucket, ids % buckets)


def _round_robin_buckets(ids: np.ndarray, buckets: int, input_size: int) -> np.ndarray:
    return ids % buckets


def _hashed_buckets(ids: np.ndarray, buckets: int, input_size: int) -> np.ndarray:
    # Any good hash: what matters is that ids do not keep their place (64-bit finaliser of MurmurHash3).
    x = ids.astype(np.uint64)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(33))) % np.uint64(buckets)).astype(np.int64)


ROUTES: Mapping[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "contiguous": _contiguous_buckets,
    "round_robin": _round_robin_buckets,
    "hashed": _hashed_buckets,
}
"""(ids [L], buckets, size of the range of raw ids) -> [L] bucket of each, by access_statistics.ROUTINGS."""


def _n_buckets(collision: ManagedCollision, n_devices: int) -> int:
    """Number of a hash table's buckets; one for each device if the table states none."""
    return collision.buckets if collision.buckets > 1 else n_devices


def buckets_of_ids(ids: np.ndarray, collision: ManagedCollision, n_devices: int) -> np.ndarray:
    """[L] bucket to which a hash table routes each raw id.

    n_devices: devices that divide the table's rows.
    """
    return ROUTES[collision.routing](np.asarray(ids), _n_buckets(collision, n_devices), collision.input_size)


def routed_row_shares(ids: np.ndarray, collision: ManagedCollision, n_devices: int) -> RowShares | None:
    """Shares of lookups and of unique ids that a hash table routes to each range of its rows, from a batch's ids [L].

    None if there is nothing to divide: no ids, or one device.

    n_devices: that divide the rows.
    """
    if len(ids) == 0 or n_devices < 2:
        return None
    buckets = _n_buckets(collision, n_devices)
    # Ranges end where devices' rows do.
    n = buckets if buckets <= MOST_RANGES else n_devices
    hit, counts = np.unique(ids, return_counts=True)
    where = buckets_of_ids(hit, collision, n_devices) * n // buckets
    lookups, unique = (np.bincount(where, of, n) for of in (counts, None))
    return RowShares(*(tuple((of / of.sum()).round(9).tolist()) for of in (lookups, unique)))


def row_division_imbalance(table: Table, n_devices: int) -> float:
    """Lookups of the busiest device over the mean, if n_devices divide a table's rows; 1 if even."""
    if table.row_shares is None or n_devices < 2:
        return 1.0
    shares = np.array(table.row_shares.lookups)
    # Shares that fall between two devices are divided evenly.
    ends = np.interp(
        np.linspace(0, 1, n_devices + 1), np.linspace(0, 1, len(shares) + 1), [0, *np.cumsum(shares)]
    )
    return float(np.diff(ends).max() * n_devices)
