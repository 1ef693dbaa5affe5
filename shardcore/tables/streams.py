"""Index streams: row ids that a batch looks up, drawn from access statistics (see step/access.py).

At its reference batch, a stream has exactly the content of the reuse histogram.

Shapes: L lookups, B samples of the batch.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from shardcore.core.access_statistics import Reuse, RowShares, Zipf
from shardcore.core.types import Shard, Table
from shardcore.step import access


def stream(table: Table, batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One batch of a table: row ids [L] int64 and offsets [V + 1] int64, for V distinct values.

    V is F · B for F features, or fewer where they are deduplicated (access.distinct_values). Samples that
    repeat a value are left out. So all rows of the batch are in it, but fewer times.

    Sample b of feature f has ids[offsets[i]:offsets[i+1]] with i = f · B + b. The same table, batch and seed
    give the same stream. A Zipf table with integer pooling for each feature has as many lookups in every
    sample. Otherwise lookups fall on samples and features at random.
    """
    # The table's name is part of the seed, so tables of one batch are drawn independently.
    rng = np.random.default_rng([seed, batch, table.rows, *table.name.encode()])
    if isinstance(table.access, Reuse):
        # Ranks first: 0 is the most popular row. Where rows lie follows below.
        ranks = _reuse_ranks(table, batch, rng)
    else:
        ranks = _zipf_ranks(table, access.lookups(table, batch), rng)
    if table.dedup > 1:
        # Repeated values are not looked up again, so the batch has fewer lookups.
        ranks = _fewer(ranks, round(len(ranks) / table.dedup), rng)
    lengths = _lengths(table, len(ranks), access.distinct_values(table, batch), rng)
    # Hashed ids lie anywhere. Ordered ones keep their ranks, or are spread by measured shares.
    ids = (
        _scatter(ranks, table.rows)
        if not table.ordered
        else ranks
        if table.row_shares is None
        else _by_shares(ranks, table, table.row_shares)
    )
    return ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _reuse_ranks(table: Table, batch: int, rng: np.random.Generator) -> np.ndarray:
    # At the reference batch the counts are exact, so the stream has this histogram.
    counts = access.reference_counts(table)
    keep = batch / table.reuse.batch
    if keep < 1:
        # Each lookup is kept with the same probability, as a smaller batch of the same data has.
        counts = rng.binomial(counts, keep)
    elif keep > 1:
        # Rounded so that the sum is right on average.
        counts = np.floor(counts * keep + rng.random(len(counts))).astype(np.int64)
    # Lookups are shuffled: samples see popular and rare rows in any order.
    ranks = np.repeat(np.arange(len(counts)), counts)
    rng.shuffle(ranks)
    return ranks


def _zipf_ranks(table: Table, n: int, rng: np.random.Generator) -> np.ndarray:
    a, u = table.zipf_alpha, rng.random(n)
    top = table.rows + 1.0
    # Inverse of the bounded continuous power law's CDF, which step/access.py uses too.
    value = top**u if abs(a - 1) < 1e-9 else (1 + u * (top ** (1 - a) - 1)) ** (1 / (1 - a))
    # The law is continuous on [1, rows + 1): rounding down gives ranks. Rounding errors may reach the end.
    return np.minimum(value.astype(np.int64) - 1, table.rows - 1)


def _fewer(ranks: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """n of the lookups: each row once, and more often if it has many. Of too many rows, some."""
    rows, counts = np.unique(ranks, return_counts=True)
    # Fewer lookups than rows: some rows are left out, each with equal probability.
    if n <= len(rows):
        return rng.permutation(rows)[:n]
    # One lookup is certain for each row. The rest falls in proportion to the rest of its counts.
    more = rng.multinomial(n - len(rows), (counts - 1) / (counts - 1).sum())
    return rng.permutation(np.repeat(rows, 1 + more))


def _lengths(table: Table, n: int, bags: int, rng: np.random.Generator) -> np.ndarray:
    if isinstance(table.access, Zipf) and n % bags == 0:
        return np.full(bags, n // bags)
    return np.bincount(rng.integers(0, bags, n), minlength=bags)


def _scatter(ranks: np.ndarray, rows: int) -> np.ndarray:
    """Spread ranks over the rows as hashing would: a bijection of [0, rows) that parts neighbours."""
    # The golden ratio spreads multiples evenly. A step coprime to `rows` makes it a bijection.
    step = max(1, int(rows * 0.6180339887498949))
    while math.gcd(step, rows) != 1:
        step += 1
    # rows // 3: the hottest rank is not row 0.
    return (ranks * step + rows // 3) % rows


def _by_shares(ranks: np.ndarray, table: Table, row_shares: RowShares) -> np.ndarray:
    """Rows of ranks, so that each range of rows has about its shares of lookups and of unique rows.

    Hot ranks go to the ranges with most lookups for each unique row, scattered over those with about as many.
    No two ranks share a row.
    """
    # Two shares for each range: of lookups, and of unique rows.
    shares = [np.array(of) for of in (row_shares.lookups, row_shares.unique)]
    edges = np.rint(np.linspace(0, table.rows, len(shares[0]) + 1)).astype(np.int64)
    # log2 of lookups for each unique row, rounded: ranges of similar heat count as equal.
    heat = np.rint(np.log2(np.maximum(shares[0], 1e-12) / np.maximum(shares[1], 1e-12)))
    order = np.argsort(-heat, kind="stable")
    # Rows of ranges, hottest range first, and how many ranks there are to place.
    sizes, n = np.diff(edges)[order], _ranks(table)
    # Last rank of each range: its share of unique rows, but no more than its rows.
    last = np.minimum(np.rint(n * np.cumsum(shares[1][order] / shares[1].sum())), np.cumsum(sizes))
    # A range that is full leaves its ranks to those before and after it.
    least = n - np.cumsum(sizes[::-1])[::-1][1:]
    first = np.concatenate([[0], np.maximum(last[:-1], least)]).astype(np.int64)
    # Ranges of equal heat begin and end together: their ranks are scattered over all of them.
    starts = [*first[np.flatnonzero(np.diff(heat[order], prepend=np.inf))], n]
    scattered = ranks.copy()
    for start, end in itertools.pairwise(starts):
        alike = (ranks >= start) & (ranks < end)
        scattered[alike] = start + _scatter(ranks[alike] - start, int(end - start))
    # The range of each rank, by its first rank.
    ranks, of = scattered, np.searchsorted(first, scattered, side="right") - 1
    held = np.diff(np.append(first, n))[of]
    # Ranks of a range are spread evenly over its rows. Distinct ranks keep distinct rows.
    return edges[:-1][order][of] + (ranks - first[of]) * sizes[of] // np.maximum(held, 1)


def _ranks(table: Table) -> int:
    """Rows that the table's streams may have."""
    return table.rows if isinstance(table.access, Zipf) else len(access.reference_counts(table))


def shard_stream(shard: Shard, batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Stream of a table, restricted to a shard's rows. Ids count from the shard's first row."""
    ids, offsets = stream(shard.table, batch, seed)
    if shard.full_rows:
        return ids, offsets
    # Offsets count kept ids only, so look them up in the running count.
    inside = (ids >= shard.row_lo) & (ids < shard.row_hi)
    kept = np.concatenate([[0], np.cumsum(inside)])
    return ids[inside] - shard.row_lo, kept[offsets]
