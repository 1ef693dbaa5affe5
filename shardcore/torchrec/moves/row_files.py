"""Rows of a job's tables on disk, by their ids: independent of plan, hot ids and ranks.

Each rank writes its rows with their ids and optimizer state. To load, each rank reads the ids that it needs
from the files of all ranks. So training goes on under another plan, with other kinds of sharding, with
another number of ranks, or with other hot ids, and nobody needs the plan that wrote them.

Tables of collections that a module wraps (managed collision, feature processors) are left to the job's own
checkpoint.

A rank holds one file's tensors at a time in memory. complete.json, written last, has the digest of each file:
a folder that is not whole, and a flipped bit, are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require, short_repr
from shardcore.io.envelope import read_record, sealed_document
from shardcore.io.model_files import UNREADABLE
from shardcore.io.schema import require_file
from shardcore.io.writing import write_atomic, write_json
from shardcore.tables.hot_rows import COLD, INSIDE
from shardcore.torchrec.modules import collections_of_model
from shardcore.torchrec.moves.agreement import rank_and_world_size
from shardcore.torchrec.moves.rows import (
    WEIGHTS,
    DenseOptimizer,
    Key,
    Part,
    dense_state_granularity,
    key_name,
    parts_on_rank,
    replicated_part,
    zero_optimizer_state,
)

_COMPLETE = "rows-complete"


def save_rows(model: nn.Module, folder: str | Path, optimizer: Any = None) -> None:
    """Write the rows and optimizer state of a model's tables to a folder. All ranks call it.

    optimizer: the job's, of replicas and hot rows. Their state is written too, with that of fused optimizers.

    Raises ShardCoreError for a model without tables, a folder that has other rows, and state of an optimizer
    that is not known.
    """
    from safetensors.torch import save

    folder, rank, n = Path(folder), *rank_and_world_size()
    # All checks before the first write, so that a refused save leaves no files.
    with _raise_on_all_ranks():
        # Replicas are equal on all ranks: rank 0 writes them.
        parts = list(_parts_of_model(model, optimizer, replicas=rank == 0))
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0 and (old := next(folder.glob("rows-*.safetensors"), None)):
            raise ShardCoreError(f"{folder} has rows already, such as {old.name}; save to an empty folder")
    files: dict[str, Any] = {}
    with _raise_on_all_ranks():
        for i, part in enumerate(parts):
            # One part at a time on the CPU, to bound memory.
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in part.tensors.items()}
            if part.ids is not None:
                tensors["ids"] = torch.from_numpy(part.ids)
            # Named by rank and part, so that ranks never write the same file.
            content, name = save(tensors), f"rows-{rank:05d}-{i:05d}.safetensors"
            write_atomic(folder / name, content)
            digest = hashlib.sha256(content).hexdigest()
            rows = part.rows if part.ids is None else None
            files[name] = asdict(_File(key_name(part.key), rows, part.columns, digest, part.step))
    of_ranks = _gather_from_ranks(files)
    with _raise_on_all_ranks():
        # Written last: without it the folder is not whole.
        if rank == 0:
            body = {"ranks": n, "files": {name: of for of_rank in of_ranks for name, of in of_rank.items()}}
            write_json(folder / "complete.json", sealed_document(_COMPLETE, body))


def load_rows(model: nn.Module, folder: str | Path, optimizer: Any = None, approximate: bool = False) -> None:
    """Fill a model's tables with rows and optimizer state that `save_rows` wrote. All ranks call it.

    optimizer: the job's, of replicas and hot rows. It gets their state.
    approximate: True to load optimizer state as well as it can be where it has another form here: a mean over
      columns, a number a row for its cells, or none.

    Raises ShardCoreError for a folder that is not whole, for rows that are missing in it, and for state that
    has another form here.
    """
    with _raise_on_all_ranks():
        folder = Path(folder)
        files = _read_manifest(folder)
        parts = list(_parts_of_model(model, optimizer, replicas=True, filling=True))
        # Columns that each row of a tensor still lacks.
        # Counted down as files are read. What is left above 0 is missing.
        missing = [{name: np.full(len(part.row_ids), part.width) for name in part.tensors} for part in parts]
        for tensor in (t for part in parts for t in part.tensors.values() if t.ndim == 1):
            tensor.zero_()  # parts of columns add up to it
        # All files of all ranks: each may have rows that this rank needs.
        for path, file in files.items():
            wanted = [x for x in zip(parts, missing, strict=True) if key_name(x[0].key) == file.table]
            if wanted:
                saved = _read_rows_file(path, file)
                for part, columns in wanted:
                    _copy_rows(part, columns, saved, approximate, path)
        for part, lacking in zip(parts, missing, strict=True):
            for name, columns in lacking.items():
                if (columns > 0).any() and (name == WEIGHTS or not approximate):
                    raise ShardCoreError(
                        f"{folder} lacks {name} of {np.count_nonzero(columns)} rows of table {key_name(part.key)!r}, "
                        f"such as id {part.row_ids[np.argmax(columns > 0)]}"
                    )


def _copy_rows(
    part: Part, missing: dict[str, np.ndarray], saved: Part, approximate: bool, path: Path
) -> None:
    """Copy rows that a saved part and a table part of this rank share. path: the file, for errors."""
    table, columns = key_name(part.key), saved.columns
    rows, into = _positions_of_shared_rows(saved, part)
    lo, hi = max(columns[0], part.columns[0]), min(columns[1], part.columns[1])
    # Rows and columns that both have: nothing else is copied.
    if not len(part.row_ids[into]) or lo >= hi:
        return
    if saved.step is not None and part.set_step is not None:
        part.set_step(saved.step)
    if (lost := saved.tensors.keys() - part.tensors.keys()) and not approximate:
        raise ShardCoreError(
            f"{path} has state {', '.join(sorted(lost))} of table {table!r}, and no optimizer here keeps it; give "
            "the optimizer, or set approximate to leave it out"
        )
    for name in part.tensors.keys() & saved.tensors.keys():
        source, tensor = saved.tensors[name], part.tensors[name]
        # State with one number a row does not say which columns it is of.
        flat = source.ndim == 1 or tensor.ndim == 1
        if not approximate and (source.ndim != tensor.ndim or (flat and columns != part.columns)):
            forms = [
                "cells" if t.ndim == 2 else f"rows of columns {c[0]} to {c[1]}"
                for t, c in ((source, columns), (tensor, part.columns))
            ]
            raise ShardCoreError(
                f"{path} has optimizer state {name!r} of table {table!r} for {forms[0]}, and here it is for "
                f"{forms[1]}; use the same optimizer and parts of columns, or set approximate to load it nearly"
            )
        values = source[rows, lo - columns[0] : hi - columns[0]] if source.ndim == 2 else source[rows]
        # A number a row of several parts: their mean, weighted by columns.
        if tensor.ndim == 1:
            tensor[into] += (
                (values.mean(1) if values.ndim == 2 else values).to(tensor) * (hi - lo) / part.width
            )
        else:
            cells = tensor[:, lo - part.columns[0] : hi - part.columns[0]]
            cells[into] = (values[:, None] if values.ndim == 1 else values).to(tensor)
        # Columns may come from several files.
        missing[name][into] -= hi - lo


def _positions_of_shared_rows(saved: Part, part: Part) -> tuple[Any, Any]:
    """Positions in the saved part and in this rank's part of the rows that both have; slices if ids are consecutive."""
    if saved.ids is None and part.ids is None:
        lo, hi = max(saved.rows[0], part.rows[0]), min(saved.rows[1], part.rows[1])
        own, other = (slice(lo - first, max(lo, hi) - first) for first in (saved.rows[0], part.rows[0]))
        return own, other
    # Both sides are sorted, so a binary search finds each row.
    ids = saved.row_ids
    at = np.searchsorted(ids, part.row_ids).clip(max=max(len(ids) - 1, 0))
    have = np.flatnonzero(ids[at] == part.row_ids) if len(ids) else np.zeros(0, dtype=int)
    return at[have], have


# --- rows of a rank -----------------------------------------------------------------------------------------


def _parts_of_model(
    model: nn.Module, optimizer: Any, replicas: bool, filling: bool = False
) -> Iterator[Part]:
    """Parts of all tables that this rank holds.

    replicas: True to count tables and hot rows that all ranks have.
    filling: True to give replicas the state that their optimizer has not made yet.
    """
    dense = DenseOptimizer(optimizer)
    collections = [c for c in collections_of_model(model, refuses_others=False) if c.wrapper is None]
    require(
        bool(collections),
        f"a {type(model).__name__} has no EmbeddingBagCollection and no EmbeddingCollection that nothing wraps; "
        "there are no rows to save or load",
    )
    for collection in collections:
        owner = collection.divider
        outer = collection.path.removesuffix(INSIDE) if owner else collection.path
        # Hot rows are in the module, not in a sharded collection.
        for name, hot in owner.hot_ids.items() if owner and replicas else ():
            part = _replicated_part_of_job((outer, name), owner.hot[name], dense, filling)
            yield replace(part, ids=hot.ids)
        for part in parts_on_rank(collection, dense):
            table = part.key[1]
            # All ranks have a collection that is not sharded.
            if not collection.is_sharded or collection.is_replicated(table):
                if not replicas:
                    continue
                part = _replicated_part_of_job(
                    part.key, collection.table_modules[table].weight, dense, filling
                )
            name = table.removesuffix(COLD) if owner else table
            # Cold rows are saved by ids of the whole table, so that other hot ids may load them.
            is_cold = name != table and name in owner.hot_ids
            ids = owner.hot_ids[name].cold_ids(*part.rows) if is_cold else None
            yield replace(part, key=(outer, name), ids=ids)


def _replicated_part_of_job(key: Key, weight: nn.Parameter, optimizer: DenseOptimizer, filling: bool) -> Part:
    """Part with all rows of a replicated table or of hot rows, under the job's dense optimizer."""
    if (found := optimizer.parameter_group(weight)) is not None:
        states = dense_state_granularity(*found)
        # Torch makes state at the first step. Loading needs it before.
        if filling and states and not optimizer.parameter_state(weight):
            found[0].state[weight] = zero_optimizer_state(*found, weight, 0)
    return replicated_part(key, weight, optimizer)


# --- files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A file of rows of a table.

    rows: [lo, hi) in the table. None: it has a tensor `ids` of them.
    columns: [lo, hi). digest: SHA-256 of the file. step: steps that the optimizer has counted.
    """

    table: str
    rows: tuple[int, int] | None
    columns: tuple[int, int]
    digest: str
    step: int | None = None


@dataclass(frozen=True)
class _Manifest:
    """complete.json: the number of ranks that wrote, and each file by its name."""

    ranks: int
    files: Mapping[str, _File]


def _read_manifest(folder: Path) -> dict[Path, _File]:
    """Files of rows that complete.json lists, by path. Raises ShardCoreError if one is missing or not listed."""
    path, names = folder / "complete.json", {p.name for p in folder.glob("rows-*.safetensors")}
    require(
        path.exists(),
        f"{folder} has {len(names)} files of rows and no complete.json; it needs a folder that save_rows finished",
    )
    files = read_record(_Manifest, path, _COMPLETE).files
    if differ := sorted(names ^ set(files)):
        raise ShardCoreError(
            f"{folder} and its complete.json differ in {len(differ)} files, such as "
            f"{short_repr(differ[0])}; it needs a folder that save_rows finished"
        )
    return {folder / name: file for name, file in sorted(files.items())}


def _read_rows_file(path: Path, file: _File) -> Part:
    """Read one file of rows. Raises ShardCoreError if the file does not match its digest in complete.json."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    require_file(path)
    try:
        with open(path, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        require(
            digest == file.digest,
            f"{path} does not match its digest in complete.json; it was cut short or edited",
        )
        tensors = load_file(path)
        ids = tensors.pop("ids").numpy() if file.rows is None else None
    except ShardCoreError:
        raise
    except (SafetensorError, *UNREADABLE) as error:
        raise ShardCoreError(f"{path} is no file of rows: {type(error).__name__}: {error}") from None
    if ids is not None and (ids.ndim != 1 or ids.dtype != np.int64 or not (ids[1:] > ids[:-1]).all()):
        raise ShardCoreError(f"{path} has ids {ids.dtype} {list(ids.shape)}; they need to be int64, rising")
    part = Part(("", file.table), file.rows or (0, 0), file.columns, tensors, file.step, ids=ids)
    n = part.rows[1] - part.rows[0] if ids is None else len(ids)
    for name, tensor in tensors.items():
        require(
            tensor.is_floating_point() and tuple(tensor.shape) in ((n,), (n, part.width)),
            f"{path} has {short_repr(name)} {tensor.dtype} {list(tensor.shape)} for {n} rows and {part.width} "
            "columns; it needs numbers of rows or cells",
        )
    return part


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
    messages = _gather_from_ranks(failure and str(failure))
    if failure or any(messages):
        raise failure or ShardCoreError(next(filter(None, messages)))


def _gather_from_ranks(value: Any) -> list[Any]:
    """List of the values that all ranks pass, by rank."""
    values = [value] * rank_and_world_size()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
