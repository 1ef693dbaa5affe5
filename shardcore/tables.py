"""Pools of tables: the calibrated generator, the files of dlrm_datasets, the public lists.

Shapes: T tables (N of them live), K = REUSE_BINS, U unique rows of a table, S statistics of a pool, B samples of a batch.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from shardcore import streams
from shardcore.types import (
    MIN_WIDTH,
    MOST_DIM,
    MOST_SEED,
    MOST_TABLES,
    REUSE_BINS,
    Reuse,
    ShardCoreError,
    Table,
    Zipf,
    require_within,
)

PUBLISHED = "2021-856"
"""The release of dlrm_datasets that the generator is calibrated to."""
DEFAULT_ACCESS = Zipf(1.05)
"""What public_pool assumes where a list says nothing about accesses: a common choice, not a measurement."""
_EMPTY = (0.0,) * REUSE_BINS


@dataclass(frozen=True)
class PoolConfig:
    """tables: how many, empty ones among them in the published proportion. dim: of every table (the release has none)."""

    tables: int = 856
    seed: int = 0
    dim: int = 64

    def __post_init__(self) -> None:
        require_within(self, "pool", tables=(1, MOST_TABLES), seed=(0, MOST_SEED), dim=(MIN_WIDTH, MOST_DIM))


def kept_for_testing(table: Table) -> bool:
    """Whether a table is kept for testing: a twentieth of any pool, by name alone. Studies (cost/study.py) judge models
    on groups of these only that were trained on groups without any of them: users bring tables that nobody measured."""
    return int(hashlib.sha256(table.name.encode()).hexdigest(), 16) % 20 == 0


def published() -> dict[str, float]:
    """What is public of dlrm_datasets (2021, 856 tables, batch 65,536), by the names that pool_statistics uses."""
    data = _release()
    values = [data["rows"]["mean"], data["rows"]["sd"], data["pooling"]["mean"], data["pooling"]["sd"], data["lookups"],
              data["unique_rows"], *data["reuse_bins"]["mean"], *data["reuse_bins"]["sd"],
              *data["access_share_by_reuse_bin"], *data["unique_row_share_by_reuse_bin"]]
    return dict(zip(_STATISTICS, values, strict=True))


_STATISTICS = ("rows mean", "rows sd", "pooling mean", "pooling sd", "lookups", "unique rows") + tuple(
    f"{name}, bin {k}" for name in ("reuse mean", "reuse sd", "access share", "unique row share") for k in range(REUSE_BINS))


def pool_statistics(tables: tuple[Table, ...],
                    counts_of: Callable[[Table], np.ndarray] = streams.reference_counts) -> dict[str, float]:
    """Statistics of a pool of tables with Reuse access: of its specifications, or of what `counts_of` measures.

    counts_of: a table's counts per unique row, [U], in any order; an empty array for a table without lookups.
    Means and population standard deviations go over all tables, empty ones counting as 0.
    """
    rows_in_bin, lookups_in_bin = np.zeros((len(tables), REUSE_BINS)), np.zeros((len(tables), REUSE_BINS))
    for i, table in enumerate(tables):
        counts = counts_of(table)
        k = streams.reuse_bin(counts)
        rows_in_bin[i] = np.bincount(k, minlength=REUSE_BINS)
        lookups_in_bin[i] = np.bincount(k, counts, minlength=REUSE_BINS)
    unique, lookups = rows_in_bin.sum(1), lookups_in_bin.sum(1)
    rows = np.array([t.rows for t in tables], dtype=float)
    pooling = lookups / np.array([t.access.batch for t in tables])
    bins = rows_in_bin / np.maximum(unique, 1)[:, None]
    values = [rows.mean(), rows.std(), pooling.mean(), pooling.std(), lookups.sum(), unique.sum(), *bins.mean(0), *bins.std(0),
              *(lookups_in_bin.sum(0) / max(lookups.sum(), 1)), *(rows_in_bin.sum(0) / max(unique.sum(), 1))]
    return dict(zip(_STATISTICS, map(float, values), strict=True))


# --- the generator ---------------------------------------------------------------------------------------------------------

_LEAST = 2
"""A live table has more unique rows than this, or as many."""
_NEAR = 0.01
"""Largest relative deviation of a statistic that _mend leaves alone."""
_SMALL = 150
"""Tables with fewer unique rows are those that rounding to whole rows changes, and that _mend may change back."""


def generate_pool(config: PoolConfig = PoolConfig()) -> tuple[Table, ...]:
    """A pool whose statistics are those published of dlrm_datasets (see `published`).

    Tables are drawn from a plausible family, then changed as little as possible for the pool to meet the published rows,
    pooling, reuse bins, access shares and unique rows (_calibrate), then rounded to whole rows, so that the streams of a table
    have exactly its histogram (_round, _mend). What is not public (how the statistics of one table go together) is made up.
    A pool of few tables meets the statistics as far as so few can. The same config gives the same pool.
    """
    rng = np.random.default_rng(config.seed)
    release = _release()
    batch = release["batch_size"]
    n_empty = round(config.tables * release["empty_tables"] / release["tables"])
    with _one_thread():
        draw = _calibrate(_draw(rng, config.tables - n_empty), config.tables)
        rows_in_bin, unseen = _round(draw, rng)
        _mend(rows_in_bin, unseen, config.tables)
    specs = [_spec(n, u, batch) for n, u in zip(rows_in_bin, unseen, strict=True)] + [(1, 0.0, Reuse(_EMPTY, batch))] * n_empty
    return tuple(Table(f"t{i:03d}", specs[j][0], config.dim, specs[j][1], specs[j][2])
                 for i, j in enumerate(rng.permutation(len(specs))))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch adds in another order with another number of threads; the pool should not depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _draw(rng: np.random.Generator, n: int) -> torch.Tensor:
    """[n, K + 2] parameters of live tables, as _unpack reads them.

    The rows of a table are the pooled population of rows of the release, tilted towards frequent ones (by 2^(tilt × bin)) and
    perturbed smoothly. Tables with frequent rows have fewer of them and lower pooling: they are the small vocabularies, of which
    a batch sees nearly every row.
    """
    k, release = np.arange(REUSE_BINS), _release()
    z, z_pooling, z_rows, noise = *rng.standard_normal((3, n)), rng.standard_normal((n, REUSE_BINS))
    smooth = np.linalg.cholesky(np.exp(-0.5 * ((k[:, None] - k) / 2.5) ** 2) + 1e-6 * np.eye(REUSE_BINS))
    tilt = 0.45 + 0.55 * z[:, None]
    weights = np.array(release["access_share_by_reuse_bin"]) / streams.BIN_MEAN * 2 ** (tilt * k) * np.exp(noise @ smooth.T)
    pooling = 8 * np.exp(-1.0 * z + 0.8 * z_pooling)
    unique = pooling * release["batch_size"] * weights.sum(1) / (weights @ streams.BIN_MEAN)
    unseen = np.where(unique < 16, unique * rng.random(n), 4e6 * np.exp(-0.25 * z + 0.6 * z_rows))
    draw = np.concatenate([np.log(weights), np.log(np.maximum(unique, 1))[:, None], np.log(np.maximum(unseen, 1e-3))[:, None]], 1)
    return torch.tensor(draw)


def _unpack(draw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unique rows in each bin [N, K] and rows that the batch does not touch [N] of drawn parameters [N, K + 2]: logits of the
    bins, log of the unique rows beyond _LEAST, log of the untouched rows."""
    unique = _LEAST + draw[:, REUSE_BINS].exp()
    return torch.softmax(draw[:, :REUSE_BINS], 1) * unique[:, None], draw[:, -1].exp()


def _terms(rows_in_bin: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    """[..., 5 + 3 K] what a table adds to the sums from which _statistics follow."""
    unique, lookups_in_bin = rows_in_bin.sum(-1), rows_in_bin * torch.tensor(streams.BIN_MEAN)
    bins, rows, lookups = rows_in_bin / unique[..., None], unique + unseen, lookups_in_bin.sum(-1)
    return torch.cat([torch.stack([rows, rows**2, lookups, lookups**2, unique], -1), bins, bins**2, lookups_in_bin], -1)


def _statistics(sums: torch.Tensor, tables: int, batch: int) -> torch.Tensor:
    """[..., S] statistics of a pool from the sums of its tables' terms, in the order of _goal; empty tables add nothing."""
    rows, rows2, lookups, lookups2, unique = sums[..., :5].unbind(-1)
    bins, bins2, lookups_in_bin = sums[..., 5:].unflatten(-1, (3, REUSE_BINS)).unbind(-2)

    def sd(total, squares):
        return (squares / tables - (total / tables) ** 2).clamp_min(1e-12).sqrt()

    scalars = [rows / tables, sd(rows, rows2), lookups / batch / tables, sd(lookups, lookups2) / batch, lookups, unique]
    shares = lookups_in_bin / lookups[..., None]
    return torch.cat([torch.stack(scalars, -1), bins / tables, sd(bins, bins2), shares], -1)


def _goal(tables: int) -> torch.Tensor:
    """[S] published statistics for a pool of `tables`; the unique row shares are left out, they follow from access shares."""
    scale = tables / _release()["tables"]
    values = {k: v * (scale if k in ("lookups", "unique rows") else 1) for k, v in published().items()}
    return torch.tensor([v for k, v in values.items() if not k.startswith("unique row share")], dtype=torch.float64)


def _calibrate(draw: torch.Tensor, tables: int) -> torch.Tensor:
    """`draw` moved by the least distance that makes its pool meet the published statistics.

    Gauss-Newton with minimum-norm steps, since the statistics are far fewer than the parameters; damped, and no parameter moves
    by more than 1 at a time.
    """
    goal, batch = _goal(tables), _release()["batch_size"]

    def deviations(x: torch.Tensor) -> torch.Tensor:
        return _statistics(_terms(*_unpack(x.reshape(draw.shape))).sum(0), tables, batch) / goal - 1

    x = best = draw.flatten()
    best_error = float("inf")
    for _ in range(30):
        error = deviations(x)
        if float(error.norm()) > 0.99 * best_error and best_error < 0.1:  # as near as the rounded figures agree
            break
        if float(error.norm()) < best_error:
            best, best_error = x, float(error.norm())
        jacobian = torch.func.jacrev(deviations)(x)
        gram = jacobian @ jacobian.T
        gram += 1e-7 * gram.diagonal().mean() * torch.eye(len(goal), dtype=gram.dtype)
        step = jacobian.T @ torch.linalg.solve(gram, error)
        x = x - step / step.abs().max().clamp_min(1)
    return best.reshape(draw.shape)


def _round(draw: torch.Tensor, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole rows in each bin [N, K], at least one a table, and whole untouched rows [N].

    A small table carries remainders from bin to bin, from a random start; the others from table to table, which keeps the
    total of each bin.
    """
    exact, unseen = (x.numpy() for x in _unpack(draw))
    small = exact.sum(1) < _SMALL
    whole = np.zeros_like(exact)
    whole[small] = np.diff(np.floor(np.cumsum(exact[small], 1) + rng.random((small.sum(), 1))), axis=1, prepend=0)
    whole[~small] = np.diff(np.floor(np.cumsum(exact[~small], 0) + 0.5), axis=0, prepend=0)
    nothing = whole.sum(1) == 0
    whole[nothing, np.argmax(exact[nothing], 1)] = 1
    return torch.tensor(whole), torch.tensor(np.rint(unseen))


def _mend(rows_in_bin: torch.Tensor, unseen: torch.Tensor, tables: int) -> None:
    """Undo what rounding did to the statistics, in place: each time the best of all moves, until all are near or none helps. A
    move takes one row of a small table to a near bin, away or to the table."""
    goal, batch = _goal(tables), _release()["batch_size"]
    identity = torch.eye(REUSE_BINS, dtype=rows_in_bin.dtype)
    shifts = [identity[j] - identity[i] for i in range(REUSE_BINS) for j in range(REUSE_BINS) if 0 < abs(i - j) <= 3]
    moves = torch.stack([*shifts, *identity, *-identity])
    small = torch.nonzero(rows_in_bin.sum(1) < _SMALL)[:, 0]
    if len(small) == 0:
        return

    def gains(i: torch.Tensor) -> torch.Tensor:
        """[..., M, terms] what each move would add to the sums, from tables i; NaN where it cannot be made."""
        moved = rows_in_bin[i][..., None, :] + moves
        change = _terms(moved, unseen[i][..., None].expand(moved.shape[:-1])) - _terms(rows_in_bin[i], unseen[i])[..., None, :]
        impossible = (moved < 0).any(-1) | (moved.sum(-1) < _LEAST)
        return change.masked_fill(impossible[..., None], torch.nan)

    def deviations(sums: torch.Tensor) -> torch.Tensor:
        return _statistics(sums, tables, batch) / goal - 1

    sums, change = _terms(rows_in_bin, unseen).sum(0), gains(small)
    for _ in range(300):
        now = deviations(sums)
        after = deviations(sums + change).norm(dim=-1).nan_to_num(float("inf"))
        table, move = divmod(int(after.argmin()), len(moves))
        if now.abs().max() < _NEAR or after[table, move] >= now.norm():
            break
        sums = sums + change[table, move]
        rows_in_bin[small[table]] += moves[move]
        change[table] = gains(small[table])


def _spec(rows_in_bin: torch.Tensor, unseen: torch.Tensor, batch: int) -> tuple[int, float, Reuse]:
    """Rows, pooling and access of a table with whole rows in each bin; its lookups are those of the bins' mean counts."""
    n = rows_in_bin.numpy()
    return round(n.sum() + float(unseen)), round(float(n @ streams.BIN_MEAN)) / batch, Reuse(tuple(n / n.sum()), batch)


def _release() -> dict:
    return _read_data("dlrm_datasets_stats.json")[PUBLISHED]


# --- files of dlrm_datasets ------------------------------------------------------------------------------------------------


def dlrm_datasets_pool(path: str | Path, dim: int = 64) -> tuple[Table, ...]:
    """The tables of a file of facebookresearch/dlrm_datasets (`.pt.gz`, or unpacked `.pt`), named t000, t001, ...

    The file holds one batch: indices (table after table), offsets [T × B + 1] and lengths [T, B], as torch.save wrote them.
    A table has rows = its largest index + 1, which is a lower bound of its true rows, and the pooling and reuse histogram of the
    batch; one without lookups is kept, with 1 row. `dim` is the reader's choice: the release has none.
    Raises ShardCoreError for a file that is not there, not whole or not of this format.
    """
    indices, offsets, lengths = _read_batch(Path(path))
    n_tables, batch = lengths.shape
    edges = offsets[::batch].tolist()
    return tuple(_measured_table(f"t{t:03d}", indices[lo:hi].numpy(), batch, dim)
                 for t, (lo, hi) in enumerate(zip(edges[:n_tables], edges[1:], strict=True)))


def _measured_table(name: str, ids: np.ndarray, batch: int, dim: int) -> Table:
    rows = int(ids.max()) + 1 if len(ids) else 1
    return Table(name, rows, dim, len(ids) / batch, streams.reuse_of(ids, batch))


def _read_batch(path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    what = f"dlrm_datasets file {str(path)!r}"
    wanted = "it needs to be the torch.save of (indices, offsets [tables × batch + 1], lengths [tables, batch])"
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain = _unpacked(path, Path(folder))
        except FileNotFoundError:
            raise ShardCoreError(f"{what} does not exist; download it from github.com/facebookresearch/dlrm_datasets") from None
        except IsADirectoryError:
            raise ShardCoreError(f"{what} is a folder; {wanted}") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ShardCoreError(f"{what} is cut short or damaged ({error}); download it again") from None
        try:
            content = torch.load(plain, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(plain))
        except Exception as error:  # foreign bytes may look like any opcode to the unpickler, so it may raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ShardCoreError(f"{what} cannot be read, being foreign or cut short ({reason}); {wanted}") from None
    tensors = tuple(content) if isinstance(content, (tuple, list)) else ()
    if not (len(tensors) == 3 and all(isinstance(x, torch.Tensor) and x.dtype in (torch.int32, torch.int64) for x in tensors)):
        raise ShardCoreError(f"{what} holds {_kind(content)}; {wanted}, whole numbers all")
    for problem in _batch_problems(*tensors):
        raise ShardCoreError(f"{what} {problem}; {wanted}")
    return tensors


def _batch_problems(indices: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor) -> Iterator[str]:
    if lengths.ndim != 2 or 0 in lengths.shape or indices.ndim != 1 or tuple(offsets.shape) != (lengths.numel() + 1,):
        yield f"has indices {list(indices.shape)}, offsets {list(offsets.shape)}, lengths {list(lengths.shape)}"
    elif offsets[0] != 0 or offsets[-1] != len(indices) or not torch.equal(offsets.diff(), lengths.flatten().to(offsets.dtype)):
        yield f"has offsets from {int(offsets[0])} to {int(offsets[-1])} that do not match its lengths and {len(indices)} indices"
    elif len(indices) and indices.min() < 0:
        yield f"has a negative index {int(indices.min())}"


def _unpacked(path: Path, folder: Path) -> Path:
    """`path` itself, or its content where it is gzipped: torch.load needs to seek."""
    with path.open("rb") as raw:
        if raw.read(2) != b"\x1f\x8b":
            return path
        raw.seek(0)
        with gzip.open(raw) as packed, (folder / "batch.pt").open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    return folder / "batch.pt"


def _kind(content: object) -> str:
    if isinstance(content, (tuple, list)):
        return f"{len(content)} objects ({', '.join(str(getattr(x, 'dtype', type(x).__name__)) for x in content[:4])})"
    return f"a {type(content).__name__}"


# --- public lists ----------------------------------------------------------------------------------------------------------


def public_pools() -> dict[str, str]:
    """Names of the public lists, and where each comes from."""
    return {k: v["source"] for k, v in _read_data("public_tables.json").items() if not k.startswith("_")}


def public_pool(name: str) -> tuple[Table, ...]:
    """The tables of a public list, named c00, c01, ...: their rows, dims and pooling.

    Accesses follow Zipf(alpha) with the alpha that the list gives, else DEFAULT_ACCESS, which is an assumption and no
    measurement. Raises ShardCoreError for a name that is not among `public_pools()`.
    """
    if name not in public_pools():
        raise ShardCoreError(f"there is no public list of tables {name!r}; known are {', '.join(public_pools())}")
    entry = _read_data("public_tables.json")[name]
    access = Zipf(entry["zipf_alpha"]) if "zipf_alpha" in entry else DEFAULT_ACCESS
    digits = max(2, len(str(len(entry["tables"]) - 1)))
    return tuple(Table(f"c{i:0{digits}d}", t["rows"], t["dim"], t["pooling"], access) for i, t in enumerate(entry["tables"]))


def _read_data(name: str) -> dict:
    return json.loads(resources.files("shardcore").joinpath("data", name).read_text(encoding="utf-8"))
