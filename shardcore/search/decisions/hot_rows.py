"""Hot rows: the number of rows of sequence tables on every device, by a threshold of lookups a batch.

The savings and costs are those of shardcore/tables/hot_rows.py.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shardcore.core.types import Problem
from shardcore.core.validation import require
from shardcore.cost.model import CostModel
from shardcore.search.decisions.driver import Decision, Outcome, Proposal
from shardcore.search.ties import least
from shardcore.step.lower import lower
from shardcore.step.memory import gib
from shardcore.tables.hot_rows import heats, hot_counts, with_hot_rows

_FACTOR = 4.0
"""Ratio of one threshold to the next. Then its root is tried on both sides of the best."""


@dataclass(frozen=True, kw_only=True)
class Threshold(Proposal):
    """A problem with hot rows as separate tables.

    rows: number of hot rows by table.
    """

    rows: Mapping[str, int]


class HotRows(Decision):
    """Choose the number of hot rows of sequence tables, which are on every device."""

    name: ClassVar[str] = "hot rows"
    level: ClassVar[int] = 3
    changes: ClassVar[str] = "hot rows as tables"

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Threshold, Outcome, None]:
        """The problem without hot rows, and with those of each threshold, from the highest on.

        On one device there are no thresholds. They fall until no plan fits, or half as many lookups as there
        are devices would make a row hot: fewer are never worth an all-reduce.

        Raises ShardCoreError for a problem without sequence tables, and as `heat_of` does.
        """
        known = heats(problem)
        require(
            bool(known),
            f"problem {problem.name!r} has no sequence tables that are looked up; only "
            "those may have hot rows (docs/plan_hot_rows.md)",
        )
        outcomes: dict[float, Outcome] = {}

        def outcome_of(threshold: float, more: int) -> Generator[Threshold, Outcome, Outcome]:
            rows = {} if threshold == math.inf else hot_counts(problem, threshold)
            # Thresholds between the same two rows give the same problem.
            same = next((x for x in outcomes.values() if x.proposal.rows == rows), None)
            if same is None:
                same = yield Threshold(
                    words=f"rows hot from {threshold:,.1f} lookups a batch" if rows else "no hot rows",
                    problem=with_hot_rows(problem, rows),
                    rows=rows,
                    more=more,
                )
            outcomes[threshold] = same
            return same

        lowest = max(1.0, len(problem.topology) / 2)
        # From above: a high threshold takes least memory, so it fits if any does.
        falling = [max(lowest, max(float(heat.lookups.max()) for _, heat in known) / _FACTOR)]
        while falling[-1] / _FACTOR >= lowest:
            falling.append(falling[-1] / _FACTOR)
        if len(problem.topology) == 1:  # no other device to be on
            falling = []
        # The unchanged problem comes first, so hot rows never make a plan dearer.
        yield from outcome_of(math.inf, len(falling) + 2 if falling else 0)
        for i, threshold in enumerate(falling):
            outcome = yield from outcome_of(threshold, len(falling) - i + 1)
            if outcome.found is None:
                break  # lower ones take more memory
        best = least(outcomes, lambda threshold: outcomes[threshold].ms)
        if best < math.inf:
            yield from outcome_of(best * _FACTOR**0.5, 1)
            yield from outcome_of(best / _FACTOR**0.5, 0)

    def facts(self, outcome: Outcome) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"hot": sum(outcome.proposal.rows.values())}
        if outcome.found:
            work = lower(outcome.found.plan, outcome.found.problem)
            facts |= {"enters exchanges": gib(work.traffic.sum()), "most memory": gib(max(work.memory_bytes))}
        return facts
