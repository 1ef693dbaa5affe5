"""Comparison of sharders over problems, some of which only some solved."""

import math
from dataclasses import replace

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.step_cost import StepCost
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import DEFAULT_SHARDER, SHARDERS, compare, known

COSTS = {"a": [1.0, 2.0, None, 4.0], "b": [2.0, 2.0, 3.0, 2.0], "c": [4.0, 1.0, 5.0, math.nan]}
SECONDS = {"a": [1.0, 3.0, 100.0, 9.0], "b": [2.0, 2.0, 2.0, 2.0], "c": []}


def solvable(tables) -> tuple[Problem, AnalyticModel]:
    problem = Problem("p", tables, Topology((Device(1 << 26),) * 2), 240)
    return problem, AnalyticModel(Setting("test", 240))


def test_costs_are_compared_where_all_solved_and_the_share_solved_stands_beside_them():
    standings = compare.standings(COSTS, SECONDS, "b")
    assert [s.solved for s in standings.values()] == [0.75, 1.0, 0.75]
    assert {s.common for s in standings.values()} == {2}
    a, b, c = standings.values()
    assert (a.cost, a.worst, a.seconds) == (pytest.approx((0.5 + 1) / 2), 1.0, 2.0)
    assert b.cost == b.worst == 1.0 and c.cost == pytest.approx((2 + 0.5) / 2)
    assert math.isnan(c.seconds)


def test_without_a_reference_each_is_held_against_the_best_of_the_others():
    standings = compare.standings(COSTS, SECONDS)
    assert standings["a"].cost == pytest.approx((1 / 2 + 2 / 1) / 2)
    assert standings["b"].cost == pytest.approx((2 / 1 + 2 / 1) / 2)
    assert compare.standings({"a": [2.0]}, {"a": [1.0]})["a"].cost == 1.0


def test_where_no_problem_was_solved_by_all_there_are_shares_alone():
    costs, seconds = {"a": [1.0, None], "b": [None, 1.0]}, {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    for standing in compare.standings(costs, seconds, "a").values():
        assert (standing.solved, standing.common) == (0.5, 0)
        assert math.isnan(standing.cost) and math.isnan(standing.seconds)


def test_an_outcome_has_a_plan_or_says_why_there_is_none(tables):
    problem, model = solvable(tables)
    outcome = compare.run("random", problem, model)
    assert outcome.plan and outcome.cost and outcome.error is None
    none = compare.run("size_greedy", replace(problem, topology=Topology((Device(1),) * 2)), model)
    assert none.plan is none.cost is None and "does not fit" in none.error
    with pytest.raises(ShardCoreError, match="'best' is not known; there are portfolio, anneal"):
        compare.run("best", problem, model)


def test_where_torchrec_is_not_installed_its_planner_says_so(monkeypatch):
    monkeypatch.delitem(SHARDERS, "torchrec", raising=False)
    monkeypatch.setattr("shardcore.torchrec.sharder.find_spec", lambda name: None)
    with pytest.raises(
        ShardCoreError,
        match="'torchrec' runs .*not installed .*: pip install .*torchrec==",
    ):
        known("torchrec")


@pytest.mark.parametrize("name", ["magic", "milp", "local"])
def test_a_name_that_is_not_known_is_refused_with_those_that_are(name):
    with pytest.raises(ShardCoreError, match=f"algorithm '{name}' is not known; there are portfolio, anneal"):
        known(name)


def test_balance_is_mean_over_largest_compute():
    assert compare.balance(StepCost((1.0, 0.0), (2.0, 1.0), (9.0, 9.0), (9.0, 9.0), (0.0, 2.0))) == 2 / 3
    assert compare.balance(StepCost(*((0.0, 0.0),) * 5)) == 1.0


def test_replayed_figures_compare_against_the_default_sharder():
    """cost/ imports no search, so it states the name again."""
    from shardcore.cost import replay_metrics

    assert replay_metrics.OURS == DEFAULT_SHARDER
