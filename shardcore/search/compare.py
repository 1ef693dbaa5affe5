"""Several sharders on one problem, under one model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from shardcore.cost.model import CostModel, price
from shardcore.search import SHARDERS
from shardcore.search.budget import Budget
from shardcore.types import Infeasible, Plan, Problem, ShardCoreError, StepCost
from shardcore.workload import lower


@dataclass(frozen=True)
class Outcome:
    """What a sharder found: a plan with its predicted cost, or why there is none; and the seconds it took."""

    algorithm: str
    seconds: float
    plan: Plan | None = None
    cost: StepCost | None = None
    error: str | None = None


def require_known(algorithms: Iterable[str]) -> None:
    """Raise ShardCoreError for a name that SHARDERS does not have."""
    for name in algorithms:
        if name not in SHARDERS:
            raise ShardCoreError(f"algorithm {name!r} is not known; there are {', '.join(SHARDERS)}")


def run(algorithm: str, problem: Problem, model: CostModel, seed: int = 0, budget: Budget | None = None) -> Outcome:
    """Run one sharder; Infeasible becomes part of the outcome, any other error is raised."""
    require_known([algorithm])
    began = time.monotonic()
    try:
        plan = SHARDERS[algorithm](problem, model, seed=seed, budget=budget)
    except Infeasible as error:
        return Outcome(algorithm, time.monotonic() - began, error=str(error))
    seconds = time.monotonic() - began
    return Outcome(algorithm, seconds, plan, price(lower(plan, problem), model))


def best_baseline(outcomes: Iterable[Outcome], algorithm: str) -> Outcome | None:
    """The cheapest plan that another algorithm found, or None."""
    others = [o for o in outcomes if o.algorithm != algorithm and o.cost]
    return min(others, key=lambda o: o.cost.total_ms, default=None)


def balance(cost: StepCost) -> float:
    """Mean over largest compute of the devices: 1 is even, 1/D all on one."""
    largest = max(cost.compute_ms)
    return sum(cost.compute_ms) / len(cost.compute_ms) / largest if largest > 0 else 1.0
