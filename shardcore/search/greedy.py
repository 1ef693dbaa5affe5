"""The baselines: random, and four greedy orders, as in the AutoShard, DreamShard and NeuroShard papers.

Tables fall in some measure of load; each goes to the device with room whose sum of that measure, with the table, over its
speed is least. On equal devices that is the published rule, the least sum before the table. Where an order leaves a table
without room, `packing` takes over: a balanced plan is then out of reach of the rule, but one that fits is not.

Shapes: D devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.search.budget import Budget
from shardcore.search.feasible import feasible_pieces, pack_or_raise
from shardcore.search.pieces import to_plan
from shardcore.search.room import Room, piece_bytes
from shardcore.types import Plan, Problem, Shard

Choose = Callable[[Shard, np.ndarray, np.ndarray], int]
"""The device for a piece, given where it fits [D] bool and the bytes left [D]."""


def random(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Tables by falling size, each to any device with room."""
    rng = np.random.default_rng(seed)
    return _place("random", problem, model, seed, lambda s: 0.0, lambda s, fits, left: int(rng.choice(np.flatnonzero(fits))))


def size_greedy(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Balances the bytes of weights."""
    return _greedy("size_greedy", problem, model, seed, lambda s: s.bytes)


def dim_greedy(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Balances the columns, and with them the communication."""
    return _greedy("dim_greedy", problem, model, seed, lambda s: s.width)


def lookup_greedy(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Balances pooling × dim, the elements looked up."""
    return _greedy("lookup_greedy", problem, model, seed, _looked_up)


def size_lookup_greedy(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """Balances pooling × dim × log10(rows)."""
    return _greedy("size_lookup_greedy", problem, model, seed, lambda s: _looked_up(s) * math.log10(s.rows))


def _looked_up(shard: Shard) -> float:
    return shard.table.pooling * shard.width * shard.rows / shard.table.rows


def _greedy(name: str, problem: Problem, model: CostModel, seed: int, load: Callable[[Shard], float]) -> Plan:
    speed = np.array([d.speed for d in problem.topology.devices])
    sums = np.zeros(len(speed))

    def least(shard: Shard, fits: np.ndarray, left: np.ndarray) -> int:
        after = np.where(fits, (sums + load(shard)) / speed, np.inf)
        device = int(np.lexsort((-left, after))[0])
        sums[device] += load(shard)
        return device

    return _place(name, problem, model, seed, load, least)


def _place(name: str, problem: Problem, model: CostModel, seed: int, load: Callable[[Shard], float], choose: Choose) -> Plan:
    problem.require_setting(model.setting)
    pieces: Sequence[Shard] = sorted(feasible_pieces(problem), key=lambda s: (-load(s), -piece_bytes(s, problem)))
    room, devices = Room(problem), []
    for piece in pieces:
        fits = room.fits(piece)
        if not fits.any():
            packing = pack_or_raise(problem)
            return to_plan(packing.pieces, packing.devices, problem, model, algorithm=name, seed=seed, packed=True)
        devices.append(choose(piece, fits, room.left))
        room.put(piece, devices[-1])
    return to_plan(pieces, devices, problem, model, algorithm=name, seed=seed, packed=False)
