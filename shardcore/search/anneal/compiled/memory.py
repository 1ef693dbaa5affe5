"""Memory of devices, equal to that of the finished plan (step/memory_account.py, memory_timeline).

A device has a row: a few sums over its shards. Some sums count in all phases of a step. Of the others, each
phase has multiples. The local batch is the same on all devices (the frame). It depends on the runs of the
plan, on their order, and on which of them have tables cut by columns.

A step has four stages. In each, one run follows another. Before and after its phases a run has buffers, too.
So one pass over the runs gives all phases: no list of them is needed.

Caches count in all phases. FBGEMM's limits of an op count as bytes, as in step/memory_account.py.

t is a stage, i a run's place in the order.
"""

import math

import numpy as np

from shardcore.core.jit import inner, seldom
from shardcore.search.anneal.compiled.arrays import (
    ARRIVED,
    DENSE_PART,
    JOINED,
    N_RUNS,
    ON_HOST,
    OVER,
    REPLICAS,
    RESIDENT,
    SCRATCH,
    SENT,
    SLOT_AFTER,
    SLOT_BEFORE,
    SLOT_FREED_LATE,
    SLOT_PHASES,
    SUMS,
)
from shardcore.step.memory import CACHE_SET_ROWS
from shardcore.step.memory_account import OF_OP
from shardcore.step.op_limits import MOST_IDS


@seldom
def shared_row(fx, e, y, s):
    """Row in fx.sums of strip s, shared in layout y: on each device of a group but the last
    (e = 0), or on the last."""
    # fx.sums has the R shards of strips first, then those that groups share, as [2, Y, S].
    return len(fx.added_ms) + (e * len(fx.shared_once) + y) * len(fx.size) + s


@seldom
def add_shard(fx, row, shard, run):
    """Add a shard's sums to a device's row."""
    # Columns are those of memory_account.Sums: 4, the features, is among `more` where it may bind.
    n, of = len(fx.run_collection), fx.sums[shard]
    row[RESIDENT] += of[0]
    row[ARRIVED] += of[1]
    row[ON_HOST] += of[5]
    row[SUMS + run] += of[2]
    row[SUMS + n + run] += of[3]
    for i in range(fx.more_at[shard], fx.more_at[shard + 1]):
        row[fx.more_column[i]] += fx.more[i]


@inner
def replace_shard(fx, row, was, then, run):
    """Replace one shard's sums by another's in a device's row."""
    n = len(fx.run_collection)
    row[RESIDENT] += fx.sums[then, 0] - fx.sums[was, 0]
    row[ARRIVED] += fx.sums[then, 1] - fx.sums[was, 1]
    row[ON_HOST] += fx.sums[then, 5] - fx.sums[was, 5]
    row[SUMS + run] += fx.sums[then, 2] - fx.sums[was, 2]
    row[SUMS + n + run] += fx.sums[then, 3] - fx.sums[was, 3]
    # Most problems have nothing more, and this is the innermost loop of a trial.
    if len(fx.more) > 0:
        for i in range(fx.more_at[was], fx.more_at[was + 1]):
            row[fx.more_column[i]] -= fx.more[i]
        for i in range(fx.more_at[then], fx.more_at[then + 1]):
            row[fx.more_column[i]] += fx.more[i]


@seldom
def frame(fx, st):
    """Compute the bytes of the local batch from the runs' outputs, ranks and partial shards."""
    # The runs with shards, by insertion sort on the rank of their first table.
    n = 0
    for r in range(len(st.run_shards)):
        if st.run_shards[r] > 0:
            i = n
            while i > 0 and st.run_rank[st.order[i - 1]] > st.run_rank[r]:
                st.order[i] = st.order[i - 1]
                i -= 1
            st.order[i] = r
            n += 1
    st.number[N_RUNS], st.number[REPLICAS] = n, 0
    # Sums over runs: outputs, those that are joined, gradients sent back, and each run's largest phase.
    received = joined = sent_back = most = 0.0
    for i in range(n):
        r = st.order[i]
        outputs, cut = st.run_outputs[r], st.run_partial[r] > 0
        if fx.run_replicas[r]:
            st.number[REPLICAS] = 1
        # Outputs of a collection's runs form one tensor. Its gradient lives until the run that is last in
        # backward has its own: the first of them.
        of_all, others, is_last = 0.0, 0, True
        for j in range(n):
            q = st.order[j]
            if fx.run_collection[q] == fx.run_collection[r]:
                of_all += st.run_outputs[q]
                if q != r:
                    others += 1
                    # Replicas' are after all that is exchanged.
                    if fx.run_replicas[q] or (j < i and not fx.run_replicas[r]):
                        is_last = False
        # Parts of a cut sequence are joined, and pooled outputs of several runs.
        together = cut if fx.run_sequence[r] else others > 0
        # A sequence has a gradient of its outputs. The last run in backward holds that of its collection.
        gradient = 0.0
        if fx.run_sequence[r]:
            gradient = outputs
        elif is_last:
            gradient = of_all
        received += outputs
        joined += outputs if together else 0.0
        # The largest phase of the run alone, for `batch_most`.
        of_run = 0.0
        for t in range(4):
            for slot in range(fx.stage_batch.shape[2]):
                # Multiples as StageCoefficients.batch names them.
                of = fx.stage_batch[r, t, slot]
                st.frame[r, t, slot] = (
                    of[0] * outputs
                    + (of[1] * outputs if cut else of[5] * gradient)
                    + (of[2] * outputs if together else 0.0)
                    + (of[3] * outputs if cut or together else 0.0)
                    + of[4] * gradient
                )
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
    st.frame_most[0] = max(most, received + max(joined, sent_back))


@inner
def in_moment(fx, st, row, m):
    """Bytes of ids and activations in a moment of Pipeline.moments."""
    of = fx.moments[st.number[REPLICAS], m]
    return of[0] + of[1] * st.value[SENT] + of[2] * row[ARRIVED]


@inner
def peak(fx, st, row):
    """Bytes of a device's largest phase, without those that are in all phases."""
    n, n_all = st.number[N_RUNS], len(fx.run_collection)
    # Outputs are joined after the stages of forward.
    most, held = st.value[JOINED] + in_moment(fx, st, row, 2), 0.0
    # Two stages forward (look up, wait for outputs), two backward (send gradients, wait for them).
    for t in range(4):
        # At first, all runs have the buffers that precede their phases.
        held = 0.0
        for i in range(n):
            r = st.order[i]
            of = fx.stage_sums[r, t, SLOT_BEFORE]
            held += st.frame[r, t, SLOT_BEFORE] + of[0] * row[SUMS + r] + of[1] * row[SUMS + n_all + r]
        if t == 0:  # ids arrive before lookups
            most = max(most, held + in_moment(fx, st, row, 0))
        if t == 2:  # the dense part comes between forward and backward
            most = max(most, st.value[DENSE_PART] + held + in_moment(fx, st, row, 3))
        freed_late, ids = 0.0, in_moment(fx, st, row, 1 + t if t < 2 else 4)
        for i in range(n):
            # Autograd goes back from the last run to the first.
            r = st.order[i] if t < 2 else st.order[n - 1 - i]
            entered, lookups = row[SUMS + r], row[SUMS + n_all + r]
            of, frame_of = fx.stage_sums[r, t], st.frame[r, t]
            # When the run begins, its phases take the place of the buffers that waited for it.
            held -= frame_of[SLOT_BEFORE] + of[SLOT_BEFORE, 0] * entered + of[SLOT_BEFORE, 1] * lookups
            for slot in range(SLOT_PHASES, SLOT_PHASES + fx.stage_phases[r, t]):
                # Only the first phase meets the buffers of the run before.
                n_bytes = frame_of[slot] + of[slot, 0] * entered + of[slot, 1] * lookups
                most = max(most, ids + held + freed_late + n_bytes)
                freed_late = 0.0
            # These stay until the stage ends, while the runs that follow have their phases.
            held += frame_of[SLOT_AFTER] + of[SLOT_AFTER, 0] * entered + of[SLOT_AFTER, 1] * lookups
            freed_late = (
                frame_of[SLOT_FREED_LATE]
                + of[SLOT_FREED_LATE, 0] * entered
                + of[SLOT_FREED_LATE, 1] * lookups
            )
    # The dense optimizer steps last.
    return max(most, held + st.value[SCRATCH] + in_moment(fx, st, row, 5))


@inner
def batch_most(fx, st):
    """The most bytes that a local batch takes on any device, in any phase."""
    of = fx.moments[st.number[REPLICAS], -1]
    return fx.always + of[0] + of[1] * st.value[SENT] + st.value[SCRATCH] + st.frame_most[0]


@inner
def room_of(fx, d, row):
    """Bytes for a local batch that device d has at least, if it holds a row.

    What it lacks has to be counted only where a local batch may take more. Infinite for a device without a
    shard. It takes nothing: it may be one whose memory is all reserved.
    """
    if row[RESIDENT] == 0.0 and row[ARRIVED] == 0.0:
        return np.inf
    if len(fx.most_features) > 0 and left_of_ops(fx, row) < 0.0:
        return -np.inf
    room, n_all = fx.free[d] - row[RESIDENT] - fx.moments[0, -1, 2] * row[ARRIVED], len(fx.run_collection)
    if len(fx.cache_at) > 0:
        room -= padding(fx, row)
    # Each run's largest phase. Only the largest of all counts, so this is quick, and mostly enough.
    for r in range(n_all):
        room -= fx.sums_most[r, 0] * row[SUMS + r] + fx.sums_most[r, 1] * row[SUMS + n_all + r]
    return room


@inner
def lack_of(fx, st, d, row, room):
    """Bytes that device d lacks if it holds a row. room: of the row."""
    # A lower bound of the room holds an upper bound of the batch. Most trials need no exact count.
    if room >= batch_most(fx, st):
        return 0.0
    # Rounded as memory.used_bytes rounds, so that both agree to the byte.
    left = fx.free[d] - row[RESIDENT] - math.floor(fx.always + peak(fx, st, row) + 0.5)
    # A cache has whole sets of rows, so its bytes do not add up over shards.
    if len(fx.cache_at) > 0:
        left -= padding(fx, row)
    if len(fx.most_features) > 0:
        # Scaled by OF_OP, so that an op that is too large lacks bytes, as a full device does.
        left = min(left, left_of_ops(fx, row))
    return max(0.0, -left)


@seldom
def padding(fx, row):
    """Bytes of a device's caches beyond those that are resident, as memory.Caches counts them."""
    # RESIDENT counts each shard's cache as wide as that shard. This column sums these bytes: take them off.
    beyond = -row[fx.cache_at[0] - 1]
    for c in range(len(fx.cache_at) - 1):
        first, widest = fx.cache_at[c], fx.cache_at[c + 1] - 1
        # A cache's rows are as wide as its widest shard. Widths ascend.
        while widest > first and row[widest] == 0.0:
            widest -= 1
        beyond += math.ceil(row[first] / CACHE_SET_ROWS) * CACHE_SET_ROWS * fx.cache_row_bytes[widest]
    return beyond


@seldom
def left_of_ops(fx, row):
    """Bytes as which features and ids count that FBGEMM could still have in the op that has fewest left."""
    left, n = np.inf, len(fx.run_collection)
    for r in range(n):
        left = min(
            left,
            OF_OP * (MOST_IDS - row[SUMS + n + r]),
            OF_OP * (fx.most_features[r] - row[SUMS + 2 * n + r]),
        )
    return left


@seldom
def all_lack(fx, st):
    """Compute room and lack of each device, the bytes on hosts, and what all of them lack."""
    # Only a plan with OVER of 0 fits; `change_shared` refuses to raise it.
    over = 0.0
    st.on_host[:] = 0.0
    for d in range(len(st.lack)):
        st.room[d] = room_of(fx, d, st.memory[d])
        st.lack[d] = lack_of(fx, st, d, st.memory[d], st.room[d])
        over += st.lack[d]
        st.on_host[fx.host[d]] += st.memory[d, ON_HOST]
    for h in range(len(st.on_host)):
        over += max(0.0, st.on_host[h] - fx.host_free)
    st.value[OVER] = over


@seldom
def host_fits(fx, st, d, more):
    """Tell if the memory of d's host takes more bytes. A host that is too full already may lose some."""
    return more <= 0.0 or st.on_host[fx.host[d]] + more <= fx.host_free


@seldom
def expect(fx, st, s, units):
    """Count a shard of strip s among those that runs have. `frame` computes what follows."""
    # Exchange K + n brings the ids of run n.
    r = fx.ids_by[fx.kind[s]] - len(fx.ids_by)
    st.run_shards[r] += 1
    st.run_outputs[r] += units * fx.local_outputs[s]
    # Runs follow each other in the order of their first tables.
    st.run_rank[r] = min(st.run_rank[r], fx.rank[s])
    st.value[SENT] += fx.local_ids[s]
    if units < fx.size[s]:
        st.run_partial[r] += 1


@inner
def change_parts(fx, st, s, was, now):
    """Count a device's shard of strip s as wider or narrower. Returns whether a run is now cut that was not,
    or no longer is."""
    r = fx.ids_by[fx.kind[s]] - len(fx.ids_by)
    # Ids of a local batch exist once for each shard; outputs do not depend on how a strip is cut.
    before = st.run_partial[r] > 0
    st.value[SENT] += (int(now > 0) - int(was > 0)) * fx.local_ids[s]
    st.run_shards[r] += int(now > 0) - int(was > 0)
    st.run_partial[r] += int(0 < now and now < fx.size[s]) - int(0 < was and was < fx.size[s])
    return before != (st.run_partial[r] > 0)
