"""Traced steps of running jobs as training samples: which are held out, and how far a model errs on them.

Measured samples tell how ops and exchanges grow with what they do. Traced ones tell their level in the steps
that matter. So a model is trained on the first, and then corrected by few factors from the second
(cost/traced_factors.py). As samples they would not count: a traced step is two ops among thousands.

Of a job the newest traced step is held out: no model can have seen it. Of a job with one, every second rank
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardcore.core.errors import SettingMismatch
from shardcore.core.types import Problem
from shardcore.cost import traced_factors
from shardcore.cost.known_errors import trained_models
from shardcore.cost.model import price
from shardcore.cost.traced_factors import TracesTellNothing
from shardcore.cost.traced_observations import Observations, joined_observations
from shardcore.io.traced_samples import TracedSample
from shardcore.io.traced_steps import TracedStep
from shardcore.step.lower import Workload, lower


@dataclass(frozen=True)
class SampleSplit:
    """Traced samples, split into training and held-out ones. A sample may be in both, with different ranks."""

    learned: tuple[TracedSample, ...]
    held_out: tuple[TracedSample, ...]


def split_samples(samples: Sequence[TracedSample]) -> SampleSplit:
    """Split traced steps into those to learn from and those held out, job by job."""
    learned: list[TracedSample] = []
    held_out: list[TracedSample] = []
    for job in dict.fromkeys(sample.job for sample in samples):
        *earlier, newest = sorted((s for s in samples if s.job == job), key=lambda s: s.number)
        learned += earlier
        if earlier:
            held_out.append(newest)
        else:
            learned += _with_every_second_rank(newest, 0)
            held_out += _with_every_second_rank(newest, 1)
    return SampleSplit(tuple(learned), tuple(held_out))


def _with_every_second_rank(sample: TracedSample, first: int) -> list[TracedSample]:
    """A traced sample with every second of its ranks. [] if there are none of them."""
    steps = [replace(step, ranks=step.ranks[first::2]) for step in sample.steps if step.ranks[first::2]]
    return [replace(sample, steps=tuple(steps))] if steps else []


def lower_sample(sample: TracedSample) -> tuple[Problem, list[tuple[Workload, TracedStep]]]:
    """A traced sample's problem with its dense part, and its steps with the workload of the plan that ran."""
    steps = [step.with_untraced_ms(sample.step_ms) for step in sample.steps]
    problem = traced_factors.with_traced_dense(sample.problem, steps)
    workload = lower(sample.plan, problem, fits=False)
    return problem, [(workload, step) for step in steps]


def observe_samples(model: Any, samples: Sequence[TracedSample]) -> Observations:
    """Measured and predicted ms of each rank in traced samples.

    Raises SettingMismatch for a model that is not for a sample's problem.
    """
    observed = []
    for sample in samples:
        problem, steps = lower_sample(sample)
        observed.append(traced_factors.observe_steps(model.for_problem(problem), steps))
    return joined_observations(observed)


def is_model_for(model: Any, sample: TracedSample) -> bool:
    """True if a model is of a traced sample's hardware, and of the setting of its problem."""
    try:
        sample.problem.require_setting(model.for_problem(sample.problem).setting)
    except SettingMismatch:
        return False
    return bool(sample.setting.hardware == model.setting.hardware)


def job_problem(model: Any, sample: TracedSample) -> Problem:
    """A traced sample's problem, whose dense part is all of the step that the model does not price."""
    problem, steps = lower_sample(sample)
    cost = price(steps[0][0], model.for_problem(problem))
    around_ms = max(0.0, sample.step_ms - (cost.total_ms - cost.dense_ms))
    return traced_factors.with_dense_ms(problem, around_ms)


def mean_percent_error(model: Any, samples: Sequence[TracedSample]) -> float:
    """Mean absolute error on traced lookups and collectives, in percent of the measurement.

    Raises TracesTellNothing for samples that tell of neither.
    """
    measured, predicted = observe_samples(model, samples).measured_and_predicted_ms()
    known = measured > 0
    if not known.any():
        names = ", ".join(dict.fromkeys(sample.job for sample in samples))
        raise TracesTellNothing(f"traced steps of {names} tell nothing of lookups or exchanges")
    return float(100 * np.abs(measured - predicted)[known].sum() / measured[known].sum())


@dataclass(frozen=True, eq=False)
class CorrectedModel:
    """A model after its correction by traced samples.

    model: as it was, where the correction does not help.
    errors: before and after, in percent, on what is held out. None: nothing is.
    words: a sentence on it.
    """

    model: Any
    errors: tuple[float, float] | None
    words: str

    @property
    def error_reduction(self) -> float:
        """Percentage points of held-out error that the correction saves. 0 if nothing is held out."""
        return self.errors[0] - self.errors[1] if self.errors else 0.0


def correct_model(model: Any, samples: Sequence[TracedSample]) -> CorrectedModel:
    """Correct a cost model by traced samples, unless its error on held-out samples grows.

    Samples that it was corrected by before do not count again, or each correction would repeat the last.

    Raises SettingMismatch for samples of other settings.
    """
    parts, earlier = split_samples(samples), _correction_history(model)
    before = mean_percent_error(model, parts.held_out) if parts.held_out else None
    learned = [sample for sample in parts.learned if sample.name not in earlier["steps"]]
    if not learned:
        of = "" if before is None else f"; error on held-out traces {before:.1f}%"
        return _keep_model(model, before, f"no traced step that the model has not learned from{of}")
    try:
        found = traced_factors.fit_factors(observe_samples(model, learned))
    except TracesTellNothing as nothing:
        return _keep_model(model, before, f"{nothing}; the model is left as it is")
    names = {sample.name for sample in learned}
    # Of the steps as traced: each of `learned` may have every second rank.
    missing = traced_factors.describe_missing_ranks(
        s for one in samples if one.name in names for s in one.steps
    )
    jobs = " and ".join(dict.fromkeys(sample.job for sample in learned))
    lineage: dict[str, Any] = {
        "job": jobs,
        "steps": [*earlier["steps"], *(sample.name for sample in learned)],
        "traces": earlier["traces"] | {sample.name: dict(sample.traces) for sample in learned},
        **replace(found, refused=(*missing, *found.refused)).to_json(),
    }
    words = f"the correction by {len(learned)} traced steps of {jobs}"
    if before is None:
        corrected = model.corrected_by(found.factors, lineage)
        return CorrectedModel(corrected, None, f"{words} is judged by nothing: no step is held out")
    after = mean_percent_error(model.corrected_by(found.factors), parts.held_out)
    words = f"error on held-out traces {before:.1f}% before and {after:.1f}% after {words}"
    if after > before:
        return _keep_model(model, before, f"{words}: the model is left as it is")
    lineage |= {"held_out": [sample.name for sample in parts.held_out], "held_out_errors": [before, after]}
    return CorrectedModel(model.corrected_by(found.factors, lineage), (before, after), words)


def _keep_model(model: Any, error: float | None, words: str) -> CorrectedModel:
    """The result of a correction that leaves the model unchanged."""
    return CorrectedModel(model, None if error is None else (error, error), words)


def _correction_history(model: Any) -> dict[str, Any]:
    """Names of the traced steps that a model was corrected by before, and digests of their traces."""
    meta = getattr(trained_models(model)[0], "meta", {})
    known = meta.get("provenance", {}).get("job", {})
    return {"steps": list(map(str, known.get("steps", []))), "traces": dict(known.get("traces", {}))}
