"""Measurements on disk: a folder of Parquet parts that only grows.

  pool-<digest>.json            the tables that the samples of some parts speak of
  compute-<sha256>.parquet      compute samples, columns as in COMPUTE
  comm-<sha256>.parquet         communication samples, columns as in COMM
  replays/<name>/               steps of a problem's plans, as replays.py keeps them

A part is named after its content, written to a temporary name and renamed; the name is checked when it is read, so a part cut
short is refused. A sample's id is the digest of its setting, its request and MEASUREMENT_VERSION: the same request is the same
sample wherever and whenever it was measured. Parts of several machines merge by copying them into one folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardcore import files
from shardcore.schema import MOST_FILE_BYTES, read_bytes, show
from shardcore.types import CommRequest, CommSample, ComputeRequest, ComputeSample, Setting, Shard, ShardCoreError, Spread, Table

REPLAYS = "replays"
_FEWEST_OF_CONTROL = 4
Control = tuple[ComputeRequest, float]
"""The group that runs throughout, so that drift shows, and its ms at the usual pace."""
Sample = TypeVar("Sample", ComputeSample, CommSample)

MEASUREMENT_VERSION = 2
"""Raised by hand when the meaning of a timing changes; older samples then no longer count."""

_PART = re.compile(r"(compute|comm)-[0-9a-f]{24}\.parquet")
_UNFINISHED = re.compile(r"\.(compute|comm|pool)-.*\.(parquet|json)\.\d+\.tmp")
_PART_ROWS = 1 << 17
"""Samples of a part that is merged."""
_MOST_VALUES, _MOST_TEXT = (1 << 18, 16), (1 << 24, 64)
"""Values of a part, and characters of its text: so many, and so many more for each of its bytes. (Shipped parts have 0.6 values a
byte.) What repeats takes next to no bytes, so that a small file could unpack to any size."""
_OPTIONAL = ("error", "forward", "backward", "known_to", "waiting_ms")
"""Columns in which a sample may have nothing."""

_SPREAD = pa.struct([("median_ms", pa.float64()), ("q1_ms", pa.float64()), ("q3_ms", pa.float64()), ("repeats", pa.int32())])
_SHARD = pa.struct([("table", pa.string()), ("dim", pa.int32()), ("row_lo", pa.int64()), ("row_hi", pa.int64()),
                    ("col_lo", pa.int32()), ("col_hi", pa.int32())])
_COMMON = [("id", pa.string()), ("hardware", pa.string()), ("setting_batch", pa.int64()), ("precision", pa.string()),
           ("optimizer", pa.string()), ("measurement_version", pa.int32()), ("measured_at", pa.float64()),
           ("error", pa.string()), ("batch", pa.int64())]
COMPUTE = pa.schema([*_COMMON, ("pool", pa.string()), ("shards", pa.list_(_SHARD)), ("forward", _SPREAD), ("backward", _SPREAD),
                     ("pace", pa.float64()), ("known_to", pa.float64()), ("order", pa.int64())])
"""batch: samples the op ran over. pool: the pool file that holds its tables; a shard's table has the dim given here. The rest as
in ComputeSample."""
COMM = pa.schema([*_COMMON, ("collective", pa.string()), ("payload", pa.string()), ("hosts", pa.int32()),
                  ("widths", pa.list_(pa.int32())), ("start_ms", pa.list_(pa.float64())), ("forward", pa.list_(_SPREAD)),
                  ("backward", pa.list_(_SPREAD)), ("waiting_ms", pa.list_(pa.float64())), ("order", pa.int64()),
                  ("oversubscribed", pa.bool_()), ("busy_ms", pa.float64())])
"""As in CommRequest and CommSample; lists have one entry a rank. Parts from before there was busy_ms have none: it was 0."""


@lru_cache(maxsize=1 << 16)
def _table_digest(table: Table) -> str:
    return files.digest(files.table_to_json(table))


@lru_cache
def _setting_json(setting: Setting) -> dict[str, Any]:
    return files.setting_to_json(setting)


def compute_id(setting: Setting, request: ComputeRequest) -> str:
    shards = [[_table_digest(s.table), s.row_lo, s.row_hi, s.col_lo, s.col_hi] for s in request.shards]
    return files.digest(["compute", MEASUREMENT_VERSION, _setting_json(setting), request.batch, shards])


def comm_id(setting: Setting, request: CommRequest) -> str:
    described = {name: value for name, value in vars(request).items() if name != "busy_ms" or value}  # as before there was one
    return files.digest(["comm", MEASUREMENT_VERSION, _setting_json(setting), described])


def write_pool(folder: str | Path, tables: Sequence[Table]) -> str:
    """Keep a pool beside the parts that speak of it; returns its digest."""
    name = files.digest([files.table_to_json(t) for t in tables])
    path = Path(folder) / f"pool-{name}.json"
    if not path.exists():
        files.write_pool(path, tables)
    return name


def write_compute(folder: str | Path, samples: Sequence[ComputeSample], pool: str) -> Path:
    """Write one part of compute samples over the tables of `pool` (a digest from write_pool)."""
    rows = [{**_common(s, s.request.batch), "pool": pool, "shards": [_shard_row(x) for x in s.request.shards],
             "forward": _spread_row(s.forward), "backward": _spread_row(s.backward), "pace": s.pace, "known_to": s.known_to,
             "order": s.order} for s in samples]
    return _write_part(folder, "compute", rows, COMPUTE)


def write_comm(folder: str | Path, samples: Sequence[CommSample]) -> Path:
    rows = [{**_common(s, s.request.batch), **{k: getattr(s.request, k) for k in ("collective", "payload", "hosts", "busy_ms")},
             "widths": list(s.request.widths), "start_ms": list(s.request.start_ms),
             "forward": s.forward and [_spread_row(x) for x in s.forward],
             "backward": s.backward and [_spread_row(x) for x in s.backward],
             "waiting_ms": s.waiting_ms and list(s.waiting_ms), "order": s.order, "oversubscribed": s.oversubscribed}
            for s in samples]
    return _write_part(folder, "comm", rows, COMM)


def _common(sample: ComputeSample | CommSample, batch: int) -> dict[str, Any]:
    s = sample.setting
    return {"id": sample.id, "hardware": s.hardware, "setting_batch": s.batch, "precision": s.precision,
            "optimizer": s.optimizer, "measurement_version": MEASUREMENT_VERSION, "measured_at": sample.measured_at,
            "error": sample.error, "batch": batch}


def _shard_row(s: Shard) -> dict[str, Any]:
    return {"table": s.table.name, "dim": s.table.dim, "row_lo": s.row_lo, "row_hi": s.row_hi, "col_lo": s.col_lo,
            "col_hi": s.col_hi}


def _spread_row(spread: Spread | None) -> dict[str, Any] | None:
    return spread and dataclasses.asdict(spread)


def _write_part(folder: str | Path, kind: str, rows: list[dict[str, Any]], schema: pa.Schema) -> Path:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    path = Path(folder) / f"{kind}-{hashlib.sha256(content).hexdigest()[:24]}.parquet"
    files.write_atomic(path, content)
    return path


def read_compute(folder: str | Path, setting: Setting | None = None) -> list[ComputeSample]:
    """The compute samples of a folder (of one setting), each id once: best_known of all its timings."""
    return best_known(read_timings(folder, setting))


def read_repeats(folder: str | Path, setting: Setting | None = None) -> list[list[ComputeSample]]:
    """The compute samples of a folder (of one setting) that were timed several times: repeated of all its timings."""
    return repeated(read_timings(folder, setting))


def best_known(samples: Iterable[Sample]) -> list[Sample]:
    """Each id once, in the order of their ids. Where an id was measured several times, a timing is preferred to an error, the
    better known timing to others, and the later one to the earlier."""
    best = {}
    for sample in sorted(samples, key=lambda s: (s.error is None, _worth(s), s.measured_at)):
        best[sample.id] = sample
    return [best[k] for k in sorted(best)]


def _worth(sample: ComputeSample | CommSample) -> float:
    known_to = getattr(sample, "known_to", None)
    return -math.inf if known_to is None else -known_to


def repeated(timings: Iterable[Sample]) -> list[list[Sample]]:
    """What was timed several times (the control sample, a repeatability set), each as all its timings in the order of time; the
    most often timed first."""
    by_id: dict[str, list[Sample]] = {}
    for sample in timings:
        if sample.error is None:
            by_id.setdefault(sample.id, []).append(sample)
    found = [sorted(s, key=lambda x: x.measured_at) for s in by_id.values() if len(s) > 1]
    return sorted(found, key=lambda s: (-len(s), s[0].id))


def read_timings(folder: str | Path, setting: Setting | None = None) -> list[ComputeSample]:
    """All timings and failures of the compute samples of a folder (of one setting)."""
    pools: dict[str, dict[str, Table]] = {}
    tables: dict[tuple[str, str, int, str], Table] = {}

    def table(pool: str, name: str, dim: int, precision: str) -> Table:
        key = (pool, name, dim, precision)
        if key not in tables:
            if pool not in pools:
                pools[pool] = _pool(folder, pool)
            if name not in pools[pool]:
                raise ShardCoreError(f"its pool {pool} has no table {show(name)}")
            tables[key] = dataclasses.replace(pools[pool][name], dim=dim, precision=precision)
        return tables[key]

    def sample(row: dict[str, Any]) -> ComputeSample:
        shards = tuple(Shard(table(row["pool"], s["table"], s["dim"], row["precision"]),
                             s["row_lo"], s["row_hi"], s["col_lo"], s["col_hi"]) for s in row["shards"])
        made = ComputeSample(
            row["id"], row["setting"], ComputeRequest(shards, row["batch"]), _spread(row["forward"]), _spread(row["backward"]),
            row["measured_at"], row["error"], row["pace"], row["known_to"], row["order"])
        _require_own_id(made.id, compute_id(made.setting, made.request))
        return made

    return _samples(folder, "compute", setting, sample)


def _samples(folder: str | Path, kind: str, setting: Setting | None, make: Callable[[dict[str, Any]], Sample]) -> list[Sample]:
    """What `make` makes of all rows of a kind, each timing once. Raises ShardCoreError naming the sample that is none."""
    samples = {}
    for row in _rows(folder, kind, setting):
        try:
            samples[row["id"], row["measured_at"]] = make(row)
        except (TypeError, ShardCoreError) as error:
            said = error if isinstance(error, ShardCoreError) else "it has an entry that is nothing"
            raise ShardCoreError(f"{row['part']} is no part of a dataset, sample {show(row['id'])}: {said}; remove it") from None
    return list(samples.values())


def _require_own_id(found: str, right: str) -> None:
    if found != right:
        raise ShardCoreError(f"its request has the id {right}")


def _pool(folder: str | Path, name: str) -> dict[str, Table]:
    """The tables of a pool, by their names."""
    if not files.DIGEST.fullmatch(name):
        raise ShardCoreError(f"its pool is {show(name)}; it needs the 16 hex digits of a pool's digest")
    return {t.name: t for t in files.read_pool(Path(folder) / f"pool-{name}.json")}


def read_comm(folder: str | Path, setting: Setting | None = None) -> list[CommSample]:
    """The communication samples of a folder (of one setting), as read_compute."""
    return best_known(_comm(folder, setting))


def read_comm_repeats(folder: str | Path, setting: Setting | None = None) -> list[list[CommSample]]:
    """The exchanges of a folder (of one setting) that were timed several times, as read_repeats."""
    return repeated(_comm(folder, setting))


def _comm(folder: str | Path, setting: Setting | None) -> list[CommSample]:
    def sample(row: dict[str, Any]) -> CommSample:
        request = CommRequest(tuple(row["widths"]), row["batch"], tuple(row["start_ms"]), row["collective"], row["payload"],
                              row["hosts"], row["busy_ms"])
        both = [row[k] and tuple(_spread(x) for x in row[k]) for k in ("forward", "backward")]
        made = CommSample(
            row["id"], row["setting"], request, both[0], both[1], row["waiting_ms"] and tuple(row["waiting_ms"]),
            row["measured_at"], row["error"], row["order"], row["oversubscribed"])
        _require_own_id(made.id, comm_id(made.setting, made.request))
        return made

    return _samples(folder, "comm", setting, sample)


def read_ids(folder: str | Path, kind: str) -> set[str]:
    """Ids of the samples that a folder holds timings of ("compute" or "comm"); failed ones are tried again."""
    rows = _rows(folder, kind, None, columns=["id", "error", "measurement_version"])
    return {row["id"] for row in rows if row["error"] is None}


def disturbed_ids(folder: str | Path, tolerance: float) -> set[str]:
    """Ids of compute samples that were timed just once, and are known more than twice as badly as most and as `tolerance`: to be
    measured again. Of fewer than six repeats it is not known how well they are known."""
    found: dict[str, list[float]] = {}
    for row in _rows(folder, "compute", None, columns=["id", "error", "known_to", "measurement_version"]):
        if row["error"] is None:
            found.setdefault(row["id"], []).append(math.inf if row["known_to"] is None else row["known_to"])
    usual = statistics.median([known[0] for known in found.values()]) if found else 0.0
    return {k for k, known in found.items() if len(known) == 1 and 2 * max(tolerance, usual) < known[0] < math.inf}


def usual_ms(folder: str | Path, setting: Setting, request: ComputeRequest) -> float | None:
    """Forward + backward of a request at the usual pace, where a folder holds a timing of it."""
    key = compute_id(setting, request)
    if key not in read_ids(folder, "compute"):
        return None
    return next(s.total_ms for s in read_compute(folder, setting) if s.id == key)


def control(folder: str | Path, setting: Setting) -> Control | None:
    """The control group of a folder's compute samples, and its ms at the usual pace; None where too little was measured to tell
    it from others."""
    repeats = read_repeats(folder, setting)
    if not has_control(repeats):
        return None
    return repeats[0][0].request, statistics.median(s.total_ms for s in repeats[0])


def has_control(repeats: Sequence[Sequence[ComputeSample]]) -> bool:
    """Whether the first of what was timed several times (see `repeated`) is the control group: more than twice as often as any
    other, as which a repeatability set is not."""
    first, second, *_ = [*map(len, repeats), 0, 0]
    return first >= _FEWEST_OF_CONTROL and first > 2 * second


def merge_parts(folder: str | Path) -> None:
    """Make one part of each kind out of all (a few of very many samples), dropping none of their samples. Killed in between, both
    are there, which reads the same; done again on the same samples, it gives the same file. Of failures, the last stays where
    nothing was timed; what a killed writer left unfinished an hour ago is removed."""
    for unfinished in (p for p in Path(folder).glob(".*.tmp") if _UNFINISHED.fullmatch(p.name)):
        with suppress(FileNotFoundError):  # its writer was faster
            if time.time() - unfinished.lstat().st_mtime > 3600:
                unfinished.unlink()
    for kind, schema, read in (("compute", COMPUTE, read_timings), ("comm", COMM, _comm)):
        parts = {path: rows for path, rows in _read_parts(folder, kind).items() if rows}
        if len(parts) < 2:
            continue
        read(folder, None)  # one sample that is none would take the good ones of other parts with it
        rows = {(r["id"], r["measured_at"]): r for part in parts.values() for r in part}
        last = {r["id"]: k for k, r in sorted(rows.items(), key=lambda x: (x[1]["error"] is None, x[1]["measured_at"]))}
        kept = [k for k in sorted(rows) if rows[k]["error"] is None or last[k[0]] == k]
        merged = {_write_part(folder, kind, [rows[k] for k in kept[i:i + _PART_ROWS]], schema)
                  for i in range(0, len(kept), _PART_ROWS)}
        for path in merged:
            _read_part(path, schema, None)  # what cannot be read replaces nothing
        for path in set(parts) - merged:
            path.unlink(missing_ok=True)


def settings(folder: str | Path) -> list[Setting]:
    """The settings that a folder holds compute samples of."""
    columns = ["hardware", "setting_batch", "precision", "optimizer", "measurement_version"]
    found = {row["setting"] for row in _rows(folder, "compute", None, columns)}
    return sorted(found, key=str)


def _rows(folder: str | Path, kind: str, setting: Setting | None, columns: list[str] | None = None) -> Iterable[dict[str, Any]]:
    """Rows whose timings mean what they mean today; where all of a setting is read, it and its `part` are entries too."""
    for path, rows in _read_parts(folder, kind, columns).items():
        for row in rows:
            if row["measurement_version"] != MEASUREMENT_VERSION:
                continue
            if "hardware" in row:
                row |= {"part": path, "setting": _setting(row, path)}
            if setting is None or row["setting"] == setting:
                yield row


def _read_parts(folder: str | Path, kind: str, columns: list[str] | None = None) -> dict[Path, list[dict[str, Any]]]:
    """All parts of a kind, read again from the start where another process merges them meanwhile."""
    while True:
        paths = _parts(folder, kind)
        try:
            return {path: _read_part(path, COMPUTE if kind == "compute" else COMM, columns) for path in paths}
        except ShardCoreError:
            if _parts(folder, kind) == paths:
                raise


def _parts(folder: str | Path, kind: str) -> list[Path]:
    """The files with a part's name, in order. Raises ShardCoreError for a link that leads nowhere."""
    found = []
    for path in sorted(Path(folder).glob(f"{kind}-*.parquet")):
        if not _PART.fullmatch(path.name):
            raise ShardCoreError(f"{path} has no name of a part, {kind}-<24 hex digits>.parquet; remove it")
        if path.is_symlink() and not path.exists():
            raise ShardCoreError(f"{path} is a link that leads nowhere; remove it")
        found.append(path)
    return found


def _read_part(path: Path, schema: pa.Schema, columns: list[str] | None) -> list[dict[str, Any]]:
    """Rows of a part; none of one whose timings mean something else (another MEASUREMENT_VERSION)."""
    content = read_bytes(path)
    if f"{hashlib.sha256(content).hexdigest()[:24]}.parquet" != path.name.split("-", 1)[1]:
        raise ShardCoreError(f"{path} does not match the digest in its name; it was cut short or edited. Remove it, and a "
                             "rerun of `measure` measures only what it held")
    try:
        rows = _rows_of(content, schema, columns, path)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        if isinstance(error, ShardCoreError):
            raise
        raise ShardCoreError(f"{path} is no part of a dataset ({type(error).__name__}: {error}); remove it") from None
    return rows


def _rows_of(content: bytes, schema: pa.Schema, columns: list[str] | None, path: Path) -> list[dict[str, Any]]:
    file = pq.ParquetFile(pa.BufferReader(content))
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    columns_of = [group.column(i) for group in groups for i in range(group.num_columns)]
    _require_size(path, "values", [c.num_values for c in columns_of], len(content), _MOST_VALUES)
    _require_size(path, "bytes", [max(g.total_byte_size, 0) for g in groups], 0, (MOST_FILE_BYTES, 0))
    text = [file.schema.column(i).path for i in range(len(file.schema)) if file.schema.column(i).physical_type == "BYTE_ARRAY"]
    # Text by its different values, each once. Threads of Arrow's can abort a process that ends: read_table starts one even so.
    table = pq.ParquetFile(pa.BufferReader(content), read_dictionary=text).read(use_threads=False)
    written_out = [_characters(chunk) for column in table.columns for chunk in column.chunks]
    _require_size(path, "characters", written_out, len(content), _MOST_TEXT)
    if "measurement_version" in table.schema.names:
        if MEASUREMENT_VERSION not in table.column("measurement_version").unique().to_pylist():
            return []
    if schema is COMM and "busy_ms" not in table.schema.names:
        table = table.append_column("busy_ms", pa.array([0.0] * len(table), pa.float64()))
    missing = [f.name for f in schema if f.name not in table.schema.names]
    if missing:
        raise ShardCoreError(f"{path} lacks the column {missing[0]!r} of this ShardCore's dataset format")
    if unknown := sorted(set(table.schema.names) - set(schema.names)):
        raise ShardCoreError(f"{path} has an unknown column {show(unknown[0])}; known are {', '.join(schema.names)}")
    for field in schema:  # (a part from before there was busy_ms has none)
        found = file.schema_arrow.field(field.name).type if field.name in file.schema_arrow.names else field.type
        if found != field.type:
            raise ShardCoreError(f"{path} has column {field.name!r} of type {found}; it needs {field.type}")
    nulls = [name for name in schema.names if name not in _OPTIONAL and table.column(name).null_count]
    if nulls:
        raise ShardCoreError(f"{path} has nothing in column {nulls[0]!r} of some sample")
    return (table.select(columns) if columns else table).to_pylist()


def _require_size(path: Path, what: str, sizes: Sequence[int], content: int, most: tuple[int, int]) -> None:
    limit = most[0] + most[1] * content
    if min(sizes, default=0) < 0 or sum(sizes) > limit:
        raise ShardCoreError(f"{path} has {sum(sizes):,} {what}; a part of its size has at most {limit:,}")


def _characters(array: pa.Array) -> int:
    """Of all text in an array that was read with dictionaries, written out."""
    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary)
        return pc.sum(pc.take(lengths, array.indices).cast(pa.int64())).as_py() or 0
    if pa.types.is_struct(array.type):
        return sum(_characters(x) for x in array.flatten())
    return _characters(array.flatten()) if pa.types.is_list(array.type) else 0


def _setting(row: dict[str, Any], path: Path) -> Setting:
    try:
        return Setting(row["hardware"], row["setting_batch"], row["precision"], row["optimizer"])
    except ShardCoreError as error:
        raise ShardCoreError(f"{path}: {error}") from None


def _spread(row: dict[str, Any] | None) -> Spread | None:
    return row and Spread(**row)
