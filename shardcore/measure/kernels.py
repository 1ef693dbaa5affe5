"""Fused FBGEMM ops, forward and backward, measured on one device.

Building an op with its own weights costs seconds of allocation for milliseconds of kernel. Here one arena of weights, touched
once, serves every op: an op is built with one row a table, in milliseconds, and then given the arena and the true row counts.
Tables of one op lie one after the other; where they exceed the arena together they wrap round and share addresses. A batch
touches a small part of the arena, so shared rows are rare, and the kernels see the same spread of addresses.

Repeats of several ops are interleaved: between two runs of one op, the others evict it from the caches, as other layers and
other batches do in training. A finished op makes room for the next; at the end finished ones go on running, unrecorded.

Shapes: T tables of an op, L lookups, B batch, W columns of all its shards together.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log2

import numpy as np
import torch

from shardcore import dataset, memory, streams
from shardcore.measure import hardware, timing
from shardcore.types import MIN_WIDTH, PRECISION_BYTES, ComputeRequest, ComputeSample, Setting, Shard, ShardCoreError, Table

_TORCH_DTYPE = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class KernelConfig:
    """arena_bytes: weights shared by all ops, the largest shard that can be measured. tolerance: repeats stop when the median
    of forward + backward is known to this fraction (95%), within min_repeats and max_repeats. interleave: ops in turn."""

    arena_bytes: int = 1 << 30
    tolerance: float = 0.02
    min_repeats: int = 6
    max_repeats: int = 24
    interleave: int = 8

    def __post_init__(self) -> None:
        bounded = 0 < self.tolerance < 1 and 2 <= self.min_repeats <= self.max_repeats
        if not (bounded and self.arena_bytes > 0 and self.interleave >= 1):
            raise ShardCoreError(f"kernel config {self} needs 0 < tolerance < 1, 2 <= min_repeats <= max_repeats, a positive "
                                 "arena_bytes and interleave")


class KernelBench:
    """Measures requests of one Setting on one device ("cpu" or "cuda"); holds the arena and the tables' index streams."""

    def __init__(self, setting: Setting, device: str = "cpu", config: KernelConfig | None = None):
        hardware.require_fbgemm(device)
        self.setting, self.device, self.config = setting, device, config or KernelConfig()
        self._clock = timing.clock_for(device)
        self._streams: dict[tuple[Table, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # A CUDA fault other than memory spoils the process for all that follows, so it is not one request's.
        self._request_errors = (ShardCoreError, torch.OutOfMemoryError if device == "cuda" else RuntimeError)
        self.kernel_s = 0.0
        """Seconds inside timed kernels so far, warm-ups included."""
        dtype = _TORCH_DTYPE[setting.precision]
        elements = self.config.arena_bytes // PRECISION_BYTES[setting.precision]
        try:
            self._arena = torch.empty(elements, dtype=dtype, device=device).uniform_(-0.01, 0.01)
        except RuntimeError as error:
            raise ShardCoreError(f"an arena of {memory.gib(self.config.arena_bytes)} does not fit {device}: make it smaller "
                                 f"({' '.join(str(error).split())[:100]})") from None
        self._state = torch.zeros(max(1, elements // MIN_WIDTH) if setting.optimizer == "rowwise_adagrad" else 1, device=device)
        self._gradient = torch.full((1,), 1e-3, device=device)

    def measure(self, requests: Iterable[ComputeRequest]) -> Iterator[ComputeSample]:
        """Yield one sample a request, in the order in which they finish; a request that fails yields its error."""
        waiting = deque(requests)
        active: list[Run] = []
        done: deque[Run] = deque(maxlen=self.config.interleave)
        while waiting or active:
            while waiting and len(active) < self.config.interleave:
                request = waiting.popleft()
                try:
                    active.append(self.prepare(request))
                except self._request_errors as error:
                    yield self._sample(request, None, error)
            fillers = list(done)[: self.config.interleave - len(active)] if active else []
            for run in fillers:
                self._once(run)
            for run in list(active):
                try:
                    times = self._once(run)
                except self._request_errors as error:
                    active.remove(run)
                    yield self._sample(run.request, None, error)
                    continue
                if run.warm:
                    run.times_ms.append(times)
                run.warm = True
                if self._settled(run):
                    active.remove(run)
                    done.append(run)
                    yield self._sample(run.request, run)

    def _settled(self, run: Run) -> bool:
        n, c = len(run.times_ms), self.config
        return n >= c.max_repeats or (n >= c.min_repeats and timing.known_to([sum(t) for t in run.times_ms]) <= c.tolerance)

    def prepare(self, request: ComputeRequest, seed: int = 0) -> Run:
        """Build a request's op over the arena, with the batch that `seed` draws. Raises ShardCoreError where a shard is larger
        than the arena or of another precision than the setting's."""
        other = {s.table.precision for s in request.shards} - {self.setting.precision}
        if other:
            raise ShardCoreError(f"shards have weights in {other.pop()}; the setting is ({self.setting})")
        indices, offsets = self._lookups(request, seed)
        width = sum(s.width for s in request.shards)
        if self._gradient.numel() < request.batch * width:
            self._gradient = torch.full((request.batch * width,), 1e-3, device=self.device)
        return Run(request, self._build(request.shards), indices, offsets,
                   self._gradient[: request.batch * width].view(request.batch, width))

    def _once(self, run: Run) -> tuple[float, float]:
        """Run forward and backward once; their ms."""
        marks = [self._clock.mark()]
        output = run.op(run.indices, run.offsets)
        marks.append(self._clock.mark())
        output.backward(run.gradient)
        marks.append(self._clock.mark())
        forward, backward = self._clock.elapsed_ms(marks)
        self.kernel_s += (forward + backward) / 1e3
        return forward, backward

    def _lookups(self, request: ComputeRequest, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices [L] and offsets [T × B + 1] of a request's shards, table after table."""
        parts = [self._stream(s, request.batch, seed) for s in request.shards]
        starts = np.cumsum([0] + [len(i) for i, _ in parts])
        offsets = [o[:-1] + int(start) for (_, o), start in zip(parts, starts[:-1], strict=True)]
        end = torch.tensor([int(starts[-1])], device=self.device)
        return torch.cat([i for i, _ in parts]), torch.cat([*offsets, end])

    def _stream(self, shard: Shard, batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not shard.full_rows:
            return self._to_device(streams.shard_stream(shard, batch, seed))
        key = (dataclasses.replace(shard.table, dim=MIN_WIDTH), batch, seed)  # a table's stream does not depend on its dim
        if key not in self._streams:
            self._streams[key] = self._to_device(streams.stream(shard.table, batch, seed))
        return self._streams[key]

    def _to_device(self, stream: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(stream[0]).to(self.device), torch.from_numpy(stream[1]).to(self.device)

    def _build(self, shards: tuple[Shard, ...]) -> torch.nn.Module:
        """An op over the arena: built with one row a table, then given its true row counts and places in the arena."""
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        cuda = self.device == "cuda"
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        adagrad = self.setting.optimizer == "rowwise_adagrad"
        op = SplitTableBatchedEmbeddingBagsCodegen(
            [(1, s.width, *place) for s in shards],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD if adagrad else EmbOptimType.EXACT_SGD,
            weights_precision=SparseType.FP16 if self.setting.precision == "fp16" else SparseType.FP32,
            learning_rate=1e-3,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=torch.device(self.device),
        )
        rows = [s.rows for s in shards]
        op.total_hash_size = sum(rows)
        op.total_hash_size_bits = int(log2(float(sum(rows))) + 1)
        op.hash_size_cumsum = self._int64([0, *np.cumsum(rows)])
        op.rows_per_table = self._int64(rows)
        op.weights_offsets = self._int64(_places([s.rows * s.width for s in shards], self._arena.numel(), shards))
        setattr(op, "weights_dev" if cuda else "weights_host", torch.nn.Parameter(self._arena))
        if adagrad:
            op.momentum1_offsets = self._int64(_places(rows, self._state.numel(), shards))
            setattr(op, "momentum1_dev" if cuda else "momentum1_host", torch.nn.Parameter(self._state))
        return op

    def _int64(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor([int(v) for v in values], dtype=torch.int64, device=self.device)

    def _sample(self, request: ComputeRequest, run: Run | None, error: Exception | None = None) -> ComputeSample:
        forward, backward = (timing.spread([t[k] for t in run.times_ms]) for k in (0, 1)) if run else (None, None)
        reason = " ".join(str(error).split())[:300] if error else None
        return ComputeSample(dataset.compute_id(self.setting, request), self.setting, request, forward, backward, time.time(),
                             reason)


@dataclass
class Run:
    """One op, ready to run: over indices [L] and offsets [T × B + 1]; gradient [B, W] of its output."""

    request: ComputeRequest
    op: torch.nn.Module
    indices: torch.Tensor
    offsets: torch.Tensor
    gradient: torch.Tensor
    warm: bool = False
    times_ms: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def _places(sizes: list[int], room: int, shards: tuple[Shard, ...]) -> list[int]:
    """Where each table begins in an arena of `room` elements: one after the other, wrapping round."""
    places, cursor = [], 0
    for size, shard in zip(sizes, shards, strict=True):
        if size > room:
            raise ShardCoreError(f"shard {shard.label} is {memory.gib(shard.bytes)}; the arena holds "
                                 f"{memory.gib(room * PRECISION_BYTES[shard.table.precision])}")
        cursor = 0 if cursor + size > room else cursor
        places.append(cursor)
        cursor += (size + 15) // 16 * 16
    return places
