"""The default search: several searches in turn, the cheapest plan of all.

1. The first round of annealing (anneal/), in the whole space.
2. The greedy baselines.
3. Further rounds of annealing, each with twice the trials.
4. NeuroShard's beam, once annealing has taken about as long as the beam takes. Annealing improves its plan.

A budget in evaluations only says where this sequence ends. So a larger one never gives a dearer plan. A
budget in seconds also limits how many plans annealing starts from.

Searches count memory approximately (memory.bytes_as). A plan counts here only if it fits exactly. Where a
cheaper one does not, the searches begin again with more memory reserved. Where they find none at all, they
begin again near a plan that an exact packing found (true_memory.near).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible, Overfull
from shardcore.memory import every_plan_bytes, require_fits
from shardcore.op_limits import require_ops
from shardcore.search import greedy
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.anneal.sharder import Search
from shardcore.search.beam import Beam
from shardcore.search.budget import Budget, Meter
from shardcore.search.exact_memory import repaired
from shardcore.search.fixed_kinds import set_aside
from shardcore.search.host_room import dealt
from shardcore.search.neuroshard import GreedyGrid, NeuroShardConfig
from shardcore.search.shard_cost_cache import ShardCostCache
from shardcore.search.shards import priced
from shardcore.search.true_memory import fitting, near, with_remedy
from shardcore.types import Placement, Plan, Problem

DEFAULT = Budget(evals=1_000_000)
"""The budget where none is given."""
TRIES = 6
"""Searches with different reserves, at most, until a plan fits."""


def portfolio(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Find the cheapest plan of all searches within the budget (none: DEFAULT).

    Raises Infeasible if no search finds a plan, and SettingMismatch.
    """
    return _Anytime("portfolio", problem, model, seed, budget).plan("all", others=True)


def annealing(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None,
              space: str = "all", reshard: Reshard | None = None) -> Plan:
    """Find the cheapest plan by annealing within the budget (none: DEFAULT).

    space: see anneal.sharder.SPACES.
    reshard: a plan to improve, and how much may move.

    Raises as `portfolio`, and ShardCoreError for an unknown space.
    """
    name = "anneal" if space == "all" else "anneal_columns"  # halves are for comparisons only
    return _Anytime(name, problem, model, seed, budget).plan(space, reshard=reshard)


class _Anytime:
    """A sequence of searches of one problem, and the cheapest plan so far that fits."""

    def __init__(self, name: str, problem: Problem, model: CostModel, seed: int,
                 budget: Budget | None) -> None:
        problem.require_setting(model.setting)
        self.problem, self.model, self.name, self.seed = problem, model, name, seed
        self.meter = (budget if budget and (budget.evals or budget.seconds) else DEFAULT).start()
        self.fixed, self.searched = set_aside(problem)
        self.best: Plan | None = None
        self.found_by = name
        self._passes_over = False  # cheaper plans that do not fit
        self._mends = True  # plans that do not fit, by moving shards
        self._cache: ShardCostCache | None = None

    def plan(self, space: str, others: bool = False, reshard: Reshard | None = None) -> Plan:
        """The cheapest plan when the budget ends.

        others: whether all searches take part, or annealing only.
        """
        self._mends = reshard is None
        if self.searched is None:
            self._keep((), self.name)
        elif error := self._search(_Reserve(self.searched), space, others, reshard):
            # Searches count memory in excess. By the exact count a plan may fit all the same.
            if not self._mends or (packed := fitting(self.problem)) is None:
                raise with_remedy(error, self.problem)
            self._keep(packed.placements, "packing")
            self.fixed, self.searched = set_aside(near(packed, self.problem))
            if self.searched:
                self._cache = None
                self._search(_Reserve(self.searched, cautious=0), space, others, None)
        provenance = {"algorithm": self.name, "seed": self.seed, "space": space, "evals": self.meter.evals,
                      **({"found_by": self.found_by} if self.found_by != self.name else {}),
                      **self.best.provenance}
        return replace(self.best, provenance=provenance)

    def _search(self, reserve: _Reserve, space: str, others: bool,
                reshard: Reshard | None) -> Infeasible | None:
        """Search until the budget ends, with more memory reserved where plans do not fit.

        Returns the first error if no plan is found.
        """
        error = None
        while reserve.problem:
            try:
                for _ in self._steps(reserve.problem, space, others, reshard):
                    pass
                return None
            except Overfull as overfull:
                error = error or overfull
                reserve.more(overfull.too_much)
            except Infeasible as infeasible:
                error = error or infeasible
                reserve.less()
            if reserve.problem is None and self.best and reserve.searchable:
                self._passes_over, reserve.problem = True, reserve.searchable
        return None if self.best else error

    def _steps(self, problem: Problem, space: str, others: bool, reshard: Reshard | None) -> Iterator[None]:
        """Search a problem step by step. Raise Overfull for a cheaper plan that does not fit."""
        model = self.model.for_problem(problem) if problem.tables != self.problem.tables else self.model
        search = Search(problem, model, self.meter, self.seed, self._cache)
        beam_evals = _beam_evals(problem) if others else None
        for number in search.rounds(space, reshard):
            self._cache = search.starts.cache
            self._keep(search.placements, self.name, search.best.ms)
            if others and number == 0 and len(problem.topology) > 1:
                for name, sharder in greedy.ORDERS.items():
                    with suppress(Infeasible):
                        if self.meter.left():
                            self._keep(sharder(problem, model, seed=self.seed).placements, name)
            if beam_evals is not None and self.meter.evals >= beam_evals:
                beam_evals = None
                with suppress(Infeasible):
                    plan = self._beam(problem, model)
                    self._keep(plan.placements, "neuroshard")
                    search.add(plan.placements, space)
            yield

    def _beam(self, problem: Problem, model: CostModel) -> Plan:
        self.meter.report("NeuroShard's beam", self.best and self.best.provenance["predicted_ms"])
        config, meter = NeuroShardConfig(), Meter(Budget(seconds=self.meter.budget.seconds),
                                                  self.meter.started_s)
        return Beam(problem, model, GreedyGrid(config.caps), config, meter).plan()

    def _keep(self, placements: Sequence[Placement], found_by: str, ms: float = 0.0) -> None:
        """Keep a plan if it is the cheapest so far. Raise Overfull if it would be, but does not fit.

        placements: of all tables, or of those that have no fixed kind.
        ms: lower bound on its cost.
        """
        least_ms = np.inf if self.best is None else self.best.provenance["predicted_ms"]
        if ms >= least_ms and not self.fixed:
            return
        placed = {p.shard.table.name for p in placements}
        fixed = [p for p in self.fixed if p.shard.table.name not in placed]
        plan = priced((*placements, *fixed), self.problem, self.model)
        if plan.provenance["predicted_ms"] >= least_ms:
            return
        try:
            require_fits(plan, self.problem)
            require_ops(plan, self.problem)
        except Infeasible:
            mended = repaired(plan, self.problem) if self._mends else None
            if mended is not None:
                plan = priced(mended.placements, self.problem, self.model)
            if mended is None or plan.provenance["predicted_ms"] >= least_ms:
                if self._passes_over:
                    return
                raise
        self.best, self.found_by = plan, found_by


class _Reserve:
    """A problem with more and more memory reserved, until searches find plans that fit.

    cautious: bytes that the second try reserves at least. None: all that devices may need beside shards.
    problem: the next one to search. None: all were tried.
    searchable: the last one for which plans were found, if any.
    """

    def __init__(self, problem: Problem, cautious: int | None = None) -> None:
        self._asked, self._dealt, self._tries = problem, dealt(problem), 1
        self._more, self._too_little, self._enough = 0, 0, None
        self._cautious = (every_plan_bytes(problem, share=0.0) - every_plan_bytes(problem) if cautious is None
                          else cautious)
        self.problem: Problem | None = problem
        self.searchable: Problem | None = None

    def more(self, n_bytes: int) -> None:
        """Reserve more: a plan took n_bytes too much."""
        self.searchable, self._too_little = self.problem, self._more
        self._next(self._cautious if self._more < self._cautious else self._more + max(self._more, n_bytes))

    def less(self) -> None:
        """Reserve less: nothing was found."""
        if self._more == 0 and self._dealt:
            # Searches count no memory of hosts. So tables there are dealt to hosts first.
            self._asked, self._dealt = self._dealt, None
            self._next(0)
        elif self._more == 0:
            self.problem = None
        else:
            self._enough = self._more
            self._next(0)

    def _next(self, more: int) -> None:
        self._tries += 1
        self._more = more if self._enough is None else (self._too_little + self._enough) // 2
        reserved = self._asked.constraints.reserved_bytes + self._more
        self.problem = None if self._tries > TRIES else replace(
            self._asked, constraints=replace(self._asked.constraints, reserved_bytes=reserved))


def _beam_evals(problem: Problem) -> float:
    """Trials of annealing that take about as long as the beam: passes × states × shards, on few devices."""
    config = NeuroShardConfig()
    states = 1 + 2 * config.candidates * (1 + config.beam * (config.steps - 1))
    return len(config.caps) * states * len(problem.tables) * (1 + len(problem.topology) / 32)
