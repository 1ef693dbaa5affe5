"""DreamShard's training: REINFORCE, rewarded by its cost network or by the CostModel.

Shapes: K plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from shardcore.search.learned.learner import Learner, PolicyConfig, Prepared, mean_entropy, step
from shardcore.search.learned.nets import DreamShard
from shardcore.search.learned.priced_plans import BATCH, KEPT, Batch, PricedPlan


class DreamShardLearner(Learner):
    """REINFORCE, rewarded by the cost network or by the CostModel."""

    net: DreamShard

    def __init__(self, name: str, all_prepared: Sequence[Prepared], config: PolicyConfig) -> None:
        super().__init__(name, all_prepared, config, {})
        of_costs = [k for k in self.w if k.startswith(("cost_table", "heads", "overall"))]
        self.costs = None if self.net.asks_model else self.optimizer(of_costs)
        self.policy = self.optimizer([k for k in self.w if k.startswith(("table", "costs", "choice"))])
        self.plans: deque[PricedPlan] = deque(maxlen=KEPT)

    def round(self) -> dict[str, float]:
        values = {}
        if self.costs:
            priced = [
                PricedPlan.of(prepared, self.roll(prepared, 1, True), self.arrays["scale_ms"])
                for prepared in self.drawn(self.config.priced)
            ]
            self.plans += [plan for plan in priced if np.isfinite(plan.total)]
            losses = [self.cost_update() for _ in range(self.config.cost_updates) if self.plans]
            values["cost_loss"] = float(np.mean(losses)) if losses else 0.0
        values["entropy"] = float(np.mean([self.policy_update() for _ in range(self.config.policy_updates)]))
        return values

    def cost_update(self) -> float:
        batch = Batch.of([self.plans[i] for i in self.rng.integers(len(self.plans), size=BATCH)])
        sums = batch.sums(self.net.latents(self.w, batch.x, torch))
        parts = self.net.parts(self.w, sums) - batch.parts
        overall = self.net.overall(self.w, batch.by_plan(sums), torch) - batch.total
        loss = (parts**2).mean(0).sum() + (overall**2).mean()
        step(self.costs, loss)
        return loss.item()

    def policy_update(self) -> float:
        losses, entropies = [], []
        for prepared in self.drawn(self.config.problems_at_once):
            rolled = self.roll(prepared, self.config.plans_each, self.net.asks_model)
            ms = rolled.total_ms[0]
            if not self.net.asks_model:
                ms = np.where(np.isfinite(ms), self.net.overall(self.arrays, rolled.latents[0]), np.inf)
            logits, _ = self.logits(prepared, rolled)
            losses.append(self.policy_loss(logits, rolled, _standardised(-ms)[:, None]))
            entropies.append(mean_entropy(logits))
        step(self.policy, sum(losses) / len(losses))
        return float(np.mean(entropies))


def _standardised(reward: np.ndarray) -> torch.Tensor:
    """[K] rewards with mean 0 and deviation 1. A plan that does not fit counts as the worst that does."""
    fits = np.isfinite(reward)
    if not fits.any():
        return torch.zeros(len(reward))
    reward = np.where(fits, reward, reward[fits].min() - reward[fits].std())
    return torch.from_numpy(((reward - reward.mean()) / (reward.std() + 1e-8)).astype(np.float32))
