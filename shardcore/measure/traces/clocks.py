"""The clocks of ranks, aligned by their collectives.

A collective ends on all ranks at about the same time. So the median difference of ends, over the collectives
of a step, is the offset of two clocks. It is known as well as these differences agree. A collective begins to
transfer when its last rank begins, so time before that is waiting. Where clocks cannot be aligned, the rank on
which a collective is shortest came last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.measure.traces.rank import StepSpans, TracedCollective

MOST_SPREAD = 0.1
"""Most spread of the differences of ends, over the step, with which an offset counts as known."""
JUMP = 0.05
"""Change of an offset between steps, over the step, that counts as a jump of a clock."""


@dataclass(frozen=True)
class ClockOffset:
    """Clock offset of a rank from the first rank in ms, with the interquartile range of its estimates."""

    ms: float
    spread_ms: float


def match_collectives(
    collectives: Mapping[int, Sequence[TracedCollective]],
) -> tuple[list[dict[int, TracedCollective]], list[str]]:
    """Match the collectives of a traced step across ranks. Returns matched groups by rank, and texts on kinds that do
    not match.

    Ranks start collectives of a kind and role in the same order. Only kinds that all ranks ran equally often
    match.
    """
    groups, unequal = [], []
    for collective, role in sorted({(c.collective, c.role) for own in collectives.values() for c in own}):
        of_rank = {
            rank: [c for c in own if (c.collective, c.role) == (collective, role)]
            for rank, own in collectives.items()
        }
        if len(set(map(len, of_rank.values()))) == 1:
            groups += [
                dict(zip(of_rank, group, strict=True)) for group in zip(*of_rank.values(), strict=True)
            ]
        else:
            counts = ", ".join(f"rank {rank}: {len(own)}" for rank, own in of_rank.items())
            unequal.append(f"{collective} of {role} ({counts})")
    return groups, unequal


def collective_counts_by_step(steps: Sequence[StepSpans]) -> dict[int, Counter[tuple[str, str]]]:
    """Count of each kind of collective that a rank ran, by step number."""
    return {step.number: Counter((c.collective, c.role) for c in step.collectives) for step in steps}


def clock_offsets(
    groups: Sequence[Mapping[int, TracedCollective]], ranks: Sequence[int]
) -> dict[int, ClockOffset]:
    """Clock offsets of the ranks in a traced step, from the ends of matched collectives."""
    first, *others = ranks
    found = {first: ClockOffset(0.0, 0.0)}
    for rank in others:
        apart = [group[rank].end_ms - group[first].end_ms for group in groups]
        if apart:
            low, middle, high = np.quantile(apart, (0.25, 0.5, 0.75))
            # Clocks that agree within what collectives tell count as equal: one host has one clock.
            found[rank] = ClockOffset(
                float(middle) if abs(middle) > 2 * (high - low) else 0.0, float(high - low)
            )
    return found


def set_last_rank_begins(
    groups: Sequence[Mapping[int, TracedCollective]], clock: Mapping[int, ClockOffset], world_size: int
) -> None:
    """Set `began_ms` of matched collectives: the time when the last rank entered, by each rank's clock.

    Where a clock is not known, the transfer takes as long on all ranks as on the one where it is shortest.
    """
    for group in groups:
        last_ms = max(one.begin_ms - clock[rank].ms for rank, one in group.items() if rank in clock)
        shortest_ms = min(one.end_ms - one.begin_ms for one in group.values())
        for rank, one in group.items():
            # By the clocks, where all are known; else the shortest span of all ranks ends with this one.
            one.began_ms = last_ms + clock[rank].ms if len(clock) == len(group) else one.end_ms - shortest_ms
            one.is_aligned = len(group) == world_size
