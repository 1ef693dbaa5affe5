"""Plans that fit by all that they take, not only by what searches count (see memory.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any

from shardcore import memory
from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible, Overfull
from shardcore.memory import every_plan_bytes, require_fits
from shardcore.op_limits import TooManyInOneOp, require_ops
from shardcore.search.budget import Budget
from shardcore.search.exact_memory import lacking, repaired, roomiest, within_ops
from shardcore.search.feasible import DoesNotFit, remedy
from shardcore.search.fixed_kinds import set_aside
from shardcore.search.shards import priced
from shardcore.types import Plan, Problem

TRIES = 6
"""Searches, at most."""
_NEAR = 2
"""Searches near a plan that fits, at most."""
_FIRST = 2 / 3
"""The first search's share of the seconds. The others have to keep the budget too."""


def within_memory(sharder: Callable[..., Plan]) -> Callable[..., Plan]:
    """A sharder that searches again, with more reserved, if its plan takes more than there is.

    The second search counts all that devices may need beside shards (`every_plan_bytes`). From then on, what
    is reserved is at least doubled. Once nothing is found with so much, it is halved between the last two.
    The first search has two thirds of the seconds, each further one half of what is left. Each has as many
    evaluations.

    A plan that takes too much is repaired, if that suffices. If none of TRIES fits, it searches near a plan
    that does (`_near`), unless there is a plan to start from. Raises the first error if no plan is found.
    """

    @wraps(sharder)
    def search(problem: Problem, model: CostModel, *, budget: Budget | None = None, **given: Any) -> Plan:
        cautious = every_plan_bytes(problem, share=0.0) - every_plan_bytes(problem)
        first, more, too_little, enough = None, 0, 0, None
        share, left = _FIRST, 1.0
        for _ in range(TRIES):
            reserved = problem.constraints.reserved_bytes + more
            asked = replace(problem, constraints=replace(problem.constraints, reserved_bytes=reserved))
            try:
                found = sharder(asked if more else problem, model, budget=budget and budget.part(share),
                                **given)
            except Infeasible as error:
                if first is None:
                    first = error
                    break
                enough = more
            else:
                try:
                    require_fits(found, problem)
                    require_ops(found, problem)
                    return found
                except TooManyInOneOp as error:
                    # Less memory would not spread them.
                    first = first or error
                    if given.get("reshard") is None and (plan := _repaired(found, problem, model)):
                        return plan
                    break
                except Overfull as error:
                    # Moves may be limited where there is a plan to start from.
                    if given.get("reshard") is None and (plan := _repaired(found, problem, model)):
                        return plan
                    first, too_little = first or error, more
                    more = cautious if more < cautious else more + max(more, error.too_much)
            if enough is not None:
                more = (too_little + enough) // 2
            left -= share
            share = left / 2
        return _packed(first, sharder, sharder.__name__, problem, model,
                       budget=budget and budget.part(left), **given)

    return search


def _packed(error: Infeasible, sharder: Callable[..., Plan], name: str, problem: Problem, model: CostModel, *,
            budget: Budget | None, **given: Any) -> Plan:
    """A plan of a search near one that fits exactly. Raises the error if there is none, with its remedy."""
    if given.get("reshard") is None and (plan := fitting(problem)):
        packed = priced(plan.placements, problem, model, algorithm=name, seed=given.get("seed", 0),
                        packed=True)
        return _near(packed, sharder, problem, model, budget=budget, **given)
    raise with_remedy(error, problem)


def with_remedy(error: Infeasible, problem: Problem) -> Infeasible:
    """The error, with what would make the problem fit if that is what it says."""
    return Infeasible(f"{error}. {remedy(problem)}") if isinstance(error, DoesNotFit) else error


def fitting(problem: Problem) -> Plan | None:
    """A plan that fits. None if none is found."""
    plan, lacks = roomiest(problem)
    return plan if plan and lacks <= 0 and fits(plan, problem) else None


def fits(plan: Plan, problem: Problem) -> bool:
    """Tell if each device has the memory, and no op more than FBGEMM runs."""
    return memory.fits(plan, problem) and within_ops(plan, problem)


def _repaired(plan: Plan, problem: Problem, model: CostModel) -> Plan | None:
    """The plan with shards moved to devices where they fit. None if that does not suffice."""
    found = repaired(plan, problem)
    return found and priced(found.placements, problem, model, **{
        k: v for k, v in plan.provenance.items() if k not in ("setting", "predicted_ms")})


def _near(packed: Plan, sharder: Callable[..., Plan], problem: Problem, model: CostModel, *,
          budget: Budget | None, **given: Any) -> Plan:
    """A plan that fits, or a cheaper one that a search finds near it."""
    with suppress(Infeasible):
        asked = near(packed, problem)
        for _ in range(_NEAR):
            plan = sharder(asked, model, budget=budget and budget.part(1 / _NEAR), **given)
            plan = plan if fits(plan, problem) else _repaired(plan, problem, model) or plan
            if (too_much := lacking(plan, problem)) <= 0 and fits(plan, problem):
                return min(packed, plan, key=lambda plan: plan.provenance["predicted_ms"])
            asked = _with_more(asked, -too_much)
    return packed


def near(packed: Plan, problem: Problem) -> Problem:
    """The problem of a search near a plan that fits.

    Tables that groups share in the plan stay so. There is as much memory as searches count for the others.
    """
    kinds = {p.shard.table.name: (p.kind,) for p in packed.placements if len(p.devices) > 1}
    return _with_room(replace(problem, constraints=replace(
        problem.constraints, kinds=tuple((dict(problem.kinds_of) | kinds).items()))), packed)


def _with_room(problem: Problem, plan: Plan) -> Problem:
    """The problem with as much memory as searches count for a plan."""
    ample = _with_more(problem, 1 << 48)
    _, others = set_aside(ample)
    if others is None:
        return ample
    names = {table.name for table in others.tables}
    rest = Plan(tuple(p for p in plan.placements if p.shard.table.name in names))
    counted = memory.counted_bytes(rest, others)
    free = memory.free_bytes(others)
    return _with_more(problem, (1 << 48) + max(n - f for n, f in zip(counted, free, strict=True) if n))


def _with_more(problem: Problem, more: int) -> Problem:
    """The problem with more memory on each device."""
    devices = tuple(replace(d, memory_bytes=max(1, d.memory_bytes + more)) for d in problem.topology.devices)
    return replace(problem, topology=replace(problem.topology, devices=devices))
