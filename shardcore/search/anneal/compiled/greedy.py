"""Greedy construction: place shards one by one, each on the device that it leaves least loaded."""

import numpy as np
from numba import boolean, int64

from shardcore.core.jit import compile_inner
from shardcore.step.engine.arrays import (
    BUSIEST,
    FREE,
    HEAD,
    HOST_BUSIEST,
    LOAD,
    SPEED,
    problem_at,
    state_at,
)
from shardcore.step.engine.cost import device_count, device_load_ms, exchanged_bytes, is_less
from shardcore.step.engine.memory import compute_local_batch_bytes, count_option, excess_bytes
from shardcore.step.engine.pointers import WORDS, entry
from shardcore.step.engine.trial import can_hold_blocks, price_changed_ops, put_shard


@compile_inner
def upper_busy_ms(fx, st, d, row):
    """Upper bound on ms that a device is busy: its compute, and exchanges as if it and its host were the busiest. row:
    of State.row.

    An upper estimate: greedy does not track the true maxima while it builds a plan.
    """
    ms = device_load_ms(fx, st, d, row, int64(LOAD))
    for x in range(len(fx.rates)):
        n_bytes = exchanged_bytes(st, row, x)
        # What the dense part hides is not known yet: the total is still growing.
        of_host = st.hosts[0, fx.host[d], x] + n_bytes - exchanged_bytes(st, d, x)
        ms += fx.rates[x, BUSIEST] * n_bytes + fx.rates[x, HOST_BUSIEST] * of_host
    return ms


@entry(boolean(HEAD, WORDS, WORDS, int64[:, ::1]))
def place_greedily(head, problem, state, shards):
    """Place shards [N, 2] (item, blocks) in the order given. False if a shard fits on no device.

    Each goes to the device with the least load after it, exchanges included. Also False if what is there
    already does not fit with the local batch of all of them.
    """
    fx, st = problem_at(problem), state_at(state)
    n_devices = device_count(st)
    # The local batch is that of all shards together, so it has to be known before the first is placed.
    for i in range(len(shards)):
        count_option(fx, st, shards[i, 0], int64(fx.shard[shards[i, 0], shards[i, 1]]))
    compute_local_batch_bytes(fx, st)
    # Shared and fixed tables are placed already. If these do not fit, no order of the others helps.
    for d in range(n_devices):
        if excess_bytes(fx, st, d, d) > 0.0:
            return False
        st.devices[d, LOAD] = upper_busy_ms(fx, st, d, d)
    row, several_hosts = n_devices, st.hosts.shape[1] > 2
    for i in range(len(shards)):
        s, blocks = shards[i, 0], shards[i, 1]
        least, best = np.inf, int64(-1)
        # Equal empty devices give the same result. Only one of them is priced.
        seen_empty = -1
        for d in range(n_devices):
            # A lower bound: a shard only adds to a load. It saves all that follows.
            if not is_less(st.devices[d, LOAD], least) or not can_hold_blocks(fx, st, s, blocks, d):
                continue
            if st.count[d] == 0:
                # Devices of one host are in the same groups, so only speed and memory may differ.
                e = seen_empty
                if (
                    e >= 0
                    and fx.devices[e, SPEED] == fx.devices[d, SPEED]
                    and fx.host[e] == fx.host[d]
                    and fx.devices[e, FREE] >= fx.devices[d, FREE]
                ):
                    continue
                seen_empty = d
            price_changed_ops(head, fx, st, row)
            after_ms = upper_busy_ms(fx, st, d, row)
            if is_less(after_ms, least):
                least, best = after_ms, d
        # The caller tries another order of placing, or cuts tables further.
        if best < 0:
            return False
        put_shard(head, fx, st, s, blocks, best)
        # Devices of a host share its link.
        for d in range(n_devices):
            if d == best or (several_hosts and fx.host[d] == fx.host[best]):
                st.devices[d, LOAD] = upper_busy_ms(fx, st, d, d)
    return True
