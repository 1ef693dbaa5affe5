"""Heat: how often each row of a table is looked up, and what a cache of some of its rows misses.

Rows fall into classes that are looked up equally often, the hottest first. The cache is FBGEMM's: it takes
the unique rows of a whole batch at once, keeps those of the current batch, and drops rows by the last batch
that touched them (LRU). Its sets of 32 ways count as one.

Misses follow Che's approximation, in batches instead of requests. A cache of r rows holds what the last T
batches touched, with T such that this is r rows on average. If r is less than one batch touches, a row that
misses enters with a probability p, such that the cache is full.

A reuse histogram knows the rows of one batch. As streams are drawn, other rows are never looked up. In data
they are: the next batch looks them up as often as this one saw rows once, and those seen once keep twice as
many lookups as rows were seen twice (Good, Biometrika 1953; Turing's estimate). Which rows is not known: they
fall as a power law. A histogram of several batches is more precise than one of a single batch.

Shapes: K classes of rows, L lookups, N sizes, T tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Table
from shardcore.step import access

_POINTS = 256
"""Sizes at which misses are computed. Others lie between them."""
_RARE = 1.5
"""Lookups of a row between those that a batch sees once and twice."""
_TAIL = 64
"""Classes of rows that a batch sees once or never."""
_MOST_BATCHES = 1e9
"""After so many batches a row counts as never looked up again."""


@dataclass(frozen=True, eq=False)
class Heat:
    """Lookups of a table's rows in a batch, by classes of rows.

    name: of the table.
    batch: samples of the batch.
    rows: [K] rows of each class, hottest first. They sum to the table's rows.
    lookups: [K] mean lookups a batch of one row of each class.
    touched: [K] probability that a batch looks a row of each class up.
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
        """Expected unique rows that a batch touches."""
        return float(self.rows @ self.touched)

    def hottest_lookups(self, rows: float | np.ndarray) -> np.ndarray:
        """[N] expected lookups a batch of the so many hottest rows. Raises ShardCoreError for too many."""
        # Rows of a class are equally hot, so part of a class has its share of lookups.
        return _through(self._require(rows, "hottest rows"), self.rows, self.rows * self.lookups)

    def rows_of(self, share: float) -> float:
        """The fewest rows that have this share of all lookups."""
        # The inverse of hottest_lookups: both are piecewise linear in rows.
        lookups = np.append(0.0, np.cumsum(self.rows * self.lookups))
        return float(np.interp(share * lookups[-1], lookups, np.append(0.0, np.cumsum(self.rows))))

    def misses(self, rows: float | np.ndarray) -> np.ndarray:
        """[N] unique rows a batch that a warm cache of so many rows misses.

        Raises ShardCoreError for a cache that is larger than the table.
        """
        sizes, misses = self._misses
        return np.interp(self._require(rows, "cached rows"), sizes, misses)

    def miss_ratio(self, rows: float | np.ndarray) -> np.ndarray:
        """[N] `misses` as a share of the unique rows that a batch touches."""
        return self.misses(rows) / self.unique_rows

    def _require(self, rows: float | np.ndarray, what: str) -> np.ndarray:
        asked = np.asarray(rows, dtype=float)
        wrong = asked[~((asked >= 0) & (asked <= self.table_rows))]
        if wrong.size:
            raise ShardCoreError(
                f"table {self.name!r} was asked for {wrong.flat[0]:.15g} {what}; it has "
                f"{self.table_rows} rows, so 0 to {self.table_rows} would be right"
            )
        return asked

    @cached_property
    def _misses(self) -> tuple[np.ndarray, np.ndarray]:
        """Sizes of a cache in rows, rising, and unique rows a batch that each misses."""
        # Half of the points for caches below a batch's rows, half for larger ones.
        q, half = self.touched, _POINTS // 2
        # p: probability that a missed row enters the cache. A small p stands for a small cache.
        p = np.geomspace(1e-6, 1, half)[:, None]
        # T: batches that a cache remembers. T = 1 is left out, as it equals p = 1.
        batches = np.geomspace(1, _MOST_BATCHES, half)[1:, None]
        # A cached row stays while each batch touches it. A missed row enters with probability p.
        # Balance of entering and leaving: in by q p while out, out where a batch does not touch it.
        scarce = q * p / np.maximum(1 - q + q * p, 1e-300)
        # Rows that every batch touches (q = 1) have log 0: they are always held.
        with np.errstate(divide="ignore"):
            ample = -np.expm1(batches * np.log1p(-q))
        # [points, K] probability that a row of each class is in the cache.
        held = np.concatenate([scarce, ample])
        # Average size of the cache, and rows of a batch that it holds: a point of the curve of misses.
        sizes, hits = held @ self.rows, held @ (self.rows * q)
        sizes, hits = (np.concatenate([[0.0], of]) for of in (sizes, hits))
        # A cache of the whole table misses nothing, which the last point adds.
        unique = self.unique_rows
        return (
            # np.interp needs rising sizes. Rounding may break that where sizes hardly differ.
            np.append(np.maximum.accumulate(sizes), max(sizes[-1], float(self.table_rows))),
            np.append(np.clip(unique - hits, 0, None), 0.0),
        )


def heat_of(tables: Sequence[Table], batch: int, unseen: bool = False) -> list[Heat]:
    """[T] the heat of tables at a batch, from their access statistics.

    unseen: whether rows that a histogram's batch never saw are looked up, as in data, or not, as in streams.

    Raises ShardCoreError for a table without lookups, and for a reuse histogram of a smaller batch: it does
    not tell what more samples would touch.
    """
    for table in tables:
        if access.lookups(table, batch) == 0:
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
    found: dict[int, Heat] = {}
    # Histograms are read together: vectorised bins are much faster than table by table.
    reuse = [i for i, table in enumerate(tables) if not isinstance(table.access, Zipf)]
    if reuse:
        rows, sums = access.bins_of([tables[i] for i in reuse])
        for i, of, total in zip(reuse, rows, sums, strict=True):
            found[i] = _of_reuse(tables[i], batch, of, total, unseen)
    return [found.get(i) or _of_zipf(table, batch) for i, table in enumerate(tables)]


def heat_of_counts(table: Table, counts: np.ndarray, batch: int, batches: int = 1) -> Heat:
    """The heat of a table from the lookups [table.rows] of each row in so many batches."""
    # Rows with equal counts are one class: the most exact classes that data allows.
    each, rows = np.unique(np.asarray(counts, dtype=float), return_counts=True)
    # Falling, as classes go from hot to cold.
    mean = each[::-1] / batches
    # Probability that a batch looks a row up, if its lookups are Poisson.
    return Heat(table.name, batch, rows[::-1].astype(float), mean, -np.expm1(-mean))


def row_counts(table: Table, ids: np.ndarray) -> np.ndarray:
    """[table.rows] how often each row is among ids [L]. Raises ShardCoreError for an id outside the table."""
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= table.rows)]
    if outside.size:
        raise ShardCoreError(
            f"table {table.name!r} was given id {int(outside[0])}, one of {outside.size} "
            f"outside it; it has {table.rows} rows, so ids 0 to {table.rows - 1}"
        )
    return np.bincount(ids, minlength=table.rows)


def _of_reuse(table: Table, batch: int, rows: np.ndarray, sums: np.ndarray, unseen: bool) -> Heat:
    # Highest bin first: the hottest class.
    live = np.flatnonzero(rows > 0)[::-1]
    sizes, keep = rows[live], batch / table.reuse.batch
    counts = sums[live] / sizes
    # A smaller batch sees fewer rows: each lookup is kept with probability `keep`.
    touched = access.seen_when_thinned(counts, keep)
    # Rows that the histogram's batch never saw.
    cold = table.rows - sizes.sum()
    if unseen and cold > 0 and rows[0]:
        # Rows that were seen twice or more keep what the others leave.
        more = live > 0
        # Good and Turing: unseen rows get as many lookups as rows seen once, those seen once twice as many
        # as rows seen twice. rows[0], rows[1] are these counts.
        others, mean = _tail(sizes[more].sum(), table.rows, min(2 * rows[1], rows[0]) + rows[0])
        known = sums[live[more]].sum()
        # The total of lookups stays, so others give up what the tail gets.
        scale = (sums.sum() - others @ mean) / known if known else 0.0
        each = np.concatenate([counts[more] * max(scale, 0.0), mean]) * keep
        # The tail may be hotter than the coldest known rows. Classes have to fall.
        order, all_rows = np.argsort(-each, kind="stable"), np.concatenate([sizes[more], others])
        return Heat(table.name, batch, all_rows[order], each[order], -np.expm1(-each[order]))
    # As streams are drawn: cold rows are a class without lookups.
    return Heat(
        table.name, batch, np.append(sizes, cold), np.append(counts * keep, 0.0), np.append(touched, 0.0)
    )


def _tail(first: float, last: float, lookups: float) -> tuple[np.ndarray, np.ndarray]:
    """[K] rows, and [K] lookups of each, of the ranks from `first` to `last`, as a power law.

    The hottest have _RARE lookups each. All together have `lookups`, which determines the power.
    """
    # Geometric classes: a power law has similar ratios in each.
    edges = np.unique(np.rint(np.geomspace(first + 1, last + 1, _TAIL + 1))) - 1
    # The geometric mean rank stands for a class.
    rows, rank = np.diff(edges), np.sqrt((edges[:-1] + 1) * (edges[1:] + 1)) / (first + 1)
    low, high = 0.0, 20.0
    # Bisection: more power means fewer lookups of the tail.
    for _ in range(50):
        power = (low + high) / 2
        low, high = (power, high) if _RARE * rank**-power @ rows > lookups else (low, power)
    each = rank**-low
    # Scaled once more, as bisection meets the total only nearly.
    return rows, each * lookups / (each @ rows)


def _of_zipf(table: Table, batch: int) -> Heat:
    sizes, mass = access.zipf_classes(table)
    lookups = access.lookups(table, batch) * mass / sizes
    return Heat(table.name, batch, sizes, lookups, -np.expm1(-lookups))


def _through(rows: np.ndarray, sizes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sum of a quantity over the first so many rows: over classes in order, and a share of the last."""
    return np.interp(rows, np.append(0.0, np.cumsum(sizes)), np.append(0.0, np.cumsum(values)))
