"""Quantiles of measured / predicted, from samples that the model was not trained on.

    log(measured / predicted) = width(log predicted) × error

width: the mean absolute log ratio among predictions of similar ms.
error: the rest, whose quantiles are those observed.

This is split-conformal prediction with a normalised score (Lei et al., JASA 2018).
Measurement noise is included.

Shapes: S samples, G ops, Q levels.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardcore.core.validation import require

LEVELS = np.concatenate([[0.005, 0.01, 0.025], np.arange(0.05, 0.951, 0.025), [0.975, 0.99, 0.995]])
_KNOTS = 4
_PER_KNOT = 50
"""Samples that each knot of the width needs. With fewer in total, one width serves every cost."""


def fit_error_quantiles(predicted_ms: np.ndarray, measured_ms: np.ndarray) -> dict[str, np.ndarray]:
    """Fit the weights band.*, quantiles of measured / predicted, to predicted and measured ms [S] of held-out
    samples.
    """
    # A ratio in logarithms: too fast and too slow count equally.
    log_ms, error = np.log(predicted_ms), np.log(measured_ms / predicted_ms)
    # As many knots as samples support, four at most.
    knots = max(1, min(_KNOTS, len(error) // _PER_KNOT))
    while True:
        # Equally many samples at each knot.
        parts = np.array_split(np.argsort(log_ms), knots)
        at = np.array([log_ms[p].mean() for p in parts])
        # The floor keeps scores finite where predictions are exact.
        widths = np.array([max(np.abs(error[p]).mean(), 1e-6) for p in parts])
        # Errors in units of the width are comparable over all costs.
        # [S] sorted, so that quantiles are positions.
        scores = np.sort(error / np.interp(log_ms, at, widths))
        if knots == 1 or quantiles_rise(at, widths, scores):
            break
        # Use fewer knots until no quantile falls as the cost grows.
        knots -= 1
    # The quantile of n + 1 draws, of which the next is one: at the ends it is the largest seen.
    ranks = np.clip(LEVELS * (len(scores) + 1) - 1, 0, len(scores) - 1)
    return {
        "band.log_ms": at,
        "band.width": widths,
        "band.level": LEVELS,
        "band.error": np.interp(ranks, np.arange(len(scores)), scores),
    }


def quantiles_rise(log_ms: np.ndarray, width: np.ndarray, error: np.ndarray) -> bool:
    """True if every quantile of a cost grows with the predicted cost. error: normalised errors, sorted."""
    # Between knots the width is linear in log ms, so the slope is constant.
    # d(log quantile) / d(log ms) = 1 + slope of width × error. The extreme errors decide.
    return bool((1 + np.outer(np.diff(width) / np.diff(log_ms), error[[0, -1]]) > 0).all())


def quantile_factors(weights: Mapping[str, np.ndarray], predicted_ms: np.ndarray, level: float) -> np.ndarray:
    """[...] factors on predicted ms: a measurement lies below the product with probability `level`.

    The product grows with the prediction. Raises ShardCoreError for a level outside 0.005 to 0.995, where no quantile
    is known.
    """
    # The floor keeps the logarithm finite. An op of 0 ms stays 0 by the product.
    log_ms = np.log(np.maximum(predicted_ms, 1e-12))
    return np.exp(
        np.interp(log_ms, weights["band.log_ms"], weights["band.width"]) * error_quantile(weights, level)
    )


def error_quantile(weights: Mapping[str, np.ndarray], level: float) -> float:
    """The quantile of normalised errors at a level. Raises ShardCoreError for a level outside 0.005 to 0.995."""
    require(
        LEVELS[0] <= level <= LEVELS[-1],
        f"confidence leads to level {level:g} of the costs' distribution; known are those within {LEVELS[0]} and "
        f"{LEVELS[-1]}",
    )
    return float(np.interp(level, weights["band.level"], weights["band.error"]))
