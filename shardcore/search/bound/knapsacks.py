"""How much worth one device can collect within a time, by shards of one kind: knapsacks of a lower bound.

Loads are rounded down and times up, so that rounding never raises the bound.

Shapes: N shards of a problem, n shards in a bag, M = STEPS steps of time, P prices.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardcore.search.bound import compiled
from shardcore.search.bound.ops import Curve
from shardcore.search.bound.shards import BoundShards

STEPS = 400
"""Of time, up to the longest that may be proved."""
_SLOPES = 48
"""Prices of load at which a divided knapsack is priced."""
_BISECTIONS = 30
"""Of the price at which a divided knapsack is full."""

Taken = Callable[[int], np.ndarray]
"""step -> [N] how often each shard is taken."""


class Bag:
    """Knapsacks of shards of one kind, for all steps of time. At most one shard of a table.

    of: numbers of the shards, by table, and within a table by the first step in which they fit.
    """

    def __init__(self, of: np.ndarray, costs: Curve, shards: BoundShards, step: float):
        ms = (np.arange(STEPS) + 1) * step - shards.model.launch_ms
        self.most, self.none = np.maximum(0.0, costs.most(ms)), ms < 0
        # A trace earlier, for rounding errors.
        fits = np.maximum(
            *(
                np.searchsorted(most * (1 + 1e-9), least[of])
                for most, least in ((ms, costs.alone), (self.most, costs.load))
            )
        )
        order = np.lexsort((fits, shards.table[of]))
        self.of, self.n, self.fits = of[order], len(shards.kind), fits[order]
        self.load, table = np.maximum(costs.load[self.of], 1e-12), shards.table[self.of]
        self.first = np.flatnonzero(np.diff(table, prepend=-1))
        self.ends = np.append(self.first, len(of))
        self.knapsacks = [
            _Knapsack(load[self.of], most, self.ends)
            for load, most in ((costs.alone, ms), (costs.load, self.most))
        ]

    def fill(self, worth: np.ndarray) -> tuple[np.ndarray, Taken]:
        """[M] the most worth by steps. Also the shards taken, by step."""
        worth, none = worth[self.of], self.none
        if not len(self.of):
            return np.zeros(STEPS), lambda step: np.zeros(self.n)
        wholes = np.stack([k.fill(worth) for k in self.knapsacks])
        # Divided knapsacks: at any price of load, each table takes its best shard that fits.
        prices = np.unique(
            np.quantile(
                np.maximum.reduceat(np.maximum(worth, 0.0) / self.load, self.first),
                np.linspace(0, 1, _SLOPES),
            )
        )
        lines = np.empty((len(prices), STEPS))
        compiled.divided(self.ends, self.fits, self.load, worth, prices, lines)
        lines += prices[:, None] * self.most
        divided = lines.min(0)
        every = np.where(none, 0.0, np.vstack([wholes, divided]))
        which = every.argmin(0)

        def taken(step: int) -> np.ndarray:
            counts = np.zeros(self.n)
            if none[step]:
                return counts
            if which[step] < len(self.knapsacks):
                counts[self.of[self.knapsacks[which[step]].taken(step)]] = 1
                return counts
            # Between the prices where less and where more is taken than fits.
            high, low = float(prices[-1]) * 2 + 1e-12, 0.0
            sets = [self._best(worth, price, step) for price in (high, low)]
            loads = [float(self.load[of].sum()) for of in sets]
            for _ in range(_BISECTIONS if loads[1] > self.most[step] else 0):
                middle = (high + low) / 2
                found = self._best(worth, middle, step)
                load = float(self.load[found].sum())
                more = bool(load > self.most[step])
                sets[more], loads[more] = found, load
                high, low = (high, middle) if more else (middle, low)
            share = np.clip((self.most[step] - loads[0]) / max(loads[1] - loads[0], 1e-12), 0.0, 1.0)
            counts[self.of[sets[0]]] += 1 - share
            counts[self.of[sets[1]]] += share
            return counts

        return every.min(0), taken

    def _best(self, worth: np.ndarray, price: float, step: int) -> np.ndarray:
        """The shards that tables take at a price of load, of those that fit within a step."""
        gain = np.where(self.fits <= step, worth - price * self.load, 0.0)
        top = np.repeat(np.maximum.reduceat(gain, self.first), np.diff(self.ends))
        return np.flatnonzero((gain == top) & (gain > 0))


class _Knapsack:
    """A knapsack that takes shards as a whole, for all steps of time.

    load: [n] of each shard. most: [M] the capacity by step. ends: where each table's shards begin and end.
    """

    def __init__(self, load: np.ndarray, most: np.ndarray, ends: np.ndarray):
        unit, self.ends = max(float(most[-1]), 1e-12) / STEPS, ends
        # Loads are rounded down, capacities only by a trace up.
        self.capacity = np.maximum(0, np.floor(most / unit * (1 + 1e-9))).astype(int)
        self.weight = np.floor(load / unit * (1 - 1e-9)).astype(int)
        self.best = np.empty((len(ends), STEPS + 2))
        self.chosen = np.empty((len(ends) - 1, STEPS + 2), dtype=np.int32)

    def fill(self, worth: np.ndarray) -> np.ndarray:
        """[M] the most worth by step."""
        compiled.knapsack(self.ends, self.weight, worth, self.best, self.chosen)
        return self.best[-1][self.capacity]

    def taken(self, step: int) -> list[int]:
        """The shards of the last filling."""
        found, left = [], int(self.capacity[step])
        for chosen in reversed(self.chosen):
            if chosen[left] >= 0:
                found.append(int(chosen[left]))
                left -= self.weight[chosen[left]]
        return found
