"""A beam over column cuts around any inner search: NeuroShard's outer search (MLSys 2023, arXiv 2305.01868).

A state says how tables are cut. An inner search says where the shards of a state go, and what that costs.
The beam keeps a few states. From each it halves the largest and the costliest shards, one at a time.
The inner search places each result, and the best few stay. Without steps the inner search runs once.

Where rows have to be divided, it begins with the kind whose first plan is cheapest (`divided_otherwise`).
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
from shardcore.core.validation import MOST_COUNT, Count, Record, within
from shardcore.cost.model import CostModel, is_least, is_less
from shardcore.search.anneal.batch import space_by_columns
from shardcore.search.anneal.search_space import SearchSpace
from shardcore.search.budget import Meter
from shardcore.search.lockstep import Placed
from shardcore.search.state.feasible import feasible_shards, fitting
from shardcore.search.state.shards import priced
from shardcore.search.ties import least, ranks, sort_by_cost
from shardcore.step.kinds import shards_on
from shardcore.step.options import ShardKey
from shardcore.step.ways import divided_otherwise, division, fixed_placements, placements_of

State = tuple[ShardKey, ...]
"""Sorted shards: how tables are cut, but not yet where they go."""

_ROWS_AT_ONCE = 16_384
"""Devices × plans × states that run in lockstep: more would take longer than one after another."""
_CELLS_AT_ONCE = 1 << 26
"""Devices × plans × states × strips in lockstep. It limits the memory."""
_PROBED = 256
"""Shards of a probe, from whose seconds those of a search of very many shards are estimated."""


@dataclass(frozen=True)
class BeamConfig(Record):
    """Parameters of the beam.

    beam: states kept.
    candidates: shards halved, of the largest and of the costliest.
    steps: cuts at most.
    """

    beam: Count = 3
    candidates: Count = 10
    steps: Annotated[int, within(0, MOST_COUNT)] = 10


TABLE_WISE = BeamConfig(steps=0)
"""Tables are whole unless no device can hold one."""


@dataclass(frozen=True)
class StatePlan:
    """The best plan of a state.

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
    """Places the shards of several states.

    plans: number of plans that it makes of each state.
    """

    @property
    def plans(self) -> int: ...

    def __call__(self, space: SearchSpace, keys: np.ndarray) -> Placed:
        """Plans of states keys [C, N, 2], each shard a strip and units of the space."""
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

    def plan(self, **provenance: Any) -> Plan:
        """The best plan of the beam. It uses the budget of `meter`.

        provenance: of the plan.

        Where a budget in seconds does not suffice for a first search, it is some plan that fits.
        Raises Infeasible (see `feasible_shards`) and SettingMismatch.
        """
        self.problem.require_setting(self.model.setting)
        shards = feasible_shards(self.problem)
        if not shards:  # all tables have one way to run
            return self._priced((), packed=False, **provenance)
        space = self._space(shards)
        state = tuple(sorted(space.cache.keys(shards)))
        # There is no time for a first inner search. A packing gives a plan at once.
        if (search_s := self._search_s(space, state)) and not self.meter.has_time(search_s):
            return self._priced(fitting(self.problem).placements, packed=True, **provenance)
        # The state with the fewest cuts. All others come from it.
        [first] = self._search(space, [state], self.inner)
        # Some rows have to be divided, and another kind may do that at less cost.
        if space.cache.is_range.any():
            space, first = self._divided_otherwise(space, first)
        best, packing = self._improve_plan(space, first), None
        # Where the first state has no plan, a packing may be cheaper than what the beam found after it.
        if not first.devices:
            packing = self._priced(fitting(self.problem).placements)
            if not best.devices and (shards := self._packed_shards(packing)):
                space = self._space(shards)
                start = StatePlan(np.inf, tuple(sorted(space.cache.keys(shards))), ())
                best = self._improve_plan(space, start)
        if packing and not is_less(best.ms, packing.provenance["predicted_ms"]):
            return self._priced(packing.placements, packed=True, **provenance)
        placements = placements_of(space.cache.bundles(best.state), best.devices, space.cache.problem)
        return self._priced(placements, packed=False, **provenance)

    def _priced(self, placements: Sequence[Placement], **provenance: Any) -> Plan:
        return priced(placements, self.problem, self.model, evals=self.meter.evals, **provenance)

    def _space(self, shards: Iterable[Shard], problem: Problem | None = None) -> SearchSpace:
        """The space of shards that the beam may cut further."""
        return space_by_columns(problem or self.problem, self.model, shards, cut=self.config.steps > 0)

    def _search(self, space: SearchSpace, states: Sequence[State], inner: InnerSearch) -> list[StatePlan]:
        """`search`, counted by the meter."""
        before_s, n_plans = self.meter.seconds(), len(states) * inner.plans
        plans = search(space, states, inner)
        self.meter.evals += n_plans
        self.plan_s = (self.meter.seconds() - before_s) / n_plans
        return plans

    def _affordable(self, states: int) -> int:
        """How many of some states the budget allows to search."""
        return self.meter.affordable(states, self.inner.plans, self.plan_s * self.inner.plans)

    def _divided_otherwise(self, space: SearchSpace, first: StatePlan) -> tuple[SearchSpace, StatePlan]:
        """The cheapest first plan of all kinds that may divide rows, with its space."""
        for other in divided_otherwise(self.problem):
            if not self._affordable(1):
                break
            # With this kind alone there may be no plan at all.
            with suppress(Infeasible):
                shards = feasible_shards(other)
                of_other = self._space(shards, other)
                [plan] = self._search(of_other, [tuple(sorted(of_other.cache.keys(shards)))], self.inner)
                # Where neither fits, the one that lacks less.
                if _sort_plans([first, plan])[0] is plan:
                    space, first = of_other, plan
        return space, first

    def _search_s(self, space: SearchSpace, state: State) -> float:
        """Estimated seconds of an inner search, from one of a few of its shards. 0 if no estimate is needed."""
        # A probe is only worth its time where it is a small part of the search.
        if self.meter.budget.seconds is None or len(state) < 10 * _PROBED:
            return 0.0
        before_s = self.meter.seconds()
        search(space, [state[:_PROBED]], self.inner)
        return (self.meter.seconds() - before_s) * len(state) / _PROBED

    def _packed_shards(self, packing: Plan) -> list[Shard]:
        """The shards of a packing, whose cuts a beam may start from: it may divide other rows than the first state.

        Empty if it has replicas, or divides rows otherwise than `division`.
        """
        left = [p for p in packing.placements if p not in fixed_placements(self.problem)]
        if any(len(p.devices) > 1 and p != division(p.shard.table, self.problem) for p in left):
            return []
        return [shard for p in left for _, shard in shards_on(p)]

    def _improve_plan(self, space: SearchSpace, start: StatePlan) -> StatePlan:
        """The best plan of a beam that starts from the state of `start`, or `start` itself."""
        # Devices × plans of a state.
        rows = self.inner.plans * len(space.fixed.devices)
        # Chunks bound the memory, and let the budget end a round early.
        chunk = max(1, min(_ROWS_AT_ONCE // rows, _CELLS_AT_ONCE // (rows * len(space.cache))))
        best, beam = start, [start.state]
        for _ in range(self.config.steps):
            halved = (_halvings(space, state, self.config.candidates) for state in beam)
            # Different states may give the same one, which is searched once.
            states = list(dict.fromkeys(state for several in halved for state in several))
            plans: list[StatePlan] = []
            while len(plans) < len(states):
                n = self._affordable(min(chunk, len(states) - len(plans)))
                if n == 0:
                    break
                plans += self._search(space, states[len(plans) : len(plans) + n], self.inner)
            # If none fits, those that lack least go on: more cuts may make them fit.
            beam = [plan.state for plan in _sort_plans(plans)[: self.config.beam]]
            best = least([best, *plans], lambda p: p.ms)
            # The budget has ended, or there is nothing left to cut.
            if len(plans) < len(states) or not plans:
                break
        return best


def _sort_plans(plans: Sequence[StatePlan]) -> list[StatePlan]:
    """Plans by rising cost, then by rising bytes beyond the memory."""
    return sort_by_cost(sorted(plans, key=lambda plan: plan.over_bytes), lambda plan: plan.ms)


def _halvings(space: SearchSpace, state: State, n: int) -> list[State]:
    """The states with one more cut: of each of the n largest and n costliest shards that can be cut."""
    # Equal shards of a strip give equal states, so one of them stands for all.
    keys = [(s, units) for s, units in dict.fromkeys(state) if units > 1 and space.fixed.may_split[s]]
    if not keys:
        return []
    cache = space.cache
    numbers = cache.numbers(*np.array(keys).T)
    # Large shards are hard to fit, costly ones hard to balance.
    largest = np.argsort(-cache.bytes[numbers], kind="stable")[:n]
    costliest = np.argsort(ranks(-cache.single_ms[numbers]), kind="stable")[:n]
    states = []
    for strip, units in (keys[i] for i in sorted({*largest, *costliest})):
        i = state.index((strip, units))
        # Sorted, so that equal states are equal tuples.
        states.append(
            tuple(sorted([*state[:i], (strip, units // 2), (strip, units - units // 2), *state[i + 1 :]]))
        )
    return states


def search(space: SearchSpace, states: Sequence[State], inner: InnerSearch) -> list[StatePlan]:
    """The best plan of each of several states with the same number of shards."""
    # One array [C, N, 2], as states have the same number of shards.
    of_states = inner(space, np.array(states))
    # [C] the first of the cheapest plans.
    best = is_least(of_states.total_ms).argmax(-1).tolist()
    each = zip(
        states, best, of_states.total_ms, of_states.devices_of_shards, of_states.over_bytes, strict=True
    )
    return [
        StatePlan(
            float(ms[k]), state, tuple(devices[k].tolist()) if np.isfinite(ms[k]) else (), int(over.min())
        )
        for state, k, ms, devices, over in each
    ]
