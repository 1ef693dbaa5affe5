"""Compare several sharders on one problem, under one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible
from shardcore.core.progress import clock
from shardcore.core.step_cost import PredictedCost, StepCost
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel, PricedPlan, price_plan
from shardcore.search.budget import Budget
from shardcore.search.learned.policy import Policy
from shardcore.search.sharders import BASELINES, DEFAULT_SHARDER, SHARDERS, sharder


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
    # Pricing for the report does not count as the search's time.
    seconds = clock() - began
    return Outcome(algorithm, seconds, price_plan(plan, problem, model))


def compile_searches(problem: Problem, model: CostModel) -> None:
    """Compile and import what searches under a model need, before anyone times them.

    Every sharder except TorchRec's runs once on one of the problem's tables.
    Otherwise the first sharder's seconds would be numba's.
    """
    # One table and no constraints: any sharder solves this.
    few = replace(
        problem,
        name="compile",
        tables=problem.tables[:1],
        constraints=Constraints(),
        job=replace(problem.job, tower_ratio=None),
    )
    for name in SHARDERS:
        if name != "torchrec":
            run(name, few, model, budget=Budget(evals=1))


def plans(
    problem: Problem, model: CostModel, seed: int = 0, budget: Budget | None = None, random: int = 3
) -> list[Outcome]:
    """Plans of each of WORTH_REPLAYING, and `random` random ones. Sharders without a plan are left out.

    The same seed gives the same plans.
    """
    # Other seeds give other random plans. All else is searched once.
    wanted = [(name, seed) for name in WORTH_REPLAYING] + [("random", seed + i) for i in range(random)]
    outcomes = [run(name, problem, model, s, budget) for name, s in wanted]
    return [o for o in outcomes if o.plan]


WORTH_REPLAYING = (
    DEFAULT_SHARDER,
    "anneal_columns",
    "neuroshard",
    *(n for n in BASELINES if n != "random"),
    *(n for n in SHARDERS if n == "torchrec"),
)
"""Sharders whose plans are worth a replay on devices."""


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
        # Without itself: otherwise no ratio could be below 1.
        others = [k for k in range(len(table)) if k != i] or [i]
        if reference:
            others = [list(costs).index(reference)]
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
