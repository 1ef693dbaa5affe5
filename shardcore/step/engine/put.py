"""Plans under construction: which devices may have a shard, and placing it there.

The local batch counts all shards from the start, so that a plan never outgrows it. Two shards of a strip that meet on
a device become one, which takes less of a local batch.

Sharders that choose devices in Python place shards in many plans at once.

Shapes: C ways to cut tables, N shards of each, B plans, W words. Plans of the same cuts follow each other.
"""

import numpy as np
from numba import boolean, int64, void

from shardcore.core.jit import inner
from shardcore.step.engine.arrays import (
    FREE,
    HEAD,
    LACK,
    ROOM,
    SENT,
    problem_at,
    state_at,
)
from shardcore.step.engine.cost import n_devices_of
from shardcore.step.engine.memory import (
    batch_most,
    change_option,
    expect,
    frame,
    host_fits,
    lack_of,
    set_lacks,
    set_room,
)
from shardcore.step.engine.pointers import WORDS, entry
from shardcore.step.engine.state import hold, recompute_ops, set_ms
from shardcore.step.engine.trial import begin_trial, edit_ops, keep_trial, price_ops

BATCH = int64[:, ::1]
"""The type of packed records [B, W] in a signature."""


@inner
def join(fx, st, s, held, units):
    """Count two shards of strip s as one in the local batch. Returns whether the frame was computed anew."""
    if held == 0:
        return False
    changes = change_option(fx, st, int64(fx.shard[s, held]), int64(fx.shard[s, held + units]))
    # Each change has to be counted, so the call comes before `or`.
    if change_option(fx, st, int64(fx.shard[s, units]), int64(0)) or changes:
        frame(fx, st)
        return True
    return False


@inner
def may_have(fx, st, s, units, d):
    """Tell if device d may have `units` more of strip s. Fills the first trial's row with its ops, not priced."""
    # `allowed` without rows means that every strip may go anywhere.
    if len(fx.allowed) > 0 and not fx.allowed[s, d]:
        return False
    held, row, sent = int64(st.held[s, d]), n_devices_of(st), st.value[SENT]
    changes = join(fx, st, s, held, units)
    begin_trial(st, d, row)
    # The widened shard: a row's optimizer state counts once.
    edit_ops(fx, st, row, int64(fx.shard[s, held]), int64(fx.shard[s, held + units]))
    set_room(fx, st, d, row)
    fits = lack_of(fx, st, d, row) == 0.0 and host_fits(fx, st, d, row)
    if changes:
        # A run whose last cut table became whole takes more in some phases, on all devices.
        for e in range(n_devices_of(st)):
            fits = fits and (e == d or lack_of(fx, st, e, e) == 0.0)
    if held > 0:
        change_option(fx, st, int64(0), int64(fx.shard[s, units]))
        change_option(fx, st, int64(fx.shard[s, held + units]), int64(fx.shard[s, held]))
        # Without the rounding errors of sums.
        st.value[SENT] = sent
        if changes:
            frame(fx, st)
    return fits


@inner
def put(head, fx, st, s, units, d):
    """Place `units` of strip s on device d, whether they fit or not.

    Computes the device's ops with their ms, its room, and what its host carries. `refresh` computes all else.
    """
    held, row = int64(st.held[s, d]), n_devices_of(st)
    join(fx, st, s, held, units)
    hold(fx, st, s, d, held + units)
    begin_trial(st, d, row)
    edit_ops(fx, st, row, int64(fx.shard[s, held]), int64(fx.shard[s, held + units]))
    price_ops(head, fx, st, row)
    keep_trial(fx, st, d, row)
    set_room(fx, st, d, d)


@entry(void(HEAD, WORDS, BATCH, int64[:, :, ::1]))
def expect_all(head, problem, states, shards):
    """Prepare plans with nothing placed for shards [C, N, 2]: strip, units."""
    fx = problem_at(problem)
    for b in range(len(states)):
        st = state_at(states[b])
        recompute_ops(head, fx, st)
        for d in range(n_devices_of(st)):
            for r in range(len(st.runs)):
                # The last device of a group has fewer rows, where these do not divide evenly.
                set_ms(head, fx, st, d, r)
        of_cuts = shards[b * len(shards) // len(states)]
        for i in range(len(of_cuts)):
            expect(fx, st, of_cuts[i, 0], int64(fx.shard[of_cuts[i, 0], of_cuts[i, 1]]))
        frame(fx, st)
        set_lacks(fx, st)


@entry(void(WORDS, BATCH, int64[:, ::1], boolean[:, ::1]))
def find_devices(problem, states, shards, fits):
    """Fill fits [B, D]: whether a device of a plan may have its shard. shards: [B, 2] strip, units."""
    fx = problem_at(problem)
    only_bytes = len(fx.caches) == 0 and not fx.ops_limited and fx.host_free == np.inf
    for b in range(len(states)):
        st, s, units = state_at(states[b]), shards[b, 0], shards[b, 1]
        needed = fx.peak_bytes[fx.shard[s, units]] + batch_most(fx, st)
        for d in range(n_devices_of(st)):
            # A lower bound of the room holds an upper bound of the shard. Mostly no trial is needed.
            # Shards of a strip that meet may change the local batch of all devices, so they always have one.
            room = min(st.devices[d, ROOM], fx.devices[d, FREE]) if st.held[s, d] == 0 else -np.inf
            if only_bytes and room >= needed and (len(fx.allowed) == 0 or fx.allowed[s, d]):
                fits[b, d] = True
            else:
                fits[b, d] = may_have(fx, st, s, units, d)


@entry(void(HEAD, WORDS, BATCH, int64[:, ::1]))
def put_all(head, problem, states, shards):
    """Place a shard in each plan. shards: [B, 3] strip, units, device."""
    fx = problem_at(problem)
    for b in range(len(states)):
        st, d = state_at(states[b]), shards[b, 2]
        put(head, fx, st, shards[b, 0], shards[b, 1], d)
        st.devices[d, LACK] = lack_of(fx, st, d, d)
