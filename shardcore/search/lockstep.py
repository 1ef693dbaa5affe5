"""Plans in lockstep: many plans under construction at once, for sharders that choose devices themselves.

The compiled search keeps the plans (PlanBatch). A shard is an item and blocks, as in step/options.py.

All greedy searches place the same shards in the same order in each plan, each on the device of least score
(place_in_order): the baselines, NeuroShard's passes and learned policies. They differ in the order and in the scores.

Shapes: C states (ways to cut tables), N shards of each, K plans of each, D devices, S items, R runs, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardcore.core.progress import iterate_with_progress
from shardcore.core.types import Plan, Problem, Shard
from shardcore.cost.model import EQUAL, CostModel, is_minimum
from shardcore.search.anneal import compiled
from shardcore.search.anneal.search_space import SearchSpace, search_space
from shardcore.search.state.shards import priced_plan
from shardcore.search.ties import cost_ranks
from shardcore.step.engine.arrays import FREE, LACK, LOAD, ROOM
from shardcore.step.engine.pointers import pack_record, pack_records
from shardcore.step.options import Integers, ShardOptions
from shardcore.step.ways import IMPOSSIBLE


def search_space_by_columns(
    problem: Problem, model: CostModel, shards: Iterable[Shard], cut: bool
) -> SearchSpace:
    """Search space of plans that give each shard one device.

    cut: whether shards may be cut further. If not, only those that they form on a device are encoded.
    """
    shards = list(shards)
    cache = ShardOptions(problem, model, shards)
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
        self._problem, self._states = pack_record(space.fixed), pack_records(self._state)
        self._head = model.compiled_op_ms().head
        compiled.prepare_plans(self._head, self._problem, self._states, np.ascontiguousarray(keys, np.int64))

    def fitting_devices(self, item: Integers, blocks: Integers) -> np.ndarray:
        """[C, K, D] bool: devices that may hold a shard and have memory for it, in each phase of a step."""
        fits = np.zeros((len(self._states), len(self.space.fixed.devices)), bool)
        compiled.find_feasible_devices(
            self._problem, self._states, self._broadcast_to_plans(item, blocks), fits
        )
        return fits.reshape(*self._shape, -1)

    def place_shard(self, item: Integers, blocks: Integers, device: Integers) -> None:
        """Add a shard to each plan, on its device, whether or not it fits there."""
        compiled.put_shards(
            self._head, self._problem, self._states, self._broadcast_to_plans(item, blocks, device)
        )

    def _broadcast_to_plans(self, *of_shards: Integers) -> np.ndarray:
        """[C · K, *] integers of shards, broadcast to all plans."""
        each = np.broadcast_arrays(np.empty(self._shape), *of_shards)[1:]
        return np.stack(each, -1).astype(np.int64).reshape(-1, len(each))

    def _without_trial_rows(self, values: np.ndarray) -> np.ndarray:
        """[C, K, D, ...] values of the devices, without the engine's extra rows for trials."""
        return values[:, : len(self.space.fixed.devices)].reshape(*self._shape, -1, *values.shape[2:])

    @property
    def held_blocks(self) -> np.ndarray:
        """[C, K, S, D] column blocks of item (table's row range) S on device D, in plan K of chain C."""
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
        forward = cache.model.op_part_ms(self.summed_encodings)[..., 0].sum(-1) / cache.speed
        compute = self.device_ms
        exchange = self.space.collective_cost(self._without_trial_rows(self._state.ops), compute).backward_ms
        return np.stack([forward, np.broadcast_to(exchange, forward.shape), compute - forward], -1)

    def first_plan(self, **provenance: Any) -> Plan:
        """First plan of the batch, consolidated. Raises as `priced_plan` if the plan is incomplete."""
        cache = self.space.cache
        placements = self.space.placements(self._state.held[0], self._state.group[0])
        return priced_plan(placements, cache.problem, cache.model, **provenance)


Scorer = Callable[[PlanBatch, np.ndarray, np.ndarray], Iterator[np.ndarray]]
"""(plans without shards, keys [C, N, 2] in the order of placing, devices [C, K, N]) -> an iterator.

Before each shard it gives scores [C, K, D] of the devices, or what broadcasts to them; inf forbids a device. Afterwards
the plans have the shard, and `devices` says where.
"""


@dataclass(frozen=True, eq=False)
class PlacedPlans:
    """Result of placing the shards of several beam states, with several plans each.

    batch: the plans.
    order: [C, N] the shard that came at each step.
    legal: [C, K, N, D] devices that might have had the shard of each step.
    devices: [C, K, N] the one that has it. If none was legal, the one that had most memory left.
    """

    batch: PlanBatch
    order: np.ndarray
    legal: np.ndarray
    devices: np.ndarray

    @property
    def feasible_plans(self) -> np.ndarray:
        """[C, K] bool: plans in which all shards found a legal device."""
        return np.all(self.legal.any(-1), axis=-1)

    @cached_property
    def total_ms(self) -> np.ndarray:
        """[C, K] cost of the plans; inf for plans that do not fit."""
        return np.where(self.feasible_plans, self.batch.cost_ms(), np.inf)

    @property
    def excess_bytes(self) -> np.ndarray:
        """[C, K] bytes by which devices exceed their memory, summed over devices."""
        return self.batch.excess_bytes.sum(-1)

    @property
    def device_of_each_shard(self) -> np.ndarray:
        """[C, K, N] device of each shard, in the order of the state's shards."""
        # All plans of a state were placed in one order.
        return np.take_along_axis(self.devices, np.argsort(self.order)[:, None], -1)


def place_in_order(
    space: SearchSpace, keys: np.ndarray, costs: np.ndarray, plans: int, scorer: Scorer, equal: float = EQUAL
) -> PlacedPlans:
    """Place shards in many plans at once: those with fewest allowed devices first, then the costliest, then the
    largest.

    keys: [C, N, 2] shards of each state, as item and blocks.
    costs: [C, N] cost of each shard.
    plans: K.
    equal: relative difference below which scores are equal. Of equal devices the one with most memory left is taken.
    """
    cache = space.cache
    numbers = cache.option_numbers(keys[..., 0], keys[..., 1])
    order = np.lexsort((-cache.peak_bytes[numbers], cost_ranks(-costs), cache.freedom[keys[..., 0]]))
    keys = np.take_along_axis(keys, order[..., None], 1)
    (n_states, n_shards, _), n_devices = keys.shape, len(cache.speed)
    batch = PlanBatch(space, keys, plans)
    devices = np.zeros((n_states, plans, n_shards), dtype=np.int64)
    legal = np.zeros((n_states, plans, n_shards, n_devices), dtype=bool)
    for i, scores in enumerate(iterate_with_progress(scorer(batch, keys, devices))):
        item, blocks = keys[:, i, 0][:, None], keys[:, i, 1][:, None]  # [C, 1]
        legal[:, :, i] = batch.fitting_devices(item, blocks) & (scores < np.inf)
        best = is_minimum(np.where(legal[:, :, i], scores, np.inf), equal)
        left_bytes = space.fixed.devices[:, FREE] - batch.used_bytes
        devices[:, :, i] = np.where(best, left_bytes, -np.inf).argmax(-1)
        # Also where none is legal: `excess_bytes` then shows by how much.
        batch.place_shard(item, blocks, devices[:, :, i])
    return PlacedPlans(batch, order, legal, devices)
