"""Correct a cost model by traced steps of a running job: few factors, each with its uncertainty.

A quantity of a step, q, is measured in a trace and predicted by the model:

    y_q = log(measured / predicted) = common + own_q + noise

q is the lookups forward, or backward, or a collective in one direction. `common` is shared by all of a family, as a
slower CPU slows all lookups. So one traced step corrects a collective that only other plans run, by what its family
shows, with more doubt. All three terms are normal with mean 0, so the posterior is a ridge fit in closed form, shrunk
towards a factor of 1.

A family whose factors do not predict ranks and steps that were left out better than the model did is left alone.

Shapes: Q quantities, U observed units (a rank in a step).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem
from shardcore.cost import collective_model
from shardcore.cost.composite import Composite
from shardcore.cost.model import CostModel, price
from shardcore.cost.neural import NeuralModel
from shardcore.io.traced_steps import RankStep, TracedStep
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, Channel
from shardcore.step.lower import Workload

COMPUTE, EXCHANGE = "lookups", "exchanges"


@dataclass(frozen=True)
class Family:
    """Standard deviations of a family's logarithms.

    common: of what all its quantities share. A model of another machine may be off by e^common.
    own: of what one quantity has alone.
    noise: least standard deviation of what a unit measures.
    """

    common: float
    own: float
    noise: float


MOST_APART = 0.1
"""Most difference of bytes sent between a trace and its plan."""
FAMILIES: Mapping[str, Family] = {COMPUTE: Family(0.5, 0.15, 0.05), EXCHANGE: Family(0.7, 0.4, 0.1)}


@dataclass(frozen=True)
class Quantity:
    """One measured quantity of a step.

    channel: of an exchange. None: of lookups.
    way: "forward" or "backward".
    """

    channel: Channel | None
    way: str

    @property
    def family(self) -> str:
        return COMPUTE if self.channel is None else EXCHANGE

    @property
    def words(self) -> str:
        return f"{self.channel.words if self.channel else 'lookups'} {self.way}"


QUANTITIES = (
    *(Quantity(None, way) for way in ("forward", "backward")),
    *(Quantity(channel, way) for channel in CHANNELS for way in channel.row.ways),
)


@dataclass(frozen=True)
class Factor:
    """A factor on a quantity's ms.

    value: exp of the posterior mean.
    sd: standard deviation of the posterior of its logarithm.
    units: ranks and steps that measured it. 0: only its family did.
    """

    value: float
    sd: float
    units: int


@dataclass(frozen=True)
class Correction:
    """Factors of a model, and what the job does around the embeddings.

    factors: of each of QUANTITIES.
    covariance: [Q, Q] of their logarithms.
    around_ms: ms of a step that the model has no part of: the dense part, and all the job does besides.
    refused: a line on each thing that the traces do not tell.
    """

    factors: Mapping[Quantity, Factor]
    covariance: np.ndarray
    around_ms: float
    refused: tuple[str, ...]

    def drawn(self, rng: np.random.Generator) -> dict[Quantity, float]:
        """Factors drawn from their posterior."""
        means = np.log([self.factors[q].value for q in QUANTITIES])
        logs = rng.multivariate_normal(means, self.covariance, method="eigh")
        return dict(zip(QUANTITIES, np.exp(logs).tolist(), strict=True))

    def document(self) -> dict[str, Any]:
        """The correction as JSON, for a model's provenance."""
        return {
            "around_ms": self.around_ms,
            "factors": {q.words: dataclasses.asdict(f) for q, f in self.factors.items() if f.units},
            "refused": list(self.refused),
        }


def with_around(problem: Problem, around_ms: float) -> Problem:
    """The problem with a dense part that takes so long, all that a job does around its embeddings."""
    job = replace(problem.job, dense_forward_ms=around_ms / 3, dense_backward_ms=around_ms * 2 / 3)
    return replace(problem, job=job)


# --- fit ------------------------------------------------------------------------------------------------------


def correction(
    model: CostModel, steps: Sequence[tuple[Workload, TracedStep]], step_ms: float | None = None
) -> Correction:
    """The correction of a model by traced steps.

    steps: workloads of the plans that ran, whose jobs have the dense part that the trace shows (`with_around`).

    step_ms: of steps without tracing. None: as traced.

    Raises ShardCoreError where the traces tell nothing of lookups.
    """
    y, weights = observations(model, steps)
    ran = np.any([[any(_predicted(model, w)[q]) for q in QUANTITIES] for w, _ in steps], axis=0)
    silent = [q.words for i, q in enumerate(QUANTITIES) if ran[i] and not weights[:, i].any()]
    refused = [f"the traces do not tell {', '.join(silent)}: corrected as their family is"] if silent else []
    lookups = [i for i, q in enumerate(QUANTITIES) if q.family == COMPUTE]
    if not weights[:, lookups].any():
        raise ShardCoreError(
            "the traces tell nothing of lookups; trace a step of the job with its embeddings"
        )
    kept = {name: _generalises(y, weights, name) for name in FAMILIES}
    refused += [
        f"{name}: factors of some ranks and steps do not fit others better than the model does; left at 1"
        for name, fits in kept.items()
        if not fits
    ]
    used = weights * [kept[q.family] for q in QUANTITIES]
    mean, covariance = _posterior(y, used)
    factors = {
        q: Factor(float(np.exp(mean[i])), float(np.sqrt(covariance[i, i])), int((used[:, i] > 0).sum()))
        for i, q in enumerate(QUANTITIES)
    }
    fitted = corrected(model, {q: f.value for q, f in factors.items()})
    total_ms = step_ms or float(np.median([step.total_ms for _, step in steps]))
    inner_ms = float(
        np.median([price(workload, fitted).total_ms - workload.job.dense_ms for workload, _ in steps])
    )
    return Correction(factors, covariance, max(0.0, total_ms - inner_ms), tuple(refused))


def observations(
    model: CostModel, steps: Sequence[tuple[Workload, TracedStep]]
) -> tuple[np.ndarray, np.ndarray]:
    """[U, Q] log of measured / predicted, and the weight of each: its share of its predicted ms. 0: not measured."""
    measured, predicted = [], []
    for workload, step in steps:
        of_devices = _predicted(model, workload)
        for rank in step.ranks:
            device = workload.topology.ranks[rank.rank]
            predicted.append([of_devices[q][device] for q in QUANTITIES])
            measured.append(_measured(rank, workload, device, predicted[-1]))
    there, ours = np.array(measured), np.array(predicted)
    told = (there > 0) & (ours > 0)
    y = np.log(np.where(told, there, 1.0) / np.where(told, ours, 1.0))
    share = np.where(told, ours, 0.0)
    return y, share / np.maximum(share.sum(0), 1e-12)


def _predicted(model: CostModel, workload: Workload) -> dict[Quantity, Sequence[float]]:
    """ms of each device by quantity."""
    cost = price(workload, model)
    collectives = exchanges_of(model).collectives(
        workload.traffic, np.array(cost.compute_ms), workload.topology
    )
    idle = (np.zeros(len(workload.ops)),) * 2
    found: dict[Quantity, Sequence[float]] = {
        Quantity(None, "forward"): cost.forward_compute_ms,
        Quantity(None, "backward"): cost.backward_compute_ms,
    }
    for q in QUANTITIES:
        if q.channel:
            found[q] = collectives.get(q.channel, idle)[("forward", "backward").index(q.way)].tolist()
    # Of ids, what the dense part does not hide.
    ids = [q for q in QUANTITIES if q.channel in ID_CHANNELS]
    total_ms = np.sum([found[q] for q in ids], axis=0)
    for q in ids:
        share = np.divide(found[q], total_ms, out=np.zeros_like(total_ms), where=total_ms > 0)
        found[q] = (share * cost.input_ms).tolist()
    return found


_RUN_AS = {
    ("all_to_all", "outputs"): ("all_to_all", "forward"),
    ("all_to_all", "gradients"): ("all_to_all", "backward"),
    ("reduce_scatter", "outputs"): ("reduce_scatter", "forward"),
    ("all_gather", "gradients"): ("reduce_scatter", "backward"),
    ("all_reduce", "reduce"): ("all_reduce", "backward"),
}
"""Collective and direction of a channel, by the collective of a trace and its role."""


def _measured(rank: RankStep, workload: Workload, device: int, predicted: Sequence[float]) -> list[float]:
    """ms of a rank by quantity. 0 where a trace does not tell.

    Work that splits and joins what travels counts in the exchange, in proportion to the ms. Of two kinds of ids, a
    trace tells the sum; each has the share that is predicted.
    """
    exposed: dict[tuple[str, str], float] = {}
    for x in rank.exchanges:
        if key := _RUN_AS.get((x.collective, x.role)):
            exposed[key] = exposed.get(key, 0.0) + x.exposed_ms
    for way, part in (("forward", "outputs"), ("backward", "gradients")):
        keys = [key for key in exposed if key[1] == way and key[0] != "all_reduce"]
        total = sum(exposed[key] for key in keys)
        for key in keys:
            share = exposed[key] / total if total > 0 else 1 / len(keys)
            exposed[key] += share * rank.ms.get(part, 0.0)
    reduced = sum(x.n_bytes for x in rank.exchanges if x.role == "reduce")
    replicas = float(
        workload.traffic[[c.collective == "all_reduce" for c in workload.channels], device].sum()
    )
    if ("all_reduce", "backward") in exposed:
        # The gradients of the dense part travel in the same all-reduces.
        exposed["all_reduce", "backward"] *= min(1.0, replicas / reduced) if reduced else 0.0
    of_ids = sum(ms for q, ms in zip(QUANTITIES, predicted, strict=True) if q.channel in ID_CHANNELS)
    ids_ms = rank.ms.get("ids", 0.0) + rank.ms.get("ids_transfer", 0.0)
    found = []
    for q, ms in zip(QUANTITIES, predicted, strict=True):
        if q.channel is None:
            found.append(rank.ms.get(f"lookup_{q.way}", 0.0))
        elif q.channel in ID_CHANNELS:
            found.append(ids_ms * ms / of_ids if of_ids else 0.0)
        else:
            ran = workload.traffic[[q.channel == c for c in workload.channels]].any()
            found.append(exposed.get((q.channel.collective, q.way), 0.0) if ran else 0.0)
    return found


def _posterior(y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[Q] mean and [Q, Q] covariance of the logarithms of the factors, given observations [U, Q]."""
    families = [q.family for q in QUANTITIES]
    prior = np.array(
        [
            [
                FAMILIES[a].common ** 2 * (a == b) + FAMILIES[a].own ** 2 * (i == j)
                for j, b in enumerate(families)
            ]
            for i, a in enumerate(families)
        ]
    )
    told = np.flatnonzero(weights.any(0))
    if not len(told):
        return np.zeros(len(families)), prior
    share = weights[:, told] / weights[:, told].sum(0)
    mean = (share * y[:, told]).sum(0)
    spread = np.sqrt((share * (y[:, told] - mean) ** 2).sum(0))
    # Units share the disturbances of their step, so their number reduces no floor.
    least = np.array([FAMILIES[families[i]].noise for i in told])
    noise = np.diag(least**2 + spread**2 / np.maximum(1, (weights[:, told] > 0).sum(0)))
    gain = np.linalg.solve(prior[np.ix_(told, told)] + noise, prior[told]).T  # [Q, told]
    return gain @ mean, prior - gain @ prior[told]


def _generalises(y: np.ndarray, weights: np.ndarray, family: str) -> bool:
    """True if factors of other units predict a unit that was left out no worse than the model itself."""
    own = [i for i, q in enumerate(QUANTITIES) if q.family == family and weights[:, i].any()]
    if not own:
        return False
    before, after = [], []
    for unit in range(len(y)):
        others = np.arange(len(y)) != unit
        if not weights[others].any():
            return True  # there is nothing else to judge by
        mean, _ = _posterior(y[others], weights[others])
        told = [i for i in own if weights[unit, i] > 0]
        before += np.abs(y[unit, told]).tolist()
        after += np.abs(y[unit, told] - mean[told]).tolist()
    return sum(after) <= sum(before)


def mismatches(workload: Workload, step: TracedStep) -> list[str]:
    """Lines on bytes of a traced step that the plan does not send: the trace is of another plan, or job."""
    lines = []
    for (collective, role), (name, way) in _RUN_AS.items():
        if way != "forward":
            continue
        rows = [c.collective == name for c in workload.channels]
        for rank in step.ranks:
            traced = sum(x.n_bytes for x in rank.exchanges if (x.collective, x.role) == (collective, role))
            ours = float(workload.traffic[rows, workload.topology.ranks[rank.rank]].sum())
            if traced and abs(traced - ours) > MOST_APART * max(traced, ours):
                lines.append(
                    f"rank {rank.rank} enters {traced:,} bytes of outputs into its {collective.replace('_', '-')}; "
                    f"the plan has {ours:,.0f}: the trace may be of another plan"
                )
                break
    return lines


# --- the corrected model --------------------------------------------------------------------------------------


def corrected(model: Any, factors: Mapping[Quantity, float], lineage: Mapping[str, Any] | None = None) -> Any:
    """The model with its ms multiplied. lineage: added to its provenance, as "job".

    Raises ShardCoreError for a model of a kind that has no weights to multiply.
    """
    if isinstance(model, Composite):
        return replace(model, models=tuple(corrected(m, factors, lineage) for m in model.models))
    if not isinstance(model, NeuralModel):
        raise ShardCoreError(f"model is a {type(model).__name__}; traces correct trained models, so far")
    of_ops = np.array([factors[Quantity(None, way)] for way in ("forward", "backward")])
    weights = dict(model.weights) | {
        "rates": model.weights["rates"] * of_ops,
        "launch": model.weights["launch"] * of_ops,
    }
    least, most = collective_model.LEAST_IN_STEP, collective_model.MOST_IN_STEP
    for q in QUANTITIES:
        if q.channel:
            factor = collective_model.in_step(model.weights, q.channel, q.way) * factors[q]
            weights[collective_model.step_weight(q.channel, q.way)] = np.array(
                [min(max(factor, least), most)]
            )
    meta = model.meta
    if lineage is not None:
        meta = {**meta, "provenance": {**meta.get("provenance", {}), "job": dict(lineage)}}
    return replace(model, weights=weights, meta=meta)


def exchanges_of(model: Any) -> NeuralModel:
    """The model that prices exchanges."""
    one = model.of_exchanges if isinstance(model, Composite) else model
    if not isinstance(one, NeuralModel):
        raise ShardCoreError(f"model is a {type(model).__name__}; traces correct trained models, so far")
    return one
