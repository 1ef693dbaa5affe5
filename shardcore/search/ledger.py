"""Ledger: what parts of tables cost, looked up instead of computed again.

A search works on numbers: a piece is (strip, units), a strip being a row range of a table and a unit MIN_WIDTH of its
columns. A *part* is what a device holds of a strip; part 0 is nothing. The ledger keeps the encoding, the bytes and the
single cost of every part in use, so that moving columns between devices is adding and subtracting rows of arrays.

Shapes: S strips, R parts, F features, D devices, 2 the kinds of op (all rows: 0, a row range: 1); ... leading dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.search.pieces import column_runs, row_range
from shardcore.search.room import piece_bytes
from shardcore.types import MIN_WIDTH, OUTPUT_BYTES, Problem, Shard
from shardcore.workload import Traffic

Piece = tuple[int, int]
"""Strip and units."""


class Ledger:
    """Parts of the strips that `pieces` cover, under one problem and model.

    speed [D]; kind [S]; codes [R, F]; bytes [R]; single_ms [R]: the cost of a part alone at speed 1. Parts are made by `add`.
    """

    def __init__(self, problem: Problem, model: CostModel, pieces: Iterable[Shard]) -> None:
        self.problem, self.model = problem, model
        self.speed = np.array([d.speed for d in problem.topology.devices])
        self._strips = column_runs(pieces)
        self._strip_of = {(row_range(run), c): i for i, run in enumerate(self._strips) for c in _units_of(run)}
        self.kind = np.array([0 if run.full_rows else 1 for run in self._strips])
        most = max(run.width for run in self._strips) // MIN_WIDTH
        self._parts = np.full((len(self._strips), most + 1), -1)
        self._parts[:, 0] = 0
        n_features = model.encode([self._strips[0]]).shape[1]
        self.codes, self.bytes, self.single_ms = np.zeros((1, n_features)), np.zeros(1, dtype=np.int64), np.zeros(1)

    def __len__(self) -> int:
        return len(self._strips)

    def piece(self, shard: Shard) -> Piece:
        return self._strip_of[row_range(shard), shard.col_lo // MIN_WIDTH], shard.width // MIN_WIDTH

    def shards(self, pieces: Sequence[Piece]) -> list[Shard]:
        """The pieces as rectangles, columns dealt out in the order given. They must not take more than a strip has."""
        cursor = [run.col_lo for run in self._strips]
        shards = []
        for strip, units in pieces:
            run, low = self._strips[strip], cursor[strip]
            cursor[strip] = low + units * MIN_WIDTH
            shards.append(Shard(run.table, run.row_lo, run.row_hi, low, cursor[strip]))
        return shards

    def may_split(self, piece: Piece) -> bool:
        strip, units = piece
        return units > 1 and self._strips[strip].table.name not in self.problem.constraints.unsplit

    def add(self, pieces: Iterable[Piece]) -> None:
        """Make the parts that the pieces of one plan can come to on a device: the sums of any of a strip's units."""
        sums: dict[int, set[int]] = {}
        for strip, units in pieces:
            held = sums.setdefault(strip, {0})
            sums[strip] = held | {h + units for h in held}
        new = [(s, u) for s in sums for u in sorted(sums[s]) if self._parts[s, u] < 0]
        if not new:
            return
        shards = [Shard(*row_range(self._strips[s]), 0, u * MIN_WIDTH) for s, u in new]
        codes = np.asarray(self.model.encode(shards), dtype=float)
        first = len(self.codes)
        self.codes = np.concatenate([self.codes, codes])
        self.single_ms = np.concatenate([self.single_ms, self.model.head(codes)])
        self.bytes = np.concatenate([self.bytes, [piece_bytes(s, self.problem) for s in shards]])
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
        parts = self.codes[self.parts(np.arange(len(self))[:, None], held)]  # [S, D, F]
        sums = np.stack([parts[self.kind == k].sum(0) for k in (0, 1)], axis=1)  # [D, 2, F]
        compute_ms = self.model.head(sums.reshape(-1, sums.shape[-1])).reshape(-1, 2).sum(1) / self.speed
        return float(self.total_ms(compute_ms, np.stack([held[self.kind == k].sum(0) for k in (0, 1)], axis=1)))


def _units_of(run: Shard) -> range:
    return range(run.col_lo // MIN_WIDTH, run.col_hi // MIN_WIDTH)
