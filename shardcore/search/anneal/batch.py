"""PlanBatch: plans under construction, for sharders that choose devices themselves.

A shard is a strip and units, as in step/options.py. Plans are kept by the compiled search.

Shapes: C ways to cut tables, N shards of each, K plans of each, D devices, S strips, R runs, F features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from shardcore.core.types import Plan, Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.search.anneal import compiled
from shardcore.search.anneal.search_space import SearchSpace, search_space
from shardcore.search.state.shards import priced_plan
from shardcore.step.engine.arrays import FREE, LACK, LOAD, ROOM
from shardcore.step.engine.pointers import pack_batch, pack_record
from shardcore.step.options import Integers, Options
from shardcore.step.ways import IMPOSSIBLE


def search_space_by_columns(
    problem: Problem, model: CostModel, shards: Iterable[Shard], cut: bool
) -> SearchSpace:
    """Search space of plans that give each shard one device.

    cut: whether shards may be cut further. If not, only those that they form on a device are encoded.
    """
    shards = list(shards)
    cache = Options(problem, model, shards)
    cache.add_merged_shards(cache.shard_keys(shards))
    return search_space(cache, shards, everywhere=False, cut=cut)


class PlanBatch:
    """C × K plans under construction, with the memory and cost that follow.

    Methods take a shard, and a device, for each plan: integers, or arrays that broadcast to [C, K].
    """

    def __init__(self, space: SearchSpace, keys: np.ndarray, plans: int = 1) -> None:
        """Plans in which nothing is placed yet. keys: [C, N, 2] all shards that will be placed in them."""
        self.space, self._shape = space, (len(keys), plans)
        topology, model = space.cache.problem.topology, space.cache.model
        self._state = compiled.empty_state(space.fixed, len(topology.hosts), (len(keys) * plans,))
        # Packed once: the records outlive all calls.
        self._problem, self._states = pack_record(space.fixed), pack_batch(self._state)
        self._head = model.compiled().head
        compiled.prepare_plans(self._head, self._problem, self._states, np.ascontiguousarray(keys, np.int64))

    def fitting_devices(self, strip: Integers, units: Integers) -> np.ndarray:
        """[C, K, D] bool: devices that may hold a shard and have memory for it, in each phase of a step."""
        fits = np.zeros((len(self._states), len(self.space.fixed.devices)), bool)
        compiled.find_feasible_devices(
            self._problem, self._states, self._broadcast_to_plans(strip, units), fits
        )
        return fits.reshape(*self._shape, -1)

    def place(self, strip: Integers, units: Integers, device: Integers) -> None:
        """Add a shard to each plan, on its device, whether or not it fits there."""
        compiled.put_shards(
            self._head, self._problem, self._states, self._broadcast_to_plans(strip, units, device)
        )

    def _broadcast_to_plans(self, *of_shards: Integers) -> np.ndarray:
        """[C · K, *] integers of shards, broadcast to all plans."""
        each = np.broadcast_arrays(np.empty(self._shape), *of_shards)[1:]
        return np.stack(each, -1).astype(np.int64).reshape(-1, len(each))

    def _without_trial_rows(self, values: np.ndarray) -> np.ndarray:
        """[C, K, D, ...] values of the devices, without the engine's extra rows for trials."""
        return values[:, : len(self.space.fixed.devices)].reshape(*self._shape, -1, *values.shape[2:])

    @property
    def held_units(self) -> np.ndarray:
        """[C, K, S, D] column units of strip (table's row range) S on device D, in plan K of chain C."""
        return self._state.held.reshape(*self._shape, *self._state.held.shape[1:])

    @property
    def used_bytes(self) -> np.ndarray:
        """[C, K, D] bytes of each device's shards, without the local batch: at least the peak of an op of its own."""
        used = self.space.fixed.devices[:, FREE] - self._without_trial_rows(self._state.devices)[..., ROOM]
        # The room is infinite for an empty device, and below all for ops that are too large.
        return np.rint(np.clip(used, 0, IMPOSSIBLE)).astype(np.int64)

    @property
    def excess_bytes(self) -> np.ndarray:
        """[C, K, D] bytes by which each device exceeds its memory, as counted when the device last changed."""
        return self._without_trial_rows(self._state.devices)[..., LACK]

    @property
    def summed_encodings(self) -> np.ndarray:
        """[C, K, D, R, F] sums of the cost model's shard encodings, by device and run: inputs of the model's head."""
        return self._without_trial_rows(self._state.ops[..., self.space.fixed.first_code :])

    @property
    def op_ms(self) -> np.ndarray:
        """[C, K, D, R] ms of each device's fused ops, at device speed 1."""
        return self._without_trial_rows(self._state.ms[..., LOAD])

    @property
    def device_ms(self) -> np.ndarray:
        """[C, K, D] compute ms of each device, at its own speed."""
        return self.op_ms.sum(-1) / self.space.cache.speed

    def cost_ms(self) -> np.ndarray:
        """[C, K] predicted ms of a step under each plan. Equal to price(lower(plan, problem), model).total_ms."""
        return self.space.cost_ms(
            self._without_trial_rows(self._state.ops), self._without_trial_rows(self._state.ms)
        )

    def device_part_ms(self) -> np.ndarray:
        """[C, K, D, 3] ms of each device: forward compute, backward exchange, backward compute."""
        cache = self.space.cache
        forward = cache.model.parts(self.summed_encodings)[..., 0].sum(-1) / cache.speed
        compute = self.device_ms
        exchange = self.space.collective_cost(self._without_trial_rows(self._state.ops), compute).backward_ms
        return np.stack([forward, np.broadcast_to(exchange, forward.shape), compute - forward], -1)

    def first_plan(self, **provenance: Any) -> Plan:
        """First plan of the batch, consolidated. Raises as `priced_plan` if the plan is incomplete."""
        cache = self.space.cache
        placements = self.space.placements(self._state.held[0], self._state.group[0])
        return priced_plan(placements, cache.problem, cache.model, **provenance)
