"""lower: turn a plan into what one training step does.

Devices send each other the ids to look up (see inputs.py).
Each device then looks up rows (forward) and exchanges pooled outputs.
After the dense part it exchanges their gradients and updates rows (backward).
As in TorchRec, the shards of a kind run as one fused FBGEMM op with its collectives (see layouts).

Shapes: C channels (layouts.CHANNELS), D devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardcore import memory
from shardcore.errors import ShardCoreError
from shardcore.inputs import expected_bytes
from shardcore.job import Job
from shardcore.layouts import (
    CHANNELS,
    ID_ROWS,
    RUNS,
    Channel,
    Layout,
    device_names,
    layout_of,
    require_placement,
    run_of,
    shards_on,
    shared_on_hosts,
)
from shardcore.outputs import output_bytes
from shardcore.topology import Topology
from shardcore.types import Plan, Problem, Shard


@dataclass(frozen=True)
class Op:
    """Shards that run as one fused FBGEMM op.

    kind: of sharding.
    shards: in the op. All of their tables are pooled, or none.
    batch: samples it runs over.
    """

    kind: str
    shards: tuple[Shard, ...]
    batch: int


@dataclass(frozen=True, eq=False)
class Workload:
    """One step of a plan.

    ops: (D tuples) of each device, in the order of LAYOUTS. Devices that run the same shards share an Op.
    traffic: [C, D] bytes that enter each channel; of layouts.ID_CHANNELS, bytes that arrive.
        All 0 along D means that its collective does not run.
    memory_bytes: (D) bytes held on each device.
    topology: the devices and links.
    global_batch: samples of a step.
    job: how a step runs around the embeddings.
    """

    ops: tuple[tuple[Op, ...], ...]
    traffic: np.ndarray
    memory_bytes: tuple[int, ...]
    topology: Topology
    global_batch: int
    job: Job = Job()


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
    held: dict[tuple[Layout, int], list[Shard]] = defaultdict(list)
    for placement in plan.placements:
        run = run_of(placement.kind, placement.shard.table)
        for device, shard in shards_on(placement):
            held[run, device].append(shard)
    ops: list[list[Op]] = [[] for _ in range(n_devices)]
    traffic = np.zeros((len(CHANNELS), n_devices))
    for layout in RUNS:
        last, entering = None, np.zeros(len(CHANNELS))
        for device in (d for d in range(n_devices) if held[layout, d]):
            shards = tuple(held[layout, device])
            # Devices of a replicated kind run the same shards. They share an Op, so that it is priced once.
            if last is None or last.shards != shards:
                last = Op(layout.name, shards, layout.batch(problem))
                entering = entering_bytes(layout, shards, problem)
            ops[device].append(last)
            traffic[:, device] += entering
    traffic[ID_ROWS] = expected_bytes(plan, problem)
    return Workload(tuple(map(tuple, ops)), shared_on_hosts(traffic, problem), tuple(used), problem.topology,
                    problem.global_batch, problem.job)


def entering_bytes(layout: Layout, shards: tuple[Shard, ...], problem: Problem) -> np.ndarray:
    """[C] bytes that a device's shards of a kind enter into each channel.

    With towers, what crosses hosts is not yet divided over the host (layouts.shared_on_hosts)."""
    outputs = [output_bytes(s, problem.global_batch) for s in shards]
    of_channel = {c: sum(b(s.bytes, o, problem) for s, o in zip(shards, outputs, strict=True))
                  for c, b in layout.channels_in(problem).items()}
    return np.array([float(of_channel.get(c, 0)) for c in CHANNELS])


def traffic_of_outputs(outputs: Mapping[Layout, np.ndarray], problem: Problem,
                       id_bytes: Mapping[Channel, np.ndarray] | None = None) -> np.ndarray:
    """[C, ..., D] bytes that enter each channel, if devices have bytes of outputs [..., D] of some kinds.

    id_bytes: [..., D] bytes of ids and lengths that devices receive by each of layouts.ID_CHANNELS.

    Only for kinds whose channels carry outputs.
    """
    shape = next(iter(outputs.values())).shape
    traffic = np.zeros((len(CHANNELS), *shape))
    for channel, n_bytes in (id_bytes or {}).items():
        traffic[CHANNELS.index(channel)] = n_bytes
    for layout, n_bytes in outputs.items():
        for channel, entering in layout.channels_in(problem).items():
            # 0 bytes of weights: outputs do not depend on them.
            traffic[CHANNELS.index(channel)] += entering(0, n_bytes, problem)
    return shared_on_hosts(traffic, problem)


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
