"""Annealing: greedy plans, improved by simulated annealing (compiled/).

Several starts are improved in turn. The best of them then gets the rest of the budget.
Starts differ in what they do with tables:

- whole tables, or cut by columns;
- the rows of large tables divided over groups of devices;
- small tables data-parallel, where that pays.

The compiled search takes the cost of an exchange as linear in its bytes.
These are the bytes of each device, of the busiest device and of the busiest host.
The model itself decides which start continues, and which plan is returned.

Shapes: S strips, D devices. Strips and units are defined in shard_cost_cache.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from shardcore.cost.model import CostModel, step_ms
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.anneal.starts import Start, Starts
from shardcore.search.budget import Budget, Meter
from shardcore.search.feasible import feasible_shards
from shardcore.search.shards import priced
from shardcore.search.true_memory import within_memory
from shardcore.types import Plan, Problem, Shard
from shardcore.workload import traffic_of_outputs

if TYPE_CHECKING:
    from shardcore.search.anneal.compiled import State

SPACES = ("all", "columns", "halves")
"""What plans may contain, see `anneal_once`."""
SPACE_OF = {"anneal": "all", "anneal_columns": "columns"}
"""The space that each sharder searches.

Row-wise and data-parallel tables have ops and collectives of their own. A model often knows these least.
"""
_DEFAULT = Budget(evals=500_000)
_HOT, _WARM, _COLD = 4e-2, 4e-3, 4e-6
"""Temperatures, relative to a device's share of the cost.

_HOT: at the beginning of a start. _WARM: when the best start continues alone. _COLD: at the end.
"""
_RACE = 0.7
"""The share of the budget in which several starts are improved."""
_COLUMNS = 0.5
"""The share of the budget for plans by columns only, before the whole space.

Searches that begin in the whole space sometimes end with costlier plans.
"""
_ROUNDS = 24
"""Rounds of a cooling. After each, the budget is checked."""


def anneal_once(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None,
                space: str = "all", reshard: Reshard | None = None) -> Plan:
    """The best plan found within the budget (none: 500,000 evaluations), by what searches count of memory.

    Only a first plan may exceed a budget in seconds.
    The starts and one round may exceed a budget in evaluations.

    space: "all"; "columns", without tables shared by groups of devices; "halves", with halved columns only.
    reshard: a plan to improve, and how much may move.

    Raises Infeasible and SettingMismatch, as all sharders do.
    """
    problem.require_setting(model.setting)
    if space not in SPACES:
        raise ShardCoreError(f"annealing has no space {space!r}; there are {', '.join(SPACES)}")
    meter = (budget if budget and (budget.evals or budget.seconds) else _DEFAULT).start()
    limited = bool(reshard and reshard.limited)
    # A problem without a plan is refused before all else.
    shards = [] if limited else feasible_shards(problem)
    search = Search(problem, model, meter, seed)
    kept = [search.starts.resharded(reshard, space)] if reshard else []
    best = search.run(kept) if limited else search.best(space, shards, kept)
    name = "anneal" if space == "all" else "anneal_columns"  # halves are for comparisons only
    return priced(best.placements, problem, model, algorithm=name, seed=seed, space=space,
                  evals=search.meter.evals)


anneal = within_memory(anneal_once)
"""`anneal_once`, again with more reserved if its plan takes more memory than there is."""


class Search:
    """One annealing run: starts, cooling, and the choice among them."""

    def __init__(self, problem: Problem, model: CostModel, meter: Meter, seed: int) -> None:
        self.starts = Starts(problem, model, meter, seed)
        self.compiled, self.head = self.starts.compiled, self.starts.head
        self.problem, self.model, self.meter = problem, model, meter
        self._annealing_s = 0.0

    def best(self, kind: str, shards: Sequence[Shard], kept: list[Start]) -> Start:
        """The best plan found in a space, from its own starts and those in `kept`."""
        # In the whole space, plans by columns are searched first (see _COLUMNS).
        columns, begin = [], 0.0
        if kind == "all":
            begin = _COLUMNS
            with suppress(Infeasible):  # data-parallel tables may still fit: outputs can take more than rows
                before_s = self.meter.seconds()
                starts = self.starts.make("columns", shards)
                took_s = self.meter.seconds() - before_s
                best = self.run(starts, 0.0, begin)
                if not self.meter.has_time(took_s):  # for the starts of the whole space
                    return self.run([*kept, best], begin, 1.0)
                columns = best.placements
        return self.run([*kept, *self.starts.make(kind, shards, columns)], begin, 1.0)

    def run(self, starts: list[Start], begin: float = 0.0, end: float = 1.0) -> Start:
        """The best plan found between two shares of the budget.

        The starts are improved in turn. Then the best one continues, from a lower temperature.
        """
        if len(self.problem.topology) > 1:
            # Shares of the budget: one for each start, equal, and then one for the best.
            at = begin + (end - begin) * np.append(np.linspace(0, _RACE, len(starts) + 1), 1.0)
            for i, start in enumerate(starts):
                self._cool(start, at[i], at[i + 1], _HOT)
            starts.sort(key=lambda s: s.ms)
            starts[0].fixed = starts[0].space.fixed
            self._cool(starts[0], at[-2], end, _WARM)
        return starts[0]

    def _cool(self, start: Start, begin: float, end: float, hot: float) -> None:
        """Improve a plan between two shares of the budget.

        Candidates are the plan before, the best plan met, and the plan after each round.
        The cheapest by the model itself stays.
        """
        state, cost = start.state, start.state.value[self.compiled.BEST] / len(self.problem.topology)
        best = self._cheaper(start, (np.inf, state))
        while (done := max(begin, self.meter.progress())) < end:
            # Temperature follows the budget used, so that it ends cold whatever the limit is.
            at = (done - begin) / (end - begin)
            hot_ms, cold_ms = (cost * hot * (_COLD / hot) ** min(1.0, x) for x in (at, at + 1 / _ROUNDS))
            trials, before_s = self._trials((end - begin) / _ROUNDS), self.meter.seconds()
            self.compiled.anneal(self.head, start.fixed, state, trials, hot_ms, cold_ms)
            self.meter.evals += trials
            self._annealing_s += self.meter.seconds() - before_s
            best = self._cheaper(start, best)
        self.compiled.rewind(self.head, start.fixed, state)
        start.ms, start.state = self._cheaper(start, best)
        self.compiled.refresh(self.head, start.fixed, start.state)

    def _cheaper(self, start: Start, best: tuple[float, State]) -> tuple[float, State]:
        """The best plan so far, or a copy of the start's present plan if that is cheaper."""
        ms = self._exact_ms(start)
        if ms >= best[0]:
            return best
        # The log and the random generator are not part of the plan.
        return ms, start.state._replace(**{name: of.copy() for name, of in start.state._asdict().items()
                                           if name not in ("log", "random")})

    def _trials(self, share: float) -> int:
        """The number of trials in this share of the budget."""
        limits = []
        if self.meter.budget.evals:
            limits.append(max(100, int(self.meter.budget.evals * share)))
        if self.meter.budget.seconds:
            # Trials per second so far; a first guess is corrected after one round.
            rate = self.meter.evals / max(self._annealing_s, 1e-3)
            limits.append(int(np.clip(rate * self.meter.budget.seconds * share, 1000, 10_000_000)))
        return min(limits)

    def _exact_ms(self, start: Start) -> float:
        """The plan's cost by the model itself, not by the linear exchanges."""
        state, fixed, space = start.state, start.fixed, start.space
        carried = {run: np.zeros(len(fixed.speed)) for run in space.runs}
        for run, n_bytes in zip(space.cache.kinds, state.carried.T, strict=False):
            carried[run] += n_bytes
        for (run, devices), size in zip(space.groups, state.group_size, strict=True):
            carried[run][list(devices)] += size
        ids = dict(zip(space.runs, state.carried.T[len(space.cache.kinds):], strict=True))
        traffic = traffic_of_outputs(carried, self.problem, ids)
        compute_ms = (state.ms.sum(1) + state.shared_ms) / fixed.speed
        comm = self.model.comm(traffic, compute_ms, self.problem.topology)
        return float(step_ms(compute_ms, comm, self.problem.job))
