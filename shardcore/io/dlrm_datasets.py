"""Reader of facebookresearch/dlrm_datasets files.

Shapes: T tables, B samples of a batch.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Table
from shardcore.io import schema
from shardcore.step.access import reuse_from_ids


def read_dlrm_datasets_pool(path: str | Path, dim: int = 64) -> tuple[Table, ...]:
    """Read the tables of a dlrm_datasets file (`.pt.gz`, or unpacked `.pt`), named t000, t001, ...

    dim: dim of every table. The release has none.

    The file holds one batch, written by torch.save: indices (table after table), offsets [T × B + 1] and
    lengths [T, B]. Tables get the pooling and reuse histogram of that batch. Their rows are the largest index
    + 1, a lower bound. A table without lookups is kept, with 1 row.

    Raises ShardCoreError for a missing, damaged or foreign file.
    """
    indices, offsets, lengths = _read_batch(Path(path))
    batch = lengths.shape[1]
    tables = []
    for t, (lo, hi) in enumerate(itertools.pairwise(offsets[::batch].tolist())):
        ids = indices[lo:hi].numpy()
        rows = int(ids.max()) + 1 if len(ids) else 1
        tables.append(Table(f"t{t:03d}", rows, dim, len(ids) / batch, reuse_from_ids(ids, batch)))
    return tuple(tables)


def _read_batch(path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices, offsets and lengths of the batch in a dlrm_datasets file."""
    what = f"dlrm_datasets file {str(path)!r}"
    wanted = (
        "it needs to be the torch.save of (indices, offsets [tables × batch + 1], lengths [tables, batch])"
    )
    if not path.exists():
        source = "github.com/facebookresearch/dlrm_datasets"
        raise ShardCoreError(f"{what} does not exist; download it from {source}")
    schema.require_file(path)
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain = _unpacked_file(path, Path(folder))
            schema.require_uncompressed_zip(plain)
            # A downloaded pickle must not run code.
            content = torch.load(plain, weights_only=True, map_location="cpu", mmap=True)
        except ShardCoreError:
            raise
        except Exception as error:  # of any type, as foreign bytes may look like any opcode of a pickle
            reason = (str(error) or type(error).__name__).splitlines()[0]
            why = f"cannot be read, being foreign, damaged or cut short ({reason})"
            raise ShardCoreError(f"{what} {why}; {wanted}") from None
    tensors = tuple(content) if isinstance(content, (tuple, list)) else ()
    # Contiguous, as a repeated view of one cell would fill memory once it is used.
    whole = all(
        isinstance(x, torch.Tensor)
        and x.dtype in (torch.int32, torch.int64)
        and x.layout == torch.strided
        and x.device.type == "cpu"
        and x.is_contiguous()
        for x in tensors
    )
    if len(tensors) != 3 or not whole:
        raise ShardCoreError(f"{what} holds {_describe_content(content)}; {wanted}, whole numbers all")
    for problem in _batch_faults(*tensors):
        raise ShardCoreError(f"{what} {problem}; {wanted}")
    return tensors


def _batch_faults(indices: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor) -> Iterator[str]:
    """Faults of a batch of lookups: wrong shapes, negative values, offsets that do not match lengths."""
    shapes = [list(x.shape) for x in (indices, offsets, lengths)]
    if lengths.ndim != 2 or 0 in lengths.shape or indices.ndim != 1 or shapes[1] != [lengths.numel() + 1]:
        yield f"has indices {shapes[0]}, offsets {shapes[1]}, lengths {shapes[2]}"
    elif lengths.min() < 0:
        yield f"has a negative length {int(lengths.min())}"
    elif (
        (first := int(offsets[0])) != 0
        or int(offsets[-1]) != len(indices)
        or not torch.equal(offsets.diff(), lengths.flatten().to(offsets.dtype))
    ):
        yield (
            f"has offsets from {first} to {int(offsets[-1])} that do not match its lengths and {len(indices)} indices"
        )
    elif len(indices) and indices.min() < 0:
        yield f"has a negative index {int(indices.min())}"


def _unpacked_file(path: Path, folder: Path) -> Path:
    """Path of the unpacked content of a file: `path` itself, or a new file in `folder` if gzipped."""
    if not schema.count_gzip_members(path):
        return path
    with (folder / "batch.pt").open("wb") as plain:
        plain.writelines(schema.unpacked_chunks(path))
    return folder / "batch.pt"


def _describe_content(content: object) -> str:
    """Describe the types of loaded content, for error messages."""
    if isinstance(content, (tuple, list)):
        kinds = (str(getattr(x, "dtype", type(x).__name__)) for x in content[:4])
        return f"{len(content)} objects ({', '.join(kinds)})"
    return f"a {type(content).__name__}"
