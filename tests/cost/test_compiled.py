"""Compiled heads say what their models' heads say."""

from itertools import product

import numpy as np
import pytest

from shardcore.core.types import Setting, Shard, Table
from shardcore.cost import features
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.composite import Composite, MemoryLinks
from shardcore.cost.model import CostModel, at_confidence
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
    "cautious": at_confidence(neural(4), 0.9),
    "one width": at_confidence(neural(1), 0.2),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_compiled_head_is_the_head(name, tables):
    model: CostModel = MODELS[name]
    sums = np.cumsum(model.encode([Shard.whole(t) for t in tables] * 4), axis=0)
    sums = np.concatenate([np.zeros((1, sums.shape[1])), sums * np.geomspace(1e-3, 1e3, len(sums))[:, None]])
    head, parameters, fetched = model.compiled_op_ms()
    assert [head(s, parameters) for s in np.ascontiguousarray(sums)] == pytest.approx(
        list(model.op_ms(sums)), rel=1e-12
    )
    assert [head(s, fetched) for s in np.ascontiguousarray(sums)] == pytest.approx(
        list(model.op_part_ms(sums)[:, 1:].sum(-1)), rel=1e-12
    )
    assert head(sums[0], parameters) == head(sums[0], fetched) == 0


@pytest.mark.parametrize("confidence", [None, 0.2, 0.9])
def test_the_compiled_head_is_the_head_beside_links_and_of_several_precisions(confidence):
    """Links have no spread, and each precision one of its own."""
    half = NeuralModel(Setting("made-up", 256, "fp16"), neural(1).weights, {})
    links = MemoryLinks({"host": 2.0, "ssd": 0.5}, "exact_sgd", 256, fetches_ahead=True)
    factors = ((0.1, "ssd"), (0.0, "host"), (1.0, "host"), (0.5, "host"))
    tables = [
        Table(f"t{i}", 5000, 16, 3.0, load_factor=share, tier=tier, precision=precision)
        for i, ((share, tier), precision) in enumerate(product(factors, ("fp32", "fp16")))
    ]
    for models in ((neural(4),), (half, neural(4))):
        model = at_confidence(Composite(models, links), confidence)
        sums = np.cumsum(model.encode([Shard.whole(t) for t in tables]), axis=0)
        head, parameters, fetched = model.compiled_op_ms()
        ms = model.op_ms(sums)
        assert [head(s, parameters) for s in sums] == pytest.approx(list(ms), rel=1e-12)
        chain_ms = model.op_part_ms(sums)[:, 1:].sum(-1)
        assert [head(s, fetched) for s in sums] == pytest.approx(list(chain_ms), rel=1e-12)
        assert ((0 < chain_ms) & (chain_ms < ms + model.op_part_ms(sums)[:, 2])).all()
