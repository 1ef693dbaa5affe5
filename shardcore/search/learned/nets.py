"""The networks of learned policies, and the features of shards that they read.

Each formula is written once for both uses, as in cost/nets.py.
`w` maps names to weights: numpy arrays to place, torch tensors to train. `xp` is that module.

A shard's features become a vector, its latent.
A device is the sum of its shards' latents, over its speed.
So a policy knows any number of shards on any number of devices, in any order.

Shapes: N shards, F = 21 features, L latents, D devices, H = 64; ... any leading dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from shardcore.core.access_statistics import REUSE_BINS
from shardcore.core.types import Shard
from shardcore.step import access

FEATURES = ("dim", "rows", "pooling", "size", *(f"reuse_{k}" for k in range(REUSE_BINS)))
"""Features of a shard, in the published order. The first four are natural logarithms.

dim: columns of the shard.
rows: rows of the shard.
pooling: lookups a sample that hit the shard's rows.
size: bytes of weights.
reuse_k: share of a batch's unique rows in bin k of a reuse histogram, of the whole table.
"""
_OFFSET = 0.1
"""Keeps logarithms finite where nothing is looked up."""
PARTS = 3
"""Costs of a device that DreamShard looks at."""
LATENTS, _WIDE, _H = 32, 128, 64

Weights = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


def shard_features(shards: Sequence[Shard], batch: int) -> np.ndarray:
    """[N, F] float32 features of shards, for a batch of `batch` samples."""
    # Of the shard, not the table: lookups are those that hit its rows.
    sizes = np.array(
        [
            (s.width, s.rows, s.table.lookups_per_sample * access.access_share(s) + _OFFSET, s.bytes)
            for s in shards
        ],
        dtype=float,
    ).reshape(-1, 4)
    bins = np.array([access.reuse_histogram(s.table, batch) for s in shards]).reshape(-1, REUSE_BINS)
    return np.concatenate([np.log(sizes), bins], 1).astype(np.float32)


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy before it places a shard.

    latents: [..., D, L] sums of the shards', over the device's speed.
    used: [..., D] share of the memory.
    costs: [..., D, PARTS] ms by the cost model; None where policies do without.
    context: [..., H] of the shard that comes next; None if the policy has none.
    """

    latents: Any
    used: Any
    costs: Any = None
    context: Any = None


class Net(ABC):
    """Neural network formulas of one learned sharding policy.

    shapes: shapes of its weights, by name. Random initial weights are drawn in this order.
    asks_model: True if it sees costs by the cost model instead of predicting them.
    """

    asks_model = False

    def __init__(self, shapes: Shapes) -> None:
        # Scaling is stored with the weights, so that a policy needs nothing but its file.
        scaling: Shapes = {name: (len(FEATURES),) for name in ("low", "high", "mean", "sd")}
        self.shapes: Shapes = scaling | {"scale_ms": (1,)} | _mlp_shapes("table", *_TABLE) | shapes

    @abstractmethod
    def shard_latents(self, weights: Weights, features: Any, xp: ModuleType = np) -> Any:
        """[N, L] latents of shards with features [N, F]."""

    @abstractmethod
    def single_shard_cost(self, weights: Weights, latents: Any) -> Any:
        """[...] predicted cost of each shard [..., L] alone. Shards of the highest cost are placed first."""

    def next_shard_contexts(self, weights: Weights, latents: Any, xp: ModuleType = np) -> Any:
        """[..., N, H] context of each shard [..., N, L] as the next one, in the order of placing. None: no context."""
        return None

    @abstractmethod
    def device_scores(self, weights: Weights, inputs: PolicyInputs, xp: ModuleType = np) -> Any:
        """[..., D] scores of devices for the next shard: logits of a softmax."""


class DreamShard(Net):
    """DreamShard's networks (arXiv 2210.02023). Costs are in units of w["scale_ms"].

    It scores a device by its latents and by the three costs that it has so far: forward compute,
    backward exchange, backward compute. A cost network predicts these, or a CostModel.
    """

    def __init__(self, asks_model: bool = False) -> None:
        self.asks_model = asks_model
        # No bias: it would add the same to all devices' scores, which a softmax ignores.
        shapes = _mlp_shapes("costs", PARTS, _H, LATENTS) | {"choice.weight": (2 * LATENTS, 1)}
        if not asks_model:
            shapes |= _mlp_shapes("cost_table", *_TABLE)
            shapes |= _layer_shapes("heads.0", LATENTS, PARTS * _H)
            shapes |= {"heads.1.weight": (PARTS, _H), "heads.1.bias": (PARTS,)}
            shapes |= _mlp_shapes("overall", LATENTS, _H, 1)
        super().__init__(shapes)

    def shard_latents(self, weights: Weights, features: Any, xp: ModuleType = np) -> Any:
        """[N, L] latents of shards: the policy's, and the cost network's if there is one."""
        # Side by side: a rollout then sums both with one array.
        x = _scale_features(weights, features, xp)
        nets = ("table",) if self.asks_model else ("table", "cost_table")
        return xp.concatenate([_relu(_mlp(weights, name, x)) for name in nets], -1)

    def single_shard_cost(self, weights: Weights, latents: Any) -> Any:
        return self.device_costs(weights, latents).sum(-1)

    def device_scores(self, weights: Weights, inputs: PolicyInputs, xp: ModuleType = np) -> Any:
        # Either source has one scale, so both kinds of policy have the same layers.
        costs = (
            inputs.costs / weights["scale_ms"]
            if self.asks_model
            else self.device_costs(weights, inputs.latents)
        )
        both = xp.concatenate([inputs.latents[..., :LATENTS], _relu(_mlp(weights, "costs", costs))], -1)
        return (both @ weights["choice.weight"])[..., 0]

    def device_costs(self, weights: Weights, latents: Any) -> Any:
        """[..., PARTS] predicted costs of devices [..., L]."""
        # Three small heads in one product.
        hidden = _relu(_linear(weights, "heads.0", latents[..., LATENTS:]))
        hidden = hidden.reshape(*hidden.shape[:-1], PARTS, _H)
        return (hidden * weights["heads.1.weight"]).sum(-1) + weights["heads.1.bias"]

    def plan_cost(self, weights: Weights, latents: Any, xp: ModuleType = np) -> Any:
        """[...] predicted cost of plans with devices [..., D, L]. An empty device counts nothing."""
        # A maximum over devices takes any number of them, and a step waits for the largest, too.
        return _mlp(weights, "overall", xp.amax(latents[..., LATENTS:], -2))[..., 0]


class AutoShard(Net):
    """AutoShard's networks (arXiv 2208.06399). Costs are compute only, in units of w["scale_ms"].

    It also knows the shard that comes next. Those before it are on the devices, so no LSTM reads them.
    """

    def __init__(self) -> None:
        shapes = _mlp_shapes("cost", LATENTS, _H, 1)
        shapes |= _layer_shapes("progress", 1, LATENTS) | _layer_shapes("device", 2, LATENTS)
        shapes |= _mlp_shapes("score", 3 * _H, _WIDE, _WIDE, _H, 1)
        shapes |= _layer_shapes("next", 2 * LATENTS, _H)
        super().__init__(shapes)

    def shard_latents(self, weights: Weights, features: Any, xp: ModuleType = np) -> Any:
        return _relu(_mlp(weights, "table", _scale_features(weights, features, xp)))

    def single_shard_cost(self, weights: Weights, latents: Any) -> Any:
        """[...] predicted compute of shards [..., L], or of devices."""
        return _mlp(weights, "cost", latents)[..., 0]

    def next_shard_contexts(self, weights: Weights, latents: Any, xp: ModuleType = np) -> Any:
        n = latents.shape[-2]
        # The share of shards that are placed already, [N, 1].
        done = (xp.arange(n, dtype=xp.float32) / n)[:, None]
        progress = xp.broadcast_to(_relu(_linear(weights, "progress", done)), latents.shape)
        return _relu(_linear(weights, "next", xp.concatenate([latents, progress], -1)))

    def device_scores(self, weights: Weights, inputs: PolicyInputs, xp: ModuleType = np) -> Any:
        facts = xp.stack([self.single_shard_cost(weights, inputs.latents), inputs.used], -1)
        devices = xp.concatenate([inputs.latents, _relu(_linear(weights, "device", facts))], -1)
        # Each device is scored against the shard that comes next, [..., D, 3 H].
        state = xp.broadcast_to(inputs.context[..., None, :], devices.shape)
        return _mlp(weights, "score", xp.concatenate([state, devices, state * devices], -1), layers=4)[..., 0]


_TABLE = (len(FEATURES), _WIDE, LATENTS)
"""Widths of a network from a shard's features to its latents."""


def _layer_shapes(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def _mlp_shapes(name: str, *widths: int) -> Shapes:
    layers = (_layer_shapes(f"{name}.{i}", *ends) for i, ends in enumerate(pairwise(widths)))
    return {weight: shape for layer in layers for weight, shape in layer.items()}


def _scale_features(weights: Weights, features: Any, xp: ModuleType) -> Any:
    """Features standardized by mean and deviation of the training tables, and clipped to their range."""
    return (xp.clip(features, weights["low"], weights["high"]) - weights["mean"]) / weights["sd"]


def _linear(weights: Weights, name: str, x: Any) -> Any:
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _relu(x: Any) -> Any:
    # Works for numpy and torch.
    return x * (x > 0)


def _mlp(weights: Weights, name: str, x: Any, layers: int = 2) -> Any:
    """Multi-layer perceptron: linear layers with a ReLU between them."""
    for i in range(layers - 1):
        x = _relu(_linear(weights, f"{name}.{i}", x))
    return _linear(weights, f"{name}.{layers - 1}", x)
