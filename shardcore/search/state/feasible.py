"""Feasibility: the first step of every sharder.

Tables that no device can hold are cut. Problems without a plan are refused with a reason and a remedy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.types import Plan, Problem, Shard
from shardcore.core.validation import require
from shardcore.search.state.cuts import cuts_of
from shardcore.search.state.packing import roomiest
from shardcore.search.state.refusal import refusal
from shardcore.search.state.shards import division, on_all_devices, why_not
from shardcore.step.kinds import LAYOUTS, WHOLE_ROWS, shards_on
from shardcore.step.memory import fits, host_bytes, require_fits
from shardcore.step.op_limits import may_bind, require_ops


def feasible_shards(problem: Problem) -> list[Shard]:
    """The shards to start from. Every table is whole, unless no device where it may live can hold it.

    Such a table is halved by columns until its shards fit.
    If its narrowest columns are still too large, its rows are divided (`division`).
    Sequences are divided by rows at once where that is possible, and else cut into equal parts.
    Tables in problem.whole are never cut. Those of `fixed_placements` are not among them.

    Raises Infeasible if there is no plan that fits (`fitting`), and ShardCoreError for a table that FBGEMM or
    the job's codecs cannot run where it may live.
    """
    return list(_feasible_shards(problem))


@lru_cache(maxsize=4)  # several searches of a problem begin with them
def _feasible_shards(problem: Problem) -> tuple[Shard, ...]:
    cuts = cuts_of(problem)  # raises ShardCoreError for a table that none of its kinds can run
    _require_ways(problem)
    shards = cuts.shards()
    if shards is not None:
        return tuple(shards)
    fixed = {p.shard.table.name for p in cuts.fixed}
    # Some tables do not fit alone, or not together: a packing says how tables are cut.
    shards = []
    for placement in (p for p in fitting(problem).placements if p.shard.table.name not in fixed):
        # A table on several devices is whole, or divided by rows.
        divided = division(placement.shard.table, problem) if len(placement.devices) > 1 else None
        by_rows = shards_on(divided) if divided and divided.kind == placement.kind else ()
        shards += [s for _, s in by_rows] or [placement.shard]
    return tuple(shards)


def _require_ways(problem: Problem) -> None:
    """Raise ShardCoreError for a table that FBGEMM or TorchRec's job run by no kind where it may live."""
    most, fails = (
        problem.topology.most_columns,
        problem.codecs_fail or any(map(problem.why_no_replicas, LAYOUTS.values())),
    )
    for table in (t for t in problem.tables if t.dim > most or fails):
        cannot = f"problem {problem.name!r} cannot place table {table.name!r}"
        # Tables that are kept together are whole on one device.
        others = LAYOUTS.values() if table.name not in problem.bundle_of else ()
        why = why_not(WHOLE_ROWS, table, problem)
        require(not why or not all(why_not(kind, table, problem) for kind in others), f"{cannot}: {why}")
        needed = -(-table.dim // problem.most_width(table))
        n_allowed = len(problem.allowed_devices(table.name))
        require(
            needed <= n_allowed,
            f"{cannot}: it has {table.dim} columns, and FBGEMM's CUDA op runs at most {most} in a shard; "
            f"it needs {needed} devices, and it may live on {n_allowed} "
            "(a CPU, by topology.hardware, has no limit)",
        )


def fitting(problem: Problem) -> Plan:
    """A plan that fits, for a sharder whose own placing failed.

    Raises Infeasible if none is found, and TooManyInOneOp if only FBGEMM's limits refuse the plan.
    """
    plan, lacks = roomiest(problem)
    if plan is not None and lacks <= 0:
        try:
            require_fits(plan, problem)
            require_ops(plan, problem)
            return plan
        except Infeasible:
            # Only devices were counted, not hosts. So tables in host memory are dealt to hosts first.
            if (pinned := _dealt_to_hosts(problem)) is None:
                raise
            return fitting(pinned)
    # Memory is enough, so the message has to name the limit of the op.
    if plan is not None and may_bind(problem) and fits(plan, problem):
        require_ops(plan, problem)
    raise Infeasible(refusal(problem))


def _dealt_to_hosts(problem: Problem) -> Problem | None:
    """The problem with tables in host memory pinned to hosts: the largest first, where most room is.

    Tables that constraints keep together are dealt as one. Pinned ones and those of a fixed kind stay.
    None: there is nothing to deal, or no host has room.
    """
    topology, constraints = problem.topology, problem.constraints
    if not topology.memory or len(topology.hosts) == 1:
        return None
    fastest = topology.memory[0].tier
    on_host = {t.name: host_bytes(Shard.whole(t), problem) * (t.tier == fastest) for t in problem.tables}
    # What is pinned to devices of one host takes that host's memory already.
    room = np.full(len(topology.hosts), float(topology.memory[0].bytes))
    for name, devices in problem.pinned.items():
        room -= [on_host[name] * (set(devices) <= set(host)) for host in topology.on_hosts]
    bound = {*problem.pinned, *(t.name for t in problem.tables if on_all_devices(t, problem))}
    apart = [(t.name,) for t in problem.tables if t.name not in problem.bundle_of]
    groups = [group for group in (*constraints.together, *apart) if not bound.intersection(group)]
    n_bytes = {group: sum(on_host[name] for name in group) for group in groups}
    pinned = []
    for group in sorted((g for g, n in n_bytes.items() if n), key=lambda g: -n_bytes[g]):
        host = int(np.argmax(room))
        room[host] -= n_bytes[group]
        # The first table is enough: those kept together follow it.
        pinned.append((group[0], topology.on_hosts[host]))
    if not pinned or room.min() < 0:
        return None
    return replace(problem, constraints=replace(constraints, pinned=(*constraints.pinned, *pinned)))
