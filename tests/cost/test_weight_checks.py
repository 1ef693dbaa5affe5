"""Requirements on a model's weights."""

import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law

from shardcore.core.errors import ShardCoreError
from shardcore.cost import collective_model, fit, neural, weight_checks
from shardcore.io import model_files


@pytest.fixture(scope="module")
def trained():
    config = fit.FitConfig(epochs=1, hidden=(4, 6))
    return fit.train(compute_samples(linear_law, 120), comm_samples(20), SETTING, config).model


def with_value(w, name, value):
    """The weights with one number of one of them changed."""
    changed = w[name].copy()
    changed.flat[-1] = value
    return {**w, name: changed}


def test_what_training_makes_is_right(trained, tmp_path):
    weight_checks.require_weights(trained.weights)
    neural.save(trained, tmp_path)
    assert neural.load(tmp_path).weights.keys() == trained.weights.keys()


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("launch", -1e-9, "weight 'launch' has -1e-09; it needs 0 to 1e.06"),
        ("rates", -1.0, "weight 'rates' has -1; it needs 0 to"),
        ("rates", np.nan, "weight 'rates' has nan"),
        ("network.1.weight", np.inf, "weight 'network.1.weight' has inf"),
        ("contention.0.weight", -0.1, "has -0.1; it needs 0 to"),
        ("contention.1.weight", -0.1, "has -0.1; it needs 0 to 6.25"),
        ("contention.1.weight", 7.0, "has 7; it needs 0 to 6.25"),
        ("load_typical", 0.0, "'load_typical' has 0"),
        ("condition_low", 1e5, "'condition_low' has 100000, above the 5.54518 of 'condition_high'"),
        ("condition_sd", 0.0, "'condition_sd' has 0"),
        ("band.width", 0.0, "'band.width' has 0"),
        ("band.level", 0.9, "from 0.005 to 0.9; it"),
        ("band.error", -1e5, "weight 'band.error' falls; it needs to rise"),
        ("band.error", 1e6, "factors beyond e\\^300"),
        ("exchange_all_to_all_forward", -1.0, "has -1; it needs 0"),
    ],
)
def test_a_number_out_of_its_range_is_named(trained, name, value, said):
    with pytest.raises(ShardCoreError, match=said):
        weight_checks.require_weights(with_value(trained.weights, name, value))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda w: {k: v for k, v in w.items() if k != "launch"}, "weight 'launch' is missing"),
        (
            lambda w: {k: v for k, v in w.items() if k != "network.2.bias"},
            "weight 'network.2.bias' is missing",
        ),
        (
            lambda w: {**w, "network.7.bias": np.zeros(2)},
            r"weight 'network.2.weight' is float64 \[6, 2\]; .* "
            r"\[6, 2\]|'network.3",
        ),
        (lambda w: {**w, "more": np.zeros(2)}, "weight 'more' is not known"),
        (
            lambda w: {**w, "rates": w["rates"].T.copy()},
            r"weight 'rates' is float64 \[2, 13\]; it needs to be "
            r"float64 \[13, 2\]",
        ),
        (lambda w: {**w, "rates": w["rates"].astype(np.float32)}, "weight 'rates' is float32"),
        (lambda w: {**w, "band.level": w["band.level"][:-1]}, "weight 'band.error' is float64"),
        (lambda w: {**w, "band.log_ms": np.zeros(0)}, "weight 'band.log_ms' is float64"),
        (
            lambda w: {
                **w,
                "band.log_ms": np.array([0.0, 1.0]),
                "band.width": np.array([5.0, 0.1]),
                "band.error": np.linspace(-0.5, 0.5, len(w["band.error"])),
            },
            "quantiles that fall as costs",
        ),
        (
            lambda w: {**w, "band.log_ms": np.array([0.0, 0.0]), "band.width": np.ones(2)},
            "'band.log_ms' falls; it needs to rise",
        ),
        (
            lambda w: {**w, "exchange_all_to_all_sideways": np.zeros(10)},
            "'exchange_all_to_all_sideways' is not known",
        ),
        (
            lambda w: {
                **w,
                collective_model.step_factor_name(collective_model.ALL_TO_ALL, "forward"): np.zeros(1),
            },
            "has 0; it needs 0.001 to",
        ),
        (lambda w: {}, "is missing"),
    ],
)
def test_a_weight_that_is_missing_unknown_or_of_another_shape_is_named(trained, change, said):
    with pytest.raises(ShardCoreError, match=said):
        weight_checks.require_weights(change(trained.weights))


def test_a_model_is_checked_when_it_is_read(trained, tmp_path):
    bad = with_value(trained.weights, "launch", -5.0)
    with pytest.raises(ShardCoreError, match="weight 'launch' has -5; it needs 0 to"):
        neural.save(neural.NeuralModel(SETTING, bad, trained.meta), tmp_path)
    neural.save(trained, tmp_path)
    meta, _ = model_files.read_model(tmp_path)
    model_files.write_model(tmp_path, meta, bad)
    with pytest.raises(ShardCoreError, match=f"model in {tmp_path}: weight 'launch' has -5; it needs 0 to"):
        neural.load(tmp_path)


def test_a_network_of_many_layers_is_refused(trained):
    layers = {
        f"network.{i}.{what}": np.ones(shape)
        for i in range(9)
        for what, shape in (("weight", (2, 2)), ("bias", (2,)))
    }
    w = {**{k: v for k, v in trained.weights.items() if not k.startswith("network.")}, **layers}
    with pytest.raises(ShardCoreError, match="9 layers"):
        weight_checks.require_weights(w)
