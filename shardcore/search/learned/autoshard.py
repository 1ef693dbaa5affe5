"""AutoShard's training: an actor-critic, rewarded for even compute.

Shapes: N shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from shardcore.search.learned import nets
from shardcore.search.learned.learner import Learner, PolicyConfig, Prepared, mean_entropy, step
from shardcore.search.learned.nets import VALUE_SHAPES, AutoShard
from shardcore.search.learned.priced_plans import BATCH, KEPT, Batch, PricedPlan


class AutoShardLearner(Learner):
    """An actor-critic, rewarded for even compute: the least device's over the most. -1 for no plan."""

    net: AutoShard

    def __init__(self, name: str, all_prepared: Sequence[Prepared], config: PolicyConfig) -> None:
        super().__init__(name, all_prepared, config, VALUE_SHAPES)
        self.all = self.optimizer([k for k in self.w if k not in ("low", "high", "mean", "sd", "scale_ms")])
        self.plans: deque[PricedPlan] = deque(maxlen=KEPT)

    def round(self) -> dict[str, float]:
        found = np.array([self.policy_update() for _ in range(self.config.policy_updates)]).mean(0)
        loss = float(np.mean([self.cost_update() for _ in range(self.config.cost_updates)]))
        return {"cost_loss": loss, "balance": float(found[0]), "entropy": float(found[1])}

    def cost_update(self) -> float:
        batch = Batch.of([self.plans[i] for i in self.rng.integers(len(self.plans), size=BATCH)])
        sums = batch.sums(self.net.latents(self.w, batch.x, torch))
        wrong = self.net.cost(self.w, sums) - (batch.parts[:, 0] + batch.parts[:, 2])
        loss = (wrong**2).mean()
        step(self.all, loss)
        return loss.item()

    def policy_update(self) -> tuple[float, float]:
        losses, found = [], []
        for prepared in self.drawn(self.config.problems_at_once):
            rolled = self.roll(prepared, self.config.plans_each, True)
            self.plans.append(PricedPlan.of(prepared, rolled, self.arrays["scale_ms"]))
            compute = rolled.parts_ms[0, ..., 0] + rolled.parts_ms[0, ..., 2]
            balance = compute.min(-1) / np.maximum(compute.max(-1), 1e-9)
            reward = torch.from_numpy(np.where(np.isfinite(rolled.total_ms[0]), balance, -1.0)).float()
            logits, context = self.logits(prepared, rolled)
            value = nets.value(self.w, context)  # [N]
            wrong = reward[:, None] - value
            losses.append(self.policy_loss(logits, rolled, wrong.detach()) + 0.5 * (wrong**2).mean())
            found.append((float(balance.mean()), mean_entropy(logits)))
        step(self.all, sum(losses) / len(losses))
        return tuple(np.mean(found, 0))
