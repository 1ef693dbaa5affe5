"""Placing in lockstep: many plans at once get the same shards in the same order, each on the device of least score.

All greedy searches place like this: the baselines, NeuroShard's passes and learned policies. They differ in the order
and in the scores.

Shapes: C states (ways to cut tables), N their shards, K plans of a state, D devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardcore.core.progress import ticking
from shardcore.cost.model import EQUAL, is_minimum
from shardcore.search.anneal.batch import PlanBatch
from shardcore.search.anneal.search_space import SearchSpace
from shardcore.search.ties import cost_ranks
from shardcore.step.engine.arrays import FREE

Scorer = Callable[[PlanBatch, np.ndarray, np.ndarray], Iterator[np.ndarray]]
"""(plans without shards, keys [C, N, 2] in the order of placing, devices [C, K, N]) -> an iterator.

Before each shard it gives scores [C, K, D] of the devices, or what broadcasts to them; inf forbids a device. Afterwards
the plans have the shard, and `devices` says where.
"""


@dataclass(frozen=True, eq=False)
class Placed:
    """Plans of several states.

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
    def fits(self) -> np.ndarray:
        """[C, K] bool: plans in which all shards found a legal device."""
        return np.all(self.legal.any(-1), axis=-1)

    @cached_property
    def total_ms(self) -> np.ndarray:
        """[C, K] cost of the plans; inf for plans that do not fit."""
        return np.where(self.fits, self.batch.cost_ms(), np.inf)

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
) -> Placed:
    """Place shards in many plans at once: those with fewest allowed devices first, then the costliest, then the
    largest.

    keys: [C, N, 2] shards of each state, as strip and units.
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
    for i, scores in enumerate(ticking(scorer(batch, keys, devices))):
        strip, units = keys[:, i, 0][:, None], keys[:, i, 1][:, None]  # [C, 1]
        legal[:, :, i] = batch.fitting_devices(strip, units) & (scores < np.inf)
        best = is_minimum(np.where(legal[:, :, i], scores, np.inf), equal)
        left_bytes = space.fixed.devices[:, FREE] - batch.used_bytes
        devices[:, :, i] = np.where(best, left_bytes, -np.inf).argmax(-1)
        # Also where none is legal: `excess_bytes` then shows by how much.
        batch.place(strip, units, devices[:, :, i])
    return Placed(batch, order, legal, devices)
