"""Plans that fit by all that they take, not only by what searches count (see memory.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible, Overfull
from shardcore.memory import every_plan_bytes, require_fits
from shardcore.search.budget import Budget
from shardcore.types import Plan, Problem

TRIES = 6
"""Searches, at most. The second counts all that devices may need beside shards (`every_plan_bytes`). From
then on, each reserves at least twice as much more as the one before."""


def within_memory(sharder: Callable[..., Plan]) -> Callable[..., Plan]:
    """A sharder that searches again, with more reserved, if its plan takes more than there is.

    Each search has half of the seconds of the one before. So all take less than twice what the budget says.

    Raises Overfull, for the first plan, if none of TRIES fits.
    """

    @wraps(sharder)
    def search(problem: Problem, model: CostModel, *, budget: Budget | None = None, **given: Any) -> Plan:
        first, more = None, 0
        cautious = every_plan_bytes(problem, share=0.0) - every_plan_bytes(problem)
        for _ in range(TRIES):
            reserved = problem.constraints.reserved_bytes + more
            asked = replace(problem, constraints=replace(problem.constraints, reserved_bytes=reserved))
            try:
                found = sharder(asked if more else problem, model, budget=budget, **given)
            except Infeasible as error:
                raise first or error from None
            try:
                require_fits(found, problem)
            except Overfull as error:
                first = first or error
                more = cautious if more < cautious else more + max(more, error.too_much)
                budget = budget and budget.halved()
            else:
                return found
        raise first

    return search
