"""Linear laws with rates of 0 or more, fitted to measurements.

Shapes: S samples, K terms.
"""

from __future__ import annotations

import numpy as np

_RIDGE, _ROUNDS = 1e-9, 15


def fit_nonnegative_rates(
    terms: np.ndarray, measured: np.ndarray, known: np.ndarray | float = 0.0
) -> np.ndarray:
    """[K] rates, 0 or more, that minimise the mean absolute relative error of terms [S, K] @ rates.

    Iteratively reweighted least squares.
    measured: [S].
    known: [S] of it that the law need not explain.
    """
    from scipy.optimize import nnls

    # At first weigh by 1 / measured: squares of relative errors.
    n, rates = terms.shape[1], np.zeros(terms.shape[1])
    # A trace of ridge shares the rate evenly among terms that the data cannot tell apart.
    ridge = np.sqrt(_RIDGE) * np.eye(n)
    weights = 1.0 / measured
    for _ in range(_ROUNDS):
        weighted = terms * weights[:, None]
        # Unit columns, so that one ridge suits terms of any unit. A term that is always 0 has no rate.
        scale = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)
        # Rows of the ridge pull rates to 0.
        target = np.concatenate([(measured - known) * weights, np.zeros(n)])
        scaled, _ = nnls(np.concatenate([weighted / scale, ridge]), target, maxiter=100 * n)
        # Undo the scaling of columns.
        rates = scaled / scale
        error = np.abs((known + terms @ rates) / measured - 1)
        # Weight 1 / |error| turns squares into absolute values. The floor of 2% keeps it finite.
        weights = 1.0 / (measured * np.sqrt(np.maximum(error, 0.02)))
    return rates
