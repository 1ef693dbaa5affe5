"""Correct a cost model by traced steps of a running job: few factors, each with its uncertainty.

A quantity of a step, q, is measured in a trace and predicted by the model:

    y_q = log(measured / predicted) = common + own_q + noise

q is the lookups forward, or backward, or a collective in one direction. `common` is shared by all of a family, as a
slower CPU slows all lookups. So one traced step corrects a collective that only other plans run, by what its family
shows, with more doubt. All three terms are normal with mean 0, so the posterior is a ridge fit in closed form, shrunk
towards a factor of 1.

A collective takes at most MOST_FACTOR times as long for its bytes. What is measured beyond is a latency: it waits for
a thread to wake, whatever its bytes. A collective that did not run has the usual latency of those that did.

A family whose correction predicts ranks and steps that were left out no better than the model did is left alone.

Shapes: Q quantities, U observed units (a rank in a step).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.payloads import CASTS
from shardcore.core.types import Problem
from shardcore.cost import collective_model
from shardcore.cost.composite import Composite
from shardcore.cost.model import CostModel, price
from shardcore.cost.neural import NeuralModel
from shardcore.cost.profile import Profile
from shardcore.cost.profile_model import ProfileModel
from shardcore.io.traced_steps import RankStep, TracedStep
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, Channel
from shardcore.step.lower import Workload

COMPUTE, EXCHANGE = "lookups", "exchanges"


class TracesTellNothing(ShardCoreError):
    """Traces without lookups, from which no model is corrected."""


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


MOST_FACTOR = 3.0
MOST_APART = 0.1
"""Most difference of bytes sent between a trace and its plan."""
SLOW = 1.4
"""Ratio of a slow rank's time to the fastest one's. Models err less between ranks."""
LEAST_LOOKUPS = 0.02
"""Share of lookups in a rank's step from which its speed is judged."""
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


LOOKUPS = tuple(Quantity(None, way) for way in ("forward", "backward"))
QUANTITIES = (
    *LOOKUPS,
    *(Quantity(channel, way) for channel in CHANNELS for way in channel.row.ways),
)


@dataclass(frozen=True)
class Factor:
    """A factor on a quantity's ms.

    value: exp of the posterior mean.
    sd: standard deviation of the posterior of its logarithm.
    units: ranks and steps that measured it. 0: only its family did.
    latency_ms: of each run, on top of the factor.
    """

    value: float
    sd: float
    units: int
    latency_ms: float = 0.0


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

    def drawn(self, rng: np.random.Generator) -> dict[Quantity, Factor]:
        """Factors drawn from their posterior."""
        means = np.log([self.factors[q].value for q in QUANTITIES])
        logs = rng.multivariate_normal(means, self.covariance, method="eigh")
        return {
            q: replace(self.factors[q], value=float(np.exp(log)))
            for q, log in zip(QUANTITIES, logs, strict=True)
        }

    def document(self) -> dict[str, Any]:
        """The correction as JSON, for a model's provenance."""
        return {"around_ms": self.around_ms, **document(self.factors, self.refused)}


def document(factors: Mapping[Quantity, Factor], refused: Sequence[str]) -> dict[str, Any]:
    """Factors that were measured, as JSON."""
    return {
        "factors": {q.words: dataclasses.asdict(f) for q, f in factors.items() if f.units},
        "refused": list(refused),
    }


def with_around(problem: Problem, around_ms: float) -> Problem:
    """The problem with a dense part that takes so long, all that a job does around its embeddings."""
    job = replace(problem.job, dense_forward_ms=around_ms / 3, dense_backward_ms=around_ms * 2 / 3)
    return replace(problem, job=job)


def with_traced_dense(problem: Problem, steps: Sequence[TracedStep]) -> Problem:
    """The problem with the dense part that traced steps show."""
    around = [rank.cost_ms("dense_ms") for step in steps for rank in step.ranks]
    return with_around(problem, float(np.median(around)))


def with_speeds(
    problem: Problem, model: CostModel, steps: Sequence[tuple[Workload, TracedStep]]
) -> tuple[Problem, list[str]]:
    """The problem with slow ranks' devices as slow as the traces show, and a line on each.

    A rank is slow if its lookups take SLOW times longer, for what the model predicts, than those of the fastest
    rank, in each of two steps or more: in a single one it may have been interrupted. Others keep their speed.
    """
    measured, predicted = (
        iter(of_units[:, : len(LOOKUPS)].sum(1)) for of_units in observations(model, steps)
    )
    speeds: dict[int, list[float]] = {}
    for workload, step in steps:
        ratios = {}
        for rank in step.ranks:
            took_ms, expected_ms = float(next(measured)), float(next(predicted))
            # Short lookups are mostly noise.
            if took_ms > LEAST_LOOKUPS * rank.total_ms and expected_ms > 0:
                ratios[workload.topology.ranks[rank.rank]] = took_ms / expected_ms
        for device, ratio in ratios.items():
            speeds.setdefault(device, []).append(min(ratios.values()) / ratio)
    devices, words = list(problem.topology.devices), []
    for device, of_steps in sorted(speeds.items()):
        if len(of_steps) > 1 and max(of_steps) * SLOW <= 1:
            share = float(np.median(of_steps))
            devices[device] = replace(devices[device], speed=devices[device].speed * share)
            words.append(
                f"device {device} looks up at {share:.0%} of the fastest one's speed: its speed is corrected"
            )
    return replace(problem, topology=replace(problem.topology, devices=tuple(devices))), words


# --- fit ------------------------------------------------------------------------------------------------------


def correction(
    model: CostModel, steps: Sequence[tuple[Workload, TracedStep]], step_ms: float | None = None
) -> Correction:
    """The correction of a model by traced steps.

    steps: workloads of the plans that ran, whose jobs have the dense part that the trace shows
      (`with_traced_dense`), and the steps, as without tracing.

    step_ms: of steps without tracing. None: as traced.

    Raises TracesTellNothing where they tell nothing of lookups.
    """
    factors, covariance, refused = factors_of(*observations(model, steps))
    fitted = corrected(model, factors)
    total_ms = step_ms or float(np.median([step.total_ms for _, step in steps]))
    inner_ms = float(
        np.median([price(workload, fitted).total_ms - workload.job.dense_ms for workload, _ in steps])
    )
    return Correction(factors, covariance, max(0.0, total_ms - inner_ms), refused)


def factors_of(
    measured: np.ndarray, predicted: np.ndarray
) -> tuple[dict[Quantity, Factor], np.ndarray, tuple[str, ...]]:
    """Factors of each of QUANTITIES, their covariance, and what the traces do not tell. From ms [U, Q].

    Raises TracesTellNothing where they tell nothing of lookups.
    """
    told = (measured > 0) & (predicted > 0)
    lookups = np.array([q.family == COMPUTE for q in QUANTITIES])
    if not told[:, lookups].any():
        raise TracesTellNothing(
            "the traces tell nothing of lookups; trace a step of the job with its embeddings"
        )
    silent = [q.words for i, q in enumerate(QUANTITIES) if predicted[:, i].any() and not told[:, i].any()]
    refused = [f"the traces do not tell {', '.join(silent)}: corrected as their family is"] if silent else []
    kept = {name: _generalises(measured, predicted, name) for name in FAMILIES}
    refused += [
        f"{name}: a correction by some ranks and steps fits others no better than the model does; left as they are"
        for name, fits in kept.items()
        if not fits
    ]
    used = measured * [kept[q.family] for q in QUANTITIES]
    fit = _fitted(used, predicted)
    units = ((used > 0) & (predicted > 0)).sum(0)
    factors = {
        q: Factor(
            float(np.exp(fit.log[i])),
            float(np.sqrt(fit.covariance[i, i])),
            int(units[i]),
            float(fit.latency_ms[i]),
        )
        for i, q in enumerate(QUANTITIES)
    }
    return factors, fit.covariance, tuple(refused)


class Observations(NamedTuple):
    """[U, Q] measured ms, 0 where a trace does not tell, and predicted ms."""

    measured: np.ndarray
    predicted: np.ndarray


def observations(model: CostModel, steps: Sequence[tuple[Workload, TracedStep]]) -> Observations:
    """ms of the ranks of steps, under the plans that ran."""
    measured, predicted = [], []
    for workload, step in steps:
        of_devices = _predicted(model, workload)
        for rank in step.ranks:
            device = workload.topology.ranks[rank.rank]
            predicted.append([of_devices[q][device] for q in QUANTITIES])
            measured.append(_measured(rank, workload, device, predicted[-1]))
    return Observations(np.array(measured), np.array(predicted))


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


_HIDDEN_MS = 1e-3
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
            # What is hidden as a whole was measured, too.
            exposed[key] = exposed.get(key, _HIDDEN_MS) + x.exposed_ms
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


class _Fit(NamedTuple):
    """[Q] mean and [Q, Q] covariance of the logarithms of factors, and [Q] latencies."""

    log: np.ndarray
    covariance: np.ndarray
    latency_ms: np.ndarray


def _fitted(measured: np.ndarray, predicted: np.ndarray) -> _Fit:
    """The posterior, given ms [U, Q]."""
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
    told = (measured > 0) & (predicted > 0)
    some = np.flatnonzero(told.any(0))
    latency_ms = np.zeros(len(families))
    if not len(some):
        return _Fit(np.zeros(len(families)), prior, latency_ms)
    ratio = np.where(told, measured, 1.0) / np.where(told, predicted, 1.0)
    exchanges = np.array([family == EXCHANGE for family in families])
    y = np.log(np.where(exchanges, np.clip(ratio, 1 / MOST_FACTOR, MOST_FACTOR), ratio))[:, some]
    # A unit counts by its share of the predicted ms: short ops are mostly noise.
    share = np.where(told, predicted, 0.0)[:, some]
    share = share / share.sum(0)
    mean = (share * y).sum(0)
    spread = np.sqrt((share * (y - mean) ** 2).sum(0))
    # Units share the disturbances of their step, so their number reduces no floor.
    least = np.array([FAMILIES[families[i]].noise for i in some])
    noise = np.diag(least**2 + spread**2 / told[:, some].sum(0))
    gain = np.linalg.solve(prior[np.ix_(some, some)] + noise, prior[some]).T  # [Q, told]
    log = gain @ mean
    for i in (i for i in some if exchanges[i]):
        beyond = measured[told[:, i], i] - np.exp(log[i]) * predicted[told[:, i], i]
        latency_ms[i] = max(0.0, float(np.median(beyond)))
    for i, q in enumerate(QUANTITIES):
        if i not in some and q.channel and q.channel not in ID_CHANNELS:
            alike = [latency_ms[j] for j in some if _is_like(QUANTITIES[j], q)]
            latency_ms[i] = float(np.median(alike)) if alike else 0.0
    return _Fit(log, prior - gain @ prior[some], latency_ms)


def _is_like(ran: Quantity, other: Quantity) -> bool:
    """True for exchanges of outputs, or of their gradients, in one direction."""
    return ran.channel is not None and ran.channel not in ID_CHANNELS and ran.way == other.way


def _generalises(measured: np.ndarray, predicted: np.ndarray, family: str) -> bool:
    """True if a correction by other units predicts a unit that was left out no worse than the model itself."""
    own = np.array([q.family == family for q in QUANTITIES])
    before = after = 0.0
    for unit in range(len(measured)):
        others = np.arange(len(measured)) != unit
        if not ((measured > 0) & (predicted > 0))[others][:, own].any():
            return bool(own.any())  # there is nothing else to judge by
        fit = _fitted(measured[others], predicted[others])
        told = own & (measured[unit] > 0) & (predicted[unit] > 0)
        corrected_ms = np.exp(fit.log) * predicted[unit] + fit.latency_ms
        before += np.abs(measured[unit] - predicted[unit])[told].sum()
        after += np.abs(measured[unit] - corrected_ms)[told].sum()
    return after <= before


def mismatches(workload: Workload, step: TracedStep) -> list[str]:
    """Lines on bytes of a traced step that the plan does not send: the trace is of another plan, or job."""
    lines: list[str] = []
    if any(shard.table.sequence for ops in workload.ops for op in ops for shard in op.shards):
        return lines  # outputs of sequences are as long as a batch's ids
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


def corrected(
    model: Any, factors: Mapping[Quantity, Factor], lineage: Mapping[str, Any] | None = None
) -> Any:
    """The model with its ms multiplied, and latencies added.

    lineage: added to its provenance, as "job". Of it, the sources of a profile's rates name the job.

    Raises ShardCoreError for a model of a kind that has no rates to multiply.
    """
    if isinstance(model, Composite):
        return replace(model, models=tuple(corrected(m, factors, lineage) for m in model.models))
    if isinstance(model, ProfileModel):
        return replace(model, profile=_corrected_profile(model.profile, factors, lineage))
    if not isinstance(model, NeuralModel):
        raise ShardCoreError(f"model is a {type(model).__name__}; traces correct trained models and profiles")
    of_ops = np.array([factors[Quantity(None, way)].value for way in ("forward", "backward")])
    scaled = {name: model.weights[name] * of_ops for name in ("rates", "launch")}
    least, most = collective_model.LEAST_IN_STEP, collective_model.MOST_IN_STEP
    once = collective_model.EXCHANGE_TERMS.index("once")
    for q in QUANTITIES:
        if q.channel is None:
            continue
        factor = collective_model.in_step(model.weights, q.channel, q.way) * factors[q].value
        factor = min(max(factor, least), most)
        scaled[collective_model.step_weight(q.channel, q.way)] = np.array([factor])
        for payload in ("fp32", *CASTS):
            name = collective_model.weight(q.channel, q.way, payload)
            if name in model.weights and factors[q].latency_ms:
                rates = model.weights[name].copy()
                # The factor multiplies it again. Exchanges run as often as the row has it.
                rates[once] += factors[q].latency_ms / (factor * q.channel.row.exchanges)
                scaled[name] = rates
    meta = model.meta
    if lineage is not None:
        meta = {**meta, "provenance": {**meta.get("provenance", {}), "job": dict(lineage)}}
    return replace(model, weights={**model.weights, **scaled}, meta=meta)


def _corrected_profile(
    profile: Profile, factors: Mapping[Quantity, Factor], lineage: Mapping[str, Any] | None
) -> Profile:
    """The profile with other rates. Those of lookups share a factor, as most serve both directions."""
    of_lookups = [factors[Quantity(None, way)] for way in ("forward", "backward")]
    by_name = {}
    for name, rate in profile.rates.items():
        channel = next((q for prefix, q in _OF_PROFILE.items() if name.startswith(prefix)), None)
        latency_us = 0.0
        if channel is not None:
            value, sd = factors[channel].value, factors[channel].sd
            if name.endswith("_latency_us"):
                latency_us = 1e3 * factors[channel].latency_ms
        elif name.startswith(_OF_LOOKUPS):
            value = float(np.sqrt(np.prod([f.value for f in of_lookups])))
            sd = max(f.sd for f in of_lookups)
        else:
            by_name[name] = rate
            continue
        # Rates are times, or bytes in a time.
        slower = rate.value / value if rate.unit == "GB/s" else rate.value * value + latency_us
        words = f"traces of {lineage['job']}" if lineage else "traces"
        by_name[name] = replace(
            rate,
            value=slower,
            uncertainty=min(rate.uncertainty, sd) or sd,
            source=f"{rate.source}; corrected by {words}",
        )
    return replace(profile, rates=by_name)


_OF_LOOKUPS = (
    "forward_", "backward_", "sort_lookup", "weighted_lookup", "read_gbps", "repeat_gbps",
    "stream_gbps", "update_gbps",
)  # fmt: skip
_OF_PROFILE = {
    "all_to_all_": Quantity(Channel("all_to_all"), "forward"),
    "reduce_scatter_": Quantity(Channel("reduce_scatter"), "forward"),
    "all_gather_": Quantity(Channel("reduce_scatter"), "backward"),
    "all_reduce_": Quantity(Channel("all_reduce"), "backward"),
}
"""The exchange whose factor corrects rates of a profile, by the start of their names."""


def exchanges_of(model: Any) -> NeuralModel | ProfileModel:
    """The model that prices exchanges."""
    one = model.of_exchanges if isinstance(model, Composite) else model
    if not isinstance(one, NeuralModel | ProfileModel):
        raise ShardCoreError(f"model is a {type(model).__name__}; traces correct trained models and profiles")
    return one
