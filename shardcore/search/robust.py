"""Plans that stay good where a profile's rates are wrong.

A profile knows how uncertain each of its rates is. Profiles are drawn within that, and plans are searched under some
of them. The plan whose worst regret over all draws is least is returned. Regret under a draw is the cost of a plan
relative to the cheapest of all plans that were found, less 1.

Shapes: P plans, K draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.core import progress
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import require, require_within
from shardcore.cost.model import CostModel, price
from shardcore.cost.profile import COLLECTIVES, Profile
from shardcore.search.budget import Budget
from shardcore.search.sharders import DEFAULT_SHARDER, SHARDERS
from shardcore.search.state.shards import priced
from shardcore.step.lower import Workload, lower

CAMPAIGNS: Mapping[str, tuple[str, ...]] = {
    **{collective: (f"{collective}_",) for collective in COLLECTIVES},
    "rows in host memory": ("host_",),
    "replicas": ("dense_",),
    "work on ids": ("bucketize_", "order_"),
}
"""Rates by what has to be measured to know them: prefixes of their names. All others: lookups."""
LOOKUPS = "lookups"


@dataclass(frozen=True)
class RobustConfig:
    """Effort of `robust`.

    draws: profiles under which plans are judged.
    searches: draws under which a plan is also searched. At most `draws`.
    most_dearer: cost under the profile's own rates that robustness may take, relative to the cheapest plan.
    algorithm: the search, a name of SHARDERS.
    """

    draws: int = 48
    searches: int = 8
    most_dearer: float = 0.02
    algorithm: str = DEFAULT_SHARDER

    def __post_init__(self) -> None:
        require_within(self, "a robust plan", draws=(2, 10_000), searches=(1, 10_000), most_dearer=(0, 10))
        require(
            self.searches <= self.draws,
            f"a robust plan has {self.searches} searches; it needs at most one for each of its {self.draws} draws",
        )


@dataclass(frozen=True)
class Regret:
    """Regret of a plan over draws of a profile, as a share of the step. worst: of all. mean: over them."""

    worst: float
    mean: float


@dataclass(frozen=True)
class Robust:
    """A plan that is good under many draws of a profile.

    plan: its provenance has the regrets, too.
    regret: of the plan.
    mean_rates_regret: of the cheapest plan under the profile's own rates.
    dearer: cost of the plan under these rates, relative to the cheapest, less 1.
    removes: share of `mean_rates_regret.mean` that a measurement would remove, by what is measured.
    """

    plan: Plan
    regret: Regret
    mean_rates_regret: Regret
    dearer: float
    removes: Mapping[str, float]


def robust(
    problem: Problem,
    profile: Profile,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    config: RobustConfig = RobustConfig(),
) -> Robust:
    """The plan whose worst regret over draws of a profile is least.

    budget: of all searches together. The one under the profile's own rates takes half.

    Raises what the search raises.
    """
    rng = np.random.default_rng(seed)
    profiles = [profile.drawn(rng) for _ in range(config.draws)]
    searched = [profile, *profiles[: config.searches]]
    plans: list[Plan] = []
    for number, under in enumerate(searched):
        part = 0.5 if not number else 0.5 / config.searches
        progress.report(f"search {number + 1} of {len(searched)}, of draws of profile {profile.name}")
        plans.append(
            SHARDERS[config.algorithm](problem, _model(under, problem), seed=seed, budget=_part(budget, part))
        )
    # Several draws often lead to the same plan.
    plans = list({plan.placements: plan for plan in plans}.values())
    workloads = [lower(plan, problem) for plan in plans]
    cost_ms = _cost_ms(workloads, profiles, problem)  # [P, K]
    own_ms = _cost_ms(workloads, [profile], problem)[:, 0]  # [P]
    regrets = cost_ms / cost_ms.min(0) - 1
    affordable = own_ms <= own_ms.min() * (1 + config.most_dearer)
    best = int(np.where(affordable, regrets.max(1), np.inf).argmin())
    cheapest = int(own_ms.argmin())
    removes = {
        campaign: _removed(regrets, _cost_ms(workloads, known, problem), cheapest)
        for campaign, known in _measured(profile, profiles).items()
    }
    regret, of_mean = (Regret(float(r.max()), float(r.mean())) for r in (regrets[best], regrets[cheapest]))
    dearer = float(own_ms[best] / own_ms.min() - 1)
    found = {
        "draws": config.draws,
        "worst_regret": regret.worst,
        "mean_regret": regret.mean,
        "worst_regret_of_mean_rates": of_mean.worst,
        "dearer": dearer,
    }
    provenance = {**plans[best].provenance, "robust": found}
    plan = priced(plans[best].placements, problem, _model(profile, problem), **provenance)
    return Robust(plan, regret, of_mean, dearer, removes)


def _model(profile: Profile, problem: Problem) -> CostModel:
    return profile.model().for_problem(problem)


def _part(budget: Budget | None, share: float) -> Budget | None:
    """A share of a budget."""
    if budget is None:
        return None
    return Budget(
        None if budget.evals is None else max(1, int(budget.evals * share)),
        None if budget.seconds is None else budget.seconds * share,
    )


def _cost_ms(workloads: Sequence[Workload], profiles: Sequence[Profile], problem: Problem) -> np.ndarray:
    """[P, K] ms of a step of each plan under each profile."""
    models = [_model(profile, problem) for profile in profiles]
    return np.array([[price(workload, model).total_ms for model in models] for workload in workloads])


def _campaign(rate: str) -> str:
    """The campaign that measures a rate."""
    return next((name for name, prefixes in CAMPAIGNS.items() if rate.startswith(prefixes)), LOOKUPS)


def _measured(profile: Profile, profiles: Sequence[Profile]) -> dict[str, list[Profile]]:
    """For each campaign, [K] profiles with its rates as drawn and all others as the profile has them."""
    return {
        campaign: [
            dataclasses.replace(
                profile,
                rates={
                    name: (drawn if _campaign(name) == campaign else profile).rates[name]
                    for name in profile.rates
                },
            )
            for drawn in profiles
        ]
        for campaign in (LOOKUPS, *CAMPAIGNS)
    }


def _removed(regrets: np.ndarray, known_ms: np.ndarray, cheapest: int) -> float:
    """Share of the mean regret that goes if each draw's plan is chosen by what a campaign would tell.

    known_ms: [P, K] costs with the campaign's rates as drawn.
    """
    before = regrets[cheapest].mean()
    after = regrets[known_ms.argmin(0), np.arange(regrets.shape[1])].mean()
    return float(max(0.0, 1 - after / before)) if before > 0 else 0.0
