"""Drift: how far a plan is from the best, now that its tables' statistics changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardcore.cost.model import CostModel, price
from shardcore.errors import ShardCoreError
from shardcore.publish.diff import Diff, diff
from shardcore.publish.gain import Gain, gain
from shardcore.publish.replan import ReplanConfig, forced_moves, replan
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.types import Plan, Problem, Table
from shardcore.workload import lower

_FRESH = ("rows", "dim", "features", "pooling", "access")
"""Fields of a Table that change while a job runs."""


@dataclass(frozen=True)
class Drift:
    """A plan's cost under one model, with its old and its current statistics.

    planned_ms: with the statistics that it was made for.
    now_ms: with current statistics.
    best_ms: cost of the best plan found, with any number of moves.
    best: that plan.
    replan_ms: cost of the best plan found with at most `most_tables` moves.
    replan: that plan.
    moves: what moves for `replan`.
    gain: what `replan` saves, and how sure that is.
    most_tables: how many tables may move. None: any number.
    threshold: the share of now_ms by which a re-plan must be cheaper to pay, whatever its margin.
    """

    planned_ms: float
    now_ms: float
    best_ms: float
    best: Plan
    replan_ms: float
    replan: Plan
    moves: Diff
    gain: Gain
    most_tables: int | None
    threshold: float

    @property
    def behind(self) -> float:
        """Extra cost over the best plan, as a share of the best plan's cost."""
        return self.now_ms / self.best_ms - 1 if self.best_ms > 0 else 0.0

    @property
    def pays(self) -> bool:
        """Whether the re-plan is worth its moves."""
        return self.gain.worth_it(self.threshold)


def drift(plan: Plan, problem: Problem, now: Problem, model: CostModel, config: ReplanConfig,
          threshold: float = 0.0) -> Drift:
    """How far a plan of `problem` is from the best plan of `now`, and what a re-plan would save.

    Tables may have grown. Each search gets the config's budget. Neither result is dearer than the plan
    itself.

    Raises what `lower` raises if the plan is no longer valid. A new plan is then needed at any cost.
    """
    old = rebind_tables(plan, now)
    planned, cost = (price(lower(p, of), model) for p, of in ((plan, problem), (old, now)))
    now_ms = cost.total_ms

    # A short search may end worse than its start, so the old plan competes too.
    def searched(limit: ReplanConfig) -> tuple[float, Plan]:
        found = replan(plan, now, model, limit)
        return min(((price(lower(found, now), model).total_ms, found), (now_ms, old)), key=lambda x: x[0])

    best_ms, best = searched(replace(config, max_moved_tables=None, max_moved_bytes=None))
    replan_ms, replanned = searched(config) if config.limited else (best_ms, best)
    # The unlimited search is heuristic as well. It can lose to the limited one.
    if replan_ms < best_ms:
        best_ms, best = replan_ms, replanned
    saved = gain((old, cost), (replanned, price(lower(replanned, now), model)), now, model)
    return Drift(planned_ms=planned.total_ms, now_ms=now_ms, best_ms=best_ms, best=best, replan_ms=replan_ms,
                 replan=replanned, moves=diff(plan, replanned, now, forced_moves(plan, now)),
                 gain=saved, most_tables=config.max_moved_tables, threshold=threshold)


def refreshed(problem: Problem, tables: Iterable[Table]) -> Problem:
    """The problem with the shapes, features, pooling and access statistics of fresh `tables`.

    Unknown names are ignored. Raises ShardCoreError if no name is known.
    """
    fresh = {t.name: t for t in tables}
    if not any(t.name in fresh for t in problem.tables):
        raise ShardCoreError(f"none of the {len(fresh)} tables with fresh statistics is one of problem "
                             f"{problem.name!r}'s, which has "
                             f"{', '.join(t.name for t in problem.tables[:3])}, ...")
    return replace(problem, tables=tuple(
        replace(t, **{name: getattr(fresh[t.name], name) for name in _FRESH}) if t.name in fresh else t
        for t in problem.tables))
