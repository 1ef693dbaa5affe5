"""Rows of a job's tables in a PyTorch Distributed Checkpoint (DCP): independent of plan, hot ids and ranks.

    save_rows(model, "rows/", optimizer)  # all ranks
    load_rows(model, "rows/", optimizer)  # another job: other ranks, plan, kinds of sharding or hot ids

Each table is one tensor of the checkpoint, under its name in the module's state_dict. A rank writes its rows and
columns as chunks. To load, it reads the chunks that overlap with its own. Names and shapes are those of a TorchRec
job's `dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})`. So such a checkpoint loads here,
and DCP reads what is written here. (P: path of a collection, T: name of a table.)

| tensor | key | size |
|---|---|---|
| weights | P.embedding_bags.T.weight or P.embeddings.T.weight | [R, D] |
| weights of cold rows | P.cold.embeddings.T_cold.weight | [R - H, D] |
| weights and ids of hot rows | P.hot.T, P.hot_ids_T | [H, D], [H] |
| state with a number a weight | state.WEIGHTS.NAME | as of the weights |
| state with a number a row | state.WEIGHTS.NAME | [K R], each part of columns after another; [R, 1] of replicas |
| how many steps were counted | state.WEIGHTS.step | [] |

NAME is that of torch.optim, such as `sum`. Of fused optimizers it is T.momentum1 for the first state, else T.NAME.

Tables of collections that a module wraps (managed collision, feature processors) are left to the job's own
checkpoint.

Shapes: R rows, D columns, H hot rows, K parts of columns on all ranks, N rows and W columns of a rank's part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require, short_repr
from shardcore.io.hot_ids import HotIds
from shardcore.tables.hot_rows import COLD, INSIDE
from shardcore.torchrec.modules import Collection, collections_of_model
from shardcore.torchrec.moves.agreement import rank_and_world_size
from shardcore.torchrec.moves.checkpoint_files import (
    METADATA,
    CheckedReader,
    PieceWriter,
    raise_checkpoint_errors,
    remove_unfinished_files,
)
from shardcore.torchrec.moves.rows import (
    STATES,
    STEP,
    WEIGHTS,
    DenseOptimizer,
    Key,
    TablePart,
    dense_state_granularity,
    key_name,
    parts_on_rank,
    replicated_part,
    zero_optimizer_state,
)
from shardcore.torchrec.moves.transfer import Range

_FIRST_STATE = "momentum1"
"""TorchRec's name of a fused optimizer's first state."""


def save_rows(model: nn.Module, folder: str | Path, optimizer: Any = None, piece_mib: float = 16.0) -> None:
    """Write the rows and optimizer state of a model's tables to a folder. All ranks call it.

    optimizer: the job's, of replicas and hot rows. Their state is written too, with that of fused optimizers.
    piece_mib: most MiB of a chunk that is written. A rank holds up to 256 MiB of chunks in memory, or one.

    Raises ShardCoreError for a model without tables, a folder that has a checkpoint, state of an optimizer that is
    not known, and a rank that cannot write.
    """
    tensors, planner = _prepare_save(model, Path(folder), optimizer, piece_mib)
    with raise_checkpoint_errors(folder):
        save(tensors, storage_writer=PieceWriter(folder), planner=planner)


@dataclass(frozen=True)
class SavingRows:
    """Rows that are being written while the job trains on (`start_saving_rows`)."""

    folder: str | Path
    written: Future
    group: Any

    def is_done(self) -> bool:
        """Tell if this rank has nothing left to write, whether or not it failed."""
        return self.written.done()

    def wait(self) -> None:
        """Wait until the rows of all ranks are written. Each rank calls it once. Raises as `save_rows`."""
        try:
            with raise_checkpoint_errors(self.folder):
                self.written.result()
        finally:
            if self.group is not None:
                dist.destroy_process_group(self.group)


def start_saving_rows(
    model: nn.Module, folder: str | Path, optimizer: Any = None, piece_mib: float = 16.0
) -> SavingRows:
    """Copy a rank's rows and optimizer state to CPU memory, and write the copy in the background. All ranks call it.

    The job may train on at once. Arguments, and what is raised, are those of `save_rows`. A rank that cannot write
    raises at `SavingRows.wait`. Until then no other save may go to the folder.
    """
    tensors, planner = _prepare_save(model, Path(folder), optimizer, piece_mib)
    # The job uses its own group meanwhile.
    group: Any = dist.new_group(backend="gloo") if rank_and_world_size()[1] > 1 else None
    with raise_checkpoint_errors(folder):
        written: Any = async_save(
            tensors, storage_writer=PieceWriter(folder), planner=planner, process_group=group
        )
    return SavingRows(folder, getattr(written, "upload_completion", written), group)


def load_rows(model: nn.Module, folder: str | Path, optimizer: Any = None, approximate: bool = False) -> None:
    """Fill a model's tables with rows and optimizer state of a checkpoint. All ranks call it.

    folder: of `save_rows`, or of `torch.distributed.checkpoint.save` of the state_dict of a TorchRec job's model and
      optimizer, under any plan, and with any names in front of theirs.
    optimizer: the job's, of replicas and hot rows. It gets their state.
    approximate: True to load optimizer state as well as it can be where it has another form here: a mean over
      columns, a number a row for its cells, or none.

    Raises ShardCoreError for a folder that is not whole, for rows that are missing in it, and for state that
    has another form here. After an error in a file, a model may have some of its rows.
    """
    with _raise_on_all_ranks():
        reader = CheckedReader(folder)
        parts = [named.part for named in _parts_of_model(model, optimizer, filling=True)]
        saved = _saved_rows_by_table(model, reader)
        reads = [r for part in parts for r in _reads_of_part(part, saved[part.key], approximate, folder)]
        for tensor in (t for part in parts for t in part.tensors.values() if t.ndim == 1):
            tensor.zero_()  # parts of columns add up to it
    with raise_checkpoint_errors(folder):
        load({}, storage_reader=reader, planner=_LoadPlanner(reads))


# --- rows of a rank -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NamedPart:
    """A part of a table on this rank, and the tensor of a checkpoint that has its weights.

    part: with the key of the whole table, and ids in it.
    weights: key of the tensor. size: its [R, D].
    cuts: ranges of columns of the parts on all ranks, rising.
    fused: the table's name if a fused optimizer has its state, else "".
    """

    part: TablePart
    weights: str
    size: tuple[int, int]
    cuts: tuple[Range, ...]
    fused: str

    def rectangles(self) -> Iterator[_Rectangle]:
        """Weights and optimizer state, and where they are in tensors of a checkpoint."""
        part, (rows, _), state = self.part, self.size, f"state.{self.weights}."
        at = part.rows[0], part.columns[0]
        for i, (name, tensor) in enumerate(part.tensors.items()):
            key = self.weights
            if name != WEIGHTS:
                key = state + (f"{self.fused}.{_FIRST_STATE if i == 1 else name}" if self.fused else name)
            if tensor.ndim == 2:
                yield _Rectangle(key, self.size, at, tensor)
            elif self.fused:
                first = self.cuts.index(part.columns) * rows + at[0]
                yield _Rectangle(key, (len(self.cuts) * rows,), (first,), tensor)
            else:
                yield _Rectangle(key, (rows, 1), at, tensor[:, None])
        if part.step is not None:
            yield _Rectangle(state + STEP, (), (), torch.tensor(part.step, dtype=torch.float64))


@dataclass(frozen=True)
class _Rectangle:
    """Numbers of a tensor of a checkpoint that this rank has.

    key, size: of the tensor. first: place of the first number in it.
    """

    key: str
    size: tuple[int, ...]
    first: tuple[int, ...]
    tensor: torch.Tensor


def _parts_of_model(model: nn.Module, optimizer: Any, filling: bool = False) -> Iterator[_NamedPart]:
    """Parts of all tables that this rank holds, also those that all ranks have.

    filling: True to give replicas the state that their optimizer has not made yet.
    """
    dense = DenseOptimizer(optimizer)
    for collection, outer in _collections(model):
        owner, configs = collection.divider, {c.name: c for c in collection.table_configs}
        # Hot rows are in the module, not in a sharded collection.
        for name, hot in owner.hot_ids.items() if owner else ():
            part = replace(
                _replicated_part_of_job((outer, name), owner.hot[name], dense, filling), ids=hot.ids
            )
            yield _NamedPart(
                part, _joined(outer, "hot", name), tuple(owner.hot[name].shape), (part.columns,), ""
            )
        for part in parts_on_rank(collection, dense):
            table, fused = part.key[1], part.key[1]
            cuts = (part.columns,)
            # All ranks have a collection that is not sharded.
            if not collection.is_sharded or collection.is_replicated(table):
                weight, fused = collection.table_modules[table].weight, ""
                part = _replicated_part_of_job(part.key, weight, dense, filling)
            else:
                shards = collection.module.module_sharding_plan[table].sharding_spec.shards
                ends = {(s.shard_offsets[1], s.shard_offsets[1] + s.shard_sizes[1]) for s in shards}
                cuts = tuple(sorted(ends))
            name = table.removesuffix(COLD) if owner else table
            # Cold rows have ids in the whole table, so that other hot ids may load them.
            is_cold = name != table and name in owner.hot_ids
            ids = owner.hot_ids[name].cold_ids(*part.rows) if is_cold else None
            size = configs[table].num_embeddings, configs[table].embedding_dim
            part = replace(part, key=(outer, name), ids=ids)
            yield _NamedPart(part, collection.weights_name(table), size, cuts, fused)


def _collections(model: nn.Module) -> list[tuple[Collection, str]]:
    """Collections whose rows are saved, each with its path: of cold rows, that of the module that has hot ones, too.

    Raises ShardCoreError for a model without any.
    """
    collections = [c for c in collections_of_model(model, refuses_others=False) if c.wrapper is None]
    require(
        bool(collections),
        f"a {type(model).__name__} has no EmbeddingBagCollection and no EmbeddingCollection that nothing wraps; "
        "there are no rows to save or load",
    )
    return [
        (c, f".{c.path}".removesuffix(INSIDE).removeprefix(".") if c.divider else c.path) for c in collections
    ]


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _replicated_part_of_job(
    key: Key, weight: nn.Parameter, optimizer: DenseOptimizer, creates_missing_state: bool
) -> TablePart:
    """Part with all rows of a replicated table or of hot rows, under the job's dense optimizer."""
    if (found := optimizer.parameter_group(weight)) is not None:
        states = dense_state_granularity(*found)
        # Torch makes state at the first step. Loading needs it before.
        if creates_missing_state and states and not optimizer.parameter_state(weight):
            found[0].state[weight] = zero_optimizer_state(*found, weight, 0)
    return replicated_part(key, weight, optimizer)


# --- saving -------------------------------------------------------------------------------------------------


def _prepare_save(
    model: nn.Module, folder: Path, optimizer: Any, piece_mib: float
) -> tuple[dict[str, Any], _SavePlanner]:
    """Tensors to save, each under a name, and their planner."""
    # All checks before the first write, so that a refused save leaves no files.
    with _raise_on_all_ranks():
        require(piece_mib > 0, f"piece_mib is {piece_mib}; it needs to be above 0")
        found = [r for part in _parts_of_model(model, optimizer) for r in part.rectangles()]
        for collection, outer in _collections(model):
            for name, hot in collection.divider.hot_ids.items() if collection.divider else ():
                ids = torch.from_numpy(hot.ids)
                found.append(_Rectangle(_joined(outer, f"hot_ids_{name}"), tuple(ids.shape), (0,), ids))
        require(
            not (folder / METADATA).exists(),
            f"{folder} has a checkpoint already, as it has a {METADATA}; save to an empty folder",
        )
        if rank_and_world_size()[0] == 0:
            remove_unfinished_files(folder)
    # Parts of one table have one count of steps.
    rectangles = {f"{r.key} {r.first}": r for r in found}
    planner = _SavePlanner(
        {name: replace(r, tensor=torch.empty(0)) for name, r in rectangles.items()}, piece_mib
    )
    return {name: r.tensor for name, r in rectangles.items()}, planner


class _SavePlanner(DefaultSavePlanner):
    """Writes a rank's rectangles of tensors, in pieces. Where several ranks have one, DCP chooses who writes it.

    places: rectangles by the name of each in the state_dict, which has their numbers: copies, in the background.
    """

    def __init__(self, places: Mapping[str, _Rectangle], piece_mib: float) -> None:
        super().__init__()
        self._places, self._piece_bytes = places, piece_mib * 2**20

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict: dict[str, Any] = state_dict
        self._pieces: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, place in self._places.items():
            tensor = self.state_dict[name]
            rows, *others = tensor.shape or (1,)
            step = max(1, int(self._piece_bytes // max(1, prod(others) * tensor.itemsize)))
            for lo in range(0, rows, step):
                piece = tensor[lo : lo + step] if tensor.ndim else tensor
                first = torch.Size([place.first[0] + lo, *place.first[1:]] if tensor.ndim else [])
                chunk = ChunkStorageMetadata(first, piece.shape)
                data = TensorWriteData(chunk, TensorProperties(tensor.dtype), torch.Size(place.size))
                items.append(
                    WriteItem(MetadataIndex(place.key, first), WriteItemType.SHARD, tensor_data=data)
                )
                self._pieces[items[-1].index] = piece
        # As DCP has it of a state_dict without others in it.
        return SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._pieces[write_item.index].detach()


# --- loading ------------------------------------------------------------------------------------------------

_Tensor = tuple[str, TensorStorageMetadata]
"""Key of a tensor in a checkpoint, and what its metadata says of it."""


@dataclass(frozen=True)
class _SavedRows:
    """Rows of a table in a checkpoint: all, the hot or the cold ones.

    tensors: weights, optimizer state and count of steps, by the names of a part.
    hot: hot ids of the table. None: it has all rows.
    is_hot: True if it has the hot rows.
    """

    tensors: Mapping[str, _Tensor]
    hot: HotIds | None
    is_hot: bool

    @property
    def size(self) -> torch.Size:
        """[R, D] of the weights."""
        return self.tensors[WEIGHTS][1].size

    def part(self, rows: Range, columns: Range) -> TablePart:
        """A part of the saved rows, without tensors."""
        ids = None
        if self.hot is not None:
            ids = self.hot.ids[slice(*rows)] if self.is_hot else self.hot.cold_ids(*rows)
        return TablePart(("", ""), rows, columns, {}, ids=ids)

    def chunks(self, name: str) -> Iterator[tuple[ChunkStorageMetadata, Range, Range, bool]]:
        """Chunks of a tensor: each with its rows and columns, and True if it has a number a row.

        Raises ShardCoreError for a tensor that is no weights and no state of these rows.
        """
        (key, tensor), (rows, dim) = self.tensors[name], self.size
        weights = self.tensors[WEIGHTS][1].chunks
        cuts = sorted({(c.offsets[1], c.offsets[1] + c.sizes[1]) for c in weights if prod(c.sizes)})
        # A number a row of a replica, and of each part of columns.
        is_column = name != WEIGHTS and tensor.size == (rows, 1)
        is_flat = is_column or tensor.size == (rows * len(cuts),)
        chunks = [c for c in tensor.chunks if prod(c.sizes)]
        require(
            (is_flat or tensor.size == (rows, dim))
            and tensor.properties.dtype.is_floating_point
            and all(c.offsets[0] % rows + c.sizes[0] <= rows for c in chunks),
            f"a checkpoint has {short_repr(key)} {tensor.properties.dtype} {list(tensor.size)} for {rows} rows and "
            f"{dim} columns in {len(cuts)} parts; it needs numbers of rows or cells",
        )
        for chunk in chunks:
            cut, row = divmod(chunk.offsets[0], rows)
            columns = (0, dim)
            if not is_flat:
                columns = (chunk.offsets[1], chunk.offsets[1] + chunk.sizes[1])
            elif not is_column:
                columns = cuts[cut]
            yield chunk, (row, row + chunk.sizes[0]), columns, is_flat


@dataclass(frozen=True)
class _TensorRead:
    """Rows and columns of a chunk that a part of this rank takes.

    tensor: its name in the part, or STEP.
    columns: those that both have.
    saved: the rows.
    type: of the saved numbers.
    item: the read in DCP's terms. Its target is known by number.
    """

    part: TablePart
    tensor: str
    columns: Range
    saved: Callable[[], TablePart]
    type: torch.dtype
    item: ReadItem

    def copy_to_part(self, values: torch.Tensor) -> None:
        """Copy numbers that were read to the part: [N, W] cells, [N] or [N, 1] of rows, or [] of steps."""
        if self.tensor == STEP:
            self.part.set_step(int(values))  # type: ignore[misc]
            return
        rows, into = _positions_of_shared_rows(self.saved(), self.part)
        tensor, (lo, hi) = self.part.tensors[self.tensor], self.columns
        values = values[rows]
        # A number a row of several parts: their mean, weighted by columns.
        if tensor.ndim == 1:
            tensor[into] += values.view(len(values), -1).mean(1).to(tensor) * ((hi - lo) / self.part.width)
        else:
            cells = tensor[:, lo - self.part.columns[0] : hi - self.part.columns[0]]
            cells[into] = values.view(len(values), -1).to(tensor)


class _LoadPlanner(DefaultLoadPlanner):
    """A rank's reads. DCP's reader takes each from its chunk."""

    def __init__(self, reads: Sequence[_TensorRead]) -> None:
        super().__init__()
        self._reads = reads

    def create_local_plan(self) -> LoadPlan:
        numbered = enumerate(read.item for read in self._reads)
        return LoadPlan([replace(item, dest_index=MetadataIndex(str(i))) for i, item in numbered])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self._reads[int(read_item.dest_index.fqn)].type)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._reads[int(read_item.dest_index.fqn)].copy_to_part(tensor)


def _reads_of_part(
    part: TablePart, saved: Sequence[_SavedRows], approximate: bool, folder: str | Path
) -> Iterator[_TensorRead]:
    """Reads that fill a part. Raises ShardCoreError for rows that are missing, and state of another form."""
    table = key_name(part.key)
    lacking = {name: np.ones(len(tensor), dtype=bool) for name, tensor in part.tensors.items()}
    for rows in saved:
        own, into = _positions_of_shared_rows(rows.part((0, rows.size[0]), (0, rows.size[1])), part)
        # Rows that both have: nothing else is read.
        if _span(own) is None:
            continue
        if (lost := rows.tensors.keys() - part.tensors.keys() - {STEP}) and not approximate:
            raise ShardCoreError(
                f"{folder} has state {', '.join(sorted(lost))} of table {table!r}, and no optimizer here keeps it; "
                "give the optimizer, or set approximate to leave it out"
            )
        if STEP in rows.tensors and part.set_step is not None:
            key, count = rows.tensors[STEP]
            nothing = torch.Size()
            item = ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(key),
                nothing,
                MetadataIndex(key, nothing),
                nothing,
                nothing,
            )
            yield _TensorRead(part, STEP, part.columns, lambda: part, count.properties.dtype, item)
        for name in part.tensors.keys() & rows.tensors.keys():
            lacking[name][into] = False
            yield from _reads_of_tensor(part, name, rows, approximate, folder)
    for name, missing in lacking.items():
        if missing.any() and (name == WEIGHTS or not approximate):
            raise ShardCoreError(
                f"{folder} lacks {name} of {np.count_nonzero(missing)} rows of table {table!r}, such as id "
                f"{part.row_ids[np.argmax(missing)]}"
            )


def _reads_of_tensor(
    part: TablePart, name: str, saved: _SavedRows, approximate: bool, folder: str | Path
) -> Iterator[_TensorRead]:
    """Reads of chunks of a tensor that overlap with a part."""
    (key, of), flat = saved.tensors[name], part.tensors[name].ndim == 1
    for chunk, rows, columns, is_flat in saved.chunks(name):
        own, _ = _positions_of_shared_rows(saved.part(rows, columns), part)
        lo, hi = max(columns[0], part.columns[0]), min(columns[1], part.columns[1])
        if (span := _span(own)) is None or lo >= hi:
            continue
        # State with one number a row does not say which columns it is of.
        if not approximate and (is_flat != flat or (flat and columns != part.columns)):
            forms = [
                f"rows of columns {c[0]} to {c[1]}" if by_row else "cells"
                for by_row, c in ((is_flat, columns), (flat, part.columns))
            ]
            raise ShardCoreError(
                f"{folder} has optimizer state {name!r} of table {key_name(part.key)!r} for {forms[0]}, and here it is "
                f"for {forms[1]}; use the same optimizer and parts of columns, or set approximate to load it nearly"
            )
        n = len(chunk.sizes)
        first = torch.Size([span[0], 0 if is_flat else lo - columns[0]][:n])
        lengths = torch.Size([span[1] - span[0], 1 if is_flat else hi - lo][:n])
        index = MetadataIndex(key, chunk.offsets)
        item = ReadItem(LoadItemType.TENSOR, index, torch.Size([0] * n), index, first, lengths)
        between = partial(saved.part, (rows[0] + span[0], rows[0] + span[1]), (lo, hi))
        yield _TensorRead(part, name, (lo, hi), between, of.properties.dtype, item)


def _positions_of_shared_rows(saved: TablePart, part: TablePart) -> tuple[Any, Any]:
    """Positions in the saved part and in this rank's part of the rows that both have; slices if ids are consecutive."""
    if saved.ids is None and part.ids is None:
        lo, hi = max(saved.rows[0], part.rows[0]), min(saved.rows[1], part.rows[1])
        own, other = (slice(lo - first, max(lo, hi) - first) for first in (saved.rows[0], part.rows[0]))
        return own, other
    ids = saved.row_ids
    ends = (ids[0], ids[-1] + 1) if len(ids) else (0, 0)
    # Of the part's rows only those between: it may have many more than a chunk.
    if part.ids is None:
        lo, hi = np.clip(ends, *part.rows) - part.rows[0]
        wanted = np.arange(part.rows[0] + lo, part.rows[0] + hi)
    else:
        lo, hi = np.searchsorted(part.ids, ends)
        wanted = part.ids[lo:hi]
    # Both sides are sorted, so a binary search finds each row.
    at = np.searchsorted(ids, wanted)
    have = np.flatnonzero(ids[at] == wanted)
    return at[have], lo + have


def _span(positions: Any) -> Range | None:
    """First and last of positions that rise, the latter exclusive; None if there are none."""
    if isinstance(positions, slice):
        return (positions.start, positions.stop) if positions.start < positions.stop else None
    return (int(positions[0]), int(positions[-1]) + 1) if len(positions) else None


def _saved_rows_by_table(model: nn.Module, reader: CheckedReader) -> dict[Key, list[_SavedRows]]:
    """What a checkpoint has of each table of a model.

    Raises ShardCoreError for a tensor that it has twice, and a table of another width.
    """
    tables = {}
    for collection, outer in _collections(model):
        owner, form = collection.divider, "embedding_bags" if collection.is_pooled else "embeddings"
        for config in owner.whole_table_configs().values() if owner else collection.table_configs:
            name, inside = config.name, (outer + INSIDE).removeprefix(".")
            # Keys that its rows may have, by the name that the table has in each.
            tables[outer, name] = (
                config.embedding_dim,
                {
                    _joined(outer, form, name, "weight"): name,
                    _joined(inside, "embeddings", name, "weight"): name,
                    (cold := _joined(inside, "embeddings", name + COLD, "weight")): name + COLD,
                    (hot := _joined(outer, "hot", name)): name,
                },
                (cold, hot, _joined(outer, f"hot_ids_{name}")),
            )
    found = _found_tensors(reader, {key for _, keys, parts in tables.values() for key in (*keys, *parts)})
    saved: dict[Key, list[_SavedRows]] = defaultdict(list)
    for table, (dim, keys, (cold, hot, ids_key)) in tables.items():
        sizes = {key: found[key][""][1].size for key in keys if "" in found[key]}
        for key, size in sizes.items():
            require(
                len(size) == 2 and size[1] == dim,
                f"{reader.path} has {short_repr(key)} {list(size)}; table {table[1]!r} has {dim} columns here",
            )
        ids: HotIds | None = None
        if cold in sizes or hot in sizes:
            require(
                cold in sizes and hot in sizes and "" in found[ids_key],
                f"{reader.path} has only some of {cold}, {hot} and {ids_key}; all are needed",
            )
            ids = HotIds(table[1], sizes[cold][0] + sizes[hot][0], _read_ids(reader, found[ids_key][""]))
            require(
                len(ids.ids) == sizes[hot][0],
                f"{reader.path} has {len(ids.ids)} hot ids and {sizes[hot][0]} rows of {short_repr(hot)}",
            )
        for key in sizes:
            tensors = {state.removeprefix(f"{keys[key]}.") or WEIGHTS: of for state, of in found[key].items()}
            if _FIRST_STATE in tensors:
                tensors[STATES[1 + (STATES[2][1] in tensors)][0]] = tensors.pop(_FIRST_STATE)
            saved[table].append(_SavedRows(tensors, ids if key in (cold, hot) else None, key == hot))
    return saved


def _found_tensors(reader: CheckedReader, wanted: set[str]) -> dict[str, dict[str, _Tensor]]:
    """Tensors whose keys have a wanted one in them, by that and by what follows on it: "" of weights.

    Where there are several, the longest counts. What is before it, such as "model.", may be anything.

    Raises ShardCoreError if there are two.
    """
    found: dict[str, dict[str, _Tensor]] = {key: {} for key in wanted}
    for key, of in reader.checked_metadata.state_dict_metadata.items():
        words = key.split(".")
        ends = range(len(words) + 1)
        spans = [(j - i, i, j) for i in ends for j in ends[i + 1 :] if ".".join(words[i:j]) in wanted]
        if spans and isinstance(of, TensorStorageMetadata):
            _, i, j = max(spans)
            of_key, rest = found[".".join(words[i:j])], ".".join(words[j:])
            require(
                rest not in of_key,
                f"{reader.path} has {short_repr(key)} and {short_repr(of_key.get(rest, ('',))[0])}; it needs one",
            )
            of_key[rest] = key, of
    return found


def _read_ids(reader: CheckedReader, tensor: _Tensor) -> np.ndarray:
    """Ids of the often looked-up rows (hot rows) that a checkpoint has in tables of their own."""
    key, of = tensor
    ids = torch.empty(of.size, dtype=torch.int64)
    # Each rank for itself, since all need them.
    with raise_checkpoint_errors(Path(reader.path)):
        load({key: ids}, storage_reader=reader, no_dist=True)
    return ids.numpy()


@contextmanager
def _raise_on_all_ranks() -> Iterator[None]:
    """Context that raises an error of one rank on all ranks, so that no rank waits for another."""
    failure: ShardCoreError | None = None
    try:
        yield
    except ShardCoreError as error:
        failure = error
    except OSError as error:
        failure = ShardCoreError(str(error))
    # Gathered on all ranks, whether or not they failed, or one would wait.
    messages: list[str | None] = [failure and str(failure)] * rank_and_world_size()[1]
    if len(messages) > 1:
        dist.all_gather_object(messages, messages[0])
    if failure or any(messages):
        raise failure or ShardCoreError(next(filter(None, messages)))
