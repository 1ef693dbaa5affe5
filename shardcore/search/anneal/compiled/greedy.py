"""Greedy construction: place shards one by one, each on the device that it leaves least loaded."""

import numpy as np
from numba import boolean, int64

from shardcore.core.jit import seldom
from shardcore.search.anneal.compiled.arrays import HEAD, problem_at, state_at
from shardcore.search.anneal.compiled.cost import copy, is_less, replace, total_of
from shardcore.search.anneal.compiled.memory import (
    change_parts,
    expect,
    frame,
    host_fits,
    lack_of,
    replace_shard,
    room_of,
)
from shardcore.search.anneal.compiled.pointers import WORDS, entry
from shardcore.search.anneal.compiled.state import hold


@seldom
def exchange(fx, st, d, k, more, more_ids):
    """ms of the exchanges if device d and its host were the busiest, with `more` bytes of kind k added.

    more_ids: bytes of ids added.

    An upper estimate: greedy does not track the true maxima while it builds a plan.
    """
    ms = 0.0
    for x in range(st.carried.shape[1]):
        added = more if x == k else 0
        if x == fx.ids_by[k]:
            # What the dense part hides is not known yet: the total is still growing.
            added = more_ids
        ms += (fx.own[x] + fx.busiest[x]) * (st.carried[d, x] + added) + fx.host_busiest[x] * (
            st.hosts[fx.host[d], x] + added
        )
    return ms


@entry(boolean(HEAD, WORDS, WORDS, int64[:, ::1]))
def greedy(head, problem, state, shards):
    """Place shards [N, 2] (strip, units) in the order given. False where one fits on no device.

    Each goes to the device with the least load after it, exchanges included. Also False if what is there
    already does not fit with the local batch of all of them.
    """
    fx, st = problem_at(problem), state_at(state)
    n_devices, n_kinds = len(st.load), len(fx.ids_by)
    # The local batch is that of all shards together, so it has to be known before the first is placed.
    for i in range(len(shards)):
        expect(fx, st, shards[i, 0], shards[i, 1])
    frame(fx, st)
    # Shared and fixed tables are placed already. If these do not fit, no order of the others helps.
    for d in range(n_devices):
        if lack_of(fx, st, d, st.memory[d], room_of(fx, d, st.memory[d])) > 0.0:
            return False
    for i in range(len(shards)):
        s, units = shards[i, 0], shards[i, 1]
        k, least, best, best_ms = fx.kind[s], np.inf, int64(-1), 0.0
        # Equal empty devices give the same result. Only one of them is priced.
        seen_empty = -1
        for d in range(n_devices):
            now = st.held[s, d] + units
            # `allowed` without rows means that every strip may go anywhere.
            if len(fx.allowed) > 0 and not fx.allowed[s, d]:
                continue
            # Sums are those of the widened shard: a row's optimizer state counts once.
            was, then = fx.shard[s, st.held[s, d]], fx.shard[s, now]
            row = st.trial_memory[0]
            copy(row, st.memory[d])
            replace_shard(fx, row, was, then, fx.ids_by[k] - n_kinds)
            if lack_of(fx, st, d, row, room_of(fx, d, row)) > 0.0 or not host_fits(
                fx, st, d, fx.sums[then, 5] - fx.sums[was, 5]
            ):
                continue
            if st.count[d] == 0:
                # Devices of one host are in the same groups, so only speed and memory may differ.
                e = seen_empty
                if (
                    e >= 0
                    and fx.speed[e] == fx.speed[d]
                    and fx.host[e] == fx.host[d]
                    and fx.free[e] >= fx.free[d]
                ):
                    continue
                seen_empty = d
            # A lower bound: a shard only adds to a load. It often saves the call of the head below.
            held_ms = total_of(st.ms[d])
            shared = st.shared_ms[d]
            none = int64(0)
            lower = (shared + held_ms) / fx.speed[d] + st.own_ms[d] + exchange(fx, st, d, none, none, none)
            if not is_less(lower, least):
                continue
            # Only one fused op changes: the one of the strip's kind.
            sums = st.trial_sums[0, 0]
            for f in range(len(sums)):
                sums[f] = st.sums[d, k, f] + fx.codes[then, f] - fx.codes[was, f]
            ms = head(sums, fx.parameters)
            # The load with the shard, and exchanges as if this device were then the busiest.
            after = (
                (shared + ms + held_ms - st.ms[d, k]) / fx.speed[d]
                + st.own_ms[d]
                + exchange(fx, st, d, k, fx.outputs[then] - fx.outputs[was], fx.ids[then] - fx.ids[was])
            )
            if is_less(after, least):
                least, best, best_ms = after, d, ms
        # The caller tries another order of placing, or cuts tables further.
        if best < 0:
            return False
        was = fx.shard[s, st.held[s, best]]
        if st.held[s, best] > 0:
            # Two expected shards are one. That takes less of a local batch.
            both = int64(st.held[s, best]) + units
            changes = change_parts(fx, st, s, int64(st.held[s, best]), both)
            if change_parts(fx, st, s, units, int64(0)) or changes:
                frame(fx, st)
        hold(fx, st, s, best, st.held[s, best] + units)
        then = fx.shard[s, st.held[s, best]]
        replace(st.sums[best, k], fx.codes[was], fx.codes[then])
        st.ms[best, k] = best_ms
        # Only what later choices read is updated here. The caller's `refresh` computes all else.
        more, ids = fx.outputs[then] - fx.outputs[was], fx.ids_by[k]
        more_ids = fx.ids[then] - fx.ids[was]
        st.carried[best, k] += more
        st.hosts[fx.host[best], k] += more
        st.all_carried[k] += more
        st.carried[best, ids] += more_ids
        st.hosts[fx.host[best], ids] += more_ids
        st.all_carried[ids] += more_ids
        st.on_host[fx.host[best]] += fx.sums[then, 5] - fx.sums[was, 5]
        replace_shard(fx, st.memory[best], was, then, fx.ids_by[k] - n_kinds)
    return True
