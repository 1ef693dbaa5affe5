"""Feasibility: the first step of every sharder.

Tables that no device can hold are cut. Problems without a plan are refused with a reason and a remedy.
"""

from __future__ import annotations

from functools import lru_cache

from shardcore.core.errors import Infeasible
from shardcore.core.types import Plan, Problem, Shard
from shardcore.core.validation import require
from shardcore.search.state.packing import packings_of, roomiest
from shardcore.search.state.refusal import refusal
from shardcore.step.kinds import LAYOUTS, WHOLE_ROWS, shards_on
from shardcore.step.memory import fits, may_bind, require_fits, require_ops
from shardcore.step.ways import division, fixed_placements, why_not


def feasible_shards(problem: Problem) -> list[Shard]:
    """The shards to start from. Every table is whole, unless no device where it may live can hold it.

    Such a table is cut by columns into as few equal parts as fit.
    If its narrowest columns are still too large, its rows are divided (`division`).
    Sequences are divided by rows at once where that is possible, and else cut.
    Tables in problem.whole are never cut. Those of `fixed_placements` are not among them.

    Raises Infeasible if there is no plan that fits (`fitting`), and ShardCoreError for a table that FBGEMM or
    the job's codecs cannot run where it may live.
    """
    return list(_feasible_shards(problem))


@lru_cache(maxsize=4)  # several searches of a problem begin with them
def _feasible_shards(problem: Problem) -> tuple[Shard, ...]:
    fixed = {p.shard.table.name for p in fixed_placements(problem)}  # raises for a table that no kind can run
    _require_ways(problem)
    # Where some tables do not fit alone, or not together, a packing says how tables are cut.
    placements = packings_of(problem).apart() or fitting(problem).placements
    shards = []
    for placement in (p for p in placements if p.shard.table.name not in fixed):
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
    if plan is None or (lacks > 0 and not (may_bind(problem) and fits(plan, problem))):
        raise Infeasible(refusal(problem))
    # Where devices have enough memory, the message has to name the host, or the limit of an op.
    require_fits(plan, problem)
    require_ops(plan, problem)
    return plan
