"""Compare several sharders on one problem, under one model."""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.core.errors import Infeasible
from shardcore.core.progress import clock
from shardcore.core.step_cost import PredictedCost, StepCost
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel, PricedPlan, price_plan
from shardcore.search.budget import Budget
from shardcore.search.learned.policy import Policy
from shardcore.search.sharders import sharder


@dataclass(frozen=True)
class SharderOutcome:
    """Result of running one sharder on a problem: a plan, or the reason that there is none.

    algorithm: its name.
    seconds: wall time, without compiling.
    priced: the plan with its predicted cost, if any.
    error: otherwise, why there is none.
    """

    algorithm: str
    seconds: float
    priced: PricedPlan | None = None
    error: str | None = None

    @property
    def plan(self) -> Plan | None:
        return self.priced and self.priced.plan

    @property
    def cost(self) -> PredictedCost | None:
        return self.priced and self.priced.cost


def run_sharder(
    algorithm: str,
    problem: Problem,
    model: CostModel,
    seed: int = 0,
    budget: Budget | None = None,
    policy: Policy | None = None,
) -> SharderOutcome:
    """Run one sharder on a problem; a learned sharder with its policy.

    Infeasible becomes part of the outcome; other errors are raised.
    """
    began = clock()
    try:
        plan = sharder(algorithm, policy)(problem, model, seed=seed, budget=budget)
    except Infeasible as error:
        return SharderOutcome(algorithm, clock() - began, error=str(error))
    # Seconds are taken first: pricing for the report does not count as the search's time.
    return SharderOutcome(algorithm, clock() - began, price_plan(plan, problem, model))


def compute_balance(cost: StepCost) -> float:
    """Balance of compute over devices: mean over largest. 1 is even; 1/D is all on one device."""
    largest = max(cost.compute_ms)
    return sum(cost.compute_ms) / len(cost.compute_ms) / largest if largest > 0 else 1.0
