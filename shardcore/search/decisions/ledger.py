"""The ledger of decisions, as a plan's provenance has it: what was proposed, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardcore.core.validation import require
from shardcore.io.schema import build

ENTRY = "decisions"
"""The ledger's name in a plan's provenance."""


@dataclass(frozen=True)
class Entry:
    """One proposal.

    proposed: in words.
    ms: predicted cost of its plan. None: it has no plan.
    seconds, evals: of its searches.
    why: reason that it has no plan.
    facts: what the decision knows of it, by name.
    within: ledger of the decisions on this proposal.
    """

    proposed: str
    ms: float | None
    seconds: float
    evals: int
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    within: Ledger | None = None


@dataclass(frozen=True)
class Ledger:
    """One decision.

    chosen: words of the proposal that won.
    because: reason that it won.
    """

    decision: str
    chosen: str
    because: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        require(
            any(entry.proposed == self.chosen for entry in self.entries),
            f"ledger of {self.decision} has chosen {self.chosen!r}, which it does not list",
        )

    @property
    def best(self) -> Entry:
        """The entry that won."""
        return next(entry for entry in self.entries if entry.proposed == self.chosen)


def ledger_of(provenance: Mapping[str, Any]) -> Ledger | None:
    """The ledger in a plan's provenance. None: nothing was decided before its search.

    Raises ShardCoreError naming an entry that is not of its kind.
    """
    return build(Ledger, provenance[ENTRY], f"provenance: {ENTRY}") if ENTRY in provenance else None
