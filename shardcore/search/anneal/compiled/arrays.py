"""The records that the compiled search works on: SearchProblem and State.

An array with no rows means "does not apply".

Shapes: S strips, U most units of a strip, R shards, F features, D devices, H hosts.
P parameters, L log entries, K kinds of what single devices hold, N runs (step/memory_account.py).
M columns of State.memory.
X exchanges: one of outputs for each kind, then one of ids for each kind and layout.
Y layouts of what groups of devices share, G groups.

Strips and units are defined in search/state/shard_cost_cache.py.
"""

# Annotations are numba's types, which pyright does not know as types.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import numba
import numpy as np
from numba import boolean, float64, int16, int32, int64, uint64

from shardcore.search.anneal.compiled.pointers import Record, pointer

HEAD = numba.types.FunctionType(float64(float64[::1], float64[::1]))
"""The type of every model's compiled head. One type, so that the search is compiled once for all models."""
MOST_EDITS = 24
"""The most edits of one move."""


class SearchProblem(NamedTuple):
    """Constants of a search. Annotations are numba's types."""

    shard: int32[:, ::1]  # [S, U + 1] number of the shard with so many units; number 0 is nothing
    codes: float64[:, ::1]  # [R, F] encoding of a shard
    added_ms: float64[::1]  # [R] ms that a shard adds to a fused op
    sums: float64[:, ::1]  # [R + 2 Y S, 6] memory_account.Sums; then those of shared strips (shared_row)
    outputs: int64[::1]  # [R] bytes of the shard's outputs
    ids: int64[::1]  # [R] bytes of ids that the shard's device receives
    ids_by: int64[::1]  # [K] number of the exchange that brings them, K to X - 1
    kind: int64[::1]  # [S] number of how the strip runs, 0 to K - 1
    size: int64[::1]  # [S] units of the whole strip
    table: int64[::1]  # [S] number of the table
    may_split: boolean[::1]  # [S] whether columns may be cut
    allowed: boolean[:, ::1]  # [S, D] where a strip may live; no rows: anywhere
    free: float64[::1]  # [D] bytes that embeddings may have
    speed: float64[::1]  # [D]
    host: int64[::1]  # [D]
    # Rates of exchanges, both ways together. ms = own * load + busiest * (largest load) + ...
    # A load is bytes of outputs of a kind, or of ids.
    own: float64[::1]  # [X] ms per load of the device itself; 0 for ids
    busiest: float64[::1]  # [X] ms per load of the busiest device
    host_busiest: float64[::1]  # [X] ms per load of the busiest host
    total: float64[::1]  # [X] ms per load of all devices together
    once: float64[::1]  # [X] ms if there is any load at all
    # The same of the work that devices have with ids, which is part of these ms. 0 for outputs.
    work_busiest: float64[::1]  # [X]
    work_total: float64[::1]  # [X]
    work_once: float64[::1]  # [X]
    hides_ids_ms: float64  # for which ids travel without making the step longer
    # Tables shared by groups of devices.
    group_layout: int64[::1]  # [G] number of the group's layout
    group_of: int64[:, ::1]  # [Y, D] the device's group in each layout; -1: none
    may_share: boolean[:, ::1]  # [Y, S] whether groups may share the strip
    shared_codes: float64[:, :, ::1]  # [Y, S, F] encoding of each device's shard
    is_last: int64[:, ::1]  # [Y, D] 1 where the device is the last of its group: its row range may be short
    shared_ids: int64[:, ::1]  # [Y, S] bytes of ids that each device receives
    shared_ids_by: int64[::1]  # [Y] number of the exchange that brings them
    shared_size: float64[:, ::1]  # [Y, S] bytes that it exchanges; whole numbers, so that sums are exact
    shared_own: float64[::1]  # [Y] ms per size of the group itself
    shared_busiest: float64[::1]  # [Y] ms per size of the largest group
    shared_total: float64[::1]  # [Y] ms per size of all groups together
    shared_once: float64[::1]  # [Y] ms if anything is shared at all
    # Memory. The exchanges of ids are those of runs: run n is that of exchange K + n.
    local_outputs: float64[::1]  # [S] bytes of a unit's outputs for a local batch
    local_ids: float64[::1]  # [S] bytes of its ids in a local batch, over all moments
    bucketized: float64[:, ::1]  # [Y, S] the same of ids in buckets
    stepped: float64[:, ::1]  # [Y, S] bytes that the dense optimizer makes to update it
    rank: int64[::1]  # [S] place in the order in which TorchRec runs tables
    waiting_ids: float64  # bytes of the local batches that the pipeline holds
    run_collection: int64[::1]  # [N] number of its collection, pooled or not
    run_sequence: boolean[::1]  # [N] whether its outputs are not pooled
    run_replicas: boolean[::1]  # [N] whether its tables are replicas
    # Multiples of a run's bytes in its turns: before, after, with the next run's first phase, in each phase.
    turn_sums: float64[:, :, :, ::1]  # [N, 4, slots, 2] multiples of what entered and of lookups
    turn_batch: float64[:, :, :, ::1]  # [N, 4, slots, 6] of its part of a local batch (see memory.frame)
    turn_phases: int64[:, ::1]  # [N, 4] phases of a turn
    sums_most: float64[:, ::1]  # [N, 2] the largest of these multiples
    host_free: float64  # bytes of a host's memory; infinite where they are not given
    # Terms of some shards in State.memory beyond their sums: limits, caches, and bundles of several runs.
    more_at: int64[::1]  # [R + 2 Y S + 1] where in the following it begins
    more_column: int64[::1]  # [..] column of State.memory; none: no shard has more
    more: float64[::1]  # [..]
    most_features: float64[::1]  # [N] features of an op that FBGEMM runs; none: no op has too many
    cache_at: int64[::1]  # [caches + 1] columns where their counts begin (memory.Caches); none: no caches
    cache_row_bytes: float64[::1]  # [M] bytes of a cache's row if its widest shard counts in this column
    # Tables that are on all devices in every plan.
    fixed_memory: float64[:, ::1]  # [D, M] as State.memory
    fixed_runs: float64[:, ::1]  # [N, 4] State.run_shards, run_partial, run_outputs, run_rank
    fixed_every: float64  # bytes of their ids in a local batch
    fixed_stepped: float64  # bytes that the dense optimizer makes to update them
    fixed_carried: int64[:, ::1]  # [D, X] as State.carried
    fixed_sums: float64[:, :, ::1]  # [D, K, F] as State.sums
    fixed_codes: float64[:, ::1]  # [G, F] as State.group_sums
    fixed_size: float64[::1]  # [G] as State.group_size
    # Re-sharding limits.
    kept: int16[:, ::1]  # [S, D] units in the plan to start from; no rows: no limits
    weight: int64[::1]  # [S] bytes of weights of a unit
    joint: int64[::1]  # [S] tables that move together: several where constraints keep them so
    most_moved: int64[::1]  # [2] limits: tables moved, bytes moved
    parameters: float64[::1]  # [P] of the model's head
    halves: boolean  # whether columns may only be halved


class State(NamedTuple):
    """One plan, with buffers to try a move. trial_*: values after a move, for its two devices."""

    held: int16[:, ::1]  # [S, D] units
    count: int64[::1]  # [D] number of strips on a device
    strips: int32[:, ::1]  # [D, S] which strips; the first `count` entries are valid
    sums: float64[:, :, ::1]  # [D, K, F] summed encodings of each fused op
    ms: float64[:, ::1]  # [D, K] ms of each fused op at speed 1
    carried: int64[:, ::1]  # [D, X] bytes that exchanges carry: outputs of each kind, and ids
    memory: float64[:, ::1]  # [D, M] sums over a device's shards, see RESIDENT
    left: float64[::1]  # [D] bytes left, at least; exact where less than nothing
    load: float64[::1]  # [D] ms
    hosts: int64[:, ::1]  # [H, X] the same of each host
    all_carried: int64[::1]  # [X] the same of all devices
    # Rows: 0 loads in ms (only [0, 0] is used), 1 what devices carry, 2 what hosts carry.
    norm: float64[:, ::1]  # [3, X] sums of p-th powers of value / ref
    ref: float64[:, ::1]  # [3, X] means that the powers are relative to
    group: int64[::1]  # [S] the group that shares the strip; -1: none
    shared: int64[::1]  # [S] the shared strips; the first number[N_SHARED] are valid
    group_sums: float64[:, ::1]  # [G, F] summed encodings
    group_ms: float64[::1]  # [G] ms of the op on each of its devices, at speed 1
    group_size: float64[::1]  # [G] sum of shared_size
    group_memory: float64[:, :, ::1]  # [2, G, M] memory on each of its devices but the last, and on the last
    group_ids: int64[::1]  # [G] bytes of ids that each of its devices receives
    shared_ms: float64[::1]  # [D] ms of the ops of its groups, at speed 1
    own_ms: float64[::1]  # [D] ms of exchanges set by its own groups' sizes
    moved: int64[::1]  # [S] bytes of each table that moved
    trial_sums: float64[:, :, ::1]  # [2, K, F]
    trial_ms: float64[:, ::1]  # [2, K]
    trial_carried: int64[:, ::1]  # [2, X]
    on_host: float64[::1]  # [H] bytes in the hosts' memory
    trial_memory: float64[:, ::1]  # [2, M]
    trial_left: float64[::1]  # [2]
    trial_load: float64[::1]  # [2]
    trial_all_carried: int64[::1]  # [X]
    trial_hosts: int64[::1]  # [H] bytes of ids of each host
    trial_norm: float64[:, ::1]  # [3, X]
    trial_group_sums: float64[:, ::1]  # [2, F] of the two groups that a move changes
    trial_group_ms: float64[::1]  # [2]
    trial_group_size: float64[::1]  # [G]
    # The local batch, see memory.frame.
    run_shards: int64[::1]  # [N] shards
    run_partial: int64[::1]  # [N] shards with some of the columns only
    run_outputs: float64[::1]  # [N] bytes of a local batch's outputs
    run_rank: int64[::1]  # [N] the least rank of its strips
    order: int64[::1]  # [N] runs in their order; the first number[N_RUNS] are valid
    frame: float64[:, :, ::1]  # [N, 4, slots] bytes of a local batch in a run's turns
    frame_most: float64[::1]  # [1] the most bytes of a local batch in a phase
    edit: int64[:, ::1]  # [MOST_EDITS, 3] a move: strip, device, units afterwards
    # A device of -1 marks a change of group; the third entry is then the group before.
    log: int32[:, ::1]  # [L, 3] done since the best plan: strip, device, units before
    number: int64[::1]  # counters, see LOG
    value: float64[::1]  # costs, see BEST
    random: uint64[::1]  # [1] state of the random generator


LOG, WORST, N_MOVED, BYTES_MOVED, N_SHARED, N_RUNS, WIDEST = range(7)
"""Indices of State.number.

LOG: entries in the log.
WORST: the slowest device.
N_MOVED, BYTES_MOVED: tables and bytes moved.
N_SHARED: strips that groups share.
N_RUNS: runs that have a shard.
WIDEST + x: the device that carries most in exchange x. It has to come last.
"""
BEST, ENERGY, OVER, EVERY, STEPPED, JOINED, DENSE_PART = range(7)
"""Indices of State.value.

BEST: cost of the best plan met, in ms.
ENERGY: smooth cost of the present plan, in ms.
OVER: bytes that all devices together lack.
EVERY: bytes of a local batch that are in all phases: its ids.
STEPPED: bytes that the dense optimizer makes.
JOINED, DENSE_PART: bytes of a local batch's outputs while they are joined, and in the dense part.
"""
RESIDENT, ARRIVED, ON_HOST, SUMS = range(4)
"""Indices of State.memory.

RESIDENT, ARRIVED, ON_HOST: of all runs, see Sums.
SUMS + n: what entered of run n. SUMS + N + n: its lookups. SUMS + 2 N + n: its features, where FBGEMM's
limits may bind. The others are counts of caches.
"""
SLOT_BEFORE, SLOT_AFTER, SLOT_LINGERS, SLOT_PHASES = range(4)
"""Indices of a turn's slots. SLOT_PHASES + i is phase i."""


def empty(problem: SearchProblem, n_hosts: int, log_length: int, seed: int) -> State:
    """A State with nothing placed."""
    (n_strips, _), n_devices, n_features = problem.shard.shape, len(problem.free), problem.codes.shape[1]
    n_exchanges, n_groups = len(problem.own), len(problem.group_layout)
    n_kinds, n_runs = len(problem.ids_by), len(problem.run_collection)
    sums = problem.fixed_memory.shape[1]
    shapes = {
        "held": (n_strips, n_devices),
        "count": n_devices,
        "strips": (n_devices, n_strips),
        "sums": (n_devices, n_kinds, n_features),
        "ms": (n_devices, n_kinds),
        "carried": (n_devices, n_exchanges),
        "memory": (n_devices, sums),
        "left": n_devices,
        "on_host": n_hosts,
        "load": n_devices,
        "hosts": (n_hosts, n_exchanges),
        "all_carried": n_exchanges,
        "norm": (3, n_exchanges),
        "ref": (3, n_exchanges),
        "group": n_strips,
        "shared": n_strips,
        "group_sums": (n_groups, n_features),
        "group_ms": n_groups,
        "group_size": n_groups,
        "group_memory": (2, n_groups, sums),
        "group_ids": n_groups,
        "shared_ms": n_devices,
        "own_ms": n_devices,
        "moved": n_strips,
        "trial_sums": (2, n_kinds, n_features),
        "trial_ms": (2, n_kinds),
        "trial_carried": (2, n_exchanges),
        "trial_memory": (2, sums),
        "trial_left": 2,
        "trial_load": 2,
        "trial_all_carried": n_exchanges,
        "trial_hosts": n_hosts,
        "trial_norm": (3, n_exchanges),
        "trial_group_sums": (2, n_features),
        "trial_group_ms": 2,
        "trial_group_size": n_groups,
        "run_shards": n_runs,
        "run_partial": n_runs,
        "run_outputs": n_runs,
        "run_rank": n_runs,
        "order": n_runs,
        "frame": problem.turn_sums.shape[:3],
        "frame_most": 1,
        "edit": (MOST_EDITS, 3),
        "log": (log_length, 3),
        "number": WIDEST + n_exchanges,
        "value": 7,
        "random": 1,
    }
    found = State(
        **{name: np.zeros(shapes[name], State.__annotations__[name].dtype.name) for name in State._fields}
    )
    found.ref[:], found.group[:], found.value[:] = 1.0, -1, np.inf
    # Spread small seeds over 64 bits. xorshift must not start at 0, where it stays.
    found.random[0] = (seed * 2654435769 + 88172645463325252) % 2**64 or 1
    return found


problem_at = pointer(Record(SearchProblem))
state_at = pointer(Record(State))
"""Compiled functions get a record from its words so."""
