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
def upper_busy_ms(problem, state, device, row):
    """Upper bound on ms that a device is busy: its compute, and exchanges as if it and its host were the busiest. row:
    of State.row.

    An upper estimate: greedy does not track the true maxima while it builds a plan.
    """
    ms = device_load_ms(problem, state, device, row, int64(LOAD))
    for x in range(len(problem.rates)):
        n_bytes = exchanged_bytes(state, row, x)
        # What the dense part hides is not known yet: the total is still growing.
        of_host = state.hosts[0, problem.host[device], x] + n_bytes - exchanged_bytes(state, device, x)
        ms += problem.rates[x, BUSIEST] * n_bytes + problem.rates[x, HOST_BUSIEST] * of_host
    return ms


@entry(boolean(HEAD, WORDS, WORDS, int64[:, ::1]))
def place_greedily(head, problem_words, state_words, shards):
    """Place shards [N, 2] (item, blocks) in the order given. False if a shard fits on no device.

    Each goes to the device with the least load after it, exchanges included. Also False if what is there
    already does not fit with the local batch of all of them.
    """
    problem, state = problem_at(problem_words), state_at(state_words)
    n_devices = device_count(state)
    # The local batch is that of all shards together, so it has to be known before the first is placed.
    for i in range(len(shards)):
        count_option(problem, state, shards[i, 0], int64(problem.shard[shards[i, 0], shards[i, 1]]))
    compute_local_batch_bytes(problem, state)
    # Shared and fixed tables are placed already. If these do not fit, no order of the others helps.
    for d in range(n_devices):
        if excess_bytes(problem, state, d, d) > 0.0:
            return False
        state.devices[d, LOAD] = upper_busy_ms(problem, state, d, d)
    row, several_hosts = n_devices, state.hosts.shape[1] > 2
    for i in range(len(shards)):
        s, blocks = shards[i, 0], shards[i, 1]
        least, best = np.inf, int64(-1)
        # Equal empty devices give the same result. Only one of them is priced.
        seen_empty = -1
        for d in range(n_devices):
            # A lower bound: a shard only adds to a load. It saves all that follows.
            if not is_less(state.devices[d, LOAD], least) or not can_hold_blocks(
                problem, state, s, blocks, d
            ):
                continue
            if state.count[d] == 0:
                # Devices of one host are in the same groups, so only speed and memory may differ.
                e = seen_empty
                if (
                    e >= 0
                    and problem.devices[e, SPEED] == problem.devices[d, SPEED]
                    and problem.host[e] == problem.host[d]
                    and problem.devices[e, FREE] >= problem.devices[d, FREE]
                ):
                    continue
                seen_empty = d
            price_changed_ops(head, problem, state, row)
            after_ms = upper_busy_ms(problem, state, d, row)
            if is_less(after_ms, least):
                least, best = after_ms, d
        # The caller tries another order of placing, or cuts tables further.
        if best < 0:
            return False
        put_shard(head, problem, state, s, blocks, best)
        # Devices of a host share its link.
        for d in range(n_devices):
            if d == best or (several_hosts and problem.host[d] == problem.host[best]):
                state.devices[d, LOAD] = upper_busy_ms(problem, state, d, d)
    return True
