"""Costs that differ by rounding only are equal, and ties go to the first."""

import numpy as np
import pytest

from shardcore.cost.model import first_argmin, is_less, is_minimum
from shardcore.search.ties import cost_ranks, min_by_cost, sort_by_cost

NEAR = 1 + 1e-12


@pytest.mark.parametrize(
    "cost, other, less", [(1, 2, True), (2, 1, False), (1, NEAR, False), (NEAR, 1, False)]
)
def test_a_cost_is_less_only_by_more_than_rounding(cost, other, less):
    assert is_less(cost, other) == less
    assert is_less(cost * 1e-20, other * 1e-20) == less


def test_any_cost_is_less_than_an_infinite_one():
    assert is_less(1.0, np.inf)
    assert not is_less(np.inf, np.inf)


def test_the_first_of_the_least_costs_wins_however_they_are_rounded():
    assert first_argmin([3, NEAR, 1, 2]) == first_argmin([3, 1, NEAR, 2]) == 1
    assert first_argmin([-1, -NEAR]) == 0
    assert first_argmin([np.inf, np.inf]) == 0
    assert is_minimum(np.array([[1, 2, NEAR], [np.inf, 5, 5 * NEAR]])).tolist() == [
        [True, False, True],
        [False, True, True],
    ]
    assert min_by_cost(["ab", "c", "d"], len) == "c"


def test_equal_costs_share_a_rank_and_stay_in_order():
    assert cost_ranks([2, NEAR, 5, 1, 2 * NEAR]).tolist() == [1, 0, 2, 0, 1]
    assert cost_ranks([[1, 2], [2, 1], [np.inf, np.inf]]).tolist() == [[0, 1], [1, 0], [0, 0]]
    assert cost_ranks([]).tolist() == []
    assert sort_by_cost([2.0, NEAR, 1.0], lambda x: x) == [NEAR, 1.0, 2.0]
