"""Ledger: what parts of tables cost, looked up instead of computed again.

A search works on numbers: a piece is (strip, units). A strip is a row range of a table, a unit MIN_WIDTH of its columns. A *part*
is what a device holds of a strip; part 0 is nothing. The ledger keeps the encoding, the bytes, the width and the single cost of
every part in use, so that moving columns between devices is adding and subtracting rows of arrays.

Shapes: S strips, R parts, F features, D devices, 2 the kinds of op (all rows: 0, a row range: 1); ... leading dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.search.pieces import column_runs, row_range
from shardcore.search.room import piece_bytes
from shardcore.types import MIN_WIDTH, OUTPUT_BYTES, Problem, Shard, Table
from shardcore.workload import Traffic

Piece = tuple[int, int]
"""Strip and units."""


class Ledger:
    """Parts of the strips that `pieces` cover, under one problem and model.

    speed [D]; kind, size [S]: the kind of op, and units in all. codes [R, F]; bytes [R]; width [R]: in units of MIN_WIDTH
    columns; single_ms [R]: the cost of a part alone at speed 1. Parts are made by `add` and `need`.
    """

    def __init__(self, problem: Problem, model: CostModel, pieces: Iterable[Shard]) -> None:
        self.problem, self.model = problem, model
        self.speed = np.array([d.speed for d in problem.topology.devices])
        self._strips = column_runs(pieces)
        self._strip_of = {(row_range(run), c): i for i, run in enumerate(self._strips) for c in _units_of(run)}
        self.kind = np.array([0 if run.full_rows else 1 for run in self._strips])
        self.size = np.array([run.width // MIN_WIDTH for run in self._strips])
        self._parts = np.full((len(self._strips), self.size.max() + 1), -1)
        self._parts[:, 0] = 0
        n_features = model.encode([self._strips[0]]).shape[1]
        self.codes, self.single_ms = np.zeros((1, n_features)), np.zeros(1)
        self.bytes, self.width = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._strips)

    def table(self, strip: int) -> Table:
        return self._strips[strip].table

    def rows(self, strip: int) -> int:
        return self._strips[strip].rows

    def piece(self, shard: Shard) -> Piece:
        return self._strip_of[row_range(shard), shard.col_lo // MIN_WIDTH], shard.width // MIN_WIDTH

    def shards(self, pieces: Sequence[Piece]) -> list[Shard]:
        """The pieces as rectangles, columns dealt out in the order given. They must not take more than a strip has."""
        taken, shards = [0] * len(self._strips), []
        for strip, units in pieces:
            shards.append(self._shard(strip, taken[strip], taken[strip] + units))
            taken[strip] += units
        return shards

    def _shard(self, strip: int, low: int, high: int) -> Shard:
        """Units low to high of a strip."""
        run = self._strips[strip]
        return Shard(run.table, run.row_lo, run.row_hi, run.col_lo + low * MIN_WIDTH, run.col_lo + high * MIN_WIDTH)

    def may_split(self, piece: Piece) -> bool:
        strip, units = piece
        return units > 1 and self._strips[strip].table.name not in self.problem.whole

    def add(self, pieces: Iterable[Piece]) -> None:
        """Make the parts that the pieces of one plan can come to on a device: the sums of any of a strip's units."""
        sums: dict[int, set[int]] = {}
        for strip, units in pieces:
            held = sums.setdefault(strip, {0})
            sums[strip] = held | {h + units for h in held}
        self._make([(s, u) for s in sums for u in sorted(sums[s]) if self._parts[s, u] < 0])

    def need(self, strips: np.ndarray, units: np.ndarray) -> None:
        """Make the parts of so many units of strips, both [N]."""
        missing = self._parts[strips, units] < 0
        if missing.any():
            self._make(list(dict.fromkeys(zip(strips[missing].tolist(), units[missing].tolist(), strict=True))))

    def whole_pieces(self) -> list[Piece]:
        """All strips, each in one piece."""
        return list(enumerate(self.size.tolist()))

    def _make(self, new: list[Piece]) -> None:
        if not new:
            return
        shards = [self._shard(s, 0, u) for s, u in new]
        codes = np.asarray(self.model.encode(shards), dtype=float)
        first = len(self.codes)
        self.codes = np.concatenate([self.codes, codes])
        self.single_ms = np.concatenate([self.single_ms, self.model.head(codes)])
        self.bytes = np.concatenate([self.bytes, [piece_bytes(s, self.problem) for s in shards]])
        self.width = np.concatenate([self.width, [s.width // MIN_WIDTH for s in shards]])
        for i, (s, u) in enumerate(new):
            self._parts[s, u] = first + i

    def parts(self, strips: np.ndarray, units: np.ndarray) -> np.ndarray:
        """[...] the parts of so many units of strips; both [...] (broadcast). The parts must have been added."""
        return self._parts[strips, units]

    def total_ms(self, compute_ms: np.ndarray, units: np.ndarray) -> np.ndarray:
        """[...] ms of steps with compute [..., D] in ms, and per device and kind so many units of columns [..., D, 2].

        What price(lower(plan, problem), model).total_ms is for the same plan.
        """
        pooled = units * float(self.problem.global_batch * OUTPUT_BYTES * MIN_WIDTH)
        traffic = Traffic(pooled[..., 0], pooled[..., 1], np.zeros(compute_ms.shape))
        return (compute_ms + self.model.comm(traffic, compute_ms, self.problem.topology).total_ms).max(-1)

    def plan_ms(self, pieces: Sequence[Piece], devices: Sequence[int]) -> float:
        """Total cost of the plan that puts pieces[i] on devices[i], in ms."""
        self.add(pieces)
        held = np.zeros((len(self), len(self.speed)), dtype=int)
        np.add.at(held, ([s for s, _ in pieces], list(devices)), [u for _, u in pieces])
        parts = self.parts(np.arange(len(self))[:, None], held)  # [S, D]
        sums, width = (np.stack([of[parts[self.kind == k]].sum(0) for k in (0, 1)], axis=1) for of in (self.codes, self.width))
        compute_ms = self.model.head(sums.reshape(-1, sums.shape[-1])).reshape(-1, 2).sum(1) / self.speed
        return float(self.total_ms(compute_ms, width))


def _units_of(run: Shard) -> range:
    return range(run.col_lo // MIN_WIDTH, run.col_hi // MIN_WIDTH)
