"""The formulas of the compute model, worked out by hand."""

import math

import numpy as np
import pytest
from laws import SETTING, by_hand

from shardcore.core.access_statistics import Zipf
from shardcore.core.types import Shard, Table
from shardcore.cost import features, nets

BATCH = SETTING.batch
SHARD = Shard.whole(Table("t", 1000, 32, 2.0, Zipf(0.0)))
LOOKUPS = 2 * BATCH
FORWARD, BACKWARD = 1.0 + 0.001 * LOOKUPS, 2.0 + 0.003 * LOOKUPS
"""ms of SHARD without its launch."""


def conditions(**at) -> np.ndarray:
    """[C] zeros, and these."""
    return np.array([at.get(name, 0.0) for name in features.CONDITIONS])


def test_an_op_is_one_launch_and_its_shards_at_their_rates():
    model = by_hand()
    codes = model.encode([SHARD, SHARD])
    assert codes[0, -2:] == pytest.approx([FORWARD, BACKWARD]) and codes[0, 0] == 1
    both = nets.op_ms(model.weights, np.stack([codes[0], codes.sum(0), 0 * codes[0]]))
    assert both == pytest.approx(
        np.array([[0.4 + FORWARD, 0.1 + BACKWARD], [0.4 + 2 * FORWARD, 0.1 + 2 * BACKWARD], [0, 0]])
    )
    assert model.op_ms(codes.sum(0)) == pytest.approx(0.5 + 2 * (FORWARD + BACKWARD))
    assert model.op_part_ms(codes[0]) == pytest.approx([0.4 + FORWARD, 0.1 + BACKWARD, 0.0])
    assert model.launch_ms() == pytest.approx(0.5)


@pytest.mark.parametrize("width, deviation", [(4, -1), (8, 0), (16, 1), (32, 1.5)])
def test_the_correction_is_of_the_clipped_and_scaled_conditions(width, deviation):
    """The correction depends on the width only: mean 8, one deviation a doubling, known up to 1.5 deviations."""
    slope = np.zeros((len(features.CONDITIONS), 2))
    slope[features.CONDITIONS.index("width")] = (0.1, -0.2)
    most = math.log(8) + 1.5 * math.log(2)
    model = by_hand(
        **{
            "network.0.weight": slope,
            "network.0.bias": np.array([0.3, 0.0]),
            "condition_mean": conditions(width=math.log(8)),
            "condition_sd": np.ones(len(features.CONDITIONS)) * math.log(2),
            "condition_high": np.full(len(features.CONDITIONS), most),
        }
    )
    known = np.array([conditions(width=math.log(width))])
    assert nets.correction_factors(model.weights, known)[0] == pytest.approx(
        [math.exp(1.5 * math.tanh(0.1 * deviation + 0.3)), math.exp(1.5 * math.tanh(-0.2 * deviation))]
    )


def test_hidden_layers_are_silu():
    first = np.zeros((len(features.CONDITIONS), 1))
    first[features.CONDITIONS.index("batch")] = 1.0
    weights = {
        "network.0.weight": first,
        "network.0.bias": np.array([0.5]),
        "network.1.weight": np.array([[0.2, -0.4]]),
        "network.1.bias": np.array([0.0, 0.1]),
    }
    x = math.log(7) + 0.5
    hidden = x / (1 + math.exp(-x))
    found = nets.correction_factors(by_hand(**weights).weights, np.array([conditions(batch=math.log(7))]))[0]
    assert found == pytest.approx(
        [math.exp(1.5 * math.tanh(0.2 * hidden)), math.exp(1.5 * math.tanh(0.1 - 0.4 * hidden))]
    )


def test_contention_grows_with_the_loads_against_typical_ones():
    k = len(features.DRIVERS)
    of_shards, typical = np.zeros((k, 1)), np.ones(k)
    of_shards[0], typical[0] = 0.5, 4.0
    model = by_hand(
        **{
            "contention.0.weight": of_shards,
            "contention.0.bias": np.array([0.1]),
            "load_typical": typical,
            "contention.1.weight": np.array([[0.2, 0.3]]),
        }
    )
    sums = model.encode([SHARD] * 8).sum(0)
    x = math.tanh(0.5 * math.log(8 / 4 + 0.01) + 0.1)
    expected = [0.4 + 8 * FORWARD * math.exp(0.2 * x), 0.1 + 8 * BACKWARD * math.exp(0.3 * x)]
    assert nets.op_ms(model.weights, sums) == pytest.approx(expected)
    assert (
        model.rate_lower_bounds(sums)[-2:] == pytest.approx([math.exp(0.2 * x), math.exp(0.3 * x)])
        and not model.rate_lower_bounds(sums)[:-2].any()
    )
    head, parameters, _ = model.compiled_op_ms()
    assert head(sums, parameters) == pytest.approx(sum(expected))


@pytest.mark.parametrize("confidence, reach", [(0.8, 0.4), (0.5, 0.25)])
def test_an_interval_lies_between_the_levels_that_leave_as_much_below_as_above(confidence, reach):
    model = by_hand()
    sums = model.encode([SHARD])
    ms = 0.5 + FORWARD + BACKWARD
    low, high = model.ms_interval(sums, confidence)
    assert low == pytest.approx([ms * math.exp(-reach)]) and high == pytest.approx([ms * math.exp(reach)])
    assert model.at_confidence(0.7).op_ms(sums) == pytest.approx([ms * math.exp(0.2)])
    head, parameters, _ = model.at_confidence(0.7).compiled_op_ms()
    assert head(sums[0], parameters) == pytest.approx(ms * math.exp(0.2))
