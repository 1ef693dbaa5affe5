"""How far [S] predictions are from [S] measurements."""

from __future__ import annotations

import numpy as np


def mape(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Mean absolute error in percent of measured."""
    return float(100 * np.mean(np.abs(predicted - measured) / measured))


def kendall_tau(x: np.ndarray, y: np.ndarray) -> float:
    """Kendall's tau-b of two [S] arrays, 1 where they rank alike; 0 where either has no order."""
    agree = untied_x = untied_y = 0.0
    for i in range(1, len(x)):
        a, b = np.sign(x[i] - x[:i]), np.sign(y[i] - y[:i])
        agree, untied_x, untied_y = agree + a @ b, untied_x + np.abs(a).sum(), untied_y + np.abs(b).sum()
    return float(agree / np.sqrt(untied_x * untied_y)) if untied_x * untied_y else 0.0


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rank correlation of two [S] arrays, ties at their mean rank; 0 where either has no order."""
    from scipy.stats import rankdata

    ranks = [rankdata(v) for v in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1]) if all(np.ptp(r) > 0 for r in ranks) else 0.0


def coverage(low: np.ndarray, high: np.ndarray, measured: np.ndarray) -> float:
    """Percent of the measurements that lie in their intervals; all [S]."""
    return 100 * float(np.mean((low <= measured) & (measured <= high)))
