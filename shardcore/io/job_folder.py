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

import numpy as np

from shardcore.core.errors import ShardCoreError, shortened
from shardcore.core.types import Plan, Problem, Table
from shardcore.core.validation import shown
from shardcore.io import files, schema, writing
from shardcore.io.envelope import document, open_document, seal, unseal
from shardcore.io.kineto import SUFFIXES
from shardcore.io.measurements import Spread
from shardcore.step import access

SCHEMA = "job"
JOB_JSON, PROBLEM_JSON, PLAN_JSON = "job.json", "problem.json", "plan.json"
_STEP = re.compile(r"step-(\d{8,})")
_TRACE = re.compile(r"rank-(\d+)\.trace\.json(\.gz)?")


@dataclass(frozen=True)
class JobFacts:
    """Facts of a job, which rank 0 writes.

    world_size: ranks.
    features: of each table of the problem, by its name.
    versions: of torch, torchrec and fbgemm_gpu.
    """

    world_size: int
    features: Mapping[str, tuple[str, ...]]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class JobStep:
    """A traced step of a job, without its traces.

    step_ms: of steps without tracing, by rank.
    remarks: a line on each thing that is missing.
    """

    folder: Path
    facts: JobFacts
    problem: Problem
    plan: Plan
    step_ms: Mapping[int, Spread]
    remarks: tuple[str, ...]

    @property
    def total_ms(self) -> float | None:
        """The slowest rank's median step without tracing. None where no rank has timed any."""
        return max((spread.median_ms for spread in self.step_ms.values()), default=None)


# --- written by the job -------------------------------------------------------------------------------------


def step_folder(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step-{step:08d}"


def is_step(name: str) -> bool:
    """True for the name of a folder of `step_folder`."""
    return _STEP.fullmatch(name) is not None


def step_number(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def trace_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.trace{SUFFIXES[-1]}"


def write_facts(folder: Path, facts: JobFacts, problem: Problem, plan: Plan) -> None:
    files.write_problem(folder / PROBLEM_JSON, problem)
    files.write_plan(folder / PLAN_JSON, plan, problem)
    writing.write_json(folder / JOB_JSON, document(SCHEMA, seal(asdict(facts))))


def write_rank(
    folder: Path, rank: int, step_ms: Spread | None, lookups: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    """Times of a rank's steps, and the ids [L] and lengths [S] of each feature of one of its batches."""
    if step_ms:
        writing.write_json(folder / f"rank-{rank}.steps.json", asdict(step_ms))
    if lookups:
        content = io.BytesIO()
        arrays = {f"ids:{name}": ids for name, (ids, _) in lookups.items()}
        arrays |= {f"lengths:{name}": lengths for name, (_, lengths) in lookups.items()}
        np.savez(content, **arrays)  # type: ignore[arg-type]
        writing.write_atomic(folder / f"rank-{rank}.lookups.npz", content.getvalue())


# --- read -----------------------------------------------------------------------------------------------------


def traced_steps(folder: str | Path) -> list[Path]:
    """Subfolders of a job's folder that have the traces of all ranks, oldest first.

    One whose JOB_JSON is damaged is among them, and `read_step` refuses it.
    """
    found = []
    for name in schema.names_in(Path(folder)):
        step = Path(folder) / name
        if is_step(name) and JOB_JSON in (names := schema.names_in(step)):
            n_ranks = len({int(m[1]) for n in names if (m := _TRACE.fullmatch(n))})
            with suppress(ShardCoreError):  # one damaged step must not hide the others
                if n_ranks < _read_facts(step).world_size:
                    continue
            found.append(step)
    return sorted(found, key=step_number)


def newest_step(folder: Path) -> Path:
    """The newest traced step of all ranks in a job's folder, or else of some. A folder without any is its own."""
    steps = sorted((folder / n for n in schema.names_in(folder) if is_step(n)), key=step_number)
    return [folder, *steps, *traced_steps(folder)][-1]


def read_step(folder: str | Path) -> JobStep:
    """A traced step's problem, with the lookups of all ranks, its plan and its times.

    Raises ShardCoreError for files that are missing, cut short or edited.
    """
    folder = Path(folder)
    facts, problem = _read_facts(folder), files.read_problem(folder / PROBLEM_JSON)
    if missing := sorted({t.name for t in problem.tables} ^ {n for n, of in facts.features.items() if of}):
        raise ShardCoreError(f"{folder / JOB_JSON} and {PROBLEM_JSON} differ in tables {missing[:3]}")
    if facts.world_size != len(problem.topology):
        raise ShardCoreError(
            f"{folder / JOB_JSON} has {facts.world_size} ranks; {PROBLEM_JSON} has {len(problem.topology)} devices"
        )
    # A plan that ran has fitted, whatever ShardCore counts.
    plan = files.read_valid_plan(folder / PLAN_JSON, problem, fits=False)
    problem, remarks = _with_lookups(folder, problem, facts)
    tables = {t.name: t for t in problem.tables}
    plan = replace(
        plan,
        placements=tuple(
            replace(p, shard=replace(p.shard, table=tables[p.shard.table.name])) for p in plan.placements
        ),
    )
    step_ms = {
        rank: schema.build(Spread, schema.read_json(path), str(path))
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
    path = folder / JOB_JSON
    return schema.build(JobFacts, unseal(open_document(path, SCHEMA), path), str(path))


def _with_lookups(folder: Path, problem: Problem, facts: JobFacts) -> tuple[Problem, tuple[str, ...]]:
    """The problem with pooling and reuse as all ranks' samples have them; as it is where some are missing."""
    paths = [folder / f"rank-{rank}.lookups.npz" for rank in range(facts.world_size)]
    there = [path for path in paths if path.exists()]
    if missing := [path.name for path in paths if path not in there]:
        return problem, (
            f"lookups of {len(there)} of {len(paths)} ranks: {folder.name} has no "
            f"{shortened(', '.join(missing), 80)}; reuse of ids is a guess",
        )
    ranks = [read_lookups(path) for path in paths]
    try:
        tables = tuple(_measured(t, facts.features[t.name], ranks) for t in problem.tables)
    except KeyError as error:
        raise ShardCoreError(f"{folder} has no lookups of feature {error}") from None
    idle = [table.name for table in tables if not table.pooling]
    return replace(problem, tables=tables), (
        f"tables {shown(idle)} have no ids in the traced batches: they count as never looked up",
    ) * bool(idle)


def _measured(
    table: Table, features: Sequence[str], ranks: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]
) -> Table:
    ids = np.concatenate([rank[f][0] for rank in ranks for f in features])
    if not (samples := sum(len(rank[features[0]][1]) for rank in ranks)):
        raise ShardCoreError(f"lookups of feature {features[0]!r} have no samples")
    return replace(table, pooling=len(ids) / samples, access=access.reuse_of(ids, samples))


def read_lookups(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The ids [L] and lengths [S] of each feature of a rank's batch."""
    try:
        content = io.BytesIO(schema.read_bytes(path))
        schema.require_stored(path)
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
