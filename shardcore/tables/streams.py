"""Streams: row ids that a batch looks up, drawn from access statistics (see step/access.py).

At its reference batch, a stream has exactly the table's reuse histogram.

Shapes: L lookups, B samples of the batch.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from shardcore.core.access_statistics import Reuse, RowShares, Zipf
from shardcore.core.types import Table
from shardcore.step import access


def draw_lookups(table: Table, batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw one batch of lookups in a table: row ids [L] int64, and offsets [V + 1] int64 where the ids of each of V
    bags begin.

    V is F · B for F features, or less if they are deduplicated (access.bag_count). Samples that repeat a value
    are then left out, so all rows of the batch are in the stream, but fewer times.

    Sample b of feature f has ids[offsets[i]:offsets[i+1]] with i = f · B + b. The same table, batch and seed give the
    same stream. If the access is Zipf and lookups divide evenly, all samples have equally many. Otherwise lookups fall
    on samples and features at random.
    """
    # With the table's name in the seed, tables of one batch are independent.
    rng = np.random.default_rng([seed, batch, table.rows, *table.name.encode()])
    if isinstance(table.access, Reuse):
        # Rank 0 is the most popular row. Ranks become ids below.
        ranks = _draw_reuse_ranks(table, batch, rng)
    else:
        ranks = _draw_zipf_ranks(table, access.lookup_count(table, batch), rng)
    if table.dedup > 1:
        # Repeated values are not looked up again, so the batch has fewer lookups.
        ranks = _subsample(ranks, round(len(ranks) / table.dedup), rng)
    lengths = _draw_lengths(table, len(ranks), access.bag_count(table, batch), rng)
    # Hashed ids are scattered. Ordered ones are the ranks, or are spread by measured row shares.
    ids = (
        _scatter_ranks(ranks, table.rows)
        if not table.ordered
        else ranks
        if table.row_shares is None
        else _rows_by_shares(ranks, table, table.row_shares)
    )
    return ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _draw_reuse_ranks(table: Table, batch: int, rng: np.random.Generator) -> np.ndarray:
    counts = access.reference_row_counts(table)
    keep = batch / table.reuse.batch
    if keep < 1:
        # A smaller batch keeps each lookup with equal probability.
        counts = rng.binomial(counts, keep)
    elif keep > 1:
        # Rounded at random, so that the sum is right on average.
        counts = np.floor(counts * keep + rng.random(len(counts))).astype(np.int64)
    # Shuffled, as samples look up popular and rare rows in any order.
    ranks = np.repeat(np.arange(len(counts)), counts)
    rng.shuffle(ranks)
    return ranks


def _draw_zipf_ranks(table: Table, n: int, rng: np.random.Generator) -> np.ndarray:
    a, u = table.zipf_alpha, rng.random(n)
    top = table.rows + 1.0
    # Inverse CDF of the bounded continuous power law, as in step/access.py.
    value = top**u if abs(a - 1) < 1e-9 else (1 + u * (top ** (1 - a) - 1)) ** (1 / (1 - a))
    # The law is on [1, rows + 1), so rounding down gives ranks. Rounding errors may reach rows + 1.
    return np.minimum(value.astype(np.int64) - 1, table.rows - 1)


def _subsample(ranks: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Subsample n lookups: each distinct row at least once where n allows, the rest in proportion to counts."""
    rows, counts = np.unique(ranks, return_counts=True)
    if n <= len(rows):
        return rng.permutation(rows)[:n]
    # Each row has one lookup. Further ones are in proportion to its further counts.
    more = rng.multinomial(n - len(rows), (counts - 1) / (counts - 1).sum())
    return rng.permutation(np.repeat(rows, 1 + more))


def _draw_lengths(table: Table, n: int, bags: int, rng: np.random.Generator) -> np.ndarray:
    if isinstance(table.access, Zipf) and n % bags == 0:
        return np.full(bags, n // bags)
    return np.bincount(rng.integers(0, bags, n), minlength=bags)


def _scatter_ranks(ranks: np.ndarray, rows: int) -> np.ndarray:
    """Spread popularity ranks over row ids by a bijection of [0, rows) that separates neighbours, as hashing does."""
    # Multiples of the golden ratio are spread evenly. A step coprime to `rows` makes a bijection.
    step = max(1, int(rows * 0.6180339887498949))
    while math.gcd(step, rows) != 1:
        step += 1
    # Offset by a third, so that the hottest rank is not row 0.
    return (ranks * step + rows // 3) % rows


def _rows_by_shares(ranks: np.ndarray, table: Table, row_shares: RowShares) -> np.ndarray:
    """Row of each popularity rank, such that ranges of rows get their measured shares of lookups and unique rows.

    Hot ranks go to the ranges with most lookups for each unique row. They are scattered over ranges that have about
    equally many. No two ranks share a row.
    """
    lookups, unique = np.array(row_shares.lookups), np.array(row_shares.unique)
    edges = np.rint(np.linspace(0, table.rows, len(lookups) + 1)).astype(np.int64)
    # log2 of lookups for each unique row. It is rounded, so that ranges of similar heat count as equal.
    heat = np.rint(np.log2(np.maximum(lookups, 1e-12) / np.maximum(unique, 1e-12)))
    order = np.argsort(-heat, kind="stable")
    # Rows of each range, hottest range first, and the number of ranks to place.
    sizes, n = np.diff(edges)[order], _n_rows_looked_up(table)
    # End of each range's ranks, by its share of unique rows. A range cannot have more ranks than rows.
    last = np.minimum(np.rint(n * np.cumsum(unique[order] / unique.sum())), np.cumsum(sizes))
    # A range begins no earlier than leaves room, in it and later ones, for all remaining ranks.
    least = n - np.cumsum(sizes[::-1])[::-1][1:]
    first = np.concatenate([[0], np.maximum(last[:-1], least)]).astype(np.int64)
    # The ranks of ranges of equal heat are scattered over all of them.
    starts = [*first[np.flatnonzero(np.diff(heat[order], prepend=np.inf))], n]
    scattered = ranks.copy()
    for start, end in itertools.pairwise(starts):
        alike = (ranks >= start) & (ranks < end)
        scattered[alike] = start + _scatter_ranks(ranks[alike] - start, int(end - start))
    # The range of each rank, by the first rank of ranges.
    ranks, of = scattered, np.searchsorted(first, scattered, side="right") - 1
    held = np.diff(np.append(first, n))[of]
    # The ranks of a range are spread evenly over its rows, so distinct ranks keep distinct rows.
    return edges[:-1][order][of] + (ranks - first[of]) * sizes[of] // np.maximum(held, 1)


def _n_rows_looked_up(table: Table) -> int:
    """Number of distinct rows that a table's drawn lookups may contain."""
    return table.rows if isinstance(table.access, Zipf) else len(access.reference_row_counts(table))
