"""Error metrics of predictions [S] against measurements [S]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MeanInterval:
    """A mean of some values with its 95% interval. With fewer than two values it is infinite."""

    mean: float
    low: float
    high: float


def mean_interval(values: np.ndarray) -> MeanInterval:
    """The mean of independent values [N] with its 95% interval (Student). nan are left out."""
    from scipy.special import stdtrit

    known = values[np.isfinite(values)]
    mean = float(known.mean()) if known.size else np.nan
    if len(known) < 2:
        return MeanInterval(mean, -np.inf, np.inf)
    half = float(stdtrit(len(known) - 1, 0.975) * known.std(ddof=1)) / len(known) ** 0.5
    return MeanInterval(mean, mean - half, mean + half)


def mape(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Mean absolute error of predictions, in percent of the measurement."""
    return float(100 * np.mean(np.abs(predicted - measured) / measured))


def kendall_tau(x: np.ndarray, y: np.ndarray) -> float:
    """Kendall's tau-b of two arrays [S]. 1 where their ranks agree, 0 where either is constant."""
    from scipy.stats import kendalltau

    result: Any = kendalltau(x, y) if np.ptp(x) and np.ptp(y) else None  # scipy does not name its type
    return float(result.statistic) if result else 0.0


def interval_coverage(low: np.ndarray, high: np.ndarray, measured: np.ndarray) -> float:
    """Percent of measurements [S] that lie in their intervals, from low [S] to high [S]."""
    return 100 * float(np.mean((low <= measured) & (measured <= high)))
