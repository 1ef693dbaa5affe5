"""Updates of a State: strips of devices, strips of groups, and the way back to the best plan."""

from numba import float64, int64, void

from shardcore.core.jit import inner, seldom
from shardcore.search.anneal.compiled.arrays import (
    BEST,
    BYTES_MOVED,
    ENERGY,
    HEAD,
    LOG,
    N_MOVED,
    N_SHARED,
    SCRATCH,
    SENT,
    problem_at,
    state_at,
)
from shardcore.search.anneal.compiled.cost import add, copy, cost_of, energy_of, load_of, power, total_of
from shardcore.search.anneal.compiled.memory import add_shard, all_lack, expect, frame, shared_row
from shardcore.search.anneal.compiled.pointers import WORDS, entry


@inner
def moved_of(fx, s, d, units):
    """Bytes of a strip that moved to device d if it holds `units` of it."""
    # Columns are exchangeable. Only units beyond those it had count as moved.
    return max(0, units - fx.kept[s, d]) * fx.weight[s]


@inner
def hold(fx, st, s, d, units):
    """Set how many units of strip s device d holds, and update the lists that follow."""
    was = int64(st.held[s, d])
    # Without limits, moved tables and bytes are not counted.
    if len(fx.kept) > 0:
        t = fx.table[s]
        # A table counts once, however many of its strips moved. A bundle counts as all of its tables (joint).
        more = moved_of(fx, s, d, units) - moved_of(fx, s, d, was)
        st.number[N_MOVED] += (int(st.moved[t] + more > 0) - int(st.moved[t] > 0)) * fx.joint[s]
        st.number[BYTES_MOVED] += more
        st.moved[t] += more
    st.held[s, d] = units
    # A device's list has only the strips that it holds: loops over it skip the many zeros of `held`.
    if was == 0 and units > 0:
        st.strips[d, st.count[d]] = s
        st.count[d] += 1
    elif was > 0 and units == 0:
        # Remove by swapping with the last entry: the order of the list has no meaning.
        i = 0
        while st.strips[d, i] != s:
            i += 1
        st.count[d] -= 1
        st.strips[d, i] = st.strips[d, st.count[d]]


@inner
def set_group(st, s, group):
    """Let a group share strip s, or none (-1)."""
    # `shared` lists a strip once, so a change from group to group leaves the list as it is.
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


@inner
def note(st, s, d, was):
    """Log the state before a change. d: a device, or -1 where `was` is the strip's group."""
    # Three numbers a change, not a copy of the plan: the way back costs only what changed since.
    at = st.number[LOG]
    st.log[at, 0], st.log[at, 1], st.log[at, 2] = s, d, was
    st.number[LOG] += 1


@seldom
def undo(fx, st, until):
    """Take back logged steps, the last first, until so many are left.

    Only `held` and `group`, with their lists, are restored.
    """
    # In reverse order, so that a strip that changed twice ends as it was before the first change.
    while st.number[LOG] > until:
        st.number[LOG] -= 1
        # int64, as elsewhere: numba compiles a function again for each constant, and each type.
        s, d, was = (
            int64(st.log[st.number[LOG], 0]),
            int64(st.log[st.number[LOG], 1]),
            int64(st.log[st.number[LOG], 2]),
        )
        if d < 0:
            set_group(st, s, was)
        else:
            hold(fx, st, s, d, was)


@seldom
def recompute_groups(head, fx, st):
    """Compute group_* from `group`, and from them shared_ms and own_ms of each device."""
    for g in range(len(st.group_size)):
        # Tables of fixed kinds are in every plan. Their sums are where a group's sums begin.
        st.group_size[g] = fx.fixed_size[g]
        copy(st.group_sums[g], fx.fixed_codes[g])
    st.group_memory[:] = 0.0
    st.group_ids[:] = 0
    for i in range(st.number[N_SHARED]):
        s = st.shared[i]
        g = st.group[s]
        y = fx.group_layout[g]
        # A group's devices have the same share, but the last, whose row range may be short.
        st.group_size[g] += fx.shared_size[y, s]
        # Exchanges of ids are counted on from the K kinds: that of run n is exchange K + n.
        r = fx.shared_ids_by[y] - len(fx.ids_by)
        for e in range(2):
            add_shard(fx, st.group_memory[e, g], shared_row(fx, e, y, s), r)
        st.run_shards[r] += 1
        st.run_outputs[r] += fx.local_outputs[s] * fx.size[s]
        st.run_rank[r] = min(st.run_rank[r], fx.rank[s])
        # Divided rows need ids of a local batch in buckets, too.
        st.value[SENT] += fx.local_ids[s] + fx.bucketized[y, s]
        # A dense optimizer updates one table after another, so only the largest buffer counts.
        st.value[SCRATCH] = max(st.value[SCRATCH], fx.scratch[y, s])
        st.group_ids[g] += fx.shared_ids[y, s]
        add(st.group_sums[g], fx.shared_codes[y, s])
    for g in range(len(st.group_size)):
        # A group without tables runs no op. All devices of a group run the same one.
        some = st.group_size[g] > 0.0
        st.group_ms[g] = head(st.group_sums[g], fx.parameters) if some else 0.0
        if len(fx.fetched) > 0:
            st.group_fetched_ms[g] = head(st.group_sums[g], fx.fetched) if some else 0.0
    # In each layout a device is in one group at most. Over layouts its costs add up.
    st.shared_ms[:] = 0.0
    st.shared_fetched_ms[:] = 0.0
    st.own_ms[:] = 0.0
    for y in range(len(fx.shared_once)):
        for d in range(len(st.load)):
            g = fx.group_of[y, d]
            if g >= 0:
                st.shared_ms[d] += st.group_ms[g]
                st.shared_fetched_ms[d] += st.group_fetched_ms[g]
                st.own_ms[d] += fx.shared_own[y] * st.group_size[g]


@seldom
def recompute(head, fx, st):
    """Compute everything that follows from `held` and `group`, and reset the norms' references.

    This also removes rounding errors that many small updates gathered.
    """
    n_devices, n_exchanges = st.carried.shape
    n_kinds = len(fx.ids_by)
    # What the local batch depends on is counted afresh, from the tables that every plan has.
    for r in range(len(st.run_shards)):
        st.run_shards[r], st.run_partial[r] = int64(fx.fixed_runs[r, 0]), int64(fx.fixed_runs[r, 1])
        st.run_outputs[r], st.run_rank[r] = fx.fixed_runs[r, 2], int64(fx.fixed_runs[r, 3])
    st.value[SENT], st.value[SCRATCH] = fx.fixed_ids, fx.fixed_scratch
    # Groups come first: devices start from what their groups hold.
    recompute_groups(head, fx, st)
    for d in range(n_devices):
        copy(st.memory[d], fx.fixed_memory[d])
        copy(st.carried[d], fx.fixed_carried[d])
    # On a group's last device the rows may be fewer, so its memory is counted apart.
    for y in range(len(fx.shared_once)):
        for d in range(n_devices):
            g = fx.group_of[y, d]
            if g >= 0:
                add(st.memory[d], st.group_memory[fx.is_last[y, d], g])
                st.carried[d, fx.shared_ids_by[y]] += st.group_ids[g]
    st.hosts[:] = 0
    st.all_carried[:] = 0
    for d in range(n_devices):
        for k in range(n_kinds):
            copy(st.sums[d, k], fx.fixed_sums[d, k])
        # Go over held strips only: most entries of `held` are 0.
        for i in range(st.count[d]):
            s = int64(st.strips[d, i])
            shard, k = int64(fx.shard[s, st.held[s, d]]), fx.kind[s]
            add_shard(fx, st.memory[d], shard, fx.ids_by[k] - n_kinds)
            expect(fx, st, s, int64(st.held[s, d]))
            st.carried[d, k] += fx.outputs[shard]
            st.carried[d, fx.ids_by[k]] += fx.ids[shard]
            add(st.sums[d, k], fx.codes[shard])
        for k in range(n_kinds):
            # An empty op is not launched, so it costs 0.
            st.ms[d, k] = head(st.sums[d, k], fx.parameters) if st.carried[d, k] > 0 else 0.0
            if len(fx.fetched) > 0:
                st.fetched_ms[d, k] = head(st.sums[d, k], fx.fetched) if st.carried[d, k] > 0 else 0.0
        add(st.hosts[fx.host[d]], st.carried[d])
        add(st.all_carried, st.carried[d])
        st.load[d] = load_of(fx, d, st.shared_ms[d], st.own_ms[d], total_of(st.ms[d]), st.carried[d])
        st.fetched[d] = (st.shared_fetched_ms[d] + total_of(st.fetched_ms[d])) / fx.speed[d]
    # Only now all runs, and so the local batch, are known.
    frame(fx, st)
    all_lack(fx, st)
    # References are the means. The lower limits guard the division for empty plans.
    st.ref[0, 0], st.ref[0, 1] = max(st.load.mean(), 1e-12), max(st.fetched.mean(), 1e-12)
    for x in range(n_exchanges):
        st.ref[1, x] = max(st.all_carried[x] / n_devices, 1.0)
        st.ref[2, x] = max(st.all_carried[x] / len(st.hosts), 1.0)
    # Norms are summed after the references are known.
    st.norm[:] = 0.0
    for d in range(n_devices):
        st.norm[0, 0] += power(st.load[d] / st.ref[0, 0])
        st.norm[0, 1] += power(st.fetched[d] / st.ref[0, 1])
        for x in range(n_exchanges):
            st.norm[1, x] += power(st.carried[d, x] / st.ref[1, x])
    for h in range(len(st.hosts)):
        for x in range(n_exchanges):
            st.norm[2, x] += power(st.hosts[h, x] / st.ref[2, x])
    st.value[ENERGY] = energy_of(fx, st.ref, st.norm, st.all_carried, st.group_size)


@entry(float64(HEAD, WORDS, WORDS))
def refresh(head, problem, state):
    """Compute everything that follows from `held` and `group`. Returns the plan's cost in ms.

    After annealing, goes back to the best plan met first, by the log. Only the state annealed last may have one.
    """
    fx, st = problem_at(problem), state_at(state)
    undo(fx, st, int64(0))
    recompute(head, fx, st)
    st.value[BEST] = cost_of(fx, st)
    return st.value[BEST]


@entry(void(WORDS, WORDS, int64[:, ::1]))
def place(problem, state, shards):
    """Add shards [N, 3]: strip, device, units. Call `refresh` afterwards."""
    fx, st = problem_at(problem), state_at(state)
    for i in range(len(shards)):
        s, d = shards[i, 0], shards[i, 1]
        hold(fx, st, s, d, st.held[s, d] + shards[i, 2])


@entry(void(WORDS, int64[:, ::1]))
def share(state, pairs):
    """Let groups share strips. pairs: [N, 2] strip, group. Call `refresh` afterwards."""
    st = state_at(state)
    for i in range(len(pairs)):
        set_group(st, pairs[i, 0], pairs[i, 1])
