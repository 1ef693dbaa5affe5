"""Feasibility: the first step of every sharder.

Tables that no device can hold are cut. Problems without a plan are refused with a reason and a remedy.
"""

from __future__ import annotations

from functools import lru_cache

from shardcore.core.errors import Infeasible
from shardcore.core.types import Plan, Problem, Shard
from shardcore.core.validation import require
from shardcore.search.state.packing import least_excess_plan, packings_of
from shardcore.search.state.refusal import refusal_message
from shardcore.step.kinds import SHARDING_KINDS, shards_by_device
from shardcore.step.memory import may_exceed_op_limits, plan_fits, require_fits, require_op_limits
from shardcore.step.ways import fixed_placements, reason_not_runnable, row_division


def feasible_shards(problem: Problem) -> list[Shard]:
    """Shards that searches start from: whole tables, cut only where no allowed device can hold the table.

    Such a table is cut by columns into as few equal parts as fit.
    If its narrowest columns are still too large, its rows are divided (`row_division`).
    Sequences are divided by rows at once where that is possible, and else cut.
    Tables in problem.uncut_tables are never cut. Those of `fixed_placements` are not among them.

    Raises Infeasible if there is no plan that fits (`find_fitting_plan`), and ShardCoreError for a table that FBGEMM or
    the job's codecs cannot run where it may live.
    """
    return list(_cached_feasible_shards(problem))


@lru_cache(maxsize=4)  # several searches of a problem begin with them
def _cached_feasible_shards(problem: Problem) -> tuple[Shard, ...]:
    fixed = {p.shard.table.name for p in fixed_placements(problem)}  # raises for a table that no kind can run
    _require_runnable_tables(problem)
    # Where some tables do not fit alone, or not together, a packing says how tables are cut.
    placements = packings_of(problem).place_bundles_independently() or find_fitting_plan(problem).placements
    shards = []
    for placement in (p for p in placements if p.shard.table.name not in fixed):
        # A table on several devices is whole, or divided by rows.
        divided = row_division(placement.shard.table, problem) if len(placement.devices) > 1 else None
        by_rows = shards_by_device(divided) if divided and divided.kind == placement.kind else ()
        shards += [s for _, s in by_rows] or [placement.shard]
    return tuple(shards)


def _require_runnable_tables(problem: Problem) -> None:
    """Raise ShardCoreError for a table that no kind of sharding can run on the devices where the table may be."""
    most, fails = (
        problem.topology.max_shard_columns,
        problem.codecs_may_fail or any(map(problem.why_replicas_fail, SHARDING_KINDS.values())),
    )
    for table in (t for t in problem.tables if t.dim > most or fails):
        cannot = f"problem {problem.name!r} cannot place table {table.name!r}"
        # Tables that are kept together are whole on one device.
        reasons = [
            reason_not_runnable(kind, table, problem)
            for kind in SHARDING_KINDS.values()
            if kind.is_on_one_device or table.name not in problem.group_by_table
        ]
        require(not all(reasons), f"{cannot}: {reasons[0]}")
        needed = -(-table.dim // problem.max_shard_width(table))
        n_allowed = len(problem.allowed_devices(table.name))
        require(
            needed <= n_allowed,
            f"{cannot}: it has {table.dim} columns, and FBGEMM's CUDA op runs at most {most} in a shard; "
            f"it needs {needed} devices, and it may live on {n_allowed} "
            "(a CPU, by topology.hardware, has no limit)",
        )


def find_fitting_plan(problem: Problem) -> Plan:
    """Plan that fits in memory, for a sharder whose own placing failed.

    Raises Infeasible if none is found, and TooManyInOneOp if only FBGEMM's limits refuse the plan.
    """
    plan, lacks = least_excess_plan(problem)
    if plan is None or (lacks > 0 and not (may_exceed_op_limits(problem) and plan_fits(plan, problem))):
        raise Infeasible(refusal_message(problem))
    # Where devices have enough memory, the message has to name the host, or the limit of an op.
    require_fits(plan, problem)
    require_op_limits(plan, problem)
    return plan
