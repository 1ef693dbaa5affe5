"""Exchange of rows and state between the shards of two plans, in pieces of bounded size.

Each region of a table in the new plan takes what it overlaps in the old one. A rank copies what it has. The
rest goes round by round: one all-to-all each, in which no rank sends or receives more than a piece's bytes.
All ranks derive the same pieces and rounds from the two plans, so that nothing about them is sent.

Shapes: N rows, W columns of a region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from shardcore.torchrec.moves.rows import Key, RowFormat, TablePart, key_name

ALIGNMENT = 16
"""Bytes. Pieces start at multiples of it in a buffer, so that it can be viewed as any type."""
_WINDOW = 2048
"""Pieces looked at to fill a round."""
_CELLS = 1 << 18
"""Cells digested at once."""
DIGEST_BYTES = 3 * 8 * _CELLS
"""Memory of a digest: numbers of 8 bytes of its cells, times their keys, and their sums."""

Range = tuple[int, int]


@dataclass(frozen=True)
class TableRegion:
    """Rows and columns [lo, hi) of a table on a rank."""

    rank: int
    rows: Range
    columns: Range

    @property
    def cells(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class TableRegions:
    """Regions (row and column ranges) of a table on each rank under a plan.

    regions: regions of all ranks. Those of replicas are whole tables.
    replicas: True if each region has all of the table.
    format: its tensors.
    """

    regions: tuple[TableRegion, ...]
    replicas: bool
    format: RowFormat

    def regions_on_rank(self, rank: int) -> list[TableRegion]:
        """Regions of the table that a rank holds."""
        return [r for r in self.regions if r.rank == rank]

    def bytes_on_rank(self, rank: int) -> int:
        """Bytes of weights and optimizer state that a rank holds of the table."""
        return sum(
            self.format.n_bytes(r.rows[1] - r.rows[0], r.columns[1] - r.columns[0])
            for r in self.regions_on_rank(rank)
        )


@dataclass(frozen=True)
class TransferPiece:
    """A rectangle of a tensor that a rank takes from another, or from itself.

    key, name: the tensor.
    source, target: regions that have it.
    rows, columns: ends of the rectangle.
    flat: True if it has a number a row.
    share: share of the target's columns that a number of a row stands for.
    type: type of its numbers, as they are sent.
    """

    key: Key
    name: str
    source: TableRegion
    target: TableRegion
    rows: Range
    columns: Range
    flat: bool
    share: float
    type: torch.dtype

    @property
    def bytes(self) -> int:
        n = (self.rows[1] - self.rows[0]) * (1 if self.flat else self.columns[1] - self.columns[0])
        return n * self.type.itemsize

    @property
    def aligned_bytes(self) -> int:
        return -(-self.bytes // ALIGNMENT) * ALIGNMENT


def inexact_state_reason(old: TableRegions, new: TableRegions) -> str:
    """Reason why a table's optimizer state cannot move unchanged between two shardings; "" if it can.

    Inexact state is not refused: `transfer_pieces` carries it over as well as possible.

    Raises nothing: what is inexact is carried over by `pieces` as well as it can be.
    """
    before, after = dict(old.format.states), dict(new.format.states)
    for name in before.keys() - after.keys():
        return f"its state {name!r} has no place, for the optimizer there keeps none"
    for name, per in after.items():
        if name not in before:
            return f"its state {name!r} starts at 0, for the optimizer so far kept none"
        if per != before[name]:
            return f"its state {name!r} has a number a {before[name]}, and a number a {per} there"
        columns = {r.columns for r in old.regions}
        if per == "row" and not {r.columns for r in new.regions} <= columns:
            return f"its state {name!r} has a number a row of each part of columns, and there are other parts"
    if after and new.format.state.itemsize < old.format.state.itemsize:
        return f"its state is {old.format.state}, and {new.format.state} there"
    return ""


def transfer_pieces(
    key: Key, old: TableRegions, new: TableRegions, most_bytes: int
) -> Iterator[TransferPiece]:
    """Rectangles of a table that the new plan's regions take from the old plan's, on all ranks.

    most_bytes: limit of a rectangle. A row may have more.
    """
    of_old, of_new = old.format.tensor_formats(), new.format.tensor_formats()
    for target in new.regions:
        # A rank has its own replica.
        sources = old.regions_on_rank(target.rank) if old.replicas else old.regions
        for source in sources:
            rows, columns = (
                _range_overlap(source.rows, target.rows),
                _range_overlap(source.columns, target.columns),
            )
            if rows[0] >= rows[1] or columns[0] >= columns[1]:
                continue
            for name in of_new.keys() & of_old.keys():
                (flat_there, of), (flat_here, _) = of_old[name], of_new[name]
                flat = flat_there or flat_here
                each = of.itemsize * (1 if flat else columns[1] - columns[0])
                share = (columns[1] - columns[0]) / (target.columns[1] - target.columns[0])
                step = max(1, most_bytes // each)
                for lo in range(rows[0], rows[1], step):
                    hi = min(lo + step, rows[1])
                    yield TransferPiece(key, name, source, target, (lo, hi), columns, flat, share, of)


def _bytes_by_peer(by_peer: list[list[TransferPiece]]) -> list[int]:
    return [sum(p.aligned_bytes for p in of_peer) for of_peer in by_peer]


def _range_overlap(a: Range, b: Range) -> Range:
    return max(a[0], b[0]), min(a[1], b[1])


def exchange_rounds(sent: Iterable[TransferPiece], most_bytes: int) -> Iterator[list[TransferPiece]]:
    """Pieces in rounds: in each, no rank sends or receives more than most_bytes, or one piece."""
    # Pairs of ranks take turns, so that the pieces of a round are between many.
    count: dict[tuple[int, int], int] = defaultdict(int)
    ordered = []
    for i, piece in enumerate(sent):
        pair = piece.source.rank, piece.target.rank
        ordered.append((count[pair], i, piece))
        count[pair] += 1
    pending = [piece for *_, piece in sorted(ordered, key=lambda entry: entry[:2])]
    while pending:
        out, into, now, later = defaultdict[int, int](int), defaultdict[int, int](int), [], []
        for piece in islice(pending, _WINDOW):
            a, b, n = piece.source.rank, piece.target.rank, piece.aligned_bytes
            if (out[a] and out[a] + n > most_bytes) or (into[b] and into[b] + n > most_bytes):
                later.append(piece)
                continue
            out[a] += n
            into[b] += n
            now.append(piece)
        pending = later + pending[_WINDOW:]
        yield now


@dataclass(frozen=True)
class Exchange:
    """One rank's side of the transfer of moved rows.

    rank, ranks: this rank of the job, and number of ranks.
    old, new: this rank's parts by table and region.
    all_to_all: (received, sent, bytes received of each rank, bytes sent to each) runs one.
    device: device of the buffers.
    """

    rank: int
    ranks: int
    old: Mapping[tuple[Key, Range, Range], TablePart]
    new: Mapping[tuple[Key, Range, Range], TablePart]
    all_to_all: Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], None]
    device: torch.device

    def fill_new_parts(self, moved: Iterable[TransferPiece], most_bytes: int) -> None:
        """Fill this rank's new parts from the old parts of all ranks. Optimizer state has to be 0 before."""
        remote = []
        for piece in moved:
            if piece.source.rank != piece.target.rank:
                remote.append(piece)
            elif piece.source.rank == self.rank:
                self._write_piece(piece, self._read_piece(piece))
        for of_round in exchange_rounds(remote, most_bytes):
            out, into = self._pieces_by_peer(of_round, True), self._pieces_by_peer(of_round, False)
            sent, received = self._empty_buffer(out), self._empty_buffer(into)
            for piece, view in self._piece_views(sent, out):
                view.copy_(self._read_piece(piece))
            self.all_to_all(received, sent, _bytes_by_peer(into), _bytes_by_peer(out))
            for piece, view in self._piece_views(received, into):
                self._write_piece(piece, view)

    def _pieces_by_peer(self, of_round: Sequence[TransferPiece], sending: bool) -> list[list[TransferPiece]]:
        """Pieces of a transfer round that this rank sends or receives, by peer rank."""
        by_peer: list[list[TransferPiece]] = [[] for _ in range(self.ranks)]
        for piece in of_round:
            here, there = (piece.source, piece.target) if sending else (piece.target, piece.source)
            if here.rank == self.rank:
                by_peer[there.rank].append(piece)
        return by_peer

    def _empty_buffer(self, by_peer: list[list[TransferPiece]]) -> torch.Tensor:
        return torch.empty(sum(_bytes_by_peer(by_peer)), dtype=torch.uint8, device=self.device)

    def _piece_views(
        self, buffer: torch.Tensor, by_peer: list[list[TransferPiece]]
    ) -> Iterator[tuple[TransferPiece, torch.Tensor]]:
        """Views of a buffer, one for each piece in it, in the pieces' shapes."""
        at = 0
        for piece in (p for of_peer in by_peer for p in of_peer):
            view = buffer[at : at + piece.bytes].view(piece.type)
            yield piece, view if piece.flat else view.view(piece.rows[1] - piece.rows[0], -1)
            at += piece.aligned_bytes

    def _piece_cells(self, part: TablePart, piece: TransferPiece, region: TableRegion) -> torch.Tensor:
        """View of the cells of a piece within a part: [N, W], or [N] of a tensor with one number a row."""
        tensor = part.tensors[piece.name]
        lo, left = piece.rows[0] - region.rows[0], piece.columns[0] - region.columns[0]
        rows = tensor[lo : lo + piece.rows[1] - piece.rows[0]]
        return rows if tensor.ndim == 1 else rows[:, left : left + piece.columns[1] - piece.columns[0]]

    def _read_piece(self, piece: TransferPiece) -> torch.Tensor:
        """Values of a piece in the old part, reduced to one number a row if the piece is flat."""
        source = piece.source
        cells = self._piece_cells(self.old[piece.key, source.rows, source.columns], piece, source)
        return cells.mean(1) if piece.flat and cells.ndim == 2 else cells

    def _write_piece(self, piece: TransferPiece, value: torch.Tensor) -> None:
        """Write received values of a piece into the new part."""
        target = piece.target
        cells = self._piece_cells(self.new[piece.key, target.rows, target.columns], piece, target)
        if cells.ndim == 1:
            # The mean over the target's columns, of which each piece has some.
            cells.add_(value.to(cells) * piece.share)
        else:
            cells.copy_(value[:, None] if value.ndim == 1 else value)


# --- digests ------------------------------------------------------------------------------------------------


def tensor_digest(tensor: torch.Tensor, row: int, column: int, kind: torch.dtype) -> int:
    """Digest of a tensor: the sum, mod 2^64, of each number's bits times a key of its row and one of its column.

    Parts of a table add up to the same, however it is cut. Keys are odd, so that any change of one number
    changes the sum, and random, so that numbers that change places do.

    tensor: [N, W] or [N]. row, column: its first in the table. kind: type that its numbers are read as.
    """
    bits = {4: torch.int32, 2: torch.int16, 8: torch.int64}[kind.itemsize]
    n, total = max(1, _CELLS // max(1, tensor[0].numel() if len(tensor) else 1)), 0
    width = tensor.shape[1] if tensor.ndim == 2 else 1
    columns = _random_odd_keys(column, width, tensor.device, 1)
    for lo in range(0, len(tensor), n):
        of_rows = tensor[lo : lo + n]
        values = of_rows.to(kind).contiguous().view(bits).view(len(of_rows), width).long()
        rows = _random_odd_keys(row + lo, len(of_rows), tensor.device, 0)
        total += int(((values * columns).sum(1) * rows).sum())
    return total % (1 << 64)


def _random_odd_keys(first: int, n: int, device: torch.device, stream: int) -> torch.Tensor:
    """[n] odd pseudo-random keys, a function of their index and stream (SplitMix64, Steele et al. 2014)."""
    x = np.arange(first, first + n, dtype=np.uint64) * np.uint64(2) + np.uint64(stream)
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)


def tensor_digests(parts: Iterable[TablePart], formats: Mapping[Key, RowFormat]) -> dict[str, int]:
    """Digests of tensors, keyed by table and tensor name, summed over the parts of each table.

    formats: formats of tables. Their tensors are digested, in their types, and no others.
    """
    totals: dict[str, int] = {}
    for part in parts:
        for tensor, (_, kind) in formats[part.key].tensor_formats().items():
            name = f"{key_name(part.key)}.{tensor}"
            added = tensor_digest(part.tensors[tensor], part.rows[0], part.columns[0], kind)
            totals[name] = (totals.get(name, 0) + added) % (1 << 64)
    return totals
