"""The law of exchanges as a line in bytes, around an even division: for searches, bounds and rates of links.

The terms give the line. Where they are not linear, it is the law's tangent there, or its chord between two amounts.

Shapes: K levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardcore.core.links import joins
from shardcore.core.topology import Topology
from shardcore.step.exchanges import (
    ChannelTerms,
    ExchangeLaw,
    OwnWork,
    Terms,
    channel_counts,
    slowest_ms,
    terms_of,
)
from shardcore.step.kinds import CHANNELS, Channel

LINE = ("own", "busiest", "host", "mean", "once")
"""Amounts of a line: bytes of the device, of the busiest one, of the busiest host's mean device, of the mean one; 1."""
OWN, BUSIEST, HOST, MEAN, ONCE = np.eye(len(LINE))


def exchange_lines(
    model: ExchangeLaw, channels: Mapping[Channel, float], topology: Topology, low: float, high: float
) -> Iterator[tuple[Channel, str, np.ndarray]]:
    """Channels, directions, and lines [5] in LINE of their ms, with devices' own work.

    channels: bytes in each for a byte that a device has. low, high: such bytes of each device, between which lines
    are nowhere above the law; where they are equal, lines are tangents.
    """
    for channel, each in channels.items():
        terms = terms_of(model, channel, topology)
        for way in channel.row.ways:
            line = _line(terms, way, each * low, each * high)
            if way == channel.row.ways[0]:
                line = line + work_line(terms.added_work)
            yield channel, way, line * np.where(ONCE, 1.0, each)


def total_line(
    model: ExchangeLaw,
    channels: Mapping[Channel, float],
    topology: Topology,
    points: tuple[float, float],
    ways: Sequence[str] = ("forward", "backward"),
) -> np.ndarray:
    """[5] the sum of `exchange_lines` of some directions. points: low and high."""
    lines = exchange_lines(model, channels, topology, *points)
    return sum((line for _, way, line in lines if way in ways), 0 * ONCE)


def _line(terms: ChannelTerms, way: str, low: float, high: float) -> np.ndarray:
    """[5] ms of a transfer as a line. Levels count by the tangent at `low`, and what ramps up by its chord."""
    of_way = terms.ways.get(way)
    if of_way is None:
        return 0 * ONCE
    lines = np.array([_level_line(terms, level, k) for k, level in enumerate(of_way.levels)])
    line = ONCE * of_way.once_ms + _shares(of_way, lines @ np.where(ONCE, 1.0, low)) @ lines
    half = of_way.ramp_bytes
    slope = of_way.ramp_ms * half / ((low + half) * (high + half))
    return line + BUSIEST * slope + ONCE * (of_way.ramp_ms * low / (low + half) - slope * low)


def _level_line(terms: ChannelTerms, level: Mapping[str, float], k: int) -> np.ndarray:
    """[5] ms of level k as a line, from its rates.

    Counts are proportional to bytes: each is what it is for one byte of every device, times an amount of LINE. Exact
    for equal units, but for what enters a device from others, and for units of several hosts.
    """
    ring, across = terms.channel.row.ring, terms.channel.scope.across
    counts = channel_counts(terms.channel, np.ones(terms.members.shape), terms.units)[k]
    # On the first level that joins some, inner units are single devices.
    alone = not any(joins(terms.units)[:k])
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
    own_ms = level.get("bytes", 0.0) / terms.units.shape[1] * (alone and not ring)
    return line + own_ms * (MEAN - OWN)


def work_line(work: OwnWork) -> np.ndarray:
    """[5] ms of own work as a line in LINE."""
    return np.array([work.byte_ms, 0.0, 0.0, work.mean_byte_ms, work.once_ms + work.all_once_ms])


def _shares(terms: Terms, of_levels: np.ndarray) -> np.ndarray:
    """[K] by how much each level counts in the slowest one: the gradient of `slowest_ms` at ms [K]."""
    slowest = slowest_ms(terms, of_levels.tolist())
    if np.isinf(terms.sharpness) or not slowest:
        return 1.0 * (np.arange(len(of_levels)) == of_levels.argmax()) if len(of_levels) else of_levels
    return (of_levels / slowest) ** (terms.sharpness - 1)


# --- what a proof needs ---------------------------------------------------------------------------------------


def has_equal_transfers(model: ExchangeLaw, topology: Topology) -> bool:
    """True if a backward exchange takes all devices the same time: none waits for its own bytes."""
    return not any(
        "bytes" in level for way, x in _ways(model, topology) if way == "backward" for level in x.levels
    )


def even_is_least(model: ExchangeLaw, topology: Topology) -> bool:
    """True if an even division of a collective's bytes over devices makes the exchanges of a step cheapest.

    Forward the last device counts, backward the devices' mean weighted by speed. Where hosts and pods are equal,
    swapping devices does not change the law. Backward a device's bytes may count. Then all devices have to be equal.
    """
    equal = len(topology.hosts) == 1 and len({d.speed for d in topology.devices}) == 1
    return topology.equal_units and (equal or has_equal_transfers(model, topology))


def has_concave_exchanges(model: ExchangeLaw, topology: Topology) -> bool:
    """True if ms are concave in evenly divided bytes, False if they are convex. Either where linear."""
    return any(np.any(x.ramp_ms) for _, x in _ways(model, topology))


def _ways(model: ExchangeLaw, topology: Topology) -> Iterator[tuple[str, Terms]]:
    """Terms of all channels by direction."""
    for channel in CHANNELS:
        yield from terms_of(model, channel, topology).ways.items()
