"""Compare several sharders on one problem, under one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.progress import clock
from shardcore.core.step_cost import PredictedCost, StepCost
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel, PricedPlan, price_plan
from shardcore.search.budget import Budget
from shardcore.search.learned.policy import Policy
from shardcore.search.sharders import sharder


@dataclass(frozen=True)
class Outcome:
    """The result of a sharder.

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


def run(
    algorithm: str,
    problem: Problem,
    model: CostModel,
    seed: int = 0,
    budget: Budget | None = None,
    policy: Policy | None = None,
) -> Outcome:
    """Run one sharder, a learned one with its policy.

    Infeasible becomes part of the outcome; other errors are raised.
    """
    began = clock()
    try:
        plan = sharder(algorithm, policy)(problem, model, seed=seed, budget=budget)
    except Infeasible as error:
        return Outcome(algorithm, clock() - began, error=str(error))
    # Seconds are taken first: pricing for the report does not count as the search's time.
    return Outcome(algorithm, clock() - began, price_plan(plan, problem, model))


@dataclass(frozen=True)
class Standing:
    """One sharder over several problems.

    solved: the share of problems with a plan.
    common: the number of problems that every sharder solved. The other fields cover only these.
    cost: mean cost relative to the reference. nan if there are no common problems.
    worst: the largest relative cost.
    seconds: mean time.
    """

    solved: float
    common: int
    cost: float
    worst: float
    seconds: float


def standings(
    costs: Mapping[str, Sequence[float | None]],
    seconds: Mapping[str, Sequence[float]],
    reference: str | None = None,
) -> dict[str, Standing]:
    """Comparison of sharders on several problems.

    costs: ms of each sharder on each problem; None or nan for no plan.
    seconds: search time of each; [] if unknown.
    reference: the sharder whose cost is 1. None: the best of the others, on each problem.
    """
    # [sharders, problems], nan without a plan.
    table = np.array([[np.nan if ms is None else ms for ms in row] for row in costs.values()], dtype=float)
    # Only problems that all solved compare fairly.
    common = np.isfinite(table).all(0)
    compared = {}
    for i, name in enumerate(costs):
        # Others without itself: otherwise no ratio could be below 1.
        others = (
            [list(costs).index(reference)] if reference else [k for k in range(len(table)) if k != i] or [i]
        )
        # [common] cost over the cheapest of the others on the same problem.
        ratios = table[i, common] / table[others][:, common].min(0) if common.any() else np.full(1, np.nan)
        # Of the same problems as the costs: hard ones take longer, and some sharders do not solve them.
        took_s = np.array(seconds[name], dtype=float)
        compared[name] = Standing(
            solved=float(np.isfinite(table[i]).mean()),
            common=int(common.sum()),
            cost=float(ratios.mean()),
            worst=float(ratios.max()),
            seconds=float(took_s[common].mean()) if len(took_s) and common.any() else float("nan"),
        )
    return compared


def balance(cost: StepCost) -> float:
    """Mean over largest compute of the devices. 1 is even; 1/D is all on one device."""
    largest = max(cost.compute_ms)
    return sum(cost.compute_ms) / len(cost.compute_ms) / largest if largest > 0 else 1.0
