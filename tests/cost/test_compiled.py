"""Compiled heads say what their models' heads say."""

import numpy as np
import pytest

from shardcore.core.types import Setting, Shard
from shardcore.cost import features
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import CostModel, QuantileCostModel, fetched_ms
from shardcore.cost.neural import NeuralModel

DRIVERS = len(features.DRIVERS)
LEVELS = np.array([0.005, 0.5, 0.995])


def neural(knots: int) -> NeuralModel:
    rng = np.random.default_rng(knots)
    weights = {
        "launch": np.array([0.4, 0.1]),
        "load_typical": rng.uniform(1, 1e4, DRIVERS),
        "rates": rng.uniform(0, 1e-5, (DRIVERS, 2)),
        "contention.0.weight": rng.uniform(0, 0.5, (DRIVERS, 5)),
        "contention.0.bias": rng.normal(size=5),
        "contention.1.weight": rng.uniform(0, 0.3, (5, 2)),
        "condition_low": np.full(9, -9.0),
        "condition_high": np.full(9, 30.0),
        "condition_mean": np.zeros(9),
        "condition_sd": np.ones(9),
        "network.0.weight": 0.03 * rng.normal(size=(9, 2)),
        "network.0.bias": np.zeros(2),
        "band.log_ms": np.linspace(-3, 3, knots),
        "band.width": rng.uniform(0.05, 0.2, knots),
        "band.level": LEVELS,
        "band.error": np.array([-2.0, 0.1, 2.5]),
    }
    return NeuralModel(Setting("made-up", 256), weights, {})


MODELS = {
    "analytic": AnalyticModel(Setting("made-up", 256)),
    "neural": neural(4),
    "cautious": QuantileCostModel(neural(4), 0.9),
    "one width": QuantileCostModel(neural(1), 0.2),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_compiled_head_is_the_head(name, tables):
    model: CostModel = MODELS[name]
    sums = np.cumsum(model.encode([Shard.whole(t) for t in tables] * 4), axis=0)
    sums = np.concatenate([np.zeros((1, sums.shape[1])), sums * np.geomspace(1e-3, 1e3, len(sums))[:, None]])
    head, parameters, fetched = model.compiled()
    assert [head(s, parameters) for s in np.ascontiguousarray(sums)] == pytest.approx(
        list(model.head(sums)), rel=1e-12
    )
    assert [head(s, fetched) for s in np.ascontiguousarray(sums)] == pytest.approx(
        list(fetched_ms(model, sums, model.head(sums))), rel=1e-12
    )
    assert head(sums[0], parameters) == head(sums[0], fetched) == 0
