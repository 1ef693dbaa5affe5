"""Re-plan: improve an existing plan while most of its weights stay in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.layouts import WHOLE_ROWS
from shardcore.memory import require_fits
from shardcore.publish.diff import diff, rebind_tables, relabel_devices, reorder_columns
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.budget import Budget
from shardcore.search.portfolio import annealing
from shardcore.search.shards import on_all_devices, priced
from shardcore.types import Plan, Problem
from shardcore.workload import require_plan

_TRIES = 4
"""Searches under a limit on what moves, at most."""


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

    New tables, and tables with a part on a device that is gone, are placed freely, outside the move limit.
    Without a limit, a new search replaces an old plan that cannot be a start. An old plan that still is one
    of the problem and of the space stays, if none cheaper is found.

    Raises Infeasible if no plan is found. Raises ShardCoreError if moves are limited and the old plan cannot
    be a start.
    """
    space = config.space or old.provenance.get("space", "all")
    kept = _kept(old, problem, model, space)
    try:
        found = _searched(old, problem, model, config, space)
    except ShardCoreError:
        if kept is None:
            raise
        return kept
    return kept if kept and kept.provenance["predicted_ms"] <= found.provenance["predicted_ms"] else found


def _kept(old: Plan, problem: Problem, model: CostModel, space: str) -> Plan | None:
    """The old plan, priced anew. None if it is none of the problem, or not of the space."""
    fixed = {t.name for t in problem.tables if on_all_devices(t, problem)}
    try:
        left = _left(old, problem)
        require_plan(left, problem)
    except ShardCoreError:
        return None
    if space != "all" and any(p.kind != WHOLE_ROWS.name and p.shard.table.name not in fixed
                              for p in left.placements):
        return None
    kept = priced(left.placements, problem, model)
    return replace(kept, provenance={**old.provenance, **kept.provenance})


def _searched(old: Plan, problem: Problem, model: CostModel, config: ReplanConfig, space: str) -> Plan:
    left = _left(old, problem)
    fixed = {t.name for t in problem.tables if on_all_devices(t, problem)}

    def search(reshard: Reshard | None) -> Plan:
        return annealing(problem, model, seed=config.seed, budget=config.budget, space=space, reshard=reshard)

    if not left.placements:  # all tables are new
        return search(None)
    free = Plan(tuple(p for p in left.placements if p.shard.table.name not in fixed))
    try:
        require_fits(left, problem)
        if config.limited:
            # What constraints move does not count. Relabelling devices could move more than the limit allows.
            new = set(Reshard(free).sorted(problem).new)
            stay = Plan(tuple(p for p in free.placements if p.shard.table not in new))
            return _moving_little(stay, config, lambda tables, n_bytes: reorder_columns(
                search(Reshard(free, tables, n_bytes)), old))
        found = search(Reshard(free))
    except ShardCoreError:
        # A fresh search cannot respect a limit on moves.
        if config.limited:
            raise
        found = search(None)
    return relabel_devices(found, old, problem)


def _moving_little(stay: Plan, config: ReplanConfig,
                   search: Callable[[int | None, int | None], Plan]) -> Plan:
    """The plan of a search that moves no more than the limits.

    Annealing counts what moves before columns are dealt out to devices. So where its plan moves more, it
    searches again with limits that are lower by as much.

    stay: of the old plan, what would stay if nothing may move.
    """
    tables, n_bytes = config.max_moved_tables, config.max_moved_bytes
    for _ in range(_TRIES):
        found = search(tables, n_bytes)
        moved = diff(stay, found)
        too_many = 0 if tables is None else len(moved.moves) - config.max_moved_tables
        too_much = 0 if n_bytes is None else moved.bytes - config.max_moved_bytes
        if too_many <= 0 and too_much <= 0:
            return found
        tables = None if tables is None else max(0, tables - max(0, too_many))
        n_bytes = None if n_bytes is None else max(0, n_bytes - max(0, too_much))
    limits = [f"{config.max_moved_tables} tables"] * (config.max_moved_tables is not None)
    limits += [f"{config.max_moved_bytes} bytes"] * (config.max_moved_bytes is not None)
    raise Infeasible(f"no plan was found that moves at most {' and '.join(limits)}; allow more to move")


def _left(old: Plan, problem: Problem) -> Plan:
    """The old plan's placements of tables that the problem still has, with all of their devices."""
    rebound, n_devices = rebind_tables(old, problem).placements, len(problem.topology)
    tables = set(problem.tables) - {p.shard.table for p in rebound if max(p.devices) >= n_devices}
    return Plan(tuple(p for p in rebound if p.shard.table in tables))
