"""Linear laws with rates of 0 or more, fitted to measurements.

Shapes: S samples, K terms.
"""

from __future__ import annotations

import itertools

import numpy as np


def fit_law(
    terms: np.ndarray, measured: np.ndarray, known: np.ndarray | float = 0.0, rounds: int = 15
) -> np.ndarray:
    """[K] rates, none negative, that minimise the mean absolute relative error of terms [S, K] @ rates.

    Iteratively reweighted least squares. measured: [S]. known: [S] of it, that the law need not explain.
    """
    weights = 1.0 / measured
    for _ in range(rounds):
        rates = _non_negative_least_squares(terms * weights[:, None], (measured - known) * weights)
        error = np.abs((known + terms @ rates) / measured - 1)
        # Weight 1 / |error| turns squares into absolute values. The floor of 2% keeps it finite.
        weights = 1.0 / (measured * np.sqrt(np.maximum(error, 0.02)))
    return rates


def _non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """argmin |a x - b| over x >= 0. Exact: it tries every set of positive terms, as K is small.

    A trace of ridge shares the rate evenly among terms that the data cannot tell apart.
    """
    # Unit columns, so that one ridge suits terms of any unit.
    norms = np.linalg.norm(a, axis=0)
    scale = np.maximum(norms, 1e-300)
    gram, target = (a / scale).T @ (a / scale) + 1e-9 * np.eye(a.shape[1]), (a / scale).T @ b
    best, solution = 0.0, np.zeros(a.shape[1])
    # A term that is always 0 has no rate. There are half as many sets without it.
    for mask in itertools.product(*((False, True) if norm else (False,) for norm in norms)):
        chosen = np.flatnonzero(mask)
        if len(chosen):
            x = np.linalg.solve(gram[np.ix_(chosen, chosen)], target[chosen])
            value = -float(target[chosen] @ x)  # of the objective x'Gx - 2x't, at its least
            if (x >= 0).all() and value < best:
                best, solution = value, np.zeros(a.shape[1])
                solution[chosen] = x
    return solution / scale
