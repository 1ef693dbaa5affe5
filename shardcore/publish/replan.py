"""Re-plan: improve an existing plan while most of its weights stay in place."""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.cost.model import CostModel
from shardcore.errors import ShardCoreError
from shardcore.memory import require_fits
from shardcore.publish.diff import rebind_tables, relabel_devices, reorder_columns
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.anneal.sharder import anneal_once
from shardcore.search.budget import Budget
from shardcore.search.fixed_kinds import with_fixed_kinds
from shardcore.search.true_memory import within_memory
from shardcore.types import Plan, Problem


@dataclass(frozen=True)
class ReplanConfig:
    """How to re-plan.

    max_moved_tables: how many tables may move. None: any number.
    max_moved_bytes: how many bytes of weights may move. None: any number.
    space: search space of annealing (see search.anneal.sharder.SPACES). None: that of the old plan.
    seed: of the search.
    budget: of the search. None: the default.
    """

    max_moved_tables: int | None = None
    max_moved_bytes: int | None = None
    space: str | None = None
    seed: int = 0
    budget: Budget | None = None

    @property
    def limited(self) -> bool:
        """Whether moves are limited."""
        return self.max_moved_tables is not None or self.max_moved_bytes is not None


def replan(old: Plan, problem: Problem, model: CostModel, config: ReplanConfig) -> Plan:
    """The best plan found by annealing from the valid part of the old plan.

    New tables, and tables on devices that are gone, are placed freely, outside the move limit.
    Without a limit, a new search replaces an old plan that cannot be a start. With a small budget the result
    may be dearer than the old plan.

    Raises Infeasible if no plan is found. Raises ShardCoreError if moves are limited and the old plan cannot
    be a start.
    """
    space = config.space or old.provenance.get("space", "all")
    left, fixed = _left(old, problem), dict(problem.constraints.kinds)
    search = within_memory(with_fixed_kinds("anneal", anneal_once))
    try:
        require_fits(left, problem)
        free = Plan(tuple(p for p in left.placements if p.shard.table.name not in fixed))
        reshard = Reshard(free, config.max_moved_tables, config.max_moved_bytes)
        found = search(problem, model, seed=config.seed, budget=config.budget, space=space, reshard=reshard)
    except ShardCoreError:
        # A fresh search cannot respect a limit on moves.
        if config.limited:
            raise
        found = search(problem, model, seed=config.seed, budget=config.budget, space=space)
    # Relabelling devices could move more tables than the limit allows.
    return reorder_columns(found, old) if config.limited else relabel_devices(found, old, problem)


def _left(old: Plan, problem: Problem) -> Plan:
    """The old plan's placements of tables and devices that the problem still has."""
    tables, n_devices = set(problem.tables), len(problem.topology)
    return Plan(tuple(p for p in rebind_tables(old, problem).placements
                      if p.shard.table in tables and max(p.devices) < n_devices))
