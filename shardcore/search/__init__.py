"""Search: from a Problem and a CostModel to a Plan.

    plan = SHARDERS["neuroshard"](problem, model, seed=0, budget=Budget(evals=10_000))

Every sharder has this form. It raises Infeasible, naming what does not fit and by how much, and SettingMismatch where the
model is for another setting. With the same seed, and a budget in evals or none, it returns the same plan. Its plans are
consolidated (see `pieces`) and carry their algorithm, seed and predicted cost as provenance.

Every sharder begins with `feasible_pieces`: also the table-wise ones cut a table that no device can hold. TorchRec's planner is
listed where it is installed (see `torchrec`).
"""

from shardcore.search.budget import Budget
from shardcore.search.sharders import BASELINES, DEFAULT_SHARDER, SHARDERS, Sharder, known

__all__ = ["BASELINES", "DEFAULT_SHARDER", "SHARDERS", "Budget", "Sharder", "known"]
