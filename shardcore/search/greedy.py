"""The baselines: random, and four greedy orders from the AutoShard, DreamShard and NeuroShard papers.

Tables are placed by falling load. Each goes to the device with memory whose load is then least.
A load is divided by the device's speed. On equal devices this is the published rule.

Bundles are placed as one. Pinned tables go first: those with fewest devices before others.
If a table finds no memory, a packing takes over (`fitting`). The plan is then not balanced, but it fits.

Shapes: D devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.progress import ticking
from shardcore.core.types import Plan, Problem, Shard
from shardcore.cost.model import CostModel, is_least
from shardcore.search.anneal.batch import PlanBatch, space_by_columns
from shardcore.search.anneal.compiled.arrays import FREE
from shardcore.search.budget import Budget
from shardcore.search.state.feasible import feasible_shards, fitting
from shardcore.search.state.shards import bundles, divided_otherwise, divides_rows, priced
from shardcore.search.ties import least, ranks

Choose = Callable[[float, np.ndarray, np.ndarray], int]
"""(load, fits [D] bool, bytes left [D]) -> the device for a bundle."""


def random(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Place tables by falling size, each on a random device with memory."""
    rng = np.random.default_rng(seed)
    return _place(
        "random",
        problem,
        model,
        seed,
        lambda shard: 0.0,
        lambda load, fits, left: int(rng.choice(np.flatnonzero(fits))),
    )


def looked_up(shard: Shard) -> float:
    """Elements of a shard that one sample looks up: the published planners' hotness × dim.

    It assumes that all rows are hit equally often.
    """
    return shard.table.pooling * shard.width * shard.rows / shard.table.rows


def _greedy(
    name: str,
    load: Callable[[Shard], float],
    problem: Problem,
    model: CostModel,
    *,
    seed: int = 0,
    budget: Budget | None = None,
) -> Plan:
    """Place tables by falling load, each where the load is then least.

    Where rows have to be divided, try each kind that may divide them, and keep the cheapest plan.
    """
    speed = np.array([d.speed for d in problem.topology.devices])

    def balanced(problem: Problem) -> Plan:
        sums = np.zeros(len(speed))

        def least_loaded(load: float, fits: np.ndarray, left: np.ndarray) -> int:
            # Loads per speed, with the new bundle included: a fast device takes more.
            after = np.where(fits, (sums + load) / speed, np.inf)
            lowest = is_least(after).nonzero()[0]
            # Ties go to the device with most memory left.
            device = int(lowest[left[lowest].argmax()])
            sums[device] += load
            return device

        return _place(name, problem, model, seed, load, least_loaded)

    plans = [balanced(problem)]
    if divides_rows(plans[0], problem):
        for other in divided_otherwise(problem):
            with suppress(Infeasible):
                plans.append(balanced(other))
    return least(plans, lambda plan: plan.provenance["predicted_ms"])


def _place(
    name: str, problem: Problem, model: CostModel, seed: int, load: Callable[[Shard], float], choose: Choose
) -> Plan:
    """Place all bundles by falling load with `choose`. Falls back to a packing where one does not fit."""
    problem.require_setting(model.setting)
    shards = feasible_shards(problem)
    if not shards:  # all tables have one way to run
        return priced((), problem, model, algorithm=name, seed=seed, packed=False)
    space, grouped = space_by_columns(problem, model, shards, cut=False), bundles(shards, problem)
    cache = space.cache
    keys = np.array([cache.key(bundle[0]) for bundle in grouped])
    strip, units = keys.T
    loads = [float(sum(map(load, bundle))) for bundle in grouped]
    batch, n_bytes = PlanBatch(space, keys[None]), cache.bytes[cache.numbers(strip, units)]
    free = space.fixed.devices[:, FREE]
    # Least freedom first, then the largest load, then the most bytes.
    for i in ticking(np.lexsort((-n_bytes, ranks(-np.array(loads)), cache.freedom[strip])).tolist()):
        fits = batch.fits(strip[i], units[i])[0, 0]
        if not fits.any():
            return priced(fitting(problem).placements, problem, model, algorithm=name, seed=seed, packed=True)
        batch.place(strip[i], units[i], choose(loads[i], fits, free - batch.used_bytes[0, 0]))
    return batch.plan(algorithm=name, seed=seed, packed=False)


LOADS: dict[str, Callable[[Shard], float]] = {
    "size_greedy": lambda s: s.bytes,  # the bytes of weights
    "dim_greedy": lambda s: s.width,  # the columns, and with them the communication
    "lookup_greedy": looked_up,  # pooling factor × dim
    "size_lookup_greedy": lambda s: looked_up(s) * math.log10(s.rows),
}
"""The load that each greedy baseline balances."""
ORDERS = {name: partial(_greedy, name, load) for name, load in LOADS.items()}
"""The greedy baselines by name."""
