"""Plans that annealing starts from: greedy ones of several ways to cut and share tables, or an existing plan.

Shapes: S strips, D devices. Strips and units are defined in step/options.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.types import Placement, Shard, Table
from shardcore.cost.model import CostModel, first_least
from shardcore.search import greedy
from shardcore.search.anneal import compiled
from shardcore.search.anneal.compiled import SearchProblem, State
from shardcore.search.anneal.rates import rates_of
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.anneal.search_space import (
    SearchSpace,
    is_large,
    keeping,
    search_space,
    without_ranges,
)
from shardcore.search.budget import Meter
from shardcore.search.state.column_parts import ColumnParts
from shardcore.search.state.feasible import fitting
from shardcore.search.state.refusal import shown
from shardcore.search.ties import least, ranks
from shardcore.step.engine.arrays import (
    ADDED_MS,
    ARRIVED,
    BEST,
    BUSIEST,
    ENTERED,
    FREE,
    GROUP_RUN,
    HOST_BUSIEST,
    LAYOUT_OF,
    OWN,
    RUN,
    SIZE,
    SPEED,
)
from shardcore.step.engine.pointers import packed
from shardcore.step.kinds import Layout, shards_on
from shardcore.step.memory import held_bytes
from shardcore.step.options import Options
from shardcore.step.ways import division, fixed_placements

_SPLITS = (np.inf, 1.2, 1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Greedy starts cut tables that cost more than one of these shares of a device's mean load."""
_DIVIDED = (1.0, 0.5, 0.25, 0.1, 0.03)
"""Other starts divide the rows of tables that cost more than one of these shares of a device's mean load."""
_COPIED = tuple(eighths / 8 for eighths in range(9))
"""Shares of the tables that starts copy, where the others have their rows divided."""
_RECUT = 2
"""Costliest tables to which `recut` gives another number of parts."""
_TIGHT, _SMALL = 0.8, (0.3, 0.2, 0.1, 0.05)
"""When memory is tight, further starts cut tables by size.

The first is the share of all memory that counts as tight.
The others are shares of a device's memory, above which tables are cut.
"""
_DEVICES_AN_EVAL = 1 << 14
"""Devices that a greedy plan tries for its strips, for each evaluation that it counts as. Few count as none."""


@dataclass
class Start:
    """A plan in its space.

    maker: what made it, and makes others of its problem.
    fixed: the subset of the space in which it is improved at first.
    ms: cost by the model itself of the cheapest plan that it led to.
    """

    maker: Starts
    space: SearchSpace
    state: State
    fixed: SearchProblem
    ms: float = np.inf

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The plan as placements of whole tables."""
        return self.maker.parts.with_whole_tables(self.space.placements(self.state.held, self.state.group))

    @property
    def may_run(self) -> bool:
        """True if TorchRec runs the plan."""
        parts = self.maker.parts
        return not parts.tables or parts.may_run(self.space.placements(self.state.held, self.state.group))

    @property
    def by_columns(self) -> bool:
        """True if its space has whole tables and columns only."""
        return not self.space.fixed.may_share.any()


class Cut(NamedTuple):
    """A way to cut and share strips, before they are placed.

    n: [S] number of equal shards by columns. 0 for shared strips.
    shared: [N, 2] shared strips, each with the number of its group.
    """

    n: np.ndarray
    shared: np.ndarray


class Starts:
    """Makes starts in the spaces of a problem. Encodings of one start are kept for the next.

    parts: the problem, with some tables in parts or none.
    """

    def __init__(self, parts: ColumnParts, model: CostModel, meter: Meter) -> None:
        self.parts, self.problem, self.model, self.meter = parts, parts.problem, model, meter
        self.head = model.compiled().head
        self.cache: Options | None = None  # of the last shards
        self._rates: dict[tuple[Layout, ...], np.ndarray] = {}  # of exchanges, by runs
        self._greedy_s: float | None = None  # seconds of the longest greedy plan so far, if there is one
        self._last: tuple[Sequence[Shard], str, SearchSpace] | None = (
            None  # the last space, and what it is of
        )

    # --- starts by columns ---

    def by_columns(self, name: str, shards: Sequence[Shard]) -> Iterator[Start]:
        """Greedy plans with tables whole or cut by columns. One at least.

        name: of the space (sharder.SPACES).

        With tight memory, cuts chosen for cost may leave gaps that no shard fits. So some starts cut by size.

        Raises Infeasible if no plan is found.
        """
        space, any_fits = self._space(shards, name), False
        # Each greedy plan of a large problem takes long, so it gets two.
        shares = _SPLITS[2:5:2] if is_large(space.cache) else _SPLITS
        series = [[Cut(self._n_by_cost(space, share), _pairs()) for share in shares]]
        tight = space.whole_bytes.sum() > _TIGHT * sum(held_bytes(self.problem))
        if tight and not is_large(space.cache):
            series.append([Cut(self._n_by_size(space, share), _pairs()) for share in _SMALL])
        for cuts in series:
            if start := self._cheapest(space, cuts):
                any_fits = True
                yield start
        if (divided := _divided_among_runs(space)) and (start := self._cheapest(divided, series[0][::3])):
            yield Start(self, space, start.state, space.among_groups(start.state.group))
        # With unequal hosts, exchanges are far from linear.
        if len(set(map(len, self.problem.topology.on_hosts))) > 1 and self._has_time():
            with suppress(Infeasible):
                # The greedy orders do not read the linear rates, which mislead the plans above here.
                plans = [order(self.problem, self.model) for order in greedy.ORDERS.values()]
                best = least(plans, lambda p: p.provenance["predicted_ms"])
                any_fits = True
                yield self.of_plan(best.placements, name)
        # A packing counts memory only, but it fits.
        if not any_fits:
            yield self.of_plan(fitting(self.problem).placements, name)

    # --- starts with shared tables ---

    def starts_with_shared(self, shards: Sequence[Shard]) -> Iterator[Start]:
        """Greedy plans of the whole space, with tables shared by groups of devices. None may fit."""
        space = self._space(shards, "all")
        may_share, layouts, runs = space.fixed.may_share, space.cache.layouts, space.fixed.strips[:, RUN]
        if not may_share.any():
            return
        # [S] the layout that copies a strip to all devices.
        copied = _first(may_share, [y for y, layout in enumerate(layouts) if layout.local_batch])
        dividing: dict[str, list[int]] = {}
        for y, layout in enumerate(layouts):
            if layout.divides_rows:
                dividing.setdefault(layout.name, []).append(y)
        series = list[Iterable[np.ndarray]]()
        # No op has whole rows of all tables, or of those of a run, and no exchange is for these.
        for run in (None, *(np.unique(runs).tolist() if len(np.unique(runs)) > 1 else ())):
            strips = runs == run if run is not None else runs >= 0
            divided = [_first(may_share & strips, several) for several in dividing.values()]
            others = [np.where(strips & (of_strips < 0), copied, of_strips) for of_strips in divided]
            series.append(self._more_copied(space, np.where(strips, copied, -1), others))
        series.append(self._more_copied(space, copied, [np.full(len(copied), -1)]))
        for ways in (*series, *self._costly_divided(space)):
            if start := self._cheapest(space, self._cuts(space, ways)):
                yield start

    def _more_copied(
        self, space: SearchSpace, copied: np.ndarray, others: Iterable[np.ndarray]
    ) -> Iterator[np.ndarray]:
        """[S] layouts of strips, -1 by columns: more and more of the smallest are copied, the others as given."""
        # Strips that may not be copied come last, beyond n_copies.
        size = np.where(copied >= 0, space.shared_bytes[copied, np.arange(len(copied))], np.inf)
        smallest, n_copies = np.argsort(size, kind="stable"), int((copied >= 0).sum())
        # In large problems only the ends: none copied, and all that may be.
        shares = _COPIED[:: len(_COPIED) - 1] if is_large(space.cache) else _COPIED
        for of_others in others:
            for share in shares:
                copies, layout_of = smallest[: int(share * n_copies)], of_others.copy()
                # The smallest are copied even if their rows might be divided.
                layout_of[copies] = copied[copies]
                yield layout_of

    def _costly_divided(self, space: SearchSpace) -> Iterator[list[np.ndarray]]:
        """For each layout that divides rows: [S] layouts of strips with the costly ones divided so, -1 for others."""
        fixed = space.fixed
        # With the exchange: of a sequence it costs more than the op.
        step_ms = self._step_ms(fixed, fixed.whole_options(), fixed.strips[:, RUN])
        mean_ms = step_ms.sum() / fixed.devices[:, SPEED].sum()
        for y in (y for y, layout in enumerate(space.cache.layouts) if layout.divides_rows):
            yield [np.where(fixed.may_share[y] & (step_ms > share * mean_ms), y, -1) for share in _DIVIDED]

    def _cuts(self, space: SearchSpace, ways: Iterable[np.ndarray]) -> list[Cut]:
        """Cuts with strips shared by layouts [S], -1 by columns. Those that share nothing are left out."""
        each = {way.tobytes(): way for way in ways if (way >= 0).any()}.values()
        return [self._cut(space, way) for way in each]

    # --- greedy plans ---

    def _cheapest(self, space: SearchSpace, cuts: Sequence[Cut]) -> Start | None:
        """The cheapest greedy plan of some cuts. If none fits, the same with tables cut further, or None."""
        plans = self._greedy_plans(space, cuts)
        # Cuts by cost may leave gaps on devices that no shard fits. Smaller shards fill them.
        if not plans and not is_large(space.cache):
            smaller = (
                Cut(self._n_by_size(space, share, cut.n), cut.shared) for cut in cuts for share in _SMALL
            )
            plans = self._greedy_plans(space, smaller)
        if not plans:
            return None
        best = least(plans, _ms)
        return Start(self, space, best, space.among_groups(best.group))

    def _greedy_plans(self, space: SearchSpace, cuts: Iterable[Cut]) -> list[State]:
        """Greedy plans of those cuts that fit, as long as there is time."""
        plans = (self._greedy(space, cut) for cut in cuts if self._has_time())
        return [state for state in plans if state is not None]

    def _greedy(self, space: SearchSpace, cut: Cut) -> State | None:
        """Place strips by falling cost; if that fails, by falling size. None if neither fits.

        Cost is that of the op, and that of the op with its exchange: the cheaper plan of both.
        Strips that are always shared are among the shared ones.
        """
        fixed, shared, plans = space.fixed, space.sharing(cut.shared), list[State]()
        # Strip and units of equal shards [N, 2].
        strips = np.repeat(np.arange(len(cut.n)), cut.n)
        # Shard i of n has units from size * i // n on, so shards differ by a unit at most.
        i, n = np.arange(len(strips)) - np.repeat(np.cumsum(cut.n) - cut.n, cut.n), cut.n[strips]
        size = fixed.strips[strips, SIZE]
        units = size * (i + 1) // n - size * i // n
        shards = np.stack([strips, units], 1).astype(np.int64)
        options = fixed.shard[strips, units]
        costs = [self._op_ms(fixed, options)]
        if not is_large(space.cache):
            costs.append(self._step_ms(fixed, options, fixed.strips[strips, RUN]))
        # Packed once, for it takes longer than what is compiled here.
        problem = packed(fixed)
        for i, key in enumerate([*costs, space.cache.bytes[options]]):
            # By size only if no order by cost fits, as that order ignores the load.
            if plans and (i == len(costs) or not self._has_time()):
                break
            state, before_s = self._state(space), self.meter.seconds()
            words = packed(state)
            # Shared strips first: greedy balances single devices around them.
            compiled.share(words, shared)
            # Greedy starts from what all devices hold, and groups share.
            compiled.refresh(self.head, problem, words)
            # Strips with fewest devices go first.
            order = np.ascontiguousarray(shards[np.lexsort((ranks(-key), space.choice[strips]))])
            self.meter.evals += (len(shards) + len(shared)) * len(fixed.devices) // _DEVICES_AN_EVAL
            if compiled.greedy(self.head, problem, words, order):
                compiled.refresh(self.head, problem, words)
                plans.append(state)
                self._greedy_s = max(self._greedy_s or 0.0, self.meter.seconds() - before_s)
        return least(plans, _ms) if plans else None

    def _has_time(self) -> bool:
        """Tell if one more greedy plan ends in the first quarter of the seconds, and there are evaluations left.

        There is always one plan.
        """
        return self._greedy_s is None or (
            self.meter.left() and self.meter.has_time(3 * self.meter.seconds() + 4 * self._greedy_s)
        )

    def _state(self, space: SearchSpace) -> State:
        """A State with nothing placed."""
        return compiled.empty(space.fixed, len(self.problem.topology.hosts))

    def recut(self, start: Start) -> list[Start]:
        """Greedy plans that cut tables into as many parts as a plan does, but a costly one into one more or one fewer.

        Parts that meet on a device are one, so that a plan may have fewer.

        Annealing seldom gets there: a new part costs about as much as a wide one, however narrow it begins.
        """
        space, fixed, group = start.space, start.space.fixed, start.state.group
        # Few plans, each made in two orders: they take a tenth of the seconds that are left, at most.
        if (
            fixed.halves
            or is_large(space.cache)
            or not self.meter.has_time(80 * _RECUT * (self._greedy_s or 0.0))
        ):
            return []
        n = np.where(group < 0, (start.state.held > 0).sum(1), 0)
        most = np.minimum(len(fixed.devices), fixed.strips[:, SIZE])
        costliest = np.argsort(ranks(-self._op_ms(fixed, fixed.whole_options())), kind="stable")
        pairs = _pairs((s, group[s]) for s in np.flatnonzero(group >= 0).tolist())
        cuts = list[Cut]()
        for s in costliest[(fixed.may_split & (n > 0))[costliest]][:_RECUT]:
            for parts in (n[s] + 1, n[s] - 1):
                if space.cache.least_parts[s] <= parts <= most[s]:
                    cuts.append(Cut(np.where(np.arange(len(n)) == s, parts, n), pairs))
        plans = [self._greedy(space, cut) for cut in cuts if self.meter.left()]
        return [Start(self, space, plan, fixed, _ms(plan)) for plan in plans if plan is not None]

    # --- cuts ---

    def _cut(self, space: SearchSpace, layout_of: np.ndarray) -> Cut:
        """Strips shared by groups of layouts [S]; those of layout -1 are cut if they cost more than the mean load."""
        pairs = [
            self._groups(space, np.flatnonzero(layout_of == y), y) for y in np.unique(layout_of) if y >= 0
        ]
        return Cut(self._n_by_cost(space, 1.0, layout_of >= 0), np.concatenate(pairs))

    def _groups(self, space: SearchSpace, strips: np.ndarray, y: int) -> np.ndarray:
        """[N, 2] strips, each with a group of a layout: the one with least load that has room.

        The costliest go first, or the largest if that fails.
        """
        fixed, groups = space.fixed, np.flatnonzero(space.fixed.groups[:, LAYOUT_OF] == y)
        # Cost of a strip in a group: its op, and the exchange that its bytes set.
        options, rates = fixed.shared_options(y, strips), fixed.rates[fixed.groups[groups[0], GROUP_RUN]]
        # The devices of a group on a host are as many as the group has.
        each_ms = rates[OWN] + rates[BUSIEST] + rates[HOST_BUSIEST] * len(space.cache.groups[groups[0]][1])
        cost = self._op_ms(fixed, options) + each_ms * fixed.vectors[options, ENTERED]
        n_bytes = space.shared_bytes[y][strips]
        # A strip takes as much on all devices of a group, so the tightest device decides.
        free = np.array([min(fixed.devices[list(space.cache.groups[g][1]), FREE]) for g in groups])
        chosen = np.zeros(len(strips), dtype=np.int64)
        for order in (np.argsort(ranks(-cost), kind="stable"), np.argsort(-n_bytes, kind="stable")):
            load, room, chosen = np.zeros(len(groups)), free.copy(), np.zeros_like(chosen)
            # A single group has them all.
            for i in order if len(groups) > 1 else ():
                fits = room >= n_bytes[i]
                # Where it fits nowhere, the group with most room is nearest to it.
                chosen[i] = first_least(np.where(fits, load, np.inf)) if fits.any() else room.argmax()
                load[chosen[i]] += cost[i]
                room[chosen[i]] -= n_bytes[i]
            # By size only if the order by cost does not fit.
            if (room >= 0).all():
                break
        return np.stack([strips, groups[chosen]], 1).astype(np.int64)

    def _n_by_size(self, space: SearchSpace, share: float, least: np.ndarray | None = None) -> np.ndarray:
        """[S] number of shards of each strip, so that none takes more than a share of a device's mean memory.

        least: [S] numbers that are kept if they are larger, or 0.

        0 for strips that are always shared.
        """
        # At least a byte: free memory may be 0, and is divided by.
        fixed, most_bytes = space.fixed, max(1, int(share * space.fixed.devices[:, FREE].mean()))
        wanted = -(-space.whole_bytes // most_bytes)
        # No fewer shards than memory forces, and none narrower than a unit.
        n = np.where(fixed.may_split, np.clip(wanted, space.cache.least_parts, fixed.strips[:, SIZE]), 1)
        n[space.divided] = 0
        return n if least is None else np.where(least > 0, np.maximum(n, least), 0)

    def _n_by_cost(self, space: SearchSpace, share: float, shared: np.ndarray | None = None) -> np.ndarray:
        """[S] number of shards by columns, so that none costs more than a share of a device's mean load.

        0 for the shared strips, and for those that always are.
        """
        fixed = space.fixed
        op_ms = self._op_ms(fixed, fixed.whole_options())
        n = np.ones(len(op_ms), dtype=np.int64)
        n[space.divided] = 0
        if shared is not None:
            n[shared] = 0
        # Only strips by columns count: the shared ones are not in these devices' load.
        limit = share * max(op_ms[n > 0].sum() / fixed.devices[:, SPEED].sum(), 1e-300)
        # No more shards than devices: two on one device are one shard.
        most = np.where(fixed.may_split, np.minimum(len(fixed.devices), fixed.strips[:, SIZE]), 1)
        parts = np.ceil(np.minimum(op_ms / limit, most)).astype(np.int64)
        return n * np.maximum(parts, space.cache.least_parts)

    def _op_ms(self, fixed: SearchProblem, options: np.ndarray) -> np.ndarray:
        """[N] cost of ops with one option each, at speed 1."""
        return np.asarray(self.model.head(fixed.codes(options)))

    def _step_ms(self, fixed: SearchProblem, options: np.ndarray, runs: np.ndarray) -> np.ndarray:
        """[N] cost of steps with one option each: its op, and the exchange of its outputs and ids."""
        each_ms, n_runs = fixed.rates[:, OWN] + fixed.rates[:, BUSIEST], len(fixed.runs)
        outputs_ms = each_ms[runs] * fixed.vectors[options, ENTERED]
        ids_ms = each_ms[n_runs + runs] * fixed.vectors[options, ARRIVED]
        return self._op_ms(fixed, options) + outputs_ms + ids_ms

    # --- starts from a plan ---

    def of_plan(self, placements: Sequence[Placement], name: str) -> Start:
        """A plan as a start in a space of its shards.

        name: of the space (sharder.SPACES).
        """
        fixed = fixed_placements(self.problem)
        left = [p for p in placements if p not in fixed]
        # Ordered rows that are divided stay shards like others (search_space.without_ranges).
        # A placement on one device has shards by columns. On several it is shared, or has row ranges.
        shared = [
            p
            for p in left
            if len(p.devices) > 1
            and not (p.shard.table.ordered and p == division(p.shard.table, self.problem))
        ]
        placed = [(s, d) for p in left if p not in shared for d, s in shards_on(p)]
        shards = [*(s for s, _ in placed), *(p.shard for p in shared)]
        # The plan's own shared tables need groups in its space, even if none of them may change.
        space = self._new_space(shards, name == "all" or bool(shared), name == "halves")
        start = self._placed(
            space, placed, _pairs(space.pair(p.kind, p.devices, p.shard.table) for p in shared)
        )
        if name != "all":
            start.space = replace(space, fixed=space.as_it_is)
            start.fixed = start.space.fixed
        return start

    def resharded(self, reshard: Reshard, name: str) -> Start:
        """A start from an existing plan, in a space by name. Tables that the plan lacks are placed greedily."""
        old = reshard.old_places(self.problem)
        # Shared and new tables come as whole strips.
        whole = [*(t for tables in old.shared.values() for t in tables), *old.new]
        shards = [*(s for s, _ in old.placed), *map(Shard.whole, whole)]
        space = self._new_space(shards, True, name == "halves")
        pairs = (space.pair(*group, t) for group, tables in old.shared.items() for t in tables)
        start = self._placed(space, old.placed, _pairs(pairs))
        # Before new tables come: what moves is counted against the plan as it was.
        held = start.state.held.copy()
        todo = space.keys([Shard.whole(t) for t in old.new])
        if not compiled.greedy(self.head, space.fixed, start.state, todo):
            raise Infeasible(
                f"problem {self.problem.name!r}: the plan to start from leaves no device room "
                "for tables that it lacks, or has where they may not be "
                f"({shown(t.name for t in old.new)}), uncut; plan afresh, or with more memory"
            )
        compiled.refresh(self.head, space.fixed, start.state)
        start.space = keeping(space, held, reshard, old.new)
        if name != "all":
            start.space = replace(start.space, fixed=start.space.as_it_is)
        # At first, tables stay in their groups.
        start.fixed = start.space.as_it_is
        return start

    def _placed(self, space: SearchSpace, shards: Sequence[tuple[Shard, int]], shared: np.ndarray) -> Start:
        """A start with shards on their devices, and strips shared by groups. Bundles are placed as one."""
        state = self._state(space)
        compiled.share(state, shared)
        # Keys of a bundle need all its tables, and those are on one device.
        by_device: dict[int, list[Shard]] = {}
        for shard, device in shards:
            by_device.setdefault(device, []).append(shard)
        for device, on_it in by_device.items():
            compiled.place(space.fixed, state, np.insert(space.keys(on_it), 1, device, axis=1))
        compiled.refresh(self.head, space.fixed, state)
        return Start(self, space, state, space.fixed)

    def _space(self, shards: Sequence[Shard], name: str) -> SearchSpace:
        """The space of shards, by name. Row ranges become whole tables, shared by all devices, where possible."""
        # Making one takes long in large problems.
        if self._last and self._last[0] is shards and self._last[1] == name:
            return self._last[2]
        whole, by_rows = without_ranges(shards, self.problem)
        space = self._new_space(whole, name == "all", name == "halves", by_rows)
        self._last = shards, name, space
        return space

    def _new_space(
        self, shards: Sequence[Shard], everywhere: bool, halves: bool, by_rows: Sequence[Table] = ()
    ) -> SearchSpace:
        """A space with rates of exchanges. Arguments as those of `search_space`.

        It keeps the last cache if that covers the shards: encoding them again would take longer than anything else.
        """
        if self.cache is None or not self.cache.covers(shards):
            self.cache = Options(self.problem, self.model, shards)
        space = search_space(self.cache, shards, everywhere, halves, by_rows)
        if space.cache.runs not in self._rates:
            self._rates[space.cache.runs] = rates_of(self.problem, self.model, space.cache.runs)
        return replace(space, fixed=space.fixed._replace(rates=self._rates[space.cache.runs]))


def _divided_among_runs(space: SearchSpace) -> SearchSpace | None:
    """The space with devices divided among the runs, by what each costs. None if there is one run, or few strips.

    A device launches an op for each of its runs. Fewer launches may be worth exchanges of fewer devices.
    """
    fixed, run_of_strip, host = space.fixed, space.fixed.strips[:, RUN], space.fixed.host
    ms = np.bincount(run_of_strip, fixed.alone[fixed.whole_options(), ADDED_MS])
    # Devices with one or two strips have few launches to save.
    if np.count_nonzero(ms) < 2 or len(run_of_strip) < 3 * len(host):
        return None
    # [D] places of devices in a row: hosts take turns, so that each run has devices on many.
    by_host = np.argsort(host, kind="stable")
    turn = np.arange(len(host)) - np.searchsorted(host[by_host], host[by_host])
    place = np.argsort(by_host[np.lexsort((host[by_host], turn))])
    # [R, 1] where each run's share of the row ends. It has the devices whose middle lies within its share.
    ends = (np.cumsum(ms) * len(host) / ms.sum())[:, None]
    begins = np.insert(ends[:-1], 0, 0.0, axis=0)
    has = (begins <= place + 0.5) & (place + 0.5 < ends)
    # A small share may have no device's middle. Its run shares the device where it begins.
    has |= ~has.any(1, keepdims=True) & (place == np.floor(np.minimum(begins, len(host) - 1)))
    # Strips pinned to devices of other runs stay where they may be.
    anywhere = fixed.allowed if len(fixed.allowed) else np.ones((len(run_of_strip), len(host)), dtype=bool)
    allowed = anywhere & has[run_of_strip]
    allowed |= anywhere & ~allowed.any(1, keepdims=True)
    return replace(space, fixed=fixed._replace(allowed=allowed))


def _ms(state: State) -> float:
    """Cost of the best plan that a state met."""
    return state.value[BEST]


def _first(may_share: np.ndarray, layouts: Sequence[int]) -> np.ndarray:
    """[S] the first of some layouts by which groups may share a strip. -1: none."""
    first = np.full(may_share.shape[1], -1)
    for y in reversed(layouts):
        first[may_share[y]] = y
    return first


def _pairs(pairs: Iterable[tuple[int, int]] = ()) -> np.ndarray:
    """[N, 2] strips, each with the group that shares it, for compiled.share."""
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
