import math

import numpy as np
import pytest

from shardcore.cost.metrics import coverage, kendall_tau, mape, spearman


def test_mape_is_relative_to_what_was_measured():
    assert mape(np.array([2.0, 3.0]), np.array([1.0, 4.0])) == pytest.approx((100 + 25) / 2)


def test_kendall_tau():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert kendall_tau(x, 10 * x) == 1
    assert kendall_tau(x, -x) == -1
    assert kendall_tau(x, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(4 / 6)
    assert kendall_tau(x, np.array([1.0, 1.0, 2.0, 3.0])) == pytest.approx(5 / math.sqrt(30))  # tau-b
    assert kendall_tau(x, np.ones(4)) == 0


def test_spearman():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(x, np.exp(x)) == pytest.approx(1) and spearman(x, -x) == pytest.approx(-1)
    assert spearman(x, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert spearman(x, np.array([1.0, 1.0, 2.0, 3.0])) == pytest.approx(0.9486833)  # ties at their mean rank
    assert spearman(x, np.ones(4)) == 0


def test_coverage_counts_the_ends():
    assert (
        coverage(
            np.array([1.0, 1.0, 3.0, 1.0]), np.array([2.0, 2.0, 4.0, 2.0]), np.array([1.0, 2.0, 2.0, 5.0])
        )
        == 50
    )
