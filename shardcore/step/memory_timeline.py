"""Memory timeline of a training step: the buffers of a device that are alive in each phase.

Source: live tensors of TorchRec's CPU processes (tests/torchrec/peaks.py), and its
comm_ops.py. Gloo gathers in a buffer
that its thread frees when it is done. That buffer counts until it is waited for.

A run is a kind's op and exchange (`kinds.sharding_kind_for_table`). TorchRec takes runs in the order of the first table
of each, in four stages:

1. Each run looks up, and sends outputs.
2. Each run waits for outputs.
3. Autograd goes back from the last run to the first. Each sends gradients.
4. In the same order, each run waits for gradients, and updates its rows.

Rows of collectives list the buffers of a run in a stage (step/collectives.py). Here runs are put together: within a
stage, some runs are done and others have not begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARTS = (
    "weights",
    "optimizer state",
    "ids",
    "sorting",
    "outputs",
    "payloads",
    "received outputs",
    "output gradients",
    "dense gradients",
    "dense part",
    "activations",
)
"""Parts of memory, in the order in which reports show them.

ids: local batches of the pipeline, and their ids sent and received, with lengths.
dense part, activations: of the job, as measured (torchrec/dense_memory.py). 0 if they are not.
sorting: buffers of FBGEMM's CUDA backward.
payloads: buffers of collectives, and casts for them.
received outputs: a device's samples, of all tables.
dense gradients: of replicas, with DDP's buckets, and scratch of their optimizer.
"""

Alive = Mapping[str, Mapping[str, int]]
"""part (see PARTS) -> buffer -> how many of it are alive.

Buffers of a run on a device:

- first, last: outputs that enter the run's first collective, and its last one. They may be the same. There, back: as
  they travel, and their gradients.
- cast, clamped: copies by TorchRec's codec, in the number type that travels and before. 0 for FP32.
  decoded, recast: the same of gradients: FP32, and the type that travels.
- sorting: scratch in which backward sorts.
- dense: a replica's gradient.

Buffers of a run for the local batch. A plan decides them, and they are the same on all devices:

- local: outputs. There, back, cast, clamped, decoded, recast: as above.
- copied: outputs as they travel back, unless they are the whole of a tensor.
- together: outputs, if those of several runs are joined to one tensor.
- joined: outputs, if columns of tables, or outputs of several runs, have to be joined.
- cut: outputs, if columns of tables have to be joined.
- gradient: gradient of all outputs of its collection, if this run is the last that needs it. Uncut: the same, if
  none of its columns are cut. Else they are copied before.

Ids, local batches and the dense part belong to no run (shard_memory.bytes_by_moment).
"""


@dataclass(frozen=True, eq=False)
class StageBuffers:
    """Memory buffers of a fused op in one stage of a step.

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


def buffers_of_stage(before: str = "", after: str = "", freed_late: str = "", **phases: str) -> StageBuffers:
    """Make the buffers of a stage, with the phases (keywords, an underscore for a space) that hold each.

    Buffers are given as text, by part: "outputs: first; payloads: first cast, first clamped".
    """
    named = {name.replace("_", " "): _parse_buffers(text) for name, text in phases.items()}
    return StageBuffers(_parse_buffers(before), named, _parse_buffers(freed_late), _parse_buffers(after))


def _parse_buffers(text: str) -> Alive:
    """Buffers by part, from text. A buffer that is listed twice is alive twice."""
    parts = (part.split(": ") for part in text.split("; ") if part)
    return {name: Counter(buffers.split(", ")) for name, buffers in parts}


MOMENTS = (0, 1, 2, 2, 3, 4, 5)
"""Place in Pipeline.ids_by_moment of each moment of a step: ids arrive, lookups, outputs arrive, outputs are joined,
the dense part runs, backward, and the dense update."""
JOINED, DENSE_PART, UPDATE = 3, 4, 6
"""Moments in which no run has phases: outputs of all runs are joined, the dense part runs, and its optimizer."""
SLOT_BEFORE, SLOT_AFTER, SLOT_FREED_LATE, SLOT_PHASES = range(4)
"""Slots of a run's stage: the fields of StageBuffers. SLOT_PHASES + i is phase i."""
OF_ENTERED, OF_LOOKUPS = 8, 9
"""Terms of a run's bytes: what its devices enter into collectives, and their lookups.

Those before are of the run's share of a local batch: outputs, and the gradient that it holds, for each case (see
`local_batch_case`).
"""
COLLECTION, SEQUENCE, REPLICAS_RUN = range(3)
"""Columns of a table of runs: number of its collection, pooled or not; 1 if its outputs are not pooled; 1 if its tables
are replicas."""
OUTPUTS, CUT = range(2)
"""Columns of runs' shares of a local batch: bytes of outputs, and above 0 where tables are cut by columns."""


# --- two functions that the engine compiles (engine/memory.py), and Python calls as they are ----------------------


def local_batch_case(i, order, batches, runs):  # noqa: ANN001, ANN201 (compiled for arrays of the engine, too)
    """The case of the i-th run of a plan in a local batch, and bytes of the gradient of outputs that it holds.

    A case is 2 if the run's outputs are joined to one tensor with others, plus 4 if its columns are cut.

    order: numbers of the plan's runs, in their order. batches: see OUTPUTS. runs: see COLLECTION.
    """
    r, of_all, others, is_last = order[i], 0.0, 0, True
    for j in range(len(order)):
        q = order[j]
        if runs[q, COLLECTION] == runs[r, COLLECTION]:
            of_all += batches[q, OUTPUTS]
            if q != r:
                others += 1
                # Backward visits runs in reverse, so the first one is last. Replicas come after all exchanges.
                if runs[q, REPLICAS_RUN] or (j < i and not runs[r, REPLICAS_RUN]):
                    is_last = False
    # Parts of a cut sequence are joined, and pooled outputs of several runs of a collection.
    cut = batches[r, CUT] > 0
    together = cut if runs[r, SEQUENCE] else others > 0
    # A sequence has a gradient of its outputs. That of a collection lives until the last run that reads it.
    gradient = 0.0
    if runs[r, SEQUENCE]:
        gradient = batches[r, OUTPUTS]
    elif is_last:
        gradient = of_all
    return 4 * int(cut) + 2 * int(together), gradient


def fill_phases(order, slots, n_phases, moments, phases):  # noqa: ANN001, ANN201 (as above)
    """Fill `phases` with the bytes of each memory phase of a step, in the order in which TorchRec runs them.

    Returns their number. Bytes are numbers, or arrays of one shape: linear terms of bytes.

    order: numbers of the plan's runs, in their order.
    slots: [N, 4, slots] bytes of each run in each slot of a stage. n_phases: [N, 4] phases of each run.
    moments: [7] bytes that are there whatever runs hold, see MOMENTS.
    """
    n, p = len(order), 0
    # Two stages forward (look up, wait for outputs), two backward (send gradients, wait for them).
    for t in range(4):
        # At first, all runs have the buffers that precede their phases.
        held = 0.0 * moments[0]
        for i in range(n):
            held = held + slots[order[i], t, SLOT_BEFORE]
        # Ids of the last batch live until the next lookup, and the new ones are permuted on arrival.
        if t == 0:
            phases[p] = moments[0] + held
            p += 1
        # Between forward and backward: TorchRec returns outputs, and the dense part runs.
        if t == 2:
            phases[p] = moments[JOINED]
            phases[p + 1] = moments[DENSE_PART] + held
            p += 2
        always, freed_late = moments[t + 1 if t < 2 else 5], 0.0 * held
        for i in range(n):
            # Autograd goes back from the last run to the first.
            r = order[i] if t < 2 else order[n - 1 - i]
            # When a run begins, its phases take the place of the buffers that waited for it.
            held = held - slots[r, t, SLOT_BEFORE]
            for k in range(SLOT_PHASES, SLOT_PHASES + n_phases[r, t]):
                # Only the first phase meets what the run before frees late.
                phases[p] = always + held + freed_late + slots[r, t, k]
                freed_late = 0.0 * held
                p += 1
            # These stay until the stage ends, while the runs that follow have their phases.
            held = held + slots[r, t, SLOT_AFTER]
            freed_late = slots[r, t, SLOT_FREED_LATE]
    # A dense optimizer updates one table after another. Gradients are in DDP's buckets only.
    phases[p] = moments[UPDATE] + held
    return p + 1


def phase_names(stages: Sequence[Stages]) -> tuple[str, ...]:
    """Names of the memory phases of a step, in the order of `fill_phases`. stages: of its runs, in their order."""
    forward = [name for t in (0, 1) for of_run in stages for name in of_run[t].phases]
    backward = [name for t in (2, 3) for of_run in reversed(stages) for name in of_run[t].phases]
    return "ids arrive", *forward, "outputs joined", "dense part", *backward, "dense update"
