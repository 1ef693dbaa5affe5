"""SearchSpace: what annealing may do with a problem's tables, as arrays.

An item's columns are divided over devices, or a group of devices shares the whole item.
The latter needs a kind whose groups have several devices: all of them, or those of a host.

Items and blocks are defined in step/options.py.

Shapes: S items, U blocks of the largest item, D devices, F features, N runs.
Y kinds by which groups share tables, G groups. X exchanges (arrays.SearchProblem).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardcore.core.progress import tick
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.cost.model import CommCost, step_ms
from shardcore.search.anneal.reshard import Reshard
from shardcore.step.engine.arrays import (
    ADDED_MS,
    ANY,
    ARRIVED,
    ENTERED,
    FETCHED,
    HALVES,
    JOINT,
    KIND_OF_GROUP,
    LOAD,
    WEIGHT,
    SearchProblem,
)
from shardcore.step.engine.problem import search_problem_fields
from shardcore.step.kinds import Group, sharding_kind_for_table
from shardcore.step.lower import traffic_of_outputs
from shardcore.step.memory import usable_bytes
from shardcore.step.options import ShardOptions
from shardcore.step.ways import placements_of_bundles, required_row_division

LARGE = 1 << 19
"""Items × devices of a large problem."""
_WORTH = 0.01
"""In a large problem, items below this share of a device's mean cost and memory are not cut."""


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """The moves that annealing may make in a problem.

    cache: the problem's tables, and their items.
    fixed: what stays the same during a search, as arrays for the compiled code.
    divided: [N] items whose rows are always divided over all devices.
    """

    cache: ShardOptions
    fixed: SearchProblem
    divided: np.ndarray

    @property
    def shared_item_bytes(self) -> np.ndarray:
        """[Y, S] estimated memory of each item on each device of a group that shares the item, by shared kind."""
        return self.cache.peak_bytes[self.fixed.shared[0]]

    def item_and_group(self, kind: str, devices: Group, table: Table) -> tuple[int, int]:
        """Index of a table among the items that are searched, and of the device group over which a kind of sharding
        divides it."""
        return self.cache.item_by_name[table.name], self.cache.groups.index(
            (sharding_kind_for_table(kind, table), devices)
        )

    def with_divided_items(self, pairs: np.ndarray) -> np.ndarray:
        """[N, 2] pairs of an item and its group: the given pairs, and the items whose rows are always divided."""
        # A divided item that `pairs` already give a group keeps that one.
        tables = [self.cache.table_of_item(s) for s in self.divided if s not in pairs[:, 0]]
        ways = [required_row_division(table, self.cache.problem) for table in tables]
        always = [self.item_and_group(way.kind, way.devices, way.shard.table) for way in ways]
        return np.concatenate([pairs, np.array(always, dtype=np.int64).reshape(-1, 2)])

    @property
    def problem_without_sharing_moves(self) -> SearchProblem:
        """Search problem in which tables shared by groups of devices stay as they are."""
        return self.fixed._replace(may_share=np.zeros_like(self.fixed.may_share))

    def problem_with_moves_among_groups(self, group: np.ndarray) -> SearchProblem:
        """Search problem in which the same tables stay shared, but may move to another group of their shared kind.

        group: [S] the group that shares an item, -1 for none.
        """
        fixed, may = self.fixed, np.zeros_like(self.fixed.may_share)
        shared = np.flatnonzero(group >= 0)
        kind_of = fixed.groups[:, KIND_OF_GROUP]
        y = kind_of[group[shared]]
        # A shared kind with a single group has no other that could take a table.
        several = np.bincount(kind_of, minlength=len(may)) > 1
        may[y, shared] = fixed.may_share[y, shared] & several[y]
        return fixed._replace(may_share=may)

    @property
    def whole_item_bytes(self) -> np.ndarray:
        """[S] estimated bytes of each item (columns of a table) as one shard."""
        return self.cache.peak_bytes[self.fixed.option_of_each_uncut_item()]

    @property
    def allowed_device_counts(self) -> np.ndarray:
        """[S] number of devices where each item may be. 0 everywhere if no table is pinned."""
        return self.fixed.allowed.sum(1) if len(self.fixed.allowed) else np.zeros(len(self.cache))

    def shard_keys(self, shards: Sequence[Shard]) -> np.ndarray:
        """[N, 2] item and blocks of each shard. All tables of a bundle, or none, have to be given."""
        return np.array(self.cache.shard_keys(shards), dtype=np.int64).reshape(-1, 2)

    def placements(self, held_blocks: np.ndarray, group: np.ndarray) -> list[Placement]:
        """Placements of items' blocks on devices, held [S, D], and of items that groups share, group [S]."""
        items, devices = np.nonzero(held_blocks)
        keys = list(zip(items.tolist(), held_blocks[items, devices].tolist(), strict=True))
        placements = placements_of_bundles(
            self.cache.deal_bundles(keys), devices.tolist(), self.cache.problem
        )
        for s in np.flatnonzero(group >= 0).tolist():
            shared_kind, on = self.cache.groups[group[s]]
            placements.append(Placement(shared_kind.name, Shard.whole(self.cache.table_of_item(s)), on))
        return placements

    def collective_cost(self, ops: np.ndarray, compute_ms: np.ndarray) -> CommCost:
        """Cost of the collectives of steps, priced by the cost model itself, not by the search's linear rates.

        ops: [..., D, N, V] as State.ops. compute_ms: [..., D].
        """
        outputs, ids = (
            {run: ops[..., r, entry] for r, run in enumerate(self.cache.runs)} for entry in (ENTERED, ARRIVED)
        )
        problem = self.cache.problem
        return self.cache.model.comm_cost(
            traffic_of_outputs(outputs, problem, ids), compute_ms, problem.topology
        )

    def cost_ms(self, ops: np.ndarray, ms: np.ndarray) -> np.ndarray:
        """[...] ms of steps, priced as the cost model prices plans. ops: [..., D, N, V]. ms: [..., D, N, A] as
        State.ms.
        """
        of_devices = ms.sum(-2) / self.cache.speed[:, None]
        compute_ms, fetched_ms = of_devices[..., LOAD], of_devices[..., FETCHED:].sum(-1)
        return step_ms(compute_ms, self.collective_cost(ops, compute_ms), self.cache.problem.job, fetched_ms)


def merge_row_ranges(shards: Sequence[Shard], problem: Problem) -> tuple[list[Shard], list[Table]]:
    """Shards with row ranges of a table merged into the whole table, and the list of merged tables.

    All row ranges run in one op. So this is not done if any such table is pinned, or its rows are ordered.
    The row ranges then stay shards like others.
    """
    tables = list(dict.fromkeys(s.table for s in shards if not s.has_all_rows))
    if any(t.ordered or t.name in problem.pinned_devices for t in tables):
        return list(shards), []
    return [*(s for s in shards if s.has_all_rows), *map(Shard.whole, tables)], tables


def search_space(
    cache: ShardOptions,
    shards: Sequence[Shard],
    everywhere: bool,
    halves: bool = False,
    by_rows: Sequence[Table] = (),
    cut: bool = True,
) -> SearchSpace:
    """Search space whose items are cut as `shards`, which have to be all items of the cache. Exchange rates are 0.

    everywhere: whether groups may share whole tables.
    halves: whether columns may only be halved.
    by_rows: tables whose rows are always divided over all devices.
    cut: whether shards may be cut by columns.
    """
    all_items, divided = range(len(cache)), [cache.item_by_name[t.name] for t in by_rows]
    # The search itself checks that a shard has several blocks.
    may_split = np.array([cut and cache.may_split(s) for s in all_items], dtype=bool)
    if is_large_problem(cache):
        may_split &= _items_to_cut(cache, shards)
    # Every number of blocks of every item, [sum of sizes].
    items = np.repeat(all_items, cache.size)
    blocks = np.concatenate([np.arange(1, n + 1) for n in cache.size])
    # Encode only the shards that a search can reach: encoding takes most of the time.
    used = may_split[items] | cache.is_range[items] | (blocks == cache.size[items])
    cache.make_shards(items[used], blocks[used])
    # Encodings may have taken long: report, or end if the time is over.
    tick()
    shared_kinds = range(len(cache.shared_kinds))
    may_share = np.array(
        [[everywhere and cache.may_share(s, y) for s in all_items] for y in shared_kinds], dtype=bool
    )
    head = cache.model.compiled_op_ms()
    fixed = SearchProblem(
        **search_problem_fields(cache, everywhere or bool(by_rows)),
        may_split=may_split,
        may_share=may_share.reshape(-1, len(cache)),
        cut=HALVES if halves else ANY,
        heads=np.array([head.parameters, *([head.fetched] if cache.problem.job.fetches_ahead else [])]),
    )
    return SearchSpace(cache, fixed, np.array(divided, dtype=np.int64))


def is_large_problem(cache: ShardOptions) -> bool:
    """Tell if a problem has so many items and devices that the search has to be selective."""
    return len(cache) * len(cache.speed) > LARGE


def _items_to_cut(cache: ShardOptions, shards: Sequence[Shard]) -> np.ndarray:
    """[S] bool: items that are cut already, or that are costly or large enough to cut.

    All others stay whole and fill gaps. Their shards would take most of the time and memory.
    """
    n, items = len(cache.speed), np.arange(len(cache))
    cache.make_shards(items, cache.size)
    whole = cache.option_numbers(items, cache.size)
    added_ms, n_bytes = cache.alone[whole, ADDED_MS], cache.peak_bytes[whole]
    # Reserved bytes may leave devices less than nothing.
    least_bytes = _WORTH * max(0.0, np.mean(usable_bytes(cache.problem)))
    # The mean cost of a device is an n-th of the sum.
    worth = (added_ms * n > _WORTH * added_ms.sum()) | (n_bytes > least_bytes)
    # What memory forces to be cut stays so, however cheap it is.
    cut = np.array([s for s, blocks in cache.shard_keys(shards) if blocks < cache.size[s]], dtype=np.int64)
    worth[cut] = True
    return worth


def limit_moves(
    space: SearchSpace, held_blocks: np.ndarray, reshard: Reshard, new: Sequence[Table]
) -> SearchSpace:
    """Search space in which no more may move from the old plan, held [S, D], than `reshard` allows.

    The `new` tables may go anywhere. Row ranges stay: TorchRec runs them only on all devices.
    """
    free, cache, limits = {t.name for t in new}, space.cache, {}
    if reshard.limits_moves:
        # No limit is a limit that no plan reaches.
        most_tables, most_bytes = (
            np.iinfo(np.int64).max if x is None else x for x in (reshard.tables, reshard.bytes)
        )
        blocks = [cache.deal_bundles([(s, 1)])[0] for s in range(len(cache))]
        # [S] bytes of weights of a block. 0 for new tables, which move freely.
        weight = [sum(s.bytes for s in block) * (block[0].table.name not in free) for block in blocks]
        limits = {
            "kept": held_blocks.copy(),
            "items": space.fixed.items.copy(),
            "most_tables": most_tables,
            "most_bytes": most_bytes,
            "may_share": np.zeros_like(space.fixed.may_share),
        }
        limits["items"][:, [WEIGHT, JOINT]] = np.stack([weight, list(map(len, blocks))], 1)
    if cache.is_range.any():
        # No device is allowed to gain a row range, so they stay.
        limits["allowed"] = cache.allowed & ~cache.is_range[:, None]
    return replace(space, fixed=space.fixed._replace(**limits))
