"""Options: ways to run columns of tables, with what each adds to a device, looked up instead of computed again.

A search works on integers. Two words, used in all of search/:

item: what devices divide among them, as in bin packing: mostly the columns of a whole table; else those of a row
  range, or a bundle of tables kept together.
block (column block): the smallest number of an item's columns, of which its shards have multiples
  (Problem.column_block_width, mostly MIN_WIDTH). A bundle is a single block. A sequence that is cut has equal parts,
  each a block.

Columns of an item are exchangeable. So a shard is (item, blocks): how many it has, not which.
Two shards of an item that meet on a device make one wider shard.
An item that a group of devices shares is an option of each of these devices.
Each option has a number, at which arrays keep its vector, its share of a local batch, bytes and cost. Number 0 is
nothing. So moving columns between devices is adding and subtracting rows of arrays.

Shapes: S items, U blocks of the largest item, O options, V entries of a vector, F features of an encoding, D devices,
K kinds, N runs, Y kinds by which groups share tables, C counts of caches; ... leading dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from math import gcd
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

import numpy as np

from shardcore.core.progress import iterate_with_progress, tick
from shardcore.core.types import Problem, Shard, Table
from shardcore.step.engine.arrays import (
    ARRIVED,
    CACHED,
    ENTERED,
    LOOKUPS,
    PEAK_BYTES,
    RESIDENT,
    SINGLE_MS,
)
from shardcore.step.kinds import ShardingKind, even_row_share, kind_on_one_device, sharding_kinds_for_tables
from shardcore.step.memory import CacheCounts, moments_beyond_resident, run_stages, shard_sums
from shardcore.step.memory_timeline import CUT
from shardcore.step.shard_memory import local_batch_share
from shardcore.step.ways import (
    IMPOSSIBLE,
    RowRange,
    ShardBundle,
    allowed_devices_of_shard,
    bundle_shards,
    fits_single_device_by_width,
    join_columns,
    row_range_of_shard,
    sharding_kind_of_shard,
)

_ENCODED_AT_ONCE = 1 << 14
"""Shards that are encoded between two reports of progress."""
_BUT_NAME = attrgetter(*(f.name for f in fields(Table) if f.name != "name"))
"""A function: all that a table has, but for its name."""


class Encoder(Protocol):
    """The methods of a cost model that options call (cost.model.CostModel)."""

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray: ...
    def op_ms(self, sums: np.ndarray) -> np.ndarray: ...


Model = TypeVar("Model", bound=Encoder)
Part = tuple[ShardingKind, Shard]
"""A shard on one device, and the run of its op."""
ShardKey = tuple[int, int]
"""A shard as item and number of blocks."""
Integers = int | np.ndarray
"""An integer, or one for each plan of a batch."""


class ShardOptions(Generic[Model]):
    """The items that `shards` cover, and ways to run them, under one problem and model.

    `add_merged_shards` and `make_shards` make options of shards, `shared_options` those of groups.

    items: [S] the bundle that is the whole item: mostly a single shard.
    parts: [S] the run and the shard of each table of an item. Tables of a bundle may run differently.
    speed: [D] speed factors.
    allowed: [S, D] devices where an item may be.
    freedom: [S] number of these devices. Items with least freedom are placed first, as others could take their
      memory and go elsewhere: the rule of the least flexible job (Pinedo, Scheduling, 5.1).
    kinds: runs of the items (kinds.sharding_kinds_for_tables).
    kind: [S] number of the item's run in `kinds`. Of a bundle, its first table counts.
    groups: kinds and their groups of several devices, which may share whole tables.
    shared_kinds: [Y] the kinds of these.
    runs: [N] runs of ops: the kinds, then others.
    stages: coefficients of their memory.
    is_range: [S] whether the item is a row range.
    block_width: [S] columns of a block of the item, or of the first table of a bundle.
    size: [S] blocks of the whole item.
    most: [S] blocks that a device may have.
    like: [S] the first item that differs by names of tables alone. Its options are those of the item.
    made: [O] the bundle of each shard's number, of the first such item. Other numbers have any.
    vectors: [O, V] what an option adds to its op: bytes and counts, counts of caches, and the encoding.
    options: [O, 2] numbers of its run, and of the next option of a bundle whose tables run differently, or 0.
    alone: [O, 7] its share of a local batch, then bytes and ms of the option alone (engine/arrays.PEAK_BYTES).
    """

    def __init__(self, problem: Problem, model: Model, shards: Iterable[Shard]) -> None:
        self.problem, self.model = problem, model
        self.speed = np.array([d.speed for d in problem.topology.devices])
        shards = list(shards)
        tick()
        self.items, self._cut_sequences = (
            bundle_shards(join_columns(shards), problem),
            _cut_sequence_widths(shards),
        )
        # By row range, so that a shard's item is one of few.
        self._items_at: dict[RowRange, list[tuple[Shard, int]]] = defaultdict(list)  # (whole item, number)
        for i, bundle in enumerate(self.items):
            for shard in bundle:
                self._items_at[row_range_of_shard(shard)].append((shard, i))
        runs = [sharding_kind_of_shard(bundle[0], problem) for bundle in iterate_with_progress(self.items)]
        # In the order of sharding_kinds_for_tables, whatever the order of the shards.
        self.kinds = tuple(run for run in sharding_kinds_for_tables(problem.tables) if run in runs)
        self.kind = np.array([self.kinds.index(run) for run in runs])
        # A row range is never in a bundle, so tables after the first run as whole rows.
        self.parts = [
            [(run, bundle[0]), *((kind_on_one_device(s.table), s) for s in bundle[1:])]
            for run, bundle in zip(runs, self.items, strict=True)
        ]
        self.is_range = np.array([not bundle[0].has_all_rows for bundle in self.items])
        self.block_width = np.array([problem.column_block_width(bundle[0].table) for bundle in self.items])
        widths: dict[int, list[int]] = defaultdict(list)
        for shard in shards:
            if shard.table.sequence:
                widths[self._item_of_shard(shard)].append(shard.width)
        for item, of_parts in widths.items():
            # A sequence that is cut has equal parts.
            self.block_width[item] = gcd(*of_parts) if len(of_parts) > 1 else self.block_width[item]
        self.size = np.array([self._block_count(i, bundle[0]) for i, bundle in enumerate(self.items)])
        keys = self.shard_keys(iterate_with_progress(shards))
        # Cut already because they do not fit whole: of sequences, only these may be cut.
        self._cut_before = {item for item, blocks in keys if blocks < self.size[item]}
        # [S] shards of each item. With fewer, some would not fit.
        self._n_before = np.bincount([item for item, _ in keys], minlength=len(self))
        self.most = np.array([self._max_blocks(i) for i in range(len(self))])
        known: dict[Hashable, int] = {}
        self.like = np.array([known.setdefault(self._equivalence_key(s), s) for s in range(len(self))])
        self.allowed = np.ones((len(self), len(problem.topology)), dtype=bool)
        for i, (first, *_) in enumerate(self.items):
            if self.is_range[i] or first.table.name in problem.pinned_devices:
                self.allowed[i] = False
                self.allowed[i, list(allowed_devices_of_shard(first, problem))] = True
        self.freedom = self.allowed.sum(1)
        # A group of one device holds what single devices hold anyway.
        self.groups = tuple(
            (shared_kind, group)
            for shared_kind in sharding_kinds_for_tables(problem.tables)
            for group in shared_kind.device_groups(problem.topology)
            if len(group) > 1
        )
        self.shared_kinds = tuple(dict.fromkeys(shared_kind for shared_kind, _ in self.groups))
        of_items = (run for parts in self.parts for run, _ in parts)
        self.runs = tuple(dict.fromkeys((*self.kinds, *of_items, *self.shared_kinds)))
        self.stages = run_stages(self.runs, problem)
        # [S, U + 1] number of the shard with so many blocks. -1: not made yet.
        self._numbers = np.full((len(self), self.size.max() + 1), -1)
        self._numbers[:, 0] = 0
        self.first_code = CACHED + len(self.cache_counts)
        # One row each, of number 0.
        self.made: list[ShardBundle] = [self.items[0]]
        self.vectors = np.zeros((1, self.first_code + encode_shards([self.items[0][0]], model).shape[1]))
        self.options, self.alone = np.zeros((1, 2), np.int64), np.zeros((1, SINGLE_MS + 1))

    def __len__(self) -> int:
        """Number of items, S."""
        return len(self.items)

    @cached_property
    def item_by_name(self) -> dict[str, int]:
        """The first item (columns of a table) of each table, by table name."""
        return {self.table_of_item(s).name: s for s in range(len(self))}

    @cached_property
    def cache_counts(self) -> CacheCounts:
        """The embedding caches in device memory that a plan's ops may have."""
        # Widths of all shards that a plan may have: a cache is as wide as its widest.
        cached = [t for t in self.problem.tables if t.in_host_memory]
        whole = [
            (run, Shard.whole(t))
            for t in cached
            for run in sharding_kinds_for_tables([t])
            if run.may_cache_rows
        ]
        narrow = [
            (parts[0][0], self._column_blocks_of_item(s, 0, blocks)[0])
            for s, parts in enumerate(self.parts)
            if self.table_of_item(s).in_host_memory
            for blocks in range(1, self.size[s])
        ]
        return CacheCounts.from_shards([*whole, *narrow])

    def covers_shards(self, shards: Sequence[Shard]) -> bool:
        """Tell if shards make up exactly the items of the options, with sequences cut into the same widths."""
        items = bundle_shards(join_columns(shards), self.problem)
        return self._cut_sequences == _cut_sequence_widths(shards) and self.items == items

    def table_of_item(self, item: int) -> Table:
        """The table of an item; of a bundle (tables kept together), the first."""
        return self.items[item][0].table

    def shard_key(self, shard: Shard) -> ShardKey:
        """A shard as (item, number of blocks). A table of a bundle has the key of the bundle."""
        item = self._item_of_shard(shard)
        return item, self._block_count(item, shard)

    def _item_of_shard(self, shard: Shard) -> int:
        """Number of the item that contains a shard."""
        return next(
            i
            for whole, i in self._items_at[row_range_of_shard(shard)]
            if whole.col_lo <= shard.col_lo < whole.col_hi
        )

    def shard_keys(self, shards: Iterable[Shard]) -> list[ShardKey]:
        """Keys (item, number of column blocks) of shards, one for each bundle of tables kept together."""
        return [self.shard_key(bundle[0]) for bundle in bundle_shards(shards, self.problem)]

    def deal_bundles(self, keys: Sequence[ShardKey]) -> list[ShardBundle]:
        """The bundle of shards of each key, with columns of an item dealt out from left to right."""
        # [S] the block with which an item's next shard begins.
        begins, dealt = [0] * len(self), []
        for item, blocks in keys:
            dealt.append(self._column_blocks_of_item(item, begins[item], begins[item] + blocks))
            begins[item] += blocks
        return dealt

    def _block_count(self, item: int, shard: Shard) -> int:
        # A bundle is a single block.
        """Number of an item's blocks in a shard."""
        return shard.width // int(self.block_width[item]) if len(self.items[item]) == 1 else 1

    def _max_blocks(self, item: int) -> int:
        """The most blocks of an item that one device may hold."""
        table = self.table_of_item(item)
        # Two parts on a device would be one wider than the others, and TorchRec needs all equally wide.
        if table.sequence and item in self._cut_before:
            return 1
        if table.dim <= self.problem.topology.max_shard_columns:
            return int(self.size[item])
        # FBGEMM's CUDA op runs no wider shard.
        return max(1, self.problem.max_shard_width(table) // int(self.block_width[item]))

    def _equivalence_key(self, item: int) -> Hashable:
        """A key that items share if they differ in table names only, so that their options are the same."""
        kinds_of = self.problem.restricted_kinds_by_table
        shards = (
            (_BUT_NAME(s.table), s.row_lo, s.row_hi, s.col_lo, s.col_hi, kinds_of.get(s.table.name))
            for s in self.items[item]
        )
        return self.kind[item], self.block_width[item], self.most[item], *shards

    @property
    def peak_bytes(self) -> np.ndarray:
        """[O] peak memory of each option alone on a device."""
        return self.alone[:, PEAK_BYTES].astype(np.int64)

    @property
    def single_op_ms(self) -> np.ndarray:
        """[O] ms of an op with only this option, at speed 1."""
        return self.alone[:, SINGLE_MS]

    @property
    def output_bytes(self) -> np.ndarray:
        """[O] bytes of lookup outputs of each option."""
        return self.vectors[:, ENTERED]

    @property
    def min_shards(self) -> np.ndarray:
        """[S] fewest shards into which each item has to be cut, by memory and FBGEMM's limits."""
        return np.maximum(self._n_before, -(-self.size // self.most))

    def _column_blocks_of_item(self, item: int, low: int, high: int) -> ShardBundle:
        """Shards of the column blocks `low` to `high` of an item."""
        bundle = self.items[item]
        # Tables kept together always come here: they are never cut.
        if high - low == self.size[item]:
            return bundle
        whole, block = bundle[0], int(self.block_width[item])
        columns = whole.col_lo + low * block, whole.col_lo + high * block
        return (Shard(whole.table, whole.row_lo, whole.row_hi, *columns),)

    def may_split(self, item: int) -> bool:
        """Tell if an item may be cut by columns into several shards.

        TorchRec needs all shards of a sequence equally wide.
        So one is cut only where it does not fit whole, and then no further.
        """
        table = self.table_of_item(item)
        return (
            not self.is_range[item]
            and table.name not in self.problem.uncut_tables
            and (not table.sequence or item in self._cut_before)
        )

    def add_merged_shards(self, keys: Iterable[ShardKey]) -> None:
        """Make options of all shards that may form on a device when shards of a plan merge.

        Their blocks are the sums of any subset of an item's shards.
        """
        sums: dict[int, set[int]] = defaultdict(lambda: {0})
        for item, blocks in keys:
            sums[item] |= {held + blocks for held in sums[item]}
        self.make_shards(*np.array([(item, blocks) for item in sums for blocks in sorted(sums[item])]).T)

    def make_shards(self, items: np.ndarray, blocks: np.ndarray) -> None:
        """Make options of shards, given by items [N] and blocks [N], where they do not exist yet."""
        items = self.like[items]
        missing = self._numbers[items, blocks] < 0
        if not missing.any():
            return
        new = list(dict.fromkeys(zip(items[missing].tolist(), blocks[missing].tolist(), strict=True)))
        # Columns are exchangeable, so the first u blocks stand for any.
        made = [self._column_blocks_of_item(s, 0, u) for s, u in iterate_with_progress(new)]
        numbers = self._make_options(
            [
                [(run, shard) for (run, _), shard in zip(self.parts[s], bundle, strict=True)]
                for (s, _), bundle in zip(new, made, strict=True)
            ]
        )
        # Numbers go on from the last option and never change, so states may keep them.
        items_of_new, blocks_of_new = np.array(new).T
        self._numbers[items_of_new, blocks_of_new] = numbers
        self.made[numbers[0] : numbers[-1] + 1] = made
        possible = blocks_of_new <= self.most[items_of_new]
        # Checking each shard takes long, so it is skipped where nothing can refuse one.
        problem, most_columns = self.problem, self.problem.topology.max_shard_columns
        if (
            problem.restricted_kinds_by_table
            or problem.codecs_may_fail
            or any(t.dim > most_columns for t in problem.tables)
        ):
            possible &= [
                all(fits_single_device_by_width(shard, problem) for shard in bundle) for bundle in made
            ]
        # As resident bytes that no device has, impossible shards need no check of their own in searches.
        self.vectors[numbers[~possible], RESIDENT] = self.alone[numbers[~possible], PEAK_BYTES] = IMPOSSIBLE

    @cached_property
    def shared_options(self) -> np.ndarray:
        """[2, Y, S] option numbers of each item on devices of a group that shares it: all but the last device, and
        the last.

        0 where the shared kind does not run the item.
        """
        shape, parts = (len(self.shared_kinds), len(self)), list[list[Part]]()
        shared = np.zeros((2, *shape), np.int64)
        for y, shared_kind in enumerate(self.shared_kinds):
            size = len(shared_kind.device_groups(self.problem.topology)[0])
            for s in iterate_with_progress(np.unique(self.like).tolist()):
                table = self.table_of_item(s)
                # One op runs a collection's tables.
                if (table.sequence, table.collection) != (shared_kind.sequence, shared_kind.collection):
                    continue
                if table.in_host_memory and not shared_kind.may_cache_rows:
                    continue
                each = even_row_share(table.rows, size) if shared_kind.divides_rows else None
                parts.append([(shared_kind, Shard(table, 0, each or table.rows, 0, table.dim))])
                shared[:, y, s] = len(parts)
                # The last device has the rows that are left.
                if each and each * size != table.rows:
                    parts.append([(shared_kind, Shard(table, each * (size - 1), table.rows, 0, table.dim))])
                    shared[1, y, s] = len(parts)
        return np.insert(self._make_options(parts), 0, 0)[shared.take(self.like, 2)] if parts else shared

    def may_share(self, item: int, y: int) -> bool:
        """Tell if groups of devices may share item s by shared kind y.

        Kinds that divide rows need unordered rows that may be divided, and at least one row for each device.
        They also need that no item is a row range, as those would run in the same op.
        """
        table, shared_kind, problem = self.table_of_item(item), self.shared_kinds[y], self.problem
        if (
            not self.shared_options[0, y, item]
            or self.is_range[item]
            or table.name in {**problem.pinned_devices, **problem.group_by_table}
        ):
            return False
        divides = not shared_kind.divides_rows or (
            not (table.ordered or table.name in problem.uncut_tables or self.is_range.any())
            and even_row_share(table.rows, len(shared_kind.device_groups(problem.topology)[0])) is not None
        )
        return divides and problem.can_run_table(shared_kind, table)

    def _make_options(self, options: Sequence[Sequence[Part]]) -> np.ndarray:
        """Make options, each of shards on one device with their shared kinds. Returns their numbers [N]."""
        begin, runs, owners = len(self.vectors), [parts[0][0] for parts in options], list(range(len(options)))
        rows, following, flat = list[int](), [0] * len(options), [part for parts in options for part in parts]
        for i, parts in enumerate(options):
            row_of = {parts[0][0]: i}
            for run, _ in parts:
                # Tables of a bundle that run differently are a chain of options. Further ones come after all others.
                if run not in row_of:
                    row_of[run] = len(runs)
                    following.append(following[i])
                    following[i] = begin + len(runs)
                    runs.append(run)
                    owners.append(i)
                rows.append(row_of[run])
        vectors, alone = (np.zeros((len(runs), of.shape[1])) for of in (self.vectors, self.alone))
        for total, each in zip(
            (vectors, alone[:, :PEAK_BYTES]), self.vectors_and_batch_shares(flat), strict=True
        ):
            np.add.at(total, rows, each)
        # Further options of a chain are in every plan, so the engine counts their local batch apart.
        alone[len(options) :] = 0.0
        run = np.array([self.runs.index(run) for run in runs], np.int64)
        # Resident and arrived, and the rest in the phase in which it takes most.
        peaks = vectors[:, RESIDENT] + moments_beyond_resident(self.problem)[0, -1, 2] * vectors[:, ARRIVED]
        peaks += (vectors[:, [ENTERED, LOOKUPS]] * self.stages.max_multiples[run]).sum(1)
        codes = vectors[:, self.first_code :]
        ms = np.asarray(self.model.op_ms(codes))
        # The second copy of an option costs no launch.
        added_ms = np.maximum(0.0, np.asarray(self.model.op_ms(2 * codes)) - ms)
        # The first option of a chain has what all of them cost and take.
        alone[:, PEAK_BYTES:] = np.stack(
            [np.bincount(owners, each, len(runs)) for each in (peaks, added_ms, ms)], 1
        )
        self.vectors = np.concatenate([self.vectors, vectors])
        self.options = np.concatenate([self.options, np.array([run, following]).T])
        self.alone = np.concatenate([self.alone, alone])
        self.made += [self.items[0]] * len(runs)
        return np.arange(begin, begin + len(options))

    def vectors_and_batch_shares(self, parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray]:
        """[N, V] vectors that shards add to an op, and [N, 4] their shares of a local batch.

        Bytes are linear in columns. So those of a row range follow from its narrowest and its widest shard.
        Caches of whole MiB are not, so shards that have one are counted each.
        """
        problem, n_sums = self.problem, CACHED
        widths = np.array([shard.width for _, shard in parts])
        keys = [
            (
                run,
                row_range_of_shard(s),
                width if s.table.in_host_memory and not s.table.lower_tier.shares_cache else 0,
            )
            for (run, s), width in zip(parts, widths.tolist(), strict=True)
        ]
        numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        of_range = np.array([numbers[key] for key in keys])
        order = np.lexsort((widths, of_range))
        _, begins, counts = np.unique(of_range[order], return_index=True, return_counts=True)
        # [2, ranges] the narrowest shard of each row range, and the widest. Only these are counted exactly.
        ends = order[np.stack([begins, begins + counts - 1])]
        exact = {
            i: (*_sums_of_op(run, shard, problem), *local_batch_share(run, shard, problem))
            for i, (run, shard) in ((i, parts[i]) for i in iterate_with_progress(np.unique(ends).tolist()))
        }
        narrow, wide = np.array([[exact[i] for i in of] for of in ends.tolist()], float)
        # A line: bytes of the narrowest shard, and their growth by column.
        a_column = (wide - narrow) / np.maximum(1, np.diff(widths[ends], axis=0).T)
        sums = narrow[of_range] + a_column[of_range] * (widths - widths[ends[0]][of_range])[:, None]
        local = sums[:, n_sums:]
        local[:, CUT] = widths < [shard.table.dim for _, shard in parts]
        # A local batch has a table's ids and outputs once, whatever ranges of its rows devices have.
        local[[shard.row_lo > 0 for _, shard in parts]] = 0.0
        vectors = np.zeros((len(parts), self.vectors.shape[1]))
        vectors[:, :n_sums] = sums[:, :n_sums]
        for i, (run, shard) in enumerate(parts) if len(self.cache_counts) else ():
            for c, n in self.cache_counts.shard_counts(run, shard).items():
                vectors[i, CACHED + c] = n
        # Replicas look up a local batch, other kinds the global one.
        batch_of = {run: run.op_batch(problem) for run in dict.fromkeys(run for run, _ in parts)}
        for batch in dict.fromkeys(batch_of.values()):
            some = [i for i, (run, _) in enumerate(parts) if batch_of[run] == batch]
            vectors[some, self.first_code :] = encode_shards([parts[i][1] for i in some], self.model, batch)
        return vectors, local

    def option_numbers(self, items: Integers, blocks: Integers) -> np.ndarray:
        """[...] option numbers of shards, given by items and blocks, which broadcast. -1 for shards without an
        option.

        The shards have to be computed before: the number of any other is -1.
        """
        return self._numbers[self.like[items], blocks]


def _sums_of_op(sharding_kind: ShardingKind, shard: Shard, problem: Problem) -> tuple[float, ...]:
    """Entries that a shard adds to the vector of its op: bytes and counts, without those of caches."""
    of = shard_sums(sharding_kind, shard, problem)
    return (
        of.always_bytes(sharding_kind, problem),
        of.arrived,
        of.entered,
        of.lookups,
        of.features,
        of.on_host,
    )


def encode_shards(shards: Sequence[Shard], model: Encoder, batch: int | None = None) -> np.ndarray:
    """[N, F] a cost model's encodings of shards, computed a chunk at a time."""
    chunks = []
    for i in range(0, len(shards), _ENCODED_AT_ONCE):
        # A chunk may take seconds.
        tick()
        chunks.append(np.asarray(model.encode(shards[i : i + _ENCODED_AT_ONCE], batch), dtype=float))
    return np.concatenate(chunks)


def _cut_sequence_widths(shards: Iterable[Shard]) -> frozenset[tuple[str, int]]:
    """Names and shard widths of sequence tables that are cut by columns."""
    return frozenset((s.table.name, s.width) for s in shards if s.table.sequence and s.width < s.table.dim)
