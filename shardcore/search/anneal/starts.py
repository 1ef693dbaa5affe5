"""Plans that annealing starts from: greedy ones of several ways to cut and share tables, or an existing plan.

Shapes: S items, D devices. Items and blocks are defined in step/options.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardcore.core.errors import Infeasible
from shardcore.core.types import Placement, Shard, Table
from shardcore.cost.model import CostModel, first_argmin
from shardcore.search import greedy
from shardcore.search.anneal import compiled
from shardcore.search.anneal.compiled import SearchProblem, State
from shardcore.search.anneal.rates import exchange_cost_rates
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.anneal.search_space import (
    SearchSpace,
    is_large_problem,
    limit_moves,
    merge_row_ranges,
    search_space,
)
from shardcore.search.budget import Meter
from shardcore.search.state.column_parts import ColumnParts
from shardcore.search.state.feasible import find_fitting_plan
from shardcore.search.state.refusal import first_names_text
from shardcore.search.ties import cost_ranks, min_by_cost
from shardcore.step.engine.arrays import (
    ADDED_MS,
    ARRIVED,
    BEST,
    BUSIEST,
    ENTERED,
    FREE,
    GROUP_RUN,
    HALVES,
    HOST_BUSIEST,
    KIND_OF_GROUP,
    OWN,
    RUN,
    SIZE,
    SPEED,
)
from shardcore.step.engine.pointers import pack_record
from shardcore.step.kinds import ShardingKind, shards_by_device
from shardcore.step.memory import usable_bytes
from shardcore.step.options import ShardOptions
from shardcore.step.ways import fixed_placements, row_division

_SPLITS = (np.inf, 1.2, 1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Greedy starts cut tables that cost more than one of these shares of a device's mean load."""
_DIVIDED = (1.0, 0.5, 0.25, 0.1, 0.03)
"""Other starts divide the rows of tables that cost more than one of these shares of a device's mean load."""
_COPIED = tuple(eighths / 8 for eighths in range(9))
"""Shares of the tables that starts copy, where the others have their rows divided."""
_RECUT = 2
"""Costliest tables to which `recut_starts` gives another number of parts."""
_TIGHT, _SMALL = 0.8, (0.3, 0.2, 0.1, 0.05)
"""When memory is tight, further starts cut tables by size.

The first is the share of all memory that counts as tight.
The others are shares of a device's memory, above which tables are cut.
"""
_DEVICES_AN_EVAL = 1 << 14
"""Devices that a greedy plan tries for its items, for each evaluation that it counts as. Few count as none."""


@dataclass
class AnnealingStart:
    """Starting plan of annealing chains, with its search space.

    maker: what made it, and makes others of its problem.
    fixed: the subset of the space in which it is improved at first.
    ms: cost by the model itself of the cheapest plan that it led to.
    """

    maker: StartMaker
    space: SearchSpace
    state: State
    fixed: SearchProblem
    ms: float = np.inf

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Start's plan as placements of whole tables."""
        return self.maker.parts.with_whole_tables(self.space.placements(self.state.held, self.state.group))

    @property
    def is_runnable(self) -> bool:
        """True if TorchRec can run the start's plan."""
        parts = self.maker.parts
        return not parts.tables or parts.are_runnable(
            self.space.placements(self.state.held, self.state.group)
        )

    @property
    def has_columns_only(self) -> bool:
        """True if the start's search space has only whole tables and tables cut by columns."""
        return not self.space.fixed.may_share.any()


class ItemCuts(NamedTuple):
    """Number of column shards of each item, and the items that device groups share, before placement.

    n: [S] number of equal shards by columns. 0 for shared items.
    shared: [N, 2] shared items, each with the number of its group.
    """

    n: np.ndarray
    shared: np.ndarray


class StartMaker:
    """Makes starts in the spaces of a problem. Encodings of one start are kept for the next.

    parts: the problem, with some tables in parts or none.
    """

    def __init__(self, parts: ColumnParts, model: CostModel, meter: Meter) -> None:
        self.parts, self.problem, self.model, self.meter = parts, parts.problem, model, meter
        self.head = model.compiled_op_ms().head
        self.cache: ShardOptions | None = None  # of the last shards
        self._rates: dict[tuple[ShardingKind, ...], np.ndarray] = {}  # of exchanges, by runs
        self._greedy_s: float | None = None  # seconds of the longest greedy plan so far, if there is one
        self._last: tuple[Sequence[Shard], str, SearchSpace] | None = (
            None  # the last space, and what it is of
        )

    # --- starts by columns ---

    def starts_by_columns(self, name: str, shards: Sequence[Shard]) -> Iterator[AnnealingStart]:
        """Greedy plans with tables whole or cut by columns. At least one.

        name: of the space (sharder.SPACES).

        With tight memory, cuts chosen for cost may leave gaps that no shard fits. So some starts cut by size.

        Raises Infeasible if no plan is found.
        """
        space, any_fits = self._space_of_shards(shards, name), False
        # Each greedy plan of a large problem takes long, so it gets two.
        shares = _SPLITS[2:5:2] if is_large_problem(space.cache) else _SPLITS
        series = [
            [ItemCuts(self._shard_counts_by_cost(space, share), _item_group_pairs()) for share in shares]
        ]
        tight = space.whole_item_bytes.sum() > _TIGHT * sum(usable_bytes(self.problem))
        if tight and not is_large_problem(space.cache):
            series.append(
                [ItemCuts(self._shard_counts_by_size(space, share), _item_group_pairs()) for share in _SMALL]
            )
        for cuts in series:
            if start := self._cheapest_start(space, cuts):
                any_fits = True
                yield start
        if (divided := _divide_devices_among_runs(space, sum(usable_bytes(self.problem)))) and (
            start := self._cheapest_start(divided, [cut for cuts in series for cut in cuts[::3]])
        ):
            yield AnnealingStart(
                self, space, start.state, space.problem_with_moves_among_groups(start.state.group)
            )
        # With unequal hosts, exchanges are far from linear.
        if len(set(map(len, self.problem.topology.devices_by_host))) > 1 and self._has_time_for_greedy_plan():
            with suppress(Infeasible):
                # The greedy orders do not read the linear rates, which mislead the plans above here.
                plans = [order(self.problem, self.model) for order in greedy.ORDERS.values()]
                best = min_by_cost(plans, lambda p: p.provenance["predicted_ms"])
                any_fits = True
                yield self.start_from_plan(best.placements, name)
        # A packing counts memory only, but it fits.
        if not any_fits:
            yield self.start_from_plan(find_fitting_plan(self.problem).placements, name)

    # --- starts with shared tables ---

    def starts_with_shared_tables(self, shards: Sequence[Shard]) -> Iterator[AnnealingStart]:
        """Greedy plans of the whole space, with tables shared by groups of devices. Possibly none fits."""
        space = self._space_of_shards(shards, "all")
        may_share, shared_kinds, runs = (
            space.fixed.may_share,
            space.cache.shared_kinds,
            space.fixed.items[:, RUN],
        )
        if not may_share.any():
            return
        # [S] the shared kind that copies an item to all devices.
        copied = _first_shared_kinds(
            may_share, [y for y, shared_kind in enumerate(shared_kinds) if shared_kind.local_batch]
        )
        dividing: dict[str, list[int]] = {}
        for y, shared_kind in enumerate(shared_kinds):
            if shared_kind.divides_rows:
                dividing.setdefault(shared_kind.name, []).append(y)
        series = list[Iterable[np.ndarray]]()
        # No op has whole rows of all tables, or of those of a run, and no exchange is for these.
        for run in (None, *(np.unique(runs).tolist() if len(np.unique(runs)) > 1 else ())):
            items = runs == run if run is not None else runs >= 0
            divided = [_first_shared_kinds(may_share & items, several) for several in dividing.values()]
            others = [np.where(items & (of_items < 0), copied, of_items) for of_items in divided]
            series.append(self._shared_kinds_with_more_copies(space, np.where(items, copied, -1), others))
        series.append(self._shared_kinds_with_more_copies(space, copied, [np.full(len(copied), -1)]))
        for ways in (*series, *self._shared_kinds_dividing_costly_items(space)):
            # Ways that share nothing are plans by columns, which come elsewhere.
            each = {way.tobytes(): way for way in ways if (way >= 0).any()}.values()
            if start := self._cheapest_start(space, [self._cut_of_shared_kinds(space, way) for way in each]):
                yield start

    def _shared_kinds_with_more_copies(
        self, space: SearchSpace, copied: np.ndarray, others: Iterable[np.ndarray]
    ) -> Iterator[np.ndarray]:
        """[S] shared kinds of items, -1 by columns: step by step more of the smallest items are copied to all
        devices.
        """
        # Items that may not be copied come last, beyond n_copies.
        size = np.where(copied >= 0, space.shared_item_bytes[copied, np.arange(len(copied))], np.inf)
        smallest, n_copies = np.argsort(size, kind="stable"), int((copied >= 0).sum())
        # In large problems only the ends: none copied, and all that may be.
        shares = _COPIED[:: len(_COPIED) - 1] if is_large_problem(space.cache) else _COPIED
        for of_others in others:
            for share in shares:
                copies, kind_of = smallest[: int(share * n_copies)], of_others.copy()
                # The smallest are copied even if their rows might be divided.
                kind_of[copies] = copied[copies]
                yield kind_of

    def _shared_kinds_dividing_costly_items(self, space: SearchSpace) -> Iterator[list[np.ndarray]]:
        """For each shared kind that divides rows: [S] shared kinds of items, with the shared kind for costly ones, else
        -1.
        """
        fixed = space.fixed
        # With the exchange: of a sequence it costs more than the op.
        step_ms = self._single_option_step_ms(fixed, fixed.option_of_each_uncut_item(), fixed.items[:, RUN])
        mean_ms = step_ms.sum() / fixed.devices[:, SPEED].sum()
        for y in (y for y, shared_kind in enumerate(space.cache.shared_kinds) if shared_kind.divides_rows):
            yield [np.where(fixed.may_share[y] & (step_ms > share * mean_ms), y, -1) for share in _DIVIDED]

    # --- greedy plans ---

    def _cheapest_start(self, space: SearchSpace, cuts: Sequence[ItemCuts]) -> AnnealingStart | None:
        """Cheapest greedy plan of several cuts. If none fits, of the same cuts with smaller shards, or None."""
        plans = self._greedy_plans(space, cuts)
        # Cuts by cost may leave gaps on devices that no shard fits. Smaller shards fill them.
        if not plans and not is_large_problem(space.cache):
            smaller = (
                ItemCuts(self._shard_counts_by_size(space, share, cut.n), cut.shared)
                for cut in cuts
                for share in _SMALL
            )
            plans = self._greedy_plans(space, smaller)
        if not plans:
            return None
        best = min_by_cost(plans, _best_ms)
        return AnnealingStart(self, space, best, space.problem_with_moves_among_groups(best.group))

    def _greedy_plans(self, space: SearchSpace, cuts: Iterable[ItemCuts]) -> list[State]:
        """Greedy plans of all cuts for which a plan fits, as long as there is time."""
        plans = (self._greedy_plan(space, cut) for cut in cuts if self._has_time_for_greedy_plan())
        return [state for state in plans if state is not None]

    def _greedy_plan(self, space: SearchSpace, cut: ItemCuts) -> State | None:
        """Greedy plan of one cut: items placed by falling cost, or by falling size if that fails. None if neither
        fits.

        Cost is that of the op, and that of the op with its exchange: the cheaper plan of both.
        Items that are always shared are among the shared ones.
        """
        fixed, shared, plans = space.fixed, space.with_divided_items(cut.shared), list[State]()
        # Item and blocks of equal shards [N, 2].
        items = np.repeat(np.arange(len(cut.n)), cut.n)
        # Shard i of n has blocks from size * i // n on, so shards differ by a block at most.
        i, n = np.arange(len(items)) - np.repeat(np.cumsum(cut.n) - cut.n, cut.n), cut.n[items]
        size = fixed.items[items, SIZE]
        blocks = size * (i + 1) // n - size * i // n
        shards = np.stack([items, blocks], 1).astype(np.int64)
        options = fixed.shard[items, blocks]
        costs = [self._single_op_ms(fixed, options)]
        if not is_large_problem(space.cache):
            costs.append(self._single_option_step_ms(fixed, options, fixed.items[items, RUN]))
        # Packed once, for it takes longer than what is compiled here.
        problem = pack_record(fixed)
        for i, key in enumerate([*costs, space.cache.peak_bytes[options]]):
            # By size only if no order by cost fits, as that order ignores the load.
            if plans and (i == len(costs) or not self._has_time_for_greedy_plan()):
                break
            state, before_s = self._empty_state(space), self.meter.elapsed_s()
            words = pack_record(state)
            # Shared items first: greedy balances single devices around them.
            compiled.share_items(words, shared)
            # Greedy starts from what all devices hold, and groups share.
            compiled.refresh_state(self.head, problem, words)
            # Items with fewest devices go first.
            order = np.ascontiguousarray(
                shards[np.lexsort((cost_ranks(-key), space.allowed_device_counts[items]))]
            )
            self.meter.evals += (len(shards) + len(shared)) * len(fixed.devices) // _DEVICES_AN_EVAL
            if compiled.place_greedily(self.head, problem, words, order):
                compiled.refresh_state(self.head, problem, words)
                plans.append(state)
                self._greedy_s = max(self._greedy_s or 0.0, self.meter.elapsed_s() - before_s)
        return min_by_cost(plans, _best_ms) if plans else None

    def _has_time_for_greedy_plan(self) -> bool:
        """Tell if one more greedy plan would end in the first quarter of the seconds, and evaluations are left.

        There is always one plan.
        """
        return self._greedy_s is None or (
            self.meter.has_budget_left()
            and self.meter.has_time(3 * self.meter.elapsed_s() + 4 * self._greedy_s)
        )

    def _empty_state(self, space: SearchSpace) -> State:
        """Search state with nothing placed."""
        return compiled.empty_state(space.fixed, len(self.problem.topology.hosts))

    def recut_starts(self, start: AnnealingStart) -> list[AnnealingStart]:
        """Greedy plans with tables cut into as many parts as in a start's plan, but a costly table into one more or one
        fewer.

        Parts that meet on a device are one, so that a plan may have fewer.

        Annealing seldom gets there: a new part costs about as much as a wide one, however narrow it begins.
        """
        space, fixed, group = start.space, start.space.fixed, start.state.group
        # Few plans, each made in two orders: they take a tenth of the seconds that are left, at most.
        if (
            fixed.cut == HALVES
            or is_large_problem(space.cache)
            or not self.meter.has_time(80 * _RECUT * (self._greedy_s or 0.0))
        ):
            return []
        n = np.where(group < 0, (start.state.held > 0).sum(1), 0)
        most = np.minimum(len(fixed.devices), fixed.items[:, SIZE])
        costliest = np.argsort(
            cost_ranks(-self._single_op_ms(fixed, fixed.option_of_each_uncut_item())), kind="stable"
        )
        pairs = _item_group_pairs((s, group[s]) for s in np.flatnonzero(group >= 0).tolist())
        cuts = list[ItemCuts]()
        for s in costliest[(fixed.may_split & (n > 0))[costliest]][:_RECUT]:
            for parts in (n[s] + 1, n[s] - 1):
                if space.cache.min_shards[s] <= parts <= most[s]:
                    cuts.append(ItemCuts(np.where(np.arange(len(n)) == s, parts, n), pairs))
        plans = [self._greedy_plan(space, cut) for cut in cuts if self.meter.has_budget_left()]
        return [
            AnnealingStart(self, space, plan, fixed, _best_ms(plan)) for plan in plans if plan is not None
        ]

    # --- cuts ---

    def _cut_of_shared_kinds(self, space: SearchSpace, kind_of: np.ndarray) -> ItemCuts:
        """Cut in which groups of shared kinds [S] share items; items of shared kind -1 are cut if they cost more than
        the mean load.
        """
        return ItemCuts(
            self._shard_counts_by_cost(space, 1.0, kind_of >= 0),
            np.concatenate(
                [
                    self._assign_groups(space, np.flatnonzero(kind_of == y), y)
                    for y in np.unique(kind_of)
                    if y >= 0
                ]
            ),
        )

    def _assign_groups(self, space: SearchSpace, items: np.ndarray, shared_kind: int) -> np.ndarray:
        """[N, 2] items, each with a device group of a shared kind: the least loaded group that has memory for the item.

        The costliest go first, or the largest if that fails.
        """
        fixed, groups = space.fixed, np.flatnonzero(space.fixed.groups[:, KIND_OF_GROUP] == shared_kind)
        # Cost of an item in a group: its op, and the exchange that its bytes set.
        options, rates = (
            fixed.options_of_shared_kind(shared_kind, items),
            fixed.rates[fixed.groups[groups[0], GROUP_RUN]],
        )
        # The devices of a group on a host are as many as the group has.
        each_ms = rates[OWN] + rates[BUSIEST] + rates[HOST_BUSIEST] * len(space.cache.groups[groups[0]][1])
        cost = self._single_op_ms(fixed, options) + each_ms * fixed.vectors[options, ENTERED]
        n_bytes = space.shared_item_bytes[shared_kind][items]
        # An item takes as much on all devices of a group, so the tightest device decides.
        free = np.array([min(fixed.devices[list(space.cache.groups[g][1]), FREE]) for g in groups])
        chosen = np.zeros(len(items), dtype=np.int64)
        for order in (np.argsort(cost_ranks(-cost), kind="stable"), np.argsort(-n_bytes, kind="stable")):
            load, room, chosen = np.zeros(len(groups)), free.copy(), np.zeros_like(chosen)
            # A single group has them all.
            for i in order if len(groups) > 1 else ():
                fits = room >= n_bytes[i]
                # Where it fits nowhere, the group with most room is nearest to it.
                chosen[i] = first_argmin(np.where(fits, load, np.inf)) if fits.any() else room.argmax()
                load[chosen[i]] += cost[i]
                room[chosen[i]] -= n_bytes[i]
            # By size only if the order by cost does not fit.
            if (room >= 0).all():
                break
        return np.stack([items, groups[chosen]], 1).astype(np.int64)

    def _shard_counts_by_size(
        self, space: SearchSpace, fraction: float, least: np.ndarray | None = None
    ) -> np.ndarray:
        """[S] number of shards of each item such that no shard takes more than a share of a device's mean memory.

        least: [S] numbers that are kept if they are larger, or 0.

        0 for items that are always shared.
        """
        # At least a byte: free memory may be 0, and is divided by.
        fixed, most_bytes = space.fixed, max(1, int(fraction * space.fixed.devices[:, FREE].mean()))
        wanted = -(-space.whole_item_bytes // most_bytes)
        # No fewer shards than memory forces, and none narrower than a block.
        n = np.where(fixed.may_split, np.clip(wanted, space.cache.min_shards, fixed.items[:, SIZE]), 1)
        n[space.divided] = 0
        return n if least is None else np.where(least > 0, np.maximum(n, least), 0)

    def _shard_counts_by_cost(
        self, space: SearchSpace, fraction: float, shared: np.ndarray | None = None
    ) -> np.ndarray:
        """[S] number of column shards of each item such that no shard costs more than a share of a device's mean load.

        0 for the shared items, and for those that always are.
        """
        fixed = space.fixed
        op_ms = self._single_op_ms(fixed, fixed.option_of_each_uncut_item())
        n = np.ones(len(op_ms), dtype=np.int64)
        n[space.divided] = 0
        if shared is not None:
            n[shared] = 0
        # Only items by columns count: the shared ones are not in these devices' load.
        limit = fraction * max(op_ms[n > 0].sum() / fixed.devices[:, SPEED].sum(), 1e-300)
        # No more shards than devices: two on one device are one shard.
        most = np.where(fixed.may_split, np.minimum(len(fixed.devices), fixed.items[:, SIZE]), 1)
        parts = np.ceil(np.minimum(op_ms / limit, most)).astype(np.int64)
        return n * np.maximum(parts, space.cache.min_shards)

    def _single_op_ms(self, fixed: SearchProblem, options: np.ndarray) -> np.ndarray:
        """[N] ms of fused ops that each run one option of an item, at speed 1."""
        return np.asarray(self.model.op_ms(fixed.option_encodings(options)))

    def _single_option_step_ms(
        self, fixed: SearchProblem, options: np.ndarray, runs: np.ndarray
    ) -> np.ndarray:
        """[N] ms of steps with one option of an item each: its op, and the exchange of its outputs and ids."""
        each_ms, n_runs = fixed.rates[:, OWN] + fixed.rates[:, BUSIEST], len(fixed.runs)
        outputs_ms = each_ms[runs] * fixed.vectors[options, ENTERED]
        ids_ms = each_ms[n_runs + runs] * fixed.vectors[options, ARRIVED]
        return self._single_op_ms(fixed, options) + outputs_ms + ids_ms

    # --- starts from a plan ---

    def start_from_plan(self, placements: Sequence[Placement], name: str) -> AnnealingStart:
        """Start from a given plan, in a space of the plan's shards.

        name: of the space (sharder.SPACES).
        """
        fixed = fixed_placements(self.problem)
        left = [p for p in placements if p not in fixed]
        # Ordered rows that are divided stay shards like others (search_space.merge_row_ranges).
        # A placement on one device has shards by columns. On several it is shared, or has row ranges.
        shared = [
            p
            for p in left
            if len(p.devices) > 1
            and not (p.shard.table.ordered and p == row_division(p.shard.table, self.problem))
        ]
        placed = [(s, d) for p in left if p not in shared for d, s in shards_by_device(p)]
        shards = [*(s for s, _ in placed), *(p.shard for p in shared)]
        # The plan's own shared tables need groups in its space, even if none of them may change.
        space = self._new_space(shards, name == "all" or bool(shared), name == "halves")
        start = self._start_with_placements(
            space,
            placed,
            _item_group_pairs(space.item_and_group(p.kind, p.devices, p.shard.table) for p in shared),
        )
        if name != "all":
            start.space = replace(space, fixed=space.problem_without_sharing_moves)
            start.fixed = start.space.fixed
        return start

    def start_from_reshard(self, reshard: Reshard, name: str) -> AnnealingStart:
        """Start from an existing plan under limits on moves. Tables missing in the plan are placed greedily."""
        old = reshard.tables_in_old_plan(self.problem)
        # Shared and new tables come as whole items.
        whole = [*(t for tables in old.shared.values() for t in tables), *old.new]
        shards = [*(s for s, _ in old.placed), *map(Shard.whole, whole)]
        space = self._new_space(shards, True, name == "halves")
        pairs = (space.item_and_group(*group, t) for group, tables in old.shared.items() for t in tables)
        start = self._start_with_placements(space, old.placed, _item_group_pairs(pairs))
        # Before new tables come: what moves is counted against the plan as it was.
        held = start.state.held.copy()
        todo = space.shard_keys([Shard.whole(t) for t in old.new])
        if not compiled.place_greedily(self.head, space.fixed, start.state, todo):
            raise Infeasible(
                f"problem {self.problem.name!r}: the plan to start from leaves no device room "
                "for tables that it lacks, or has where they may not be "
                f"({first_names_text(t.name for t in old.new)}), uncut; plan afresh, or with more memory"
            )
        compiled.refresh_state(self.head, space.fixed, start.state)
        start.space = limit_moves(space, held, reshard, old.new)
        if name != "all":
            start.space = replace(start.space, fixed=start.space.problem_without_sharing_moves)
        # At first, tables stay in their groups.
        start.fixed = start.space.problem_without_sharing_moves
        return start

    def _start_with_placements(
        self, space: SearchSpace, shards: Sequence[tuple[Shard, int]], shared: np.ndarray
    ) -> AnnealingStart:
        """Start with shards on given devices, and items shared by groups. A bundle's tables are placed together."""
        state = self._empty_state(space)
        compiled.share_items(state, shared)
        # Keys of a bundle need all its tables, and those are on one device.
        by_device: dict[int, list[Shard]] = {}
        for shard, device in shards:
            by_device.setdefault(device, []).append(shard)
        for device, on_it in by_device.items():
            compiled.place_shards(space.fixed, state, np.insert(space.shard_keys(on_it), 1, device, axis=1))
        compiled.refresh_state(self.head, space.fixed, state)
        return AnnealingStart(self, space, state, space.fixed)

    def _space_of_shards(self, shards: Sequence[Shard], name: str) -> SearchSpace:
        """Named search space of shards. Row ranges become whole tables, shared by all devices, where possible."""
        # Making one takes long in large problems.
        if self._last and self._last[0] is shards and self._last[1] == name:
            return self._last[2]
        whole, by_rows = merge_row_ranges(shards, self.problem)
        space = self._new_space(whole, name == "all", name == "halves", by_rows)
        self._last = shards, name, space
        return space

    def _new_space(
        self, shards: Sequence[Shard], everywhere: bool, halves: bool, by_rows: Sequence[Table] = ()
    ) -> SearchSpace:
        """New search space with rates of exchanges. Arguments as in `search_space`.

        It keeps the last cache if that covers the shards: encoding them again would take longer than anything else.
        """
        if self.cache is None or not self.cache.covers_shards(shards):
            self.cache = ShardOptions(self.problem, self.model, shards)
        space = search_space(self.cache, shards, everywhere, halves, by_rows)
        if space.cache.runs not in self._rates:
            self._rates[space.cache.runs] = exchange_cost_rates(self.problem, self.model, space.cache.runs)
        return replace(space, fixed=space.fixed._replace(rates=self._rates[space.cache.runs]))


def _divide_devices_among_runs(space: SearchSpace, n_bytes: int) -> SearchSpace | None:
    """Search space in which ops of each shared kind get devices in proportion to their cost, and the memory that they
    need. None for a single shared kind, or too few shards.

    A device launches an op for each of its runs. Fewer launches may be worth exchanges of fewer devices.

    n_bytes: that all devices may use.
    """
    fixed, run_of_item, host = space.fixed, space.fixed.items[:, RUN], space.fixed.host
    ms = np.bincount(run_of_item, fixed.alone[fixed.option_of_each_uncut_item(), ADDED_MS])
    # Devices with one item have few launches to save.
    if np.count_nonzero(ms) < 2 or len(run_of_item) < 2 * len(host):
        return None
    # [D] places of devices in a row: hosts take turns, so that each run has devices on many.
    by_host = np.argsort(host, kind="stable")
    turn = np.arange(len(host)) - np.searchsorted(host[by_host], host[by_host])
    place = np.argsort(by_host[np.lexsort((host[by_host], turn))])
    # [R] devices that each run needs for its memory, whole ones beyond the first. Cost decides on the others.
    need = np.bincount(run_of_item, space.whole_item_bytes) * len(host) / n_bytes
    need = np.where(need > 1, np.ceil(need), need)
    wish = np.maximum(ms * len(host) / ms.sum() - need, 1e-9)
    share = need + max(0.0, len(host) - need.sum()) * wish / wish.sum()
    # [R, 1] where each run's share of the row ends. It has the devices whose middle lies within its share.
    ends = (np.cumsum(share) * (len(host) / share.sum()))[:, None]
    begins = np.insert(ends[:-1], 0, 0.0, axis=0)
    has = (begins <= place + 0.5) & (place + 0.5 < ends)
    # A small share may have no device's middle. Its run shares the device where it begins.
    has |= ~has.any(1, keepdims=True) & (place == np.floor(np.minimum(begins, len(host) - 1)))
    # Items pinned to devices of other runs stay where they may be.
    anywhere = fixed.allowed if len(fixed.allowed) else np.ones((len(run_of_item), len(host)), dtype=bool)
    allowed = anywhere & has[run_of_item]
    allowed |= anywhere & ~allowed.any(1, keepdims=True)
    return replace(space, fixed=fixed._replace(allowed=allowed))


def _best_ms(state: State) -> float:
    """Cost of the best plan met by a search state."""
    return state.value[BEST]


def _first_shared_kinds(may_share: np.ndarray, shared_kinds: Sequence[int]) -> np.ndarray:
    """[S] first of several shared kinds by which groups may share an item; -1 for none."""
    first = np.full(may_share.shape[1], -1)
    for y in reversed(shared_kinds):
        first[may_share[y]] = y
    return first


def _item_group_pairs(pairs: Iterable[tuple[int, int]] = ()) -> np.ndarray:
    """[N, 2] array of pairs of an item and the group that shares the item, for compiled.share."""
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
