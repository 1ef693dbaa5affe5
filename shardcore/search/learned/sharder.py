"""Learned sharders: a policy as a function of the Sharder protocol (see shardcore/search/__init__.py)."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel
from shardcore.search.beam import Beam, BeamConfig
from shardcore.search.budget import Budget
from shardcore.search.learned.policy import Policy
from shardcore.search.learned.rollout import Rollouts

TABLE_WISE = BeamConfig(steps=0)
"""Tables are whole, as published, unless no device can hold one."""


def place(
    policy: Policy,
    algorithm: str,
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    config: BeamConfig = TABLE_WISE,
) -> Plan:
    """The policy's plan: each shard goes to the legal device with the highest score.

    With a budget, it is the best of that plan and of random plans by the policy. One evaluation is one plan
    priced. The cost model prices them, and knows the memory; the policy decides.

    algorithm: its name in provenance.
    config: of the beam that cuts tables by columns. TABLE_WISE: they stay whole.

    Raises Infeasible (see `feasible_shards`), and SettingMismatch for a policy of other hardware.
    """
    policy.require_hardware(model.setting)
    rng, meter = np.random.default_rng(seed), (budget or Budget()).start()
    beam = Beam(problem, model, Rollouts(policy.net, policy.weights), config, meter)
    return beam.plan(
        lambda n: Rollouts(policy.net, policy.weights, n, rng, greedy_first=False),
        algorithm=algorithm,
        seed=seed,
        policy=policy.name,
        config=asdict(config),
    )
