"""Moves of tables that groups of devices share: into a group, out of it, or between groups.

Each changes every device of a group. So they cost more than other moves and are tried less often.
"""

from numba import int64

from shardcore.core.jit import seldom
from shardcore.search.anneal.compiled.arrays import LOG, N_SHARED, OVER, WORST
from shardcore.search.anneal.compiled.cost import (
    add,
    copy,
    copy_norm,
    energy_of,
    is_less,
    load_of,
    power,
    total_of,
)
from shardcore.search.anneal.compiled.moves import below, uniform
from shardcore.search.anneal.compiled.state import hold, note, recompute, set_group, undo


@seldom
def propose_shared(fx, st):
    """Draw a move: (leaves, start, comes, to, b, back). An entry of -1 means none; all -1: no move.

    leaves: a strip that leaves group `start`, for another group `to` or for device b.
    comes: a strip that leaves device b for group `to`.
    back: a strip that leaves group `to` for `start`, where `leaves` goes the other way.
    """
    n, n_shared = len(st.load), st.number[N_SHARED]
    b, leaves, comes, y = below(st, n), -1, -1, 0
    nothing = (-1, -1, -1, -1, -1, -1)
    # Prefer the slowest device as the giver.
    if uniform(st) < 0.5:
        b = st.number[WORST]
    if n_shared > 0 and uniform(st) < 0.6:
        leaves = st.shared[below(st, n_shared)]
        y = fx.group_layout[st.group[leaves]]
        # A strip that leaves a group goes to the less loaded of two devices.
        c = below(st, n)
        b = c if is_less(st.load[c], st.load[b]) else b
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
            y = below(st, len(fx.shared_once))
        if not fx.may_share[y, comes] or st.held[comes, b] != fx.size[comes] or fx.group_of[y, b] < 0:
            return nothing
    if leaves < 0 and comes < 0:
        return nothing
    start = st.group[leaves] if leaves >= 0 else -1
    to = -1
    if comes >= 0:
        to = start
        if leaves < 0:  # mostly b's own group
            to = fx.group_of[y, b]
            c = fx.group_of[y, below(st, n)] if len(st.group_size) > len(fx.shared_once) else to
            if c != to and c >= 0 and uniform(st) < 0.5:
                to = c
    return leaves, start, comes, to, b, -1


@seldom
def try_group(head, fx, st, slot, g, leaves, comes):
    """Fill trial_group_*[slot] for group g after one strip leaves and another comes. -1: no such strip."""
    y, sums = fx.group_layout[g], st.trial_group_sums[slot]
    st.trial_group_size[g] = st.group_size[g]
    copy(sums, st.group_sums[g])
    if leaves >= 0:
        st.trial_group_size[g] -= fx.shared_size[y, leaves]
        for f in range(len(sums)):
            sums[f] -= fx.shared_codes[y, leaves, f]
    if comes >= 0:
        st.trial_group_size[g] += fx.shared_size[y, comes]
        add(sums, fx.shared_codes[y, comes])
    # Sizes are whole numbers, so that an empty group is exactly 0.
    some = st.trial_group_size[g] > 0.0
    st.trial_group_ms[slot] = head(sums, fx.parameters) if some else 0.0
    if len(fx.fetched) > 0:
        st.trial_group_fetched_ms[slot] = head(sums, fx.fetched) if some else 0.0


@seldom
def change_shared(head, fx, st, threshold):
    """Try one move of shared tables. Carry it out if the energy is then below the threshold."""
    leaves, start, comes, to, b, back = propose_shared(fx, st)
    if b < 0:
        return False
    moves = leaves >= 0 and comes < 0 and to >= 0  # between groups
    n, norm, ref = len(st.load), st.trial_norm, st.ref
    y = fx.group_layout[start if start >= 0 else to]
    copy(st.trial_group_size, st.group_size)
    # int64(...): numba would compile a function again for each constant.
    if start >= 0:
        try_group(head, fx, st, int64(0), start, leaves, comes if to == start else back)
    if to >= 0 and to != start:
        try_group(head, fx, st, int64(1), to, back, leaves if moves else comes)
    # Encodings of b's op for such strips after the move.
    # (Tables of a layout are of one collection, so both strips are of one kind.)
    k = fx.kind[leaves if leaves >= 0 else comes]
    carried, sums = st.trial_carried[0], st.trial_sums[0, 0]
    # The exchanges that bring ids to b, and to the groups.
    ids, shared_by = fx.ids_by[k], fx.shared_ids_by[y]
    copy(carried, st.carried[b])
    copy(sums, st.sums[b, k])
    # The strip that leaves comes whole to b.
    if leaves >= 0 and not moves:
        if len(fx.allowed) > 0 and not fx.allowed[leaves, b]:
            return False
        shard = fx.shard[leaves, fx.size[leaves]]
        carried[k] += fx.outputs[shard]
        carried[ids] += fx.ids[shard]
        add(sums, fx.codes[shard])
    if comes >= 0:
        shard = fx.shard[comes, fx.size[comes]]
        carried[k] -= fx.outputs[shard]
        carried[ids] -= fx.ids[shard]
        for f in range(len(sums)):
            sums[f] -= fx.codes[shard, f]
    ms = head(sums, fx.parameters) if carried[k] > 0 else 0.0
    fetched_ms = head(sums, fx.fetched) if len(fx.fetched) > 0 and carried[k] > 0 else 0.0
    # Bytes of ids that each device of group `start` loses, and of group `to` gains.
    out_ids = fx.shared_ids[y, leaves] if leaves >= 0 else 0
    in_ids = (fx.shared_ids[y, leaves] if moves else fx.shared_ids[y, comes]) if to >= 0 else 0
    if back >= 0:
        out_ids, in_ids = out_ids - fx.shared_ids[y, back], in_ids - fx.shared_ids[y, back]
    copy_norm(norm, st.norm)
    # Every device of a group changes. So the norms of loads and of ids are summed anew.
    norm[0, 0] = norm[0, 1] = 0.0
    for d in range(n):
        g = fx.group_of[y, d]
        shared_ms, own_ms = st.shared_ms[d], st.own_ms[d]
        fetched = st.shared_fetched_ms[d] + total_of(st.fetched_ms[d])
        if g >= 0 and (g == start or g == to):
            slot = 0 if g == start else 1
            shared_ms += st.trial_group_ms[slot] - st.group_ms[g]
            fetched += st.trial_group_fetched_ms[slot] - st.group_fetched_ms[g]
            own_ms += fx.shared_own[y] * (st.trial_group_size[g] - st.group_size[g])
        if d == b:
            load = load_of(fx, d, shared_ms, own_ms, ms + total_of(st.ms[d]) - st.ms[d, k], carried)
            fetched += fetched_ms - st.fetched_ms[d, k]
        else:
            load = load_of(fx, d, shared_ms, own_ms, total_of(st.ms[d]), st.carried[d])
        norm[0, 0] += power(load / ref[0, 0])
        norm[0, 1] += power(fetched / fx.speed[d] / ref[0, 1])
    # The exchanges of ids, which follow those of outputs.
    for x in range(len(fx.ids_by), len(carried)):
        norm[1, x] = 0.0
        norm[2, x] = 0.0
        st.trial_hosts[:] = 0
        st.trial_all_carried[x] = 0
        for d in range(n):
            g = fx.group_of[y, d]
            received = carried[x] if d == b else st.carried[d, x]
            if x == shared_by and g >= 0 and (g == start or g == to):
                received += (in_ids if g == to else 0) - (out_ids if g == start else 0)
            norm[1, x] += power(received / ref[1, x])
            st.trial_hosts[fx.host[d]] += received
            st.trial_all_carried[x] += received
        for h in range(len(st.trial_hosts)):
            norm[2, x] += power(st.trial_hosts[h] / ref[2, x])
    # Outputs change on b only, and only those of kind k.
    norm[1, k] += power(carried[k] / ref[1, k]) - power(st.carried[b, k] / ref[1, k])
    h, wider = fx.host[b], carried[k] - st.carried[b, k]
    norm[2, k] += power((st.hosts[h, k] + wider) / ref[2, k]) - power(st.hosts[h, k] / ref[2, k])
    for x in range(len(fx.ids_by)):
        st.trial_all_carried[x] = st.all_carried[x]
    st.trial_all_carried[k] += wider
    if energy_of(fx, ref, norm, st.trial_all_carried, st.trial_group_size) >= threshold:
        return False
    # From here on the plan itself changes. It is changed back if it turns out not to fit.
    over, mark = st.value[OVER], st.number[LOG]
    if leaves >= 0:
        # Note each step before it is taken, so that `undo` can go back in reverse order.
        note(st, leaves, int64(-1), start)
        set_group(st, leaves, to if moves else -1)
        if not moves:
            note(st, leaves, b, int64(0))
            hold(fx, st, leaves, b, fx.size[leaves])
    if back >= 0:
        note(st, back, int64(-1), to)
        set_group(st, back, start)
    if comes >= 0:
        note(st, comes, b, fx.size[comes])
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
