"""Validity of a model's weights: predictions have to be finite, 0 or more, and grow with the work.

A weights file is safe to load, but may hold anything. With a negative launch, for example, predictions are
negative, and a search would look for more of them.

Shapes: K drivers, C conditions, H hidden, E exchange terms, Q knots, L levels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from shardcore.core.validation import require
from shardcore.cost import collective_model, features, quantiles
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


def require_weights(w: Mapping[str, np.ndarray]) -> None:
    """Raise ShardCoreError for a weight that is missing, unknown, of another shape, or out of range."""
    k, c, e = len(features.DRIVERS), len(features.CONDITIONS), len(collective_model.EXCHANGE_TERMS)
    hidden, knots, levels = (_length(w, name) for name in ("contention.0.bias", "band.log_ms", "band.level"))
    # Name: (shape, allowed range). Signs in these ranges make costs grow with the work.
    rules = {
        "rates": ((k, 2), _RATE),
        "launch": ((2,), _RATE),
        "load_typical": ((k,), _POSITIVE),
        "condition_low": ((c,), _ANY),
        "condition_high": ((c,), _ANY),
        "condition_mean": ((c,), _ANY),
        "condition_sd": ((c,), (1e-9, 1e6)),
        "contention.0.weight": ((k, hidden), (0.0, 1e6)),
        "contention.0.bias": ((hidden,), _ANY),
        "contention.1.weight": ((hidden, 2), (0.0, _CONTENTION / hidden)),
        "band.log_ms": ((knots,), _ANY),
        "band.width": ((knots,), (1e-9, 1e6)),
        "band.level": ((levels,), (0.0, 1.0)),
        "band.error": ((levels,), _ANY),
        **_network(w, c),
    }
    in_step = (collective_model.LEAST_IN_STEP, collective_model.MOST_IN_STEP)
    ran = [(channel, way) for channel in CHANNELS for way in channel.row.ways]
    # Collectives may be unmeasured, and factors exist only with replays.
    optional = {
        collective_model.rates_name(*x, payload): ((e,), _RATE)
        for x in ran
        if not x[0].row.work
        for payload in x[0].row.payloads
    }
    optional |= {collective_model.step_factor_name(*x): ((1,), in_step) for x in ran}
    optional |= {name: ((2,), _RATE) for name in collective_model.OWN_WORK}
    # An unknown weight would be ignored silently, so refuse it.
    unknown = sorted(set(w) - set(rules) - set(optional))
    require(not unknown, f"weight {', '.join(map(repr, unknown))} is not known")
    # Optional weights are checked only where they are present.
    for name, (shape, ends) in {**rules, **{n: r for n, r in optional.items() if n in w}}.items():
        _require(w, name, shape, ends)
    for low, high in zip(w["condition_low"].tolist(), w["condition_high"].tolist(), strict=True):
        require(low <= high, f"weight 'condition_low' has {low:g}, above the {high:g} of 'condition_high'")
    _require_band(w["band.log_ms"], w["band.width"], w["band.level"], w["band.error"])


def _require_band(log_ms: np.ndarray, width: np.ndarray, level: np.ndarray, error: np.ndarray) -> None:
    """Quantiles have to rise with the level and with the cost, and stay finite."""
    lowest, highest = quantiles.LEVELS[0], quantiles.LEVELS[-1]
    require(
        level[0] <= lowest and level[-1] >= highest,
        f"weight 'band.level' goes from {level[0]:g} to {level[-1]:g}; it needs to reach from {lowest} to {highest}",
    )
    rising = (("band.log_ms", log_ms, 1e-9), ("band.level", level, 1e-9), ("band.error", error, 0.0))
    for name, values, least in rising:
        require(not (np.diff(values) < least).any(), f"weight {name!r} falls; it needs to rise")
    require(
        quantiles.rises(log_ms, width, error),
        "weights 'band.width' and 'band.error' mean quantiles that fall as costs grow",
    )
    require(
        np.abs(error).max() * width.max() <= _BAND,
        f"weights 'band.error' and 'band.width' mean factors beyond e^{_BAND:g}",
    )


def _network(
    w: Mapping[str, np.ndarray], inputs: int
) -> dict[str, tuple[tuple[int, ...], tuple[float, float]]]:
    """Rules of the correction network's layers. Each takes what the one before gives; the last gives 2."""
    layers = (re.fullmatch(r"network\.(\d{1,3})\..*", name) for name in w)
    rules, last = {}, max((int(layer[1]) for layer in layers if layer), default=0)
    require(
        last < _MOST_LAYERS, f"weights 'network' have {last + 1} layers; they need {_MOST_LAYERS} at most"
    )
    # The name of a layer gives its number: network.0, network.1, ...
    for i in range(last + 1):
        outputs = 2 if i == last else _length(w, f"network.{i}.bias")
        rules |= {f"network.{i}.weight": ((inputs, outputs), _ANY), f"network.{i}.bias": ((outputs,), _ANY)}
        inputs = outputs
    return rules


def _length(w: Mapping[str, np.ndarray], name: str) -> int:
    """Entries of a weight that others have to match: at least 1."""
    return max(w[name].size, 1) if name in w else 1


def _require(w: Mapping[str, np.ndarray], name: str, shape: Sequence[int], ends: tuple[float, float]) -> None:
    require(name in w, f"weight {name!r} is missing")
    values = w[name]
    require(
        values.shape == tuple(shape) and values.dtype == np.float64,
        f"weight {name!r} is {values.dtype} {list(values.shape)}; it needs to be float64 {list(shape)}",
    )
    # Negated, so that comparisons with NaN, which are False, count as wrong.
    wrong = values[~((values >= ends[0]) & (values <= ends[1]))].tolist()
    require(not wrong, f"weight {name!r} has {sum(wrong[:1]):g}; it needs {ends[0]:g} to {ends[1]:g}")
