"""Options: memory and cost of what a device can hold, looked up instead of computed again.

A search works on integers. Two words, used in all of search/:

strip: columns that devices divide among them. Mostly those of a whole table; else of a row range, or a bundle.
unit: the columns of which a strip's shards have multiples: Problem.unit_width, or MIN_WIDTH by default.
  Tables kept together are a single unit. A sequence that is cut has equal parts, each a unit.

Columns of a strip are exchangeable. So a shard is (strip, units): how many it has, not which.
Two shards of a strip that meet on a device make one wider shard.
Each shard has a number, at which arrays keep its encoding, bytes, width and cost. Number 0 is nothing.
So moving columns between devices is adding and subtracting rows of arrays.

Shapes: S strips, U units of the largest strip, R shards, F features, D devices, K kinds; ... leading dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import gcd
from typing import Generic, Protocol, TypeVar

import numpy as np

from shardcore.core.job import PIPELINES
from shardcore.core.progress import tick, ticking
from shardcore.core.types import Problem, Shard, Table
from shardcore.step.id_bytes import sample_bytes
from shardcore.step.kinds import WHOLE_ROWS, Layout, run_of, runs_of
from shardcore.step.memory import Caches
from shardcore.step.memory_account import StageCoefficients, sums_of
from shardcore.step.shard_memory import bucketized_bytes
from shardcore.step.ways import (
    IMPOSSIBLE,
    Bundle,
    RowRange,
    bundles,
    devices_of,
    join_columns,
    layout_of_shard,
    may_be_on_a_device,
    required_division,
    row_range,
)

_ENCODED_AT_ONCE = 1 << 14
"""Shards that are encoded between two reports of progress."""


class Encoder(Protocol):
    """What options need of a cost model (cost.model.CostModel)."""

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray: ...
    def head(self, sums: np.ndarray) -> np.ndarray: ...


Model = TypeVar("Model", bound=Encoder)
ShardKey = tuple[int, int]
"""A shard as strip and number of units."""
Integers = int | np.ndarray
"""An integer, or one for each plan of a batch."""


class Options(Generic[Model]):
    """The strips that `shards` cover, and shards of them, under one problem and model.

    `add` and `need` compute shards.

    strips: [S] the bundle that is the whole strip: mostly a single shard.
    parts: [S] the run and the shard of each table of a strip. Tables of a bundle may run differently.
    made: [R] the bundle of each number. Number 0 stands for nothing, though it has one.
    kinds: runs of the strips (kinds.runs_of).
    speed: [D] speed factors.
    allowed: [S, D] devices where a strip may be.
    freedom: [S] number of these devices. Strips with least freedom are placed first, as others could take their
      memory and go elsewhere: the rule of the least flexible job (Pinedo, Scheduling, 5.1).
    kind: [S] number of the strip's run in `kinds`. Of a bundle, its first table counts.
    is_range: [S] whether the strip is a row range.
    unit: [S] columns of a unit of the strip, or of the first table of a bundle.
    size: [S] units of the whole strip.
    most: [S] units that a device may have.
    codes: [R, F] encodings.
    strip_of: [R] strip of each shard.
    sums: [R, 6] contribution to a device's memory (memory_account.Sums).
    bytes: [R] peak memory of the shard alone. An estimate of what it adds to a device's.
    outputs: [R] bytes of outputs.
    single_ms: [R] cost of an op with only this shard, at speed 1.
    """

    def __init__(self, problem: Problem, model: Model, shards: Iterable[Shard]) -> None:
        self.problem, self.model = problem, model
        self.speed = np.array([d.speed for d in problem.topology.devices])
        shards = list(shards)
        tick()
        self.strips, self._cut_sequences = _strips_of(shards, problem), _cut_sequences(shards)
        # By row range, so that a shard's strip is one of few.
        self._strips_at: dict[RowRange, list[tuple[Shard, int]]] = defaultdict(list)  # (whole strip, number)
        for i, bundle in enumerate(self.strips):
            for shard in bundle:
                self._strips_at[row_range(shard)].append((shard, i))
        runs = [layout_of_shard(bundle[0], problem) for bundle in ticking(self.strips)]
        # In the order of runs_of, whatever the order of the shards.
        self.kinds = tuple(run for run in runs_of(problem.tables) if run in runs)
        self.kind = np.array([self.kinds.index(run) for run in runs])
        # A row range is never in a bundle, so tables after the first run as whole rows.
        self.parts = [
            [(run, bundle[0]), *((run_of(WHOLE_ROWS.name, s.table), s) for s in bundle[1:])]
            for run, bundle in zip(runs, self.strips, strict=True)
        ]
        self.is_range = np.array([not bundle[0].full_rows for bundle in self.strips])
        self.unit = np.array([problem.unit_width(bundle[0].table) for bundle in self.strips])
        widths: dict[int, list[int]] = defaultdict(list)
        for shard in shards:
            if shard.table.sequence:
                widths[self._strip(shard)].append(shard.width)
        for strip, of_parts in widths.items():
            # A sequence that is cut has equal parts.
            self.unit[strip] = gcd(*of_parts) if len(of_parts) > 1 else self.unit[strip]
        self.size = np.array([self._units(i, bundle[0]) for i, bundle in enumerate(self.strips)])
        keys = self.keys(ticking(shards))
        # Cut already because they do not fit whole: of sequences, only these may be cut.
        self._cut_before = {strip for strip, units in keys if units < self.size[strip]}
        # [S] shards of each strip. With fewer, some would not fit.
        self._n_before = np.bincount([strip for strip, _ in keys], minlength=len(self))
        self.most = np.array([self._most(i) for i in range(len(self))])
        self.allowed = np.ones((len(self), len(problem.topology)), dtype=bool)
        for i, (first, *_) in enumerate(self.strips):
            if self.is_range[i] or first.table.name in problem.pinned:
                self.allowed[i] = False
                self.allowed[i, list(devices_of(first, problem))] = True
        self.freedom = self.allowed.sum(1)
        # [S, U + 1] number of the shard with so many units. -1: not computed yet.
        self._numbers = np.full((len(self), self.size.max() + 1), -1)
        self._numbers[:, 0] = 0
        self.made: list[Bundle] = [self.strips[0]]  # number 0: any will do, its values are zeroed
        self._codes, self._single_ms = np.zeros((0, 1)), np.zeros(0)
        self.strip_of, self.sums = np.zeros(1, dtype=np.int64), np.zeros((1, 6))
        # One row each, of number 0.
        self.bytes, self.outputs = (np.zeros(1, dtype=np.int64) for _ in range(2))
        all_runs = {*self.kinds, *(run for parts in self.parts for run, _ in parts)}
        # [2] the largest multiples of what entered and of lookups in any phase, for peaks of single shards.
        self._multiples = {run: StageCoefficients.of((run,), problem).most[0] for run in all_runs}

    def __len__(self) -> int:
        """S."""
        return len(self.strips)

    @cached_property
    def strip_by_name(self) -> dict[str, int]:
        """A strip of each table, by name: the same one for all row ranges. Of a bundle only the first table."""
        return {self.table(s).name: s for s in range(len(self))}

    @cached_property
    def local_ids(self) -> np.ndarray:
        """[S] bytes of a strip's ids in a local batch, as they are sent.

        Those of a table's row ranges count for the first of them.
        """
        n_bytes = np.zeros(len(self))
        for i, shard in (
            (i, s) for i, bundle in enumerate(ticking(self.strips)) for s in bundle if s.row_lo == 0
        ):
            n_bytes[i] += sample_bytes(shard.table, self.problem.job)
            # Divided rows need their ids in buckets, too, one for each device.
            if not shard.full_rows:
                n_devices = len(required_division(shard.table, self.problem).devices)
                n_bytes[i] += bucketized_bytes(shard.table, self.problem.job, n_devices)
        return self.problem.local_batch * n_bytes

    @cached_property
    def caches(self) -> Caches:
        """The caches in device memory that a plan's ops may have."""
        # Widths of all shards that a plan may have: a cache is as wide as its widest.
        cached = [t for t in self.problem.tables if t.in_host_memory]
        whole = [(run, Shard.whole(t)) for t in cached for run in runs_of([t]) if run.caches]
        narrow = [
            (parts[0][0], self._columns(s, 0, units)[0])
            for s, parts in enumerate(self.parts)
            if self.table(s).in_host_memory
            for units in range(1, self.size[s])
        ]
        return Caches.of([*whole, *narrow])

    def covers(self, shards: Sequence[Shard]) -> bool:
        """Tell if these shards make up exactly the strips of the cache, with sequences cut the same."""
        return self._cut_sequences == _cut_sequences(shards) and self.strips == _strips_of(
            shards, self.problem
        )

    def table(self, strip: int) -> Table:
        """The strip's table, or the first of several kept together."""
        return self.strips[strip][0].table

    def key(self, shard: Shard) -> ShardKey:
        """A shard as strip and units. A table kept together with others has the key of their bundle."""
        strip = self._strip(shard)
        return strip, self._units(strip, shard)

    def _strip(self, shard: Shard) -> int:
        return next(
            i for whole, i in self._strips_at[row_range(shard)] if whole.col_lo <= shard.col_lo < whole.col_hi
        )

    def keys(self, shards: Iterable[Shard]) -> list[ShardKey]:
        """One key for each bundle of these shards. All of a bundle's tables have to be given, or none."""
        return [self.key(bundle[0]) for bundle in bundles(shards, self.problem)]

    def bundles(self, keys: Sequence[ShardKey]) -> list[Bundle]:
        """The bundle of each key, with columns dealt out in the order given. A strip must not be exceeded."""
        # [S] the unit with which a strip's next shard begins.
        begins, dealt = [0] * len(self), []
        for strip, units in keys:
            dealt.append(self._columns(strip, begins[strip], begins[strip] + units))
            begins[strip] += units
        return dealt

    def _units(self, strip: int, shard: Shard) -> int:
        # A bundle is a single unit.
        return shard.width // int(self.unit[strip]) if len(self.strips[strip]) == 1 else 1

    def _most(self, strip: int) -> int:
        """Units that a device may have of a strip."""
        table = self.table(strip)
        # Two parts on a device would be one wider than the others, and TorchRec needs all equally wide.
        if table.sequence and strip in self._cut_before:
            return 1
        if table.dim <= self.problem.topology.most_columns:
            return int(self.size[strip])
        # FBGEMM's CUDA op runs no wider shard.
        return max(1, self.problem.most_width(table) // int(self.unit[strip]))

    @property
    def least_parts(self) -> np.ndarray:
        """[S] fewest shards of a strip that devices' memory and FBGEMM allow."""
        return np.maximum(self._n_before, -(-self.size // self.most))

    def _columns(self, strip: int, low: int, high: int) -> Bundle:
        """Units low to high of a strip."""
        bundle = self.strips[strip]
        # Tables kept together always come here: they are never cut.
        if high - low == self.size[strip]:
            return bundle
        whole, unit = bundle[0], int(self.unit[strip])
        columns = whole.col_lo + low * unit, whole.col_lo + high * unit
        return (Shard(whole.table, whole.row_lo, whole.row_hi, *columns),)

    def may_split(self, key: ShardKey) -> bool:
        """Tell if the shard may be cut by columns. A row range may not: it has only one device.

        TorchRec needs all shards of a sequence equally wide.
        So one is cut only where it does not fit whole, and then no further.
        """
        strip, units = key
        table = self.table(strip)
        return (
            units > 1
            and not self.is_range[strip]
            and table.name not in self.problem.whole
            and (not table.sequence or strip in self._cut_before)
        )

    def add(self, keys: Iterable[ShardKey]) -> None:
        """Compute all shards that those of one plan can form on a device.

        Their units are the sums of any subset of a strip's shards.
        """
        sums: dict[int, set[int]] = defaultdict(lambda: {0})
        for strip, units in keys:
            sums[strip] |= {held + units for held in sums[strip]}
        self._make([(s, u) for s in sums for u in sorted(sums[s]) if self._numbers[s, u] < 0])

    def need(self, strips: np.ndarray, units: np.ndarray) -> None:
        """Compute the shards of these strips [N] and units [N]."""
        missing = self._numbers[strips, units] < 0
        if missing.any():
            new = zip(strips[missing].tolist(), units[missing].tolist(), strict=True)
            self._make(list(dict.fromkeys(new)))

    def _make(self, new: list[ShardKey]) -> None:
        """Compute memory and outputs now; encodings wait until someone asks (_encode)."""
        if not new:
            return
        # Columns are exchangeable, so the first u units stand for any.
        made = [self._columns(s, 0, u) for s, u in ticking(new)]
        runs = [[run for run, _ in self.parts[s]] for s, _ in new]
        # The tables of all bundles in one list, so that numpy takes them at once.
        of_shards = [pair for pairs in map(zip, runs, made) for pair in pairs]
        # [shards, 6] before bundles are added up.
        each = self._sums_of(of_shards)
        begins = np.cumsum([0, *map(len, made[:-1])])
        sums = np.add.reduceat(each, begins)
        # Resident and arrived, and the rest in the phase in which it takes most.
        resident, arrived, entered, lookups, _, _ = each.T
        of_entered, of_lookup = np.array([self._multiples[run] for run, _ in of_shards]).T
        pipeline = PIPELINES[self.problem.job.pipeline]
        copies = max(ids.arrived for ids in pipeline.moments) - pipeline.least_arrived
        peaks = resident + copies * arrived + (entered * of_entered + lookups * of_lookup)
        n_bytes = np.add.reduceat(peaks, begins)
        strips, units = np.array(new).T
        possible = units <= self.most[strips]
        # Checking each shard takes long, so it is skipped where nothing can refuse one.
        most_columns = self.problem.topology.most_columns
        if (
            self.problem.kinds_of
            or self.problem.codecs_fail
            or any(t.dim > most_columns for t in self.problem.tables)
        ):
            possible &= [all(may_be_on_a_device(shard, self.problem) for shard in bundle) for bundle in made]
        # As resident bytes that no device has, impossible shards need no check of their own in searches.
        sums[~possible, 0] = n_bytes[~possible] = IMPOSSIBLE
        entered = sums.T[2]
        # Numbers go on from the last shard and never change, so states may keep them.
        self._numbers[strips, units] = len(self.made) + np.arange(len(new))
        self.made += made
        for name, values in (
            ("strip_of", strips),
            ("sums", sums),
            ("bytes", n_bytes.astype(np.int64)),
            ("outputs", entered.astype(np.int64)),
        ):
            setattr(self, name, np.concatenate([getattr(self, name), values]))

    def _sums_of(self, shards: Sequence[tuple[Layout, Shard]]) -> np.ndarray:
        """[N, 6] memory_account.Sums of shards and their runs.

        They are linear in columns. So those of a row range follow from its narrowest and its widest shard.
        Caches of whole MiB are not, so shards that have one are counted each.
        """
        apart = {t.name for t in self.problem.tables if t.in_host_memory and not t.below.shares_cache}
        keys = [
            (run, row_range(shard), shard.width if apart and shard.table.name in apart else 0)
            for run, shard in shards
        ]
        # Two exact counts for each row range, in place of one for each of its shards.
        groups: dict[tuple[Layout, RowRange, int], dict[int, Shard]] = defaultdict(dict)  # by width
        for key, (_, shard) in zip(keys, shards, strict=True):
            groups[key][shard.width] = shard
        lines = {}
        for key, group in ticking(groups.items()):
            run, narrow, wide = key[0], min(group), max(group)
            # A line: sums of the narrowest shard, and their growth by column.
            sums, a_column = np.array(sums_of(run, group[narrow], self.problem)), np.zeros(6)
            if wide > narrow:
                a_column = (sums_of(run, group[wide], self.problem) - sums) / (wide - narrow)
            lines[key] = sums, a_column, narrow
        of_shards = [(*lines[key], shard.width) for key, (_, shard) in zip(keys, shards, strict=True)]
        sums, a_column, narrow, width = map(np.array, zip(*of_shards, strict=True))
        return sums + a_column * (width - narrow)[:, None]

    @property
    def codes(self) -> np.ndarray:
        """[R, F] encodings of all shards computed so far."""
        self._encode()
        return self._codes

    @property
    def single_ms(self) -> np.ndarray:
        """[R] ms of all shards computed so far."""
        self._encode()
        return self._single_ms

    def _encode(self) -> None:
        """Encode the shards computed since the last call. Lazy: some callers need only bytes."""
        # Shards that are not encoded yet are the last ones.
        if new := self.made[len(self._codes) :]:
            codes = encoded([s for bundle in new for s in bundle], self.model)
            # A bundle's encoding is the sum of its shards'.
            codes = np.add.reduceat(codes, np.cumsum([0, *map(len, new[:-1])]))
            codes[0] *= len(self._codes) > 0  # number 0 is nothing
            self._codes = np.concatenate([self._codes.reshape(-1, codes.shape[1]), codes])
            self._single_ms = np.concatenate([self._single_ms, self.model.head(codes)])

    def numbers(self, strips: Integers, units: Integers) -> np.ndarray:
        """[...] numbers of the shards of these strips and units; both arguments broadcast.

        The shards have to be computed before: the number of any other is -1.
        """
        return self._numbers[strips, units]


def encoded(shards: Sequence[Shard], model: Encoder, batch: int | None = None) -> np.ndarray:
    """[N, F] the model's encodings, a chunk at a time. batch: as in Encoder.encode."""
    chunks = []
    for i in range(0, len(shards), _ENCODED_AT_ONCE):
        # A chunk may take seconds.
        tick()
        chunks.append(np.asarray(model.encode(shards[i : i + _ENCODED_AT_ONCE], batch), dtype=float))
    return np.concatenate(chunks)


def _cut_sequences(shards: Iterable[Shard]) -> frozenset[tuple[str, int]]:
    """Sequences that are cut by columns, and the widths of their shards."""
    return frozenset((s.table.name, s.width) for s in shards if s.table.sequence and s.width < s.table.dim)


def _strips_of(shards: Iterable[Shard], problem: Problem) -> list[Bundle]:
    return bundles(join_columns(shards), problem)
