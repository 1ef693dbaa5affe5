"""What the training of both policies shares: problems, weights, and gradients of the plans that were made.

Shapes: K plans of a problem, N shards, D devices, R numbers of its cache, L latents, H a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem
from shardcore.core.validation import MOST_COUNT, MOST_SEED, require_within
from shardcore.cost.model import CostModel
from shardcore.search.learned.features import features
from shardcore.search.learned.nets import Seen
from shardcore.search.learned.policy import NETS
from shardcore.search.learned.rollout import Rollout, Rollouts
from shardcore.search.state.feasible import feasible_shards
from shardcore.search.state.shard_cost_cache import ShardCostCache


@dataclass(frozen=True)
class PolicyConfig:
    """How to train a policy.

    rounds: at most. A round is some priced plans, cost updates and policy updates.
    patience: rounds without a better validation cost, before training stops.
    priced: plans that a round prices for the cost network.
    cost_updates: of the cost network in a round.
    policy_updates: in a round.
    problems_at_once: of a policy update.
    plans_each: of each of them.
    learning_rate: of the first round; it falls to 0 with the last.
    entropy: weight of the policy's entropy in its loss.
    seed: of weights, problems and plans.
    """

    rounds: int = 30
    patience: int = 10
    priced: int = 20
    cost_updates: int = 100
    policy_updates: int = 20
    problems_at_once: int = 2
    plans_each: int = 16
    learning_rate: float = 2e-3
    entropy: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        count = (1, MOST_COUNT)
        require_within(
            self,
            "policy config",
            rounds=count,
            patience=count,
            priced=count,
            cost_updates=count,
            policy_updates=count,
            problems_at_once=count,
            plans_each=(2, MOST_COUNT),
            entropy=(0, 1),
            seed=(0, MOST_SEED),
        )
        if not 0 < self.learning_rate < 1:
            raise ShardCoreError(
                f"policy config has learning_rate {self.learning_rate}; it needs to be within 0 and 1"
            )


class Prepared:
    """A problem, ready for rollouts.

    keys: [1, N, 2] its shards, each a strip and units.
    x: [M, F] features of all shards of the cache; a bundle has several rows.
    bundle: [M] number of each row's shard in the cache.
    """

    def __init__(self, problem: Problem, model: CostModel) -> None:
        shards = feasible_shards(problem)
        self.cache = ShardCostCache(problem, model.for_problem(problem), shards)
        keys = sorted(self.cache.keys(shards))
        self.cache.add(keys)
        self.keys = np.array([keys])
        self.x = features([s for bundle in self.cache.made for s in bundle], problem.global_batch)
        self.bundle = np.repeat(np.arange(len(self.cache.made)), [len(b) for b in self.cache.made])


class Learner:
    """What both policies share: weights, and gradients of the plans that were made."""

    def __init__(
        self,
        name: str,
        all_prepared: Sequence[Prepared],
        config: PolicyConfig,
        more: dict[str, tuple[int, ...]],
    ) -> None:
        self.net, self.all_prepared, self.config = NETS[name], all_prepared, config
        self.rng = np.random.default_rng([5, config.seed])
        self.w = _initial({**self.net.shapes, **more}, all_prepared, config.seed)
        # The same memory: what an update changes, the next rollout uses.
        self.arrays = {k: v.detach().numpy() for k, v in self.w.items()}
        self.optimizers: list[torch.optim.Optimizer] = []

    def optimizer(self, names: Sequence[str]) -> torch.optim.Optimizer:
        made = torch.optim.Adam(
            [self.w[name].requires_grad_() for name in names], lr=self.config.learning_rate
        )
        self.optimizers.append(made)
        return made

    def roll(self, prepared: Prepared, plans: int, priced: bool) -> Rollout:
        rollouts = Rollouts(self.net, self.arrays, plans, self.rng, greedy_first=False, priced=priced)
        return rollouts.run(prepared.cache, prepared.keys)

    def drawn(self, n: int) -> list[Prepared]:
        return [self.all_prepared[i] for i in self.rng.integers(len(self.all_prepared), size=n)]

    def latents(self, prepared: Prepared) -> torch.Tensor:
        """[R, L], with gradients."""
        rows = self.net.latents(self.w, torch.from_numpy(prepared.x), torch)
        zeros = torch.zeros(len(prepared.cache.made), rows.shape[1])
        found = zeros.index_add(0, torch.from_numpy(prepared.bundle), rows)
        return found * (torch.arange(len(found)) > 0)[:, None]  # number 0 is nothing

    def logits(self, prepared: Prepared, rolled: Rollout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[K, N, D] scores of the devices as the rollout saw them, legal ones only; and contexts [N, H]."""
        of_number, speed = self.latents(prepared), torch.from_numpy(prepared.cache.speed.astype(np.float32))
        held = torch.from_numpy(held_before(prepared, rolled))
        keys = prepared.keys[0][rolled.order[0]]
        sequence = of_number[prepared.cache.numbers(keys[:, 0], keys[:, 1])]
        context = self.net.context(self.w, sequence, torch)
        costs = None if rolled.costs is None else torch.from_numpy(rolled.costs[0])
        seen = Seen(held @ of_number / speed[:, None], torch.from_numpy(rolled.used[0]), costs, context)
        scores = self.net.scores(self.w, seen, torch)
        return scores.masked_fill(~torch.from_numpy(rolled.legal[0]), -1e9), context

    def policy_loss(self, logits: torch.Tensor, rolled: Rollout, advantage: torch.Tensor) -> torch.Tensor:
        """Of REINFORCE. advantage: [K, N] or [K, 1]."""
        logs = logits.log_softmax(-1)
        taken = logs.gather(-1, torch.from_numpy(rolled.devices[0])[..., None])[..., 0]
        entropy = -(logs.exp() * logs).sum(-1)
        # Where there is no choice, there is nothing to learn.
        choice = torch.from_numpy(rolled.legal[0].sum(-1) > 1)
        gain = (taken * advantage + self.config.entropy * entropy) * choice
        return -gain.sum() / choice.sum().clamp(min=1)


def held_before(prepared: Prepared, rolled: Rollout) -> np.ndarray:
    """[K, N, D, R] float32: 1 for what the devices held before each shard of the rollout's first state."""
    cache, devices = prepared.cache, rolled.devices[0]
    (n_plans, n), n_devices = devices.shape, len(cache.speed)
    keys = prepared.keys[0][rolled.order[0]]
    held = np.zeros((n_plans, n, n_devices, len(cache.made)), np.float32)
    units = np.zeros((n_plans, n_devices, len(cache)), np.int64)
    each = np.arange(n_plans)
    for i in range(n - 1):
        strip, more = keys[i]
        before = units[each, devices[:, i], strip]
        units[each, devices[:, i], strip] += more
        held[each, i + 1, devices[:, i], cache.numbers(strip, before)] -= 1
        held[each, i + 1, devices[:, i], cache.numbers(strip, before + more)] += 1
    return np.cumsum(held, axis=1, out=held)


def _initial(
    shapes: dict[str, tuple[int, ...]], all_prepared: Sequence[Prepared], seed: int
) -> dict[str, torch.Tensor]:
    """Weights at the start. Features of the problems' tables set their scaling."""
    x = np.concatenate([prepared.x[prepared.bundle > 0] for prepared in all_prepared])
    scaling = {
        "low": x.min(0),
        "high": x.max(0),
        "mean": x.mean(0),
        "sd": np.where(x.std(0) > 1e-6, x.std(0), 1.0),
    }
    generator = torch.Generator().manual_seed(seed)
    w = {}
    for name, shape in shapes.items():
        if name in scaling:
            w[name] = torch.from_numpy(scaling[name].astype(np.float32))
        elif name == "scale_ms":
            w[name] = torch.tensor([_typical_ms(all_prepared)], dtype=torch.float32)
        else:
            # Matrices as torch.nn.Linear makes them; biases by their own length, not by their inputs.
            reach = (shape[0] if len(shape) == 2 and name != "heads.1.weight" else shape[-1]) ** -0.5
            w[name] = (torch.rand(shape, generator=generator) * 2 - 1) * reach
    return w


def _typical_ms(all_prepared: Sequence[Prepared]) -> float:
    """Compute of a device in an even plan, the mean of the problems."""
    found = [
        one.cache.single_ms[one.cache.numbers(*one.keys[0].T)].sum() / one.cache.speed.sum()
        for one in all_prepared
    ]
    return max(float(np.mean(found)), 1e-6)


def mean_entropy(logits: torch.Tensor) -> float:
    return torch.distributions.Categorical(logits=logits.detach()).entropy().mean().item()


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
