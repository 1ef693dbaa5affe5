"""SearchSpace: what annealing may do with a problem's tables, as arrays.

A strip's columns are divided over devices, or a group of devices shares the whole strip.
The latter needs a kind whose groups have several devices: all of them, or those of a host.

Strips and units are defined in step/options.py.

Shapes: S strips, U units of the largest strip, D devices, F features, N runs.
Y layouts of what groups share, G groups. X exchanges (arrays.SearchProblem).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.progress import tick
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.cost.model import CommCost, CostModel, first_least, is_less, step_ms
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.ties import ranks
from shardcore.step.engine.arrays import (
    ARRIVED,
    BUSIEST,
    ENTERED,
    FETCHED,
    HOST_BUSIEST,
    JOINT,
    LAYOUT_OF,
    LOAD,
    LOOKUPS,
    ONCE,
    OWN,
    RESIDENT,
    RUN,
    SPEED,
    TOTAL,
    WEIGHT,
    WORK_ONCE,
    SearchProblem,
)
from shardcore.step.engine.local_batch import batch_fields, first_run, fixed_fields, table_ranks
from shardcore.step.engine.vectors import option_fields
from shardcore.step.kinds import Group, Layout, even_share, run_of, runs_of
from shardcore.step.lower import traffic_of_outputs
from shardcore.step.memory import held_bytes
from shardcore.step.memory_account import StageCoefficients
from shardcore.step.op_limits import may_bind, most_features
from shardcore.step.options import Options, encoded
from shardcore.step.ways import placed, required_division

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
    runs: [N] runs of ops: kinds of what single devices hold (cache.kinds), then others.
    """

    cache: Options
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
        layout_of = fixed.groups[:, LAYOUT_OF]
        y = layout_of[group[shared]]
        # A layout with a single group has no other that could take a table.
        several = np.bincount(layout_of, minlength=len(may)) > 1
        may[y, shared] = fixed.may_share[y, shared] & several[y]
        return fixed._replace(may_share=may)

    @property
    def whole_bytes(self) -> np.ndarray:
        """[S] estimated bytes of each strip uncut."""
        return self.cache.bytes[self.fixed.whole_options()]

    @property
    def choice(self) -> np.ndarray:
        """[S] number of devices to choose from. 0 everywhere if nothing is pinned."""
        return self.fixed.allowed.sum(1) if len(self.fixed.allowed) else np.zeros(len(self.cache))

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

    def collectives(self, ops: np.ndarray, compute_ms: np.ndarray) -> CommCost:
        """The collectives of steps, priced by the model itself: rates of the search are fitted to it.

        ops: [..., D, N, V] as State.ops. compute_ms: [..., D].
        """
        outputs, ids = (
            {run: ops[..., r, entry] for r, run in enumerate(self.runs)} for entry in (ENTERED, ARRIVED)
        )
        problem = self.cache.problem
        return self.cache.model.comm(traffic_of_outputs(outputs, problem, ids), compute_ms, problem.topology)

    def cost_ms(self, ops: np.ndarray, ms: np.ndarray) -> np.ndarray:
        """[...] ms of steps, as the model itself prices plans. ops: [..., D, N, V]. ms: [..., D, N, A] as State.ms."""
        of_devices = ms.sum(-2) / self.cache.speed[:, None]
        compute_ms, fetched_ms = of_devices[..., LOAD], of_devices[..., FETCHED:].sum(-1)
        return step_ms(compute_ms, self.collectives(ops, compute_ms), self.cache.problem.job, fetched_ms)


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
    cache: Options,
    shards: Sequence[Shard],
    everywhere: bool,
    halves: bool = False,
    by_rows: Sequence[Table] = (),
    cut: bool = True,
) -> SearchSpace:
    """The space of `shards`, which have to be all strips of the cache. Its rates of exchanges are 0.

    everywhere: whether groups may share whole tables.
    halves: whether columns may only be halved.
    by_rows: tables whose rows are always divided over all devices.
    cut: whether shards may be cut by columns.
    """
    problem, model = cache.problem, cache.model
    all_strips = np.arange(len(cache))
    # Asked for two units: the search itself checks that a shard has more than one.
    may_split = np.array([cut and cache.may_split((s, 2)) for s in range(len(cache))], dtype=bool)
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
    # Kinds come first: runs 0 to K - 1 are theirs.
    of_strips = (run for parts in cache.parts for run, _ in parts)
    runs = tuple(dict.fromkeys((*cache.kinds, *of_strips, *layouts)))
    coefficients = StageCoefficients.of(runs, problem)
    # Encodings and coefficients may have taken long: report, or end if the time is over.
    tick()
    may_share, parts, shared_codes = _shareable(cache, groups, layouts, everywhere, {t.name for t in by_rows})
    options = option_fields(cache, runs, layouts, parts, shared_codes)
    rank, on_hosts = table_ranks(problem), problem.topology.on_hosts
    collections = sorted({(run.collection, run.sequence) for run in runs})
    head = model.compiled()
    fixed = SearchProblem(
        shard=np.ascontiguousarray(number_of, dtype=np.int32),
        **options,
        added_ms=added(options["vectors"][:, options["first_code"] :], model),
        strips=np.array(
            [
                cache.kind,
                cache.size,
                # One number for a table: its row ranges are several strips, but move as one table.
                [cache.strip_by_name[cache.table(s).name] for s in range(len(cache))],
                [min(rank[shard.table.name] for shard in first_run(parts)) for parts in cache.parts],
                # No limits of re-sharding: `keeping` puts them in.
                np.zeros(len(cache)),
                np.zeros(len(cache)),
            ],
            np.int64,
        ).T.copy(),
        may_split=may_split,
        # No rows if nothing is restricted: the compiled search then skips the check.
        allowed=cache.allowed[:0] if cache.allowed.all() else cache.allowed,
        # The local batch comes off in the search, as it changes with the plan.
        devices=np.stack([cache.speed, held_bytes(problem)], 1).astype(float),
        # Of ranks, which are host by host, and then of devices.
        host=np.repeat(np.arange(len(on_hosts)), [len(devices) for devices in on_hosts])[
            np.argsort(problem.topology.ranks)
        ],
        rates=np.zeros((2 * len(runs), WORK_ONCE + 1)),
        n_kinds=len(cache.kinds),
        hides_ids_ms=problem.job.hides_ids_ms,
        dense_ms=problem.job.dense_ms,
        halves=halves,
        heads=np.array([head.parameters, *([head.fetched] if problem.job.fetches_ahead else [])]),
        groups=np.array(
            [(layouts.index(layout), group[0], group[-1], runs.index(layout)) for layout, group in groups],
            np.int64,
        ).reshape(-1, 4),
        group_of=_group_of(groups, layouts, len(problem.topology)),
        may_share=may_share,
        **batch_fields(cache, groups, layouts),
        **fixed_fields(cache, runs),
        # Outputs of a collection's runs are joined to one tensor, so the local batch looks at them together.
        runs=np.array(
            [
                (
                    collections.index((run.collection, run.sequence)),
                    run.sequence,
                    run.local_batch,
                    layouts.index(run) if run in layouts and run not in cache.kinds else -1,
                    *phases,
                )
                for run, phases in zip(runs, coefficients.phases.tolist(), strict=True)
            ],
            np.int64,
        ),
        stages=np.concatenate([coefficients.batch, coefficients.sums], -1),
        limits=np.column_stack([coefficients.most, [most_features(run.batch(problem)) for run in runs]]),
        ops_limited=may_bind(problem),
        kept=np.zeros((0, len(problem.topology)), np.int16),
        most_tables=0,
        most_bytes=0,
    )
    # As cache.bytes: resident, and the largest multiple of what arrived, entered, and of lookups.
    of_groups = fixed.vectors[fixed.first_shared :][: may_share.size].reshape(
        *may_share.shape, fixed.vectors.shape[1]
    )
    multiples = coefficients.most[[runs.index(layout) for layout in layouts]].reshape(-1, 1, 2)
    shared_bytes = of_groups[..., RESIDENT] + fixed.moments[0, -1, 2] * of_groups[..., ARRIVED]
    shared_bytes += (of_groups[..., [ENTERED, LOOKUPS]] * multiples).sum(-1)
    divided = np.array([cache.strip_by_name[t.name] for t in by_rows], dtype=np.int64)
    return SearchSpace(cache, fixed, shared_bytes.astype(np.int64), groups, divided, runs)


def is_large(cache: Options) -> bool:
    """Tell if the problem has so many shards that the search has to be selective."""
    return len(cache) * len(cache.speed) > LARGE


def _worth_cutting(cache: Options, shards: Sequence[Shard]) -> np.ndarray:
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
        most_tables, most_bytes = (
            np.iinfo(np.int64).max if x is None else x for x in (reshard.tables, reshard.bytes)
        )
        units = [cache.bundles([(s, 1)])[0] for s in range(len(cache))]
        # [S] bytes of weights of a unit. 0 for new tables, which move freely.
        weight = [sum(s.bytes for s in unit) * (unit[0].table.name not in free) for unit in units]
        limits = {
            "kept": held.copy(),
            "strips": space.fixed.strips.copy(),
            "most_tables": most_tables,
            "most_bytes": most_bytes,
            "may_share": np.zeros_like(space.fixed.may_share),
        }
        limits["strips"][:, [WEIGHT, JOINT]] = np.stack([weight, list(map(len, units))], 1)
    if cache.is_range.any():
        # No device is allowed to gain a row range, so they stay.
        limits["allowed"] = cache.allowed & ~cache.is_range[:, None]
    return replace(space, fixed=space.fixed._replace(**limits))


# --- tables that groups of devices share --------------------------------------------------------------------


def _group_of(
    groups: Sequence[tuple[Layout, Group]], layouts: Sequence[Layout], n_devices: int
) -> np.ndarray:
    """[Y, D] the device's group in each layout. -1: a device that is alone on its host shares nothing there."""
    group_of = np.full((len(layouts), n_devices), -1)
    for g, (layout, group) in enumerate(groups):
        group_of[layouts.index(layout), list(group)] = g
    return group_of


def _shareable(
    cache: Options,
    groups: Sequence[tuple[Layout, Group]],
    layouts: Sequence[Layout],
    wanted: bool,
    divided: Collection[str],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Strips that groups may share.

    Returns [Y, S] whether they may, [2, Y, S] the shards of each device but the last and of the last, and [Y, S, F]
    encodings of the former.

    Groups may share whole tables, save pinned ones and those that are kept together.
    Kinds that divide rows need unordered rows that may be divided, and at least one row for each device.
    They also need that no strip is a row range, as those would run in the same op.

    wanted: whether groups may share tables that need not be divided.
    divided: names of tables that are always divided.
    """
    problem, model = cache.problem, cache.model
    shape = (len(layouts), len(cache))
    may_share, codes = np.zeros(shape, dtype=bool), np.zeros((*shape, cache.codes.shape[1]))
    parts = np.full((2, *shape), None)
    # Plans by columns only: encodings of shared tables would take long for nothing.
    if not wanted and not divided:
        return may_share, parts, codes
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
        may_share[y] = free & runs_it & may
        # Replicas look up a local batch, other kinds the global one.
        codes[y] = encoded(shards, model, layout.batch(problem))
    return may_share, parts, codes


def worth_copying(space: SearchSpace, model: CostModel, y: int) -> np.ndarray:
    """[N] strips that are better copied to all devices in layout y, by falling gain.

    The gain counts all other work as divided evenly. As many strips as make the step cheapest.
    """
    fixed, may = space.fixed, np.flatnonzero(space.fixed.may_share[y])
    if not len(may):
        return may
    speed, rates, r = fixed.devices[:, SPEED], fixed.rates, space.runs.index(space.layouts[y])
    n, total_speed, slowest = len(speed), speed.sum(), speed.min()
    # [S, F] of uncut tables: what they add is compared to what a copy on all devices adds.
    whole, shared = fixed.whole_options(), fixed.shared_options(y, may)
    codes, copies = fixed.codes(whole), fixed.codes(shared)
    all_codes, size = codes.sum(0), fixed.vectors[shared, ENTERED]
    # Of evenly divided bytes, the busiest host sends what its devices send together.
    host_share = n / len(space.cache.problem.topology.hosts)
    byte_ms = (rates[:, OWN] + rates[:, BUSIEST] + rates[:, HOST_BUSIEST] * host_share) / n + rates[:, TOTAL]
    # A copy sends no outputs, so their exchange is saved.
    outputs_ms = byte_ms[fixed.strips[may, RUN]] * fixed.vectors[whole[may], ENTERED]
    # Copies are on all devices.
    copy_ms = byte_ms[r] * n

    def divided_ms(left: np.ndarray) -> np.ndarray:
        """Cost of these encodings, divided evenly over the devices."""
        return model.head(np.maximum(left, 0) / n) * n / total_speed

    # Fixed tables of this group pay the exchange's fixed cost in any case.
    fixed_op = fixed.fixed_ops[0, r]
    fixed_codes, once = fixed_op[fixed.first_code :], rates[r, ONCE] * (fixed_op[ENTERED] == 0)
    # Price a copy among all others, as they share one op.
    all_copies = fixed_codes + copies.sum(0)
    without = model.head(np.maximum(all_copies - copies, 0))
    extra_ms = (model.head(all_copies[None]) - without) / slowest + copy_ms * size
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
        + copy_ms * np.cumsum(size[order])
    )
    # Only if the best number of copies beats none at all.
    none_ms = divided_ms(all_codes[None])[0] + model.head(fixed_codes[None])[0] / slowest
    return may[order[: first_least(step_ms) + 1]] if is_less(step_ms.min(), none_ms) else may[:0]
