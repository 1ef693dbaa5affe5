"""Memory of a device in a training step of a plan, by part.

Weights and optimizer state are always there. Other buffers depend on the phase of the step (memory_timeline.py), as
TorchRec runs it under the job's pipeline. A device needs the bytes of the largest phase.
The buffers in which FBGEMM's CUDA kernels sort are given, from its source. Scratch of its CPU kernels is not
counted.

A plan fits if every device's peak memory is at most its capacity (`require_fits`), and no op has more than FBGEMM runs
(`require_op_limits`).

The timeline is linear. In each phase a device holds its shards' resident bytes, and multiples of a few sums over its
shards (`ShardSums`): ids that arrived, outputs (or gradients of replicas), and lookups. Buffers for the local batch are
the same on all devices. So searches keep the same count exactly while shards come and go (`Account`, engine/memory.py).

Shapes: D devices, R runs, P phases, T stages of a step. F sums of a shard, see `ShardSums`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardcore.core.access_statistics import ManagedCollision
from shardcore.core.catalog import DENSE_OPTIMIZERS, OPTIMIZERS
from shardcore.core.errors import Infeasible, Overfull
from shardcore.core.job import PIPELINES
from shardcore.core.progress import iterate_with_progress
from shardcore.core.tiers import TIERS
from shardcore.core.types import PRECISION_BYTES, Placement, Plan, Problem, Shard, Table
from shardcore.core.validation import require_type
from shardcore.step.access import access_share
from shardcore.step.id_bytes import id_bytes_per_sample
from shardcore.step.kinds import (
    ShardingKind,
    kind_on_one_device,
    merged_placements,
    sharding_kind_for_table,
    shards_by_device,
)
from shardcore.step.memory_timeline import (
    DENSE_PART,
    JOINED,
    MOMENTS,
    OF_ENTERED,
    OF_LOOKUPS,
    OUTPUTS,
    PARTS,
    SLOT_AFTER,
    SLOT_BEFORE,
    SLOT_FREED_LATE,
    SLOT_PHASES,
    UPDATE,
    Stages,
    fill_phases,
    local_batch_case,
    phase_names,
)
from shardcore.step.shard_memory import (
    LocalBatchShare,
    bucketized_id_bytes,
    buffers_per_term,
    bytes_by_moment,
    bytes_of_offsets,
    exchanged_amounts,
    local_batch_shares,
)

STATE_BYTES = {name: (x.state_bytes("cell"), x.state_bytes("row")) for name, x in OPTIMIZERS.items()}
"""Optimizer state: bytes a cell, and bytes a row. FBGEMM keeps moments as FP32 whatever the weights are.

Source: momentum1 and momentum2 in FBGEMM's split_table_batched_embeddings_ops_training.py.
"""
CACHED_ROW_BYTES = 16
"""Bytes of a cached row other than its weights: its id and its last batch, 8 each (lxu_cache_state and lxu_state in
FBGEMM's split_table_batched_embeddings_ops_training.py)."""
CACHE_SET_ROWS = 32
"""Rows of a set of the cache, which has whole sets (DEFAULT_ASSOC, in the same file)."""
MIB = 1 << 20
_NO_COLLISION = ManagedCollision(0)


@dataclass(frozen=True)
class DeviceMemory:
    """Peak memory of one device.

    phase: name of the largest phase.
    parts: bytes of each of PARTS in it, 0 included.
    """

    phase: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


# --- resident bytes ----------------------------------------------------------------------------------------------


def resident_bytes(sharding_kind: ShardingKind, shard: Shard, problem: Problem) -> tuple[int, int]:
    """Bytes of a shard's weights in device memory, and of its optimizer state there.

    Weights include their cache, and the map from ids to rows.
    """
    # Optimizer state of fused tables: FBGEMM's optimizers run in the backward kernel.
    table, (a_cell, a_row) = shard.table, STATE_BYTES[problem.optimizer]
    collision = table.managed_collision or _NO_COLLISION
    # Maps have an entry for every row, cached or not, so they do not shrink with the cache.
    tier = table.lower_tier
    mapped = tier.row_bytes * (0 < table.load_factor < 1) + (collision.row_bytes or 0)
    mapped += collision.hash_form.slot_bytes / collision.hash_form.slot_rows
    # Managed collision keeps ids that it saw since its last eviction. A row range has its share of them.
    seen = problem.global_batch * table.lookups_per_sample * collision.lookup_bytes
    mapping = collision.bytes + math.ceil(shard.rows * mapped + (seen and seen * access_share(shard)))
    # Device memory holds only the cache. State of rows stays there for all rows (see host_tier_bytes).
    if table.in_host_memory:
        if not tier.shares_cache:
            a_cached = stored_row_bytes(shard, problem.optimizer) + CACHED_ROW_BYTES
            state = (a_row + shard.width * a_cell * (not tier.holds_cells)) * (not tier.holds_state)
            return private_cache_rows(shard) * a_cached + mapping, shard.rows * state
        return table.cached_rows(shard.rows) * _cached_row_bytes(shard) + mapping, shard.rows * a_row
    if sharding_kind.dense_gradient:
        # Torch's optimizers keep state of the weights' type.
        dense, each = DENSE_OPTIMIZERS[problem.replica_optimizer], PRECISION_BYTES[table.precision]
        a_cell, a_row = dense.state_bytes("cell", each), dense.state_bytes("row", each)
    # State of cells grows with the shard's width, state of rows does not.
    return shard.bytes + mapping, shard.rows * (shard.width * a_cell + a_row)


def _cached_row_bytes(shard: Shard) -> int:
    """Bytes of a cached row of a shard, if no shard of the same op is wider."""
    return shard.width * PRECISION_BYTES[shard.table.precision] + CACHED_ROW_BYTES


def stored_row_bytes(shard: Shard, optimizer: str) -> int:
    """Bytes of a shard's row in its tier and in its private cache: weights, and the optimizer state packed behind
    them.

    Source: cache_row_dim of FBGEMM's SSDTableBatchedEmbeddingBags.
    """
    table, each = shard.table, PRECISION_BYTES[shard.table.precision]
    a_cell, a_row = STATE_BYTES[optimizer]
    state = math.ceil((shard.width * a_cell + a_row) / each) * table.lower_tier.holds_state
    return each * (shard.width + math.ceil(state / 4) * 4)


def private_cache_mib(shard: Shard) -> int:
    """MiB of weights in a shard's private cache (KeyValueParams.max_l1_cache_size)."""
    a_row = shard.width * PRECISION_BYTES[shard.table.precision]
    # A cache has a set at least.
    least = math.ceil(CACHE_SET_ROWS * a_row / MIB)
    return max(round(shard.table.cached_rows(shard.rows) * a_row / MIB), least)


def private_cache_rows(shard: Shard) -> int:
    """Number of rows in a shard's private cache.

    Source: _populate_ssd_tbe_params in batched_embedding_kernel.py of TorchRec 1.8.
    """
    most = shard.table.lower_tier.most_cached
    a_set = CACHE_SET_ROWS * shard.width * PRECISION_BYTES[shard.table.precision]
    sets = max(int(most * shard.rows / CACHE_SET_ROWS), 1)
    return CACHE_SET_ROWS * min(sets, private_cache_mib(shard) * MIB // a_set)


def host_tier_bytes(shard: Shard, problem: Problem) -> int:
    """Bytes of a shard in its memory tier below the device: all weights, and in some tiers optimizer state of cells.

    Source: FBGEMM allocates both as UVM. State of rows is in device memory. On SSD there are weights alone.
    """
    table = shard.table
    if not table.in_host_memory:
        return 0
    tier, (a_cell, _) = table.lower_tier, STATE_BYTES[problem.optimizer]
    if tier.shares_cache:
        return shard.bytes + shard.rows * shard.width * a_cell * tier.holds_cells
    return shard.rows * (stored_row_bytes(shard, problem.optimizer) + tier.header_bytes)


def usable_bytes(problem: Problem) -> list[int]:
    """[D] bytes of each device's memory that embeddings may take: memory less the reserve."""
    return [d.memory_bytes - problem.constraints.reserved_bytes for d in problem.topology.devices]


# --- memory of a plan ------------------------------------------------------------------------------------


def memory_by_part(plan: Plan, problem: Problem) -> list[DeviceMemory]:
    """[D] peak memory of a plan on each device, by part."""
    require_type(plan, Plan, "plan", "a Plan, as a sharder gives")
    require_type(problem, Problem, "problem", "a Problem")
    batches = local_batch_shares(merged_placements(plan.placements), problem)
    (names, by_part), runs = phases_by_part(tuple(batches), problem), list(batches)
    # Terms of a local batch are equal on all devices, so they are computed once.
    of_all, of_devices, devices = (
        local_batch_memory_terms(batches, problem),
        _shards_of_devices(plan, problem),
        [],
    )
    # All devices share one index of caches, so that their counts have the same meaning.
    caches = CacheCounts.from_shards(pair for held in of_devices for pair in held)
    for held in of_devices:
        terms = of_all.copy()
        for run, sums in _sums_of_runs(held, problem).items():
            terms[sums_of_run(runs.index(run))] = sums
        by_phase = by_part @ terms
        largest = int(by_phase.sum(1).argmax())
        parts: dict[str, float] = dict(zip(PARTS, by_phase[largest].tolist(), strict=True))
        # The cache is as wide as its widest shard: what resident_bytes does not count is padding.
        parts["weights"] += float(caches.padding_bytes(caches.total_counts(held))) if len(caches) else 0.0
        devices.append(DeviceMemory(names[largest], _rounded_parts(parts)))
    return devices


def _rounded_parts(parts: Mapping[str, float]) -> dict[str, int]:
    """Parts of memory in whole bytes that sum to the rounded sum."""
    # Round the running sum, not each part: rounding errors then never add up.
    # Integers of Python, as those of NumPy overflow with a huge batch.
    ends = [round(end) for end in np.cumsum(list(parts.values())).tolist()]
    return {part: end - begin for part, begin, end in zip(parts, [0, *ends], ends, strict=False)}


@dataclass(frozen=True, eq=False)
class CacheCounts:
    """Devices' caches, by counts that add up over shards.

    An op has one cache for all of its shards of a precision that have none of their own. It has whole sets of
    rows, each as wide as the widest shard with a cache (max_D_cache in FBGEMM's
    split_table_batched_embeddings_ops_training.py).

    Counts [..., C] are, in this order: bytes of caches that `resident_bytes` has; then of each cache its
    rows, and how many shards have each width.

    ops: for each cache, by run and precision, where its counts begin, and widths, ascending.
    row_bytes: [C] bytes of a cache's row if its widest shard counts in this entry. 0 for other entries.
    """

    ops: Mapping[tuple[ShardingKind, str], tuple[int, tuple[int, ...]]]
    row_bytes: np.ndarray

    @classmethod
    def from_shards(cls, shards: Iterable[tuple[ShardingKind, Shard]]) -> CacheCounts:
        """Embedding caches of the fused ops that may have the given shards."""
        # Widths are known up front, so that counts are fixed-length vectors that add and subtract.
        widths: dict[tuple[ShardingKind, str], set[int]] = defaultdict(set)
        for run, shard in shards:
            if shard.table.shares_cache:
                widths[run, shard.table.precision].add(shard.width)
        # Column 0 is common to all caches. Then each cache has one column of rows, and one for each width.
        begins = np.cumsum([1, *(1 + len(of) for of in widths.values())]).tolist()
        ops = {op: (at, tuple(sorted(of))) for (op, of), at in zip(widths.items(), begins, strict=False)}
        row_bytes = np.zeros(begins[-1] if ops else 0)
        for (_, precision), (at, of) in ops.items():
            row_bytes[at + 1 : at + 1 + len(of)] = (
                np.array(of) * PRECISION_BYTES[precision] + CACHED_ROW_BYTES
            )
        return cls(ops, row_bytes)

    def __len__(self) -> int:
        """Number of counts, C. 0 if there are no caches."""
        return len(self.row_bytes)

    def shard_counts(self, sharding_kind: ShardingKind, shard: Shard) -> dict[int, float]:
        """Amounts that a shard adds to its op's row cache, by their index in the vector of counts; without zeros."""
        table = shard.table
        if not table.shares_cache:
            return {}
        # A shard's cache is that of its run and precision, as FBGEMM makes one op for each.
        at, widths = self.ops[sharding_kind, table.precision]
        rows = table.cached_rows(shard.rows)
        # Cached bytes at the shard's own width are entry 0, which padding takes off again.
        return {0: rows * _cached_row_bytes(shard), at: rows, at + 1 + widths.index(shard.width): 1}

    def total_counts(self, shards: Iterable[tuple[ShardingKind, Shard]]) -> np.ndarray:
        """[C] counts of caches, summed over shards."""
        total = np.zeros(len(self))
        for run, shard in shards:
            for i, n in self.shard_counts(run, shard).items():
                total[i] += n
        return total

    def padding_bytes(self, counts: np.ndarray) -> np.ndarray:
        """[...] bytes of embedding caches beyond those that `resident_bytes` counts, as rows are as wide as the
        widest shard.
        """
        # Remove what resident_bytes counted at each shard's own width. The caches below count it in full.
        of_entry = np.moveaxis(counts, -1, 0)
        n_bytes = -of_entry[0]
        for at, widths in self.ops.values():
            n_bytes = n_bytes + cache_bytes(of_entry, at, at + len(widths), self.row_bytes)
        return n_bytes


def cache_bytes(counts, first, last, row_bytes):  # noqa: ANN001, ANN201 (the engine compiles it, too)
    """Bytes of an op's cache, from its count of rows (entry `first`) and of shards of each width (up to `last`).

    row_bytes: of a row of the cache if its widest shard counts in this entry.
    """
    widest = 0.0 * counts[first]
    # Counts by width let a search remove a shard without a search for the next widest one.
    for i in range(first + 1, last + 1):
        widest = np.maximum(widest, row_bytes[i] * (counts[i] > 0))
    # Rows are allocated in whole sets.
    return np.ceil(counts[first] / CACHE_SET_ROWS) * CACHE_SET_ROWS * widest


def used_bytes(plan: Plan, problem: Problem) -> list[int]:
    """[D] peak bytes of a plan on each device."""
    return [device.bytes for device in memory_by_part(plan, problem)]


def _shards_of_devices(plan: Plan, problem: Problem) -> list[list[tuple[ShardingKind, Shard]]]:
    """[D] the shards of a plan on each device, each with its sharding kind."""
    # Merged: two shards of a table on one device are one shard, with one set of lengths and one cache.
    held: list[list[tuple[ShardingKind, Shard]]] = [[] for _ in problem.topology.devices]
    for placement in merged_placements(plan.placements):
        sharding_kind = sharding_kind_for_table(placement.kind, placement.shard.table)
        for device, shard in shards_by_device(placement):
            held[device].append((sharding_kind, shard))
    return held


def require_fits(plan: Plan, problem: Problem) -> list[int]:
    """[D] peak bytes of a plan. Raises Overfull, naming the device with the largest excess.

    A device without a shard is not checked: a reserve larger than its memory keeps it out. Raises Infeasible
    for a host whose memory does not hold the rows of its devices.
    """
    used, may_hold = used_bytes(plan, problem), usable_bytes(problem)
    _require_hosts_fit(plan, problem)
    # An unused device may have a reserve above its memory.
    holding = {device for placement in plan.placements for device in placement.devices}
    # Limits are per device, as devices may have unequal memory.
    if not (too_much := {d: used[d] - may_hold[d] for d in sorted(holding) if used[d] > may_hold[d]}):
        return used
    # The worst device says best how much memory is lacking.
    device = max(too_much, key=too_much.__getitem__)
    parts = memory_by_part(plan, problem)[device].parts
    # The three largest parts tell a user where to save.
    largest = sorted(filter(parts.get, parts), key=lambda part: -parts[part])[:3]
    raise Overfull(
        f"device {device} of problem {problem.name!r} would hold {size_text(used[device])} "
        f"({', '.join(f'{part} {size_text(parts[part])}' for part in largest)}); it may hold "
        f"{size_text(may_hold[device])}, {size_text(too_much[device])} too little. "
        "It would fit with as much more memory, or less reserved",
    )


def plan_fits(plan: Plan, problem: Problem) -> bool:
    """Tell if the memory of devices and hosts suffices for a plan."""
    try:
        require_fits(plan, problem)
    except Infeasible:
        return False
    return True


def _require_hosts_fit(plan: Plan, problem: Problem) -> None:
    """Raise Infeasible, naming the first host whose memory does not hold the rows of its devices."""
    topology = problem.topology
    for memory in topology.memory:
        # [D] bytes in this tier. Devices of a host share it, so their sums count.
        on_device = [
            sum(host_tier_bytes(shard, problem) for _, shard in held if shard.table.tier == memory.tier)
            for held in _shards_of_devices(plan, problem)
        ]
        for host, devices in zip(topology.hosts, topology.devices_by_host, strict=True):
            if (used := sum(on_device[d] for d in devices)) > memory.bytes:
                raise Infeasible(
                    f"host {host!r} of problem {problem.name!r} would hold {size_text(used)} of rows "
                    f"in {TIERS[memory.tier].words}; it may hold {size_text(memory.bytes)} there, "
                    f"{size_text(used - memory.bytes)} too little"
                )


def size_text(n_bytes: float) -> str:
    """A number of bytes as text, such as "1.5 GiB" or "3 bytes"."""
    if abs(n_bytes) >= 0.1 * 2**30:
        return f"{n_bytes / 2**30:.1f} GiB"
    if abs(n_bytes) >= 0.1 * 2**20:
        return f"{n_bytes / 2**20:.1f} MiB"
    return "1 byte" if round(n_bytes) == 1 else f"{n_bytes:.0f} bytes"


# --- limits of an FBGEMM op on CUDA: features and samples in 32 bits together, and ids that 32 bits count -------

MOST_IDS = (1 << 31) - 1
"""Ids of one op in a step. Source: pytorch/FBGEMM 6236, pytorch/torchrec 4443."""


class TooManyInOneOp(Infeasible):
    """An op has more features or ids than FBGEMM runs. Another plan may spread them."""


def max_op_features(batch: int) -> int:
    """The most features of one FBGEMM op with pooled outputs over `batch` samples.

    Its backward packs the numbers of a feature and of a sample into 32 bits. T features take as many bits as
    T itself. Source: get_infos_metadata in FBGEMM.
    """
    # The most numbers in the bits that are left is one less than a power of two.
    return (1 << max(0, 32 - batch.bit_length())) - 1


def may_exceed_op_limits(problem: Problem) -> bool:
    """Tell if some plan of a problem may have more features or ids in one op than FBGEMM runs."""
    tables = problem.tables
    # All tables in one op is the worst case. Mostly it is far below the limits, which saves every check.
    return not problem.topology.on_cpu and (
        sum(t.features for t in tables) > max_op_features(problem.global_batch)
        or sum(t.lookups_per_sample for t in tables) * problem.global_batch > MOST_IDS
    )


def require_op_limits(plan: Plan, problem: Problem) -> None:
    """Raise TooManyInOneOp, naming the first device with too many features or ids in one FBGEMM op."""
    if not may_exceed_op_limits(problem):
        return
    for device, held in enumerate(_shards_of_devices(plan, problem)):
        for run, sums in _sums_of_runs(held, problem).items():
            features, ids = (
                int(sums[ShardSums._fields.index("features")]),
                sums[ShardSums._fields.index("lookups")],
            )
            batch, what = run.op_batch(problem), f"device {device} of problem {problem.name!r} would run"
            if features > (most := max_op_features(batch)):
                raise TooManyInOneOp(
                    f"{what} {features} features in one op ({run.name}) over {batch} samples; FBGEMM's CUDA op packs "
                    f"both into 32 bits, so at most {most} features: it needs more devices, or a smaller batch"
                )
            if ids > MOST_IDS:
                raise TooManyInOneOp(
                    f"{what} {ids:.3g} ids in one op ({run.name}); FBGEMM's CUDA op counts them in 32 bits, "
                    f"so at most {MOST_IDS}: it needs more devices, or a smaller batch"
                )


# --- sums over shards ------------------------------------------------------------------------------------------

OF_OP = 1024.0
"""Bytes that stand for a feature or an id beyond what an op may have."""


class ShardSums(NamedTuple):
    """A shard's contribution to a device's sums.

    entered: bytes of outputs, or of a replica's gradient. They enter collectives.
    lookups: in a step.
    arrived: bytes of ids that the device receives. Several batches of them are there.
    weights, state: resident bytes (see `resident_bytes`).
    offsets: bytes of the offsets of its lookups, which are there in all phases.
    features: with pooled outputs.
    on_host: bytes in the fastest tier of the memory of the device's host. Plans are checked for slower ones.
    """

    entered: int
    lookups: float
    arrived: int
    weights: int
    state: int
    offsets: int
    features: int
    on_host: int

    def always_bytes(self, sharding_kind: ShardingKind, problem: Problem) -> float:
        """Bytes that a device has in all phases of a step."""
        # A replica's gradient lives all step in DDP's bucket.
        moved = (
            PIPELINES[problem.job.pipeline].min_arrived_batches * self.arrived
            + self.entered * sharding_kind.local_batch
        )
        return self.weights + self.state + self.offsets + moved


def shard_sums(sharding_kind: ShardingKind, shard: Shard, problem: Problem) -> ShardSums:
    """Sums that a shard adds to its device (weights, optimizer state, buffers), from which memory follows."""
    table, memory = shard.table, problem.topology.memory
    arrived, entered, lookups = exchanged_amounts(sharding_kind, shard, problem)
    return ShardSums(
        entered,
        lookups,
        arrived,
        *resident_bytes(sharding_kind, shard, problem),
        bytes_of_offsets(sharding_kind, shard, problem),
        # Sequences do not count: FBGEMM's limit packs the feature number of pooled outputs (require_op_limits).
        0 if sharding_kind.sequence else table.features,
        host_tier_bytes(shard, problem) * (not memory or table.tier == memory[0].tier),
    )


def _sums_of_runs(
    held: Iterable[tuple[ShardingKind, Shard]], problem: Problem
) -> dict[ShardingKind, np.ndarray]:
    """Sums over the shards of each op of a device, from its shards with their sharding kinds."""
    sums: defaultdict[ShardingKind, np.ndarray] = defaultdict(lambda: np.zeros(len(ShardSums._fields)))
    for run, shard in iterate_with_progress(held):
        sums[run] += shard_sums(run, shard, problem)
    return sums


FIXED, SENT, SCRATCH = range(3)
"""Terms of memory that belong to no run: 1, for bytes that no plan changes; bytes of ids of a local batch, as they are
sent; and those by which the dense optimizer updates the largest replica."""


def columns_of_run(r: int) -> slice:
    """Columns of the terms of run r of a plan: its share of a local batch (memory_timeline.OF_ENTERED), then
    ShardSums.
    """
    n = OF_ENTERED + len(ShardSums._fields)
    return slice(3 + n * r, 3 + n * (r + 1))


def sums_of_run(r: int) -> slice:
    """Columns of the terms of run r of a plan that are ShardSums over a device's shards."""
    columns = columns_of_run(r)
    return slice(columns.start + OF_ENTERED, columns.stop)


@dataclass(frozen=True, eq=False)
class RunStages:
    """Bytes that runs hold in the four stages of a step, for a unit of each of their terms.

    slots: [R, 4, slots, Q, 10] bytes by part. Runs with fewer phases have zeros in the slots that they lack.
    phases: [R, 4] number of phases.
    stages: [R] rows of their collectives.
    """

    slots: np.ndarray
    phases: np.ndarray
    stages: tuple[Stages, ...]

    @property
    def max_multiples(self) -> np.ndarray:
        """[R, 2] the largest of the multiples of bytes that entered, and of lookups."""
        sums = self.slots.sum(3)[..., OF_ENTERED:]
        # Buffers freed late exist together with those of `after`.
        sums[:, :, SLOT_AFTER] += sums[:, :, SLOT_FREED_LATE]
        return sums.max((1, 2))


def moments_beyond_resident(problem: Problem) -> np.ndarray:
    """[2, M + 1, 3] bytes and multiples of ids that no run holds and that are not resident (see ShardSums), at each
    moment.

    See shard_memory.bytes_by_moment. The last row has the largest of each.
    """
    moments = bytes_by_moment(problem).sum(2)
    moments[..., 2] -= PIPELINES[problem.job.pipeline].min_arrived_batches
    return np.append(moments, moments.max(1, keepdims=True), axis=1)


@lru_cache(maxsize=64)
def run_stages(sharding_kinds: tuple[ShardingKind, ...], problem: Problem) -> RunStages:
    """Bytes that fused ops of the given sharding kinds hold in each stage of a step."""
    stages, part = tuple(run.memory_stages for run in sharding_kinds), PARTS.index
    phases = np.array([[len(buffers.phases) for buffers in of] for of in stages], np.int64).reshape(-1, 4)
    slots = np.zeros(
        (len(sharding_kinds), 4, SLOT_PHASES + phases.max(initial=0), len(PARTS), OF_LOOKUPS + 1)
    )
    for r, run in enumerate(sharding_kinds):
        terms = buffers_per_term(run, problem)
        for t, held in enumerate(stages[r]):
            for slot, alive in enumerate((held.before, held.after, held.freed_late, *held.phases.values())):
                for of_part, (name, n) in ((of, item) for of in alive for item in alive[of].items()):
                    slots[r, t, slot, part(of_part)] += [n * of.get(name, 0.0) for of in terms]
    if PIPELINES[problem.job.pipeline].looks_up_ahead:
        # A batch has its outputs and their gradient until the step ends, so the gradient is in no stage once more
        # (buffers_per_term). The next batch's outputs are on their way from before backward.
        alive = [SLOT_BEFORE, SLOT_AFTER, *range(SLOT_PHASES, slots.shape[2])]
        slots[:, 0][:, alive, part("received outputs"), :OF_ENTERED:2] += 1.0
        slots[:, 0][:, alive, part("output gradients"), 1:OF_ENTERED:2] += 1.0
        slots[:, 2:, alive] += slots[:, :1, [SLOT_AFTER]]
    return RunStages(slots, phases, stages)


def table_of_runs(sharding_kinds: Sequence[ShardingKind]) -> np.ndarray:
    """[R, 3] collection and kind of each sharding kind (memory_timeline.COLLECTION)."""
    # Outputs of a collection's runs are joined to one tensor.
    collections = sorted({(run.collection, run.sequence) for run in sharding_kinds})
    rows = [
        (collections.index((x.collection, x.sequence)), x.sequence, x.local_batch) for x in sharding_kinds
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


@dataclass(frozen=True, eq=False)
class MemoryAccount:
    """Memory of plans with the same runs and the same local batch, linear in terms.

    Terms K are FIXED and those after it, then those of each run (`columns_of_run`).

    runs: columns of each run's sums among the terms, in the order in which TorchRec runs them.
    terms: [P, K] bytes in a phase for a unit of each term. Only phases that can be a device's peak.
    limits: [D, P] bytes that a device may have, with its local batch.
    phases: number of the first columns of P that are phases. Others are lookups and features of each run's op,
      which FBGEMM limits. They exist only where a plan may have too many.
    base: [P] bytes of a local batch.
    """

    problem: Problem
    runs: Mapping[ShardingKind, slice]
    terms: np.ndarray
    limits: np.ndarray
    phases: int
    base: np.ndarray

    @classmethod
    def from_batches(cls, batches: Mapping[ShardingKind, LocalBatchShare], problem: Problem) -> MemoryAccount:
        """Memory account of plans with given sharding kinds, from each sharding kind's share of a local batch.

        batches: share of each run in a local batch, in the order of runs.
        """
        account = account_without_batch(tuple(batches), problem)
        return replace(account, base=account.terms @ local_batch_memory_terms(batches, problem))

    @property
    def sent_id_batches(self) -> np.ndarray:
        """[P] batches of which ids for a local batch are in a phase."""
        return self.terms[:, SENT]

    def bytes_by_phase(self, sharding_kind: ShardingKind, sums: ShardSums) -> np.ndarray:
        """[P] bytes that a shard of a run takes on its device in each phase of a step."""
        return self.terms[:, self.runs[sharding_kind]] @ np.array(sums, float)

    def device_loads(self, placements: Iterable[Placement]) -> np.ndarray:
        """[D, P] bytes of placements on each device in each phase of a step, without the local batch."""
        load = np.zeros(self.limits.shape)
        for placement in placements:
            run = sharding_kind_for_table(placement.kind, placement.shard.table)
            for device, shard in shards_by_device(placement):
                load[device] += self.bytes_by_phase(run, shard_sums(run, shard, self.problem))
        return load


@lru_cache(maxsize=4)
def phases_by_part(
    sharding_kinds: tuple[ShardingKind, ...], problem: Problem
) -> tuple[tuple[str, ...], np.ndarray]:
    """Names [N] of a step's phases in their order, and bytes [N, Q, K] of each part in a phase for a unit of each term.

    sharding_kinds: in the order in which TorchRec runs them.
    """
    of_runs, n_terms = run_stages(sharding_kinds, problem), columns_of_run(len(sharding_kinds)).start
    looks_up_ahead = PIPELINES[problem.job.pipeline].looks_up_ahead
    slots = np.zeros((*of_runs.slots.shape[:-1], n_terms))
    moments, part = np.zeros((len(MOMENTS), len(PARTS), n_terms)), PARTS.index
    by_moment = bytes_by_moment(problem)[int(any(run.local_batch for run in sharding_kinds))]
    moments[..., [FIXED, SENT]] = by_moment[..., :2]
    moments[UPDATE, part("dense gradients"), SCRATCH] = 1.0
    for r, run in enumerate(sharding_kinds):
        slots[r, ..., columns_of_run(r)][..., : OF_LOOKUPS + 1] = of_runs.slots[r]
        of_run = moments[..., columns_of_run(r)]
        # Outputs, and once more if they are joined with others.
        of_run[JOINED, part("received outputs"), :OF_ENTERED:2] = 1.0, 2.0, 1.0, 2.0
        # Outputs that are kept until the step ends are among what waits for backward.
        of_run[DENSE_PART, part("received outputs"), :OF_ENTERED:2] = not looks_up_ahead
        sums = dict(zip(ShardSums._fields, np.moveaxis(moments[..., sums_of_run(r)], 2, 0), strict=True))
        # A replica's gradient lives all step in DDP's bucket.
        sums["entered"][:, part("dense gradients")] = run.local_batch
        sums["arrived"][:] = by_moment[..., 2]
        sums["weights"][:, part("weights")] = 1.0
        sums["state"][:, part("optimizer state")] = 1.0
        sums["offsets"][:, part("ids")] = 1.0
    names = phase_names(of_runs.stages)
    by_part = np.zeros((len(names), len(PARTS), n_terms))
    fill_phases(range(len(sharding_kinds)), slots, of_runs.phases, moments, by_part)
    return names, by_part


@lru_cache(maxsize=64)
def account_without_batch(sharding_kinds: tuple[ShardingKind, ...], problem: Problem) -> MemoryAccount:
    """Memory account of plans with given sharding kinds, in TorchRec's running order, without a local batch."""
    # Equal phases are one for the purpose of a maximum.
    peaks = np.unique(phases_by_part(sharding_kinds, problem)[1].sum(1), axis=0)
    # A phase that has no more of any term than another one is never the peak. Phases below none but themselves stay.
    # One by one: all pairs of many runs' phases would take gigabytes.
    terms = peaks[[(peak <= peaks).all(1).sum() == 1 for peak in peaks]]
    # One limit a device, repeated for all phases: the peak is the largest of them.
    limits, phases = np.tile(np.array(usable_bytes(problem), float)[:, None], len(terms)), len(terms)
    # FBGEMM's limits are extra columns: searches then check them by the same comparison as memory.
    if may_exceed_op_limits(problem):
        # Load and limit are both scaled by OF_OP, so an excess of one id reads as 1 KiB too much.
        of_ops = [n for run in sharding_kinds for n in (MOST_IDS, max_op_features(run.op_batch(problem)))]
        limits = np.append(limits, np.tile(OF_OP * np.array(of_ops, float), (len(limits), 1)), axis=1)
        terms = np.append(terms, np.zeros((len(of_ops), terms.shape[1])), axis=0)
        for r in range(len(sharding_kinds)):
            # Each op counts its own run's lookups and features only.
            of_run = terms[phases + 2 * r : phases + 2 * r + 2, sums_of_run(r)]
            of_run[0, ShardSums._fields.index("lookups")] = of_run[1, ShardSums._fields.index("features")] = (
                OF_OP
            )
    columns = {run: sums_of_run(r) for r, run in enumerate(sharding_kinds)}
    return MemoryAccount(problem, columns, terms, limits, phases, np.zeros(len(terms)))


def local_batch_memory_terms(batches: Mapping[ShardingKind, LocalBatchShare], problem: Problem) -> np.ndarray:
    """[K] terms of memory of a local batch (see MemoryAccount), the same on all devices.

    batches: share of each run, in the order of runs.
    """
    terms, order = np.zeros(columns_of_run(len(batches)).start), range(len(batches))
    shares = np.array([(batch.outputs, batch.cut) for batch in batches.values()], float)
    runs = table_of_runs(tuple(batches))
    for r in order:
        case, gradient = local_batch_case(r, order, shares, runs)
        terms[columns_of_run(r)][case : case + 2] = shares[r, OUTPUTS], gradient
    terms[FIXED], terms[SENT] = 1.0, sum(batch.sent for batch in batches.values())
    # One table is updated after another, so the largest buffer counts.
    terms[SCRATCH] = max((problem.job.update_bytes, *(batch.scratch for batch in batches.values())))
    return terms


def peak_bytes_function(problem: Problem) -> Callable[[ShardingKind, Shard], int]:
    """A function of a sharding kind and a shard: bytes that the shard alone takes on a device at its peak.

    The ids of a local batch that a cut or a division adds to all devices are included.
    """

    def peak_bytes(run: ShardingKind, shard: Shard) -> int:
        """Bytes that a shard alone takes on a device at its peak."""
        account, ids = account_without_batch((run,), problem), 0.0
        # Cutting a table sends its ids once more, so every device permutes one more copy.
        if shard.width < shard.table.dim and not run.local_batch:
            ids += id_bytes_per_sample(shard.table, problem.job)
        # Bucketized ids are an extra copy, with lengths for each range.
        if run.divides_rows:
            ids += bucketized_id_bytes(shard.table, problem.job, len(run.shared_by(problem.topology)[0]))
        own = account.bytes_by_phase(run, shard_sums(run, shard, problem))
        # Columns beyond `phases` are op limits, not bytes.
        return math.ceil((own + problem.local_batch * ids * account.sent_id_batches)[: account.phases].max())

    return peak_bytes


def table_peak_bytes(table: Table, problem: Problem, width: int | None = None) -> int:
    """Peak bytes of a table on a device, or of `width` of its columns."""
    shard = Shard(table, 0, table.rows, 0, width or table.dim)
    return peak_bytes_function(problem)(kind_on_one_device(table), shard)


def local_batch_bytes(problem: Problem) -> int:
    """Bytes that a local batch adds to the peak of a device with half of an even share of all tables.

    The largest phase counts. So with more shards, the local batch adds less.
    """
    whole = [Placement(kind_on_one_device(t).name, Shard.whole(t), (0,)) for t in problem.tables]
    account = memory_account(whole, problem)
    # All tables on device 0, then half of what an even share would be.
    load = account.device_loads(whole)[0, : account.phases] / (2 * len(problem.topology))
    # Resident bytes are in all phases.
    return math.ceil((account.base[: account.phases] + load).max() - load.max())


def memory_account(placements: Iterable[Placement], problem: Problem) -> MemoryAccount:
    """The memory account of a plan, complete or not."""
    return MemoryAccount.from_batches(local_batch_shares(placements, problem), problem)
