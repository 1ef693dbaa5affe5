"""Index streams: which rows a batch looks up, drawn from a table's access statistics; and the statistics of a stream.

A reuse histogram is the content of one reference batch: U unique rows, n_k of them in bin k, with counts inside the bin that
add up to the batch's lookups. A stream at the reference batch has exactly this content; at a smaller batch each lookup is
kept with probability batch / reference (what a smaller batch of the same data sees); at a larger one the counts scale and no
new rows appear, so unique rows are then a lower bound.

Shapes: L lookups, B samples of the batch, U unique rows.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from shardcore.types import REUSE_BINS, Reuse, Shard, Table, Zipf

BIN_LOW = np.array([1] + [2 ** (k - 1) + 1 for k in range(1, REUSE_BINS)], dtype=np.float64)
"""Smallest count in each reuse bin."""
BIN_HIGH = np.array([2**k for k in range(REUSE_BINS - 1)] + [np.inf], dtype=np.float64)
"""Largest count in each reuse bin."""
BIN_MEAN = np.array([1, 2, 3.38, 6.23, 11.6, 22.4, 45, 88] + [0.7 * 2**k for k in range(8, REUSE_BINS - 1)] + [1.5 * BIN_LOW[-1]])
"""Mean count in each reuse bin. Bins 0 to 9: as the access and unique-row shares that are public of dlrm_datasets (2021) imply,
within their rounding; from there 0.7 of the upper edge likewise, and 1.5 times the lower edge where there is no upper one."""
_ZIPF_BUCKETS = 512


def lookups(table: Table, batch: int) -> int:
    """Lookups of one batch: pooling × batch, rounded."""
    return round(table.pooling * batch)


def reference_counts(table: Table) -> np.ndarray:
    """[U] int64 counts of the unique rows of a Reuse table's reference batch, largest first; they sum to its lookups.

    U is the number of rows for which the bins' counts can add up to the lookups with every bin's mean count as near as
    possible to BIN_MEAN.
    """
    total = lookups(table, table.access.batch)
    if total == 0:
        return np.zeros(0, dtype=np.int64)
    n_bins, mean_counts = _bin_rows(table)
    return np.concatenate([_spread_counts(int(n), int(c), k) for k, (n, c) in reversed(
        list(enumerate(zip(n_bins, mean_counts, strict=True)))) if n > 0])


@lru_cache(maxsize=4096)
def _bin_rows(table: Table) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows in each bin and the sum of their counts: two tuples of REUSE_BINS."""
    bins = np.array(table.access.bins)
    total = lookups(table, table.access.batch)
    unique = min(table.rows, max(1, round(total / float(bins @ BIN_MEAN))))
    rows = _apportion(bins, unique)
    while rows @ BIN_LOW > total and unique > 1:  # too many rows for so few lookups
        unique = max(1, min(unique - 1, int(unique * total / float(rows @ BIN_LOW))))
        rows = _apportion(bins, unique)
    sums = _apportion_counts(rows, total)
    return tuple(int(n) for n in rows), tuple(int(c) for c in sums)


def _apportion(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to `shares` that sum to `total` (largest remainders)."""
    exact = shares / shares.sum() * total
    whole = np.floor(exact)
    rest = int(round(total - whole.sum()))
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[:rest]] += 1
    return whole


def _apportion_counts(rows: np.ndarray, total: int) -> np.ndarray:
    """[REUSE_BINS] sums of counts per bin, within the bins' edges where that is possible, adding up to `total`."""
    low, high = rows * BIN_LOW, np.where(rows > 0, np.maximum(rows, 1) * BIN_HIGH, 0.0)
    sums = rows * BIN_MEAN
    gap = total - sums.sum()
    if gap < 0:
        room = sums - low
        sums -= room * min(1.0, -gap / max(room.sum(), 1e-9))
    else:
        room = np.where(np.isinf(high), 0.0, high - sums)
        step = min(gap, room.sum())
        sums += room * (step / max(room.sum(), 1e-9))
        gap -= step
        if gap > 0:  # beyond every closed bin: the open one takes the rest, or the highest that there is
            sums[np.flatnonzero(rows > 0)[-1]] += gap
    sums = np.floor(sums)
    top = np.flatnonzero(rows > 0)[::-1]
    rest = int(total - sums.sum())
    for k in top:  # the rounding rest goes where there is room, from the top
        take = rest if np.isinf(high[k]) else int(min(rest, high[k] - sums[k])) if rest > 0 else rest
        sums[k] += take
        rest -= take
    sums[top[0]] += rest
    return sums


def _spread_counts(rows: int, total: int, k: int) -> np.ndarray:
    """[rows] counts within bin k, falling, that add up to `total`: a ramp around their mean."""
    mean = total / rows
    reach = min(mean - BIN_LOW[k], BIN_HIGH[k] - mean) if k < REUSE_BINS - 1 else mean - BIN_LOW[k]
    ramp = np.linspace(1, -1, rows) if rows > 1 else np.zeros(1)
    counts = np.rint(mean + max(reach, 0) * ramp).astype(np.int64)
    rest = total - int(counts.sum())
    if rest:  # rounding: one each, where it stays in the bin
        step = int(math.copysign(1, rest))
        fits = np.flatnonzero((counts + step >= BIN_LOW[k]) & (counts + step <= BIN_HIGH[k]))
        fits = fits if len(fits) >= abs(rest) else np.arange(rows)
        counts[fits[: abs(rest)]] += step
        counts[0] += total - int(counts.sum())
    return -np.sort(-counts)


def unique_rows(shard: Shard, batch: int) -> float:
    """Expected unique rows that one batch touches in a shard."""
    return _unique(shard.table, batch, shard.row_lo, shard.row_hi)


@lru_cache(maxsize=1 << 17)
def _unique(table: Table, batch: int, row_lo: int, row_hi: int) -> float:
    if lookups(table, batch) == 0:
        return 0.0
    if not table.ordered and row_hi - row_lo < table.rows:
        return _unique(table, batch, 0, table.rows) * ((row_hi - row_lo) / table.rows)
    weights, sizes = _rank_classes(table, batch)
    seen = -np.expm1(-weights) if isinstance(table.access, Zipf) else _seen_when_thinned(weights, table, batch)
    inside = sizes
    if table.ordered:
        edges = np.concatenate([[0.0], np.cumsum(sizes)])
        inside = np.clip(np.minimum(edges[1:], row_hi) - np.maximum(edges[:-1], row_lo), 0, None)
    return float(min((seen * inside).sum(), row_hi - row_lo))


def _seen_when_thinned(counts: np.ndarray, table: Table, batch: int) -> np.ndarray:
    keep = min(1.0, batch / table.access.batch)
    return np.ones_like(counts) if keep == 1.0 else -np.expm1(counts * np.log1p(-keep))


@lru_cache(maxsize=8192)
def _rank_classes(table: Table, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes of rows of like popularity, most popular first: their accesses (Zipf: expected in the batch; Reuse: in the
    reference batch) and how many rows each holds. The rows of a Reuse table that its batch never saw are left out."""
    if isinstance(table.access, Reuse):
        rows, sums = (np.array(x, dtype=float) for x in _bin_rows(table))
        live = np.flatnonzero(rows > 0)[::-1]
        return sums[live] / rows[live], rows[live]
    edges = _zipf_edges(table)
    sizes = np.diff(edges)
    mass = np.diff(_zipf_cdf(edges, table))
    return lookups(table, batch) * mass / sizes, sizes


def _zipf_edges(table: Table) -> np.ndarray:
    edges = np.unique(np.rint(np.geomspace(1, table.rows + 1, _ZIPF_BUCKETS)))
    return edges - 1


def _zipf_cdf(rank: np.ndarray, table: Table) -> np.ndarray:
    """Share of accesses to the `rank` most popular rows: the bounded continuous power law on [1, rows + 1)."""
    a, n = table.access.alpha, table.rows
    if abs(a - 1) < 1e-9:
        return np.log(np.asarray(rank) + 1.0) / math.log(n + 1.0)
    return ((np.asarray(rank) + 1.0) ** (1 - a) - 1) / ((n + 1.0) ** (1 - a) - 1)


def access_share(shard: Shard) -> float:
    """The share of its table's lookups that a shard's row range serves."""
    table = shard.table
    if shard.full_rows:
        return 1.0
    if not table.ordered:
        return shard.rows / table.rows
    if isinstance(table.access, Zipf):
        low, high = _zipf_cdf(np.array([shard.row_lo, shard.row_hi]), table)
        return float(high - low)
    counts, sizes = _rank_classes(table, table.access.batch)
    edges = np.concatenate([[0.0], np.cumsum(sizes)])
    inside = np.clip(np.minimum(edges[1:], shard.row_hi) - np.maximum(edges[:-1], shard.row_lo), 0, None)
    return float((counts * inside).sum() / max((counts * sizes).sum(), 1e-12))


def stream(table: Table, batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One batch of a table: row ids [L] int64 and offsets [B + 1] int64, sample b's ids being ids[offsets[b]:offsets[b+1]].

    The same table, batch and seed give the same stream. A Zipf table has the same number of lookups in every sample where
    its pooling is whole; else lookups fall on samples at random.
    """
    rng = np.random.default_rng([seed, batch, table.rows, *table.name.encode()])
    if isinstance(table.access, Reuse):
        ranks = _reuse_ranks(table, batch, rng)
    else:
        ranks = _zipf_ranks(table, lookups(table, batch), rng)
    lengths = _lengths(table, len(ranks), batch, rng)
    ids = ranks if table.ordered else _scatter(ranks, table.rows)
    return ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _reuse_ranks(table: Table, batch: int, rng: np.random.Generator) -> np.ndarray:
    counts = reference_counts(table)
    keep = batch / table.access.batch
    if keep < 1:
        counts = rng.binomial(counts, keep)
    elif keep > 1:
        counts = np.floor(counts * keep + rng.random(len(counts))).astype(np.int64)  # rounded so that the sum is right on average
    ranks = np.repeat(np.arange(len(counts)), counts)
    rng.shuffle(ranks)
    return ranks


def _zipf_ranks(table: Table, n: int, rng: np.random.Generator) -> np.ndarray:
    a, u = table.access.alpha, rng.random(n)
    top = table.rows + 1.0
    value = top**u if abs(a - 1) < 1e-9 else (1 + u * (top ** (1 - a) - 1)) ** (1 / (1 - a))
    return np.minimum(value.astype(np.int64) - 1, table.rows - 1)


def _lengths(table: Table, n: int, batch: int, rng: np.random.Generator) -> np.ndarray:
    if isinstance(table.access, Zipf) and n % batch == 0:
        return np.full(batch, n // batch)
    return np.bincount(rng.integers(0, batch, n), minlength=batch)


def _scatter(ranks: np.ndarray, rows: int) -> np.ndarray:
    """Spread ranks over the rows as hashing would: a bijection of [0, rows), neighbours falling far apart."""
    step = max(1, int(rows * 0.6180339887498949))
    while math.gcd(step, rows) != 1:
        step += 1
    return (ranks * step + rows // 3) % rows


def shard_stream(shard: Shard, batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The part of its table's stream that falls into a shard's rows, ids counted from the shard's first row."""
    ids, offsets = stream(shard.table, batch, seed)
    if shard.full_rows:
        return ids, offsets
    inside = (ids >= shard.row_lo) & (ids < shard.row_hi)
    kept = np.concatenate([[0], np.cumsum(inside)])
    return ids[inside] - shard.row_lo, kept[offsets]


def reuse_of(ids: np.ndarray, batch: int) -> Reuse:
    """The reuse histogram of a stream of `batch` samples."""
    if len(ids) == 0:
        return Reuse((0.0,) * REUSE_BINS, batch)
    _, counts = np.unique(ids, return_counts=True)
    bins = np.bincount(reuse_bin(counts), minlength=REUSE_BINS)
    return Reuse(tuple(float(b) for b in bins / bins.sum()), batch)


def reuse_bin(counts: np.ndarray) -> np.ndarray:
    """The reuse bin of each count: 0 for 1, k for (2^(k-1), 2^k], the last for more than 2^(REUSE_BINS - 2)."""
    return np.searchsorted(BIN_HIGH, counts)
