"""How many rows of a problem's sequence tables are hot: tried by searching a plan for each threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.search.budget import Budget
from shardcore.search.sharders import Sharder
from shardcore.tables.hot_rows import heats, hot_counts, with_hot_rows
from shardcore.types import Plan, Problem

_FACTOR = 4.0
"""Between thresholds that are tried at first. Then its root, beside the best of them."""


@dataclass(frozen=True)
class Tried:
    """A threshold, and what it gives.

    least_lookups: a batch, from which on a row is hot. None: no row is.
    rows: hot rows by table.
    problem: with these as tables of their own.
    plan: the best that was found. None: there is none.
    why: there is none.
    """

    least_lookups: float | None
    rows: dict[str, int]
    problem: Problem
    plan: Plan | None
    why: str = ""

    @property
    def ms(self) -> float:
        """Predicted for a step."""
        return self.plan.provenance["predicted_ms"] if self.plan else float("inf")


def try_thresholds(problem: Problem, model: CostModel, sharder: Sharder, seed: int = 0,
                   budget: Budget | None = None,
                   say: Callable[[Tried], None] = lambda tried: None) -> list[Tried]:
    """A plan without hot rows, and one for each threshold, from the highest on.

    On one device there are no thresholds. They fall until no plan fits, or half as many lookups as there are
    devices would make a row hot: fewer are never worth an all-reduce. The best is the one with the least ms,
    the first of equals.

    Raises ShardCoreError for a problem without sequence tables, and as `heat_of` and sharders do.
    """
    if not (known := heats(problem)):
        raise ShardCoreError(f"problem {problem.name!r} has no sequence tables that are looked up; only "
                             "those may have hot rows (docs/plan.md)")
    found: list[Tried] = []

    def attempt(least_lookups: float | None) -> Tried:
        rows = {} if least_lookups is None else hot_counts(problem, least_lookups)
        same = next((t for t in found if t.rows == rows), None)
        if same is not None:
            return same
        own, plan, why = with_hot_rows(problem, rows), None, ""
        try:
            plan = sharder(own, model.for_problem(own), seed=seed, budget=budget)
        except Infeasible as error:
            why = str(error)
        found.append(Tried(least_lookups, rows, own, plan, why))
        say(found[-1])
        return found[-1]

    attempt(None)
    if len(problem.topology) == 1:  # no other device to be on
        return found
    least = max(1.0, len(problem.topology) / 2)
    threshold = max(least, max(float(heat.lookups.max()) for _, heat in known) / _FACTOR)
    while threshold >= least:
        if attempt(threshold).plan is None:
            break
        threshold /= _FACTOR
    best = min(found, key=lambda t: t.ms).least_lookups
    for near in (best * _FACTOR**0.5, best / _FACTOR**0.5) if best else ():
        attempt(near)
    return found


def best_of(tried: list[Tried]) -> Tried:
    """The one with the least ms. Raises Infeasible with what was said if none has a plan."""
    best = min(tried, key=lambda t: t.ms)
    if best.plan is None:
        raise Infeasible(best.why)
    return best
