"""Drift: the distance of a plan from the best one, after its tables' statistics changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem, Table
from shardcore.core.validation import require
from shardcore.cost.model import CostModel, price_plan
from shardcore.io.files import describe_changed_parts, problem_part_digests
from shardcore.plans.diff import PlanDiff, diff_plans
from shardcore.plans.gain import PlanGain, plan_gain
from shardcore.plans.replan import ReplanConfig, replan, tables_forced_to_move
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.search.ties import min_by_cost

_FRESH = ("rows", "dim", "features", "pooling", "access")
"""Fields of a Table that change while a job runs, as pools have them."""
_MEASURED = (*_FRESH, "dedup", "ordered", "row_shares", "strides")
"""Those of a problem's tables: problem_for measures more than a pool has."""


@dataclass(frozen=True)
class PlanDrift:
    """A plan's cost under one model, with its old and its current statistics.

    planned_ms: with the statistics that it was made for.
    now_ms: with current statistics.
    best_ms: cost of the best plan found, with any number of moves.
    best: that plan.
    replan_ms: cost of the best plan found with at most `most_tables` moves.
    replan: that plan.
    moves: the moves to `replan`.
    gain: ms that `replan` saves, with their margin.
    most_tables: number of tables that may move. None: any number.
    threshold: the share of now_ms by which a re-plan must be cheaper to pay, at any margin.
    """

    planned_ms: float
    now_ms: float
    best_ms: float
    best: Plan
    replan_ms: float
    replan: Plan
    moves: PlanDiff
    gain: PlanGain
    most_tables: int | None
    threshold: float

    @property
    def cost_above_best(self) -> float:
        """Extra cost of the plan over the best plan found, as a share of the best plan's cost."""
        return self.now_ms / self.best_ms - 1 if self.best_ms > 0 else 0.0

    @property
    def is_replan_worthwhile(self) -> bool:
        """True if the gain of the re-plan exceeds its margin and the threshold."""
        return self.gain.exceeds_margin(self.threshold)


def plan_drift(
    plan: Plan,
    problem: Problem,
    new_problem: Problem,
    model: CostModel,
    config: ReplanConfig,
    threshold: float = 0.0,
) -> PlanDrift:
    """Drift of a plan of `problem` from the best plan of the same tables with newer statistics, `new_problem`.

    Tables may have grown. Each search gets the config's budget. Neither result is dearer than the plan
    itself.

    Raises what `lower` raises if the plan is no longer valid. A new plan is then needed at any cost.
    """
    # The old placements with the tables of now.
    old = rebind_tables(plan, new_problem)
    planned, current = price_plan(plan, problem, model), price_plan(old, new_problem, model)

    # No limit on moves: the best plan is a yardstick, not a proposal.
    free = replace(config, max_moved_tables=None, max_moved_bytes=None)
    searches = (config, free) if config.limits_moves else (config,)
    plans = [price_plan(replan(plan, new_problem, model, limits), new_problem, model) for limits in searches]
    replanned = plans[0]
    # The unlimited search is heuristic. It can lose to the limited one.
    best = min_by_cost(plans, lambda x: x.cost.total_ms)
    return PlanDrift(
        planned_ms=planned.cost.total_ms,
        now_ms=current.cost.total_ms,
        best_ms=best.cost.total_ms,
        best=best.plan,
        replan_ms=replanned.cost.total_ms,
        replan=replanned.plan,
        moves=diff_plans(plan, replanned.plan, new_problem, tables_forced_to_move(plan, new_problem)),
        gain=plan_gain(current, replanned, new_problem, model),
        most_tables=config.max_moved_tables,
        threshold=threshold,
    )


def with_fresh_problem(problem: Problem, fresh: Problem) -> Problem:
    """Problem with the shapes and all statistics of a fresh problem of the same tables.

    Raises ShardCoreError if they differ otherwise, too: in tables, devices, batch, job.
    """
    now = with_fresh_tables(problem, fresh.tables, _MEASURED)
    # Names, shapes, devices and job have to agree. The order of tables does not matter.
    parts = problem_part_digests(now)
    del parts["order of tables"]
    if differ := describe_changed_parts(parts, fresh):
        raise ShardCoreError(
            f"problem {fresh.name!r} has more than fresh statistics for the plan of "
            f"{problem.name!r}{differ}. Re-plan it: plan --start, with --start-problem"
        )
    return now


def with_fresh_tables(problem: Problem, tables: Iterable[Table], fields: Sequence[str] = _FRESH) -> Problem:
    """Problem with the shapes, features, pooling and access statistics of fresh `tables`.

    fields: fields of a Table, to take from the fresh ones.

    Unknown names are ignored. Raises ShardCoreError if no name is known.
    """
    fresh = {t.name: t for t in tables}
    # A pool may have other tables, too, but some have to match.
    require(
        any(t.name in fresh for t in problem.tables),
        f"none of the {len(fresh)} tables with fresh statistics is one of problem {problem.name!r}'s, which has "
        f"{', '.join(t.name for t in problem.tables[:3])}, ...",
    )
    # Tables without fresh statistics keep theirs.
    now = (replace(t, **{f: getattr(fresh.get(t.name, t), f) for f in fields}) for t in problem.tables)
    return replace(problem, tables=tuple(now))
