"""Trials of a change, its cost and whether it fits, and placing shards one after another.

A change is a list of edits in st.edit. An edit says how many blocks of an item a device holds afterwards.
Ops that a change alters are in rows of their own (State.row) until it is accepted.

Where shards are placed one after another, the local batch counts all of them from the start, so that a plan never
outgrows it. Two shards of an item that meet on a device become one, which takes less of a local batch.

Shapes: C ways to cut tables, N shards of each, B plans, W words. Plans of the same cuts follow each other.
"""

import numpy as np
from numba import boolean, int64, void

from shardcore.core.jit import compile_inner
from shardcore.step.engine.arrays import (
    BYTES_MOVED,
    ENTERED,
    FREE,
    HEAD,
    HELD,
    HOST_BUSIEST,
    LACK,
    LOAD,
    N_MOVED,
    NEXT,
    ON_HOST,
    OPTION_RUN,
    PEAK_BYTES,
    RESIDENT,
    ROOM,
    SENT,
    problem_at,
    state_at,
)
from shardcore.step.engine.cost import (
    copy_vector,
    depends_on_busiest_device,
    device_count,
    device_load_ms,
    exchanged_bytes,
    norm_power,
    smooth_cost_ms,
    sum_over_device_ops,
)
from shardcore.step.engine.memory import (
    compute_local_batch_bytes,
    count_option,
    excess_bytes,
    host_memory_fits,
    max_local_batch_bytes,
    replace_counted_option,
    set_excess_bytes,
    set_memory_room,
)
from shardcore.step.engine.pointers import WORDS, entry
from shardcore.step.engine.state import (
    count_moved_bytes,
    log_and_set,
    recompute_ops,
    set_held_blocks,
    set_op_ms,
)

BATCH = int64[:, ::1]
"""The type of packed records [B, W] in a signature."""


@compile_inner
def write_edit(st, i, s, d, blocks):
    """Write edit i of a trial: device d holds `blocks` column blocks of item s (a table's row range) afterwards."""
    st.edit[i, 0], st.edit[i, 1], st.edit[i, 2] = s, d, blocks


@compile_inner
def options_of_edit(fx, st, i):
    """The options that edit i of a trial removes from its device and adds to it."""
    s, d = st.edit[i, 0], st.edit[i, 1]
    return int64(fx.shard[s, st.held[s, d]]), int64(fx.shard[s, st.edit[i, 2]])


@compile_inner
def exceeds_move_limits(fx, st, n):
    """Tell if a trial of n edits exceeds the limits on moved tables or bytes."""
    # Counted in place, and back again: what a table gains on one device may be what it loses on the other.
    tables, n_bytes = st.number[N_MOVED], st.number[BYTES_MOVED]
    for i in range(n):
        s, d = st.edit[i, 0], st.edit[i, 1]
        count_moved_bytes(fx, st, s, d, int64(st.held[s, d]), st.edit[i, 2])
    # A plan above a limit may still come closer to it: only a further increase is refused.
    too_many = st.number[N_MOVED] > max(fx.most_tables, tables)
    too_many = too_many or st.number[BYTES_MOVED] > max(fx.most_bytes, n_bytes)
    for i in range(n):
        s, d = st.edit[i, 0], st.edit[i, 1]
        count_moved_bytes(fx, st, s, d, st.edit[i, 2], int64(st.held[s, d]))
    return too_many


@compile_inner
def begin_trial_ops(st, d, row):
    """Start a trial: its row of ops refers to the ops of device d."""
    for r in range(st.row.shape[1]):
        st.row[row, r] = d


@compile_inner
def replace_option_in_ops(fx, st, row, was, then):
    """Replace an option in the ops of a trial, with the rest of its bundle."""
    for i in range(2):
        option, sign = (was, -1.0) if i == 0 else (then, 1.0)
        while option > 0:
            r = fx.options[option, OPTION_RUN]
            if st.row[row, r] != row:
                copy_vector(st.ops[row, r], st.ops[st.row[row, r], r])
                st.row[row, r] = row
            op, vector = st.ops[row, r], fx.vectors[option]
            for v in range(len(op)):
                op[v] += sign * vector[v]
            option = fx.options[option, NEXT]


@compile_inner
def price_changed_ops(head, fx, st, row):
    """Compute the ms of the ops that a trial has changed."""
    for r in range(st.row.shape[1]):
        if st.row[row, r] == row:
            op = st.ops[row, r]
            # An empty op is exactly 0. Differences of vectors would leave rounding errors.
            if op[ENTERED] == 0.0:
                for v in range(len(op)):
                    op[v] = 0.0
            set_op_ms(head, fx, st, row, r)


@compile_inner
def apply_trial_ops(fx, st, d, row):
    """Give a device the ops of a trial, and update its host's bytes."""
    # Sums of the host first: they need what the device carried until now.
    of_host, n_runs = st.hosts[0, fx.host[d]], len(fx.runs)
    of_host[-1] += sum_over_device_ops(st, row, int64(ON_HOST)) - sum_over_device_ops(st, d, int64(ON_HOST))
    for r in range(n_runs):
        if st.row[row, r] == row:
            for x in range(r, len(fx.rates), n_runs):
                of_host[x] += exchanged_bytes(st, row, x) - exchanged_bytes(st, d, x)
            copy_vector(st.ops[d, r], st.ops[row, r])
            copy_vector(st.ms[d, r], st.ms[row, r])


@compile_inner
def edits_fit(fx, st, a, b, n):
    """Tell if memory suffices after n edits on devices a and b. A device beyond its memory may not get worse.

    Fills ROOM and LACK of the trial's rows. Where all fit, the local batch is that after the edits.
    """
    n_devices, sent, before, changes = device_count(st), st.value[SENT], max_local_batch_bytes(fx, st), False
    for i in range(n):
        # Runs with cut tables have a larger local batch.
        # (It comes before `or`, as each edit has to be counted.)
        was, then = options_of_edit(fx, st, i)
        changes = replace_counted_option(fx, st, was, then) or changes
    if changes:
        compute_local_batch_bytes(fx, st)
    fit = True
    for slot in range(2):
        d, row = a if slot == 0 else b, n_devices + slot
        set_memory_room(fx, st, d, row)
        st.devices[row, LACK] = excess_bytes(fx, st, d, row)
        fit = fit and st.devices[row, LACK] <= st.devices[d, LACK]
        if fx.host_free < np.inf and fx.host[a] != fx.host[b]:
            fit = fit and host_memory_fits(fx, st, d, row)
    # The local batch is that of all devices. More parts of tables have more ids.
    most = max_local_batch_bytes(fx, st)
    if fit and (changes or most > before):
        for d in range(n_devices):
            # ROOM is a lower bound, so only devices that it does not clear are counted exactly.
            if st.devices[d, ROOM] < most and st.devices[d, LACK] == 0.0 and d != a and d != b:
                if excess_bytes(fx, st, d, d) > 0.0:
                    fit = False
                    break
    # The trial changed the local batch in place. Change it back.
    if not fit:
        for i in range(n):
            was, then = options_of_edit(fx, st, i)
            replace_counted_option(fx, st, then, was)
        # Without the rounding errors of sums.
        st.value[SENT] = sent
        if changes:
            compute_local_batch_bytes(fx, st)
    # With another local batch, devices that lack bytes lack more or fewer.
    elif changes or most != before:
        for d in range(n_devices):
            if st.devices[d, LACK] > 0.0:
                st.devices[d, LACK] = excess_bytes(fx, st, d, d)
    return fit


@compile_inner
def price_edits(head, fx, st, a, b, n):
    """The smooth cost in ms after n edits on devices a and b. Infinite if they are not allowed.

    Fills the trial's rows, which `accept_edits` takes over. `edits_fit` fills those of memory.
    """
    # Cheap checks come first: no head is called for a move that is not allowed.
    n_devices = device_count(st)
    left_a = fx.devices[a, FREE] - st.devices[a, HELD]
    left_b = fx.devices[b, FREE] - st.devices[b, HELD]
    for i in range(n):
        s, d, now = st.edit[i, 0], st.edit[i, 1], st.edit[i, 2]
        if now > 0 and len(fx.allowed) > 0 and not fx.allowed[s, d]:
            return np.inf
        was, then = options_of_edit(fx, st, i)
        more = fx.vectors[then, RESIDENT] - fx.vectors[was, RESIDENT]
        left_a -= more if d == a else 0.0
        left_b -= more if d == b else 0.0
    # Resident bytes alone refuse many moves. `edits_fit` counts all bytes, only for the few that cost little enough.
    if -left_a > st.devices[a, LACK] or -left_b > st.devices[b, LACK]:
        return np.inf
    if len(fx.kept) > 0 and exceeds_move_limits(fx, st, n):
        return np.inf
    begin_trial_ops(st, a, n_devices)
    begin_trial_ops(st, b, n_devices + 1)
    for i in range(n):
        was, then = options_of_edit(fx, st, i)
        replace_option_in_ops(fx, st, n_devices if st.edit[i, 1] == a else n_devices + 1, was, then)
    # Norms change by the two devices' terms only: constant time, whatever the number of devices.
    norm, ref, n_runs = st.norm[1], st.ref, len(fx.runs)
    for i in range(3):
        copy_vector(norm[i], st.norm[0, i])
    g, h = fx.host[a], fx.host[b]
    copy_vector(st.hosts[1, -1], st.hosts[0, -1])
    copy_vector(st.hosts[1, g], st.hosts[0, g])
    copy_vector(st.hosts[1, h], st.hosts[0, h])
    for slot in range(2):
        d, row = a if slot == 0 else b, n_devices + slot
        price_changed_ops(head, fx, st, row)
        for j in range(len(fx.heads)):
            then_ms = device_load_ms(fx, st, d, row, j)
            st.devices[row, LOAD + j] = then_ms
            norm[0, j] += norm_power(then_ms / ref[0, j]) - norm_power(st.devices[d, LOAD + j] / ref[0, j])
        for r in range(n_runs):
            if st.row[row, r] == row:
                for x in range(r, len(fx.rates), n_runs):
                    was, then = exchanged_bytes(st, d, x), exchanged_bytes(st, row, x)
                    st.hosts[1, -1, x] += then - was
                    st.hosts[1, fx.host[d], x] += then - was
                    # Two powers a device and exchange: saved where the busiest device adds no cost.
                    if depends_on_busiest_device(fx, x):
                        norm[1, x] += norm_power(then / ref[1, x]) - norm_power(was / ref[1, x])
    # On one host both changes meet in one term.
    for slot in range(1 + int(g != h)):
        was_of, then_of = st.hosts[0, h if slot else g], st.hosts[1, h if slot else g]
        for x in range(len(fx.rates)):
            if fx.rates[x, HOST_BUSIEST] > 0.0:
                norm[2, x] += norm_power(then_of[x] / ref[2, x]) - norm_power(was_of[x] / ref[2, x])
    return smooth_cost_ms(fx, st, int64(1))


@compile_inner
def accept_edits(fx, st, a, b, n):
    """Apply the n edits of a priced trial to the plan."""
    n_devices = device_count(st)
    for i in range(n):
        s, d = st.edit[i, 0], st.edit[i, 1]
        log_and_set(fx, st, s, d, st.edit[i, 2])
    # The trial has computed all results already.
    for slot in range(2):
        d, row = a if slot == 0 else b, n_devices + slot
        apply_trial_ops(fx, st, d, row)
        copy_vector(st.devices[d], st.devices[row])
    copy_vector(st.hosts[0, -1], st.hosts[1, -1])
    for i in range(3):
        copy_vector(st.norm[0, i], st.norm[1, i])


# --- placing shards ---


@compile_inner
def join_in_local_batch(fx, st, s, held, blocks):
    """Count two shards of item s on a device as one. Returns True if the local batch was recomputed."""
    if held == 0:
        return False
    changes = replace_counted_option(fx, st, int64(fx.shard[s, held]), int64(fx.shard[s, held + blocks]))
    # Each change has to be counted, so the call comes before `or`.
    if replace_counted_option(fx, st, int64(fx.shard[s, blocks]), int64(0)) or changes:
        compute_local_batch_bytes(fx, st)
        return True
    return False


@compile_inner
def can_hold_blocks(fx, st, s, blocks, d):
    """Tell if device d has room for `blocks` more column blocks of item s (a table's row range)."""
    # `allowed` without rows means that every item may go anywhere.
    if len(fx.allowed) > 0 and not fx.allowed[s, d]:
        return False
    held, row, sent = int64(st.held[s, d]), device_count(st), st.value[SENT]
    changes = join_in_local_batch(fx, st, s, held, blocks)
    begin_trial_ops(st, d, row)
    # The widened shard: a row's optimizer state counts once.
    replace_option_in_ops(fx, st, row, int64(fx.shard[s, held]), int64(fx.shard[s, held + blocks]))
    set_memory_room(fx, st, d, row)
    fits = excess_bytes(fx, st, d, row) == 0.0 and host_memory_fits(fx, st, d, row)
    if changes:
        # A run whose last cut table became whole takes more in some phases, on all devices.
        for e in range(device_count(st)):
            fits = fits and (e == d or excess_bytes(fx, st, e, e) == 0.0)
    if held > 0:
        replace_counted_option(fx, st, int64(0), int64(fx.shard[s, blocks]))
        replace_counted_option(fx, st, int64(fx.shard[s, held + blocks]), int64(fx.shard[s, held]))
        # Without the rounding errors of sums.
        st.value[SENT] = sent
        if changes:
            compute_local_batch_bytes(fx, st)
    return fits


@compile_inner
def put_shard(head, fx, st, s, blocks, d):
    """Place `blocks` of item s (columns of a table) on device d, whether they fit or not.

    Computes the device's ops with their ms, its room, and what its host carries. `refresh_state` computes all else.
    """
    held, row = int64(st.held[s, d]), device_count(st)
    join_in_local_batch(fx, st, s, held, blocks)
    set_held_blocks(fx, st, s, d, held + blocks)
    begin_trial_ops(st, d, row)
    replace_option_in_ops(fx, st, row, int64(fx.shard[s, held]), int64(fx.shard[s, held + blocks]))
    price_changed_ops(head, fx, st, row)
    apply_trial_ops(fx, st, d, row)
    set_memory_room(fx, st, d, d)


@entry(void(HEAD, WORDS, BATCH, int64[:, :, ::1]))
def prepare_plans(head, problem, states, shards):
    """Prepare empty plans for the shards [C, N, 2] (item, blocks) to be placed."""
    fx = problem_at(problem)
    for b in range(len(states)):
        st = state_at(states[b])
        recompute_ops(head, fx, st)
        for d in range(device_count(st)):
            for r in range(len(st.runs)):
                # The last device of a group has fewer rows, where these do not divide evenly.
                set_op_ms(head, fx, st, d, r)
        of_cuts = shards[b * len(shards) // len(states)]
        for i in range(len(of_cuts)):
            count_option(fx, st, of_cuts[i, 0], int64(fx.shard[of_cuts[i, 0], of_cuts[i, 1]]))
        compute_local_batch_bytes(fx, st)
        set_excess_bytes(fx, st)


@entry(void(WORDS, BATCH, int64[:, ::1], boolean[:, ::1]))
def find_feasible_devices(problem, states, shards, fits):
    """Fill fits [B, D]: whether each device of a plan has room for the plan's next shard. shards: [B, 2] item,
    blocks.
    """
    fx = problem_at(problem)
    only_bytes = len(fx.caches) == 0 and not fx.ops_limited and fx.host_free == np.inf
    for b in range(len(states)):
        st, s, blocks = state_at(states[b]), shards[b, 0], shards[b, 1]
        needed = fx.alone[fx.shard[s, blocks], PEAK_BYTES] + max_local_batch_bytes(fx, st)
        for d in range(device_count(st)):
            # A lower bound of the room holds an upper bound of the shard. Mostly no trial is needed.
            # Shards of an item that meet may change the local batch of all devices, so they always have one.
            room = min(st.devices[d, ROOM], fx.devices[d, FREE]) if st.held[s, d] == 0 else -np.inf
            if only_bytes and room >= needed and (len(fx.allowed) == 0 or fx.allowed[s, d]):
                fits[b, d] = True
            else:
                fits[b, d] = can_hold_blocks(fx, st, s, blocks, d)


@entry(void(HEAD, WORDS, BATCH, int64[:, ::1]))
def put_shards(head, problem, states, shards):
    """Place one shard in each of several plans. shards: [B, 3] item, blocks, device."""
    fx = problem_at(problem)
    for b in range(len(states)):
        st, d = state_at(states[b]), shards[b, 2]
        put_shard(head, fx, st, shards[b, 0], shards[b, 1], d)
        st.devices[d, LACK] = excess_bytes(fx, st, d, d)
