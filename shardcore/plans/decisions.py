"""Decisions: which version of a problem's plan is current, since when and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.step_cost import PredictedCost
from shardcore.core.types import Plan
from shardcore.core.validation import MOST_UNIX_S, is_path_name, shown
from shardcore.io import files, schema

OUTCOMES = ("first", "better", "kept", "no longer fits", "restored")
_SCHEMA, _SCHEMA_VERSION = "shardcore/decision", 1


@dataclass(frozen=True)
class Decision:
    """Which version of a problem's plan is current, and why.

    problem: the problem's name.
    outcome: one of OUTCOMES. "first", "better" and "no longer fits" take the candidate. "no longer fits" is
      about the previous plan. "kept" keeps the previous plan. "restored" takes the version that was current
      under the same model before.
    reason: why, in a sentence.
    current: the version that was chosen.
    candidate: the version that was considered.
    problem_digest: digest of the problem as it is now.
    candidate_ms: cost of the candidate under the current model. None: unknown.
    previous_ms: cost of the previous plan under the current model. None: there was none, or it is no longer
      valid for this problem.
    margin_ms: by how much the gain may be wrong (see gain.Gain). None: there was nothing to compare.
    threshold: the share of previous_ms by which a candidate must be cheaper, whatever its margin.
    decided_at: Unix s. 0: unknown.
    parent: id of the decision before.
    provenance: model, model_version, data_version, git_commit, setting, algorithm, its settings and seed.
    """

    problem: str
    outcome: str
    reason: str
    current: str
    candidate: str
    problem_digest: str
    candidate_ms: float | None = None
    previous_ms: float | None = None
    margin_ms: float | None = None
    threshold: float = 0.0
    decided_at: float = 0.0
    parent: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ShardCoreError(f"decision has outcome {self.outcome!r}; known are {', '.join(OUTCOMES)}")
        if not is_path_name(self.problem):
            raise ShardCoreError(f"decision has problem {self.problem!r}; it needs the name of one")
        for name in ("current", "candidate", "problem_digest"):
            require_id(getattr(self, name), f"decision has {name}")
        if self.outcome != "kept" and self.current != self.candidate:
            raise ShardCoreError(
                f"decision {self.outcome!r} has current {self.current}; it takes its candidate, {self.candidate}"
            )
        if self.parent is not None:
            require_id(self.parent, "decision has parent")
        for name in ("candidate_ms", "previous_ms", "margin_ms", "threshold", "decided_at"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ShardCoreError(f"decision has {name} {getattr(self, name)}; it needs 0 or more")
        # datetime cannot show later times.
        if self.decided_at > MOST_UNIX_S:
            raise ShardCoreError(
                f"decision has decided_at {self.decided_at}; it needs Unix seconds, up to {MOST_UNIX_S:.0f}"
            )

    @property
    def id(self) -> str:
        return files.digest(self.document())

    @property
    def total_ms(self) -> float | None:
        """Cost of the chosen version, under the model of that time."""
        return self.candidate_ms if self.current == self.candidate else self.previous_ms

    def repeats(self, other: Decision | None) -> bool:
        """Whether it says the same as the other one, time and parent aside."""
        if other is None:
            return False
        # Time and parent differ between any two decisions.
        same = dataclasses.replace(self, decided_at=other.decided_at, parent=other.parent)
        return same == other

    def document(self) -> dict[str, Any]:
        """The decision as JSON."""
        return {"schema": _SCHEMA, "version": _SCHEMA_VERSION, **dataclasses.asdict(self)}


def from_document(data: Any, where: str) -> Decision:
    """The decision in a file. Raises ShardCoreError if the file has another form.

    where: the file, for the message.
    """
    known = _SCHEMA, _SCHEMA_VERSION, int
    if (
        not isinstance(data, dict)
        or (data.pop("schema", None), version := data.pop("version", None), type(version)) != known
    ):
        raise ShardCoreError(
            f"{where} is no decision of a version that this ShardCore reads ({_SCHEMA} {_SCHEMA_VERSION})"
        )
    decision = schema.build(Decision, data, where)
    files.require_provenance(decision.provenance, f"{where}: provenance")
    return decision


def require_id(found: str, what: str) -> str:
    """`found`, if it is a digest. Raises ShardCoreError otherwise: versions and decisions are named by
    digest."""
    if not files.DIGEST.fullmatch(found):
        raise ShardCoreError(f"{what} {shown(found)}; it needs 16 hex digits")
    return found


@dataclass(frozen=True)
class Version:
    """A plan, and what it takes.

    name: for people.
    """

    name: str
    plan: Plan
    cost: PredictedCost
    memory_bytes: Sequence[int]


def version_name(version: str) -> str:
    """The name of a published version, for people."""
    return f"version {version}"
