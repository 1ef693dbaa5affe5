"""Clocks, medians, when a median is known well enough, and the slowdown of the machine meanwhile."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from shardcore.io.measurements import Spread


def spread(values_ms: Sequence[float]) -> Spread:
    q1, median, q3 = np.percentile(np.asarray(values_ms), [25, 50, 75])
    return Spread(float(median), float(q1), float(q3), len(values_ms))


def relative_ci(values_ms: Sequence[float]) -> float:
    """How well a median is known: half its 95% interval relative to it, from order statistics (no
    distribution assumed).

    Infinite below six values, of which no interval of the median can have 95%.
    """
    n = len(values_ms)
    if n < 6:
        return math.inf
    ordered = np.sort(np.asarray(values_ms))
    reach = 0.98 * math.sqrt(n)  # normal approximation to the binomial ranks of the median, 95%
    low, high = max(0, math.floor((n - 1) / 2 - reach)), min(n - 1, math.ceil((n - 1) / 2 + reach))
    return float((ordered[high] - ordered[low]) / 2 / max(ordered[n // 2], 1e-9))


class SlowdownLog:
    """The machine's slowdown at each of many runs of different ops in turn, from the runs themselves.

    A shared machine's speed wanders by tens of percent within milliseconds to minutes, for all ops nearly
    alike. How much slower than usual the runs just before and after were, each compared with its own op's
    level, tells the slowdown at a run: as far as neighbours agree at all, so that on a quiet machine nothing
    is corrected. Levels and slowdowns are fitted together by turns. An op with a known level (`anchors`, log
    ms) ties the slowdown to its usual value; without one, the mean slowdown is 1. The last `kept` runs are
    fitted together.

    Shapes: N runs kept.
    """

    REACH = 3.0
    """Runs over which a neighbour's word fades by a factor of e; found on recorded runs, where 2 to 5 are
    alike."""
    _OUTLIER = 0.3
    """A run slower or faster by more than this, in log, says no more than this of the slowdown."""

    def __init__(self, anchors: dict[Hashable, float] | None = None, kept: int = 2048):
        self.anchors = dict(anchors or {})
        self._runs: deque[tuple[Hashable, float]] = deque(maxlen=kept)
        self._added = 0
        distance = np.arange(-int(4 * self.REACH), int(4 * self.REACH) + 1)
        self._kernel = np.where(distance == 0, 0.0, np.exp(-np.abs(distance) / self.REACH))

    def add(self, op: Hashable, ms: float) -> int:
        """Note a run; its number, from 0."""
        self._runs.append((op, math.log(max(ms, 1e-6))))
        self._added += 1
        return self._added - 1

    def fit(self) -> Callable[[int], float]:
        """The slowdown at each run kept, by its number (1: as usual, 1.2: all took 20% longer); for older
        runs KeyError."""
        ops, logs = zip(*self._runs, strict=True)
        numbers: dict[Hashable, int] = {}
        op = np.array([numbers.setdefault(o, len(numbers)) for o in ops])
        log, count = np.array(logs), np.bincount(op)
        levels = np.bincount(op, log) / count
        weight = self._around(np.ones(len(log)))
        tied = [(numbers[o], level) for o, level in self.anchors.items() if o in numbers]
        slowdown = np.zeros(len(log))
        for _ in range(8):
            excess = slowdown + np.clip(log - levels[op] - slowdown, -self._OUTLIER, self._OUTLIER)
            around = self._around(excess) / np.maximum(weight, 1e-9)
            centred = around - around.mean()
            agreement = float(np.clip(centred @ excess / max(centred @ centred, 1e-12), 0.0, 1.0))
            slowdown = around.mean() + agreement * centred
            levels += (
                np.bincount(op, np.clip(log - slowdown - levels[op], -self._OUTLIER, self._OUTLIER)) / count
            )
            shift = np.mean([levels[k] - level for k, level in tied]) if tied else -slowdown.mean()
            levels, slowdown = levels - shift, slowdown + shift
        slowdown = np.exp(slowdown)
        first = self._added - len(slowdown)

        def slowdown_of(number: int) -> float:
            if number < first:
                raise KeyError(number)
            return float(slowdown[number - first])

        return slowdown_of

    def _around(self, values: np.ndarray) -> np.ndarray:
        reach = len(self._kernel) // 2
        return np.convolve(values, self._kernel)[reach : reach + len(values)]


class Caches:
    """A device's caches, which `evict` overwrites, as other layers would between two runs of an op.

    n_bytes: more than the caches hold.
    """

    def __init__(self, n_bytes: int, device: str):
        self._written = torch.zeros(max(1, n_bytes // 4), device=device)

    def evict(self) -> None:
        self._written.add_(1)
