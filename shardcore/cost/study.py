"""Studies of a dataset and of models: how well a timing repeats, how good a model is on tables that it never saw, and how much
data is enough.

Shapes: S samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.cost import accuracy, fit
from shardcore.cost.metrics import mape
from shardcore.cost.nnls import fit_law
from shardcore.measurements import ComputeSample
from shardcore.tables.held_out import kept_for_testing
from shardcore.types import Setting

CONTROL = 8
"""What was timed more often than this is the reference op, not part of a repeatability set."""
_PARTS = (16, 8, 4, 2, 1)
"""A learning curve trains on the dataset over these."""
_POWERS = np.linspace(0.1, 2, 39)


def repeatability(repeats: Sequence[Sequence[ComputeSample]]) -> float | None:
    """The mean absolute error in percent that one timing has against the truth: of each group timed at least three times (twice,
    where none was; dataset.repeated gives them), the difference of the two best known timings over √2. None without any: no model
    can be shown to be better than this."""
    often = [g for g in repeats if 3 <= len(g) <= CONTROL] or [g for g in repeats if len(g) == 2]
    pairs = [sorted(g, key=lambda s: math.inf if s.relative_ci is None else s.relative_ci)[:2] for g in often]
    return 100 * float(np.mean([abs(b.total_ms / a.total_ms - 1) for a, b in pairs])) / math.sqrt(2) if pairs else None


def split_by_table(compute: Sequence[ComputeSample]) -> tuple[list[ComputeSample], list[ComputeSample]]:
    """The groups without any table that is kept for testing (kept_for_testing), and those of such tables alone."""
    kept = [[kept_for_testing(x.table) for x in s.request.shards] for s in compute]
    return ([s for s, k in zip(compute, kept, strict=True) if not any(k)],
            [s for s, k in zip(compute, kept, strict=True) if all(k)])


def unseen_tables(compute: Sequence[ComputeSample], setting: Setting, config: fit.FitConfig | None = None) -> float | None:
    """Error in percent on the groups of tables that are kept for testing alone, of a model trained on the groups without any of
    them; None where either are too few."""
    seen, unseen = split_by_table([s for s in compute if s.error is None])
    if not unseen or len(seen) < fit.MIN_COMPUTE:
        return None
    model = fit.train(seen, [], setting, config).model
    return mape(accuracy.predict(model, unseen), np.array([s.total_ms for s in unseen]))


@dataclass(frozen=True)
class LearningCurve:
    """Error on the test split, in percent, against samples trained on: the rows (samples, error) that were found, and the law
    error = constant + scale × samples^-power through them (Hestness et al. 2017)."""

    rows: tuple[tuple[int, float], ...]
    constant: float
    scale: float
    power: float

    def at(self, samples: float) -> float:
        """Error in percent that the law foretells."""
        return self.constant + self.scale * samples**-self.power

    @property
    def gain(self) -> float:
        """Percentage points that twice the samples would take off the error."""
        most = max(n for n, _ in self.rows)
        return self.at(most) - self.at(2 * most)


def learning_curve(compute: Sequence[ComputeSample], setting: Setting, config: fit.FitConfig | None = None,
                   progress: fit.Progress | None = None) -> LearningCurve | None:
    """Models of a sixteenth of the samples to all of them, each part holding the smaller ones; takes as long as two trainings.
    None where the samples are too few for three points."""
    timed = sorted((s for s in compute if s.error is None), key=lambda s: s.id)
    rest, test = [s for s in timed if accuracy.split_of(s.id) != "test"], accuracy.held_out(timed)
    sizes = [n for part in _PARTS if (n := len(rest) // part) >= fit.MIN_COMPUTE]
    if len(sizes) < 3 or not test:
        return None
    rows, measured = [], np.array([s.total_ms for s in test])
    for n in sizes:
        model = fit.train(rest[:n], [], setting, config).model
        rows.append((n, mape(accuracy.predict(model, test), measured)))
        if progress:
            progress("learning_curve", n, {"test_mape": rows[-1][1]})
    return _law(rows)


def _law(rows: Sequence[tuple[int, float]]) -> LearningCurve:
    samples, error = (np.array(x, dtype=float) for x in zip(*rows, strict=True))
    found = []
    for power in _POWERS:
        terms = np.stack([np.ones_like(samples), samples**-power], 1)
        constant, scale = fit_law(terms, error)
        missed = float(np.abs(terms @ [constant, scale] / error - 1).mean())
        found.append((missed, LearningCurve(tuple(rows), float(constant), float(scale), float(power))))
    return min(found, key=lambda x: x[0])[1]
