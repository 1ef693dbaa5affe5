"""Search: from a Problem and a CostModel to a Plan.

    plan = SHARDERS["neuroshard"](problem, model, seed=0, budget=Budget(evals=10_000))

Every sharder has this form. It raises Infeasible, naming what does not fit and by how much, and SettingMismatch where the
model is for another setting. With the same seed, and a budget in evals or none, it returns the same plan. Its plans are
consolidated (see `pieces`) and carry their algorithm, seed and predicted cost as provenance.

Every sharder begins with `feasible_pieces`: also the table-wise ones cut a table that no device can hold. Some are other people's
planners (`peers`); TorchRec's is listed where it is installed (see `peers.torchrec`).
"""

from __future__ import annotations

from typing import Protocol

from shardcore.cost.model import CostModel
from shardcore.search import greedy, local, neuroshard
from shardcore.search.budget import Budget
from shardcore.search.peers import embark, milp, torchrec
from shardcore.types import Plan, Problem

__all__ = ["BASELINES", "DEFAULT_SHARDER", "SHARDERS", "Budget", "Sharder"]


class Sharder(Protocol):
    def __call__(self, problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan: ...


DEFAULT_SHARDER = "local_columns"
BASELINES = ("random", *greedy.ORDERS)
"""What people use without a search: published plans are shown against these."""

SHARDERS: dict[str, Sharder] = {
    "random": greedy.random,
    **greedy.ORDERS,
    "neuroshard": neuroshard.neuroshard,
    "embark": embark.embark,
    "milp": milp.milp,
    "local": local.local,
    "local_columns": local.local_columns,
}
if torchrec.installed():
    SHARDERS["torchrec"] = torchrec.torchrec
