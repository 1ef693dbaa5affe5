"""Traced steps in a dataset: a folder for each, which training joins with what was measured.

  DATASET/traces/JOB-00001000-DIGEST/
    problem.json    as files.write_problem, with the lookups that the job had
    plan.json       the plan that ran, as files.write_plan
    traced.json     schema shardcore/traced, sealed by a digest: TracedSample without the two

traced.json is written last, so a folder without it holds no sample. No ids and no traces are kept: a sample
is a few KB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from shardcore.core.types import Plan, Problem, Setting
from shardcore.core.validation import (
    MOST_COUNT,
    MOST_MS,
    Record,
    entry_count_within,
    number_within,
    require,
    short_repr,
)
from shardcore.io import files, schema, writing
from shardcore.io.envelope import read_document, sealed_document
from shardcore.io.traced_steps import TRACED_PARTS, TracedStep

TRACES = "traces"
"""Folder of a dataset."""
SCHEMA = "traced"
_TRACED_JSON, _PROBLEM_JSON, _PLAN_JSON = "traced.json", "problem.json", "plan.json"


@dataclass(frozen=True)
class TracedSample(Record, noun="traced step"):
    """Consecutive traced steps of a job under one plan, as a sample of a dataset.

    setting: of the hardware that it ran on.
    job, number: name of the job, and number of its first traced step.
    steps: as traced, with what tracing takes.
    step_ms: of steps without tracing.
    traces: digests of the trace files, by rank.
    """

    setting: Setting
    job: str
    number: int
    problem: Problem
    plan: Plan
    steps: Annotated[tuple[TracedStep, ...], entry_count_within(1, MOST_COUNT)]
    step_ms: Annotated[float, number_within(0, MOST_MS, above=True)]
    traces: Mapping[str, str]

    def __post_init__(self) -> None:
        super().__post_init__()
        what, devices = f"traced step {self.name}", len(self.problem.topology)
        for rank in (rank for step in self.steps for rank in step.ranks):
            require(
                0 <= rank.rank < devices, f"{what} has rank {rank.rank}; its problem has {devices} devices"
            )
            what_rank, unknown = f"rank {rank.rank} of {what}", sorted(set(rank.ms) - set(TRACED_PARTS))
            require(not unknown, f"{what_rank} has the part {short_repr(unknown[:1])}; no step has it")
            times = (*rank.ms.values(), *(ms for x in rank.exchanges for ms in (x.exposed_ms, x.shared_ms)))
            require(
                0 < rank.total_ms <= MOST_MS and all(0 <= ms <= MOST_MS for ms in times),
                f"{what_rank} has times of {short_repr(times)} ms; they need to be 0 or more",
            )

    @property
    def name(self) -> str:
        """Name of the sample: job and number of the first traced step."""
        return f"{self.job}-{self.number:08d}"


def add_traced_sample(dataset: str | Path, sample: TracedSample) -> Path:
    """Write a traced sample to a dataset's folder. Returns the sample's own folder. Writing an existing sample again
    changes nothing."""
    body = {
        "setting": files.setting_to_json(sample.setting),
        "job": sample.job,
        "number": sample.number,
        "steps": [asdict(step) for step in sample.steps],
        "step_ms": sample.step_ms,
        "traces": dict(sample.traces),
    }
    digest = files.json_digest(
        [files.problem_to_json(sample.problem), files.plan_to_json(sample.plan, sample.problem), body]
    )
    folder = Path(dataset) / TRACES / f"{sample.name}-{digest[:8]}"
    files.write_problem(folder / _PROBLEM_JSON, sample.problem)
    files.write_plan(folder / _PLAN_JSON, sample.plan, sample.problem)
    writing.write_json(folder / _TRACED_JSON, sealed_document(SCHEMA, body))
    return folder


def read_traced_samples(datasets: Iterable[str | Path], setting: Setting | None = None) -> list[TracedSample]:
    """Read the traced samples (of one setting) of datasets, each once, sorted by job and step number.

    Raises ShardCoreError naming one that is damaged or edited.
    """
    found = {
        folder.name: _load_sample(folder, body)
        for dataset in datasets
        for folder, of, body, _ in _read_bodies(dataset)
        if setting is None or of == setting
    }
    return sorted(found.values(), key=lambda sample: (sample.job, sample.number))


def traced_settings(dataset: str | Path) -> list[Setting]:
    """Settings of the traced samples in a dataset."""
    return sorted({setting for _, setting, _, _ in _read_bodies(dataset)}, key=str)


def traced_digests(dataset: str | Path) -> list[str]:
    """Digests of the traced samples in a dataset."""
    return [digest for *_, digest in _read_bodies(dataset)]


def _read_bodies(dataset: str | Path) -> Sequence[tuple[Path, Setting, dict[str, Any], str]]:
    """Folder, setting, content and digest of each traced sample in a dataset."""
    found = []
    for name in schema.list_names(where := Path(dataset) / TRACES):
        if (path := where / name / _TRACED_JSON).exists():
            body = read_document(path, SCHEMA)
            setting = schema.build_record(Setting, body.get("setting"), f"{path}: setting")
            found.append((path.parent, setting, body, files.json_digest(body)))
    return found


def _load_sample(folder: Path, body: Mapping[str, Any]) -> TracedSample:
    """Traced sample of a parsed traced.json, with the problem and plan of its folder."""
    problem = files.read_problem(folder / _PROBLEM_JSON)
    # A plan that ran has fitted, whatever ShardCore counts.
    plan = files.read_valid_plan(folder / _PLAN_JSON, problem, fits=False)
    return schema.build_record(TracedSample, body, str(folder / _TRACED_JSON), problem=problem, plan=plan)
