"""What the ops of each kind take at least, by their load: contention in a lower bound.

An op's shards slow each other down, the more the larger its load.

Shapes: N shards, F features, G intervals of load, W loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardcore.search.bound_shards import BoundShards

_INTERVALS = 32


@dataclass(frozen=True, eq=False)
class Curve:
    """The least ms of ops of one kind by their load, without the launch.

    alone: [N] ms that each shard adds at least, whatever else an op has. 0 for those of other kinds.
    load: [N] of each shard: about what it adds to a usual op. Not below `alone`.
    ends: [G + 1] loads, rising from 0 to that of all tables.
    slowdown: [G] from ends[g] on, an op takes at least slowdown[g] × its load. Rising.
    """

    alone: np.ndarray
    load: np.ndarray
    ends: np.ndarray
    slowdown: np.ndarray

    def most(self, ms: np.ndarray) -> np.ndarray:
        """The largest load of an op that takes at most `ms`. 0 for less than 0 ms."""
        ms = np.maximum(0.0, ms)
        g = np.searchsorted(self.slowdown * self.ends[:-1], ms, side="right") - 1
        return np.minimum(ms / self.slowdown[g], self.ends[g + 1])


def curve(shards: BoundShards, kind: int, some: np.ndarray, sure: np.ndarray) -> Curve:
    """The curve of a kind's ops that have only `some` shards, [N] bool.

    sure: [N] bool, shards that every op has.
    A shard counts at the rates of its op's least drivers, and at least at those of its own.
    """
    model, of = shards.model, np.flatnonzero(some & (shards.kind == kind))
    every = np.zeros((2, len(shards.kind)))
    if not len(of):
        return Curve(*every, np.array([0.0, 1.0]), np.ones(1))
    codes, table, sure = shards.codes[of], shards.table[of], sure[of]
    base = codes[sure].sum(0)
    alone = load = (model.rates(np.maximum(codes, base)) * codes).sum(1)
    # Loads are those at a usual op's rates. Any loads give a valid curve; these give one that is near.
    for _ in range(3):
        usual = _room(load, table).sum() / (2 if kind else 1) / shards.n_groups[kind]
        [least] = _least_codes(codes, load, table, sure, np.array([usual]))
        load = np.maximum(load, (model.rates(np.maximum(codes, least)) * codes).sum(1))
    total = max(float(_room(load, table).sum()), 1e-12)
    ends = np.append(0.0, total * np.geomspace(1e-3, 1.0, _INTERVALS) * (1 + 1e-9))
    busy = load > 0
    least = np.maximum(codes[busy], _least_codes(codes, load, table, sure, ends[:-1])[:, None])
    slowdown = (((model.rates(least) * codes[busy]).sum(-1) / load[busy]).min(1) if busy.any()
                else np.ones(_INTERVALS))
    every[0, of], every[1, of] = alone, load
    return Curve(*every, ends, np.maximum.accumulate(slowdown))


def _room(load: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[T] the most load of one shard of each table."""
    room = np.zeros(int(table.max(initial=-1)) + 1)
    np.maximum.at(room, table, load)
    return room


def _least_codes(codes: np.ndarray, load: np.ndarray, table: np.ndarray, sure: np.ndarray,
                 wanted: np.ndarray) -> np.ndarray:
    """[W, F] the least that an op can have of each feature, if the loads of its shards sum to `wanted` [W].

    codes: [N, F]. load: [N] of each shard. sure: [N] bool, what every op has.
    A device holds at most one shard of each table.
    """
    fixed, base = float(load[sure].sum()), codes[sure].sum(0)
    free = (load > 0) & ~np.isin(table, table[sure])
    room = _room(np.where(free, load, 0.0), table)
    each = np.full((len(room), codes.shape[1]), np.inf)
    np.minimum.at(each, table[free], codes[free] / load[free][:, None])
    room, each = room[room > 0], each[room > 0]
    found = np.zeros((len(wanted), codes.shape[1]))
    # A fractional knapsack: take load first from tables that bring least of the feature.
    for f in range(codes.shape[1]):
        order = np.argsort(each[:, f])
        filled = np.append(0.0, np.cumsum(room[order]))
        brought = np.append(0.0, np.cumsum((room * each[:, f])[order]))
        found[:, f] = base[f] + np.interp(np.maximum(0.0, wanted - fixed), filled, brought)
    return found
