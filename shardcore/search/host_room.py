"""Plans whose tables with rows in host memory fit in the memory of their hosts.

Searches count device memory only. So where a plan takes more of a host than there is, such tables are dealt
to hosts first, and the search is asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible
from shardcore.memory import host_bytes
from shardcore.search.budget import Budget
from shardcore.search.shards import on_all_devices
from shardcore.types import Plan, Problem, Shard


def within_host_memory(sharder: Callable[..., Plan]) -> Callable[..., Plan]:
    """A sharder that searches again, with tables in host memory pinned to hosts, if it finds no plan.

    Each of both searches has half of the seconds. Raises Infeasible as the first search did.
    """

    @wraps(sharder)
    def search(problem: Problem, model: CostModel, *, budget: Budget | None = None, **given: Any) -> Plan:
        pinned = dealt(problem)
        if pinned is None:
            return sharder(problem, model, budget=budget, **given)
        half = budget and budget.part(0.5)
        try:
            return sharder(problem, model, budget=half, **given)
        except Infeasible as error:
            try:
                return sharder(pinned, model, budget=half, **given)
            except Infeasible:
                raise error from None

    return search


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
    units = {group[0]: n for group in groups
             if (n := sum(takes[name] for name in group)) and not bound.intersection(group)}
    pinned = []
    for name in sorted(units, key=lambda name: -units[name]):
        host = int(np.argmax(room))
        room[host] -= units[name]
        pinned.append((name, topology.on_hosts[host]))
    if not pinned or room.min() < 0:
        return None
    return replace(problem, constraints=replace(asked, pinned=(*asked.pinned, *pinned)))
