"""A folder in which a running job leaves its traces (torchrec/profiler.py), one subfolder for each traced step.

  step-00000021/
    job.json                ranks, and the features of each table; rank 0 writes it and the next two
    problem.json            as files.write_problem; lookups are of rank 0's samples
    plan.json               the plan in use, as files.write_plan
    rank-0.trace.json.gz    Kineto's trace, of each rank
    rank-0.lookups.npz      the ids of a batch of the rank, as it enters the collections
    rank-0.steps.json       times of steps without tracing, of each rank

Shapes: L ids of a feature, S samples of a rank.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from shardcore.core.errors import ShardCoreError, shorten
from shardcore.core.types import Plan, Problem, Table
from shardcore.core.validation import MOST_DEVICES, number_within, require, short_repr
from shardcore.io import files, schema, writing
from shardcore.io.envelope import read_record, sealed_document
from shardcore.io.kineto import SUFFIXES
from shardcore.io.measurements import TimingSpread
from shardcore.step import access

SCHEMA = "job"
JOB_JSON, PROBLEM_JSON, PLAN_JSON = "job.json", "problem.json", "plan.json"
_STEP = re.compile(r"step-(\d{8,})")
_TRACE = re.compile(r"rank-(\d+)\.trace\.json(\.gz)?")


@dataclass(frozen=True)
class JobFacts:
    """Facts of a traced training job, written by rank 0.

    world_size: ranks.
    features: of each table of the problem, by its name.
    versions: of torch, torchrec and fbgemm_gpu.
    """

    world_size: Annotated[int, number_within(1, MOST_DEVICES)]
    features: Mapping[str, tuple[str, ...]]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class JobStep:
    """Content of a traced step's folder, without the profiler traces.

    step_ms: of steps without tracing, by rank.
    remarks: a line on each thing that is missing.
    """

    folder: Path
    facts: JobFacts
    problem: Problem
    plan: Plan
    step_ms: Mapping[int, TimingSpread]
    remarks: tuple[str, ...]

    @property
    def total_ms(self) -> float | None:
        """Median ms of a step without tracing, on the slowest rank; None where no rank has timed any."""
        return max((spread.median_ms for spread in self.step_ms.values()), default=None)


# --- written by the job -------------------------------------------------------------------------------------


def step_folder(folder: str | Path, step: int) -> Path:
    """Folder of a traced training step, in a job's folder."""
    return Path(folder) / f"step-{step:08d}"


def is_step_folder_name(name: str) -> bool:
    """Tell if a name is that of the folder of a traced training step."""
    return _STEP.fullmatch(name) is not None


def step_number(folder: Path) -> int:
    """Number of a traced training step, from its folder's name."""
    return int(folder.name.removeprefix("step-"))


def trace_path(folder: Path, rank: int) -> Path:
    """Path of a rank's profiler trace in the folder of a traced step."""
    return folder / f"rank-{rank}.trace{SUFFIXES[-1]}"


def write_facts(folder: Path, facts: JobFacts, problem: Problem, plan: Plan) -> None:
    """Write the problem, the plan and other facts of a training job to the folder of a traced step."""
    files.write_problem(folder / PROBLEM_JSON, problem)
    files.write_plan(folder / PLAN_JSON, plan, problem)
    writing.write_json(folder / JOB_JSON, sealed_document(SCHEMA, asdict(facts)))


def write_rank_measurements(
    folder: Path,
    rank: int,
    step_ms: TimingSpread | None,
    lookups: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> None:
    """Write a rank's step times, and the ids [L] and lengths [S] of each feature of one of its batches."""
    if step_ms:
        writing.write_json(folder / f"rank-{rank}.steps.json", asdict(step_ms))
    if lookups:
        content = io.BytesIO()
        arrays = {f"ids:{name}": ids for name, (ids, _) in lookups.items()}
        arrays |= {f"lengths:{name}": lengths for name, (_, lengths) in lookups.items()}
        np.savez(content, **arrays)  # type: ignore[arg-type]
        writing.write_atomic(folder / f"rank-{rank}.lookups.npz", content.getvalue())


# --- read -----------------------------------------------------------------------------------------------------


def complete_step_folders(folder: str | Path) -> list[Path]:
    """Folders of a job's traced steps that have the traces of all ranks, oldest first.

    One whose JOB_JSON is damaged is among them, and `read_step` refuses it.
    """
    found = []
    for name in schema.list_names(Path(folder)):
        step = Path(folder) / name
        if is_step_folder_name(name) and JOB_JSON in (names := schema.list_names(step)):
            n_ranks = len({int(m[1]) for n in names if (m := _TRACE.fullmatch(n))})
            with suppress(ShardCoreError):  # one damaged step must not hide the others
                if n_ranks < _read_facts(step).world_size:
                    continue
            found.append(step)
    return sorted(found, key=step_number)


def newest_step_folder(folder: Path) -> Path:
    """Folder of a job's newest traced step with traces of all ranks, or else of some; the job's folder itself if there
    is none."""
    steps = sorted((folder / n for n in schema.list_names(folder) if is_step_folder_name(n)), key=step_number)
    return [folder, *steps, *complete_step_folders(folder)][-1]


def read_step(folder: str | Path) -> JobStep:
    """Read a traced step: its problem, with access statistics from all ranks' lookups, its plan and its times.

    Raises ShardCoreError for files that are missing, cut short or edited.
    """
    folder = Path(folder)
    facts, problem = _read_facts(folder), files.read_problem(folder / PROBLEM_JSON)
    if missing := sorted({t.name for t in problem.tables} ^ {n for n, of in facts.features.items() if of}):
        raise ShardCoreError(f"{folder / JOB_JSON} and {PROBLEM_JSON} differ in tables {missing[:3]}")
    require(
        facts.world_size == len(problem.topology),
        f"{folder / JOB_JSON} has {facts.world_size} ranks; {PROBLEM_JSON} has {len(problem.topology)} devices",
    )
    # A plan that ran has fitted, whatever ShardCore counts.
    plan = files.read_valid_plan(folder / PLAN_JSON, problem, fits=False)
    problem, remarks = _with_measured_access(folder, problem, facts)
    tables = {t.name: t for t in problem.tables}
    plan = replace(
        plan,
        placements=tuple(
            replace(p, shard=replace(p.shard, table=tables[p.shard.table.name])) for p in plan.placements
        ),
    )
    step_ms = {
        rank: schema.build_record(TimingSpread, schema.read_json(path), str(path))
        for rank in range(facts.world_size)
        if (path := folder / f"rank-{rank}.steps.json").exists()
    }
    if not step_ms:
        remarks = (
            *remarks,
            "no steps without tracing were timed: the traced step counts, with what tracing takes",
        )
    return JobStep(folder, facts, problem, plan, step_ms, remarks)


def _read_facts(folder: Path) -> JobFacts:
    """Read the facts of a traced training job."""
    return read_record(JobFacts, folder / JOB_JSON, SCHEMA)


def _with_measured_access(folder: Path, problem: Problem, facts: JobFacts) -> tuple[Problem, tuple[str, ...]]:
    """The problem with pooling and reuse from all ranks' traced lookups, and remarks; unchanged if a rank's are
    missing."""
    paths = [folder / f"rank-{rank}.lookups.npz" for rank in range(facts.world_size)]
    there = [path for path in paths if path.exists()]
    if missing := [path.name for path in paths if path not in there]:
        return problem, (
            f"lookups of {len(there)} of {len(paths)} ranks: {folder.name} has no "
            f"{shorten(', '.join(missing), 80)}; reuse of ids is a guess",
        )
    ranks = [read_lookups(path) for path in paths]
    try:
        tables = tuple(_with_table_statistics(t, facts.features[t.name], ranks) for t in problem.tables)
    except KeyError as error:
        raise ShardCoreError(f"{folder} has no lookups of feature {error}") from None
    idle = [table.name for table in tables if not table.pooling]
    return replace(problem, tables=tables), (
        f"tables {short_repr(idle)} have no ids in the traced batches: they count as never looked up",
    ) * bool(idle)


def _with_table_statistics(
    table: Table, features: Sequence[str], ranks: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]
) -> Table:
    """The table with pooling and reuse from the traced lookups of its features on all ranks."""
    ids = np.concatenate([rank[f][0] for rank in ranks for f in features])
    if not (samples := sum(len(rank[features[0]][1]) for rank in ranks)):
        raise ShardCoreError(f"lookups of feature {features[0]!r} have no samples")
    return replace(table, pooling=len(ids) / samples, access=access.reuse_from_ids(ids, samples))


def read_lookups(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read the ids [L] and lengths [S] of each feature of a rank's traced batch."""
    try:
        content = io.BytesIO(schema.read_bytes(path))
        schema.require_uncompressed_zip(path)
        with np.load(content, allow_pickle=False) as arrays:
            for name in arrays.files:
                if arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu":
                    raise ValueError(f"{name} is no list of whole numbers")
                lengths = name.replace("ids:", "lengths:", 1)
                if lengths != name and np.abs(arrays[lengths]).sum(dtype=float) != len(arrays[name]):
                    raise ValueError(f"{name} has {len(arrays[name])} ids, and {lengths} another sum")
            names = [name.removeprefix("ids:") for name in arrays.files if name.startswith("ids:")]
            return {name: (arrays[f"ids:{name}"], arrays[f"lengths:{name}"]) for name in names}
    except ShardCoreError:
        raise
    except (ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise ShardCoreError(f"{path} has no lookups: {error}") from None
