"""Rows of HotColdEmbeddingCollections on disk, by their ids: whatever the hot ids, plan and ranks were.

Each rank writes the rows that it has, with the ids of each. To load, each rank reads those ids that it needs,
from the files of all ranks. So training goes on with other hot ids (as heat drifts), another plan, or another
number of ranks.

A rank holds one file's tensors at a time in memory. complete.json, written last, has the digest of each file:
a folder that is not whole, and a flipped bit, are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from shardcore.tables.hot_rows import COLD
from shardcore.torchrec.hot_cold import HotColdEmbeddingCollection, hot_cold_modules
from shardcore.torchrec.modules import path_in_model

_ROWS, _COMPLETE, _META = "rows", "rows-complete", "shardcore"
_FUSED_STATE = {"momentum1": "sum"}
"""Optimizer state of FBGEMM's fused optimizers and of torch.optim's: Adagrad, row-wise or not, has one."""
_STEPS, _FUSED_STEPS = "step", "iter"
"""Their counts of steps, which belong to no row."""


@dataclass(frozen=True)
class _Part:
    """Some rows of a table that this rank has.

    table: its path and name. ids: [N] of the rows, rising. columns: [lo, hi).
    tensors: by name, [N, hi - lo] weights, and optimizer state of cells or [N] of rows. They share memory
        with the module's own.
    """

    table: str
    ids: np.ndarray
    columns: tuple[int, int]
    tensors: dict[str, torch.Tensor]


def save_rows(model: nn.Module, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the rows of a model's HotColdEmbeddingCollections to a folder. All ranks call it.

    optimizer: of hot rows, whose state is written too, with that of TorchRec's fused optimizers.

    Raises ShardCoreError for a model without such collections, a folder that has other rows, and state of
    other optimizers than SGD and Adagrad.
    """
    from safetensors.torch import save

    folder, rank, n = Path(folder), *_ranks()
    with _all_or_none():
        parts = list(_parts(model, optimizer, replicas=rank == 0))
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0 and (old := next(folder.glob("rows-*.safetensors"), None)):
            raise ShardCoreError(f"{folder} has rows already, such as {old.name}; save to an empty folder")
    digests: dict[str, str] = {}
    with _all_or_none():
        for i, part in enumerate(parts):
            about = document(_ROWS, {"table": part.table, "columns": part.columns})
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in part.tensors.items()}
            content = save({"ids": torch.from_numpy(part.ids), **tensors}, {_META: json.dumps(about)})
            name = f"rows-{rank:05d}-{i:05d}.safetensors"
            write_atomic(folder / name, content)
            digests[name] = hashlib.sha256(content).hexdigest()
    of_ranks = _gathered(digests)
    with _all_or_none():
        # Written last: without it the folder is not whole.
        if rank == 0:
            files = {name: digest for of in of_ranks for name, digest in of.items()}
            write_json(folder / "complete.json", document(_COMPLETE, seal({"ranks": n, "files": files})))


def load_rows(model: nn.Module, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Fill a model's HotColdEmbeddingCollections with rows that `save_rows` wrote. All ranks call it.

    optimizer: of hot rows. Call this after its first step, or after its state was loaded: before, it has no
        state to fill.

    Raises ShardCoreError for a folder that is not whole, and for rows that are missing in it.
    """
    with _all_or_none():
        folder = Path(folder)
        files = _complete(folder)
        parts = list(_parts(model, optimizer, replicas=True))
        missing = [
            {name: np.full(len(part.ids), part.columns[1] - part.columns[0]) for name in part.tensors}
            for part in parts
        ]
        tables = {part.table for part in parts}
        for path, digest in files.items():
            if (rows := _read(path, digest, tables)) is not None:
                for part, lacking in zip(parts, missing, strict=True):
                    if part.table == rows.table:
                        _fill(part, lacking, rows)
        for part, lacking in zip(parts, missing, strict=True):
            for name, columns in lacking.items():
                if (columns > 0).any():
                    raise ShardCoreError(
                        f"{folder} lacks {name} of {np.count_nonzero(columns)} rows of table {part.table!r}, such as "
                        f"id {part.ids[np.argmax(columns > 0)]}"
                    )


def _fill(part: _Part, missing: dict[str, np.ndarray], found: _Part) -> None:
    """Copy what a file has of a part's rows."""
    ids, columns = found.ids, found.columns
    at = np.searchsorted(ids, part.ids).clip(max=max(len(ids) - 1, 0))
    have = np.flatnonzero(ids[at] == part.ids) if len(ids) else np.zeros(0, dtype=int)
    lo, hi = max(columns[0], part.columns[0]), min(columns[1], part.columns[1])
    if not len(have) or lo >= hi:
        return
    rows, into = torch.from_numpy(at[have]), torch.from_numpy(have)
    for name, tensor in part.tensors.items():
        if name not in found.tensors:
            continue
        source = found.tensors[name]
        if source.ndim != tensor.ndim:
            kinds = {1: "rows", 2: "cells"}
            raise ShardCoreError(
                f"optimizer state {name!r} of table {part.table!r} is of {kinds[source.ndim]} where its rows "
                f"were, and of {kinds[tensor.ndim]} where they are now; hot and other rows need the same "
                "optimizer (both row-wise Adagrad, or neither)"
            )
        if tensor.ndim == 1:
            tensor[into.to(tensor.device)] = source[rows].to(tensor)
            missing[name][have] = 0
        else:
            cells = source[:, lo - columns[0] : hi - columns[0]][rows]
            tensor[into.to(tensor.device), lo - part.columns[0] : hi - part.columns[0]] = cells.to(tensor)
            missing[name][have] -= hi - lo


# --- what a rank has --------------------------------------------------------------------------------------


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer | None, replicas: bool) -> Iterator[_Part]:
    """replicas: whether hot rows, which all ranks have, count."""
    collections = list(hot_cold_modules(model))
    if not collections:
        raise ShardCoreError(
            f"a {type(model).__name__} has no HotColdEmbeddingCollection; there are no rows to save or load"
        )
    for path, module in collections:
        path = path_in_model(path, model)
        if replicas:
            yield from _hot_parts(path, module, optimizer)
        yield from _cold_parts(path, module)


def _hot_parts(
    path: str, module: HotColdEmbeddingCollection, optimizer: torch.optim.Optimizer | None
) -> Iterator[_Part]:
    for name, hot in module.hot_ids.items():
        weight = module.hot[name]
        state = optimizer.state.get(weight, {}) if optimizer else {}
        kept = {k: v for k, v in state.items() if torch.is_tensor(v) and k != _STEPS}
        _require_known(kept, _FUSED_STATE.values(), f"{path}.{name}")
        yield _Part(
            f"{path}.{name}",
            hot.ids,
            (0, weight.shape[1]),
            {"weights": weight.detach(), **{k: _state(v, len(hot.ids)) for k, v in kept.items()}},
        )


def _cold_parts(path: str, module: HotColdEmbeddingCollection) -> Iterator[_Part]:
    states = _fused_states(module.cold, path)
    names = {name + (COLD if name in module.hot_ids else ""): name for name in module.whole_tables()}
    for key, value in module.cold.state_dict().items():
        table = key.split(".")[1]  # embeddings.NAME.weight
        name = names[table]
        for i, (tensor, (row, column)) in enumerate(_local(value)):
            rows, width = tensor.shape
            if not rows or not width:
                continue
            ids = (
                module.hot_ids[name].cold_ids(row, row + rows)
                if name in module.hot_ids
                else np.arange(row, row + rows)
            )
            tensors = {"weights": tensor.detach()}
            for state, shards in states.get(table, {}).items():
                tensors[state] = _state(shards[i], rows)
            yield _Part(f"{path}.{name}", ids, (column, column + width), tensors)


def _local(value: Any) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """This rank's shards of a parameter, each with its first row and column."""
    if hasattr(value, "local_shards"):
        return [(s.tensor, tuple(s.metadata.shard_offsets)) for s in value.local_shards()]
    return [(value, (0, 0))]


def _fused_states(cold: nn.Module, path: str) -> dict[str, dict[str, list[torch.Tensor]]]:
    """Of TorchRec's fused optimizer, by table and name of the state, the tensors of this rank's shards."""
    fused = getattr(cold, "fused_optimizer", None)
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for states in (fused.state_dict()["state"] if fused else {}).values():
        for key, value in states.items():
            table, _, name = key.rpartition(".")
            table = table.rsplit(".", 1)[-1]
            tensors = (
                [s.tensor for s in value.local_shards()]
                if hasattr(value, "local_shards")
                else [value]
                if torch.is_tensor(value)
                else []
            )
            if name in (_STEPS, _FUSED_STEPS) or not tensors:
                continue
            _require_known({name: None}, _FUSED_STATE, f"{path}.{table}")
            found.setdefault(table, {})[_FUSED_STATE[name]] = tensors
    return found


def _state(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """State of cells [N, D], or of rows [N], as a view."""
    tensor = tensor.detach()
    return tensor.view(rows) if tensor.numel() == rows else tensor.view(rows, -1)


def _require_known(names: Any, known: Any, table: str) -> None:
    for name in names:
        if name not in known:
            raise ShardCoreError(
                f"the optimizer of table {table!r} has state {name!r}; rows are saved of "
                f"SGD and Adagrad ({', '.join(known)}) only"
            )


# --- files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Complete:
    """complete.json: how many ranks wrote, and the digest of each file."""

    ranks: int
    files: Mapping[str, str]


@dataclass(frozen=True)
class _Header:
    """A file's own description of its rows."""

    table: str
    columns: tuple[int, int]


def _complete(folder: Path) -> dict[Path, str]:
    """Files of rows, each with its digest. Raises ShardCoreError for a folder that is not whole."""
    path, there = folder / "complete.json", {p.name for p in folder.glob("rows-*.safetensors")}
    if not path.exists():
        raise ShardCoreError(
            f"{folder} has {len(there)} files of rows and no complete.json; it needs a folder that save_rows finished"
        )
    said = build(_Complete, unseal(open_document(path, _COMPLETE), path), str(path)).files
    if differ := sorted(there ^ set(said)):
        raise ShardCoreError(
            f"{folder} and its complete.json differ in {len(differ)} files, such as "
            f"{shown(differ[0])}; it needs a folder that save_rows finished"
        )
    return {folder / name: digest for name, digest in sorted(said.items())}


def _read(path: Path, digest: str, tables: Collection[str]) -> _Part | None:
    """The rows of a file. None if they are of none of these tables.

    Raises ShardCoreError for a file that does not match its digest.
    """
    from safetensors import SafetensorError, safe_open

    require_file(path)
    try:
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
    return _Part(header.table, ids, (lo, hi), tensors)


def _ranks() -> tuple[int, int]:
    ready = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)


@contextmanager
def _all_or_none() -> Iterator[None]:
    """Around what may fail on some ranks. An error of one is raised on all, so that none waits for it."""
    own: ShardCoreError | None = None
    try:
        yield
    except ShardCoreError as error:
        own = error
    except OSError as error:
        own = ShardCoreError(str(error))
    said = _gathered(own and str(own))
    if own or any(said):
        raise own or ShardCoreError(next(filter(None, said)))


def _gathered(value: Any) -> list[Any]:
    """A value of each rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
