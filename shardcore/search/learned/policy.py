"""Policy: a trained policy, its files, and the plans that it makes.

A folder holds policy.json and weights.safetensors, so reading one runs none of its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardcore.core.errors import SettingMismatch
from shardcore.core.types import Plan, Problem, Setting
from shardcore.core.validation import require
from shardcore.cost.model import CostModel
from shardcore.io import model_files, schema
from shardcore.io.model_files import Tensor, require_tensors
from shardcore.search.beam import TABLE_WISE, Beam, BeamConfig
from shardcore.search.budget import Budget
from shardcore.search.learned.nets import FEATURES, AutoShard, DreamShard, Net
from shardcore.search.learned.rollout import Rollouts

NETS: dict[str, Net] = {
    "dreamshard": DreamShard(),
    "dreamshard_direct": DreamShard(asks_model=True),
    "autoshard": AutoShard(),
}
"""Networks by name. dreamshard_direct has no cost network: it sees, and learns from, the CostModel's."""
POLICY_JSON = "policy.json"
_MOST, _LEAST_SCALE = 1e6, 1e-30
"""Largest weight, and the least of those that others are divided by. Trained weights are below 100."""


@dataclass(frozen=True, eq=False)
class Policy:
    """A trained sharding policy: network, weights and setting.

    name: name of its networks, in NETS.
    setting: setting of the cost model that it was trained against.
    weights: arrays by name.
    meta: JSON. `config`: how it was trained. `metrics`: how good it is. `provenance`: what the trainer adds.
    """

    name: str
    setting: Setting
    weights: Mapping[str, np.ndarray]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ShardCoreError for a weight that is missing, unknown, of another shape, or out of range."""
        require(self.name in NETS, f"policy has the name {self.name!r}; known are {', '.join(NETS)}")
        # A file from elsewhere may have any weights, and formulas would fail far from here.
        declared = {
            # Features and costs are divided by these.
            name: Tensor(shape, (_LEAST_SCALE if name in ("sd", "scale_ms") else -_MOST, _MOST), np.float32)
            for name, shape in self.net.shapes.items()
        }
        require_tensors(self.weights, declared)

    @property
    def net(self) -> Net:
        return NETS[self.name]


def place_with_policy(
    policy: Policy,
    algorithm: str,
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    config: BeamConfig = TABLE_WISE,
) -> Plan:
    """Plan by a learned policy: each shard goes to the legal device with the highest score.

    One evaluation is one plan priced. The cost model prices plans, and knows the memory; the policy decides.

    algorithm: its name in provenance.
    seed: only recorded.
    config: parameters of the beam that cuts tables by columns. TABLE_WISE: they stay whole, as published.

    Raises Infeasible (see `feasible_shards`), and SettingMismatch for a policy of other hardware.
    """
    # Another batch is allowed, as features depend on it. Of other hardware the policy knows nothing.
    if policy.setting.hardware != model.setting.hardware:
        raise SettingMismatch(
            f"policy {policy.name!r} was trained for hardware {policy.setting.hardware!r}; "
            f"the cost model is for {model.setting.hardware!r}: train one for it "
            "(python -m shardcore train-policy)"
        )
    beam = Beam(problem, model, Rollouts(policy.net, policy.weights), config, (budget or Budget()).start())
    return beam.best_plan(algorithm=algorithm, seed=seed, policy=policy.name, config=asdict(config))


@dataclass(frozen=True)
class _Meta:
    """policy.json without the setting and the names of features."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


_FORMAT = model_files.TrainedFormat("policy", _Meta, {"features": FEATURES})


def write_policy(folder: str | Path, policy: Policy) -> None:
    """Write a policy's folder: its description and its weights."""
    _FORMAT.write_trained(folder, policy.setting, {**policy.meta, "name": policy.name}, policy.weights)


def read_policy(folder: str | Path) -> Policy:
    """Read a policy's folder, as `write_policy` wrote it, bit for bit. Raises ShardCoreError as read_trained, and for
    invalid weights.
    """
    setting, meta, weights = _FORMAT.read_trained(folder)
    with schema.prefix_errors(f"policy in {folder}"):
        return Policy(meta.pop("name"), setting, weights, meta)
