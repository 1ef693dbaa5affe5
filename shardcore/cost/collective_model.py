"""Collectives of trained models: measured rates, as terms of the law of exchanges (exchanges.py).

Each collective has its own rates, forward and backward. The slowest level of links decides. All rates are 0 or more,
so the law is convex. Swapping two devices of a host, or two hosts, swaps their times.

Bandwidths and latency of a topology take the place of rates. They serve links that nobody could measure.

In a training step a collective takes longer than in isolation. Replays give that factor (step_factors.py).
Prices include it. Accuracy is that of the law without it.

Bytes are those of FP32 outputs, whatever travels. So each payload has other rates, casts included. A payload
that was not measured has the rates of FP32, with proportionally fewer bytes.

Bucketized ids travel as other ids do. The time to put them in buckets is added: work of each device, on the
ids of its samples. It does not depend on links. Ids that arrive are put in order, which is work of each
device, too. The rates of ids include it. Another law gives its share of their time, and is added where a
topology gives its links.

Shapes: E exchange terms, K levels, n devices of a group; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardcore.core.links import LEVELS, joining_levels
from shardcore.core.payloads import payload_by_name
from shardcore.core.topology import Topology
from shardcore.cost.model import CorrectionFactor
from shardcore.step.collectives import COLLECTIVES, carried_payload
from shardcore.step.exchanges import (
    ChannelTerms,
    CollectiveTerms,
    OwnWork,
    merge_unknown_levels,
    with_topology_rates,
)
from shardcore.step.kinds import Channel
from shardcore.step.scopes import WORLD, group_members

LATENCY_TERMS = ("once", "messages", "far_rounds", "skew_ms")
"""Terms of the latency.

once: 1.
messages: sent by a device.
far_rounds: rounds that wait for a link between hosts. An all-to-all has one: it sends all at once.
skew_ms: from the first start to the last, at most exchanges.SKEW_LIMIT_MS. Long waiters resume late.
"""
EXCHANGE_TERMS = (*LATENCY_TERMS, *(term for level in LEVELS.values() for term in level.terms))
LATENCY = slice(0, len(LATENCY_TERMS))
TERMS_OF_LEVEL: Mapping[str, slice] = {
    name: slice(first := EXCHANGE_TERMS.index(next(iter(level.terms))), first + len(level.terms))
    for name, level in LEVELS.items()
}
"""The terms of each level."""
NEAR, *_, FAR = TERMS_OF_LEVEL.values()
_COUNT_OF = [count for level in LEVELS.values() for count in level.terms.values()]
# Terms that count bytes: those scale with the payload. head_start is a time.
OF_BYTES = [LATENCY.stop + i for i, count in enumerate(_COUNT_OF) if count != "head_start"]
_ONCE, _SKEW = (LATENCY_TERMS.index(name) for name in ("once", "skew_ms"))

FP32: Mapping[str, str] = {"forward": "fp32", "backward": "fp32"}
"""Payloads by direction."""
ORDER = "order_ids"
"""Name of a weight [2], of putting arrived ids in order: ms once, and ms a byte. Absent where not measured."""
OWN_WORK = (*(row.work.weight for row in COLLECTIVES.values() if row.work), ORDER)
"""Names of the weights of devices' own work on ids."""
ALL_TO_ALL = Channel(next(iter(COLLECTIVES)))
"""Its rates stand in for those of a channel that was not measured."""
TRACE = 1e-12
"""ms a byte of a level that was measured beside slower ones, and never decided."""
LEAST_IN_STEP, MOST_IN_STEP = 1e-3, 1e3
"""Range of a collective's time in a step over its time alone. Factors beyond it are discarded."""

# --- terms of a channel -------------------------------------------------------------------------------------


def channel_terms(
    weights: Mapping[str, np.ndarray],
    channel: Channel,
    topology: Topology,
    payloads: Mapping[str, str] = FP32,
) -> ChannelTerms:
    """Terms of the law of exchanges for a channel's collective in a topology. payloads: by direction."""
    members = group_members(channel.group, topology)
    # One device exchanges with nobody, so TorchRec orders nothing.
    if members.shape[1] < 2:
        return ChannelTerms(channel, members, topology.domain_numbers[:, :0], {})
    # All groups of a channel have the same shape, so the first one's domains stand for all.
    domains = topology.domain_numbers[:, members[0]]
    rates, directions = dict[str, np.ndarray](), dict[str, CollectiveTerms]()
    for direction in channel.definition.directions:
        # A factor in steps scales measured rates. A topology's links then replace them, without a factor.
        rates[direction] = step_factor(weights, channel, direction) * exchange_rates(
            weights, channel, direction, payloads[direction]
        )
        share = payload_by_name(
            carried_payload(channel.definition, direction, payloads[direction])
        ).size_ratio
        directions[direction] = CollectiveTerms(
            0.0,
            with_topology_rates(_rates_by_level(rates[direction]), topology, share),
            rates[direction][_SKEW],
        )
    # Messages cross the outermost link in use. A given latency is all of it: no term for messages, rounds or skew.
    latency_ms = topology.outermost_link(domains).latency_ms
    domains = merge_unknown_levels(domains, _has_level_rates(domains, list(directions.values())))
    for direction, terms in directions.items():
        if latency_ms is None:
            directions[direction] = replace(
                terms, once_ms=rates[direction][LATENCY][:-1] @ latency_terms(channel, domains)
            )
        else:
            directions[direction] = replace(
                terms, once_ms=latency_ms * channel.definition.exchanges, skew=0.0
            )
    work, added = OwnWork(), OwnWork()
    if channel.definition.ids:
        work = id_processing_work(weights, channel)
        # Rates of measured links include the time to put ids in order. Given links do not: a given latency leaves out
        # the constant of own work, a given bandwidth its time by bytes.
        given = topology.slowest_link
        added = replace(
            work,
            once_ms=work.once_ms * (given.latency_ms is not None),
            byte_ms=work.byte_ms * (given.gbps is not None),
        )
    return ChannelTerms(channel, members, domains, directions, work, added)


def latency_terms(channel: Channel, domains: np.ndarray) -> list[float]:
    """Values of LATENCY_TERMS, without the skew, for groups of n devices. domains: [K, n]."""
    n, row = domains.shape[1], channel.definition
    # A ring waits for a link between hosts in each of its n - 1 rounds.
    far_rounds = float(any(joining_levels(domains)[1:])) * (n - 1 if row.ring else 1)
    # Ids are exchanged in three calls, each with its own latency.
    return [1.0 * row.exchanges, (n - 1.0) * row.exchanges, far_rounds * row.exchanges]


def _rates_by_level(rates: np.ndarray) -> list[dict[str, float]]:
    """[K] the rates of each level of links by the bytes that they multiply, from rates [E]. Rates of 0 are left out."""
    return [
        {count: rate for count, rate in zip(level.terms.values(), rates[part].tolist(), strict=True) if rate}
        for level, part in zip(LEVELS.values(), TERMS_OF_LEVEL.values(), strict=True)
    ]


def id_processing_work(weights: Mapping[str, np.ndarray], channel: Channel) -> OwnWork:
    """A device's time to bucketize and order the ids that it exchanges. 0 where that was not measured."""
    once, by_byte = weights.get(ORDER, np.zeros(2)) * step_factor(weights, channel, "forward")
    before_once, before_byte = bucketizing_ms(weights, channel) * step_factor(weights, channel, "forward")
    return OwnWork(once, by_byte, before_once, before_byte)


def bucketizing_ms(weights: Mapping[str, np.ndarray], channel: Channel) -> np.ndarray:
    """[2] ms to put ids in buckets before they travel: once, and for each byte that a device receives in the mean."""
    work = channel.definition.work
    return weights.get(work.weight, np.zeros(2)) if work else np.zeros(2)


def _channel_name(channel: Channel) -> str:
    """A channel's part in the names of a model's weights."""
    return channel.collective if channel.group == WORLD else f"{channel.collective}_{channel.group}"


def rates_weight_name(channel: Channel, direction: str, payload: str = "fp32") -> str:
    """The name of a channel's rates among a model's weights."""
    return f"exchange_{_channel_name(channel)}_{direction}" + (f"_{payload}" if payload != "fp32" else "")


def _weight_or_substitute(
    weights: Mapping[str, np.ndarray],
    name: Callable[[Channel, str], str],
    channel: Channel,
    direction: str,
    otherwise: np.ndarray,
) -> np.ndarray:
    """A channel's weight. If absent, that of the collective over all devices, or of a similar collective."""
    # From the most to the least specific: scope, collective, then what stands in for it.
    names = [name(c, direction) for c in (channel, *_substitute_channels(channel))]
    return next((weights[key] for key in names if key in weights), otherwise)


def _substitute_channels(channel: Channel) -> list[Channel]:
    """Channels whose rates may replace a channel's: its collective over all devices, then similar ones
    (Collective.like).
    """
    channels = [Channel(channel.collective)]
    # Each collective names one stand-in, and the all-to-all none, so this ends.
    while like := channels[-1].definition.like:
        channels.append(Channel(like))
    return channels


def exchange_rates(
    weights: Mapping[str, np.ndarray], channel: Channel, direction: str, payload: str = "fp32"
) -> np.ndarray:
    """[E] rates of a channel's collective in a direction, or of a substitute. 0 where nothing was measured.

    For another payload than FP32: those of the channel or its collective, or FP32's with fewer bytes.
    """
    # A measured payload has its casts in its rates. Otherwise only bytes become fewer.
    if (payload := carried_payload(channel.definition, direction, payload)) != "fp32":
        own = [rates_weight_name(c, direction, payload) for c in (channel, Channel(channel.collective))]
        if known := [weights[name] for name in own if name in weights]:
            return known[0]
        # A copy: these arrays are the model's own weights.
        fewer = exchange_rates(weights, channel, direction).copy()
        fewer[OF_BYTES] *= payload_by_name(payload).size_ratio
        return fewer
    return _weight_or_substitute(
        weights, rates_weight_name, channel, direction, np.zeros(len(EXCHANGE_TERMS))
    )


def has_payload_rates(
    weights: Mapping[str, np.ndarray], channel: Channel, direction: str, payload: str
) -> bool:
    """True if a channel's rates were measured with this payload."""
    payload = carried_payload(channel.definition, direction, payload)
    return payload == "fp32" or any(
        rates_weight_name(c, direction, payload) in weights for c in (channel, Channel(channel.collective))
    )


def step_factor_name(channel: Channel, direction: str) -> str:
    """The name, among a model's weights, of a channel's factor in a training step (step_factors.py)."""
    return f"exchange_in_step_{_channel_name(channel)}_{direction}"


def step_factor(weights: Mapping[str, np.ndarray], channel: Channel, direction: str) -> float:
    """A collective's time in a training step over its time alone, or a substitute's. 1 where nothing was measured."""
    return float(_weight_or_substitute(weights, step_factor_name, channel, direction, np.ones(1))[0])


def corrected_weights(
    weights: Mapping[str, np.ndarray], channel: Channel, direction: str, correction: CorrectionFactor
) -> dict[str, np.ndarray]:
    """Weights of a channel's exchanges that take a factor times as long in steps, and a latency more."""
    in_step = float(
        np.clip(step_factor(weights, channel, direction) * correction.value, LEAST_IN_STEP, MOST_IN_STEP)
    )
    corrected = {step_factor_name(channel, direction): np.array([in_step])}
    for payload in channel.definition.payloads if correction.latency_ms else ():
        name = rates_weight_name(channel, direction, payload)
        if name in weights:
            corrected[name] = weights[name].copy()
            # The factor multiplies it again. Exchanges run as often as the row has it.
            corrected[name][_ONCE] += correction.latency_ms / (in_step * channel.definition.exchanges)
    return corrected


def substitute_words(weights: Mapping[str, np.ndarray], channel: Channel) -> str:
    """Text for the channel whose rates price a channel that was not measured."""
    measured = (c for c in _substitute_channels(channel) if is_measured(weights, c))
    return f"the {next(measured, ALL_TO_ALL).description}"


def is_measured(weights: Mapping[str, np.ndarray], channel: Channel) -> bool:
    """True if the channel has measured rates in every direction."""
    row = channel.definition
    # Channels with own work have no separate rates: theirs are those of `like`, and the work's.
    if row.work:
        return row.work.weight in weights and is_measured(weights, Channel(row.like))
    return all(rates_weight_name(channel, direction) in weights for direction in row.directions)


def measured_link_levels(weights: Mapping[str, np.ndarray], channel: Channel) -> set[str]:
    """The levels of links over which a channel's collective was measured."""
    # A level counts as known if either direction has a rate there.
    rates = np.stack(
        [exchange_rates(weights, channel, direction) for direction in channel.definition.directions]
    )
    return {name for name, part in TERMS_OF_LEVEL.items() if rates[:, part].any()}


def _has_level_rates(domains: np.ndarray, directions: Sequence[CollectiveTerms]) -> list[bool]:
    """[K] True for each level of links that has a rate in some direction. domains: [K, n]."""
    # A trace tells only that others beyond it decide.
    beyond = [any(joining_levels(domains)[k + 1 :]) for k in range(len(domains))]
    return [
        any(rate > TRACE * (not others) for terms in directions for rate in terms.levels[k].values())
        for k, others in enumerate(beyond)
    ]
