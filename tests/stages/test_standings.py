"""Comparison of sharders over problems, some of which only some solved."""

import math

import pytest

from shardcore.stages.evaluate import compute_standings

COSTS = {"a": [1.0, 2.0, None, 4.0], "b": [2.0, 2.0, 3.0, 2.0], "c": [4.0, 1.0, 5.0, math.nan]}
SECONDS = {"a": [1.0, 3.0, 100.0, 9.0], "b": [2.0, 2.0, 2.0, 2.0], "c": []}


def test_costs_are_compared_where_all_solved_and_the_share_solved_stands_beside_them():
    found = compute_standings(COSTS, SECONDS, "b")
    assert [s.solved for s in found.values()] == [0.75, 1.0, 0.75]
    assert {s.common for s in found.values()} == {2}
    a, b, c = found.values()
    assert (a.cost, a.worst, a.seconds) == (pytest.approx((0.5 + 1) / 2), 1.0, 2.0)
    assert b.cost == b.worst == 1.0 and c.cost == pytest.approx((2 + 0.5) / 2)
    assert math.isnan(c.seconds)


def test_without_a_reference_each_is_held_against_the_best_of_the_others():
    found = compute_standings(COSTS, SECONDS)
    assert found["a"].cost == pytest.approx((1 / 2 + 2 / 1) / 2)
    assert found["b"].cost == pytest.approx((2 / 1 + 2 / 1) / 2)
    assert compute_standings({"a": [2.0]}, {"a": [1.0]})["a"].cost == 1.0


def test_where_no_problem_was_solved_by_all_there_are_shares_alone():
    costs, seconds = {"a": [1.0, None], "b": [None, 1.0]}, {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    for standing in compute_standings(costs, seconds, "a").values():
        assert (standing.solved, standing.common) == (0.5, 0)
        assert math.isnan(standing.cost) and math.isnan(standing.seconds)
