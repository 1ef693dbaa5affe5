"""Doubts about a plan under a hardware profile: how far the rates that a measurement would show can change the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel, PricedPlan, predicted_total_ms
from shardcore.step.lower import Workload, lower


@dataclass(frozen=True)
class Doubt:
    """Rates of a profile that one kind of measurement would show.

    measured: kind of measurement, as of UncertainRates.
    band: relative standard error of the step's ms, without its dense part, that these rates cause.
    regret: largest share of the step that another plan saves if all of them are a standard error off.
    """

    measured: str
    band: float
    regret: float


def plan_doubts(
    priced: PricedPlan, problem: Problem, model: CostModel, search: Callable[[Problem, CostModel], Plan]
) -> tuple[Doubt, ...]:
    """Doubts about a plan, by kind of measurement. () for a model that is not of a profile.

    search: finds a plan under the model with other rates.
    """
    return tuple(
        Doubt(x.measured, x.band, max(_regret(priced.workload, problem, other, search) for other in x.models))
        for x in model.uncertain_rates(priced.workload)
    )


def _regret(
    workload: Workload, problem: Problem, model: CostModel, search: Callable[[Problem, CostModel], Plan]
) -> float:
    """Share of a step that the plan of a search under a model saves; 0 if it saves nothing."""
    now_ms = predicted_total_ms(workload, model)
    return max(0.0, 1 - predicted_total_ms(lower(search(problem, model), problem), model) / now_ms)
