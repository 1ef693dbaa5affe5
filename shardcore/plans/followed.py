"""Jobs that follow a problem's plan (see torchrec.moves.follow): the plans that they may move to, and their reports.

  PLANS/<problem>/jobs/<job>.json
      the job's last report, which the next one replaces

The jobs write them. `shardcore job follow` reads them.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import Record, require_path_name
from shardcore.io import schema, writing
from shardcore.io.envelope import read_record, sealed_document
from shardcore.plans import places, store

SCHEMA = "job-report"
_SUFFIX = ".json"


# --- written by jobs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobEvent:
    """A change of a job's plan, or a version that it did not take.

    version: the plan's in the store.
    outcome: "moved" at first, then "stayed" or "rolled back" once steps were measured. "refused" if the job could
      not move to it.
    reason: the reason in words. "": none is needed.
    step: steps of the job by then. at_s: Unix time.
    before_ms, after_ms: measured steps, of the slowest rank. None: not measured.
    expected_ms: the longest step after the move that the prediction allows. None: nothing was predicted.
    tables: number of tables that moved. bytes: their bytes, by way. pause_s: pause of the move.
    """

    version: str
    outcome: str
    reason: str = ""
    step: int = 0
    at_s: float = 0.0
    before_ms: float | None = None
    after_ms: float | None = None
    expected_ms: float | None = None
    tables: int = 0
    bytes: Mapping[str, int] | None = None
    pause_s: float | None = None


@dataclass(frozen=True)
class JobReport(Record, noun="a job's report"):
    """A job's plan and last changes, as it reports them.

    job: the job's name.
    current: the version in use. None: the job's own plan, which the store does not have.
    step: steps since it follows. step_ms: measured at the last look, of the slowest rank.
    at_s: Unix time of the report.
    events: the last ones, oldest first.
    """

    job: Annotated[str, require_path_name]
    current: str | None
    step: int
    at_s: float
    step_ms: float | None = None
    events: tuple[JobEvent, ...] = ()


@dataclass(frozen=True)
class FollowedVersion:
    """A published plan that a running job may move to.

    most_ratio: its predicted step with the margin of its gain, over that of the plan that it replaced. None:
      it replaced none.
    """

    plan: Plan
    problem: Problem
    most_ratio: float | None


def unique_process_name() -> str:
    """Name for this process that no other process on any host has."""
    host = re.sub("[^A-Za-z0-9.-]", "-", socket.gethostname())
    return f"job-{host[:60]}-{os.getpid()}"


@dataclass(frozen=True)
class StoredPlans:
    """Published plans of one problem in a plan store, for a job that follows them.

    root: the store's folder or URL. name: the problem's.
    job: the job's name, under which it reports. A job that restarts under its name replaces its report.
      Default: the name of its process, as jobs of one name would replace each other's.
    """

    root: str | Path
    name: str
    job: str = field(default_factory=unique_process_name)

    def version(self) -> str:
        """Current version of the problem's plan. Raises ShardCoreError if nothing was published, or the store is not
        reached.
        """
        return store.current_version(self.root, self.name)

    def read(self, version: str) -> FollowedVersion:
        """Read a version of the plan. Raises ShardCoreError for a version that is missing or not valid."""
        plan, problem = store.load_plan(self.root, self.name, version)
        decision, most_ratio = store.adopting_decision(self.root, self.name, version), None
        # A first plan replaced none, so a job has no step time to compare with.
        if decision and decision.previous_ms and decision.candidate_ms is not None:
            # With the margin: a step slower than that is beyond the model's error.
            most_ratio = (decision.candidate_ms + (decision.margin_ms or 0.0)) / decision.previous_ms
        return FollowedVersion(plan, problem, most_ratio)

    def roll_back(self, version: str, reason: str) -> str:
        """Make the version before a given one current again, and return it. Raises ShardCoreError as
        `store.roll_back_version`.
        """
        return store.roll_back_version(self.root, self.name, version, reason).current

    def report(self, report: Mapping[str, Any]) -> None:
        """Write a job's report next to the plans. Raises ShardCoreError if the report cannot be written.

        report: fields of a JobReport, without the job's name.
        """
        checked = schema.build_record(JobReport, report, "a job's report", job=self.job)
        content = writing.json_bytes(sealed_document(SCHEMA, asdict(checked)))
        places.write_file(store.jobs_folder(self.root, self.name) / f"{self.job}{_SUFFIX}", content)


# --- read by people ---------------------------------------------------------------------------------------


def read_reports(root: str | Path, name: str) -> list[JobReport | ShardCoreError]:
    """Reports of all jobs that follow a problem's plan, by the jobs' names; an error in place of a damaged report."""
    folder = store.jobs_folder(root, name)
    reports: list[JobReport | ShardCoreError] = []
    for at in (folder / file for file in places.list_names(folder) if file.endswith(_SUFFIX)):
        try:
            reports.append(read_record(JobReport, at, SCHEMA))
        except ShardCoreError as error:
            reports.append(error)
    return reports
