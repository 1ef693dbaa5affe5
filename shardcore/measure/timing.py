"""Medians of timings, their confidence, and the machine's slowdown meanwhile."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardcore.io.measurements import TimingSpread


def timing_spread(values_ms: Sequence[float] | np.ndarray) -> TimingSpread:
    # Quartiles, as the outliers of timings are all on one side.
    """Median and quartiles of repeated timings."""
    q1, median, q3 = np.percentile(np.asarray(values_ms), [25, 50, 75])
    return TimingSpread(float(median), float(q1), float(q3), len(values_ms))


def relative_ci(values_ms: Sequence[float] | np.ndarray) -> float:
    """Half the width of the 95% confidence interval of a median, relative to the median; distribution-free.

    Infinite for fewer than six values: even from the least to the largest, they make no 95% interval.
    """
    n = len(values_ms)
    if n < 6:
        return math.inf
    ordered = np.sort(np.asarray(values_ms))
    # The number of values below the median is binomial with p = 1/2, so its standard deviation is sqrt(n) /
    # 2. The interval reaches 1.96 of these, counted in ranks of sorted values, to both sides.
    reach = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor((n - 1) / 2 - reach)), min(n - 1, math.ceil((n - 1) / 2 + reach))
    # The lower limit avoids a division by 0, for timings below the clock's resolution.
    return float((ordered[high] - ordered[low]) / 2 / max(ordered[n // 2], 1e-9))


class SlowdownLog:
    """Estimate of the machine's slowdown over time from many runs of different ops in turn.

    A shared machine's speed wanders by tens of percent within milliseconds to minutes, for all ops by nearly
    the same factor. Each op has a level: its log ms at the usual speed. A run's excess over the level of its
    op is slowdown and noise. The excess of the runs just before and after predicts the slowdown, to the
    degree that neighbours agree: on a quiet machine nothing is corrected. Levels and slowdowns are fitted in
    alternation.

    anchors: known levels of ops, log ms. They fix the scale of the slowdown. Without one, its mean logarithm
      is 0.
    kept: number of runs, the last ones, which are fitted together.

    Shapes: N runs kept.
    """

    REACH = 3.0
    """Runs over which a neighbour's weight fades by a factor of e. On recorded runs 2 to 5 are equally good."""
    _OUTLIER = 0.3
    """Largest log excess of a run that counts. What is beyond is noise rather than slowdown."""

    def __init__(self, anchors: Mapping[Any, float] | None = None, kept: int = 2048):
        self.anchors = dict(anchors or {})
        # The deque drops the oldest runs.
        self._runs: deque[tuple[Hashable, float]] = deque(maxlen=kept)
        self._added = 0
        # Beyond four times REACH, weights are next to nothing.
        distance = np.arange(-int(4 * self.REACH), int(4 * self.REACH) + 1)
        # A run does not predict itself: its own weight is 0.
        self._kernel = np.where(distance == 0, 0.0, np.exp(-np.abs(distance) / self.REACH))

    def add_timing(self, op: Hashable, ms: float) -> int:
        """Add the timing of a run of an op. Returns the run's number, from 0."""
        self._runs.append((op, math.log(max(ms, 1e-6))))
        self._added += 1
        return self._added - 1

    def fit_slowdown(self) -> Callable[[int], float]:
        """Fit the machine's slowdown over time. Returns a function from a run's number to the slowdown; 1.2: 20% slower
        than usual.

        It raises KeyError for runs that are no longer kept.
        """
        ops, logs = zip(*self._runs, strict=True)
        numbers: dict[Hashable, int] = {}
        # [N] the op of each run, as a number in order of first appearance.
        op = np.array([numbers.setdefault(o, len(numbers)) for o in ops])
        # Logarithms turn factors of slowdown into sums.
        log, count = np.array(logs), np.bincount(op)
        # An op's level starts at the mean of its runs.
        levels = np.bincount(op, log) / count
        # [N] total weight of each run's neighbours. It is less at both ends, where some are missing.
        weight = self._weighted_neighbours(np.ones(len(log)))
        # Anchored ops that are among the kept runs.
        tied = [(numbers[o], level) for o, level in self.anchors.items() if o in numbers]
        slowdown = np.zeros(len(log))
        for _ in range(8):
            excess = slowdown + np.clip(log - levels[op] - slowdown, -self._OUTLIER, self._OUTLIER)
            around = self._weighted_neighbours(excess) / np.maximum(weight, 1e-9)
            # Only deviations from the mean show agreement. The mean itself is a common factor, fixed below.
            centred = around - around.mean()
            # Regression slope of a run's excess on that of its neighbours: 0 if they predict nothing.
            agreement = float(np.clip(centred @ excess / max(centred @ centred, 1e-12), 0.0, 1.0))
            slowdown = around.mean() + agreement * centred
            missed = np.clip(log - slowdown - levels[op], -self._OUTLIER, self._OUTLIER)
            levels += np.bincount(op, missed) / count
            # Levels and slowdown are determined up to a constant, which anchors or the mean fix.
            shift = np.mean([levels[k] - level for k, level in tied]) if tied else -slowdown.mean()
            levels, slowdown = levels - shift, slowdown + shift
        slowdown = np.exp(slowdown)
        # Number of the oldest run kept.
        first = self._added - len(slowdown)

        def slowdown_at(number: int) -> float:
            if number < first:
                raise KeyError(number)
            return float(slowdown[number - first])

        return slowdown_at

    def _weighted_neighbours(self, values: np.ndarray) -> np.ndarray:
        """Weighted sum of each run's neighbours in time."""
        reach = len(self._kernel) // 2
        return np.convolve(values, self._kernel)[reach : reach + len(values)]


class HardwareCaches:
    """A device's caches, evicted by overwriting a buffer larger than the caches.

    n_bytes: size of the buffer.
    """

    def __init__(self, n_bytes: int, device: str):
        # float32: four bytes each.
        self._written = torch.zeros(max(1, n_bytes // 4), device=device)

    def evict_caches(self) -> None:
        """Overwrite the device's caches."""
        self._written.add_(1)
