"""Error metrics of predictions [S] against measurements [S]."""

from __future__ import annotations

import numpy as np


def mape(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Mean absolute error in percent of the measurement."""
    return float(100 * np.mean(np.abs(predicted - measured) / measured))


def kendall_tau(x: np.ndarray, y: np.ndarray) -> float:
    """Kendall's tau-b of two arrays [S]. 1 where they rank alike, 0 where either is constant."""
    agree = untied_x = untied_y = 0.0
    # One row of pairs at a time: all S² pairs would take too much memory.
    for i in range(1, len(x)):
        a, b = np.sign(x[i] - x[:i]), np.sign(y[i] - y[:i])
        agree, untied_x, untied_y = agree + a @ b, untied_x + np.abs(a).sum(), untied_y + np.abs(b).sum()
    return float(agree / np.sqrt(untied_x * untied_y)) if untied_x * untied_y else 0.0


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rank correlation of two arrays [S]. Ties get their mean rank; 0 where either is constant."""
    from scipy.stats import rankdata

    ranks = [rankdata(v) for v in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1]) if all(np.ptp(r) > 0 for r in ranks) else 0.0


def coverage(low: np.ndarray, high: np.ndarray, measured: np.ndarray) -> float:
    """Percent of the measurements that lie in their intervals. All arrays are [S]."""
    return 100 * float(np.mean((low <= measured) & (measured <= high)))
