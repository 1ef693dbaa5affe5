"""Losses of a TorchRec checkpoint where a table changes its kind of sharding.

Found by saving with torch.distributed.checkpoint and loading under another plan, on two gloo ranks
(TorchRec 1.8; tests/plans/test_checkpoints.py does it again):

- Weights load from any kind into any other. `load_state_dict` alone loads them from replicas only, or into
  the same shards.
- The optimizer of replicas is not the fused one, and each names its state otherwise (TorchRec issue 2394). A
  fused table that was a replica finds no state, and loading fails. A replica that was fused starts afresh.
- State with one number a row is kept for each part of columns. With another number of parts its size
  differs, and loading fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcore.core.catalog import DENSE_OPTIMIZERS, OPTIMIZERS
from shardcore.core.types import Placement, Problem
from shardcore.step.kinds import layout_of

NOTHING = "nothing, as the optimizer keeps no state"
ALL_LOADS = "nothing"
FROM_REPLICAS = "its optimizer state, which fails to load, for replicas name theirs otherwise"
TO_REPLICAS = "its optimizer state without a word, for replicas name theirs otherwise"
OTHER_PARTS = "its optimizer state, which fails to load, for it has one number a row of each part of columns"


def lost(old: Sequence[Placement], new: Sequence[Placement], problem: Problem | None) -> str:
    """The loss of a table's checkpoint between its old placements and its new ones. "": nothing changes.

    problem: has the optimizers. None: they are taken to keep state by rows, which loses most.
    """
    replicas = [any(layout_of(p.kind).dense_gradient for p in of) for of in (old, new)]
    parts = [len({p.devices for p in of}) for of in (old, new)]
    if {p.kind for p in old} == {p.kind for p in new} and parts[0] == parts[1]:
        return ""
    fused = OPTIMIZERS[problem.optimizer].states if problem else ("row",)
    dense = DENSE_OPTIMIZERS[problem.replica_optimizer].states if problem else ("row",)
    if not fused and not (any(replicas) and dense):
        return NOTHING
    if any(replicas):
        return FROM_REPLICAS if replicas[0] else TO_REPLICAS
    return OTHER_PARTS if "row" in fused and parts[0] != parts[1] else ALL_LOADS
