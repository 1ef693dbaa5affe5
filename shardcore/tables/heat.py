"""Heat: how often each row of a table is looked up, and how many lookups a cache of some of its rows misses.

Rows fall into classes that are looked up equally often, the hottest first. The cache is FBGEMM's: it takes the unique
rows of a whole batch at once, keeps those of the current batch, and drops rows by the last batch that touched them
(LRU).

Misses follow Che's approximation, in batches instead of requests. A cache of r rows holds what the last T batches
touched, where T is such that this is r rows on average. If one batch touches more than r rows, those with the lowest
ids enter.

That is of a cache of one set. FBGEMM's has sets of 32 ways, and a row stays until its set is full. Of rows that come to
sets at random, those that fill one are in a Gamma distribution: as if the cache had more rows, or fewer.

A reuse histogram knows the rows of one batch. Streams are drawn such that other rows are never looked up. In data they
are. The estimate of Good and Turing (Good, Biometrika 1953) says how often: the next batch looks up unseen rows, in
all, as many times as there are rows that this batch saw once. Rows seen once have twice as many lookups as there are
rows seen twice. Which of these rows are hotter is not known; a power law is assumed. A histogram of several batches is
more precise than one of a single batch.

Shapes: K classes of rows, L lookups, N sizes, M memories of a cache, T tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Table
from shardcore.step import access

_POINTS = 256
"""Sizes of a cache at which misses are computed. Other sizes are interpolated."""
_RARE = 1.5
"""Lookups of the hottest row of the tail: between rows that a batch sees once and rows that it sees twice."""
_TAIL = 64
"""Number of classes of the tail: rows that a batch sees once or never."""
_WAYS, _PARTS = 32, 16
"""Rows of a set of FBGEMM's cache, and equally probable parts that its distribution is divided into."""
_MOST_BATCHES = 1e9
"""Longest memory of a cache, in batches. It holds nearly all rows that are ever looked up."""


@dataclass(frozen=True, eq=False)
class TableHeat:
    """Lookups of a table's rows in a batch, by classes of rows.

    name: name of the table.
    batch: samples of the batch.
    rows: [K] number of rows of each class, hottest first. They sum to the table's rows.
    lookups: [K] mean lookups a batch of one row of each class.
    touched: [K] probability that a batch looks up a given row of each class.
    """

    name: str
    batch: int
    rows: np.ndarray
    lookups: np.ndarray
    touched: np.ndarray

    @property
    def table_rows(self) -> int:
        return round(float(self.rows.sum()))

    @property
    def unique_rows(self) -> float:
        """Expected number of unique rows of the table that a batch touches."""
        return float(self.rows @ self.touched)

    def hottest_lookups(self, rows: float | np.ndarray) -> np.ndarray:
        """[N] expected lookups of a batch in the `rows` hottest rows together.

        Raises ShardCoreError for more rows than the table has.
        """
        # Rows of a class are equally hot, so lookups are piecewise linear in rows.
        return np.interp(self._checked_row_counts(rows, "hottest rows"), *self._cumulative_rows_and_lookups)

    def fewest_rows_with_share(self, fraction: float) -> float:
        """Fewest rows of the table that receive a share of all its lookups."""
        # The inverse of hottest_lookups.
        rows, lookups = self._cumulative_rows_and_lookups
        return float(np.interp(fraction * lookups[-1], lookups, rows))

    @property
    def _cumulative_rows_and_lookups(self) -> tuple[np.ndarray, np.ndarray]:
        """[K + 1] cumulative rows, and their cumulative lookups, over classes of rows, hottest first."""
        return np.append(0.0, np.cumsum(self.rows)), np.append(0.0, np.cumsum(self.rows * self.lookups))

    def missed_rows(self, rows: float | np.ndarray) -> np.ndarray:
        """[N] unique rows of a batch that miss a warm cache of `rows` rows.

        Raises ShardCoreError for a cache that is larger than the table.
        """
        sizes, misses = self._miss_curve
        # A set that fills early is of a smaller cache, and one that fills late of a larger one.
        as_if = np.multiply.outer(self._checked_row_counts(rows, "cached rows"), _rows_filling_a_set())
        # All rows need no cache, whose sets would be too full for some.
        return np.where(rows >= self.table_rows, 0.0, np.interp(as_if, sizes, misses).mean(-1))

    @property
    def cached_rows_by_memory(self) -> np.ndarray:
        """[M] rows of the table in a cache, by how long the cache remembers a row; the same memories for all tables."""
        return self._miss_curve[0]

    def _checked_row_counts(self, rows: float | np.ndarray, what: str) -> np.ndarray:
        """Row counts as floats. Raises ShardCoreError for counts outside 0 to the table's rows."""
        numbers = np.asarray(rows, dtype=float)
        wrong = numbers[~((numbers >= 0) & (numbers <= self.table_rows))]
        if wrong.size:
            raise ShardCoreError(
                f"table {self.name!r} was asked for {wrong.flat[0]:.15g} {what}; it has "
                f"{self.table_rows} rows, so 0 to {self.table_rows} would be right"
            )
        return numbers

    @cached_property
    def _miss_curve(self) -> tuple[np.ndarray, np.ndarray]:
        """[points] cache sizes in rows, rising, and the unique rows of a batch that each size misses."""
        # Half of the points are caches smaller than a batch's rows, half are larger ones.
        q, half = self.touched, _POINTS // 2
        # Slots of a set over the rows that come to it: the fewer, the smaller the cache. Above 2, all enter.
        slots = np.geomspace(1e-6, 2, half)[:, None, None]
        # Rows of a set in their order of entering, over its slots. The later, the fuller is the set.
        last = np.minimum(1 / slots, 2)
        order = last * ((np.arange(_PARTS) + 0.5) / _PARTS)[:, None]
        enters = _probability_of_free_way(order)
        # T, the batches that a larger cache remembers. T = 1 is left out, as then all that come enter.
        batches = np.geomspace(1, _MOST_BATCHES, half)[1:, None]
        # In a small cache, a row stays as long as each batch touches it. The share of time h that it is held balances
        # entering and leaving: (1 - h) q p = h (1 - q).
        held_by_order = q * enters / np.maximum(1 - q + q * enters, 1e-300)
        scarce = (slots * last)[:, 0] * held_by_order.mean(1)
        # A larger cache holds a row if any of T batches touched it: 1 - (1 - q)^T. For q = 1 the log is infinite.
        with np.errstate(divide="ignore"):
            ample = -np.expm1(batches * np.log1p(-q))
        # [points, K] probability that a row of each class is in the cache.
        held = np.concatenate([scarce, ample])
        # Mean size of each cache, and rows of a batch that it holds. The first point is a cache without rows.
        sizes, hits = held @ self.rows, held @ (self.rows * q)
        sizes, hits = np.append(0.0, sizes), np.append(0.0, hits)
        return (
            # np.interp needs rising sizes. Rounding may break that where sizes hardly differ.
            np.append(np.maximum.accumulate(sizes), max(sizes[-1], float(self.table_rows))),
            # A cache of the whole table, the last point, misses nothing.
            np.append(np.clip(self.unique_rows - hits, 0, None), 0.0),
        )


def heat_of_tables(tables: Sequence[Table], batch: int, unseen: bool = False) -> list[TableHeat]:
    """[T] heat of tables at a batch size, from their access statistics.

    unseen: True if rows that a histogram's batch never saw are looked up, as in data. False: they are not, as in
        streams.

    Raises ShardCoreError for a table without lookups, and for a reuse histogram of a smaller batch, which does not show
    what further samples would touch.
    """
    for table in tables:
        if access.lookup_count(table, batch) == 0:
            raise ShardCoreError(
                f"table {table.name!r} has no access statistics: its pooling of "
                f"{table.pooling:g} gives a batch of {batch} no lookup; it needs some"
            )
        if not isinstance(table.access, Zipf) and table.reuse.batch < batch:
            raise ShardCoreError(
                f"table {table.name!r} has a reuse histogram of batch {table.reuse.batch}, "
                f"which does not tell what a batch of {batch} touches; it needs one of "
                f"{batch} samples or more"
            )
    of_reuse: dict[int, TableHeat] = {}
    # All histograms at once, which is much faster than table by table.
    numbers = [i for i, table in enumerate(tables) if not isinstance(table.access, Zipf)]
    if numbers:
        rows, sums = access.reuse_bin_sizes([tables[i] for i in numbers])
        for i, rows_in_bin, lookups_in_bin in zip(numbers, rows, sums, strict=True):
            of_reuse[i] = _heat_from_reuse(tables[i], batch, rows_in_bin, lookups_in_bin, unseen)
    return [of_reuse.get(i) or _heat_from_zipf(table, batch) for i, table in enumerate(tables)]


def _probability_of_free_way(order: np.ndarray) -> np.ndarray:
    """[...] probability that a cache set still has a free way, after `order` rows per way on average."""
    from scipy.stats import gamma

    return gamma.sf(order * _WAYS, _WAYS)


@lru_cache(maxsize=1)
def _rows_filling_a_set() -> np.ndarray:
    """[_PARTS] quantiles of the rows that arrive until a cache set is full, over its ways; about 1 on average."""
    from scipy.stats import gamma

    return gamma.ppf((np.arange(_PARTS) + 0.5) / _PARTS, _WAYS) / _WAYS


def count_row_lookups(table: Table, ids: np.ndarray) -> np.ndarray:
    """[table.rows] number of times that each row occurs among ids [L].

    Raises ShardCoreError for an id outside the table.
    """
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= table.rows)]
    if outside.size:
        raise ShardCoreError(
            f"table {table.name!r} was given id {int(outside[0])}, one of {outside.size} "
            f"outside it; it has {table.rows} rows, so ids 0 to {table.rows - 1}"
        )
    return np.bincount(ids, minlength=table.rows)


def _heat_from_reuse(table: Table, batch: int, rows: np.ndarray, sums: np.ndarray, unseen: bool) -> TableHeat:
    """Heat of a table from its reuse histogram.

    rows, sums: rows and lookups in each bin.
    unseen: as in `heat_of_tables`.
    """
    # Classes are bins, the highest first.
    live = np.flatnonzero(rows > 0)[::-1]
    sizes, keep = rows[live], batch / table.reuse.batch
    counts = sums[live] / sizes
    # In a smaller batch each lookup is kept with probability `keep`, so it sees fewer rows.
    touched = access.seen_probability(counts, keep)
    # Rows that the histogram's batch never saw.
    cold = table.rows - sizes.sum()
    if unseen and cold > 0 and rows[0]:
        # Bin 0 is rows seen once. Rows of other bins keep the lookups that the tail leaves.
        more = live > 0
        # Good and Turing: unseen rows have rows[0] lookups together, and rows seen once 2 rows[1].
        others, mean = _power_law_tail(sizes[more].sum(), table.rows, min(2 * rows[1], rows[0]) + rows[0])
        known = sums[live[more]].sum()
        # The total of lookups stays the same.
        scale = (sums.sum() - others @ mean) / known if known else 0.0
        each = np.concatenate([counts[more] * max(scale, 0.0), mean]) * keep
        # Sorted, as the tail may be hotter than the coldest of the other rows.
        order, all_rows = np.argsort(-each, kind="stable"), np.concatenate([sizes[more], others])
        return TableHeat(table.name, batch, all_rows[order], each[order], -np.expm1(-each[order]))
    # Rows that were never seen are a class without lookups.
    return TableHeat(
        table.name, batch, np.append(sizes, cold), np.append(counts * keep, 0.0), np.append(touched, 0.0)
    )


def _power_law_tail(first_rank: float, last_rank: float, lookups: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows [K], and lookups of one row [K], by class, of ranks `first_rank` to `last_rank` under a power law.

    The hottest row has _RARE lookups. All rows together have `lookups`, which determines the power.
    """
    # Classes are geometric in rank, so that the law falls by similar ratios in each.
    edges = np.unique(np.rint(np.geomspace(first_rank + 1, last_rank + 1, _TAIL + 1))) - 1
    # A class is represented by its geometric mean rank.
    rows, rank = np.diff(edges), np.sqrt((edges[:-1] + 1) * (edges[1:] + 1)) / (first_rank + 1)
    low, high = 0.0, 20.0
    # Bisection: a higher power gives the tail fewer lookups.
    for _ in range(50):
        power = (low + high) / 2
        low, high = (power, high) if _RARE * rank**-power @ rows > lookups else (low, power)
    each = rank**-low
    # Scaled, as bisection meets the total only approximately.
    return rows, each * lookups / (each @ rows)


def _heat_from_zipf(table: Table, batch: int) -> TableHeat:
    sizes, mass = access.popularity_classes(table)
    lookups = access.lookup_count(table, batch) * mass / sizes
    # A row's lookups are Poisson, so a batch touches it with probability 1 - exp(-lookups).
    return TableHeat(table.name, batch, sizes, lookups, -np.expm1(-lookups))
