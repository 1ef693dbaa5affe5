"""Pooling and reuse of tables, from FBGEMM's reports of a running job.

TBEBenchmarkParamsReporter of FBGEMM 1.8 writes them:

    FBGEMM_TBE_REPORT_INPUT_PARAMS=1 FBGEMM_REPORT_INPUT_PARAMS_BUCKET=DIR python job.py

Such a job writes DIR/tbe-OP-config-estimation-STEP.json for each table batched embedding op (TBE) and step. A
file describes an op, not a table. It has rows, dim and mean lookups of each feature, in the op's order, but
no names. `write_tables_of_ops`, called in the job, writes the names next to them. Without names, a table is
known by its shape, if no other table has the same.

FBGEMM estimates reuse. It gives the shares of the 20 most frequent ids. To the other ids it fits a power law
of counts by rank, but does not say how many ids there are. `rows_by_count` finds the number for which the law
ends at ids seen once. It is some 10% off a batch's true number of unique rows. It is far off if one id is
seen often and no other is seen less often. `problem_for` with batches of data is more accurate.

FBGEMM counts steps only for optimizers that need the count. Under others (EXACT_SGD) it reports step 0 again
at the second step. The job then fails, because the file exists. It also fails at a feature with a handful of
different ids in a batch.

Shapes: K = REUSE_BINS.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcore.core.access_statistics import REUSE_BINS, Reuse
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Table
from shardcore.core.validation import MOST_BATCH, MOST_POOLING, shown
from shardcore.io import schema, writing
from shardcore.step.access import BIN_HIGH
from shardcore.torchrec.modules import collections_of

if TYPE_CHECKING:
    from torch import nn

REPORT, TABLES = re.compile(r"tbe-(?P<op>.+)-config-estimation-\d+\.json"), "tbe-{op}-tables.json"
NO_FIT = (1.0, 2.0)
"""(q, s) that FBGEMM reports if it fitted no power law."""
LAST_COUNT = 0.7
"""Count at which the fitted law ends. It passes through the middle of the ids seen once, then below 1."""
STEEPEST = 5.0
"""FBGEMM only accepts laws that begin at 1 / STEEPEST of the last frequent id's count, or above."""


@dataclass(frozen=True)
class TablePart:
    """A range of a model's table in an op.

    module: path of its collection in the model.
    table: its name there.
    row_lo, row_hi: rows [row_lo, row_hi).
    col_lo, col_hi: columns [col_lo, col_hi).
    """

    module: str
    table: str
    row_lo: int
    row_hi: int
    col_lo: int
    col_hi: int


@dataclass(frozen=True)
class PartLookups:
    """Lookups of one table of an op, summed over its features, in the mean of the reported steps.

    rows: rows of the op's table.
    dim: columns of the op's table.
    part: its range of the model's table. None: unknown.
    pooling: lookups per sample.
    seen: [K] unique ids by how often a batch looks them up.
    batch: samples of that batch.
    features: number of features of the table.
    weighted: True if lookups have weights.
    """

    rows: int
    dim: int
    part: TablePart | None
    pooling: float
    seen: np.ndarray
    batch: int
    features: int = 1
    weighted: bool = False


def write_tables_of_ops(model: nn.Module, folder: str | Path) -> None:
    """Write the tables of each op on this rank, next to FBGEMM's reports.

    model: a DistributedModelParallel.
    folder: the folder of the reports.
    """
    for collection in collections_of(model, refuses_others=False):
        for kernel in collection.kernels():
            if not (uuid := getattr(getattr(kernel, "emb_module", None), "uuid", None)):
                continue
            parts = []
            for table in kernel._config.embedding_tables:
                row, column = table.local_metadata.shard_offsets if table.local_metadata else (0, 0)
                rows, columns = (row, row + table.local_rows), (column, column + table.local_cols)
                parts.append(asdict(TablePart(collection.path, table.name, *rows, *columns)))
            writing.write_json(Path(folder) / TABLES.format(op=uuid), parts)


def read_statistics(path: str | Path) -> list[PartLookups]:
    """Lookups of all tables of all ops in a folder of reports, or in one report.

    Raises ShardCoreError for a folder without reports, and for a damaged report.
    """
    path = Path(path)
    reports = [path]
    if path.is_dir():
        # Other files may lie in the folder, such as the names of tables.
        reports = [path / name for name in schema.names_in(path) if REPORT.fullmatch(name)]
    if not reports:
        raise ShardCoreError(
            f"folder {str(path)!r} has no reports of FBGEMM (tbe-OP-config-estimation-STEP.json); run the job with "
            "FBGEMM_TBE_REPORT_INPUT_PARAMS=1, and FBGEMM_REPORT_INPUT_PARAMS_BUCKET naming it"
        )
    steps: dict[tuple[str, int], list[PartLookups]] = defaultdict(list)
    for report in reports:
        named = REPORT.fullmatch(report.name)
        op = named["op"] if named else report.name
        names = report.with_name(TABLES.format(op=op))
        parts = None
        if names.exists():
            parts = schema.read(schema.read_json(names), tuple[TablePart, ...], str(names))
        # Several steps of an op are averaged.
        tables = _tables_of(schema.read_json(report), f"FBGEMM report {str(report)!r}", parts)
        for i, table in tables.items():
            steps[op, i].append(table)
    return [_mean(tables) for tables in steps.values()]


def reported_tables(path: str | Path) -> tuple[Table, ...]:
    """The tables of a job, without its model. Precision is FP32.

    Tables have their names in the job, if those were written. Otherwise each table of an op counts as a separate
    table: t0, t1, ... Each rank's reports are needed.

    Raises as `read_statistics` and `matched` do.
    """
    reported = read_statistics(path)
    parts: dict[tuple[str, str], list[TablePart]] = defaultdict(list)
    last: dict[tuple[str, str], PartLookups] = {}
    # Ranks report parts of the same table, so parts are collected over all reports.
    for r in reported:
        if r.part:
            parts[r.part.module, r.part.table].append(r.part)
            last[r.part.module, r.part.table] = r
    # Tables of several modules may share a name.
    uses = Counter(table for _, table in parts)
    shapes = {}
    for (module, table), held in sorted(parts.items()):
        name = table if uses[table] == 1 else f"{module}.{table}"
        shapes[name] = module, table, max(p.row_hi for p in held), max(p.col_hi for p in held)
    tables = []
    for name, statistics in matched(reported, shapes).items():
        module, table, rows, dim = shapes[name]
        r = last[module, table]
        tables.append(Table(name, rows, dim, *statistics, features=r.features, weighted=r.weighted))
    for i, r in enumerate(r for r in reported if not r.part):
        statistics = r.pooling, _reuse([r])
        tables.append(Table(f"t{i}", r.rows, r.dim, *statistics, features=r.features, weighted=r.weighted))
    return tuple(tables)


def _tables_of(report: Any, what: str, parts: Sequence[TablePart] | None) -> dict[int, PartLookups]:
    """Lookups by the op's table index."""
    try:
        specs = schema.read(report["embedding_specs"], tuple[tuple[int, int], ...], "embedding_specs")
        table_of = schema.read(report["feature_table_map"], tuple[int, ...], "feature_table_map")
        weighted = schema.read(report.get("weighted", False), bool, "weighted")
        if not all(0 <= i < len(specs) for i in table_of):
            raise ValueError(f"feature_table_map is {shown(table_of)}, for {len(specs)} tables")
        # A table of an op may have several features, whose lookups add up.
        pooling, seen, batches = defaultdict(float), defaultdict(lambda: np.zeros(REUSE_BINS)), {}
        for table, mean, batch, law in zip(
            table_of,
            report["pooling_params"]["Ls"],
            report["batch_params"]["Bs"],
            report["indices_params_list"],
            strict=True,
        ):
            hitters = schema.read(law["heavy_hitters"], tuple[float, ...], "heavy_hitters")
            if not all(0 <= share <= 1 for share in hitters):
                raise ValueError(f"heavy_hitters are {shown(hitters)}, not shares within 0 and 1")
            q, s = schema.read(law["zipf_q"], float, "zipf_q"), schema.read(law["zipf_s"], float, "zipf_s")
            mean, batch = schema.read(mean, float, "Ls"), schema.read(batch, int, "Bs")
            if not (0 <= mean <= MOST_POOLING and 1 <= batch <= MOST_BATCH):
                raise ValueError(
                    f"Ls has {mean:g} and Bs {batch}; they need 0 to {MOST_POOLING:g} and 1 to {MOST_BATCH}"
                )
            batches[table] = batch
            pooling[table] += mean
            # Features of a table are assumed to look up different ids.
            with np.errstate(all="ignore"):  # what is not finite is refused below
                seen[table] += rows_by_count(hitters, q, s, mean * batch, specs[table][0])
        tables = {}
        for i in pooling:
            if not (np.isfinite(seen[i]).all() and 0 <= pooling[i] < math.inf):
                raise ValueError("lookups are not finite, or less than none")
            tables[i] = PartLookups(
                rows=specs[i][0],
                dim=specs[i][1],
                part=parts[i] if parts else None,
                pooling=pooling[i],
                seen=seen[i],
                batch=batches[i],
                features=table_of.count(i),
                weighted=weighted,
            )
        return tables
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        reason = error if isinstance(error, ShardCoreError) else f"{type(error).__name__}: {error}"
        raise ShardCoreError(
            f"{what} is not what FBGEMM 1.8 writes ({reason}); it needs embedding_specs, feature_table_map, and for "
            "each feature Ls, Bs and indices_params_list"
        ) from None


def _mean(steps: list[PartLookups]) -> PartLookups:
    first, n = steps[0], len(steps)
    if differs := next((s for s in steps if (s.rows, s.dim) != (first.rows, first.dim)), None):
        raise ShardCoreError(
            f"FBGEMM's reports of one op have a table of {first.rows} x {first.dim} and, at "
            f"another step, of {differs.rows} x {differs.dim}; they need to be of one job"
        )
    return replace(first, pooling=sum(s.pooling for s in steps) / n, seen=np.mean([s.seen for s in steps], 0))


def rows_by_count(hitters: Iterable[float], q: float, s: float, lookups: float, rows: int) -> np.ndarray:
    """[K] unique ids of a batch by reuse bin.

    hitters: shares of lookups of the most frequent ids.
    q, s: other ids at rank r (from 0) have counts in proportion to (r + q)^-s.
    lookups: lookups of the batch.
    rows: rows of the table.
    """
    # FBGEMM gives shares. Counts are whole numbers.
    counts = np.rint(np.asarray(hitters, dtype=float) * lookups)
    seen = np.bincount(np.searchsorted(BIN_HIGH, counts), minlength=REUSE_BINS).astype(float)
    first, left = len(counts), lookups - counts.sum()
    # Nothing is left to distribute.
    if left < 0.5 or rows <= first or not first:
        return seen
    # The law starts below the last frequent id.
    most = counts[-1]
    if (q, s) == NO_FIT:
        # As if all were seen as often.
        q, s, least = 1.0, 0.01, (1 + (most if most < STEEPEST else most / STEEPEST)) / 2
    else:
        least = max(1.0, most / STEEPEST)

    # Integral of the law over ranks [first - 0.5, end - 0.5]. It is a logarithm at s = 1.
    def mass(end: float) -> float:
        lo, hi = first + q - 0.5, end + q - 0.5
        return math.log(hi / lo) if abs(s - 1) < 1e-9 else (hi ** (1 - s) - lo ** (1 - s)) / (1 - s)

    def count(rank: float, end: float) -> float:
        return left * (rank + q - 0.5) ** -s / mass(end)

    low, high = first + 1e-6, first + min(rows - first, left)
    # The number of ids is bounded by rows and by lookups, as each id has one at least.
    # Bisection over the number of ids: both counts fall as it grows.
    for _ in range(60):
        middle = (low + high) / 2
        more = (count(middle, middle) > LAST_COUNT and count(first + 0.5, middle) > least) or count(
            first + 0.5, middle
        ) > most
        low, high = (middle, high) if more else (low, middle)
    # The law scaled to the lookups that are left.
    scale = left / mass(high)
    # Rank at which the law falls below each bin's highest count.
    edges = np.clip([(scale / (c + 0.5)) ** (1 / s) - q + 0.5 for c in BIN_HIGH], first, high)
    return seen - np.diff(edges, prepend=high)


def matched(
    reported: list[PartLookups], shapes: Mapping[str, tuple[str, str, int, int]]
) -> dict[str, tuple[float, Reuse]]:
    """Pooling and reuse of tables, by our names.

    reported: lookups of tables of ops.
    shapes: by our name: module, name there, rows and dim.

    Column parts of a table look up the same ids, so one part per row range counts. Row parts add up.
    Raises ShardCoreError for a table that was not reported, or that shares its shape with others and has no
    name.
    """
    by_table: dict[tuple[str, str], dict[tuple[int, int], PartLookups]] = defaultdict(dict)
    by_shape = defaultdict(list)
    for r in reported:
        if r.part:
            by_table[r.part.module, r.part.table][r.part.row_lo, r.part.row_hi] = r
        else:
            by_shape[r.rows, r.dim].append(r)
    result = {}
    for name, (module, table, rows, dim) in shapes.items():
        ranges = by_table[module, table]
        parts = list(ranges.values()) or by_shape[rows, dim]
        same = [n for n, shape in shapes.items() if shape[2:] == (rows, dim)]
        if not ranges and parts and (len(parts) > 1 or len(same) > 1):
            raise ShardCoreError(
                f"FBGEMM reported {len(parts)} tables of {rows} rows and dim {dim}, and does not say which is table "
                f"{name!r} (there are {', '.join(same[:5])}); call write_tables_of_ops in the job"
            )
        n_rows = sum(high - low for low, high in ranges) if ranges else rows
        if not parts or n_rows != rows:
            lacks = f"did not report a table of {rows} rows and dim {dim}"
            if parts:
                lacks = f"reported {n_rows} of the {rows} rows"
            raise ShardCoreError(
                f"FBGEMM {lacks}, as table {name!r} has; each rank reports its fused ops alone (data_parallel tables "
                "none), and a job that cuts tables needs to call write_tables_of_ops"
            )
        result[name] = (sum(p.pooling for p in parts), _reuse(parts))
    return result


def _reuse(parts: list[PartLookups]) -> Reuse:
    seen = np.sum([p.seen for p in parts], 0)
    return Reuse(tuple(float(b) for b in (seen / seen.sum() if seen.sum() else seen)), parts[0].batch)
