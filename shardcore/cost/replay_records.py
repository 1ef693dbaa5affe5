"""Predictions for replayed plans, next to their measured costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardcore.core.step_cost import PARTS, StepCost
from shardcore.cost.model import CostModel, price
from shardcore.cost.replay_metrics import ReplayRecord, noise_ms
from shardcore.io.replays import ReplaySet
from shardcore.step.lower import lower


def judge(replayed: Sequence[ReplaySet], model: CostModel, ids: bool = True) -> list[ReplayRecord]:
    """One record for every replay. Times are scaled to a slowdown of 1.

    ids: True if both times include the ms that ids add to a step.
    """
    rows = []
    for one in replayed:
        own = model.for_problem(one.problem)
        # fits=False: a replay ran, whatever today's count of memory says.
        steps = {name: lower(plan, one.problem, fits=False) for name, plan in one.plans.items()}
        predicted = {name: _total_ms(price(step, own), ids) for name, step in steps.items()}
        # A model predicts a machine at its usual speed.
        costs = {name: cost.at_usual_speed() for name, cost in one.costs.items()}
        rows += [
            ReplayRecord(
                problem=one.problem.name,
                algorithm=algorithm,
                plan=name,
                predicted_ms=predicted[name],
                replayed_ms=_total_ms(costs[name], ids),
                noise_ms=noise_ms(costs[name].step),
            )
            for algorithm, name in one.made
        ]
    return rows


def _total_ms(cost: StepCost, ids: bool) -> float:
    # Ids add equally much on every device.
    return cost.total_ms - (0.0 if ids else max(cost.input_ms))


def parts(replayed: Sequence[ReplaySet], model: CostModel) -> dict[str, float]:
    """Measured over predicted time of each part of a step, over all replays. Keys are step_cost.PARTS."""

    def of(cost: StepCost) -> np.ndarray:
        # Sums over devices: parts of single devices are noisy.
        return np.array([sum(getattr(cost, name)) for name in PARTS])

    predicted = took = np.zeros(len(PARTS))
    for one in replayed:
        own = model.for_problem(one.problem)
        for name, plan in one.plans.items():
            predicted = predicted + of(price(lower(plan, one.problem, fits=False), own))
            took = took + of(one.costs[name].at_usual_speed())
    # A part that no replay has, such as ids of one device, has no ratio.
    return {name: float(t / p) for name, p, t in zip(PARTS, predicted, took, strict=True) if p > 0}


def csv_rows(rows: Sequence[ReplayRecord]) -> list[dict[str, Any]]:
    return [
        {k: round(v, 5) if isinstance(v, float) else v for k, v in dataclasses.asdict(r).items()}
        for r in rows
    ]
