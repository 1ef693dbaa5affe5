"""The pace of machines that have one name: datasets of equally fast ones may join.

Shapes: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.cost import features
from shardcore.cost.nnls import fit_law
from shardcore.io.measurements import ComputeSample

FEWEST = 20
"""With fewer timed samples nothing is known."""
MOST = 2.0
"""Samples of machines whose pace differs by more do not join. Other work slows a machine down, too."""


def pace(own: Sequence[ComputeSample], other: Sequence[ComputeSample]) -> float | None:
    """How many times as long an op takes in `own` as in `other`: the median over `own`. None: unknown.

    The samples need not be of the same ops: a linear law of the drivers stands for `other`.
    """
    (own_terms, own_ms), (terms, ms) = _terms(own), _terms(other)
    if min(len(own_ms), len(ms)) < FEWEST:
        return None
    return float(np.median(own_ms / np.maximum(own_terms @ fit_law(terms, ms), 1e-9)))


def is_equal(found: float | None) -> bool:
    """Compare a pace with MOST. An unknown pace is taken for equal."""
    return found is None or 1 / MOST <= found <= MOST


def _terms(samples: Sequence[ComputeSample]) -> tuple[np.ndarray, np.ndarray]:
    """[S, K + 1] launch and drivers, and [S] ms, of the samples without an error."""
    timed = [s for s in samples if s.error is None]
    if not timed:
        return np.zeros((0, 1)), np.zeros(0)
    drivers = np.stack([features.features(s.request.shards, s.request.batch)[0].sum(0) for s in timed])
    return np.concatenate([np.ones((len(timed), 1)), drivers], 1), np.array([s.total_ms for s in timed])
