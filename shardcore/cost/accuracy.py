"""Dataset splits, and the accuracy of a model on samples that it was not trained on.

Shapes: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from shardcore.cost import collective_fit, features, nets
from shardcore.cost.metrics import coverage, kendall_tau, mape
from shardcore.cost.neural import NeuralModel
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveSample, ComputeSample

Sample = TypeVar("Sample", ComputeSample, CollectiveSample)
COVERAGES = (50, 80, 90, 95)
"""Nominal coverages in percent. `evaluate` reports the real share inside each interval."""


def held_out(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of the test split."""
    return [s for s in samples if dataset.split_of(s.id) == "test"]


def predict(model: NeuralModel, samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S] predicted ms, forward + backward."""
    return model.head(_sums(model, samples))


def noise(samples: Sequence[ComputeSample]) -> float:
    """Percent, mean interquartile range over median of the timings of samples. 0 for none."""
    parts = [part for s in samples if s.error is None for part in (s.forward, s.backward)]
    # A median of 0 has no relative spread.
    spreads = [(part.q3_ms - part.q1_ms) / part.median_ms for part in parts if part and part.median_ms]
    return 100 * float(np.mean(spreads)) if spreads else 0.0


def intervals(
    model: NeuralModel, samples: Sequence[ComputeSample], confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """[S] ms, low and high, around the measured forward + backward with probability `confidence`."""
    return model.interval(_sums(model, samples), confidence)


def _sums(model: NeuralModel, samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S, K + 2] summed encodings of each sample's shards."""
    if not samples:
        # An empty stack has no width, so state it.
        return np.zeros((0, len(features.DRIVERS) + 2))
    return np.stack([model.encode(s.request.shards, s.request.batch).sum(0) for s in samples])


def evaluate(
    model: NeuralModel, compute: Sequence[ComputeSample], comm: Sequence[CollectiveSample]
) -> dict[str, float]:
    """Accuracy on measurements, as flat metrics. Errors are in percent.

    compute_*: errors of forward + backward of fused ops.
    compute_coverage_*: percent of measurements inside the interval of that nominal coverage.
    Exchanges: see collective_fit.errors.

    A kind without samples has no metrics.
    """
    compute = [s for s in compute if s.error is None]
    # The same samples as in training: payloads that jobs may choose.
    comm = [s for s in collective_fit.priced(comm) if s.error is None]
    metrics: dict[str, float] = {"n_compute": float(len(compute)), "n_comm": float(len(comm))}
    if compute:
        # Encoded once, for predictions and for all intervals.
        sums = _sums(model, compute)
        predicted, timed = nets.parts(model.weights, sums), features.measured_ms(compute)
        total, measured = predicted.sum(1), timed.sum(1)
        metrics |= {
            "compute_mape": mape(total, measured),
            "forward_compute_mape": mape(predicted[:, 0], timed[:, 0]),
            "backward_compute_mape": mape(predicted[:, 1], timed[:, 1]),
            "compute_mse_ms2": float(((total - measured) ** 2).mean()),
            "compute_kendall_tau": kendall_tau(total, measured),
        }
        for percent in COVERAGES:
            metrics[f"compute_coverage_{percent}"] = coverage(*model.interval(sums, percent / 100), measured)
    return metrics | collective_fit.errors(model.weights, comm)
