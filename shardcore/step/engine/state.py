"""Updates of a State: items of devices, items of groups, and the way back to the best plan."""

from numba import int64, void

from shardcore.core.jit import compile_inner
from shardcore.step.engine.arrays import (
    BYTES_MOVED,
    ENERGY,
    ENTERED,
    FIRST,
    JOINT,
    LAST,
    LAYOUT,
    LAYOUT_OF,
    LOAD,
    LOG,
    N_MOVED,
    N_SHARED,
    SCRATCH,
    SENT,
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
def count_moved_bytes(fx, st, s, d, was, now):
    """Count the tables and bytes moved if device d holds `now` column blocks of an item (a table's row range) instead
    of `was`.
    """
    # Columns are exchangeable. Only blocks beyond those it had count as moved.
    more = (max(0, now - fx.kept[s, d]) - max(0, was - fx.kept[s, d])) * fx.items[s, WEIGHT]
    # A table counts once, however many of its items moved. A bundle counts as all of its tables (joint).
    t = fx.items[s, TABLE]
    st.number[N_MOVED] += (int(st.moved[t] + more > 0) - int(st.moved[t] > 0)) * fx.items[s, JOINT]
    st.number[BYTES_MOVED] += more
    st.moved[t] += more


@compile_inner
def set_held_blocks(fx, st, s, d, blocks):
    """Set how many blocks of item s (columns of a table) device d holds, and update the device's list of items."""
    was = int64(st.held[s, d])
    # Without limits, moved tables and bytes are not counted.
    if len(fx.kept) > 0:
        count_moved_bytes(fx, st, s, d, was, blocks)
    st.held[s, d] = blocks
    # A device's list has only the items that it holds: loops over it skip the many zeros of `held`.
    if was == 0 and blocks > 0:
        st.items[d, st.count[d]] = s
        st.count[d] += 1
    elif was > 0 and blocks == 0:
        # Remove by swapping with the last entry: the order of the list has no meaning.
        i = 0
        while st.items[d, i] != s:
            i += 1
        st.count[d] -= 1
        st.items[d, i] = st.items[d, st.count[d]]


@compile_inner
def set_item_group(st, s, group):
    """Set the group of devices that shares item s; -1 for none."""
    # `shared` lists an item once, so a change from group to group leaves the list as it is.
    if st.group[s] < 0:
        st.shared[st.number[N_SHARED]] = s
        st.number[N_SHARED] += 1
    elif group < 0:
        # Remove by swapping with the last entry.
        i = 0
        while st.shared[i] != s:
            i += 1
        st.number[N_SHARED] -= 1
        st.shared[i] = st.shared[st.number[N_SHARED]]
    st.group[s] = group


@compile_inner
def set_blocks_or_group(fx, st, s, d, then):
    """Set the blocks of item s on device d, or the item's group if d is -1."""
    if d < 0:
        set_item_group(st, s, then)
    else:
        set_held_blocks(fx, st, s, d, then)


@compile_inner
def log_and_set(fx, st, s, d, then):
    """Log the present blocks or group of an item, then change them."""
    # Three numbers a change, not a copy of the plan: the way back costs only what changed since.
    at = st.number[LOG]
    st.log[at, 0], st.log[at, 1], st.log[at, 2] = s, d, st.group[s] if d < 0 else st.held[s, d]
    st.number[LOG] += 1
    set_blocks_or_group(fx, st, s, d, then)


@compile_inner
def undo_logged_changes(fx, st, until):
    """Undo logged changes of a plan, the last first, until `until` entries are left.

    Only `held` and `group`, with their lists, are restored.
    """
    # In reverse order, so that an item that changed twice ends as it was before the first change.
    while st.number[LOG] > until:
        st.number[LOG] -= 1
        of = st.log[st.number[LOG]]
        # int64, as elsewhere: numba compiles a function again for each constant, and each type.
        set_blocks_or_group(fx, st, int64(of[0]), int64(of[1]), int64(of[2]))


@compile_inner
def set_op_ms(head, fx, st, row, r):
    """Compute the ms of one op in a row of State.ops."""
    op = st.ops[row, r]
    for a in range(len(fx.heads)):
        # An empty op is not launched, so it costs 0.
        st.ms[row, r, a] = head(op[fx.first_code :], fx.heads[a]) if op[ENTERED] > 0.0 else 0.0


@compile_inner
def first_of_group(fx, d, r):
    """The first device of the group that shares op r with device d; d itself if none does."""
    y = fx.runs[r, LAYOUT]
    return fx.groups[fx.group_of[y, d], FIRST] if y >= 0 and fx.group_of[y, d] >= 0 else d


@compile_inner
def sum_load_norms(fx, st):
    """Recompute the sums of powers of all devices' loads, for the smooth cost."""
    for a in range(len(fx.heads)):
        st.norm[1, 0, a] = 0.0
        for d in range(device_count(st)):
            st.norm[1, 0, a] += norm_power(device_load_ms(fx, st, d, d, a) / st.ref[0, a])


@compile_inner
def sum_exchange_norms(fx, st, r):
    """Recompute the byte sums of an op's exchanges and their sums of powers, for the smooth cost."""
    n_hosts = st.hosts.shape[1] - 1
    for x in range(r, len(fx.rates), len(fx.runs)):
        st.norm[1, 1, x] = st.norm[1, 2, x] = 0.0
        for h in range(n_hosts + 1):
            st.hosts[1, h, x] = 0.0
        for d in range(device_count(st)):
            n_bytes = exchanged_bytes(st, d, x)
            # A group counts once, so that the norm of a single group is exact.
            if first_of_group(fx, d, r) == d:
                st.norm[1, 1, x] += norm_power(n_bytes / st.ref[1, x])
            st.hosts[1, fx.host[d], x] += n_bytes
            st.hosts[1, n_hosts, x] += n_bytes
        for h in range(n_hosts):
            st.norm[1, 2, x] += norm_power(st.hosts[1, h, x] / st.ref[2, x])


@compile_inner
def recompute_ops(head, fx, st):
    """Recompute all devices' ops and the local batch's options from the shards of a plan."""
    # Tables of fixed kinds are in every plan.
    for r in range(len(st.runs)):
        copy_vector(st.runs[r], fx.fixed_runs[r])
    st.value[SENT], st.value[SCRATCH] = fx.fixed_ids, fx.fixed_scratch
    for d in range(device_count(st)):
        for r in range(len(st.runs)):
            copy_vector(st.ops[d, r], fx.fixed_ops[d, r])
            st.row[d, r] = d
    for i in range(st.number[N_SHARED]):
        s = st.shared[i]
        g = st.group[s]
        y = fx.groups[g, LAYOUT_OF]
        for d in range(fx.groups[g, FIRST], fx.groups[g, LAST] + 1):
            if fx.group_of[y, d] == g:
                add_option_to_ops(fx, st, d, fx.shared[int(d == fx.groups[g, LAST]), y, s])
        count_option(fx, st, s, fx.shared[0, y, s])
    for d in range(device_count(st)):
        # Go over held items only: most entries of `held` are 0.
        for i in range(st.count[d]):
            s = int64(st.items[d, i])
            option = int64(fx.shard[s, st.held[s, d]])
            add_option_to_ops(fx, st, d, option)
            count_option(fx, st, s, option)
        for r in range(len(st.runs)):
            # All devices of a group run the same op. Only the first is priced.
            first = first_of_group(fx, d, r)
            if first == d:
                set_op_ms(head, fx, st, d, r)
            else:
                copy_vector(st.ms[d, r], st.ms[first, r])


@compile_inner
def recompute_state(head, fx, st):
    """Recompute a search state from the shards of its plan, which removes accumulated rounding errors.

    This also removes rounding errors that many small updates gathered.
    """
    recompute_ops(head, fx, st)
    # Only now all runs, and so the local batch, are known.
    compute_local_batch_bytes(fx, st)
    set_excess_bytes(fx, st)
    n_devices = device_count(st)
    for a in range(len(fx.heads)):
        # References are the means. The lower limits guard the division for empty plans.
        st.ref[0, a] = 0.0
        for d in range(n_devices):
            st.devices[d, LOAD + a] = device_load_ms(fx, st, d, d, a)
            st.ref[0, a] += st.devices[d, LOAD + a]
        st.ref[0, a] = max(st.ref[0, a] / n_devices, 1e-12)
    sum_load_norms(fx, st)
    for r in range(len(st.runs)):
        # Norms are summed after their references are known.
        sum_exchange_norms(fx, st, r)
        for x in range(r, len(fx.rates), len(st.runs)):
            st.ref[1, x] = max(st.hosts[1, -1, x] / n_devices, 1.0)
            st.ref[2, x] = max(st.hosts[1, -1, x] / (st.hosts.shape[1] - 1), 1.0)
        sum_exchange_norms(fx, st, r)
    for h in range(st.hosts.shape[1]):
        for x in range(len(fx.rates)):
            st.hosts[0, h, x] = st.hosts[1, h, x]
    for i in range(3):
        copy_vector(st.norm[0, i], st.norm[1, i])
    st.value[ENERGY] = smooth_cost_ms(fx, st, int64(0))


@entry(void(WORDS, WORDS, int64[:, ::1]))
def place_shards(problem, state, shards):
    """Add shards [N, 3] (item, device, blocks) to a plan. Call `refresh_state` afterwards."""
    fx, st = problem_at(problem), state_at(state)
    for i in range(len(shards)):
        s, d = shards[i, 0], shards[i, 1]
        set_held_blocks(fx, st, s, d, st.held[s, d] + shards[i, 2])


@entry(void(WORDS, int64[:, ::1]))
def share_items(state, pairs):
    """Assign items to groups of devices that share them. pairs: [N, 2] item, group. Call `refresh_state`
    afterwards.
    """
    st = state_at(state)
    for i in range(len(pairs)):
        set_item_group(st, pairs[i, 0], pairs[i, 1])
