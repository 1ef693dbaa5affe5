"""Re-plan: improve an existing plan while most of its weights stay in place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar

import numpy as np

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import (
    MOST_BYTES,
    MOST_COUNT,
    MOST_SEED,
    Record,
    number_within,
    require,
)
from shardcore.cost.model import CostModel
from shardcore.cost.move_rates import MoveRates
from shardcore.plans.diff import PlanDiff, device_shard_pairs, diff_plans, relabel_devices, reorder_columns
from shardcore.plans.move_price import MovePrice, price_move
from shardcore.search.anneal.reshard import Reshard, rebind_tables
from shardcore.search.budget import Budget
from shardcore.search.decisions.driver import Decision, FoundPlan, Proposal, ProposalOutcome
from shardcore.search.portfolio import search_with_annealing
from shardcore.search.sharders import DEFAULT_SHARDER, SPACE_OF
from shardcore.search.state.column_parts import parts_of_plan
from shardcore.search.state.packing import least_excess_plan
from shardcore.search.state.shards import CONCESSION, priced_plan
from shardcore.step.kinds import device_names, sharding_kind_by_name
from shardcore.step.lower import require_valid_plan
from shardcore.step.memory import plan_fits, usable_bytes, used_bytes
from shardcore.step.ways import must_be_on_all_devices
from shardcore.tables.hot_rows import rename_to_cold_parts

_TRIES = 4
"""Searches under a limit on what moves, at most."""


@dataclass(frozen=True)
class ReplanConfig(Record, noun="re-plan config"):
    """Settings of a re-plan: limits on moved tables and bytes, pause and payback.

    max_moved_tables: tables that may move. None: any number.
    max_moved_bytes: bytes of weights that may move. None: any number.
    max_pause_s: seconds that a job stands still while its tables move, at most. None: any number.
    pay_back_in_s: seconds in which the gain makes up for that pause, at most. None: any number.
    move_rates: rates of the machine, for the pause (see `move_price`). None: bytes on links alone count.
    space: search space of annealing (see search.anneal.sharder.SPACES). None: that of the old plan.
    seed: seed of the search.
    budget: budget of the search. None: the default.
    """

    max_moved_tables: Annotated[int | None, number_within(0, MOST_COUNT)] = None
    max_moved_bytes: Annotated[int | None, number_within(0, MOST_BYTES)] = None
    max_pause_s: Annotated[float | None, number_within(0, MOST_COUNT)] = None
    pay_back_in_s: Annotated[float | None, number_within(0, MOST_COUNT)] = None
    move_rates: MoveRates | None = None
    space: str | None = None
    seed: Annotated[int, number_within(0, MOST_SEED)] = 0
    budget: Budget | None = None

    @property
    def limits_moves(self) -> bool:
        """True if the tables or bytes that may move are limited."""
        return self.max_moved_tables is not None or self.max_moved_bytes is not None

    def accepts_move(self, price: MovePrice, before_ms: float, now_ms: float) -> bool:
        """Tell if a move pauses the job, and pays back, within the limits."""
        return (self.max_pause_s is None or price.pause_s <= self.max_pause_s) and (
            self.pay_back_in_s is None or price.payback_s(before_ms, now_ms) <= self.pay_back_in_s
        )

    @property
    def limits_text(self) -> str:
        """Limits on moved tables and bytes, in words."""
        limits = {"tables": self.max_moved_tables, "bytes": self.max_moved_bytes}
        return " and ".join(f"{most} {unit}" for unit, most in limits.items() if most is not None)

    def moves_beyond_limits(self, moved: PlanDiff) -> tuple[int, int]:
        """Number of tables, and of bytes, by which moves exceed the limits; 0 or less within the limits."""
        return (
            0 if self.max_moved_tables is None else len(moved.moves) - self.max_moved_tables,
            0 if self.max_moved_bytes is None else moved.bytes - self.max_moved_bytes,
        )


def renumber_devices(
    old: Plan, old_problem: Problem, new_problem: Problem, lost_devices: Sequence[int]
) -> tuple[Plan, Problem]:
    """Old plan with its devices numbered as in the new problem, and the problem to re-plan.

    Devices that stay keep their order and come first, those that are gone last. Where the problem still has
    as many devices as before, numbers stay, and no table may live on those that are gone.

    old_problem: the problem of the old plan.
    lost_devices: indices of its devices.

    Raises ShardCoreError for a device that it does not have, or if more are missing than that.
    """
    n_before, n_now = len(old_problem.topology), len(new_problem.topology)
    # Device numbers are those of the old problem.
    wrong = [d for d in lost_devices if not 0 <= d < n_before]
    require(
        not wrong,
        f"{device_names(wrong)} of problem {old_problem.name!r} cannot be gone; it has devices 0 to {n_before - 1}",
    )
    left = [d for d in range(n_before) if d not in lost_devices]
    require(
        bool(left),
        f"all {n_before} devices of problem {old_problem.name!r} are gone; it needs to have one left",
    )
    if n_now == n_before:
        if not lost_devices:
            return old, new_problem
        # Devices that are gone are still in the problem, so pins keep tables away from them.
        pins = {
            t.name: sorted(set(new_problem.allowed_devices(t.name)) - set(lost_devices))
            for t in new_problem.tables
        }
        if empty := [name for name, devices in pins.items() if not devices]:
            raise Infeasible(
                f"table {empty[0]!r} may live on {device_names(new_problem.allowed_devices(empty[0]))} "
                "only, which are gone; pin it elsewhere"
            )
        return old, replace(
            new_problem, constraints=replace(new_problem.constraints, pinned=tuple(pins.items()))
        )
    # Fewer devices than are left: which ones are missing is unknown.
    require(
        not lost_devices or n_now >= len(left),
        f"problem {new_problem.name!r} has {n_now} devices; {old_problem.name!r} has {len(left)} "
        f"without {device_names(lost_devices)}: name all devices that are gone",
    )
    # Devices that are gone get numbers that the problem does not have.
    number = {d: i for i, d in enumerate(left)} | {d: n_now + i for i, d in enumerate(lost_devices)}
    placements = (replace(p, devices=tuple(number[d] for d in p.devices)) for p in old.placements)
    return replace(old, placements=tuple(placements)), new_problem


@dataclass(frozen=True)
class Start(Decision, noun="a plan to start from"):
    """A plan that searches improve instead of planning afresh.

    old: the plan.
    before: the problem that it was made for.
    gone: devices of that problem that are gone.
    algorithm: sharder of the new plan. It has to anneal.
    config: limits on moves.
    group: the group's problem of a grouped plan. Problems of other groups are searched afresh.
    """

    old: Plan
    before: Problem
    gone: tuple[int, ...] = ()
    algorithm: str = DEFAULT_SHARDER
    config: ReplanConfig = field(default_factory=ReplanConfig)
    group: Problem | None = None

    name: ClassVar[str] = "plan to start from"
    level: ClassVar[int] = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.algorithm in SPACE_OF,
            f"a plan to start from is for algorithm {', '.join(SPACE_OF)} only; got {self.algorithm}",
        )

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Proposal, ProposalOutcome, None]:
        """Problem to be searched from the old plan.

        Raises ShardCoreError for a plan with towers where the problem has none, as `renumber_devices`, and
        where moves are limited and groups are others.
        """
        if self.group and not (problem.name == self.group.name and _have_same_topology(problem, self.group)):
            require(
                not self.config.limits_moves,
                f"at most {self.config.limits_text} may move; in groups of another size or layout every table does",
            )
            yield Proposal(words="afresh", problem=problem)
            return
        require(
            # A plan with towers has pinned its tables to hosts.
            "tower_ratio" not in self.old.provenance or problem.job.tower_ratio is not None,
            "the plan to start from has towers; give the towers, too",
        )
        # Numbers and names of the old plan are brought to the new problem first.
        old, now = self.renumbered_plan(problem)

        def search(
            problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None
        ) -> Plan:
            config = replace(self.config, space=SPACE_OF[self.algorithm], seed=seed, budget=budget)
            return replan(old, now, model, config)

        yield Proposal(words="from the plan before", problem=problem, search=search)

    def renumbered_plan(self, problem: Problem) -> tuple[Plan, Problem]:
        """Old plan with devices and tables numbered and named as in the new problem, and the problem to re-plan."""
        return renumber_devices(
            rename_to_cold_parts(self.old, problem), self.before, problem, sorted({*self.gone})
        )

    def moves_to_plan(self, plan: Plan, problem: Problem) -> PlanDiff:
        """Moves from the old plan to a new one."""
        old, now = self.renumbered_plan(problem)
        return diff_plans(old, plan, problem, tables_forced_to_move(old, now))

    def move_price(self, plan: Plan, problem: Problem, model: CostModel) -> MovePrice:
        """Price of moving a running job from the old plan to a new one."""
        old, _ = self.renumbered_plan(problem)
        return price_move(old, plan, problem, model.for_problem(problem), self.config.move_rates)

    def adopt(self, proposal: Proposal, found: FoundPlan, problem: Problem, model: CostModel) -> FoundPlan:
        if proposal.search is None:
            # A search afresh starts from no plan, so it has no moves to record.
            return found
        moved = self.moves_to_plan(found.plan, found.problem).to_json()
        if not self.gone and _have_same_topology(found.problem, self.before):  # a job that runs can be moved
            moved["price"] = self.move_price(found.plan, found.problem, model).to_json()
        provenance = {**found.plan.provenance, "moved": moved}
        return replace(found, plan=replace(found.plan, provenance=provenance))


def _have_same_topology(a: Problem, b: Problem) -> bool:
    """Tell if two problems have the same topology, apart from the domain over which rows are divided."""
    one, other = (replace(x.topology, rows_over=None) for x in (a, b))
    return one == other


def tables_forced_to_move(old: Plan, problem: Problem) -> frozenset[str]:
    """Names of the old plan's tables that cannot keep their places under the new problem.

    Their device is gone or has too little memory, or constraints or their kind forbid it.
    """
    # Tables that are new have no place to keep.
    known = old.placements_by_table().keys() & {t.name for t in problem.tables}
    return frozenset(known - _staying_plan(old, problem).placements_by_table().keys())


def replan(old: Plan, problem: Problem, model: CostModel, config: ReplanConfig) -> Plan:
    """Best plan that annealing finds from the old plan's valid placements, within limits on moves.

    New tables, and those of `tables_forced_to_move`, are placed freely, outside the move limit.
    Without a limit, a new search replaces an old plan that cannot be a start. An old plan that still is one
    of the problem and of the space stays, if none cheaper is found.

    Annealing counts moves before columns are dealt out to devices, counts new rows as moved, and knows no pauses.
    So where its plan moves more, or pauses longer, than it may, it searches again with lower limits. Else the old
    plan stays, if it can.

    Raises Infeasible if no plan is found. Raises ShardCoreError if moves are limited and the old plan cannot
    be a start.
    """
    space = config.space or old.provenance.get("space", "all")
    kept = _kept_plan(old, problem, model, space)
    pauses = kept is not None and (config.max_pause_s, config.pay_back_in_s) != (None, None)
    budget, limits = config.budget, config
    # Tries for a pause share the seconds, so that all together keep the budget.
    if pauses and budget is not None and budget.seconds is not None:
        budget = replace(budget, seconds=budget.seconds / _TRIES)

    search = partial(search_with_annealing, problem, model, seed=config.seed, budget=budget, space=space)
    for _ in range(_TRIES):
        try:
            plan = _searched_plan(old, problem, limits, search)
        except ShardCoreError:
            if kept is None:
                raise
            return kept
        before_ms, now_ms = (x.provenance["predicted_ms"] for x in (kept or plan, plan))
        # Of plans that cost about the same the kept one counts.
        if kept and before_ms <= (1 + CONCESSION) * now_ms:
            return kept
        # Forced moves do not count.
        forced = tables_forced_to_move(old, problem) if config.limits_moves else ()
        moved = diff_plans(old, plan, forced=forced).voluntary_moves
        too_many, too_much = (max(0, excess) for excess in config.moves_beyond_limits(moved))
        tables, n_bytes = limits.max_moved_tables, limits.max_moved_bytes
        if too_many or too_much:
            tables, n_bytes = tables and max(0, tables - too_many), n_bytes and max(0, n_bytes - too_much)
        elif not pauses or config.accepts_move(
            price_move(old, plan, problem, model, config.move_rates), before_ms, now_ms
        ):
            return plan
        else:
            # The pause follows from bytes, so that half of them pause about half as long.
            n_bytes = moved.bytes // 2
        limits = replace(limits, max_moved_tables=tables, max_moved_bytes=n_bytes)
    if kept is None:
        raise Infeasible(f"no plan was found that moves at most {config.limits_text}; allow more to move")
    return kept


def _kept_plan(old: Plan, problem: Problem, model: CostModel, space: str) -> Plan | None:
    """Old plan with its current price; None if the plan is not valid for the problem, or not in the search space."""
    try:
        left = _plan_of_remaining_tables(old, problem)
        require_valid_plan(left, problem)
    except ShardCoreError:
        return None
    # Other kinds are in a space of columns only where a table has no choice.
    others = [p.shard.table for p in left.placements if not sharding_kind_by_name(p.kind).is_on_one_device]
    if space != "all" and not all(must_be_on_all_devices(table, problem) for table in others):
        return None
    price = priced_plan(left.placements, problem, model).provenance
    # The old origin stays, and the new price replaces the old one. Columns stay where they are, in any order.
    return replace(left, provenance={**old.provenance, **price})


def _searched_plan(old: Plan, problem: Problem, limits: ReplanConfig, search: Callable[..., Plan]) -> Plan:
    """Plan searched from the part of the old plan that stays. Without limits on moves, of a fresh search if that fails.

    search: of the problem, afresh or from a `reshard`.
    """
    tables, n_bytes = limits.max_moved_tables, limits.max_moved_bytes
    try:
        stays = _staying_plan(old, problem)
        try:
            searched = search(reshard=Reshard(stays, tables, n_bytes) if stays.placements else None)
        except Infeasible:
            # Annealing places the other tables uncut. Where they find no room so, a packing cuts them.
            packed = _packed_plan(stays, problem) if limits.limits_moves else None
            if packed is None:
                raise
            searched = search(reshard=Reshard(packed, tables, n_bytes))
    except ShardCoreError:
        # A fresh search cannot respect a limit on moves.
        if limits.limits_moves:
            raise
        searched = search()
    # Devices that are renumbered could move more than the limits allow.
    return reorder_columns(searched, old) if limits.limits_moves else relabel_devices(searched, old, problem)


def _packed_plan(kept_plan: Plan, problem: Problem) -> Plan | None:
    """Partial plan completed by packing its missing tables into free memory; None if none are missing or they do not
    fit.
    """
    there = kept_plan.placements_by_table()
    missing = tuple(t for t in problem.tables if t.name not in there)
    if not kept_plan.placements or not missing:
        return None
    devices = (
        replace(device, memory_bytes=max(1, device.memory_bytes - used))
        for device, used in zip(problem.topology.devices, used_bytes(kept_plan, problem), strict=True)
    )
    constraints = problem.constraints.restricted_to({t.name for t in missing})
    topology = problem.topology.with_devices(devices)
    packing, _ = least_excess_plan(
        replace(problem, tables=missing, topology=topology, constraints=constraints)
    )
    packed = Plan((*kept_plan.placements, *(packing.placements if packing else ())))
    return packed if plan_fits(packed, problem) else None


def _plan_of_remaining_tables(old: Plan, problem: Problem) -> Plan:
    """Old plan's placements of tables that the problem still has and whose devices all remain."""
    rebound, n_devices = rebind_tables(old, problem).placements, len(problem.topology)
    # A placement on a device that is gone takes its whole table along.
    tables = set(problem.tables) - {p.shard.table for p in rebound if max(p.devices) >= n_devices}
    return Plan(tuple(p for p in rebound if p.shard.table in tables))


def _staying_plan(old: Plan, problem: Problem) -> Plan:
    """Old plan's placements that can stay, without tables of a fixed kind.

    Where a device would hold more than it may, tables leave it: the smallest that is enough, or the largest.
    """
    remaining = _plan_of_remaining_tables(old, problem)
    tables, parts = remaining.placements_by_table(), parts_of_plan(remaining, problem)
    fixed = [p for t in problem.tables if must_be_on_all_devices(t, problem) for p in tables.pop(t.name, [])]
    searched = parts.split_plan(Plan(tuple(chain(*tables.values()))))
    for table in Reshard(searched).tables_in_old_plan(parts.problem).new:
        tables.pop(parts.tables[table.name][0].name if table.name in parts.tables else table.name, None)
    while tables:
        stays = tuple(chain(*tables.values()))
        # The device with the largest excess gives up tables first.
        excess = np.subtract(used_bytes(Plan((*fixed, *stays)), problem), usable_bytes(problem))
        worst = int(np.argmax(excess))
        there = {
            name: sum(shard.bytes for device, shard in device_shard_pairs(placements) if device == worst)
            for name, placements in tables.items()
        }
        if excess[worst] <= 0 or not any(there.values()):
            return Plan(stays)
        # Those that are enough come first, then the nearest to that.
        del tables[
            min(there, key=lambda name: (there[name] < excess[worst], abs(there[name] - excess[worst])))
        ]
    return Plan(())
