"""The formulas of the compute model. Arrays come in a mapping `w` of weights: numpy's to predict, torch's to train (`xp` is the
module that they belong to), so that each formula stands here once.

A physical baseline per shard, times a learned correction, plus one launch an op.

    encode(shard) = [1, forward ms, backward ms],  ms = rates · drivers × exp(CORRECTION tanh(network(conditions)))
    op            = launch × min(count, 1) + sum over its shards

Rates, launch and exponentials are positive, so a shard more never costs less. Conditions are clipped to the range that was
measured: beyond it the drivers go on growing, and the correction stays that of the nearest shard known. That a fused op costs
less than its shards one by one is the launch that they share: with launch = 1.4 mean shards it is 1.4, 1.9, 2.1, 2.2 times less
for 2, 5, 10, 15 shards, and NeuroShard saw 1.3, 1.8, 2.1, 2.2 on GPUs.

Shapes: N shards, K drivers, C conditions, G groups; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

CORRECTION = 1.5
"""Corrections lie between exp(-1.5) and exp(1.5): a factor of 4.5."""

def encode(w: Mapping[str, Any], drivers: Any, conditions: Any, xp: ModuleType = np) -> Any:
    """[N, 3] encodings of shards, all at least 0: count, forward ms, backward ms."""
    x = (xp.clip(conditions, w["condition_low"], w["condition_high"]) - w["condition_mean"]) / w["condition_sd"]
    layers = sum(name.startswith("network.") for name in w) // 2
    for i in range(layers):
        x = xp.tanh(x @ w[f"network.{i}.weight"] + w[f"network.{i}.bias"])
    costs = drivers @ w["rates"] * xp.exp(CORRECTION * x)
    return xp.concatenate([drivers[:, :1], costs], 1)  # the first driver counts shards


def parts(w: Mapping[str, Any], sums: Any, xp: ModuleType = np) -> Any:
    """[..., 2] forward and backward ms of groups from their summed encodings [..., 3]; 0 where the count is 0."""
    return w["launch"] * xp.clip(sums[..., :1], 0.0, 1.0) + sums[..., 1:]
