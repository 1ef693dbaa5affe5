"""What the ops of each kind take at least, by their load: contention in a lower bound.

An op's shards slow each other down, the more the larger its load.

Shapes: N shards, n shards of a kind, F features, G intervals of load, W loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardcore.search.bound.contention import least_rates, least_sums
from shardcore.search.bound.shards import BoundShards

_INTERVALS = 80
_FROM, _TO = 0.02, 3.0
"""Between these loads, relative to a usual op's, intervals are short."""


@dataclass(frozen=True, eq=False)
class Curve:
    """The least ms of ops of one kind by their load, without the launch.

    alone: [N] ms that each shard adds at least, whatever else an op has. 0 for those of other kinds.
    load: [N] of each shard: about what it adds to a usual op.
    ends: [G + 1] loads, rising from 0 to that of all tables.
    slowdown: [G] from ends[g] on, an op takes at least slowdown[g] × its load. Rising.
    """

    alone: np.ndarray
    load: np.ndarray
    ends: np.ndarray
    slowdown: np.ndarray

    def least(self, load: float) -> float:
        """The least slowdown of an op of this load or more."""
        g = np.searchsorted(self.ends[:-1], load, side="right") - 1
        return float(self.slowdown[g])

    def most(self, ms: np.ndarray) -> np.ndarray:
        """The largest load of an op that takes at most `ms`. 0 for less than 0 ms."""
        ms = np.maximum(0.0, ms)
        g = np.searchsorted(self.slowdown * self.ends[:-1], ms, side="right") - 1
        return np.minimum(ms / self.slowdown[g], self.ends[g + 1])


class Ops:
    """Ops of one kind of sharding.

    of: [n] numbers of their shards.
    load: [n] ms of each at the rates of a usual op. Any loads give valid bounds; these give near ones.
    ends: [G + 1] loads, rising from 0 to that of all tables.
    rates: [G, F] rates of any op of load ends[g] or more, at least.
    every: the curve of ops that may have any shards.
    """

    def __init__(self, shards: BoundShards, kind: int):
        self.shards, self.of = shards, np.flatnonzero(shards.kind == kind)
        # A usual op has an even part of the tables. Of a kind that groups share, about half of the tables.
        whole = np.isin(self.of, shards.at[kind][np.arange(len(shards.size)), shards.size[:, kind]])
        ops = 2 * shards.n_groups[kind] if kind else len(shards.speed)
        codes, model = shards.codes[self.of], shards.model
        usual = codes[whole].sum(0) / ops
        # Loads count at the least rates of a usual load, so that such an op's slowdown is near 1.
        rates = model.rates(usual)
        rates = self._least_rates(codes @ rates, np.array([usual @ rates]))[0]
        self.load = codes @ rates
        inner = max(float(usual @ rates), 1e-12) * np.geomspace(_FROM, _TO, _INTERVALS - 1)
        top = max(float(_room(self.load, shards.table[self.of]).sum()), 1e-12) * (1 + 1e-9)
        self.ends = np.concatenate([[0.0], inner[inner < top], [top]])
        self.rates = self._least_rates(self.load, self.ends[:-1])
        all_ = np.ones(len(shards.kind), dtype=bool)
        self.every = self.curve(all_, ~all_)

    def _least_rates(self, load: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """[W, F] rates of any op of these loads [W] or more, if its shards have loads [n]."""
        shards, busy = self.shards, load > 0
        of = self.of[busy]
        if not len(of):
            return shards.model.rates(np.zeros((len(wanted), shards.codes.shape[1])))
        return least_rates(shards.model, shards.codes[of], load[busy], shards.table[of], wanted)

    def curve(self, some: np.ndarray, sure: np.ndarray) -> Curve:
        """The curve of ops that have only `some` shards, [N] bool.

        sure: [N] bool, shards that every op has.
        A shard counts at the rates of its op's least features, and at least at those of its own.
        """
        shards, some, sure = self.shards, some[self.of], sure[self.of]
        of, load, sure = self.of[some], self.load[some], sure[some]
        codes, model = shards.codes[of], shards.model
        every = np.zeros((2, len(shards.kind)))
        base = codes[sure].sum(0)
        every[0, of] = (model.rates(np.maximum(codes, base)) * codes).sum(1)
        every[1, of] = load
        busy, rates, slowdown = load > 0, self.rates, np.ones(len(self.ends) - 1)
        if sure.any():
            rates = np.maximum(rates, model.rates(base + self._least_beside(of, load, sure)))
        if busy.any():
            # One interval after the other: of all together there are too many numbers.
            own = model.rates(codes[busy])
            slowdown = np.array(
                [((np.maximum(own, least) * codes[busy]).sum(-1) / load[busy]).min() for least in rates]
            )
        return Curve(*every, self.ends, np.maximum.accumulate(slowdown))

    def _least_beside(self, of: np.ndarray, load: np.ndarray, sure: np.ndarray) -> np.ndarray:
        """[G, F] the least of each feature that ops have beside what is sure, at the ends of intervals."""
        codes, table = self.shards.codes[of], self.shards.table[of]
        free = (load > 0) & ~np.isin(table, table[sure])
        if not free.any():
            return np.zeros((len(self.ends) - 1, codes.shape[1]))
        wanted = np.maximum(0.0, self.ends[:-1] - load[sure].sum())
        return least_sums(codes[free], load[free], table[free], wanted)


def _room(load: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[T] the most load of one shard of each table."""
    room = np.zeros(int(table.max(initial=-1)) + 1)
    np.maximum.at(room, table, load)
    return room
