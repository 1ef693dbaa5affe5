"""Datasets: a folder of measured samples that only grows.

  pool-<digest>.json            the tables in the samples of some parts
  compute-*, comm-*.parquet     samples of ops and of collectives, see dataset_parts.py
  replays/<name>/               steps of a problem's plans, see replays.py

A sample's id is the digest of its setting, its request and the version of what its timing means. So a request
has the same id wherever and whenever it was measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting, Shard, Table
from shardcore.core.validation import require, short_repr
from shardcore.io import dataset_parts, files
from shardcore.io.dataset_parts import MEASUREMENT_VERSIONS, SCHEMAS, SETTING_COLUMNS, Row
from shardcore.io.measurements import (
    CollectiveRequest,
    CollectiveSample,
    ComputeRequest,
    ComputeSample,
    EmulatedLinks,
    TimingSpread,
)

REPLAYS = "replays"
_USUAL = {"busy_ms": 0.0, "group": "world", "emulated": None}
"""Fields of a CollectiveRequest that enter its id only if they have other values."""
_COLUMNS = {kind: frozenset(schema.names) for kind, schema in SCHEMAS.items()}
_OVER_HOSTS = 2
"""Version of times over several hosts, raised by hand when their meaning changes. In 2, ranks start together."""
_FEWEST_OF_REFERENCE = 4
"""Fewest timings of a reference op, by which it is recognised."""
ReferenceOp = tuple[ComputeRequest, float]
"""The op that runs throughout to show the machine's slowdown, and its usual ms."""
Sample = TypeVar("Sample", ComputeSample, CollectiveSample)


# --- ids ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
def _table_digest(table: Table) -> str:
    """Digest of a table's JSON, kept for repeated use."""
    return files.json_digest(files.table_to_json(table))


@lru_cache
def _setting_json(setting: Setting) -> dict[str, Any]:
    """JSON of a setting, kept for repeated use."""
    return files.setting_to_json(setting)


def compute_id(setting: Setting, request: ComputeRequest) -> str:
    """Id of the measurement of a fused op: digest of setting, request and measurement version."""
    shards = [[_table_digest(s.table), s.row_lo, s.row_hi, s.col_lo, s.col_hi] for s in request.shards]
    return files.json_digest(
        ["compute", MEASUREMENT_VERSIONS["compute"], _setting_json(setting), request.batch, shards]
    )


def collective_id(setting: Setting, request: CollectiveRequest) -> str:
    """Id of the measurement of a collective: digest of setting, request and measurement version."""
    described = {
        name: value for name, value in vars(request).items() if name not in _USUAL or value != _USUAL[name]
    }
    if request.emulated:
        # Fields of pods count only with pods, so that exchanges without any keep the ids of earlier versions.
        described["emulated"] = {
            name: value
            for name, value in dataclasses.asdict(request.emulated).items()
            if request.pods > 1 or "pod" not in name
        }
    if request.hosts > 1:
        described["method"] = _OVER_HOSTS
    return files.json_digest(["comm", MEASUREMENT_VERSIONS["comm"], _setting_json(setting), described])


def split_of_sample(sample_id: str) -> str:
    """Split of a sample, by a hash of its id: "train", "validation" or "test", in the ratio 8 : 1 : 1.

    It depends on the id only. So a sample keeps its split as the dataset grows.
    """
    # A hash, not a random draw: no state, and the same on every machine.
    part = int(hashlib.sha256(sample_id.encode()).hexdigest(), 16) % 10
    return "train" if part < 8 else ("validation" if part == 8 else "test")


# --- writing ------------------------------------------------------------------------------------------------


def write_pool(folder: str | Path, tables: Sequence[Table]) -> str:
    """Write a pool of tables to the folder of the dataset whose samples use them. Returns the pool's digest."""
    name = files.json_digest([files.table_to_json(t) for t in tables])
    path = Path(folder) / f"pool-{name}.json"
    try:
        is_there = files.read_pool(path) == tuple(tables)
    except ShardCoreError:
        # Missing or damaged. Its parts could not be read without it.
        is_there = False
    if not is_there:
        files.write_pool(path, tables)
    return name


def write_compute_samples(folder: str | Path, samples: Sequence[ComputeSample], pool: str) -> Path:
    """Write compute samples to a dataset folder as one Parquet part.

    pool: digest of the pool with the samples' tables, from write_pool.
    """
    rows = [
        {
            **_common_columns(s, "compute"),
            "pool": pool,
            "shards": [
                {
                    "table": x.table.name,
                    "dim": x.table.dim,
                    "row_lo": x.row_lo,
                    "row_hi": x.row_hi,
                    "col_lo": x.col_lo,
                    "col_hi": x.col_hi,
                }
                for x in s.request.shards
            ],
            "forward": s.forward and dataclasses.asdict(s.forward),
            "backward": s.backward and dataclasses.asdict(s.backward),
            "sequence": all(x.table.sequence for x in s.request.shards),
        }
        for s in samples
    ]
    return dataset_parts.write_part(folder, "compute", rows)


def write_collective_samples(folder: str | Path, samples: Sequence[CollectiveSample]) -> Path:
    """Write samples of collectives to a dataset folder as one Parquet part."""
    rows = [
        {
            **_common_columns(s, "comm"),
            "emulated_between_gbit_s": s.request.emulated and s.request.emulated.between_gbit_s,
            "emulated_within_gbit_s": s.request.emulated and s.request.emulated.within_gbit_s,
            "emulated_pod_gbit_s": s.request.emulated and s.request.emulated.pod_gbit_s,
            "forward": s.forward and [dataclasses.asdict(x) for x in s.forward],
            "backward": s.backward and [dataclasses.asdict(x) for x in s.backward],
            "emulated_pods": s.request.pods if s.request.pods > 1 else None,
        }
        for s in samples
    ]
    return dataset_parts.write_part(folder, "comm", rows)


def _common_columns(sample: ComputeSample | CollectiveSample, kind: str) -> Row:
    """Columns of the setting, and those named as fields of the sample and of its request. Times are plain values."""
    return {
        **{column: getattr(sample.setting, name) for name, column in SETTING_COLUMNS.items()},
        "measurement_version": MEASUREMENT_VERSIONS[kind],
        **_named_columns(vars(sample.request), kind, type(sample.request)),
        **_named_columns(vars(sample), kind, type(sample)),
    }


def _named_columns(values: Mapping[str, Any], kind: str, cls: type) -> Row:
    """Values of the columns that are named as fields of a dataclass, from a row or from an instance's fields."""
    return {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in _COLUMNS[kind]}


# --- reading ------------------------------------------------------------------------------------------------


def read_compute_samples(folder: str | Path, setting: Setting | None = None) -> list[ComputeSample]:
    """Compute samples of a dataset folder (of one setting), each with its best timing."""
    return most_precise_samples(read_compute_timings(folder, setting))


def read_collective_samples(folder: str | Path, setting: Setting | None = None) -> list[CollectiveSample]:
    """Samples of collectives in a dataset folder (of one setting), each with its best timing."""
    return most_precise_samples(_read_collective_timings(folder, setting))


def most_precise_samples(samples: Iterable[Sample]) -> list[Sample]:
    """One sample for each id, sorted by id: the best of repeated timings.

    A timing without error is preferred, then the most precise one, then the latest.
    """

    def timing_precision(sample: Sample) -> float:
        # Collectives have no confidence interval, and some compute samples lack it.
        relative_ci = getattr(sample, "relative_ci", None)
        return -math.inf if relative_ci is None else -relative_ci

    best = {}
    # In rising order of preference, so that the best one of each id is written last.
    for sample in sorted(samples, key=lambda s: (s.error is None, timing_precision(s), s.measured_at)):
        best[sample.id] = sample
    return [best[k] for k in sorted(best)]


def repeated_samples(timings: Iterable[Sample]) -> list[list[Sample]]:
    """Samples that were timed several times, grouped by id, the most often timed first; each group in order of time.

    They are the reference op, and samples that were measured again to show how far timings agree.
    """
    by_id: dict[str, list[Sample]] = {}
    for sample in timings:
        if sample.error is None:
            by_id.setdefault(sample.id, []).append(sample)
    return sorted(
        (sorted(s, key=lambda x: x.measured_at) for s in by_id.values() if len(s) > 1),
        key=lambda s: (-len(s), s[0].id),
    )


def read_compute_timings(
    folder: str | Path, setting: Setting | None = None, most: int | None = None
) -> list[ComputeSample]:
    """All timings and failures of the compute samples in a dataset folder (of one setting).

    most: number of timings and failures to read. None: all. A merged part is sorted by id, which is a digest, so its
      first rows are a random subset.
    """
    pools: dict[str, dict[str, Table]] = {}
    tables: dict[tuple[str, str, int, str, bool], Table] = {}

    def pool_table(pool: str, name: str, dim: int, precision: str, sequence: bool) -> Table:
        key = (pool, name, dim, precision, sequence)
        # Equal tables are one object, as thousands of samples share a few tables.
        if key not in tables:
            if pool not in pools:
                require(
                    files.DIGEST.fullmatch(pool) is not None,
                    f"its pool is {short_repr(pool)}; it needs the 16 hex digits of a pool's digest",
                )
                pools[pool] = {t.name: t for t in files.read_pool(Path(folder) / f"pool-{pool}.json")}
            require(name in pools[pool], f"its pool {pool} has no table {short_repr(name)}")
            tables[key] = dataclasses.replace(
                pools[pool][name], dim=dim, precision=precision, sequence=sequence
            )
        return tables[key]

    def build_sample(row: Row) -> ComputeSample:
        shards = tuple(
            Shard(
                pool_table(row["pool"], s["table"], s["dim"], row["precision"], row["sequence"]),
                s["row_lo"],
                s["row_hi"],
                s["col_lo"],
                s["col_hi"],
            )
            for s in row["shards"]
        )
        given = {
            **_named_columns(row, "compute", ComputeSample),
            "setting": row["setting"],
            "request": ComputeRequest(shards, row["batch"]),
            "forward": row["forward"] and TimingSpread(**row["forward"]),
            "backward": row["backward"] and TimingSpread(**row["backward"]),
        }
        return ComputeSample(**given)

    return _build_samples(folder, "compute", setting, build_sample, compute_id, most)


def _read_collective_timings(folder: str | Path, setting: Setting | None) -> list[CollectiveSample]:
    """All timings and failures of the samples of collectives in a dataset folder (of one setting)."""

    def build_sample(row: Row) -> CollectiveSample:
        between, within = row["emulated_between_gbit_s"], row["emulated_within_gbit_s"]
        require(
            between is not None or within is None,
            f"it has emulated_within_gbit_s {within} only; it needs emulated_between_gbit_s beside it",
        )
        request = CollectiveRequest(
            **_named_columns(row, "comm", CollectiveRequest),
            emulated=None
            if between is None
            else EmulatedLinks(between, within, row["emulated_pods"] or 1, row["emulated_pod_gbit_s"]),
        )
        given = {
            **_named_columns(row, "comm", CollectiveSample),
            "setting": row["setting"],
            "request": request,
            "forward": row["forward"] and tuple(TimingSpread(**x) for x in row["forward"]),
            "backward": row["backward"] and tuple(TimingSpread(**x) for x in row["backward"]),
        }
        return CollectiveSample(**given)

    return _build_samples(folder, "comm", setting, build_sample, collective_id)


def _build_samples(
    folder: str | Path,
    kind: str,
    setting: Setting | None,
    make: Callable[[Row], Sample],
    identify: Callable[[Setting, Any], str],
    most: int | None = None,
) -> list[Sample]:
    """Samples built by `make` from a dataset's rows of a kind (the first `most` rows), each timing once.

    identify: (setting, request) -> id of the sample.

    Raises ShardCoreError naming an invalid sample.
    """
    samples = {}
    for row in islice(dataset_parts.read_rows(folder, kind, setting), most):
        try:
            sample = make(row)
            # If the request was edited, a model would learn its timing for another request.
            right = identify(sample.setting, sample.request)
            require(sample.id == right, f"its request has the id {right}")
            # By time, too, as a timing is in two parts after an interrupted merge.
            samples[row["id"], row["measured_at"]] = sample
        except (TypeError, ShardCoreError) as error:
            reason = error if isinstance(error, ShardCoreError) else "it has an entry that is nothing"
            raise ShardCoreError(
                f"{row['part']} is no part of a dataset, sample {short_repr(row['id'])}: {reason}; remove it"
            ) from None
    return list(samples.values())


def merge_parts(folder: str | Path) -> None:
    """Merge the Parquet parts of a dataset folder. Raises ShardCoreError naming an invalid sample."""
    dataset_parts.merge_parts(
        folder,
        lambda kind: (
            read_compute_timings(folder) if kind == "compute" else _read_collective_timings(folder, None)
        ),
    )


# --- questions ----------------------------------------------------------------------------------------------


def dataset_settings(folder: str | Path) -> list[Setting]:
    """Settings of the compute samples in a dataset folder."""
    rows = dataset_parts.read_rows(
        folder,
        "compute",
        columns=[*SETTING_COLUMNS.values(), "measurement_version"],
    )
    return sorted({row["setting"] for row in rows}, key=str)


def read_timed_ids(folder: str | Path, kind: str) -> set[str]:
    """Ids of a dataset's samples of a kind that have a timing. Failed samples are left out, to be measured again."""
    rows = dataset_parts.read_rows(folder, kind, None, columns=["id", "error", "measurement_version"])
    return {row["id"] for row in rows if row["error"] is None}


def disturbed_sample_ids(folder: str | Path, tolerance: float) -> set[str]:
    """Ids of compute samples in a dataset with an outlying confidence interval, to be measured again.

    They were timed once, with a confidence interval over twice as wide as both the usual one and `tolerance`.
    Samples of fewer than six repeats have no interval, and are left alone.
    """
    columns, intervals = ["id", "error", "relative_ci", "measurement_version"], {}
    for row in dataset_parts.read_rows(folder, "compute", None, columns):
        if row["error"] is None:
            intervals.setdefault(row["id"], []).append(
                math.inf if row["relative_ci"] is None else row["relative_ci"]
            )
    # On a noisy machine all intervals are wide, and only outliers are worth repeating.
    usual = statistics.median([widths[0] for widths in intervals.values()]) if intervals else 0.0
    most = 2 * max(tolerance, usual)
    return {k for k, widths in intervals.items() if len(widths) == 1 and most < widths[0] < math.inf}


def median_ms(folder: str | Path, setting: Setting, request: ComputeRequest) -> float | None:
    """Median forward + backward ms of a fused op at the machine's usual speed; None if the dataset folder has no
    timing."""
    key = compute_id(setting, request)
    return next(
        (s.total_ms for s in read_compute_samples(folder, setting) if s.id == key and s.error is None), None
    )


def reference_op(folder: str | Path, setting: Setting) -> ReferenceOp | None:
    """Reference op of a dataset's compute samples and its usual ms; None if too few timings identify the op."""
    if not has_reference_op(repeats := repeated_samples(read_compute_timings(folder, setting))):
        return None
    return repeats[0][0].request, statistics.median(s.total_ms for s in repeats[0])


def has_reference_op(repeats: Sequence[Sequence[ComputeSample]]) -> bool:
    """Tell if the most often timed sample is the reference op, which runs throughout a measurement.

    Samples carry no mark of their purpose, so counts decide: it was timed more than twice as often as any
    other.
    """
    first, second, *_ = [*map(len, repeats), 0, 0]
    return first >= _FEWEST_OF_REFERENCE and first > 2 * second
