"""The formulas of the compute model, written once for both uses.

`w` maps names to weights: numpy arrays to predict, torch tensors to train. `xp` is that module.

Each shard has a physical baseline times a learned correction.
An op sums its shards, times their contention, and adds one launch.

    encode(shard) = [drivers, forward ms, backward ms],
    ms            = rates · drivers × exp(CORRECTION tanh(network(conditions)))

    contention    = C · tanh(A log(sums of drivers) + b),  all of A and C positive

    op            = launch × min(count, 1) + sum of ms × exp(contention)

Shards of one op compete for caches and memory. Their sum grows faster than linearly; contention learns that.
Rates, launch, A and C are positive, so another shard never lowers the cost.
Conditions are clipped to the measured range. Beyond it the drivers still grow, at the last known correction.

A fused op costs less than its shards one by one, as they share a launch.
With launch = 1.4 mean shards, fusing 2, 5, 10, 15 shards gains a factor of 1.4, 1.9, 2.1, 2.2.
NeuroShard saw 1.3, 1.8, 2.1, 2.2 on GPUs.

Shapes: N shards, K drivers, C conditions, G ops; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

CORRECTION = 1.5
"""Corrections lie between exp(-1.5) and exp(1.5): a factor of 4.5."""
LOAD_FLOOR = 0.01
"""Added to relative loads, so that their logarithm stays finite."""


def encode_shards(weights: Mapping[str, Any], drivers: Any, conditions: Any, xp: ModuleType = np) -> Any:
    """[N, K + 2] encodings of shards: drivers (the first is 1), forward ms, backward ms.

    All are 0 or more.
    """
    return xp.concatenate(
        [drivers, drivers @ weights["rates"] * correction_factors(weights, conditions, xp)], 1
    )


def correction_factors(weights: Mapping[str, Any], conditions: Any, xp: ModuleType = np) -> Any:
    """[N, 2] learned factors on a shard's baseline ms, forward and backward."""
    # Clip to the measured range: a network must not extrapolate.
    x = (
        xp.clip(conditions, weights["condition_low"], weights["condition_high"]) - weights["condition_mean"]
    ) / weights["condition_sd"]
    # Each layer has a weight and a bias.
    layers = sum(name.startswith("network.") for name in weights) // 2
    for i in range(layers):
        x = x @ weights[f"network.{i}.weight"] + weights[f"network.{i}.bias"]
        if i < layers - 1:
            x = x * (0.5 + 0.5 * xp.tanh(0.5 * x))  # SiLU
    return xp.exp(CORRECTION * xp.tanh(x))


def op_ms(weights: Mapping[str, Any], sums: Any, xp: ModuleType = np) -> Any:
    """[..., 2] ms of fused ops, forward and backward, from summed encodings [..., K + 2]. 0 for an empty op."""
    # The first driver counts shards, so it is 0 for an empty op only.
    drivers, ms = sums[..., :-2], sums[..., -2:]
    # min(count, 1): one launch, however many shards.
    return weights["launch"] * xp.clip(drivers[..., :1], 0.0, 1.0) + ms * contention_factors(
        weights, drivers, xp
    )


def contention_factors(weights: Mapping[str, Any], drivers: Any, xp: ModuleType = np) -> Any:
    """[..., 2] factors by which the shards of an op slow each other, forward and backward.

    drivers: [..., K] amounts of work that drive an op's time, such as lookups and bytes, summed over its shards.
    """
    # Relative to the median op, loads are near 1 and their logarithm near 0.
    # The tanh below bounds the factor, however large the load.
    load = xp.log(drivers / weights["load_typical"] + LOAD_FLOOR)
    return xp.exp(
        xp.tanh(load @ weights["contention.0.weight"] + weights["contention.0.bias"])
        @ weights["contention.1.weight"]
    )
