"""The compute of a replayed step: a rank's ops over each batch, or sleep that lasts as long.

Shapes: D devices, R repeats.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import OUTPUT_BYTES, PRECISION_BYTES, Setting, Shard
from shardcore.io.dataset import ReferenceOp
from shardcore.io.measurements import ComputeRequest
from shardcore.measure import own_core
from shardcore.measure.kernels import KernelBench, KernelConfig
from shardcore.measure.timing import Caches
from shardcore.step.lower import Op, Workload
from shardcore.step.memory import gib
from shardcore.step.output_bytes import output_bytes

Alone = Sequence[np.ndarray]
"""For each workload, [D, 2] ms of a device's forward and backward compute, measured with nothing beside."""
Config = Any
"""A replay.ReplayConfig. Replays use this module."""
_GRADIENT = 1e-3
"""What dense parts send back: small, so that weights stay finite however often a step repeats."""


class Ops:
    """One rank's compute of a workload: its ops over each batch.

    The shards of a run are one op for each precision of their weights, and for each width of sequences. Their
    outputs travel together.

    outputs, gradients: by run (kinds.runs_of). Batches have more lookups or fewer, so gradients of
        sequences have room for the most of any.
    """

    def __init__(
        self, benches: Mapping[str, KernelBench], workload: Workload, rank: int, config: Config, device: str
    ):
        self._batches = [
            {
                op.run: [benches[precision_in(part)].prepare(part, config.seed + k) for part in _fused(op)]
                for op in workload.ops[rank]
            }
            for k in range(config.batches)
        ]
        self.gradients = {
            op.run: full(
                _shape(op, max(sum(run.gradient.numel() for run in runs[op.run]) for runs in self._batches)),
                device,
            )
            for op in workload.ops[rank]
        }
        self._flat = {op.run for op in workload.ops[rank] if _is_flat(op)}
        self.forward(config.batches - 1)

    def forward(self, batch: int) -> None:
        outputs = {kind: [run.forward() for run in of_kind] for kind, of_kind in self._batches[batch].items()}
        self.outputs = {
            kind: own[0]
            if len(own) == 1
            else torch.cat([x.flatten() for x in own] if kind in self._flat else own, -1)
            for kind, own in outputs.items()
        }

    def backward(self) -> None:
        for kind, output in self.outputs.items():
            output.backward(self.gradients[kind].view(-1)[: output.numel()].view(output.shape))


class Asleep:
    """Compute that was measured before: the rank sleeps for as long. Otherwise as Ops.

    alone_ms: [2] forward and backward.
    """

    def __init__(self, workload: Workload, rank: int, alone_ms: np.ndarray, device: str):
        self._alone_s = alone_ms / 1e3
        self.outputs = {
            op.run: full(
                _shape(op, sum(output_bytes(s, op.batch) for s in op.shards) // OUTPUT_BYTES), device
            )
            for op in workload.ops[rank]
        }
        self.gradients = {kind: torch.full_like(own, _GRADIENT) for kind, own in self.outputs.items()}

    def forward(self, batch: int) -> None:
        time.sleep(self._alone_s[0])

    def backward(self) -> None:
        time.sleep(self._alone_s[1])


def full(shape: Sequence[int], device: str) -> torch.Tensor:
    return torch.full(tuple(shape), _GRADIENT, device=device)


def _shape(op: Op, elements: int) -> tuple[int, ...]:
    """Of outputs: a row for each sample."""
    return (elements,) if _is_flat(op) else (op.batch, elements // op.batch)


def _is_flat(op: Op) -> bool:
    """Whether its outputs have no common rows: of sequences, and of fewer values than samples."""
    return op.run.sequence or any(s.table.dedup > 1 for s in op.shards)


def _fused(op: Op) -> list[ComputeRequest]:
    """The fused ops that run the shards of one op."""
    shards: dict[tuple[str, int], list[Shard]] = defaultdict(list)
    for shard in op.shards:
        shards[shard.table.precision, shard.width if op.run.sequence else 0].append(shard)
    return [ComputeRequest(tuple(own), op.batch) for own in shards.values()]


def precision_in(request: ComputeRequest) -> str:
    return request.shards[0].table.precision


def benches_for(
    workloads: Sequence[Workload],
    ranks: Iterable[int],
    setting: Setting,
    config: Config,
    device: str,
    reference: ReferenceOp | None,
) -> dict[str, KernelBench]:
    """A bench for each precision, with room for these ranks' largest op.

    Together at most config.arena_bytes.
    """
    requests = [part for w in workloads for rank in ranks for op in w.ops[rank] for part in _fused(op)]
    precisions = setting.precision.split("+")
    room = dict.fromkeys(precisions, 64)
    for request in requests:
        room[precision_in(request)] = max(room[precision_in(request)], _arena_bytes(request))
    room = {p: min(config.arena_bytes // len(precisions), n_bytes) for p, n_bytes in room.items()}
    _grow(room, reference)
    return {
        p: KernelBench(replace(setting, precision=p), device, KernelConfig(arena_bytes=n_bytes))
        for p, n_bytes in room.items()
    }


def require_room(
    workloads: Sequence[Workload], setting: Setting, config: Config, reference: ReferenceOp | None
) -> None:
    """Raise ShardCoreError for a shard that no bench of `benches_for` has room for."""
    room = dict.fromkeys(precisions := setting.precision.split("+"), config.arena_bytes // len(precisions))
    _grow(room, reference)
    for shard in (s for w in workloads for ops in w.ops for op in ops for s in op.shards):
        if shard.bytes > room[shard.table.precision]:
            raise ShardCoreError(
                f"shard {shard.label} is {gib(shard.bytes)}; the arena holds "
                f"{gib(room[shard.table.precision])}: give more (--arena-gib, "
                "ReplayConfig.arena_bytes), as each rank has memory for"
            )


def _grow(room: dict[str, int], reference: ReferenceOp | None) -> None:
    """Give a reference op the room that it needs, by precision."""
    if reference:
        of = precision_in(reference[0])
        room[of] = max(room[of], *(s.bytes for s in reference[0].shards))


def _arena_bytes(request: ComputeRequest) -> int:
    """What an op takes in an arena, its tables one after the other at multiples of 16 elements."""
    return sum(
        (s.rows * s.width + 15) // 16 * 16 * PRECISION_BYTES[s.table.precision] for s in request.shards
    )


def measure_alone(
    rank: int,
    init_method: str,
    say: Callable[[Any], None],
    workloads: Sequence[Workload],
    setting: Setting,
    config: Config,
    reference: ReferenceOp | None,
) -> None:
    """A process that measures the compute of all devices, one after another. It says Alone, and [R] ms of the
    reference op beside."""
    torch.set_num_threads(1)
    cores = own_core.take(0)
    benches = benches_for(workloads, range(len(workloads[0].ops)), setting, config, "cpu", reference)
    beside = reference and benches[precision_in(reference[0])].prepare(reference[0], config.seed)
    caches, found, reference_ms = Caches(config.evict_bytes, "cpu"), [], []
    for workload in workloads:
        found.append(np.zeros((len(workload.ops), 2)))
        for device in range(len(workload.ops)):
            ops, took = Ops(benches, workload, device, config, "cpu"), []
            for index in range(config.warmups + config.repeats):
                caches.evict()
                marks = [time.perf_counter()]
                for part in (ops.backward, partial(ops.forward, index % config.batches)):
                    part()
                    marks.append(time.perf_counter())
                took.append(np.diff(marks)[::-1] * 1e3)
            found[-1][device] = np.median(took[config.warmups :], axis=0)
            if beside:
                caches.evict()
                reference_ms.append(benches[precision_in(reference[0])].once_ms(beside))
    own_core.give_back(cores)
    say((found, np.array(reference_ms)))
