"""The records that the compiled search works on: SearchProblem and State.

An array with no rows means "does not apply".

Shapes: S strips, U most units of a strip, R shards, F features, D devices, H hosts.
P parameters, L log entries, K kinds of what single devices hold, N runs (step/memory_account.py).
M columns of State.memory.
X exchanges: one of outputs for each kind, then one of ids for each kind and layout.
Y layouts of what groups of devices share, G groups.
B slots of a run's stage, E edits of a move, C counters. Digits stand for themselves.

Strips and units are defined in search/state/shard_cost_cache.py.
"""

# Annotations are numba's types, which pyright does not know as types.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import numba
import numpy as np
from numba import boolean, float64, int16, int32, int64, uint64

from shardcore.search.anneal.compiled.pointers import Array, Record, pointer

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
    # The same for the work of devices with ids, which these ms include. 0 for outputs.
    work_busiest: float64[::1]  # [X]
    work_total: float64[::1]  # [X]
    work_once: float64[::1]  # [X]
    hides_ids_ms: float64  # for which ids travel without making the step longer
    dense_ms: float64
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
    local_ids: float64[::1]  # [S] bytes of its ids in a local batch, as they are sent
    bucketized: float64[:, ::1]  # [Y, S] the same of ids in buckets
    scratch: float64[:, ::1]  # [Y, S] bytes that the dense optimizer makes to update it
    rank: int64[::1]  # [S] place in the order in which TorchRec runs tables
    # Pipeline.moments without replicas, and with: bytes of local batches and activations, and multiples of
    # State.value[SENT] and of ids that arrived. The last row has the largest of each.
    moments: float64[:, :, ::1]  # [2, 7, 3]
    always: float64  # bytes that are there in all moments
    looks_up_ahead: boolean  # whether the pipeline does (memory_timeline.stages_under)
    run_collection: int64[::1]  # [N] number of its collection, pooled or not
    run_sequence: boolean[::1]  # [N] whether its outputs are not pooled
    run_replicas: boolean[::1]  # [N] whether its tables are replicas
    # Multiples of a run's bytes in a stage. Slots are those of memory_account.StageCoefficients.
    stage_sums: float64[:, :, :, ::1]  # [N, 4, slots, 2] multiples of what entered and of lookups
    stage_batch: float64[:, :, :, ::1]  # [N, 4, slots, 6] of its share of a local batch (see memory.frame)
    stage_phases: int64[:, ::1]  # [N, 4] phases of a stage
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
    fixed_ids: float64  # bytes of their ids in a local batch, as they are sent
    fixed_scratch: float64  # bytes that the dense optimizer makes to update them
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
    fetched: float64[::1]  # [P] those with which it gives model.fetched_ms; none: nothing is fetched ahead
    halves: boolean  # whether columns may only be halved


class State(NamedTuple):
    """One plan, with buffers to try a move. trial_*: values after a move, for its two devices."""

    held: Array("SD", int16)  # units
    count: Array("D", int64)  # number of strips on a device
    strips: Array("DS", int32)  # which strips; the first `count` entries are valid
    sums: Array("DKF", float64)  # summed encodings of each fused op
    ms: Array("DK", float64)  # ms of each fused op at speed 1
    fetched_ms: Array("DK", float64)  # of each fused op at speed 1, see model.fetched_ms
    carried: Array("DX", int64)  # bytes that exchanges carry: outputs of each kind, and ids
    memory: Array("DM", float64)  # sums over a device's shards, see RESIDENT
    # Bytes that a local batch may take, at least. Infinite: nothing is there; -inf: an op is too large.
    room: Array("D", float64)
    lack: Array("D", float64)  # bytes that it lacks
    load: Array("D", float64)  # ms
    fetched: Array("D", float64)  # ms of its fetches and updates at its speed
    hosts: Array("HX", int64)  # bytes that each host's exchanges carry
    all_carried: Array("X", int64)  # those of all devices
    # Rows: 0 ms of devices ([0, 0] load, [0, 1] fetched; X is 2 or more), 1 what devices carry, 2 what hosts
    # carry.
    norm: Array("3X", float64)  # sums of p-th powers of value / ref
    ref: Array("3X", float64)  # means that the powers are relative to
    group: Array("S", int64)  # the group that shares the strip; -1: none
    shared: Array("S", int64)  # the shared strips; the first number[N_SHARED] are valid
    group_sums: Array("GF", float64)  # summed encodings
    group_ms: Array("G", float64)  # ms of the op on each of its devices, at speed 1
    group_fetched_ms: Array("G", float64)  # the same of fetched_ms
    group_size: Array("G", float64)  # sum of shared_size
    group_memory: Array("2GM", float64)  # memory on each of its devices but the last, and on the last
    group_ids: Array("G", int64)  # bytes of ids that each of its devices receives
    shared_ms: Array("D", float64)  # ms of the ops of its groups, at speed 1
    shared_fetched_ms: Array("D", float64)  # their fetched_ms
    own_ms: Array("D", float64)  # ms of exchanges set by its own groups' sizes
    moved: Array("S", int64)  # bytes of each table that moved
    trial_sums: Array("2KF", float64)
    trial_ms: Array("2K", float64)
    trial_fetched_ms: Array("2K", float64)
    trial_carried: Array("2X", int64)
    on_host: Array("H", float64)  # bytes in the hosts' memory
    trial_memory: Array("2M", float64)
    trial_room: Array("2", float64)
    trial_lack: Array("2", float64)
    trial_load: Array("2", float64)
    trial_fetched: Array("2", float64)
    trial_all_carried: Array("X", int64)
    trial_hosts: Array("H", int64)  # bytes of ids of each host
    trial_norm: Array("3X", float64)
    trial_group_sums: Array("2F", float64)  # of the two groups that a move changes
    trial_group_ms: Array("2", float64)
    trial_group_fetched_ms: Array("2", float64)
    trial_group_size: Array("G", float64)
    # The local batch, see memory.frame.
    run_shards: Array("N", int64)  # shards
    run_partial: Array("N", int64)  # shards with some of the columns only
    run_outputs: Array("N", float64)  # bytes of a local batch's outputs
    run_rank: Array("N", int64)  # the least rank of its strips
    order: Array("N", int64)  # runs in their order; the first number[N_RUNS] are valid
    frame: Array("N4B", float64)  # bytes of a local batch in a run's stages
    frame_most: Array("1", float64)  # the most bytes of a local batch in a phase
    edit: Array("E3", int64)  # a move: strip, device, units afterwards
    # A device of -1 marks a change of group; the third entry is then the group before.
    log: Array("L3", int32)  # done since the best plan: strip, device, units before
    number: Array("C", int64)  # counters, see LOG
    value: Array("7", float64)  # costs, see BEST
    random: Array("1", uint64)  # state of the random generator


LOG, WORST, N_MOVED, BYTES_MOVED, N_SHARED, N_RUNS, REPLICAS, WIDEST = range(8)
"""Indices of State.number.

LOG: entries in the log.
WORST: the slowest device.
N_MOVED, BYTES_MOVED: tables and bytes moved.
N_SHARED: strips that groups share.
N_RUNS: runs that have a shard.
REPLICAS: 1 if replicas are among them, else 0.
WIDEST + x: the device that carries most in exchange x. It has to come last.
"""
BEST, ENERGY, OVER, SENT, SCRATCH, JOINED, DENSE_PART = range(7)
"""Indices of State.value.

BEST: cost of the best plan met, in ms.
ENERGY: smooth cost of the present plan, in ms.
OVER: bytes that devices and hosts together lacked when all was last computed.
SENT: bytes of ids of a local batch, as they are sent.
SCRATCH: bytes that the dense optimizer makes.
JOINED, DENSE_PART: bytes of a local batch's outputs while they are joined, and in the dense part.
"""
RESIDENT, ARRIVED, ON_HOST, SUMS = range(4)
"""Indices of State.memory.

RESIDENT, ARRIVED, ON_HOST: of all runs, see Sums.
SUMS + n: what entered of run n. SUMS + N + n: its lookups. SUMS + 2 N + n: its features, where FBGEMM's
limits may bind. The others are counts of caches.
"""
SLOT_BEFORE, SLOT_AFTER, SLOT_FREED_LATE, SLOT_PHASES = range(4)
"""Indices of a stage's slots. SLOT_PHASES + i is phase i."""


def empty(problem: SearchProblem, n_hosts: int, log_length: int, seed: int) -> State:
    """A State with nothing placed."""
    (n_strips, _), n_devices, n_exchanges = problem.shard.shape, len(problem.free), len(problem.own)
    sizes = {
        "S": n_strips,
        "D": n_devices,
        "H": n_hosts,
        "F": problem.codes.shape[1],
        "K": len(problem.ids_by),
        "X": n_exchanges,
        "G": len(problem.group_layout),
        "N": len(problem.run_collection),
        "M": problem.fixed_memory.shape[1],
        "B": problem.stage_sums.shape[2],
        "C": WIDEST + n_exchanges,
        "E": MOST_EDITS,
        "L": log_length,
        **{str(n): n for n in range(10)},
    }
    state = State(
        **{
            name: np.zeros([sizes[dim] for dim in array.dims], array.dtype.name)
            for name, array in State.__annotations__.items()
        }
    )
    state.ref[:], state.group[:], state.value[:] = 1.0, -1, np.inf
    # Spread small seeds over 64 bits. xorshift must not start at 0, where it stays.
    state.random[0] = (seed * 2654435769 + 88172645463325252) % 2**64 or 1
    return state


problem_at = pointer(Record(SearchProblem))
state_at = pointer(Record(State))
"""Compiled functions get a record from its words so."""
