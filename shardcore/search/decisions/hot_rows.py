"""Hot rows: the number of rows of sequence tables on every device, by a threshold of lookups a batch.

The savings and costs are those of shardcore/tables/hot_rows.py.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from shardcore.core.types import Problem
from shardcore.core.validation import require
from shardcore.cost.model import CostModel
from shardcore.search.decisions.driver import Decision, Proposal, ProposalOutcome
from shardcore.step.lower import lower
from shardcore.step.memory import size_text
from shardcore.tables.hot_rows import HOT, heat_of_divisible_tables, hot_row_counts, with_hot_rows

_FACTOR = 2.0
"""Ratio of one threshold to the next."""


class HotRows(Decision):
    """Choose the number of hot rows of sequence tables, which are on every device."""

    name: ClassVar[str] = "hot rows"
    level: ClassVar[int] = 3
    changes: ClassVar[str] = "hot rows as tables"

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Proposal, ProposalOutcome, None]:
        """Problem without hot rows, then with hot rows from each threshold, the highest first.

        On one device there are no thresholds. They fall until no plan fits, or half as many lookups as there
        are devices would make a row hot: fewer are never worth an all-reduce.

        Raises ShardCoreError for a problem without sequence tables, and as `heat_of` does.
        """
        known = heat_of_divisible_tables(problem)
        require(
            bool(known),
            f"problem {problem.name!r} has no sequence tables that are looked up; only "
            "those may have hot rows (docs/plan_hot_rows.md)",
        )
        lowest, hottest = len(problem.topology) / 2, max(float(heat.lookups.max()) for _, heat in known)
        n = math.ceil(max(1.0, math.log(hottest / lowest, _FACTOR))) if len(problem.topology) > 1 else 0
        # The unchanged problem comes first, so hot rows never make a plan dearer.
        before: dict[str, int] = {}
        yield Proposal(words="no hot rows", problem=problem, more=n)
        # From above: a high threshold takes least memory, so it fits if any does.
        for i in range(1, n + 1):
            threshold = max(1.0, lowest, hottest / _FACTOR**i)
            rows = hot_row_counts(problem, threshold)
            # Thresholds between the same two rows give the same problem.
            if rows == before:
                continue
            outcome = yield Proposal(
                words=f"rows hot from {threshold:,.1f} lookups a batch",
                problem=with_hot_rows(problem, rows),
                more=n - i,
            )
            before = rows
            if outcome.found is None:
                return  # lower ones take more memory

    def ledger_facts(self, outcome: ProposalOutcome) -> Mapping[str, Any]:
        tables = outcome.proposal.problem.tables
        facts: dict[str, Any] = {"hot": sum(t.rows for t in tables if t.name.endswith(HOT))}
        if outcome.found:
            work = lower(outcome.found.plan, outcome.found.problem)
            facts |= {
                "enters exchanges": size_text(work.traffic.sum()),
                "most memory": size_text(max(work.memory_bytes)),
            }
        return facts
