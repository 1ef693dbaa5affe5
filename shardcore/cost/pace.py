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
    """Ratio of an op's time in `own` to its time in `other`: the median over `own`. None: unknown.

    The samples need not be of the same ops: a linear law of the drivers stands for `other`.
    """
    # Failed samples have no time.
    own, other = ([s for s in samples if s.error is None] for samples in (own, other))
    if min(len(own), len(other)) < FEWEST:
        return None
    # Both sides need not have the same ops: the law of `other` predicts each op of `own`.
    law = fit_law(features.launch_and_drivers(other), features.measured_ms(other).sum(1))
    expected_ms = features.launch_and_drivers(own) @ law
    # The median: a few outliers do not decide whether datasets join.
    return float(np.median(features.measured_ms(own).sum(1) / np.maximum(expected_ms, 1e-9)))


def is_equal(ratio: float | None) -> bool:
    """Compare a pace with MOST. An unknown pace counts as equal."""
    return ratio is None or 1 / MOST <= ratio <= MOST
