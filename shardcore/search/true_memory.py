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
"""Searches, at most."""
_FIRST = 2 / 3
"""The first search's share of the seconds. The others have to keep the budget too."""


def within_memory(sharder: Callable[..., Plan]) -> Callable[..., Plan]:
    """A sharder that searches again, with more reserved, if its plan takes more than there is.

    The second search counts all that devices may need beside shards (`every_plan_bytes`). From then on, what
    is reserved is at least doubled. Once nothing is found with so much, it is halved between the last two.
    The first search has two thirds of the seconds, each further one half of what is left. Each has as many
    evaluations.

    Raises Overfull, for the first plan, if none of TRIES fits.
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
            except Infeasible:
                if first is None:
                    raise
                enough = more
            else:
                try:
                    require_fits(found, problem)
                    return found
                except Overfull as error:
                    first, too_little = first or error, more
                    more = cautious if more < cautious else more + max(more, error.too_much)
            if enough is not None:
                more = (too_little + enough) // 2
            left -= share
            share = left / 2
        raise first

    return search
