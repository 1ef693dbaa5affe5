"""Memory of devices, equal to that of the finished plan (step/memory.py, memory_timeline).

Sums over a device's shards are entries of its ops' vectors. Resident bytes count in all phases of a step. Of other
sums, each phase has multiples. The local batch is the same on all devices (the frame). It depends on the runs of the
plan, on their order, and on which of them have tables cut by columns.

A step has four stages. In each, one run follows another. Before and after its phases a run has buffers, too.
So one pass over the runs gives all phases: no list of them is needed.

Caches count in all phases. FBGEMM's limits of an op count as bytes, as in step/memory.py.

t is a stage, i a run's place in the order. row is the row of State.row that has a device's ops.
"""

import math

import numpy as np
from numba import int64

from shardcore.core.jit import compile_inner
from shardcore.step.engine.arrays import (
    ARRIVED,
    CACHED,
    COLLECTION,
    CUT,
    DENSE_PART,
    ENTERED,
    FEATURES,
    FIRST_RANK,
    FRAME_MOST,
    FREE,
    HELD,
    JOINED,
    LACK,
    LOOKUPS,
    MOST_ENTERED,
    MOST_FEATURES,
    MOST_LOOKUPS,
    N_RUNS,
    NEXT,
    OF_ENTERED,
    OF_LOOKUPS,
    OF_SCRATCH,
    OF_SENT,
    ON_HOST,
    OPTION_RUN,
    OUTPUTS,
    OVER,
    PHASES,
    RANK,
    REPLICAS,
    REPLICAS_RUN,
    RESIDENT,
    ROOM,
    SCRATCH,
    SENT,
    SEQUENCE,
    SHARDS,
    SLOT_AFTER,
    SLOT_BEFORE,
    SLOT_FREED_LATE,
    SLOT_PHASES,
)
from shardcore.step.engine.cost import add_vector, device_count, sum_over_device_ops
from shardcore.step.memory import CACHE_SET_ROWS, MOST_IDS, OF_OP


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
        outputs, cut = st.runs[r, OUTPUTS], st.runs[r, CUT] > 0.0
        if fx.runs[r, REPLICAS_RUN]:
            st.number[REPLICAS] = 1
        # Outputs of a collection's runs form one tensor. Its gradient lives until the run that is last in
        # backward has its own: the first of them.
        of_all, others, is_last = 0.0, 0, True
        for j in range(n):
            q = st.order[j]
            if fx.runs[q, COLLECTION] == fx.runs[r, COLLECTION]:
                of_all += st.runs[q, OUTPUTS]
                if q != r:
                    others += 1
                    # Replicas' are after all that is exchanged.
                    if fx.runs[q, REPLICAS_RUN] or (j < i and not fx.runs[r, REPLICAS_RUN]):
                        is_last = False
        # Parts of a cut sequence are joined, and pooled outputs of several runs.
        together = cut if fx.runs[r, SEQUENCE] else others > 0
        # A sequence has a gradient of its outputs. The last run in backward holds that of its collection.
        gradient = 0.0
        if fx.runs[r, SEQUENCE]:
            gradient = outputs
        elif is_last:
            gradient = of_all
        received += outputs
        joined += outputs if together else 0.0
        # Multiples as StageCoefficients.batch has them.
        case = 4 * int(cut) + 2 * int(together)
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
    st.value[JOINED] = received + joined
    # Outputs that are kept until the step ends are among what waits for backward.
    st.value[DENSE_PART] = 0.0 if fx.looks_up_ahead else received
    # No phase takes more of a local batch.
    st.value[FRAME_MOST] = max(most, received + max(joined, sent_back))


@compile_inner
def moment_bytes(fx, st, arrived, m):
    """Bytes of input batches, ids and activations at one moment of the pipeline. arrived: bytes of received ids."""
    of = fx.moments[st.number[REPLICAS], m]
    return of[0] + of[1] * st.value[SENT] + of[2] * arrived


@compile_inner
def slot_bytes(fx, st, row, r, t, slot):
    """Bytes of an op's buffers in one slot of a stage: of the local batch, and of the device's shards."""
    of, op = fx.stages[r, t, slot], st.ops[st.row[row, r], r]
    return st.frame[r, t, slot] + of[OF_ENTERED] * op[ENTERED] + of[OF_LOOKUPS] * op[LOOKUPS]


@compile_inner
def peak_phase_bytes(fx, st, row):
    """Bytes of a device's largest memory phase, without those present in all phases."""
    n, arrived = st.number[N_RUNS], sum_over_device_ops(st, row, int64(ARRIVED))
    # Outputs are joined after the stages of forward.
    most, held = st.value[JOINED] + moment_bytes(fx, st, arrived, int64(2)), 0.0
    # Two stages forward (look up, wait for outputs), two backward (send gradients, wait for them).
    for t in range(4):
        # At first, all runs have the buffers that precede their phases.
        held = 0.0
        for i in range(n):
            held += slot_bytes(fx, st, row, st.order[i], t, SLOT_BEFORE)
        if t == 0:  # ids arrive before lookups
            most = max(most, held + moment_bytes(fx, st, arrived, int64(0)))
        if t == 2:  # the dense part comes between forward and backward
            most = max(most, st.value[DENSE_PART] + held + moment_bytes(fx, st, arrived, int64(3)))
        freed_late, ids = 0.0, moment_bytes(fx, st, arrived, 1 + t if t < 2 else 4)
        for i in range(n):
            # Autograd goes back from the last run to the first.
            r = st.order[i] if t < 2 else st.order[n - 1 - i]
            # When the run begins, its phases take the place of the buffers that waited for it.
            held -= slot_bytes(fx, st, row, r, t, SLOT_BEFORE)
            for slot in range(SLOT_PHASES, SLOT_PHASES + fx.runs[r, PHASES + t]):
                # Only the first phase meets the buffers of the run before.
                most = max(most, ids + held + freed_late + slot_bytes(fx, st, row, r, t, slot))
                freed_late = 0.0
            # These stay until the stage ends, while the runs that follow have their phases.
            held += slot_bytes(fx, st, row, r, t, SLOT_AFTER)
            freed_late = slot_bytes(fx, st, row, r, t, SLOT_FREED_LATE)
    # The dense optimizer steps last.
    return max(most, held + st.value[SCRATCH] + moment_bytes(fx, st, arrived, int64(5)))


@compile_inner
def max_local_batch_bytes(fx, st):
    """Upper bound of the bytes that a local batch takes on any device in any phase."""
    of = fx.moments[st.number[REPLICAS], -1]
    return fx.always + of[0] + of[1] * st.value[SENT] + st.value[SCRATCH] + st.value[FRAME_MOST]


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
    left = (
        fx.devices[d, FREE]
        - st.devices[row, HELD]
        - math.floor(fx.always + peak_phase_bytes(fx, st, row) + 0.5)
    )
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
        r, first, widest = fx.caches[c, 0], fx.caches[c, 1], fx.caches[c, 2]
        op = st.ops[st.row[row, r], r]
        # A cache's rows are as wide as its widest shard. Widths ascend.
        while widest > first and op[widest] == 0.0:
            widest -= 1
        beyond += math.ceil(op[first] / CACHE_SET_ROWS) * CACHE_SET_ROWS * fx.cache_row_bytes[widest]
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
    """Count an option of strip s (columns of a table) in the local batch of its op."""
    run, alone = st.runs[fx.options[option, OPTION_RUN]], fx.alone[option]
    run[OUTPUTS] += alone[OUTPUTS]
    # Runs follow each other in the order of their first tables.
    run[FIRST_RANK] = min(run[FIRST_RANK], float(fx.strips[s, RANK]))
    # A dense optimizer updates one table after another, so only the largest buffer counts.
    st.value[SCRATCH] = max(st.value[SCRATCH], alone[OF_SCRATCH])
    replace_counted_option(fx, st, int64(0), option)


@compile_inner
def replace_counted_option(fx, st, was, now):
    """Replace an option of a strip in the local batch. Returns True if an op gains its first cut table or loses its
    last.

    Ids of a local batch exist once for each shard; outputs do not depend on how a strip is cut.
    """
    run = st.runs[fx.options[max(was, now), OPTION_RUN]]
    before = run[CUT] > 0.0
    run[SHARDS] += int(now > 0) - int(was > 0)
    run[CUT] += fx.alone[now, CUT] - fx.alone[was, CUT]
    st.value[SENT] += fx.alone[now, OF_SENT] - fx.alone[was, OF_SENT]
    return before != (run[CUT] > 0.0)
