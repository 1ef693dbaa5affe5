"""A step's collectives, one after another, whatever the law of their transfers.

Shapes: C channels, L lanes, D devices; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardcore.cost.model import CommCost
from shardcore.step.kinds import ID_CHANNELS, Channel
from shardcore.step.traffic import channels_of

Transfers = Callable[[Channel, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(channel, bytes [..., D], skew ms [...]) -> ms [..., D] of the transfers forward and backward."""
OwnWork = Callable[[Channel, np.ndarray], np.ndarray]
"""(channel of ids, bytes [..., D] that arrive) -> ms [..., D] of a device's own work in it."""


def step_comm(
    transfers: Transfers, own_work: OwnWork, traffic: np.ndarray, compute_ms: np.ndarray, meets: bool
) -> CommCost:
    """Costs [..., D] of a step's collectives. compute_ms: [..., D].

    The forward exchange follows a device's compute and backward transfer. It waits for the last device.
    A late start costs more than the waiting. That follows from the skew of the compute only,
    as a backward transfer ends for all devices at about the same time.

    meets: True if there are several devices. They meet only if bytes are exchanged at all.
    """
    compute_ms = np.asarray(compute_ms, dtype=float)
    shape = np.broadcast_shapes(np.shape(traffic)[1:], compute_ms.shape)
    input_ms, work_ms, forward, backward = (np.zeros(shape) for _ in range(4))
    for channel, (there, back) in channels_ms(transfers, traffic, compute_ms).items():
        if channel in ID_CHANNELS:
            input_ms += there
        else:
            forward += there
            backward += back
    # Work is counted by lane: each run's ids are put in buckets and in order separately.
    for channel, arriving in zip(channels_of(traffic), traffic, strict=True):
        if channel in ID_CHANNELS:
            work_ms += own_work(channel, arriving)
    ready = compute_ms + backward
    # The skew of compute and backward transfers is waited for here.
    some = traffic.sum(0).sum(-1, keepdims=True) > 0
    # Devices without any exchange never meet, so none waits for another.
    waiting = np.where(some & meets, ready.max(-1, keepdims=True) - ready, 0.0)
    return CommCost(forward, backward, waiting, input_ms, work_ms)


def channels_ms(
    transfers: Transfers, traffic: np.ndarray, compute_ms: np.ndarray
) -> dict[Channel, tuple[np.ndarray, np.ndarray]]:
    """Transfers [..., D] in ms of each channel, forward and backward, all lanes together.

    compute_ms: [..., D].
    """
    skew_ms = np.ptp(compute_ms, axis=-1)
    nothing = np.zeros(np.shape(traffic)[1:])
    by_channel = {channel: (nothing, nothing) for channel in channels_of(traffic)}
    for channel, sent_bytes in zip(channels_of(traffic), traffic, strict=True):
        # Searches price thousands of plans, and most channels of a plan carry nothing.
        if not sent_bytes.any():
            continue
        forward, backward = transfers(channel, sent_bytes, skew_ms)
        # Runs exchange one after another.
        before = by_channel[channel]
        by_channel[channel] = before[0] + forward, before[1] + backward
        if "forward" in channel.row.ways:
            # A collective synchronises the devices: the next one starts without skew.
            skew_ms = np.where(np.any(sent_bytes, axis=-1), 0.0, skew_ms)
    return by_channel
