"""Annealing: greedy plans, side by side improved by simulated annealing (compiled/), the best of them to the end.

The starts: tables whole or cut by columns; large ones everywhere, their rows divided; small ones everywhere, in copies (data-
parallel), where that is worth it. What the exchanges cost is taken to be linear in what each device, the widest one and the
widest host exchange; which of the improved starts goes on and is returned, the model itself decides.

Shapes: S strips, D devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.layouts import CHANNELS, shards_on
from shardcore.memory import free_bytes
from shardcore.search import greedy
from shardcore.search.budget import Budget, Meter
from shardcore.search.feasible import feasible_pieces, pack_or_raise, shown
from shardcore.search.packing import least_bytes
from shardcore.search.pieces import placed, priced
from shardcore.search.shard_cost_cache import ShardCostCache
from shardcore.types import MIN_WIDTH, Placement, Plan, Problem, Shard
from shardcore.workload import traffic_of_widths

if TYPE_CHECKING:  # numba takes a second to import, and only this needs it
    from shardcore.search.anneal.compiled import SearchProblem, State
    from shardcore.search.anneal.search_space import Reshard, SearchSpace

SPACES = ("all", "columns", "halves")
SPACE_OF = {"anneal": "all", "anneal_columns": "columns"}
"""Which of them the sharders of these names search."""
_DEFAULT = Budget(evals=500_000)
_SPLITS = (np.inf, 1.2, 1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Greedy starts cut what costs more than this share of a device's mean load."""
_MISSES = 5
"""Cuts after which a greedy plan that did not become cheaper is not cut further."""
_DIVIDED = (1.0, 0.5, 0.25)
"""Others divide the rows of such tables."""
_TIGHT, _SMALL = 0.8, (0.3, 0.2, 0.1, 0.05)
"""Where the tables take more than this share of the memory, others cut what takes more than these of a device's."""
_HOPEFUL = 1.5
"""Starts that cost more than this share of the cheapest are not improved."""
_HOT, _WARM, _COLD = 4e-2, 4e-3, 4e-6
"""Temperatures relative to a device's share of the cost: of a start, of the best of them when it goes on alone, at the end."""
_RACE = 0.7
"""Share of the budget for which several starts are improved."""
_COLUMNS = 0.5
"""Share of the budget for plans by columns alone, before all of the space: of those that try rows and copies from the start, some
end above them."""
_ROUNDS = 24
"""Parts of a cooling, after each of which it is compared with the budget."""
_LOG = 1 << 20
"""Changes since the best plan that are kept."""


def anneal(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None, space: str = "all",
          reshard: Reshard | None = None) -> Plan:
    """The best plan found within the budget (none: 500,000 evaluations). The seconds of a budget only a first plan may exceed,
    evaluations its starts and one round too. space: "all", or without tables everywhere, by rows or in copies: "columns" (any
    widths), or "halves" of columns. reshard: a plan to improve, and how much may move.

    Raises Infeasible and SettingMismatch as all sharders do.
    """
    problem.require_setting(model.setting)
    if space not in SPACES:
        raise ShardCoreError(f"annealing has no space {space!r}; there are {', '.join(SPACES)}")
    meter = (budget if budget and (budget.evals or budget.seconds) else _DEFAULT).start()
    limited = bool(reshard and reshard.limited)
    pieces = [] if limited else feasible_pieces(problem)  # a problem without a plan is refused before all else
    search = Search(problem, model, meter, seed)
    kept = [search.resharded(reshard, space)] if reshard else []
    best = search.run(kept) if limited else search.best(space, pieces, kept)
    name = "anneal" if space == "all" else "anneal_columns"  # halves are for comparisons only
    return priced(best.placements, problem, model, algorithm=name, seed=seed, space=space, evals=search.meter.evals)


def anneal_columns(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None) -> Plan:
    """`anneal` without tables everywhere: rows and copies have ops and collectives of their own, of which a model often knows
    least."""
    return anneal(problem, model, seed=seed, budget=budget, space="columns")


@dataclass
class Start:
    """A plan in its space; fixed: what of that space it is improved in at first."""

    space: SearchSpace
    state: State
    fixed: SearchProblem
    ms: float = np.inf

    @property
    def placements(self) -> list[Placement]:
        return self.space.placements(self.state.held, self.state.group)


class Search:
    def __init__(self, problem: Problem, model: CostModel, meter: Meter, seed: int) -> None:
        before_s = meter.seconds()
        from shardcore.search.anneal import compiled  # or read from disk, while the clock stands still
        from shardcore.search.anneal import search_space as spaces

        meter.started_s += meter.seconds() - before_s
        self.compiled, self.spaces, self.meter = compiled, spaces, meter
        self.problem, self.model, self.seed = problem, model, seed
        self.head = model.compiled().head
        self._cache: ShardCostCache | None = None
        self._greedy_s: float | None = None  # seconds of the longest greedy plan so far, if one was found
        self._annealing_s = 0.0

    def best(self, kind: str, pieces: Sequence[Shard], kept: list[Start]) -> Start:
        """The best plan found in a space of pieces from its starts and those `kept`."""
        columns, begin = [], 0.0
        if kind == "all":
            begin = _COLUMNS
            with suppress(Infeasible):  # copies may fit, where a table's outputs take more than its rows
                before_s = self.meter.seconds()
                starts = self.starts("columns", pieces)
                took_s = self.meter.seconds() - before_s
                best = self.run(starts, 0.0, begin)
                if not self.meter.has_time(took_s):  # for the starts of the larger space
                    return self.run([*kept, best], begin, 1.0)
                columns = best.placements
        return self.run([*kept, *self.starts(kind, pieces, columns)], begin, 1.0)

    def run(self, starts: list[Start], begin: float = 0.0, end: float = 1.0) -> Start:
        """The best plan found from one share of the budget to another: the starts are improved in turn for a part of it, then the
        best of them, less cooled, with the rest."""
        if len(self.problem.topology) > 1:
            at = begin + (end - begin) * np.append(np.linspace(0, _RACE, len(starts) + 1), 1.0)
            for i, start in enumerate(starts):
                self._cool(start, at[i], at[i + 1], _HOT)
            starts.sort(key=lambda s: s.ms)
            starts[0].fixed = starts[0].space.fixed
            self._cool(starts[0], at[-2], end, _WARM)
        return starts[0]

    def _cool(self, start: Start, begin: float, end: float, hot: float) -> None:
        """Improve a plan from one share of the budget to another: of what it was, the best met and what it is after each part of
        the cooling, the one stays that is cheapest by the model itself."""
        state, cost = start.state, start.state.value[self.compiled.BEST] / len(self.problem.topology)
        best = self._cheaper(start, (np.inf, state))
        while (done := max(begin, self.meter.progress())) < end:
            at = (done - begin) / (end - begin)
            hot_ms, cold_ms = (cost * hot * (_COLD / hot) ** min(1.0, x) for x in (at, at + 1 / _ROUNDS))
            trials, before_s = self._trials((end - begin) / _ROUNDS), self.meter.seconds()
            self.compiled.anneal(self.head, start.fixed, state, trials, hot_ms, cold_ms)
            self.meter.evals += trials
            self._annealing_s += self.meter.seconds() - before_s
            best = self._cheaper(start, best)
        self.compiled.rewind(self.head, start.fixed, state)
        start.ms, start.state = self._cheaper(start, best)
        self.compiled.refresh(self.head, start.fixed, start.state)

    def _cheaper(self, start: Start, best: tuple[float, State]) -> tuple[float, State]:
        """The best so far, or a copy of what a start is now."""
        ms = self._exact_ms(start)
        if ms >= best[0]:
            return best
        return ms, start.state._replace(**{name: of.copy() for name, of in start.state._asdict().items()
                                           if name not in ("log", "random")})

    def _trials(self, share: float) -> int:
        """How many trials are about that share of the budget."""
        limits = []
        if self.meter.budget.evals:
            limits.append(max(100, int(self.meter.budget.evals * share)))
        if self.meter.budget.seconds:
            rate = self.meter.evals / max(self._annealing_s, 1e-3)
            limits.append(int(np.clip(rate * self.meter.budget.seconds * share, 1000, 10_000_000)))
        return min(limits)

    def _exact_ms(self, start: Start) -> float:
        """What the model itself says of the plan."""
        state, fixed, space = start.state, start.fixed, start.space
        widths = {layout: MIN_WIDTH * state.width[:, k] for k, layout in enumerate(space.cache.kinds)}
        traffic = traffic_of_widths(widths, self.problem)
        for (layout, devices), size in zip(space.groups, state.group_size, strict=True):
            for channel, entering in layout.channels.items():
                rows, width = (size, 1) if layout.dense_gradient else (0, MIN_WIDTH * size)
                traffic[CHANNELS.index(channel), devices] += entering(rows, width, self.problem)
        compute_ms = (state.ms.sum(1) + state.shared_ms) / fixed.speed
        return float((compute_ms + self.model.comm(traffic, compute_ms, self.problem.topology).total_ms).max())

    # --- starts --------------------------------------------------------------------------------------------------------

    def starts(self, kind: str, pieces: Sequence[Shard], columns: Sequence[Placement] = ()) -> list[Start]:
        """Plans in a space, of SPACES. columns: a plan in that of columns, in place of the start that has no table everywhere."""
        space = self._space(pieces, kind)
        found = [self._of(columns, kind)] if columns else self._by_columns(space)
        layouts = space.layouts if space.fixed.may_share.any() else ()
        for y in sorted(range(len(layouts)), key=lambda y: not layouts[y].divides_rows):
            found += self._divided(space, y) if layouts[y].divides_rows else self._replicated(space, y, any(found))
        on_host = Counter(d.host for d in self.problem.topology.devices)
        if len(set(on_host.values())) > 1 and self._has_time():  # what exchanges cost is then far from linear
            with suppress(Infeasible):
                plans = [g(self.problem, self.model) for g in greedy.ORDERS.values()]
                found.append(self._of(min(plans, key=lambda p: p.provenance["predicted_ms"]).placements, kind))
        fit = [start for start in found if start] or [self._packed(kind)]
        least = min(start.state.value[self.compiled.BEST] for start in fit)
        return [start for start in fit if start.state.value[self.compiled.BEST] <= _HOPEFUL * least]

    def _divided(self, space: SearchSpace, y: int) -> list[Start | None]:
        """Large tables shared by the groups of a layout; and all of them: no op of whole rows, no exchange of these."""
        whole = np.flatnonzero(space.fixed.may_share[y])
        single = self._single_ms(space.fixed, whole, space.fixed.size[whole])
        all_ms = self._single_ms(space.fixed, np.arange(len(space.fixed.size)), space.fixed.size)
        mean_ms = all_ms.sum() / space.fixed.speed.sum()
        large = [whole[single > share * mean_ms] for share in _DIVIDED]
        return [self._cheapest(space, [self._with(space, s, y) for s in large if len(s)]),
                self._cheapest(space, [self._with(space, whole, y)])]

    def _replicated(self, space: SearchSpace, y: int, fits: bool) -> list[Start | None]:
        """Those tables on all devices that are worth it; where nothing fits yet, those that take less so."""
        worth = self.spaces.worth_copying(space, self.model, y)
        some = {len(worth) // k for k in (1, 2, 4)} - {0}
        found = [self._cheapest(space, [self._with(space, worth[:k], y) for k in sorted(some)])]
        if not fits and not any(found):
            whole_bytes = space.fixed.part_bytes[space.fixed.part[np.arange(len(space.fixed.size)), space.fixed.size]]
            saving = space.fixed.may_share[y] & (space.fixed.shared_bytes[y] < whole_bytes / 2)
            found.append(self._cheapest(space, [self._with(space, np.flatnonzero(saving), y)]))
        return found

    def _by_columns(self, space: SearchSpace) -> list[Start | None]:
        """Where memory is tight, what is cut for the cost may leave gaps that no part fits: then also parts of few bytes."""
        found = [self._cheapest(space, [(self._cuts(space, share), _pairs()) for share in self._shares(space)])]
        if least_bytes(self.problem) > _TIGHT * sum(free_bytes(self.problem)) and not self.spaces.is_large(space.cache):
            found.append(self._cheapest(space, [(self._small(space, share), _pairs()) for share in _SMALL]))
        return found

    def _shares(self, space: SearchSpace) -> Sequence[float]:
        return _SPLITS[2:5:2] if self.spaces.is_large(space.cache) else _SPLITS

    def _cheapest(self, space: SearchSpace, ways: Sequence[tuple[np.ndarray, np.ndarray]]) -> Start | None:
        """The cheapest of some greedy plans, of strips in n [S] parts and those shared; from there on, what costs most on the
        device that is last is cut once more, as long as that helps (as EMBark's planner does). None where none fits."""
        best, least, begin = None, np.inf, None
        for n, shared in ways:
            shared = np.concatenate([shared, _pairs(space.divided, space.dividing)])
            state = self._greedy(space, n, shared)
            if state is not None and state.value[self.compiled.BEST] < least:
                best, least, begin = state, state.value[self.compiled.BEST], (n, shared)
        state, misses = best, 0
        while state is not None and misses < _MISSES and not self.spaces.is_large(space.cache):
            n, shared = begin
            worst = state.number[self.compiled.WORST]
            last = state.items[worst, :state.count[worst]]
            if not len(last):
                break
            hottest = last[np.argmax(self._single_ms(space.fixed, last, state.held[last, worst]))]
            if not space.fixed.may_split[hottest] or n[hottest] >= min(len(space.fixed.free), space.fixed.size[hottest]):
                break
            n[hottest] += 1
            state = self._greedy(space, n, shared)
            misses += 1
            if state is not None and state.value[self.compiled.BEST] < least:
                best, least, misses = state, state.value[self.compiled.BEST], 0
        return None if best is None else Start(space, best, space.as_it_is)

    def _greedy(self, space: SearchSpace, n: np.ndarray, shared: np.ndarray) -> State | None:
        """Strips in n [S] parts (0: none) placed by falling cost or, where that does not fit, by falling size; None where neither
        does, or where there is a plan already and no time for another one."""
        if not self._has_time():
            return None
        fixed, parts, before_s = space.fixed, self._parts(space, n), self.meter.seconds()
        size = fixed.part_bytes[fixed.part[parts[:, 0], parts[:, 1]]]
        for order in (np.arange(len(parts)), np.lexsort((-size, _choice(fixed, parts[:, 0])))):
            state = self._state(space)
            self.compiled.share(self.head, fixed, state, shared)
            fits = (state.used <= np.maximum(0, fixed.free)).all()
            if fits and self.compiled.greedy(self.head, fixed, state, np.ascontiguousarray(parts[order])):
                self.compiled.refresh(self.head, fixed, state)
                self._greedy_s = max(self._greedy_s or 0.0, self.meter.seconds() - before_s)
                return state
        return None

    def _has_time(self) -> bool:
        """Whether the budget in seconds has time for one more greedy plan: for the first there is always time."""
        return self._greedy_s is None or self.meter.has_time(self._greedy_s)

    def _state(self, space: SearchSpace) -> State:
        return self.compiled.empty(space.fixed, len(self.problem.topology.hosts), _LOG, self.seed)

    def _with(self, space: SearchSpace, strips: np.ndarray, y: int) -> tuple[np.ndarray, np.ndarray]:
        """Some strips shared by groups of a layout, the costliest first by the group that has least; the others cut where they
        cost more than a device's mean load."""
        groups = np.flatnonzero(space.fixed.group_layout == y)
        cost = self._single_ms(space.fixed, strips, space.fixed.size[strips])
        load, of = np.zeros(len(groups)), np.zeros(len(strips), dtype=np.int64)
        for i in np.argsort(-cost, kind="stable") if len(groups) > 1 else ():
            of[i] = load.argmin()
            load[of[i]] += cost[i]
        return self._cuts(space, 1.0, strips), np.stack([strips, groups[of]], 1).astype(np.int64)

    def _small(self, space: SearchSpace, share: float) -> np.ndarray:
        """[S] parts of each strip, none of which takes more than a share of a device's mean memory; 0 if everywhere."""
        fixed = space.fixed
        size = fixed.part_bytes[fixed.part[np.arange(len(fixed.size)), fixed.size]]
        n = np.where(fixed.may_split, np.clip(-(-size // max(1, int(share * fixed.free.mean()))), 1, fixed.size), 1)
        n[space.divided] = 0
        return n

    def _cuts(self, space: SearchSpace, share: float, everywhere: Sequence[int] = ()) -> np.ndarray:
        """[S] parts of each strip by columns, none of which costs more than a share of a device's mean load; 0 if everywhere."""
        fixed, single = space.fixed, self._single_ms(space.fixed, np.arange(len(space.fixed.size)), space.fixed.size)
        n = np.ones(len(single), dtype=np.int64)
        n[space.divided] = n[np.asarray(everywhere, dtype=np.int64)] = 0
        limit = share * max(single[n > 0].sum() / fixed.speed.sum(), 1e-300)
        most = np.where(fixed.may_split, np.minimum(len(fixed.free), fixed.size), 1)
        return n * np.clip(np.ceil(np.minimum(single / limit, most)).astype(np.int64), 1, None)

    def _parts(self, space: SearchSpace, n: np.ndarray) -> np.ndarray:
        """[N, 2] strips and units of n [S] equal parts, by falling cost, what may go to few devices first."""
        fixed, strip = space.fixed, np.repeat(np.arange(len(n)), n)
        i, of = np.arange(len(strip)) - np.repeat(np.cumsum(n) - n, n), n[strip]
        units = fixed.size[strip] * (i + 1) // of - fixed.size[strip] * i // of
        order = np.lexsort((-self._single_ms(fixed, strip, units), _choice(fixed, strip)))
        return np.ascontiguousarray(np.stack([strip, units], 1)[order], dtype=np.int64)

    def _single_ms(self, fixed: SearchProblem, strips: np.ndarray, units: np.ndarray) -> np.ndarray:
        return np.asarray(self.model.head(fixed.codes[fixed.part[strips, units]]))

    def _packed(self, kind: str) -> Start:
        packing = pack_or_raise(self.problem)
        placements = placed([(shard,) for shard in packing.pieces], packing.devices, self.problem)
        return self._of(placements, "all" if kind == "all" else "columns")

    def _of(self, placements: Sequence[Placement], kind: str) -> Start:
        """A plan without data-parallel tables, in a space of its own: rows that are divided stay so."""
        parts = [(shard, d) for p in placements for d, shard in shards_on(p)]
        space = self._space([shard for shard, _ in parts], kind)
        divided = {space.cache.table(s).name for s in space.divided}
        left = [(shard, d) for shard, d in parts if shard.table.name not in divided]
        return self._placed(space, left, _pairs(space.divided, space.dividing))

    def _space(self, pieces: Sequence[Shard], kind: str) -> SearchSpace:
        whole, by_rows = self.spaces.without_ranges(pieces, self.problem)
        return self.spaces.space(self._of_strips(whole), whole, kind == "all", kind == "halves", by_rows)

    def _of_strips(self, pieces: Sequence[Shard]) -> ShardCostCache:
        """The last cache, where it has the strips of these pieces: to encode its parts again would take longest of all."""
        if self._cache is None or not self._cache.covers(pieces):
            self._cache = ShardCostCache(self.problem, self.model, pieces)
        return self._cache

    def _placed(self, space: SearchSpace, pieces: Sequence[tuple[Shard, int]], shared: np.ndarray) -> Start:
        """Pieces on their devices, and the strips that groups share."""
        state = self._state(space)
        self.compiled.share(self.head, space.fixed, state, shared)
        by_device: dict[int, list[Shard]] = {}
        for piece, device in pieces:
            by_device.setdefault(device, []).append(piece)
        for device, on_it in by_device.items():
            found = space.strips(on_it)
            self.compiled.place(space.fixed, state, np.insert(found, 1, device, axis=1))
        self.compiled.refresh(self.head, space.fixed, state)
        return Start(space, state, space.fixed)

    def resharded(self, reshard: Reshard, kind: str) -> Start:
        """The plan to start from, with what it lacks placed greedily."""
        old = reshard.sorted(self.problem)
        whole = [*(t for tables in old.shared.values() for t in tables), *old.new]
        all_pieces = [*(s for s, _ in old.placed), *map(Shard.whole, whole)]
        space = self.spaces.space(self._of_strips(all_pieces), all_pieces, True, kind == "halves")
        shared = [_pairs(space.numbers(tables), space.number(*group)) for group, tables in old.shared.items()]
        start = self._placed(space, old.placed, np.concatenate([_pairs(), *shared]))
        held = start.state.held.copy()
        todo = space.strips([Shard.whole(t) for t in old.new])
        if not self.compiled.greedy(self.head, space.fixed, start.state, todo):
            raise Infeasible(f"problem {self.problem.name!r}: the plan to start from leaves no device room for tables that it "
                             f"lacks, or has where they may not be ({shown(t.name for t in old.new)}), uncut; plan afresh, or "
                             "with more memory")
        self.compiled.refresh(self.head, space.fixed, start.state)
        start.space = self.spaces.keeping(space, held, reshard, old.new)
        if kind != "all":
            start.space = replace(start.space, fixed=start.space.as_it_is)
        start.fixed = start.space.as_it_is
        return start


def _pairs(strips: Sequence[int] = (), group: int = 0) -> np.ndarray:
    """[N, 2] strips that a group shares, for compiled.share."""
    return np.array([(s, group) for s in strips], dtype=np.int64).reshape(-1, 2)


def _choice(fixed: SearchProblem, strips: np.ndarray) -> np.ndarray:
    """[N] devices to choose from; 0 for all where nothing is pinned."""
    return fixed.allowed[strips].sum(1) if len(fixed.allowed) else np.zeros(len(strips))
