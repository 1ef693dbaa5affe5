"""The baselines: random, and four greedy orders, as in the AutoShard, DreamShard and NeuroShard papers.

Tables fall in some measure of load; each goes to the device with room whose sum of that measure, with the table, over its
speed is least. On equal devices that is the published rule, the least sum before the table. Tables that are kept together go
as one; pinned ones go first, those with the fewest devices to choose from before others. Where an order leaves a table without
room, `packing` takes over: a balanced plan is then out of reach of the rule, but one that fits is not.

Shapes: D devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.search.budget import Budget
from shardcore.search.feasible import feasible_pieces, pack_or_raise
from shardcore.search.pieces import items, to_plan
from shardcore.search.placement_state import PlacementState
from shardcore.search.shard_cost_cache import ShardCostCache
from shardcore.types import Plan, Problem, Shard

Choose = Callable[[float, np.ndarray, np.ndarray], int]
"""The device for an item of such a load, given where it fits [D] bool and the bytes left [D]."""


def random(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Tables by falling size, each to any device with room."""
    rng = np.random.default_rng(seed)
    return _place("random", problem, model, seed, lambda s: 0.0, lambda _, fits, left: int(rng.choice(np.flatnonzero(fits))))


def size_greedy(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Balances the bytes of weights."""
    return _greedy("size_greedy", problem, model, seed, lambda s: s.bytes)


def dim_greedy(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Balances the columns, and with them the communication."""
    return _greedy("dim_greedy", problem, model, seed, lambda s: s.width)


def lookup_greedy(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Balances pooling × dim, the elements looked up."""
    return _greedy("lookup_greedy", problem, model, seed, looked_up)


def size_lookup_greedy(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Balances pooling × dim × log10(rows)."""
    return _greedy("size_lookup_greedy", problem, model, seed, lambda s: looked_up(s) * math.log10(s.rows))


def looked_up(shard: Shard) -> float:
    """Elements of a shard that one sample looks up, its rows being hit evenly: the published planners' hotness × dim."""
    return shard.table.pooling * shard.width * shard.rows / shard.table.rows


def _greedy(name: str, problem: Problem, model: CostModel, seed: int, load: Callable[[Shard], float]) -> Plan:
    speed = np.array([d.speed for d in problem.topology.devices])
    sums = np.zeros(len(speed))

    def least(load: float, fits: np.ndarray, left: np.ndarray) -> int:
        after = np.where(fits, (sums + load) / speed, np.inf)
        lowest = (after == after.min()).nonzero()[0]
        device = int(lowest[left[lowest].argmax()])
        sums[device] += load
        return device

    return _place(name, problem, model, seed, load, least)


def _place(name: str, problem: Problem, model: CostModel, seed: int, load: Callable[[Shard], float], choose: Choose) -> Plan:
    problem.require_setting(model.setting)
    pieces = feasible_pieces(problem)
    cache, found = ShardCostCache(problem, model, pieces), items(pieces, problem)
    of = [cache.piece(item[0]) for item in found]
    cache.add(of)
    strip, units = np.array(of).T
    loads = np.array([sum(map(load, item)) for item in found])
    state = PlacementState(cache, priced=False)
    for i in np.lexsort((-cache.bytes[cache.parts(strip, units)], -loads, cache.freedom[strip])):
        fits = state.fits(strip[i], units[i])
        if not fits.any():
            packing = pack_or_raise(problem)
            return to_plan(packing.pieces, packing.devices, problem, model, algorithm=name, seed=seed, packed=True)
        state.place(strip[i], units[i], choose(loads[i], fits, state.free - state.used))
    return state.plan(algorithm=name, seed=seed, packed=False)


ORDERS = {"size_greedy": size_greedy, "dim_greedy": dim_greedy, "lookup_greedy": lookup_greedy,
          "size_lookup_greedy": size_lookup_greedy}
"""The greedy baselines by name."""
