"""The clocks of ranks, aligned by their collectives.

A collective ends on all ranks at about the same time. So the median difference of ends, over the collectives
of a step, is the offset of two clocks. It is known as well as these differences agree. A collective begins to
transfer when its last rank begins, so time before that is waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.measure.traces.rank import Collective, StepSpans

MOST_SPREAD = 0.1
"""Most spread of the differences of ends, over the step, with which an offset counts as known."""
JUMP = 0.05
"""Change of an offset between steps, over the step, that counts as a jump of a clock."""


@dataclass(frozen=True)
class Offset:
    """A rank's clock minus the first rank's, in ms; spread_ms: interquartile range of what collectives say."""

    ms: float
    spread_ms: float


def matched(collectives: Mapping[int, Sequence[Collective]]) -> list[dict[int, Collective]]:
    """Collectives of a step by rank, those of all ranks together.

    Ranks start collectives of a kind and role in the same order. Only kinds that all ranks ran equally often
    match.
    """
    by_kind: dict[tuple[str, str], dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in collectives.items():
        for one in own:
            by_kind[one.collective, one.role][rank].append(one)
    result = []
    for of_rank in by_kind.values():
        counts = {len(of_rank.get(rank, ())) for rank in collectives}
        if len(counts) == 1:
            result += [
                dict(zip(of_rank, group, strict=True)) for group in zip(*of_rank.values(), strict=True)
            ]
    return result


def kinds(steps: Sequence[StepSpans]) -> dict[int, Counter[tuple[str, str]]]:
    """Counts of each kind of collective that a rank ran, by number of the step."""
    return {step.number: _kinds(step.collectives) for step in steps}


def _kinds(collectives: Sequence[Collective]) -> Counter[tuple[str, str]]:
    return Counter((c.collective, c.role) for c in collectives)


def unmatched(collectives: Mapping[int, Sequence[Collective]]) -> list[str]:
    """Words on the kinds of collectives that ranks ran unequally often in a step."""
    counts = {rank: _kinds(own) for rank, own in collectives.items()}
    kinds = sorted({kind for of_rank in counts.values() for kind in of_rank})
    return [
        f"{collective} of {role} ({', '.join(f'rank {r}: {c[collective, role]}' for r, c in counts.items())})"
        for collective, role in kinds
        if len({c[collective, role] for c in counts.values()}) > 1
    ]


def offsets(groups: Sequence[Mapping[int, Collective]], ranks: Sequence[int]) -> dict[int, Offset]:
    """Offsets of the ranks' clocks in a step. Without collectives that match, none but the first rank's."""
    first, *others = ranks
    found = {first: Offset(0.0, 0.0)}
    for rank in others:
        apart = [group[rank].end_ms - group[first].end_ms for group in groups]
        if apart:
            low, middle, high = np.quantile(apart, (0.25, 0.5, 0.75))
            # Clocks that agree within what collectives tell count as equal: one host has one clock.
            found[rank] = Offset(float(middle) if abs(middle) > 2 * (high - low) else 0.0, float(high - low))
    return found


def mark_begins(groups: Sequence[Mapping[int, Collective]], clock: Mapping[int, Offset]) -> None:
    """Set when the last rank of each collective began, by the clock of each rank."""
    for group in groups:
        begins = [one.begin_ms - clock[rank].ms for rank, one in group.items() if rank in clock]
        for rank, one in group.items():
            if rank in clock and len(begins) > 1:
                one.began_ms = max(begins) + clock[rank].ms
