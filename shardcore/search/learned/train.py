"""Train a policy against a CostModel, with no device in the loop.

DreamShard (arXiv 2210.02023) imagines: its cost network learns from some plans that the CostModel prices.
It then rewards many more that nobody prices. dreamshard_direct has the CostModel price them all.
AutoShard (arXiv 2208.06399) is rewarded for even compute; an actor-critic replaces its V-trace.

Differences to the released codes: legal devices are masked in the update, too. Costs and policy have
optimizers of their own. Features are scaled once, not by task. An update takes plans of several problems.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem
from shardcore.cost.model import CostModel
from shardcore.search.greedy import ORDERS
from shardcore.search.learned.autoshard import AutoShardLearner
from shardcore.search.learned.dreamshard import DreamShardLearner
from shardcore.search.learned.learner import PolicyConfig, Prepared
from shardcore.search.learned.nets import AutoShard
from shardcore.search.learned.policy import NETS, Policy
from shardcore.search.learned.rollout import Rollouts

Progress = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, eq=False)
class TrainedPolicy:
    """A policy and its learning curves.

    policy: with the weights of the best round.
    curves: rows {round, validation_cost, ...}. The cost is relative to the best greedy order's.
    """

    policy: Policy
    curves: list[dict[str, float]]


def train(
    name: str,
    problems: Sequence[Problem],
    validation: Sequence[Problem],
    model: CostModel,
    config: PolicyConfig = PolicyConfig(),  # noqa: B008
    progress: Progress | None = None,
) -> TrainedPolicy:
    """A policy with the networks of NETS[name]. The same problems and config give the same policy.

    problems: to learn from.
    validation: other problems. Their mean cost says when to stop, and which round was best.
    progress: called as progress(round, values), once a round.
    """
    if name not in NETS:
        raise ShardCoreError(f"there is no policy {name!r}; known are {', '.join(NETS)}")
    if not problems or not validation:
        raise ShardCoreError(
            f"training got {len(problems)} problems and {len(validation)} for validation; "
            "it needs 1 or more of both"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices are small, and results no longer depend on the number of threads
    try:
        return _train(name, problems, validation, model, config, progress or (lambda *_: None))
    finally:
        torch.set_num_threads(before)


def _train(
    name: str,
    problems: Sequence[Problem],
    validation: Sequence[Problem],
    model: CostModel,
    config: PolicyConfig,
    progress: Progress,
) -> TrainedPolicy:
    all_prepared, unseen = ([Prepared(p, model) for p in some] for some in (problems, validation))
    of_greedy = np.array([greedy_ms(p, model.for_problem(p)) for p in validation])
    learner_of = AutoShardLearner if isinstance(NETS[name], AutoShard) else DreamShardLearner
    learner = learner_of(name, all_prepared, config)
    best, best_round, kept, curves = np.inf, 0, {}, []
    for i in range(config.rounds):
        for optimizer in learner.optimizers:
            optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - i / config.rounds)
        values = learner.round()
        rolled = [Rollouts(learner.net, learner.arrays).run(one.cache, one.keys) for one in unseen]
        ms = np.array([float(r.total_ms[0, 0]) for r in rolled])
        # A plan that does not fit counts as twice the greedy one.
        cost = float(np.where(np.isfinite(ms), ms / of_greedy, 2.0).mean())
        curves.append({"round": i + 1, "validation_cost": cost, **values})
        progress(i + 1, curves[-1])
        if cost < best:
            best, best_round = cost, i
            kept = {k: v.copy() for k, v in learner.arrays.items() if k in learner.net.shapes}
        elif i - best_round >= config.patience:
            break
    meta = {
        "config": dataclasses.asdict(config),
        "metrics": {"validation_cost": best, "rounds": best_round + 1},
    }
    return TrainedPolicy(Policy(name, model.setting, kept, meta), curves)


def greedy_ms(problem: Problem, model: CostModel) -> float:
    """Cost of the best greedy order."""
    return min(order(problem, model).provenance["predicted_ms"] for order in ORDERS.values())
