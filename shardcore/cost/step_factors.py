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
from collections.abc import Sequence

import numpy as np

from shardcore.core.links import LEVELS, Link
from shardcore.core.step_cost import StepCost
from shardcore.core.validation import require
from shardcore.cost import collective_model
from shardcore.cost.model import price
from shardcore.cost.neural import NeuralModel
from shardcore.cost.nnls import fit_law
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, Channel
from shardcore.step.lower import Workload

FEWEST_STEPS = 8
"""A collective that ran in fewer steps uses the all-to-all's factor."""

Step = tuple[Workload, StepCost]
"""A replayed step, and its measured cost."""


def fit(model: NeuralModel, steps: Sequence[Step]) -> NeuralModel:
    """The model with factors fitted to these steps, on links that were measured.

    meta["steps"]: the number of steps used. The model itself is returned where none is usable. Steps on one
    host tell nothing of collectives measured between hosts only.

    Raises ShardCoreError where some steps ran on one host and some over several.
    """
    steps = [
        (w, took)
        for w, took in steps
        if len(w.topology) > 1
        # Given links are not measured ones, so replays over them tell nothing of the measured.
        and w.topology.slowest == Link(w.topology.slowest.level)
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
    of_parts = [_factors_of_part(isolated, on_one, part) for part in _PARTS]
    of_sums, used_over_several = _factors_of_sums(isolated, over_several)
    factors = {}
    for fitted in (*(fitted for fitted, _ in of_parts), of_sums):
        # An extreme factor means a fit gone wrong, not a slow exchange.
        factors |= {
            name: np.array([factor])
            for name, factor in fitted.items()
            if collective_model.LEAST_IN_STEP <= factor <= collective_model.MOST_IN_STEP
        }
    if not factors:
        return model
    used = max(n for _, n in of_parts) + used_over_several
    return dataclasses.replace(
        isolated, weights={**isolated.weights, **factors}, meta={**model.meta, "steps": used}
    )


def _factors_of_part(isolated: NeuralModel, steps: Sequence[Step], part: str) -> tuple[dict[str, float], int]:
    """Factors by the names of their weights, and the number of steps used. From one part of steps on one host."""
    way, channels = _PARTS[part]
    # Ids that a dense part hides have no time.
    timed = [s for s in steps if any(getattr(s[1], part))]
    timed = [s for s in timed if part != "input_ms" or not s[0].job.hides_ids_ms]
    innermost = next(iter(LEVELS))
    known = [c for c in channels if innermost in collective_model.measured_links(isolated.weights, c)]
    # A factor from few steps would be mostly their noise.
    often = [c for c in known if sum(_runs(w, c) for w, _ in timed) >= FEWEST_STEPS]
    # Keep steps whose collectives all run often enough, or another's time would distort the fit.
    usable = [s for s in timed if (ran := {c for c in channels if _runs(s[0], c)}) and ran <= set(often)]
    if not usable:
        return {}, 0
    observed = [_predicted_and_measured(isolated, s, part, often) for s in usable]
    terms, took = (np.concatenate(values) for values in zip(*observed, strict=True))
    fitted = fit_law(terms, took)
    names = [collective_model.step_factor_name(c, way) for c in often]
    return dict(zip(names, fitted.tolist(), strict=True)), len(usable)


def _factors_of_sums(isolated: NeuralModel, steps: Sequence[Step]) -> tuple[dict[str, float], int]:
    """Factors and number of steps as _factors_of_part, from the sum of all exchanges of steps over several hosts."""
    # Without times of ids the sum would lack a term. Hidden ids are in no sum.
    steps = [(w, took) for w, took in steps if any(took.input_ms) and not w.job.hides_ids_ms]

    def is_measured(channel: Channel) -> bool:
        # Over several hosts, the outermost links price a channel.
        return channel.scope.link in collective_model.measured_links(isolated.weights, channel)

    known = [channels for channels in _SUMS if all(map(is_measured, channels))]
    often = [x for x in known if sum(any(_runs(w, c) for c in x) for w, _ in steps) >= FEWEST_STEPS]
    covered = {c for channels in often for c in channels}
    usable = [(w, took) for w, took in steps if covered.issuperset(c for c in w.channels if _runs(w, c))]
    if not usable:
        return {}, 0
    terms, took_ms = [], []
    for workload, measured in usable:
        # Its own phases add up to the step, without any waiting.
        last = int(np.argmin(measured.waiting_ms))  # the others wait for it
        took_ms.append(measured.total_ms - measured.dense_ms - measured.compute_ms[last])
        compute_ms = np.array(price(workload, isolated).compute_ms)
        # Predicted in isolation: the factor is what steps take more than that.
        ms = isolated.collectives(workload.traffic, compute_ms, workload.topology)
        terms.append([sum(ms[c][way][last] for c in channels for way in (0, 1)) for channels in often])
    factors = {}
    for channels, factor in zip(often, fit_law(np.array(terms), np.array(took_ms)).tolist(), strict=True):
        factors |= {collective_model.step_factor_name(c, way): factor for c in channels for way in c.row.ways}
    return factors, len(usable)


def summary(before: NeuralModel, fitted: NeuralModel, n: int) -> str:
    """A sentence on the result of `fit` for n steps."""
    if fitted is before:
        return (
            f"{n} replayed steps tell nothing of what exchanges take in them: needed are {FEWEST_STEPS} on links that "
            "were measured, and measured exchanges"
        )
    return f"{fitted.meta['steps']} of {n} replayed steps tell what exchanges take in them"


_PARTS = {
    **{
        f"{way}_comm_ms": (way, [c for c in CHANNELS if c not in ID_CHANNELS and way in c.row.ways])
        for way in ("forward", "backward")
    },
    "input_ms": ("forward", list(ID_CHANNELS)),
}
"""Parts of a StepCost, with the direction and the channels that they time."""
_SUMS = [tuple(ID_CHANNELS), *((c,) for c in CHANNELS if c not in ID_CHANNELS)]
"""Channels that share a factor over several hosts."""
_NAMES = {collective_model.step_factor_name(c, way) for way, channels in _PARTS.values() for c in channels}


def _runs(workload: Workload, channel: Channel) -> bool:
    """True if any device enters bytes into the channel."""
    return bool(workload.traffic[[c == channel for c in workload.channels]].any())


def _predicted_and_measured(
    model: NeuralModel, step: Step, part: str, channels: Sequence[Channel]
) -> tuple[np.ndarray, np.ndarray]:
    """[D, C] predicted ms of each channel in isolation, and [D] ms that all of them took.

    The measured times are scaled to the slowdown of the measurements.
    """
    workload, measured = step
    # Predicted compute stands for the usual speed: measured over predicted is the replay's slowdown.
    compute_ms = price(workload, model).compute_ms
    predicted = model.collectives(workload.traffic, np.array(compute_ms), workload.topology)
    # Index into the pair (forward, backward) of NeuralModel.collectives.
    which = ("forward", "backward").index(_PARTS[part][0])
    took = np.array(getattr(measured, part)) * sum(compute_ms) / sum(measured.compute_ms)
    # A transfer that ended before the last device arrived has no measured time.
    ran = took > 0
    return np.stack([predicted[c][which] for c in channels], axis=-1)[ran], took[ran]
