"""Quantiles hold what they say, whatever the errors are like, and never fall as costs grow."""

import numpy as np
import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.cost import quantiles


def draws(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Predictions, and measurements with skewed errors that are three times as large for small costs."""
    rng = np.random.default_rng(seed)
    predicted = np.exp(rng.uniform(0, 5, n))
    return predicted, predicted * np.exp((0.05 + 0.1 / predicted) * (rng.exponential(1, n) - 0.7))


@pytest.mark.parametrize("level", [0.05, 0.25, 0.5, 0.9, 0.975])
def test_the_share_below_a_quantile_is_its_level(level):
    weights = quantiles.fit_error_quantiles(*draws(3000, 0))
    predicted, measured = draws(20_000, 1)
    below = measured < predicted * quantiles.quantile_factors(weights, predicted, level)
    assert below.mean() == pytest.approx(level, abs=0.02)
    assert below[predicted < 5].mean() == pytest.approx(level, abs=0.06)


def test_quantiles_grow_with_the_cost_and_the_level():
    rng = np.random.default_rng(0)
    predicted = np.exp(rng.uniform(0, 1, 400))
    weights = quantiles.fit_error_quantiles(
        predicted, predicted * np.exp(np.where(predicted < 1.6, 2.0, 0.01) * rng.normal(size=400))
    )
    costs = np.exp(np.linspace(-3, 6, 500))
    of_levels = np.stack(
        [costs * quantiles.quantile_factors(weights, costs, level) for level in (0.005, 0.1, 0.5, 0.9, 0.995)]
    )
    assert (np.diff(of_levels, axis=1) > 0).all() and (np.diff(of_levels, axis=0) >= 0).all()


@pytest.mark.parametrize(
    "level, ms",
    [(0.99, 1.3), (0.5, 1.0), (0.25, (0.8 * 0.9) ** 0.5), (0.75, (1.1 * 1.3) ** 0.5), (0.01, 0.8)],
)
def test_few_samples_by_hand(level, ms):
    """Five errors cut the next one's place into six: a half lies below the middle one, a quarter below what
    is half-way between the first two (on a log scale); beyond the largest nothing is known."""
    predicted, measured = np.ones(5), np.array([1.1, 0.8, 1.3, 1.0, 0.9])
    weights = quantiles.fit_error_quantiles(predicted, measured)
    assert quantiles.quantile_factors(weights, np.ones(1), level)[0] == pytest.approx(ms)
    assert weights["band.width"] == pytest.approx([np.abs(np.log(measured)).mean()])


def test_a_width_needs_fifty_samples_and_four_are_enough():
    assert [len(quantiles.fit_error_quantiles(*draws(n, 0))["band.width"]) for n in (99, 100, 199, 1000)] == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("level", [0.0, 0.001, 0.9999, 1.5])
def test_levels_that_are_not_known(level):
    with pytest.raises(ShardCoreError, match=f"level {level:g} .*within 0.005 and 0.995"):
        quantiles.quantile_factors(quantiles.fit_error_quantiles(*draws(100, 0)), np.ones(1), level)
