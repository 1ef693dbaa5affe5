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
from shardcore.search.state.shards import priced
from shardcore.step.engine.arrays import FREE, LACK, LOAD, ROOM
from shardcore.step.engine.pointers import packed, packed_batch
from shardcore.step.options import Integers, Options
from shardcore.step.ways import IMPOSSIBLE


def space_by_columns(problem: Problem, model: CostModel, shards: Iterable[Shard], cut: bool) -> SearchSpace:
    """The space of plans that give each shard a device.

    cut: whether shards may be cut further. If not, only those that they form on a device are encoded.
    """
    shards = list(shards)
    cache = Options(problem, model, shards)
    cache.add(cache.keys(shards))
    return search_space(cache, shards, everywhere=False, cut=cut)


class PlanBatch:
    """C × K plans under construction, with the memory and cost that follow.

    Methods take a shard, and a device, for each plan: integers, or arrays that broadcast to [C, K].
    """

    def __init__(self, space: SearchSpace, keys: np.ndarray, plans: int = 1) -> None:
        """Plans with nothing placed. keys: [C, N, 2] all shards that will be placed in them."""
        self.space, self._shape = space, (len(keys), plans)
        topology, model = space.cache.problem.topology, space.cache.model
        self._state = compiled.empty(space.fixed, len(topology.hosts), (len(keys) * plans,))
        # Packed once: the records outlive all calls.
        self._problem, self._states = packed(space.fixed), packed_batch(self._state)
        self._head = model.compiled().head
        compiled.expect_all(self._head, self._problem, self._states, np.ascontiguousarray(keys, np.int64))

    def fits(self, strip: Integers, units: Integers) -> np.ndarray:
        """[C, K, D] bool: devices that may hold the shard and have the memory, in each phase of a step."""
        fits = np.zeros((len(self._states), len(self.space.fixed.devices)), bool)
        compiled.find_devices(self._problem, self._states, self._each(strip, units), fits)
        return fits.reshape(*self._shape, -1)

    def place(self, strip: Integers, units: Integers, device: Integers) -> None:
        """Add a shard, whether it fits or not."""
        compiled.put_all(self._head, self._problem, self._states, self._each(strip, units, device))

    def _each(self, *of_shards: Integers) -> np.ndarray:
        """[C · K, *] integers of each plan."""
        each = np.broadcast_arrays(np.empty(self._shape), *of_shards)[1:]
        return np.stack(each, -1).astype(np.int64).reshape(-1, len(each))

    def _of_devices(self, values: np.ndarray) -> np.ndarray:
        """[C, K, D, ...] values without those of trials."""
        return values[:, : len(self.space.fixed.devices)].reshape(*self._shape, -1, *values.shape[2:])

    @property
    def held(self) -> np.ndarray:
        """[C, K, S, D] units of each strip on each device."""
        return self._state.held.reshape(*self._shape, *self._state.held.shape[1:])

    @property
    def used_bytes(self) -> np.ndarray:
        """[C, K, D] bytes of the shards, without those of the local batch: at least the device's own peak."""
        used = self.space.fixed.devices[:, FREE] - self._of_devices(self._state.devices)[..., ROOM]
        # The room is infinite for an empty device, and below all for ops that are too large.
        return np.rint(np.clip(used, 0, IMPOSSIBLE)).astype(np.int64)

    @property
    def lack_bytes(self) -> np.ndarray:
        """[C, K, D] bytes beyond the memory, counted when the device last changed."""
        return self._of_devices(self._state.devices)[..., LACK]

    @property
    def codes(self) -> np.ndarray:
        """[C, K, D, R, F] summed encodings, which the model's head reads."""
        return self._of_devices(self._state.ops[..., self.space.fixed.first_code :])

    @property
    def op_ms(self) -> np.ndarray:
        """[C, K, D, R] ms of the fused ops, at speed 1."""
        return self._of_devices(self._state.ms[..., LOAD])

    @property
    def device_ms(self) -> np.ndarray:
        """[C, K, D] ms of compute, at each device's speed."""
        return self.op_ms.sum(-1) / self.space.cache.speed

    def cost_ms(self) -> np.ndarray:
        """[C, K] predicted ms of a step. Equal to price(lower(plan, problem), model).total_ms."""
        return self.space.cost_ms(self._of_devices(self._state.ops), self._of_devices(self._state.ms))

    def parts_ms(self) -> np.ndarray:
        """[C, K, D, 3] ms of each device: forward compute, backward exchange, backward compute."""
        cache = self.space.cache
        forward = cache.model.parts(self.codes)[..., 0].sum(-1) / cache.speed
        compute = self.device_ms
        exchange = self.space.collectives(self._of_devices(self._state.ops), compute).backward_ms
        return np.stack([forward, np.broadcast_to(exchange, forward.shape), compute - forward], -1)

    def plan(self, **provenance: Any) -> Plan:
        """The first plan, consolidated. Raises what `priced` raises if it is incomplete."""
        cache = self.space.cache
        placements = self.space.placements(self._state.held[0], self._state.group[0])
        return priced(placements, cache.problem, cache.model, **provenance)
