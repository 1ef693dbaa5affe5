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
def add_option_to_ops(problem, state, device, option):
    """Add an option's vector, with its bundle's further options, to a device's ops."""
    while option > 0:
        add_vector(state.ops[device, problem.options[option, OPTION_RUN]], problem.vectors[option])
        option = problem.options[option, NEXT]


@compile_inner
def compute_local_batch_bytes(problem, state):
    """Compute the bytes of a local batch in each stage of each op, from all shards of the plan."""
    # The runs with shards, by insertion sort on the rank of their first table.
    n = 0
    for r in range(len(state.runs)):
        if state.runs[r, SHARDS] > 0.0:
            i = n
            while i > 0 and state.runs[state.order[i - 1], FIRST_RANK] > state.runs[r, FIRST_RANK]:
                state.order[i] = state.order[i - 1]
                i -= 1
            state.order[i] = r
            n += 1
    state.number[N_RUNS], state.number[REPLICAS] = n, 0
    # Sums over runs: outputs, those that are joined, gradients sent back, and each run's largest phase.
    received = joined = sent_back = most = 0.0
    for i in range(n):
        r = state.order[i]
        case, gradient = local_batch_case(i, state.order[:n], state.runs, problem.runs)
        outputs = state.runs[r, OUTPUTS]
        if problem.runs[r, REPLICAS_RUN]:
            state.number[REPLICAS] = 1
        received += outputs
        joined += outputs if case % 4 else 0.0
        # The largest phase of the run alone, for `max_local_batch_bytes`.
        of_run = 0.0
        for t in range(4):
            for slot in range(problem.stages.shape[2]):
                of = problem.stages[r, t, slot]
                state.frame[r, t, slot] = of[case] * outputs + of[case + 1] * gradient
                # Buffers before and after a run's phases meet phases of other runs, so they count, too.
                if slot >= SLOT_PHASES or slot == SLOT_BEFORE:
                    of_run = max(of_run, state.frame[r, t, slot])
            of_run = max(of_run, state.frame[r, t, SLOT_AFTER] + state.frame[r, t, SLOT_FREED_LATE])
        most += of_run
        # In the dense part, all runs wait for the first stage of backward.
        sent_back += state.frame[r, 2, SLOT_BEFORE]
    state.value[ALL_JOINED] = received + joined
    # Outputs that are kept until the step ends are among what waits for backward.
    state.value[IN_DENSE_PART] = 0.0 if problem.looks_up_ahead else received
    # No phase takes more of a local batch.
    state.value[FRAME_MOST] = max(most, received + max(joined, sent_back))


@compile_inner
def peak_phase_bytes(problem, state, row):
    """Bytes of a device's largest memory phase, without those that are resident."""
    n, arrived = state.number[N_RUNS], sum_over_device_ops(state, row, int64(ARRIVED))
    for m in range(len(state.moments)):
        of_moment = problem.moments[state.number[REPLICAS], m]
        state.moments[m] = of_moment[0] + of_moment[1] * state.value[SENT] + of_moment[2] * arrived
    state.moments[JOINED] += state.value[ALL_JOINED]
    state.moments[DENSE_PART] += state.value[IN_DENSE_PART]
    state.moments[UPDATE] += state.value[SCRATCH]
    for i in range(n):
        r = state.order[i]
        op = state.ops[state.row[row, r], r]
        # Of the local batch, and of the device's shards.
        for t in range(4):
            for slot in range(SLOT_PHASES + problem.runs[r, PHASES + t]):
                of = problem.stages[r, t, slot]
                own = of[OF_ENTERED] * op[ENTERED] + of[OF_LOOKUPS] * op[LOOKUPS]
                state.slots[r, t, slot] = state.frame[r, t, slot] + own
    most = 0.0
    for p in range(
        fill_phases(state.order[:n], state.slots, problem.runs[:, PHASES:], state.moments, state.phases)
    ):
        most = max(most, state.phases[p])
    return most


@compile_inner
def max_local_batch_bytes(problem, state):
    """Upper bound of the bytes that a local batch takes on any device in any phase."""
    of = problem.moments[state.number[REPLICAS], -1]
    return of[0] + of[1] * state.value[SENT] + state.value[SCRATCH] + state.value[FRAME_MOST]


@compile_inner
def set_local_batch_room(problem, state, device, row):
    """Compute a device's resident bytes and its room for a local batch, from its ops.

    What a device lacks has to be counted only where a local batch may take more than its room. That is infinite for
    a device without a shard. It takes nothing: it may be one whose memory is all reserved.
    """
    held, arrived = (
        sum_over_device_ops(state, row, int64(RESIDENT)),
        sum_over_device_ops(state, row, int64(ARRIVED)),
    )
    state.devices[row, HELD] = held
    if held == 0.0 and arrived == 0.0:
        state.devices[row, ROOM] = np.inf
        return
    if problem.ops_limited and op_headroom(problem, state, row) < 0.0:
        state.devices[row, ROOM] = -np.inf
        return
    room = problem.devices[device, FREE] - held - problem.moments[0, -1, 2] * arrived
    if len(problem.caches) > 0:
        room -= cache_padding_bytes(problem, state, row)
    # Each run's largest phase. Only the largest of all counts, so this is quick, and mostly enough.
    for r in range(len(problem.runs)):
        op = state.ops[state.row[row, r], r]
        room -= problem.limits[r, MOST_ENTERED] * op[ENTERED] + problem.limits[r, MOST_LOOKUPS] * op[LOOKUPS]
    state.devices[row, ROOM] = room


@compile_inner
def excess_bytes(problem, state, device, row):
    """Bytes by which a device's memory is exceeded with the given ops; 0 if they fit."""
    # A lower bound of the room holds an upper bound of the batch. Most trials need no exact count.
    if state.devices[row, ROOM] >= max_local_batch_bytes(problem, state):
        return 0.0
    # Rounded as memory.used_bytes rounds, so that both agree to the byte.
    left = (
        problem.devices[device, FREE]
        - state.devices[row, HELD]
        - math.floor(peak_phase_bytes(problem, state, row) + 0.5)
    )
    # A cache has whole sets of rows, so its bytes do not add up over shards.
    if len(problem.caches) > 0:
        left -= cache_padding_bytes(problem, state, row)
    if problem.ops_limited:
        # Scaled by OF_OP, so that an op that is too large lacks bytes, as a full device does.
        left = min(left, op_headroom(problem, state, row))
    return max(0.0, -left)


@compile_inner
def cache_padding_bytes(problem, state, row):
    """Bytes of a device's embedding caches beyond those counted as resident."""
    # RESIDENT counts each shard's cache as wide as that shard. This entry sums these bytes: take them off.
    beyond = -sum_over_device_ops(state, row, int64(CACHED))
    for c in range(len(problem.caches)):
        r, first, last = problem.caches[c, 0], problem.caches[c, 1], problem.caches[c, 2]
        beyond += cache_bytes(state.ops[state.row[row, r], r], first, last, problem.cache_row_bytes)
    return beyond


@compile_inner
def op_headroom(problem, state, row):
    """Remaining headroom under FBGEMM's per-op limits, in pseudo-bytes (OF_OP); the minimum over ops."""
    left = np.inf
    for r in range(len(problem.runs)):
        op = state.ops[state.row[row, r], r]
        left = min(
            left, OF_OP * (MOST_IDS - op[LOOKUPS]), OF_OP * (problem.limits[r, MOST_FEATURES] - op[FEATURES])
        )
    return left


@compile_inner
def set_excess_bytes(problem, state):
    """Compute the memory excess of each device and host, and their sum."""
    # Only a plan with OVER of 0 fits; `try_shared_move` refuses to raise it.
    over = 0.0
    for h in range(state.hosts.shape[1]):
        state.hosts[0, h, -1] = 0.0
    for d in range(device_count(state)):
        set_local_batch_room(problem, state, d, d)
        state.devices[d, LACK] = excess_bytes(problem, state, d, d)
        over += state.devices[d, LACK]
        state.hosts[0, problem.host[d], -1] += sum_over_device_ops(state, d, int64(ON_HOST))
    for h in range(state.hosts.shape[1] - 1):
        over += max(0.0, state.hosts[0, h, -1] - problem.host_free)
    state.value[OVER] = over


@compile_inner
def host_memory_fits(problem, state, device, row):
    """Tell if a host's memory suffices with other ops on a device. A host that is too full may still shrink."""
    more = sum_over_device_ops(state, row, int64(ON_HOST)) - sum_over_device_ops(
        state, device, int64(ON_HOST)
    )
    return more <= 0.0 or state.hosts[0, problem.host[device], -1] + more <= problem.host_free


@compile_inner
def count_option(problem, state, item, option):
    """Count an option of an item (columns of a table) in the local batch of its op."""
    run, alone = state.runs[problem.options[option, OPTION_RUN]], problem.alone[option]
    run[OUTPUTS] += alone[OUTPUTS]
    # Runs follow each other in the order of their first tables.
    run[FIRST_RANK] = min(run[FIRST_RANK], float(problem.items[item, RANK]))
    # A dense optimizer updates one table after another, so only the largest buffer counts.
    state.value[SCRATCH] = max(state.value[SCRATCH], alone[OF_SCRATCH])
    replace_counted_option(problem, state, int64(0), option)


@compile_inner
def replace_counted_option(problem, state, was, now):
    """Replace an option of an item in the local batch. Returns True if an op gains its first cut table or loses its
    last.

    Ids of a local batch exist once for each shard; outputs do not depend on how an item is cut.
    """
    run = state.runs[problem.options[max(was, now), OPTION_RUN]]
    before = run[CUT] > 0.0
    run[SHARDS] += int(now > 0) - int(was > 0)
    run[CUT] += problem.alone[now, CUT] - problem.alone[was, CUT]
    state.value[SENT] += problem.alone[now, OF_SENT] - problem.alone[was, OF_SENT]
    return before != (run[CUT] > 0.0)
