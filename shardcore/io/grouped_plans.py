"""Files of grouped plans: the plan of one sharding group, and the division of devices into groups.

Their schema is separate, so that no reader of plans takes one for a plan of all devices. A file has the
digest of the whole problem, and that of a group's problem, which follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcore.core.types import Problem
from shardcore.io import files, problem_parts, writing
from shardcore.io.envelope import document, is_document, open_document, seal, unseal
from shardcore.io.schema import build, errors_named
from shardcore.step.lower import require_plan
from shardcore.step.sharding_groups import GroupedPlan, Grouping, problem_of_group

SCHEMA = "grouped-plan"


def is_grouped(path: str | Path) -> bool:
    """Tell if a file has the schema of a grouped plan."""
    return is_document(path, SCHEMA)


def write_grouped(path: str | Path, grouped: GroupedPlan, problem: Problem) -> None:
    """Write a grouped plan. problem: the whole problem, of all devices."""
    of_group = files.plan_to_json(grouped.plan, grouped.problem)
    writing.write_json(
        path,
        document(
            SCHEMA,
            seal(
                {
                    "problem": problem.name,
                    "problem_digest": files.problem_digest(problem),
                    "problem_parts": problem_parts.parts_of(problem),
                    "groups": asdict(grouped.grouping),
                    "plan": {k: v for k, v in of_group.items() if k not in ("schema", "version", "digest")},
                }
            ),
        ),
    )


def read_grouped(path: str | Path, problem: Problem) -> GroupedPlan:
    """The grouped plan of a whole problem.

    Raises ShardCoreError if it was made for another one, was edited, or would be refused by `lower`.
    """
    written = build(_GroupedPlan, unseal(open_document(path, SCHEMA), path), str(path))
    files.require_same_problem(written, problem, f"{path} is a grouped plan")
    grouping = build(Grouping, written.groups, f"{path}: groups")
    with errors_named(path):
        of_group = problem_of_group(problem, grouping)
        plan = files.plan_from_json(dict(written.plan), of_group, "its plan")
        require_plan(plan, of_group)
    return GroupedPlan(grouping, plan, of_group)


@dataclass(frozen=True, kw_only=True)
class _GroupedPlan(files.ForProblem):
    """A grouped plan's file."""

    groups: Mapping[str, Any]
    plan: Mapping[str, Any]
