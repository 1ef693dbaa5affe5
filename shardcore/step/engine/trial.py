"""Trials of a change, its cost and whether it fits, and placing shards one after another.

A change is a list of edits in state.edit. An edit says how many blocks of an item a device holds afterwards.
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
    set_local_batch_room,
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
def write_edit(state, i, item, device, blocks):
    """Write edit i of a trial: a device holds `blocks` column blocks of an item (a table's row range) afterwards."""
    state.edit[i, 0], state.edit[i, 1], state.edit[i, 2] = item, device, blocks


@compile_inner
def options_of_edit(problem, state, edit):
    """The options that edit i of a trial removes from its device and adds to it."""
    s, d = state.edit[edit, 0], state.edit[edit, 1]
    return int64(problem.shard[s, state.held[s, d]]), int64(problem.shard[s, state.edit[edit, 2]])


@compile_inner
def exceeds_move_limits(problem, state, n):
    """Tell if a trial of n edits exceeds the limits on moved tables or bytes."""
    # Counted in place, and back again: what a table gains on one device may be what it loses on the other.
    tables, n_bytes = state.number[N_MOVED], state.number[BYTES_MOVED]
    for i in range(n):
        s, d = state.edit[i, 0], state.edit[i, 1]
        count_moved_bytes(problem, state, s, d, int64(state.held[s, d]), state.edit[i, 2])
    # A plan above a limit may still come closer to it: only a further increase is refused.
    too_many = state.number[N_MOVED] > max(problem.most_tables, tables)
    too_many = too_many or state.number[BYTES_MOVED] > max(problem.most_bytes, n_bytes)
    for i in range(n):
        s, d = state.edit[i, 0], state.edit[i, 1]
        count_moved_bytes(problem, state, s, d, state.edit[i, 2], int64(state.held[s, d]))
    return too_many


@compile_inner
def begin_trial_ops(state, device, row):
    """Start a trial: its row of ops refers to the ops of a device."""
    for r in range(state.row.shape[1]):
        state.row[row, r] = device


@compile_inner
def replace_option_in_ops(problem, state, row, was, then):
    """Replace an option in the ops of a trial, together with its bundle's further options."""
    for i in range(2):
        option, sign = (was, -1.0) if i == 0 else (then, 1.0)
        while option > 0:
            r = problem.options[option, OPTION_RUN]
            if state.row[row, r] != row:
                copy_vector(state.ops[row, r], state.ops[state.row[row, r], r])
                state.row[row, r] = row
            op, vector = state.ops[row, r], problem.vectors[option]
            for v in range(len(op)):
                op[v] += sign * vector[v]
            option = problem.options[option, NEXT]


@compile_inner
def price_changed_ops(head, problem, state, row):
    """Compute the ms of the ops that a trial has changed."""
    for r in range(state.row.shape[1]):
        if state.row[row, r] == row:
            op = state.ops[row, r]
            # An empty op is exactly 0. Differences of vectors would leave rounding errors.
            if op[ENTERED] == 0.0:
                for v in range(len(op)):
                    op[v] = 0.0
            set_op_ms(head, problem, state, row, r)


@compile_inner
def apply_trial_ops(problem, state, device, row):
    """Give a device the ops of a trial, and update its host's bytes."""
    # Sums of the host first: they need what the device carried until now.
    of_host, n_runs = state.hosts[0, problem.host[device]], len(problem.runs)
    of_host[-1] += sum_over_device_ops(state, row, int64(ON_HOST)) - sum_over_device_ops(
        state, device, int64(ON_HOST)
    )
    for r in range(n_runs):
        if state.row[row, r] == row:
            for x in range(r, len(problem.rates), n_runs):
                of_host[x] += exchanged_bytes(state, row, x) - exchanged_bytes(state, device, x)
            copy_vector(state.ops[device, r], state.ops[row, r])
            copy_vector(state.ms[device, r], state.ms[row, r])


@compile_inner
def edits_fit(problem, state, a, b, n):
    """Tell if memory suffices after n edits on devices a and b. A device beyond its memory may not get worse.

    Fills ROOM and LACK of the trial's rows. Where all fit, the local batch is that after the edits.
    """
    n_devices, sent, before, changes = (
        device_count(state),
        state.value[SENT],
        max_local_batch_bytes(problem, state),
        False,
    )
    for i in range(n):
        # Runs with cut tables have a larger local batch.
        # (It comes before `or`, as each edit has to be counted.)
        was, then = options_of_edit(problem, state, i)
        changes = replace_counted_option(problem, state, was, then) or changes
    if changes:
        compute_local_batch_bytes(problem, state)
    fit = True
    for slot in range(2):
        d, row = a if slot == 0 else b, n_devices + slot
        set_local_batch_room(problem, state, d, row)
        state.devices[row, LACK] = excess_bytes(problem, state, d, row)
        fit = fit and state.devices[row, LACK] <= state.devices[d, LACK]
        if problem.host_free < np.inf and problem.host[a] != problem.host[b]:
            fit = fit and host_memory_fits(problem, state, d, row)
    # The local batch is that of all devices. More parts of tables have more ids.
    most = max_local_batch_bytes(problem, state)
    if fit and (changes or most > before):
        for d in range(n_devices):
            # ROOM is a lower bound, so only devices that it does not clear are counted exactly.
            if state.devices[d, ROOM] < most and state.devices[d, LACK] == 0.0 and d != a and d != b:
                if excess_bytes(problem, state, d, d) > 0.0:
                    fit = False
                    break
    # The trial changed the local batch in place. Change it back.
    if not fit:
        for i in range(n):
            was, then = options_of_edit(problem, state, i)
            replace_counted_option(problem, state, then, was)
        # Without the rounding errors of sums.
        state.value[SENT] = sent
        if changes:
            compute_local_batch_bytes(problem, state)
    # With another local batch, devices that lack bytes lack more or fewer.
    elif changes or most != before:
        for d in range(n_devices):
            if state.devices[d, LACK] > 0.0:
                state.devices[d, LACK] = excess_bytes(problem, state, d, d)
    return fit


@compile_inner
def price_edits(head, problem, state, a, b, n):
    """The smooth cost in ms after n edits on devices a and b. Infinite if they are not allowed.

    Fills the trial's rows, which `accept_edits` takes over. `edits_fit` fills those of memory.
    """
    # Cheap checks come first: no head is called for a move that is not allowed.
    n_devices = device_count(state)
    left_a = problem.devices[a, FREE] - state.devices[a, HELD]
    left_b = problem.devices[b, FREE] - state.devices[b, HELD]
    for i in range(n):
        s, d, now = state.edit[i, 0], state.edit[i, 1], state.edit[i, 2]
        if now > 0 and len(problem.allowed) > 0 and not problem.allowed[s, d]:
            return np.inf
        was, then = options_of_edit(problem, state, i)
        more = problem.vectors[then, RESIDENT] - problem.vectors[was, RESIDENT]
        left_a -= more if d == a else 0.0
        left_b -= more if d == b else 0.0
    # Resident bytes alone refuse many moves. `edits_fit` counts all bytes, only for the few that cost little enough.
    if -left_a > state.devices[a, LACK] or -left_b > state.devices[b, LACK]:
        return np.inf
    if len(problem.kept) > 0 and exceeds_move_limits(problem, state, n):
        return np.inf
    begin_trial_ops(state, a, n_devices)
    begin_trial_ops(state, b, n_devices + 1)
    for i in range(n):
        was, then = options_of_edit(problem, state, i)
        replace_option_in_ops(
            problem, state, n_devices if state.edit[i, 1] == a else n_devices + 1, was, then
        )
    # Norms change by the two devices' terms only: constant time, whatever the number of devices.
    norm, ref, n_runs = state.norm[1], state.ref, len(problem.runs)
    for i in range(3):
        copy_vector(norm[i], state.norm[0, i])
    g, h = problem.host[a], problem.host[b]
    copy_vector(state.hosts[1, -1], state.hosts[0, -1])
    copy_vector(state.hosts[1, g], state.hosts[0, g])
    copy_vector(state.hosts[1, h], state.hosts[0, h])
    for slot in range(2):
        d, row = a if slot == 0 else b, n_devices + slot
        price_changed_ops(head, problem, state, row)
        for j in range(len(problem.heads)):
            then_ms = device_load_ms(problem, state, d, row, j)
            state.devices[row, LOAD + j] = then_ms
            norm[0, j] += norm_power(then_ms / ref[0, j]) - norm_power(state.devices[d, LOAD + j] / ref[0, j])
        for r in range(n_runs):
            if state.row[row, r] == row:
                for x in range(r, len(problem.rates), n_runs):
                    was, then = exchanged_bytes(state, d, x), exchanged_bytes(state, row, x)
                    state.hosts[1, -1, x] += then - was
                    state.hosts[1, problem.host[d], x] += then - was
                    # Two powers a device and exchange: saved where the busiest device adds no cost.
                    if depends_on_busiest_device(problem, x):
                        norm[1, x] += norm_power(then / ref[1, x]) - norm_power(was / ref[1, x])
    # On one host both changes meet in one term.
    for slot in range(1 + int(g != h)):
        was_of, then_of = state.hosts[0, h if slot else g], state.hosts[1, h if slot else g]
        for x in range(len(problem.rates)):
            if problem.rates[x, HOST_BUSIEST] > 0.0:
                norm[2, x] += norm_power(then_of[x] / ref[2, x]) - norm_power(was_of[x] / ref[2, x])
    return smooth_cost_ms(problem, state, int64(1))


@compile_inner
def accept_edits(problem, state, a, b, n):
    """Apply the n edits of a priced trial to the plan."""
    n_devices = device_count(state)
    for i in range(n):
        s, d = state.edit[i, 0], state.edit[i, 1]
        log_and_set(problem, state, s, d, state.edit[i, 2])
    # The trial has computed all results already.
    for slot in range(2):
        d, row = a if slot == 0 else b, n_devices + slot
        apply_trial_ops(problem, state, d, row)
        copy_vector(state.devices[d], state.devices[row])
    copy_vector(state.hosts[0, -1], state.hosts[1, -1])
    for i in range(3):
        copy_vector(state.norm[0, i], state.norm[1, i])


# --- placing shards ---


@compile_inner
def count_joined_shards_once(problem, state, item, held, blocks):
    """Count two shards of an item on a device as one. Returns True if the local batch was recomputed."""
    if held == 0:
        return False
    changes = replace_counted_option(
        problem, state, int64(problem.shard[item, held]), int64(problem.shard[item, held + blocks])
    )
    # Each change has to be counted, so the call comes before `or`.
    if replace_counted_option(problem, state, int64(problem.shard[item, blocks]), int64(0)) or changes:
        compute_local_batch_bytes(problem, state)
        return True
    return False


@compile_inner
def can_hold_blocks(problem, state, item, blocks, device):
    """Tell if a device has room for `blocks` more column blocks of an item (a table's row range)."""
    # `allowed` without rows means that every item may go anywhere.
    if len(problem.allowed) > 0 and not problem.allowed[item, device]:
        return False
    held, row, sent = int64(state.held[item, device]), device_count(state), state.value[SENT]
    changes = count_joined_shards_once(problem, state, item, held, blocks)
    begin_trial_ops(state, device, row)
    # The widened shard: a row's optimizer state counts once.
    replace_option_in_ops(
        problem, state, row, int64(problem.shard[item, held]), int64(problem.shard[item, held + blocks])
    )
    set_local_batch_room(problem, state, device, row)
    fits = excess_bytes(problem, state, device, row) == 0.0 and host_memory_fits(problem, state, device, row)
    if changes:
        # A run whose last cut table became whole takes more in some phases, on all devices.
        for e in range(device_count(state)):
            fits = fits and (e == device or excess_bytes(problem, state, e, e) == 0.0)
    if held > 0:
        replace_counted_option(problem, state, int64(0), int64(problem.shard[item, blocks]))
        replace_counted_option(
            problem, state, int64(problem.shard[item, held + blocks]), int64(problem.shard[item, held])
        )
        # Without the rounding errors of sums.
        state.value[SENT] = sent
        if changes:
            compute_local_batch_bytes(problem, state)
    return fits


@compile_inner
def put_shard(head, problem, state, item, blocks, device):
    """Place `blocks` of an item (columns of a table) on a device, whether they fit or not.

    Computes the device's ops with their ms, its room, and what its host carries. `refresh_state` computes all else.
    """
    held, row = int64(state.held[item, device]), device_count(state)
    count_joined_shards_once(problem, state, item, held, blocks)
    set_held_blocks(problem, state, item, device, held + blocks)
    begin_trial_ops(state, device, row)
    replace_option_in_ops(
        problem, state, row, int64(problem.shard[item, held]), int64(problem.shard[item, held + blocks])
    )
    price_changed_ops(head, problem, state, row)
    apply_trial_ops(problem, state, device, row)
    set_local_batch_room(problem, state, device, device)


@entry(void(HEAD, WORDS, BATCH, int64[:, :, ::1]))
def prepare_plans(head, problem_words, states, shards):
    """Prepare empty plans for the shards [C, N, 2] (item, blocks) to be placed."""
    problem = problem_at(problem_words)
    for b in range(len(states)):
        state = state_at(states[b])
        recompute_ops(head, problem, state)
        for d in range(device_count(state)):
            for r in range(len(state.runs)):
                # The last device of a group has fewer rows, where these do not divide evenly.
                set_op_ms(head, problem, state, d, r)
        of_cuts = shards[b * len(shards) // len(states)]
        for i in range(len(of_cuts)):
            count_option(problem, state, of_cuts[i, 0], int64(problem.shard[of_cuts[i, 0], of_cuts[i, 1]]))
        compute_local_batch_bytes(problem, state)
        set_excess_bytes(problem, state)


@entry(void(WORDS, BATCH, int64[:, ::1], boolean[:, ::1]))
def find_feasible_devices(problem_words, states, shards, fits):
    """Fill fits [B, D]: whether each device of a plan has room for the plan's next shard. shards: [B, 2] item,
    blocks.
    """
    problem = problem_at(problem_words)
    only_bytes = len(problem.caches) == 0 and not problem.ops_limited and problem.host_free == np.inf
    for b in range(len(states)):
        state, s, blocks = state_at(states[b]), shards[b, 0], shards[b, 1]
        needed = problem.alone[problem.shard[s, blocks], PEAK_BYTES] + max_local_batch_bytes(problem, state)
        for d in range(device_count(state)):
            # A lower bound of the room holds an upper bound of the shard. Mostly no trial is needed.
            # Shards of an item that meet may change the local batch of all devices, so they always have one.
            room = min(state.devices[d, ROOM], problem.devices[d, FREE]) if state.held[s, d] == 0 else -np.inf
            if only_bytes and room >= needed and (len(problem.allowed) == 0 or problem.allowed[s, d]):
                fits[b, d] = True
            else:
                fits[b, d] = can_hold_blocks(problem, state, s, blocks, d)


@entry(void(HEAD, WORDS, BATCH, int64[:, ::1]))
def put_shards(head, problem_words, states, shards):
    """Place one shard in each of several plans. shards: [B, 3] item, blocks, device."""
    problem = problem_at(problem_words)
    for b in range(len(states)):
        state, d = state_at(states[b]), shards[b, 2]
        put_shard(head, problem, state, shards[b, 0], shards[b, 1], d)
        state.devices[d, LACK] = excess_bytes(problem, state, d, d)
