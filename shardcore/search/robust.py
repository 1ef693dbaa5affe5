"""Plans that stay good where a model's rates are wrong.

A hardware profile knows how uncertain each of its rates is. Rates are drawn within that. A search finds a plan
under the profile's own rates. Annealing improves this plan under each of some draws: fresh starts would take most
of the time. Of all these plans the one with the least worst regret over all draws is returned. Regret under a draw
is a plan's cost relative to the cheapest of these plans, less 1.

Shapes: P plans, K draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.core import progress
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import require, require_within
from shardcore.cost.model import CostModel, UncertainCostModel
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.budget import Budget
from shardcore.search.portfolio import annealing
from shardcore.search.sharders import DEFAULT_SHARDER, SHARDERS, Sharder
from shardcore.search.state.shards import priced
from shardcore.step.lower import Workload, lower

_FIRST_SHARE = 0.75
"""Share of the budget that the search under the model's own rates has."""
_PRICINGS = 4
"""Times, about, that all plans are priced under all draws: as drawn, and as known after each measurement."""


@dataclass(frozen=True)
class RobustConfig:
    """Effort of `robust`.

    draws: of the model's rates, under which plans are judged.
    searches: draws under which that plan is improved. At most `draws`.
    most_dearer: cost under the model's own rates that robustness may take, relative to the cheapest plan.
    """

    draws: int = 32
    searches: int = 8
    most_dearer: float = 0.02

    def __post_init__(self) -> None:
        require_within(self, "a robust plan", draws=(2, 10_000), searches=(1, 10_000), most_dearer=(0, 10))
        require(
            self.searches <= self.draws,
            f"a robust plan has {self.searches} searches; it needs at most one for each of its {self.draws} draws",
        )


def robust(
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    search: Sharder = SHARDERS[DEFAULT_SHARDER],
    config: RobustConfig = RobustConfig(),
) -> Plan:
    """The plan whose worst regret over draws of the model's rates is least. A Sharder that wraps another.

    budget: of all searches together. The one under the model's own rates takes three quarters: a plan far from the best
      loses more than wrong rates cost. Judging the plans has up to an eighth of the seconds.

    The plan's provenance has "robust":

    worst_regret, mean_regret: over the draws, as shares of the step.
    of_cheapest: the same two of the cheapest plan under the model's own rates.
    dearer: cost of the plan under these rates, relative to the cheapest, less 1.
    measuring_removes: share of the cheapest plan's mean regret that a measurement would remove, by what is measured.

    Raises ShardCoreError for a model that is no profile's, and what the search raises.
    """
    if not isinstance(model, UncertainCostModel):
        raise ShardCoreError(
            f"model {type(model).__name__} does not know how uncertain its rates are; a robust plan needs a hardware "
            "profile's (--hardware)"
        )
    rng = np.random.default_rng(seed)
    # Drawn before any search, so that draws depend on the seed only.
    models = [model.drawn(rng) for _ in range(config.draws)]
    plans = [search(problem, model, seed=seed, budget=_part(budget, _FIRST_SHARE))]
    judging_s = _judging_s(plans[0], problem, model, config)
    part = _part(budget, (1 - _FIRST_SHARE) / config.searches, judging_s / config.searches)
    start, algorithm = Reshard(plans[0], alone=True), plans[0].provenance["algorithm"]
    for number, truth in enumerate(models[: config.searches], start=1):
        progress.report(f"search under draw {number} of {config.searches} of the model's rates")
        plans.append(annealing(problem, truth, seed=seed + number, budget=part, reshard=start))
    # Several draws often lead to the same plan.
    plans = list({plan.placements: plan for plan in plans}.values())
    workloads = [lower(plan, problem) for plan in plans]
    progress.report(f"judging {len(plans)} plans under {config.draws} draws")
    # Lowered once: only the rates differ between draws.
    cost_ms = _cost_ms(workloads, models)  # [P, K]
    own_ms = _cost_ms(workloads, [model])[:, 0]  # [P]
    # Relative to the cheapest plan known under each draw, as the true optimum is not known.
    regrets = cost_ms / cost_ms.min(0) - 1
    # The model's own rates are its best guess, so a plan may lose only so much under them.
    affordable = own_ms <= own_ms.min() * (1 + config.most_dearer)
    best = int(np.where(affordable, regrets.max(1), np.inf).argmin())
    cheapest = int(own_ms.argmin())
    robustness = {
        "draws": config.draws,
        **_regret(regrets[best]),
        "of_cheapest": _regret(regrets[cheapest]),
        "dearer": float(own_ms[best] / own_ms.min() - 1),
        "measuring_removes": {
            measured: _removed(
                regrets, workloads, [model.informed(truth, measured) for truth in models], own_ms
            )
            for measured in model.measurable
        },
    }
    provenance = {**plans[best].provenance, "algorithm": algorithm, "robust": robustness}
    return priced(plans[best].placements, problem, model, **provenance)


def _regret(regrets: np.ndarray) -> dict[str, float]:
    """The worst and the mean of regrets [K]."""
    return {"worst_regret": float(regrets.max()), "mean_regret": float(regrets.mean())}


def _part(budget: Budget | None, share: float, spare_s: float = 0.0) -> Budget | None:
    """A share of a budget. spare_s: seconds of it for other work, of which it gives up to a half."""
    if budget is None:
        return None
    return Budget(
        None if budget.evals is None else max(1, int(budget.evals * share)),
        None if budget.seconds is None else budget.seconds * share - min(spare_s, budget.seconds * share / 2),
    )


def _judging_s(plan: Plan, problem: Problem, model: UncertainCostModel, config: RobustConfig) -> float:
    """About the seconds that judging takes, from those of one price."""
    workload, began_s = lower(plan, problem), progress.clock()
    _cost_ms([workload], [model] * config.draws)
    return (progress.clock() - began_s) * (1 + config.searches) * _PRICINGS


def _cost_ms(workloads: Sequence[Workload], models: Sequence[UncertainCostModel]) -> np.ndarray:
    """[P, K] ms of a step of each plan under each model."""
    return np.array([models[0].steps_ms(workload, models) for workload in workloads])


def _removed(
    regrets: np.ndarray,
    workloads: Sequence[Workload],
    informed: Sequence[UncertainCostModel],
    own_ms: np.ndarray,
) -> float:
    """Share of the mean regret that goes if each draw's plan is chosen with the measured rates known.

    regrets: [P, K].
    informed: [K] models with the measured rates as drawn.
    own_ms: [P] costs under the model's own rates. The cheapest plan's regret counts.
    """
    before = regrets[own_ms.argmin()].mean()
    # Rates that no plan depends on need no further look: most problems have no replicas, or no rows in host memory.
    if before == 0 or np.array_equal(_cost_ms(workloads, informed[:1])[:, 0], own_ms):
        return 0.0
    chosen = _cost_ms(workloads, informed).argmin(0)
    after = regrets[chosen, np.arange(regrets.shape[1])].mean()
    return float(max(0.0, 1 - after / before))
