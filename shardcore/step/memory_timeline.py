"""What of a device's memory is alive in each phase of a training step, as TorchRec runs it.

Read from the live tensors of TorchRec's CPU processes (tests/torchrec/peaks.py), and from its comm_ops.py. Gloo
gathers in a buffer of its own, which its thread frees when it is done. It counts until it is waited for.

Runs have turns in four stages (step/turns.py). So in a turn, some runs had theirs and others did not. What
they hold then is in the rows of collectives (step/collectives.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardcore.step.turns import Alive, Stages

BATCHES = 3
"""Local batches that TrainPipelineSparseDist holds: in compute, in input distribution, being copied."""

IDS_ALIVE = 2
"""Batches whose ids are in the order of the plan, in buckets and on their devices at once."""

_IDLE: Alive = {
    "ids": {"batch": BATCHES, **dict.fromkeys(("permuted", "bucketized", "arrived"), IDS_ALIVE)},
    "dense gradients": {"dense": 1},
}
"""Of a run whenever it is nothing else: ids, and DDP's buckets."""


@dataclass(frozen=True, eq=False)
class Phase:
    """A phase of a step. alive: (part, run, amount) -> how many are alive. Runs by their number."""

    name: str
    alive: Mapping[tuple[str, int, str], int]


def _sum(each: Iterable[tuple[int, Alive]]) -> dict[tuple[str, int, str], int]:
    found: Counter[tuple[str, int, str]] = Counter()
    for run, alive in each:
        for part, amounts in alive.items():
            for amount, n in amounts.items():
                found[part, run, amount] += n
    return found


@lru_cache(maxsize=256)
def phases_of(stages: tuple[Stages, ...]) -> tuple[Phase, ...]:
    """The phases of a step, in the order of TorchRec. stages: of each run."""
    runs = range(len(stages))
    idle = [(run, _IDLE) for run in runs]
    # The last batch's ids live until the next lookup. The new ones are permuted on arrival.
    found = [Phase("ids arrive", _sum([*idle, *((run, {"ids": {"arrived": 1}}) for run in runs)]))]
    for stage in range(4):
        turns = [of_run[stage] for of_run in stages]
        held, lingering = [turn.before for turn in turns], []
        if stage == 2:  # outputs in one tensor, and its gradient
            received = [*idle, *((run, {"received outputs": {"local": 1}}) for run in runs)]
            found += [
                Phase(
                    "outputs joined",
                    _sum([*received, *((run, {"received outputs": {"together": 1}}) for run in runs)]),
                ),
                Phase("dense part", _sum([*received, *enumerate(held)])),
            ]
        for run in reversed(runs) if stage > 1 else runs:
            held[run] = {}
            for name, alive in turns[run].phases.items():
                found.append(Phase(name, _sum([*idle, *enumerate(held), *lingering, (run, alive)])))
                lingering = []
            held[run], lingering = turns[run].after, [(run, turns[run].lingers)]
    # A dense optimizer updates one table after another. Gradients are in DDP's buckets only.
    return (*found, Phase("dense update", _sum([*idle, (0, {"dense gradients": {"stepped": 1}})])))


@lru_cache(maxsize=256)
def times_of(stages: tuple[Stages, ...]) -> tuple[tuple[tuple[int, str], ...], np.ndarray]:
    """(run, amount) that count, and [amounts, phases] how many are alive, all parts together."""
    found = phases_of(stages)
    amounts = tuple(dict.fromkeys((run, amount) for phase in found for _, run, amount in phase.alive))
    rows, times = {amount: row for row, amount in enumerate(amounts)}, np.zeros((len(amounts), len(found)))
    for column, phase in enumerate(found):
        for (_, run, amount), n in phase.alive.items():
            times[rows[run, amount], column] += n
    return amounts, times


@lru_cache(maxsize=256)
def needed_times(stages: tuple[Stages, ...]) -> tuple[tuple[tuple[int, str], ...], np.ndarray]:
    """`times_of` without phases in which nothing is alive that is not in another, too."""
    amounts, times = times_of(stages)
    times = np.unique(times, axis=1)
    less = (times[:, :, None] <= times[:, None, :]).all(0)
    return amounts, times[:, less.sum(1) == 1]
