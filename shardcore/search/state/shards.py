"""Plans that searches make, with their price."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from shardcore.core.types import Placement, Plan, Problem
from shardcore.cost.model import CostModel, price
from shardcore.search.ties import sort_by_cost
from shardcore.step import memory
from shardcore.step.lower import lower
from shardcore.step.ways import consolidate_placements, fixed_placements

CONCESSION = 1e-3
"""Share of its cost that a plan may lose to a simpler one, or to the plan in use.

Models err more in a difference of two plans (plans/gain.py). More is not conceded, for then a sharder that is better by
little would look worse than others.
"""


def cheapest_plan(plans: Iterable[Plan], problem: Problem) -> Plan:
    """Cheapest plan that fits, or the cheapest of all if none fits."""
    by_cost = sort_by_cost(plans, lambda plan: plan.provenance["predicted_ms"])
    return next((plan for plan in by_cost if memory.plan_fits(plan, problem)), by_cost[0])


def priced_plan(
    placements: Iterable[Placement], problem: Problem, model: CostModel, fits: bool = False, **provenance: Any
) -> Plan:
    """Consolidated plan of given placements, with provenance and predicted cost.

    Tables of `fixed_placements` need not be among them.

    Raises what `lower.lower` raises. A plan that does not fit is refused only with `fits`.
    """
    placements = list(placements)
    there = {placement.shard.table.name for placement in placements}
    placements += [p for p in fixed_placements(problem) if p.shard.table.name not in there]
    # Canonical first: the price is of shards as TorchRec runs them.
    plan = Plan(consolidate_placements(placements))
    cost = price(lower(plan, problem, fits), model)
    beyond = {"extrapolated": list(cost.extrapolated)} if cost.extrapolated else {}
    return replace(
        plan,
        provenance={**provenance, "setting": str(model.setting), "predicted_ms": cost.total_ms, **beyond},
    )
