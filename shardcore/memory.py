"""What a plan takes of a device's memory in a training step, by part.

Weights and optimizer state are always there. What else lives at once depends on the phase of the step
(phases.py), as TorchRec runs it under TrainPipelineSparseDist. A device needs what the largest phase takes.
The buffers in which FBGEMM's CUDA kernels sort are given, from its source. Scratch of its CPU kernels is not
counted.

A plan fits if what it takes (`used_bytes`) is there (`require_fits`). Searches add up bytes of shards. So of
each shard they count its own largest phase (`bytes_as`), and of the tables' own share the largest too
(`free_bytes`). On two devices that is never less than a plan takes: the largest of sums is at most the sum of
the largest. On more, ids of cut and divided tables are on every device, but count on some: so it may be less
where ids dominate. Then a sharder searches again (search/true_memory.py).

Shapes: D devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardcore.errors import Infeasible, Overfull
from shardcore.fused import DENSE_OPTIMIZERS, OPTIMIZERS
from shardcore.inputs import received_bytes, sample_bytes
from shardcore.job import PAYLOADS, Job
from shardcore.layouts import WHOLE_ROWS, Layout, layout_of, run_of, shards_on
from shardcore.outputs import output_bytes, table_output_rows
from shardcore.phases import EXCHANGED, PHASES, TIMES
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
MAPPED_ROW_BYTES = 4
"""Bytes a row of a table with a cache, cached or not, in device memory: FBGEMM's map of rows to tables."""
SORTING_BYTES = 52
"""Bytes a lookup that FBGEMM's CUDA backward needs to sort rows. Given, not measured.

8 each for linear indices, sorted ones and unique ones. 4 each for infos, sorted infos, run lengths and their
sums. 12 for the radix sort's second copy. Source: transpose_embedding_input in FBGEMM.
"""


@dataclass(frozen=True)
class DeviceMemory:
    """What one device needs.

    phase: the one of PHASES that takes most.
    parts: bytes of each of PARTS then, 0 included.
    """

    phase: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


# --- amounts ----------------------------------------------------------------------------------------------


def resident_bytes(layout: Layout, shard: Shard, problem: Problem) -> tuple[int, int]:
    """Bytes of a shard's weights in device memory, with its cache, and of its optimizer's state there."""
    a_cell, a_row = STATE_BYTES[problem.optimizer]
    if shard.table.in_host_memory:
        cached, of = shard.table.cached(shard.rows), Lookups.of(shard.table, problem)
        weights = cached * (shard.width * of.weight_bytes + of.cached_bytes) + shard.rows * of.mapped_bytes
        return weights, shard.rows * a_row
    if layout.dense_gradient:
        # Torch's optimizers keep state of the weights' type.
        dense, each = DENSE_OPTIMIZERS[problem.replica_optimizer], PRECISION_BYTES[shard.table.precision]
        a_cell, a_row = dense.state_bytes("cell", each), dense.state_bytes("row", each)
    return shard.bytes, shard.rows * (shard.width * a_cell + a_row)


def host_bytes(shard: Shard, problem: Problem) -> int:
    """Bytes of a shard in its host's memory: all of its weights, and the optimizer's state of cells.

    Source: FBGEMM allocates both as UVM. State of rows is in device memory.
    """
    if not shard.table.in_host_memory:
        return 0
    a_cell, _ = STATE_BYTES[problem.optimizer]
    return shard.bytes + shard.rows * shard.width * a_cell


def shard_amounts(layout: Layout, shard: Shard, problem: Problem) -> dict[str, float]:
    """Bytes of each amount of a shard. The names are those in phases.PHASES."""
    if layout.local_batch:
        return {"dense": shard.bytes * layout.dense_gradient}
    lookups = problem.global_batch * shard.table.looked_up * access_share(shard)
    outputs = output_bytes(shard, problem.global_batch)
    found: dict[str, float] = {}
    for channel, entering in layout.channels.items():
        found |= _travelling(f"{channel.collective} {channel.group}",
                             entering(shard.bytes, outputs, problem), problem.job)
    return found | {"arrived": received_bytes(shard, problem), "sorting": lookups * _sorting_bytes(problem)}


def _travelling(name: str, n_bytes: float, job: Job, cast: str = "forward_payload") -> dict[str, float]:
    """An amount, as it travels, and its casts. cast: the payload for which they are made."""
    there, back, share = (PAYLOADS[payload] / OUTPUT_BYTES for payload in (
        job.forward_payload, job.backward_payload, getattr(job, cast)))
    return {name: n_bytes, f"{name} there": n_bytes * there, f"{name} back": n_bytes * back,
            f"{name} cast": n_bytes * share * (share < 1), f"{name} clamped": n_bytes * (share < 1)}


@lru_cache(maxsize=4)
def batch_amounts(problem: Problem) -> Mapping[str, float]:
    """Bytes of each amount of a local batch, if no table is cut or divided."""
    local = problem.local_batch
    ids = local * sum(sample_bytes(t, problem.job) for t in problem.tables)
    outputs = OUTPUT_BYTES * sum(t.dim * table_output_rows(t, local) for t in problem.tables)
    there = PAYLOADS[problem.job.forward_payload] / OUTPUT_BYTES
    return {"batch": ids, "permuted": ids, "received": outputs, "joined": outputs, "cut": outputs,
            "arriving": outputs * there, "replicated": outputs,
            **_travelling("ordered", outputs, problem.job, "backward_payload")}


def placed_amounts(plan: Plan, problem: Problem) -> dict[str, float]:
    """Bytes of each amount of a local batch under a plan."""
    local, of_all = problem.local_batch, batch_amounts(problem)
    found = Counter({name: of_all[name] for name in ("batch", "received")})
    received: dict[Layout, float] = Counter()
    # Several columns of a table on a device are one shard in TorchRec.
    places = {(p.kind, p.shard.table, p.devices): p for p in plan.placements}
    for placement in places.values():
        layout, table = layout_of(placement.kind), placement.shard.table
        found["permuted"] += local * sample_bytes(table, problem.job)
        if layout.divides_rows:
            ranges = len(placement.devices)
            found["bucketized"] += local * sample_bytes(table, problem.job, ranges=ranges)
    for placement in plan.placements:
        shard = placement.shard
        received[run_of(placement.kind, shard.table)] += (
            OUTPUT_BYTES * shard.width * table_output_rows(shard.table, local))
    ordered = arriving = scattered = 0.0
    for layout, n_bytes in received.items():
        collectives = {channel.collective for channel in layout.channels}
        if layout.local_batch:
            found["replicated"] += n_bytes
        # Kinds run one after another.
        elif "all_to_all" in collectives:
            ordered, arriving = max(ordered, n_bytes), arriving + n_bytes
        elif "reduce_scatter" in collectives:
            scattered += n_bytes
    found["stepped"] = max(_stepped(layout_of(p.kind), p.shard, problem) for p in plan.placements)
    cut = any(p.shard.width < p.shard.table.dim for p in plan.placements)
    found["arriving"] = arriving * PAYLOADS[problem.job.forward_payload] / OUTPUT_BYTES
    found["joined"], found["cut"] = ordered * (cut or len(received) > 1), ordered * cut
    return (found | _travelling("scattered", scattered, problem.job, "backward_payload")
            | _travelling("ordered", ordered, problem.job, "backward_payload"))


def _sorting_bytes(problem: Problem) -> int:
    """Bytes a lookup. Hardware that is not named counts as a GPU."""
    return 0 if (problem.topology.hardware or "").startswith("cpu") else SORTING_BYTES


@lru_cache(maxsize=16)
def _of_columns(job: Job) -> tuple[tuple[float, float, float], ...]:
    """The same for shards with all rows: of ids that arrive, of outputs, and of sorting."""
    outputs = _travelling(EXCHANGED, 1, job)
    return tuple({(times["arrived"], sum(n * times[name] for name, n in outputs.items()), times["sorting"])
                  for times in TIMES.values()})


def _most(amounts: Mapping[str, float]) -> int:
    """Bytes of these amounts in the phase that takes most of them."""
    return math.ceil(max(sum(n * amounts.get(name, 0) for name, n in times.items())
                         for times in TIMES.values()))


# --- what searches add up ---------------------------------------------------------------------------------


def bytes_as(layout: Layout, shard: Shard, problem: Problem) -> int:
    """Bytes of one device's part of a shard, run as this kind, in its own largest phase."""
    if layout.name == WHOLE_ROWS.name and shard.full_rows:
        return table_bytes(shard.table, problem, shard.width)
    return (sum(resident_bytes(layout, shard, problem))
            + _most(shard_amounts(layout, shard, problem) | _sent_again(layout, shard, problem)))


def _sent_again(layout: Layout, shard: Shard, problem: Problem) -> dict[str, float]:
    """What a cut or divided shard adds to a local batch. Every device has that, but it counts here only."""
    # Of the group, not of the rows: the last range may be short.
    ranges = len(layout.groups(problem.topology)[0]) if layout.divides_rows else 1
    again = problem.local_batch * sample_bytes(shard.table, problem.job, ranges=ranges)
    return {"permuted": again * (shard.width < shard.table.dim and not layout.local_batch),
            "bucketized": again * (ranges > 1), "stepped": _stepped(layout, shard, problem)}


def _stepped(layout: Layout, shard: Shard, problem: Problem) -> int:
    return shard.bytes * layout.dense_gradient * DENSE_OPTIMIZERS[problem.replica_optimizer].scratch


def table_bytes(table: Table, problem: Problem, width: int | None = None) -> int:
    """`bytes_as` of a whole table on a device, or of some of its columns. Faster than to create a Shard."""
    return int(columns_bytes(Lookups.of(table, problem), table.rows, width or table.dim, table.dim, problem))


class Lookups(NamedTuple):
    """What a table's lookups take. Numbers, or arrays of them for several tables.

    pooling: lookups a sample.
    sample_bytes: of ids and lengths of a sample.
    outputs: rows of outputs of the global batch.
    weight_bytes: of a weight.
    cached: rows in device memory, of all rows.
    cached_bytes: of a cached row beside its weights. 0 without a cache.
    mapped_bytes: of a row, cached or not, for there is a cache.
    in_host: 1 where rows, and state of cells, are in host memory. Else 0.
    """

    pooling: Any
    sample_bytes: Any
    outputs: Any
    weight_bytes: Any
    cached: Any
    cached_bytes: Any
    mapped_bytes: Any
    in_host: Any

    @classmethod
    def of(cls, table: Table, problem: Problem) -> Lookups:
        return cls(table.looked_up, sample_bytes(table, problem.job),
                   table_output_rows(table, problem.global_batch), PRECISION_BYTES[table.precision],
                   table.cached(table.rows), CACHED_ROW_BYTES * table.in_host_memory,
                   MAPPED_ROW_BYTES * (0 < table.load_factor < 1), int(table.in_host_memory))

    @classmethod
    def of_all(cls, tables: Iterable[Table], problem: Problem) -> Lookups:
        """Of several tables, as arrays."""
        each = [cls.of(table, problem) for table in tables]
        return cls(*np.array(each, dtype=float).reshape(-1, len(cls._fields)).T)


def columns_bytes(lookups: Lookups, rows: Any, width: Any, dim: Any, problem: Problem) -> Any:
    """Bytes of `width` of `dim` columns, with all rows. Numbers, or arrays of them."""
    a_cell, a_row = STATE_BYTES[problem.optimizer]
    resident = (lookups.cached * (width * lookups.weight_bytes + lookups.cached_bytes)
                + rows * (width * a_cell * (1 - lookups.in_host) + lookups.mapped_bytes + a_row))
    arrived = problem.global_batch * lookups.sample_bytes
    outputs = lookups.outputs * OUTPUT_BYTES * width
    permuted = 2 * problem.local_batch * lookups.sample_bytes * (width < dim)
    sorting = problem.global_batch * lookups.pooling * _sorting_bytes(problem)
    phases = [a * arrived + o * outputs + s * sorting for a, o, s in _of_columns(problem.job)]
    if isinstance(resident, np.ndarray):
        return resident + np.ceil(np.maximum.reduce(phases) + permuted)
    return resident + math.ceil(max(phases) + permuted)


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


def every_plan_bytes(problem: Problem) -> int:
    """Bytes that searches count on each device whatever the plan is: a local batch and its outputs."""
    return _most(batch_amounts(problem))


def held_bytes(problem: Problem) -> list[int]:
    """[D] bytes that embeddings may take, their inputs and outputs included: all but what is reserved."""
    return [d.memory_bytes - problem.constraints.reserved_bytes for d in problem.topology.devices]


# --- what a plan takes ------------------------------------------------------------------------------------


def by_part(plan: Plan, problem: Problem) -> list[DeviceMemory]:
    """[D] what a plan takes on each device, by part."""
    of_all, found = placed_amounts(plan, problem), []
    for held in _held(plan, problem):
        resident = [resident_bytes(layout, shard, problem) for layout, shard in held]
        amounts = Counter(of_all)
        for layout, shard in held:
            amounts.update(shard_amounts(layout, shard, problem))
        phase = max(PHASES, key=lambda p: sum(n * amounts[name] for name, n in TIMES[p].items()))
        parts = dict.fromkeys(PARTS, 0)
        parts["weights"], parts["optimizer state"] = (sum(n) for n in zip((0, 0), *resident, strict=True))
        parts |= {part: int(sum(n * amounts[name] for name, n in counts.items()))
                  for part, counts in PHASES[phase].items()}
        found.append(DeviceMemory(phase, parts))
    return found


def used_bytes(plan: Plan, problem: Problem) -> list[int]:
    """[D] bytes that a plan takes on each device."""
    return [device.bytes for device in by_part(plan, problem)]


def _held(plan: Plan, problem: Problem) -> list[list[tuple[Layout, Shard]]]:
    """Of each device its shards. Several columns of a table on a device are one shard in TorchRec."""
    held: list[dict[Any, tuple[Layout, Shard]]] = [{} for _ in problem.topology.devices]
    for placement in plan.placements:
        layout = run_of(placement.kind, placement.shard.table)
        for device, shard in shards_on(placement):
            key = layout.name, shard.table.name, shard.row_lo
            if key in held[device]:
                shard = replace(shard, col_lo=0, col_hi=shard.width + held[device][key][1].width)
            held[device][key] = layout, shard
    return [list(shards.values()) for shards in held]


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


def _require_hosts_fit(plan: Plan, problem: Problem) -> None:
    """Raise Infeasible, naming the first host whose memory does not hold the rows of its devices."""
    if not problem.topology.gives_host_memory:
        return
    on_device = [sum(host_bytes(shard, problem) for _, shard in held) for held in _held(plan, problem)]
    may_hold = problem.topology.host_memory_bytes
    for host, devices in zip(problem.topology.hosts, problem.topology.on_hosts, strict=True):
        if (taken := sum(on_device[d] for d in devices)) > may_hold:
            raise Infeasible(f"host {host!r} of problem {problem.name!r} would hold {gib(taken)} of rows; it "
                             f"may hold {gib(may_hold)} (host_memory_bytes), {gib(taken - may_hold)} too "
                             "little")


def gib(n_bytes: float) -> str:
    """A size for people, in GiB. MiB below 0.1 GiB, bytes below 0.1 MiB."""
    if abs(n_bytes) >= 0.1 * 2**30:
        return f"{n_bytes / 2**30:.1f} GiB"
    return f"{n_bytes / 2**20:.1f} MiB" if abs(n_bytes) >= 0.1 * 2**20 else f"{n_bytes:.0f} bytes"
