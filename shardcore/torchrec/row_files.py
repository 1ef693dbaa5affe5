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
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import shown
from shardcore.io.envelope import document, open_document, opened, seal, unseal
from shardcore.io.model_files import UNREADABLE
from shardcore.io.schema import build, parse_json, require_file
from shardcore.io.writing import write_atomic, write_json
from shardcore.tables.hot_rows import COLD, INSIDE
from shardcore.torchrec.agreement import rank_and_ranks
from shardcore.torchrec.modules import collections_of
from shardcore.torchrec.rows import (
    WEIGHTS,
    DenseOptimizer,
    Key,
    Part,
    dense_part,
    dense_states,
    fresh_state,
    key_name,
    parts_of,
)

_ROWS, _COMPLETE, _META = "rows", "rows-complete", "shardcore"


def save_rows(model: nn.Module, folder: str | Path, optimizer: Any = None) -> None:
    """Write the rows of a model's tables to a folder. All ranks call it.

    optimizer: the job's, of replicas and hot rows. Their state is written too, with that of fused optimizers.

    Raises ShardCoreError for a model without tables, a folder that has other rows, and state of an optimizer
    that is not known.
    """
    from safetensors.torch import save

    folder, rank, n = Path(folder), *rank_and_ranks()
    # All checks before the first write, so that a refused save leaves no files.
    with _all_or_none():
        # Replicas are equal on all ranks: rank 0 writes them.
        parts = list(_parts(model, optimizer, replicas=rank == 0))
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0 and (old := next(folder.glob("rows-*.safetensors"), None)):
            raise ShardCoreError(f"{folder} has rows already, such as {old.name}; save to an empty folder")
    digests: dict[str, str] = {}
    with _all_or_none():
        for i, part in enumerate(parts):
            header = {"table": key_name(part.key), "columns": part.columns, "step": part.step}
            # One part at a time on the CPU, to bound memory.
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in part.tensors.items()}
            tensors["ids"] = torch.from_numpy(part.row_ids)
            content = save(tensors, {_META: json.dumps(document(_ROWS, header))})
            name = f"rows-{rank:05d}-{i:05d}.safetensors"
            # Named by rank and part, so that ranks never write the same file.
            write_atomic(folder / name, content)
            digests[name] = hashlib.sha256(content).hexdigest()
    of_ranks = _gathered(digests)
    with _all_or_none():
        # Written last: without it the folder is not whole.
        if rank == 0:
            files = {name: digest for of_rank in of_ranks for name, digest in of_rank.items()}
            write_json(folder / "complete.json", document(_COMPLETE, seal({"ranks": n, "files": files})))


def load_rows(model: nn.Module, folder: str | Path, optimizer: Any = None, approximate: bool = False) -> None:
    """Fill a model's tables with rows that `save_rows` wrote. All ranks call it.

    optimizer: the job's, of replicas and hot rows. It gets their state.
    approximate: True to load optimizer state as well as it can be where it has another form here: a mean over
      columns, a number a row for its cells, or none.

    Raises ShardCoreError for a folder that is not whole, for rows that are missing in it, and for state that
    has another form here.
    """
    with _all_or_none():
        folder = Path(folder)
        files = _complete(folder)
        parts = list(_parts(model, optimizer, replicas=True, filling=True))
        # Columns that each row of a tensor still lacks.
        # Counted down as files are read. What is left above 0 is missing.
        missing = [{name: np.full(len(part.row_ids), part.width) for name in part.tensors} for part in parts]
        for tensor in (t for part in parts for t in part.tensors.values() if t.ndim == 1):
            tensor.zero_()  # parts of columns add up to it
        tables = {key_name(part.key) for part in parts}
        # All files of all ranks: each may have rows that this rank needs.
        for path, digest in files.items():
            if (rows := _read(path, digest, tables)) is not None:
                for part, columns in zip(parts, missing, strict=True):
                    if key_name(part.key) == rows.key[1]:
                        _fill(part, columns, rows, approximate, path)
        for part, lacking in zip(parts, missing, strict=True):
            for name, columns in lacking.items():
                if (columns > 0).any() and (name == WEIGHTS or not approximate):
                    raise ShardCoreError(
                        f"{folder} lacks {name} of {np.count_nonzero(columns)} rows of table {key_name(part.key)!r}, "
                        f"such as id {part.row_ids[np.argmax(columns > 0)]}"
                    )


def _fill(part: Part, missing: dict[str, np.ndarray], saved: Part, approximate: bool, path: Path) -> None:
    """Copy the rows of a part that a file has. path: of the file, for errors."""
    table, ids, columns = key_name(part.key), saved.row_ids, saved.columns
    # Both sides are sorted, so a binary search finds each row.
    # [N] position in the file of each row of the part, if the file has it.
    at = np.searchsorted(ids, part.row_ids).clip(max=max(len(ids) - 1, 0))
    have = np.flatnonzero(ids[at] == part.row_ids) if len(ids) else np.zeros(0, dtype=int)
    lo, hi = max(columns[0], part.columns[0]), min(columns[1], part.columns[1])
    # Rows and columns that both have: nothing else is copied.
    if not len(have) or lo >= hi:
        return
    if saved.step is not None and part.set_step is not None:
        part.set_step(saved.step)
    # Positions in the file and in the part.
    rows, into = torch.from_numpy(at[have]), torch.from_numpy(have)
    if (lost := saved.tensors.keys() - part.tensors.keys()) and not approximate:
        raise ShardCoreError(
            f"{path} has state {', '.join(sorted(lost))} of table {table!r}, and no optimizer here keeps it; give "
            "the optimizer, or set approximate to leave it out"
        )
    for name, tensor in part.tensors.items():
        if name not in saved.tensors:
            continue
        source = saved.tensors[name]
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
        into_device = into.to(tensor.device)
        if source.ndim == 2:
            source = source[:, lo - columns[0] : hi - columns[0]]
        values = source[rows]
        # A number a row of several parts: their mean, weighted by columns.
        if tensor.ndim == 1:
            share = (hi - lo) / part.width
            tensor[into_device] += (values.mean(1) if values.ndim == 2 else values).to(tensor) * share
        else:
            left = part.columns[0]
            tensor[into_device, lo - left : hi - left] = (values[:, None] if values.ndim == 1 else values).to(
                tensor
            )
        # Columns may come from several files.
        missing[name][have] -= hi - lo


# --- rows of a rank -----------------------------------------------------------------------------------------


def _parts(model: nn.Module, optimizer: Any, replicas: bool, filling: bool = False) -> Iterator[Part]:
    """Rows of all tables on this rank.

    replicas: True to count tables and hot rows that all ranks have.
    filling: True to give replicas the state that their optimizer has not made yet.
    """
    dense = DenseOptimizer(optimizer)
    collections = [c for c in collections_of(model, refuses_others=False) if c.wrapper is None]
    if not collections:
        raise ShardCoreError(
            f"a {type(model).__name__} has no EmbeddingBagCollection and no EmbeddingCollection that nothing wraps; "
            "there are no rows to save or load"
        )
    for collection in collections:
        owner = collection.divider
        outer = collection.path.removesuffix(INSIDE) if owner else collection.path
        # Hot rows are in the module, not in a sharded collection.
        for name, hot in owner.hot_ids.items() if owner and replicas else ():
            part = _dense((outer, name), owner.hot[name], dense, filling)
            yield replace(part, ids=hot.ids)
        for part in parts_of(collection, dense):
            table = part.key[1]
            # All ranks have a collection that is not sharded.
            if not collection.is_sharded or collection.replicates(table):
                if not replicas:
                    continue
                part = _dense(part.key, collection.of_tables[table].weight, dense, filling)
            name = table.removesuffix(COLD) if owner else table
            # Cold rows are saved by ids of the whole table, so that other hot ids may load them.
            is_cold = name != table and name in owner.hot_ids
            ids = owner.hot_ids[name].cold_ids(*part.rows) if is_cold else None
            yield replace(part, key=(outer, name), ids=ids)


def _dense(key: Key, weight: nn.Parameter, optimizer: DenseOptimizer, filling: bool) -> Part:
    """A table, or hot rows, under the job's dense optimizer."""
    if (found := optimizer.group_of(weight)) is not None:
        states = dense_states(*found)
        # Torch makes state at the first step. Loading needs it before.
        if filling and states and not optimizer.state_of(weight):
            found[0].state[weight] = fresh_state(*found, weight, 0)
    return dense_part(key, weight, optimizer)


# --- files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Complete:
    """complete.json: the number of ranks that wrote, and the digest of each file."""

    ranks: int
    files: Mapping[str, str]


@dataclass(frozen=True)
class _Header:
    """A file's own description of its rows."""

    table: str
    columns: tuple[int, int]
    step: int | None = None


def _complete(folder: Path) -> dict[Path, str]:
    """Files of rows, each with its digest. Raises ShardCoreError for a folder that is not whole."""
    path, names = folder / "complete.json", {p.name for p in folder.glob("rows-*.safetensors")}
    if not path.exists():
        raise ShardCoreError(
            f"{folder} has {len(names)} files of rows and no complete.json; it needs a folder that save_rows finished"
        )
    digests = build(_Complete, unseal(open_document(path, _COMPLETE), path), str(path)).files
    if differ := sorted(names ^ set(digests)):
        raise ShardCoreError(
            f"{folder} and its complete.json differ in {len(differ)} files, such as "
            f"{shown(differ[0])}; it needs a folder that save_rows finished"
        )
    return {folder / name: digest for name, digest in sorted(digests.items())}


def _read(path: Path, digest: str, tables: Collection[str]) -> Part | None:
    """The rows of a file. None if they are of none of these tables.

    Raises ShardCoreError for a file that does not match its digest.
    """
    from safetensors import SafetensorError, safe_open

    require_file(path)
    try:
        # The header is read first: files of other tables are skipped unread.
        with safe_open(path, "pt") as file:
            about = parse_json((file.metadata() or {}).get(_META, "null").encode(), path)
            header = build(_Header, opened(about, _ROWS, path), str(path))
            if header.table not in tables:
                return None
            with open(path, "rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != digest:
                    raise ShardCoreError(
                        f"{path} does not match its digest in complete.json; it was cut short or edited"
                    )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        ids, (lo, hi) = tensors.pop("ids").numpy(), header.columns
    except ShardCoreError:
        raise
    except (SafetensorError, *UNREADABLE) as error:
        raise ShardCoreError(f"{path} is no file of rows: {type(error).__name__}: {error}") from None
    if ids.ndim != 1 or ids.dtype != np.int64 or not (ids[1:] > ids[:-1]).all():
        raise ShardCoreError(f"{path} has ids {ids.dtype} {list(ids.shape)}; they need to be int64, rising")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tuple(tensor.shape) not in ((len(ids),), (len(ids), hi - lo)):
            raise ShardCoreError(
                f"{path} has {shown(name)} {tensor.dtype} {list(tensor.shape)} for {len(ids)} rows and columns {lo} to "
                f"{hi}; it needs numbers of rows or cells"
            )
    return Part(("", header.table), (0, len(ids)), (lo, hi), tensors, header.step, ids=ids)


@contextmanager
def _all_or_none() -> Iterator[None]:
    """Raise an error of one rank on all ranks, so that none waits for it."""
    failure: ShardCoreError | None = None
    try:
        yield
    except ShardCoreError as error:
        failure = error
    except OSError as error:
        failure = ShardCoreError(str(error))
    # Gathered on all ranks, whether or not they failed, or one would wait.
    messages = _gathered(failure and str(failure))
    if failure or any(messages):
        raise failure or ShardCoreError(next(filter(None, messages)))


def _gathered(value: Any) -> list[Any]:
    """A value of each rank."""
    values = [value] * rank_and_ranks()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
