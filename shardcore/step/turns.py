"""Turns of a run in a training step, and what it has in memory meanwhile.

A run is a kind's op and exchange (`kinds.run_of`). TorchRec runs them in the order of the first table of
each, in four stages. Each run has a turn in each stage:

1. It looks up, and sends outputs.
2. It waits for outputs.
3. Autograd goes back from the last run to the first: each sends gradients.
4. Again so: each waits for gradients, and updates its rows.

Rows of collectives say what is in memory then (step/collectives.py). memory_timeline.py puts runs together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Alive = Mapping[str, Mapping[str, int]]
"""part -> amount -> how many of it are alive.

Amounts of a run on a device:

- arrived: the ids of a global batch that it gets.
- a collective and its group: the outputs that enter it. There, back: as they travel, and their gradients.
- cast, clamped: what TorchRec's codec makes of them, in the number type that travels and before. 0 for FP32.
  decoded, recast: the same of what comes back: FP32, and in the type that travels.
- sorting: what backward sorts.
- dense: a replica's gradient.

Amounts of a run's part of a local batch. A plan decides them, and they are the same on all devices:

- permuted: its ids in the order of the plan. Those of a table cut by columns are in it several times. A batch
  whose features are in that order already is not copied; it counts as if, for its order is not known.
- bucketized: its ids of tables whose rows are divided. Of sequences, also where each id was.
- local: its outputs. There, back, cast, clamped, decoded, recast: as above.
- copied: as they travel back, if they are not the whole of a tensor.
- together: as local, if outputs of several runs are joined to one tensor.
- joined: as local, if columns of tables, or outputs of several runs, have to be joined.
- cut: as local, if columns of tables have to be.
- gradient: of all outputs of its collection, if this run is the last that needs it. Uncut: the same, if none
  of its columns are cut. Else they are copied before.

Others: batch, the ids of a local batch, and stepped, what the dense optimizer makes to update the largest
replica. They count for the first run.
"""


@dataclass(frozen=True, eq=False)
class Turn:
    """A run's turn in a stage.

    before: what of the run is alive until its turn, from the start of the stage.
    phases: what is in each phase of its turn.
    lingers: what is, besides what follows, in the first phase of the next run's turn.
    after: what is until the end of the stage.
    """

    before: Alive
    phases: Mapping[str, Alive]
    lingers: Alive
    after: Alive


Stages = tuple[Turn, ...]
"""A run's turns in the four stages."""


def turn_of(
    before: Alive | None = None, after: Alive | None = None, lingers: Alive | None = None, **phases: Alive
) -> Turn:
    """A turn. Names of phases have underscores for spaces."""
    return Turn(
        before or {},
        {name.replace("_", " "): alive for name, alive in phases.items()},
        lingers or {},
        after or {},
    )
