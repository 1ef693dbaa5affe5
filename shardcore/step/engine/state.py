"""Updates of a State: items of devices, items of groups, and the way back to the best plan."""

from numba import int64, void

from shardcore.core.jit import compile_inner
from shardcore.step.engine.arrays import (
    BYTES_MOVED,
    ENERGY,
    ENTERED,
    FIRST,
    JOINT,
    KIND_OF_GROUP,
    LAST,
    LOAD,
    LOG,
    N_MOVED,
    N_SHARED,
    SCRATCH,
    SENT,
    SHARED_KIND,
    TABLE,
    WEIGHT,
    problem_at,
    state_at,
)
from shardcore.step.engine.cost import (
    copy_vector,
    device_count,
    device_load_ms,
    exchanged_bytes,
    norm_power,
    smooth_cost_ms,
)
from shardcore.step.engine.memory import (
    add_option_to_ops,
    compute_local_batch_bytes,
    count_option,
    set_excess_bytes,
)
from shardcore.step.engine.pointers import WORDS, entry


@compile_inner
def count_moved_bytes(problem, state, item, device, was, now):
    """Count the tables and bytes moved if a device holds `now` column blocks of an item (a table's row range) instead
    of `was`.
    """
    # Columns are exchangeable. Only blocks beyond those it had count as moved.
    more = (
        max(0, now - problem.kept[item, device]) - max(0, was - problem.kept[item, device])
    ) * problem.items[item, WEIGHT]
    # A table counts once, however many of its items moved. A bundle counts as all of its tables (joint).
    t = problem.items[item, TABLE]
    state.number[N_MOVED] += (int(state.moved[t] + more > 0) - int(state.moved[t] > 0)) * problem.items[
        item, JOINT
    ]
    state.number[BYTES_MOVED] += more
    state.moved[t] += more


@compile_inner
def set_held_blocks(problem, state, item, device, blocks):
    """Set how many blocks of an item (columns of a table) a device holds, and update the device's list of items."""
    was = int64(state.held[item, device])
    # Without limits, moved tables and bytes are not counted.
    if len(problem.kept) > 0:
        count_moved_bytes(problem, state, item, device, was, blocks)
    state.held[item, device] = blocks
    # A device's list has only the items that it holds: loops over it skip the many zeros of `held`.
    if was == 0 and blocks > 0:
        state.items[device, state.count[device]] = item
        state.count[device] += 1
    elif was > 0 and blocks == 0:
        # Remove by swapping with the last entry: the order of the list has no meaning.
        i = 0
        while state.items[device, i] != item:
            i += 1
        state.count[device] -= 1
        state.items[device, i] = state.items[device, state.count[device]]


@compile_inner
def set_item_group(state, item, group):
    """Set the group of devices that shares an item; -1 for none."""
    # `shared` lists an item once, so a change from group to group leaves the list as it is.
    if state.group[item] < 0:
        state.shared[state.number[N_SHARED]] = item
        state.number[N_SHARED] += 1
    elif group < 0:
        # Remove by swapping with the last entry.
        i = 0
        while state.shared[i] != item:
            i += 1
        state.number[N_SHARED] -= 1
        state.shared[i] = state.shared[state.number[N_SHARED]]
    state.group[item] = group


@compile_inner
def set_blocks_or_group(problem, state, item, device, then):
    """Set the blocks of an item on a device, or the item's group if `device` is -1."""
    if device < 0:
        set_item_group(state, item, then)
    else:
        set_held_blocks(problem, state, item, device, then)


@compile_inner
def log_and_set(problem, state, item, device, then):
    """Log the present blocks or group of an item, then change them."""
    # Three numbers a change, not a copy of the plan: the way back costs only what changed since.
    at = state.number[LOG]
    state.log[at, 0], state.log[at, 1], state.log[at, 2] = (
        item,
        device,
        state.group[item] if device < 0 else state.held[item, device],
    )
    state.number[LOG] += 1
    set_blocks_or_group(problem, state, item, device, then)


@compile_inner
def undo_logged_changes(problem, state, until):
    """Undo logged changes of a plan, the last first, until `until` entries are left.

    Only `held` and `group`, with their lists, are restored.
    """
    # In reverse order, so that an item that changed twice ends as it was before the first change.
    while state.number[LOG] > until:
        state.number[LOG] -= 1
        of = state.log[state.number[LOG]]
        # int64, as elsewhere: numba compiles a function again for each constant, and each type.
        set_blocks_or_group(problem, state, int64(of[0]), int64(of[1]), int64(of[2]))


@compile_inner
def set_op_ms(head, problem, state, row, run):
    """Compute the ms of one op in a row of State.ops."""
    op = state.ops[row, run]
    for a in range(len(problem.heads)):
        # An empty op is not launched, so it costs 0.
        state.ms[row, run, a] = head(op[problem.first_code :], problem.heads[a]) if op[ENTERED] > 0.0 else 0.0


@compile_inner
def first_of_group(problem, device, run):
    """The first device of the group that shares an op with a device; the device itself if none does."""
    y = problem.runs[run, SHARED_KIND]
    return (
        problem.groups[problem.group_of[y, device], FIRST]
        if y >= 0 and problem.group_of[y, device] >= 0
        else device
    )


@compile_inner
def sum_load_norms(problem, state):
    """Recompute the sums of powers of all devices' loads, for the smooth cost."""
    for a in range(len(problem.heads)):
        state.norm[1, 0, a] = 0.0
        for d in range(device_count(state)):
            state.norm[1, 0, a] += norm_power(device_load_ms(problem, state, d, d, a) / state.ref[0, a])


@compile_inner
def sum_exchange_norms(problem, state, run):
    """Recompute the byte sums of an op's exchanges and their sums of powers, for the smooth cost."""
    n_hosts = state.hosts.shape[1] - 1
    for x in range(run, len(problem.rates), len(problem.runs)):
        state.norm[1, 1, x] = state.norm[1, 2, x] = 0.0
        for h in range(n_hosts + 1):
            state.hosts[1, h, x] = 0.0
        for d in range(device_count(state)):
            n_bytes = exchanged_bytes(state, d, x)
            # A group counts once, so that the norm of a single group is exact.
            if first_of_group(problem, d, run) == d:
                state.norm[1, 1, x] += norm_power(n_bytes / state.ref[1, x])
            state.hosts[1, problem.host[d], x] += n_bytes
            state.hosts[1, n_hosts, x] += n_bytes
        for h in range(n_hosts):
            state.norm[1, 2, x] += norm_power(state.hosts[1, h, x] / state.ref[2, x])


@compile_inner
def recompute_ops(head, problem, state):
    """Recompute all devices' ops and the local batch's options from the shards of a plan."""
    # Tables of fixed kinds are in every plan.
    for r in range(len(state.runs)):
        copy_vector(state.runs[r], problem.fixed_runs[r])
    state.value[SENT], state.value[SCRATCH] = problem.fixed_ids, problem.fixed_scratch
    for d in range(device_count(state)):
        for r in range(len(state.runs)):
            copy_vector(state.ops[d, r], problem.fixed_ops[d, r])
            state.row[d, r] = d
    for i in range(state.number[N_SHARED]):
        s = state.shared[i]
        g = state.group[s]
        y = problem.groups[g, KIND_OF_GROUP]
        for d in range(problem.groups[g, FIRST], problem.groups[g, LAST] + 1):
            if problem.group_of[y, d] == g:
                add_option_to_ops(problem, state, d, problem.shared[int(d == problem.groups[g, LAST]), y, s])
        count_option(problem, state, s, problem.shared[0, y, s])
    for d in range(device_count(state)):
        # Go over held items only: most entries of `held` are 0.
        for i in range(state.count[d]):
            s = int64(state.items[d, i])
            option = int64(problem.shard[s, state.held[s, d]])
            add_option_to_ops(problem, state, d, option)
            count_option(problem, state, s, option)
        for r in range(len(state.runs)):
            # All devices of a group run the same op. Only the first is priced.
            first = first_of_group(problem, d, r)
            if first == d:
                set_op_ms(head, problem, state, d, r)
            else:
                copy_vector(state.ms[d, r], state.ms[first, r])


@compile_inner
def recompute_state(head, problem, state):
    """Recompute a search state from the shards of its plan, which removes accumulated rounding errors.

    This also removes rounding errors that many small updates gathered.
    """
    recompute_ops(head, problem, state)
    # Only now all runs, and so the local batch, are known.
    compute_local_batch_bytes(problem, state)
    set_excess_bytes(problem, state)
    n_devices = device_count(state)
    for a in range(len(problem.heads)):
        # References are the means. The lower limits guard the division for empty plans.
        state.ref[0, a] = 0.0
        for d in range(n_devices):
            state.devices[d, LOAD + a] = device_load_ms(problem, state, d, d, a)
            state.ref[0, a] += state.devices[d, LOAD + a]
        state.ref[0, a] = max(state.ref[0, a] / n_devices, 1e-12)
    sum_load_norms(problem, state)
    for r in range(len(state.runs)):
        # Norms are summed after their references are known.
        sum_exchange_norms(problem, state, r)
        for x in range(r, len(problem.rates), len(state.runs)):
            state.ref[1, x] = max(state.hosts[1, -1, x] / n_devices, 1.0)
            state.ref[2, x] = max(state.hosts[1, -1, x] / (state.hosts.shape[1] - 1), 1.0)
        sum_exchange_norms(problem, state, r)
    for h in range(state.hosts.shape[1]):
        for x in range(len(problem.rates)):
            state.hosts[0, h, x] = state.hosts[1, h, x]
    for i in range(3):
        copy_vector(state.norm[0, i], state.norm[1, i])
    state.value[ENERGY] = smooth_cost_ms(problem, state, int64(0))


@entry(void(WORDS, WORDS, int64[:, ::1]))
def place_shards(problem_words, state_words, shards):
    """Add shards [N, 3] (item, device, blocks) to a plan. Call `refresh_state` afterwards."""
    problem, state = problem_at(problem_words), state_at(state_words)
    for i in range(len(shards)):
        s, d = shards[i, 0], shards[i, 1]
        set_held_blocks(problem, state, s, d, state.held[s, d] + shards[i, 2])


@entry(void(WORDS, int64[:, ::1]))
def share_items(state_words, pairs):
    """Assign items to groups of devices that share them. pairs: [N, 2] item, group. Call `refresh_state`
    afterwards.
    """
    state = state_at(state_words)
    for i in range(len(pairs)):
        set_item_group(state, pairs[i, 0], pairs[i, 1])
