"""Compiled heads: `CostModel.compiled` returns one, for a search that prices millions of ops one by one.

A head takes the summed encoding of one op and its model's parameters, both flat arrays.
It returns ms, the same number as the model's `head`, without a call into Python.
Numba compiles heads on first use and keeps the result on disk.

Shapes: K drivers, H hidden units, Q knots.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64, njit
from numba.core.dispatcher import Dispatcher

from shardcore.core import jit

# Divisions follow numpy (no ZeroDivisionError), which saves a branch in every one.
_compile = njit(cache=True, error_model="numpy")


def ready(head: Dispatcher) -> Dispatcher:
    """The head, compiled. Only those that models ask for are."""
    return jit.ready(head, float64(float64[::1], float64[::1]))


@_compile
def linear(sums: np.ndarray, p: np.ndarray) -> float:
    """ms of the linear model.

    p: launch ms, then ms per unit of each feature. The first feature counts shards.
    """
    # No launch without a shard.
    ms = p[0] * min(max(sums[0], 0.0), 1.0)
    # A loop instead of a dot product: no temporary array, and no call into BLAS.
    for i in range(len(sums)):
        ms += p[1 + i] * sums[i]
    return ms


@_compile
def contended(sums: np.ndarray, p: np.ndarray) -> float:
    """ms of the contended model: `nets.parts` summed over forward and backward.

    With an error other than 0 it returns a quantile instead, as `quantiles.quantile` does.

    p[0]: H.
    p[1]: Q.
    p[2]: floor of loads.
    p[3]: error, the quantile of normalised errors; 0 for the prediction itself.
    p[4]: 1 to count forward and backward, 0 for the share of backward in them.
    p[5:7]: launch ms, forward and backward.
    p[7:7 + 2 Q]: log ms at the knots, then the widths there.
    Then [K]: 1 / typical loads.
    Then [K, H] and [H]: weight and bias of contention.0.
    Then [H, 2]: weight of contention.1.
    """
    # The last two sums are ms, forward and backward. The others are drivers.
    k, h, q = len(sums) - 2, int(p[0]), int(p[1])
    # Offsets into p.
    knots = 7
    typical = knots + 2 * q
    weight = typical + k
    bias = weight + k * h
    out = bias + h
    # A fresh small array a call, so that the head stays pure.
    hidden = np.empty(h)
    for j in range(h):
        hidden[j] = p[bias + j]
    # First layer. The floor keeps the logarithm finite for an empty op.
    for i in range(k):
        load = math.log(sums[i] * p[typical + i] + p[2])
        for j in range(h):
            hidden[j] += load * p[weight + i * h + j]
    # Weights of [H, 2] are interleaved: forward, then backward, for each hidden unit.
    # Second layer: log factors by which contention slows both directions.
    forward = backward = 0.0
    for j in range(h):
        x = math.tanh(hidden[j])
        forward += x * p[out + 2 * j]
        backward += x * p[out + 2 * j + 1]
    # Launch once, then both sums of ms, each times its contention.
    launches, backward_ms = min(max(sums[0], 0.0), 1.0), sums[k + 1] * math.exp(backward)
    ms = (p[5] + p[6]) * launches + sums[k] * math.exp(forward) + backward_ms
    counted = ms if p[4] == 1.0 else p[6] * launches + backward_ms
    # An error of 0 stands for the mean. An empty op has no logarithm.
    if p[3] == 0.0 or ms <= 0.0:
        return counted
    # Linear interpolation of the width between knots, constant beyond the first and the last.
    # A linear scan: Q is at most four (quantiles.py).
    log_ms, i = math.log(ms), 0
    widths = knots + q
    while i < q - 1 and log_ms > p[knots + i + 1]:
        i += 1
    if i == q - 1 or log_ms <= p[knots]:
        width = p[widths + i]
    else:
        width = p[widths + i] + (p[widths + i + 1] - p[widths + i]) * (log_ms - p[knots + i]) / (
            p[knots + i + 1] - p[knots + i]
        )
    return counted * math.exp(width * p[3])


@_compile
def several(sums: np.ndarray, p: np.ndarray) -> float:
    """ms of ops of several precisions, one after another. See composite.Composite.

    sums: those of each precision, side by side.
    p[0]: P, the number of precisions.
    p[1:1 + P]: how many parameters each has.
    Then the parameters of each, as `contended` takes them.
    """
    n = int(p[0])
    width = len(sums) // n
    ms, at = 0.0, 1 + n
    for i in range(n):
        end = at + int(p[1 + i])
        # A slice is a view, so no numbers are copied.
        own = sums[i * width : (i + 1) * width]
        # An op without shards of a precision does not exist, so it has no launch either.
        if own[0] > 0.0:
            ms += contended(own, p[at:end])
        at = end
    return ms


HEADS = (linear, contended, several)
"""Heads of ops in device memory, by the number that `beside_link` has for them."""


@_compile
def beside_link(sums: np.ndarray, p: np.ndarray) -> float:
    """ms of an op with rows in host memory. See composite.LinkHead.

    sums: those of another head, then ms of the link: forward, backward, and of rows fetched ahead.
    p[0]: which of HEADS that is. p[1:4]: multiples of the link's ms. Then that head's parameters.
    """
    n = len(sums) - 3
    own, which, of_own = sums[:n], int(p[0]), p[4:]
    # Numbers of heads, not functions: parameters are floats only. The order is that of HEADS.
    if which == 0:
        ms = linear(own, of_own)
    elif which == 1:
        ms = contended(own, of_own)
    else:
        ms = several(own, of_own)
    for i in range(3):
        ms += p[1 + i] * sums[n + i]
    return ms
