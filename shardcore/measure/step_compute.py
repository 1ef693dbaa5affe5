"""The compute of a replayed step: a rank's ops over each batch, or a sleep of their duration.

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
from shardcore.measure import fused_op, own_core
from shardcore.measure.config import ReplayConfig
from shardcore.measure.devices import device_by_name
from shardcore.measure.kernels import KernelBench, KernelConfig
from shardcore.measure.timing import HardwareCaches
from shardcore.step.access import output_bytes
from shardcore.step.lower import Op, Workload
from shardcore.step.memory import size_text

ComputeTimes = Sequence[np.ndarray]
"""For each workload, [D, 2] ms of a device's forward and backward compute, measured one device at a time."""
Benches = Mapping[str, KernelBench]
"""A bench for each precision of weights, by its name."""
_GRADIENT = 1e-3
"""Value of the dense part's gradients: small, so that weights stay finite however often a step repeats."""


class RankOps:
    """One rank's compute of a workload's step: its fused ops over each batch.

    The shards of a run make one op for each precision of their weights, and for each width of sequences.
    Their outputs travel together.

    outputs, gradients: tensors by run (kinds.sharding_kinds_for_tables). Gradients of sequences have room for the batch
        with most lookups.
    """

    def __init__(self, benches: Benches, workload: Workload, rank: int, config: ReplayConfig, device: str):
        own = workload.ops[rank]

        def prepare_runs(op: Op, batch: int) -> list[Any]:
            # The seed depends on the batch alone, so that all plans of a problem see the same batches.
            return [
                benches[_request_precision(part)].prepare(part, config.seed + batch)
                for part in _fused_requests(op)
            ]

        # All batches are prepared before timing.
        self._batches = [
            {op.sharding_kind: prepare_runs(op, batch) for op in own} for batch in range(config.batches)
        ]
        self.gradients = {}
        for op in own:
            # As large as the largest batch needs. Others use a part.
            sizes = [sum(run.gradient.numel() for run in runs[op.sharding_kind]) for runs in self._batches]
            self.gradients[op.sharding_kind] = filled_tensor(_output_shape(op, max(sizes)), device)
        self._flat = {op.sharding_kind for op in own if _has_flat_outputs(op)}
        # The first step begins with a backward pass, which needs outputs.
        self.forward(config.batches - 1)

    def forward(self, batch: int) -> None:
        """Run the lookups of a batch number, into `outputs`."""
        results = {kind: [run.forward() for run in runs] for kind, runs in self._batches[batch].items()}
        self.outputs = {}
        for kind, parts in results.items():
            flat = [x.flatten() for x in parts] if kind in self._flat else parts
            # Ops of a run travel together, so their outputs are joined.
            self.outputs[kind] = parts[0] if len(parts) == 1 else torch.cat(flat, -1)

    def backward(self) -> None:
        """Run the backward pass and optimizer of all ops."""
        for kind, output in self.outputs.items():
            # A view of as many elements as this batch has outputs.
            output.backward(self.gradients[kind].view(-1)[: output.numel()].view(output.shape))


class SleepingOps:
    """Stand-in for the compute of a step: the rank sleeps for durations measured before. Same interface as Ops.

    compute_ms: [2] duration of forward and backward.
    """

    def __init__(self, workload: Workload, rank: int, compute_ms: np.ndarray, device: str):
        self._forward_s, self._backward_s = (compute_ms / 1e3).tolist()
        self.outputs = {}
        for op in workload.ops[rank]:
            elements = sum(output_bytes(s, op.batch) for s in op.shards) // OUTPUT_BYTES
            self.outputs[op.sharding_kind] = filled_tensor(_output_shape(op, elements), device)
        self.gradients = {kind: torch.full_like(outputs, _GRADIENT) for kind, outputs in self.outputs.items()}

    def forward(self, batch: int) -> None:
        time.sleep(self._forward_s)

    def backward(self) -> None:
        time.sleep(self._backward_s)


def filled_tensor(shape: Sequence[int], device: str) -> torch.Tensor:
    """Tensor filled with the value of the dense part's gradients."""
    return torch.full(tuple(shape), _GRADIENT, device=device)


def _output_shape(op: Op, elements: int) -> tuple[int, ...]:
    """Shape of an op's outputs: [B, W], or one flat row."""
    return (elements,) if _has_flat_outputs(op) else (op.batch, elements // op.batch)


def _has_flat_outputs(op: Op) -> bool:
    """True if an op's outputs form no [batch, columns] matrix: sequences, or features with batch sizes of their own."""
    return op.sharding_kind.sequence or any(s.table.has_variable_batch for s in op.shards)


def _fused_requests(op: Op) -> list[ComputeRequest]:
    """FBGEMM's fused ops that together run a plan's op: one for each precision, and each width of sequences."""
    shards: dict[tuple[str, int], list[Shard]] = defaultdict(list)
    for shard in op.shards:
        # An op of FBGEMM has one precision, and with sequences one width.
        shards[shard.table.precision, shard.width if op.sharding_kind.sequence else 0].append(shard)
    return [ComputeRequest(tuple(group), op.batch) for group in shards.values()]


def _request_precision(request: ComputeRequest) -> str:
    """Precision of a request's weights."""
    return request.shards[0].table.precision


class ReferenceRuns:
    """Runs of a dataset's reference op between training steps; none without a reference op.

    times_ms: time of each run.
    """

    def __init__(self, benches: Benches, reference: ReferenceOp | None, seed: int):
        self.times_ms: list[float] = []
        self._bench = self._run = None
        if reference:
            self._bench = benches[_request_precision(reference[0])]
            self._run = self._bench.prepare(reference[0], seed)

    def run_once(self, caches: HardwareCaches) -> None:
        """Run the reference op once with cold caches, and record its time."""
        if self._bench and self._run:
            # The caches are cold before each step, too.
            caches.evict_caches()
            self.times_ms.append(self._bench.run_once_ms(self._run))


def make_benches(
    workloads: Sequence[Workload],
    ranks: Iterable[int],
    setting: Setting,
    config: ReplayConfig,
    device: str,
    reference: ReferenceOp | None,
) -> dict[str, KernelBench]:
    """Make a KernelBench for each precision of weights, with an arena for the largest op of some ranks.

    Together they have at most config.arena_bytes, unless the reference op needs more.
    """
    room = _arena_bytes_by_precision(setting, config.arena_bytes, None)
    # At least a few bytes, for a precision that no op of these ranks has.
    needed = dict.fromkeys(room, 64)
    for op in (op for w in workloads for rank in ranks for op in w.ops[rank]):
        for request in _fused_requests(op):
            precision, cell_bytes = _request_precision(request), PRECISION_BYTES[_request_precision(request)]
            n_bytes = sum(fused_op.aligned_size(s.rows * s.width) * cell_bytes for s in request.shards)
            needed[precision] = max(needed[precision], n_bytes)
    # No larger than needed, as each rank has arenas of all precisions.
    sizes = {p: min(room[p], n_bytes) for p, n_bytes in needed.items()}
    _grow_for_reference(sizes, reference)
    return {
        p: KernelBench(replace(setting, precision=p), device, KernelConfig(arena_bytes=n_bytes))
        for p, n_bytes in sizes.items()
    }


def require_arena_room(
    workloads: Sequence[Workload], setting: Setting, config: ReplayConfig, reference: ReferenceOp | None
) -> None:
    """Raise ShardCoreError for a shard of a workload that is larger than the arena of its precision."""
    room = _arena_bytes_by_precision(setting, config.arena_bytes, reference)
    for shard in (s for w in workloads for ops in w.ops for op in ops for s in op.shards):
        if shard.bytes > (most := room[shard.table.precision]):
            raise ShardCoreError(
                f"shard {shard.label} is {size_text(shard.bytes)}; the arena holds {size_text(most)}: "
                "give more (--arena-gib, ReplayConfig.arena_bytes), as each rank has memory for"
            )


def _arena_bytes_by_precision(
    setting: Setting, arena_bytes: int, reference: ReferenceOp | None
) -> dict[str, int]:
    """Arena size for each precision of weights: an even share, or what the reference op needs."""
    precisions = setting.precision.split("+")
    room = {precision: arena_bytes // len(precisions) for precision in precisions}
    _grow_for_reference(room, reference)
    return room


def _grow_for_reference(room: dict[str, int], reference: ReferenceOp | None) -> None:
    """Enlarge the arena of the reference op's precision to its largest shard."""
    if reference:
        precision = _request_precision(reference[0])
        room[precision] = max(room[precision], *(s.bytes for s in reference[0].shards))


def measure_compute(
    rank: int,
    init_method: str,
    send: Callable[[Any], None],
    workloads: Sequence[Workload],
    setting: Setting,
    config: ReplayConfig,
    reference: ReferenceOp | None,
) -> None:
    """Measure the compute of all devices of workloads' steps, one after another, in one process.

    It sends ComputeTimes, and the ms of each run of the reference op.
    """
    torch.set_num_threads(1)
    # One core, as a rank of a gang has.
    cores, on = own_core.take_core(0), device_by_name("cpu")
    benches = make_benches(workloads, range(len(workloads[0].ops)), setting, config, "cpu", reference)
    reference_runs, caches, times = (
        ReferenceRuns(benches, reference, config.seed),
        HardwareCaches(config.evict_bytes, "cpu"),
        [],
    )
    for workload in workloads:
        of_devices = np.zeros((len(workload.ops), 2))
        for device in range(len(workload.ops)):
            ops, took_ms = RankOps(benches, workload, device, config, "cpu"), []
            for index in range(config.warmups + config.repeats):
                caches.evict_caches()
                # Backward comes first, as a step begins after the dense part.
                parts = ops.backward, partial(ops.forward, index % config.batches)
                # Reversed, as forward comes first in the result.
                took_ms.append(on.time_calls_ms(*parts)[::-1])
            of_devices[device] = np.median(took_ms[config.warmups :], axis=0)
            reference_runs.run_once(caches)
        times.append(of_devices)
    own_core.restore_cores(cores)
    send((times, np.array(reference_runs.times_ms)))
