"""How much the shards of an op contend at least, by the op's load.

Ops of a load may have little of one feature or of another, but not of all: tables that bring few lookups for
their load bring many rows, and so on. So the least rates are found by branch and bound over boxes of
features. In a box, rates are no lower than at its lower corner. The corner is raised by pairs of features, of
which ops of that load have a least weighted sum: where there is at most so much of one, there is at least so
much of the other. The box with the lowest rates is divided next, by the feature and value that raise them
most.

Any boxes that cover all ops give a valid bound, so the number of divisions only decides how near it is.

Shapes: N shards, T tables, F features, W loads, B boxes, C ways to divide a box.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardcore.cost.model import BoundableCostModel

_DIVISIONS = 40
_WEIGHTS = np.array([0.1, 0.3, 1.0, 3.0, 10.0])
"""Of the second feature of a pair, each counted in the mean shard's."""
_AT = (0.25, 0.5, 0.75)
"""Where a box may be divided, from its low to its high end, by logarithm."""
_TRACE = 1e-9
"""Rounding errors of features, in mean shards."""


@dataclass(frozen=True, eq=False)
class Shares:
    """What ops of given loads can have, counted in the mean shard's features.

    unit: [F] features of the mean shard. 1 for those that no shard has.
    low, high: [W, F] the least and the most of each feature by itself.
    pairs: [P, F, F, W] the least of feature i + _WEIGHTS[p] × feature j.
    """

    unit: np.ndarray
    low: np.ndarray
    high: np.ndarray
    pairs: np.ndarray

    def with_at_most(self, low: np.ndarray, features: np.ndarray, most: np.ndarray) -> np.ndarray:
        """[C, W, F] lower corners of boxes that have at most most[c] of features[c]."""
        least = self.pairs[:, :, features] - _WEIGHTS[:, None, None, None] * most
        found = np.maximum(low, least.max(0).transpose(1, 2, 0) - _TRACE)
        found[np.arange(len(features)), :, features] = low.T[features]
        return found


def least_rates(
    model: BoundableCostModel, codes: np.ndarray, load: np.ndarray, table: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """[W, F] rates no higher than those of any op whose shards' loads sum to `wanted` [W] or more.

    codes: [N, F]. load: [N], more than 0. table: [N], rising. An op has at most one shard of a table.
    """
    shares = _shares(codes, load, table, wanted)
    total, n = codes.sum(0), np.arange(len(wanted))
    divided = [f for f in range(codes.shape[1]) if _counts(model, shares, f)]
    low, high, ms = shares.low[None], shares.high[None], _ms(model, shares, shares.low, total)[None]
    for _ in range(_DIVISIONS if divided else 0):
        of = ms.argmin(0)
        below, above, at, feature = _division(model, shares, (low[of, n], high[of, n]), divided)
        # The box below takes the place of the one that is divided.
        upper, low, high = high[of, n], low.copy(), high.copy()
        low[of, n], high[of, n, feature] = below, at
        ms[of, n] = _ms_of_box(model, shares, below, high[of, n], total)
        low, high = np.concatenate([low, above[None]]), np.concatenate([high, upper[None]])
        ms = np.concatenate([ms, _ms_of_box(model, shares, above, upper, total)[None]])
    rates = model.rates(low * shares.unit)
    return np.where(np.isfinite(ms)[..., None], rates, np.inf).min(0)


def least_sums(values: np.ndarray, load: np.ndarray, table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """[W, J] the least sums of each of `values` [N, J] that ops have whose loads sum to `wanted` [W].

    A fractional knapsack: it takes load first from tables that bring least of the value.
    """
    first = np.flatnonzero(np.diff(table, prepend=-1))
    room = np.maximum.reduceat(load, first)
    each = np.minimum.reduceat(values / load[:, None], first)
    order = np.argsort(each, axis=0)
    start = np.zeros((1, values.shape[1]))
    filled = np.concatenate([start, np.cumsum(room[order], axis=0)])
    brought = np.concatenate([start, np.cumsum(room[order] * np.take_along_axis(each, order, 0), axis=0)])
    # np.interp of all columns at once: each lies beyond the one before.
    column = np.arange(values.shape[1])
    beyond = column * (filled[-1].max() + 1.0)
    wanted = np.minimum(wanted[:, None], filled[-1])
    at = np.searchsorted((filled + beyond).T.ravel(), wanted + beyond) - column * len(filled)
    at = np.clip(at, 1, len(filled) - 1)
    less, more = filled[at - 1, column], filled[at, column]
    # A load may be too small to tell the two apart.
    part = np.divide(wanted - less, more - less, out=np.zeros_like(wanted), where=more > less)
    return brought[at - 1, column] + part * (brought[at, column] - brought[at - 1, column])


def _shares(codes: np.ndarray, load: np.ndarray, table: np.ndarray, wanted: np.ndarray) -> Shares:
    unit = codes.mean(0)
    unit = np.where(unit > 0, unit, 1.0)
    codes = codes / unit
    # An op of more load has no less of anything than a part of it that has just this load.
    low, high = least_sums(codes, load, table, wanted), -least_sums(-codes, load, table, wanted)
    pairs = np.stack(
        [
            least_sums(
                (codes[:, :, None] + weight * codes[:, None]).reshape(len(codes), -1), load, table, wanted
            ).T
            for weight in _WEIGHTS
        ]
    )
    return Shares(unit, low, high, pairs.reshape(len(_WEIGHTS), len(unit), len(unit), len(wanted)))


def _counts(model: BoundableCostModel, shares: Shares, feature: int) -> bool:
    """Whether rates depend on a feature."""
    less = shares.high.copy()
    less[:, feature] = shares.low[:, feature]
    return bool((model.rates(less * shares.unit) != model.rates(shares.high * shares.unit)).any())


def _division(
    model: BoundableCostModel, shares: Shares, box: tuple[np.ndarray, np.ndarray], features: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """How to divide boxes (low, high [W, F]): the lower corners [W, F] of what is below and above, the value
    [W] and the feature [W] that divide them."""
    low, high = box
    total = np.ones(low.shape[1]) * shares.unit
    # All ways at once, [C, W]: each of these features, at each part of its side.
    feature, part = np.repeat(features, len(_AT)), np.tile(_AT, len(features))[:, None]
    least, most = low.T[feature], high.T[feature]
    value = np.maximum(least, np.maximum(least, 1e-3 * most) ** (1 - part) * most**part)
    below, above = shares.with_at_most(low, feature, value), np.repeat(low[None], len(feature), 0)
    above[np.arange(len(feature)), :, feature] = value
    ms = np.minimum(
        _ms_of_box(model, shares, below, high, total), _ms_of_box(model, shares, above, high, total)
    )
    best, n = ms.argmax(0), np.arange(len(low))
    return below[best, n], above[best, n], value[best, n], feature[best]


def _ms(model: BoundableCostModel, shares: Shares, low: np.ndarray, total: np.ndarray) -> np.ndarray:
    """[...] ms of `total` [F] at the rates of lower corners [..., F]: what is to be raised."""
    return model.rates(low * shares.unit) @ total


def _ms_of_box(
    model: BoundableCostModel, shares: Shares, low: np.ndarray, high: np.ndarray, total: np.ndarray
) -> np.ndarray:
    """As _ms. inf for boxes in which there are no ops."""
    return np.where((low > high + 2 * _TRACE).any(-1), np.inf, _ms(model, shares, low, total))
