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
from shardcore.search.anneal.batch import PlanBatch
from shardcore.search.anneal.search_space import SearchSpace
from shardcore.search.beam import TABLE_WISE, Beam
from shardcore.search.budget import Budget
from shardcore.search.lockstep import Placed, place_in_order
from shardcore.step.options import Options

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

    def __call__(self, space: SearchSpace, keys: np.ndarray) -> Placed:
        return place_in_order(space, keys, self._loads(space.cache, keys), self.plans, self._scores)

    def _loads(self, cache: Options, keys: np.ndarray) -> np.ndarray:
        """[1, N] loads of the shards, those of a bundle's tables added up."""
        if self.load is None:
            return np.zeros(keys.shape[:2])
        of_number = np.array([sum(map(self.load, bundle)) for bundle in cache.made], dtype=float)
        return of_number[cache.numbers(keys[..., 0], keys[..., 1])]

    def _scores(self, batch: PlanBatch, keys: np.ndarray, devices: np.ndarray) -> Iterator[np.ndarray]:
        """Scores of a lockstep.Scorer: loads by speed, with the new shard's included."""
        cache = batch.space.cache
        sums = np.zeros(len(cache.speed))
        for i, load in enumerate(self._loads(cache, keys)[0]):
            yield self.rng.random(len(sums)) if self.load is None else (sums + load) / cache.speed
            sums[devices[0, 0, i]] += load


def looked_up(shard: Shard) -> float:
    """Elements of a shard that one sample looks up: the published planners' hotness × dim.

    It assumes that all rows are hit equally often.
    """
    return shard.table.pooling * shard.width * shard.rows / shard.table.rows


def _baseline(
    name: str,
    load: Load | None,
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
) -> Plan:
    """Place tables by falling load, each where the load is then least. load: as in LeastLoaded. No budget is needed."""
    inner = LeastLoaded(load, np.random.default_rng(seed))
    return Beam(problem, model, inner, TABLE_WISE, Budget().start()).plan(algorithm=name, seed=seed)


LOADS: dict[str, Load] = {
    "size_greedy": lambda s: s.bytes,  # the bytes of weights
    "dim_greedy": lambda s: s.width,  # the columns, and with them the communication
    "lookup_greedy": looked_up,  # pooling factor × dim
    "size_lookup_greedy": lambda s: looked_up(s) * math.log10(s.rows),
}
"""The load that each greedy baseline balances."""
ORDERS = {name: partial(_baseline, name, load) for name, load in LOADS.items()}
"""The greedy baselines by name."""
random = partial(_baseline, "random", None)
"""Tables by falling size, each on a random device with memory."""
