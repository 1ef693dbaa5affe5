"""Validity of a model's weights: predictions have to be finite, 0 or more, and grow with the work.

A weights file is safe to load, but may hold anything. With a negative launch, for example, predictions are
negative, and a search would look for more of them.

Shapes: K drivers, C conditions, H hidden, E exchange terms, Q knots, L levels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from shardcore.core.validation import require
from shardcore.cost import collective_model, features, quantiles
from shardcore.io.model_files import Tensor, require_tensors
from shardcore.step.kinds import CHANNELS

_POSITIVE = (1e-30, 1e30)
_RATE = (0.0, 1e6)
_ANY = (-1e6, 1e6)
_CONTENTION, _BAND = 50.0, 300.0
"""Largest exponents of the factors of contention and of quantiles.

Their product is finite, and far beyond any measurement.
"""
_MOST_LAYERS = 8
"""Layers of the network. With more, products of weights within _ANY may overflow."""


def require_weights(weights: Mapping[str, np.ndarray]) -> None:
    """Raise ShardCoreError for a model's weights that are missing, out of range, or do not fit together."""
    k, c, e = len(features.DRIVERS), len(features.CONDITIONS), len(collective_model.EXCHANGE_TERMS)
    hidden, knots, levels = (
        _entry_count(weights, name) for name in ("contention.0.bias", "band.log_ms", "band.level")
    )
    in_step = (collective_model.LEAST_IN_STEP, collective_model.MOST_IN_STEP)
    ran = [(channel, direction) for channel in CHANNELS for direction in channel.definition.directions]
    # Signs in these ranges make costs grow with the work.
    declared = {
        "rates": Tensor((k, 2), _RATE),
        "launch": Tensor((2,), _RATE),
        "load_typical": Tensor((k,), _POSITIVE),
        "condition_low": Tensor((c,), _ANY),
        "condition_high": Tensor((c,), _ANY),
        "condition_mean": Tensor((c,), _ANY),
        "condition_sd": Tensor((c,), (1e-9, 1e6)),
        "contention.0.weight": Tensor((k, hidden), (0.0, 1e6)),
        "contention.0.bias": Tensor((hidden,), _ANY),
        "contention.1.weight": Tensor((hidden, 2), (0.0, _CONTENTION / hidden)),
        "band.log_ms": Tensor((knots,), _ANY),
        "band.width": Tensor((knots,), (1e-9, 1e6)),
        "band.level": Tensor((levels,), (0.0, 1.0)),
        "band.error": Tensor((levels,), _ANY),
        **_network_tensors(weights, c),
        # Collectives may be unmeasured, and factors exist only with replays.
        **{
            collective_model.rates_weight_name(*x, payload): Tensor((e,), _RATE, is_optional=True)
            for x in ran
            if not x[0].definition.work
            for payload in x[0].definition.payloads
        },
        **{collective_model.step_factor_name(*x): Tensor((1,), in_step, is_optional=True) for x in ran},
        **{name: Tensor((2,), _RATE, is_optional=True) for name in collective_model.OWN_WORK},
    }
    require_tensors(weights, declared)
    for low, high in zip(weights["condition_low"].tolist(), weights["condition_high"].tolist(), strict=True):
        require(low <= high, f"weight 'condition_low' has {low:g}, above the {high:g} of 'condition_high'")
    _require_band(weights["band.log_ms"], weights["band.width"], weights["band.level"], weights["band.error"])


def _require_band(log_ms: np.ndarray, width: np.ndarray, level: np.ndarray, error: np.ndarray) -> None:
    """Raise ShardCoreError unless error quantiles rise with the level and the cost, and stay finite."""
    lowest, highest = quantiles.LEVELS[0], quantiles.LEVELS[-1]
    require(
        level[0] <= lowest and level[-1] >= highest,
        f"weight 'band.level' goes from {level[0]:g} to {level[-1]:g}; it needs to reach from {lowest} to {highest}",
    )
    rising = (("band.log_ms", log_ms, 1e-9), ("band.level", level, 1e-9), ("band.error", error, 0.0))
    for name, values, least in rising:
        require(not (np.diff(values) < least).any(), f"weight {name!r} falls; it needs to rise")
    require(
        quantiles.quantiles_rise(log_ms, width, error),
        "weights 'band.width' and 'band.error' mean quantiles that fall as costs grow",
    )
    require(
        np.abs(error).max() * width.max() <= _BAND,
        f"weights 'band.error' and 'band.width' mean factors beyond e^{_BAND:g}",
    )


def _network_tensors(weights: Mapping[str, np.ndarray], inputs: int) -> dict[str, Tensor]:
    """Declared shapes of the correction network's layers. The last layer has 2 outputs."""
    layers = (re.fullmatch(r"network\.(\d{1,3})\..*", name) for name in weights)
    declared, last = dict[str, Tensor](), max((int(layer[1]) for layer in layers if layer), default=0)
    require(
        last < _MOST_LAYERS, f"weights 'network' have {last + 1} layers; they need {_MOST_LAYERS} at most"
    )
    # The name of a layer gives its number: network.0, network.1, ...
    for i in range(last + 1):
        outputs = 2 if i == last else _entry_count(weights, f"network.{i}.bias")
        declared |= {
            f"network.{i}.weight": Tensor((inputs, outputs), _ANY),
            f"network.{i}.bias": Tensor((outputs,), _ANY),
        }
        inputs = outputs
    return declared


def _entry_count(weights: Mapping[str, np.ndarray], name: str) -> int:
    """Number of entries of a weight, at least 1."""
    return max(weights[name].size, 1) if name in weights else 1
