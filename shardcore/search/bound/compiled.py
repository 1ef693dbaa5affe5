"""The inner loops of packing.py, compiled.

Shapes: T tables, N shards, C + 1 capacities, M steps of time, S speeds, P prices.
"""

import numba
import numpy as np

from shardcore.core.jit import entry

_F1, _F2, _I1, _I2 = numba.float64[::1], numba.float64[:, ::1], numba.int64[::1], numba.int32[:, ::1]


@entry(numba.void(_I1, _I1, _F1, _F2, _I2))
def knapsack(first, weight, worth, best, chosen):
    """Fill knapsacks of all capacities: at most one shard of a table.

    first: [T + 1] where each table's shards begin. weight, worth: [N].
    best: [T + 1, C + 1] is filled: of the tables before, the most worth within a capacity.
    chosen: [T, C + 1] is filled: the shard of the table, or -1.
    """
    n = best.shape[1]
    for c in range(n):
        best[0, c] = 0.0
    # A knapsack by table (multiple choice). A row stays for each table, to trace choices back.
    for t in range(len(first) - 1):
        # Without a shard of this table, what the tables before it brought stays.
        for c in range(n):
            best[t + 1, c] = best[t, c]
            chosen[t, c] = -1
        for i in range(first[t], first[t + 1]):
            w, v = weight[i], worth[i]
            # A shard without worth only takes capacity.
            if v > 0.0:
                # Rows of `best` are of different tables, so no shard is counted twice.
                for c in range(w, n):
                    with_it = best[t, c - w] + v
                    if with_it > best[t + 1, c]:
                        best[t + 1, c] = with_it
                        chosen[t, c] = i


@entry(numba.void(_I1, _I1, _F1, _F1, _F1, _F2))
def divided(first, fits, load, worth, prices, gains):
    """Sum what tables gain by their best shards at prices of load, at most one shard of a table.

    first: [T + 1] where each table's shards begin. fits: [N] the first step in which a shard fits, rising
    within a table. M or more: none.
    load, worth: [N]. prices: [P]. gains: [P, M] is filled.
    """
    n = gains.shape[1]
    for p in range(len(prices)):
        for m in range(n):
            gains[p, m] = 0.0
        for t in range(len(first) - 1):
            best = 0.0
            # `fits` rises, so each better shard counts from its step on, by what it adds.
            for i in range(first[t], first[t + 1]):
                gain = worth[i] - prices[p] * load[i]
                if fits[i] < n and gain > best:
                    gains[p, fits[i]] += gain - best
                    best = gain
        # From growth at each step to the sum up to it.
        for m in range(1, n):
            gains[p, m] += gains[p, m - 1]


@entry(numba.void(_F1, _F1, _F1, _I1))
def share(one, other, most, at):
    """Divide each capacity between two collectors.

    most: [M] is filled with what both collect. at: [M] with what `one` gets of the capacity.
    """
    for m in range(len(one)):
        most[m], at[m] = -np.inf, 0
        for j in range(m + 1):
            both = one[j] + other[m - j]
            # Of ways that collect as much, the first stays: results do not depend on rounding further on.
            if both > most[m]:
                most[m], at[m] = both, j


@entry(numba.void(_F1, _F1, _I2, _F1, _F1, _I1))
def share_with_devices(shared, own, left, count, most, at):
    """Divide each time between what all devices share and what each has alone, at several speeds.

    shared, own: [M] collected by capacity. left: [S, M] capacity of a device by time. count: [S] devices.
    most, at: [M] are filled as in `share`.
    """
    for m in range(len(shared)):
        # -inf stays where no division leaves every device time enough.
        most[m], at[m] = -np.inf, 0
        for j in range(m + 1):
            total = shared[j]
            for s in range(len(count)):
                # A slow device has no time for so much that all share.
                if left[s, m] < j:
                    total = -np.inf
                    break
                # What is shared takes capacity from every device.
                total += count[s] * own[left[s, m] - j]
            if total > most[m]:
                most[m], at[m] = total, j
