"""ShardCostCache: memory and cost of what a device can hold, looked up instead of computed again.

A search works on integers. Three words, used in all of search/:

strip: the columns of one row range, or all tables of a bundle. Mostly a strip is a whole table.
unit: MIN_WIDTH columns of a strip. A bundle is a single unit.
part: what one device holds of a strip. It depends on the number of units only. Part 0 is nothing.

A piece is (strip, units). Two pieces of a strip that meet on a device make one larger part.
The cache keeps each part's encoding, bytes, width and cost.
So moving columns between devices is adding and subtracting rows of arrays.

Shapes: S strips, R parts, F features, D devices, K kinds; ... leading dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.layouts import LAYOUTS, WHOLE_ROWS
from shardcore.search.free_memory import item_bytes
from shardcore.search.pieces import Item, RowRange, devices_of, items, join_columns, layout_of_piece, row_range
from shardcore.types import MIN_WIDTH, Problem, Shard, Table
from shardcore.workload import traffic_of_widths

Piece = tuple[int, int]
"""Strip and number of units."""


class ShardCostCache:
    """The parts of the strips that `pieces` cover, under one problem and model. `add` and `need` make parts.

    kinds: [K] kinds of sharding of the pieces. The first is that of whole rows.
    speed: [D] speed factors.
    allowed: [S, D] where a strip may be.
    freedom: [S] on how many devices it may be.
    kind: [S] number of the strip's kind.
    size: [S] units of the whole strip.
    codes: [R, F] encodings.
    bytes: [R] memory.
    width: [R] units of columns.
    single_ms: [R] cost of an op with only this part, at speed 1.
    """

    def __init__(self, problem: Problem, model: CostModel, pieces: Iterable[Shard]) -> None:
        self.problem, self.model = problem, model
        self.speed = np.array([d.speed for d in problem.topology.devices])
        self._strips = _strips_of(pieces, problem)
        self._shards: dict[RowRange, list[tuple[Shard, int]]] = defaultdict(list)
        for i, item in enumerate(self._strips):
            for shard in item:
                self._shards[row_range(shard)].append((shard, i))
        of_strip = [layout_of_piece(item[0], problem) for item in self._strips]
        self.kinds = tuple(layout for layout in LAYOUTS.values() if layout is WHOLE_ROWS or layout in of_strip)
        self.kind = np.array([self.kinds.index(layout) for layout in of_strip])
        self.size = np.array([self._units(i, item[0]) for i, item in enumerate(self._strips)])
        self.allowed = np.ones((len(self._strips), len(problem.topology)), dtype=bool)
        for i, first in enumerate(item[0] for item in self._strips):
            if self.kind[i] or first.table.name in problem.pinned:
                self.allowed[i] = False
                self.allowed[i, list(devices_of(first, problem))] = True
        self.freedom = self.allowed.sum(1)
        # -1: not made yet.
        self._parts = np.full((len(self._strips), self.size.max() + 1), -1)
        self._parts[:, 0] = 0
        self._made: list[Item] = [self._strips[0]]  # part 0: any item will do, its values are zeroed
        self._codes, self._single_ms = np.zeros((0, 1)), np.zeros(0)
        self.bytes, self.width = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        """S."""
        return len(self._strips)

    def covers(self, pieces: Iterable[Shard]) -> bool:
        """Whether these pieces make up exactly the strips of the cache."""
        return self._strips == _strips_of(pieces, self.problem)

    def table(self, strip: int) -> Table:
        """The strip's table, or the first table of a bundle."""
        return self._strips[strip][0].table

    def piece(self, shard: Shard) -> Piece:
        """The piece of a shard. A table of a bundle belongs to the bundle's piece."""
        strip = next(i for whole, i in self._shards[row_range(shard)]
                     if whole.col_lo <= shard.col_lo < whole.col_hi)
        return strip, self._units(strip, shard)

    def pieces(self, shards: Iterable[Shard]) -> list[Piece]:
        """The pieces of shards. A bundle, of which all tables or none are given, is one piece."""
        return [self.piece(item[0]) for item in items(shards, self.problem)]

    def items(self, pieces: Sequence[Piece]) -> list[Item]:
        """Pieces as shards, with columns dealt out in the order given. A strip must not be exceeded."""
        taken, found = [0] * len(self._strips), []
        for strip, units in pieces:
            found.append(self._item(strip, taken[strip], taken[strip] + units))
            taken[strip] += units
        return found

    def _units(self, strip: int, shard: Shard) -> int:
        return shard.width // MIN_WIDTH if len(self._strips[strip]) == 1 else 1

    def _item(self, strip: int, low: int, high: int) -> Item:
        """The shards of units low to high of a strip."""
        item = self._strips[strip]
        # Only a whole bundle, or a strip with gaps, has several shards.
        if high - low == self.size[strip]:
            return item
        whole = item[0]
        col_lo, col_hi = (whole.col_lo + units * MIN_WIDTH for units in (low, high))
        return (Shard(whole.table, whole.row_lo, whole.row_hi, col_lo, col_hi),)

    def may_split(self, piece: Piece) -> bool:
        """Whether the piece may be cut by columns. A row range may not: it has only one device."""
        strip, units = piece
        return units > 1 and not self.kind[strip] and self.table(strip).name not in self.problem.whole

    def add(self, pieces: Iterable[Piece]) -> None:
        """Make all parts that the pieces of one plan can form on a device.

        These are the sums of any subset of a strip's pieces.
        """
        sums: dict[int, set[int]] = {}
        for strip, units in pieces:
            held = sums.setdefault(strip, {0})
            sums[strip] = held | {h + units for h in held}
        self._make([(s, u) for s in sums for u in sorted(sums[s]) if self._parts[s, u] < 0])

    def need(self, strips: np.ndarray, units: np.ndarray) -> None:
        """Make the parts of these numbers of units; strips and units are [N]."""
        missing = self._parts[strips, units] < 0
        if missing.any():
            self._make(list(dict.fromkeys(zip(strips[missing].tolist(), units[missing].tolist(), strict=True))))

    def _make(self, new: list[Piece]) -> None:
        """Compute memory and width now; encodings wait until someone asks (_encode)."""
        if not new:
            return
        made, first = [self._item(s, 0, u) for s, u in new], len(self._made)
        self._made += made
        self.bytes = np.concatenate([self.bytes, [item_bytes(item, self.problem) for item in made]])
        self.width = np.concatenate([self.width, [sum(s.width for s in item) // MIN_WIDTH for item in made]])
        for i, (s, u) in enumerate(new):
            self._parts[s, u] = first + i

    @property
    def codes(self) -> np.ndarray:
        """[R, F] encodings of all parts made so far."""
        self._encode()
        return self._codes

    @property
    def single_ms(self) -> np.ndarray:
        """[R] ms of all parts made so far."""
        self._encode()
        return self._single_ms

    def _encode(self) -> None:
        """Encode the parts made since the last call. Lazy: some callers need only bytes."""
        if new := self._made[len(self._codes):]:
            codes = np.asarray(self.model.encode([s for item in new for s in item]), dtype=float)
            # A bundle's part sums the encodings of its tables.
            codes = np.add.reduceat(codes, np.cumsum([0, *map(len, new[:-1])]))
            codes[0] *= len(self._codes) > 0  # part 0 is nothing
            self._codes = np.concatenate([self._codes.reshape(-1, codes.shape[1]), codes])
            self._single_ms = np.concatenate([self._single_ms, self.model.head(codes)])

    def parts(self, strips: np.ndarray, units: np.ndarray) -> np.ndarray:
        """[...] part numbers of these numbers of units; both arguments broadcast.

        The parts have to be made before: an unknown one is -1.
        """
        return self._parts[strips, units]

    def total_ms(self, compute_ms: np.ndarray, units: np.ndarray) -> np.ndarray:
        """[...] ms of a step, from compute and columns. Equal to price(lower(plan, problem), model).total_ms.

        compute_ms: [..., D] at each device's speed.
        units: [..., D, K] of each kind.
        """
        widths = {layout: MIN_WIDTH * units[..., k] for k, layout in enumerate(self.kinds)}
        traffic = traffic_of_widths(widths, self.problem)
        return (compute_ms + self.model.comm(traffic, compute_ms, self.problem.topology).total_ms).max(-1)

    def plan_ms(self, pieces: Sequence[Piece], devices: Sequence[int]) -> float:
        """ms of the plan that puts pieces[i] on devices[i]."""
        self.add(pieces)
        held = np.zeros((len(self), len(self.speed)), dtype=int)
        np.add.at(held, ([s for s, _ in pieces], list(devices)), [u for _, u in pieces])
        parts = self.parts(np.arange(len(self))[:, None], held)  # [S, D]
        sums, width = (np.stack([of[parts[self.kind == k]].sum(0) for k in range(len(self.kinds))], axis=1)
                       for of in (self.codes, self.width))
        # The shards of a kind run as one fused op: price sums, not shards.
        compute_ms = self.model.head(sums.reshape(-1, sums.shape[-1])).reshape(-1, len(self.kinds)).sum(1) / self.speed
        return float(self.total_ms(compute_ms, width))


def _strips_of(pieces: Iterable[Shard], problem: Problem) -> list[Item]:
    return items(join_columns(pieces), problem)
