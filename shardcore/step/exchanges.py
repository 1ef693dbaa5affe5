"""Times of exchanges: one law for all cost models, and its terms, which a model gives for each channel.

    transfer = once + skew + ramp + the slowest level of links
    ramp     = ramp_ms * busiest / (busiest + ramp_bytes)
    level    = sum of rate * count of bytes (link_counts)

All levels carry at once, so the slowest decides: by a maximum, or by a smooth one where they overlap in part. A device
adds its own work on what it exchanges. All rates are 0 or more, so more bytes never take less time.

Searches and bounds take it as a line in bytes (exchange_lines.py).

Shapes: K levels, G groups of n devices, D devices, C channels, L traffic slots; ... any leading dimensions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from typing import Any, Protocol

import numpy as np

from shardcore.core.links import LEVELS
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.step.kinds import ID_CHANNELS, Channel
from shardcore.step.link_counts import link_byte_counts
from shardcore.step.lower import channels_of_traffic

SKEW_LIMIT_MS = 10.0
"""Skew beyond which an exchange takes no longer."""


# --- terms --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CollectiveTerms:
    """ms of a collective in one direction. Numbers, or arrays of many models that broadcast to [..., G, n].

    once_ms: of a call.
    skew: ms for each ms from the first device's start to the last one's, as far as SKEW_LIMIT_MS.
    ramp_ms, ramp_bytes: what large messages take more, and bytes of the busiest device that take half of it.
    levels: of each level of links, ms for a byte of each count of link_counts.COUNTS. Others are 0.
    sharpness: exponent of the smooth maximum over levels. inf: the maximum.
    """

    once_ms: Any
    levels: Sequence[Mapping[str, Any]]
    skew: float = 0.0
    ramp_ms: Any = 0.0
    ramp_bytes: Any = 1.0
    sharpness: float = np.inf


@dataclass(frozen=True, eq=False)
class OwnWork:
    """ms of a device's own work on what it exchanges, such as to put ids in order. Numbers, or arrays [..., 1].

    once_ms, byte_ms: of a device with bytes, and of each of its bytes.
    all_once_ms, mean_byte_ms: of every device where one has bytes, and of each byte of their mean.
    """

    once_ms: Any = 0.0
    byte_ms: Any = 0.0
    all_once_ms: Any = 0.0
    mean_byte_ms: Any = 0.0

    def work_ms(self, entered_bytes: np.ndarray) -> np.ndarray:
        """[..., D] ms of each device's work on the bytes [..., D] that it exchanges."""
        some = entered_bytes > 0
        own_ms = np.where(some, self.once_ms + self.byte_ms * entered_bytes, 0.0)
        mean_bytes = entered_bytes.mean(-1, keepdims=True)
        all_ms = self.all_once_ms + self.mean_byte_ms * mean_bytes
        return own_ms + np.where(some.any(-1, keepdims=True), all_ms, 0.0)


@dataclass(frozen=True, eq=False)
class ChannelTerms:
    """Terms of a channel in a topology.

    members: [G, n] devices of each group.
    domains: [K, n] domain of each device of the first group, by level. All groups have the same shape. Levels that the
      terms do not know are merged with others (`merge_unknown_levels`).
    directions: terms by direction. None where groups have one device.
    work: a device's own work.
    added_work: the part of it that is not in `once_ms` and the rates.
    """

    channel: Channel
    members: np.ndarray
    domains: np.ndarray
    directions: Mapping[str, CollectiveTerms]
    work: OwnWork = field(default_factory=OwnWork)
    added_work: OwnWork = field(default_factory=OwnWork)

    def transfer_ms_by_direction(self, sent_bytes: np.ndarray, skew_ms: np.ndarray) -> dict[str, np.ndarray]:
        """[..., D] ms of a channel's collective on each device, forward and backward, with devices' work on ids.

        sent_bytes: [..., D]. skew_ms: [...] from the first device's start to the last one's.
        """
        row, sent = self.channel.definition, np.asarray(sent_bytes, dtype=float)
        nothing: Any = np.zeros(sent.shape)
        ms = {"forward": nothing, "backward": nothing}
        if self.directions and sent.any():
            grouped = sent[..., self.members]
            counts = channel_byte_counts(self.channel, grouped, self.domains)
            busiest = grouped.max(-1, keepdims=True)
            # If any device of a group has bytes, all take part. Of dense gradients: those that have some.
            runs = grouped > 0 if row.dense else busiest > 0
            for direction, terms in self.directions.items():
                took = np.where(runs, transfer_ms(terms, counts, busiest, skew_ms), 0.0)
                took = np.broadcast_to(took, np.broadcast_shapes(took.shape, grouped.shape))
                ms[direction] = np.zeros((*took.shape[:-2], sent.shape[-1]))
                ms[direction][..., self.members] = took
        # Ids are worked on before and after they travel forward, dense gradients once they are summed.
        ms[row.directions[0]] = ms[row.directions[0]] + self.added_work.work_ms(sent)
        return ms


def channel_byte_counts(channel: Channel, grouped: np.ndarray, domains: np.ndarray) -> list[dict[str, Any]]:
    """[K] counts of a channel's bytes [..., G, n] on each level of links (link_counts.COUNTS). domains: [K, n]."""
    row = channel.definition
    # Inputs of a ring are padded to the largest.
    owned = row.passes * grouped.max(-1, keepdims=True) if row.ring else grouped
    return link_byte_counts(row.ring, owned, domains, channel.scope.across)


def transfer_ms(
    terms: CollectiveTerms,
    counts: Sequence[Mapping[str, Any]],
    busiest: np.ndarray,
    skew_ms: np.ndarray | float = 0.0,
) -> np.ndarray:
    """[..., G, n] ms of a collective's transfers by the law of exchanges, from counts of bytes on each level of
    links.
    """
    used = zip(terms.levels, counts, strict=True)
    levels = [sum(rate * count[name] for name, rate in level.items()) for level, count in used if level]
    ms = terms.once_ms + slowest_level_ms(terms, levels)
    if terms.skew:
        ms = ms + terms.skew * np.minimum(skew_ms, SKEW_LIMIT_MS)[..., None, None]
    if np.any(terms.ramp_ms):
        ms = ms + terms.ramp_ms * busiest / (busiest + terms.ramp_bytes)
    return ms


def slowest_level_ms(terms: CollectiveTerms, of_levels: Iterable[Any]) -> Any:
    """The ms of the slowest level of links, by a maximum or a smooth maximum."""
    if np.isinf(terms.sharpness):
        return reduce(np.maximum, of_levels, np.zeros(()))
    return sum(ms**terms.sharpness for ms in of_levels) ** (1 / terms.sharpness)


def with_payload_share(terms: CollectiveTerms, fraction: float) -> CollectiveTerms:
    """The terms of a collective whose payload takes `fraction` of the FP32 bytes."""
    levels = [{name: fraction * rate for name, rate in level.items()} for level in terms.levels]
    return replace(terms, levels=levels, ramp_bytes=terms.ramp_bytes / fraction)


def with_topology_rates(
    levels: Sequence[Mapping[str, Any]], topology: Topology, fraction: float = 1.0
) -> list[Mapping[str, Any]]:
    """[K] rates of each level of links, replaced where a topology states its bandwidth.

    The busiest device's bytes decide. Where the devices of a domain share a link, the busiest domain's do.
    fraction: share of the bytes that travels.
    """
    given = list(levels)
    for k, name in enumerate(LEVELS):
        link = topology.link(name)
        if link.gbps:
            byte_ms = fraction / (link.gbps * BYTES_PER_MS_PER_GBPS)
            # If nothing is known of links within such domains, a device's are as fast, or they would cost nothing.
            if link.shared and not any(given[:k]):
                given[0] = {"busiest": byte_ms}
            given[k] = {"uplink" if link.shared else "busiest": byte_ms}
    return given


def merge_unknown_levels(domains: np.ndarray, known: Sequence[bool]) -> np.ndarray:
    """[K, n] index of the host, pod, ... that each device is in, by level of links. A level of unknown rates is merged
    into the next one out that is known, or else in, so that its bytes count there.

    Where no level is known, all devices are in one domain.

    domains: [K, n] of n devices on K levels. known: [K] True for a level whose rates are known.
    """
    if not any(known):
        # One domain for all: their bytes count on the innermost level.
        return np.zeros_like(domains)
    merged, last = domains.copy(), max(k for k, is_known in enumerate(known) if is_known)
    for k, is_known in enumerate(known[:last]):
        if not is_known:
            # Merged with the level inside it: its bytes then count on the next one out.
            merged[k] = merged[k - 1] if k else np.arange(domains.shape[1])
    # Nothing further out is known, so the last known level carries those bytes, too.
    merged[last:] = domains[-1]
    return merged


# --- a step -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def cached_channel_terms(model: ExchangeLaw, channel: Channel, topology: Topology) -> ChannelTerms:
    """A cost model's terms of a channel's collective in a topology, cached."""
    return model.channel_terms(channel, topology)


@dataclass(frozen=True, eq=False)
class CommCost:
    """Costs of a step's collectives, in ms.

    forward_ms: [..., D] transfer of pooled outputs.
    backward_ms: [..., D] transfer of gradients.
    waiting_ms: [..., D] wait for the last device, before the forward exchange.
    input_ms: [..., D] transfer of ids, the device's own work included.
    input_work_ms: [..., D] own work in it: to put ids in buckets, and in order once they arrived.
    """

    forward_ms: np.ndarray
    backward_ms: np.ndarray
    waiting_ms: np.ndarray
    input_ms: np.ndarray
    input_work_ms: np.ndarray

    @property
    def total_ms(self) -> np.ndarray:
        """[..., D] ms of all collectives on each device, without ids."""
        return self.forward_ms + self.backward_ms + self.waiting_ms


class ExchangeLaw(Protocol):
    """A model whose terms give the costs of a step's collectives."""

    @abstractmethod
    def channel_terms(self, channel: Channel, topology: Topology) -> ChannelTerms:
        """Coefficients (latency, ms for each byte, and so on) by which the cost model prices a channel's collective."""

    def comm_cost(self, traffic: np.ndarray, compute_ms: np.ndarray, topology: Topology) -> CommCost:
        """Costs of a step's collectives on each device. They run one after another.

        The forward exchange follows a device's compute and backward transfer. It waits for the last device. A late
        start costs more than the waiting. That follows from the skew of the compute only, as a backward transfer ends
        for all devices at about the same time.

        traffic: [L C, ..., D] bytes of each of kinds.CHANNELS, in each traffic slot, as in Workload.
        compute_ms: [..., D] of each device. It sets the skew with which devices arrive.
        """
        compute_ms = np.asarray(compute_ms, dtype=float)
        shape = np.broadcast_shapes(np.shape(traffic)[1:], compute_ms.shape)
        input_ms, work_ms, forward, backward = (np.zeros(shape) for _ in range(4))
        for channel, directions in channel_transfer_ms(self, traffic, compute_ms, topology).items():
            if channel in ID_CHANNELS:
                input_ms += directions["forward"]
            else:
                forward += directions["forward"]
                backward += directions["backward"]
        # Work is counted by traffic slot: each run's ids are put in buckets and in order separately.
        for channel, arriving in zip(channels_of_traffic(traffic), traffic, strict=True):
            if channel in ID_CHANNELS and arriving.any():
                work_ms += cached_channel_terms(self, channel, topology).work.work_ms(arriving)
        ready = compute_ms + backward
        # The skew of compute and backward transfers is waited for here. Devices without any exchange never meet.
        some = (traffic.sum(0).sum(-1, keepdims=True) > 0) & (len(topology) > 1)
        waiting = np.where(some, ready.max(-1, keepdims=True) - ready, 0.0)
        return CommCost(forward, backward, waiting, input_ms, work_ms)


def channel_transfer_ms(
    model: ExchangeLaw, traffic: np.ndarray, compute_ms: np.ndarray, topology: Topology
) -> dict[Channel, dict[str, np.ndarray]]:
    """[..., D] ms of each channel's collective by direction, over all traffic slots.

    Arguments as of ExchangeLaw.comm_cost.
    """
    skew_ms = np.ptp(compute_ms, axis=-1)
    nothing = np.zeros(np.shape(traffic)[1:])
    by_channel = {
        channel: {"forward": nothing, "backward": nothing} for channel in channels_of_traffic(traffic)
    }
    for channel, sent_bytes in zip(channels_of_traffic(traffic), traffic, strict=True):
        # Searches price thousands of plans, and most channels of a plan carry nothing.
        if not sent_bytes.any():
            continue
        ms = cached_channel_terms(model, channel, topology).transfer_ms_by_direction(sent_bytes, skew_ms)
        # Runs exchange one after another.
        by_channel[channel] = {
            direction: before + ms[direction] for direction, before in by_channel[channel].items()
        }
        if "forward" in channel.definition.directions:
            # A collective synchronises the devices: the next one starts without skew.
            skew_ms = np.where(np.any(sent_bytes, axis=-1), 0.0, skew_ms)
    return by_channel
