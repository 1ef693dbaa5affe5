"""Quantiles hold what they say, whatever the errors are like, and never fall as costs grow."""

import numpy as np
import pytest

from shardcore.cost import band
from shardcore.types import ShardCoreError


def draws(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Predictions, and measurements with skewed errors that are three times as large for small costs."""
    rng = np.random.default_rng(seed)
    predicted = np.exp(rng.uniform(0, 5, n))
    return predicted, predicted * np.exp((0.05 + 0.1 / predicted) * (rng.exponential(1, n) - 0.7))


@pytest.mark.parametrize("level", [0.05, 0.25, 0.5, 0.9, 0.975])
def test_the_share_below_a_quantile_is_its_level(level):
    weights = band.fit(*draws(3000, 0))
    predicted, measured = draws(20_000, 1)
    below = measured < band.quantile(weights, predicted, level)
    assert below.mean() == pytest.approx(level, abs=0.02)
    assert below[predicted < 5].mean() == pytest.approx(level, abs=0.06)


def test_quantiles_grow_with_the_cost_and_the_level():
    rng = np.random.default_rng(0)
    predicted = np.exp(rng.uniform(0, 1, 400))
    weights = band.fit(predicted, predicted * np.exp(np.where(predicted < 1.6, 2.0, 0.01) * rng.normal(size=400)))
    costs = np.exp(np.linspace(-3, 6, 500))
    quantiles = np.stack([band.quantile(weights, costs, level) for level in (0.005, 0.1, 0.5, 0.9, 0.995)])
    assert (np.diff(quantiles, axis=1) > 0).all() and (np.diff(quantiles, axis=0) >= 0).all()


def test_nothing_costs_nothing_at_any_level():
    assert band.quantile(band.fit(*draws(100, 0)), np.zeros(2), 0.9).tolist() == [0.0, 0.0]


def test_few_samples_give_the_largest_error_seen():
    predicted, measured = np.ones(5), np.array([0.8, 0.9, 1.0, 1.1, 1.3])
    assert band.quantile(band.fit(predicted, measured), np.ones(1), 0.99)[0] == pytest.approx(1.3)


@pytest.mark.parametrize("level", [0.0, 0.001, 0.9999, 1.5])
def test_levels_that_are_not_known(level):
    with pytest.raises(ShardCoreError, match=f"level {level:g} .*within 0.005 and 0.995"):
        band.quantile(band.fit(*draws(100, 0)), np.ones(1), level)
