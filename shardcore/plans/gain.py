"""The gain of one plan over another, with an interval of the difference, not of the two costs.

Two plans of a problem share most errors of the model. Let a and b be the ms of compute, or of exchanges,
under both plans, sigma the model's error of it (cost/known_errors.py), and c the share of its work that the plans place
otherwise. Errors of what stays are the same in both, those of what moves are independent:

    var = sigma² (a² + b² - 2 (1 - c) a b)

summed over compute and exchanges. The margin is CALIBRATION times its root.

The calibration is that of 135 pairs of replayed plans of nine problems, which the model did not see: the
quantile at CONFIDENCE of the error of a difference over that root. The 105 pairs of drawn plans that are
kept now give 0.39 (tests/plans/test_gain.py). It is below 1, for a step adds up many ops and exchanges, whose
errors partly cancel, and errors of single samples hold their noise too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

from shardcore.core.types import Plan, Problem, Shard
from shardcore.cost.known_errors import known_model_errors
from shardcore.cost.model import CostModel, PricedPlan
from shardcore.step.access import access_share, output_bytes
from shardcore.step.kinds import shards_by_device

CONFIDENCE = 0.9
CALIBRATION = 0.56


@dataclass(frozen=True)
class PlanGain:
    """The ms that a plan saves over another one.

    ms: saved ms of a step.
    margin_ms: the real difference is within `ms` ± this with probability CONFIDENCE.
    before_ms: cost of the other plan.
    """

    ms: float
    margin_ms: float
    before_ms: float

    def exceeds_margin(self, threshold: float = 0.0) -> bool:
        """Tell if the gain exceeds both its margin of error and a share of the cost before."""
        return self.ms > max(self.margin_ms, threshold * self.before_ms)

    def __str__(self) -> str:
        before_ms = self.before_ms or 1.0
        return f"gain {self.ms / before_ms:.1%} ± {self.margin_ms / before_ms:.1%}"


def plan_gain(old_plan: PricedPlan, new_plan: PricedPlan, problem: Problem, model: CostModel) -> PlanGain:
    """Predicted gain of a plan over another plan of the same tables, with the cost model's margin of error."""
    plans, costs = (old_plan.plan, new_plan.plan), (old_plan.cost, new_plan.cost)
    # Work of lookups: a range of rows counts by its share of them.
    lookups = _changed_work_share(*plans, lambda s: s.table.lookups_per_sample * s.width * access_share(s))
    # Bytes of outputs stand for those of all exchanges.
    sent = _changed_work_share(*plans, lambda s: output_bytes(s, problem.global_batch))
    compute = [max(cost.compute_ms) for cost in costs]
    # Exchanges here are all of the step but the slowest compute and the dense model.
    exchanges = [cost.total_ms - cost.dense_ms - ms for cost, ms in zip(costs, compute, strict=True)]
    # Changes of compute and of exchanges err independently.
    variance = sum(
        error**2 * (a * a + b * b - 2 * (1 - changed) * a * b)
        for error, changed, (a, b) in zip(
            known_model_errors(model), (lookups, sent), (compute, exchanges), strict=True
        )
    )
    totals = [cost.total_ms for cost in costs]
    return PlanGain(totals[0] - totals[1], CALIBRATION * sqrt(max(0.0, variance)), totals[0])


def _changed_work_share(old: Plan, new: Plan, work: Callable[[Shard], float]) -> float:
    """Share of work, 0 to 1, that is on other devices under the new plan than under the old one."""
    # Work is summed over both plans, so that a plan which moved everything has a share of 1.
    before, after = _work_by_placement(old, work), _work_by_placement(new, work)
    total = sum(before.values()) + sum(after.values())
    return sum(abs(before[k] - after[k]) for k in before.keys() | after.keys()) / total if total else 0.0


def _work_by_placement(plan: Plan, work: Callable[[Shard], float]) -> dict[Any, float]:
    """Work of a plan by device, kind, table and rows. Which columns of a table a device has does not matter."""
    placed: dict[Any, float] = defaultdict(float)
    for p in plan.placements:
        for device, shard in shards_by_device(p):
            placed[device, p.kind, shard.table.name, shard.row_lo] += work(shard)
    return placed
