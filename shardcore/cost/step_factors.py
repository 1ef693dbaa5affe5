"""The time of a collective within a training step, relative to its time in isolation: a factor, from replays.

In a step an exchange follows compute, without the barrier of an isolated measurement. So it takes longer.
On one host there is one factor for each collective and direction.

Over several hosts parts of a step overlap: a rank that has its ids sends gradients, while ids of others
travel. Only their sum is told, so a collective has one factor for both directions, and all ids have one.
An all-reduce of small replicas takes 2.4 times as long as alone there (emulated hosts,
docs/benchmarks/2026-11-25-emulated-hosts.md). It is a ring through all ranks, so each waits for all others.

Ops take as long in a step as in isolation, at the slowdown that the reference op shows (docs/decisions/measuring.md).
So a replay on one host whose compute took longer than predicted ran on a slower machine.
Its exchanges are divided by that slowdown. Links between hosts do not slow down with a machine.

Shapes: S steps, D devices, C collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import LEVELS, Link
from shardcore.core.step_cost import StepCost
from shardcore.cost import collective_model
from shardcore.cost.model import price
from shardcore.cost.neural import NeuralModel
from shardcore.cost.nnls import fit_law
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, Channel
from shardcore.step.lower import Workload

FEWEST_STEPS = 8
"""A collective that ran in fewer steps uses the all-to-all's factor."""

Step = tuple[Workload, StepCost]
"""A replayed step, and what it took."""


def fit(model: NeuralModel, steps: Sequence[Step]) -> NeuralModel:
    """The model with factors fitted to these steps, on links that were measured.

    meta["steps"]: the number of steps used. The model itself is returned where none is usable.
    Steps on one host say nothing of collectives measured between hosts only.
    Raises ShardCoreError where some steps ran on one host and some over several.
    """
    steps = [
        (w, took)
        for w, took in steps
        if len(w.topology) > 1
        and w.topology.slowest == Link(w.topology.slowest.level)
        and w.job.forward_payload == w.job.backward_payload == "fp32"
    ]
    if not collective_model.is_measured(model.weights, collective_model.ALL_TO_ALL):
        return model
    # Without old factors, or new ones would be relative to them.
    alone = dataclasses.replace(model, weights={k: v for k, v in model.weights.items() if k not in _NAMES})
    on_one = [s for s in steps if len(s[0].topology.hosts) == 1]
    over_several = [s for s in steps if len(s[0].topology.hosts) > 1]
    if on_one and over_several:
        raise ShardCoreError(
            f"{len(on_one)} steps ran on one host and {len(over_several)} over several; a "
            "model has one factor for a collective in both: give steps of one kind"
        )
    found = [*(_of_part(alone, on_one, part) for part in _PARTS), _of_sums(alone, over_several)]
    factors = {
        name: np.array([k])
        for of, _ in found
        for name, k in of.items()
        if collective_model.LEAST_IN_STEP <= k <= collective_model.MOST_IN_STEP
    }
    if not factors:
        return model
    told = max(n for _, n in found[:-1]) + found[-1][1]
    return dataclasses.replace(
        alone, weights={**alone.weights, **factors}, meta={**model.meta, "steps": told}
    )


def _of_part(alone: NeuralModel, steps: Sequence[Step], part: str) -> tuple[dict[str, float], int]:
    """Factors by the names of their weights, and the number of steps that tell them.

    From one part of steps on one host.
    """
    way, channels = _PARTS[part]
    # What a dense part hides of ids has no time.
    timed = [
        s for s in steps if any(getattr(s[1], part)) and not (part == "input_ms" and s[0].job.hides_ids_ms)
    ]
    often = [
        c
        for c in channels
        if next(iter(LEVELS)) in collective_model.measured_links(alone.weights, c)
        and sum(_runs(w, c) for w, _ in timed) >= FEWEST_STEPS
    ]
    # Keep steps whose collectives all run often enough, or another's time would distort the fit.
    known = [s for s in timed if (ran := {c for c in channels if _runs(s[0], c)}) and ran <= set(often)]
    if not known:
        return {}, 0
    terms, took = (
        np.concatenate(x) for x in zip(*(_observed(alone, s, part, often) for s in known), strict=True)
    )
    fitted = fit_law(terms, took)
    return {collective_model.step_weight(c, way): k for c, k in zip(often, fitted, strict=True)}, len(known)


def _of_sums(alone: NeuralModel, steps: Sequence[Step]) -> tuple[dict[str, float], int]:
    """As _of_part, from the sum of all exchanges of steps over several hosts."""
    steps = [(w, took) for w, took in steps if any(took.input_ms) and not w.job.hides_ids_ms]
    often = [
        some
        for some in _SUMS
        if all(_decides(c) in collective_model.measured_links(alone.weights, c) for c in some)
        and sum(any(_runs(w, c) for c in some) for w, _ in steps) >= FEWEST_STEPS
    ]
    known = [s for s in steps if all(c in sum(often, ()) for c in s[0].channels if _runs(s[0], c))]
    if not known:
        return {}, 0
    terms, took = [], []
    for workload, measured in known:
        last = int(np.argmin(measured.waiting_ms))  # the others wait for it
        took.append(measured.total_ms - measured.dense_ms - measured.compute_ms[last])
        compute_ms = np.array(price(workload, alone).compute_ms)
        ms = alone.collectives(workload.traffic, compute_ms, workload.topology)
        terms.append([sum(ms[c][way][last] for c in some for way in (0, 1)) for some in often])
    fitted = fit_law(np.array(terms), np.array(took))
    return {
        collective_model.step_weight(c, way): k
        for some, k in zip(often, fitted, strict=True)
        for c in some
        for way in c.row.ways
    }, len(known)


def _decides(channel: Channel) -> str:
    """The level of links that a channel over several hosts is priced by."""
    inner, *_, outer = LEVELS
    return inner if channel.scope.within else outer


def said(before: NeuralModel, fitted: NeuralModel, n: int) -> str:
    """In words: what `fit` made of n steps."""
    if fitted is before:
        return (
            f"{n} replayed steps tell nothing of what exchanges take in them: needed are {FEWEST_STEPS} "
            "on links that were "
            "measured, and measured exchanges"
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
_NAMES = {collective_model.step_weight(c, way) for way, channels in _PARTS.values() for c in channels}


def _runs(workload: Workload, channel: Channel) -> bool:
    """Whether any device enters bytes into the channel."""
    return bool(workload.traffic[[c == channel for c in workload.channels]].any())


def _observed(
    model: NeuralModel, step: Step, part: str, channels: Sequence[Channel]
) -> tuple[np.ndarray, np.ndarray]:
    """[D, C] predicted ms of each channel in isolation, and [D] ms that all of them took.

    The measured times are scaled to the slowdown of the measurements.
    """
    workload, measured = step
    said = price(workload, model)
    alone = model.collectives(workload.traffic, np.array(said.compute_ms), workload.topology)
    # Index into the pair (forward, backward) of NeuralModel.collectives.
    which = ("forward", "backward").index(_PARTS[part][0])
    took = np.array(getattr(measured, part)) * sum(said.compute_ms) / sum(measured.compute_ms)
    # A transfer that ended before the last device arrived has no measured time.
    ran = took > 0
    return np.stack([alone[c][which] for c in channels], axis=-1)[ran], took[ran]
