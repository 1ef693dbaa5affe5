"""What FBGEMM reports of a running job's lookups (TBEBenchmarkParamsReporter, FBGEMM 1.8): pooling and reuse of its tables.

    FBGEMM_TBE_REPORT_INPUT_PARAMS=1 FBGEMM_REPORT_INPUT_PARAMS_BUCKET=DIR python job.py

A job that runs so writes DIR/tbe-OP-config-estimation-STEP.json for each table batched embedding op (TBE) and step. A file is
of an op, not of a table: for each feature of the op, in its order, it has rows, dim and mean lookups, and no name. Called in the
job, `write_tables_of_ops` puts names beside them; without, a table is known by its shape, where no other has the same.

Reuse is FBGEMM's estimate of it: the shares of the 20 most frequent ids, and the power law that it fits to the other ids of the
batch by rank, but not how many these are. `rows_by_count` finds the number for which the law ends at ids seen once. Against the
true number of a batch's unique rows it is some 10% off, and far off where an id is seen many times and yet no other less often:
`problem_for` with batches of data is better where there are any.

FBGEMM counts steps for the optimizers that need it alone. Under others (EXACT_SGD) it reports step 0 again at the second step,
and the job ends there, for the file exists; it also ends at a feature with a handful of different ids in a batch.

Shapes: K = REUSE_BINS.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcore import files, schema
from shardcore.errors import ShardCoreError
from shardcore.tables.access import BIN_HIGH
from shardcore.types import REUSE_BINS, Reuse, Table

if TYPE_CHECKING:
    from torch import nn

REPORT, TABLES = re.compile(r"tbe-(?P<op>.+)-config-estimation-\d+\.json"), "tbe-{op}-tables.json"
NO_FIT = (1.0, 2.0)
"""(q, s) of a report whose ids no power law fits."""
LAST_COUNT = 0.7
"""Where the fitted law ends: it goes through the middle of the ids seen once, and falls below 1 on their way."""
STEEPEST = 5.0
"""FBGEMM takes laws alone that begin at least at a fifth of the last of the most frequent ids."""


@dataclass(frozen=True)
class TablePart:
    """What an op holds of a model's table: rows [row_lo, row_hi) and columns [col_lo, col_hi), half-open."""

    module: str
    table: str
    row_lo: int
    row_hi: int
    col_lo: int
    col_hi: int


@dataclass(frozen=True)
class PartLookups:
    """What all features of one table of an op look up in a step, in the mean of the steps reported. rows, dim: of the op's table;
    part: which of the model's that is, where known. pooling: lookups per sample. seen: [K] ids by how often a batch of so many
    samples sees them."""

    rows: int
    dim: int
    part: TablePart | None
    pooling: float
    seen: np.ndarray
    batch: int


def write_tables_of_ops(model: nn.Module, folder: str | Path) -> None:
    """For each op of a DistributedModelParallel on this rank, which tables it holds, beside what FBGEMM reports of it."""
    for path, module in model.named_modules():
        for lookup in getattr(module, "_lookups", ()):
            for kernel in getattr(getattr(lookup, "module", lookup), "_emb_modules", ()):
                if uuid := getattr(getattr(kernel, "emb_module", None), "uuid", None):
                    files.write_json(Path(folder) / TABLES.format(op=uuid), [
                        asdict(_part(path, table)) for table in kernel._config.embedding_tables])


def _part(path: str, table: Any) -> TablePart:
    row, column = table.local_metadata.shard_offsets if table.local_metadata else (0, 0)
    path = ".".join(p for p in path.split(".") if p not in ("module", "_dmp_wrapped_module"))
    return TablePart(path, table.name, row, row + table.local_rows, column, column + table.local_cols)


def read_statistics(path: str | Path) -> list[PartLookups]:
    """Lookups of all tables of all ops that a folder has reports of, or of one report.

    Raises ShardCoreError for a folder without reports, and for a file that is none, naming what it lacks.
    """
    path = Path(path)
    reports = sorted(p for p in path.iterdir() if REPORT.fullmatch(p.name)) if path.is_dir() else [path]
    if not reports:
        raise ShardCoreError(f"folder {str(path)!r} has no reports of FBGEMM (tbe-OP-config-estimation-STEP.json); run the job "
                             "with FBGEMM_TBE_REPORT_INPUT_PARAMS=1, and FBGEMM_REPORT_INPUT_PARAMS_BUCKET naming it")
    steps: dict[tuple[str, int], list[PartLookups]] = defaultdict(list)
    for report in reports:
        named = REPORT.fullmatch(report.name)
        op = named["op"] if named else report.name
        names = report.with_name(TABLES.format(op=op))
        parts = schema.read(schema.read_json(names), tuple[TablePart, ...], str(names)) if names.exists() else None
        for i, found in _tables_of(schema.read_json(report), f"FBGEMM report {str(report)!r}", parts).items():
            steps[op, i].append(found)
    return [_mean(found) for found in steps.values()]


def reported_tables(path: str | Path) -> tuple[Table, ...]:
    """The tables of a job, without its model: by their names in it, or, where none were written, one for each table of an op (t0,
    t1, ...; a part of a table is then one of its own). They count as FP32. A report of each rank that has a part is needed.

    Raises as `read_statistics` and `matched` do.
    """
    found = read_statistics(path)
    parts: dict[tuple[str, str], list[TablePart]] = defaultdict(list)
    for part in (f.part for f in found if f.part):
        parts[part.module, part.table].append(part)
    having = Counter(table for _, table in parts)
    shapes = {table if having[table] == 1 else f"{module}.{table}":
              (module, table, max(p.row_hi for p in held), max(p.col_hi for p in held))
              for (module, table), held in sorted(parts.items())}
    tables = [Table(name, *shapes[name][2:], *statistics) for name, statistics in matched(found, shapes).items()]
    unnamed = [f for f in found if not f.part]
    return tuple(tables + [Table(f"t{i}", f.rows, f.dim, f.pooling, _reuse([f])) for i, f in enumerate(unnamed)])


def _tables_of(report: Any, what: str, parts: Sequence[TablePart] | None) -> dict[int, PartLookups]:
    """By the op's number of a table."""
    try:
        specs = schema.read(report["embedding_specs"], tuple[tuple[int, int], ...], "embedding_specs")
        table_of = schema.read(report["feature_table_map"], tuple[int, ...], "feature_table_map")
        pooling, seen, batches = defaultdict(float), defaultdict(lambda: np.zeros(REUSE_BINS)), {}
        for table, mean, batch, law in zip(table_of, report["pooling_params"]["Ls"], report["batch_params"]["Bs"],
                                           report["indices_params_list"], strict=True):
            hitters = schema.read(law["heavy_hitters"], tuple[float, ...], "heavy_hitters")
            if not all(0 <= share <= 1 for share in hitters):
                raise ValueError(f"heavy_hitters are {schema.show(hitters)}, not shares within 0 and 1")
            mean = schema.read(mean, float, "Ls")
            batches[table] = batch
            pooling[table] += mean
            seen[table] += rows_by_count(hitters, law["zipf_q"], law["zipf_s"], mean * batch, specs[table][0])
        schema.read(list(batches.values()), tuple[int, ...], "Bs")
        if not all(0 <= i < len(specs) for i in table_of):
            raise ValueError(f"feature_table_map is {schema.show(table_of)}, for {len(specs)} tables")
        found = {i: PartLookups(*specs[i], parts[i] if parts else None, pooling[i], seen[i], batches[i]) for i in pooling}
        if not all(np.isfinite(f.seen).all() and 0 <= f.pooling < math.inf and f.batch >= 1 for f in found.values()):
            raise ValueError("lookups are not finite, or less than none")
        return found
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        said = error if isinstance(error, ShardCoreError) else f"{type(error).__name__}: {error}"
        raise ShardCoreError(f"{what} is not what FBGEMM 1.8 writes ({said}); it needs embedding_specs, "
                             "feature_table_map, and for each feature Ls, Bs and indices_params_list") from None


def _mean(steps: list[PartLookups]) -> PartLookups:
    first, n = steps[0], len(steps)
    return PartLookups(first.rows, first.dim, first.part, sum(s.pooling for s in steps) / n,
                       sum(s.seen for s in steps) / n, first.batch)


def rows_by_count(hitters: Iterable[float], q: float, s: float, lookups: float, rows: int) -> np.ndarray:
    """[K] how many ids a batch sees so often, by reuse bin: of the most frequent ids, by their shares of the lookups, and of all
    others, whose counts by rank r (from 0) are in proportion to (r + q)^-s."""
    counts = np.rint(np.asarray(hitters, dtype=float) * lookups)
    seen = np.bincount(np.searchsorted(BIN_HIGH, counts), minlength=REUSE_BINS).astype(float)
    first, left = len(counts), lookups - counts.sum()
    if left < 0.5 or rows <= first or not first:
        return seen
    most = counts[-1]
    if (q, s) == NO_FIT:
        q, s, least = 1.0, 0.01, (1 + (most if most < STEEPEST else most / STEEPEST)) / 2  # as if all were seen as often
    else:
        least = max(1.0, most / STEEPEST)

    def mass(end: float) -> float:
        lo, hi = first + q - 0.5, end + q - 0.5
        return math.log(hi / lo) if abs(s - 1) < 1e-9 else (hi ** (1 - s) - lo ** (1 - s)) / (1 - s)

    def count(rank: float, end: float) -> float:
        return left * (rank + q - 0.5) ** -s / mass(end)

    low, high = first + 1e-6, first + min(rows - first, left)
    for _ in range(60):  # both fall with the number of ids
        middle = (low + high) / 2
        more = count(middle, middle) > LAST_COUNT and count(first + 0.5, middle) > least or count(first + 0.5, middle) > most
        low, high = (middle, high) if more else (low, middle)
    scale = left / mass(high)
    edges = np.clip([(scale / (c + 0.5)) ** (1 / s) - q + 0.5 for c in BIN_HIGH], first, high)
    return seen - np.diff(edges, prepend=high)


def matched(found: list[PartLookups], shapes: Mapping[str, tuple[str, str, int, int]]) -> dict[str, tuple[float, Reuse]]:
    """Pooling and reuse of tables, by our names.

    shapes: of each table its module, its name there, rows and dim. Parts of a table by columns look up the same ids, so that one
    of each row range counts; parts by rows add up. Raises ShardCoreError naming a table that was not reported, or that only its
    shape says which it is, where others have the same.
    """
    named = [f for f in found if f.part]
    by_shape = defaultdict(list)
    for f in found:
        if not f.part:
            by_shape[f.rows, f.dim].append(f)
    result = {}
    for name, (module, table, rows, dim) in shapes.items():
        ranges = {(f.part.row_lo, f.part.row_hi): f for f in named if (f.part.module, f.part.table) == (module, table)}
        parts = list(ranges.values()) or by_shape[rows, dim]
        same = [n for n, shape in shapes.items() if shape[2:] == (rows, dim)]
        if not ranges and parts and (len(parts) > 1 or len(same) > 1):
            raise ShardCoreError(f"FBGEMM reported {len(parts)} tables of {rows} rows and dim {dim}, and does not say which is "
                                 f"table {name!r} (there are {', '.join(same[:5])}); call write_tables_of_ops in the job")
        reported = sum(high - low for low, high in ranges) if ranges else rows
        if not parts or reported != rows:
            lacks = f"reported {reported} of the {rows} rows" if parts else f"did not report a table of {rows} rows and dim {dim}"
            raise ShardCoreError(f"FBGEMM {lacks}, as table {name!r} has; each rank reports its fused ops alone (data_parallel "
                                 "tables none), and a job that cuts tables needs to call write_tables_of_ops")
        result[name] = (sum(p.pooling for p in parts), _reuse(parts))
    return result


def _reuse(parts: list[PartLookups]) -> Reuse:
    seen = sum(p.seen for p in parts)
    return Reuse(tuple(float(b) for b in (seen / seen.sum() if seen.sum() else seen)), parts[0].batch)
