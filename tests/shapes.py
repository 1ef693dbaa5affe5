"""Short words for tests: topologies by their hosts, placements by their kinds, bytes by their channels.

Shapes: C channels, D devices.
"""

from dataclasses import replace

import numpy as np

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.step.kinds import CHANNELS, ID_CHANNELS, Channel, ShardingKind
from shardcore.step.lower import lower
from shardcore.step.memory import memory_account
from shardcore.step.scopes import WORLD

CHANNEL = {c.collective if c.group == WORLD else f"{c.collective}_{c.group}": c for c in CHANNELS}
"""Channels by collective, and group if that is not all devices: "all_to_all", "reduce_scatter_host"."""
ALL_TO_ALL, REDUCE_SCATTER, ALL_REDUCE = (Channel(c) for c in ("all_to_all", "reduce_scatter", "all_reduce"))
WITHIN, ACROSS = CHANNEL["reduce_scatter_host"], CHANNEL["all_to_all_cross"]
"""Channels of host_row."""
TO_TOWER = CHANNEL["all_to_all_host"]


def sends(**entering) -> np.ndarray:
    """[C, ..., D] bytes that enter the channels named; 0 for the others."""
    arrays = {CHANNEL[name]: np.asarray(x, dtype=float) for name, x in entering.items()}
    nothing = np.zeros(next(iter(arrays.values())).shape)
    return np.array([arrays.get(c, nothing) for c in CHANNELS])


def entering(found: np.ndarray) -> dict[str, list[float]]:
    """Bytes of the channels of outputs and gradients that run, by name, over all traffic slots of traffic [L C, D]."""
    found = found.reshape(-1, len(CHANNELS), found.shape[-1]).sum(0)
    return {
        name: found[CHANNELS.index(c)].tolist()
        for name, c in CHANNEL.items()
        if c not in ID_CHANNELS and found[CHANNELS.index(c)].any()
    }


def on_hosts(hosts: str, memory_bytes: int = 1 << 30, **fields) -> Topology:
    """A device for each letter, on a host of that name."""
    return Topology(tuple(Device(memory_bytes, host=h) for h in hosts), **fields)


def with_room(problem: Problem) -> Problem:
    """The problem with memory for the local batch, and what its devices have for shards."""
    whole = [column(t, 0) for t in problem.tables]
    more = int(memory_account(whole, problem).base.max()) + 1
    devices = tuple(replace(d, memory_bytes=d.memory_bytes + more) for d in problem.topology.devices)
    return replace(problem, topology=replace(problem.topology, devices=devices))


def column(table: Table, device: int, lo: int = 0, hi: int | None = None) -> Placement:
    """Columns [lo, hi) of a table, all of them if not said otherwise, on a device."""
    return Placement("column", Shard(table, 0, table.rows, lo, hi or table.dim), (device,))


def row(table: Table, topology: Topology) -> Placement:
    """Its rows divided over all devices."""
    return Placement("row", Shard.whole(table), topology.ranks)


def host_row(table: Table, devices, lo: int = 0, hi: int | None = None) -> Placement:
    """The rows of columns [lo, hi) divided over the devices of a host."""
    return Placement("host_row", Shard(table, 0, table.rows, lo, hi or table.dim), tuple(devices))


def replica(table: Table, topology: Topology) -> Placement:
    """On every device."""
    return Placement("data_parallel", Shard.whole(table), topology.ranks)


def arriving(plan: Plan, problem: Problem) -> dict[ShardingKind, np.ndarray]:
    """For each run of a plan that exchanges ids [D] bytes that each device receives in a step."""
    work = lower(plan, problem, fits=False)
    return {run: work.entering_bytes(run, run.ids) for run in work.traffic_slots if run.ids}
