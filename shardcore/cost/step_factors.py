"""The time of a collective within a training step, relative to its time in isolation: a factor, from replays.

In a step an exchange follows compute, without the barrier of an isolated measurement. So it takes longer. On
one host there is one factor for each collective and direction.

Over several hosts, phases of a step overlap: a rank that has its ids sends gradients, while ids of others
travel. Only their sum is measured, so a collective has one factor for both directions, and all ids have one.
An all-reduce of small replicas takes 0.88 of its time in isolation there, as it starts before other gradients
(emulated hosts, docs/benchmarks/2026-11-26-pods.md).

Ops take as long in a step as in isolation, at the slowdown that the reference op shows
(docs/decisions/measuring.md). So a replay on one host whose compute took longer than predicted ran on a
slower machine. Its exchanges are divided by that slowdown. Links between hosts do not slow down with a
machine.

Shapes: S steps, D devices, C collectives.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from shardcore.core.links import LEVELS, Link
from shardcore.core.step_cost import StepCost
from shardcore.core.validation import require
from shardcore.cost import collective_model
from shardcore.cost.model import price
from shardcore.cost.neural import NeuralModel
from shardcore.cost.nnls import fit_nonnegative_rates
from shardcore.step.exchanges import channel_transfer_ms
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, Channel
from shardcore.step.lower import Workload

FEWEST_STEPS = 8
"""A collective that ran in fewer steps uses the all-to-all's factor."""

Step = tuple[Workload, StepCost]
"""A replayed step, and its measured cost."""


def fit_step_factors(model: NeuralModel, steps: Sequence[Step]) -> NeuralModel:
    """The model with a factor for each collective in a training step, fitted to replayed steps over measured links.

    meta["steps"]: the number of steps used. The model itself is returned where none is usable. Steps on one
    host tell nothing of collectives measured between hosts only.

    Raises ShardCoreError where some steps ran on one host and some over several.
    """
    steps = [
        (w, took)
        for w, took in steps
        if len(w.topology) > 1
        # Given links are not measured ones, so replays over them tell nothing of the measured.
        and w.topology.slowest_link == Link(w.topology.slowest_link.level)
        # Factors are for FP32. Casts of other payloads would count as part of them.
        and w.job.forward_payload == w.job.backward_payload == "fp32"
    ]
    if not collective_model.is_measured(model.weights, collective_model.ALL_TO_ALL):
        # Factors are relative to measured exchanges: without these there is nothing to scale.
        return model
    # Without old factors, or new ones would be relative to them.
    isolated = dataclasses.replace(model, weights={k: v for k, v in model.weights.items() if k not in _NAMES})
    on_one = [s for s in steps if len(s[0].topology.hosts) == 1]
    over_several = [s for s in steps if len(s[0].topology.hosts) > 1]
    require(
        not (on_one and over_several),
        f"{len(on_one)} steps ran on one host and {len(over_several)} over several; a model has one factor for a "
        "collective in both: give steps of one kind",
    )
    # On one host each part of a step is measured apart. Over several hosts only their sum is.
    fits = [
        *(_fit_part_factors(isolated, on_one, part) for part in _PARTS),
        _fit_part_factors(isolated, over_several, _SUM),
    ]
    factors = {
        name: np.array([factor])
        for fitted, _ in fits
        for name, factor in fitted.items()
        # An extreme factor means a fit gone wrong, not a slow exchange.
        if collective_model.LEAST_IN_STEP <= factor <= collective_model.MOST_IN_STEP
    }
    if not factors:
        return model
    used = max(n for _, n in fits)
    return dataclasses.replace(
        isolated, weights={**isolated.weights, **factors}, meta={**model.meta, "steps": used}
    )


def _fit_part_factors(
    isolated: NeuralModel, steps: Sequence[Step], part: str
) -> tuple[dict[str, float], int]:
    """Fit the collectives' factors from one measured part of steps. Returns them by weight name, and the steps used.

    part: what of the steps is measured: one of _PARTS on one host, _SUM over several.
    """
    # Ids that a dense part hides have no time. Without times of ids the sum would lack a term.
    timed = [
        (w, took)
        for w, took in steps
        if any(getattr(took, part or "input_ms")) and not (part in (_SUM, "input_ms") and w.job.id_overlap_ms)
    ]
    innermost, measured = next(iter(LEVELS)), partial(collective_model.measured_link_levels, isolated.weights)
    # On one host the innermost links price a channel, over several hosts the outermost of its scope.
    known = [
        shared
        for shared in _SHARED[part]
        if all((innermost if part else c.scope.outermost_level) in measured(c) for c, _ in shared)
    ]
    # A factor from few steps would be mostly their noise.
    often = [shared for shared in known if sum(_has_traffic(w, shared) for w, _ in timed) >= FEWEST_STEPS]
    # Keep steps whose collectives all run often enough, or another's time would distort the fit.
    ran = [{shared for shared in _SHARED[part] if _has_traffic(w, shared)} for w, _ in timed]
    usable = [step for step, of_step in zip(timed, ran, strict=True) if of_step and of_step <= set(often)]
    if not usable:
        return {}, 0
    observed = [_predicted_and_measured_ms(isolated, step, part, often) for step in usable]
    terms, took_ms = (np.concatenate(values) for values in zip(*observed, strict=True))
    fitted = zip(often, fit_nonnegative_rates(terms, took_ms).tolist(), strict=True)
    factors = {collective_model.step_factor_name(*one): factor for shared, factor in fitted for one in shared}
    return factors, len(usable)


def fit_summary(before: NeuralModel, fitted: NeuralModel, n: int) -> str:
    """One sentence on how many of n replayed steps told the factors of collectives."""
    if fitted is before:
        return (
            f"{n} replayed steps tell nothing of what exchanges take in them: needed are {FEWEST_STEPS} on links that "
            "were measured, and measured exchanges"
        )
    return f"{fitted.meta['steps']} of {n} replayed steps tell what exchanges take in them"


Shared = tuple[tuple[Channel, str], ...]
"""Channels in a direction, which share a factor."""
_WAYS = ("forward", "backward")
_OUTPUTS = [c for c in CHANNELS if c not in ID_CHANNELS]
_PARTS: dict[str, list[Shared]] = {
    **{
        f"{direction}_comm_ms": [((c, direction),) for c in _OUTPUTS if direction in c.definition.directions]
        for direction in _WAYS
    },
    "input_ms": [((c, "forward"),) for c in ID_CHANNELS],
}
"""Parts of a StepCost, with what they time on one host."""
_SUM = ""
_SHARED = _PARTS | {
    _SUM: [
        tuple((c, direction) for c in some for direction in c.definition.directions)
        for some in (ID_CHANNELS, *((c,) for c in _OUTPUTS))
    ]
}
"""The same, and of the sum of all exchanges over several hosts."""
_NAMES = {collective_model.step_factor_name(*one) for one in itertools.chain(*_SHARED[_SUM])}


def _has_traffic(workload: Workload, shared: Shared) -> bool:
    """True if a step sends any bytes over one of the channels."""
    channels = {c for c, _ in shared}
    return bool(workload.traffic[[c in channels for c in workload.channels]].any())


def _predicted_and_measured_ms(
    model: NeuralModel, step: Step, part: str, often: Sequence[Shared]
) -> tuple[np.ndarray, np.ndarray]:
    """[R, C] predicted ms of collectives in isolation, and [R] measured ms of all of them in a step.

    R: devices whose transfers have measured times; of the sum, the last device. Measured parts are scaled to the
    slowdown of the measurements.
    """
    workload, measured = step
    # Predicted compute stands for the usual speed: measured over predicted is the replay's slowdown.
    compute_ms = price(workload, model).compute_ms
    ms = channel_transfer_ms(model, workload.traffic, np.array(compute_ms), workload.topology)
    predicted = np.stack([sum(ms[c][direction] for c, direction in shared) for shared in often], axis=-1)
    if part == _SUM:
        # Its own phases add up to the step, without any waiting.
        last = int(np.argmin(measured.waiting_ms))  # the others wait for it
        took_ms = measured.total_ms - measured.dense_ms - measured.compute_ms[last]
        return predicted[[last]], np.array([took_ms])
    took = np.array(getattr(measured, part)) * sum(compute_ms) / sum(measured.compute_ms)
    # A transfer that ended before the last device arrived has no measured time.
    ran = took > 0
    return predicted[ran], took[ran]
