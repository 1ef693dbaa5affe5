"""Plans that annealing starts from: greedy ones of several ways to cut and share tables, or an existing plan.

Shapes: S strips, D devices. Strips and units are defined in search/state/shard_cost_cache.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.progress import stopped_clock
from shardcore.core.types import Placement, Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.search import greedy
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.budget import Meter
from shardcore.search.state.feasible import fitting, shown
from shardcore.search.state.shard_cost_cache import ShardCostCache
from shardcore.search.state.shards import division, fixed_placements
from shardcore.step.kinds import shards_on
from shardcore.step.memory import held_bytes

if TYPE_CHECKING:  # numba takes a second to import, and only searches need it
    from shardcore.search.anneal.compiled import SearchProblem, State
    from shardcore.search.anneal.search_space import SearchSpace

_SPLITS = (np.inf, 1.2, 1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Greedy starts cut tables that cost more than this share of a device's mean load."""
_REFINED = 3
"""Greedy plans of a kind that are refined."""
_MISSES = 5
"""After so many cuts without a cheaper greedy plan, cutting ends."""
_DIVIDED = (1.0, 0.5, 0.25, 0.1, 0.03)
"""Other starts divide the rows of tables that cost more than these shares."""
_COPIED = tuple(eighths / 8 for eighths in range(9))
"""Shares of the tables that starts copy, where the others have their rows divided."""
_TIGHT, _SMALL = 0.8, (0.3, 0.2, 0.1, 0.05)
"""When memory is tight, further starts cut tables by size.

The first is the share of all memory that counts as tight.
The others are shares of a device's memory, above which tables are cut.
"""
_LOG = 1 << 20
"""The most changes since the best plan that are logged."""


@dataclass
class Start:
    """A plan in its space.

    fixed: the subset of the space in which it is improved at first.
    ms: cost by the model itself of the cheapest plan that it led to.
    """

    space: SearchSpace
    state: State
    fixed: SearchProblem
    ms: float = np.inf

    @property
    def placements(self) -> list[Placement]:
        """The plan as placements."""
        return self.space.placements(self.state.held, self.state.group)


class Starts:
    """Makes starts in the spaces of a problem. What is encoded for one is kept for the next."""

    def __init__(self, problem: Problem, model: CostModel, meter: Meter, seed: int) -> None:
        with stopped_clock():  # numba takes a second to import
            from shardcore.search.anneal import compiled
            from shardcore.search.anneal import search_space as spaces

        self.compiled, self.spaces, self.meter = compiled, spaces, meter
        self.problem, self.model, self.seed = problem, model, seed
        self.head = model.compiled().head
        self.cache: ShardCostCache | None = None  # of the last shards
        self._greedy_s: float | None = None  # seconds of the longest greedy plan so far, if one was found

    def by_columns(self, kind: str, shards: Sequence[Shard]) -> Iterator[Start]:
        """Greedy plans with tables whole or cut by columns, in one of SPACES. One at least.

        With tight memory, cuts chosen for cost may leave gaps that no shard fits. So some starts cut by size.

        Raises Infeasible if no plan is found.
        """
        space, n = self._space(shards, kind), 0
        shares = _SPLITS[2:5:2] if self.spaces.is_large(space.cache) else _SPLITS
        ways = [[(self._cuts(space, share), _pairs()) for share in shares]]
        if space.whole_bytes.sum() > _TIGHT * sum(held_bytes(self.problem)) and not self.spaces.is_large(
            space.cache
        ):
            ways.append([(self._small(space, share), _pairs()) for share in _SMALL])
        for start in (self._cheapest(space, way) for way in ways):
            if start:
                n += 1
                yield start
        on_host = Counter(d.host for d in self.problem.topology.devices)
        if len(set(on_host.values())) > 1 and self._has_time():  # exchanges are then far from linear
            with suppress(Infeasible):
                plans = [g(self.problem, self.model) for g in greedy.ORDERS.values()]
                best = min(plans, key=lambda p: p.provenance["predicted_ms"])
                n += 1
                yield self.of_plan(best.placements, kind)
        if not n:
            yield self.of_plan(fitting(self.problem).placements, kind)

    def shared(self, shards: Sequence[Shard], fits: bool) -> Iterator[Start]:
        """Greedy plans of the whole space, with tables shared by groups of devices.

        fits: whether some plan by columns fits.
        """
        space = self._space(shards, "all")
        layouts = space.layouts if space.fixed.may_share.any() else ()
        # Layouts without divided rows come last: they may be the only ones that fit.
        for y in sorted(range(len(layouts)), key=lambda y: not layouts[y].divides_rows):
            for start in (
                self._divided(space, y) if layouts[y].divides_rows else self._replicated(space, y, fits)
            ):
                if start:
                    fits = True
                    yield start
        if layouts and (start := self._by_kinds(space)):
            yield start

    def _by_kinds(self, space: SearchSpace) -> Start | None:
        """The cheapest start with all tables, pooled or not, on several devices. None if none fits.

        The smallest tables are copied, the others have their rows divided: more and more of the former.
        """
        may, layouts, ways = space.fixed.may_share, space.layouts, []
        copied = _first(may, [y for y, layout in enumerate(layouts) if layout.local_batch])
        size = np.where(copied >= 0, space.shared_bytes[copied, np.arange(may.shape[1])], np.inf)
        smallest, n_copies = np.argsort(size, kind="stable"), int((copied >= 0).sum())
        for name in dict.fromkeys(layout.name for layout in layouts if layout.divides_rows):
            divided = _first(may, [y for y, layout in enumerate(layouts) if layout.name == name])
            for share in _COPIED[:: len(_COPIED) - 1] if self.spaces.is_large(space.cache) else _COPIED:
                of = np.where(divided >= 0, divided, copied)
                copies = smallest[: int(share * n_copies)]
                of[copies] = copied[copies]
                if (of >= 0).any():
                    each = (self._with(space, np.flatnonzero(of == y), y) for y in np.unique(of[of >= 0]))
                    n, pairs = zip(*each, strict=True)
                    ways.append((np.min(n, 0), np.concatenate(pairs)))
        return self._cheapest(space, ways) if ways else None

    def from_columns(self, columns: Sequence[Placement]) -> Iterator[Start]:
        """A plan by columns as a start in the whole space, and with tables on all devices where that pays."""
        yield self.of_plan(columns, "all")
        placed = [(shard, d) for p in columns for d, shard in shards_on(p)]
        space = self._space([shard for shard, _ in placed], "all")
        for y in range(len(space.layouts)):
            if not space.layouts[y].divides_rows and (start := self._copied(space, placed, y)):
                yield start

    def _divided(self, space: SearchSpace, y: int) -> Iterator[Start | None]:
        """Starts with large tables shared by the groups of a layout, and with all tables shared.

        With all tables shared there is no op of whole rows, and no exchange for it. Those that do better on
        all devices, or cannot be divided, may be there.
        """
        fixed, whole = space.fixed, np.flatnonzero(space.fixed.may_share[y])
        alone = self._alone_ms(fixed, np.arange(len(fixed.size)), fixed.size)
        mean_ms = alone.sum() / fixed.speed.sum()
        large = {len(s): s for s in (whole[alone[whole] > share * mean_ms] for share in _DIVIDED) if len(s)}
        ways = [self._with(space, s, y) for s in large.values()]
        yield self._cheapest(space, ways)
        yield self._cheapest(space, [self._with(space, whole, y), *self._with_copies(space, whole, y)])

    def _with_copies(
        self, space: SearchSpace, whole: np.ndarray, y: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ways to start: some strips on all devices, all others shared by the groups of a layout.

        whole: strips that the layout may share.
        """
        may_share = space.fixed.may_share
        for z in (z for z, layout in enumerate(space.layouts) if not layout.divides_rows):
            only = np.flatnonzero(may_share[z] & ~may_share[y])
            for copied in (np.union1d(s, only) for s in self._copies(space, z) or [only]):
                if len(copied):
                    n, on_all = self._with(space, copied, z)
                    also, in_groups = self._with(space, np.setdiff1d(whole, copied), y)
                    yield np.minimum(n, also), np.concatenate([on_all, in_groups])

    def _copied(self, space: SearchSpace, placed: Sequence[tuple[Shard, int]], y: int) -> Start | None:
        """A plan by columns, with as many tables on all devices as pays and fits. None if none do."""
        [group] = np.flatnonzero(space.fixed.group_layout == y)
        for strips in self._copies(space, y):
            copied = {space.cache.table(s).name for s in [*strips, *space.divided]}
            left = [(shard, d) for shard, d in placed if shard.table.name not in copied]
            start = self._placed(space, left, space.sharing(_pairs(strips, group)))
            if start.state.value[self.compiled.OVER] == 0:
                return start
        return None

    def _replicated(self, space: SearchSpace, y: int, fits: bool) -> Iterator[Start | None]:
        """Starts with tables on all devices where that pays.

        If nothing fits yet, a start replicates the tables that take less memory so.
        """
        copies, every = self._copies(space, y), np.flatnonzero(space.fixed.may_share[y])
        start = self._cheapest(
            space,
            [
                *(self._with(space, s, y) for s in (*copies, every)),
                *(self._with(space, s, y, np.inf) for s in copies),
            ],
        )
        yield start
        if not fits and start is None:
            less = space.shared_bytes[y] < space.whole_bytes / 2
            saving = space.fixed.may_share[y] & less
            yield self._cheapest(space, [self._with(space, np.flatnonzero(saving), y)])

    def _copies(self, space: SearchSpace, y: int) -> list[np.ndarray]:
        """Strips that are better on all devices in layout y, and shares of them, as all may not fit."""
        worth = self.spaces.worth_copying(space, self.model, y)
        shares = _COPIED[::4] if self.spaces.is_large(space.cache) else _COPIED
        numbers = dict.fromkeys(math.ceil(share * len(worth)) for share in reversed(shares))
        return [worth[:n] for n in numbers if n]

    def _cheapest(self, space: SearchSpace, ways: Sequence[tuple[np.ndarray, np.ndarray]]) -> Start | None:
        """The cheapest of some greedy plans. If none fits, the same with tables cut further. None: none fits.

        ways: number of shards of each strip [S], and the pairs of shared strips.
        """
        large = self.spaces.is_large(space.cache)
        found = list(self._placed_greedily(space, ways))
        if not (found or large):
            cut = ((self._small(space, share, n), pairs) for n, pairs in ways for share in _SMALL)
            found = list(self._placed_greedily(space, cut))
        found.sort(key=lambda x: x[0])
        if not large:
            found = [self._refined(space, *x) for x in found[:_REFINED]]
        best = min(found, key=lambda x: x[0], default=None)
        return None if best is None else Start(space, best[1], space.among_groups(best[1].group))

    def _placed_greedily(
        self, space: SearchSpace, ways: Iterable[tuple[np.ndarray, np.ndarray]]
    ) -> Iterator[tuple[float, State, np.ndarray, np.ndarray]]:
        """Cost, plan, numbers of shards and pairs of each way that fits."""
        for n, pairs in ways:
            shared = space.sharing(pairs)
            if (state := self._greedy(space, n, shared)) is not None:
                yield state.value[self.compiled.BEST], state, n, shared

    def _refined(
        self, space: SearchSpace, least: float, best: State, n: np.ndarray, shared: np.ndarray
    ) -> tuple[float, State]:
        """A greedy plan refined, as EMBark's planner does, and its cost.

        The costliest strip on the slowest device is cut once more, as long as that helps.
        """
        state, misses, n = best, 0, n.copy()
        while state is not None and misses < _MISSES:
            worst = state.number[self.compiled.WORST]
            last = state.strips[worst, : state.count[worst]]
            if not len(last):
                break
            hottest = last[np.argmax(self._single_ms(space.fixed, last, state.held[last, worst]))]
            if not space.fixed.may_split[hottest] or n[hottest] >= min(
                len(space.fixed.free), space.fixed.size[hottest]
            ):
                break
            n[hottest] += 1
            state = self._greedy(space, n, shared)
            misses += 1
            if state is not None and state.value[self.compiled.BEST] < least:
                best, least, misses = state, state.value[self.compiled.BEST], 0
        return least, best

    def _greedy(self, space: SearchSpace, n: np.ndarray, shared: np.ndarray) -> State | None:
        """Place strips in n [S] shards by falling cost; if that fails, by falling size. 0 leaves a strip out.

        Cost is that of the op, and that of the op with its exchange: the cheaper plan of both.

        None if neither fits, or if the budget has no time for another plan.
        """
        if not self._has_time():
            return None
        fixed, shards, found = space.fixed, self._shards(space, n), []
        strips, units = shards.T
        costs = [self._single_ms(fixed, strips, units), self._alone_ms(fixed, strips, units)]
        costs = costs[:1] if self.spaces.is_large(space.cache) else costs
        for i, key in enumerate([*costs, space.bytes[fixed.shard[strips, units]]]):
            if found and (i == len(costs) or not self._has_time()):
                break
            state, before_s = self._state(space), self.meter.seconds()
            self.compiled.share(self.head, fixed, state, shared)
            # Strips with fewest devices go first.
            order = np.ascontiguousarray(shards[np.lexsort((-key, space.choice[strips]))])
            if self.compiled.greedy(self.head, fixed, state, order):
                self.compiled.refresh(self.head, fixed, state)
                found.append(state)
                self._greedy_s = max(self._greedy_s or 0.0, self.meter.seconds() - before_s)
        return min(found, key=lambda s: s.value[self.compiled.BEST], default=None)

    def _has_time(self) -> bool:
        """Tell if one more greedy plan ends in the first half of the budget. There is always one."""
        return self._greedy_s is None or self.meter.has_time(self.meter.seconds() + 2 * self._greedy_s)

    def _state(self, space: SearchSpace) -> State:
        """A State with nothing placed."""
        return self.compiled.empty(space.fixed, len(self.problem.topology.hosts), _LOG, self.seed)

    def _with(
        self, space: SearchSpace, strips: np.ndarray, y: int, share: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """A way to start: some strips shared by groups of a layout, all others cut.

        The costliest strips go first, each to the group with least load that has room; the largest go first
        if that fails. Other strips are cut if they cost more than a share of a device's mean load.
        """
        groups = np.flatnonzero(space.fixed.group_layout == y)
        fixed = space.fixed
        cost = (
            self.model.head(fixed.shared_codes[y, strips])
            + (fixed.shared_own[y] + fixed.shared_busiest[y]) * fixed.shared_size[y, strips]
        )
        n_bytes = space.shared_bytes[y][strips]
        free = np.array([min(space.fixed.free[list(space.groups[g][1])]) for g in groups])
        for order in (np.argsort(-cost, kind="stable"), np.argsort(-n_bytes, kind="stable")):
            load, room, of = np.zeros(len(groups)), free.copy(), np.zeros(len(strips), dtype=np.int64)
            for i in order if len(groups) > 1 else ():
                fits = room >= n_bytes[i]
                of[i] = np.where(fits, load, np.inf).argmin() if fits.any() else room.argmax()
                load[of[i]] += cost[i]
                room[of[i]] -= n_bytes[i]
            if (room >= 0).all():
                break
        return self._cuts(space, share, strips), np.stack([strips, groups[of]], 1).astype(np.int64)

    def _small(self, space: SearchSpace, share: float, least: np.ndarray | None = None) -> np.ndarray:
        """[S] number of shards of each strip, so that none takes more than a share of a device's mean memory.

        least: [S] numbers that are kept if they are larger, or 0.

        0 for strips that are always shared.
        """
        fixed, most_bytes = space.fixed, max(1, int(share * space.fixed.free.mean()))
        wanted = -(-space.whole_bytes // most_bytes)
        n = np.where(fixed.may_split, np.clip(wanted, space.cache.least_parts, fixed.size), 1)
        n[space.divided] = 0
        return n if least is None else np.where(least > 0, np.maximum(n, least), 0)

    def _cuts(self, space: SearchSpace, share: float, everywhere: Sequence[int] = ()) -> np.ndarray:
        """[S] number of shards by columns, so that none costs more than a share of a device's mean load.

        0 for strips that groups share.
        """
        fixed, single = (
            space.fixed,
            self._single_ms(space.fixed, np.arange(len(space.fixed.size)), space.fixed.size),
        )
        n = np.ones(len(single), dtype=np.int64)
        n[space.divided] = n[np.asarray(everywhere, dtype=np.int64)] = 0
        limit = share * max(single[n > 0].sum() / fixed.speed.sum(), 1e-300)
        most = np.where(fixed.may_split, np.minimum(len(fixed.free), fixed.size), 1)
        parts = np.ceil(np.minimum(single / limit, most)).astype(np.int64)
        return n * np.maximum(parts, space.cache.least_parts)

    def _shards(self, space: SearchSpace, n: np.ndarray) -> np.ndarray:
        """[N, 2] strips and units of n [S] equal shards."""
        fixed, strip = space.fixed, np.repeat(np.arange(len(n)), n)
        i, of = np.arange(len(strip)) - np.repeat(np.cumsum(n) - n, n), n[strip]
        units = fixed.size[strip] * (i + 1) // of - fixed.size[strip] * i // of
        return np.stack([strip, units], 1).astype(np.int64)

    def _single_ms(self, fixed: SearchProblem, strips: np.ndarray, units: np.ndarray) -> np.ndarray:
        """[N] ms of ops with one shard each, at speed 1."""
        return np.asarray(self.model.head(fixed.codes[fixed.shard[strips, units]]))

    def _alone_ms(self, fixed: SearchProblem, strips: np.ndarray, units: np.ndarray) -> np.ndarray:
        """[N] ms of steps with one shard each: of its op, and of the exchange of its outputs and ids."""
        shard, kind, each_ms = fixed.shard[strips, units], fixed.kind[strips], fixed.own + fixed.busiest
        return (
            self._single_ms(fixed, strips, units)
            + each_ms[kind] * fixed.outputs[shard]
            + each_ms[fixed.ids_by[kind]] * fixed.ids[shard]
        )

    def of_plan(self, placements: Sequence[Placement], kind: str) -> Start:
        """A plan as a start in its own space."""
        fixed = fixed_placements(self.problem)
        left = [p for p in placements if p not in fixed]
        shared = [p for p in left if len(p.devices) > 1]
        # Ordered rows that are divided stay shards like others (search_space.without_ranges).
        ranges = [p for p in shared if p.shard.table.ordered and p == division(p.shard.table, self.problem)]
        shared = [p for p in shared if p not in ranges]
        placed = [(s, d) for p in left if p not in shared for d, s in shards_on(p)]
        shards = [*(s for s, _ in placed), *(p.shard for p in shared)]
        space = self.spaces.space(
            self._of_strips(shards), shards, kind == "all" or bool(shared), kind == "halves"
        )
        start = self._placed(
            space,
            placed,
            np.concatenate(
                [
                    _pairs(),
                    *(
                        _pairs(space.strips([p.shard.table]), space.number(p.kind, p.devices, p.shard.table))
                        for p in shared
                    ),
                ]
            ),
        )
        if kind != "all":
            start.space = replace(space, fixed=space.as_it_is)
            start.fixed = start.space.fixed
        return start

    def _space(self, shards: Sequence[Shard], kind: str) -> SearchSpace:
        """The space of shards. Row ranges become whole tables, shared by all devices, where possible."""
        whole, by_rows = self.spaces.without_ranges(shards, self.problem)
        return self.spaces.space(self._of_strips(whole), whole, kind == "all", kind == "halves", by_rows)

    def _of_strips(self, shards: Sequence[Shard]) -> ShardCostCache:
        """A cache for the strips of these shards: the last one if it covers them.

        Encoding its shards again would take longer than anything else.
        """
        if self.cache is None or not self.cache.covers(shards):
            self.cache = ShardCostCache(self.problem, self.model, shards)
        return self.cache

    def _placed(self, space: SearchSpace, shards: Sequence[tuple[Shard, int]], shared: np.ndarray) -> Start:
        """A start with shards on their devices, and strips shared by groups. Bundles are placed as one."""
        state = self._state(space)
        self.compiled.share(self.head, space.fixed, state, shared)
        by_device: dict[int, list[Shard]] = {}
        for shard, device in shards:
            by_device.setdefault(device, []).append(shard)
        for device, on_it in by_device.items():
            found = space.keys(on_it)
            self.compiled.place(space.fixed, state, np.insert(found, 1, device, axis=1))
        self.compiled.refresh(self.head, space.fixed, state)
        return Start(space, state, space.fixed)

    def resharded(self, reshard: Reshard, kind: str) -> Start:
        """A start from an existing plan. Tables that the plan lacks are placed greedily."""
        old = reshard.sorted(self.problem)
        whole = [*(t for tables in old.shared.values() for t in tables), *old.new]
        shards = [*(s for s, _ in old.placed), *map(Shard.whole, whole)]
        space = self.spaces.space(self._of_strips(shards), shards, True, kind == "halves")
        shared = [
            _pairs(space.strips([t]), space.number(*group, t))
            for group, tables in old.shared.items()
            for t in tables
        ]
        start = self._placed(space, old.placed, np.concatenate([_pairs(), *shared]))
        held = start.state.held.copy()
        todo = space.keys([Shard.whole(t) for t in old.new])
        if not self.compiled.greedy(self.head, space.fixed, start.state, todo):
            raise Infeasible(
                f"problem {self.problem.name!r}: the plan to start from leaves no device room "
                "for tables that it lacks, or has where they may not be "
                f"({shown(t.name for t in old.new)}), uncut; plan afresh, or with more memory"
            )
        self.compiled.refresh(self.head, space.fixed, start.state)
        start.space = self.spaces.keeping(space, held, reshard, old.new)
        if kind != "all":
            start.space = replace(start.space, fixed=start.space.as_it_is)
        start.fixed = start.space.as_it_is
        return start


def _first(may_share: np.ndarray, layouts: Sequence[int]) -> np.ndarray:
    """[S] the first of some layouts by which groups may share a strip. -1: none."""
    found = np.full(may_share.shape[1], -1)
    for y in reversed(layouts):
        found[may_share[y]] = y
    return found


def _pairs(strips: Sequence[int] = (), group: int = 0) -> np.ndarray:
    """[N, 2] strips, and the group that shares them, for compiled.share."""
    return np.array([(s, group) for s in strips], dtype=np.int64).reshape(-1, 2)
