"""The least ms of ops by their load.

An op's shards slow each other down, the more the larger its load. Ops of a load may have little of one
feature or of another, but not of all: tables that bring few lookups for their load bring many rows, and so
on. So branch and bound over boxes of features gives the least rates (`op_rates_lower_bound`).

Shapes: N shards, I bundles (options.bundles_and_runs), F features; G intervals of load, W loads, B boxes, P weights
of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardcore.cost.model import CostModel

_INTERVALS = 80
"""Intervals of load, at most."""
_FROM, _TO = 0.02, 3.0
"""Between these loads, relative to a usual op's, intervals are short."""
_LINES = 16
"""Lines below the ms of ops, at most."""
_DIVISIONS = 40
"""Divisions of boxes of features. More give higher rates, and so a nearer bound."""
_WEIGHTS = np.array([0.1, 0.3, 1.0, 3.0, 10.0])
"""Weights of the second feature of a pair, each counted in the mean shard's."""
_TRACE = 1e-9
"""Rounding errors of features, in mean shards."""


@dataclass(frozen=True, eq=False)
class SlowdownCurve:
    """Lower bound of an op's ms as a function of its load, without the launch.

    alone_ms: [N] ms that each shard adds at least, whatever else an op has.
    load: [N] load of each shard: about the ms that it adds to a usual op.
    ends: [G + 1] loads, rising from 0 to that of all tables.
    slowdown: [G] from ends[g] on, an op takes at least slowdown[g] × its load. Rising.
    """

    alone_ms: np.ndarray
    load: np.ndarray
    ends: np.ndarray
    slowdown: np.ndarray

    def lines_below_op_ms(self, most_ms: float, launch_ms: float) -> list[tuple[float, float]]:
        """Slopes and intercepts (ms at load 0) of lines that are nowhere above an op's ms at its load.

        most_ms: of an op without its launch. There are no lines below ops that have no time.
        """
        # Before each step of the curve it is lowest, so it is nowhere below lines that are not above these points.
        able = (self.slowdown * self.ends[:-1] <= most_ms) & (most_ms > 0)
        slowdown = self.slowdown[able]
        load = np.minimum(self.ends[1:][able], most_ms / slowdown)
        ms = slowdown * load + launch_ms
        if not len(load):
            return []
        secants = np.diff(ms, prepend=0.0) / np.maximum(np.diff(load, prepend=0.0), 1e-300)
        slopes = np.unique([*np.quantile(secants, np.linspace(0, 1, _LINES)), (ms / load).min()])
        return [(slope, min(0.0, float((ms - slope * load).min()))) for slope in slopes.tolist()]


def op_slowdown_curve(
    codes: np.ndarray, bundle: np.ndarray, usual: np.ndarray, model: CostModel
) -> SlowdownCurve:
    """Curve of the least slowdown of ops by load. Any loads give valid bounds; loads at the rates of a usual op give
    tight ones.

    codes: [N, F] of all shards. bundle: [N] their bundles, rising. An op has at most one shard of a bundle.
    usual: [F] features of a usual op.
    """
    # Loads count at the least rates of a usual load, so that such an op's slowdown is near 1.
    rates = model.rate_lower_bounds(usual)
    [rates] = op_rates_lower_bound(model, codes, codes @ rates, bundle, np.array([usual @ rates]))
    load = codes @ rates
    # Slowdowns change fast near a usual load, so intervals there are a few per cent.
    inner = max(float(usual @ rates), 1e-12) * np.geomspace(_FROM, _TO, _INTERVALS - 1)
    top = max(float(np.maximum.reduceat(load, first_shard_of_each_bundle(bundle)).sum()), 1e-12) * (1 + 1e-9)
    ends = np.concatenate([[0.0], inner[inner < top], [top]])
    own, busy = model.rate_lower_bounds(codes), load > 0
    # Rates of an interval hold for all ops in it, as they are those at its lower end. A shard counts at these, or
    # at those of its own features if they are higher. One interval after the other: together they are too many.
    slowdown = [
        ((np.maximum(own, least) * codes).sum(-1)[busy] / load[busy]).min(initial=np.inf)
        for least in op_rates_lower_bound(model, codes, load, bundle, ends[:-1])
    ]
    slowdown = np.array(slowdown) if busy.any() else np.ones(len(ends) - 1)
    # An op of a later interval has at least the load of all earlier ones, so their slowdowns hold, too.
    # Whatever else an op has, its features are at least those of one shard.
    return SlowdownCurve((own * codes).sum(1), load, ends, np.maximum.accumulate(slowdown))


def first_shard_of_each_bundle(bundle: np.ndarray) -> np.ndarray:
    """[I] index of the first shard of each bundle."""
    return np.flatnonzero(np.diff(bundle, prepend=-1))


def op_rates_lower_bound(
    model: CostModel, codes: np.ndarray, load: np.ndarray, bundle: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """[W, F] lower bounds on the rates of ops whose shards' loads sum to `wanted` [W] or more.

    In a box of features, rates are no lower than at its lower corner. The box with the lowest rates is divided
    next, at the middle of the feature that raises them most. Below the middle, other features are at least what
    pairs leave: of features i and j, ops of that load have a least weighted sum. Any boxes that cover all ops give a
    valid bound, so the number of divisions only decides how near it is.

    codes: [N, F]. load: [N]. bundle: [N], rising. An op has at most one shard of a bundle.
    """
    busy = load > 0
    if not busy.any():  # no lookups, so no contention
        return model.rate_lower_bounds(np.zeros((len(wanted), codes.shape[1])))
    codes, load, bundle = codes[busy], load[busy], bundle[busy]
    # Features differ by orders of magnitude. In mean shards one set of weights serves all pairs.
    unit = np.where(codes.mean(0) > 0, codes.mean(0), 1.0)
    codes = codes / unit
    # An op of more load has no less of anything than a part of it that has just this load.
    low = least_feature_sums(codes, load, bundle, wanted)
    # The most of a feature is the least of its negative.
    high = -least_feature_sums(-codes, load, bundle, wanted)
    if (model.rate_lower_bounds(low * unit) == model.rate_lower_bounds(high * unit)).all():
        return model.rate_lower_bounds(low * unit)
    n_loads, n_features = low.shape
    # [P, W, F, F] the least of feature i + weight × feature j, as pairs[p, w, j, i].
    sums = ((codes[:, None] + x * codes[:, :, None]).reshape(len(codes), -1) for x in _WEIGHTS)
    pairs = np.stack([least_feature_sums(of_pairs, load, bundle, wanted) for of_pairs in sums])
    pairs = pairs.reshape(len(_WEIGHTS), n_loads, n_features, n_features)

    def box_ms(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """[...] ms of the mean shard in boxes of features, to maximise. inf for boxes without ops."""
        empty = (low > high + 2 * _TRACE).any(-1)
        return np.where(empty, np.inf, model.rate_lower_bounds(low * unit) @ unit)

    # All boxes: [B, W, F], and their ms [B, W].
    lows, highs, values = low[None], high[None], box_ms(low, high)[None]
    each, feature = np.arange(n_loads), np.arange(n_features)
    for _ in range(_DIVISIONS):
        # [W] for each load its own box: the one that limits its bound.
        box = values.argmin(0)
        low, high = lows[box, each], highs[box, each]
        # In the middle by logarithm. The low end may be 0, so a thousandth of the high end stands for it.
        middle = np.maximum(low, np.sqrt(np.maximum(low, 1e-3 * high) * high))
        # [W, F, F] lower corners of both parts if feature j is divided.
        left = (pairs - _WEIGHTS[:, None, None, None] * middle[..., None]).max(0) - _TRACE
        below, above = np.maximum(low[:, None], left), np.tile(low[:, None], (1, n_features, 1))
        below[:, feature, feature], above[:, feature, feature] = low, middle
        # The lower of both parts limits the rates: the best division raises it most.
        j = np.minimum(box_ms(below, high[:, None]), box_ms(above, high[:, None])).argmax(1)
        upper = high.copy()
        upper[each, j] = middle[each, j]
        # The box below takes the place of the one that is divided.
        lows[box, each], highs[box, each] = below[each, j], upper
        values[box, each] = box_ms(below[each, j], upper)
        lows, highs = np.concatenate([lows, above[None, each, j]]), np.concatenate([highs, high[None]])
        values = np.concatenate([values, box_ms(above[each, j], high)[None]])
    # An op is in some box, so the least rates of all boxes hold. Empty boxes do not count.
    return np.where(np.isfinite(values)[..., None], model.rate_lower_bounds(lows * unit), np.inf).min(0)


def least_feature_sums(
    values: np.ndarray, load: np.ndarray, bundle: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """[W, J] lower bounds on sums of `values` [N, J] over an op's shards whose loads sum to `wanted` [W].

    A fractional knapsack: it takes load first from bundles that bring least of the value.
    """
    first = first_shard_of_each_bundle(bundle)
    # Relaxed: the most load of any shard of a bundle, at the least value a load of any.
    room = np.maximum.reduceat(load, first)
    each = np.minimum.reduceat(values / load[:, None], first)
    # [I, J] bundles by value per load, each column of values in its own order.
    order = np.argsort(each, axis=0)
    start = np.zeros((1, values.shape[1]))
    # Piecewise linear curves: load taken so far, and the value that came with it.
    filled = np.concatenate([start, np.cumsum(room[order], axis=0)])
    brought = np.concatenate([start, np.cumsum(room[order] * np.take_along_axis(each, order, 0), axis=0)])
    return np.stack([np.interp(wanted, *curve) for curve in zip(filled.T, brought.T, strict=True)], axis=1)
