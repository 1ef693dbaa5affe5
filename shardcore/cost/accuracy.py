"""How good a model is on samples that it was not trained on: the splits and the metrics.

Shapes: S samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from shardcore.cost import exchange, nets
from shardcore.cost.metrics import kendall_tau, mape
from shardcore.cost.neural import NeuralModel
from shardcore.types import CommSample, ComputeSample

Sample = TypeVar("Sample", ComputeSample, CommSample)

# --- splits ------------------------------------------------------------------------------------------------------------


def split_of(sample_id: str) -> str:
    """Of "train", "validation" and "test" (8 : 1 : 1), from the id alone: a sample stays on its side as the dataset grows."""
    part = int(hashlib.sha256(sample_id.encode()).hexdigest(), 16) % 10
    return "train" if part < 8 else ("validation" if part == 8 else "test")


def held_out(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of the test split."""
    return [s for s in samples if split_of(s.id) == "test"]


def predict(model: NeuralModel, samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S] forward + backward ms."""
    return _predicted_parts(model, samples).sum(1)


def _predicted_parts(model: NeuralModel, samples: Sequence[ComputeSample]) -> np.ndarray:
    if not samples:
        return np.zeros((0, 2))
    sums = np.stack([model.encode(s.request.shards, s.request.batch).sum(0) for s in samples])
    return nets.parts(model.weights, sums)


def evaluate(model: NeuralModel, compute: Sequence[ComputeSample], comm: Sequence[CommSample]) -> dict[str, float]:
    """Accuracy on measurements: flat metrics, errors in percent; those of a kind without samples are left out.

    compute_* is of forward + backward of a group; *_comm_mape of one rank's transfer.
    """
    compute, comm = ([s for s in samples if s.error is None] for samples in (compute, exchange.priced(comm)))
    metrics: dict[str, float] = {"n_compute": float(len(compute)), "n_comm": float(len(comm))}
    if compute:
        both = _predicted_parts(model, compute)
        found = np.array([[s.forward.median_ms, s.backward.median_ms] for s in compute])
        total, measured = both.sum(1), found.sum(1)
        metrics |= {"compute_mape": mape(total, measured), "forward_compute_mape": mape(both[:, 0], found[:, 0]),
                    "backward_compute_mape": mape(both[:, 1], found[:, 1]),
                    "compute_mse_ms2": float(((total - measured) ** 2).mean()),
                    "compute_kendall_tau": kendall_tau(total, measured)}
    if comm:
        for way in ("forward", "backward"):
            terms, measured = exchange.observed(comm, way)
            metrics[f"{way}_comm_mape"] = mape(terms @ model.weights[f"exchange_{way}"], measured)
    return metrics
