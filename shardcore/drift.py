"""Drift: how far a plan is from the best, now that its tables are looked up otherwise; and a re-plan that moves few of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardcore import store
from shardcore.cost.model import CostModel, price
from shardcore.diff import Diff, carried, diff, in_order, nearest
from shardcore.search.budget import Budget
from shardcore.search.local import local
from shardcore.types import Plan, Problem, ShardCoreError, Table
from shardcore.workload import lower

DEFAULT_THRESHOLD = 0.02


@dataclass(frozen=True)
class Drift:
    """A plan's cost in ms under one model. planned_ms: with the statistics that it was made for; now_ms, with those of now; best
    and best_ms: the best plan found for these, any number of tables moving; replan and replan_ms: the best found with at most
    most_tables of them moving (None: any number), and moves, what moves for it. threshold: by what share of now_ms it has to be
    cheaper for that to pay."""

    planned_ms: float
    now_ms: float
    best_ms: float
    best: Plan
    replan_ms: float
    replan: Plan
    moves: Diff
    most_tables: int | None
    threshold: float

    @property
    def behind(self) -> float:
        """How much more than the best plan this one costs now, as a share of the best one's cost."""
        return self.now_ms / self.best_ms - 1 if self.best_ms > 0 else 0.0

    @property
    def pays(self) -> bool:
        return store.worth_it(self.replan_ms, self.now_ms, self.threshold)


def drift(plan: Plan, problem: Problem, now: Problem, model: CostModel, most_tables: int | None = None,
          threshold: float = DEFAULT_THRESHOLD, seed: int = 0, budget: Budget | None = None) -> Drift:
    """How far a plan of `problem` is from the best plan of the problem as it is now, whose tables have the same shapes, and what
    a re-plan brings. Both are searched locally from the plan, each within the budget; none is dearer than the plan itself.

    Raises what `lower` raises where the plan is none for the problem as it is now: that needs a new plan, whatever it costs.
    """
    old = carried(plan, now)
    planned_ms, now_ms = (price(lower(p, of), model).total_ms for p, of in ((plan, problem), (old, now)))

    def searched(tables: int | None) -> tuple[float, Plan]:
        from shardcore.search.space import Reshard  # compiled code, late

        space = plan.provenance.get("space", "all")
        found = local(now, model, seed=seed, budget=budget, space=space, reshard=Reshard(old, tables))
        found = nearest(found, old, now) if tables is None else in_order(found, old)
        return min(((price(lower(found, now), model).total_ms, found), (now_ms, old)), key=lambda x: x[0])

    best_ms, best = searched(None)
    replan_ms, replan = (best_ms, best) if most_tables is None else searched(most_tables)
    if replan_ms < best_ms:
        best_ms, best = replan_ms, replan
    return Drift(planned_ms, now_ms, best_ms, best, replan_ms, replan, diff(old, replan), most_tables, threshold)


def refreshed(problem: Problem, tables: Iterable[Table]) -> Problem:
    """The problem with the pooling and access statistics that fresh `tables` have; those of other names do not matter. Raises
    ShardCoreError for one of another shape, or where none is one of the problem's."""
    fresh = {t.name: t for t in tables}
    known = [t for t in problem.tables if t.name in fresh]
    if not known:
        raise ShardCoreError(f"none of the {len(fresh)} tables with fresh statistics is one of problem {problem.name!r}'s, which "
                             f"has {', '.join(t.name for t in problem.tables[:3])}, ...")
    for table in known:
        new = fresh[table.name]
        if (new.rows, new.dim) != (table.rows, table.dim):
            raise ShardCoreError(f"table {table.name!r} is {new.rows} × {new.dim} with fresh statistics, {table.rows} × "
                                 f"{table.dim} in problem {problem.name!r}; a table of another shape needs a new plan")
    return replace(problem, tables=tuple(
        replace(t, pooling=fresh[t.name].pooling, access=fresh[t.name].access) if t.name in fresh else t for t in problem.tables))
