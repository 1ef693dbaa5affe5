"""The default search: several searches in turn, the cheapest plan of all.

1. The first round of annealing (anneal/), in the whole space.
2. The greedy baselines.
3. The first round again with hot tables in parts by columns: those that take more than half of a host's mean load, or
   sequences of a device's (state/column_parts.py).
4. Further rounds of annealing, of the better half of all these plans, each with twice the trials.
5. NeuroShard's beam, once annealing has taken about as long as the beam takes. Annealing improves its plan.

A budget in evaluations only says where this sequence ends. So a larger one never gives a dearer plan. A
budget in seconds also limits how many plans annealing starts from. Without a budget the sequence ends once
three quarters of all evaluations have made the best plan less than 0.1% cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.progress import OutOfTime, stopped_clock
from shardcore.core.types import Placement, Plan, Problem, Shard
from shardcore.cost.model import CostModel, group_op_ms, is_less
from shardcore.search import greedy
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.beam import Beam
from shardcore.search.budget import FEWEST_EVALS, LATE_SHARE, Budget, Meter
from shardcore.search.neuroshard import GreedyGrid, NeuroShardConfig
from shardcore.search.state.column_parts import even_cut_columns, may_cut_table
from shardcore.search.state.feasible import find_fitting_plan
from shardcore.search.state.shards import priced_plan
from shardcore.search.ties import cost_ranks
from shardcore.step.access import output_bytes
from shardcore.step.kinds import SHARDING_KINDS
from shardcore.step.ways import searched_tables

if TYPE_CHECKING:
    from shardcore.search.anneal.sharder import AnnealingSearch

_BEAM = NeuroShardConfig()
_HOT, _LEVELS = 0.5, (2.0, 4.0, 1.0)
"""Least load of a hot table, in mean loads of a host, or of a device for sequences. Parts for each such load.

The hottest table alone is also cut in two.
"""
_GRIDS = tuple(
    sharding_kind
    for sharding_kind in SHARDING_KINDS.values()
    if sharding_kind.divides_rows and sharding_kind.cuts_columns
)
"""Kinds by which a group may share the part of a table."""
_SPARE = 3.0
"""Greedy baselines and rounds with tables in parts need this multiple of the first round's seconds, and the beam that
of all rounds before."""


def search_with_portfolio(
    problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None
) -> Plan:
    """Find the cheapest plan of several searches in turn.

    budget: of all searches. None: until more trials bring less than 0.1%.

    Raises Infeasible if no search finds a plan, and SettingMismatch.
    """
    return _Anytime("portfolio", problem, model, seed, budget).best_plan("all", others=True)


def search_with_annealing(
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
    space: str = "all",
    reshard: Reshard | None = None,
) -> Plan:
    """Find the cheapest plan by annealing.

    budget: of all rounds. None: until more trials bring less than 0.1%.
    space: see anneal.sharder.SPACES.
    reshard: a plan to improve, and how much may move.

    Raises as `search_with_portfolio`, and ShardCoreError for an unknown space.
    """
    name = "anneal" if space == "all" else "anneal_columns"  # halves are for comparisons only
    return _Anytime(name, problem, model, seed, budget).best_plan(space, reshard=reshard)


class _Anytime:
    """A sequence of searches of one problem, and the cheapest plan so far."""

    def __init__(
        self, name: str, problem: Problem, model: CostModel, seed: int, budget: Budget | None
    ) -> None:
        problem.require_setting(model.setting)
        self.problem, self.model, self.name, self.seed = problem, model, name, seed
        # Rounds have no end of their own, so there is always some limit.
        self.meter = (budget or Budget()).with_default_end().start()
        self._curve: list[tuple[int, float]] = []  # evaluations, and the best cost, after each round
        self.best: Plan | None = None
        self.found_by = name
        self.error: Infeasible | None = None  # of the first plan that did not fit
        self._keeping_s = 0.0  # seconds to price a plan: with very many tables it takes long

    @property
    def best_ms(self) -> float:
        """Cost of the cheapest plan so far; infinite before the first plan."""
        return np.inf if self.best is None else self.best.provenance["predicted_ms"]

    def best_plan(self, space: str, others: bool = False, reshard: Reshard | None = None) -> Plan:
        """Cheapest plan of all searches when the budget ends.

        others: whether all searches take part, or annealing only.
        """
        if not searched_tables(self.problem):
            self._keep_if_cheapest((), self.name)
        else:
            self._run_searches(space, others, reshard)
        # Another plan than the one to start from would move more than its limits.
        if self.best is None and reshard is None:
            self._keep_if_cheapest(find_fitting_plan(self.problem).placements, self.name)
        if self.best is None:
            raise self.error or Infeasible(f"problem {self.problem.name!r}: no plan was found that fits")
        provenance = {
            "algorithm": self.name,
            "seed": self.seed,
            "space": space,
            "evals": self.meter.evals,
            **({"found_by": self.found_by} if self.found_by != self.name else {}),
            **({"within": self.meter.budget.within} if self._has_levelled_off() else {}),
            **self.best.provenance,
        }
        return replace(self.best, provenance=provenance)

    def _run_searches(self, space: str, others: bool, reshard: Reshard | None) -> None:
        """Run annealing, and all other searches if asked for, until the budget ends."""
        with stopped_clock():  # numba takes a second to import
            from shardcore.search.anneal.sharder import AnnealingSearch
        search = AnnealingSearch(self.problem, self.model, self.meter, self.seed)
        beam_evals = (
            self.meter.budget.threads_to_keep_busy * _annealing_trials_of_beam(self.problem)
            if others
            else None
        )
        began_s = self.meter.elapsed_s()
        for number in search.run_rounds(space, reshard):
            self._keep_annealed_plan(search)
            if number == 0 and len(self.problem.topology) > 1:
                took_s = self.meter.elapsed_s() - began_s
                # Where time is short, annealing has better use for it: its starts are greedy plans, too.
                for name, sharder in greedy.ORDERS.items() if others else ():
                    if self.meter.has_budget_left() and self.meter.has_time(_SPARE * took_s):
                        self._add_search(name, partial(sharder, self.problem, self.model, seed=self.seed))
                for cuts in self._cuts_of_hot_tables() if space == "all" and reshard is None else ():
                    # Of very many tables, the first round takes most of the time.
                    if self.meter.has_budget_left() and self.meter.has_time(_SPARE * took_s):
                        search.add_starts_with_cut_tables(cuts)
            if beam_evals is not None and self.meter.evals >= beam_evals:
                beam_evals = None
                has_time = self.meter.has_time(_SPARE * (self.meter.elapsed_s() - began_s))
                # The beam counts its own evaluations, but keeps to the same seconds.
                meter = Meter(Budget(seconds=self.meter.budget.seconds), self.meter.started_s)
                if has_time and (
                    plan := self._add_search(
                        "neuroshard",
                        lambda of=meter: Beam(
                            self.problem, self.model, GreedyGrid(_BEAM.scales), _BEAM, of
                        ).best_plan(),
                    )
                ):
                    # Annealing starts from it in its next round.
                    search.add_plan(plan.placements, space)
            self._curve.append((self.meter.evals, self.best_ms))
            if self._has_levelled_off():
                break
        self._keep_annealed_plan(search)

    def _has_levelled_off(self) -> bool:
        """Tell if a late share of all evaluations has made the best plan cheaper by less than the budget's `within`."""
        within, evals = self.meter.budget.within, self.meter.evals
        if within is None or evals < FEWEST_EVALS:
            return False
        earlier_ms = [ms for at, ms in self._curve if at <= (1 - LATE_SHARE) * evals]
        return self.best is not None and bool(earlier_ms) and earlier_ms[-1] <= (1 + within) * self.best_ms

    def _keep_annealed_plan(self, search: AnnealingSearch) -> None:
        # Pricing a plan takes long with very many tables, so only a new one is priced.
        if search.best is not None and is_less(search.best.ms, self.best_ms):
            self._keep_if_cheapest(search.best.placements, self.name, search.best.ms)

    def _cuts_of_hot_tables(self) -> list[dict[str, list[int]]]:
        """Ways to cut tables into parts that are too hot for one host, or sequences too hot for one device."""
        topology, tables = self.problem.topology, searched_tables(self.problem)
        in_grids = any(1 < len(group) < len(topology) for y in _GRIDS for group in y.device_groups(topology))
        whole = [Shard.whole(table) for table in tables]
        ms = group_op_ms([[shard] for shard in whole], self.model)
        n_bytes = np.array([output_bytes(shard, self.problem.global_batch) for shard in whole])
        # Outputs of a sequence are not pooled, and those of a table with few lookups may be wide: hot by either.
        share = np.maximum(*(x / max(x.sum(), 1e-300) for x in (ms, n_bytes)))
        most = [len(topology) if table.sequence else len(topology.hosts) * in_grids for table in tables]
        loads = share * most
        hot = {
            tables[i]: float(loads[i])
            for i in np.argsort(cost_ranks(-loads), kind="stable").tolist()
            if loads[i] > _HOT and may_cut_table(tables[i], self.problem)
        }
        ways = [{t.name: even_cut_columns(t, 2, self.problem) for t in islice(hot, 1)}]
        for level in _LEVELS:
            n_parts = {t: ceil(level * load) for t, load in hot.items() if level * load > 1}
            ways.append({t.name: even_cut_columns(t, n, self.problem) for t, n in n_parts.items()})
        return [cuts for i, cuts in enumerate(ways) if cuts and cuts not in ways[:i]]

    def _add_search(self, name: str, other: Callable[[], Plan]) -> Plan | None:
        """Run another search, and keep its plan if cheapest. None if the search finds no plan, or none in time."""
        self.meter.report_progress(name, self.best_ms)
        with suppress(Infeasible, OutOfTime):
            with self.meter.enforced_deadline(self._keeping_s) if self.best else nullcontext():
                plan = other()
            self._keep_if_cheapest(plan.placements, name, plan.provenance["predicted_ms"])
            return plan

    def _keep_if_cheapest(self, placements: Sequence[Placement], found_by: str, ms: float = 0.0) -> None:
        """Keep a plan if it fits and is the cheapest so far.

        placements: of all tables, or of those that have no fixed kind.
        ms: lower bound on its cost.
        """
        if not is_less(ms, self.best_ms):
            return
        before_s = self.meter.elapsed_s()
        try:
            plan = priced_plan(placements, self.problem, self.model, fits=True)
        except Infeasible as error:
            self.error = self.error or error
            return
        self._keeping_s = max(self._keeping_s, self.meter.elapsed_s() - before_s)
        if is_less(plan.provenance["predicted_ms"], self.best_ms):
            self.best, self.found_by = plan, found_by


def _annealing_trials_of_beam(problem: Problem) -> float:
    """Estimated number of annealing trials that take as long as the beam search."""
    # States of the first step, and of all others.
    return (
        len(_BEAM.scales)
        * (1 + 2 * _BEAM.candidates * (1 + _BEAM.beam * (_BEAM.steps - 1)))
        * len(problem.tables)
        * (1 + len(problem.topology) / 32)
    )
