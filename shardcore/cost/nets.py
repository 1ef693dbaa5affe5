"""The formulas of the compute model. Arrays come in a mapping `w` of weights: numpy's to predict, torch's to train (`xp` is the
module that they belong to), so that each formula stands here once.

A physical baseline per shard times a learned correction; the sum over an op's shards times their contention; one launch an op.

    encode(shard) = [drivers, forward ms, backward ms],  ms = rates · drivers × exp(CORRECTION tanh(network(conditions)))
    contention    = C · tanh(A log(sums of drivers) + b),  all of A and C positive
    op            = launch × min(count, 1) + sum of ms × exp(contention)

Shards of one op contend for caches and memory: their sum grows faster than they do, which contention learns. Rates, launch, A
and C are positive, so a shard more never costs less. Conditions are clipped to the range that was measured: beyond it the drivers
go on growing, and the correction stays that of the nearest shard known. That a fused op costs less than its shards one by one is
the launch that they share: with launch = 1.4 mean shards it is 1.4, 1.9, 2.1, 2.2 times less for 2, 5, 10, 15 shards, and
NeuroShard saw 1.3, 1.8, 2.1, 2.2 on GPUs.

Shapes: N shards, K drivers, C conditions, G groups; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

CORRECTION = 1.5
"""Corrections lie between exp(-1.5) and exp(1.5): a factor of 4.5."""
LOAD_FLOOR = 0.01
"""Loads far below the typical one count alike, so that their logarithm is finite."""


def encode(w: Mapping[str, Any], drivers: Any, conditions: Any, xp: ModuleType = np) -> Any:
    """[N, K + 2] encodings of shards, all at least 0: their drivers (the first counts shards), forward ms, backward ms."""
    return xp.concatenate([drivers, drivers @ w["rates"] * correction(w, conditions, xp)], 1)


def correction(w: Mapping[str, Any], conditions: Any, xp: ModuleType = np) -> Any:
    """[N, 2] factors on what the rates say that shards take, forward and backward."""
    x = (xp.clip(conditions, w["condition_low"], w["condition_high"]) - w["condition_mean"]) / w["condition_sd"]
    layers = sum(name.startswith("network.") for name in w) // 2
    for i in range(layers):
        x = x @ w[f"network.{i}.weight"] + w[f"network.{i}.bias"]
        if i < layers - 1:
            x = x * (0.5 + 0.5 * xp.tanh(0.5 * x))  # SiLU
    return xp.exp(CORRECTION * xp.tanh(x))


def parts(w: Mapping[str, Any], sums: Any, xp: ModuleType = np) -> Any:
    """[..., 2] forward and backward ms of groups from their summed encodings [..., K + 2]; 0 where the count is 0."""
    drivers, ms = sums[..., :-2], sums[..., -2:]
    return w["launch"] * xp.clip(drivers[..., :1], 0.0, 1.0) + ms * contention(w, drivers, xp)


def contention(w: Mapping[str, Any], drivers: Any, xp: ModuleType = np) -> Any:
    """[..., 2] factors on what the shards of groups take one by one, from their summed drivers [..., K]."""
    load = xp.log(drivers / w["load_typical"] + LOAD_FLOOR)
    return xp.exp(xp.tanh(load @ w["contention.0.weight"] + w["contention.0.bias"]) @ w["contention.1.weight"])
