"""Files of a PyTorch Distributed Checkpoint (DCP), written in pieces and checked when they are read.

DCP's own writer and reader do the work. Added to them:

- a save holds some pieces in memory, and no piece of each tensor until its end;
- `.metadata`, which DCP writes last, has a digest in `.metadata.sha256` (`sha256sum -c` checks it). Each tensor in the
  other files is an archive of torch.save, with a CRC-32, which DCP itself does not check;
- `.metadata` is a pickle. Nothing is run that it names: only the types of DCP's own metadata are made.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardcore.core.errors import ShardCoreError, escape_unprintable, shorten
from shardcore.core.validation import require, short_repr
from shardcore.io.schema import read_bytes, require_file
from shardcore.io.writing import write_atomic

METADATA, _DIGEST, _FILES = ".metadata", ".metadata.sha256", "__*.distcp"
_FILE_BYTES = 1 << 28
"""Bytes of a file, at most, or one piece. DCP's writer may hold as many in memory."""
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
"""What a .metadata may name: types of these modules, these names, torch's data types and paths."""


class PieceWriter(FileSystemWriter):
    """DCP's writer, with a digest of `.metadata`, and bounded memory."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # DCP keeps a piece of each tensor until a file is done, hence several files.
        results: list[WriteResult] = []
        for i, items in enumerate(_items_by_file(plan.items)):
            name = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{i}_")
            try:
                results += super().write_data(replace(plan, items=items, storage_data=name), planner).wait()
            except RuntimeError as error:
                # torch.save hides why it could not write.
                raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # A save that is killed before this line is whole, and only its .metadata goes unchecked.
        folder = Path(self.path)
        write_atomic(folder / _DIGEST, _digest_line((folder / METADATA).read_bytes()))


class CheckedReader(FileSystemReader):
    """DCP's reader, which refuses files that are missing, cut short or edited.

    Raises ShardCoreError from `checked_metadata`, and for a tensor that does not match its CRC-32.
    """

    @cached_property
    def checked_metadata(self) -> Metadata:
        """Metadata of a whole checkpoint. Raises ShardCoreError if the folder is not one."""
        folder = Path(self.path)
        path, n = folder / METADATA, len(list(folder.glob(_FILES)))
        require(
            path.exists(),
            f"{folder} has {n} files of tensors and no {METADATA}; it needs a folder that save_rows or "
            "torch.distributed.checkpoint finished",
        )
        content = read_bytes(path)
        if (digest := folder / _DIGEST).exists():
            require(
                read_bytes(digest) == _digest_line(content),
                f"{path} does not match its digest in {_DIGEST}; one of both was cut short or edited",
            )
        metadata, ends = _unpickled_metadata(content, path)
        for file, end in sorted((folder / name, end) for name, end in ends.items()):
            require_file(file)
            require(
                file.stat().st_size >= end,
                f"{file} has {file.stat().st_size} bytes of {end}; it was cut short",
            )
        return metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.checked_metadata

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        content = io.BytesIO(super()._slice_file(file, sinfo).read())
        # An archive that DCP has transformed, such as a compressed one, has checks of its own.
        if not sinfo.transform_descriptors:
            try:
                with zipfile.ZipFile(content) as archive:
                    damaged = archive.testzip()
            except Exception as error:  # a damaged archive may raise any
                damaged = f"{type(error).__name__}: {error}"
            require(
                damaged is None,
                f"{Path(self.path) / sinfo.relative_path} does not match its CRC-32 at byte {sinfo.offset} "
                f"({short_repr(damaged)}); it was edited",
            )
        content.seek(0)
        return content


@contextmanager
def raise_checkpoint_errors(folder: str | Path) -> Iterator[None]:
    """Context that raises the first rank's failure in DCP, which all ranks learn, as a ShardCoreError."""
    try:
        with warnings.catch_warnings():
            # A model in a single process is no mistake.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items(), key=lambda of_rank: of_rank[0])
        text = f"{folder}, rank {rank}: {type(error).__name__}: {error}"
        text = str(error) if isinstance(error, ShardCoreError) else text
        raise ShardCoreError(shorten(escape_unprintable(text), 300)) from error


def remove_unfinished_files(folder: Path) -> None:
    """Make a folder, and remove from it what a save left that was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob(_FILES), folder / _DIGEST):
        path.unlink(missing_ok=True)


def _digest_line(content: bytes) -> bytes:
    """Line of a file of `sha256sum` about .metadata."""
    return f"{hashlib.sha256(content).hexdigest()}  {METADATA}\n".encode()


def _items_by_file(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Lists of items that may share a file."""
    batch, total = [], 0
    for item in items:
        size = item.tensor_storage_size() or 0
        if batch and total + size > _FILE_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


class _Unpickler(pickle.Unpickler):
    """Makes DCP's metadata, and nothing else that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        # Paths are written, but not used: a path of another system could not even be made.
        if module.split(".")[0] == "pathlib":
            return lambda *parts: "/".join(parts)
        if module in _MODULES or (module, name) in _NAMES:
            found = super().find_class(module, name)
            if (module, name) in _NAMES or (isinstance(found, type) and found.__module__ == module):
                return found
        elif module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpickled_metadata(content: bytes, path: Path) -> tuple[Metadata, dict[str, int]]:
    """Metadata of a checkpoint, and how many bytes each of its files has at least."""
    ends: dict[str, int] = {}
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        for of in metadata.storage_data.values():
            ends[of.relative_path] = max(ends.get(of.relative_path, 0), of.offset + of.length)
        tensors = {
            k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)
        }
        torn = [key for key, of in tensors.items() if not _is_whole(key, of, metadata.storage_data)]
    except Exception as error:  # a damaged pickle may raise any, and hold anything
        text = shorten(escape_unprintable(f"{type(error).__name__}: {error}"), 120)
        raise ShardCoreError(f"{path} is no metadata of a checkpoint: {text}") from None
    require(not torn, f"{path} lacks chunks of {len(torn)} tensors, such as {short_repr(torn[:1])}")
    return metadata, ends


def _is_whole(key: str, tensor: TensorStorageMetadata, stored: Mapping[MetadataIndex, Any]) -> bool:
    """Tell if all chunks of a tensor are stored, lie in it and add up to it."""
    within = all(
        0 <= lo <= lo + n <= size
        for chunk in tensor.chunks
        for lo, n, size in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
    )
    known = all(MetadataIndex(key, chunk.offsets) in stored for chunk in tensor.chunks)
    return within and known and sum(prod(chunk.sizes) for chunk in tensor.chunks) == prod(tensor.size)
