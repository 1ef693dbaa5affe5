"""Re-plan: improve an existing plan while most of its weights stay in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.types import MIN_WIDTH, Placement, Plan, Problem, Shard, Table
from shardcore.core.validation import (
    MOST_BYTES,
    MOST_COUNT,
    MOST_SEED,
    require,
    require_types,
    require_within,
)
from shardcore.cost.model import CostModel
from shardcore.plans.diff import Diff, diff, relabel_devices, reorder_columns
from shardcore.search.anneal.reshard import Reshard, rebind_tables
from shardcore.search.budget import Budget
from shardcore.search.decisions.driver import Decision, Found, Outcome, Proposal
from shardcore.search.portfolio import annealing
from shardcore.search.sharders import DEFAULT_SHARDER, SPACE_OF
from shardcore.search.state.shards import on_all_devices, priced
from shardcore.step.kinds import WHOLE_ROWS, device_names, shards_on
from shardcore.step.lower import require_plan
from shardcore.step.memory import fits, held_bytes, require_fits, used_bytes
from shardcore.tables.hot_rows import as_cold

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

    def __post_init__(self) -> None:
        require_types(self, "re-plan config")
        require_within(
            self,
            "re-plan config",
            max_moved_tables=(0, MOST_COUNT),
            max_moved_bytes=(0, MOST_BYTES),
            seed=(0, MOST_SEED),
        )

    @property
    def limited(self) -> bool:
        """Whether moves are limited."""
        return self.max_moved_tables is not None or self.max_moved_bytes is not None

    @property
    def limits(self) -> str:
        """The limits in words."""
        said = [f"{self.max_moved_tables} tables"] * (self.max_moved_tables is not None)
        return " and ".join(said + [f"{self.max_moved_bytes} bytes"] * (self.max_moved_bytes is not None))

    def exceeded_by(self, moved: Diff) -> tuple[int, int]:
        """Tables and bytes that move beyond the limits. 0 or less: none."""
        return (
            0 if self.max_moved_tables is None else len(moved.moves) - self.max_moved_tables,
            0 if self.max_moved_bytes is None else moved.bytes - self.max_moved_bytes,
        )


def without_devices(old: Plan, before: Problem, now: Problem, gone: Sequence[int]) -> tuple[Plan, Problem]:
    """The old plan with its devices numbered as they are now, and the problem to re-plan.

    Devices that stay keep their order and come first, those that are gone last. Where the problem still has
    as many devices as before, numbers stay, and no table may live on those that are gone.

    before: the problem of the old plan.
    gone: indices of its devices.

    Raises ShardCoreError for a device that it does not have, or if more are missing than that.
    """
    n_before, n_now = len(before.topology), len(now.topology)
    if wrong := [d for d in gone if not 0 <= d < n_before]:
        raise ShardCoreError(
            f"device {wrong[0]} of problem {before.name!r} cannot be gone; it has devices 0 to {n_before - 1}"
        )
    left = [d for d in range(n_before) if d not in gone]
    if not left:
        raise ShardCoreError(
            f"all {n_before} devices of problem {before.name!r} are gone; it needs to have one left"
        )
    if n_now == n_before:
        if not gone:
            return old, now
        pins = {t.name: sorted(set(now.allowed_devices(t.name)) - set(gone)) for t in now.tables}
        if empty := [name for name, devices in pins.items() if not devices]:
            raise Infeasible(
                f"table {empty[0]!r} may live on {device_names(now.allowed_devices(empty[0]))} "
                "only, which are gone; pin it elsewhere"
            )
        return old, replace(now, constraints=replace(now.constraints, pinned=tuple(pins.items())))
    if gone and n_now < len(left):
        raise ShardCoreError(
            f"problem {now.name!r} has {n_now} devices; {before.name!r} has {len(left)} "
            f"without {device_names(gone)}: name all devices that are gone"
        )
    # What is gone gets numbers that the problem does not have.
    number = {d: i for i, d in enumerate(left)} | {d: n_now + i for i, d in enumerate(gone)}
    return replace(
        old, placements=tuple(replace(p, devices=tuple(number[d] for d in p.devices)) for p in old.placements)
    ), now


@dataclass(frozen=True)
class Start(Decision):
    """A plan that searches improve instead of planning afresh.

    old, before: the plan, and the problem that it was made for.
    gone: devices of that problem that are gone.
    algorithm: of the new plan. It has to anneal.
    config: limits on what moves.
    group: problem of a group that the plan is of. Problems of other groups are searched afresh.
    """

    old: Plan
    before: Problem
    gone: tuple[int, ...] = ()
    algorithm: str = DEFAULT_SHARDER
    config: ReplanConfig = field(default_factory=ReplanConfig)
    group: Problem | None = None

    name: ClassVar[str] = "plan to start from"
    level: ClassVar[int] = 5

    def __post_init__(self) -> None:
        require_types(self, "a plan to start from")
        require(
            self.algorithm in SPACE_OF,
            f"a plan to start from is for algorithm {', '.join(SPACE_OF)} only; got {self.algorithm}",
        )

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Proposal, Outcome, None]:
        """The problem, searched from the plan.

        Raises ShardCoreError for a plan with towers where the problem has none, as `without_devices`, and
        where moves are limited and groups are others.
        """
        if self.group and (problem.name, problem.topology) != (self.group.name, self.group.topology):
            require(
                not self.config.limited,
                f"at most {self.config.limits} may move; in groups of another size or layout every table does",
            )
            yield Proposal(words="afresh", problem=problem)
            return
        require(
            "tower_ratio" not in self.old.provenance or problem.job.tower_ratio is not None,
            "the plan to start from has towers; give the towers, too",
        )
        was, of = self.numbered(problem)

        def search(own: Problem, fitting: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
            return replan(
                was,
                of,
                fitting,
                replace(self.config, space=SPACE_OF[self.algorithm], seed=seed, budget=budget),
            )

        yield Proposal(words="from the plan before", problem=problem, search=search)

    def numbered(self, problem: Problem) -> tuple[Plan, Problem]:
        """The old plan with devices and tables as the problem has them, and the problem to re-plan."""
        return without_devices(as_cold(self.old, problem), self.before, problem, sorted({*self.gone}))

    def moved(self, plan: Plan, problem: Problem) -> Diff:
        """The moves from the old plan to a new one."""
        was, of = self.numbered(problem)
        return diff(was, plan, problem, forced_moves(was, of))

    def adopt(self, proposal: Proposal, found: Found | None, model: CostModel) -> Found | None:
        if found is None or proposal.search is None:
            return found
        moved = self.moved(found.plan, found.problem).document()
        return replace(found, plan=replace(found.plan, provenance={**found.plan.provenance, "moved": moved}))


def forced_moves(old: Plan, problem: Problem) -> frozenset[str]:
    """Names of the old plan's tables that cannot stay where they are.

    Their device is gone or has too little memory, constraints are against it, or their kind cannot run so.
    """
    known = {p.shard.table.name for p in old.placements} & {t.name for t in problem.tables}
    return frozenset(known - {p.shard.table.name for p in _stays(old, problem).placements})


def replan(old: Plan, problem: Problem, model: CostModel, config: ReplanConfig) -> Plan:
    """The best plan found by annealing from the valid part of the old plan.

    New tables, and those of `forced_moves`, are placed freely, outside the move limit.
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
    if space != "all" and any(
        p.kind != WHOLE_ROWS.name and p.shard.table.name not in fixed for p in left.placements
    ):
        return None
    kept = priced(left.placements, problem, model)
    return replace(kept, provenance={**old.provenance, **kept.provenance})


def _searched(old: Plan, problem: Problem, model: CostModel, config: ReplanConfig, space: str) -> Plan:
    def search(reshard: Reshard | None) -> Plan:
        return annealing(problem, model, seed=config.seed, budget=config.budget, space=space, reshard=reshard)

    if not _left(old, problem).placements:  # all tables are new
        return search(None)
    try:
        stays = _stays(old, problem)
        if stays.placements:
            require_fits(stays, problem)  # in the memory of hosts, too
        if config.limited:
            # Relabelling devices could move more than the limit allows.
            names = {p.shard.table.name for p in stays.placements}
            was = Plan(tuple(p for p in old.placements if p.shard.table.name in names))
            return _moving_little(
                was,
                config,
                lambda tables, n_bytes: reorder_columns(
                    _with_room(stays, problem, lambda start: search(Reshard(start, tables, n_bytes))), old
                ),
            )
        found = search(Reshard(stays))
    except ShardCoreError:
        # A fresh search cannot respect a limit on moves.
        if config.limited:
            raise
        found = search(None)
    return relabel_devices(found, old, problem)


def _moving_little(was: Plan, config: ReplanConfig, search: Callable[[int | None, int | None], Plan]) -> Plan:
    """The plan of a search that moves no more than the limits.

    Annealing counts what moves before columns are dealt out to devices, and new rows as if they moved. So
    where its plan moves more, it searches again with limits that are lower by as much.

    was: of the old plan, what would stay if nothing may move.
    """
    tables, n_bytes = config.max_moved_tables, config.max_moved_bytes
    for _ in range(_TRIES):
        found = search(tables, n_bytes)
        too_many, too_much = config.exceeded_by(diff(was, found))
        if too_many <= 0 and too_much <= 0:
            return found
        tables = None if tables is None else max(0, tables - max(0, too_many))
        n_bytes = None if n_bytes is None else max(0, n_bytes - max(0, too_much))
    raise Infeasible(f"no plan was found that moves at most {config.limits}; allow more to move")


def _with_room(stays: Plan, problem: Problem, search: Callable[[Plan], Plan]) -> Plan:
    """The plan of a search from what stays. It places the other tables uncut.

    Where they find no room so, they are placed in parts first.
    """
    try:
        return search(stays)
    except Infeasible:
        if (start := _filled_up(stays, problem)) is None:
            raise
        return search(start)


def _filled_up(stays: Plan, problem: Problem) -> Plan | None:
    """A plan of what stays, and of the others in the fewest equal parts, each where most memory is left.

    None: a table finds no room. Tables that constraints bind to others, or to a kind, are left out.
    """
    bound = {*problem.bundle_of, *dict(problem.constraints.kinds)}
    there = {p.shard.table.name for p in stays.placements} | bound
    filled: Plan | None = stays
    for table in sorted((t for t in problem.tables if t.name not in there), key=lambda t: -t.bytes):
        if (filled := _in_parts(table, filled, problem)) is None:
            break
    return filled


def _in_parts(table: Table, plan: Plan, problem: Problem) -> Plan | None:
    units, allowed = table.dim // MIN_WIDTH, problem.allowed_devices(table.name)
    whole = table.name in problem.constraints.unsplit
    for n in (n for n in range(1, 2 if whole else units + 1) if units % n == 0 and n <= len(allowed)):
        used = used_bytes(plan, problem) if plan.placements else [0] * len(problem.topology)
        left = np.array(held_bytes(problem)) - used
        roomiest = sorted(allowed, key=lambda d: -left[d])[:n]
        width = table.dim // n
        parts = (
            Placement(WHOLE_ROWS.name, Shard(table, 0, table.rows, i * width, (i + 1) * width), (d,))
            for i, d in enumerate(roomiest)
        )
        filled = Plan((*plan.placements, *parts))
        if fits(filled, problem):
            return filled
    return None


def _left(old: Plan, problem: Problem) -> Plan:
    """The old plan's placements of tables that the problem still has, with all of their devices."""
    rebound, n_devices = rebind_tables(old, problem).placements, len(problem.topology)
    tables = set(problem.tables) - {p.shard.table for p in rebound if max(p.devices) >= n_devices}
    return Plan(tuple(p for p in rebound if p.shard.table in tables))


def _stays(old: Plan, problem: Problem) -> Plan:
    """The part of the old plan that can stay. Tables of a fixed kind are no part of it.

    Where a device would hold more than it may, tables leave it: the smallest that is enough, or the largest.
    """
    left, fixed = _left(old, problem), {t.name for t in problem.tables if on_all_devices(t, problem)}
    free = Plan(tuple(p for p in left.placements if p.shard.table.name not in fixed))
    gone = {t.name for t in Reshard(free).sorted(problem).new}
    while True:
        stays = Plan(tuple(p for p in left.placements if p.shard.table.name not in gone))
        used = used_bytes(stays, problem) if stays.placements else [0] * len(problem.topology)
        too_much = [n - may_hold for n, may_hold in zip(used, held_bytes(problem), strict=True)]
        worst = max(range(len(used)), key=too_much.__getitem__)
        on_it = _weights_on(worst, stays, fixed)
        if too_much[worst] <= 0 or not on_it:
            return Plan(tuple(p for p in stays.placements if p.shard.table.name not in fixed))
        enough = {name: n for name, n in on_it.items() if n >= too_much[worst]}
        gone.add(min(enough, key=enough.__getitem__) if enough else max(on_it, key=on_it.__getitem__))


def _weights_on(device: int, plan: Plan, fixed: Collection[str]) -> dict[str, int]:
    """Bytes of weights of each table on a device, but for tables of a fixed kind."""
    found: dict[str, int] = {}
    for p in plan.placements:
        if device in p.devices and p.shard.table.name not in fixed:
            n_bytes = sum(shard.bytes for d, shard in shards_on(p) if d == device)
            found[p.shard.table.name] = found.get(p.shard.table.name, 0) + n_bytes
    return found
