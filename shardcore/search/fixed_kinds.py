"""Tables that kinds have to run whose shards are on all devices (constraints.kinds).

Of such tables there is nothing to search. They are set aside, with the memory that they take. The others are
searched as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardcore import memory
from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.layouts import LAYOUTS, layout_of, ways
from shardcore.search.shards import on_all_devices, priced, why_not
from shardcore.types import Placement, Plan, Problem, Shard, Table


def with_fixed_kinds(name: str, sharder: Callable[..., Plan]) -> Callable[..., Plan]:
    """A sharder that also places tables that have to be on all devices. It raises as `set_aside` does."""

    def search(problem: Problem, model: CostModel, **given: Any) -> Plan:
        fixed, others = set_aside(problem)
        if not fixed:
            return sharder(problem, model, **given)
        if others is None:
            return priced(fixed, problem, model, algorithm=name, seed=given.get("seed", 0))
        found = sharder(others, model.for_problem(others), **given)
        said = {k: v for k, v in found.provenance.items() if k not in ("setting", "predicted_ms")}
        return priced((*found.placements, *fixed), problem, model, **said)

    search.__name__ = name
    return search


def set_aside(problem: Problem) -> tuple[list[Placement], Problem | None]:
    """The placements of tables that constraints.kinds have on all devices, and the problem of the others.

    None: there are no others. What the former take on a device is reserved in the latter.

    Raises ShardCoreError for a table that none of its kinds can run, and for one on all devices that other
    constraints keep on some devices or whole. Raises Infeasible if those tables do not fit.
    """
    for table in problem.tables if problem.kinds_of else ():
        if table.name in problem.kinds_of:
            _require_possible(table, problem)
    fixed = [_placed(table, problem) for table in problem.tables if on_all_devices(table, problem)]
    if not fixed:
        return [], problem
    names = {placement.shard.table.name for placement in fixed}
    tables = tuple(table for table in problem.tables if table.name not in names)
    if not tables:
        return fixed, None
    # Their outputs are part of a local batch, which is counted for all tables together.
    others = replace(problem, tables=tables, constraints=problem.constraints.among({t.name for t in tables}))
    taken = (memory.every_plan_bytes(problem) - memory.every_plan_bytes(others)
             + max(memory.counted_bytes(Plan(tuple(fixed)), problem)))
    reserved, least = others.constraints.reserved_bytes + taken, min(memory.held_bytes(problem))
    if taken > least:
        raise Infeasible(f"problem {problem.name!r} has {len(fixed)} tables that constraints.kinds puts on "
                         f"every device; they take {memory.gib(taken)} of each, and {memory.gib(least)} "
                         "is free: it needs more memory, or fewer of them")
    return fixed, replace(others, constraints=replace(others.constraints, reserved_bytes=reserved))


def _require_possible(table: Table, problem: Problem) -> None:
    """Raise ShardCoreError unless one of its kinds can run a table."""
    kinds, asked = problem.kinds_of[table.name], problem.constraints
    for constraint, names in (("pinned", dict(asked.pinned)), ("together", sum(asked.together, ())),
                              ("unsplit", asked.unsplit)):
        if table.name in names and {layout_of(kind) for kind in kinds} <= set(ways(problem.topology)) and (
                constraint != "unsplit" or all(layout_of(kind).divides_rows for kind in kinds)):
            raise ShardCoreError(f"problem {problem.name!r} has table {table.name!r} in constraints.kinds "
                                 f"({', '.join(kinds)}, on all devices) and in constraints.{constraint}; it "
                                 "needs to be in one of them")
    reasons = [why_not(layout_of(kind), table, problem) for kind in kinds]
    if None in reasons:
        return
    free = replace(problem, constraints=replace(asked, kinds=()))
    others = [name for name, layout in LAYOUTS.items() if why_not(layout, table, free) is None]
    raise ShardCoreError(f"problem {problem.name!r} runs table {table.name!r} by {' or '.join(kinds)} "
                         f"(constraints.kinds): {'; '.join(dict.fromkeys(reasons))}. It needs "
                         f"{' or '.join(others) or 'other constraints'}")


def _placed(table: Table, problem: Problem) -> Placement:
    """The table on all devices, by the kind that takes least memory."""
    shard = Shard.whole(table)
    placements = [Placement(kind, shard, problem.topology.ranks) for kind in problem.kinds_of[table.name]
            if why_not(layout_of(kind), table, problem) is None]
    return min(placements, key=lambda p: max(memory.counted_bytes(Plan((p,)), problem)))
