"""A lower bound from packing: the tables do not fit on the devices within less time.

Give each table a worth, which its shards share by their columns. Within a time, a device can only collect so
much worth: a knapsack. If all devices together collect less than all tables are worth, then no plan takes so
little time. That holds for any worths (the dual of a linear program over all fillings of a device). So they
may come from any search: here subgradient steps, then cutting planes. Whatever is tried proves a time.
The bound is the longest of these. Shards may also have separate worths; then a table is worth the least of
its ways to be made up.

A device's knapsack holds columns. Kinds that groups of devices share take time from all their devices, and
collect worth once. Exchanges beyond the least cost worth too, at a rate.

With cases, more is known: which kinds of sharding the tables with most work take. So more is known of the ops
of kinds that all devices share, and of their contention. The bound is that of the lowest case. So only the
lowest is divided further, by the kind of its next table.

Loads are rounded down and times up, so that rounding never raises the bound.

Shapes: T tables, N shards of a problem, n shards in a bag, M = STEPS steps of time, K kinds of a mix,
P prices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.search.bound import compiled
from shardcore.search.bound.ops import BoundShards, Curve, Ops

STEPS = 400
"""Steps of time, up to the longest that may be proved."""
_SLOPES = 48
"""Prices of load at which a divided knapsack is priced."""
_BISECTIONS = 30
"""Bisections of the price at which a divided knapsack is full."""
_FIRST_EFFORT, _NEXT_EFFORT = (40, 40), (15, 10)
"""Subgradient steps, and linear programs, that look for worths: without a proof, and from the worths of one."""
_INITIAL_WORTHS = 8
"""Worths tried at most, one after another, before those."""
_RATE = 0.8
"""Worth of a ms of exchanges at first, in ms of work. With less work, an op contends less. So a device
that waits for a ms loses less than a ms of work."""
_TIMES = 8
"""Times tried with worths of shards."""
_FEW, _FEWER = 60, 24
"""Tables up to which there are linear programs: without a proof, and from one. Many tables fill devices as
if they could be divided."""
_REACH = 0.3
"""Distance that worths move at first, relative to themselves."""
_AHEAD = 1.003
"""The time to prove next, relative to the one that is proved."""
_CASES = 60
"""Cases to prove at most, with few tables. With many tables they are fewer, as each takes longer."""
_MOST_CASE_SHARDS = 20_000
"""With more possible shards there are no cases, for their time and memory."""
_MOST_WORK = 4_000
"""Cases times tables."""
_RAISED_TO, _RAISES = 1.25, 3
"""The time to prove of a case is this multiple of what is proved already. It is raised so often at most."""

CountsAt = Callable[[int], np.ndarray]
"""step -> [N] counts of shards, fractions included."""


@dataclass(frozen=True, eq=False)
class Proof:
    """A time that is proved.

    ms: no plan takes less.
    worth: [T + 1] worth of tables, and of a ms of exchanges, that proves it. None: it is proved otherwise.
    """

    ms: float
    worth: np.ndarray | None


# --- cases --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class _Case:
    """Plans of one mix of kinds, in which the kinds of some tables are known. Ordered by ms.

    ms: proved time of these plans.
    number: number of the proof. It orders cases of equal ms.
    kinds: kinds of the tables with most work, in the order of falling work.
    mix: kinds that the plans use.
    """

    ms: float
    number: int
    kinds: tuple[int, ...]
    mix: tuple[int, ...]


def least_ms(
    shards: BoundShards, ops: Sequence[Ops], mixes: dict[tuple[int, ...], float], equal_waits: bool
) -> float:
    """ms of plans at least.

    ops: ops of each kind.
    mixes: the ms that are proved already, by mix of kinds.
    equal_waits: True if all devices wait for the same exchanges.
    """
    if len(shards.kind) > _MOST_CASE_SHARDS:
        return min(mixes.values())
    packing, left = Packing(shards, ops, equal_waits), max(8, min(_CASES, _MOST_WORK // len(shards.size)))
    # Tables with most work decide first: their kinds tell most of the ops.
    order = np.argsort(-shards.alone_ms[shards.whole], kind="stable")
    cases = [_Case(ms, i, (), mix) for i, (mix, ms) in enumerate(mixes.items())]
    # The lowest case is the bound, so it is always the one to prove further.
    heapq.heapify(cases)
    proofs: dict[int, Proof] = {}
    number = len(cases)
    while left > 0 and np.isfinite(cases[0].ms):
        case = heapq.heappop(cases)
        before = proofs.pop(case.number, None)
        # A mix is first proved as a whole. After that it is divided by the kind of one more table.
        more = [()] if before is None else [(k,) for k in case.mix]
        # Nothing is left to divide it by, and no other case is lower.
        if before is not None and (len(case.kinds) == len(order) or len(case.mix) == 1):
            return case.ms
        for kind in more:
            kinds = case.kinds + kind
            proof = _prove_case(packing, case.mix, kinds, order, before or Proof(case.ms, None))
            proofs[number] = proof
            heapq.heappush(cases, _Case(proof.ms, number, kinds, case.mix))
            # Numbers follow the order of proofs, so that equal cases leave the heap in a fixed order.
            number, left = number + 1, left - 1
    return cases[0].ms


def _prove_case(
    packing: Packing, mix: tuple[int, ...], kinds: tuple[int, ...], order: np.ndarray, start: Proof
) -> Proof:
    """A proof for plans whose tables order[i] are of kinds[i]."""
    shards = packing.shards
    kind_of = np.full(len(order), -1)
    kind_of[order[: len(kinds)]] = kinds
    kind = kind_of[shards.table]
    # -1: the case leaves the table's kind open.
    known = (kind < 0) | (kind == shards.kind)
    for _ in range(_RAISES):
        # Steps of time are a fraction of `high`: a far one would make them coarse.
        high = start.ms * _RAISED_TO
        usable = shards.within(known & (shards.alone_ms / shards.fastest <= high))
        # A table that the case gives a kind on all devices is in the op of each device.
        on_all = (shards.kind > 0) & (shards.copies == len(shards.speed))
        proof = packing.prove(list(mix), usable, usable & on_all & (kind == shards.kind), start, high)
        # Go on where all that was asked for is proved.
        if proof.ms < high:
            return proof
        start = proof
    return start


# --- plans of a mix of kinds --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Packing:
    """Bounds of plans of a mix of kinds.

    ops: ops of each kind.
    equal_waits: True if all devices wait for the same exchanges. If not, exchanges do not count.
    """

    shards: BoundShards
    ops: Sequence[Ops]
    equal_waits: bool

    def prove(
        self, mix: list[int], usable: np.ndarray, certain: np.ndarray, start: Proof, high: float
    ) -> Proof:
        """The least ms of plans of the mix, from start.ms to high.

        usable: [N] bool, the shards that they may use.
        certain: [N] bool, shards that all devices have.
        """
        on_hosts = any(1 < self.shards.n_groups[k] < len(self.shards.speed) for k in mix)
        # Hosts count as one, which needs equal speeds.
        if high <= start.ms or (on_hosts and len(set(self.shards.speed)) > 1):
            return start
        proof = Mix(self, mix, usable, certain, high).prove(start)
        # No plan of the mix ends by `high`, so that much is proved.
        if not np.isfinite(proof.ms):
            return Proof(high, proof.worth)
        return Proof(min(high, max(start.ms, proof.ms)), proof.worth)


class Mix:
    """Plans of one mix of kinds, by steps of time up to `high` ms.

    Worths, in its methods, are [T + 1]: of tables, and of a ms of exchanges.

    fixed_ms: exchanges that every device waits for at least. Steps of time begin after them.
    extra_ms: [N] what a shard adds to exchanges beyond its part of these.
    step: length of a step, as ms at speed 1.
    count: number of devices of each speed, from the slowest on. left: [speeds, M] their steps at each step.
    bags: knapsacks of each kind.
    price: [N] first worths of shards. inf for those that may not be used.
    """

    def __init__(
        self, packing: Packing, mix: list[int], usable: np.ndarray, certain: np.ndarray, high: float
    ):
        shards = packing.shards
        self.shards, self.mix, self.high = shards, mix, high
        exchange, wait = shards.exchange_ms * packing.equal_waits, shards.wait_ms * packing.equal_waits  # [N]
        # All others take longer than `high` even on the fastest device.
        usable = usable & (shards.alone_ms <= high * shards.speed.max())
        least = shards.least_of_each(np.where(usable, wait, np.inf), mix)  # [T]
        self.possible = bool(np.isfinite(least).all())
        least = np.where(np.isfinite(least), least, 0.0)
        self.extra_ms = exchange - shards.part * least[shards.table]
        self.fixed_ms = float(least.sum() + shards.latencies_ms(mix, every=True)) * packing.equal_waits
        speeds, self.count = np.unique(shards.speed, return_counts=True)
        # Each step is one of the fastest device's compute. Slower devices have fewer, rounded up.
        self.fastest = float(speeds[-1])
        self.step = max(1e-9, (high - self.fixed_ms) * self.fastest) / STEPS
        ends = (np.arange(STEPS) + 1) * (speeds[:, None] / self.fastest)
        self.left = np.ceil(ends - 1e-9).astype(np.int32) - 1
        curves = {k: packing.ops[k].curve(usable, certain) for k in mix}
        self.bags = {}
        for k, curve in curves.items():
            numbers = np.flatnonzero(usable & (shards.kind == k))
            self.bags[k] = Bag(numbers, curve, shards, self.step, packing.ops[k].model.launch_ms)
        # First worths: an even share of work, and exchanges.
        load = np.sum([curve.load for curve in curves.values()], axis=0)
        price = load * shards.copies / shards.speed.sum() + _RATE * np.maximum(0.0, self.extra_ms)
        self.price = np.where(usable, price, np.inf)

    def prove(self, start: Proof) -> Proof:
        """The best proof of several worths. At first the worths of `start`, if it has any."""
        if not self.possible or self.high <= self.fixed_ms:
            return Proof(np.inf, start.worth)
        at = best_at = self._first(start)
        # A proof of a wider case has near worths already, so fewer steps are tried.
        n_tables, (steps, programs) = len(at) - 1, _FIRST_EFFORT if start.worth is None else _NEXT_EFFORT
        if n_tables > (_FEW if start.worth is None else _FEWER):
            programs = 0
        # Steps are relative to worths, but tables of little worth may gain some, too.
        scale = np.append(np.maximum(at[:-1], 0.02 * at[:-1].mean()), 0.5 * at[-1])
        # push: how far beyond the proof subgradient steps aim. It shrinks while they fail.
        best, push, stalled, reach, cuts = -1, 0.02, 0, _REACH, []
        for n in range(steps + programs):
            most, filled = self.collected(at)
            proved = _proved(most)
            if n > steps:
                # Trust worths further from the best while they prove more.
                reach = max(_REACH / 8, reach * (2.0 if proved > best else 0.7))
            if proved > best:
                best, best_at, stalled = proved, at, 0
            elif n < steps and (stalled := stalled + 1) % 6 == 0:
                # Go back to the best worths, with smaller steps.
                at, push = best_at, 0.6 * push
                most, filled = self.collected(at)
            if best == STEPS - 1:  # all that was asked for
                break
            ahead = min(STEPS - 1, int(best * (_AHEAD if n >= steps else 1 + push)))
            # Just beyond what is proved, but no step too short for the launches of the mix.
            goal = max(best + 1, ahead, int(np.argmax(most > -np.inf)))
            # A filling that collects most at the goal: with which worths would it collect less?
            counts, waited_ms = filled(goal)
            worth_taken = np.bincount(self.shards.table, counts * self.shards.part, n_tables)
            # What this filling collects is cut · worths, at any worths.
            cut = np.append(worth_taken, waited_ms - counts @ self.extra_ms)
            if n < steps:
                # A subgradient: worth falls for tables that are taken too often.
                rise = np.append(np.ones(n_tables), 0.0) - cut
                # Polyak's step: as far along the subgradient as what is collected beyond 1 asks for.
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
        proved_ms = max(start.ms, self._end_ms(best), self._possible_ms())
        return Proof(self.by_price(proved_ms), best_at)

    def _first(self, start: Proof) -> np.ndarray:
        """[T + 1] the best worths to start from; tables' sum to 1.

        Those of `start`, or what tables take at least: by all shards, or by those that fit within a time.
        The time is what is proved before, as often as that proves more.
        """
        tried = [] if start.worth is None else [start.worth / start.worth[:-1].sum()]
        tried.append(_normed(self.shards.least_of_each(self.price, self.mix)))
        steps = [_proved(self.collected(worths)[0]) for worths in tried]
        ms = max(start.ms, self._end_ms(max(steps)), self._possible_ms())
        # Within a time, large shards drop out. Tables that lose their cheapest ones are worth more.
        for _ in range(_INITIAL_WORTHS):
            worth = self.shards.least_of_each(self._price_within(ms), self.mix)
            if not np.isfinite(worth).all():  # a table fits in no way
                break
            tried.append(_normed(worth))
            steps.append(_proved(self.collected(tried[-1])[0]))
            if self._end_ms(steps[-1]) <= ms:
                break
            ms = self._end_ms(steps[-1])
        return tried[int(np.argmax(steps))]

    def by_price(self, low: float) -> float:
        """ms proved by separate worths of shards: their shares of loads and exchanges.

        A table is worth the least of its ways to be made up of shards that fit within a time. So nothing is
        gained where many devices have the best shard of a table, of which no plan has more than one. It proves
        no more than that time.
        """
        high, best = self.high, low
        for _ in range(_TIMES if low < high else 0):
            # A bisection. What proves less than `ms` is a proof all the same, so `best` keeps it.
            ms = (low + high) / 2
            price = self._price_within(ms)
            least = self.shards.least_of_each(price, self.mix)
            if not np.isfinite(least).all():  # a table fits in no way, so no plan takes so little time
                low = best = ms
                continue
            # More than its table a shard need not be worth: then devices collect less, the table as much.
            worth = np.where(np.isfinite(price), np.minimum(price, least[self.shards.table]), 0.0)
            most, _ = self._most((worth - _RATE * self.extra_ms) / least.sum(), _RATE / least.sum())
            proved = self._end_ms(_proved(most))
            best = max(best, min(proved, ms))
            low, high = (ms, high) if proved >= ms else (low, ms)
        return best

    def _price_within(self, ms: float) -> np.ndarray:
        """[N] prices of shards that fit within a time. inf for others."""
        fits = self.shards.within(self.shards.alone_ms / self.shards.fastest + self.fixed_ms <= ms)
        return np.where(fits, self.price, np.inf)

    def _possible_ms(self) -> float:
        """The time from which each table has a large shard that fits: every plan has such a shard of it."""
        shards, least = self.shards, np.full(len(self.shards.size), np.inf)
        usable = np.isfinite(self.price) & shards.large & np.isin(shards.kind, self.mix)
        np.minimum.at(least, shards.table[usable], (shards.alone_ms / shards.fastest)[usable])
        return float(least.max()) + self.fixed_ms

    def _end_ms(self, step: int) -> float:
        """The end of a step, with exchanges."""
        return self.fixed_ms + (step + 1) * self.step / self.fastest

    def collected(self, worths: np.ndarray) -> tuple[np.ndarray, Callable[[int], tuple[np.ndarray, float]]]:
        """[M] the most worth that all devices collect by the end of each step, less that of exchanges.

        Also returns a function: from a step to counts of shards [N], and the ms of exchanges.
        """
        rate = float(worths[-1])
        by_shard = worths[:-1][self.shards.table] * self.shards.part - rate * self.extra_ms
        return self._most(by_shard, rate)

    def _most(
        self, by_shard: np.ndarray, rate: float
    ) -> tuple[np.ndarray, Callable[[int], tuple[np.ndarray, float]]]:
        """The same as `collected`, from what each shard collects [N], less the exchanges that it adds."""
        shards, n = self.shards, len(self.shards.speed)
        # [M] of each kind: the most that one device, or one group, collects by each step.
        fills = {k: bag.fill(by_shard) for k, bag in self.bags.items()}
        single, single_counts = fills.get(0, (np.zeros(STEPS), lambda step: np.zeros(len(shards.kind))))
        units, host_counts, host_at = n, None, np.empty(0, dtype=int)
        for k in self.mix:
            if 1 < shards.n_groups[k] < n:
                # A host counts as one: what its devices share, and the columns of each. No topology has
                # two kinds that hosts share.
                size, units = int(shards.group_size[k]), int(shards.n_groups[k])
                single, host_at = _shared(fills[k][0], size * single)
                host_counts = fills[k][1]
        shared, ways = None, []
        for k in self.mix:
            if shards.n_groups[k] == 1 < n:
                # Every plan of the mix has a launch of each of its kinds.
                value = np.where(self.bags[k].none, -np.inf, fills[k][0])
                shared, at = (value, None) if shared is None else _shared(value, shared)
                ways.append((fills[k][1], at))
        if shared is None:  # only devices' own columns: nothing shared takes no time
            shared = np.append(0.0, np.full(STEPS - 1, -np.inf))
        count = np.array([units], dtype=float) if len(self.count) == 1 else self.count.astype(float)
        within, shared_at = np.empty(STEPS), np.empty(STEPS, dtype=int)
        compiled.share_with_devices(shared, single, self.left, count, within, shared_at)
        # Time that all devices wait for exchanges is worth `rate` a ms.
        waiting = rate * (np.arange(STEPS) + 1) * self.step / self.fastest
        most, waited = _shared(waiting, within)

        def filled(step: int) -> tuple[np.ndarray, float]:
            """Follow the divisions back: time into waiting and compute, compute into kinds."""
            # The step divides into waiting and compute.
            compute = step - int(waited[step])
            left = int(shared_at[compute])
            counts, on_devices = np.zeros(len(shards.kind)), self.left[:, compute] - left
            for way, at in reversed(ways):
                part = left if at is None else int(at[left])
                counts += way(part)
                left -= part
            # By speed: a slower device has less time left for its own columns.
            for devices, capacity in zip(count, on_devices, strict=True):
                if host_counts:
                    part = int(host_at[capacity])
                    counts += devices * host_counts(part)
                    capacity, devices = capacity - part, n
                counts += devices * single_counts(int(capacity))
            return counts, (int(waited[step]) + 1) * self.step / self.fastest

        return most, filled


def _normed(worth: np.ndarray) -> np.ndarray:
    """[T + 1] worths [T] and that of a ms of exchanges, so that those of tables sum to 1."""
    return np.append(worth, _RATE) / worth.sum()


def _proved(most: np.ndarray) -> int:
    """The last step within which devices collect too little [M], if tables are worth 1. -1 for none."""
    enough = most >= 1 - 1e-9  # a trace less, for rounding
    return int(np.argmax(enough)) - 1 if enough.any() else STEPS - 1


def _lowest(cuts: np.ndarray, near: np.ndarray, reach: float) -> tuple[np.ndarray, float]:
    """Worths that sum to 1 [T + 1], with which the fillings `cuts` [C, T + 1] collect least, and how much.

    near, reach: worths stay within that many times those nearby, and their mean.
    """
    from scipy.optimize import linprog

    n, far = len(near), reach * (near + 0.1 * near[:-1].mean())
    sums = np.append(np.ones(n - 1), [0.0, 0.0])[None]
    bounds = [*zip(np.maximum(0.0, near - far), near + far, strict=True), (None, None)]
    # The last variable is the most that any filling collects: the goal is to make it least.
    result = linprog(
        np.append(np.zeros(n), 1.0),
        np.column_stack([cuts, -np.ones(len(cuts))]),
        np.zeros(len(cuts)),
        sums,
        [1.0],
        bounds,
        method="highs",
    )
    if result.x is None:
        return near, 1.0
    worths = np.maximum(0.0, result.x[:-1])
    return worths / worths[:-1].sum(), float(result.x[-1])


def _shared(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[M] what two collect who divide a capacity, and the capacity of the first (compiled.share)."""
    most, at = np.empty(STEPS), np.empty(STEPS, dtype=int)
    compiled.share(np.ascontiguousarray(one), np.ascontiguousarray(other), most, at)
    return most, at


# --- knapsacks ----------------------------------------------------------------------------------------------


class Bag:
    """Knapsacks of shards of one kind, for all steps of time. At most one shard of a table.

    number: [n] numbers of the shards, by table, and within a table by the first step in which they fit.
    load: [n] their loads.
    fits: [n] that step.
    most: [M] the largest load of an op by step.
    none: [M] True where a step is too short even for a launch.
    first: [tables] where each table's shards begin. ends: the same, and the end of the last.
    """

    def __init__(self, number: np.ndarray, curve: Curve, shards: BoundShards, step: float, launch_ms: float):
        ms = (np.arange(STEPS) + 1) * step - launch_ms
        self.most, self.none = np.maximum(0.0, curve.most(ms)), ms < 0
        # A trace earlier, for rounding errors.
        by_ms = np.searchsorted(ms * (1 + 1e-9), curve.alone[number])
        # Both limits have to hold: the shard's own time, and the load of its op.
        fits = np.maximum(by_ms, np.searchsorted(self.most * (1 + 1e-9), curve.load[number]))
        order = np.lexsort((fits, shards.table[number]))
        self.number, self.n, self.fits = number[order], len(shards.kind), fits[order]
        # Above 0, as worths are divided by it.
        self.load, table = np.maximum(curve.load[self.number], 1e-12), shards.table[self.number]
        self.first = np.flatnonzero(np.diff(table, prepend=-1))
        self.ends = np.append(self.first, len(number))
        # Both by what shards add alone, and by their load: each is a limit.
        by_time = _Knapsack(curve.alone[self.number], ms, self.ends)
        self.knapsacks = [by_time, _Knapsack(curve.load[self.number], self.most, self.ends)]

    def fill(self, worth: np.ndarray) -> tuple[np.ndarray, CountsAt]:
        """[M] the most worth by steps. Also the counts of shards, by step."""
        worth, none = worth[self.number], self.none
        if not len(self.number):
            return np.zeros(STEPS), lambda step: np.zeros(self.n)
        wholes = np.stack([k.fill(worth) for k in self.knapsacks])
        # Divided knapsacks: at any price of load, each table takes its best shard that fits.
        # Choices change at the tables' worths per load, so prices are quantiles of these.
        best = np.maximum.reduceat(np.maximum(worth, 0.0) / self.load, self.first)
        prices = np.unique(np.quantile(best, np.linspace(0, 1, _SLOPES)))
        lines = np.empty((len(prices), STEPS))
        compiled.divided(self.ends, self.fits, self.load, worth, prices, lines)
        # The Lagrangian bound: gains at this price, and all the load there is at the price.
        lines += prices[:, None] * self.most
        # Each row bounds what a device collects, so the least of them holds.
        every = np.where(none, 0.0, np.vstack([wholes, lines.min(0)]))
        which = every.argmin(0)

        def counts_at(step: int) -> np.ndarray:
            counts = np.zeros(self.n)
            if none[step]:
                return counts
            if which[step] < len(self.knapsacks):
                counts[self.number[self.knapsacks[which[step]].taken(step)]] = 1
                return counts
            # Bisect the price for two sets of shards: one with less load than fits, one with more.
            high, low = float(prices[-1]) * 2 + 1e-12, 0.0
            sets = [self._best(worth, price, step) for price in (high, low)]
            loads = [float(self.load[chosen].sum()) for chosen in sets]
            for _ in range(_BISECTIONS if loads[1] > self.most[step] else 0):
                middle = (high + low) / 2
                chosen = self._best(worth, middle, step)
                load = float(self.load[chosen].sum())
                more = bool(load > self.most[step])
                sets[more], loads[more] = chosen, load
                high, low = (high, middle) if more else (middle, low)
            # A mix of both sets that has just the load that fits.
            share = np.clip((self.most[step] - loads[0]) / max(loads[1] - loads[0], 1e-12), 0.0, 1.0)
            counts[self.number[sets[0]]] += 1 - share
            counts[self.number[sets[1]]] += share
            return counts

        return every.min(0), counts_at

    def _best(self, worth: np.ndarray, price: float, step: int) -> np.ndarray:
        """The shards that tables take at a price of load, of those that fit within a step."""
        # [n] by table: the top is taken if it gains anything.
        gain = np.where(self.fits <= step, worth - price * self.load, 0.0)
        top = np.repeat(np.maximum.reduceat(gain, self.first), np.diff(self.ends))
        return np.flatnonzero((gain == top) & (gain > 0))


class _Knapsack:
    """A knapsack that takes shards as a whole, for all steps of time.

    load: [n] of each shard. most: [M] the capacity by step. ends: where each table's shards begin and end.
    """

    def __init__(self, load: np.ndarray, most: np.ndarray, ends: np.ndarray):
        unit, self.ends = max(float(most[-1]), 1e-12) / STEPS, ends
        # Loads are rounded down, capacities only by a trace up.
        self.capacity = np.maximum(0, np.floor(most / unit * (1 + 1e-9))).astype(int)
        self.weight = np.floor(load / unit * (1 - 1e-9)).astype(int)
        # Two capacities more than steps: a trace up may reach the next.
        self.best = np.empty((len(ends), STEPS + 2))
        self.chosen = np.empty((len(ends) - 1, STEPS + 2), dtype=np.int32)

    def fill(self, worth: np.ndarray) -> np.ndarray:
        """[M] the most worth by step."""
        compiled.knapsack(self.ends, self.weight, worth, self.best, self.chosen)
        return self.best[-1][self.capacity]

    def taken(self, step: int) -> list[int]:
        """The shards of the last filling."""
        shards, left = [], int(self.capacity[step])
        # From the last table back: its choice tells what capacity the tables before had.
        for chosen in reversed(self.chosen):
            if chosen[left] >= 0:
                shards.append(int(chosen[left]))
                left -= self.weight[chosen[left]]
        return shards
