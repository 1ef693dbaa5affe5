"""Moves between two devices: propose one, price it, carry it out.

A move is a list of edits in st.edit. An edit says how many units of a strip a device holds afterwards.
"""

import numpy as np
from numba import int64

from shardcore.core.jit import inner, seldom
from shardcore.search.anneal.compiled.arrays import (
    BYTES_MOVED,
    MOST_EDITS,
    N_MOVED,
    ON_HOST,
    RESIDENT,
    SENT,
    WIDEST,
    WORST,
)
from shardcore.search.anneal.compiled.cost import (
    copy,
    copy_norm,
    energy_of,
    is_less,
    load_of,
    power,
    replace,
    total_of,
)
from shardcore.search.anneal.compiled.memory import (
    batch_most,
    change_parts,
    frame,
    host_fits,
    lack_of,
    replace_shard,
    room_of,
)
from shardcore.search.anneal.compiled.state import hold, moved_of, note


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
def edit(st, i, s, d, units):
    """Write edit i: device d holds `units` of strip s afterwards."""
    st.edit[i, 0], st.edit[i, 1], st.edit[i, 2] = s, d, units


@inner
def other_holder(st, s, a):
    """A random device other than a that holds some of strip s, or -1. Looks at 64 devices at most."""
    n = len(st.load)
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
    n = len(st.load)
    # Choose device a: half of the time the slowest one. Only a change there lowers the maximum.
    u = uniform(st)
    if u < 0.5:
        a = st.number[WORST]
    elif u < 0.65:
        # Mostly the one with most columns, else the one that carries most in another exchange of strips.
        # Strips of the last kind use the last of these, as kinds and their exchanges of ids are in order.
        x = 0 if u <= 0.6 else 1 + below(st, fx.ids_by[-1])
        a = st.number[WIDEST + x]
    else:
        a = below(st, n)
    if st.count[a] == 0:
        return 0, 0, 0
    # Choose a strip that a holds, and device b. The less loaded of two draws mostly wins.
    s = int64(st.strips[a, below(st, st.count[a])])
    units, size = int(st.held[s, a]), fx.size[s]
    b = below(st, n)
    c = below(st, n)
    if uniform(st) < 0.7 and is_less(st.load[c], st.load[b]):
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


@seldom
def moves_too_much(fx, st, n):
    """Tell if n edits exceed the re-sharding limits. The edits concern at most two tables."""
    # Sum by table: what it gains on one device may be what it loses on the other.
    a = b = -1
    more_a = more_b = joint_a = joint_b = 0
    for i in range(n):
        s, d = st.edit[i, 0], st.edit[i, 1]
        more = moved_of(fx, s, d, st.edit[i, 2]) - moved_of(fx, s, d, int64(st.held[s, d]))
        t = fx.table[s]
        if a < 0 or a == t:
            a = t
            more_a += more
            joint_a = fx.joint[s]
        else:
            b = t
            more_b += more
            joint_b = fx.joint[s]
    # A table counts as moved once some device holds bytes of it that it did not have.
    tables = st.number[N_MOVED]
    if a >= 0:
        tables += (int(st.moved[a] + more_a > 0) - int(st.moved[a] > 0)) * joint_a
    if b >= 0:
        tables += (int(st.moved[b] + more_b > 0) - int(st.moved[b] > 0)) * joint_b
    # A plan above a limit may still come closer to it: only a further increase is refused.
    too_many = tables > fx.most_moved[0] and tables > st.number[N_MOVED]
    return too_many or (st.number[BYTES_MOVED] + more_a + more_b > fx.most_moved[1] and more_a + more_b > 0)


@inner
def fits(fx, st, a, b, n):
    """Tell if all devices fit after n edits on devices a and b. A device that lacks bytes may lack as many.

    Fills trial_memory, trial_room and trial_lack. Where all fit, the local batch is that after the edits.
    """
    n_kinds, sent, before, changes = len(fx.ids_by), st.value[SENT], batch_most(fx, st), False
    copy(st.trial_memory[0], st.memory[a])
    copy(st.trial_memory[1], st.memory[b])
    for i in range(n):
        s, d, now = st.edit[i, 0], st.edit[i, 1], st.edit[i, 2]
        was, then = fx.shard[s, st.held[s, d]], fx.shard[s, now]
        replace_shard(fx, st.trial_memory[0 if d == a else 1], was, then, fx.ids_by[fx.kind[s]] - n_kinds)
        # Runs with cut tables have a larger local batch.
        # (It comes before `or`, as each edit has to be counted.)
        changes = change_parts(fx, st, s, int64(st.held[s, d]), now) or changes
    if changes:
        frame(fx, st)
    fit = True
    for slot in range(2):
        d, row = a if slot == 0 else b, st.trial_memory[slot]
        st.trial_room[slot] = room_of(fx, d, row)
        st.trial_lack[slot] = lack_of(fx, st, d, row, st.trial_room[slot])
        fit = fit and st.trial_lack[slot] <= st.lack[d]
        if fx.host_free < np.inf and fx.host[a] != fx.host[b]:
            fit = fit and host_fits(fx, st, d, row[ON_HOST] - st.memory[d, ON_HOST])
    # The local batch is that of all devices. More parts of tables have more ids.
    most = batch_most(fx, st)
    if fit and (changes or most > before):
        for d in range(len(st.lack)):
            # `room` is a lower bound, so only devices that it does not clear are counted exactly.
            if st.room[d] < most and st.lack[d] == 0.0 and d != a and d != b:
                if lack_of(fx, st, d, st.memory[d], st.room[d]) > 0.0:
                    fit = False
                    break
    # The trial changed the local batch in place. Change it back.
    if not fit:
        for i in range(n):
            s, d = st.edit[i, 0], st.edit[i, 1]
            change_parts(fx, st, s, st.edit[i, 2], int64(st.held[s, d]))
        # Without the rounding errors of sums.
        st.value[SENT] = sent
        if changes:
            frame(fx, st)
    # With another local batch, devices that lack bytes lack more or fewer.
    elif changes or most != before:
        for d in range(len(st.lack)):
            if st.lack[d] > 0.0:
                st.lack[d] = lack_of(fx, st, d, st.memory[d], st.room[d])
    return fit


@inner
def try_edits(head, fx, st, a, b, n):
    """The energy in ms after n edits on devices a and b. Infinite where they are not allowed.

    Fills the trial_* arrays, which `accept` takes over. `fits` fills those of memory.
    """
    for i in range(n):
        s, d, now = st.edit[i, 0], st.edit[i, 1], st.edit[i, 2]
        if now > 0 and len(fx.allowed) > 0 and not fx.allowed[s, d]:
            return np.inf
    # Cheap checks come first: no head is called for a move that is not allowed.
    n_exchanges, n_kinds = st.carried.shape[1], len(fx.ids_by)
    # Bytes left beside what is resident.
    left_a, left_b = fx.free[a] - st.memory[a, RESIDENT], fx.free[b] - st.memory[b, RESIDENT]
    for slot in range(2):
        d = a if slot == 0 else b
        copy(st.trial_carried[slot], st.carried[d])
        copy(st.trial_ms[slot], st.ms[d])
        copy(st.trial_fetched_ms[slot], st.fetched_ms[d])
    for i in range(n):
        s, d, now = st.edit[i, 0], st.edit[i, 1], st.edit[i, 2]
        slot = 0 if d == a else 1
        was, then, k = fx.shard[s, st.held[s, d]], fx.shard[s, now], fx.kind[s]
        more = fx.sums[then, 0] - fx.sums[was, 0]
        left_a -= more if slot == 0 else 0.0
        left_b -= more if slot == 1 else 0.0
        st.trial_carried[slot, k] += fx.outputs[then] - fx.outputs[was]
        st.trial_carried[slot, fx.ids_by[k]] += fx.ids[then] - fx.ids[was]
        # The fused op of kind k on that device changes: its cost is not known yet.
        st.trial_ms[slot, k] = -1.0
    # Resident bytes alone refuse many moves. `fits` counts all bytes, and only for the few that cost little enough.
    if -left_a > st.lack[a] or -left_b > st.lack[b]:
        return np.inf
    if len(fx.kept) > 0 and moves_too_much(fx, st, n):
        return np.inf
    for slot in range(2):
        d = a if slot == 0 else b
        for k in range(n_kinds):
            sums = st.trial_sums[slot, k]
            copy(sums, st.sums[d, k])
            # No edit concerns this op, so its cost still holds.
            if st.trial_ms[slot, k] >= 0.0:
                continue
            # An empty op costs exactly 0. Differences of encodings would leave rounding errors.
            if st.trial_carried[slot, k] == 0:
                sums[:] = 0.0
                st.trial_ms[slot, k] = st.trial_fetched_ms[slot, k] = 0.0
                continue
            for i in range(n):
                s = st.edit[i, 0]
                if st.edit[i, 1] == d and fx.kind[s] == k:
                    replace(sums, fx.codes[fx.shard[s, st.held[s, d]]], fx.codes[fx.shard[s, st.edit[i, 2]]])
            st.trial_ms[slot, k] = head(sums, fx.parameters)
            if len(fx.fetched) > 0:
                st.trial_fetched_ms[slot, k] = head(sums, fx.fetched)
        st.trial_load[slot] = load_of(
            fx, d, st.shared_ms[d], st.own_ms[d], total_of(st.trial_ms[slot]), st.trial_carried[slot]
        )
        st.trial_fetched[slot] = (st.shared_fetched_ms[d] + total_of(st.trial_fetched_ms[slot])) / fx.speed[d]
    # Norms change by the two devices' terms only: constant time, whatever the number of devices.
    norm, ref = st.trial_norm, st.ref
    copy_norm(norm, st.norm)
    copy(st.trial_all_carried, st.all_carried)
    for slot in range(2):
        d = a if slot == 0 else b
        norm[0, 0] += power(st.trial_load[slot] / ref[0, 0]) - power(st.load[d] / ref[0, 0])
        if len(fx.fetched) > 0:
            norm[0, 1] += power(st.trial_fetched[slot] / ref[0, 1]) - power(st.fetched[d] / ref[0, 1])
        for x in range(n_exchanges):
            more = st.trial_carried[slot, x] - st.carried[d, x]
            if more != 0:
                st.trial_all_carried[x] += more
                # Two powers a device and exchange: saved where the busiest device adds no cost.
                if fx.busiest[x] > 0.0 or fx.work_busiest[x] > 0.0:
                    norm[1, x] += power(st.trial_carried[slot, x] / ref[1, x]) - power(
                        st.carried[d, x] / ref[1, x]
                    )
    if len(st.hosts) > 1:
        g, h = fx.host[a], fx.host[b]
        for x in range(n_exchanges):
            if fx.host_busiest[x] > 0.0:
                more = st.trial_carried[0, x] - st.carried[a, x]
                also = st.trial_carried[1, x] - st.carried[b, x]
                # On one host both changes meet in one term.
                if g == h:
                    more, also = more + also, 0
                norm[2, x] += power((st.hosts[g, x] + more) / ref[2, x]) - power(st.hosts[g, x] / ref[2, x])
                norm[2, x] += power((st.hosts[h, x] + also) / ref[2, x]) - power(st.hosts[h, x] / ref[2, x])
    # Groups keep their tables in such a move, so their exchange stays as it is.
    return energy_of(fx, ref, norm, st.trial_all_carried, st.group_size)


@inner
def accept(fx, st, a, b, n):
    """Carry out the n edits that `try_edits` priced last, and that fit."""
    for i in range(n):
        s, d = st.edit[i, 0], st.edit[i, 1]
        # Noted before it changes: `undo` needs the number of units before.
        note(st, s, d, int64(st.held[s, d]))
        hold(fx, st, s, d, st.edit[i, 2])
    # The trial has computed all results already.
    for slot in range(2):
        d = a if slot == 0 else b
        # Sums over devices first: they need what the device carried until now.
        replace(st.hosts[fx.host[d]], st.carried[d], st.trial_carried[slot])
        replace(st.all_carried, st.carried[d], st.trial_carried[slot])
        copy(st.carried[d], st.trial_carried[slot])
        copy(st.ms[d], st.trial_ms[slot])
        copy(st.fetched_ms[d], st.trial_fetched_ms[slot])
        for k in range(st.ms.shape[1]):
            copy(st.sums[d, k], st.trial_sums[slot, k])
        st.on_host[fx.host[d]] += st.trial_memory[slot, ON_HOST] - st.memory[d, ON_HOST]
        copy(st.memory[d], st.trial_memory[slot])
        st.room[d], st.lack[d] = st.trial_room[slot], st.trial_lack[slot]
        st.load[d], st.fetched[d] = st.trial_load[slot], st.trial_fetched[slot]
    copy_norm(st.norm, st.trial_norm)
