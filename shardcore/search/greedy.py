"""The baselines: random, and four greedy orders from the AutoShard, DreamShard and NeuroShard papers.

Tables are placed by falling load. Each goes to the device with memory whose load is then least.
A load is divided by the device's speed. On equal devices this is the published rule.

Bundles are placed as one. Pinned tables go first: those with fewest devices before others.
Where rows have to be divided, each kind that may divide them is tried, and the cheapest plan stays.
If a table finds no memory, a packing takes over (`Beam.plan`). The plan is then not balanced, but it fits.

Shapes: N shards, D devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardcore.core.types import Plan, Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.search.anneal.search_space import SearchSpace
from shardcore.search.beam import TABLE_WISE, Beam
from shardcore.search.budget import Budget
from shardcore.search.lockstep import PlacedPlans, PlanBatch, place_in_order
from shardcore.step.options import ShardOptions

Load = Callable[[Shard], float]


@dataclass(frozen=True)
class LeastLoaded:
    """An inner search (see beam.InnerSearch): each shard goes to the device whose load is then least.

    load: of a shard. None: shards go to random devices.
    rng: draws these.
    """

    load: Load | None
    rng: np.random.Generator
    plans: int = 1

    def __call__(self, space: SearchSpace, keys: np.ndarray) -> PlacedPlans:
        return place_in_order(
            space, keys, self._shard_loads(space.cache, keys), self.plans, self._device_scores
        )

    def _shard_loads(self, cache: ShardOptions, keys: np.ndarray) -> np.ndarray:
        """[1, N] load of each shard; of a bundle, the sum over its tables."""
        if self.load is None:
            return np.zeros(keys.shape[:2])
        of_number = np.array([sum(map(self.load, bundle)) for bundle in cache.made], dtype=float)
        return of_number[cache.option_numbers(keys[..., 0], keys[..., 1])]

    def _device_scores(self, batch: PlanBatch, keys: np.ndarray, devices: np.ndarray) -> Iterator[np.ndarray]:
        """Scores of devices for each shard, as a lockstep.Scorer: load, including the new shard's, over speed."""
        cache = batch.space.cache
        sums = np.zeros(len(cache.speed))
        for i, load in enumerate(self._shard_loads(cache, keys)[0]):
            yield self.rng.random(len(sums)) if self.load is None else (sums + load) / cache.speed
            sums[devices[0, 0, i]] += load


def looked_up_elements(shard: Shard) -> float:
    """Elements of a shard that one sample looks up: pooling factor × dim, as in published planners.

    It assumes that all rows are hit equally often.
    """
    return shard.table.pooling * shard.width * shard.rows / shard.table.rows


def _baseline_plan(
    name: str,
    load: Load | None,
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
) -> Plan:
    """Plan with tables placed by falling load, each on the least loaded device. load: see LeastLoaded. The budget is
    unused.
    """
    inner = LeastLoaded(load, np.random.default_rng(seed))
    return Beam(problem, model, inner, TABLE_WISE, Budget().start()).best_plan(algorithm=name, seed=seed)


LOADS: dict[str, Load] = {
    "size_greedy": lambda s: s.bytes,  # the bytes of weights
    "dim_greedy": lambda s: s.width,  # the columns, and with them the communication
    "lookup_greedy": looked_up_elements,  # pooling factor × dim
    "size_lookup_greedy": lambda s: looked_up_elements(s) * math.log10(s.rows),
}
"""The load that each greedy baseline balances."""
ORDERS = {name: partial(_baseline_plan, name, load) for name, load in LOADS.items()}
"""The greedy baselines by name."""
random = partial(_baseline_plan, "random", None)
"""Tables by falling size, each on a random device with memory."""
