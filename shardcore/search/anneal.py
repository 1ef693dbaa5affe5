"""The compiled core of the local search: greedy construction, and simulated annealing over changes of two devices, and of the
tables that live everywhere.

What it makes small is a smooth form of a step's cost: the p-norm of the devices' loads instead of their maximum, and likewise of
the columns that a device, or a host, exchanges. A change alters two devices, so its effect on the norms takes as long however
many there are. A table that comes to all devices or leaves them, its rows divided or in copies, alters every one. The best plan
met is kept as a log of what was done since (annealing: Kirkpatrick, Gelatt, Vecchi 1983; the norm in place of the maximum as in
load balancing, Awerbuch et al. 1995).

Compiled without numba's reference counts (_nrt=False, an option of numba's own use): they tripled the time of a trial. So nothing
here may allocate. It is one file, though a long one, as numba's cache on disk notices changes of a function's own file alone.

Shapes: S strips, U most units, R parts, F features, D devices, H hosts, P parameters, L log; 2 the kinds of op (0 all rows, 1 a
row range), or the ways to be everywhere (0 rows, 1 copies). Empty arrays, with no rows, stand for what does not apply.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np
from numba import njit

HEAD = numba.types.FunctionType(numba.float64(numba.float64[::1], numba.float64[::1]))
"""The type of every model's compiled head, so that the search is compiled once for all models."""

POWERS = 5
"""log2 of the norm's p."""
_MOST = 24
"""Edits of a change."""
_EVERYWHERE = 0.1
"""Share of the trials that concern tables everywhere."""


class Fixed(NamedTuple):
    """What a search does not change.

    part [S, U + 1]: the part that so many units of a strip are, 0 for none; codes [R, F], added_ms (to an op), part_bytes,
    part_width [R] of parts. kind, size, table [S]: kind of op; units; number of its table; may_split [S]. allowed [S, D]: where a
    strip may live (no rows: on any device). free [D] bytes, speed [D], host [D]. own, busiest, host_busiest, total, once [2]: ms
    of both exchanges for each unit of width of the device; of the device, the host with most; of all; and if there is any. every
    [2, S]: which strips may be everywhere; every_codes [2, S, F], every_bytes, every_size [2, S] (whole numbers): what each
    device then holds, its exchange taking every_once + every_rate x sum of sizes [2] ms. kept [S, D]: units of the plan to start
    from (no rows: none), weight [S] bytes of a unit, most_moved [2] tables and bytes that may come to devices that did not have
    them. halves: columns are cut in halves alone. parameters [P] of the head.
    """

    part: np.ndarray
    codes: np.ndarray
    added_ms: np.ndarray
    part_bytes: np.ndarray
    part_width: np.ndarray
    kind: np.ndarray
    size: np.ndarray
    table: np.ndarray
    may_split: np.ndarray
    allowed: np.ndarray
    free: np.ndarray
    speed: np.ndarray
    host: np.ndarray
    own: np.ndarray
    busiest: np.ndarray
    host_busiest: np.ndarray
    total: np.ndarray
    once: np.ndarray
    every: np.ndarray
    every_codes: np.ndarray
    every_bytes: np.ndarray
    every_size: np.ndarray
    every_rate: np.ndarray
    every_once: np.ndarray
    kept: np.ndarray
    weight: np.ndarray
    most_moved: np.ndarray
    parameters: np.ndarray
    halves: bool


class State(NamedTuple):
    """One plan, and the room to try a change in.

    held [S, D] units; count [D], items [D, S]: the strips that a device holds; sums [D, 2, F], ms, width [D, 2], used [D] bytes,
    load [D] ms; hosts [H, 2] width. norm [3, 2]: sums of p-th powers of loads, widths, hosts' widths over ref [3, 2]. way [S]:
    -1, or the way in which a strip is everywhere; spread [S]: those that are; every_sums [2, F], every_ms, every_size [2].
    moved [S] bytes of tables. trial_*: the same after a change, of its two devices; edit [_MOST, 3]: what it is: strip, device,
    units then. log [L, 3]: strip, device (-1: everywhere), units (the way) before. number, value: see LOG and BEST. random [1].
    """

    held: np.ndarray
    count: np.ndarray
    items: np.ndarray
    sums: np.ndarray
    ms: np.ndarray
    width: np.ndarray
    used: np.ndarray
    load: np.ndarray
    hosts: np.ndarray
    norm: np.ndarray
    ref: np.ndarray
    way: np.ndarray
    spread: np.ndarray
    every_sums: np.ndarray
    every_ms: np.ndarray
    every_size: np.ndarray
    moved: np.ndarray
    trial_sums: np.ndarray
    trial_ms: np.ndarray
    trial_width: np.ndarray
    trial_used: np.ndarray
    trial_load: np.ndarray
    trial_norm: np.ndarray
    trial_every_sums: np.ndarray
    trial_every_ms: np.ndarray
    trial_every_size: np.ndarray
    edit: np.ndarray
    log: np.ndarray
    number: np.ndarray
    value: np.ndarray
    random: np.ndarray


LOG, WORST, WIDEST, N_MOVED, BYTES_MOVED, SPREAD = 0, 1, 2, 4, 5, 6
"""Of State.number: entries of the log; devices that are last, and widest of each kind; tables, bytes moved; strips spread."""
BEST, ENERGY = 0, 1
"""Of State.value: cost of the best plan met, in ms; the smooth cost of the present one."""


def state(fixed: Fixed, n_hosts: int, log_length: int, seed: int) -> State:
    """An empty plan."""
    (n_strips, _), n_devices, n_features = fixed.part.shape, len(fixed.free), fixed.codes.shape[1]
    f, n = np.float64, np.int64
    return State(
        np.zeros((n_strips, n_devices), np.int16), np.zeros(n_devices, n), np.zeros((n_devices, n_strips), np.int32),
        np.zeros((n_devices, 2, n_features), f), np.zeros((n_devices, 2), f), np.zeros((n_devices, 2), n), np.zeros(n_devices, n),
        np.zeros(n_devices, f), np.zeros((n_hosts, 2), n), np.zeros((3, 2), f), np.ones((3, 2), f), np.full(n_strips, -1, n),
        np.zeros(n_strips, n), np.zeros((2, n_features), f), np.zeros(2, f), np.zeros(2, f), np.zeros(n_strips, n),
        np.zeros((2, 2, n_features), f), np.zeros((2, 2), f), np.zeros((2, 2), n), np.zeros(2, n), np.zeros(2, f),
        np.zeros((3, 2), f), np.zeros((2, n_features), f), np.zeros(2, f), np.zeros(2, f), np.zeros((_MOST, 3), n),
        np.zeros((log_length, 3), np.int32), np.zeros(7, n), np.full(2, np.inf),
        np.array([(seed * 2654435769 + 88172645463325252) % 2**64 or 1], np.uint64))



_V, _M, _C = numba.float64[::1], numba.float64[:, ::1], numba.float64[:, :, ::1]
_I, _J = numba.int64[::1], numba.int64[:, ::1]
_B = numba.boolean[:, ::1]
_FIXED = numba.types.NamedTuple(
    (numba.int32[:, ::1], _M, _V, _I, _I, _I, _I, _I, numba.boolean[::1], _B, _I, _V, _I, _V, _V, _V, _V, _V, _B, _C, _J, _M, _V,
     _V, numba.int16[:, ::1], _I, _I, _V, numba.boolean), Fixed)
_STATE = numba.types.NamedTuple(
    (numba.int16[:, ::1], _I, numba.int32[:, ::1], _C, _M, _J, _I, _V, _J, _M, _M, _I, _I, _M, _V, _V, _I, _C, _M, _J, _I, _V, _M,
     _M, _V, _V, _J, numba.int32[:, ::1], _I, _V, numba.uint64[::1]), State)


_OPTIONS = {"cache": True, "error_model": "numpy", "_nrt": False}
_inner = njit(error_model="numpy", _nrt=False)


@njit(inline="always")
def _power(x):
    for _ in range(POWERS):
        x *= x
    return x


@njit(inline="always")
def _root(x):
    return math.exp(math.log(x) / (1 << POWERS)) if x > 0.0 else 0.0


@_inner
def _uniform(st):
    x = st.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    st.random[0] = x
    return ((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(inline="always")
def _below(st, n):
    return min(int(_uniform(st) * n), n - 1)


@_inner
def _copy_norm(to, of):
    for i in range(3):
        for k in range(2):
            to[i, k] = of[i, k]


@_inner
def _every_ms(fx, size):
    """What the exchanges of tables that are everywhere take, from their sizes [2]."""
    ms = 0.0
    for w in range(2):
        if size[w] > 0.0:
            ms += fx.every_once[w] + fx.every_rate[w] * size[w]
    return ms


@_inner
def _energy(fx, ref, norm, total, every_size):
    """The smooth cost from the norms, the units of width in all, of both kinds, and the sizes of what is everywhere."""
    cost = ref[0, 0] * _root(norm[0, 0]) + _every_ms(fx, every_size)
    for k in range(2):
        if total[k] > 0:
            cost += fx.once[k] + fx.total[k] * total[k] + fx.busiest[k] * ref[1, k] * _root(norm[1, k])
            if fx.host_busiest[k] > 0.0:
                cost += fx.host_busiest[k] * ref[2, k] * _root(norm[2, k])
    return cost


@_inner
def _totals(st):
    total = (0, 0)
    for h in range(len(st.hosts)):
        total = (total[0] + st.hosts[h, 0], total[1] + st.hosts[h, 1])
    return total


@_inner
def _cost(fx, st):
    """The cost as it is, with maxima; sets the devices that are last and widest."""
    worst = 0
    for d in range(1, len(st.load)):
        if st.load[d] > st.load[worst]:
            worst = d
    st.number[WORST] = worst
    cost = st.load[worst] + _every_ms(fx, st.every_size)
    total = _totals(st)
    for k in range(2):
        if total[k] > 0:
            widest = 0
            if fx.busiest[k] > 0.0:
                for d in range(1, len(st.load)):
                    if st.width[d, k] > st.width[widest, k]:
                        widest = d
            st.number[WIDEST + k] = widest
            cost += fx.once[k] + fx.total[k] * total[k] + fx.busiest[k] * st.width[widest, k]
            if fx.host_busiest[k] > 0.0:
                most = 0
                for h in range(len(st.hosts)):
                    most = max(most, st.hosts[h, k])
                cost += fx.host_busiest[k] * most
    return cost


@_inner
def _load(fx, d, every_ms, ms, width0, width1):
    return (every_ms + ms) / fx.speed[d] + fx.own[0] * width0 + fx.own[1] * width1


@_inner
def _moved_of(fx, s, d, units):
    """Bytes of a strip that came to a device when it holds so many units."""
    return max(0, units - fx.kept[s, d]) * fx.weight[s]


@_inner
def _moves_too_much(fx, st, n):
    """Whether n edits move more than they may, all of tables of which at most two are concerned."""
    a = b = -1
    more_a = more_b = 0
    for i in range(n):
        s, d = st.edit[i, 0], st.edit[i, 1]
        more = _moved_of(fx, s, d, st.edit[i, 2]) - _moved_of(fx, s, d, st.held[s, d])
        t = fx.table[s]
        if a < 0 or a == t:
            a = t
            more_a += more
        else:
            b = t
            more_b += more
    tables = st.number[N_MOVED]
    if a >= 0:
        tables += int(st.moved[a] + more_a > 0) - int(st.moved[a] > 0)
    if b >= 0:
        tables += int(st.moved[b] + more_b > 0) - int(st.moved[b] > 0)
    too_many = tables > fx.most_moved[0] and tables > st.number[N_MOVED]
    return too_many or (st.number[BYTES_MOVED] + more_a + more_b > fx.most_moved[1] and more_a + more_b > 0)


@_inner
def _try(head, fx, st, a, b, n):
    """The energy after n edits (strip, device a or b, units then), inf where they are not allowed; fills trial_*."""
    for i in range(n):
        s, d, now = st.edit[i, 0], st.edit[i, 1], st.edit[i, 2]
        if now > 0 and len(fx.allowed) > 0 and not fx.allowed[s, d]:
            return np.inf
    st.trial_used[0], st.trial_used[1] = st.used[a], st.used[b]
    for k in range(2):
        st.trial_width[0, k], st.trial_width[1, k] = st.width[a, k], st.width[b, k]
    touched = 0
    for i in range(n):
        s, d, now = st.edit[i, 0], st.edit[i, 1], st.edit[i, 2]
        slot = 0 if d == a else 1
        was, then, k = fx.part[s, st.held[s, d]], fx.part[s, now], fx.kind[s]
        st.trial_used[slot] += fx.part_bytes[then] - fx.part_bytes[was]
        st.trial_width[slot, k] += fx.part_width[then] - fx.part_width[was]
        touched |= 1 << (2 * slot + k)
    if (st.trial_used[0] > fx.free[a] and st.trial_used[0] > st.used[a]) or (
            st.trial_used[1] > fx.free[b] and st.trial_used[1] > st.used[b]):
        return np.inf
    if len(fx.kept) > 0 and _moves_too_much(fx, st, n):
        return np.inf
    n_features = st.sums.shape[2]
    for slot in range(2):
        d = a if slot == 0 else b
        for k in range(2):
            st.trial_ms[slot, k] = st.ms[d, k]
            for f in range(n_features):
                st.trial_sums[slot, k, f] = st.sums[d, k, f]
            if touched >> (2 * slot + k) & 1:
                if st.trial_width[slot, k] == 0:
                    for f in range(n_features):
                        st.trial_sums[slot, k, f] = 0.0
                    st.trial_ms[slot, k] = 0.0
                    continue
                for i in range(n):
                    s = st.edit[i, 0]
                    if st.edit[i, 1] == d and fx.kind[s] == k:
                        was, then = fx.part[s, st.held[s, d]], fx.part[s, st.edit[i, 2]]
                        for f in range(n_features):
                            st.trial_sums[slot, k, f] += fx.codes[then, f] - fx.codes[was, f]
                st.trial_ms[slot, k] = head(st.trial_sums[slot, k], fx.parameters)
        st.trial_load[slot] = _load(fx, d, st.every_ms[0] + st.every_ms[1], st.trial_ms[slot, 0] + st.trial_ms[slot, 1],
                                    st.trial_width[slot, 0], st.trial_width[slot, 1])
    total = _totals(st)
    norm, ref = st.trial_norm, st.ref
    _copy_norm(norm, st.norm)
    for slot in range(2):
        d = a if slot == 0 else b
        norm[0, 0] += _power(st.trial_load[slot] / ref[0, 0]) - _power(st.load[d] / ref[0, 0])
        for k in range(2):
            more = st.trial_width[slot, k] - st.width[d, k]
            if more != 0:
                total = (total[0] + more, total[1]) if k == 0 else (total[0], total[1] + more)
                if fx.busiest[k] > 0.0:
                    norm[1, k] += _power(st.trial_width[slot, k] / ref[1, k]) - _power(st.width[d, k] / ref[1, k])
    if len(st.hosts) > 1:
        x, y = fx.host[a], fx.host[b]
        for k in range(2):
            if fx.host_busiest[k] > 0.0:
                more = st.trial_width[0, k] - st.width[a, k]
                also = st.trial_width[1, k] - st.width[b, k]
                if x == y:
                    more, also = more + also, 0
                norm[2, k] += _power((st.hosts[x, k] + more) / ref[2, k]) - _power(st.hosts[x, k] / ref[2, k])
                norm[2, k] += _power((st.hosts[y, k] + also) / ref[2, k]) - _power(st.hosts[y, k] / ref[2, k])
    return _energy(fx, ref, norm, total, st.every_size)


@_inner
def _hold(fx, st, s, d, units):
    """Set what a device holds of a strip, with the lists that follow."""
    was = st.held[s, d]
    if len(fx.kept) > 0:
        t = fx.table[s]
        more = _moved_of(fx, s, d, units) - _moved_of(fx, s, d, was)
        st.number[N_MOVED] += int(st.moved[t] + more > 0) - int(st.moved[t] > 0)
        st.number[BYTES_MOVED] += more
        st.moved[t] += more
    st.held[s, d] = units
    if was == 0 and units > 0:
        st.items[d, st.count[d]] = s
        st.count[d] += 1
    elif was > 0 and units == 0:
        i = 0
        while st.items[d, i] != s:
            i += 1
        st.count[d] -= 1
        st.items[d, i] = st.items[d, st.count[d]]


@_inner
def _accept(fx, st, a, b, n):
    """Carry out the edits that _try tried last."""
    for i in range(n):
        s, d = st.edit[i, 0], st.edit[i, 1]
        _note(st, s, d, st.held[s, d])
        _hold(fx, st, s, d, st.edit[i, 2])
    for slot in range(2):
        d = a if slot == 0 else b
        for k in range(2):
            st.hosts[fx.host[d], k] += st.trial_width[slot, k] - st.width[d, k]
            st.width[d, k] = st.trial_width[slot, k]
            st.ms[d, k] = st.trial_ms[slot, k]
            for f in range(st.sums.shape[2]):
                st.sums[d, k, f] = st.trial_sums[slot, k, f]
        st.used[d] = st.trial_used[slot]
        st.load[d] = st.trial_load[slot]
    _copy_norm(st.norm, st.trial_norm)


@_inner
def _refresh_every(head, fx, st):
    st.every_sums[:] = 0.0
    st.every_size[:] = 0.0
    for i in range(st.number[SPREAD]):
        s = st.spread[i]
        w = st.way[s]
        st.every_size[w] += fx.every_size[w, s]
        for f in range(st.every_sums.shape[1]):
            st.every_sums[w, f] += fx.every_codes[w, s, f]
    for w in range(2):
        st.every_ms[w] = head(st.every_sums[w], fx.parameters) if st.every_size[w] > 0.0 else 0.0


@_inner
def _set_way(st, s, way):
    """Put a strip everywhere in some way, or take it from there (-1)."""
    if st.way[s] < 0:
        st.spread[st.number[SPREAD]] = s
        st.number[SPREAD] += 1
    elif way < 0:
        i = 0
        while st.spread[i] != s:
            i += 1
        st.number[SPREAD] -= 1
        st.spread[i] = st.spread[st.number[SPREAD]]
    st.way[s] = way


@_inner
def _undo(fx, st):
    """Back to the best plan met, but for what follows from `held` and `way`."""
    while st.number[LOG] > 0:
        st.number[LOG] -= 1
        s, d, was = st.log[st.number[LOG], 0], st.log[st.number[LOG], 1], st.log[st.number[LOG], 2]
        if d < 0:
            _set_way(st, s, was)
        else:
            _hold(fx, st, s, d, was)


@_inner
def _note(st, s, d, was):
    at = st.number[LOG]
    st.log[at, 0], st.log[at, 1], st.log[at, 2] = s, d, was
    st.number[LOG] += 1


@_inner
def _refresh(head, fx, st):
    """Everything that follows from `held`, computed anew; the norms are taken relative to the means."""
    n_devices = len(st.load)
    _refresh_every(head, fx, st)
    taken = 0
    for i in range(st.number[SPREAD]):
        taken += fx.every_bytes[st.way[st.spread[i]], st.spread[i]]
    st.hosts[:] = 0
    for d in range(n_devices):
        st.sums[d] = 0.0
        st.width[d] = 0
        st.used[d] = taken
        for i in range(st.count[d]):
            s = st.items[d, i]
            p, k = fx.part[s, st.held[s, d]], fx.kind[s]
            st.used[d] += fx.part_bytes[p]
            st.width[d, k] += fx.part_width[p]
            for f in range(st.sums.shape[2]):
                st.sums[d, k, f] += fx.codes[p, f]
        for k in range(2):
            st.ms[d, k] = head(st.sums[d, k], fx.parameters) if st.width[d, k] > 0 else 0.0
            st.hosts[fx.host[d], k] += st.width[d, k]
        st.load[d] = _load(fx, d, st.every_ms[0] + st.every_ms[1], st.ms[d, 0] + st.ms[d, 1], st.width[d, 0], st.width[d, 1])
    total = _totals(st)
    st.ref[0, 0] = max(st.load.mean(), 1e-12)
    for k in range(2):
        st.ref[1, k] = max(total[k] / n_devices, 1.0)
        st.ref[2, k] = max(total[k] / len(st.hosts), 1.0)
    st.norm[:] = 0.0
    for d in range(n_devices):
        st.norm[0, 0] += _power(st.load[d] / st.ref[0, 0])
        for k in range(2):
            st.norm[1, k] += _power(st.width[d, k] / st.ref[1, k])
    for h in range(len(st.hosts)):
        for k in range(2):
            st.norm[2, k] += _power(st.hosts[h, k] / st.ref[2, k])
    st.value[ENERGY] = _energy(fx, st.ref, st.norm, total, st.every_size)


@njit(numba.float64(HEAD, _FIXED, _STATE), **_OPTIONS)
def refresh(head, fx, st):
    """Compute everything that follows from `held`; returns the plan's cost, which is the best met from now on."""
    _refresh(head, fx, st)
    st.number[LOG] = 0
    st.value[BEST] = _cost(fx, st)
    return st.value[BEST]


@njit(numba.float64(HEAD, _FIXED, _STATE), **_OPTIONS)
def rewind(head, fx, st):
    """Back to the best plan met; returns its cost."""
    _undo(fx, st)
    _refresh(head, fx, st)
    st.value[BEST] = _cost(fx, st)
    return st.value[BEST]


@njit(numba.void(_FIXED, _STATE, numba.int64[:, ::1]), **_OPTIONS)
def place(fx, st, pieces):
    """Add pieces [N, 3]: strip, device, units; to be followed by `refresh`."""
    for i in range(len(pieces)):
        s, d = pieces[i, 0], pieces[i, 1]
        _hold(fx, st, s, d, st.held[s, d] + pieces[i, 2])


@_inner
def _exchange(fx, st, d, k, more):
    """ms that a device's and its host's widths make of the exchanges, were they the largest, with so much more of a kind."""
    ms = 0.0
    for j in range(2):
        width = more if j == k else 0
        ms += (fx.own[j] + fx.busiest[j]) * (st.width[d, j] + width) + fx.host_busiest[j] * (st.hosts[fx.host[d], j] + width)
    return ms


@njit(numba.void(HEAD, _FIXED, _STATE, numba.int64[::1], numba.int64), **_OPTIONS)
def put_everywhere(head, fx, st, strips, way):
    """Put strips [N] everywhere, one way or the other; before all others are placed."""
    for s in strips:
        _set_way(st, s, way)
    _refresh(head, fx, st)


@njit(numba.boolean(HEAD, _FIXED, _STATE, numba.int64[:, ::1]), **_OPTIONS)
def greedy(head, fx, st, pieces):
    """Add pieces [N, 2] (strip, units) in their order, each to the device that it leaves least loaded, exchanges included; False
    where one fits nowhere. Of devices that hold nothing and are equal, one is looked at."""
    n_devices, every_ms = len(st.load), st.every_ms[0] + st.every_ms[1]
    for i in range(len(pieces)):
        s, units = pieces[i, 0], pieces[i, 1]
        k, least, best, best_ms = fx.kind[s], np.inf, -1, 0.0
        seen_empty = -1
        for d in range(n_devices):
            now = st.held[s, d] + units
            if len(fx.allowed) > 0 and not fx.allowed[s, d]:
                continue
            was, then = fx.part[s, st.held[s, d]], fx.part[s, now]
            if st.used[d] + fx.part_bytes[then] - fx.part_bytes[was] > fx.free[d]:
                continue
            if st.count[d] == 0:
                e = seen_empty
                if e >= 0 and fx.speed[e] == fx.speed[d] and fx.host[e] == fx.host[d] and fx.free[e] >= fx.free[d]:
                    continue
                seen_empty = d
            lower = (every_ms + st.ms[d, 0] + st.ms[d, 1]) / fx.speed[d] + _exchange(fx, st, d, 0, 0)
            if lower >= least:
                continue
            for f in range(st.sums.shape[2]):
                st.trial_sums[0, 0, f] = st.sums[d, k, f] + fx.codes[then, f] - fx.codes[was, f]
            ms = head(st.trial_sums[0, 0], fx.parameters)
            after = (every_ms + ms + st.ms[d, 1 - k]) / fx.speed[d] + _exchange(
                fx, st, d, k, fx.part_width[then] - fx.part_width[was])
            if after < least:
                least, best, best_ms = after, d, ms
        if best < 0:
            return False
        was = fx.part[s, st.held[s, best]]
        _hold(fx, st, s, best, st.held[s, best] + units)
        then = fx.part[s, st.held[s, best]]
        for f in range(st.sums.shape[2]):
            st.sums[best, k, f] += fx.codes[then, f] - fx.codes[was, f]
        st.ms[best, k] = best_ms
        more = fx.part_width[then] - fx.part_width[was]
        st.width[best, k] += more
        st.hosts[fx.host[best], k] += more
        st.used[best] += fx.part_bytes[then] - fx.part_bytes[was]
    return True


@njit(inline="always")
def _edit(st, i, s, d, units):
    st.edit[i, 0], st.edit[i, 1], st.edit[i, 2] = s, d, units


@_inner
def _other_holder(st, s, a):
    """Another device that holds some of a strip, looked for among 64; -1 where there is none."""
    n = len(st.load)
    d = _below(st, n)
    for _ in range(min(n, 64)):
        if d != a and st.held[s, d] > 0:
            return d
        d = d + 1 if d + 1 < n else 0
    return -1


@_inner
def _propose(fx, st):
    """Edits of two devices: (a, b, how many); none where the draw leads nowhere."""
    n = len(st.load)
    u = _uniform(st)
    if u < 0.5:
        a = st.number[WORST]
    elif u < 0.65:
        a = st.number[WIDEST + (1 if u > 0.6 else 0)]
    else:
        a = _below(st, n)
    if st.count[a] == 0:
        return 0, 0, 0
    s = st.items[a, _below(st, st.count[a])]
    units, size = int(st.held[s, a]), fx.size[s]
    b = _below(st, n)
    c = _below(st, n)
    if _uniform(st) < 0.7 and st.load[c] < st.load[b]:
        b = c
    if units < size and _uniform(st) < 0.25:
        c = _other_holder(st, s, a)
        if c >= 0:
            b = c
    if a == b:
        return 0, 0, 0
    part = units
    if fx.may_split[s] and units > 1 and _uniform(st) < 0.4:  # some of it
        part = units // 2 if fx.halves or _uniform(st) < 0.3 else 1 + _below(st, units - 1)
    _edit(st, 0, s, a, units - part)
    _edit(st, 1, s, b, st.held[s, b] + part)
    u = _uniform(st)
    if u < 0.15 and len(fx.kept) == 0:
        return a, b, _trade(fx, st, s, a, b, part)
    if u < 0.6 and st.count[b] > 0:  # for something else
        r = st.items[b, _below(st, st.count[b])]
        if r == s:
            return 0, 0, 0
        back = int(st.held[r, b])
        if fx.may_split[r] and back > 1 and _uniform(st) < 0.2:
            back = back // 2 if fx.halves else 1 + _below(st, back - 1)
        _edit(st, 2, r, b, st.held[r, b] - back)
        _edit(st, 3, r, a, st.held[r, a] + back)
        return a, b, 4
    return a, b, 2


@_inner
def _trade(fx, st, s, a, b, part):
    """How many edits give so much of a strip to b for several others that cost about as much: what makes room for a part of a
    table that outweighs a device."""
    want = fx.added_ms[fx.part[s, part]] * (0.3 + 0.8 * _uniform(st))
    n, i = 2, _below(st, max(st.count[b], 1))
    for _ in range(st.count[b]):
        i = i + 1 if i + 1 < st.count[b] else 0
        r = st.items[b, i]
        ms = fx.added_ms[fx.part[r, st.held[r, b]]]
        if r != s and ms <= want:
            _edit(st, n, r, b, 0)
            _edit(st, n + 1, r, a, st.held[r, a] + st.held[r, b])
            want -= ms
            n += 2
            if n + 2 > _MOST:
                break
    return n


@_inner
def _change_everywhere(head, fx, st, threshold):
    """Try to put a table that one device has whole everywhere, or one from there onto a device, or both; make it so if the energy
    then is below the threshold."""
    n, n_spread = len(st.load), st.number[SPREAD]
    b, leaves, comes, way = _below(st, n), -1, -1, 0
    if _uniform(st) < 0.5:
        b = st.number[WORST]
    if n_spread > 0 and _uniform(st) < 0.6:
        leaves = st.spread[_below(st, n_spread)]
        way = st.way[leaves]
        c = _below(st, n)
        b = c if st.load[c] < st.load[b] else b
        if not fx.every[way, leaves]:
            return False
    if (leaves < 0 or _uniform(st) < 0.6) and st.count[b] > 0:
        comes = st.items[b, _below(st, st.count[b])]
        if leaves < 0:
            way = _below(st, 2)
        if not fx.every[way, comes] or st.held[comes, b] != fx.size[comes]:
            return False
    if leaves < 0 and comes < 0:
        return False
    n_features, norm, ref = st.sums.shape[2], st.trial_norm, st.ref
    on_b, everywhere, width = 0, 0, st.width[b, 0]
    for w in range(2):
        st.trial_every_size[w] = st.every_size[w]
        st.trial_every_ms[w] = st.every_ms[w]
    for f in range(n_features):
        st.trial_every_sums[way, f] = st.every_sums[way, f]
        st.trial_sums[0, 0, f] = st.sums[b, 0, f]
    if leaves >= 0:
        p = fx.part[leaves, fx.size[leaves]]
        on_b += fx.part_bytes[p]
        everywhere -= fx.every_bytes[way, leaves]
        width += fx.part_width[p]
        st.trial_every_size[way] -= fx.every_size[way, leaves]
        for f in range(n_features):
            st.trial_sums[0, 0, f] += fx.codes[p, f]
            st.trial_every_sums[way, f] -= fx.every_codes[way, leaves, f]
    if comes >= 0:
        p = fx.part[comes, fx.size[comes]]
        on_b -= fx.part_bytes[p]
        everywhere += fx.every_bytes[way, comes]
        width -= fx.part_width[p]
        st.trial_every_size[way] += fx.every_size[way, comes]
        for f in range(n_features):
            st.trial_sums[0, 0, f] -= fx.codes[p, f]
            st.trial_every_sums[way, f] += fx.every_codes[way, comes, f]
    st.trial_every_ms[way] = head(st.trial_every_sums[way], fx.parameters) if st.trial_every_size[way] > 0.0 else 0.0
    ms = head(st.trial_sums[0, 0], fx.parameters) if width > 0 else 0.0
    every_ms = st.trial_every_ms[0] + st.trial_every_ms[1]
    _copy_norm(norm, st.norm)
    norm[0, 0] = 0.0
    for d in range(n):
        more = everywhere + on_b if d == b else everywhere
        if more > 0 and st.used[d] + more > fx.free[d]:
            return False
        if d == b:
            load = _load(fx, d, every_ms, ms + st.ms[d, 1], width, st.width[d, 1])
        else:
            load = _load(fx, d, every_ms, st.ms[d, 0] + st.ms[d, 1], st.width[d, 0], st.width[d, 1])
        norm[0, 0] += _power(load / ref[0, 0])
    if len(fx.allowed) > 0 and leaves >= 0 and not fx.allowed[leaves, b]:
        return False
    norm[1, 0] += _power(width / ref[1, 0]) - _power(st.width[b, 0] / ref[1, 0])
    h, total = fx.host[b], _totals(st)
    more = width - st.width[b, 0]
    norm[2, 0] += _power((st.hosts[h, 0] + more) / ref[2, 0]) - _power(st.hosts[h, 0] / ref[2, 0])
    energy = _energy(fx, ref, norm, (total[0] + more, total[1]), st.trial_every_size)
    if energy >= threshold:
        return False
    if leaves >= 0:
        _note(st, leaves, -1, way)
        _set_way(st, leaves, -1)
        _note(st, leaves, b, 0)
        _hold(fx, st, leaves, b, fx.size[leaves])
    if comes >= 0:
        _note(st, comes, b, fx.size[comes])
        _hold(fx, st, comes, b, 0)
        _note(st, comes, -1, -1)
        _set_way(st, comes, way)
    _refresh(head, fx, st)
    return True


@njit(numba.float64(HEAD, _FIXED, _STATE, numba.int64, numba.float64, numba.float64), **_OPTIONS)
def anneal(head, fx, st, trials, hot_ms, cold_ms):
    """Try so many changes, the temperature falling from hot_ms to cold_ms; returns the cost of the best plan met."""
    # Changes everywhere take time for each device, and there are fewer of them.
    often = min(_EVERYWHERE, 2.0 / len(st.load)) if fx.every.any() else 0.0
    temperature, cooling = hot_ms, (cold_ms / hot_ms) ** (1.0 / max(trials, 1))
    for _ in range(trials):
        temperature *= cooling
        threshold = st.value[ENERGY] - temperature * math.log(max(_uniform(st), 1e-300))
        if often > 0.0 and _uniform(st) < often:
            if not _change_everywhere(head, fx, st, threshold):
                continue
        else:
            a, b, n = _propose(fx, st)
            if n == 0:
                continue
            energy = _try(head, fx, st, a, b, n)
            if energy >= threshold:
                continue
            _accept(fx, st, a, b, n)
            st.value[ENERGY] = energy
        cost = _cost(fx, st)
        if cost < st.value[BEST]:
            st.value[BEST] = cost
            st.number[LOG] = 0
        elif st.number[LOG] + _MOST > len(st.log):  # begin again from the best
            _undo(fx, st)
            _refresh(head, fx, st)
            _cost(fx, st)
    return st.value[BEST]
