"""Tables that a given kind has to run (constraints.kinds).

Shards of such a kind are on all devices, so there is nothing to search. These tables are set aside, with the
memory that they take. The others are searched as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardcore import memory
from shardcore.constraints import Constraints
from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.layouts import layout_of, require_placement, run_of, ways
from shardcore.search.shards import priced
from shardcore.types import Placement, Plan, Problem, Shard, Table


def with_fixed_kinds(name: str, sharder: Callable[..., Plan]) -> Callable[..., Plan]:
    """A sharder that also places the tables of constraints.kinds. It raises as `set_aside` does."""

    def search(problem: Problem, model: CostModel, **given: Any) -> Plan:
        if not problem.constraints.kinds:
            return sharder(problem, model, **given)
        fixed, others = set_aside(problem)
        if others is None:
            return priced(fixed, problem, model, algorithm=name, seed=given.get("seed", 0))
        found = sharder(others, model.for_problem(others), **given)
        said = {k: v for k, v in found.provenance.items() if k not in ("setting", "predicted_ms")}
        return priced((*found.placements, *fixed), problem, model, **said)

    return search


def set_aside(problem: Problem) -> tuple[list[Placement], Problem | None]:
    """The placements of tables with a fixed kind, and the problem of the others. None: there are no others.

    What the former take on a device is reserved in the latter.

    Raises ShardCoreError for a kind that cannot run its table, or whose shards are not on all devices, and
    for a table that other constraints keep on some devices or whole. Raises Infeasible if those tables do not
    fit.
    """
    if not (kinds := dict(problem.constraints.kinds)):
        return [], problem
    fixed = [_placed(table, kinds[table.name], problem) for table in problem.tables if table.name in kinds]
    tables = tuple(table for table in problem.tables if table.name not in kinds)
    if not tables:
        return fixed, None
    # Their outputs are part of a local batch, which is counted for all tables together.
    others = replace(problem, tables=tables, constraints=_of(tables, problem.constraints))
    taken = (memory.every_plan_bytes(problem) - memory.every_plan_bytes(others)
             + max(memory.counted_bytes(Plan(tuple(fixed)), problem)))
    reserved, least = others.constraints.reserved_bytes + taken, min(memory.held_bytes(problem))
    if taken > least:
        raise Infeasible(f"problem {problem.name!r} has {len(fixed)} tables that constraints.kinds puts on "
                         f"every device; they take {memory.gib(taken)} of each, and {memory.gib(least)} "
                         "is free: it needs more memory, or fewer of them")
    return fixed, replace(others, constraints=replace(others.constraints, reserved_bytes=reserved))


def _placed(table: Table, kind: str, problem: Problem) -> Placement:
    run_of(kind, table)  # refuses what does not run
    if layout_of(kind) not in ways(problem.topology):
        known = ", ".join(layout.name for layout in ways(problem.topology)) or "none on one device"
        raise ShardCoreError(f"problem {problem.name!r} runs table {table.name!r} by {kind} "
                             f"(constraints.kinds); it needs a kind that is on all devices: {known}")
    asked = problem.constraints
    for constraint, names in (("pinned", dict(asked.pinned)), ("together", sum(asked.together, ())),
                              ("unsplit", asked.unsplit if layout_of(kind).divides_rows else ())):
        if table.name in names:
            raise ShardCoreError(f"problem {problem.name!r} has table {table.name!r} in constraints.kinds "
                                 f"({kind}, on all devices) and in constraints.{constraint}; it needs to be "
                                 "in one of them")
    placement = Placement(kind, Shard.whole(table), problem.topology.ranks)
    require_placement(placement, problem)
    return placement


def _of(tables: tuple[Table, ...], asked: Constraints) -> Constraints:
    """What is asked of some of the tables. No kinds."""
    names = {table.name for table in tables}
    together = (tuple(name for name in group if name in names) for group in asked.together)
    return Constraints(asked.reserved_bytes, tuple(name for name in asked.unsplit if name in names),
                       tuple((name, where) for name, where in asked.pinned if name in names),
                       tuple(filter(None, together)))
