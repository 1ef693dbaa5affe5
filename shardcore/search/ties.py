"""Sorting by cost. Candidates of equal costs (cost.model.EQUAL) keep their order, or are sorted by further keys."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shardcore.cost.model import is_less


def min_by_cost(candidates: Iterable[Any], cost: Callable[[Any], float]) -> Any:
    """First candidate of the least cost, where nearly equal costs count as equal."""
    return sort_by_cost(candidates, cost)[0]


def sort_by_cost(candidates: Iterable[Any], cost: Callable[[Any], float]) -> list[Any]:
    """Candidates by rising cost. Those of nearly equal cost keep their order."""
    candidates = list(candidates)
    return [candidates[i] for i in np.argsort(cost_ranks([cost(x) for x in candidates]), kind="stable")]


def cost_ranks(costs: Any) -> np.ndarray:
    """[..., N] ranks of costs [..., N], rising. Nearly equal costs share a rank."""
    order = np.argsort(costs, axis=-1, kind="stable")
    sorted_costs = np.take_along_axis(np.asarray(costs, dtype=float), order, -1)
    # A place begins where a cost is more than the one before. The first has none before.
    begins = np.roll(is_less(sorted_costs, np.roll(sorted_costs, -1, -1)), 1, -1)
    return np.take_along_axis(np.cumsum(begins, axis=-1), np.argsort(order, axis=-1), -1)
