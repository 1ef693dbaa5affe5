"""Error metrics of predictions [S] against measurements [S]."""

from __future__ import annotations

from typing import Any

import numpy as np


def mape(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Mean absolute error in percent of the measurement."""
    return float(100 * np.mean(np.abs(predicted - measured) / measured))


def kendall_tau(x: np.ndarray, y: np.ndarray) -> float:
    """Kendall's tau-b of two arrays [S]. 1 where their ranks agree, 0 where either is constant."""
    from scipy.stats import kendalltau

    result: Any = kendalltau(x, y) if np.ptp(x) and np.ptp(y) else None  # scipy does not name its type
    return float(result.statistic) if result else 0.0


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rank correlation of two arrays [S]. Ties get their mean rank; 0 where either is constant."""
    from scipy.stats import spearmanr

    # A constant array has no ranks to correlate, and scipy would warn.
    result: Any = spearmanr(x, y) if np.ptp(x) and np.ptp(y) else None
    return float(result.statistic) if result else 0.0


def coverage(low: np.ndarray, high: np.ndarray, measured: np.ndarray) -> float:
    """Percent of the measurements that lie in their intervals. All arrays are [S]."""
    return 100 * float(np.mean((low <= measured) & (measured <= high)))
