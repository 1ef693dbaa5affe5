"""Published plans: a folder with immutable versions and one atomic pointer a problem.

  PLANS/<problem>/versions/<version>/{problem,plan,cost}.json
  PLANS/<problem>/current            the version that training jobs load

A version is named after its content, so publishing the same plan twice is one version.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardcore import files
from shardcore.types import Plan, Problem, ShardCoreError

_POINTER = "current"


def publish(root: str | Path, problem: Problem, plan: Plan, cost: Mapping[str, Any]) -> str:
    """Keep a plan with its problem and costs, then point to it; returns the version. Readers never see half of one."""
    home = Path(root) / problem.name
    body = files.plan_to_json(plan, problem)
    version = files.digest(body)
    folder = home / "versions" / version
    if not folder.exists():
        draft = home / f".{version}.{os.getpid()}.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        files.write_problem(draft / "problem.json", problem)
        files.write_json(draft / "plan.json", body)
        files.write_json(draft / "cost.json", dict(cost))
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(draft, folder)
        except OSError:  # another publisher was first with the same content
            shutil.rmtree(draft, ignore_errors=True)
            if not folder.exists():
                raise
    files.write_atomic(home / _POINTER, f"{version}\n".encode())
    return version


def current(root: str | Path, name: str) -> Path:
    """The folder of a problem's current version; raises ShardCoreError where nothing was published for it."""
    pointer = Path(root) / name / _POINTER
    try:
        return Path(root) / name / "versions" / pointer.read_text().strip()
    except OSError:
        published = sorted(p.parent.name for p in Path(root).glob(f"*/{_POINTER}"))
        raise ShardCoreError(f"no plan is published for problem {name!r} in {root}; there are {published or 'none'}") from None


def load_plan(root: str | Path, name: str) -> tuple[Plan, Problem]:
    """The current plan of a problem, and the problem."""
    folder = current(root, name)
    problem = files.read_problem(folder / "problem.json")
    return files.read_plan(folder / "plan.json", problem), problem
