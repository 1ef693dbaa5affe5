"""Search: from a Problem and a CostModel to a Plan.

    plan = SHARDERS["neuroshard"](problem, model, seed=0, budget=Budget(evals=10_000))

Every sharder has this form.
It raises Infeasible, naming what does not fit and by how much.
It raises SettingMismatch if the model is for another setting.
The same seed, with a budget in evals or none, gives the same plan.
Learned sharders (DreamShard, AutoShard) take a policy, too (learned/):

    plan = sharder("dreamshard", read_policy(folder))(problem, model)

Plans are consolidated (state/shards.py). Provenance records their algorithm, seed and predicted cost.

Every sharder begins with `feasible_shards`. So table-wise sharders, too, cut a table that no device can hold.
TorchRec's planner is listed where it is installed (torchrec/baseline.py).
"""

from shardcore.search.budget import Budget
from shardcore.search.sharders import (
    BASELINES,
    DEFAULT_SHARDER,
    LEARNED,
    SHARDERS,
    SPACE_OF,
    Sharder,
    require_known_sharder,
    sharder,
)

__all__ = [
    "BASELINES",
    "DEFAULT_SHARDER",
    "LEARNED",
    "SHARDERS",
    "SPACE_OF",
    "Budget",
    "Sharder",
    "require_known_sharder",
    "sharder",
]
