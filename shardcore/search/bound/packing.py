"""A lower bound from packing: the tables do not fit on the devices within less time.

Give each table a worth, which its shards share by their columns. Within a time, a device can only collect so
much worth: a knapsack. If all devices together collect less than all tables are worth, then no plan takes so
little time. That holds for any worths (the dual of a linear program over all fillings of a device). So they
may be found by any means: here by subgradient steps, then by cutting planes. Whatever is tried proves a time.
The bound is the longest of these. Shards may have worths of their own; then a table is worth the least of
its ways to be made up.

A device's knapsack holds columns. Kinds that groups of devices share take time from all their devices, and
collect worth once. Exchanges beyond the least cost worth too, at a rate.

Loads are rounded down and times up, so that rounding never raises the bound.

Shapes: T tables, N shards, M = STEPS steps of time, K kinds of a mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.search.bound import compiled
from shardcore.search.bound.knapsacks import STEPS, Bag
from shardcore.search.bound.ops import Ops
from shardcore.search.bound.shards import BoundShards

_FIRST, _AGAIN = (40, 40), (15, 10)
"""Subgradient steps, and linear programs, that look for worths: from nothing, and from those of a proof."""
_AT_FIRST = 8
"""Worths tried at most, one after another, before those."""
_RATE = 0.8
"""What a ms of exchanges is worth at first, in ms of work. With less work, an op contends less. So a device
that waits for a ms loses less than a ms of work."""
_TIMES = 8
"""Times tried with worths of shards."""
_FEW, _FEWER = 60, 24
"""Tables up to which there are linear programs: from nothing, and from a proof. Many tables fill devices as
if they could be divided."""
_REACH = 0.3
"""How far worths move at first, relative to themselves."""
_AHEAD = 1.003
"""The time to prove next, relative to the one that is proved."""


@dataclass(frozen=True, eq=False)
class Proof:
    """ms: no plan takes less. worth: [T + 1] that of tables, and of a ms of exchanges, that prove it."""

    ms: float
    worth: np.ndarray | None


class Packing:
    """Bounds of plans of a mix of kinds.

    ops: of each kind.
    alike: whether all devices wait for the same exchanges. If not, exchanges do not count.
    """

    def __init__(self, shards: BoundShards, ops: Sequence[Ops], alike: bool):
        self.shards, self.ops, self.alike = shards, ops, alike
        # What part of its table each shard is. A kind's groups share a table as one.
        self.part = np.zeros(len(shards.kind))
        for k, at in enumerate(shards.at):
            i, u = np.nonzero(at >= 0)
            self.part[at[i, u]] = u / shards.size[i, k]

    def prove(self, mix: list[int], some: np.ndarray, sure: np.ndarray, start: Proof, high: float) -> Proof:
        """What plans of the mix take at least, from start.ms to high ms.

        some: [N] bool, the shards that they may use.
        sure: [N] bool, shards that all devices have.
        """
        on_hosts = any(1 < self.shards.n_groups[k] < len(self.shards.speed) for k in mix)
        if high <= start.ms or (on_hosts and len(set(self.shards.speed)) > 1):
            return start
        found = _Mix(self, mix, some, sure, high).prove(start)
        if not np.isfinite(found.ms):
            return Proof(high, found.worth)
        return Proof(min(high, max(start.ms, found.ms)), found.worth)


class _Mix:
    """Plans of one mix of kinds, by steps of time up to `high` ms."""

    def __init__(self, packing: Packing, mix: list[int], some: np.ndarray, sure: np.ndarray, high: float):
        shards = packing.shards
        self.shards, self.part, self.mix, self.high = shards, packing.part, mix, high
        exchange = shards.exchange_ms * packing.alike
        some = some & (shards.alone_ms <= high * shards.speed.max())
        least = shards.least_of_each(np.where(some, exchange, np.inf), mix)
        self.possible = bool(np.isfinite(least).all())
        least = np.where(np.isfinite(least), least, 0.0)
        # What a shard adds to exchanges beyond its part of its table's least.
        self.extra_ms = exchange - self.part * least[shards.table]
        self.fixed_ms = float(least.sum() + shards.latencies_ms(mix)) * packing.alike
        speeds, self.count = np.unique(shards.speed, return_counts=True)
        # Steps are of the fastest device's compute.
        self.fastest = float(speeds[-1])
        self.step = max(1e-9, (high - self.fixed_ms) * self.fastest) / STEPS
        # The step of a slower device, rounded up.
        ends = (np.arange(STEPS) + 1) * (speeds[:, None] / self.fastest)
        self.left = np.ceil(ends - 1e-9).astype(np.int32) - 1
        curves = {k: packing.ops[k].curve(some, sure) for k in mix}
        self.bags = {
            k: Bag(np.flatnonzero(some & (shards.kind == k)), costs, shards, self.step)
            for k, costs in curves.items()
        }
        load = np.sum([c.load for c in curves.values()], axis=0)
        price = load * shards.copies / shards.speed.sum() + _RATE * np.maximum(0.0, self.extra_ms)
        self.price = np.where(some, price, np.inf)

    def prove(self, start: Proof) -> Proof:
        """The best proof that is found. At first the worths of `start`, if it has any."""
        if not self.possible or self.high <= self.fixed_ms:
            return Proof(np.inf, start.worth)
        at = best_at = self._first(start)
        worth, (steps, programs) = at[:-1], _FIRST if start.worth is None else _AGAIN
        if len(worth) > (_FEW if start.worth is None else _FEWER):
            programs = 0
        scale = np.append(np.maximum(worth, 0.02 * worth.mean()), 0.5 * at[-1])
        best, push, stalled, reach, cuts = -1, 0.02, 0, _REACH, []
        for n in range(steps + programs):
            most, filled = self.collected(at[:-1], float(at[-1]))
            proved = _proved(most)
            if n > steps:
                reach = max(_REACH / 8, reach * (2.0 if proved > best else 0.7))
            if proved > best:
                best, best_at, stalled = proved, at, 0
            elif n < steps and (stalled := stalled + 1) % 6 == 0:
                # Go back to the best worths, with smaller steps.
                at, push = best_at, 0.6 * push
                most, filled = self.collected(at[:-1], float(at[-1]))
            if best == STEPS - 1:
                break
            goal = max(
                best + 1,
                min(STEPS - 1, int(best * (_AHEAD if n >= steps else 1 + push))),
                int(np.argmax(most > -np.inf)),
            )
            taken, waited_ms = filled(goal)
            cut = np.append(
                np.bincount(self.shards.table, taken * self.part, len(worth)),
                waited_ms - taken @ self.extra_ms,
            )
            if n < steps:
                # A subgradient: worth falls for tables that are taken too often.
                rise = np.append(np.ones(len(worth)), 0.0) - cut
                change = scale**2 * rise
                moved = np.maximum(0.0, at + change * max(most[goal] - 1, 1e-3) / max(rise @ change, 1e-12))
                # A step may leave no table any worth, which proves nothing.
                at = moved / moved[:-1].sum() if moved[:-1].any() else best_at
                continue
            # A filling of a step is one of all later steps too. So all cuts hold for the next step to prove.
            cuts.append(cut)
            at, least = _lowest(np.array(cuts), best_at, reach)
            # Within reach, no worths prove the goal: look further, or give up.
            if least >= 1 - 1e-6:
                if reach > 4:
                    break
                reach = max(_REACH, 3 * reach)
        # Less time than the end of a step does not suffice.
        found_ms = max(start.ms, self._end_ms(best), self._possible_ms())
        return Proof(self._by_price(found_ms), best_at)

    def _first(self, start: Proof) -> np.ndarray:
        """[T + 1] the best worths to start from, of tables and of a ms of exchanges; tables' sum to 1.

        Those of `start`, or what tables take at least: by all shards, or by those that fit within a time.
        The time is what is proved before, as often as that proves more.
        """
        tried = [] if start.worth is None else [start.worth / start.worth[:-1].sum()]
        tried.append(_normed(self.shards.least_of_each(self.price, self.mix)))
        steps = [_proved(self.collected(x[:-1], float(x[-1]))[0]) for x in tried]
        ms = max(start.ms, self._end_ms(max(steps)), self._possible_ms())
        for _ in range(_AT_FIRST):
            fits = self.shards.within(self.shards.alone_ms / self.shards.fastest + self.fixed_ms <= ms)
            worth = self.shards.least_of_each(np.where(fits, self.price, np.inf), self.mix)
            if not np.isfinite(worth).all():
                break
            tried.append(_normed(worth))
            steps.append(_proved(self.collected(tried[-1][:-1], float(tried[-1][-1]))[0]))
            if self._end_ms(steps[-1]) <= ms:
                break
            ms = self._end_ms(steps[-1])
        return tried[int(np.argmax(steps))]

    def _by_price(self, low: float) -> float:
        """ms proved by worths of shards rather than of columns: what each takes of loads and exchanges.

        A table is worth the least of its ways to be made up of shards that fit within a time. So nothing is
        gained where many devices have the best part of a table, of which no plan has more than one. Nothing
        is said of more than that time.
        """
        high, best = self.high, low
        for _ in range(_TIMES if low < high else 0):
            ms = (low + high) / 2
            fits = self.shards.within(self.shards.alone_ms / self.shards.fastest + self.fixed_ms <= ms)
            price = np.where(fits, self.price, np.inf)
            least = self.shards.least_of_each(price, self.mix)
            if not np.isfinite(least).all():
                low = best = ms
                continue
            worth = np.where(fits, np.minimum(price, least[self.shards.table]), 0.0)
            most, _ = self._most((worth - _RATE * self.extra_ms) / least.sum(), _RATE / least.sum())
            proved = self._end_ms(_proved(most))
            best = max(best, min(proved, ms))
            low, high = (ms, high) if proved >= ms else (low, ms)
        return best

    def _possible_ms(self) -> float:
        """From when on each table has a large shard that fits: every plan has such a shard of it."""
        shards, least = self.shards, np.full(len(self.shards.size), np.inf)
        some = np.isfinite(self.price) & shards.large & np.isin(shards.kind, self.mix)
        np.minimum.at(least, shards.table[some], (shards.alone_ms / shards.fastest)[some])
        return float(least.max()) + self.fixed_ms

    def _end_ms(self, step: int) -> float:
        """The end of a step, with exchanges."""
        return self.fixed_ms + (step + 1) * self.step / self.fastest

    def collected(self, worth: np.ndarray, rate: float) -> tuple[np.ndarray, Callable]:
        """[M] the most worth that all devices collect by the end of each step, less that of exchanges.

        worth: [T]. rate: what a ms of exchanges costs.
        Also returns a function: from a step to the shards taken [N], and the ms of exchanges.
        """
        return self._most(worth[self.shards.table] * self.part - rate * self.extra_ms, rate)

    def _most(self, of_shards: np.ndarray, rate: float) -> tuple[np.ndarray, Callable]:
        """As `collected`, from what each shard collects [N], less the exchanges that it adds."""
        shards, n = self.shards, len(self.shards.speed)
        fills = {k: bag.fill(of_shards) for k, bag in self.bags.items()}
        own, own_taken = fills.get(0, (np.zeros(STEPS), lambda step: np.zeros(len(shards.kind))))
        each, of_host = n, (None, None)
        for k in self.mix:
            if 1 < shards.n_groups[k] < n:
                # A host counts as one: what its devices share, beside the columns of each. No topology has
                # two kinds that hosts share.
                size, each = int(shards.group_size[k]), int(shards.n_groups[k])
                own, at = _together(fills[k][0], size * own)
                of_host = (fills[k][1], at)
        shared, ways = None, []
        for k in self.mix:
            if shards.n_groups[k] == 1 < n:
                # Every plan of the mix has a launch of each of its kinds.
                value = np.where(self.bags[k].none, -np.inf, fills[k][0])
                shared, at = (value, None) if shared is None else _together(value, shared)
                ways.append((fills[k][1], at))
        if shared is None:
            shared = np.append(0.0, np.full(STEPS - 1, -np.inf))
        count = np.array([each], dtype=float) if len(self.count) == 1 else self.count.astype(float)
        within, shared_at = np.empty(STEPS), np.empty(STEPS, dtype=int)
        compiled.beside(shared, own, self.left, count, within, shared_at)
        waiting = rate * (np.arange(STEPS) + 1) * self.step / self.fastest
        most, waited = _together(waiting, within)

        def filled(step: int) -> tuple[np.ndarray, float]:
            compute = step - int(waited[step])
            left = int(shared_at[compute])
            taken, on_devices = np.zeros(len(shards.kind)), self.left[:, compute] - left
            for way, at in reversed(ways):
                part = left if at is None else int(at[left])
                taken += way(part)
                left -= part
            for devices, capacity in zip(count, on_devices, strict=True):
                if of_host[0] is not None:
                    part = int(of_host[1][capacity])
                    taken += devices * of_host[0](part)
                    capacity, devices = capacity - part, n
                taken += devices * own_taken(int(capacity))
            return taken, (int(waited[step]) + 1) * self.step / self.fastest

        return most, filled


def _normed(worth: np.ndarray) -> np.ndarray:
    """[T + 1] worths [T] and that of a ms of exchanges, so that those of tables sum to 1."""
    return np.append(worth, _RATE) / worth.sum()


def _proved(most: np.ndarray) -> int:
    """The last step within which devices collect too little [M], if tables are worth 1. -1 for none."""
    enough = most >= 1 - 1e-9
    return int(np.argmax(enough)) - 1 if enough.any() else STEPS - 1


def _lowest(cuts: np.ndarray, near: np.ndarray, reach: float) -> tuple[np.ndarray, float]:
    """Worths that sum to 1 [T + 1], with which the fillings `cuts` [C, T + 1] collect least, and how much.

    near, reach: worths stay within that many times those nearby, and their mean.
    """
    from scipy.optimize import linprog

    n, far = len(near), reach * (near + 0.1 * near[:-1].mean())
    sums = np.append(np.ones(n - 1), [0.0, 0.0])[None]
    bounds = [*zip(np.maximum(0.0, near - far), near + far, strict=True), (None, None)]
    found = linprog(
        np.append(np.zeros(n), 1.0),
        np.column_stack([cuts, -np.ones(len(cuts))]),
        np.zeros(len(cuts)),
        sums,
        [1.0],
        bounds,
        method="highs",
    )
    if found.x is None:
        return near, 1.0
    at = np.maximum(0.0, found.x[:-1])
    return at / at[:-1].sum(), float(found.x[-1])


def _together(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See compiled.together."""
    most, at = np.empty(STEPS), np.empty(STEPS, dtype=int)
    compiled.together(np.ascontiguousarray(one), np.ascontiguousarray(other), most, at)
    return most, at
