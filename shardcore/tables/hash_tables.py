"""Hash tables of ids: where raw ids go, and how many lookups collide for want of rows.

A managed-collision table (access_statistics.ManagedCollision) gives each raw id a row when it first comes. TorchRec
divides its rows over ranks, by buckets: equal ranges of rows, as many to each rank. Raw ids go to buckets by a rule
(ROUTINGS). Ids that share a factor with the number of buckets then leave most of them idle.

Within a bucket, an id hashes to a slot and takes the first free one of so many in turn (`probes`). An id that finds
none shares a row with another: its lookups collide. Without probes the map is exact, and holds the ids that are looked
up most: those beyond its rows share one.

Shapes: L ids, K classes of ids of like popularity, T times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from shardcore.core.access_statistics import MOST_RANGES, ManagedCollision, RowShares, Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Table
from shardcore.core.validation import require
from shardcore.step import access

# --- routing ------------------------------------------------------------------------------------------------


def _contiguous(ids: np.ndarray, buckets: int, input_size: int) -> np.ndarray:
    # Ids beyond the size that was promised go round, as FBGEMM's block_bucketize_sparse_features sends them.
    bucket = ids // -(-input_size // buckets)
    return np.where(bucket < buckets, bucket, ids % buckets)


def _round_robin(ids: np.ndarray, buckets: int, input_size: int) -> np.ndarray:
    return ids % buckets


def _hashed(ids: np.ndarray, buckets: int, input_size: int) -> np.ndarray:
    # Any good hash: what matters is that ids do not keep their place (64-bit finaliser of MurmurHash3).
    x = ids.astype(np.uint64)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(33))) % np.uint64(buckets)).astype(np.int64)


ROUTES: Mapping[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "contiguous": _contiguous,
    "round_robin": _round_robin,
    "hashed": _hashed,
}
"""(ids [L], buckets, size of the range of raw ids) -> [L] bucket of each, by access_statistics.ROUTINGS."""


def _buckets(collision: ManagedCollision, n_devices: int) -> int:
    """Buckets of a table. One that does not say has one for each of the devices."""
    return collision.buckets if collision.buckets > 1 else n_devices


def routed(ids: np.ndarray, collision: ManagedCollision, n_devices: int) -> np.ndarray:
    """[L] bucket of each raw id. n_devices: that divide the rows."""
    return ROUTES[collision.routing](np.asarray(ids), _buckets(collision, n_devices), collision.input_size)


def routed_shares(ids: np.ndarray, collision: ManagedCollision, n_devices: int) -> RowShares | None:
    """The shares of a batch's raw ids [L] in ranges of rows: those of buckets. None: nothing is to divide.

    n_devices: that divide the rows.
    """
    if len(ids) == 0 or n_devices < 2:
        return None
    buckets = _buckets(collision, n_devices)
    # Ranges end where devices' rows do.
    n = buckets if buckets <= MOST_RANGES else n_devices
    hit, counts = np.unique(ids, return_counts=True)
    where = routed(hit, collision, n_devices) * n // buckets
    lookups, unique = (np.bincount(where, of, n) for of in (counts, None))
    return RowShares(*(tuple((of / of.sum()).round(9).tolist()) for of in (lookups, unique)))


def imbalance(table: Table, n_devices: int) -> float:
    """Lookups of the busiest device over the mean, if so many divide the table's rows. 1: they are even."""
    if table.row_shares is None or n_devices < 2:
        return 1.0
    shares = np.array(table.row_shares.lookups)
    # Shares that fall between two devices are divided evenly.
    ends = np.interp(
        np.linspace(0, 1, n_devices + 1), np.linspace(0, 1, len(shares) + 1), [0, *np.cumsum(shares)]
    )
    return float(np.diff(ends).max() * n_devices)


# --- collisions ---------------------------------------------------------------------------------------------

_TIMES, _LOADS = 400, 512
"""Steps of the forecast, and loads at which probing is known."""


def collided_share(table: Table, rows: int, lookups: float) -> float:
    """Expected share of a stream's lookups that collide, if a hash table has so many rows.

    table: its access is a power law over `rows` ids (the universe of ids), its managed collision the map.
    lookups: of the stream, which begins with an empty table.

    Raises ShardCoreError for another access, and without a map.
    """
    collision = table.managed_collision
    if collision is None or not isinstance(table.access, Zipf):
        raise ShardCoreError(
            f"table {table.name!r} needs managed_collision and access by a power law to tell its collisions"
        )
    require(rows >= 1, f"table {table.name!r} would have {rows} rows; it needs 1 or more")
    sizes, mass = access.zipf_classes(table)
    rates = mass / sizes  # of an id, for a lookup
    if not collision.probes:
        # Ids that have come, and have rows of their own, collide with none.
        came = float((sizes * -np.expm1(-lookups * rates)).sum())
        return _beyond(sizes, mass, rows - 1) if came > rows - 1 else 0.0
    # Geometric steps: the table fills fast at first.
    times = np.concatenate([[0.0], np.geomspace(1.0, max(lookups, 2.0), _TIMES)])
    seen = (sizes * -np.expm1(-np.outer(times, rates))).sum(1)  # [T] ids that have come
    failing, loads = _probing(collision.probes)
    load, lost, collided = 0.0, np.zeros(len(sizes)), 0.0
    for i in range(1, len(times)):
        # An id fails if all of its slots are taken when it first comes, and shares a row from then on.
        new = seen[i] - seen[i - 1]
        fails = float(np.interp(load + new / rows / 2, loads, failing))
        load = min(1.0, load + new * (1 - fails) / rows)
        came = np.exp(-rates * times[i - 1]) - np.exp(-rates * times[i])
        # The lookup by which it comes collides, and those that follow.
        collided += new * fails + float((mass * (lost + came * fails / 2)).sum()) * (times[i] - times[i - 1])
        lost += came * fails
    return collided / times[-1]


def _beyond(sizes: np.ndarray, mass: np.ndarray, rows: int) -> float:
    """Share of lookups of all ids but the `rows` most popular. Classes are in falling popularity."""
    held = np.interp(rows, np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([[0], np.cumsum(mass)]))
    return float(max(0.0, 1 - held / mass.sum()))


@lru_cache(maxsize=16)
def _probing(probes: int) -> tuple[np.ndarray, np.ndarray]:
    """Probability that `probes` slots in turn are all taken, at loads from 0 to 1.

    By linear probing, blocks of taken slots with the free one at their end have a Borel distribution. A slot is in
    one of m with a probability in proportion to m, at an even place (Knuth, TAOCP 3, 6.4; Janson 2005).
    """
    from scipy.special import gammaln

    loads = np.linspace(0, 1, _LOADS)
    m = np.arange(1, 64 * probes + 1)
    failing = np.ones(_LOADS)
    for i, load in enumerate(loads[:-1]):
        log_borel = -load * m + (m - 1) * np.log(np.maximum(load * m, 1e-300)) - gammaln(m + 1)
        # Of a block of m, its first m - probes places have so many taken slots ahead. The rest of the law is beyond
        # all blocks that are counted: all of its places fail.
        of_block = (1 - load) * np.exp(log_borel)
        tail = max(0.0, 1 - float((m * of_block).sum()))
        failing[i] = min(1.0, float((np.maximum(m - probes, 0) * of_block).sum()) + tail)
    return np.maximum.accumulate(failing), loads


def rows_for(table: Table, most: float, lookups: float) -> int:
    """Fewest rows of a hash table, in whole buckets, for which at most a share of a stream's lookups collide.

    Raises ShardCoreError as `collided_share`, and for a share that is not within 0 and 1.
    """
    require(
        0 < most < 1,
        f"collisions are to be a share of {most:g} of the lookups; it needs to be within 0 and 1",
    )
    collision = table.managed_collision
    step = collision.buckets if collision else 1
    few, enough = 0, 1
    while collided_share(table, enough * step, lookups) > most:
        few, enough = enough, 2 * enough
    # Fewer rows collide more, so halving finds the least.
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (
            (few, middle) if collided_share(table, middle * step, lookups) <= most else (middle, enough)
        )
    return enough * step
