"""A beam over column cuts around any inner search: NeuroShard's outer search (MLSys 2023, arXiv 2305.01868).

A state says how tables are cut. An inner search says where the shards of a state go, and what that costs.
The beam keeps a few states. From each it halves the largest and the costliest shards, one at a time.
The inner search places each result, and the best few stay. Without steps the inner search runs once.

Where rows have to be divided, it begins with the kind whose first plan is cheapest (`alternative_row_divisions`).
If no plan of any state fits, a second beam starts from a `packing`.

Shapes: C states searched at once, N their shards, K plans of a state, D devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.types import Placement, Plan, Problem, Shard
from shardcore.core.validation import MOST_COUNT, Count, Record, number_within
from shardcore.cost.model import CostModel, is_less, is_minimum
from shardcore.search.anneal.search_space import SearchSpace
from shardcore.search.budget import Meter
from shardcore.search.lockstep import PlacedPlans, search_space_by_columns
from shardcore.search.state.feasible import feasible_shards, find_fitting_plan
from shardcore.search.state.shards import priced_plan
from shardcore.search.ties import cost_ranks, min_by_cost, sort_by_cost
from shardcore.step.kinds import shards_by_device
from shardcore.step.options import ShardKey
from shardcore.step.ways import (
    alternative_row_divisions,
    fixed_placements,
    placements_of_bundles,
    row_division,
)

State = tuple[ShardKey, ...]
"""Sorted shards: how tables are cut, but not yet where they go."""

_ROWS_AT_ONCE = 16_384
"""Devices × plans × states that run in lockstep: more would take longer than one after another."""
_CELLS_AT_ONCE = 1 << 26
"""Devices × plans × states × items in lockstep. It limits the memory."""
_PROBED = 256
"""Shards of a probe, from whose seconds those of a search of very many shards are estimated."""


@dataclass(frozen=True)
class BeamConfig(Record):
    """Parameters of the beam search.

    beam: states kept.
    candidates: shards halved, of the largest and of the costliest.
    steps: cuts at most.
    """

    beam: Count = 3
    candidates: Count = 10
    steps: Annotated[int, number_within(0, MOST_COUNT)] = 10


TABLE_WISE = BeamConfig(steps=0)
"""Tables are whole unless no device can hold one."""


@dataclass(frozen=True)
class StatePlan:
    """Cheapest plan found for one beam state (one way to cut tables by columns).

    ms: its cost; infinite if no plan fits.
    state: how tables are cut.
    devices: of each shard; empty if no plan fits.
    over_bytes: least bytes that a plan takes beyond the memory.
    """

    ms: float
    state: State
    devices: tuple[int, ...]
    over_bytes: int = 0


class InnerSearch(Protocol):
    """Inner search of the beam: places the shards of several states.

    plans: number of plans that it makes of each state.
    """

    @property
    def plans(self) -> int: ...

    def __call__(self, space: SearchSpace, keys: np.ndarray) -> PlacedPlans:
        """Plans of beam states, keys [C, N, 2]: for each shard of a state its item and blocks."""
        ...


@dataclass
class Beam:
    """The search of one problem, under one budget.

    plan_s: seconds that a plan of the last searches took. 0 before the first. It says what a budget in seconds affords.
    """

    problem: Problem
    model: CostModel
    inner: InnerSearch
    config: BeamConfig
    meter: Meter
    plan_s: float = 0.0

    def best_plan(self, **provenance: Any) -> Plan:
        """Best plan of the beam search, within the budget of `meter`.

        provenance: of the plan.

        Where a budget in seconds does not suffice for a first search, it is some plan that fits.
        Raises Infeasible (see `feasible_shards`) and SettingMismatch.
        """
        self.problem.require_setting(self.model.setting)
        shards = feasible_shards(self.problem)
        if not shards:  # all tables have one way to run
            return self._priced_plan((), packed=False, **provenance)
        space = self._column_space(shards)
        state = tuple(sorted(space.cache.shard_keys(shards)))
        # There is no time for a first inner search. A packing gives a plan at once.
        if (search_s := self._estimated_search_s(space, state)) and not self.meter.has_time(search_s):
            return self._priced_plan(find_fitting_plan(self.problem).placements, packed=True, **provenance)
        # The state with the fewest cuts. All others come from it.
        [first] = self._search_states(space, [state], self.inner)
        # Some rows have to be divided, and another kind may do that at less cost.
        if space.cache.is_range.any():
            space, first = self._cheapest_row_division(space, first)
        best, packing = self._improve_plan(space, first), None
        # Where the first state has no plan, a packing may be cheaper than what the beam found after it.
        if not first.devices:
            packing = self._priced_plan(find_fitting_plan(self.problem).placements)
            if not best.devices and (shards := self._packed_shards(packing)):
                space = self._column_space(shards)
                start = StatePlan(np.inf, tuple(sorted(space.cache.shard_keys(shards))), ())
                best = self._improve_plan(space, start)
        if packing and not is_less(best.ms, packing.provenance["predicted_ms"]):
            return self._priced_plan(packing.placements, packed=True, **provenance)
        placements = placements_of_bundles(
            space.cache.deal_bundles(best.state), best.devices, space.cache.problem
        )
        return self._priced_plan(placements, packed=False, **provenance)

    def _priced_plan(self, placements: Sequence[Placement], **provenance: Any) -> Plan:
        return priced_plan(placements, self.problem, self.model, evals=self.meter.evals, **provenance)

    def _column_space(self, shards: Iterable[Shard], problem: Problem | None = None) -> SearchSpace:
        """Search space of shards that the beam may cut further."""
        return search_space_by_columns(problem or self.problem, self.model, shards, cut=self.config.steps > 0)

    def _search_states(
        self, space: SearchSpace, states: Sequence[State], inner: InnerSearch
    ) -> list[StatePlan]:
        """Best plans of beam states by `search_states`, with evaluations and time counted by the meter."""
        before_s, n_plans = self.meter.elapsed_s(), len(states) * inner.plans
        plans = search_states(space, states, inner)
        self.meter.evals += n_plans
        self.plan_s = (self.meter.elapsed_s() - before_s) / n_plans
        return plans

    def _affordable_states(self, states: int) -> int:
        """Number of states that the budget still allows to search, at most `states`."""
        return self.meter.affordable_repeats(states, self.inner.plans, self.plan_s * self.inner.plans)

    def _cheapest_row_division(self, space: SearchSpace, first: StatePlan) -> tuple[SearchSpace, StatePlan]:
        """Search space and first plan of the kind that divides rows most cheaply, among all kinds that may."""
        for other in alternative_row_divisions(self.problem):
            if not self._affordable_states(1):
                break
            # With this kind alone there may be no plan at all.
            with suppress(Infeasible):
                shards = feasible_shards(other)
                of_other = self._column_space(shards, other)
                [plan] = self._search_states(
                    of_other, [tuple(sorted(of_other.cache.shard_keys(shards)))], self.inner
                )
                # Where neither fits, the one that lacks less.
                if _sort_plans([first, plan])[0] is plan:
                    space, first = of_other, plan
        return space, first

    def _estimated_search_s(self, space: SearchSpace, state: State) -> float:
        """Estimated seconds of an inner search of a state, from a search of a few of its shards. 0 if no estimate is
        needed.
        """
        # A probe is only worth its time where it is a small part of the search.
        if self.meter.budget.seconds is None or len(state) < 10 * _PROBED:
            return 0.0
        before_s = self.meter.elapsed_s()
        search_states(space, [state[:_PROBED]], self.inner)
        return (self.meter.elapsed_s() - before_s) * len(state) / _PROBED

    def _packed_shards(self, packing: Plan) -> list[Shard]:
        """Shards of a packing, from whose cuts a beam may start. A packing may divide other rows than the first state.

        Empty if it has replicas, or divides rows otherwise than `row_division`.
        """
        left = [p for p in packing.placements if p not in fixed_placements(self.problem)]
        if any(len(p.devices) > 1 and p != row_division(p.shard.table, self.problem) for p in left):
            return []
        return [shard for p in left for _, shard in shards_by_device(p)]

    def _improve_plan(self, space: SearchSpace, start: StatePlan) -> StatePlan:
        """Best plan of a beam that begins with the state of `start`; `start` itself if no plan is better."""
        # Devices × plans of a state.
        rows = self.inner.plans * len(space.fixed.devices)
        # Chunks bound the memory, and let the budget end a round early.
        chunk = max(1, min(_ROWS_AT_ONCE // rows, _CELLS_AT_ONCE // (rows * len(space.cache))))
        best, beam = start, [start.state]
        for _ in range(self.config.steps):
            halved = (_states_with_one_more_cut(space, state, self.config.candidates) for state in beam)
            # Different states may give the same one, which is searched once.
            states = list(dict.fromkeys(state for several in halved for state in several))
            plans: list[StatePlan] = []
            while len(plans) < len(states):
                n = self._affordable_states(min(chunk, len(states) - len(plans)))
                if n == 0:
                    break
                plans += self._search_states(space, states[len(plans) : len(plans) + n], self.inner)
            # If none fits, those that lack least go on: more cuts may make them fit.
            beam = [plan.state for plan in _sort_plans(plans)[: self.config.beam]]
            best = min_by_cost([best, *plans], lambda p: p.ms)
            # The budget has ended, or there is nothing left to cut.
            if len(plans) < len(states) or not plans:
                break
        return best


def _sort_plans(plans: Sequence[StatePlan]) -> list[StatePlan]:
    """Plans of beam states by rising cost, then by rising memory excess."""
    return sort_by_cost(sorted(plans, key=lambda plan: plan.over_bytes), lambda plan: plan.ms)


def _states_with_one_more_cut(space: SearchSpace, state: State, n: int) -> list[State]:
    """Beam states that follow from a state by one more cut: of one of the n largest or n costliest shards."""
    # Equal shards of an item give equal states, so one of them stands for all.
    keys = [(s, blocks) for s, blocks in dict.fromkeys(state) if blocks > 1 and space.fixed.may_split[s]]
    if not keys:
        return []
    cache = space.cache
    numbers = cache.option_numbers(*np.array(keys).T)
    # Large shards are hard to fit, costly ones hard to balance.
    largest = np.argsort(-cache.peak_bytes[numbers], kind="stable")[:n]
    costliest = np.argsort(cost_ranks(-cache.single_op_ms[numbers]), kind="stable")[:n]
    states = []
    for item, blocks in (keys[i] for i in sorted({*largest, *costliest})):
        i = state.index((item, blocks))
        # Sorted, so that equal states are equal tuples.
        states.append(
            tuple(sorted([*state[:i], (item, blocks // 2), (item, blocks - blocks // 2), *state[i + 1 :]]))
        )
    return states


def search_states(space: SearchSpace, states: Sequence[State], inner: InnerSearch) -> list[StatePlan]:
    """Best plan of each of several beam states with the same number of shards."""
    # One array [C, N, 2], as states have the same number of shards.
    of_states = inner(space, np.array(states))
    # [C] the first of the cheapest plans.
    best = is_minimum(of_states.total_ms).argmax(-1).tolist()
    each = zip(
        states,
        best,
        of_states.total_ms,
        of_states.device_of_each_shard,
        of_states.excess_bytes,
        strict=True,
    )
    return [
        StatePlan(
            float(ms[k]), state, tuple(devices[k].tolist()) if np.isfinite(ms[k]) else (), int(over.min())
        )
        for state, k, ms, devices, over in each
    ]
