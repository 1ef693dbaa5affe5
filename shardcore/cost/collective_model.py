"""The communication model: one linear law for any number of devices, fitted to measured exchanges.

Each collective has its own rates, forward and backward.

    transfer = latency + max(time within hosts, time between hosts)

Bytes use both kinds of link at once, so the slower kind decides. Each of the three parts is linear in its
terms, and all rates are 0 or more. So more bytes never take less time, and the law is convex. Swapping two
devices of a host, or two hosts, swaps their times.

The explicit link model (explicit_links) is the same law with the bandwidths and latency of a topology. It
serves links that nobody could measure.

In a training step a collective takes longer than in isolation. Replays give that factor (step_factors.py).
Prices include it. Accuracy is that of the law without it.

Bytes are those of FP32 outputs, whatever travels. So each payload has other rates, casts included. A payload
that was not measured has the rates of FP32, with proportionally fewer bytes.

Bucketized ids travel as other ids do. The time to put them in buckets is added: work of each device, on the
ids of its samples. It does not depend on links. Ids that arrive are put in order, which is work of each
device, too. The rates of ids include it. Another law gives its share of their time, and is added where a
topology gives its links.

Shapes: D devices, E exchange terms, S samples; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import numpy as np

from shardcore.core.links import LEVELS, Level, joins
from shardcore.core.payloads import payload_of
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.cost.link_counts import link_counts
from shardcore.step.collectives import COLLECTIVES, carried_as
from shardcore.step.kinds import CHANNELS, Channel
from shardcore.step.scopes import WORLD, groups_of

LATENCY_TERMS = ("once", "messages", "far_rounds", "skew_ms")
"""Terms of the latency.

once: 1.
messages: sent by a device.
far_rounds: rounds that wait for a link between hosts. An all-to-all has one: it sends all at once.
skew_ms: from the first start to the last, at most SKEW_LIMIT_MS. Long waiters resume late.
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
# Terms by a device's own bytes. If their rates are 0, all devices finish together.
_OWN_BYTES = [LATENCY.stop + i for i, count in enumerate(_COUNT_OF) if count == "bytes"]

FP32: Mapping[str, str] = {"forward": "fp32", "backward": "fp32"}
"""Payloads by way."""
ORDER = "order_ids"
"""Name of a weight [2], of putting arrived ids in order: ms once, and ms a byte. Absent where not measured."""
OWN_WORK = (*(row.work.weight for row in COLLECTIVES.values() if row.work), ORDER)
"""Names of the weights of devices' own work on ids."""
ALL_TO_ALL = Channel(next(iter(COLLECTIVES)))
"""Its rates stand in for those of a channel that was not measured."""
SKEW_LIMIT_MS = 10.0
TRACE = 1e-12
"""ms a byte of a level that was measured beside slower ones, and never decided."""
LEAST_IN_STEP, MOST_IN_STEP = 1e-3, 1e3
"""Range of a collective's time in a step over its time alone. Factors beyond it are discarded."""

# --- terms --------------------------------------------------------------------------------------------------

Terms = Sequence[np.ndarray | float] | np.ndarray
"""Values of EXCHANGE_TERMS, in shapes that broadcast to [..., D]."""


def exchange_terms(
    channel: Channel, owned_bytes: np.ndarray, units: np.ndarray, skew_ms: np.ndarray | float = 0.0
) -> Terms:
    """Terms of a collective in groups of n devices.

    owned_bytes: [..., n] as in lower.Workload.traffic.
    units: [K, n] as of core.links.units_of.
    skew_ms: [...] from the first start to the last.

    Groups across hosts share their links. For them, the axis before the last is that of the groups.
    """
    owned, row, n = np.asarray(owned_bytes, dtype=float), channel.row, units.shape[1]
    # A trailing axis, so that one skew serves all devices of a group.
    skew = np.minimum(np.asarray(skew_ms, dtype=float), SKEW_LIMIT_MS)[..., None]
    if row.ring:
        # Inputs are padded to the largest, but for a dense gradient.
        owned = row.passes * (owned if row.dense else owned.max(-1, keepdims=True))
    # A device receives its ids as it receives gradients backward: `owned` bytes, a part from each device.
    by_level = zip(LEVELS.values(), link_counts(row.ring, owned, units, channel.scope.across), strict=True)
    # A ring waits for a link between hosts in each of its n - 1 rounds.
    far_rounds = float(any(joins(units)[1:])) * (n - 1 if row.ring else 1)
    # Ids are exchanged in three calls, each with its own latency.
    times = row.exchanges
    # The order is that of EXCHANGE_TERMS: level by level, term by term.
    counts = [of_level[name] for level, of_level in by_level for name in level.terms.values()]
    return [1.0 * times, (n - 1.0) * times, far_rounds * times, skew, *counts]


# --- prices -------------------------------------------------------------------------------------------------


def transfer_ms(terms: Terms, rates: np.ndarray) -> np.ndarray:
    """[..., D] ms from terms and rates [E]."""
    # Terms without a rate are skipped: most rates are 0.
    # Latency adds to the slowest level, as all levels carry at once.
    # Terms may be scalars or arrays. An empty sum is a 0-d array, so that broadcasting works.
    latency, *levels = (
        sum((r * t for r, t in zip(rates[part], terms[part], strict=True) if r), np.zeros(()))
        for part in (LATENCY, *TERMS_OF_LEVEL.values())
    )
    # Reduced pairwise, as levels have different shapes until they are broadcast.
    return latency + reduce(np.maximum, levels)


ChannelRates = tuple[Mapping[str, np.ndarray], np.ndarray]
"""Rates of a channel in a topology: [E] by way, and [K, n] units of the devices of a group.

Of the units, levels that no rates know are merged with those that some do.
"""


def channel_rates(
    w: Mapping[str, np.ndarray], channel: Channel, topology: Topology, payloads: Mapping[str, str] = FP32
) -> ChannelRates:
    """Rates of a channel among groups of two or more devices. payloads: by way."""
    # All groups of a channel have the same shape, so the first one's units stand for all.
    units = topology.units[:, groups_of(channel.group, topology)[0]]
    by_way = {
        # A factor in steps scales measured rates. A topology's links then replace them, without a factor.
        way: explicit_links(
            in_step(w, channel, way) * rates_of(w, channel, way, payloads[way]),
            topology,
            payload_of(carried_as(channel.row, way, payloads[way])).share,
            units,
        )
        for way in channel.row.ways
    }
    return by_way, _counted(units, np.stack(list(by_way.values())))


def collective_ms(
    w: Mapping[str, np.ndarray],
    channel: Channel,
    owned_bytes: np.ndarray,
    topology: Topology,
    skew_ms: np.ndarray | float = 0.0,
    rates: Callable[[], ChannelRates] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """[..., D] ms of a channel, forward and backward.

    skew_ms: skew of the start of the forward exchange. No backward rate depends on it.
    rates: the channel's. None: those of FP32 payloads.
    0 where a group has nothing to run: no device owns bytes, or it has one device.
    """
    owned = np.asarray(owned_bytes, dtype=float)
    forward, backward = np.zeros_like(owned), np.zeros_like(owned)
    members = groups_of(channel.group, topology)
    # A group of one device sends nothing, and a channel without bytes makes no call.
    if members.shape[1] < 2 or not owned.any():
        return forward, backward
    by_way, units = rates() if rates else channel_rates(w, channel, topology)
    # [..., G, n]: price all groups of the channel at once.
    grouped = owned[..., members]
    terms = exchange_terms(channel, grouped, units, np.asarray(skew_ms, dtype=float)[..., None])
    # If any device of a group owns bytes, all take part. Of dense gradients: owners only.
    all_run = np.broadcast_to((grouped > 0).any(-1, keepdims=True), grouped.shape)
    runs = grouped > 0 if channel.row.dense else all_run
    for ms, way in ((forward, "forward"), (backward, "backward")):
        if way in by_way:
            # Devices that take no part spend no time in this channel.
            ms[..., members] = np.where(runs, transfer_ms(terms, by_way[way]), 0.0)
    if channel.row.ids:
        # Rates of measured links include the time to put ids in order. Given links do not.
        given = topology.slowest
        # A given latency leaves out the constant of own work, a given bandwidth its time by bytes.
        # Ids have no backward exchange.
        forward += id_work_ms(w, channel, owned, given.latency_ms is not None, given.gbps is not None)
    return forward, backward


def work_before_ms(w: Mapping[str, np.ndarray], channel: Channel, received_bytes: np.ndarray) -> np.ndarray:
    """[..., 1] ms of a device's own work before ids travel. 0 where there is none, or it was not measured.

    received_bytes: [..., D] of each device, afterwards. All devices have equally many ids before.
    """
    # Absent weights count as 0: a model without such samples still prices other channels.
    work = channel.row.work
    once, per_byte = w.get(work.weight, (0.0, 0.0)) if work else (0.0, 0.0)
    return once + per_byte * received_bytes.mean(-1, keepdims=True)


def id_work_ms(
    w: Mapping[str, np.ndarray],
    channel: Channel,
    received_bytes: np.ndarray,
    once: bool = True,
    bytes_too: bool = True,
) -> np.ndarray:
    """[..., D] ms of a channel of ids that are a device's own work. 0 where that was not measured.

    received_bytes: [..., D] of each device.
    once, bytes_too: True if putting ids in order counts with its constant, and with its time by bytes.
    """
    received = np.asarray(received_bytes, dtype=float)
    # One device exchanges with nobody, so TorchRec orders nothing.
    if received.shape[-1] < 2:
        return np.zeros_like(received)
    of_any, of_byte = w.get(ORDER, (0.0, 0.0))
    # A device that receives nothing has nothing to put in order.
    ms = np.where(received > 0, of_any * once + of_byte * bytes_too * received, 0.0)
    # Any ids in the batch make all devices put theirs in buckets.
    ms += np.where(received.any(-1, keepdims=True), work_before_ms(w, channel, received), 0.0)
    return in_step(w, channel, "forward") * ms


def _name(channel: Channel) -> str:
    """A channel's name within names of weights."""
    return channel.collective if channel.group == WORLD else f"{channel.collective}_{channel.group}"


def rates_name(channel: Channel, way: str, payload: str = "fp32") -> str:
    """The name of a channel's rates among a model's weights."""
    return f"exchange_{_name(channel)}_{way}" + (f"_{payload}" if payload != "fp32" else "")


def _own_or_like(
    w: Mapping[str, np.ndarray],
    name: Callable[[Channel, str], str],
    channel: Channel,
    way: str,
    otherwise: np.ndarray,
) -> np.ndarray:
    """A channel's own weight. If absent, that of its collective over all devices, or of those like it."""
    # From the most to the least specific: scope, collective, then what stands in for it.
    names = [name(c, way) for c in (channel, *_stand_ins(channel))]
    return next((w[key] for key in names if key in w), otherwise)


def _stand_ins(channel: Channel) -> list[Channel]:
    """The channel's collective over all devices, then similar ones (Collective.like)."""
    channels = [Channel(channel.collective)]
    # Each collective names one stand-in, and the all-to-all none, so this ends.
    while like := channels[-1].row.like:
        channels.append(Channel(like))
    return channels


def rates_of(w: Mapping[str, np.ndarray], channel: Channel, way: str, payload: str = "fp32") -> np.ndarray:
    """[E] rates: the channel's own or a substitute (see _own_or_like). 0 where there is none.

    For another payload than FP32: those of the channel or its collective, or FP32's with fewer bytes.
    """
    # A measured payload has its casts in its rates. Otherwise only bytes become fewer.
    if (payload := carried_as(channel.row, way, payload)) != "fp32":
        own = [rates_name(c, way, payload) for c in (channel, Channel(channel.collective))]
        if known := [w[name] for name in own if name in w]:
            return known[0]
        # A copy: these arrays are the model's own weights.
        fewer = rates_of(w, channel, way).copy()
        fewer[OF_BYTES] *= payload_of(payload).share
        return fewer
    return _own_or_like(w, rates_name, channel, way, np.zeros(len(EXCHANGE_TERMS)))


def knows_payload(w: Mapping[str, np.ndarray], channel: Channel, way: str, payload: str) -> bool:
    """True if the rates of a channel are those of its payload."""
    payload = carried_as(channel.row, way, payload)
    return payload == "fp32" or any(
        rates_name(c, way, payload) in w for c in (channel, Channel(channel.collective))
    )


def step_factor_name(channel: Channel, way: str) -> str:
    """The name of a channel's factor in a training step (step_factors.py), among a model's weights."""
    return f"exchange_in_step_{_name(channel)}_{way}"


def in_step(w: Mapping[str, np.ndarray], channel: Channel, way: str) -> float:
    """A channel's factor in a step, or a substitute (see _own_or_like). 1 where there is none."""
    return float(_own_or_like(w, step_factor_name, channel, way, np.ones(1))[0])


def stands_for(w: Mapping[str, np.ndarray], channel: Channel) -> str:
    """Words for the channel whose rates a channel without measurements uses."""
    measured = (c for c in _stand_ins(channel) if is_measured(w, c))
    return f"the {next(measured, ALL_TO_ALL).words}"


def is_measured(w: Mapping[str, np.ndarray], channel: Channel) -> bool:
    """True if the channel has measured rates in every direction."""
    row = channel.row
    # Channels with own work have no separate rates: theirs are those of `like`, and the work's.
    if row.work:
        return row.work.weight in w and is_measured(w, Channel(row.like))
    return all(rates_name(channel, way) in w for way in row.ways)


def measured_links(w: Mapping[str, np.ndarray], channel: Channel) -> set[str]:
    """The levels of links that the channel's rates know."""
    # A level counts as known if either direction has a rate there.
    rates = np.stack([rates_of(w, channel, way) for way in channel.row.ways])
    return {name for name, part in TERMS_OF_LEVEL.items() if rates[:, part].any()}


def explicit_links(
    rates: np.ndarray, topology: Topology, share: float = 1.0, units: np.ndarray | None = None
) -> np.ndarray:
    """The explicit link model: [E] rates with the latency and bandwidths of the topology.

    The busiest device's bytes decide. Where the devices of a unit share a link, the busiest unit's do. If
    nothing is known of links within such units, a device's are as fast.
    share: share of the bytes that travels.
    units: [K, n] of the devices that exchange. None: all.
    """
    # A copy, as weights of a model are shared.
    rates = rates.copy()
    # Messages cross the outermost link in use. Its latency is that of the whole exchange.
    latency_ms = (topology.slowest if units is None else topology.outermost(units)).latency_ms
    if latency_ms is not None:
        # A given latency is all of it: no term for messages, rounds or skew.
        rates[LATENCY] = (latency_ms, 0, 0, 0)
    innermost, inside = next(iter(LEVELS.values())), slice(LATENCY.stop, LATENCY.stop)
    for level in LEVELS.values():
        link = topology.link(level.name)
        if link.gbps:
            # ms a byte. With a smaller payload fewer bytes travel.
            of_byte = share / (link.gbps * BYTES_PER_MS_PER_GBPS)
            # Shared links: the busiest unit's bytes count. Else those of the busiest device.
            _give(rates, level, level.shared if link.shared else level.each, of_byte)
            # Rates of inner levels are all 0: price them by the same link, or they would cost nothing.
            if link.shared and not rates[inside].any():
                _give(rates, innermost, innermost.each, of_byte)
        # All levels inside the next one.
        inside = slice(LATENCY.stop, TERMS_OF_LEVEL[level.name].stop)
    return rates


def _give(rates: np.ndarray, level: Level, term: str, of_byte: float) -> None:
    """Make ms of a byte the only rate of a level."""
    rates[TERMS_OF_LEVEL[level.name]] = 0
    rates[EXCHANGE_TERMS.index(term)] = of_byte


def _counted(units: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """[K, n] units, as far as the rates [..., E] can tell levels apart.

    The bytes of a level without rates count on the next one out that has some, or else in. Where none has,
    all devices count as one unit.
    """
    # [K] True if some direction has a rate for the level. A trace tells only that others beyond it decide.
    beyond = [any(joins(units)[k + 1 :]) for k in range(len(units))]
    known = [
        bool((rates[..., part] > TRACE * (not others)).any())
        for part, others in zip(TERMS_OF_LEVEL.values(), beyond, strict=True)
    ]
    if not any(known):
        # One unit for all: their bytes count on the innermost level.
        return np.zeros_like(units)
    counted, last = units.copy(), max(k for k, has_rates in enumerate(known) if has_rates)
    for k, has_rates in enumerate(known[:last]):
        if not has_rates:
            # Merged with the level inside it: its bytes then count on the next one out.
            counted[k] = counted[k - 1] if k else np.arange(units.shape[1])
    # Nothing further out has rates, so the last known level carries those bytes, too.
    counted[last:] = units[-1]
    return counted


def even_is_least(w: Mapping[str, np.ndarray], topology: Topology, payload: str) -> bool:
    """True if an even division of a collective's bytes over devices is the cheapest.

    Forward the last device counts, backward the devices' mean weighted by speed. The law is convex. Where
    hosts and pods are equal, swapping devices does not change it. Backward a device's bytes may count. Then
    all devices have to be equal.
    """
    # Equal devices are interchangeable, so even their own bytes do not break symmetry.
    equal = len(topology.hosts) == 1 and len({d.speed for d in topology.devices}) == 1
    return topology.equal_units and (equal or not own_bytes_count(w, topology, payload))


def own_bytes_count(w: Mapping[str, np.ndarray], topology: Topology, payload: str) -> bool:
    """True if backward time depends on a device's bytes, not only on the busiest device's.

    payload: payload of gradients.
    """
    # Given links are priced by the busiest device, so they remove rates of a device's own bytes.
    return any(
        explicit_links(rates_of(w, c, "backward", payload), topology)[_OWN_BYTES].any() for c in CHANNELS
    )
