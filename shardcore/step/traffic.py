"""Arrays of bytes by channel, and where the runs of a plan stand in them.

Shapes: C channels (kinds.CHANNELS), L lanes, D devices.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shardcore.core.types import Problem
from shardcore.step.kinds import CHANNELS, Channel, Layout


def lanes(runs: Iterable[Layout]) -> dict[Layout, int]:
    """Lane of each run in arrays of bytes, from 0.

    Each run has separate collectives. Runs without a channel in common share a lane, so most plans have
    one. Gradients of replicas are all in the first: DDP reduces them together.
    """
    # Greedy colouring: a run takes the first lane in which none of its channels is in use.
    in_use: list[set[Channel]] = [set()]
    lane_of = {}
    for run in runs:
        # Dense channels do not conflict: DDP reduces all gradients in one call, so their bytes add up.
        channels = {c for c in (*run.channels, run.ids) if c and not c.row.dense}
        lane_of[run] = next((i for i, others in enumerate(in_use) if not channels & others), len(in_use))
        # A run that fits no lane opens the next one.
        in_use += [set()] * (lane_of[run] == len(in_use))
        in_use[lane_of[run]] |= channels
    return lane_of


def row_in(lane: int, channel: Channel) -> int:
    """The row of a channel in arrays of bytes."""
    # Lane-major: [L C, ...] holds the C rows of lane 0, then those of lane 1.
    return lane * len(CHANNELS) + CHANNELS.index(channel)


def channels_of(traffic: np.ndarray) -> tuple[Channel, ...]:
    """The channel of each row of an array of bytes."""
    return CHANNELS * (len(traffic) // len(CHANNELS))


def shared_on_units(traffic: np.ndarray, problem: Problem) -> np.ndarray:
    """Traffic [L C, ..., D]; with towers, what crosses hosts (or pods) is divided evenly over each one's devices.

    After the exchange within a tower, all its devices have equally many samples (Layout.channels_in).
    """
    if problem.job.tower_ratio is not None:
        on_units = np.array(problem.topology.row_units)
        # Only exchanges across them are compressed by towers. Others keep each device's own bytes.
        for row in (i for i, c in enumerate(channels_of(traffic)) if c.scope.across):
            of_unit = traffic[row][..., on_units]
            # The mean over a unit keeps its total, which is what its uplink carries.
            traffic[row][..., on_units] = np.broadcast_to(of_unit.mean(-1, keepdims=True), of_unit.shape)
    return traffic
