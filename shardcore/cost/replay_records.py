"""Predictions for replayed plans, next to their measured costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardcore.core.step_cost import StepCost
from shardcore.cost.known_errors import USUAL_ERRORS, errors_of
from shardcore.cost.model import CostModel, price
from shardcore.cost.replay_metrics import ReplayRecord, noise_ms
from shardcore.io.replays import ReplaySet
from shardcore.step.lower import lower


def judge(replayed: Sequence[ReplaySet], model: CostModel, ids: bool = True) -> list[ReplayRecord]:
    """One record for every replay. Times are scaled to a slowdown of 1.

    ids: True if both times include the ms that ids add to a step.
    """
    # A model whose few held-out samples err by less than usual is not known to be better.
    errors, rows = np.maximum(errors_of(model), USUAL_ERRORS), []
    for one in replayed:
        own = model.for_problem(one.problem)
        # fits=False: a replay ran, whatever today's count of memory says.
        steps = {name: lower(plan, one.problem, fits=False) for name, plan in one.plans.items()}
        predicted = {name: price(step, own) for name, step in steps.items()}
        ops_ms = {name: max(cost.compute_ms) for name, cost in predicted.items()}
        # A model predicts a machine at its usual speed.
        costs = {name: cost.at_usual_speed() for name, cost in one.costs.items()}
        rows += [
            ReplayRecord(
                problem=one.problem.name,
                algorithm=algorithm,
                plan=name,
                predicted_ms=_total_ms(predicted[name], ids),
                replayed_ms=_total_ms(costs[name], ids),
                noise_ms=noise_ms(costs[name].step),
                explained_ms=float(
                    errors
                    @ (ops_ms[name], predicted[name].total_ms - predicted[name].dense_ms - ops_ms[name])
                ),
            )
            for algorithm, name in one.made
        ]
    return rows


def _total_ms(cost: StepCost, ids: bool) -> float:
    # Ids add equally much on every device.
    return cost.total_ms - (0.0 if ids else max(cost.input_ms))


def csv_rows(rows: Sequence[ReplayRecord]) -> list[dict[str, Any]]:
    return [
        {k: round(v, 5) if isinstance(v, float) else v for k, v in dataclasses.asdict(r).items()}
        for r in rows
    ]
