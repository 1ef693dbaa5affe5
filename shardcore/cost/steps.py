"""What ops and collectives take in steps of training, beside what they take alone, as they are measured: a factor for the forward
and the backward of all ops, and one for each collective and way, from replays.

In a step all devices compute at once, with the caches that the last step left; and an exchange follows compute, without the
barrier that measured exchanges have before them. Factors are against the machine's pace while it was measured, so they also tell
how much slower it was when it replayed. The pace of a single step among the others is known by its compute, and taken out of
what its exchanges took.

Shapes: S steps, D devices, C collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from shardcore.cost import exchange
from shardcore.cost.model import price
from shardcore.cost.neural import NeuralModel
from shardcore.cost.rates import fit_law
from shardcore.types import StepCost, Topology
from shardcore.workload import Workload

FEWEST_STEPS = 8
"""Fewer tell nothing; a collective that ran in fewer of them has the factor of the all-to-all."""

Step = tuple[Workload, StepCost]
"""What was replayed, and what it took."""


def fit(model: NeuralModel, steps: Sequence[Step]) -> NeuralModel:
    """The model whose ops and collectives take as long as in those of the steps that ran on measured links. meta["steps"]: how
    many these are; where they are fewer than FEWEST_STEPS, or the model has no measured exchanges, the model as it is."""
    steps = [(w, took) for w, took in steps if len(w.topology) > 1 and _are_measured(w.topology)]
    if len(steps) < FEWEST_STEPS or not exchange.is_measured(model.weights, "all_to_all"):
        return model
    fitted = _fit_collectives(_fit_compute(alone(model), steps), steps)
    return dataclasses.replace(fitted, meta={**model.meta, "steps": len(steps)})


def said(before: NeuralModel, fitted: NeuralModel, n: int) -> str:
    """What `fit` made of n steps, in words."""
    if fitted is before:
        return (f"{n} replayed steps tell nothing of what ops and exchanges take in them: needed are {FEWEST_STEPS} on links "
                "that were measured, and measured exchanges")
    return f"{fitted.meta['steps']} of {n} replayed steps tell what ops and exchanges take in them"


def alone(model: NeuralModel) -> NeuralModel:
    """The model of what ops and collectives take alone."""
    weights = with_compute(model.weights, 1 / compute_factors(model.weights))
    return dataclasses.replace(model, weights={k: v for k, v in weights.items() if k not in _NAMES},
                               meta={k: v for k, v in model.meta.items() if k != "steps"})


def compute_factors(w: Mapping[str, np.ndarray]) -> np.ndarray:
    """[2] how many times as long as alone ops take in steps, forward and backward, among a model's weights; 1 where none told."""
    return w.get(_COMPUTE, np.ones(2))


def with_compute(w: Mapping[str, np.ndarray], factors: np.ndarray) -> dict[str, np.ndarray]:
    """Weights of a model whose ops take factors [2] times as long as those of `w`."""
    return {**w, "rates": w["rates"] * factors, "launch": w["launch"] * factors,
            "band.log_ms": w["band.log_ms"] + np.log(factors).mean(), _COMPUTE: compute_factors(w) * factors}


def _fit_compute(model: NeuralModel, steps: Sequence[Step]) -> NeuralModel:
    said = [price(workload, model) for workload, _ in steps]
    factors = np.ones(2)
    for i, part in enumerate(("forward_compute_ms", "backward_compute_ms")):
        terms, took = (np.concatenate([getattr(cost, part) for cost in costs]) for costs in (said, [took for _, took in steps]))
        ran = (terms > 0) & (took > 0)
        factors[i] = fit_law(terms[ran, None], took[ran])[0] if ran.any() else 1.0
    return dataclasses.replace(model, weights=with_compute(model.weights, factors))


def _fit_collectives(model: NeuralModel, steps: Sequence[Step]) -> NeuralModel:
    """The model, which has no factors of collectives yet, with theirs. Steps run on one host: they say nothing of collectives
    that were measured between hosts alone."""
    factors: dict[str, np.ndarray] = {}
    for way in ("forward", "backward"):
        often = [c for c in _OF_WAY[way] if "within" in exchange.measured_links(model.weights, c)
                 and sum(_runs(w, c) for w, _ in steps) >= FEWEST_STEPS]
        known = [s for s in steps if (ran := {c for c in _OF_WAY[way] if _runs(s[0], c)}) and ran <= set(often)]
        if known:
            terms, took = (np.concatenate(x) for x in zip(*(_observed(model, s, way, often) for s in known), strict=True))
            fitted = zip(often, fit_law(terms, took), strict=True)
            factors |= {exchange.step_weight(c, way): np.array([k]) for c, k in fitted if k > 0}
    return dataclasses.replace(model, weights={**model.weights, **factors})


_OF_WAY = {way: [c for c, ways in exchange.WAYS.items() if way in ways] for way in ("forward", "backward")}
_COMPUTE = "compute_in_step"
_NAMES = {_COMPUTE, *(exchange.step_weight(c, way) for way, names in _OF_WAY.items() for c in names)}


def _are_measured(topology: Topology) -> bool:
    return topology.within_host_gbps is topology.between_hosts_gbps is topology.latency_ms is None


def _runs(workload: Workload, collective: str) -> bool:
    return bool(np.any(getattr(workload.traffic, collective)))


def _observed(model: NeuralModel, step: Step, way: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """[D, C] ms that collectives take alone, says the model, and [D] what all of them took at the pace of most steps."""
    workload, measured = step
    said = price(workload, model)
    each = model.collectives(workload.traffic, np.array(said.compute_ms), workload.topology)
    which = ("forward", "backward").index(way)
    took = np.array(getattr(measured, f"{way}_comm_ms")) * sum(said.compute_ms) / sum(measured.compute_ms)
    ran = took > 0  # what was over before the last device came has no transfer time
    return np.stack([each[c][which] for c in names], axis=-1)[ran], took[ran]
