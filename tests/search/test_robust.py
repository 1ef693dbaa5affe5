"""Robust plans: chosen over draws of a profile, within what they may cost, and the same for the same seed."""

from dataclasses import replace

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem, Table
from shardcore.cost.model import price
from shardcore.cost.profile import load_profile
from shardcore.search.budget import Budget
from shardcore.search.robust import RobustConfig, robust
from shardcore.step.lower import lower

PROFILE = load_profile("nvidia-h100-sxm")
CONFIG = RobustConfig(draws=12, searches=3)


def problem(n: int = 8) -> Problem:
    tables = tuple(
        Table(f"t{i}", 10_000 * (1 + i * i), (32, 64, 128)[i % 3], 1.0 + 7 * (i % 4)) for i in range(3 * n)
    )
    return Problem("robust", tables, PROFILE.topology(1, n), 8192, "rowwise_adagrad")


@pytest.fixture(scope="module")
def found():
    return robust(problem(), PROFILE, seed=3, budget=Budget(evals=800), config=CONFIG)


def test_its_worst_regret_is_at_most_that_of_the_cheapest_plan(found):
    assert 0 <= found.regret.mean <= found.regret.worst <= found.mean_rates_regret.worst
    assert 0 <= found.dearer <= CONFIG.most_dearer
    assert found.plan.provenance["robust"]["worst_regret"] == found.regret.worst


def test_the_plan_fits_and_is_priced_by_the_profiles_own_rates(found):
    model = PROFILE.model().for_problem(problem())
    assert price(lower(found.plan, problem()), model).total_ms == pytest.approx(
        found.plan.provenance["predicted_ms"]
    )


def test_a_measurement_removes_a_share_of_the_regret(found):
    assert {"lookups", "all_to_all"} <= found.removes.keys()
    assert all(0 <= share <= 1 for share in found.removes.values())


def test_the_same_seed_gives_the_same_plan(found):
    again = robust(problem(), PROFILE, seed=3, budget=Budget(evals=800), config=CONFIG)
    assert again.plan.placements == found.plan.placements and again.regret == found.regret


def test_a_profile_without_uncertainty_has_no_regret():
    rates = {name: replace(rate, uncertainty=0.0) for name, rate in PROFILE.rates.items()}
    sure = robust(problem(4), replace(PROFILE, rates=rates), budget=Budget(evals=200), config=CONFIG)
    assert sure.regret.worst == sure.mean_rates_regret.worst == 0
    assert set(sure.removes.values()) == {0.0}


@pytest.mark.parametrize(
    "given, words",
    [
        ({"draws": 1}, "draws"),
        ({"searches": 0}, "searches"),
        ({"draws": 4, "searches": 5}, "at most one for each"),
        ({"most_dearer": -0.1}, "most_dearer"),
        ({"algorithm": "annael"}, "annael"),
    ],
)
def test_bad_configs_are_refused_by_name(given, words):
    with pytest.raises(ShardCoreError, match=words):
        robust(problem(4), PROFILE, budget=Budget(evals=10), config=RobustConfig(**given))
