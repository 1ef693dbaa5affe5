"""Compiled heads: what CostModel.compiled gives a search that prices millions of groups one by one.

A head takes the summed encoding of one group and its model's parameters, both flat arrays, and returns ms: the same numbers as
the model's `head`, without a call into Python for each. Numba compiles them on first use and keeps the result on disk.

Shapes: K drivers, H hidden units, Q knots.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64, njit

import shardcore.compiling  # noqa: F401  (where the result is kept)

_compile = njit(float64(float64[::1], float64[::1]), cache=True, error_model="numpy")


@_compile
def linear(sums: np.ndarray, p: np.ndarray) -> float:
    """p: launch ms, ms per unit of each feature; the first feature counts shards."""
    ms = p[0] * min(max(sums[0], 0.0), 1.0)
    for i in range(len(sums)):
        ms += p[1 + i] * sums[i]
    return ms


@_compile
def contended(sums: np.ndarray, p: np.ndarray) -> float:
    """nets.parts summed over forward and backward, at a quantile if wanted (band.quantile). p: H, Q, floor of loads, error;
    launch [2]; log ms and width [Q] each; 1 / typical loads [K]; contention.0 weight [K, H] and bias [H]; contention.1 weight
    [H, 2]."""
    k, h, q = len(sums) - 2, int(p[0]), int(p[1])
    typical = 6 + 2 * q
    weight = typical + k
    bias = weight + k * h
    out = bias + h
    hidden = np.empty(h)
    for j in range(h):
        hidden[j] = p[bias + j]
    for i in range(k):
        load = math.log(sums[i] * p[typical + i] + p[2])
        for j in range(h):
            hidden[j] += load * p[weight + i * h + j]
    forward = backward = 0.0
    for j in range(h):
        x = math.tanh(hidden[j])
        forward += x * p[out + 2 * j]
        backward += x * p[out + 2 * j + 1]
    ms = (p[4] + p[5]) * min(max(sums[0], 0.0), 1.0) + sums[k] * math.exp(forward) + sums[k + 1] * math.exp(backward)
    if p[3] == 0.0 or ms <= 0.0:
        return ms
    log_ms, i = math.log(ms), 0
    while i < q - 1 and log_ms > p[6 + i + 1]:
        i += 1
    if i == q - 1 or log_ms <= p[6]:
        width = p[6 + q + i]
    else:
        width = p[6 + q + i] + (p[6 + q + i + 1] - p[6 + q + i]) * (log_ms - p[6 + i]) / (p[6 + i + 1] - p[6 + i])
    return ms * math.exp(width * p[3])
