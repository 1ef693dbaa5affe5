"""Tables with rows in host memory, dealt to hosts so that they fit there. For packings, which count devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardcore.core.types import Problem, Shard
from shardcore.search.state.shards import on_all_devices
from shardcore.step.memory import host_bytes


def dealt(problem: Problem) -> Problem | None:
    """The problem with its tables in host memory pinned to hosts: the largest first, where most room is.

    Tables that constraints keep together are dealt as one. Those that are pinned, or of a fixed kind, stay as
    they are. None: there is nothing to deal, or they do not fit so.
    """
    topology, asked = problem.topology, problem.constraints
    if not topology.memory or len(topology.hosts) == 1:
        return None
    takes = {t.name: host_bytes(Shard.whole(t), problem) for t in problem.tables}
    room = np.full(len(topology.hosts), float(topology.memory[0].bytes))
    for name, devices in problem.pinned.items():
        room -= [takes[name] * (set(devices) <= set(host)) for host in topology.on_hosts]
    bound = {*problem.pinned, *(t.name for t in problem.tables if on_all_devices(t, problem))}
    kept = {name for group in asked.together for name in group}
    groups = [*asked.together, *((t.name,) for t in problem.tables if t.name not in kept)]
    units = {
        group[0]: n
        for group in groups
        if (n := sum(takes[name] for name in group)) and not bound.intersection(group)
    }
    pinned = []
    for name in sorted(units, key=lambda name: -units[name]):
        host = int(np.argmax(room))
        room[host] -= units[name]
        pinned.append((name, topology.on_hosts[host]))
    if not pinned or room.min() < 0:
        return None
    return replace(problem, constraints=replace(asked, pinned=(*asked.pinned, *pinned)))
