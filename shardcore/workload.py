"""lower: what one training step of a plan does. The one place that knows how a plan executes.

A step, per device: look up (forward), exchange pooled outputs, [dense part], exchange their gradients, update (backward).
As in TorchRec, shards of a kind run as one fused FBGEMM op with one collective:

  kind         shards                      op runs over    forward           backward
  COLUMN       all rows, one device        global batch    all-to-all        all-to-all
  ROW          a row range, one device     global batch    reduce-scatter    all-gather
  REPLICATED   several devices             local batch     nothing           all-reduce of the dense gradient

Table-wise is COLUMN with one shard. Input ids also travel, but TorchRec's pipeline overlaps that with the previous batch's
compute, so a step does not wait for it and it is not part of the Workload.

Shapes: D devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from shardcore import memory
from shardcore.types import OUTPUT_BYTES, Plan, Problem, Shard, ShardCoreError, Topology

COLUMN, ROW, REPLICATED = "column", "row", "replicated"
KINDS = (COLUMN, ROW, REPLICATED)


@dataclass(frozen=True)
class Op:
    """Shards that run as one fused FBGEMM op over `batch` samples."""

    kind: str
    shards: tuple[Shard, ...]
    batch: int


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes per device and step that enter each collective: float arrays [..., D], leading dimensions for several plans at
    once. All 0 along D means that the collective does not run.

    all_to_all: pooled outputs of the device's COLUMN shards, global batch × their widths; backward moves as many gradients.
    reduce_scatter: partial outputs of its ROW shards, global batch × their widths; backward gathers as many.
    all_reduce: dense gradients of its REPLICATED shards, rows × widths.
    """

    all_to_all: np.ndarray
    reduce_scatter: np.ndarray
    all_reduce: np.ndarray

    @classmethod
    def of_columns(cls, all_to_all: np.ndarray) -> Traffic:
        """Traffic of plans that only have COLUMN shards."""
        all_to_all = np.asarray(all_to_all, dtype=float)
        return cls(all_to_all, np.zeros_like(all_to_all), np.zeros_like(all_to_all))


@dataclass(frozen=True, eq=False)
class Workload:
    """One step of a plan: per device its ops (D tuples, in the order of KINDS; devices that run the same shards share an Op), the
    traffic [D], the memory in bytes (D)."""

    ops: tuple[tuple[Op, ...], ...]
    traffic: Traffic
    memory_bytes: tuple[int, ...]
    topology: Topology
    global_batch: int


def kind_of(shard: Shard, devices: tuple[int, ...]) -> str:
    if len(devices) > 1:
        return REPLICATED
    return COLUMN if shard.full_rows else ROW


def lower(plan: Plan, problem: Problem) -> Workload:
    """The Workload of a plan. Raises ShardCoreError where the plan does not cover the problem's tables exactly once or names
    a device that is not there, or breaks a constraint; Infeasible where a device would hold more than it may."""
    require_cover(plan, problem)
    require_constraints(plan, problem)
    used = memory.require_fits(plan, problem)
    n_devices = len(problem.topology)
    groups: dict[tuple[int, str], list[Shard]] = defaultdict(list)
    for placement in plan.placements:
        for device in placement.devices:
            groups[device, kind_of(placement.shard, placement.devices)].append(placement.shard)
    batch = {COLUMN: problem.global_batch, ROW: problem.global_batch, REPLICATED: problem.local_batch}
    of: dict[str, list[Op]] = {kind: [] for kind in KINDS}
    for kind, d in product(KINDS, range(n_devices)):
        op = Op(kind, tuple(groups[d, kind]), batch[kind])
        of[kind].append(of[kind][-1] if of[kind] and of[kind][-1].shards == op.shards else op)

    def output_bytes(kind: str) -> np.ndarray:
        return np.array([problem.global_batch * OUTPUT_BYTES * sum(s.width for s in op.shards) for op in of[kind]], dtype=float)

    gradient_bytes = {id(op): OUTPUT_BYTES * sum(s.rows * s.width for s in op.shards) for op in of[REPLICATED]}
    traffic = Traffic(all_to_all=output_bytes(COLUMN), reduce_scatter=output_bytes(ROW),
                      all_reduce=np.array([gradient_bytes[id(op)] for op in of[REPLICATED]], dtype=float))
    ops = tuple(tuple(op for op in (of[kind][d] for kind in KINDS) if op.shards) for d in range(n_devices))
    return Workload(ops, traffic, tuple(used), problem.topology, problem.global_batch)


def require_plan(plan: Plan, problem: Problem, fits: bool = True) -> None:
    """Raise what `lower` raises; without `fits`, all but Infeasible."""
    require_cover(plan, problem)
    require_constraints(plan, problem)
    if fits:
        memory.require_fits(plan, problem)


def require_cover(plan: Plan, problem: Problem) -> None:
    """Raise ShardCoreError unless every cell of every table is placed exactly once, on devices that exist."""
    n_devices = len(problem.topology)
    by_table: dict[str, list[Shard]] = defaultdict(list)
    known = {t.name: t for t in problem.tables}
    for placement in plan.placements:
        shard = placement.shard
        found = known.get(shard.table.name)
        if found is not shard.table and found != shard.table:
            raise ShardCoreError(f"plan places table {shard.table.name!r}, which problem {problem.name!r} does not have "
                                 "(or not with this shape and these statistics)")
        if max(placement.devices) >= n_devices:
            raise ShardCoreError(f"plan places {shard.label} on device {max(placement.devices)}; "
                                 f"problem {problem.name!r} has devices 0 to {n_devices - 1}")
        by_table[shard.table.name].append(shard)
    for table in problem.tables:
        shards = by_table[table.name]
        placed = sum(s.rows * s.width for s in shards)
        if overlap := _overlapping(shards):
            raise ShardCoreError(f"plan places cells twice: {overlap[1].label} and {overlap[0].label}")
        if placed != table.rows * table.dim:
            raise ShardCoreError(f"plan places {placed} of the {table.rows * table.dim} cells of table {table.name!r}")


def require_constraints(plan: Plan, problem: Problem) -> None:
    """Raise ShardCoreError unless the tables that must stay whole are, all live only where they may, and those that are kept
    together are on one device."""
    if not problem.whole and not problem.pinned:
        return
    homes: dict[tuple[str, ...], tuple[str, tuple[int, ...]]] = {}
    for placement in plan.placements:
        shard, devices, name = placement.shard, placement.devices, placement.shard.table.name
        if name in problem.whole and shard != Shard.whole(shard.table):
            raise ShardCoreError(f"plan cuts table {name!r}, one part being {shard.label}; it must stay whole "
                                 f"({problem.kept_whole_by(name)})")
        allowed = problem.pinned.get(name, devices)
        for wrong in (d for d in devices if d not in allowed):
            raise ShardCoreError(f"plan places {shard.label} on device {wrong}; table {name!r} may live on "
                                 f"{device_names(allowed)} alone (constraints.pinned)")
        if name in problem.bundle_of:
            other, home = homes.setdefault(problem.bundle_of[name], (name, devices))
            if len(devices) > 1 or devices != home:
                raise ShardCoreError(f"plan places table {name!r} on {device_names(devices)} and {other!r} on "
                                     f"{device_names(home)}; they need to be together on one (constraints.together)")


def device_names(devices: Sequence[int]) -> str:
    """Devices for people, the first few of many."""
    shown = ", ".join(map(str, devices[:8])) + (f" and {len(devices) - 8} more" if len(devices) > 8 else "")
    return f"device{'s' * (len(devices) > 1)} {shown}"


def _overlapping(shards: Sequence[Shard]) -> tuple[Shard, Shard] | None:
    """Two that share cells. Where row ranges are the same or apart, as in all plans of ours, only neighbours can."""
    if len(shards) == 1:
        return None
    ordered = sorted(shards, key=lambda s: (s.row_lo, s.row_hi, s.col_lo))
    neighbours = list(zip(ordered[1:], ordered, strict=False))
    if any(a.row_lo < b.row_hi and (a.row_lo, a.row_hi) != (b.row_lo, b.row_hi) for a, b in neighbours):
        neighbours = [(a, b) for i, a in enumerate(shards) for b in shards[:i]]
    return next(((a, b) for a, b in neighbours if _overlap(a, b)), None)


def _overlap(a: Shard, b: Shard) -> bool:
    return a.row_lo < b.row_hi and b.row_lo < a.row_hi and a.col_lo < b.col_hi and b.col_lo < a.col_hi
