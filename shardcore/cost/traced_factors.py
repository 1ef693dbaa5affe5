"""Correct a cost model by traced steps of a running job: few factors, each with its uncertainty.

A quantity of a step, q, is measured in a trace and predicted by the model:

    y_q = log(measured / predicted) = x_q + noise,    x_q = common + own_q

q is the lookups forward, or backward, or a collective in one direction. `common` is shared by all of a
family, as a slower CPU slows all lookups. So one traced step corrects a collective that only other plans run,
by what its family shows, with more doubt. Where exchanges overlap in time, one more observation is of these
together, with dense gradients:

    log(together) = log(sum_q exp(x_q) predicted_q) + noise

Their sum is known, and what is one exchange's is not (traced_observations.py): the noise of y_q grows with the
share of its ms that others share. All terms are normal with mean 0. So the posterior is a ridge fit,
linearised for the sum, and shrunk towards a factor of 1.

A collective takes at most MOST_FACTOR times as long for its bytes. What is measured beyond, up to
MOST_LATENCY_MS, is a latency: it waits for a thread to wake, whatever its bytes. What is beyond that is a
slower link, and a factor again. A collective that did not run has the usual latency of those that did.

A family whose correction predicts ranks and steps that were left out no better than the model did is left
alone.

Shapes: Q quantities, U observed units (a rank in a step).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.payloads import payload_by_name
from shardcore.core.types import Problem
from shardcore.cost.model import (
    COMPUTE,
    EXCHANGE,
    LOOKUPS,
    QUANTITIES,
    CorrectionFactor,
    CostModel,
    PredictedQuantity,
    price,
)
from shardcore.cost.traced_observations import REDUCED, RUN_AS, Observations, observe_steps
from shardcore.io.traced_steps import TracedStep
from shardcore.step.collectives import COLLECTIVES, carried_payload
from shardcore.step.kinds import ID_CHANNELS
from shardcore.step.lower import Workload


class TracesTellNothing(ShardCoreError):
    """Traces without lookups, or without their ids, from which no model is corrected."""


@dataclass(frozen=True)
class FactorPriors:
    """Priors of a family of correction factors: standard deviations of their logarithms.

    common: deviation of what all its quantities share. A model of another machine may be off by e^common.
    own: deviation of what one quantity has alone.
    noise: least standard deviation of what a unit measures.
    """

    common: float
    own: float
    noise: float


MOST_FACTOR = 5.0
MOST_LATENCY_MS = 4.0
"""Most that an exchange waits for a thread to wake: the tick of Linux's scheduler."""
UNCLEAR = 2.0
"""Standard deviation of an exchange's logarithm, where all of its ms may be another's: such a part tells little."""
TOGETHER = 0.2
"""Standard deviation of the logarithm of the ms of exchanges that overlap, of one step for others."""
MOST_APART = 0.1
"""Most difference of bytes sent between a trace and its plan."""
SLOW = 1.4
"""Ratio of a slow rank's time to the fastest one's. Models err less between ranks."""
LEAST_LOOKUPS = 0.02
"""Share of lookups in a rank's step from which its speed is judged."""
FAMILIES: Mapping[str, FactorPriors] = {
    COMPUTE: FactorPriors(0.5, 0.15, 0.05),
    EXCHANGE: FactorPriors(0.7, 0.4, 0.1),
}


@dataclass(frozen=True)
class TracedCorrection:
    """Factors of a model, and what the job does around the embeddings.

    factors: factor of each of QUANTITIES.
    covariance: [Q, Q] of their logarithms.
    refused: a line on each thing that the traces do not tell.
    around_ms: ms of a step that the model has no part of: the dense part, and all else that the job does.
    """

    factors: Mapping[PredictedQuantity, CorrectionFactor]
    covariance: np.ndarray
    refused: tuple[str, ...]
    around_ms: float = 0.0

    def sample_factors(self, rng: np.random.Generator) -> dict[PredictedQuantity, CorrectionFactor]:
        """Draw the factors of a correction from their posterior."""
        means = np.log([self.factors[q].value for q in QUANTITIES])
        logs = rng.multivariate_normal(means, self.covariance, method="eigh")
        return {
            q: replace(self.factors[q], value=float(np.exp(log)))
            for q, log in zip(QUANTITIES, logs, strict=True)
        }

    def to_json(self) -> dict[str, Any]:
        """The measured factors of a correction, and what the traces do not tell, as JSON for a model's provenance."""
        return {
            "factors": {q.label: asdict(f) for q, f in self.factors.items() if f.units},
            "refused": list(self.refused),
        }


def with_dense_ms(problem: Problem, around_ms: float) -> Problem:
    """The problem with a dense part of `around_ms`: all that a job does around its embeddings."""
    times = {"dense_forward_ms": around_ms / 3, "dense_backward_ms": around_ms * 2 / 3}
    return replace(problem, job=replace(problem.job, dense_mflops=None, **times))


def with_traced_dense(problem: Problem, steps: Sequence[TracedStep]) -> Problem:
    """The problem with the median ms of the dense part in traced steps."""
    return with_dense_ms(
        problem, float(np.median([rank.cost_ms("dense_ms") for step in steps for rank in step.ranks]))
    )


def with_traced_speeds(
    problem: Problem, model: CostModel, steps: Sequence[tuple[Workload, TracedStep]]
) -> tuple[Problem, list[str]]:
    """The problem with the speeds of slow devices as traced steps show them, and a line of text on each.

    A rank is slow if its lookups take SLOW times longer, for what the model predicts, than those of the
    fastest rank, in each of two steps or more: in a single one it may have been interrupted. Others keep
    their speed.
    """
    seen = observe_steps(model, steps)
    of_ranks = (ms[:, : len(LOOKUPS)].sum(1).tolist() for ms in (seen.measured, seen.predicted))
    units, speeds = zip(*of_ranks, strict=True), dict[int, list[float]]()
    for workload, step in steps:
        ratios = {
            workload.topology.ranks[rank.rank]: took_ms / expected_ms
            # Units are the ranks of all steps, in order.
            for rank, (took_ms, expected_ms) in zip(step.ranks, units, strict=False)
            # Short lookups are mostly noise.
            if took_ms > LEAST_LOOKUPS * rank.total_ms and expected_ms > 0
        }
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


def fit_correction(
    model: CostModel, steps: Sequence[tuple[Workload, TracedStep]], step_ms: float | None = None
) -> TracedCorrection:
    """Fit the correction of a cost model to traced steps of a job.

    steps: workloads of the plans that ran, whose jobs have the dense part that the trace shows
      (`with_traced_dense`), and the steps, as without tracing.

    step_ms: ms of steps without tracing. None: as traced.

    Raises TracesTellNothing where they tell nothing of lookups.
    """
    found = fit_factors(observe_steps(model, steps))
    fitted, missing = model.corrected_by(found.factors), describe_missing_ranks(step for _, step in steps)
    total_ms = step_ms or float(np.median([step.total_ms for _, step in steps]))
    inner_ms = float(
        np.median([price(workload, fitted).total_ms - workload.job.dense_ms for workload, _ in steps])
    )
    return replace(found, refused=(*missing, *found.refused), around_ms=max(0.0, total_ms - inner_ms))


def describe_missing_ranks(steps: Iterable[TracedStep]) -> list[str]:
    """A line of text on each set of ranks without a trace. Such steps correct no collective."""
    missing = dict.fromkeys(step.missing_ranks_text for step in steps if step.missing_ranks_text)
    return [f"exchanges: traces of {words} missing; such steps correct no exchange" for words in missing]


def fit_factors(observations: Observations) -> TracedCorrection:
    """Fit a factor for lookups and each collective to traced steps, with covariance, and text on what is unknown.

    Raises TracesTellNothing where they tell nothing of lookups.
    """
    known = observations.is_measured
    if not known[:, ~_EXCHANGES].any():
        raise TracesTellNothing(
            "the traces tell nothing of lookups; trace a step of the job with its embeddings, and with ids"
        )
    silent = [
        q.label
        for i, q in enumerate(QUANTITIES)
        if observations.predicted[:, i].any() and not known[:, i].any()
    ]
    left = "corrected as their family is" if known[:, _EXCHANGES].any() else "not corrected"
    refused = [f"the traces do not tell {', '.join(silent)}: {left}"] if silent else []
    evidence = _quantity_observations(observations)[0].joined_with(
        _overlap_observation(observations, np.zeros(len(QUANTITIES)))
    )
    why_not = {}
    for name in FAMILIES:
        own = evidence.select_family(name)
        if not len(own.values):
            continue
        if not _correction_generalises(observations, name):
            why_not[name] = "a correction by some ranks and steps fits others no better than the model does"
        elif not own.favours_correction():
            why_not[name] = "the traces are as likely without a correction"
    refused += [f"{name}: {reason}; left as they are" for name, reason in why_not.items()]
    fit = _fit_posterior(observations)
    kept = np.array([q.family not in why_not for q in QUANTITIES])
    log, latency_ms = np.where(kept, fit.log, 0.0), np.where(kept, fit.latency_ms, 0.0)
    units = np.where(kept, known.sum(0), 0)
    # The uncertainty of a factor that stays 1 is that of its fit, too.
    factors = {
        q: CorrectionFactor(
            float(np.exp(log[i])), float(np.sqrt(fit.covariance[i, i])), int(units[i]), float(latency_ms[i])
        )
        for i, q in enumerate(QUANTITIES)
    }
    return TracedCorrection(factors, fit.covariance, tuple(refused))


class _FittedFactors(NamedTuple):
    """[Q] mean and [Q, Q] covariance of the logarithms of factors, and [Q] latencies."""

    log: np.ndarray
    covariance: np.ndarray
    latency_ms: np.ndarray

    def correct_observations(self, observations: Observations) -> Observations:
        """The observations with the corrected model's predictions."""
        factors = np.exp(self.log)
        predicted = factors * observations.predicted + self.latency_ms * (observations.predicted > 0)
        return observations._replace(predicted=predicted, dense=factors[REDUCED] * observations.dense)


_EXCHANGES = np.array([q.family == EXCHANGE for q in QUANTITIES])
_NOISE = np.array([FAMILIES[q.family].noise for q in QUANTITIES])
_PRIOR = np.array(
    [
        [
            FAMILIES[a.family].common ** 2 * (a.family == b.family) + FAMILIES[a.family].own ** 2 * (a == b)
            for b in QUANTITIES
        ]
        for a in QUANTITIES
    ]
)
"""[Q, Q] covariance of the logarithms of factors, before any trace."""
_ROUNDS, _PRECISION = 60, 1e-6
"""Most rounds of the linearised fit, and the change of logarithms at which it ends."""


class _LinearObservations(NamedTuple):
    """Observations [n] of logarithms x: values = terms x + noise, with variances `noise`. terms: [n, Q]."""

    terms: np.ndarray
    values: np.ndarray
    noise: np.ndarray

    def joined_with(self, other: _LinearObservations | None) -> _LinearObservations:
        """The observations of two linear systems as one."""
        return (
            self
            if other is None
            else _LinearObservations(*map(np.concatenate, zip(self, other, strict=True)))
        )

    def select_family(self, family: str) -> _LinearObservations:
        """The observations of one family of quantities: lookups or collectives."""
        own = self.terms @ np.array([q.family == family for q in QUANTITIES]) > 0
        return _LinearObservations(self.terms[own], self.values[own], self.noise[own])

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and covariance of the factors' logarithms."""
        gain = np.linalg.solve(self._covariance(), self.terms @ _PRIOR).T
        return gain @ self.values, _PRIOR - gain @ self.terms @ _PRIOR

    def favours_correction(self) -> bool:
        """True if the observations are likelier under the prior of factors than with all factors 1.

        A correction costs: a wide prior makes any value unlikely. So what noise explains corrects nothing.
        """
        return self._log_density(self._covariance()) > self._log_density(np.diag(self.noise))

    def _covariance(self) -> np.ndarray:
        return self.terms @ _PRIOR @ self.terms.T + np.diag(self.noise)

    def _log_density(self, covariance: np.ndarray) -> float:
        """Logarithm of the normal density of the observed values, up to a constant."""
        squares = self.values @ np.linalg.solve(covariance, self.values)
        return -0.5 * float(squares + np.linalg.slogdet(covariance)[1])


def _fit_posterior(observations: Observations) -> _FittedFactors:
    """Fit the posterior of all factors' logarithms, and latencies, to observed steps."""
    parts, latency_ms = _quantity_observations(observations)
    log, covariance = parts.posterior()
    at = log
    for _ in range(_ROUNDS):
        log, covariance = parts.joined_with(_overlap_observation(observations, at)).posterior()
        # Half steps: a whole one can overshoot where one term is most of the sum.
        at, before = (at + log) / 2, at
        if np.abs(at - before).max() < _PRECISION:
            break
    return _FittedFactors(log, covariance, latency_ms)


def _quantity_observations(observations: Observations) -> tuple[_LinearObservations, np.ndarray]:
    """One linear observation for each measured quantity (lookups, collectives), and latencies [Q]."""
    known = observations.is_measured
    some = np.flatnonzero(known.any(0))
    measured, predicted = (
        np.where(known, observations.measured, 1.0),
        np.where(known, observations.predicted, 1.0),
    )
    most_ms = _max_factor_ms(measured, predicted)
    bounded = np.clip(measured, predicted / MOST_FACTOR, most_ms)
    mean, variance = _weighted_mean(
        np.log(np.where(_EXCHANGES, bounded, measured) / predicted), observations.predicted, known
    )
    unclear, _ = _weighted_mean(observations.shared / measured, observations.predicted, known)
    # Units share the disturbances of their step, so their number reduces no floor.
    noise = _NOISE**2 + (UNCLEAR * unclear) ** 2 + variance
    latency_ms = np.zeros(len(QUANTITIES))
    for i in (i for i in some if _EXCHANGES[i]):
        latency_ms[i] = max(0.0, float(np.median((measured - most_ms)[known[:, i], i])))
    # Exchanges of outputs, or of their gradients, that did not run have the usual latency of those that did.
    for direction in ("forward", "backward"):
        exchanges = [
            i
            for i, q in enumerate(QUANTITIES)
            if q.channel and q.channel not in ID_CHANNELS and q.direction == direction
        ]
        if ran := [latency_ms[i] for i in exchanges if i in some]:
            latency_ms[[i for i in exchanges if i not in some]] = np.median(ran)
    return _LinearObservations(np.eye(len(QUANTITIES))[some], mean[some], noise[some]), latency_ms


def _overlap_observation(observations: Observations, at: np.ndarray) -> _LinearObservations | None:
    """The summed ms of overlapping collectives as an observation, linear around logarithms `at` [Q]. None: not
    observed.
    """
    exchanged = observations.predicted_overlap_ms
    units = exchanged.sum(1) > 0
    if not units.any():
        return None
    total = np.where(units, exchanged.sum(1), 1.0)
    measured = np.where(units, observations.together.sum(1), 1.0)
    runs = (exchanged > 0).sum(1)
    bounded = np.clip(measured, total / MOST_FACTOR, _max_factor_ms(measured, total, runs))
    mean, variance = _weighted_mean(np.log(bounded / total), total, units)
    # The factor of all-reduces is that of the dense gradients, too.
    by_factor = np.exp(at) * exchanged[units].mean(0)
    sum_ms = by_factor.sum()
    slopes = by_factor / sum_ms
    value = mean + np.log(total[units].mean() / sum_ms) + slopes @ at
    return _LinearObservations(slopes[None], np.array([value]), np.array([TOGETHER**2 + variance]))


def _max_factor_ms(measured: np.ndarray, predicted: np.ndarray, runs: float | np.ndarray = 1.0) -> np.ndarray:
    """Largest ms that a factor on the prediction explains. The rest is the latency of `runs` collectives."""
    return np.maximum(MOST_FACTOR * predicted, measured - MOST_LATENCY_MS * runs)


def _weighted_mean(
    values: np.ndarray, weights: np.ndarray, known: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean over observed units weighted by predicted ms, and its variance."""
    share = np.where(known, weights, 0.0)
    share = share / np.maximum(share.sum(0), 1e-30)
    mean = (share * values).sum(0)
    return mean, (share * (values - mean) ** 2).sum(0) / np.maximum(known.sum(0), 1)


def _correction_generalises(observations: Observations, family: str) -> bool:
    """True if a correction fitted to other steps predicts a left-out step no worse than the uncorrected model."""
    before = after = 0.0
    for unit in range(len(observations.measured)):
        others = np.arange(len(observations.measured)) != unit
        learned, left_out = (
            Observations(*(values[rows] for values in observations)) for rows in (others, ~others)
        )
        if not (learned.measured_and_predicted_ms(family)[0] > 0).any():
            return True  # there is nothing else to judge by
        measured, as_it_is = left_out.measured_and_predicted_ms(family)
        corrected_ms = (
            _fit_posterior(learned).correct_observations(left_out).measured_and_predicted_ms(family)[1]
        )
        before += np.abs(measured - as_it_is)[measured > 0].sum()
        after += np.abs(measured - corrected_ms)[measured > 0].sum()
    return after <= before


def describe_mismatches(workload: Workload, step: TracedStep) -> list[str]:
    """Lines of text on bytes in a traced step that differ from the plan's: the trace is of another plan or job."""
    lines: list[str] = []
    if any(shard.table.sequence for ops in workload.ops for op in ops for shard in op.shards):
        return lines  # outputs of sequences are as long as a batch's ids
    for (collective, role), (name, direction) in RUN_AS.items():
        if direction != "forward":
            continue
        rows = [c.collective == name for c in workload.channels]
        # Traffic counts as FP32, and a trace has the bytes that travel.
        share = payload_by_name(
            carried_payload(COLLECTIVES[name], direction, workload.job.forward_payload)
        ).size_ratio
        for rank in step.ranks:
            traced = sum(x.n_bytes for x in rank.exchanges if (x.collective, x.role) == (collective, role))
            ours = share * float(workload.traffic[rows, workload.topology.ranks[rank.rank]].sum())
            if traced and abs(traced - ours) > MOST_APART * max(traced, ours):
                lines.append(
                    f"rank {rank.rank} enters {traced:,} bytes of outputs into its {collective.replace('_', '-')}; "
                    f"the plan has {ours:,.0f}: the trace is of another plan or job"
                )
                break
    return lines
