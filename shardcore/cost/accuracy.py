"""Dataset splits, and the accuracy of a model on samples that it was not trained on.

Shapes: S samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardcore.cost import collective_fit, features, nets
from shardcore.cost.metrics import interval_coverage, kendall_tau, mape, mean_interval
from shardcore.cost.neural import NeuralModel
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveSample, ComputeSample

COVERAGES = (50, 80, 90, 95)
"""Nominal coverages in percent. `evaluate_accuracy` reports the real share inside each interval."""
FEWEST = 10
"""With fewer held-out samples a mean error is no figure: only its interval is shown."""


def held_out_samples(samples: Sequence[dataset.Sample]) -> list[dataset.Sample]:
    """The samples in the test split of a dataset."""
    return [s for s in samples if dataset.split_of_sample(s.id) == "test"]


def predict_op_ms(model: NeuralModel, samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S] predicted ms, forward + backward, of measured ops."""
    return model.op_ms(_summed_op_encodings(model, samples))


def confidence_intervals(
    model: NeuralModel, samples: Sequence[ComputeSample], confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """[S] lower and upper ms of an op: its measured forward + backward lies between them with a given probability."""
    return model.ms_interval(_summed_op_encodings(model, samples), confidence)


def _summed_op_encodings(model: NeuralModel, samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S, K + 2] for each measured op, the sum of the encodings of its shards."""
    if not samples:
        # An empty stack has no width, so state it.
        return np.zeros((0, len(features.DRIVERS) + 2))
    return np.stack([model.encode(s.request.shards, s.request.batch).sum(0) for s in samples])


def evaluate_accuracy(
    model: NeuralModel,
    compute_samples: Sequence[ComputeSample],
    collective_samples: Sequence[CollectiveSample],
) -> dict[str, float]:
    """Accuracy of a cost model on measured ops and collectives, as flat metrics. Errors are in percent.

    compute_*: errors of forward + backward of fused ops.
    all_to_all_*: errors of FP32 all-to-alls, mean of both ways.
    *_low, *_high: the 95% interval of a mean error.
    compute_coverage_*: percent of measurements inside the interval of that nominal coverage.
    Exchanges: see collective_fit.exchange_errors and sample_counts.

    A kind without samples has no metrics.
    """
    compute_samples = [s for s in compute_samples if s.error is None]
    # The same samples as in training: payloads that jobs may choose.
    collective_samples = [s for s in collective_fit.priceable_samples(collective_samples) if s.error is None]
    metrics: dict[str, float] = {
        "n_compute": float(len(compute_samples)),
        "n_comm": float(len(collective_samples)),
    }
    if compute_samples:
        # Encoded once, for predictions and for all intervals.
        sums = _summed_op_encodings(model, compute_samples)
        predicted, timed = nets.op_ms(model.weights, sums), features.measured_ms(compute_samples)
        total, measured = predicted.sum(1), timed.sum(1)
        metrics |= {
            **_mean_error_metrics("compute", 100 * np.abs(total / measured - 1)),
            "forward_compute_mape": mape(predicted[:, 0], timed[:, 0]),
            "backward_compute_mape": mape(predicted[:, 1], timed[:, 1]),
            "compute_mse_ms2": float(((total - measured) ** 2).mean()),
            "compute_kendall_tau": kendall_tau(total, measured),
        }
        for percent in COVERAGES:
            metrics[f"compute_coverage_{percent}"] = interval_coverage(
                *model.ms_interval(sums, percent / 100), measured
            )
    # Of each all-to-all, the mean of both ways.
    of_each = [
        np.mean(
            [
                mape(*collective_fit.predicted_and_measured_ms(model.weights, [s], direction))
                for direction in collective_fit.ALL_TO_ALL.definition.directions
            ]
        )
        for s in collective_fit.samples_of_kind(
            collective_samples, collective_fit.ALL_TO_ALL.collective, "fp32"
        )
    ]
    if of_each:
        metrics |= _mean_error_metrics("all_to_all", np.array(of_each))
    return (
        metrics
        | collective_fit.exchange_errors(model.weights, collective_samples)
        | collective_fit.sample_counts(collective_samples)
    )


def _mean_error_metrics(kind: str, percent: np.ndarray) -> dict[str, float]:
    """Mean of absolute errors [S] with its 95% interval, as metrics. A single sample has no interval."""
    found = mean_interval(percent)
    ends = {f"{kind}_mape_low": max(0.0, found.low), f"{kind}_mape_high": found.high}
    return {
        f"n_{kind}": float(len(percent)),
        f"{kind}_mape": found.mean,
        **(ends if np.isfinite(found.high) else {}),
    }


def describe_error(metrics: Mapping[str, float], kind: str = "compute", samples: str = "groups") -> str:
    """Text for a mean error among the metrics of `evaluate_accuracy`, with the number of samples and the 95% interval.

    With fewer than FEWEST samples the interval alone is said.
    """
    n = int(metrics.get(f"n_{kind}", 0))
    if f"{kind}_mape_high" not in metrics:
        return f"unknown, as {n or 'no'} {samples} are held out"
    interval = f"{metrics[f'{kind}_mape_low']:.1f} to {metrics[f'{kind}_mape_high']:.1f}%"
    figure = f"{metrics[f'{kind}_mape']:.1f}% ({interval}) on {n:,} {samples}"
    return figure if n >= FEWEST else f"{interval}, as only {n} {samples} are held out"


def accuracy_summary(metrics: Mapping[str, float]) -> str:
    """One line of text on the accuracy metrics of `study.judge_test_split`."""
    timing = (
        f"; a timing itself is off by {metrics['repeatability']:.1f}%" if "repeatability" in metrics else ""
    )
    return (
        f"error on this machine's held-out samples: ops {describe_error(metrics)}, exchanges "
        f"{describe_error(metrics, 'all_to_all', 'all-to-alls')}{timing}"
    )
