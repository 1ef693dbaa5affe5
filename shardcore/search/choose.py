"""Choose: among good plans of one problem, by several models.

A search finds what its model errs on in its favour. A second model, of another family or of other data, errs elsewhere, so the
plan to take is one that both find good.

Shapes: P plans, M models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.cost.model import CostModel, price
from shardcore.search import SHARDERS, Budget
from shardcore.types import Plan, Problem
from shardcore.workload import lower


@dataclass(frozen=True)
class Choice:
    """total_ms [P][M]: what each model says of each plan; chosen: the plan's index."""

    plans: tuple[Plan, ...]
    total_ms: tuple[tuple[float, ...], ...]
    chosen: int

    @property
    def plan(self) -> Plan:
        return self.plans[self.chosen]

    @property
    def cheapest(self) -> int:
        """The plan that the first model alone would choose."""
        return int(np.argmin(np.array(self.total_ms)[:, 0]))


def choose(plans: Sequence[Plan], problem: Problem, models: Sequence[CostModel]) -> Choice:
    """The plan with the least regret: over models the most that it costs above the cheapest plan under that model, relatively
    (minimax regret: Savage 1951); among equals the cheapest by the first model. Raises what `lower` raises."""
    total_ms = np.array([[price(lower(plan, problem), model).total_ms for model in models] for plan in plans])
    regret = (total_ms / np.maximum(total_ms.min(0), 1e-12)).max(1)
    chosen = int(np.lexsort((total_ms[:, 0], regret.round(9)))[0])
    return Choice(tuple(plans), tuple(tuple(map(float, row)) for row in total_ms), chosen)


def candidates(problem: Problem, models: Sequence[CostModel], algorithm: str, seeds: Sequence[int],
               budget: Budget | None = None) -> list[Plan]:
    """Different plans of one algorithm: searched under each model, with each seed and as much of a budget as that leaves. Raises
    Infeasible where none is found."""
    n = len(seeds) * len(models)
    each = budget and Budget(budget.evals and max(1, budget.evals // n), budget.seconds and budget.seconds / n)
    found: dict[Plan, None] = {}
    for model in models:
        for seed in seeds:
            found[SHARDERS[algorithm](problem, model, seed=seed, budget=each)] = None
    return list(found)
