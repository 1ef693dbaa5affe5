import math

import numpy as np
import pytest

from shardcore.cost.metrics import interval_coverage, kendall_tau, mape, mean_interval


def test_mape_is_relative_to_what_was_measured():
    assert mape(np.array([2.0, 3.0]), np.array([1.0, 4.0])) == pytest.approx((100 + 25) / 2)


def test_kendall_tau():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert kendall_tau(x, 10 * x) == 1
    assert kendall_tau(x, -x) == -1
    assert kendall_tau(x, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(4 / 6)
    assert kendall_tau(x, np.array([1.0, 1.0, 2.0, 3.0])) == pytest.approx(5 / math.sqrt(30))  # tau-b
    assert kendall_tau(x, np.ones(4)) == 0


def test_a_mean_has_students_interval():
    found = mean_interval(np.array([1.0, 2.0, 6.0, np.nan]))
    half = 4.302653 * math.sqrt(7 / 3)  # the 97.5% quantile of two degrees of freedom, sd² = 7
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 3 - half, 3 + half))
    one = mean_interval(np.array([2.0]))
    assert (one.mean, one.low, one.high) == (2.0, -math.inf, math.inf)
    assert math.isnan(mean_interval(np.array([np.nan])).mean)


def test_the_interval_covers_as_it_says_also_for_few_values():
    rng = np.random.default_rng(1)
    for n in (3, 30):
        found = [mean_interval(rng.normal(5, 1, n)) for _ in range(400)]
        assert 0.92 < np.mean([x.low < 5 < x.high for x in found]) < 0.98


def test_coverage_counts_the_ends():
    assert (
        interval_coverage(
            np.array([1.0, 1.0, 3.0, 1.0]), np.array([2.0, 2.0, 4.0, 2.0]), np.array([1.0, 2.0, 2.0, 5.0])
        )
        == 50
    )
