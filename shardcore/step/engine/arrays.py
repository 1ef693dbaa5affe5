"""The records that the compiled search works on: SearchProblem and State.

An option is a way to run some columns of an item. Its vector is what it adds to the op of its run: memory, bytes,
counts of caches, and the encoding. An item's shards are options of single devices. An item that a group shares is an
option of each device of the group. A bundle whose tables run differently is a chain of options.

A device has an op for each run. Its vector is the sum of the vectors of its options. All that a plan costs and
takes follows from these vectors.

An array with no rows means "does not apply".

Shapes: S items, U most blocks of an item, O options, V entries of a vector, D devices, H hosts.
N runs: first the K kinds of what single devices hold, then others (step/memory.py).
X exchanges: of each run's outputs, then of each run's ids. Exchange x is that of run x % N.
Y kinds by which groups of devices share tables, G groups. C caches, L log entries, P parameters, A heads.
B slots of a run's stage, P most phases of a step, E edits of a move, Q counters. Digits stand for themselves.

Items and blocks are defined in step/options.py.
"""

# Annotations are numba's types, which pyright does not know as types.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import numba
import numpy as np
from numba import boolean, float64, int16, int32, int64, uint64

from shardcore.step.engine.pointers import Array, Record, make_record_loader

HEAD = numba.types.FunctionType(float64(float64[::1], float64[::1]))
"""The type of every model's compiled head. One type, so that the search is compiled once for all models."""
MOST_EDITS = 24
"""The most edits of one move."""

RESIDENT, ARRIVED, ENTERED, LOOKUPS, FEATURES, ON_HOST, CACHED = range(7)
"""Entries of a vector: sums (memory.ShardSums; RESIDENT is its always_bytes), counts of caches (memory.CacheCounts),
then the encoding."""
RUN, SIZE, TABLE, RANK, WEIGHT, JOINT = range(6)
"""Columns of SearchProblem.items.

RUN: number of the run, 0 to K - 1.
SIZE: blocks of the whole item.
TABLE: number of the table.
RANK: place in the order in which TorchRec runs tables.
WEIGHT: bytes of weights of a block, where re-sharding has limits.
JOINT: tables that move together: several where constraints keep them so.
"""
OWN, BUSIEST, HOST_BUSIEST, TOTAL, ONCE, WORK_BUSIEST, WORK_TOTAL, WORK_ONCE = range(8)
"""Columns of SearchProblem.rates, of both ways together: ms for each byte.

OWN: of the device itself. 0 for ids.
BUSIEST, HOST_BUSIEST: of the busiest device, and of the busiest host.
TOTAL: of all devices together.
ONCE: if there is any byte at all.
WORK_BUSIEST, WORK_TOTAL, WORK_ONCE: the share of these that is devices' own work with ids. 0 for outputs.
"""
OPTION_RUN, NEXT = range(2)
"""Columns of SearchProblem.options: the run, and the next option of a bundle's chain, 0 for none."""
SHARED_KIND, PHASES = 3, 4
"""Further columns of SearchProblem.runs, after those of memory_timeline.COLLECTION.

SHARED_KIND: number of the shared kind whose groups share its tables, -1 for kinds on one device.
PHASES + t: phases of stage t.
"""
MOST_ENTERED, MOST_LOOKUPS, MOST_FEATURES = range(3)
"""Columns of SearchProblem.limits: the largest multiples of what enters a run and of its lookups, and features of an op
that FBGEMM runs."""
SPEED, FREE = range(2)
"""Columns of SearchProblem.devices: the speed factor, and bytes that embeddings may have."""
ANY, HALVES, SHIFTS = range(3)
"""SearchProblem.cut: into any parts, into halves, or only so that columns go from one part of a table to another."""
KIND_OF_GROUP, FIRST, LAST, GROUP_RUN = range(4)
"""Columns of SearchProblem.groups: number of the shared kind, the first and the last device, and the shared kind's run.

The last may have fewer rows than the others.
"""


class SearchProblem(NamedTuple):
    """Constants of a search. Annotations are numba's types."""

    # Options, by number. Number 0 is nothing.
    shard: int32[:, ::1]  # [S, U + 1] the option of so many blocks
    shared: int64[
        :, :, ::1
    ]  # [2, Y, S] that of each device of a shared kind's groups but the last, and of the last
    vectors: float64[:, ::1]  # [O, V]
    options: int64[:, ::1]  # [O, 2] see OPTION_RUN
    alone: float64[:, ::1]  # [O, 7] see OF_SENT
    first_code: int64  # where encodings begin in vectors
    items: int64[:, ::1]  # [S, 6] see RUN
    may_split: boolean[::1]  # [S] whether columns may be cut
    allowed: boolean[:, ::1]  # [S, D] where an item may live; no rows: anywhere
    devices: float64[:, ::1]  # [D, 2] see SPEED
    host: int64[::1]  # [D]
    rates: float64[:, ::1]  # [X, 8] see OWN
    n_kinds: int64  # K
    hides_ids_ms: float64  # for which ids travel without making the step longer
    dense_ms: float64
    cut: int64  # how columns may be cut: see ANY
    heads: float64[
        :, ::1
    ]  # [A, P] parameters of ms, and those that give the chain of fetches where rows are fetched ahead
    # Tables shared by groups of devices.
    groups: int64[:, ::1]  # [G, 4] see KIND_OF_GROUP
    group_of: int64[:, ::1]  # [Y, D] the device's group in each shared kind; -1: none
    may_share: boolean[:, ::1]  # [Y, S] whether groups may share the item
    # Memory.
    # What no run holds, at each moment (memory_timeline.MOMENTS), without replicas and with: bytes, and multiples of
    # State.value[SENT] and of ids that arrived. The last row has the largest of each.
    moments: float64[:, :, ::1]  # [2, 8, 3]
    looks_up_ahead: boolean  # whether the pipeline does
    host_free: float64  # bytes of a host's memory; infinite where they are not given
    runs: int64[:, ::1]  # [N, 8] see COLLECTION
    # Multiples of a run's bytes in a stage (memory.RunStages).
    stages: float64[:, :, :, ::1]  # [N, 4, slots, 10] see memory_timeline.OF_ENTERED
    limits: float64[:, ::1]  # [N, 3] see MOST_ENTERED
    ops_limited: boolean  # whether an op may have too much for FBGEMM
    caches: int64[:, ::1]  # [C, 3] run of each cache, and its first and last entry in vectors
    cache_row_bytes: float64[::1]  # [V] bytes of a cache's row if its widest shard counts in this entry
    # Tables that are on all devices in every plan.
    fixed_ops: float64[:, :, ::1]  # [D, N, V] as State.ops
    fixed_runs: float64[:, ::1]  # [N, 4] as State.runs
    fixed_ids: float64  # bytes of their ids in a local batch, as they are sent
    fixed_scratch: float64  # bytes that the dense optimizer makes to update them
    # Re-sharding limits.
    kept: int16[:, ::1]  # [S, D] blocks in the plan to start from; no rows: no limits
    most_tables: int64  # that may move
    most_bytes: int64  # that may move

    def option_encodings(self, options: np.ndarray) -> np.ndarray:
        """[..., F] the cost model's encodings of options, by their numbers [...]."""
        return np.ascontiguousarray(self.vectors[options][..., self.first_code :])

    def option_of_each_uncut_item(self) -> np.ndarray:
        """[S] the option number of each item (columns of a table) as a single, uncut shard."""
        return self.shard[np.arange(len(self.items)), self.items[:, SIZE]]

    def options_of_shared_kind(self, shared_kind: int, items: np.ndarray) -> np.ndarray:
        """[...] option numbers of items shared by groups of shared kind y, on each device of a group except the
        last.
        """
        return self.shared[0, shared_kind, items]


class State(NamedTuple):
    """One plan under construction, with its costs and memory, and buffers to try a move.

    Rows D and D + 1 of ops, ms and devices are those of a trial: of its first device, and of its second.
    """

    held: Array("SD", int16)  # blocks
    count: Array("D", int64)  # number of items on a device
    items: Array("DS", int32)  # which items; the first `count` entries are valid
    group: Array("S", int64)  # the group that shares the item; -1: none
    shared: Array("S", int64)  # the shared items; the first number[N_SHARED] are valid
    ops: Array("TNV", float64)  # the vector of each op
    ms: Array("TNA", float64)  # of each op at speed 1, by head
    row: Array("TN", int64)  # the row of `ops` and `ms` that has a device's op
    devices: Array("T5", float64)  # see LOAD
    # Bytes that exchanges carry, then bytes in hosts' memory. The last row is that of all devices.
    # First the present ones, then those of a trial.
    hosts: Array("2IZ", float64)
    # Sums of p-th powers of value / ref, now and in a trial.
    # Rows: 0 ms of devices ([0, 0] load, [0, 1] fetched), 1 what devices carry, 2 what hosts carry.
    norm: Array("23X", float64)
    ref: Array("3X", float64)  # means that the powers are relative to
    moved: Array("S", int64)  # bytes of each table that moved
    # The local batch, see memory.compute_local_batch_bytes.
    runs: Array("N4", float64)  # see SHARDS
    order: Array("N", int64)  # runs in their order; the first number[N_RUNS] are valid
    frame: Array("N4B", float64)  # bytes of a local batch in a run's stages
    # One device's memory, while it is counted.
    slots: Array("N4B", float64)  # bytes in a run's stages
    moments: Array("7", float64)  # bytes that no run holds
    phases: Array("P", float64)  # bytes in each phase of a step
    edit: Array("E3", int64)  # a move: item, device, blocks afterwards
    # A device of -1 marks a change of group; the third entry is then the group before.
    log: Array("L3", int32)  # done since the best plan: item, device, blocks before
    number: Array("Q", int64)  # counters, see LOG
    value: Array("8", float64)  # costs, see BEST
    random: Array("1", uint64)  # state of the random generator; not 0, where xorshift stays


LOAD, FETCHED, ROOM, LACK, HELD = range(5)
"""Columns of State.devices.

LOAD: ms. FETCHED: ms of its fetches and updates. Both at its speed.
ROOM: bytes that a local batch may take, at least. Infinite: nothing is there; -inf: an op is too large.
LACK: bytes that it lacks.
HELD: resident bytes.
"""
OF_SENT, OF_SCRATCH, PEAK_BYTES, ADDED_MS, SINGLE_MS = range(2, 7)
"""Further columns of SearchProblem.alone, after memory_timeline.OUTPUTS and CUT.

The first four are its share of a local batch (shard_memory.LocalBatchShare).
PEAK_BYTES: bytes of the option alone in its largest phase. An estimate of what it adds to a device's.
ADDED_MS: ms that it adds to an op, without the launch.
SINGLE_MS: ms of an op with only this option, at speed 1.
"""
SHARDS, FIRST_RANK = 2, 3
"""Further columns of State.runs: shards, and the least rank of its items. Those before are sums
(memory_timeline.OUTPUTS)."""
LOG, WORST, N_MOVED, BYTES_MOVED, N_SHARED, N_RUNS, REPLICAS, WIDEST = range(8)
"""Indices of State.number.

LOG: entries in the log.
WORST: the slowest device.
N_MOVED, BYTES_MOVED: tables and bytes moved.
N_SHARED: items that groups share.
N_RUNS: runs that have a shard.
REPLICAS: 1 if replicas are among them, else 0.
WIDEST + x: the device that carries most in exchange x. It has to come last.
"""
BEST, ENERGY, OVER, SENT, SCRATCH, ALL_JOINED, IN_DENSE_PART, FRAME_MOST = range(8)
"""Indices of State.value.

BEST: cost of the best plan met, in ms.
ENERGY: smooth cost of the present plan, in ms.
OVER: bytes that devices and hosts together lacked when all was last computed.
SENT: bytes of ids of a local batch, as they are sent.
SCRATCH: bytes that the dense optimizer makes.
ALL_JOINED, IN_DENSE_PART: bytes of a local batch's outputs while they are joined, and in the dense part.
FRAME_MOST: the most bytes of a local batch in a phase.
"""


def empty_state(problem: SearchProblem, n_hosts: int, batch: tuple[int, ...] = ()) -> State:
    """A search state with no shards placed. batch: leading dimension of its arrays, for several plans."""
    n_devices, n_runs, length = problem.fixed_ops.shape
    sizes = {
        "S": len(problem.items),
        "D": n_devices,
        "T": n_devices + 2,
        "I": n_hosts + 1,
        "N": n_runs,
        "V": length,
        "X": 2 * n_runs,
        "Z": 2 * n_runs + 1,
        "A": len(problem.heads),
        "B": problem.stages.shape[2],
        "P": 4 + problem.stages[..., 0].size,
        "Q": WIDEST + 2 * n_runs,
        "E": MOST_EDITS,
        "L": 0,
        **{str(n): n for n in range(10)},
    }
    state = State(
        **{
            name: np.zeros([*batch, *map(sizes.__getitem__, array.dims)], array.dtype.name)
            for name, array in State.__annotations__.items()
        }
    )
    state.ref[...], state.group[...], state.value[...] = 1.0, -1, np.inf
    return state


problem_at = make_record_loader(Record(SearchProblem))
state_at = make_record_loader(Record(State))
"""Compiled functions get a record from its words so."""
