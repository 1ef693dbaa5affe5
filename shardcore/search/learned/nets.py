"""The formulas of both policies, written once for both uses, as in cost/nets.py.

`w` maps names to weights: numpy arrays to place, torch tensors to train. `xp` is that module.

A shard's features become a vector, its latent. A device is the sum of its shards' latents, over its speed.
So a policy knows any number of shards on any number of devices, in any order.

DreamShard (arXiv 2210.02023) scores a device by its latents and by the three costs that it has so far:
forward compute, backward exchange, backward compute. A network of its own predicts them, or a CostModel.

AutoShard (arXiv 2208.06399) also knows the shard that comes next, and all before it: an LSTM reads them.

Shapes: N shards, F features, L latents, D devices, H = 64; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from shardcore.search.learned.features import FEATURES

Weights = Mapping[str, Any]
LATENTS, _WIDE, _H = 32, 128, 64
PARTS = 3
"""Costs of a device that DreamShard looks at."""
_SCALING = {name: (len(FEATURES),) for name in ("low", "high", "mean", "sd")}


@dataclass(frozen=True)
class Seen:
    """What a policy sees of the devices before it places a shard.

    latents: [..., D, L] sums of the shards', over the device's speed.
    used: [..., D] share of the memory.
    costs: [..., D, PARTS] ms by the cost model; None if nobody asked it.
    context: [..., H] of the shard that comes next; None if the policy has none.
    """

    latents: Any
    used: Any
    costs: Any = None
    context: Any = None


class Net(Protocol):
    """The formulas of one policy.

    shapes: of its weights, by name.
    asks_model: whether it sees costs by the cost model instead of its own.
    """

    shapes: Mapping[str, tuple[int, ...]]
    asks_model: bool

    def latents(self, w: Weights, features: Any, xp: ModuleType = np) -> Any:
        """[N, L] of shards with features [N, F]."""

    def single(self, w: Weights, latents: Any, xp: ModuleType = np) -> Any:
        """[...] predicted cost of shards [..., L] by themselves. Those that cost most are placed first."""

    def context(self, w: Weights, latents: Any, xp: ModuleType = np) -> Any:
        """[..., N, H] for each of the shards [..., N, L], in the order of placing. None: there is none."""

    def scores(self, w: Weights, seen: Seen, xp: ModuleType = np) -> Any:
        """[..., D] of devices: logits of a softmax."""


def _table(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a network from a shard's features to its latents."""
    return {**_layer(f"{name}.0", len(FEATURES), _WIDE), **_layer(f"{name}.1", _WIDE, LATENTS)}


def _layer(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


class DreamShard:
    """DreamShard's networks. Costs are in units of w["scale_ms"]."""

    def __init__(self, asks_model: bool = False) -> None:
        self.asks_model = asks_model
        self.shapes = {
            **_SCALING,
            "scale_ms": (1,),
            **_table("table"),
            **_layer("costs.0", PARTS, _H),
            **_layer("costs.1", _H, LATENTS),
            "choice.weight": (2 * LATENTS, 1),
        }
        if not asks_model:
            self.shapes |= {
                **_table("cost_table"),
                **_layer("heads.0", LATENTS, PARTS * _H),
                "heads.1.weight": (PARTS, _H),
                "heads.1.bias": (PARTS,),
                **_layer("overall.0", LATENTS, _H),
                **_layer("overall.1", _H, 1),
            }

    def latents(self, w: Weights, features: Any, xp: ModuleType = np) -> Any:
        """[N, L]: the policy's, and those of the cost network if there is one."""
        x = _scaled(w, features, xp)
        nets = ("table",) if self.asks_model else ("table", "cost_table")
        return xp.concatenate(
            [_relu(_linear(w, f"{name}.1", _relu(_linear(w, f"{name}.0", x)))) for name in nets], -1
        )

    def single(self, w: Weights, latents: Any, xp: ModuleType = np) -> Any:
        return self.parts(w, latents).sum(-1)

    def context(self, w: Weights, latents: Any, xp: ModuleType = np) -> None:
        return None

    def scores(self, w: Weights, seen: Seen, xp: ModuleType = np) -> Any:
        costs = seen.costs / w["scale_ms"] if self.asks_model else self.parts(w, seen.latents)
        costs = _relu(_linear(w, "costs.1", _relu(_linear(w, "costs.0", costs))))
        both = xp.concatenate([seen.latents[..., :LATENTS], costs], -1)
        return (both @ w["choice.weight"])[..., 0]

    def parts(self, w: Weights, latents: Any) -> Any:
        """[..., PARTS] predicted costs of devices [..., L]."""
        hidden = _relu(_linear(w, "heads.0", latents[..., LATENTS:]))
        hidden = hidden.reshape(*hidden.shape[:-1], PARTS, _H)
        return (hidden * w["heads.1.weight"]).sum(-1) + w["heads.1.bias"]

    def overall(self, w: Weights, latents: Any, xp: ModuleType = np) -> Any:
        """[...] predicted cost of plans with devices [..., D, L]. An empty device counts nothing."""
        most = xp.amax(latents[..., LATENTS:], -2)
        return _linear(w, "overall.1", _relu(_linear(w, "overall.0", most)))[..., 0]


class AutoShard:
    """AutoShard's networks. Costs are compute only, in units of w["scale_ms"]."""

    asks_model = False

    def __init__(self) -> None:
        self.shapes = {
            **_SCALING,
            "scale_ms": (1,),
            **_table("table"),
            **_layer("cost.0", LATENTS, _H),
            **_layer("cost.1", _H, 1),
            **_layer("progress", 1, LATENTS),
            **_layer("device", 2, LATENTS),
            **_layer("score.0", 3 * _H, _WIDE),
            **_layer("score.1", _WIDE, _WIDE),
            **_layer("score.2", _WIDE, _H),
            **_layer("score.3", _H, 1),
        }
        for layer in ("lstm.0", "lstm.1"):
            self.shapes |= {
                f"{layer}.input": (_H, 4 * _H),
                f"{layer}.state": (_H, 4 * _H),
                f"{layer}.bias": (4 * _H,),
            }

    def latents(self, w: Weights, features: Any, xp: ModuleType = np) -> Any:
        return _relu(_linear(w, "table.1", _relu(_linear(w, "table.0", _scaled(w, features, xp)))))

    def single(self, w: Weights, latents: Any, xp: ModuleType = np) -> Any:
        return self.cost(w, latents)

    def context(self, w: Weights, latents: Any, xp: ModuleType = np) -> Any:
        n = latents.shape[-2]
        done = (xp.arange(n, dtype=xp.float32) / n)[:, None]
        progress = xp.broadcast_to(_relu(_linear(w, "progress", done)), latents.shape)
        return _lstm(w, "lstm.1", _lstm(w, "lstm.0", xp.concatenate([latents, progress], -1), xp), xp)

    def scores(self, w: Weights, seen: Seen, xp: ModuleType = np) -> Any:
        own = xp.stack([self.cost(w, seen.latents), seen.used], -1)
        devices = xp.concatenate([seen.latents, _relu(_linear(w, "device", own))], -1)
        state = xp.broadcast_to(seen.context[..., None, :], devices.shape)
        x = xp.concatenate([state, devices, state * devices], -1)
        for i in range(3):
            x = _relu(_linear(w, f"score.{i}", x))
        return _linear(w, "score.3", x)[..., 0]

    def cost(self, w: Weights, latents: Any) -> Any:
        """[...] predicted compute of devices [..., L]."""
        return _linear(w, "cost.1", _relu(_linear(w, "cost.0", latents)))[..., 0]


VALUE_SHAPES = {**_layer("value.0", _H, _H), **_layer("value.1", _H, 1)}
"""Weights of `value`."""


def value(w: Weights, context: Any) -> Any:
    """[...] rewards that AutoShard's critic expects after contexts [..., H]. Only training needs it."""
    return _linear(w, "value.1", _relu(_linear(w, "value.0", context)))[..., 0]


def _scaled(w: Weights, features: Any, xp: ModuleType) -> Any:
    """Features of the training tables have mean 0 and deviation 1. Others are clipped to their range."""
    return (xp.clip(features, w["low"], w["high"]) - w["mean"]) / w["sd"]


def _linear(w: Weights, name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def _relu(x: Any) -> Any:
    return x * (x > 0)


def _lstm(w: Weights, name: str, x: Any, xp: ModuleType) -> Any:
    """[..., N, H] outputs of a layer (Hochreiter and Schmidhuber 1997) over a sequence [..., N, H]."""
    gates = x @ w[f"{name}.input"] + w[f"{name}.bias"]
    h = memory = gates[..., 0, :_H] * 0
    outputs = []
    for i in range(x.shape[-2]):
        of = gates[..., i, :] + h @ w[f"{name}.state"]
        enter, forget, out, value = (of[..., k * _H : (k + 1) * _H] for k in range(4))
        memory = _sigmoid(forget, xp) * memory + _sigmoid(enter, xp) * xp.tanh(value)
        h = _sigmoid(out, xp) * xp.tanh(memory)
        outputs.append(h)
    return xp.stack(outputs, -2)


def _sigmoid(x: Any, xp: ModuleType) -> Any:
    return 0.5 + 0.5 * xp.tanh(0.5 * x)
