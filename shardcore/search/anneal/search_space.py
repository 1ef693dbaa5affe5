"""SearchSpace: what annealing may do with a problem's tables, as arrays.

A strip's columns are divided over devices, or a group of devices shares the whole strip.
The latter needs a kind whose groups have several devices: all of them, or those of a host.

Strips and units are defined in search/state/shard_cost_cache.py.

Shapes: S strips, U units of the largest strip, R shards of the cache, D devices, F features.
K kinds of what single devices hold (cache.kinds). Y layouts of what groups share, G groups.
X exchanges: of outputs of each kind, then of ids of each run (arrays.SearchProblem).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.progress import tick
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.cost.model import CostModel, first_least, is_less
from shardcore.search.anneal.compiled import SearchProblem
from shardcore.search.anneal.memory_columns import Columns, batch_memory, fixed_memory, shards_memory
from shardcore.search.anneal.rates import exchange_rates, id_rates, shared_rates
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.state.shard_cost_cache import ShardCostCache, encoded
from shardcore.search.state.shards import placed, required_division
from shardcore.search.ties import ranks
from shardcore.step.kinds import Group, Layout, even_share, run_of, runs_of
from shardcore.step.memory import held_bytes
from shardcore.step.memory_account import StageCoefficients
from shardcore.step.op_limits import may_bind
from shardcore.step.output_bytes import output_bytes

LARGE = 1 << 19
"""Strips × devices of a large problem."""
_WORTH = 0.01
"""In a large problem, strips below this share of a device's mean cost and memory are not cut."""


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """The moves that annealing may make in a problem.

    cache: the problem's tables, and their strips.
    fixed: what stays the same during a search, as arrays for the compiled code.
    shared_bytes: [Y, S] estimated memory of a strip on each device of a group.
    groups: [G] a kind and its devices, which may share whole tables.
    divided: [N] strips whose rows are always divided over all devices.
    runs: [X - K] runs that ids travel for, each with its exchange: of kinds, then of groups.
    """

    cache: ShardCostCache
    fixed: SearchProblem
    shared_bytes: np.ndarray
    groups: tuple[tuple[Layout, Group], ...]
    divided: np.ndarray
    runs: tuple[Layout, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """[Y] layouts of the groups."""
        return tuple(dict.fromkeys(layout for layout, _ in self.groups))

    def pair(self, kind: str, devices: Group, table: Table) -> tuple[int, int]:
        """A table's strip, and the number of the group that shares it by a kind."""
        return self.cache.strip_by_name[table.name], self.groups.index((run_of(kind, table), devices))

    def sharing(self, pairs: np.ndarray) -> np.ndarray:
        """[N, 2] strips that groups share, and the divided strips that are not among them."""
        # A divided strip that `pairs` already give a group keeps that one.
        tables = [self.cache.table(s) for s in self.divided if s not in pairs[:, 0]]
        ways = [required_division(table, self.cache.problem) for table in tables]
        always = [self.pair(way.kind, way.devices, way.shard.table) for way in ways]
        return np.concatenate([pairs, np.array(always, dtype=np.int64).reshape(-1, 2)])

    @property
    def as_it_is(self) -> SearchProblem:
        """The space in which the same tables stay shared by the same groups."""
        return self.fixed._replace(may_share=np.zeros_like(self.fixed.may_share))

    def among_groups(self, group: np.ndarray) -> SearchProblem:
        """The space in which the same tables stay shared, but may move to another group of their layout.

        group: [S] the group that shares a strip, -1 for none.
        """
        fixed, may = self.fixed, np.zeros_like(self.fixed.may_share)
        shared = np.flatnonzero(group >= 0)
        y = fixed.group_layout[group[shared]]
        # A layout with a single group has no other that could take a table.
        several = np.bincount(fixed.group_layout, minlength=len(may)) > 1
        may[y, shared] = fixed.may_share[y, shared] & several[y]
        return fixed._replace(may_share=may)

    @property
    def whole_bytes(self) -> np.ndarray:
        """[S] estimated bytes of each strip uncut."""
        return self.cache.bytes[self.fixed.shard[np.arange(len(self.fixed.size)), self.fixed.size]]

    @property
    def choice(self) -> np.ndarray:
        """[S] number of devices to choose from. 0 everywhere if nothing is pinned."""
        return self.fixed.allowed.sum(1) if len(self.fixed.allowed) else np.zeros(len(self.fixed.size))

    def keys(self, shards: Sequence[Shard]) -> np.ndarray:
        """[N, 2] strips and units of shards. Of a bundle, all tables or none have to be among them."""
        return np.array(self.cache.keys(shards), dtype=np.int64).reshape(-1, 2)

    def placements(self, held: np.ndarray, group: np.ndarray) -> list[Placement]:
        """Placements of held [S, D] units, and of the strips that groups share, group [S]."""
        strips, devices = np.nonzero(held)
        keys = list(zip(strips.tolist(), held[strips, devices].tolist(), strict=True))
        placements = placed(self.cache.bundles(keys), devices.tolist(), self.cache.problem)
        for s in np.flatnonzero(group >= 0).tolist():
            layout, on = self.groups[group[s]]
            placements.append(Placement(layout.name, Shard.whole(self.cache.table(s)), on))
        return placements


def _runs(layout: Layout, table: Table) -> bool:
    """Tell if a layout is of the table's collection, and runs its kernel."""
    same_op = (layout.sequence, layout.collection) == (table.sequence, table.collection)
    return same_op and (layout.caches or not table.in_host_memory)


def without_ranges(shards: Sequence[Shard], problem: Problem) -> tuple[list[Shard], list[Table]]:
    """The shards with divided tables made whole, and these tables.

    All row ranges run in one op. So this is not done if any such table is pinned, or its rows are ordered.
    The row ranges then stay shards like others.
    """
    tables = list(dict.fromkeys(s.table for s in shards if not s.full_rows))
    if any(t.ordered or t.name in problem.pinned for t in tables):
        return list(shards), []
    return [*(s for s in shards if s.full_rows), *map(Shard.whole, tables)], tables


def search_space(
    cache: ShardCostCache,
    shards: Sequence[Shard],
    everywhere: bool,
    halves: bool = False,
    by_rows: Sequence[Table] = (),
) -> SearchSpace:
    """The space of `shards`, which have to be all strips of the cache.

    everywhere: whether groups may share whole tables.
    halves: whether columns may only be halved.
    by_rows: tables whose rows are always divided over all devices.
    """
    problem, model = cache.problem, cache.model
    all_strips = np.arange(len(cache))
    # Asked for two units: the search itself checks that a shard has more than one.
    may_split = np.array([cache.may_split((s, 2)) for s in range(len(cache))], dtype=bool)
    if is_large(cache):
        may_split &= _worth_cutting(cache, shards)
    # Every number of units of every strip, [sum of sizes].
    strips = np.repeat(all_strips, cache.size)
    units = np.concatenate([np.arange(1, n + 1) for n in cache.size])
    # Encode only the shards that a search can reach: encoding takes most of the time.
    used = may_split[strips] | cache.is_range[strips] | (units == cache.size[strips])
    cache.need(strips[used], units[used])
    # [S, U + 1]. -1 for shards that no move makes.
    number_of = cache.numbers(all_strips[:, None], np.arange(cache.size.max() + 1))
    # A group of one device holds what single devices hold anyway.
    groups = tuple(
        (layout, group)
        for layout in runs_of(problem.tables)
        for group in layout.groups(problem.topology)
        if len(group) > 1
    )
    layouts = tuple(dict.fromkeys(layout for layout, _ in groups))
    # Kinds come first: runs 0 to K - 1 are theirs, as `ids_by` has it.
    of_strips = (run for parts in cache.parts for run, _ in parts)
    id_runs = tuple(dict.fromkeys((*cache.kinds, *of_strips, *layouts)))
    # In the order of X: outputs of each kind, then ids of each run.
    exchanges = [exchange_rates(problem, model, layout) for layout in cache.kinds]
    exchanges += [id_rates(problem, model, layout) for layout in id_runs]
    coefficients = StageCoefficients.of(id_runs, problem)
    # Rates and coefficients may have taken long: report, or end if the time is over.
    tick()
    shared, parts = _group_fields(cache, groups, everywhere, {t.name for t in by_rows}, id_runs)
    columns = Columns(problem, id_runs, cache.caches, may_bind(problem))
    memory = shards_memory(cache, columns, layouts, parts)
    # Of each device but the last, which has no more.
    shared_sums = memory["sums"][len(cache.made) :].reshape(2, len(layouts), len(cache), 6)[0]
    fixed = SearchProblem(
        shard=np.ascontiguousarray(number_of, dtype=np.int32),
        codes=np.ascontiguousarray(cache.codes),
        added_ms=added(cache.codes, model),
        outputs=cache.outputs,
        ids=cache.id_bytes,
        ids_by=np.arange(len(cache.kinds)) + len(cache.kinds),
        kind=cache.kind.astype(np.int64),
        size=cache.size.astype(np.int64),
        # One number for a table: its row ranges are several strips, but move as one table.
        table=np.array([cache.strip_by_name[cache.table(s).name] for s in range(len(cache))]),
        may_split=may_split,
        # No rows if nothing is restricted: the compiled search then skips the check.
        allowed=cache.allowed[:0] if cache.allowed.all() else cache.allowed,
        # The local batch comes off in the search, as it changes with the plan.
        free=np.array(held_bytes(problem), float),
        speed=cache.speed,
        host=np.array([problem.topology.hosts.index(d.host) for d in problem.topology.devices], np.int64),
        **{name: np.array([rates[name] for rates in exchanges]) for name in exchanges[0]},
        hides_ids_ms=problem.job.hides_ids_ms,
        dense_ms=problem.job.dense_ms,
        **shared,
        shared_ids=shared_sums[..., 1].astype(np.int64),
        **memory,
        **batch_memory(cache, groups, columns),
        **fixed_memory(cache, groups, columns),
        stage_sums=coefficients.sums,
        stage_batch=coefficients.batch,
        stage_phases=coefficients.phases,
        sums_most=coefficients.most,
        # No limits of re-sharding: `keeping` puts them in.
        kept=np.zeros((0, len(problem.topology)), np.int16),
        weight=np.zeros(0, np.int64),
        joint=np.zeros(0, np.int64),
        most_moved=np.zeros(2, np.int64),
        parameters=model.compiled().parameters,
        fetched=model.compiled().fetched if problem.job.fetches_ahead else np.zeros(0),
        halves=halves,
    )
    # As cache.bytes: resident, and the largest multiple of what arrived, entered, and of lookups.
    multiples = coefficients.most[[id_runs.index(layout) for layout in layouts]].reshape(-1, 1, 2)
    shared_bytes = shared_sums[..., 0] + fixed.moments[0, -1, 2] * shared_sums[..., 1]
    shared_bytes += (shared_sums[..., 2:4] * multiples).sum(-1)
    divided = np.array([cache.strip_by_name[t.name] for t in by_rows], dtype=np.int64)
    return SearchSpace(cache, fixed, shared_bytes.astype(np.int64), groups, divided, id_runs)


def is_large(cache: ShardCostCache) -> bool:
    """Tell if the problem has so many shards that the search has to be selective."""
    return len(cache) * len(cache.speed) > LARGE


def _worth_cutting(cache: ShardCostCache, shards: Sequence[Shard]) -> np.ndarray:
    """[S] bool: strips that `shards` cut already, or that are costly or large enough to cut.

    All others stay whole and fill gaps. Their shards would take most of the time and memory.
    """
    n, strips = len(cache.speed), np.arange(len(cache))
    cache.need(strips, cache.size)
    whole = cache.numbers(strips, cache.size)
    added_ms, n_bytes = added(cache.codes[whole], cache.model), cache.bytes[whole].astype(float)
    # Reserved bytes may leave devices less than nothing.
    least_bytes = _WORTH * max(0.0, np.mean(held_bytes(cache.problem)))
    # The mean cost of a device is an n-th of the sum.
    worth = (added_ms * n > _WORTH * added_ms.sum()) | (n_bytes > least_bytes)
    # What memory forces to be cut stays so, however cheap it is.
    cut = np.array([s for s, units in cache.keys(shards) if units < cache.size[s]], dtype=np.int64)
    worth[cut] = True
    return worth


def added(codes: np.ndarray, model: CostModel) -> np.ndarray:
    """[N] ms that shards add to an op without its launch, from codes [N, F]."""
    # The second copy of a shard costs no launch.
    return np.maximum(0.0, np.asarray(model.head(2 * codes)) - model.head(codes))


def keeping(space: SearchSpace, held: np.ndarray, reshard: Reshard, new: Sequence[Table]) -> SearchSpace:
    """The space in which only as much may move from held [S, D] as `reshard` allows.

    The `new` tables may go anywhere. Row ranges stay: TorchRec runs them only on all devices.
    """
    free, cache, limits = {t.name for t in new}, space.cache, {}
    if reshard.limited:
        # No limit is a limit that no plan reaches.
        most = [np.iinfo(np.int64).max if x is None else x for x in (reshard.tables, reshard.bytes)]
        units = [cache.bundles([(s, 1)])[0] for s in range(len(cache))]
        # [S] bytes of weights of a unit. 0 for new tables, which move freely.
        weight = [sum(s.bytes for s in unit) * (unit[0].table.name not in free) for unit in units]
        limits = {
            "kept": held.copy(),
            "weight": np.array(weight, np.int64),
            "joint": np.array(list(map(len, units)), np.int64),
            "most_moved": np.array(most, np.int64),
            "may_share": np.zeros_like(space.fixed.may_share),
        }
    if cache.is_range.any():
        # No device is allowed to gain a row range, so they stay.
        limits["allowed"] = cache.allowed & ~cache.is_range[:, None]
    return replace(space, fixed=space.fixed._replace(**limits))


# --- tables that groups of devices share --------------------------------------------------------------------


def _group_fields(
    cache: ShardCostCache,
    groups: Sequence[tuple[Layout, Group]],
    wanted: bool,
    divided: Collection[str],
    id_runs: Sequence[Layout],
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The fields of arrays.SearchProblem about groups, and the shards that devices of a group have.

    The latter are [2, Y, S]: of each device but the last, and of the last.

    Groups may share whole tables, save pinned ones and those that are kept together.
    Kinds that divide rows need unordered rows that may be divided, and at least one row for each device.
    They also need that no strip is a row range, as those would run in the same op.

    wanted: whether groups may share tables that need not be divided.
    divided: names of tables that are always divided.
    id_runs: the runs of the exchanges of ids.
    """
    problem, model = cache.problem, cache.model
    topology, layouts = problem.topology, tuple(dict.fromkeys(layout for layout, _ in groups))
    # -1: a device that is alone on its host shares nothing there.
    group_of = np.full((len(layouts), len(topology)), -1)
    for g, (layout, group) in enumerate(groups):
        group_of[layouts.index(layout), list(group)] = g
    shape = (len(layouts), len(cache))
    fields = {
        "group_layout": np.array([layouts.index(layout) for layout, _ in groups], np.int64),
        "group_of": group_of,
        "may_share": np.zeros(shape, dtype=bool),
        "shared_codes": np.zeros((*shape, cache.codes.shape[1])),
        "shared_ids_by": np.array([len(cache.kinds) + id_runs.index(y) for y in layouts], np.int64),
        "shared_size": np.zeros(shape),
        **{f"shared_{name}": np.zeros(len(layouts)) for name in ("own", "busiest", "total", "once")},
    }
    parts = np.full((2, *shape), None)
    # Plans by columns only: encodings of shared tables would take long for nothing.
    if not wanted and not divided:
        return fields, parts
    whole = [Shard.whole(cache.table(s)) for s in range(len(cache))]
    # Tables that constraints keep together or on some devices are not shared.
    bound = [w.table.name in problem.pinned or w.table.name in problem.bundle_of for w in whole]
    free = wanted & ~cache.is_range & ~np.array(bound, dtype=bool)
    for y, layout in enumerate(layouts):
        # With groups of unequal size, the smallest has the most of a table on each device.
        size = min(len(group) for other, group in groups if other is layout)
        # A kernel of the right collection, and constraints.kinds, both have to allow it.
        runs_it = np.array([_runs(layout, shard.table) for shard in whole], dtype=bool)
        may = [problem.may_run(layout, shard.table) for shard in whole]
        shards = last = whole
        if layout.divides_rows:
            # [S] rows on each device but the last. None: some device would have no row.
            rows = [even_share(shard.rows, size) for shard in whole]
            divides = [
                n is not None and not w.table.ordered and w.table.name not in problem.whole
                for w, n in zip(whole, rows, strict=True)
            ]
            may = np.array(may) & divides & (not cache.is_range.any())
            shards = [replace(w, row_hi=n or w.rows) for w, n in zip(whole, rows, strict=True)]
            # The last device of a group has the rows that are left.
            last = [
                replace(w, row_lo=n * (size - 1)) if n and n * size != w.rows else shard
                for shard, w, n in zip(shards, whole, rows, strict=True)
            ]
        # One op runs a collection's tables. Those of others have no shard here.
        parts[:, y] = shards, last
        parts[:, y, ~runs_it] = None
        fields["may_share"][y] = free & runs_it & may
        # Replicas look up a local batch, other kinds the global one.
        fields["shared_codes"][y] = encoded(shards, model, layout.batch(problem))
        fields["shared_size"][y] = [
            shard.bytes if layout.dense_gradient else output_bytes(shard, problem.global_batch)
            for shard in shards
        ]
        for name, rate in shared_rates(problem, model, layout, size).items():
            fields[f"shared_{name}"][y] = rate
    return fields, parts


def worth_copying(space: SearchSpace, model: CostModel, y: int) -> np.ndarray:
    """[N] strips that are better copied to all devices in layout y, by falling gain.

    The gain counts all other work as divided evenly. As many strips as make the step cheapest.
    """
    fixed, may = space.fixed, np.flatnonzero(space.fixed.may_share[y])
    if not len(may):
        return may
    n, total_speed, slowest = len(fixed.speed), fixed.speed.sum(), fixed.speed.min()
    # [S, F] of uncut tables: what they add is compared to what a copy on all devices adds.
    codes = fixed.codes[fixed.shard[np.arange(len(fixed.size)), fixed.size]]
    copies, all_codes, size = fixed.shared_codes[y, may], codes.sum(0), fixed.shared_size[y, may]
    # Of evenly divided bytes, the busiest host sends what its devices send together.
    host_share = n / len(space.cache.problem.topology.hosts)
    byte_ms = (fixed.own + fixed.busiest + fixed.host_busiest * host_share) / n + fixed.total
    # A copy sends no outputs, so their exchange is saved.
    outputs_ms = byte_ms[fixed.kind[may]] * fixed.outputs[fixed.shard[may, fixed.size[may]]]

    def divided_ms(left: np.ndarray) -> np.ndarray:
        """Cost of these encodings, divided evenly over the devices."""
        return model.head(np.maximum(left, 0) / n) * n / total_speed

    [group] = np.flatnonzero(fixed.group_layout == y)
    # Fixed tables of this group pay the exchange's fixed cost in any case.
    fixed_codes, once = fixed.fixed_codes[group], fixed.shared_once[y] * (fixed.fixed_size[group] == 0)
    # Price a copy among all others, as they share one op.
    all_copies = fixed_codes + copies.sum(0)
    without = model.head(np.maximum(all_copies - copies, 0))
    extra_ms = (model.head(all_copies[None]) - without) / slowest + fixed.shared_total[y] * size
    # Each table's saving is that of leaving it out of the evenly divided work.
    saved_ms = divided_ms(all_codes[None]) - divided_ms(all_codes - codes[may]) + outputs_ms
    # By falling gain, so that any best number of strips is the first ones.
    order = np.argsort(ranks(extra_ms - saved_ms), kind="stable")
    # [N] cost of a step with the first, the first two, ... of these strips copied.
    step_ms = (
        divided_ms(all_codes - np.cumsum(codes[may[order]], 0))
        - np.cumsum(outputs_ms[order])
        + model.head(fixed_codes + np.cumsum(copies[order], 0)) / slowest
        + once
        + fixed.shared_total[y] * np.cumsum(size[order])
    )
    # Only if the best number of copies beats none at all.
    none_ms = divided_ms(all_codes[None])[0] + model.head(fixed_codes[None])[0] / slowest
    return may[order[: first_least(step_ms) + 1]] if is_less(step_ms.min(), none_ms) else may[:0]
