"""The calibrated generator: a pool with the published statistics of dlrm_datasets.

Shapes: T tables (N of them live), K = REUSE_BINS, S statistics of a pool, M moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from shardcore.core.access_statistics import REUSE_BINS, Reuse
from shardcore.core.types import MIN_WIDTH, Table
from shardcore.core.validation import MOST_DIM, MOST_TABLES, Record, Seed, number_within
from shardcore.step import access
from shardcore.tables.statistics import published_statistics, read_published_release

_EMPTY = (0.0,) * REUSE_BINS
_LEAST = 2
"""Fewest unique rows of a live table."""
_NEAR = 0.01
"""Largest relative deviation of a statistic that `_undo_rounding` accepts."""
_SMALL = 150
"""Unique rows below which rounding to whole rows changes its statistics: `_undo_rounding` changes only these."""


@dataclass(frozen=True)
class PoolConfig(Record, noun="pool"):
    """Parameters of a generated pool.

    tables: number of tables, including empty ones in the published proportion.
    seed: seed of the draws.
    dim: dim of every table. The release has none.
    """

    tables: Annotated[int, number_within(1, MOST_TABLES)] = 856
    seed: Seed = 0
    dim: Annotated[int, number_within(MIN_WIDTH, MOST_DIM)] = 64


def generate_pool(config: PoolConfig = PoolConfig()) -> tuple[Table, ...]:
    """Generate a pool of tables with the published statistics of dlrm_datasets (see `published_statistics`).

    Tables are drawn from a plausible family. `_calibrate_parameters` changes them as little as possible to meet the
    published rows, pooling, reuse bins, access shares and unique rows. `_round_to_whole_rows` and `_undo_rounding`
    then make rows whole, so that a table's streams have exactly its histogram.

    How the properties of one table go together is not public, and is made up. A small pool meets the statistics as
    far as it can. The same config gives the same pool, except for a few tables where torch's linear algebra rounds
    differently.
    """
    # One generator for all draws, so that the seed alone decides the pool.
    rng = np.random.default_rng(config.seed)
    release = read_published_release()
    batch = release["batch_size"]
    # Empty tables in the published proportion. They add nothing to sums, but count in means.
    n_empty = round(config.tables * release["empty_tables"] / release["tables"])
    with _one_thread():
        draw = _calibrate_parameters(_draw_parameters(rng, config.tables - n_empty), config.tables)
        rows_in_bin, unseen = _round_to_whole_rows(draw, rng)
        # Rounding shifts statistics, which single rows then correct.
        _undo_rounding(rows_in_bin, unseen, config.tables)
    specs = [_rows_pooling_and_access(n, u, batch) for n, u in zip(rows_in_bin, unseen, strict=True)]
    specs += [(1, 0.0, Reuse(_EMPTY, batch))] * n_empty
    return tuple(
        Table(f"t{i:03d}", specs[j][0], config.dim, specs[j][1], specs[j][2])
        # Permuted, as empty tables would be last otherwise.
        for i, j in enumerate(rng.permutation(len(specs)))
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context in which torch runs on one thread: more threads change the order of sums, and so the pool."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _draw_parameters(rng: np.random.Generator, n: int) -> torch.Tensor:
    """[N, K + 2] random parameters of live tables, in the form that `_rows_from_parameters` reads.

    A table's rows are distributed over bins as those of the release, tilted towards frequent rows by 2^(tilt × bin)
    and smoothly perturbed. Tables with frequent rows have fewer rows, and lower pooling: they are small vocabularies,
    of which a batch sees nearly every row.
    """
    k, release = np.arange(REUSE_BINS), read_published_release()
    # z correlates the parameters of a table: tilt, pooling and unseen rows all use it.
    z, z_pooling, z_rows, noise = *rng.standard_normal((3, n)), rng.standard_normal((n, REUSE_BINS))
    # A Gaussian kernel over bins, so that neighbouring bins are perturbed alike. The diagonal keeps it definite.
    smooth = np.linalg.cholesky(np.exp(-0.5 * ((k[:, None] - k) / 2.5) ** 2) + 1e-6 * np.eye(REUSE_BINS))
    # A tilt above 0 favours frequent rows. It rises with z, and pooling falls with z.
    tilt = 0.45 + 0.55 * z[:, None]
    # [K] rows in each bin of the whole release: lookups over mean counts.
    population = np.array(release["access_share_by_reuse_bin"]) / access.BIN_MEAN
    weights = population * 2 ** (tilt * k) * np.exp(noise @ smooth.T)
    # Log-normal around 8, lower where rows are frequent.
    pooling = 8 * np.exp(-1.0 * z + 0.8 * z_pooling)
    # Unique rows follow from lookups over the mean count of a row.
    unique = pooling * release["batch_size"] * weights.sum(1) / (weights @ access.BIN_MEAN)
    # Of a small vocabulary a batch sees most rows. Other tables have millions that it does not touch.
    unseen = np.where(unique < 16, unique * rng.random(n), 4e6 * np.exp(-0.25 * z + 0.6 * z_rows))
    rows = [np.log(np.maximum(unique, 1))[:, None], np.log(np.maximum(unseen, 1e-3))[:, None]]
    # In logarithms, the solver may move parameters freely, and rows stay positive.
    return torch.tensor(np.concatenate([np.log(weights), *rows], 1))


def _rows_from_parameters(draw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unique rows of each table by reuse bin [N, K], and rows that a batch does not touch [N].

    draw: [N, K + 2] logits of the bins, log of unique rows beyond _LEAST, log of untouched rows.
    """
    unique = _LEAST + draw[:, REUSE_BINS].exp()
    # Softmax keeps shares of bins positive with sum 1, whatever the logits.
    return torch.softmax(draw[:, :REUSE_BINS], 1) * unique[:, None], draw[:, -1].exp()


def _statistic_terms(rows_in_bin: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    """[..., 5 + 3 K] a table's terms in the sums from which `_statistics_from_sums` computes pool statistics."""
    unique, lookups_in_bin = rows_in_bin.sum(-1), rows_in_bin * torch.tensor(access.BIN_MEAN)
    bins, rows, lookups = rows_in_bin / unique[..., None], unique + unseen, lookups_in_bin.sum(-1)
    # With squares, standard deviations also follow from sums over tables.
    scalars = torch.stack([rows, rows**2, lookups, lookups**2, unique], -1)
    return torch.cat([scalars, bins, bins**2, lookups_in_bin], -1)


def _statistics_from_sums(sums: torch.Tensor, tables: int, batch: int) -> torch.Tensor:
    """[..., S] pool statistics from sums of the tables' terms, in the order of `_target_statistics`.

    Empty tables add nothing to the sums.
    """
    rows, rows2, lookups, lookups2, unique = sums[..., :5].unbind(-1)
    bins, bins2, lookups_in_bin = sums[..., 5:].unflatten(-1, (3, REUSE_BINS)).unbind(-2)

    def standard_deviation(total, squares):
        # Rounding may leave a tiny negative variance, whose root would be NaN.
        return (squares / tables - (total / tables) ** 2).clamp_min(1e-12).sqrt()

    scalars = [
        rows / tables,
        standard_deviation(rows, rows2),
        lookups / batch / tables,
        standard_deviation(lookups, lookups2) / batch,
        lookups,
        unique,
    ]
    shares = lookups_in_bin / lookups[..., None]
    return torch.cat([torch.stack(scalars, -1), bins / tables, standard_deviation(bins, bins2), shares], -1)


def _target_statistics(tables: int) -> torch.Tensor:
    """[S] published pool statistics, scaled to a pool of `tables`.

    Unique row shares are left out: they follow from the access shares.
    """
    # Totals grow with the number of tables. Means and shares do not.
    scale = tables / read_published_release()["tables"]
    values = {
        k: v * (scale if k in ("lookups", "unique rows") else 1) for k, v in published_statistics().items()
    }
    kept = [v for k, v in values.items() if not k.startswith("unique row share")]
    return torch.tensor(kept, dtype=torch.float64)


def _calibrate_parameters(draw: torch.Tensor, tables: int) -> torch.Tensor:
    """Table parameters nearest to `draw` with which a pool has the published statistics.

    This is Gauss-Newton with minimum-norm steps, as statistics are far fewer than parameters. The normal matrix is
    damped, and no parameter moves by more than 1 in a step.
    """
    goal, batch = _target_statistics(tables), read_published_release()["batch_size"]

    def relative_deviations(x: torch.Tensor) -> torch.Tensor:
        # Relative, so that millions of rows and shares below 1 count equally.
        return (
            _statistics_from_sums(
                _statistic_terms(*_rows_from_parameters(x.reshape(draw.shape))).sum(0), tables, batch
            )
            / goal
            - 1
        )

    x = best = draw.flatten()
    best_error = float("inf")
    for _ in range(30):
        error = relative_deviations(x)
        if float(error.norm()) > 0.99 * best_error and best_error < 0.1:
            # No further progress: published figures are rounded and cannot all be met exactly.
            break
        if float(error.norm()) < best_error:
            best, best_error = x, float(error.norm())
        # [S, parameters]. Reverse mode is cheaper, as statistics are few.
        jacobian = torch.func.jacrev(relative_deviations)(x)
        gram = jacobian @ jacobian.T
        # Damped, as statistics that nearly depend on each other make the matrix singular.
        gram += 1e-7 * gram.diagonal().mean() * torch.eye(len(goal), dtype=gram.dtype)
        # The minimum-norm step that removes the error to first order: J^T (J J^T)^-1 error.
        step = jacobian.T @ torch.linalg.solve(gram, error)
        # By at most 1 in any logarithm. Beyond that, the linear model is far off.
        x = x - step / step.abs().max().clamp_min(1)
    return best.reshape(draw.shape)


def _round_to_whole_rows(draw: torch.Tensor, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to whole numbers: by bin [N, K], at least one a table, and untouched rows [N].

    The remainder of each rounding is carried on. In small tables it goes from bin to bin, which keeps the table's
    total. In others it goes from table to table, which keeps each bin's total.
    """
    exact, unseen = (x.numpy() for x in _rows_from_parameters(draw))
    # Small tables have few rows a bin. Rounding each bin alone would lose many of them.
    small = exact.sum(1) < _SMALL
    whole = np.zeros_like(exact)
    start = rng.random((small.sum(), 1))
    # Rounding cumulative sums carries remainders on. With random starts, tables do not all round the same bins up.
    whole[small] = np.diff(np.floor(np.cumsum(exact[small], 1) + start), axis=1, prepend=0)
    whole[~small] = np.diff(np.floor(np.cumsum(exact[~small], 0) + 0.5), axis=0, prepend=0)
    nothing = whole.sum(1) == 0
    # A live table needs a row. It gets one in its largest bin.
    whole[nothing, np.argmax(exact[nothing], 1)] = 1
    return torch.tensor(whole), torch.tensor(np.rint(unseen))


def _undo_rounding(rows_in_bin: torch.Tensor, unseen: torch.Tensor, tables: int) -> None:
    """Undo the effect of rounding on the pool's statistics by moving single rows between bins of the histogram, in
    place.

    Each round makes the best of all moves, until all statistics are within _NEAR or no move helps. A move puts one row
    of a small table into a near bin, adds a row, or removes one.
    """
    goal, batch = _target_statistics(tables), read_published_release()["batch_size"]
    identity = torch.eye(REUSE_BINS, dtype=rows_in_bin.dtype)
    # Only near bins, so that a table changes little.
    near = [(i, j) for i in range(REUSE_BINS) for j in range(REUSE_BINS) if 0 < abs(i - j) <= 3]
    shifts = [identity[j] - identity[i] for i, j in near]
    moves = torch.stack([*shifts, *identity, *-identity])
    # A row more or less does not change the statistics of larger tables.
    small = torch.nonzero(rows_in_bin.sum(1) < _SMALL)[:, 0]
    if len(small) == 0:
        return

    def changes_by_move(i: torch.Tensor) -> torch.Tensor:
        """[..., M, terms] change of the sums by each move of tables i. NaN for an impossible move."""
        moved = rows_in_bin[i][..., None, :] + moves
        after = _statistic_terms(moved, unseen[i][..., None].expand(moved.shape[:-1]))
        change = after - _statistic_terms(rows_in_bin[i], unseen[i])[..., None, :]
        # A bin cannot have negative rows, nor a live table fewer than _LEAST.
        impossible = (moved < 0).any(-1) | (moved.sum(-1) < _LEAST)
        return change.masked_fill(impossible[..., None], torch.nan)

    def relative_deviations(sums: torch.Tensor) -> torch.Tensor:
        return _statistics_from_sums(sums, tables, batch) / goal - 1

    # [small tables, M, terms] changes, computed once. A round then only adds vectors.
    sums, change = _statistic_terms(rows_in_bin, unseen).sum(0), changes_by_move(small)
    for _ in range(300):
        now = relative_deviations(sums)
        # Impossible moves are NaN, and count as infinitely far.
        after = relative_deviations(sums + change).norm(dim=-1).nan_to_num(float("inf"))
        table, move = divmod(int(after.argmin()), len(moves))
        # Near enough, or a local optimum.
        if now.abs().max() < _NEAR or after[table, move] >= now.norm():
            break
        sums = sums + change[table, move]
        rows_in_bin[small[table]] += moves[move]
        # Only the changed table has new gains.
        change[table] = changes_by_move(small[table])


def _rows_pooling_and_access(
    rows_in_bin: torch.Tensor, unseen: torch.Tensor, batch: int
) -> tuple[int, float, Reuse]:
    """Rows, pooling and access statistics of a table from its whole rows by bin."""
    n = rows_in_bin.numpy()
    # Whole lookups in a batch, so that a stream can have exactly this histogram.
    pooling = round(float(n @ access.BIN_MEAN)) / batch
    return round(n.sum() + float(unseen)), pooling, Reuse(tuple(n / n.sum()), batch)
