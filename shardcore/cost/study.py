"""Studies of a dataset: repeatability of a timing, accuracy on unseen tables, and the learning curve.

Shapes: S samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.core.types import Setting
from shardcore.cost import accuracy, drift_correction, fit
from shardcore.cost.metrics import mape
from shardcore.cost.neural import NeuralModel
from shardcore.cost.nnls import fit_nonnegative_rates
from shardcore.io import dataset
from shardcore.io.measurements import ComputeSample
from shardcore.tables.held_out import is_held_out

CONTROL = 8
"""An op timed more often than this is the reference op, and left out of repeatability sets."""
_PARTS = (16, 8, 4, 2, 1)
"""A learning curve trains on the dataset divided by each of these."""
_POWERS = np.linspace(0.1, 2, 39)


def repeatability_error(repeats: Sequence[Sequence[ComputeSample]]) -> float | None:
    """Mean absolute error of a single timing, in percent: a lower bound for the error of any model.

    It uses ops timed at least three times, or twice where there are none (dataset.repeated_samples). Each contributes
    the difference of its two most precise timings, over √2. None without any such op.
    """
    # Ops timed three times give two precise timings to choose from.
    often = [g for g in repeats if 3 <= len(g) <= CONTROL] or [g for g in repeats if len(g) == 2]
    # Both timings have equal errors, so their difference has √2 times the error of one.
    pairs = [sorted(g, key=lambda s: math.inf if s.relative_ci is None else s.relative_ci)[:2] for g in often]
    return (
        100 * float(np.mean([abs(b.total_ms / a.total_ms - 1) for a, b in pairs])) / math.sqrt(2)
        if pairs
        else None
    )


def judge_test_split(model: NeuralModel, known: drift_correction.Measurements) -> dict[str, float]:
    """Accuracy of a model on the test split, and the repeatability of the timings if it is known."""
    timing = repeatability_error(known.repeats)
    return accuracy.evaluate_accuracy(model, *known.samples_of_split("test")) | (
        {} if timing is None else {"repeatability": timing}
    )


def split_by_table(
    compute_samples: Sequence[ComputeSample],
) -> tuple[list[ComputeSample], list[ComputeSample]]:
    """Split ops into those of training tables alone and those of held-out tables alone."""
    kept = [[is_held_out(x.table) for x in s.request.shards] for s in compute_samples]
    return (
        [s for s, k in zip(compute_samples, kept, strict=True) if not any(k)],
        [s for s, k in zip(compute_samples, kept, strict=True) if all(k)],
    )


def unseen_table_error(
    compute_samples: Sequence[ComputeSample], setting: Setting, config: fit.FitConfig | None = None
) -> float | None:
    """Percent error on ops of unseen tables, of a model trained without the unseen tables.

    None where either side has too few ops.
    """
    # Ops that mix seen and unseen tables are on neither side.
    seen, unseen = split_by_table([s for s in compute_samples if s.error is None])
    if not unseen or len(seen) < fit.MIN_COMPUTE:
        return None
    model = fit.train_op_model(seen, setting, config or fit.FitConfig())
    return mape(accuracy.predict_op_ms(model, unseen), np.array([s.total_ms for s in unseen]))


@dataclass(frozen=True)
class LearningCurve:
    """Test error against the number of training samples.

    rows: (samples, error in percent), as measured.
    constant, scale, power: numbers of the law through them (Hestness et al. 2017).

        error = constant + scale × samples^-power
    """

    rows: tuple[tuple[int, float], ...]
    constant: float
    scale: float
    power: float

    def error_at(self, samples: float) -> float:
        """Test error in percent at a number of training samples, by the fitted power law."""
        return self.constant + self.scale * samples**-self.power

    @property
    def gain(self) -> float:
        """Percentage points of test error that doubling the training samples would save."""
        most = max(n for n, _ in self.rows)
        return self.error_at(most) - self.error_at(2 * most)


def learning_curve(
    compute_samples: Sequence[ComputeSample],
    setting: Setting,
    config: fit.FitConfig | None = None,
    progress: fit.Progress | None = None,
) -> LearningCurve | None:
    """Test errors of models trained on a sixteenth, an eighth and so on up to all of the samples, with a power law.

    Each subset contains the smaller ones. None with too few samples for three points.
    """
    timed = sorted((s for s in compute_samples if s.error is None), key=lambda s: s.id)
    # Sorted by id, which is random: each prefix is a random sample.
    rest, test = (
        [s for s in timed if dataset.split_of_sample(s.id) != "test"],
        accuracy.held_out_samples(timed),
    )
    sizes = [n for part in _PARTS if (n := len(rest) // part) >= fit.MIN_COMPUTE]
    if len(sizes) < 3 or not test:
        return None
    rows, measured = [], np.array([s.total_ms for s in test])
    for n in sizes:
        model = fit.train_op_model(rest[:n], setting, config or fit.FitConfig())
        rows.append((n, mape(accuracy.predict_op_ms(model, test), measured)))
        if progress:
            progress("learning_curve", n, {"test_mape": rows[-1][1]})
    return _fit_power_law(rows)


def _fit_power_law(rows: Sequence[tuple[int, float]]) -> LearningCurve:
    """Fit a power law to test errors by number of training samples."""
    samples, error = (np.array(x, dtype=float) for x in zip(*rows, strict=True))
    laws = []
    # For a fixed power the law is linear in its other two numbers: fit them, and keep the best power.
    for power in _POWERS:
        terms = np.stack([np.ones_like(samples), samples**-power], 1)
        constant, scale = fit_nonnegative_rates(terms, error)
        # Relative error, as for the fit itself.
        missed = float(np.abs(terms @ [constant, scale] / error - 1).mean())
        laws.append((missed, LearningCurve(tuple(rows), float(constant), float(scale), float(power))))
    return min(laws, key=lambda x: x[0])[1]
