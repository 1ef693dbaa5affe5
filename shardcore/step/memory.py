"""Memory of a device in a training step of a plan, by part.

Weights and optimizer state are always there. Other buffers depend on the phase of the step (memory_timeline.py), as
TorchRec runs it under the job's pipeline. A device needs the bytes of the largest phase.
The buffers in which FBGEMM's CUDA kernels sort are given, from its source. Scratch of its CPU kernels is not
counted.

A plan fits if every device's peak memory is at most its capacity (`require_fits`). Searches keep the
same count while shards come and go (memory_account.py).

Shapes: D devices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from shardcore.core.access_statistics import ManagedCollision
from shardcore.core.catalog import DENSE_OPTIMIZERS, OPTIMIZERS
from shardcore.core.errors import Infeasible, Overfull
from shardcore.core.job import PIPELINES
from shardcore.core.progress import ticking
from shardcore.core.tiers import TIERS
from shardcore.core.types import PRECISION_BYTES, Plan, Problem, Shard
from shardcore.core.validation import require_type
from shardcore.step.access import access_share
from shardcore.step.kinds import Layout, merged, run_of, shards_on
from shardcore.step.memory_timeline import phases_of, stages_under, times_of
from shardcore.step.shard_memory import local_buffers, run_batches, shard_buffers

PARTS = (
    "weights",
    "optimizer state",
    "ids",
    "sorting",
    "outputs",
    "payloads",
    "received outputs",
    "output gradients",
    "dense gradients",
    "dense part",
    "activations",
)
"""Parts of memory, in the order in which reports show them.

ids: local batches of the pipeline, and their ids sent and received, with lengths.
dense part, activations: of the job, as measured (torchrec/dense_memory.py). 0 if they are not.
sorting: buffers of FBGEMM's CUDA backward.
payloads: buffers of collectives, and casts for them.
received outputs: a device's samples, of all tables.
dense gradients: of replicas, with DDP's buckets, and scratch of their optimizer.
"""

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


def resident_bytes(layout: Layout, shard: Shard, problem: Problem) -> tuple[int, int]:
    """Bytes of a shard's weights in device memory, and of its optimizer's state there.

    Weights include their cache, and the map from ids to rows.
    """
    # Optimizer state of fused tables: FBGEMM's optimizers run in the backward kernel.
    table, (a_cell, a_row) = shard.table, STATE_BYTES[problem.optimizer]
    collision = table.managed_collision or _NO_COLLISION
    # Maps have an entry for every row, cached or not, so they do not shrink with the cache.
    tier = table.below
    mapped = tier.row_bytes * (0 < table.load_factor < 1) + (collision.row_bytes or 0)
    mapped += collision.known.slot_bytes / collision.known.slot_rows
    # Managed collision keeps ids that it saw since its last eviction. A row range has its share of them.
    seen = problem.global_batch * table.looked_up * collision.lookup_bytes
    mapping = collision.bytes + math.ceil(shard.rows * mapped + (seen and seen * access_share(shard)))
    # Device memory holds only the cache. State of rows stays there for all rows (see host_bytes).
    if table.in_host_memory:
        if not tier.shares_cache:
            a_cached = stored_row_bytes(shard, problem.optimizer) + CACHED_ROW_BYTES
            state = (a_row + shard.width * a_cell * (not tier.holds_cells)) * (not tier.holds_state)
            return own_cache_rows(shard) * a_cached + mapping, shard.rows * state
        return table.cached(shard.rows) * _cached_row_bytes(shard) + mapping, shard.rows * a_row
    if layout.dense_gradient:
        # Torch's optimizers keep state of the weights' type.
        dense, each = DENSE_OPTIMIZERS[problem.replica_optimizer], PRECISION_BYTES[table.precision]
        a_cell, a_row = dense.state_bytes("cell", each), dense.state_bytes("row", each)
    # State of cells grows with the shard's width, state of rows does not.
    return shard.bytes + mapping, shard.rows * (shard.width * a_cell + a_row)


def _cached_row_bytes(shard: Shard) -> int:
    """Bytes of a cached row of a shard, if no shard of its op is wider. Caches.padding has what is beyond."""
    return shard.width * PRECISION_BYTES[shard.table.precision] + CACHED_ROW_BYTES


def stored_row_bytes(shard: Shard, optimizer: str) -> int:
    """Bytes of a row of a shard in its tier and in its own cache: weights, and state that is packed behind
    them.

    Source: cache_row_dim of FBGEMM's SSDTableBatchedEmbeddingBags.
    """
    table, each = shard.table, PRECISION_BYTES[shard.table.precision]
    a_cell, a_row = STATE_BYTES[optimizer]
    state = math.ceil((shard.width * a_cell + a_row) / each) * table.below.holds_state
    return each * (shard.width + math.ceil(state / 4) * 4)


def own_cache_mib(shard: Shard) -> int:
    """MiB of weights in the cache of a shard that shares none (KeyValueParams.max_l1_cache_size)."""
    a_row = shard.width * PRECISION_BYTES[shard.table.precision]
    # A cache has a set at least.
    least = math.ceil(CACHE_SET_ROWS * a_row / MIB)
    return max(round(shard.table.cached(shard.rows) * a_row / MIB), least)


def own_cache_rows(shard: Shard) -> int:
    """Rows of the cache of a shard that shares none.

    Source: _populate_ssd_tbe_params in batched_embedding_kernel.py of TorchRec 1.8.
    """
    most = shard.table.below.most_cached
    a_set = CACHE_SET_ROWS * shard.width * PRECISION_BYTES[shard.table.precision]
    sets = max(int(most * shard.rows / CACHE_SET_ROWS), 1)
    return CACHE_SET_ROWS * min(sets, own_cache_mib(shard) * MIB // a_set)


def host_bytes(shard: Shard, problem: Problem) -> int:
    """Bytes of a shard in its tier below device memory: all of its weights, and there may be the state of
    cells.

    Source: FBGEMM allocates both as UVM. State of rows is in device memory. On SSD there are weights alone.
    """
    table = shard.table
    if not table.in_host_memory:
        return 0
    tier, (a_cell, _) = table.below, STATE_BYTES[problem.optimizer]
    if tier.shares_cache:
        return shard.bytes + shard.rows * shard.width * a_cell * tier.holds_cells
    return shard.rows * (stored_row_bytes(shard, problem.optimizer) + tier.header_bytes)


def held_bytes(problem: Problem) -> list[int]:
    """[D] bytes that embeddings may take, with their inputs and outputs: memory less the reserve."""
    return [d.memory_bytes - problem.constraints.reserved_bytes for d in problem.topology.devices]


# --- memory of a plan ------------------------------------------------------------------------------------


def by_part(plan: Plan, problem: Problem) -> list[DeviceMemory]:
    """[D] memory of a plan on each device, by part."""
    require_type(plan, Plan, "plan", "a Plan, as a sharder gives")
    require_type(problem, Problem, "problem", "a Problem")
    # Buffers of a local batch are equal on all devices, so they are computed once.
    local, devices = local_buffers(run_batches(merged(plan.placements), problem), problem), []
    pipeline = PIPELINES[problem.job.pipeline]
    stages = tuple(stages_under(run.stages, pipeline) for run in local)
    # [phases] moments of a step, and [buffers, phases] how often each buffer counts in each.
    replicas = any(run.local_batch for run in local)
    phases = phases_of(stages, pipeline, replicas)
    names, times = times_of(stages, pipeline, replicas)
    # Buffers are keyed by run number: the timeline knows runs by their order only.
    numbers = {run: number for number, run in enumerate(local)}
    # Buffers that a device does not have count as 0 bytes.
    of_all: defaultdict[tuple[int, str], float] = defaultdict(float)
    of_all |= {(numbers[run], name): n for run in local for name, n in local[run].items()}
    of_devices = _held(plan, problem)
    # All devices share one index of caches, so that their counts have the same meaning.
    caches = Caches.of(pair for held in of_devices for pair in held)
    for held in of_devices:
        # Resident bytes are in every phase, so they do not affect which phase is largest.
        resident = [resident_bytes(layout, shard, problem) for layout, shard in ticking(held)]
        buffers = of_all.copy()
        # Ops are priced by run, as the shards of a run share their buffers.
        of_runs: dict[Layout, list[Shard]] = defaultdict(list)
        for layout, shard in held:
            of_runs[layout].append(shard)
        for layout, shards in of_runs.items():
            for name, n in shard_buffers(layout, shards, problem).items():
                buffers[numbers[layout], name] += n
        # The peak: bytes of buffers [B] times their multiplicity [B, phases], largest phase.
        phase = phases[int(np.argmax(np.array([buffers[name] for name in names]) @ times))]
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        parts["weights"], parts["optimizer state"] = (sum(n) for n in zip((0, 0), *resident, strict=True))
        # The cache is as wide as its widest shard: what resident_bytes does not count is padding.
        parts["weights"] += float(caches.padding(caches.total(held))) if len(caches) else 0.0
        # Attribute the peak's buffers to parts, so that reports add up to the same total.
        for (part, run, name), n in phase.alive.items():
            # A buffer may count for several parts, and more than once in each.
            parts[part] += n * buffers[run, name]
        devices.append(DeviceMemory(phase.name, _whole(parts)))
    return devices


def _whole(parts: Mapping[str, float]) -> dict[str, int]:
    """The parts in whole bytes that sum to the rounded sum."""
    # Round the running sum, not each part: rounding errors then never add up.
    # Integers of Python, as those of NumPy overflow with a huge batch.
    ends = [round(end) for end in np.cumsum(list(parts.values())).tolist()]
    return {part: end - begin for part, begin, end in zip(parts, [0, *ends], ends, strict=False)}


@dataclass(frozen=True, eq=False)
class Caches:
    """Devices' caches, by counts that add up over shards.

    An op has one cache for all of its shards of a precision that have none of their own. It has whole sets of
    rows, each as wide as the widest shard with a cache (max_D_cache in FBGEMM's
    split_table_batched_embeddings_ops_training.py).

    Counts [..., C] are, in this order: bytes of caches that `resident_bytes` has; then of each cache its
    rows, and how many shards have each width.

    ops: for each cache, by run and precision, where its counts begin, and widths, ascending.
    """

    ops: Mapping[tuple[Layout, str], tuple[int, tuple[int, ...]]]

    @classmethod
    def of(cls, shards: Iterable[tuple[Layout, Shard]]) -> Caches:
        """The caches that these shards may have."""
        # Widths are known up front, so that counts are fixed-length vectors that add and subtract.
        widths: dict[tuple[Layout, str], set[int]] = defaultdict(set)
        for run, shard in shards:
            if shard.table.shares_cache:
                widths[run, shard.table.precision].add(shard.width)
        # Column 0 is common to all caches. Then each cache has one column of rows, and one for each width.
        begins = np.cumsum([1, *(1 + len(of) for of in widths.values())]).tolist()
        return cls(
            {op: (at, tuple(sorted(of))) for (op, of), at in zip(widths.items(), begins, strict=False)}
        )

    def __len__(self) -> int:
        """C. 0 if there are none."""
        return sum(1 + len(widths) for _, widths in self.ops.values()) + bool(self.ops)

    def counts(self, run: Layout, shard: Shard) -> dict[int, float]:
        """A shard's counts, those that are not 0."""
        table = shard.table
        if not table.shares_cache:
            return {}
        # A shard's cache is that of its run and precision, as FBGEMM makes one op for each.
        at, widths = self.ops[run, table.precision]
        rows = table.cached(shard.rows)
        # Cached bytes at the shard's own width are entry 0, which padding takes off again.
        return {0: rows * _cached_row_bytes(shard), at: rows, at + 1 + widths.index(shard.width): 1}

    def total(self, shards: Iterable[tuple[Layout, Shard]]) -> np.ndarray:
        """[C] counts of some shards together."""
        total = np.zeros(len(self))
        for run, shard in shards:
            for i, n in self.counts(run, shard).items():
                total[i] += n
        return total

    def padding(self, counts: np.ndarray) -> np.ndarray:
        """[...] bytes of caches beyond those that `resident_bytes` has."""
        # Remove what resident_bytes counted at each shard's own width. The caches below count it in full.
        n_bytes = -counts[..., 0]
        for (_, precision), (at, _), widest in zip(
            self.ops, self.ops.values(), self.widest(counts), strict=True
        ):
            # Rows are allocated in whole sets of 32.
            rows = np.ceil(counts[..., at] / CACHE_SET_ROWS) * CACHE_SET_ROWS
            n_bytes = n_bytes + rows * (widest * PRECISION_BYTES[precision] + CACHED_ROW_BYTES)
        return n_bytes

    def widest(self, counts: np.ndarray) -> list[np.ndarray]:
        """[...] columns of the widest shard of each cache, 0 without one."""
        ops = self.ops.values()
        # Counts by width let a search remove a shard without a search for the next widest one.
        return [(widths * (counts[..., at + 1 : at + 1 + len(widths)] > 0)).max(-1) for at, widths in ops]


def used_bytes(plan: Plan, problem: Problem) -> list[int]:
    """[D] bytes that a plan takes on each device."""
    return [device.bytes for device in by_part(plan, problem)]


def _held(plan: Plan, problem: Problem) -> list[list[tuple[Layout, Shard]]]:
    """[D] the shards of each device, and how each runs."""
    # Merged: two shards of a table on one device are one shard, with one set of lengths and one cache.
    held: list[list[tuple[Layout, Shard]]] = [[] for _ in problem.topology.devices]
    for placement in merged(plan.placements):
        layout = run_of(placement.kind, placement.shard.table)
        for device, shard in shards_on(placement):
            held[device].append((layout, shard))
    return held


def require_fits(plan: Plan, problem: Problem) -> list[int]:
    """[D] `used_bytes` of a plan. Raises Overfull, naming the device that has most too much.

    A device without a shard is not checked: a reserve larger than its memory keeps it out. Raises Infeasible
    for a host whose memory does not hold the rows of its devices.
    """
    used, may_hold = used_bytes(plan, problem), held_bytes(problem)
    _require_hosts_fit(plan, problem)
    # An unused device may have a reserve above its memory.
    holding = {device for placement in plan.placements for device in placement.devices}
    # Limits are per device, as devices may have unequal memory.
    if not (too_much := {d: used[d] - may_hold[d] for d in sorted(holding) if used[d] > may_hold[d]}):
        return used
    # The worst device says best how much memory is lacking.
    device = max(too_much, key=too_much.__getitem__)
    parts = by_part(plan, problem)[device].parts
    # The three largest parts tell a user where to save.
    largest = sorted(filter(parts.get, parts), key=lambda part: -parts[part])[:3]
    raise Overfull(
        f"device {device} of problem {problem.name!r} would hold {gib(used[device])} "
        f"({', '.join(f'{part} {gib(parts[part])}' for part in largest)}); it may hold {gib(may_hold[device])}, "
        f"{gib(too_much[device])} too little. It would fit with as much more memory, or less reserved",
        too_much[device],
    )


def fits(plan: Plan, problem: Problem) -> bool:
    """Tell if `require_fits` accepts a plan."""
    try:
        require_fits(plan, problem)
    except Infeasible:
        return False
    return True


def _require_hosts_fit(plan: Plan, problem: Problem) -> None:
    """Raise Infeasible, naming the first host with a tier of memory that does not hold its devices' rows."""
    topology = problem.topology
    for memory in topology.memory:
        # [D] bytes in this tier. Devices of a host share it, so their sums count.
        on_device = [
            sum(host_bytes(shard, problem) for _, shard in held if shard.table.tier == memory.tier)
            for held in _held(plan, problem)
        ]
        for host, devices in zip(topology.hosts, topology.on_hosts, strict=True):
            if (used := sum(on_device[d] for d in devices)) > memory.bytes:
                raise Infeasible(
                    f"host {host!r} of problem {problem.name!r} would hold {gib(used)} of rows "
                    f"in {TIERS[memory.tier].words}; it may hold {gib(memory.bytes)} there, "
                    f"{gib(used - memory.bytes)} too little"
                )


def gib(n_bytes: float) -> str:
    """A size for people, in GiB. MiB below 0.1 GiB, bytes below 0.1 MiB."""
    if abs(n_bytes) >= 0.1 * 2**30:
        return f"{n_bytes / 2**30:.1f} GiB"
    if abs(n_bytes) >= 0.1 * 2**20:
        return f"{n_bytes / 2**20:.1f} MiB"
    return "1 byte" if round(n_bytes) == 1 else f"{n_bytes:.0f} bytes"
