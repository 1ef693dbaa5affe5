"""Clocks, medians, and when a median is known well enough."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from shardcore.types import Spread


def spread(values_ms: Sequence[float]) -> Spread:
    q1, median, q3 = np.percentile(np.asarray(values_ms), [25, 50, 75])
    return Spread(float(median), float(q1), float(q3), len(values_ms))


def known_to(values_ms: Sequence[float]) -> float:
    """How well a median is known: half its 95% interval relative to it, from order statistics (no distribution assumed).

    Infinite below six values, of which no interval of the median can have 95%.
    """
    n = len(values_ms)
    if n < 6:
        return math.inf
    ordered = np.sort(np.asarray(values_ms))
    reach = 0.98 * math.sqrt(n)  # normal approximation to the binomial ranks of the median, 95%
    low, high = max(0, math.floor((n - 1) / 2 - reach)), min(n - 1, math.ceil((n - 1) / 2 + reach))
    return float((ordered[high] - ordered[low]) / 2 / max(ordered[n // 2], 1e-9))


class CpuClock:
    """Marks points in time on this thread."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, marks: Sequence[float]) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(marks[:-1], marks[1:], strict=True)]


class CudaClock:
    """Marks points in the current CUDA stream; elapsed_ms waits for the last."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def clock_for(device: str) -> CpuClock | CudaClock:
    return CudaClock() if device == "cuda" else CpuClock()
