"""Re-plan: improve an existing plan while most of its weights stay in place."""

from __future__ import annotations

from collections import Counter
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
from shardcore.cost.move_rates import MoveRates
from shardcore.plans.diff import Diff, diff, relabel_devices, reorder_columns
from shardcore.plans.move_price import MovePrice, price_move
from shardcore.search.anneal.reshard import Reshard, rebind_tables
from shardcore.search.budget import Budget
from shardcore.search.decisions.driver import Decision, Found, Outcome, Proposal
from shardcore.search.portfolio import annealing
from shardcore.search.sharders import DEFAULT_SHARDER, SPACE_OF
from shardcore.search.state.halves import halves_of
from shardcore.search.state.shards import CONCESSION, on_all_devices, priced
from shardcore.step.kinds import WHOLE_ROWS, device_names, shards_on
from shardcore.step.lower import require_plan
from shardcore.step.memory import fits, held_bytes, require_fits, used_bytes
from shardcore.tables.hot_rows import as_cold

_TRIES = 4
"""Searches under a limit on what moves, at most."""


@dataclass(frozen=True)
class ReplanConfig:
    """Settings of a re-plan.

    max_moved_tables: tables that may move. None: any number.
    max_moved_bytes: bytes of weights that may move. None: any number.
    max_pause_s: seconds that a job stands still while its tables move, at most. None: any number.
    pay_back_in_s: seconds in which the gain makes up for that pause, at most. None: any number.
    move_rates: rates of the machine, for the pause (see `move_price`). None: bytes on links alone count.
    space: search space of annealing (see search.anneal.sharder.SPACES). None: that of the old plan.
    seed: seed of the search.
    budget: budget of the search. None: the default.
    """

    max_moved_tables: int | None = None
    max_moved_bytes: int | None = None
    max_pause_s: float | None = None
    pay_back_in_s: float | None = None
    move_rates: MoveRates | None = None
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
            max_pause_s=(0, MOST_COUNT),
            pay_back_in_s=(0, MOST_COUNT),
            seed=(0, MOST_SEED),
        )

    @property
    def limited(self) -> bool:
        """True if moves are limited."""
        return self.max_moved_tables is not None or self.max_moved_bytes is not None

    def accepts(self, price: MovePrice, before_ms: float, now_ms: float) -> bool:
        """True if a move pauses, and pays back, within the limits."""
        return (self.max_pause_s is None or price.pause_s <= self.max_pause_s) and (
            self.pay_back_in_s is None or price.pays_back_s(before_ms, now_ms) <= self.pay_back_in_s
        )

    @property
    def limits(self) -> str:
        """The limits on tables and bytes in words."""
        limits = {"tables": self.max_moved_tables, "bytes": self.max_moved_bytes}
        return " and ".join(f"{most} {unit}" for unit, most in limits.items() if most is not None)

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
    # Device numbers are those of the old problem.
    if wrong := [d for d in gone if not 0 <= d < n_before]:
        raise ShardCoreError(
            f"device {wrong[0]} of problem {before.name!r} cannot be gone; it has devices 0 to {n_before - 1}"
        )
    left = [d for d in range(n_before) if d not in gone]
    require(
        bool(left), f"all {n_before} devices of problem {before.name!r} are gone; it needs to have one left"
    )
    if n_now == n_before:
        if not gone:
            return old, now
        # Devices that are gone are still in the problem, so pins keep tables away from them.
        pins = {t.name: sorted(set(now.allowed_devices(t.name)) - set(gone)) for t in now.tables}
        if empty := [name for name, devices in pins.items() if not devices]:
            raise Infeasible(
                f"table {empty[0]!r} may live on {device_names(now.allowed_devices(empty[0]))} "
                "only, which are gone; pin it elsewhere"
            )
        return old, replace(now, constraints=replace(now.constraints, pinned=tuple(pins.items())))
    # Fewer devices than are left: which ones are missing is unknown.
    if gone and n_now < len(left):
        raise ShardCoreError(
            f"problem {now.name!r} has {n_now} devices; {before.name!r} has {len(left)} "
            f"without {device_names(gone)}: name all devices that are gone"
        )
    # Devices that are gone get numbers that the problem does not have.
    number = {d: i for i, d in enumerate(left)} | {d: n_now + i for i, d in enumerate(gone)}
    placements = (replace(p, devices=tuple(number[d] for d in p.devices)) for p in old.placements)
    return replace(old, placements=tuple(placements)), now


@dataclass(frozen=True)
class Start(Decision):
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
        if self.group and not (problem.name == self.group.name and _same_devices(problem, self.group)):
            require(
                not self.config.limited,
                f"at most {self.config.limits} may move; in groups of another size or layout every table does",
            )
            yield Proposal(words="afresh", problem=problem)
            return
        require(
            # A plan with towers has pinned its tables to hosts.
            "tower_ratio" not in self.old.provenance or problem.job.tower_ratio is not None,
            "the plan to start from has towers; give the towers, too",
        )
        # Numbers and names of the old plan are brought to the new problem first.
        old, now = self.numbered(problem)

        def search(
            problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None
        ) -> Plan:
            config = replace(self.config, space=SPACE_OF[self.algorithm], seed=seed, budget=budget)
            return replan(old, now, model, config)

        yield Proposal(words="from the plan before", problem=problem, search=search)

    def numbered(self, problem: Problem) -> tuple[Plan, Problem]:
        """The old plan with devices and tables as the problem has them, and the problem to re-plan."""
        return without_devices(as_cold(self.old, problem), self.before, problem, sorted({*self.gone}))

    def moved(self, plan: Plan, problem: Problem) -> Diff:
        """The moves from the old plan to a new one."""
        old, now = self.numbered(problem)
        return diff(old, plan, problem, forced_moves(old, now))

    def price(self, plan: Plan, problem: Problem, model: CostModel) -> MovePrice:
        """The price of moving a running job from the old plan to a new one."""
        old, _ = self.numbered(problem)
        return price_move(old, plan, problem, model.for_problem(problem), self.config.move_rates)

    def adopt(self, proposal: Proposal, found: Found, problem: Problem, model: CostModel) -> Found:
        if proposal.search is None:
            # A search afresh starts from no plan, so it has no moves to record.
            return found
        moved = self.moved(found.plan, found.problem).document()
        if not self.gone and _same_devices(found.problem, self.before):  # a job that runs can be moved
            moved["price"] = self.price(found.plan, found.problem, model).document()
        provenance = {**found.plan.provenance, "moved": moved}
        return replace(found, plan=replace(found.plan, provenance=provenance))


def _same_devices(a: Problem, b: Problem) -> bool:
    """Tell if two problems have the same topology. One may leave open over which units rows are divided."""
    one, other = (replace(x.topology, rows_over=None) for x in (a, b))
    return one == other


def forced_moves(old: Plan, problem: Problem) -> frozenset[str]:
    """Names of the old plan's tables that cannot keep their places.

    Their device is gone or has too little memory, or constraints or their kind forbid it.
    """
    if halves := halves_of(was := rebind_tables(old, problem), problem):
        moves = forced_moves(halves.split(was), halves.problem)
        return frozenset(halves.tables[name][0].name if name in halves.tables else name for name in moves)
    # Tables that are new have no place to keep.
    known = old.by_table().keys() & {t.name for t in problem.tables}
    return frozenset(known - _staying_plan(old, problem).by_table().keys())


def replan(old: Plan, problem: Problem, model: CostModel, config: ReplanConfig) -> Plan:
    """The best plan that annealing finds from the valid placements of the old plan.

    New tables, and those of `forced_moves`, are placed freely, outside the move limit.
    Without a limit, a new search replaces an old plan that cannot be a start. An old plan that still is one
    of the problem and of the space stays, if none cheaper is found.

    Where the pause of a move is limited, searches move less and less, until one pauses little enough and pays
    back soon enough. Else the old plan stays, if it can.

    Raises Infeasible if no plan is found. Raises ShardCoreError if moves are limited and the old plan cannot
    be a start.
    """
    space = config.space or old.provenance.get("space", "all")
    if halves := halves_of(was := rebind_tables(old, problem), problem):
        plan = replan(halves.split(was), halves.problem, model, config)
        if halves.may_run(plan.placements):
            return halves.whole(plan, problem, model)
    kept = _kept_plan(old, problem, model, space)
    if (config.max_pause_s, config.pay_back_in_s) != (None, None) and kept is not None:
        return _plan_that_pays_back(old, kept, problem, model, config)
    try:
        searched = _searched_plan(old, problem, model, config, space)
    except ShardCoreError:
        if kept is None:
            raise
        return kept
    # Plans that cost about the same: nothing moves for one of them.
    if kept and kept.provenance["predicted_ms"] <= (1 + CONCESSION) * searched.provenance["predicted_ms"]:
        return kept
    return searched


def _plan_that_pays_back(
    old: Plan, kept: Plan, problem: Problem, model: CostModel, config: ReplanConfig
) -> Plan:
    """A plan whose move is within the limits on its pause, or the old plan."""
    # Tries share the seconds, so that all together keep the budget.
    before_ms, budget = kept.provenance["predicted_ms"], config.budget
    if budget is not None and budget.seconds is not None:
        budget = replace(budget, seconds=budget.seconds / _TRIES)
    free = replace(config, max_pause_s=None, pay_back_in_s=None, budget=budget)
    for _ in range(_TRIES):
        try:
            plan = replan(old, problem, model, free)
        except Infeasible:  # so little may not move
            break
        price = price_move(old, plan, problem, model, config.move_rates)
        if config.accepts(price, before_ms, plan.provenance["predicted_ms"]):
            return plan
        # The pause follows from bytes, so that half of them pause about half as long.
        free = replace(free, max_moved_bytes=diff(old, plan).bytes // 2)
    return kept


def _kept_plan(old: Plan, problem: Problem, model: CostModel, space: str) -> Plan | None:
    """The old plan, priced anew. None if it is not valid for the problem, or not in the space."""
    try:
        left = _remaining_plan(old, problem)
        require_plan(left, problem)
    except ShardCoreError:
        return None
    # Other kinds are in a space of columns only where a table has no choice.
    others = [p.shard.table for p in left.placements if p.kind != WHOLE_ROWS.name]
    if space != "all" and not all(on_all_devices(table, problem) for table in others):
        return None
    price = priced(left.placements, problem, model).provenance
    # The old origin stays, and the new price replaces the old one. Columns stay where they are, in any order.
    return replace(left, provenance={**old.provenance, **price})


def _searched_plan(old: Plan, problem: Problem, model: CostModel, config: ReplanConfig, space: str) -> Plan:
    def search(reshard: Reshard | None) -> Plan:
        return annealing(problem, model, seed=config.seed, budget=config.budget, space=space, reshard=reshard)

    if not _remaining_plan(old, problem).placements:  # all tables are new
        return search(None)
    try:
        stays = _staying_plan(old, problem)
        if stays.placements:
            require_fits(stays, problem)  # in the memory of hosts, too
        if config.limited:
            return _plan_within_limits(old, stays, problem, config, search)
        searched = search(Reshard(stays))
    except ShardCoreError:
        # A fresh search cannot respect a limit on moves.
        if config.limited:
            raise
        searched = search(None)
    return relabel_devices(searched, old, problem)


def _plan_within_limits(
    old: Plan, stays: Plan, problem: Problem, config: ReplanConfig, search: Callable[[Reshard], Plan]
) -> Plan:
    """The plan of a search that moves no more than the limits.

    Annealing counts moves before columns are dealt out to devices, and counts new rows as moved. So where its
    plan moves more, it searches again with limits that are lower by as much. It does not relabel devices,
    which could move more than the limits allow.

    stays: the placements of the old plan that stay if nothing may move.
    """
    # Forced moves do not count, so the limits compare with tables that can stay.
    names = stays.by_table().keys()
    before = Plan(tuple(p for p in old.placements if p.shard.table.name in names))
    tables, n_bytes = config.max_moved_tables, config.max_moved_bytes
    for _ in range(_TRIES):
        try:
            searched = search(Reshard(stays, tables, n_bytes))
        except Infeasible:
            # It places the other tables uncut. Where they find no room so, they are placed in parts first.
            if (start := _filled_up(stays, problem)) is None:
                raise
            searched = search(Reshard(start, tables, n_bytes))
        searched = reorder_columns(searched, old)
        too_many, too_much = config.exceeded_by(diff(before, searched))
        if too_many <= 0 and too_much <= 0:
            return searched
        # Lower each limit by its excess, and never below 0.
        tables = None if tables is None else max(0, tables - max(0, too_many))
        n_bytes = None if n_bytes is None else max(0, n_bytes - max(0, too_much))
    raise Infeasible(f"no plan was found that moves at most {config.limits}; allow more to move")


def _filled_up(stays: Plan, problem: Problem) -> Plan | None:
    """The plan with its missing tables in the fewest equal parts, each where most memory is left.

    None: a table finds no room. Tables that constraints bind to others, or to a kind, are left out.
    """
    left_out = {*stays.by_table(), *problem.bundle_of, *dict(problem.constraints.kinds)}
    for table in sorted((t for t in problem.tables if t.name not in left_out), key=lambda t: -t.bytes):
        filled = _in_parts(table, stays, problem)
        if filled is None:
            return None
        stays = filled
    return stays


def _in_parts(table: Table, plan: Plan, problem: Problem) -> Plan | None:
    """The plan with a table in the fewest equal parts that fit. None: it finds no room."""
    allowed = problem.allowed_devices(table.name)
    # Room on each device, less what the plan takes so far.
    left = np.array(held_bytes(problem)) - _used_bytes(plan, problem)
    roomiest = sorted(allowed, key=lambda d: -left[d])
    units = 1 if table.name in problem.constraints.unsplit else table.dim // MIN_WIDTH
    # Equal parts only: TorchRec cuts a sequence's columns into equal widths.
    for n in (n for n in range(1, len(allowed) + 1) if units % n == 0):
        width = table.dim // n
        parts = (
            Placement(WHOLE_ROWS.name, Shard(table, 0, table.rows, i * width, (i + 1) * width), (d,))
            for i, d in enumerate(roomiest[:n])
        )
        filled = Plan((*plan.placements, *parts))
        if fits(filled, problem):
            return filled
    return None


def _remaining_plan(old: Plan, problem: Problem) -> Plan:
    """The old plan's placements of tables that the problem still has, with all of their devices."""
    rebound, n_devices = rebind_tables(old, problem).placements, len(problem.topology)
    # A placement on a device that is gone takes its whole table along.
    tables = set(problem.tables) - {p.shard.table for p in rebound if max(p.devices) >= n_devices}
    return Plan(tuple(p for p in rebound if p.shard.table in tables))


def _staying_plan(old: Plan, problem: Problem) -> Plan:
    """The placements of the old plan that can stay, without tables of a fixed kind.

    Where a device would hold more than it may, tables leave it: the smallest that is enough, or the largest.
    """
    left = _remaining_plan(old, problem)
    fixed = {t.name for t in problem.tables if on_all_devices(t, problem)}
    gone = {t.name for t in Reshard(_without(left, fixed)).old_places(problem).new}
    while True:
        stays = _without(left, gone)
        # The device with the largest excess gives up tables first.
        excess = np.array(_used_bytes(stays, problem)) - held_bytes(problem)
        worst = int(np.argmax(excess))
        weights = _weights_on(worst, _without(stays, fixed))
        if excess[worst] <= 0 or not weights:
            return _without(stays, fixed)
        # The smallest table that frees enough, or else the largest one.
        enough = [name for name, n in weights.items() if n >= excess[worst]]
        gone.add(min(enough, key=weights.__getitem__) if enough else max(weights, key=weights.__getitem__))


def _without(plan: Plan, tables: Collection[str]) -> Plan:
    return Plan(tuple(p for p in plan.placements if p.shard.table.name not in tables))


def _used_bytes(plan: Plan, problem: Problem) -> Sequence[int]:
    """[D] bytes that a plan, which may be empty, needs on each device."""
    return used_bytes(plan, problem) if plan.placements else [0] * len(problem.topology)


def _weights_on(device: int, plan: Plan) -> Counter[str]:
    """Bytes of weights of each table on a device."""
    weights = Counter[str]()
    for d, shard in (pair for p in plan.placements for pair in shards_on(p)):
        if d == device:
            weights[shard.table.name] += shard.bytes
    return weights
