"""Policy: a trained policy, and its files.

A folder holds policy.json and weights.safetensors, so reading one runs none of its code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.types import Setting
from shardcore.core.validation import shown
from shardcore.io import files, model_files, schema
from shardcore.search.learned.features import FEATURES
from shardcore.search.learned.nets import AutoShard, DreamShard, Net

NETS: dict[str, Net] = {
    "dreamshard": DreamShard(),
    "dreamshard_direct": DreamShard(asks_model=True),
    "autoshard": AutoShard(),
}
"""Networks by name. dreamshard_direct has no cost network: it sees, and learns from, the CostModel's."""
POLICY_JSON = "policy.json"
_LIMIT = 1e6
"""Of a weight. Trained ones are below 100."""


@dataclass(frozen=True, eq=False)
class Policy:
    """A trained policy.

    name: of its networks, in NETS.
    setting: of the cost model that it was trained against.
    weights: arrays by name.
    meta: JSON. `config`: how it was trained. `metrics`: how good it is. `provenance`: what the trainer adds.
    """

    name: str
    setting: Setting
    weights: Mapping[str, np.ndarray]
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in NETS:
            raise ShardCoreError(f"policy has the name {self.name!r}; known are {', '.join(NETS)}")
        _require(self.weights, NETS[self.name].shapes)

    @property
    def net(self) -> Net:
        return NETS[self.name]

    def require_hardware(self, setting: Setting) -> None:
        """Raise SettingMismatch if the policy was trained for other hardware than a cost model's."""
        if self.setting.hardware != setting.hardware:
            raise SettingMismatch(
                f"policy {self.name!r} was trained for hardware {self.setting.hardware!r}; "
                f"the cost model is for {setting.hardware!r}: train one for it "
                "(python -m shardcore train-policy)"
            )


def _require(weights: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ShardCoreError for a weight that is missing, unknown, of another shape, or out of range."""
    for name in sorted(set(weights) ^ set(shapes)):
        raise ShardCoreError(f"weight {name!r} is {'not known' if name in weights else 'missing'}")
    for name, shape in shapes.items():
        found = weights[name]
        if found.shape != shape or found.dtype != np.float32:
            raise ShardCoreError(
                f"weight {name!r} is {found.dtype} {list(found.shape)}; it needs to be float32 {list(shape)}"
            )
        if not (np.abs(found) <= _LIMIT).all():
            raise ShardCoreError(f"weight {name!r} has values beyond {_LIMIT:g}, or that are not numbers")
    for name in ("sd", "scale_ms"):
        if (weights[name] <= 0).any():
            raise ShardCoreError(f"weight {name!r} is not positive")


def write_policy(folder: str | Path, policy: Policy) -> None:
    model_files.write_model(
        folder,
        {
            **policy.meta,
            "name": policy.name,
            "features": list(FEATURES),
            "setting": files.setting_to_json(policy.setting),
        },
        policy.weights,
        "policy",
    )


def read_policy(folder: str | Path) -> Policy:
    """Read what `write_policy` wrote, bit for bit.

    Raises ShardCoreError for files that are missing, cut short or edited, of another schema, or of a policy
    that was trained on other features than this ShardCore computes.
    """
    meta, weights = model_files.read_model(folder, "policy")
    found = meta.pop("features", None)
    if found != list(FEATURES):
        raise ShardCoreError(
            f"policy in {folder} was trained on features {shown(found)}; this "
            f"ShardCore computes {shown(list(FEATURES))}: train again"
        )
    setting = files.setting_from_json(meta.pop("setting", None), f"{folder}: setting")
    of = schema.build(_Meta, meta, str(folder))
    try:
        return Policy(of.name, setting, weights, {k: v for k, v in meta.items() if k != "name"})
    except ShardCoreError as error:
        raise ShardCoreError(f"policy in {folder}: {error}") from None


@dataclass(frozen=True)
class _Meta:
    """policy.json without the setting and the names of features."""

    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
