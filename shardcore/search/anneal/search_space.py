"""SearchSpace: what annealing may do with a problem's tables, as arrays.

A strip's columns are divided over devices, or a group of devices shares the whole strip.
The latter needs a kind whose groups have several devices: all of them, or those of a host.

Strips and units are defined in search/state/shard_cost_cache.py.

Shapes: S strips, D devices, F features.
K kinds of what single devices hold (cache.kinds). Y layouts of what groups share, G groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.progress import tick
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.cost.model import CostModel
from shardcore.search.anneal.compiled import SearchProblem
from shardcore.search.anneal.memory_columns import Columns, batch_memory, given, shards_memory
from shardcore.search.anneal.rates import exchange_rates, id_rates, shared_rates
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.state.shard_cost_cache import ShardCostCache, encoded
from shardcore.search.state.shards import division, placed
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

    problem, cache: the tables and their strips.
    fixed: the same as arrays, for the compiled search.
    bytes: [R] about the memory of a shard.
    shared_bytes: [Y, S] about that of a strip on each device of a group.
    groups: [G] a kind and its devices, which may share whole tables.
    divided: [N] strips whose rows are always divided over all devices.
    runs: [X - K] those that ids travel for, each by an exchange of its own: of kinds, then of groups.
    """

    problem: Problem
    cache: ShardCostCache
    fixed: SearchProblem
    bytes: np.ndarray
    shared_bytes: np.ndarray
    groups: tuple[tuple[Layout, Group], ...]
    divided: np.ndarray
    runs: tuple[Layout, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """[Y] layouts of the groups."""
        return tuple(dict.fromkeys(layout for layout, _ in self.groups))

    def number(self, kind: str, devices: Group, table: Table) -> int:
        """The number of a group that shares a table by a kind."""
        return self.groups.index((run_of(kind, table), devices))

    @property
    def always_shared(self) -> np.ndarray:
        """[N, 2] the divided strips, each with its group."""
        ways = [(s, division(self.cache.table(s), self.problem)) for s in self.divided]
        pairs = [(s, self.number(way.kind, way.devices, self.cache.table(s))) for s, way in ways]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def sharing(self, pairs: np.ndarray) -> np.ndarray:
        """[N, 2] strips that groups share, and the divided strips that are not among them."""
        always = self.always_shared
        return np.concatenate([pairs, always[~np.isin(always[:, 0], pairs[:, 0])]])

    @property
    def as_it_is(self) -> SearchProblem:
        """The same space, but the tables that groups share stay the same."""
        return self.fixed._replace(may_share=np.zeros_like(self.fixed.may_share))

    def among_groups(self, group: np.ndarray) -> SearchProblem:
        """The same space, but of the tables that groups share only those move that other groups may share.

        group: [S] the group that shares a strip, -1 for none.
        """
        fixed, may = self.fixed, np.zeros_like(self.fixed.may_share)
        shared = np.flatnonzero(group >= 0)
        y = fixed.group_layout[group[shared]]
        several = np.bincount(fixed.group_layout, minlength=len(may)) > 1
        may[y, shared] = fixed.may_share[y, shared] & several[y]
        return fixed._replace(may_share=may)

    @property
    def whole_bytes(self) -> np.ndarray:
        """[S] about the bytes of each strip uncut."""
        return self.bytes[self.fixed.shard[np.arange(len(self.fixed.size)), self.fixed.size]]

    @property
    def choice(self) -> np.ndarray:
        """[S] number of devices to choose from. 0 for all if nothing is pinned."""
        return self.fixed.allowed.sum(1) if len(self.fixed.allowed) else np.zeros(len(self.fixed.size))

    def strips(self, tables: Iterable[Table]) -> np.ndarray:
        """[N] strips of whole tables, which must not be in bundles."""
        of = {self.cache.table(s).name: s for s in range(len(self.cache))}
        return np.array([of[t.name] for t in tables], dtype=np.int64)

    def keys(self, shards: Sequence[Shard]) -> np.ndarray:
        """[N, 2] strips and units of shards. Of a bundle, all tables or none have to be among them."""
        return np.array(self.cache.keys(shards), dtype=np.int64).reshape(-1, 2)

    def placements(self, held: np.ndarray, group: np.ndarray) -> list[Placement]:
        """Placements of held [S, D] units, and of the strips that groups share, group [S]."""
        strips, devices = np.nonzero(held)
        keys = list(zip(strips.tolist(), held[strips, devices].tolist(), strict=True))
        found = placed(self.cache.bundles(keys), devices.tolist(), self.problem)
        for s in np.flatnonzero(group >= 0):
            layout, on = self.groups[group[s]]
            found.append(Placement(layout.name, Shard.whole(self.cache.table(s)), on))
        return found


def runs(layout: Layout, table: Table) -> bool:
    """Whether a layout is of the table's collection, and runs its kernel."""
    return (layout.sequence, layout.collection) == (table.sequence, table.collection) and (
        layout.caches or not table.in_host_memory
    )


def without_ranges(shards: Sequence[Shard], problem: Problem) -> tuple[list[Shard], list[Table]]:
    """The shards with divided tables made whole, and these tables.

    All row ranges run in one op. So this is not done if any such table is pinned, or its rows are ordered.
    The row ranges then stay shards like others.
    """
    tables = list(dict.fromkeys(s.table for s in shards if not s.full_rows))
    if any(t.ordered or t.name in problem.pinned for t in tables):
        return list(shards), []
    return [*(s for s in shards if s.full_rows), *map(Shard.whole, tables)], tables


def space(
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
    may_split = np.array([cache.may_split((s, 2)) for s in range(len(cache))], dtype=bool)
    if is_large(cache):
        may_split &= _worth_cutting(cache, shards)
    strips = np.repeat(np.arange(len(cache)), cache.size)
    units = np.concatenate([np.arange(1, n + 1) for n in cache.size])
    # Encode only the shards that a search can reach: encoding takes most of the time.
    used = may_split[strips] | cache.is_range[strips] | (units == cache.size[strips])
    cache.need(strips[used], units[used])
    number_of = cache.numbers(np.arange(len(cache))[:, None], np.arange(cache.size.max() + 1))
    # Hosts as numbers.
    hosts = {h: i for i, h in enumerate(problem.topology.hosts)}
    n_devices = len(problem.topology)
    groups = tuple(
        (layout, group)
        for layout in runs_of(problem.tables)
        for group in layout.groups(problem.topology)
        if len(group) > 1
    )
    of_ids = tuple(
        dict.fromkeys(
            (
                *cache.kinds,
                *(run for s in range(len(cache)) for run in cache.runs(s)),
                *(layout for layout, _ in groups),
            )
        )
    )
    exchange = [
        *(exchange_rates(problem, model, layout) for layout in cache.kinds),
        *(id_rates(problem, model, layout) for layout in of_ids),
    ]
    number = {cache.table(s).name: s for s in range(len(cache))}
    coefficients = StageCoefficients.of(of_ids, problem)
    tick()
    shared, parts = _shared(problem, model, cache, groups, everywhere, {t.name for t in by_rows}, of_ids)
    columns = Columns(problem, of_ids, cache.caches, may_bind(problem))
    layouts = tuple(dict.fromkeys(layout for layout, _ in groups))
    memory = shards_memory(cache, columns, layouts, parts)
    sums = memory["sums"][len(cache.made) :].reshape(2, len(layouts), len(cache), 6)[0]
    fixed = SearchProblem(
        shard=np.ascontiguousarray(number_of, dtype=np.int32),
        codes=np.ascontiguousarray(cache.codes),
        added_ms=added(cache.codes, model),
        outputs=cache.outputs,
        ids=cache.id_bytes,
        ids_by=np.arange(len(cache.kinds)) + len(cache.kinds),
        kind=cache.kind.astype(np.int64),
        size=cache.size.astype(np.int64),
        table=np.array([number[cache.table(s).name] for s in range(len(cache))]),
        may_split=may_split,
        # No rows if nothing is restricted: the compiled search then skips the check.
        allowed=cache.allowed[:0] if cache.allowed.all() else cache.allowed,
        free=np.array(held_bytes(problem), float),
        speed=cache.speed,
        host=np.array([hosts[d.host] for d in problem.topology.devices], np.int64),
        **{name: np.array([rates[name] for rates in exchange]) for name in exchange[0]},
        hides_ids_ms=problem.job.hides_ids_ms,
        **shared,
        shared_ids=sums[..., 1].astype(np.int64),
        **memory,
        **batch_memory(cache, groups, columns),
        **given(cache, groups, columns),
        turn_sums=coefficients.sums,
        turn_batch=coefficients.batch,
        turn_phases=coefficients.phases,
        sums_most=coefficients.most,
        kept=np.zeros((0, n_devices), np.int16),
        weight=np.zeros(0, np.int64),
        joint=np.zeros(0, np.int64),
        most_moved=np.zeros(2, np.int64),
        parameters=model.compiled().parameters,
        halves=halves,
    )
    multiples = coefficients.most[[of_ids.index(layout) for layout in layouts]]
    shared_bytes = sums[..., :2].sum(-1) + (sums[..., 2:4] * multiples.reshape(-1, 1, 2)).sum(-1)
    return SearchSpace(
        problem,
        cache,
        fixed,
        cache.bytes,
        shared_bytes.astype(np.int64),
        groups,
        np.array([number[t.name] for t in by_rows], dtype=np.int64),
        of_ids,
    )


def is_large(cache: ShardCostCache) -> bool:
    """Whether the problem has so many shards that the search has to be selective."""
    return len(cache) * len(cache.speed) > LARGE


def _worth_cutting(cache: ShardCostCache, shards: Sequence[Shard]) -> np.ndarray:
    """[S] bool: strips that `shards` cut already, or that are costly or large enough to cut.

    All others stay whole and fill gaps. Their shards would take most of the time and memory.
    """
    n, strips = len(cache.speed), np.arange(len(cache))
    cache.need(strips, cache.size)
    whole = cache.numbers(strips, cache.size)
    added_ms, n_bytes = added(cache.codes[whole], cache.model), cache.bytes[whole].astype(float)
    least_bytes = _WORTH * max(0.0, np.mean(held_bytes(cache.problem)))
    worth = (added_ms * n > _WORTH * added_ms.sum()) | (n_bytes > least_bytes)
    cut = np.array([s for s, units in cache.keys(shards) if units < cache.size[s]], dtype=np.int64)
    worth[cut] = True
    return worth


def added(codes: np.ndarray, model: CostModel) -> np.ndarray:
    """[N] ms that shards add to an op without its launch, from codes [N, F]."""
    # The second copy of a shard costs no launch.
    return np.maximum(0.0, np.asarray(model.head(2 * codes)) - model.head(codes))


def keeping(of: SearchSpace, held: np.ndarray, reshard: Reshard, new: Sequence[Table]) -> SearchSpace:
    """The space in which only as much may move from held [S, D] as `reshard` allows.

    The `new` tables may go anywhere. Row ranges stay: TorchRec runs them only on all devices.
    """
    free, cache = {t.name for t in new}, of.cache

    def unit_bytes(strip: int) -> int:
        """Bytes of weights of one unit. 0 for new tables, which move freely."""
        return 0 if cache.table(strip).name in free else sum(s.bytes for s in cache.bundles([(strip, 1)])[0])

    fixed, limits = of.fixed, {}
    if reshard.limited:
        most = [np.iinfo(np.int64).max if x is None else x for x in (reshard.tables, reshard.bytes)]
        limits = {
            "kept": held.copy(),
            "weight": np.array([unit_bytes(s) for s in range(len(cache))], np.int64),
            "joint": np.array([len(cache.bundles([(s, 1)])[0]) for s in range(len(cache))], np.int64),
            "most_moved": np.array(most, np.int64),
            "may_share": np.zeros_like(fixed.may_share),
        }
    if cache.is_range.any():
        limits["allowed"] = cache.allowed & ~cache.is_range[:, None]
    return replace(of, fixed=fixed._replace(**limits))


# --- tables that groups of devices share --------------------------------------------------------------------


def _shared(
    problem: Problem,
    model: CostModel,
    cache: ShardCostCache,
    groups: Sequence[tuple[Layout, Group]],
    wanted: bool,
    divided: Collection[str],
    of_ids: Sequence[Layout],
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The fields of arrays.SearchProblem about groups, and what devices of a group have of a strip.

    The latter are shards [2, Y, S]: of each device but the last, and of the last.

    Groups may share whole tables that no constraint concerns.
    Kinds that divide rows need unordered rows, and at least one row for each device.
    They also need that no strip is a row range, as those would run in the same op.

    divided: names of tables that are always divided.
    of_ids: the runs of the exchanges of ids.
    """
    topology, layouts = problem.topology, tuple(dict.fromkeys(layout for layout, _ in groups))
    n_kinds = len(cache.kinds)
    of = np.full((len(layouts), len(topology)), -1)
    for g, (layout, group) in enumerate(groups):
        of[layouts.index(layout), list(group)] = g
    shape = (len(layouts), len(cache))
    found = {
        "group_layout": np.array([layouts.index(layout) for layout, _ in groups], np.int64),
        "group_of": of,
        "may_share": np.zeros(shape, dtype=bool),
        "shared_codes": np.zeros((*shape, cache.codes.shape[1])),
        "shared_ids_by": np.array([n_kinds + of_ids.index(layout) for layout in layouts], np.int64),
        "shared_size": np.zeros(shape),
        **{f"shared_{name}": np.zeros(len(layouts)) for name in ("own", "busiest", "total", "once")},
    }
    parts = np.full((2, *shape), None)
    if not wanted and not divided:
        return found, parts
    whole = [Shard.whole(cache.table(s)) for s in range(len(cache))]
    bound = {*problem.pinned, *problem.whole}
    free = np.array(
        [
            wanted
            and not cache.is_range[s]
            and w.width == cache.unit[s] * cache.size[s]
            and w.table.name not in bound
            for s, w in enumerate(whole)
        ],
        dtype=bool,
    )
    for y, layout in enumerate(layouts):
        # With groups of unequal size, the smallest has the most of a table on each device.
        size = min(len(group) for of_group, group in groups if of_group is layout)
        shards, divides = whole, np.ones(len(whole), dtype=bool)
        if layout.divides_rows:
            share = [even_share(shard.rows, size) for shard in whole]
            shards = [
                replace(shard, row_hi=rows or shard.rows) for shard, rows in zip(whole, share, strict=True)
            ]
            fine = [not s.table.ordered and rows is not None for s, rows in zip(whole, share, strict=True)]
            divides = np.array(fine, dtype=bool) & (not cache.is_range.any())
        runs_it = np.array([runs(layout, shard.table) for shard in whole], dtype=bool)
        found["may_share"][y] = (
            free & divides & runs_it & [problem.may_run(layout, shard.table) for shard in whole]
        )
        found["shared_codes"][y] = encoded(shards, model, layout.batch(problem))
        parts[:, y] = shards
        if layout.divides_rows:
            # The last device of a group has the rows that are left.
            parts[1, y] = [
                replace(shard, row_lo=shard.row_hi * (size - 1), row_hi=w.row_hi)
                if rows and rows * size != w.row_hi
                else shard
                for shard, w, rows in zip(shards, whole, share, strict=True)
            ]
        parts[:, y, ~runs_it] = None
        found["shared_size"][y] = [
            shard.bytes if layout.dense_gradient else output_bytes(shard, problem.global_batch)
            for shard in shards
        ]
        for name, rate in shared_rates(problem, model, layout, size).items():
            found[f"shared_{name}"][y] = rate
    return found, parts


def worth_copying(space: SearchSpace, model: CostModel, y: int) -> np.ndarray:
    """[N] strips that are better on all devices in layout y, if all other work were divided evenly.

    By falling gain: as many as make the step cheapest.
    """
    fixed, may = space.fixed, np.flatnonzero(space.fixed.may_share[y])
    if not len(may):
        return may
    n, speed, slowest = len(fixed.speed), fixed.speed.sum(), fixed.speed.min()
    codes = fixed.codes[fixed.shard[np.arange(len(fixed.size)), fixed.size]]
    copies = fixed.shared_codes[y, may]
    total, size = codes.sum(0), fixed.shared_size[y, may]
    outputs = fixed.outputs[fixed.shard[may, fixed.size[may]]]
    of_byte = (
        (fixed.own + fixed.busiest + fixed.host_busiest * n / len(space.problem.topology.hosts)) / n
        + fixed.total
    )[fixed.kind[may]]

    def divided_ms(left: np.ndarray) -> np.ndarray:
        """ms of these encodings, divided evenly over the devices."""
        return model.head(np.maximum(left, 0) / n) * n / speed

    [group] = np.flatnonzero(fixed.group_layout == y)
    given, once = fixed.given_codes[group], fixed.shared_once[y] * (fixed.given_size[group] == 0)
    beside = given + copies.sum(0)  # price a table among the others, as they share one op
    extra = (
        model.head(beside[None]) - model.head(np.maximum(beside - copies, 0))
    ) / slowest + fixed.shared_total[y] * size
    saved = divided_ms(total[None]) - divided_ms(total - codes[may]) + of_byte * outputs
    order = np.argsort(extra - saved, kind="stable")
    step = (
        divided_ms(total - np.cumsum(codes[may[order]], 0))
        - np.cumsum((of_byte * outputs)[order])
        + model.head(given + np.cumsum(copies[order], 0)) / slowest
        + once
        + fixed.shared_total[y] * np.cumsum(size[order])
    )
    none = divided_ms(total[None])[0] + model.head(given[None])[0] / slowest
    return may[order[: int(step.argmin()) + 1]] if step.min() < none else may[:0]
