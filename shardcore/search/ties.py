"""Comparisons of costs. Costs that differ by less than 1e-9 of themselves are equal, and then the first one counts.

Equal costs are often computed by sums in another order. Which one is less in its last bits means nothing, and must
not decide between plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

EQUAL = 1e-9
"""Relative difference below which costs are equal."""


def is_less(cost: Any, other: Any) -> Any:
    """[...] bool: costs that are less than others, not just by rounding."""
    return cost + EQUAL * np.abs(cost) < other


def is_least(costs: np.ndarray) -> np.ndarray:
    """[..., N] bool: costs that equal the least one along the last axis."""
    return ~is_less(costs.min(-1, keepdims=True), costs)


def first_least(costs: Any) -> int:
    """The number of the first of the least costs [N]."""
    return int(is_least(np.asarray(costs, dtype=float)).argmax())


def least(items: Iterable[Any], cost: Callable[[Any], float]) -> Any:
    """The first item of least cost."""
    return rising(items, cost)[0]


def rising(items: Iterable[Any], cost: Callable[[Any], float]) -> list[Any]:
    """Items by rising cost. Those of equal cost stay in order."""
    items = list(items)
    return [items[i] for i in np.argsort(ranks([cost(item) for item in items]), kind="stable")]


def ranks(costs: Any) -> np.ndarray:
    """[..., N] places of costs [..., N] by rising cost. Equal costs share one, so that other keys of a sort decide."""
    order = np.argsort(costs, axis=-1, kind="stable")
    sorted_costs = np.take_along_axis(np.asarray(costs, dtype=float), order, -1)
    # A place begins where a cost is more than the one before. The first has none before.
    begins = is_less(sorted_costs, np.roll(sorted_costs, -1, -1))
    places = np.cumsum(np.roll(begins, 1, -1), axis=-1)
    return np.take_along_axis(places, np.argsort(order, axis=-1), -1)
