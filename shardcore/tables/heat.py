"""Heat: how often each row of a table is looked up, the hottest first; and what a cache of its rows misses.

A power law says it of each row. A reuse histogram says it of the rows that one batch has seen. The next batch
sees others: as many lookups go to them as rows were seen once, and those seen once keep twice as many as rows
were seen twice (Good, Biometrika 1953; Turing's estimate). Their rows are unknown: they fall as a power law.

A batch looks up each of its rows at once, as FBGEMM's cache does. Batches are drawn independently. The rows
that a cache holds follow from Che's approximation (Che, Tung, Wang, JSAC 2002): a row is there if it was
looked up within the last T batches, and T is such that the cache is full. A histogram of several batches is
better than one of a single batch (bench/heat.py).

Shapes: K classes of rows that are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardcore.limits import require
from shardcore.tables import access
from shardcore.types import Table, Zipf

_RARE = 1.5
"""Lookups of a row between those that a batch sees once and twice."""
_CLASSES = 64
"""Of rows that a batch sees once or never."""


@dataclass(frozen=True, eq=False)
class Heat:
    """Rows by heat.

    rows: [K] of each class, the hottest first.
    each: [K] expected lookups of one row, for one sample.
    """

    rows: np.ndarray
    each: np.ndarray

    @cached_property
    def _edges(self) -> np.ndarray:
        """[K + 1] rows that are hotter than each class, and all rows."""
        return np.concatenate([[0.0], np.cumsum(self.rows)])

    @cached_property
    def _lookups(self) -> np.ndarray:
        """[K + 1] lookups of those rows, for one sample."""
        return np.concatenate([[0.0], np.cumsum(self.rows * self.each)])

    def of_hottest(self, rows: np.ndarray | float) -> np.ndarray:
        """Expected lookups, for one sample, of so many of the hottest rows."""
        self._require(rows)
        return np.interp(rows, self._edges, self._lookups)

    def rows_of(self, share: float) -> float:
        """The fewest rows that have this share of all lookups."""
        require(0 <= share <= 1, f"a share of lookups is {share:g}; it needs to be within 0 and 1")
        return float(np.interp(share * self._lookups[-1], self._lookups, self._edges))

    def rows_above(self, each: float) -> float:
        """Rows with more expected lookups for a sample than this."""
        return float(self.rows[self.each > each].sum())

    def touched(self, samples: float) -> float:
        """Expected rows that a batch of so many samples looks up."""
        return float(self.rows @ self._in_a_batch(samples))

    def missed(self, rows: float, samples: float) -> float:
        """Expected rows that each batch has to fetch into a cache of so many rows.

        The cache drops the row that was not looked up for longest (LRU), but none of this batch's, as
        FBGEMM's does. So if it holds less than a batch's rows, rows stay as long as each batch looks them up,
        and others come in by chance where there is room.
        """
        self._require(rows)
        seen = self._in_a_batch(samples)
        rate, touched = self.each * samples, self.rows @ seen
        if rows >= self.rows[seen > 0].sum():
            return 0.0

        def held(x: float) -> np.ndarray:
            """[K] probability that the cache has a row. Both grow with x, -60 to 60."""
            if rows <= touched:  # exp(min(x, 0)): that a row which the batch lacks comes in
                came = np.exp(min(x, 0.0))
                return seen * came / (1 - seen + seen * came)
            return -np.expm1(-rate * np.exp(x))  # exp(x) is T

        low, high = -60.0, 60.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.rows @ held(middle) < rows else (low, middle)
        # Rows that all batches look up hold each other out.
        return max(float(self.rows @ (seen * (1 - held(low)))), float(touched - rows))

    def _in_a_batch(self, samples: float) -> np.ndarray:
        """[K] probability that a batch looks up a row."""
        require(samples > 0, f"a batch has {samples:g} samples; it needs more than 0")
        return -np.expm1(-self.each * samples)

    def _require(self, rows: np.ndarray | float) -> None:
        most = float(self._edges[-1])
        require(bool((np.asarray(rows) >= 0).all() and (np.asarray(rows) <= most).all()),
                f"{np.max(rows):g} rows were asked for; the table has {most:g}")


def heat_of(table: Table) -> Heat:
    """The heat of a table's rows, from its access statistics."""
    if table.pooling == 0:
        return Heat(np.array([float(table.rows)]), np.zeros(1))
    return _of_power_law(table) if isinstance(table.access, Zipf) else _of_histogram(table)


def still_hot(before: np.ndarray, now: np.ndarray, rows: int) -> float:
    """The share of lookups that go to the rows that were hottest before, of those that go to the hottest now.

    before, now: [R] lookups of each row of a table, in two spans of time.
    rows: how many count as hot.

    1: the same rows are as hot. 0: none of them is looked up.
    """
    require(before.shape == now.shape and before.ndim == 1, f"lookups were counted for {list(before.shape)} "
            f"rows before and {list(now.shape)} now; both need one number for each row of the table")
    require(0 < rows <= len(before), f"{rows} rows count as hot; the table has {len(before)}")
    old = np.argsort(-before, kind="stable")[:rows]
    most = np.sort(now)[-rows:].sum()
    return float(now[old].sum() / most) if most else 1.0


def _of_power_law(table: Table) -> Heat:
    sizes, mass = access.zipf_classes(table)
    return Heat(sizes, table.pooling * mass / sizes)


def _of_histogram(table: Table) -> Heat:
    """Counts of the reference batch; but rows seen once, and those it did not see, on a power law."""
    counts = access.reference_counts(table).astype(float)
    of, rows = (x[::-1].astype(float) for x in np.unique(counts, return_counts=True))
    each, f1, unseen = of.copy(), float(rows[of == 1].sum()), float(table.rows - len(counts))
    if f1 and unseen:
        seen, f2 = of > 1, float(rows[of == 2].sum())
        known, rare = (of * rows)[seen].sum(), min(2 * f2, f1) + f1
        classes, heat = _falling(float(rows[seen].sum()), float(table.rows), rare)
        # In all, as many lookups as before.
        scale = (known + f1 - heat @ classes) / known if known else 1.0
        each = np.concatenate([of[seen] * max(scale, 0.0), heat])
        rows = np.concatenate([rows[seen], classes])
    elif unseen:
        each, rows = np.append(each, 0.0), np.append(rows, unseen)
    order = np.argsort(-each, kind="stable")
    return Heat(rows[order], each[order] / table.access.batch)


def _falling(first: float, last: float, lookups: float) -> tuple[np.ndarray, np.ndarray]:
    """[K] rows, and [K] lookups of each, of the ranks from `first` to `last` of a power law.

    The hottest have _RARE lookups each, all together `lookups`. Where even as many each would be too few,
    all have as many.
    """
    edges = np.unique(np.rint(np.geomspace(first + 1, last + 1, _CLASSES + 1))) - 1
    rows, middle = np.diff(edges), np.sqrt((edges[:-1] + 1) * (edges[1:] + 1))
    low, high = 0.0, 20.0
    for _ in range(60):
        power = (low + high) / 2
        each = _RARE * (middle / (first + 1)) ** -power
        low, high = (power, high) if each @ rows > lookups else (low, power)
    each = _RARE * (middle / (first + 1)) ** -low
    return rows, each * lookups / (each @ rows)
