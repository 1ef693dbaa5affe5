"""Moves of tables that groups of devices share: into a group, out of it, or between groups.

Each changes every device of a group. So they cost more than other moves and are tried less often.
"""

from numba import int64

from shardcore.core.jit import inner
from shardcore.search.anneal.compiled.moves import below, uniform
from shardcore.step.engine.arrays import (
    FIRST,
    GROUP_RUN,
    LAYOUT_OF,
    LOAD,
    LOG,
    N_SHARED,
    OVER,
    RUN,
    SIZE,
    WORST,
)
from shardcore.step.engine.cost import copy, energy_of, is_less, n_devices_of
from shardcore.step.engine.state import (
    hold,
    note,
    recompute,
    set_group,
    sum_exchanges,
    sum_loads,
    undo,
)
from shardcore.step.engine.trial import begin_trial, edit_ops, price_ops


@inner
def propose_shared(fx, st):
    """Draw a move: (leaves, start, comes, to, b, back). An entry of -1 means none; all -1: no move.

    leaves: a strip that leaves group `start`, for another group `to` or for device b.
    comes: a strip that leaves device b for group `to`.
    back: a strip that leaves group `to` for `start`, where `leaves` goes the other way.
    """
    n, n_shared = n_devices_of(st), st.number[N_SHARED]
    b, leaves, comes, y = below(st, n), -1, -1, 0
    nothing = (-1, -1, -1, -1, -1, -1)
    # Prefer the slowest device as the giver.
    if uniform(st) < 0.5:
        b = st.number[WORST]
    if n_shared > 0 and uniform(st) < 0.6:
        leaves = st.shared[below(st, n_shared)]
        y = fx.groups[st.group[leaves], LAYOUT_OF]
        # A strip that leaves a group goes to the less loaded of two devices.
        c = below(st, n)
        b = c if is_less(st.devices[c, LOAD], st.devices[b, LOAD]) else b
        # Some spaces let no strip change its group, or only some (SearchSpace.as_it_is, among_groups).
        if not fx.may_share[y, leaves]:
            return nothing
        start, to = st.group[leaves], fx.group_of[y, b]
        # Here b stands for its group: the strip goes there, perhaps in exchange for one of that group's.
        if to != start and uniform(st) < 0.5:
            back = st.shared[below(st, n_shared)]
            swaps = st.group[back] == to and fx.may_share[y, back] and uniform(st) < 0.7
            return leaves, start, -1, to, b, back if swaps else -1
    # Another strip may take its place, or come alone. It has to be whole on b.
    if (leaves < 0 or uniform(st) < 0.6) and st.count[b] > 0:
        comes = st.strips[b, below(st, st.count[b])]
        if leaves < 0:
            y = below(st, len(fx.may_share))
        if not fx.may_share[y, comes] or st.held[comes, b] != fx.strips[comes, SIZE] or fx.group_of[y, b] < 0:
            return nothing
    if leaves < 0 and comes < 0:
        return nothing
    start = st.group[leaves] if leaves >= 0 else -1
    to = -1
    if comes >= 0:
        to = start
        if leaves < 0:  # mostly b's own group
            to = fx.group_of[y, b]
            c = fx.group_of[y, below(st, n)] if len(fx.groups) > len(fx.may_share) else to
            if c != to and c >= 0 and uniform(st) < 0.5:
                to = c
    return leaves, start, comes, to, b, -1


@inner
def group_option(fx, y, s):
    """The option of strip s on a device of a group of layout y. Nothing for a strip of -1."""
    return fx.shared[0, y, s] if s >= 0 else int64(0)


@inner
def trial_energy(head, fx, st, leaves, start, comes, to, b, back):
    """The energy in ms after a move that `propose_shared` draws. Only the rows of trials change."""
    n, moves = n_devices_of(st), comes < 0 and to >= 0
    group, s = fx.groups[start if start >= 0 else to], leaves if leaves >= 0 else comes
    y = group[LAYOUT_OF]
    # The run of the groups' ops, and that of b's own op for such strips.
    # (Tables of a layout are of one collection, so both strips are of one kind.)
    r, k = group[GROUP_RUN], fx.strips[s, RUN]
    # The first row has the op of group `start` and b's own op, the second has the op of group `to`.
    begin_trial(st, b, n)
    begin_trial(st, b, n + 1)
    if start >= 0:
        st.row[n, r] = fx.groups[start, FIRST]
        enters = comes if to == start else back
        edit_ops(fx, st, n, group_option(fx, y, leaves), group_option(fx, y, enters))
    if to >= 0 and to != start:
        st.row[n + 1, r] = fx.groups[to, FIRST]
        enters = leaves if moves else comes
        edit_ops(fx, st, n + 1, group_option(fx, y, back), group_option(fx, y, enters))
    if not moves:
        # Strips are whole on b.
        was = int64(fx.shard[comes, fx.strips[comes, SIZE]]) if comes >= 0 else int64(0)
        then = int64(fx.shard[leaves, fx.strips[leaves, SIZE]]) if leaves >= 0 else int64(0)
        edit_ops(fx, st, n, was, then)
    price_ops(head, fx, st, n)
    price_ops(head, fx, st, n + 1)
    # Every device of a group has the op of the trial, until the energy is known.
    for d in range(n):
        g = fx.group_of[y, d]
        if g >= 0 and (g == start or g == to):
            st.row[d, r] = n if g == start else n + 1
    if not moves:
        st.row[b, k] = n
    for i in range(3):
        copy(st.norm[1, i], st.norm[0, i])
    copy(st.hosts[1, -1], st.hosts[0, -1])
    # Many loads and bytes change. So their norms are summed anew.
    sum_loads(fx, st)
    sum_exchanges(fx, st, r)
    sum_exchanges(fx, st, k)
    energy = energy_of(fx, st, int64(1))
    for d in range(n):
        st.row[d, r] = d
    st.row[b, k] = b
    return energy


@inner
def change_shared(head, fx, st, threshold):
    """Try one move of shared tables. Carry it out if the energy is then below the threshold."""
    leaves, start, comes, to, b, back = propose_shared(fx, st)
    if b < 0:
        return False
    moves = leaves >= 0 and comes < 0 and to >= 0  # between groups
    if leaves >= 0 and not moves and len(fx.allowed) > 0 and not fx.allowed[leaves, b]:
        return False
    if trial_energy(head, fx, st, leaves, start, comes, to, b, back) >= threshold:
        return False
    # From here on the plan itself changes. It is changed back if it turns out not to fit.
    over, mark = st.value[OVER], st.number[LOG]
    if leaves >= 0:
        # Note each step before it is taken, so that `undo` can go back in reverse order.
        note(st, leaves, int64(-1), start)
        set_group(st, leaves, to if moves else -1)
        if not moves:
            note(st, leaves, b, int64(0))
            hold(fx, st, leaves, b, fx.strips[leaves, SIZE])
    if back >= 0:
        note(st, back, int64(-1), to)
        set_group(st, back, start)
    if comes >= 0:
        note(st, comes, b, fx.strips[comes, SIZE])
        hold(fx, st, comes, b, int64(0))
        note(st, comes, int64(-1), int64(-1))
        set_group(st, comes, to)
    # Every device of a group changed. A full recompute is simple, and removes rounding errors.
    recompute(head, fx, st)
    # Only then it is known what the local batch takes, and so whether devices fit.
    if st.value[OVER] > over:
        undo(fx, st, mark)
        recompute(head, fx, st)
        return False
    return True
