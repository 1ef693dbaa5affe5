"""The law of exchanges as a line in bytes, around an even division: for searches, bounds and rates of links.

The terms give the line. Where they are not linear, it is the law's tangent there, or its chord between two amounts.

Shapes: K levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardcore.core.links import joining_levels
from shardcore.core.topology import Topology
from shardcore.step.exchanges import (
    ChannelTerms,
    CollectiveTerms,
    ExchangeLaw,
    OwnWork,
    cached_channel_terms,
    channel_byte_counts,
    slowest_level_ms,
)
from shardcore.step.kinds import CHANNELS, Channel

LINE = ("own", "busiest", "host", "mean", "once")
"""Amounts of a line: bytes of the device, of the busiest one, of the busiest host's mean device, of the mean one; 1."""
OWN, BUSIEST, HOST, MEAN, ONCE = np.eye(len(LINE))


def linear_exchange_costs(
    model: ExchangeLaw, channels: Mapping[Channel, float], topology: Topology, low: float, high: float
) -> Iterator[tuple[Channel, str, np.ndarray]]:
    """Each channel and direction with the ms of its collective as a linear function [5] of the amounts in LINE.

    channels: bytes in each for a byte that a device has. low, high: such bytes of each device, between which lines
    are nowhere above the law; where they are equal, lines are tangents.
    """
    for channel, each in channels.items():
        terms = cached_channel_terms(model, channel, topology)
        for direction in channel.definition.directions:
            line = _transfer_line(terms, direction, each * low, each * high)
            if direction == channel.definition.directions[0]:
                line = line + linear_work_cost(terms.added_work)
            yield channel, direction, line * np.where(ONCE, 1.0, each)


def total_linear_cost(
    model: ExchangeLaw,
    channels: Mapping[Channel, float],
    topology: Topology,
    points: tuple[float, float],
    directions: Sequence[str] = ("forward", "backward"),
) -> np.ndarray:
    """[5] ms of collectives in some directions as a linear function of the amounts in LINE. points: low and high."""
    lines = linear_exchange_costs(model, channels, topology, *points)
    return sum((line for _, direction, line in lines if direction in directions), 0 * ONCE)


def _transfer_line(terms: ChannelTerms, direction: str, low_bytes: float, high_bytes: float) -> np.ndarray:
    """[5] ms of a collective's transfer as a linear function of the amounts in LINE, between two amounts of bytes."""
    of_direction = terms.directions.get(direction)
    if of_direction is None:
        return 0 * ONCE
    lines = np.array([_level_line(terms, level, k) for k, level in enumerate(of_direction.levels)])
    line = (
        ONCE * of_direction.once_ms
        + _level_weights(of_direction, lines @ np.where(ONCE, 1.0, low_bytes)) @ lines
    )
    half = of_direction.ramp_bytes
    slope = of_direction.ramp_ms * half / ((low_bytes + half) * (high_bytes + half))
    return (
        line
        + BUSIEST * slope
        + ONCE * (of_direction.ramp_ms * low_bytes / (low_bytes + half) - slope * low_bytes)
    )


def _level_line(terms: ChannelTerms, level: Mapping[str, float], k: int) -> np.ndarray:
    """[5] ms of a collective on links of level k as a linear function of the amounts in LINE.

    Counts are proportional to bytes: each is what it is for one byte of every device, times an amount of LINE. Exact
    for equal domains, but for what enters a device from others, and for domains of several hosts.
    """
    ring, across = terms.channel.definition.ring, terms.channel.scope.across
    counts = channel_byte_counts(terms.channel, np.ones(terms.members.shape), terms.domains)[k]
    # On the first level that joins some, inner domains are single devices.
    alone = not any(joining_levels(terms.domains)[:k])
    amounts = {
        "bytes": BUSIEST if ring else (OWN + MEAN) / 2,  # as many leave a device as enter it, from others
        "busiest": BUSIEST,
        "port": BUSIEST,
        "uplink": BUSIEST if ring or (alone and not across) else HOST,
        "shared_uplink": BUSIEST if ring else MEAN,
        "head_start": ONCE,
    }
    line = sum((rate * np.max(counts[name]) * amounts[name] for name, rate in level.items()), 0 * ONCE)
    # None of its own bytes enter a device.
    own_ms = level.get("bytes", 0.0) / terms.domains.shape[1] * (alone and not ring)
    return line + own_ms * (MEAN - OWN)


def linear_work_cost(work: OwnWork) -> np.ndarray:
    """[5] ms of a device's work on exchanged ids as a linear function of the amounts in LINE."""
    return np.array([work.byte_ms, 0.0, 0.0, work.mean_byte_ms, work.once_ms + work.all_once_ms])


def _level_weights(terms: CollectiveTerms, of_levels: np.ndarray) -> np.ndarray:
    """[K] gradient of the slowest level's ms by the ms of each level of links."""
    slowest = slowest_level_ms(terms, of_levels.tolist())
    if np.isinf(terms.sharpness) or not slowest:
        return 1.0 * (np.arange(len(of_levels)) == of_levels.argmax()) if len(of_levels) else of_levels
    return (of_levels / slowest) ** (terms.sharpness - 1)


# --- what a proof needs ---------------------------------------------------------------------------------------


def has_equal_transfers(model: ExchangeLaw, topology: Topology) -> bool:
    """True if each backward collective takes equally long on all devices."""
    return not any(
        "bytes" in level
        for direction, x in _terms_by_direction(model, topology)
        if direction == "backward"
        for level in x.levels
    )


def is_even_division_cheapest(model: ExchangeLaw, topology: Topology) -> bool:
    """True if collectives are cheapest when their bytes are divided evenly over devices.

    Forward the last device counts, backward the devices' mean weighted by speed. Where hosts and pods are equal,
    swapping devices does not change the law. Backward a device's bytes may count. Then all devices have to be equal.
    """
    equal = len(topology.hosts) == 1 and len({d.speed for d in topology.devices}) == 1
    return topology.equal_domains and (equal or has_equal_transfers(model, topology))


def has_concave_exchanges(model: ExchangeLaw, topology: Topology) -> bool:
    """True if ms of collectives are concave in evenly divided bytes, False if convex. Either if linear."""
    return any(np.any(x.ramp_ms) for _, x in _terms_by_direction(model, topology))


def _terms_by_direction(model: ExchangeLaw, topology: Topology) -> Iterator[tuple[str, CollectiveTerms]]:
    """Each direction of all channels, with the terms of its collective."""
    for channel in CHANNELS:
        yield from cached_channel_terms(model, channel, topology).directions.items()
