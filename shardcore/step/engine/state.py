"""Updates of a State: strips of devices, strips of groups, and the way back to the best plan."""

from numba import int64, void

from shardcore.core.jit import inner
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
    copy,
    energy_of,
    exchanged_bytes,
    load_of,
    n_devices_of,
    power,
)
from shardcore.step.engine.memory import add_option, expect, frame, set_lacks
from shardcore.step.engine.pointers import WORDS, entry


@inner
def count_moved(fx, st, s, d, was, now):
    """Count the tables and bytes that moved if device d has `now` units of a strip in place of `was`."""
    # Columns are exchangeable. Only units beyond those it had count as moved.
    more = (max(0, now - fx.kept[s, d]) - max(0, was - fx.kept[s, d])) * fx.strips[s, WEIGHT]
    # A table counts once, however many of its strips moved. A bundle counts as all of its tables (joint).
    t = fx.strips[s, TABLE]
    st.number[N_MOVED] += (int(st.moved[t] + more > 0) - int(st.moved[t] > 0)) * fx.strips[s, JOINT]
    st.number[BYTES_MOVED] += more
    st.moved[t] += more


@inner
def hold(fx, st, s, d, units):
    """Set how many units of strip s device d holds, and update the lists that follow."""
    was = int64(st.held[s, d])
    # Without limits, moved tables and bytes are not counted.
    if len(fx.kept) > 0:
        count_moved(fx, st, s, d, was, units)
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
def set_place(fx, st, s, d, then):
    """Set the units of strip s on device d, or the strip's group where d is -1."""
    if d < 0:
        set_group(st, s, then)
    else:
        hold(fx, st, s, d, then)


@inner
def change_place(fx, st, s, d, then):
    """Log the state before, then `set_place`."""
    # Three numbers a change, not a copy of the plan: the way back costs only what changed since.
    at = st.number[LOG]
    st.log[at, 0], st.log[at, 1], st.log[at, 2] = s, d, st.group[s] if d < 0 else st.held[s, d]
    st.number[LOG] += 1
    set_place(fx, st, s, d, then)


@inner
def undo(fx, st, until):
    """Take back logged steps, the last first, until so many are left.

    Only `held` and `group`, with their lists, are restored.
    """
    # In reverse order, so that a strip that changed twice ends as it was before the first change.
    while st.number[LOG] > until:
        st.number[LOG] -= 1
        of = st.log[st.number[LOG]]
        # int64, as elsewhere: numba compiles a function again for each constant, and each type.
        set_place(fx, st, int64(of[0]), int64(of[1]), int64(of[2]))


@inner
def set_ms(head, fx, st, row, r):
    """Compute the ms of run r's op in a row of State.ops."""
    op = st.ops[row, r]
    for a in range(len(fx.heads)):
        # An empty op is not launched, so it costs 0.
        st.ms[row, r, a] = head(op[fx.first_code :], fx.heads[a]) if op[ENTERED] > 0.0 else 0.0


@inner
def first_of_group(fx, d, r):
    """The first device of the group that shares run r's op with device d: d itself where no group does."""
    y = fx.runs[r, LAYOUT]
    return fx.groups[fx.group_of[y, d], FIRST] if y >= 0 and fx.group_of[y, d] >= 0 else d


@inner
def sum_loads(fx, st):
    """Compute the norms of a trial's loads anew."""
    for a in range(len(fx.heads)):
        st.norm[1, 0, a] = 0.0
        for d in range(n_devices_of(st)):
            st.norm[1, 0, a] += power(load_of(fx, st, d, d, a) / st.ref[0, a])


@inner
def sum_exchanges(fx, st, r):
    """Compute a trial's sums and norms of the exchanges of run r anew."""
    n_hosts = st.hosts.shape[1] - 1
    for x in range(r, len(fx.rates), len(fx.runs)):
        st.norm[1, 1, x] = st.norm[1, 2, x] = 0.0
        for h in range(n_hosts + 1):
            st.hosts[1, h, x] = 0.0
        for d in range(n_devices_of(st)):
            n_bytes = exchanged_bytes(st, d, x)
            # A group counts once, so that the norm of a single group is exact.
            if first_of_group(fx, d, r) == d:
                st.norm[1, 1, x] += power(n_bytes / st.ref[1, x])
            st.hosts[1, fx.host[d], x] += n_bytes
            st.hosts[1, n_hosts, x] += n_bytes
        for h in range(n_hosts):
            st.norm[1, 2, x] += power(st.hosts[1, h, x] / st.ref[2, x])


@inner
def recompute_ops(head, fx, st):
    """Compute the ops of all devices, and what the local batch depends on, from `held` and `group`."""
    # Tables of fixed kinds are in every plan.
    for r in range(len(st.runs)):
        copy(st.runs[r], fx.fixed_runs[r])
    st.value[SENT], st.value[SCRATCH] = fx.fixed_ids, fx.fixed_scratch
    for d in range(n_devices_of(st)):
        for r in range(len(st.runs)):
            copy(st.ops[d, r], fx.fixed_ops[d, r])
            st.row[d, r] = d
    for i in range(st.number[N_SHARED]):
        s = st.shared[i]
        g = st.group[s]
        y = fx.groups[g, LAYOUT_OF]
        for d in range(fx.groups[g, FIRST], fx.groups[g, LAST] + 1):
            if fx.group_of[y, d] == g:
                add_option(fx, st, d, fx.shared[int(d == fx.groups[g, LAST]), y, s])
        expect(fx, st, s, fx.shared[0, y, s])
    for d in range(n_devices_of(st)):
        # Go over held strips only: most entries of `held` are 0.
        for i in range(st.count[d]):
            s = int64(st.strips[d, i])
            option = int64(fx.shard[s, st.held[s, d]])
            add_option(fx, st, d, option)
            expect(fx, st, s, option)
        for r in range(len(st.runs)):
            # All devices of a group run the same op. Only the first is priced.
            first = first_of_group(fx, d, r)
            if first == d:
                set_ms(head, fx, st, d, r)
            else:
                copy(st.ms[d, r], st.ms[first, r])


@inner
def recompute(head, fx, st):
    """Compute everything that follows from `held` and `group`, and reset the norms' references.

    This also removes rounding errors that many small updates gathered.
    """
    recompute_ops(head, fx, st)
    # Only now all runs, and so the local batch, are known.
    frame(fx, st)
    set_lacks(fx, st)
    n_devices = n_devices_of(st)
    for a in range(len(fx.heads)):
        # References are the means. The lower limits guard the division for empty plans.
        st.ref[0, a] = 0.0
        for d in range(n_devices):
            st.devices[d, LOAD + a] = load_of(fx, st, d, d, a)
            st.ref[0, a] += st.devices[d, LOAD + a]
        st.ref[0, a] = max(st.ref[0, a] / n_devices, 1e-12)
    sum_loads(fx, st)
    for r in range(len(st.runs)):
        # Norms are summed after their references are known.
        sum_exchanges(fx, st, r)
        for x in range(r, len(fx.rates), len(st.runs)):
            st.ref[1, x] = max(st.hosts[1, -1, x] / n_devices, 1.0)
            st.ref[2, x] = max(st.hosts[1, -1, x] / (st.hosts.shape[1] - 1), 1.0)
        sum_exchanges(fx, st, r)
    for h in range(st.hosts.shape[1]):
        for x in range(len(fx.rates)):
            st.hosts[0, h, x] = st.hosts[1, h, x]
    for i in range(3):
        copy(st.norm[0, i], st.norm[1, i])
    st.value[ENERGY] = energy_of(fx, st, int64(0))


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
