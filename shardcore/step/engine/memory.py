"""Memory of devices, equal to that of the finished plan (step/memory.py, memory_timeline).

Sums over a device's shards are entries of its ops' vectors. Resident bytes count in all phases of a step. Of other
sums, each phase has multiples. The local batch is the same on all devices (the frame). It depends on the runs of the
plan, on their order, and on which of them have tables cut by columns.

The phases of a step, the share of each run in a local batch, and bytes of caches are counted by the functions that
Python calls for a finished plan (memory_timeline.fill_phases, memory.cache_bytes).

Caches count in all phases. FBGEMM's limits of an op count as bytes, as in step/memory.py.

t is a stage, i a run's place in the order. row is the row of State.row that has a device's ops.
"""

import math

import numpy as np
from numba import int64

from shardcore.core.jit import compile_inner
from shardcore.step import memory, memory_timeline
from shardcore.step.engine.arrays import (
    ALL_JOINED,
    ARRIVED,
    CACHED,
    ENTERED,
    FEATURES,
    FIRST_RANK,
    FRAME_MOST,
    FREE,
    HELD,
    IN_DENSE_PART,
    LACK,
    LOOKUPS,
    MOST_ENTERED,
    MOST_FEATURES,
    MOST_LOOKUPS,
    N_RUNS,
    NEXT,
    OF_SCRATCH,
    OF_SENT,
    ON_HOST,
    OPTION_RUN,
    OVER,
    PHASES,
    RANK,
    REPLICAS,
    RESIDENT,
    ROOM,
    SCRATCH,
    SENT,
    SHARDS,
)
from shardcore.step.engine.cost import add_vector, device_count, sum_over_device_ops
from shardcore.step.memory import MOST_IDS, OF_OP
from shardcore.step.memory_timeline import (
    CUT,
    DENSE_PART,
    JOINED,
    OF_ENTERED,
    OF_LOOKUPS,
    OUTPUTS,
    REPLICAS_RUN,
    SLOT_AFTER,
    SLOT_BEFORE,
    SLOT_FREED_LATE,
    SLOT_PHASES,
    UPDATE,
)

cache_bytes = compile_inner(memory.cache_bytes)
fill_phases = compile_inner(memory_timeline.fill_phases)
local_batch_case = compile_inner(memory_timeline.local_batch_case)


@compile_inner
def add_option_to_ops(fx, st, d, option):
    """Add an option's vector, and those of the rest of its bundle, to a device's ops."""
    while option > 0:
        add_vector(st.ops[d, fx.options[option, OPTION_RUN]], fx.vectors[option])
        option = fx.options[option, NEXT]


@compile_inner
def compute_local_batch_bytes(fx, st):
    """Compute the bytes of a local batch in each stage of each op, from all shards of the plan."""
    # The runs with shards, by insertion sort on the rank of their first table.
    n = 0
    for r in range(len(st.runs)):
        if st.runs[r, SHARDS] > 0.0:
            i = n
            while i > 0 and st.runs[st.order[i - 1], FIRST_RANK] > st.runs[r, FIRST_RANK]:
                st.order[i] = st.order[i - 1]
                i -= 1
            st.order[i] = r
            n += 1
    st.number[N_RUNS], st.number[REPLICAS] = n, 0
    # Sums over runs: outputs, those that are joined, gradients sent back, and each run's largest phase.
    received = joined = sent_back = most = 0.0
    for i in range(n):
        r = st.order[i]
        case, gradient = local_batch_case(i, st.order[:n], st.runs, fx.runs)
        outputs = st.runs[r, OUTPUTS]
        if fx.runs[r, REPLICAS_RUN]:
            st.number[REPLICAS] = 1
        received += outputs
        joined += outputs if case % 4 else 0.0
        # The largest phase of the run alone, for `max_local_batch_bytes`.
        of_run = 0.0
        for t in range(4):
            for slot in range(fx.stages.shape[2]):
                of = fx.stages[r, t, slot]
                st.frame[r, t, slot] = of[case] * outputs + of[case + 1] * gradient
                # Buffers before and after a run's phases meet phases of other runs, so they count, too.
                if slot >= SLOT_PHASES or slot == SLOT_BEFORE:
                    of_run = max(of_run, st.frame[r, t, slot])
            of_run = max(of_run, st.frame[r, t, SLOT_AFTER] + st.frame[r, t, SLOT_FREED_LATE])
        most += of_run
        # In the dense part, all runs wait for the first stage of backward.
        sent_back += st.frame[r, 2, SLOT_BEFORE]
    st.value[ALL_JOINED] = received + joined
    # Outputs that are kept until the step ends are among what waits for backward.
    st.value[IN_DENSE_PART] = 0.0 if fx.looks_up_ahead else received
    # No phase takes more of a local batch.
    st.value[FRAME_MOST] = max(most, received + max(joined, sent_back))


@compile_inner
def peak_phase_bytes(fx, st, row):
    """Bytes of a device's largest memory phase, without those that are resident."""
    n, arrived = st.number[N_RUNS], sum_over_device_ops(st, row, int64(ARRIVED))
    for m in range(len(st.moments)):
        of_moment = fx.moments[st.number[REPLICAS], m]
        st.moments[m] = of_moment[0] + of_moment[1] * st.value[SENT] + of_moment[2] * arrived
    st.moments[JOINED] += st.value[ALL_JOINED]
    st.moments[DENSE_PART] += st.value[IN_DENSE_PART]
    st.moments[UPDATE] += st.value[SCRATCH]
    for i in range(n):
        r = st.order[i]
        op = st.ops[st.row[row, r], r]
        # Of the local batch, and of the device's shards.
        for t in range(4):
            for slot in range(SLOT_PHASES + fx.runs[r, PHASES + t]):
                of = fx.stages[r, t, slot]
                own = of[OF_ENTERED] * op[ENTERED] + of[OF_LOOKUPS] * op[LOOKUPS]
                st.slots[r, t, slot] = st.frame[r, t, slot] + own
    most = 0.0
    for p in range(fill_phases(st.order[:n], st.slots, fx.runs[:, PHASES:], st.moments, st.phases)):
        most = max(most, st.phases[p])
    return most


@compile_inner
def max_local_batch_bytes(fx, st):
    """Upper bound of the bytes that a local batch takes on any device in any phase."""
    of = fx.moments[st.number[REPLICAS], -1]
    return of[0] + of[1] * st.value[SENT] + st.value[SCRATCH] + st.value[FRAME_MOST]


@compile_inner
def set_memory_room(fx, st, d, row):
    """Compute a device's resident bytes and its room for a local batch, from its ops.

    What a device lacks has to be counted only where a local batch may take more than its room. That is infinite for
    a device without a shard. It takes nothing: it may be one whose memory is all reserved.
    """
    held, arrived = (
        sum_over_device_ops(st, row, int64(RESIDENT)),
        sum_over_device_ops(st, row, int64(ARRIVED)),
    )
    st.devices[row, HELD] = held
    if held == 0.0 and arrived == 0.0:
        st.devices[row, ROOM] = np.inf
        return
    if fx.ops_limited and op_headroom(fx, st, row) < 0.0:
        st.devices[row, ROOM] = -np.inf
        return
    room = fx.devices[d, FREE] - held - fx.moments[0, -1, 2] * arrived
    if len(fx.caches) > 0:
        room -= cache_padding_bytes(fx, st, row)
    # Each run's largest phase. Only the largest of all counts, so this is quick, and mostly enough.
    for r in range(len(fx.runs)):
        op = st.ops[st.row[row, r], r]
        room -= fx.limits[r, MOST_ENTERED] * op[ENTERED] + fx.limits[r, MOST_LOOKUPS] * op[LOOKUPS]
    st.devices[row, ROOM] = room


@compile_inner
def excess_bytes(fx, st, d, row):
    """Bytes by which a device's memory is exceeded with the given ops; 0 if they fit."""
    # A lower bound of the room holds an upper bound of the batch. Most trials need no exact count.
    if st.devices[row, ROOM] >= max_local_batch_bytes(fx, st):
        return 0.0
    # Rounded as memory.used_bytes rounds, so that both agree to the byte.
    left = fx.devices[d, FREE] - st.devices[row, HELD] - math.floor(peak_phase_bytes(fx, st, row) + 0.5)
    # A cache has whole sets of rows, so its bytes do not add up over shards.
    if len(fx.caches) > 0:
        left -= cache_padding_bytes(fx, st, row)
    if fx.ops_limited:
        # Scaled by OF_OP, so that an op that is too large lacks bytes, as a full device does.
        left = min(left, op_headroom(fx, st, row))
    return max(0.0, -left)


@compile_inner
def cache_padding_bytes(fx, st, row):
    """Bytes of a device's embedding caches beyond those counted as resident."""
    # RESIDENT counts each shard's cache as wide as that shard. This entry sums these bytes: take them off.
    beyond = -sum_over_device_ops(st, row, int64(CACHED))
    for c in range(len(fx.caches)):
        r, first, last = fx.caches[c, 0], fx.caches[c, 1], fx.caches[c, 2]
        beyond += cache_bytes(st.ops[st.row[row, r], r], first, last, fx.cache_row_bytes)
    return beyond


@compile_inner
def op_headroom(fx, st, row):
    """Remaining headroom under FBGEMM's per-op limits, in pseudo-bytes (OF_OP); the minimum over ops."""
    left = np.inf
    for r in range(len(fx.runs)):
        op = st.ops[st.row[row, r], r]
        left = min(
            left, OF_OP * (MOST_IDS - op[LOOKUPS]), OF_OP * (fx.limits[r, MOST_FEATURES] - op[FEATURES])
        )
    return left


@compile_inner
def set_excess_bytes(fx, st):
    """Compute the memory excess of each device and host, and their sum."""
    # Only a plan with OVER of 0 fits; `try_shared_move` refuses to raise it.
    over = 0.0
    for h in range(st.hosts.shape[1]):
        st.hosts[0, h, -1] = 0.0
    for d in range(device_count(st)):
        set_memory_room(fx, st, d, d)
        st.devices[d, LACK] = excess_bytes(fx, st, d, d)
        over += st.devices[d, LACK]
        st.hosts[0, fx.host[d], -1] += sum_over_device_ops(st, d, int64(ON_HOST))
    for h in range(st.hosts.shape[1] - 1):
        over += max(0.0, st.hosts[0, h, -1] - fx.host_free)
    st.value[OVER] = over


@compile_inner
def host_memory_fits(fx, st, d, row):
    """Tell if a host's memory suffices with other ops on device d. A host that is too full may still shrink."""
    more = sum_over_device_ops(st, row, int64(ON_HOST)) - sum_over_device_ops(st, d, int64(ON_HOST))
    return more <= 0.0 or st.hosts[0, fx.host[d], -1] + more <= fx.host_free


@compile_inner
def count_option(fx, st, s, option):
    """Count an option of item s (columns of a table) in the local batch of its op."""
    run, alone = st.runs[fx.options[option, OPTION_RUN]], fx.alone[option]
    run[OUTPUTS] += alone[OUTPUTS]
    # Runs follow each other in the order of their first tables.
    run[FIRST_RANK] = min(run[FIRST_RANK], float(fx.items[s, RANK]))
    # A dense optimizer updates one table after another, so only the largest buffer counts.
    st.value[SCRATCH] = max(st.value[SCRATCH], alone[OF_SCRATCH])
    replace_counted_option(fx, st, int64(0), option)


@compile_inner
def replace_counted_option(fx, st, was, now):
    """Replace an option of an item in the local batch. Returns True if an op gains its first cut table or loses its
    last.

    Ids of a local batch exist once for each shard; outputs do not depend on how an item is cut.
    """
    run = st.runs[fx.options[max(was, now), OPTION_RUN]]
    before = run[CUT] > 0.0
    run[SHARDS] += int(now > 0) - int(was > 0)
    run[CUT] += fx.alone[now, CUT] - fx.alone[was, CUT]
    st.value[SENT] += fx.alone[now, OF_SENT] - fx.alone[was, OF_SENT]
    return before != (run[CUT] > 0.0)
