"""Prices of grouped plans: one plan that several groups of devices each run."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardcore.core.types import Problem
from shardcore.cost.model import CostModel
from shardcore.search.decisions.groups import grouped_cost, synchronisation_workloads
from shardcore.step.lower import lower
from shardcore.step.sharding_groups import GroupedPlan


def grouped_cost_json(grouped: GroupedPlan, problem: Problem, model: CostModel) -> dict[str, Any]:
    """Predicted cost of one training step of a grouped plan, as a JSON object without the parts of the step.

    model: model for the problem of a group.
    """
    cost = grouped_cost(grouped, problem, model)
    return {
        "total_ms": cost.total_ms,
        "groups": dataclasses.asdict(grouped.grouping),
        "step_ms": cost.step_ms,
        "sync_ms": cost.sync_ms,
    }


def extrapolation_sentences(grouped: GroupedPlan, problem: Problem, model: CostModel) -> list[str]:
    """Sentences on what a grouped plan's cost extrapolates: a step of one group, and synchronising replicas.

    model: model for the problem of a group.
    """
    sentences = []
    # These come first, as only a few are shown: all weights travel at once, which is much more than steps
    # exchange.
    if grouped.grouping.size < len(problem.topology):
        for works in synchronisation_workloads(grouped, problem):
            sentences += [f"synchronising: {text}" for work in works for text in model.out_of_range(work)]
    return list(dict.fromkeys((*sentences, *model.out_of_range(lower(grouped.plan, grouped.problem)))))
