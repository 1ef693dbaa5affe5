"""Decisions: the current version of a problem's plan, its time and its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from shardcore.core.step_cost import PredictedCost
from shardcore.core.types import Plan
from shardcore.core.validation import (
    MOST_MS,
    MOST_UNIX_S,
    Record,
    number_within,
    one_of,
    require,
    require_path_name,
)
from shardcore.io import envelope, files, schema
from shardcore.plans.what_if import WhatIf

ROLLED_BACK = "rolled back"
OUTCOMES = ("first", "better", "kept", "no longer fits", "restored", ROLLED_BACK)


@dataclass(frozen=True)
class Decision(Record):
    """Record of which version of a problem's plan became current, and why.

    problem: the problem's name.
    outcome: one of OUTCOMES. "first", "better" and "no longer fits" choose the candidate. "no longer fits" is
      about the previous plan. "kept" keeps the previous plan. "restored" chooses the version that was current
      under the same model before. "rolled back" chooses the version before the candidate, which was slower in
      a job than predicted.
    reason: the reason, in a sentence.
    current: the version that was chosen.
    candidate: the version that was considered.
    problem_digest: digest of the problem as it is now.
    candidate_ms: cost of the candidate under the current model. None: unknown.
    previous_ms: cost of the previous plan under the current model. None: there was none, or it is no longer
      valid for this problem.
    margin_ms: error of the gain (see gain.PlanGain). None: there was nothing to compare.
    threshold: the share of previous_ms by which a candidate must be cheaper, at any margin.
    decided_at: Unix s. 0: unknown.
    parent: id of the decision before.
    provenance: model, model_version, data_version, git_commit, setting, algorithm, its settings and seed.
    """

    problem: Annotated[str, require_path_name]
    outcome: Annotated[str, one_of(OUTCOMES)]
    reason: str
    current: Annotated[str, files.require_digest]
    candidate: Annotated[str, files.require_digest]
    problem_digest: Annotated[str, files.require_digest]
    candidate_ms: Annotated[float | None, number_within(0, MOST_MS)] = None
    previous_ms: Annotated[float | None, number_within(0, MOST_MS)] = None
    margin_ms: Annotated[float | None, number_within(0, MOST_MS)] = None
    threshold: Annotated[float, number_within(0, 1)] = 0.0
    # datetime cannot show later times.
    decided_at: Annotated[float, number_within(0, MOST_UNIX_S)] = 0.0
    parent: Annotated[str | None, files.require_digest] = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Only these two outcomes leave another version current than the one considered.
        require(
            self.outcome in ("kept", ROLLED_BACK) or self.current == self.candidate,
            f"decision {self.outcome!r} has current {self.current}; it takes its candidate, {self.candidate}",
        )

    @property
    def id(self) -> str:
        # The id covers all fields, so an edited decision no longer matches its name.
        return files.json_digest(self.to_json())

    @property
    def total_ms(self) -> float | None:
        """Cost of the chosen version, under the cost model at the time of the decision."""
        # The chosen version is either the candidate or the one before.
        return self.candidate_ms if self.current == self.candidate else self.previous_ms

    def is_repeat_of(self, other: Decision | None) -> bool:
        """Tell if a decision equals another one in all but time and parent."""
        if other is None:
            return False
        # Time and parent are copied from the other, so that == compares the rest.
        return dataclasses.replace(self, decided_at=other.decided_at, parent=other.parent) == other

    def to_json(self) -> dict[str, Any]:
        """JSON form of a publishing decision."""
        return envelope.with_schema("decision", dataclasses.asdict(self))


def decision_from_json(data: Any, where: str) -> Decision:
    """Decision read from JSON. Raises ShardCoreError if the JSON has another form.

    where: the file, for the message.
    """
    decision = schema.build_record(Decision, envelope.document_body(data, "decision", where), where)
    # Reports read these keys as texts.
    files.require_provenance(decision.provenance, f"{where}: provenance")
    return decision


@dataclass(frozen=True)
class PlanVersion:
    """A plan with its name for people, its cost, and the bytes that it needs on each device.

    what_if: what moves of its shards would do. None: it is not known.
    """

    name: str
    plan: Plan
    cost: PredictedCost
    memory_bytes: Sequence[int]
    what_if: WhatIf | None = None


def version_name(version: str) -> str:
    """Name of a published version, for people."""
    return f"version {version}"
