"""Annealing: greedy plans, improved by simulated annealing (compiled/), round after round.

The first round makes the starts and improves each. They differ in what they do with tables:

- whole tables, or cut by columns;
- the rows of large tables divided over groups of devices;
- small tables data-parallel, where that pays.

Each further round has twice the trials. It improves the best plan, then the better half of the starts again.
A budget in evaluations only says where the sequence ends. So a larger one never finds a dearer plan. A budget
in seconds also limits the starts, which may take long in large problems.

The compiled search takes the cost of an exchange as linear in its bytes.
These are the bytes of each device, of the busiest device and of the busiest host.
The model itself decides which plan is best.

Shapes: S items, D devices. Items and blocks are defined in step/options.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from threading import Lock

import numpy as np

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.progress import OutOfTime
from shardcore.core.types import Placement, Plan, Problem
from shardcore.cost.model import CostModel, is_less
from shardcore.search.anneal import compiled
from shardcore.search.anneal.compiled import State
from shardcore.search.anneal.reshard import Reshard, rebind_tables
from shardcore.search.anneal.search_space import LARGE
from shardcore.search.anneal.starts import AnnealingStart, StartMaker
from shardcore.search.budget import Meter
from shardcore.search.state.column_parts import ColumnParts, parts_of_plan, with_tables_in_parts
from shardcore.search.state.feasible import feasible_shards, find_fitting_plan
from shardcore.search.state.shards import CONCESSION, priced_plan
from shardcore.search.ties import sort_by_cost
from shardcore.step.engine.arrays import ADDED_MS, LOAD, LOG, OVER, SHIFTS
from shardcore.step.engine.pointers import pack_record

SPACES = ("all", "columns", "halves")
"""Spaces of plans: anything; tables whole or cut by columns; the same, with halved columns only."""
_HOT, _WARM, _COLD = 4e-2, 4e-3, 4e-6
"""Temperatures, relative to a device's share of the cost.

_HOT: at the beginning of a start. _WARM: when the best plan continues. _COLD: at the end.
"""
_MANY_DEVICES = 1 << 12
"""Devices of a topology beyond which the first start has each table on several devices: it is made at once."""
_HOPEFUL = 1.5
"""Starts that cost more than this multiple of the cheapest are dropped."""
_TRIALS_AN_ITEM, _FEWEST, _MOST = 20, 500, 20_000
"""Trials of each start in the first round: so many for each item, within limits."""
_FEWEST_RECUT = 2_000
"""Fewest trials of a start in rounds that also cool recut plans (StartMaker.recut_starts). These share as many."""
_OF_BEST = 0.5
"""Trials of the best plan in a round, relative to those of all starts together."""
_HALVED = 0.5
"""Starts that a round keeps: this share of the round before."""
_ROUNDS_AHEAD = 6
"""Plans by columns are improved while they would be the best after so many more rounds like their last one."""
_CHEAP, _TRIALS_WHOLE = 0.3, 20_000
"""Tables that cost less than this share of a device's mean load become whole at once. Trials after it, at most."""
_JOINS = ((32, 2_000, (_WARM,)), (32, 6_000, (_WARM, _HOT) * 4))
"""Passes over cut tables: joins of parts, at most; trials and temperatures of the chains after each.

Chains end in different plans, and one that costs little enough suffices.
"""
_STAGES, _STAGE = 24, 100
"""Stages of a cooling, at most, and the fewest trials of one. After each, the budget is checked."""
_LOG = 1 << 20
"""The most changes since the best plan that are logged."""
_REPORT_S = 0.5
"""Time between two reports while threads anneal."""
_MOST_BYTES = 1 << 25
"""Bytes of the plans of stages, at most, that wait to be priced together, on all threads."""


@dataclass(frozen=True, eq=False)
class AnnealingChain:
    """A cooling of a copy of a plan.

    stages: of the cooling. After each, the budget is checked.
    trials: of each stage.
    hot: temperature at the beginning.
    number: of the chain in its search. With the search's seed it seeds the trials.
    """

    start: AnnealingStart
    stages: int
    trials: int
    hot: float
    number: int


class AnnealingSearch:
    """One annealing search of a problem: its starts, chains and best plan.

    best: the cheapest plan met, in its space. None before the first.
    """

    def __init__(self, problem: Problem, model: CostModel, meter: Meter, seed: int) -> None:
        # At first no table is in parts.
        self.starts = StartMaker(ColumnParts(problem, {}), model, meter)
        self.head = self.starts.head
        self.problem, self.model, self.meter = problem, model, meter
        self.best: AnnealingStart | None = None
        self._best_by_columns: AnnealingStart | None = None
        # The most that plans by columns may cost, relative to the best plan, to be improved further.
        self._columns_limit = _HOPEFUL
        self._waiting: list[AnnealingStart] = []
        self._first_trials = int(np.clip(_TRIALS_AN_ITEM * len(problem.tables), _FEWEST, _MOST))
        self._seed, self._chains, self._counting = seed, count(), Lock()
        self._threads = meter.budget.max_threads
        self._ended = len(problem.topology) == 1  # there is nothing to try, or no budget left

    @property
    def best_ms(self) -> float:
        """Cost of the best plan so far; infinite before the first plan."""
        return np.inf if self.best is None else self.best.ms

    def run_rounds(self, space: str, reshard: Reshard | None = None) -> Iterator[int]:
        """Search a space in rounds, until the budget ends. Yields the number of each round after the round.

        reshard: a plan to improve, and how much may move.

        Raises Infeasible if no plan is found, and ShardCoreError for an unknown space.
        """
        if space not in SPACES:
            raise ShardCoreError(f"annealing has no space {space!r}; there are {', '.join(SPACES)}")
        maker = self.starts
        if reshard:
            plan = rebind_tables(reshard.plan, self.problem)
            parts = parts_of_plan(plan, self.problem)
            maker = StartMaker(parts, self.model, self.meter)
            self._queue_starts(
                [maker.start_from_reshard(replace(reshard, plan=parts.split_plan(plan)), space)]
            )
        # Fresh starts would move more than the limits.
        fresh = not (reshard and reshard.limits_moves)
        if fresh:
            self._make_starts(space, maker)
        starts, by_columns = list[AnnealingStart](), list[AnnealingStart]()
        trials = self._first_trials
        for number in count():
            starts, self._waiting = sort_by_cost((*starts, *self._waiting), lambda start: start.ms), []
            chains, columns = list[AnnealingChain](), None
            if number > 0 and self.best is not None:
                # Successive halving: the better half of the starts goes on, each with twice the trials.
                trials *= 2
                by_columns = by_columns or [start for start in starts if start.has_columns_only][:1]
                starts = starts[: int(np.ceil(len(starts) * _HALVED))]
                columns = self._best_by_columns
                if columns is not None and columns.ms > self._columns_limit * self.best_ms:
                    columns = None
                # Once plans by columns are the best, only their start goes on.
                if columns is not None and columns.ms <= self.best_ms:
                    starts, columns = by_columns or starts, None
                # The best plan goes on in its whole space, not in the part in which its start began.
                best = replace(self.best, fixed=self.best.space.fixed)
                chains.append(self._make_chain(best, int(trials * max(1.0, len(starts) * _OF_BEST)), _WARM))
            # Trials seldom lead from shared tables to columns, and plans by columns need more trials than others.
            # So the best of these goes on while it may become the best of all.
            before_ms = columns.ms if columns else 0.0
            if columns is not None:
                columns = replace(columns)
                chains.append(self._make_chain(columns, trials, _WARM))
            # Trials seldom lead to another number of parts of a costly table, and long chains lead away from it again.
            if trials >= _FEWEST_RECUT and number > 0 and fresh and self.best is not None:
                recut = self.best.maker.recut_starts(self.best)
                chains += [self._make_chain(start, trials // len(recut), _HOT) for start in recut]
            # Each from its first plan again: the best plan of all rounds is in `best`.
            chains += [self._make_chain(start, trials, _HOT) for start in starts]
            more = list(islice(cycle(chains), -len(chains) % self.meter.budget.threads_to_keep_busy))
            chains += [self._make_chain(chain.start, trials, chain.hot) for chain in more]
            self._run_chains(*chains)
            if columns is not None:
                self._columns_limit = max(1.0, (before_ms / max(columns.ms, 1e-300)) ** _ROUNDS_AHEAD)
            yield number
            if self._ended or not self.meter.has_budget_left():
                return

    def add_plan(self, placements: Iterable[Placement], space: str) -> None:
        """Add a plan by columns, from another search, to the plans that the next round improves."""
        self._queue_starts([self.starts.start_from_plan(list(placements), space)])

    def add_starts_with_cut_tables(self, cuts: Mapping[str, Sequence[int]]) -> None:
        """Make starts with some tables cut into parts, anneal them once, and add them to those that the next round
        improves.

        cuts: columns before which to cut tables, by name.
        """
        waiting, self._waiting = self._waiting, []
        with suppress(Infeasible):
            self._make_starts(
                "all", StartMaker(with_tables_in_parts(self.problem, cuts), self.model, self.meter)
            )
            self._run_chains(*(self._make_chain(start, self._first_trials, _HOT) for start in self._waiting))
        self._waiting += waiting

    def _make_starts(self, space: str, maker: StartMaker) -> None:
        """Make the starts of a search space. In the whole space, starts by columns come first, except for sequences.

        Raises Infeasible if there are none.
        """
        # A problem without a plan is refused before all else.
        self.meter.report_progress("finding shards that fit")
        shards, whole_space = feasible_shards(maker.problem), space == "all"
        # By columns alone, sequences may take fifty times as long, and so may a few tables on very many devices. So a
        # short budget also has another plan.
        n_devices, sequences = len(self.problem.topology), any(t.sequence for t in self.problem.tables)
        first = (sequences and len(shards) * n_devices <= LARGE) or n_devices > _MANY_DEVICES
        if first and whole_space:
            self._queue_starts(maker.starts_with_shared_tables(shards))
        # Data-parallel tables may still fit where columns do not: outputs can take more than rows.
        before_s = self.meter.elapsed_s()
        with suppress(Infeasible) if whole_space else nullcontext():
            if self.best is None or self.meter.has_budget_left():
                self._queue_starts(maker.starts_by_columns("columns" if whole_space else space, shards))
        # Very many tables take long to encode. Then a plan in time is worth more than one of the whole space.
        has_time = self.meter.has_budget_left() and self.meter.has_time(self.meter.elapsed_s() - before_s)
        if whole_space and not first and (self.best is None or has_time):
            self._queue_starts(maker.starts_with_shared_tables(shards))
        if self.best is None:
            find_fitting_plan(maker.problem)
        # Improving a hopeless start would waste its share of the budget.
        self._waiting = [start for start in self._waiting if start.ms <= _HOPEFUL * self.best_ms]

    def _queue_starts(self, starts: Iterable[AnnealingStart]) -> None:
        """Queue starts for the next round, and keep their plans if cheapest."""
        self.meter.report_progress("making plans to start from", self.best_ms)
        # Only once there is a plan may the budget cut this short.
        with suppress(OutOfTime), self.meter.enforced_deadline() if self.best else nullcontext():
            for start in starts:
                self._keep_cheapest_plan(start, self._cheapest_plans(start, [start.state]))
                self.meter.report_progress("making plans to start from", self.best_ms)
                self._waiting.append(start)

    def _make_chain(self, start: AnnealingStart, trials: int, hot: float) -> AnnealingChain:
        n_stages = int(np.clip(trials // _STAGE, 1, _STAGES))
        return AnnealingChain(start, n_stages, max(1, trials // n_stages), hot, next(self._chains))

    def _run_chains(self, *chains: AnnealingChain) -> None:
        """Run annealing chains on the budget's threads, and keep the cheapest plans found.

        Compiled code holds no interpreter lock. What is found does not depend on the number of threads.
        """
        afforded: list[tuple[AnnealingChain, int]] = []
        for chain in chains:
            # Never a part of a stage: a larger budget then goes through the same stages, and more.
            n_stages = self.meter.affordable_repeats(chain.stages, chain.trials)
            self.meter.reserved += n_stages * chain.trials
            afforded.append((chain, n_stages))
            if n_stages < chain.stages:
                break
        threads = min(self._threads, len(afforded))
        found = (
            self._run_chains_in_threads(threads, afforded)
            if threads > 1
            else [self._run_chain(*one) for one in afforded]
        )
        self.meter.reserved = 0
        for (chain, _), (plans, done) in zip(afforded, found, strict=True):
            self._ended = self._ended or done < chain.stages
            self._keep_cheapest_plan(chain.start, plans)

    def _run_chains_in_threads(
        self, threads: int, afforded: Sequence[tuple[AnnealingChain, int]]
    ) -> list[tuple[list[AnnealingStart], int]]:
        """Run annealing chains in threads. Returns what each chain found, in order. Reports progress meanwhile."""
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(self._run_chain, *one) for one in afforded]
            try:
                while (state := wait(futures, _REPORT_S)).not_done:
                    for future in state.done:
                        future.result()  # raises what its chain did
                    self.meter.report_progress("annealing", self.best_ms)
            except BaseException:
                # Chains that run end after their stage, and no other begins.
                self._ended = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def _run_chain(self, chain: AnnealingChain, n_stages: int) -> tuple[list[AnnealingStart], int]:
        """Cheapest plans of the first stages of an annealing chain, and the number of stages for which there was time.

        Candidates are the plan after each stage, and the best plan that was met.
        """
        start, state, met, done = chain.start, copy_state(chain.start.state), list[State](), 0
        # Pages of the log that no change reaches take no memory.
        state = state._replace(log=np.empty((_LOG, 3), np.int32))
        state.random[...] = (
            np.random.SeedSequence([self._seed, chain.number]).generate_state(1, np.uint64) | 1
        )
        # Packed once, for it takes as long as hundreds of trials.
        problem, words = pack_record(start.fixed), pack_record(state)
        # Relative to a device's share: relative to the whole cost, many devices ran too hot.
        mean_ms = compiled.refresh_state(self.head, problem, words) / len(self.problem.topology)
        while done < n_stages and not self._ended and self.meter.has_time(0.0):
            # One geometric cooling over all stages, and each stage a part of it.
            hot_ms, cold_ms = (
                mean_ms * chain.hot * (_COLD / chain.hot) ** (x / chain.stages) for x in (done, done + 1)
            )
            self.meter.report_progress("annealing", self.best_ms)
            compiled.anneal(self.head, problem, words, chain.trials, hot_ms, cold_ms)
            met.append(copy_state(state))
            done += 1
            with self._counting:
                self.meter.evals += chain.trials
                self.meter.reserved -= chain.trials
            if sum(plan.held.nbytes for plan in met) > _MOST_BYTES // self._threads:
                met = [plan.state for plan in self._cheapest_plans(start, met)]
        if done == chain.stages:
            # After the last stage the state is any plan. `refresh_state` leads it back to the best one met.
            compiled.refresh_state(self.head, problem, words)
            met.append(copy_state(state))
        return self._cheapest_plans(start, met), done

    def _cheapest_plans(self, start: AnnealingStart, states: Sequence[State]) -> list[AnnealingStart]:
        """Cheapest plan that a start led to, and the cheapest plan that TorchRec can run."""
        if not states:
            return []
        by_cost = sort_by_cost(
            [
                replace(start, state=state, ms=ms)
                for state, ms in zip(states, self._model_costs_ms(start, states), strict=True)
            ],
            lambda plan: plan.ms,
        )
        return [by_cost[0], *islice((plan for plan in by_cost if plan.is_runnable), 1)]

    def _keep_cheapest_plan(self, start: AnnealingStart, plans: Sequence[AnnealingStart]) -> None:
        """Keep the cheapest plan found from a start, if cheaper than the best plan so far."""
        for plan in plans:
            start.ms = min(start.ms, plan.ms)
            # A space in which nothing may be shared has plans by columns only.
            if start.has_columns_only and (
                self._best_by_columns is None or is_less(plan.ms, self._best_by_columns.ms)
            ):
                self._best_by_columns = plan
            if is_less(plan.ms, self.best_ms) and plan.is_runnable:
                self.best = plan

    def _model_costs_ms(self, start: AnnealingStart, states: Sequence[State]) -> list[float]:
        """Costs of plans priced by the cost model itself, not by linear exchanges."""
        # Of many plans at once, for a call of the model takes as long as thousands of trials.
        n_devices = len(self.problem.topology)
        ops = np.stack([state.ops[:n_devices] for state in states])
        ms = np.stack([state.ms[:n_devices] for state in states])
        return start.space.cost_ms(ops, ms).tolist()


def simplify_plan(plan: Plan, problem: Problem, model: CostModel, seed: int, meter: Meter) -> Plan:
    """Plan with its tables in fewer parts, at most CONCESSION dearer. The same plan if none is found.

    At first all tables that cost little become whole. Then the narrowest part of all joins the widest of its table,
    again and again. Parts that stay are tried once more, with more trials.
    Each time whole parts and tables move, and columns go from one part of a table to another, until the plan costs
    little enough again. If it does not, the tables stay as they are.

    meter: has the trials and seconds that this may take.
    """
    search, limit_ms = (
        AnnealingSearch(problem, model, meter, seed),
        (1 + CONCESSION) * plan.provenance["predicted_ms"],
    )
    with suppress(OutOfTime, ShardCoreError), meter.enforced_deadline():
        start = best = search.starts.start_from_plan(plan.placements, "columns")
        joined, cache = start.fixed._replace(cut=SHIFTS), start.space.cache
        # [S] whether the whole table costs little.
        is_cheap = (
            joined.alone[joined.option_of_each_uncut_item(), ADDED_MS]
            < _CHEAP * start.state.devices[: len(problem.topology), LOAD].mean()
        )
        # Parts of a sequence have to stay equally wide.
        is_sequence = np.array([cache.table_of_item(s).sequence for s in range(len(cache))])
        n_devices = len(problem.topology)
        whole_trials = meter.affordable_repeats(3 * _TRIALS_WHOLE, 1) // 3
        # The first pass has no joins: all tables that cost little become whole.
        for joins, trials, temperatures in ((0, whole_trials, (_WARM,)), *_JOINS):
            stays = is_sequence.copy()
            for _ in range(max(1, joins)):
                # [S, D] columns of tables that are cut. Row ranges are items on one device each.
                columns = best.state.held * cache.block_width[:, None]
                columns[((columns > 0).sum(1) < 2) | stays] = 0
                # [S] device of each table's widest part. Equal parts take turns, or all tables would meet on device 0.
                widest = (columns + np.indices(columns.shape).sum(0) % n_devices / (2 * n_devices)).argmax(1)
                narrower = (columns > 0) & (np.arange(n_devices) != widest[:, None])
                if search._ended or not narrower.any():
                    break
                s, d = np.nonzero(narrower & is_cheap[:, None])
                if joins:
                    s, d = np.divmod([np.where(narrower, columns, np.inf).argmin()], n_devices)
                state, blocks = copy_state(best.state), best.state.held[s, d]
                compiled.place_shards(
                    joined,
                    state,
                    np.stack([s, d, -blocks, s, widest[s], blocks], 1, dtype=np.int64).reshape(-1, 3),
                )
                compiled.refresh_state(search.head, joined, state)
                search.best, stays[s] = None, joins > 0
                if len(s) and state.value[OVER] == 0:
                    search._run_chains(
                        *(
                            search._make_chain(replace(start, state=state, fixed=joined), trials, hot)
                            for hot in temperatures
                        )
                    )
                if search.best is not None and search.best.ms <= limit_ms:
                    best, stays[s] = search.best, False
                    # Of a cheaper plan, fewer parts may not cost what it has saved.
                    limit_ms = min(limit_ms, (1 + CONCESSION) * best.ms)
        if best is not start:
            return priced_plan(best.placements, problem, model, fits=True, **plan.provenance)
    return plan


def copy_state(state: State) -> State:
    """Copy of a search state, without its log of changes."""
    copy = State(*(array.copy() for array in state._replace(log=state.log[:0])))
    copy.number[LOG] = 0
    return copy
