"""Re-plan: improve a plan that there is, while most of its weights stay where they are."""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.cost.model import CostModel
from shardcore.errors import ShardCoreError
from shardcore.memory import require_fits
from shardcore.publish.diff import rebind_tables, relabel_devices, reorder_columns
from shardcore.search.anneal.sharder import anneal
from shardcore.search.budget import Budget
from shardcore.types import Plan, Problem


@dataclass(frozen=True)
class ReplanConfig:
    """How to re-plan.

    max_moved_tables: so many tables may move. None: any number.
    max_moved_bytes: so many bytes of weights may move. None: any number.
    space: of annealing (see search.anneal.sharder.SPACES). None: the one that the old plan was searched in.
    seed: of the search.
    budget: of the search. None: its own.
    """

    max_moved_tables: int | None = None
    max_moved_bytes: int | None = None
    space: str | None = None
    seed: int = 0
    budget: Budget | None = None

    @property
    def limited(self) -> bool:
        return self.max_moved_tables is not None or self.max_moved_bytes is not None


def replan(old: Plan, problem: Problem, model: CostModel, config: ReplanConfig) -> Plan:
    """The best plan found by annealing from what is left of the old plan.

    Tables that are new, or that were on devices that are gone, are placed freely and do not count as moved.
    Without a limit on moves, an old plan that no search can start from is replaced by a search afresh. The
    plan found may be dearer than the old one, where that one is still possible and the budget is small.

    Raises Infeasible where no plan is found, and ShardCoreError where moves are limited and the old plan is
    none to start from.
    """
    from shardcore.search.anneal.search_space import Reshard  # compiled code: loaded when a search runs

    space = config.space or old.provenance.get("space", "all")
    left = _left(old, problem)
    try:
        require_fits(left, problem)
        reshard = Reshard(left, config.max_moved_tables, config.max_moved_bytes)
        found = anneal(problem, model, seed=config.seed, budget=config.budget, space=space, reshard=reshard)
    except ShardCoreError:
        if config.limited:
            raise
        found = anneal(problem, model, seed=config.seed, budget=config.budget, space=space)
    return reorder_columns(found, old) if config.limited else relabel_devices(found, old, problem)


def _left(old: Plan, problem: Problem) -> Plan:
    """What of the old plan is of tables and on devices that the problem has."""
    tables, n_devices = set(problem.tables), len(problem.topology)
    return Plan(tuple(p for p in rebind_tables(old, problem).placements
                      if p.shard.table in tables and max(p.devices) < n_devices))
