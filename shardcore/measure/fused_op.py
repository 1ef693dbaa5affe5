"""FBGEMM's fused training op (table-batched embeddings, TBE), by our names of optimizers and precisions."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from shardcore.core.catalog import OPTIMIZERS, PRECISIONS
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import MIN_WIDTH, PRECISION_BYTES, Setting, Shard
from shardcore.core.validation import require
from shardcore.step.memory import size_text

_LEARNING_RATE = 1e-3


def build_fused_op(
    widths: Sequence[int],
    optimizer: str,
    precision: str,
    device: str,
    table_of: Sequence[int] | None = None,
    sequence: bool = False,
) -> torch.nn.Module:
    """Build FBGEMM's fused embedding op with one row for each table. Raises FBGEMM's error for unsupported options.

    widths: columns of each table.
    device: "cpu" or "cuda"; "meta" is CUDA's op without its memory.
    table_of: number of each feature's table. None: each table has one feature.
    sequence: True if each lookup is an output, as in TorchRec's EmbeddingCollection.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    on_cpu = device == "cpu"
    location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
    compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
    return SplitTableBatchedEmbeddingBagsCodegen(
        # One row a table: weights come from the arena (kernels.py), so none are allocated here.
        [(1, width, location, compute) for width in widths],
        feature_table_map=list(table_of) if table_of is not None else None,
        optimizer=EmbOptimType[OPTIMIZERS[optimizer].theirs],
        weights_precision=SparseType[PRECISIONS[precision].theirs],
        learning_rate=_LEARNING_RATE,
        pooling_mode=PoolingMode.NONE if sequence else PoolingMode.SUM,
        # Drawn ids are within bounds, so no check of them is timed.
        bounds_check_mode=BoundsCheckMode.NONE,
        device=torch.device(device),
    )


def split_evenly(n: int, parts: int) -> list[int]:
    """Split n into whole parts that differ by 1 at most."""
    each, more = divmod(n, parts)
    return [each + (i < more) for i in range(parts)]


def aligned_size(elements: int) -> int:
    """Size of a table in the arena, in elements, rounded up to a multiple of 16."""
    return (elements + 15) // 16 * 16


def require_trainable(setting: Setting, device: str) -> None:
    """Raise ShardCoreError, naming what would work, if FBGEMM does not train a setting's weights on a device."""
    require(
        setting.precision in PRECISIONS,
        f"an op has weights of one precision, not of {setting.precision}; measure each apart: {', '.join(PRECISIONS)}",
    )
    if not (why := _training_error(setting.optimizer, setting.precision, device)):
        return
    # Only after a refusal, as each try builds and runs an op.
    running = []
    for optimizer in OPTIMIZERS:
        if trained := [p for p in PRECISIONS if not _training_error(optimizer, p, device)]:
            running.append(f"{optimizer} with {' or '.join(trained)}")
    raise ShardCoreError(
        f"FBGEMM does not train {setting.precision} weights with {setting.optimizer} on "
        f"{device} ({why}); here it trains {'; '.join(running) or 'nothing'}"
    )


def _training_error(optimizer: str, precision: str, device: str) -> str:
    """FBGEMM's error when training one row with an optimizer and precision on a device; "" if none."""
    # Tried for real: a list of what runs would be wrong for the next version or device.
    row, offsets = torch.tensor([0], device=device), torch.tensor([0, 1], device=device)
    try:
        op = build_fused_op([MIN_WIDTH], optimizer, precision, device)
        op(row, offsets).backward(torch.ones(1, MIN_WIDTH, device=device))
    except (AssertionError, RuntimeError) as error:
        return " ".join(str(error).split())[:80] or type(error).__name__
    return ""


def arena_offsets(sizes: list[int], room: int, shards: tuple[Shard, ...]) -> list[int]:
    """Offset, in elements, of each table in an arena of `room` elements.

    sizes: elements of each table.

    Tables lie one after the other. Where the arena ends, the next begins at 0 again.
    """
    spare = (room - sum(map(aligned_size, sizes))) // 16
    # A hash of the group's labels: groups begin at different places, and each at the same one in every run.
    places, cursor = [], zlib.crc32("".join(s.label for s in shards).encode()) % max(1, spare) * 16
    for size, shard in zip(sizes, shards, strict=True):
        if size > room:
            raise ShardCoreError(
                f"shard {shard.label} is {size_text(shard.bytes)}; the arena holds "
                f"{size_text(room * PRECISION_BYTES[shard.table.precision])}"
            )
        # A table that does not fit before the end shares addresses with tables at the beginning.
        cursor = 0 if cursor + size > room else cursor
        places.append(cursor)
        cursor += aligned_size(size)
    return places
