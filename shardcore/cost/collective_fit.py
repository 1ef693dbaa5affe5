"""The communication model's rates: fitted to measured exchanges, and judged on others.

On one host each rank's transfer counts. Over several hosts that of the last rank does: a step waits for it,
and the lead of others depends on how TCP shares a link. Fitted to all ranks, the last comes out 20% to 30%
too early (docs/benchmarks/2026-11-25-emulated-hosts.md).

Shapes: D devices, E exchange terms, S samples, R ranks that count of all samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from shardcore.core.links import LEVELS, domain_numbers
from shardcore.core.types import OUTPUT_BYTES
from shardcore.cost.collective_model import (
    ALL_TO_ALL,
    EXCHANGE_TERMS,
    LATENCY,
    ORDER,
    TERMS_OF_LEVEL,
    TRACE,
    bucketizing_ms,
    exchange_rates,
    is_measured,
    latency_terms,
    rates_weight_name,
)
from shardcore.cost.metrics import mape
from shardcore.cost.nnls import fit_nonnegative_rates
from shardcore.io.measurements import CollectiveSample
from shardcore.step.collectives import COLLECTIVES, Collective
from shardcore.step.exchanges import SKEW_LIMIT_MS, channel_byte_counts
from shardcore.step.kinds import Channel
from shardcore.step.scopes import SCOPES, WORLD

ONCE, MESSAGES = (EXCHANGE_TERMS.index(name) for name in ("once", "messages"))
MESSAGE_SHARE = 1 / 7
"""Latency of a message to one device more, over that which an exchange has once, where it was not measured.

In published logs of nccl-tests on A100, all-to-alls of small messages take 3.7 times as long on 32 devices as
on 8, all-gathers 2.7 and all-reduces 2.1 times. With this share it is 2.7 times
(docs/decisions/latency-of-more-devices.md).
"""
MOST_AUXILIARY_SAMPLES = 15
"""Exchanges of another machine that join those of a kind."""
_PRIOR = 4
"""Own timings of a kind that weigh as much as the level of all kinds."""
FEWEST_SAMPLES = 4
"""A collective with fewer samples gets no rates."""
_SHORT = (0.2, 0.4, 0.6)
"""Shares of samples, the shortest ones, for which first guesses say that the innermost level decides."""
_MEASURED = [(row, payload) for row in COLLECTIVES.values() for payload in row.payloads]
"""Collectives with their payloads."""


def fit_exchange_rates(
    samples: Sequence[CollectiveSample], auxiliary_samples: Sequence[CollectiveSample] = ()
) -> dict[str, np.ndarray]:
    """Fit [E] rates of each measured collective, scope, payload and direction. Keys are `rates_weight_name`.

    auxiliary_samples: samples of another machine (auxiliary_samples.py). Some of each kind join at the level of this
      machine's.
    """
    kinds: list[tuple[str, np.ndarray, np.ndarray, int, np.ndarray]] = []
    for (row, payload), group in itertools.product(_MEASURED, SCOPES):
        # Samples of one collective, payload and scope, which have separate rates.
        known, theirs = (
            samples_of_kind(some, row.name, payload, group) for some in (samples, auxiliary_samples)
        )
        # Ids with work before have the rates of other ids.
        for direction in (
            row.directions if len(known) + len(theirs) >= FEWEST_SAMPLES and not row.work else ()
        ):
            terms, measured = terms_and_measured_ms([*known, *theirs[:MOST_AUXILIARY_SAMPLES]], direction)
            own, logs = sum(len(_fitted_ranks(s, direction)) for s in known), np.zeros(0)
            if theirs:
                # Logarithms of own times over those of the other machine's law.
                there = _transfer_ms(
                    terms[:, :own],
                    _fit_rates(*terms_and_measured_ms(theirs[: 4 * MOST_AUXILIARY_SAMPLES], direction)),
                )
                logs = np.log(measured[:own] / np.maximum(there, 1e-9))
            kinds.append(
                (rates_weight_name(Channel(row.name, group), direction, payload), terms, measured, own, logs)
            )
    # The level of all kinds. Without own exchanges it is the other machine's: a logarithm of 0.
    level = np.median(np.concatenate([np.zeros(1), *(logs for *_, logs in kinds)]))
    rates: dict[str, np.ndarray] = {}
    for name, terms, measured, own, logs in kinds:
        # A kind with few own timings, or none, is near the level of all kinds.
        measured[own:] *= np.exp(
            (own * (np.median(logs) if len(logs) else level) + _PRIOR * level) / (own + _PRIOR)
        )
        rates[name] = _fit_rates(terms, measured)
    # Laws of own work need the rates of ids, so they are fitted last.
    works: dict[str, np.ndarray] = {}
    for row in COLLECTIVES.values():
        works |= _fit_bucketizing(rates, row, samples_of_kind(samples, row.name, "fp32"))
    # Ids without work before: their own work is the order alone.
    plain_ids = [s for s in samples if s.request.definition.ids and not s.request.definition.work]
    return rates | works | _fit_id_ordering(plain_ids)


def _transfer_ms(terms: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """[S] ms of collectives by the law of exchanges, from terms [E, S] and rates [E]."""
    levels = [rates[part] @ terms[part] for part in TERMS_OF_LEVEL.values()]
    return rates[LATENCY] @ terms[LATENCY] + np.max(levels, axis=0)


def _fit_bucketizing(
    rates: Mapping[str, np.ndarray], collective: Collective, samples: Sequence[CollectiveSample]
) -> dict[str, np.ndarray]:
    """Fit the time to put ids in buckets: what bucketized exchanges of ids take beyond plain ones. {} without both."""
    if (
        not collective.work
        or len(samples) < FEWEST_SAMPLES
        or not is_measured(rates, Channel(collective.like))
    ):
        return {}
    terms, measured = terms_and_measured_ms(samples, "forward")
    # All devices have equally many ids before: the mean of those that arrive.
    # One value for each rank that counts, in the order of `terms_and_measured_ms`.
    mean_bytes = np.concatenate(
        [np.full(len(_fitted_ranks(s, "forward")), rank_bytes(s).mean()) for s in samples]
    )
    # [R, 2] terms of own work: once, and each byte.
    own = np.stack([np.ones_like(mean_bytes), mean_bytes], axis=1)
    # Time that plain ids take for as many bytes. The rest is the work of putting ids in buckets.
    known = _transfer_ms(terms, exchange_rates(rates, Channel(collective.like), "forward"))
    return {collective.work.weight: fit_nonnegative_rates(own, measured, known=known)}


def _fit_id_ordering(samples: Sequence[CollectiveSample]) -> dict[str, np.ndarray]:
    """Fit the time to put received ids in order. {} with too few samples."""
    timed = [(rank_bytes(s), s.work_ms) for s in samples if s.work_ms is not None]
    if len(timed) < FEWEST_SAMPLES:
        return {}
    received, work_ms = (np.concatenate(values) for values in zip(*timed, strict=True))
    # Ranks without ids do nothing, so they tell nothing of the constant.
    ran = (received > 0) & (work_ms > 0)
    own = np.stack([np.ones(ran.sum()), received[ran]], axis=1)
    return {ORDER: fit_nonnegative_rates(own, work_ms[ran])}


def _fit_rates(terms: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """[E] rates of a collective from terms [E, S] and measured ms [S]: the best fit of several guesses of the slowest
    link.

    The maximum over levels of links is not linear. Guesses say which level is slowest for each sample.
    """
    # Levels are numbered outward, so the maximum over used levels is the outermost.
    outermost = np.max([k * terms[part].any(0) for k, part in enumerate(TERMS_OF_LEVEL.values())], axis=0)
    # On further levels a link may rest between rounds. Then bytes of short exchanges there take no time.
    guesses = [np.where(measured > np.quantile(measured, share), outermost, 0) for share in _SHORT]
    different = np.unique([outermost, *guesses], axis=0)
    fits = [_fit_from_guess(guess, terms, measured) for guess in different]
    best = min(fits, key=lambda rates: np.abs(_transfer_ms(terms, rates) / measured - 1).mean())
    for level in LEVELS.values():
        # A level that carried bytes and never decided takes no time. With no rate at all it would count as
        # not measured, and its bytes on another level.
        if terms[TERMS_OF_LEVEL[level.name]].any() and not best[TERMS_OF_LEVEL[level.name]].any():
            best[EXCHANGE_TERMS.index(level.each)] = TRACE
    return best


def _fit_from_guess(
    decides: np.ndarray, terms: np.ndarray, measured: np.ndarray, rounds: int = 8
) -> np.ndarray:
    """[E] rates of a collective, fitted from a first guess [S] of the level of links that is slowest for each sample.

    It fits again until the guess agrees with the fit.
    """
    parts, rates = list(TERMS_OF_LEVEL.values()), np.zeros(len(terms))
    for _ in range(rounds):
        # Only the terms of the guessed level count for a sample, and the latency.
        decisive = terms.copy()
        for k, part in enumerate(parts):
            decisive[part, decides != k] = 0
        rates = _fit_with_shared_rates(decisive, measured)
        # Guess again: the level that takes longest under the new rates.
        before, decides = decides, np.argmax([rates[part] @ terms[part] for part in parts], axis=0)
        if (before == decides).all():
            break
    return rates


def _fit_with_shared_rates(terms: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """[E] rates of a linear law of collectives. Terms that are equal in all samples share their rate evenly.

    Samples of one number of devices do not tell how latency grows with it: MESSAGE_SHARE does then.
    """
    # Always the same ratio: the two columns are one, and least squares cannot tell them apart.
    terms, is_constant = terms.copy(), np.ptp(terms[MESSAGES] / terms[ONCE]) == 0
    if is_constant:
        # Fold messages into the constant by a known ratio, fit, and take them apart again below.
        terms[ONCE] += MESSAGE_SHARE * terms[MESSAGES]
        terms[MESSAGES] = 0
    # Terms that the samples cannot tell apart share their rate evenly (nnls.py).
    rates = fit_nonnegative_rates(terms.T, measured)
    if is_constant:
        # The folded column's rate belongs to `once`; messages have their share of it.
        rates[MESSAGES] = MESSAGE_SHARE * rates[ONCE]
    return rates


def priceable_samples(samples: Sequence[CollectiveSample]) -> list[CollectiveSample]:
    """Measured collectives whose payload a job may choose, which a cost model can price.

    An exchange that ended before the last rank started has no transfer time, and is left out.
    """
    chosen = [s for s in samples if s.request.definition.cast or s.request.payload == "fp32"]
    # A time of 0 has no relative error.
    return [
        s
        for s in chosen
        if s.error
        or min(_measured_ms(s, direction).min() for direction in s.request.definition.directions) > 0
    ]


def terms_and_measured_ms(
    samples: Sequence[CollectiveSample], direction: str
) -> tuple[np.ndarray, np.ndarray]:
    """Terms [E, R] of the law of exchanges, and measured transfer ms [R], of ranks that decide."""
    terms, measured = [np.zeros((len(EXCHANGE_TERMS), 0))], [np.zeros(0)]
    for s in samples:
        # Only the ranks that count: on several hosts the last one, else all.
        ranks = _fitted_ranks(s, direction)
        terms.append(_sample_terms(s, direction)[:, ranks])
        measured.append(_measured_ms(s, direction)[ranks])
    return np.concatenate(terms, axis=1), np.concatenate(measured)


def _measured_ms(sample: CollectiveSample, direction: str) -> np.ndarray:
    """[D] median ms of each rank's transfer in a measured collective."""
    return np.array([x.median_ms for x in getattr(sample, direction)])


def _fitted_ranks(sample: CollectiveSample, direction: str) -> list[int]:
    """The ranks of a measured collective that a fit uses: all on one host; over several hosts the last, as a step
    waits for it.
    """
    ms = _measured_ms(sample, direction)
    return list(range(len(ms))) if sample.request.hosts == 1 else [int(ms.argmax())]


# Cross-validation fits to the same samples again and again.
@lru_cache(1 << 13)
def _sample_terms(sample: CollectiveSample, direction: str) -> np.ndarray:
    """[E, D] terms of the law of exchanges for each rank of a measured collective."""
    r = sample.request
    # Ranks are numbered host by host, and hosts are of one size.
    members = np.array(r.rank_groups)
    # Domains of one group stand for all: groups of a scope have one shape.
    domains = domain_numbers([r.host_names[rank] for rank in members[0]])
    first = direction == r.definition.directions[0]  # only the first exchange is entered at start_ms
    skew_ms = max(r.start_ms) - min(r.start_ms) if first else 0.0
    terms = exchange_terms(Channel(r.collective, r.group), rank_bytes(sample)[members], domains, skew_ms)
    of_ranks = np.zeros((len(terms), len(r.widths)))
    for row, term in zip(of_ranks, terms, strict=True):
        # Terms are by group member: write each to the rank that it is.
        row[members] = np.broadcast_to(term, members.shape)
    return of_ranks


def exchange_terms(
    channel: Channel, grouped_bytes: np.ndarray, domains: np.ndarray, skew_ms: float
) -> list[np.ndarray | float]:
    """Values of EXCHANGE_TERMS for groups of devices; each broadcasts to [G, n]. Arguments as of channel_byte_counts.

    skew_ms: of the start. Long waiters resume late, which is a term of latency.
    """
    by_level = zip(LEVELS.values(), channel_byte_counts(channel, grouped_bytes, domains), strict=True)
    # The order is that of EXCHANGE_TERMS: level by level, term by term.
    counts = [of_level[name] for level, of_level in by_level for name in level.terms.values()]
    return [*latency_terms(channel, domains), min(skew_ms, SKEW_LIMIT_MS), *counts]


def rank_bytes(sample: CollectiveSample) -> np.ndarray:
    """[D] bytes of FP32 outputs that each rank of a measured collective owns."""
    # Bytes of FP32 outputs, whatever the payload: rates of a payload include its cast.
    return np.array(sample.request.widths, dtype=float) * sample.request.batch * OUTPUT_BYTES


# --- accuracy -----------------------------------------------------------------------------------------------


def predicted_and_measured_ms(
    weights: Mapping[str, np.ndarray], samples: Sequence[CollectiveSample], direction: str
) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and measured transfer ms [R] of samples of one collective and payload."""
    all_predicted, all_measured = [], []
    for sample in samples:
        r, measured = sample.request, _measured_ms(sample, direction)
        channel = Channel(r.collective, r.group)
        ms = _transfer_ms(
            _sample_terms(sample, direction), exchange_rates(weights, channel, direction, r.payload)
        )
        # Own work takes place before the transfer, so it adds.
        once_ms, byte_ms = bucketizing_ms(weights, channel)
        ms = np.broadcast_to(ms + once_ms + byte_ms * rank_bytes(sample).mean(), measured.shape)
        # Over several hosts the last rank counts.
        all_predicted.append(ms if r.hosts == 1 else ms.max(keepdims=True))
        all_measured.append(measured if r.hosts == 1 else measured.max(keepdims=True))
    return np.concatenate(all_predicted), np.concatenate(all_measured)


def exchange_errors(
    weights: Mapping[str, np.ndarray], samples: Sequence[CollectiveSample]
) -> dict[str, float]:
    """Mean absolute error of predicted collectives, in percent, as flat metrics.

    "<direction>_comm_mape": of all-to-alls.
    "<collective>_<direction>_mape": of the others.
    "..._<payload>_mape": of other payloads than FP32.

    A kind without samples has no metrics.
    """
    return {
        f"{_metric_name(row.name, direction, payload)}_mape": mape(
            *predicted_and_measured_ms(weights, of_kind, direction)
        )
        for row, payload in _MEASURED
        if (of_kind := samples_of_kind(samples, row.name, payload))
        for direction in row.directions
    }


def sample_counts(samples: Sequence[CollectiveSample]) -> dict[str, float]:
    """Number of measured collectives of each kind and direction, as flat metrics such as "n_forward_comm"."""
    return {
        f"n_{_metric_name(row.name, direction, payload)}": float(len(of_kind))
        for row, payload in _MEASURED
        if (of_kind := samples_of_kind(samples, row.name, payload))
        for direction in row.directions
    }


def samples_of_kind(
    samples: Sequence[CollectiveSample], collective: str, payload: str, group: str = WORLD
) -> list[CollectiveSample]:
    """The measured collectives of one name, payload and scope of groups."""
    kind = (collective, payload, group)
    return [s for s in samples if (s.request.collective, s.request.payload, s.request.group) == kind]


def _metric_name(collective: str, direction: str, payload: str) -> str:
    name = f"{direction}_comm" if collective == ALL_TO_ALL.collective else f"{collective}_{direction}"
    return name + (f"_{payload}" if payload != "fp32" else "")
