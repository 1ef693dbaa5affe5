"""A store's plans as a running job follows them (see torchrec.follow)."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardcore.core.types import Plan, Problem
from shardcore.io import schema
from shardcore.plans import job_reports, store
from shardcore.plans.job_reports import JobReport


@dataclass(frozen=True)
class Followed:
    """A plan that a job may move to.

    version: in the store.
    most_ratio: its predicted step with the margin of its gain, over that of the plan that it replaced. None:
      it replaced none.
    """

    version: str
    plan: Plan
    problem: Problem
    most_ratio: float | None


def process_name() -> str:
    """A name for this process that no other one on any host has."""
    host = re.sub("[^A-Za-z0-9.-]", "-", socket.gethostname())
    return f"job-{host[:60]}-{os.getpid()}"


@dataclass(frozen=True)
class StoredPlans:
    """Plans of a problem.

    root: the store's folder or URL. name: the problem's.
    job: the job's name, under which it reports. A job that restarts under its name replaces its report.
      Default: the name of its process, as jobs of one name would replace each other's.
    """

    root: str | Path
    name: str
    job: str = field(default_factory=process_name)

    def version(self) -> str:
        """The current version. Raises ShardCoreError if nothing was published, or the store is not reached."""
        return store.current(self.root, self.name)

    def read(self, version: str) -> Followed:
        """Raises ShardCoreError for a version that is not there or not valid."""
        plan, problem = store.load_plan(self.root, self.name, version)
        decision, most_ratio = store.adoption(self.root, self.name, version), None
        # A first plan replaced none, so a job has no step time to compare with.
        if decision and decision.previous_ms and decision.candidate_ms is not None:
            # With the margin: a step slower than that is beyond the model's error.
            most_ratio = (decision.candidate_ms + (decision.margin_ms or 0.0)) / decision.previous_ms
        return Followed(version, plan, problem, most_ratio)

    def roll_back(self, version: str, reason: str) -> str:
        """Make the version before current again. Returns it. Raises ShardCoreError as `store.roll_back`."""
        return store.roll_back(self.root, self.name, version, reason).current

    def report(self, report: Mapping[str, Any]) -> None:
        """Write a job's report next to the plans. Raises ShardCoreError if it cannot be written.

        report: fields of a job_reports.JobReport, without the job's name.
        """
        job_reports.write(
            self.root, self.name, schema.build(JobReport, report, "a job's report", job=self.job)
        )
