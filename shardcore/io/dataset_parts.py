"""The Parquet parts of a dataset's folder.

  compute-<sha256>.parquet   samples of ops, columns as in COMPUTE
  comm-<sha256>.parquet      samples of collectives, columns as in COMM

A part is named by the digest of its content, which is checked when it is read: a damaged part is refused. It
is written under a temporary name, then renamed. Parts of several machines merge by copying them into one
folder.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.core.validation import require, short_repr
from shardcore.io import writing
from shardcore.io.schema import MOST_FILE_BYTES, list_names, prefix_errors, read_bytes

MEASUREMENT_VERSIONS = {"compute": 2, "comm": 3}
"""Version of each kind, raised by hand when the meaning of a timing changes. Older samples then no longer count.

comm 3: ranks have a core each (measure/own_core.py).
"""
_PART = re.compile(r"(compute|comm)-[0-9a-f]{24}\.parquet")
_UNFINISHED = re.compile(r"\.(compute|comm|pool)-.*\.(parquet|json)\.\d+\.tmp")
_PART_ROWS = 1 << 17
"""Most samples of a merged part."""
_MOST_VALUES, _MOST_TEXT = (1 << 18, 16), (1 << 24, 64)
"""Limits on a part's values and on its characters of text: a base, and a number for each byte of the file.

Repeated values take almost no bytes, so a small file could unpack to any size. Shipped parts have 0.6 values
a byte.
"""
SETTING_COLUMNS = {
    "hardware": "hardware",
    "batch": "setting_batch",
    "precision": "precision",
    "optimizer": "optimizer",
}
"""Column of each field of a sample's Setting."""
_ABSENT = ("emulated_pods", "emulated_pod_gbit_s")
"""Columns that a part lacks if all their values are null, so that parts without pods are as in earlier versions."""

_SPREAD = pa.struct(
    [("median_ms", pa.float64()), ("q1_ms", pa.float64()), ("q3_ms", pa.float64()), ("repeats", pa.int32())]
)
_SHARD = pa.struct(
    [
        ("table", pa.string()),
        ("dim", pa.int32()),
        ("row_lo", pa.int64()),
        ("row_hi", pa.int64()),
        ("col_lo", pa.int32()),
        ("col_hi", pa.int32()),
    ]
)
_COMMON = [
    ("id", pa.string()),
    ("hardware", pa.string()),
    ("setting_batch", pa.int64()),
    ("precision", pa.string()),
    ("optimizer", pa.string()),
    ("measurement_version", pa.int32()),
    ("measured_at", pa.float64()),
    ("error", pa.string()),
    ("batch", pa.int64()),
]
COMPUTE = pa.schema(
    [
        *_COMMON,
        ("pool", pa.string()),
        ("shards", pa.list_(_SHARD)),
        ("forward", _SPREAD),
        ("backward", _SPREAD),
        ("slowdown", pa.float64()),
        ("relative_ci", pa.float64()),
        ("order", pa.int64()),
        ("software", pa.string()),
        ("sequence", pa.bool_()),
    ]
)
"""Columns of compute parts. batch: samples that the op ran over. pool: digest of the pool file with its tables. dim:
dim of a shard's table, instead of the pool's. sequence: True if lookups are not pooled. Others are as in
ComputeSample.
"""
COMM = pa.schema(
    [
        *_COMMON,
        ("collective", pa.string()),
        ("payload", pa.string()),
        ("hosts", pa.int32()),
        ("widths", pa.list_(pa.int32())),
        ("start_ms", pa.list_(pa.float64())),
        ("forward", pa.list_(_SPREAD)),
        ("backward", pa.list_(_SPREAD)),
        ("waiting_ms", pa.list_(pa.float64())),
        ("order", pa.int64()),
        ("oversubscribed", pa.bool_()),
        ("busy_ms", pa.float64()),
        ("group", pa.string()),
        ("emulated_between_gbit_s", pa.float64()),
        ("emulated_within_gbit_s", pa.float64()),
        ("emulated_pods", pa.int32()),
        ("emulated_pod_gbit_s", pa.float64()),
        ("work_ms", pa.list_(pa.float64())),
    ]
)
"""Columns of parts of collectives, as in CollectiveRequest and CollectiveSample. Lists have one entry a rank.
emulated_*: fields of EmulatedLinks; null where hosts and links are real.
"""
SCHEMAS = {"compute": COMPUTE, "comm": COMM}


_OPTIONAL = (
    *("error", "forward", "backward", "relative_ci", "waiting_ms", "work_ms"),
    *(name for name in COMM.names if name.startswith("emulated_")),
)
"""Columns that may be null."""
Row = dict[str, Any]


def write_part(folder: str | Path, kind: str, rows: list[Row]) -> Path:
    """Write a dataset's rows of a kind ("compute" or "comm") as one Parquet file.

    Raises ShardCoreError for rows that no reader would take, such as very many equal ones.
    """
    sink = pa.BufferOutputStream()
    absent = [name for name in _ABSENT if all(row.get(name) is None for row in rows)]
    schema = pa.schema([field for field in SCHEMAS[kind] if field.name not in absent])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    # Equal content gets an equal name, so copies of a part merge into one.
    path = Path(folder) / f"{kind}-{hashlib.sha256(content).hexdigest()[:24]}.parquet"
    # A part that no reader takes would make the whole dataset unreadable.
    _read_bounded(content, path)
    writing.write_atomic(path, content)
    return path


def read_rows(
    folder: str | Path, kind: str, setting: Setting | None = None, columns: list[str] | None = None
) -> Iterator[Row]:
    """Iterate over a dataset's rows of a kind (of one setting) that have the current measurement version.

    Rows that include the setting's columns also get the keys `setting` and `part`.
    """
    for path, rows in _read_all_parts(folder, kind, columns).items():
        for row in rows:
            # Old samples stay on disk, but their timings mean something else.
            if row["measurement_version"] != MEASUREMENT_VERSIONS[kind]:
                continue
            if "hardware" in row:
                fields = {name: row[column] for name, column in SETTING_COLUMNS.items()}
                with prefix_errors(path):
                    row |= {"part": path, "setting": Setting(**fields)}
            if setting is None or row["setting"] == setting:
                yield row


def merge_parts(folder: str | Path, require_valid: Callable[[str], object]) -> None:
    """Merge all Parquet parts of each kind in a dataset folder into one (or a few, for very many samples), without
    losing samples.

    require_valid: raises for a kind with an invalid sample, which would spoil the merged part.

    A kill leaves old and new parts, which read the same. Merging the same samples again gives the same file.
    If a sample only failed, its last failure is kept. Temporary files over an hour old are removed.
    """
    for unfinished in (p for p in Path(folder).glob(".*.tmp") if _UNFINISHED.fullmatch(p.name)):
        with suppress(FileNotFoundError):  # its writer may have renamed it by now
            if time.time() - unfinished.lstat().st_mtime > 3600:
                unfinished.unlink()
    for kind in SCHEMAS:
        parts = {path: rows for path, rows in _read_all_parts(folder, kind).items() if rows}
        if len(parts) < 2:
            continue
        require_valid(kind)
        rows = {(r["id"], r["measured_at"]): r for part in parts.values() for r in part}
        in_time = sorted(rows.items(), key=lambda x: (x[1]["error"] is None, x[1]["measured_at"]))
        last = {r["id"]: k for k, r in in_time}
        kept = [k for k in sorted(rows) if rows[k]["error"] is None or last[k[0]] == k]
        try:
            merged = {
                write_part(folder, kind, [rows[k] for k in kept[i : i + _PART_ROWS]])
                for i in range(0, len(kept), _PART_ROWS)
            }
        except ShardCoreError:
            # Merged, they would exceed the limits of a part. They stay as they are.
            continue
        for path in merged:
            # The new parts are checked before the old ones are deleted.
            _read_part(path, kind, None)
        for path in set(parts) - merged:
            path.unlink(missing_ok=True)


def _read_all_parts(folder: str | Path, kind: str, columns: list[str] | None = None) -> dict[Path, list[Row]]:
    """Rows of all Parquet parts of a kind in a dataset folder, by path; retried if another process merges parts
    meanwhile."""
    while True:
        paths = _part_paths(folder, kind)
        try:
            return {path: _read_part(path, kind, columns) for path in paths}
        except ShardCoreError:
            if _part_paths(folder, kind) == paths:
                raise


def _part_paths(folder: str | Path, kind: str) -> list[Path]:
    """Paths of a dataset's Parquet parts of a kind, sorted. Raises ShardCoreError for a wrong name and for a broken
    link."""
    parts = []
    for path in (Path(folder) / name for name in list_names(folder)):
        if not path.name.startswith(f"{kind}-") or path.suffix != ".parquet":
            continue
        require(
            _PART.fullmatch(path.name) is not None,
            f"{path} has no name of a part, {kind}-<24 hex digits>.parquet; remove it",
        )
        require(path.exists() or not path.is_symlink(), f"{path} is a link that leads nowhere; remove it")
        parts.append(path)
    return parts


def _read_part(path: Path, kind: str, columns: list[str] | None) -> list[Row]:
    """Rows of a Parquet part of a dataset; empty if all have outdated measurement versions."""
    content = read_bytes(path)
    require(
        f"{hashlib.sha256(content).hexdigest()[:24]}.parquet" == path.name.split("-", 1)[1],
        f"{path} does not match the digest in its name; it was cut short or edited. "
        "Remove it, and a rerun of `measure` measures only what it held",
    )
    try:
        return _decode_rows(content, kind, columns, path)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        if isinstance(error, ShardCoreError):
            raise
        raise ShardCoreError(
            f"{path} is no part of a dataset ({type(error).__name__}: {error}); remove it"
        ) from None


def _read_bounded(content: bytes, path: Path) -> tuple[pa.Table, pa.Schema]:
    """Arrow table and file schema of a Parquet part, read within limits of memory.

    Raises ShardCoreError for a part that would fill memory.
    """
    file = pq.ParquetFile(pa.BufferReader(content))
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    columns_of = [group.column(i) for group in groups for i in range(group.num_columns)]
    # Sizes are checked before unpacking, as a hostile file could fill memory.
    _require_bounded_size(path, "values", [c.num_values for c in columns_of], len(content), _MOST_VALUES)
    _require_bounded_size(path, "bytes", [max(g.total_byte_size, 0) for g in groups], 0, (MOST_FILE_BYTES, 0))
    physical = map(file.schema.column, range(len(file.schema)))
    text = [column.path for column in physical if column.physical_type == "BYTE_ARRAY"]
    # As dictionaries, repeated text is in memory once. No threads, as Arrow's can abort a process that ends.
    table = pq.ParquetFile(pa.BufferReader(content), read_dictionary=text).read(use_threads=False)
    written_out = [_count_characters(chunk) for column in table.columns for chunk in column.chunks]
    _require_bounded_size(path, "characters", written_out, len(content), _MOST_TEXT)
    return table, file.schema_arrow


def _decode_rows(content: bytes, kind: str, columns: list[str] | None, path: Path) -> list[Row]:
    """Rows of a Parquet part's content, after checks of columns and version."""
    schema, (table, in_file) = SCHEMAS[kind], _read_bounded(content, path)
    if (
        "measurement_version" in table.schema.names
        and MEASUREMENT_VERSIONS[kind] not in table.column("measurement_version").unique().to_pylist()
    ):
        return []
    for field in (f for f in schema if f.name in _ABSENT and f.name not in table.schema.names):
        table = table.append_column(field, pa.nulls(len(table), field.type))
        in_file = in_file.append(field)
    _require_columns(table, in_file, schema, path)
    return (table.select(columns) if columns else table).to_pylist()


def _require_columns(table: pa.Table, in_file: pa.Schema, schema: pa.Schema, path: Path) -> None:
    if missing := [f.name for f in schema if f.name not in table.schema.names]:
        raise ShardCoreError(f"{path} lacks the column {missing[0]!r} of this ShardCore's dataset format")
    if unknown := sorted(set(table.schema.names) - set(schema.names)):
        raise ShardCoreError(
            f"{path} has an unknown column {short_repr(unknown[0])}; known are {', '.join(schema.names)}"
        )
    for field in schema:
        if (found := in_file.field(field.name).type) != field.type:
            raise ShardCoreError(f"{path} has column {field.name!r} of type {found}; it needs {field.type}")
    if nulls := [name for name in schema.names if name not in _OPTIONAL and table.column(name).null_count]:
        raise ShardCoreError(f"{path} has nothing in column {nulls[0]!r} of some sample")


def _require_bounded_size(
    path: Path, what: str, sizes: Sequence[int], content: int, most: tuple[int, int]
) -> None:
    """Raise ShardCoreError if the sizes sum to more than a limit that grows with the file's size."""
    limit = most[0] + most[1] * content
    require(
        min(sizes, default=0) >= 0 and sum(sizes) <= limit,
        f"{path} has {sum(sizes):,} {what}; a part of its size has at most {limit:,}",
    )


def _count_characters(array: pa.Array) -> int:
    """Number of characters of all text in a dictionary-encoded Arrow array, with repeated text counted each time."""
    if pa.types.is_dictionary(array.type):
        lengths = pc.call_function("binary_length", [array.dictionary])
        return pc.call_function("sum", [pc.take(lengths, array.indices).cast(pa.int64())]).as_py() or 0
    if pa.types.is_struct(array.type):
        return sum(_count_characters(x) for x in array.flatten())
    return _count_characters(array.flatten()) if pa.types.is_list(array.type) else 0
