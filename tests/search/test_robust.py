"""Robust plans: chosen over draws of a profile, within what they may cost, and the same for the same seed."""

from dataclasses import replace

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.cost.profile import load_profile
from shardcore.search.budget import Budget
from shardcore.search.robust import RobustConfig, robust
from shardcore.search.sharders import SHARDERS
from shardcore.step.lower import lower

PROFILE = load_profile("nvidia-h100-sxm")
CONFIG = RobustConfig(draws=12, searches=3)


def problem(n: int = 8) -> Problem:
    tables = tuple(
        Table(f"t{i}", 10_000 * (1 + i * i), (32, 64, 128)[i % 3], 1.0 + 7 * (i % 4)) for i in range(3 * n)
    )
    return Problem("robust", tables, PROFILE.topology(1, n), 8192, "rowwise_adagrad")


def planned(problem: Problem, profile=PROFILE, evals: int = 800, **given):
    model = profile.model().for_problem(problem)
    return robust(problem, model, seed=3, budget=Budget(evals=evals), config=CONFIG, **given)


@pytest.fixture(scope="module")
def plan():
    return planned(problem())


def test_its_worst_regret_is_at_most_that_of_the_cheapest_plan(plan):
    result = plan.provenance["robust"]
    assert 0 <= result["mean_regret"] <= result["worst_regret"] <= result["of_cheapest"]["worst_regret"]
    assert 0 <= result["dearer"] <= CONFIG.most_dearer


def test_the_plan_fits_and_is_priced_by_the_profiles_own_rates(plan):
    model = PROFILE.model().for_problem(problem())
    predicted_ms = price(lower(plan, problem()), model).total_ms
    assert predicted_ms == pytest.approx(plan.provenance["predicted_ms"])


def test_a_measurement_removes_a_share_of_the_regret(plan):
    removes = plan.provenance["robust"]["measuring_removes"]
    assert {"lookups", "all-to-alls"} <= removes.keys()
    assert all(0 <= share <= 1 for share in removes.values())


def test_the_same_seed_gives_the_same_plan(plan):
    assert planned(problem()) == plan


def test_a_profile_without_uncertainty_has_no_regret():
    rates = {name: replace(rate, uncertainty=0.0) for name, rate in PROFILE.rates.items()}
    sure = planned(problem(4), replace(PROFILE, rates=rates), 200).provenance["robust"]
    assert sure["worst_regret"] == sure["of_cheapest"]["worst_regret"] == 0
    assert set(sure["measuring_removes"].values()) == {0.0}


def test_a_budget_in_seconds_that_is_over_at_once_still_gives_a_plan():
    model = PROFILE.model().for_problem(problem(4))
    short = robust(problem(4), model, budget=Budget(seconds=1e-3), config=CONFIG)
    assert short.provenance["robust"]["draws"] == CONFIG.draws


def test_any_search_may_be_made_robust():
    assert planned(problem(4), search=SHARDERS["neuroshard"]).provenance["algorithm"] == "neuroshard"


def test_a_model_that_is_no_profiles_is_refused():
    with pytest.raises(ShardCoreError, match="AnalyticModel.*--hardware"):
        robust(problem(4), AnalyticModel(PROFILE.model().for_problem(problem(4)).setting))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"draws": 1}, "draws"),
        ({"searches": 0}, "searches"),
        ({"draws": 4, "searches": 5}, "at most one for each"),
        ({"most_dearer": -0.1}, "most_dearer"),
    ],
)
def test_bad_configs_are_refused_by_name(given, words):
    with pytest.raises(ShardCoreError, match=words):
        RobustConfig(**given)
