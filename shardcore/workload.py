"""lower: turn a plan into what one training step does.

Each device looks up rows (forward) and exchanges pooled outputs.
After the dense part it exchanges their gradients and updates rows (backward).
As in TorchRec, the shards of a kind run as one fused FBGEMM op with its collectives (see layouts).

Input ids also travel. TorchRec's pipeline overlaps that with the previous batch's compute.
So a step does not wait for it, and a Workload does not contain it.

Shapes: C channels (layouts.CHANNELS), D devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardcore import memory
from shardcore.errors import ShardCoreError
from shardcore.layouts import CHANNELS, LAYOUTS, Layout, device_names, layout_of, require_placement, shards_on
from shardcore.topology import Topology
from shardcore.types import Plan, Problem, Shard


@dataclass(frozen=True)
class Op:
    """Shards that run as one fused FBGEMM op.

    kind: of sharding.
    shards: in the op.
    batch: samples it runs over.
    """

    kind: str
    shards: tuple[Shard, ...]
    batch: int


@dataclass(frozen=True, eq=False)
class Workload:
    """One step of a plan.

    ops: (D tuples) of each device, in the order of LAYOUTS. Devices that run the same shards share an Op.
    traffic: [C, D] bytes that enter each channel. All 0 along D means that its collective does not run.
    memory_bytes: (D) bytes held on each device.
    topology: the devices and links.
    global_batch: samples of a step.
    """

    ops: tuple[tuple[Op, ...], ...]
    traffic: np.ndarray
    memory_bytes: tuple[int, ...]
    topology: Topology
    global_batch: int


def lower(plan: Plan, problem: Problem, fits: bool = True) -> Workload:
    """The Workload of a plan.

    Raises ShardCoreError if the plan does not cover the problem's tables exactly once.
    Raises it too for a placement that its kind does not allow, and for a broken constraint.
    Raises Infeasible if a device would hold more than it may, unless `fits` is False.
    """
    require_cover(plan, problem)
    require_constraints(plan, problem)
    used = (memory.require_fits if fits else memory.used_bytes)(plan, problem)
    n_devices = len(problem.topology)
    held: dict[tuple[str, int], list[Shard]] = defaultdict(list)
    for placement in plan.placements:
        for device, shard in shards_on(placement):
            held[placement.kind, device].append(shard)
    ops: list[list[Op]] = [[] for _ in range(n_devices)]
    traffic = np.zeros((len(CHANNELS), n_devices))
    for kind, layout in LAYOUTS.items():
        last, entering = None, np.zeros(len(CHANNELS))
        for device in (d for d in range(n_devices) if held[kind, d]):
            shards = tuple(held[kind, device])
            # Devices of a replicated kind run the same shards. They share an Op, so that it is priced once.
            if last is None or last.shards != shards:
                last = Op(kind, shards, layout.batch(problem))
                entering = entering_bytes(layout, shards, problem)
            ops[device].append(last)
            traffic[:, device] += entering
    return Workload(tuple(map(tuple, ops)), traffic, tuple(used), problem.topology, problem.global_batch)


def entering_bytes(layout: Layout, shards: tuple[Shard, ...], problem: Problem) -> np.ndarray:
    """[C] bytes that a device's shards of a kind enter into each channel."""
    of_channel = {c: sum(b(s.rows, s.width, problem) for s in shards) for c, b in layout.channels.items()}
    return np.array([float(of_channel.get(c, 0)) for c in CHANNELS])


def traffic_of_widths(widths: Mapping[Layout, np.ndarray], problem: Problem) -> np.ndarray:
    """[C, ..., D] bytes that enter each channel, if devices hold columns [..., D] of some kinds.

    Only for kinds whose channels carry pooled outputs, as these do not depend on rows.
    """
    shape = next(iter(widths.values())).shape
    traffic = np.zeros((len(CHANNELS), *shape))
    for layout, width in widths.items():
        for channel, entering in layout.channels.items():
            # 0 rows: pooled outputs do not depend on them.
            traffic[CHANNELS.index(channel)] += entering(0, width, problem)
    return traffic


def require_plan(plan: Plan, problem: Problem, fits: bool = True) -> None:
    """Raise what `lower` raises. Without `fits`, everything except Infeasible."""
    require_cover(plan, problem)
    require_constraints(plan, problem)
    if fits:
        memory.require_fits(plan, problem)


def require_cover(plan: Plan, problem: Problem) -> None:
    """Raise ShardCoreError unless every cell of every table is placed exactly once.

    Placements have to be possible for their kind, on devices that exist.
    """
    by_table: dict[str, list[Shard]] = defaultdict(list)
    known = {t.name: t for t in problem.tables}
    for placement in plan.placements:
        shard = placement.shard
        found = known.get(shard.table.name)
        if found is not shard.table and found != shard.table:
            raise ShardCoreError(f"plan places table {shard.table.name!r}, "
                                 f"which problem {problem.name!r} does not have "
                                 "(or not with this shape and these statistics)")
        require_placement(placement, problem)
        by_table[shard.table.name].append(shard)
    for table in problem.tables:
        # Shards of a table have all rows. So they overlap only if their columns do.
        shards = sorted(by_table[table.name], key=lambda s: s.col_lo)
        for left, right in zip(shards, shards[1:], strict=False):
            if right.col_lo < left.col_hi:
                raise ShardCoreError(f"plan places cells twice: {left.label} and {right.label}")
        # No cell twice, and the right number of cells: so every cell once.
        placed = sum(s.rows * s.width for s in shards)
        if placed != table.rows * table.dim:
            raise ShardCoreError(f"plan places {placed} of the {table.rows * table.dim} cells of table "
                                 f"{table.name!r}")


def require_constraints(plan: Plan, problem: Problem) -> None:
    """Raise ShardCoreError if the plan breaks a constraint.

    Tables that must stay whole are whole. All live only where they may. Bundles are on one device.
    """
    # Most problems have no constraints.
    if not problem.whole and not problem.pinned:
        return
    homes: dict[tuple[str, ...], tuple[str, tuple[int, ...]]] = {}
    for placement in plan.placements:
        shard, devices, name = placement.shard, placement.devices, placement.shard.table.name
        divided = layout_of(placement.kind).divides_rows and len(devices) > 1
        if name in problem.whole and (divided or shard != Shard.whole(shard.table)):
            one = next(s for _, s in shards_on(placement))
            raise ShardCoreError(f"plan cuts table {name!r}, one shard being {one.label}; it must stay whole "
                                 f"({problem.kept_whole_by(name)})")
        allowed = problem.pinned.get(name, devices)
        for wrong in (d for d in devices if d not in allowed):
            raise ShardCoreError(f"plan places {shard.label} on device {wrong}; table {name!r} may only live "
                                 f"on {device_names(allowed)} (constraints.pinned)")
        if name in problem.bundle_of:
            other, home = homes.setdefault(problem.bundle_of[name], (name, devices))
            if len(devices) > 1 or devices != home:
                raise ShardCoreError(f"plan places table {name!r} on {device_names(devices)} and "
                                     f"{other!r} on "
                                     f"{device_names(home)}; "
                                     "they need to be together on one (constraints.together)")
