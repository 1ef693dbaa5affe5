"""Compiled heads: `CostModel.compiled_op_ms` returns one, for a search that prices millions of ops one by one.

A head takes the summed encoding of one op and its model's parameters, both flat arrays.
It returns ms, the same number as the model's `op_ms`, without a call into Python.
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


def compile_head(head: Dispatcher) -> Dispatcher:
    """Compile a head: the function that gives an op's ms from its summed encoding."""
    return jit.compiled_for(head, float64(float64[::1], float64[::1]))


@_compile
def linear_op_ms(sums: np.ndarray, p: np.ndarray) -> float:
    """ms of a fused op by a linear law of its summed encoding.

    p: launch ms, then ms per unit of each feature. The first feature counts shards.
    """
    # No launch without a shard.
    ms = p[0] * min(max(sums[0], 0.0), 1.0)
    # A loop instead of a dot product: no temporary array, and no call into BLAS.
    for i in range(len(sums)):
        ms += p[1 + i] * sums[i]
    return ms


@_compile
def contended_op_ms(sums: np.ndarray, p: np.ndarray) -> float:
    """ms of a fused op whose shards slow each other: `nets.op_ms`, forward + backward.

    With an error other than 0 it returns a quantile instead, as `heads.ContendedHead` does.

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
    # Linear interpolation of the width between knots, constant beyond the first and the last: the sum of what each
    # piece adds. Q is at most four (quantiles.py).
    widths = knots + q
    log_ms, width = math.log(ms), p[widths]
    for i in range(q - 1):
        passed = (log_ms - p[knots + i]) / (p[knots + i + 1] - p[knots + i])
        width += min(max(passed, 0.0), 1.0) * (p[widths + i + 1] - p[widths + i])
    return counted * math.exp(width * p[3])


HEADS = (linear_op_ms, contended_op_ms)
"""Heads of which an op may have several, by the number that `multi_head_op_ms` has for them."""


@_compile
def multi_head_op_ms(sums: np.ndarray, p: np.ndarray) -> float:
    """ms of a fused op as a sum over several heads (composite.Composite).

    sums: those of each head, side by side.
    p[0]: P, the number of heads.
    p[1:1 + 3 P]: of each, its number in HEADS, how many sums it has, and how many parameters.
    Then the parameters of each.
    """
    n = int(p[0])
    ms, first, at = 0.0, 0, 1 + 3 * n
    for i in range(n):
        after = first + int(p[2 + 3 * i])
        end = at + int(p[3 + 3 * i])
        # A slice is a view, so no numbers are copied.
        own, of_own = sums[first:after], p[at:end]
        # Numbers of heads, not functions: parameters are floats only. The order is that of HEADS.
        if p[1 + 3 * i] == 0.0:
            ms += linear_op_ms(own, of_own)
        # An op without shards of a precision does not exist, so it has no launch either.
        elif own[0] > 0.0:
            ms += contended_op_ms(own, of_own)
        first, at = after, end
    return ms
