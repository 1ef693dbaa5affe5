"""Access statistics: how many rows a batch touches, what share of lookups a row range serves, and bytes of outputs.

A reuse histogram describes one reference batch with U unique rows, n_k of them in bin k. Counts inside the
bins sum to the batch's lookups.

A smaller batch keeps each lookup with probability batch / reference, as a smaller batch of the same data
would. In a larger batch counts scale and no new rows appear. So unique rows are then a lower bound.

Shapes: T tables, N shards, K classes of rows, L lookups, U unique rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardcore.core.access_statistics import MOST_RANGES, REUSE_BINS, Reuse, RowShares, Zipf
from shardcore.core.payloads import payload_by_name
from shardcore.core.types import OUTPUT_BYTES, Shard, Table

BIN_LOW = np.array([1] + [2 ** (k - 1) + 1 for k in range(1, REUSE_BINS)], dtype=np.float64)
"""Smallest count in each reuse bin."""
BIN_HIGH = np.array([2**k for k in range(REUSE_BINS - 1)] + [np.inf], dtype=np.float64)
"""Largest count in each reuse bin."""
BIN_MEAN = np.array(
    [1, 2, 3.38, 6.23, 11.6, 22.4, 45, 88]
    + [0.7 * 2**k for k in range(8, REUSE_BINS - 1)]
    + [1.5 * BIN_LOW[-1]]
)
"""Mean count in each reuse bin.

Bins 0 to 9 follow from the public access and unique-row shares of dlrm_datasets (2021), within their
rounding. Higher bins have 0.7 of their upper edge, as those do. The last bin has no upper edge: 1.5 times its
lower one.
"""
UNEVEN = 1.25
"""Lookups of the busiest row range, over those that hashing the same ids would give it, from which a table
counts as uneven. Samples and divisions of even tables differ by less."""
# Random placements to compare with, and the least number of ranges that statistics keep.
_HASHED, _FEWEST_RANGES = 8, 64
# Classes of similar popularity: enough for sums over rows, and far fewer than rows.
_ZIPF_BUCKETS = 512


def lookup_count(table: Table, batch: int) -> int:
    """Number of lookups in a table in one batch: pooling × batch, rounded."""
    return round(table.pooling * batch)


def bag_count(table: Table, batch: int) -> int:
    """Number of bags of a table that are looked up in one batch: one for each sample and feature, fewer if
    deduplicated.
    """
    return max(1, round(batch * table.mean_bags))


def bag_counts_by_feature(table: Table, batch: int) -> list[int]:
    """[F] number of bags of each feature of a table in one batch."""
    strides = np.array(table.strides or (1.0,) * table.features)
    # Rounding the running sum keeps the total.
    ends = np.rint(bag_count(table, batch) * np.cumsum(strides) / strides.sum()).astype(int)
    return np.diff(ends, prepend=0).tolist()


def reference_row_counts(table: Table) -> np.ndarray:
    """[U] lookups of each distinct row in the reference batch of a table with a reuse histogram, largest first, as
    int64.

    They sum to the batch's lookups. U keeps each bin's mean count as near to BIN_MEAN as possible.
    """
    # A table without lookups has no unique rows either, and no bins to fill.
    total = lookup_count(table, table.reuse.batch)
    if total == 0:
        return np.zeros(0, dtype=np.int64)
    n_bins, mean_counts = _reuse_bin_sizes(table)
    return np.concatenate(
        [
            # Highest bin first, so that counts fall over the whole array.
            _spread_counts(int(n), int(c), k)
            for k, (n, c) in reversed(list(enumerate(zip(n_bins, mean_counts, strict=True))))
            if n > 0
        ]
    )


@lru_cache(maxsize=4096)
def _reuse_bin_sizes(table: Table) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows, and sums of their lookup counts, in each bin of a table's reuse histogram."""
    # One table through the vectorised path, cached: searches ask for the same tables many times.
    rows, sums = reuse_bin_sizes([table])
    return tuple(int(n) for n in rows[0]), tuple(int(c) for c in sums[0])


def reuse_bin_sizes(tables: Sequence[Table]) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and sums of their lookup counts, in each bin of the reuse histograms of tables: two arrays [T,
    REUSE_BINS].
    """
    bins = np.array([t.reuse.bins for t in tables])
    # float64 holds these whole numbers exactly.
    total = np.array([lookup_count(t, t.reuse.batch) for t in tables], dtype=float)
    mean = np.array([of @ BIN_MEAN for of in bins])
    # Unique rows follow from lookups over their mean count, at most all rows, and at least one.
    unique = np.minimum([t.rows for t in tables], np.maximum(1.0, np.rint(total / mean)))
    rows = _apportion(bins, unique)
    while len(over := np.flatnonzero((rows @ BIN_LOW > total) & (unique > 1))):
        # Too many rows for so few lookups: each row needs at least the lowest count of its bin.
        fewer = np.floor(unique[over] * total[over] / (rows[over] @ BIN_LOW))
        unique[over] = np.maximum(1.0, np.minimum(unique[over] - 1, fewer))
        rows[over] = _apportion(bins[over], unique[over])
    return rows, _apportion_counts(rows, total)


def _apportion(shares: np.ndarray, total: np.ndarray) -> np.ndarray:
    """[T, K] whole numbers in proportion to `shares` [T, K] that sum to `total` [T], by largest remainders."""
    # Fractions of rows: the floor of each, then one more for the largest remainders.
    exact = shares / shares.sum(-1, keepdims=True) * total[:, None]
    whole = np.floor(exact)
    rest = np.rint(total - whole.sum(-1))
    # A stable sort breaks ties by bin, so results do not depend on the platform.
    order = np.argsort(-(exact - whole), axis=-1, kind="stable")
    more = (np.arange(shares.shape[1]) < rest[:, None]).astype(float)
    np.put_along_axis(whole, order, np.take_along_axis(whole, order, -1) + more, -1)
    return whole


def _apportion_counts(rows: np.ndarray, total: np.ndarray) -> np.ndarray:
    """[T, REUSE_BINS] sums of lookup counts for each bin of a reuse histogram, which add up to `total` [T].

    They stay within the bins' edges where possible.
    """
    # Bins without rows take part in nothing below.
    live = rows > 0
    top = np.flatnonzero(live.any(0)).max(initial=0)
    highest = live.shape[1] - 1 - np.argmax(live[:, ::-1], axis=1)  # the last bin that has rows
    each = np.arange(len(rows))
    # [T, REUSE_BINS] least and most that the counts of a bin may sum to.
    low = rows * BIN_LOW
    # The last bin has no upper edge: infinite where it has rows, 0 where it has none.
    high = np.multiply(np.maximum(rows, 1), BIN_HIGH, where=live, out=np.zeros_like(rows))
    sums = rows * BIN_MEAN
    # Start at the mean counts. Then move all bins by the same share of their room.
    # gap > 0: too few lookups so far. Room is what bins can still give or take.
    gap = total - sums.sum(-1)
    below, above = sums - low, np.where(np.isinf(high), 0.0, high - sums)
    room = np.where(gap < 0, below.sum(-1), above.sum(-1))
    # 1e-9 keeps the division finite where no bin has room.
    step = np.where(gap < 0, np.maximum(gap, -np.maximum(room, 1e-9)), np.minimum(gap, room))
    share = step / np.maximum(room, 1e-9)
    sums += np.where(gap[:, None] < 0, below, above) * share[:, None]
    beyond = np.where(gap < 0, 0.0, gap - step)
    # All closed bins are full. The highest bin with rows takes the rest.
    sums[each, highest] += np.maximum(beyond, 0.0)
    # Counts are whole lookups.
    sums = np.floor(sums)
    rest = total - sums.sum(-1)
    for k in range(top, -1, -1):  # the rounding rest goes to the highest bins with room
        closed = (rest > 0) & np.isfinite(high[:, k])
        take = np.where(closed, np.minimum(rest, high[:, k] - sums[:, k]), rest) * live[:, k]
        sums[:, k] += take
        rest = rest - take
    # What no bin has room for exceeds an edge, so that the total stays exact.
    sums[each, highest] += rest
    return sums


def _spread_counts(rows: int, total: int, k: int) -> np.ndarray:
    """[rows] falling lookup counts within bin k of a reuse histogram that add up to `total`: a ramp around their
    mean.
    """
    # The ramp is symmetric around the mean, so its sum is right before rounding.
    mean = total / rows
    reach = min(mean - BIN_LOW[k], BIN_HIGH[k] - mean) if k < REUSE_BINS - 1 else mean - BIN_LOW[k]
    ramp = np.linspace(1, -1, rows) if rows > 1 else np.zeros(1)
    counts = np.rint(mean + max(reach, 0) * ramp).astype(np.int64)
    rest = total - int(counts.sum())
    # Rounding error: add 1 to counts that stay in the bin.
    if rest:
        step = int(math.copysign(1, rest))
        fits = np.flatnonzero((counts + step >= BIN_LOW[k]) & (counts + step <= BIN_HIGH[k]))
        fits = fits if len(fits) >= abs(rest) else np.arange(rows)
        counts[fits[: abs(rest)]] += step
        # More rest than rows: the first row takes what is left.
        counts[0] += total - int(counts.sum())
    # Largest first, as reference_row_counts promises.
    return -np.sort(-counts)


def unique_rows(shard: Shard, batch: int) -> float:
    """Expected number of distinct rows that one batch touches in a shard."""
    return float(unique_rows_of_shards([shard], batch)[0])


def unique_rows_of_shards(shards: Sequence[Shard], batch: int) -> np.ndarray:
    """[N] expected number of distinct rows that one batch touches in each of many shards.

    Results are cached. A row range has its share of the table's unique rows: measured, or by its rows. Where
    ids are ordered by frequency, those of its ranks.
    """
    # Unique rows of ranked tables depend on the range. For others one number a table serves all ranges.
    by_rank = [s.table.ordered and s.table.row_shares is None for s in shards]
    # The whole table is the key where ranges scale, so that ranges share a cache entry.
    keys = [
        (s.table, batch, s.row_lo, s.row_hi) if ranked else (s.table, batch, 0, s.table.rows)
        for s, ranked in zip(shards, by_rank, strict=True)
    ]
    counts = [_KNOWN.get(key) for key in keys]
    # dict.fromkeys removes duplicates: many shards of one table need one computation.
    if new := dict.fromkeys((key for key, rows in zip(keys, counts, strict=True) if rows is None), 0.0):
        # Tables without lookups keep their 0.
        hit = [key for key in new if lookup_count(key[0], batch) > 0]
        for access, compute in ((Reuse, _unique_rows_by_histogram), (Zipf, _unique_rows_by_power_law)):
            queries = [key for key in hit if isinstance(key[0].access, access)]
            for i in range(0, len(queries), _AT_ONCE):
                new.update(
                    zip(queries[i : i + _AT_ONCE], compute(queries[i : i + _AT_ONCE]).tolist(), strict=True)
                )
        counts = [new[key] if rows is None else rows for key, rows in zip(keys, counts, strict=True)]
        # Dropping everything is cheap and keeps memory bounded.
        if len(_KNOWN) + len(new) > _MOST_KNOWN:
            _KNOWN.clear()
        if len(new) <= _MOST_KNOWN:
            _KNOWN.update(new)
    shares = [1.0 if ranked else _unique_row_share(s) for s, ranked in zip(shards, by_rank, strict=True)]
    return np.minimum(np.array(counts, dtype=float) * shares, [s.rows for s in shards])


def _unique_row_share(shard: Shard) -> float:
    """The share of a table's distinct rows in a batch that lie in a shard."""
    table = shard.table
    # Hashed ids touch every range in proportion to its rows.
    if table.row_shares is None or shard.has_all_rows:
        return shard.rows / table.rows
    return _share_in_row_range(table.row_shares.unique, shard)


def _share_in_row_range(shares: tuple[float, ...], shard: Shard) -> float:
    """The share of accesses in a shard's row range, from shares of equal ranges of the table. Each range counts as
    even.
    """
    # Interpolate the cumulative share at both ends of the shard's rows.
    edges, sums = np.linspace(0, shard.table.rows, len(shares) + 1), np.cumsum((0.0, *shares))
    return float(np.diff(np.interp((shard.row_lo, shard.row_hi), edges, sums / sums[-1]))[0])


_Query = tuple[Table, int, int, int]
"""A table, a batch, and rows [lo, hi)."""
_KNOWN: dict[_Query, float] = {}
_MOST_KNOWN = 1 << 18
"""Enough for 100,000 tables, each at the global and the local batch."""
_AT_ONCE = 4096
"""Tables processed at once, to bound memory."""


def _unique_rows_by_histogram(queries: Sequence[_Query]) -> np.ndarray:
    """[N] expected distinct rows in a batch, of tables with a reuse histogram. No row outside its reference batch
    counts.
    """
    rows, sums = reuse_bin_sizes([table for table, *_ in queries])
    # A smaller batch keeps each lookup with this probability. A larger one shows no new rows.
    keep = np.array([min(1.0, batch / table.reuse.batch) for table, batch, *_ in queries])
    # Reversed: the highest bin is the most popular class.
    live, unique = (rows > 0)[:, ::-1], np.zeros(len(queries))
    n_live = live.sum(1)
    # Group tables by their number of bins with rows: only these enter the sums.
    for n in np.unique(n_live).tolist():
        # Equal numbers of bins give a dense [n_some, n] array without padding.
        some = np.flatnonzero(n_live == n).tolist()
        sizes, counts = (of[some, ::-1][live[some]].reshape(len(some), n) for of in (rows, sums))
        # counts / sizes: mean lookups of a row in each class.
        seen = seen_probability(counts / sizes, keep[some, None])
        unique[some] = _seen_rows_in_ranges(seen, sizes, [queries[i] for i in some])
    return unique


def seen_probability(counts: np.ndarray, keep: np.ndarray | float) -> np.ndarray:
    """The probability that a row is seen if each of its lookups is kept with probability `keep`."""
    # log1p(-1) where all lookups are kept. np.where then drops the result.
    with np.errstate(divide="ignore"):
        # 1 - (1 - keep)^counts, by expm1 and log1p: exact also where keep is tiny.
        return np.where(keep == 1.0, 1.0, -np.expm1(counts * np.log1p(-keep)))


def _seen_rows_in_ranges(seen: np.ndarray, sizes: np.ndarray, queries: Sequence[_Query]) -> np.ndarray:
    """[N] expected number of seen rows within the row range of each query.

    seen: [N, K] share of each class of rows that is seen.
    sizes: [N, K] rows of each class, most popular first.

    In ordered tables the most popular rows come first.
    """
    # Positions 2 and 3 of a query: its row range [lo, hi).
    low, high = (np.array([of[i] for of in queries], dtype=float)[:, None] for i in (2, 3))
    if any(table.ordered for table, *_ in queries):
        edges = np.concatenate([np.zeros((len(sizes), 1)), np.cumsum(sizes, axis=1)], axis=1)
        ordered = np.array([[table.ordered] for table, *_ in queries])
        # Rows are in order of popularity, so a class is a range of rows, and overlap is counted.
        inside = np.minimum(edges[:, 1:], high) - np.maximum(edges[:, :-1], low)
        sizes = np.where(ordered, np.clip(inside, 0, None), sizes)
    # A range cannot have more unique rows than rows.
    return np.minimum((seen * sizes).sum(1), (high - low)[:, 0])


def _unique_rows_by_power_law(queries: Sequence[_Query]) -> np.ndarray:
    """[N] expected distinct rows in a batch, of tables with a power law of accesses."""
    # All tables have 512 edges, some twice. Duplicates are removed below.
    edges, unique = _zipf_edges(np.array([table.rows for table, *_ in queries])), np.zeros(len(queries))
    kept = np.diff(edges, prepend=-1.0, axis=1) > 0
    n_kept = kept.sum(1)
    # Group tables by their number of classes: small tables have fewer.
    for n in np.unique(n_kept).tolist():
        some = np.flatnonzero(n_kept == n).tolist()
        ranks, of = edges[some][kept[some]].reshape(len(some), n), [queries[i] for i in some]
        sizes, mass = np.diff(ranks, axis=1), np.diff(_zipf_cdf(ranks, [table for table, *_ in of]), axis=1)
        # [n_some, n - 1] expected lookups of one row of each class.
        weights = np.array([[lookup_count(table, batch)] for table, batch, *_ in of]) * mass / sizes
        # 1 - exp(-w): a row is seen at least once, if its lookups are Poisson.
        unique[some] = _seen_rows_in_ranges(-np.expm1(-weights), sizes, of)
    return unique


def _zipf_edges(rows: np.ndarray) -> np.ndarray:
    """[T, _ZIPF_BUCKETS] row ranks that separate classes of similar popularity. Some appear twice in small tables."""
    # Geometric: popularity falls by a power law, so classes have similar ratios.
    return np.rint(np.geomspace(1, rows + 1, _ZIPF_BUCKETS, axis=-1)) - 1


def popularity_classes(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """[K] number of rows in each class of similar popularity, and its share of accesses, most popular first."""
    edges = _zipf_edges(np.array([table.rows]))[0]
    edges = edges[np.diff(edges, prepend=-1.0) > 0]
    return np.diff(edges), np.diff(_zipf_cdf(edges[None], [table])[0])


def _zipf_cdf(ranks: np.ndarray, tables: Sequence[Table]) -> np.ndarray:
    """[T, K] share of accesses to the `ranks` [T, K] most popular rows of tables with a power law.

    The law is the bounded continuous power law on [1, rows + 1).
    """
    # At alpha = 1 the integral of x^-alpha is a logarithm, not a power.
    flat = np.array([[abs(t.zipf_alpha - 1) < 1e-9] for t in tables])
    power = np.where(flat, 0.0, [[1 - t.zipf_alpha] for t in tables])
    # Mass of all rows, which normalises the law. Python's math: equal results on every processor.
    whole = np.array(
        [
            [math.log(t.rows + 1.0) if f else (t.rows + 1.0) ** p - 1]
            for t, f, p in zip(tables, flat.ravel(), power.ravel().tolist(), strict=True)
        ]
    )
    # The law is on [1, rows + 1), so ranks from 0 shift by one.
    ranks = ranks + 1.0
    # A scalar power of 0.5 is a sqrt in numpy, but one in an array is not: round equally.
    risen = np.where(power == 0.5, np.sqrt(ranks), ranks**power)
    return np.where(flat, np.log(ranks), risen - 1) / whole


def access_share(shard: Shard) -> float:
    """The share of a table's lookups that fall into a shard's row range."""
    table = shard.table
    # The most common case, and exact.
    if shard.has_all_rows:
        return 1.0
    # Ids as if hashed: lookups are even over rows.
    if not table.ordered or table.pooling == 0:
        return shard.rows / table.rows
    if table.row_shares:
        return _share_in_row_range(table.row_shares.lookups, shard)
    # Rows are ranks, so the law's mass between two of them is the share.
    if isinstance(table.access, Zipf):
        low, high = _zipf_cdf(np.array([[shard.row_lo, shard.row_hi]]), [table])[0]
        return float(high - low)
    # A histogram: counts of its classes, most popular first.
    rows, sums = (np.array(x, dtype=float) for x in _reuse_bin_sizes(table))
    live = np.flatnonzero(rows > 0)[::-1]
    counts, sizes = sums[live] / rows[live], rows[live]
    edges = np.concatenate([[0.0], np.cumsum(sizes)])
    inside = np.clip(np.minimum(edges[1:], shard.row_hi) - np.maximum(edges[:-1], shard.row_lo), 0, None)
    # Rows of the histogram come in order of popularity, as the table's rows do.
    return float((counts * inside).sum() / max((counts * sizes).sum(), 1e-12))


def access_concentration(tables: Sequence[Table], unique: np.ndarray) -> np.ndarray:
    """[N] share of a batch's lookups that hit the most popular quarter of the rows touched, for each table.

    unique: [N] rows that it touches. 0.25 is even access.
    """
    # Even access: a quarter of the rows has a quarter of the lookups.
    shares = np.full(len(tables), 0.25)
    zipf = [i for i, t in enumerate(tables) if isinstance(t.access, Zipf)]
    if zipf:
        power = 1 - np.array([tables[i].zipf_alpha for i in zipf])
        rows = np.maximum(1.0, unique[zipf])
        # The law is the bounded continuous power law, as in _zipf_cdf.
        flat, safe = abs(power) < 1e-9, np.where(abs(power) < 1e-9, 1.0, power)
        # Integral of the law over the first quarter of the touched rows, and over all of them.
        few, all_ = (np.where(flat, np.log(n), (n**safe - 1) / safe) for n in (1 + rows / 4, 1 + rows))
        shares[zipf] = few / all_
    for i, table in enumerate(tables):
        # Counts of a histogram do not depend on the batch, so they are cached by table.
        if isinstance(table.access, Reuse) and table.pooling:
            shares[i] = _reuse_concentration(table)
    # Rounding may leave a share below even access.
    return np.maximum(0.25, shares)


@lru_cache(maxsize=1 << 14)
def _reuse_concentration(table: Table) -> float:
    """The share of lookups that hit the most popular quarter of the rows, for a table with a reuse histogram."""
    rows, sums = (np.array(x, dtype=float)[::-1] for x in _reuse_bin_sizes(table))
    edges, lookups_to = np.cumsum(rows), np.cumsum(sums)
    # The quarter may end inside a bin: rows of a bin count equally.
    quarter = np.interp(edges[-1] / 4, np.concatenate([[0], edges]), np.concatenate([[0], lookups_to]))
    return float(quarter / lookups_to[-1])


def row_shares_from_ids(ids: np.ndarray, rows: int, n_devices: int) -> RowShares | None:
    """The shares of a batch's ids [L] in equal ranges of rows. None if the ids are spread as if hashed.

    n_devices: number of devices that may divide the rows. Ids count as hashed if no device has markedly more
    than if the same rows lay anywhere (UNEVEN). A hot row makes its device busy either way.
    """
    # Too few ids, devices or rows to divide: nothing to tell from hashing.
    if len(ids) == 0 or n_devices < 2 or rows < n_devices:
        return None
    # Compare with the same rows and counts at random places, so that hot rows count in both.
    hit, counts = np.unique(ids, return_counts=True)
    # A fixed seed: the same ids always give the same answer.
    rng, devices = np.random.default_rng(0), min(n_devices, MOST_RANGES)
    busiest, *hashed = (
        np.bincount(where, counts, devices).max()
        for where in (hit * devices // rows, *(rng.integers(0, devices, len(hit)) for _ in range(_HASHED)))
    )
    # The largest of eight random placements allows for their chance deviations.
    if busiest <= UNEVEN * max(hashed):
        return None
    # A multiple of the devices, so that ranges end where theirs do.
    n = min(rows, -(-_FEWEST_RANGES // devices) * devices)
    # Lookups weigh rows by their counts. Unique rows count each once.
    lookups, unique = (np.bincount(hit * n // rows, of, n) for of in (counts, None))
    return RowShares(*(tuple((of / of.sum()).round(9).tolist()) for of in (lookups, unique)))


def reuse_from_ids(ids: np.ndarray, batch: int) -> Reuse:
    """The reuse histogram of a stream of ids from `batch` samples."""
    if len(ids) == 0:
        return Reuse((0.0,) * REUSE_BINS, batch)
    # Only how often ids occur matters, not which ones.
    _, counts = np.unique(ids, return_counts=True)
    bins = np.bincount(reuse_bin_index(counts), minlength=REUSE_BINS)
    return Reuse(tuple(float(b) for b in bins / bins.sum()), batch)


@lru_cache(maxsize=1 << 14)
def reuse_histogram(table: Table, batch: int) -> tuple[float, ...]:
    """[REUSE_BINS] a table's reuse histogram: as given, or as a power law is expected to give for a batch."""
    if isinstance(table.access, Reuse):
        return table.reuse.bins
    # A power law has no reference batch: take the counts that this batch is expected to have.
    sizes, mass = popularity_classes(table)
    return expected_reuse_histogram(sizes, lookup_count(table, batch) * mass / sizes)


def expected_reuse_histogram(rows: np.ndarray, lookups_each: np.ndarray) -> tuple[float, ...]:
    """[REUSE_BINS] the expected reuse histogram of a batch, from classes of rows and their mean lookups.

    rows: [K] of each class. lookups_each: [K] mean lookups a batch of one row of each class.
    """
    from scipy.special import pdtr

    # A row's lookups in a batch are nearly Poisson.
    below = pdtr(np.concatenate([[0.0], BIN_HIGH[:-1]])[:, None], lookups_each[None])  # [REUSE_BINS, K]
    # Probability of a count within each bin's edges, times the rows of each class.
    seen = np.diff(np.concatenate([below, np.ones((1, len(rows)))]), axis=0) @ rows
    return tuple((seen / max(seen.sum(), 1e-9)).tolist())


def reuse_bin_index(counts: np.ndarray) -> np.ndarray:
    """The bin of a reuse histogram for each lookup count: 0 for 1, k for (2^(k-1), 2^k], the last for all above."""
    return np.searchsorted(BIN_HIGH, counts)


# --- outputs: what lookups give, and what gradients come back to -------------------------------------------------


def output_rows(shard: Shard, batch: int) -> int:
    """Number of rows of a shard's lookup outputs for `batch` samples.

    Pooled: one for each distinct value of a feature. A sequence: one for each lookup of the shard's rows, by
    the table's statistics.
    """
    return table_output_rows(shard.table, batch, access_share(shard) if shard.table.sequence else 1.0)


def table_output_rows(table: Table, batch: int, fraction: float = 1.0) -> int:
    """Number of rows of lookup outputs for a part of a table that gets `fraction` of its lookups."""
    # Whole rows, so that searches can add and subtract their bytes exactly. At least one: there is an op.
    if not table.sequence:
        return bag_count(table, batch)
    return max(1, round(batch * table.lookups_per_sample * fraction))


def output_bytes(shard: Shard, batch: int) -> int:
    """Bytes of a shard's lookup outputs for `batch` samples, or of their gradients."""
    # FBGEMM returns FP32 outputs, whatever type the weights have.
    return OUTPUT_BYTES * shard.width * output_rows(shard, batch)


def payload_bytes(n_bytes: Any, payload: str) -> Any:
    """Bytes that outputs or gradients of `n_bytes` in FP32 take on the wire, without padding."""
    return n_bytes * payload_by_name(payload).size_ratio
