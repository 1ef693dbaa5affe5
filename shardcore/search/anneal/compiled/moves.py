"""Moves between two devices, as edits (step/engine/trial.py)."""

import numpy as np
from numba import int64

from shardcore.core.jit import inner
from shardcore.step.engine.arrays import (
    LOAD,
    MOST_EDITS,
    SIZE,
    WIDEST,
    WORST,
)
from shardcore.step.engine.cost import (
    is_less,
    n_devices_of,
)
from shardcore.step.engine.trial import edit


@inner
def uniform(st):
    """A random number in [0, 1), from the generator xorshift64* (Vigna 2016).

    The state lives in st.random, so that a run with the same seed repeats.
    """
    x = st.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    st.random[0] = x
    # The upper 53 bits fill a float64's mantissa: 9007199254740992 is 2^53.
    return ((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@inner
def below(st, n):
    """A random integer from 0 to n - 1."""
    # Rounding can make uniform * n equal to n.
    return min(int(uniform(st) * n), n - 1)


@inner
def other_holder(st, s, a):
    """A random device other than a that holds some of strip s, or -1. Looks at 64 devices at most."""
    n = n_devices_of(st)
    d = below(st, n)
    # The limit keeps a proposal's time constant on large clusters.
    for _ in range(min(n, 64)):
        if d != a and st.held[s, d] > 0:
            return d
        d = d + 1 if d + 1 < n else 0
    return -1


@inner
def propose(fx, st):
    """Draw a move between two devices: (a, b, number of edits). No edits: this draw leads nowhere."""
    n = n_devices_of(st)
    # Choose device a: half of the time the slowest one. Only a change there lowers the maximum.
    u = uniform(st)
    if u < 0.5:
        a = st.number[WORST]
    elif u < 0.65:
        # Mostly the one with most columns, else the one that carries most in another exchange of strips.
        # Kinds are the first runs, among the exchanges of outputs and among those of ids.
        x = 0 if u <= 0.6 else 1 + below(st, 2 * fx.n_kinds - 1)
        a = st.number[WIDEST + x + (len(fx.runs) - fx.n_kinds if x >= fx.n_kinds else 0)]
    else:
        a = below(st, n)
    if st.count[a] == 0:
        return 0, 0, 0
    # Choose a strip that a holds, and device b. The less loaded of two draws mostly wins.
    s = int64(st.strips[a, below(st, st.count[a])])
    units, size = int(st.held[s, a]), fx.strips[s, SIZE]
    b = below(st, n)
    c = below(st, n)
    if uniform(st) < 0.7 and is_less(st.devices[c, LOAD], st.devices[b, LOAD]):
        b = c
    # One wide shard costs less than two narrow ones: prefer a device with the same strip.
    if units < size and uniform(st) < 0.25:
        c = other_holder(st, s, a)
        if c >= 0:
            b = c
    if a == b:
        return 0, 0, 0
    # How much moves: all that a holds, half of it, or any number of units.
    given = units
    if fx.may_split[s] and units > 1 and uniform(st) < 0.4:
        given = units // 2 if fx.halves or uniform(st) < 0.3 else 1 + below(st, units - 1)
    # Now the kind of move: a trade for several strips, a swap for one, or a plain move.
    # int64, as elsewhere: numba compiles a function again for each constant, and each type.
    edit(st, int64(0), s, a, units - given)
    edit(st, int64(1), s, b, st.held[s, b] + given)
    u = uniform(st)
    # A trade moves many tables, and `moves_too_much` counts two at most: there are none under limits.
    if u < 0.15 and len(fx.kept) == 0:
        return a, b, trade(fx, st, s, a, b, given)
    # A swap mostly changes what both devices hold by less than a plain move, so more of them fit.
    if u < 0.6 and st.count[b] > 0:
        r = int64(st.strips[b, below(st, st.count[b])])
        if r == s:
            return 0, 0, 0
        # The other strip moves whole, or partly where it may be cut.
        back = int(st.held[r, b])
        if fx.may_split[r] and back > 1 and uniform(st) < 0.2:
            back = back // 2 if fx.halves else 1 + below(st, back - 1)
        edit(st, int64(2), r, b, st.held[r, b] - back)
        edit(st, int64(3), r, a, st.held[r, a] + back)
        return a, b, 4
    return a, b, 2


@inner
def trade(fx, st, s, a, b, given):
    """Give `given` units of strip s to b, in return for several strips of about the same cost.

    Returns the number of edits. It makes room for a shard too costly for any single swap.
    """
    # The return may cost from 0.3 to 1.1 of what was given, so that trades differ.
    want = fx.added_ms[fx.shard[s, given]] * (0.3 + 0.8 * uniform(st))
    # Edits 0 and 1 are what is given. Start at a random strip, so that none is preferred.
    n, i = int64(2), below(st, max(st.count[b], 1))
    for _ in range(st.count[b]):
        i = i + 1 if i + 1 < st.count[b] else 0
        r = int64(st.strips[b, i])
        ms = fx.added_ms[fx.shard[r, st.held[r, b]]]
        if r != s and ms <= want:
            edit(st, n, r, b, int64(0))
            edit(st, n + 1, r, a, st.held[r, a] + st.held[r, b])
            want -= ms
            n += 2
            if n + 2 > MOST_EDITS:
                break
    return n
