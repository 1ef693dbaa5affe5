"""How many rows of a problem's sequence tables are hot: tried by searching a plan for each threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardcore import progress
from shardcore.cost.model import CostModel
from shardcore.errors import ShardCoreError
from shardcore.search.budget import Budget
from shardcore.search.sharders import Sharder
from shardcore.search.tried import Tried, searched
from shardcore.tables.hot_rows import heats, hot_counts, with_hot_rows
from shardcore.types import Problem

_FACTOR = 4.0
"""Between thresholds that are tried at first. Then its root, beside the best of them."""


@dataclass(frozen=True, kw_only=True)
class Threshold(Tried):
    """A threshold, and what it gives: a problem with hot rows as tables of their own.

    least_lookups: a batch, from which on a row is hot. None: no row is.
    rows: hot rows by table.
    """

    least_lookups: float | None
    rows: dict[str, int]


def try_thresholds(problem: Problem, model: CostModel, sharder: Sharder, seed: int = 0,
                   budget: Budget | None = None,
                   say: Callable[[Threshold], None] = lambda tried: None) -> list[Threshold]:
    """A plan without hot rows, and one for each threshold, from the highest on.

    On one device there are no thresholds. They fall until no plan fits, or half as many lookups as there are
    devices would make a row hot: fewer are never worth an all-reduce. The best is the one with the least ms,
    the first of equals.

    Raises ShardCoreError for a problem without sequence tables, and as `heat_of` and sharders do.
    """
    if not (known := heats(problem)):
        raise ShardCoreError(f"problem {problem.name!r} has no sequence tables that are looked up; only "
                             "those may have hot rows (docs/plan.md)")
    found: list[Threshold] = []

    def attempt(least_lookups: float | None) -> Threshold:
        rows = {} if least_lookups is None else hot_counts(problem, least_lookups)
        same = next((t for t in found if t.rows == rows), None)
        if same is not None:
            return same
        own = with_hot_rows(problem, rows)
        with progress.part(f"{sum(rows.values()):,} hot rows"):
            plan, why = searched(own, model, sharder, seed, budget)
        found.append(Threshold(least_lookups=least_lookups, rows=rows, problem=own, plan=plan, why=why))
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
