"""Memory timeline of a training step: the buffers of a device that are alive in each phase.

Source: live tensors of TorchRec's CPU processes (tests/torchrec/peaks.py), and its
comm_ops.py. Gloo gathers in a buffer
that its thread frees when it is done. That buffer counts until it is waited for.

A run is a kind's op and exchange (`kinds.layout_for_table`). TorchRec takes runs in the order of the first table of
each, in four stages:

1. Each run looks up, and sends outputs.
2. Each run waits for outputs.
3. Autograd goes back from the last run to the first. Each sends gradients.
4. In the same order, each run waits for gradients, and updates its rows.

Rows of collectives list the buffers of a run in a stage (step/collectives.py). Here runs are put together: within a
stage, some runs are done and others have not begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from shardcore.core.job import Pipeline

Alive = Mapping[str, Mapping[str, int]]
"""part (memory.PARTS) -> buffer -> how many of it are alive.

Buffers of a run on a device:

- arrived: ids of a global batch that it receives.
- offsets: of a batch that it looks up. One batch counts in all phases: backward needs them until the next lookup.
- a collective and its group: outputs that enter it. There, back: as they travel, and their gradients.
- cast, clamped: copies by TorchRec's codec, in the number type that travels and before. 0 for FP32.
  decoded, recast: the same of gradients: FP32, and the type that travels.
- sorting: scratch in which backward sorts.
- dense: a replica's gradient.

Buffers of a run for the local batch. A plan decides them, and they are the same on all devices:

- sent: ids in the order of the plan, and in buckets if the rows of a table are divided (of sequences, also the place of
  each id). A table cut by columns has several copies. TorchRec does not copy a batch whose features are in that order
  already. It counts nevertheless, for its order is not known.
- local: outputs. There, back, cast, clamped, decoded, recast: as above.
- copied: outputs as they travel back, unless they are the whole of a tensor.
- together: outputs, if those of several runs are joined to one tensor.
- joined: outputs, if columns of tables, or outputs of several runs, have to be joined.
- cut: outputs, if columns of tables have to be joined.
- gradient: gradient of all outputs of its collection, if this run is the last that needs it. Uncut: the same, if
  none of its columns are cut. Else they are copied before.

Others, which count for the first run:

- batch: a local batch: its ids, and what else it has.
- dense part, activations: tensors of the dense part that are always there, and in its passes.
- expanded: outputs of bags copied to samples, where features have batches of their own.
- scratch: tensors by which the dense optimizer updates the largest replica, or the dense part.
"""


@dataclass(frozen=True, eq=False)
class StageBuffers:
    """Buffers of a run in one stage.

    before: from the start of the stage until the run begins.
    phases: in each of the run's phases.
    freed_late: only in the first phase of the next run, in addition to `after`.
    after: from the run's last phase until the end of the stage.
    """

    before: Alive
    phases: Mapping[str, Alive]
    freed_late: Alive
    after: Alive


Stages = tuple[StageBuffers, ...]
"""Buffers of a run in the four stages."""

_MOMENTS = (1, 2, 4, 4)
"""Moment of each stage, by its place in Pipeline.ids_by_moment."""


def stage_buffers(
    before: Alive | None = None, after: Alive | None = None, freed_late: Alive | None = None, **phases: Alive
) -> StageBuffers:
    """Make the buffers of a stage, with the phases (keywords) that hold each. An underscore in a keyword stands for a
    space.
    """
    named = {name.replace("_", " "): alive for name, alive in phases.items()}
    return StageBuffers(before or {}, named, freed_late or {}, after or {})


_ALWAYS: Alive = {
    "received outputs": {"expanded": 1},
    "dense gradients": {"dense": 1},
    "dense part": {"dense part": 1},
}
"""Buffers of a run in all phases: outputs copied from bags to samples, DDP's buckets, and the dense part's tensors."""


@cache
def stages_under_pipeline(stages: Stages, pipeline: Pipeline) -> Stages:
    """Memory buffers of an op in the four stages of a step, under the job's training pipeline.

    One that looks up ahead has outputs of a batch, and their gradients, until the step ends. The next batch's
    outputs are on their way from before backward.
    """
    if not pipeline.looks_up_ahead:
        return stages
    lookups, outputs_arrive, sent_back, update = stages
    received: Alive = {"received outputs": {"local": 1}}
    gradient: Alive = {"output gradients": {"gradient": 1}}
    kept = _merge_buffers(lookups.after, received, gradient)
    # The gradient of outputs stays, so stages need not list it.
    sent_back = _map_buffers(sent_back, lambda alive: _drop_buffers(alive, ("gradient", "uncut")))
    update = _map_buffers(update, lambda alive: _drop_buffers(alive, ("gradient",)))
    return (
        # Activations are measured without this gradient.
        _map_buffers(lookups, lambda alive: _merge_buffers(alive, received, gradient)),
        outputs_arrive,
        *(_map_buffers(stage, lambda alive: _merge_buffers(alive, kept)) for stage in (sent_back, update)),
    )


def _map_buffers(stage: StageBuffers, changed: Callable[[Alive], Alive]) -> StageBuffers:
    """A stage with a function applied to all its sets of buffers."""
    phases = {name: changed(alive) for name, alive in stage.phases.items()}
    return replace(stage, before=changed(stage.before), phases=phases, after=changed(stage.after))


def _merge_buffers(*several: Alive) -> Alive:
    """Sets of buffers merged into one, with their numbers added."""
    parts: dict[str, Counter[str]] = {}
    for part, buffers in (item for alive in several for item in alive.items()):
        parts.setdefault(part, Counter()).update(buffers)
    return parts


def _drop_buffers(alive: Alive, names: Sequence[str]) -> Alive:
    """A set of buffers without those of some names."""
    return {part: {b: n for b, n in buffers.items() if b not in names} for part, buffers in alive.items()}


@dataclass(frozen=True, eq=False)
class Phase:
    """A phase of a step. alive: (part, number of the run, buffer) -> how many are alive."""

    name: str
    alive: Mapping[tuple[str, int, str], int]


def _make_phase(name: str, *buffers: Iterable[tuple[int, Alive]]) -> Phase:
    """Make a memory phase of a step from buffers of ops, given by the op's number."""
    # A Counter, as one buffer may be listed for a run more than once in a phase.
    alive: Counter[tuple[str, int, str]] = Counter()
    for run, of_run in (pair for pairs in buffers for pair in pairs):
        for part, counts in of_run.items():
            for buffer, n in counts.items():
                alive[part, run, buffer] += n
    return Phase(name, alive)


@lru_cache(maxsize=256)
def step_phases(stages: tuple[Stages, ...], pipeline: Pipeline, replicas: bool) -> tuple[Phase, ...]:
    """The memory phases of a training step, in the order in which TorchRec runs them.

    stages: of each run, under the pipeline. replicas: whether there are any.
    """
    # Runs are known by their place in TorchRec's order.
    runs = range(len(stages))

    # A buffer of each run, for phases that concern all of them.
    def one_buffer_per_run(part: str, buffer: str) -> list[tuple[int, Alive]]:
        return [(run, {part: {buffer: 1}}) for run in runs]

    def buffers_at_moment(moment: int) -> list[tuple[int, Alive]]:
        # Buffers that exist in every phase of a moment, for each run.
        ids = pipeline.ids_by_moment[moment]
        sent = ids.sent + replicas * ids.replicas
        in_ids = {"batch": ids.batches, "sent": sent, "arrived": ids.arrived, "offsets": 1}
        buffers = {**_ALWAYS, "ids": in_ids}
        # Between forward and backward, activations are there.
        if moment == 3 or (pipeline.looks_up_ahead and moment < 2):
            buffers["activations"] = {"activations": 1}
        return [(run, buffers) for run in runs]

    # The last batch's ids live until the next lookup. The new ones are permuted on arrival.
    waiting = [(run, of_run[0].before) for run, of_run in enumerate(stages)]
    phases, held = [_make_phase("ids arrive", buffers_at_moment(0), waiting)], []
    for stage in range(4):
        now = buffers_at_moment(_MOMENTS[stage])
        buffers = [of_run[stage] for of_run in stages]
        # Every run holds what a stage starts with, until it runs.
        held = [of_run.before for of_run in buffers]
        freed_late: list[tuple[int, Alive]] = []
        # Between forward and backward: TorchRec returns outputs, and the dense part runs.
        if stage == 2:  # outputs in one tensor, and its gradient
            received = one_buffer_per_run("received outputs", "local")
            joined = one_buffer_per_run("received outputs", "together")
            phases += [
                _make_phase("outputs joined", buffers_at_moment(2), received, joined),
                # Outputs that are kept are among what waits for backward.
                _make_phase(
                    "dense part",
                    buffers_at_moment(3),
                    [] if pipeline.looks_up_ahead else received,
                    enumerate(held),
                ),
            ]
        # Autograd visits runs in reverse.
        for run in reversed(runs) if stage > 1 else runs:
            # While a run is in its own phases, these list its buffers in full.
            held[run] = {}
            for name, alive in buffers[run].phases.items():
                phases.append(_make_phase(name, now, enumerate(held), freed_late, [(run, alive)]))
                # Only the first phase after a run still has what it frees late.
                freed_late = []
            # From here on the run holds what it keeps until the end of the stage.
            held[run], freed_late = buffers[run].after, [(run, buffers[run].freed_late)]
    # A dense optimizer updates one table after another. Gradients are in DDP's buckets only.
    scratch = [(0, {"dense gradients": {"scratch": 1}})]
    phases.append(_make_phase("dense update", buffers_at_moment(5), enumerate(held), scratch))
    return tuple(phases)


@lru_cache(maxsize=256)
def buffer_multiplicities(
    stages: tuple[Stages, ...], pipeline: Pipeline, replicas: bool
) -> tuple[tuple[tuple[int, str], ...], np.ndarray]:
    """The buffers (op number, name) of a step, and [buffers, phases] how many of each are alive in each phase."""
    phases = step_phases(stages, pipeline, replicas)
    # Insertion order, so that the same stages always give the same rows.
    buffers = tuple(dict.fromkeys((run, buffer) for phase in phases for _, run, buffer in phase.alive))
    rows, times = {buffer: row for row, buffer in enumerate(buffers)}, np.zeros((len(buffers), len(phases)))
    for column, phase in enumerate(phases):
        for (_, run, buffer), n in phase.alive.items():
            # Different parts of one buffer add up: a peak counts bytes, not their reason.
            times[rows[run, buffer], column] += n
    return buffers, times


@lru_cache(maxsize=256)
def peak_multiplicities(
    stages: tuple[Stages, ...], pipeline: Pipeline, replicas: bool
) -> tuple[tuple[tuple[int, str], ...], np.ndarray]:
    """The buffers of a step and how many are alive, in the phases that can be a device's peak."""
    buffers, times = buffer_multiplicities(stages, pipeline, replicas)
    # Equal columns are one phase for the purpose of a maximum.
    times = np.unique(times, axis=1)
    # less[a, b]: no buffer is alive more often in a than in b. Then a is never the peak.
    less = (times[:, :, None] <= times[:, None, :]).all(0)
    # A phase below no phase but itself stays.
    return buffers, times[:, less.sum(1) == 1]
