"""Moves that annealing tries: of shards between two devices, as edits (step/engine/trial.py), and of tables whose rows
are shared by a group of devices.

The latter go into a group, out of it, or between groups. Each changes every device of a group. So they cost more than
other moves and are tried less often.
"""

import numpy as np
from numba import int64

from shardcore.core.jit import compile_inner
from shardcore.step.engine.arrays import (
    ADDED_MS,
    FIRST,
    GROUP_RUN,
    HALVES,
    KIND_OF_GROUP,
    LOAD,
    LOG,
    MOST_EDITS,
    N_SHARED,
    OVER,
    RUN,
    SHIFTS,
    SIZE,
    WIDEST,
    WORST,
)
from shardcore.step.engine.cost import (
    copy_vector,
    device_count,
    is_less,
    smooth_cost_ms,
)
from shardcore.step.engine.state import (
    log_and_set,
    recompute_state,
    sum_exchange_norms,
    sum_load_norms,
    undo_logged_changes,
)
from shardcore.step.engine.trial import begin_trial_ops, price_changed_ops, replace_option_in_ops, write_edit


@compile_inner
def draw_uniform(state):
    """Random number in [0, 1), from the generator xorshift64* (Vigna 2016).

    The state lives in state.random, so that a run with the same seed repeats.
    """
    x = state.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state.random[0] = x
    # The upper 53 bits fill a float64's mantissa: 9007199254740992 is 2^53.
    return ((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compile_inner
def draw_integer_below(state, n):
    """Random integer from 0 to n - 1."""
    # Rounding can make uniform * n equal to n.
    return min(int(draw_uniform(state) * n), n - 1)


@compile_inner
def draw_other_device_with_item(state, item, a):
    """Random device other than `a` that holds part of an item, or -1. Looks at 64 devices at most."""
    n = device_count(state)
    d = draw_integer_below(state, n)
    # The limit keeps a proposal's time constant on large clusters.
    for _ in range(min(n, 64)):
        if d != a and state.held[item, d] > 0:
            return d
        d = d + 1 if d + 1 < n else 0
    return -1


@compile_inner
def propose_move(problem, state):
    """Draw a move between two devices: (a, b, number of edits). 0 edits: the draw is no move."""
    n = device_count(state)
    # Choose device a: half of the time the slowest one. Only a change there lowers the maximum.
    u = draw_uniform(state)
    if u < 0.5:
        a = state.number[WORST]
    elif u < 0.65:
        # Mostly the one with most columns, else the one that carries most in another exchange of items.
        # Kinds are the first runs, among the exchanges of outputs and among those of ids.
        x = 0 if u <= 0.6 else 1 + draw_integer_below(state, 2 * problem.n_kinds - 1)
        a = state.number[WIDEST + x + (len(problem.runs) - problem.n_kinds if x >= problem.n_kinds else 0)]
    else:
        a = draw_integer_below(state, n)
    if state.count[a] == 0:
        return 0, 0, 0
    # Choose an item that a holds, and device b. The less loaded of two draws mostly wins.
    s = int64(state.items[a, draw_integer_below(state, state.count[a])])
    blocks, size = int(state.held[s, a]), problem.items[s, SIZE]
    b = draw_integer_below(state, n)
    c = draw_integer_below(state, n)
    if draw_uniform(state) < 0.7 and is_less(state.devices[c, LOAD], state.devices[b, LOAD]):
        b = c
    # One wide shard costs less than two narrow ones: prefer a device with the same item.
    if blocks < size and draw_uniform(state) < 0.25:
        c = draw_other_device_with_item(state, s, a)
        if c >= 0:
            b = c
    if a == b:
        return 0, 0, 0
    # How much moves: all that a holds, half of it, or any number of blocks.
    given = blocks
    if (
        problem.may_split[s]
        and blocks > 1
        and (problem.cut != SHIFTS or state.held[s, b] > 0)
        and draw_uniform(state) < 0.4
    ):
        given = (
            blocks // 2
            if problem.cut == HALVES or draw_uniform(state) < 0.3
            else 1 + draw_integer_below(state, blocks - 1)
        )
    # Now the kind of move: a trade for several items, a swap for one, or a plain move.
    # int64, as elsewhere: numba compiles a function again for each constant, and each type.
    write_edit(state, int64(0), s, a, blocks - given)
    write_edit(state, int64(1), s, b, state.held[s, b] + given)
    u = draw_uniform(state)
    # A trade moves many tables, which limits would mostly refuse.
    if u < 0.15 and len(problem.kept) == 0:
        return a, b, add_trade_edits(problem, state, s, a, b, given)
    # A swap mostly changes what both devices hold by less than a plain move, so more of them fit.
    if u < 0.6 and state.count[b] > 0:
        r = int64(state.items[b, draw_integer_below(state, state.count[b])])
        if r == s:
            return 0, 0, 0
        # The other item moves whole, or partly where it may be cut.
        back = int(state.held[r, b])
        if (
            problem.may_split[r]
            and back > 1
            and (problem.cut != SHIFTS or state.held[r, a] > 0)
            and draw_uniform(state) < 0.2
        ):
            back = back // 2 if problem.cut == HALVES else 1 + draw_integer_below(state, back - 1)
        write_edit(state, int64(2), r, b, state.held[r, b] - back)
        write_edit(state, int64(3), r, a, state.held[r, a] + back)
        return a, b, 4
    return a, b, 2


@compile_inner
def add_trade_edits(problem, state, item, a, b, given):
    """Add edits that give `given` blocks of an item to device `b`, for several items of about the same cost in
    return.

    Returns the number of edits. It makes room for a shard too costly for any single swap.
    """
    # The return may cost from 0.3 to 1.1 of what was given, so that trades differ.
    want = problem.alone[problem.shard[item, given], ADDED_MS] * (0.3 + 0.8 * draw_uniform(state))
    # Edits 0 and 1 are what is given. Start at a random item, so that none is preferred.
    n, i = int64(2), draw_integer_below(state, max(state.count[b], 1))
    for _ in range(state.count[b]):
        i = i + 1 if i + 1 < state.count[b] else 0
        r = int64(state.items[b, i])
        ms = problem.alone[problem.shard[r, state.held[r, b]], ADDED_MS]
        if r != item and ms <= want:
            write_edit(state, n, r, b, int64(0))
            write_edit(state, n + 1, r, a, state.held[r, a] + state.held[r, b])
            want -= ms
            n += 2
            if n + 2 > MOST_EDITS:
                break
    return n


# --- tables that groups share ---


@compile_inner
def propose_shared_move(problem, state):
    """Draw a move of tables that groups of devices share: (leaves, start, comes, to, b, back). -1 for none; all -1: no
    move.

    leaves: an item that leaves group `start`, for another group `to` or for device b.
    comes: an item that leaves device b for group `to`.
    back: an item that leaves group `to` for `start`, where `leaves` goes the other way.
    """
    n, n_shared = device_count(state), state.number[N_SHARED]
    b, leaves, comes, y = draw_integer_below(state, n), -1, -1, 0
    nothing = (-1, -1, -1, -1, -1, -1)
    # Prefer the slowest device as the giver.
    if draw_uniform(state) < 0.5:
        b = state.number[WORST]
    if n_shared > 0 and draw_uniform(state) < 0.6:
        leaves = state.shared[draw_integer_below(state, n_shared)]
        y = problem.groups[state.group[leaves], KIND_OF_GROUP]
        # An item that leaves a group goes to the less loaded of two devices.
        c = draw_integer_below(state, n)
        b = c if is_less(state.devices[c, LOAD], state.devices[b, LOAD]) else b
        # Some spaces let no item change its group, or only some (SearchSpace.problem_without_sharing_moves).
        if not problem.may_share[y, leaves]:
            return nothing
        start, to = state.group[leaves], problem.group_of[y, b]
        # Here b stands for its group: the item goes there, perhaps in exchange for one of that group's.
        if to != start and draw_uniform(state) < 0.5:
            back = state.shared[draw_integer_below(state, n_shared)]
            swaps = state.group[back] == to and problem.may_share[y, back] and draw_uniform(state) < 0.7
            return leaves, start, -1, to, b, back if swaps else -1
    # Another item may take its place, or come alone. It has to be whole on b.
    if (leaves < 0 or draw_uniform(state) < 0.6) and state.count[b] > 0:
        comes = state.items[b, draw_integer_below(state, state.count[b])]
        if leaves < 0:
            y = draw_integer_below(state, len(problem.may_share))
        if (
            not problem.may_share[y, comes]
            or state.held[comes, b] != problem.items[comes, SIZE]
            or problem.group_of[y, b] < 0
        ):
            return nothing
    if leaves < 0 and comes < 0:
        return nothing
    start = state.group[leaves] if leaves >= 0 else -1
    to = -1
    if comes >= 0:
        to = start
        if leaves < 0:  # mostly b's own group
            to = problem.group_of[y, b]
            c = (
                problem.group_of[y, draw_integer_below(state, n)]
                if len(problem.groups) > len(problem.may_share)
                else to
            )
            if c != to and c >= 0 and draw_uniform(state) < 0.5:
                to = c
    return leaves, start, comes, to, b, -1


@compile_inner
def shared_item_option(problem, shared_kind, item):
    """Option number of an item on a device of a group of a shared kind; 0 for an item of -1."""
    return problem.shared[0, shared_kind, item] if item >= 0 else int64(0)


@compile_inner
def shared_move_energy(head, problem, state, leaves, start, comes, to, b, back):
    """Annealing energy in ms after a move of shared tables (see `propose_shared_move`). The plan itself stays."""
    n, moves = device_count(state), comes < 0 and to >= 0
    group, s = problem.groups[start if start >= 0 else to], leaves if leaves >= 0 else comes
    y = group[KIND_OF_GROUP]
    # The run of the groups' ops, and that of b's own op for such items.
    # (Tables of a shared kind are of one collection, so both items are of one kind.)
    r, k = group[GROUP_RUN], problem.items[s, RUN]
    # The first row has the op of group `start` and b's own op, the second has the op of group `to`.
    begin_trial_ops(state, b, n)
    begin_trial_ops(state, b, n + 1)
    if start >= 0:
        state.row[n, r] = problem.groups[start, FIRST]
        enters = comes if to == start else back
        replace_option_in_ops(
            problem, state, n, shared_item_option(problem, y, leaves), shared_item_option(problem, y, enters)
        )
    if to >= 0 and to != start:
        state.row[n + 1, r] = problem.groups[to, FIRST]
        enters = leaves if moves else comes
        replace_option_in_ops(
            problem,
            state,
            n + 1,
            shared_item_option(problem, y, back),
            shared_item_option(problem, y, enters),
        )
    if not moves:
        # Items are whole on b.
        was = int64(problem.shard[comes, problem.items[comes, SIZE]]) if comes >= 0 else int64(0)
        then = int64(problem.shard[leaves, problem.items[leaves, SIZE]]) if leaves >= 0 else int64(0)
        replace_option_in_ops(problem, state, n, was, then)
    price_changed_ops(head, problem, state, n)
    price_changed_ops(head, problem, state, n + 1)
    # Every device of a group has the op of the trial, until the energy is known.
    for d in range(n):
        g = problem.group_of[y, d]
        if g >= 0 and (g == start or g == to):
            state.row[d, r] = n if g == start else n + 1
    if not moves:
        state.row[b, k] = n
    for i in range(3):
        copy_vector(state.norm[1, i], state.norm[0, i])
    copy_vector(state.hosts[1, -1], state.hosts[0, -1])
    # Many loads and bytes change. So their norms are summed anew.
    sum_load_norms(problem, state)
    sum_exchange_norms(problem, state, r)
    sum_exchange_norms(problem, state, k)
    energy = smooth_cost_ms(problem, state, int64(1))
    for d in range(n):
        state.row[d, r] = d
    state.row[b, k] = b
    return energy


@compile_inner
def try_shared_move(head, problem, state, threshold):
    """Try one move of shared tables, and keep the move if the energy is then below the threshold. True if kept."""
    leaves, start, comes, to, b, back = propose_shared_move(problem, state)
    if b < 0:
        return False
    moves = leaves >= 0 and comes < 0 and to >= 0  # between groups
    if leaves >= 0 and not moves and len(problem.allowed) > 0 and not problem.allowed[leaves, b]:
        return False
    if shared_move_energy(head, problem, state, leaves, start, comes, to, b, back) >= threshold:
        return False
    # From here on the plan itself changes. It is changed back if it turns out not to fit.
    over, mark = state.value[OVER], state.number[LOG]
    if leaves >= 0:
        log_and_set(problem, state, leaves, int64(-1), to if moves else int64(-1))
        if not moves:
            log_and_set(problem, state, leaves, b, problem.items[leaves, SIZE])
    if back >= 0:
        log_and_set(problem, state, back, int64(-1), start)
    if comes >= 0:
        log_and_set(problem, state, comes, b, int64(0))
        log_and_set(problem, state, comes, int64(-1), to)
    # Every device of a group changed. A full recompute is simple, and removes rounding errors.
    recompute_state(head, problem, state)
    # Only then it is known what the local batch takes, and so whether devices fit.
    if state.value[OVER] > over:
        undo_logged_changes(problem, state, mark)
        recompute_state(head, problem, state)
        return False
    return True
