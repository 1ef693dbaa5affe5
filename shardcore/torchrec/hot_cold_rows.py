"""Rows of HotColdEmbeddingCollections on disk, by their ids: independent of hot ids, plan and ranks.

Each rank writes its rows with their ids. To load, each rank reads the ids that it needs from the files of all
ranks. So training goes on with other hot ids (as heat drifts), another plan, or another number of ranks.

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
class _Rows:
    """Rows of a table on this rank.

    table: its path and name.
    ids: [N] of the rows, rising.
    columns: [lo, hi).
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
            files = {name: digest for of_rank in of_ranks for name, digest in of_rank.items()}
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
        # Columns that each row of a tensor still lacks.
        missing = [
            {name: np.full(len(part.ids), part.columns[1] - part.columns[0]) for name in part.tensors}
            for part in parts
        ]
        tables = {part.table for part in parts}
        for path, digest in files.items():
            if (rows := _read(path, digest, tables)) is not None:
                for part, columns in zip(parts, missing, strict=True):
                    if part.table == rows.table:
                        _fill(part, columns, rows)
        for part, lacking in zip(parts, missing, strict=True):
            for name, columns in lacking.items():
                if (columns > 0).any():
                    raise ShardCoreError(
                        f"{folder} lacks {name} of {np.count_nonzero(columns)} rows of table {part.table!r}, such as "
                        f"id {part.ids[np.argmax(columns > 0)]}"
                    )


def _fill(part: _Rows, missing: dict[str, np.ndarray], source_rows: _Rows) -> None:
    """Copy the rows of a part that a file has."""
    ids, columns = source_rows.ids, source_rows.columns
    # [N] position in the file of each row of the part, if the file has it.
    at = np.searchsorted(ids, part.ids).clip(max=max(len(ids) - 1, 0))
    have = np.flatnonzero(ids[at] == part.ids) if len(ids) else np.zeros(0, dtype=int)
    lo, hi = max(columns[0], part.columns[0]), min(columns[1], part.columns[1])
    if not len(have) or lo >= hi:
        return
    # Positions in the file and in the part.
    rows, into = torch.from_numpy(at[have]), torch.from_numpy(have)
    for name, tensor in part.tensors.items():
        if name not in source_rows.tensors:
            continue
        source = source_rows.tensors[name]
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
            # Columns may come from several files.
            missing[name][have] -= hi - lo


# --- rows of a rank -----------------------------------------------------------------------------------------


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer | None, replicas: bool) -> Iterator[_Rows]:
    """Rows of all tables on this rank. replicas: True to count hot rows, which all ranks have."""
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
) -> Iterator[_Rows]:
    for name, hot in module.hot_ids.items():
        weight = module.hot[name]
        state = optimizer.state.get(weight, {}) if optimizer else {}
        # Counts of steps belong to no row.
        of_rows = {k: v for k, v in state.items() if torch.is_tensor(v) and k != _STEPS}
        _require_known(of_rows, _FUSED_STATE.values(), f"{path}.{name}")
        states = {k: _state(v, len(hot.ids)) for k, v in of_rows.items()}
        tensors = {"weights": weight.detach(), **states}
        yield _Rows(f"{path}.{name}", hot.ids, (0, weight.shape[1]), tensors)


def _cold_parts(path: str, module: HotColdEmbeddingCollection) -> Iterator[_Rows]:
    states = _fused_states(module.cold, path)
    names = {name + (COLD if name in module.hot_ids else ""): name for name in module.whole_tables()}
    for key, value in module.cold.state_dict().items():
        table = key.split(".")[1]  # embeddings.NAME.weight
        name = names[table]
        for i, (tensor, (row, column)) in enumerate(_local(value)):
            rows, width = tensor.shape
            if not rows or not width:
                continue
            ids = np.arange(row, row + rows)
            if name in module.hot_ids:
                ids = module.hot_ids[name].cold_ids(row, row + rows)
            tensors = {"weights": tensor.detach()}
            for state, shards in states.get(table, {}).items():
                tensors[state] = _state(shards[i], rows)
            yield _Rows(f"{path}.{name}", ids, (column, column + width), tensors)


def _local(value: Any) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """This rank's shards of a parameter, each with its first row and column."""
    if hasattr(value, "local_shards"):
        return [(s.tensor, tuple(s.metadata.shard_offsets)) for s in value.local_shards()]
    return [(value, (0, 0))]


def _fused_states(cold: nn.Module, path: str) -> dict[str, dict[str, list[torch.Tensor]]]:
    """Tensors of TorchRec's fused optimizer for this rank's shards, by table and name of the state."""
    fused: Any = getattr(cold, "fused_optimizer", None)
    states: dict[str, dict[str, list[torch.Tensor]]] = {}
    for of_group in (fused.state_dict()["state"] if fused else {}).values():
        for key, value in of_group.items():
            table, _, name = key.rpartition(".")
            table = table.rsplit(".", 1)[-1]
            is_tensor = hasattr(value, "local_shards") or torch.is_tensor(value)
            if name in (_STEPS, _FUSED_STEPS) or not is_tensor:
                continue
            tensors = [tensor for tensor, _ in _local(value)]
            if not tensors:
                continue
            _require_known([name], _FUSED_STATE, f"{path}.{table}")
            states.setdefault(table, {})[_FUSED_STATE[name]] = tensors
    return states


def _state(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """State of cells [N, D], or of rows [N], as a view."""
    tensor = tensor.detach()
    return tensor.view(rows) if tensor.numel() == rows else tensor.view(rows, -1)


def _require_known(names: Collection[str], known: Collection[str], table: str) -> None:
    for name in names:
        if name not in known:
            raise ShardCoreError(
                f"the optimizer of table {table!r} has state {name!r}; rows are saved of "
                f"SGD and Adagrad ({', '.join(known)}) only"
            )


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


def _read(path: Path, digest: str, tables: Collection[str]) -> _Rows | None:
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
    return _Rows(header.table, ids, (lo, hi), tensors)


def _ranks() -> tuple[int, int]:
    ready = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)


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
    messages = _gathered(failure and str(failure))
    if failure or any(messages):
        raise failure or ShardCoreError(next(filter(None, messages)))


def _gathered(value: Any) -> list[Any]:
    """A value of each rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
