"""Decisions that are made before a search, each tried by a search: what they have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible
from shardcore.search.budget import Budget
from shardcore.search.sharders import Sharder
from shardcore.types import Plan, Problem


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A decision, and what it gives.

    problem: as the decision makes it.
    plan: the best that was found. None: there is none.
    why: there is none.
    """

    problem: Problem
    plan: Plan | None
    why: str = ""

    @property
    def ms(self) -> float:
        """Predicted for a step; infinite without a plan."""
        return self.plan.provenance["predicted_ms"] if self.plan else float("inf")

    @property
    def words(self) -> str:
        """What it gives, for people."""
        return f"{self.ms:.3f} ms" if self.plan else "no plan fits"


Some = TypeVar("Some", bound=Tried)


def searched(problem: Problem, model: CostModel, sharder: Sharder, seed: int,
             budget: Budget | None) -> tuple[Plan | None, str]:
    """The plan that was found, or None and why there is none."""
    try:
        return sharder(problem, model.for_problem(problem), seed=seed, budget=budget), ""
    except Infeasible as error:
        return None, str(error)


def best_of(tried: Iterable[Some]) -> Some:
    """The one with the least ms. Raises Infeasible with what was said if none has a plan."""
    best = min(tried, key=lambda t: t.ms)
    if best.plan is None:
        raise Infeasible(best.why)
    return best
