"""How sharders compare over problems, some of which only some solved."""

import math
from dataclasses import replace

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.step_cost import StepCost
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget, compare, known

COSTS = {"a": [1.0, 2.0, None, 4.0], "b": [2.0, 2.0, 3.0, 2.0], "c": [4.0, 1.0, 5.0, math.nan]}
SECONDS = {"a": [1.0, 3.0, 100.0, 9.0], "b": [2.0, 2.0, 2.0, 2.0], "c": []}


def test_costs_are_compared_where_all_solved_and_the_share_solved_stands_beside_them():
    found = compare.standings(COSTS, SECONDS, "b")
    assert [s.solved for s in found.values()] == [0.75, 1.0, 0.75] and {s.common for s in found.values()} == {
        2
    }
    assert (
        found["a"].cost == pytest.approx((0.5 + 1) / 2)
        and found["a"].worst == 1.0
        and found["a"].seconds == 2.0
    )
    assert found["b"].cost == found["b"].worst == 1.0 and found["c"].cost == pytest.approx((2 + 0.5) / 2)
    assert math.isnan(found["c"].seconds)


def test_without_a_reference_each_is_held_against_the_best_of_the_others():
    found = compare.standings(COSTS, SECONDS)
    assert found["a"].cost == pytest.approx((1 / 2 + 2 / 1) / 2) and found["b"].cost == pytest.approx(
        (2 / 1 + 2 / 1) / 2
    )
    assert compare.standings({"a": [2.0]}, {"a": [1.0]})["a"].cost == 1.0


def test_where_no_problem_was_solved_by_all_there_are_shares_alone():
    found = compare.standings({"a": [1.0, None], "b": [None, 1.0]}, {"a": [1.0, 1.0], "b": [1.0, 1.0]}, "a")
    assert all(
        s.solved == 0.5 and s.common == 0 and math.isnan(s.cost) and math.isnan(s.seconds)
        for s in found.values()
    )


def test_an_outcome_has_a_plan_or_says_why_there_is_none(tables):
    problem, model = (
        Problem("p", tables, Topology((Device(1 << 26),) * 2), 240),
        AnalyticModel(Setting("test", 240)),
    )
    found = compare.run("random", problem, model)
    assert found.plan and found.cost and found.error is None
    none = compare.run("size_greedy", replace(problem, topology=Topology((Device(1),) * 2)), model)
    assert none.plan is none.cost is None and "does not fit" in none.error
    with pytest.raises(ShardCoreError, match="'best' is not known; there are portfolio, anneal"):
        compare.run("best", problem, model)


def test_where_torchrec_is_not_installed_its_planner_says_so(monkeypatch):
    monkeypatch.delitem(SHARDERS, "torchrec", raising=False)
    with pytest.raises(ShardCoreError, match="'torchrec' needs TorchRec, .*installed: pip install --no-"):
        known("torchrec")


@pytest.mark.parametrize("name", ["magic", "milp", "local"])
def test_a_name_that_is_not_known_is_refused_with_those_that_are(name):
    with pytest.raises(ShardCoreError, match=f"algorithm '{name}' is not known; there are portfolio, anneal"):
        known(name)


def test_balance_is_mean_over_largest_compute():
    assert compare.balance(StepCost((1.0, 0.0), (2.0, 1.0), (9.0, 9.0), (9.0, 9.0), (0.0, 2.0))) == 2 / 3
    assert compare.balance(StepCost(*((0.0, 0.0),) * 5)) == 1.0


def test_plans_worth_a_replay_are_the_same_for_a_seed_and_of_every_kind(tables):
    problem, model = (
        Problem("p", tables, Topology((Device(1 << 26),) * 2), 240),
        AnalyticModel(Setting("test", 240)),
    )
    found, again = (
        compare.plans(problem, model, seed=3, budget=Budget(evals=200), random=2) for _ in range(2)
    )
    assert [o.plan for o in found] == [o.plan for o in again]
    names = [o.algorithm for o in found]
    assert (
        set(compare.WORTH_REPLAYING) < set(names) and names.count("random") == 2 and names[0] == "portfolio"
    )


def test_replayed_figures_compare_against_the_default_sharder():
    """cost/ sees no search, so it has the name again."""
    from shardcore.cost import replay_metrics

    assert replay_metrics.OURS == DEFAULT_SHARDER
