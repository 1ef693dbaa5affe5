"""What a plan takes of a device's memory in a training step, by part.

Weights and optimizer state are always there. What else lives at once depends on the phase of the step
(phases.py), as TorchRec runs it under TrainPipelineSparseDist. A device needs what the largest phase takes.
The buffers in which FBGEMM's CUDA kernels sort are given, from its source. Scratch of its CPU kernels is not
counted.

A plan fits if what it takes (`used_bytes`) is there (`require_fits`). Searches add up bytes of shards. So of
each shard they count its own largest phase (`bytes_as`), and of the tables' own share what it adds to that
(`free_bytes`). That is more than a plan takes on most devices. It may be less on a device with many shards
and small outputs. It may be where ids of tables that are cut or divided dominate: those are on every device,
but count on some. Then a sharder searches again (search/true_memory.py).

Shapes: D devices.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardcore.access_statistics import ManagedCollision
from shardcore.amounts import (
    batch_bytes,
    bucketized_bytes,
    local_amounts,
    outputs_amounts,
    shard_amounts,
    sorting_bytes,
    stepped_bytes,
    travelling,
)
from shardcore.errors import Infeasible, Overfull
from shardcore.fused import DENSE_OPTIMIZERS, OPTIMIZERS
from shardcore.inputs import sample_bytes
from shardcore.job import Job
from shardcore.layouts import WHOLE_ROWS, Layout, merged, run_of, shards_on
from shardcore.outputs import table_output_rows
from shardcore.phases import phases_of, run_key, times_of
from shardcore.step.tiers import TIERS
from shardcore.tables.access import access_share
from shardcore.types import OUTPUT_BYTES, PRECISION_BYTES, Plan, Problem, Shard, Table

PARTS = ("weights", "optimizer state", "ids", "sorting", "outputs", "payloads", "received outputs",
         "output gradients", "dense gradients")
"""What memory is counted for, in the order in which it is shown.

ids: local batches of the pipeline, and what is sent and received of them, with lengths.
sorting: buffers of FBGEMM's CUDA backward.
payloads: buffers of collectives, and what is cast for them.
received outputs: a device's samples, of all tables.
dense gradients: of replicas, with DDP's buckets, and what their optimizer makes to update them.
"""

STATE_BYTES = {name: (x.state_bytes("cell"), x.state_bytes("row")) for name, x in OPTIMIZERS.items()}
"""Optimizer state: bytes a cell, and bytes a row. FBGEMM keeps moments as FP32 whatever the weights are.

Source: momentum1 and momentum2 in FBGEMM's split_table_batched_embeddings_ops_training.py.
"""
CACHED_ROW_BYTES = 16
"""Bytes a cached row beside its weights: its id and its last batch, 8 each (lxu_cache_state and lxu_state in
FBGEMM's split_table_batched_embeddings_ops_training.py)."""
CACHE_SET_ROWS = 32
"""Rows of a set of the cache, which has whole sets (DEFAULT_ASSOC, in the same file)."""
SHARE = 0.5
"""Of an even share of tables, for `every_plan_bytes`. With less, searches count more. With more, they count
too little more often (docs/benchmarks, memory)."""
MAPPED_ROW_BYTES = 4
"""Bytes a row of a table with a cache, cached or not, in device memory: FBGEMM's map of rows to tables."""


@dataclass(frozen=True)
class DeviceMemory:
    """What one device needs.

    phase: the one of `phases_of` that takes most.
    parts: bytes of each of PARTS then, 0 included.
    """

    phase: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


# --- amounts ----------------------------------------------------------------------------------------------


def resident_bytes(layout: Layout, shard: Shard, problem: Problem) -> tuple[int, int]:
    """Bytes of a shard's weights in device memory, and of its optimizer's state there.

    Weights are with their cache, and with what maps ids to rows.
    """
    a_cell, a_row = STATE_BYTES[problem.optimizer]
    of = Lookups.of(shard.table, problem)
    beside = math.ceil(shard.rows * of.mapped_bytes + of.seen_bytes * problem.global_batch * of.pooling
                       * (access_share(shard) if of.seen_bytes else 0))
    if shard.table.in_host_memory:
        cached = shard.table.cached(shard.rows)
        return cached * (shard.width * of.weight_bytes + of.cached_bytes) + beside, shard.rows * a_row
    if layout.dense_gradient:
        # Torch's optimizers keep state of the weights' type.
        dense, each = DENSE_OPTIMIZERS[problem.replica_optimizer], PRECISION_BYTES[shard.table.precision]
        a_cell, a_row = dense.state_bytes("cell", each), dense.state_bytes("row", each)
    return shard.bytes + beside, shard.rows * (shard.width * a_cell + a_row)


def host_bytes(shard: Shard, problem: Problem) -> int:
    """Bytes of a shard in its host's memory: all of its weights, and the optimizer's state of cells.

    Source: FBGEMM allocates both as UVM. State of rows is in device memory.
    """
    if not shard.table.in_host_memory:
        return 0
    a_cell, _ = STATE_BYTES[problem.optimizer]
    return shard.bytes + shard.rows * shard.width * a_cell


def _whole_rows(sequence: bool) -> Layout:
    """How tables with all rows run, pooled or not."""
    return WHOLE_ROWS.as_sequence if sequence else WHOLE_ROWS


@lru_cache(maxsize=32)
def _of_columns(job: Job, sequence: bool) -> tuple[tuple[float, float, float], ...]:
    """How often ids that arrive, outputs, and what is sorted are there. In each phase, for all rows."""
    run = _whole_rows(sequence)
    key, [name] = _key(run), (channel.name for channel in run.channels)
    amounts, times = times_of((key,))
    parts = ({"arrived": 1.0}, travelling(name, 1, job), {"sorting": 1.0})
    return tuple(set(zip(*(np.array([part.get(a, 0) for _, a in amounts]) @ times for part in parts),
                         strict=True)))


def _key(run: Layout) -> tuple[str, ...]:
    return run_key([channel.name for channel in run.channels], run.sequence)


def _most(key: tuple[str, ...], amounts: Mapping[str, float]) -> int:
    """Bytes of these amounts of a run in the phase that takes most of them."""
    of_run, times = times_of((key,))
    return math.ceil((np.array([amounts.get(amount, 0) for _, amount in of_run]) @ times).max())


# --- what searches add up ---------------------------------------------------------------------------------


def bytes_as(layout: Layout, shard: Shard, problem: Problem) -> int:
    """Bytes of one device's part of a shard, run as this kind, in its own largest phase."""
    if layout.name == WHOLE_ROWS.name and shard.full_rows:
        return table_bytes(shard.table, problem, shard.width)
    amounts = shard_amounts(layout, shard, problem) | _sent_again(layout, shard, problem)
    return sum(resident_bytes(layout, shard, problem)) + _most(_key(layout), amounts)


def _sent_again(layout: Layout, shard: Shard, problem: Problem) -> dict[str, float]:
    """What a cut or divided shard adds to a local batch. Every device has that, but it counts here only."""
    # Of the group, not of the rows: the last range may be short.
    ranges = len(layout.groups(problem.topology)[0]) if layout.divides_rows else 1
    local, cut = problem.local_batch, shard.width < shard.table.dim and not layout.local_batch
    return {"permuted": local * sample_bytes(shard.table, problem.job, ranges=ranges) * cut,
            "bucketized": local * bucketized_bytes(shard.table, problem.job, ranges) * (ranges > 1),
            "stepped": stepped_bytes(layout, shard, problem)}


def table_bytes(table: Table, problem: Problem, width: int | None = None) -> int:
    """`bytes_as` of a whole table on a device, or of some of its columns. Faster than to create a Shard."""
    return int(columns_bytes(Lookups.of(table, problem), table.rows, width or table.dim, table.dim, problem))


class Lookups(NamedTuple):
    """What a table's lookups take. Numbers, or arrays of them for several tables.

    pooling: lookups a sample.
    sample_bytes: of ids and lengths of a sample.
    outputs: rows of outputs of the global batch.
    sequence: 1 where outputs are not pooled. Else 0.
    weight_bytes: of a weight.
    cached: rows in device memory, of all rows.
    cached_bytes: of a cached row beside its weights, had the device all tables of its op. 0 without a cache.
    mapped_bytes: of a row, cached or not: for there is a cache, or managed collision.
    seen_bytes: of a lookup, that managed collision keeps.
    in_host: 1 where rows, and state of cells, are in host memory. Else 0.
    """

    pooling: Any
    sample_bytes: Any
    outputs: Any
    sequence: Any
    weight_bytes: Any
    cached: Any
    cached_bytes: Any
    mapped_bytes: Any
    seen_bytes: Any
    in_host: Any

    @classmethod
    def of(cls, table: Table, problem: Problem) -> Lookups:
        collision, each = table.managed_collision or ManagedCollision(0), PRECISION_BYTES[table.precision]
        widest = problem.cache_widths.get((table.collection, table.sequence, table.precision), 0)
        beside = CACHED_ROW_BYTES + max(0, widest - table.dim) * each
        return cls(table.looked_up, sample_bytes(table, problem.job),
                   table_output_rows(table, problem.global_batch), int(table.sequence),
                   each, table.cached(table.rows), beside * table.in_host_memory,
                   MAPPED_ROW_BYTES * (0 < table.load_factor < 1) + collision.row_bytes,
                   collision.lookup_bytes, int(table.in_host_memory))

    @classmethod
    def of_all(cls, tables: Iterable[Table], problem: Problem) -> Lookups:
        """Of several tables, as arrays."""
        each = [cls.of(table, problem) for table in tables]
        return cls(*np.array(each, dtype=float).reshape(-1, len(cls._fields)).T)


def columns_bytes(lookups: Lookups, rows: Any, width: Any, dim: Any, problem: Problem) -> Any:
    """Bytes of `width` of `dim` columns, with all rows. Numbers, or arrays of them."""
    a_cell, a_row = STATE_BYTES[problem.optimizer]
    resident = (lookups.cached * (width * lookups.weight_bytes + lookups.cached_bytes)
                + rows * (width * a_cell * (1 - lookups.in_host) + lookups.mapped_bytes + a_row)
                + np.ceil(problem.global_batch * lookups.pooling * lookups.seen_bytes))
    arrived = problem.global_batch * lookups.sample_bytes
    outputs = lookups.outputs * OUTPUT_BYTES * width
    permuted = 2 * problem.local_batch * lookups.sample_bytes * (width < dim)
    sorting = problem.global_batch * lookups.pooling * sorting_bytes(problem)

    def phases(sequence: bool) -> list[Any]:
        return [a * arrived + o * outputs + s * sorting for a, o, s in _of_columns(problem.job, sequence)]

    if isinstance(resident, np.ndarray):
        most = [np.maximum.reduce(phases(sequence)) for sequence in (False, True)]
        return resident + np.ceil(np.where(lookups.sequence, most[1], most[0]) + permuted)
    return resident + math.ceil(max(phases(bool(lookups.sequence))) + permuted)


def counted_bytes(plan: Plan, problem: Problem) -> list[int]:
    """[D] `bytes_as` of all shards on each device, to compare with `free_bytes`."""
    counted = [0] * len(problem.topology)
    for device, held in enumerate(_held(plan, problem)):
        counted[device] = sum(bytes_as(layout, shard, problem) for layout, shard in held)
    return counted


def free_bytes(problem: Problem) -> list[int]:
    """[D] bytes that shards may take: a device's memory less what is reserved and what every plan takes."""
    own = every_plan_bytes(problem)
    return [may_hold - own for may_hold in held_bytes(problem)]


@lru_cache(maxsize=16)
def every_plan_bytes(problem: Problem, share: float = SHARE) -> int:
    """Bytes that searches count on each device besides its shards: for a local batch and its outputs.

    These take most where shards take little, and of shards the largest phase counts. So the more shards a
    device has, the less these add. This is exact for a device with `share` of an even share of all tables.
    """
    # In the order of their first tables, as TorchRec runs them.
    runs = [_whole_rows(sequence) for sequence in dict.fromkeys(t.sequence for t in problem.tables)]
    of_run, times = times_of(tuple(map(_key, runs)))
    local: Counter[tuple[int, str]] = Counter({(0, "batch"): batch_bytes(problem)})
    of_all: Counter[tuple[int, str]] = Counter()
    for number, run in enumerate(runs):
        tables = [t for t in problem.tables if t.sequence == run.sequence]
        ids = problem.local_batch * sum(sample_bytes(t, problem.job) for t in tables)
        outputs = OUTPUT_BYTES * sum(t.dim * table_output_rows(t, problem.local_batch) for t in tables)
        own = outputs_amounts(outputs, problem, cut=False, together=False) | {
            "permuted": ids, "gradient": outputs, "uncut": outputs}
        local.update({(number, name): n for name, n in own.items()})
        for table in tables:
            of_all.update({(number, name): n for name, n in
                           shard_amounts(run, Shard.whole(table), problem).items()})
    of_batch, of_shards = (np.array([amounts.get(name, 0) for name in of_run]) @ times
                           for amounts in (local, of_all))
    of_shards *= share / len(problem.topology)
    return math.ceil((of_batch + of_shards).max() - of_shards.max())


def held_bytes(problem: Problem) -> list[int]:
    """[D] bytes that embeddings may take, their inputs and outputs included: all but what is reserved."""
    return [d.memory_bytes - problem.constraints.reserved_bytes for d in problem.topology.devices]


# --- what a plan takes ------------------------------------------------------------------------------------


def by_part(plan: Plan, problem: Problem) -> list[DeviceMemory]:
    """[D] what a plan takes on each device, by part."""
    local, found = local_amounts(plan, problem), []
    keys = tuple(_key(run) for run in local)
    phases, (names, times) = phases_of(keys), times_of(keys)
    numbers = {run: number for number, run in enumerate(local)}
    of_all = Counter({(numbers[run], name): n for run in local for name, n in local[run].items()})
    for held in _held(plan, problem):
        resident = [resident_bytes(layout, shard, problem) for layout, shard in held]
        amounts = of_all.copy()
        for layout, shard in held:
            for name, n in shard_amounts(layout, shard, problem).items():
                amounts[numbers[layout], name] += n
        phase = phases[int(np.argmax(np.array([amounts[name] for name in names]) @ times))]
        parts = dict.fromkeys(PARTS, 0.0)
        parts["weights"], parts["optimizer state"] = (sum(n) for n in zip((0, 0), *resident, strict=True))
        parts["weights"] += _cache_padding(held, problem)
        for (part, run, name), n in phase.alive.items():
            parts[part] += n * amounts[run, name]
        found.append(DeviceMemory(phase.name, {part: int(n) for part, n in parts.items()}))
    return found


def _cache_padding(held: Iterable[tuple[Layout, Shard]], problem: Problem) -> int:
    """Bytes that a device's caches take beyond `resident_bytes` of its shards. Negative if they take less.

    An op has one cache for all of its shards. It has whole sets of rows, each as wide as the widest shard
    with a cache (max_D_cache in FBGEMM's split_table_batched_embeddings_ops_training.py).
    """
    ops: dict[tuple[Layout, str], list[Shard]] = defaultdict(list)
    for layout, shard in held:
        if 0 < shard.table.load_factor < 1:
            ops[layout, shard.table.precision].append(shard)
    padding = 0
    for (_, precision), shards in ops.items():
        rows, widths = ([s.table.cached(s.rows) for s in shards], [s.width for s in shards])
        all_rows = -(-sum(rows) // CACHE_SET_ROWS) * CACHE_SET_ROWS
        each = PRECISION_BYTES[precision]
        padding += all_rows * (max(widths) * each + CACHED_ROW_BYTES) - sum(
            r * (w * each + Lookups.of(s.table, problem).cached_bytes)
            for s, r, w in zip(shards, rows, widths, strict=True))
    return padding


def used_bytes(plan: Plan, problem: Problem) -> list[int]:
    """[D] bytes that a plan takes on each device."""
    return [device.bytes for device in by_part(plan, problem)]


def _held(plan: Plan, problem: Problem) -> list[list[tuple[Layout, Shard]]]:
    """[D] the shards of each device, and how each runs."""
    held: list[list[tuple[Layout, Shard]]] = [[] for _ in problem.topology.devices]
    for placement in merged(plan.placements):
        layout = run_of(placement.kind, placement.shard.table)
        for device, shard in shards_on(placement):
            held[device].append((layout, shard))
    return held


def require_fits(plan: Plan, problem: Problem) -> list[int]:
    """[D] `used_bytes` of a plan. Raises Overfull, naming the device that has most too much.

    A device without a shard is not asked: a reserve larger than its memory keeps it out. Raises Infeasible
    for a host whose memory does not hold the rows of its devices.
    """
    used, may_hold = used_bytes(plan, problem), held_bytes(problem)
    _require_hosts_fit(plan, problem)
    holding = {device for placement in plan.placements for device in placement.devices}
    if not (too_much := {d: used[d] - may_hold[d] for d in sorted(holding) if used[d] > may_hold[d]}):
        return used
    device = max(too_much, key=too_much.__getitem__)
    parts = by_part(plan, problem)[device].parts
    largest = sorted(filter(parts.get, parts), key=lambda part: -parts[part])[:3]
    raise Overfull(f"device {device} of problem {problem.name!r} would hold {gib(used[device])} "
                   f"({', '.join(f'{part} {gib(parts[part])}' for part in largest)}); it may hold "
                   f"{gib(may_hold[device])}, {gib(too_much[device])} too little. It would fit with as much "
                   "more memory, or less reserved", too_much[device])


def fits(plan: Plan, problem: Problem) -> bool:
    """Whether `require_fits` takes a plan."""
    try:
        require_fits(plan, problem)
    except Infeasible:
        return False
    return True


def _require_hosts_fit(plan: Plan, problem: Problem) -> None:
    """Raise Infeasible, naming the first host with a tier of memory that does not hold its devices' rows."""
    topology = problem.topology
    for memory in topology.memory:
        on_device = [sum(host_bytes(shard, problem) for _, shard in held if shard.table.tier == memory.tier)
                     for held in _held(plan, problem)]
        for host, devices in zip(topology.hosts, topology.on_hosts, strict=True):
            if (taken := sum(on_device[d] for d in devices)) > memory.bytes:
                raise Infeasible(f"host {host!r} of problem {problem.name!r} would hold {gib(taken)} of rows "
                                 f"in {TIERS[memory.tier].words}; it may hold {gib(memory.bytes)} there, "
                                 f"{gib(taken - memory.bytes)} too little")


def gib(n_bytes: float) -> str:
    """A size for people, in GiB. MiB below 0.1 GiB, bytes below 0.1 MiB."""
    if abs(n_bytes) >= 0.1 * 2**30:
        return f"{n_bytes / 2**30:.1f} GiB"
    return f"{n_bytes / 2**20:.1f} MiB" if abs(n_bytes) >= 0.1 * 2**20 else f"{n_bytes:.0f} bytes"
