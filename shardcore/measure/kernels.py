"""Fused FBGEMM ops, forward and backward, measured on one device.

Building an op with its own weights costs seconds of allocation for milliseconds of kernel. Here one arena of
weights, touched once, serves every op. An op is built with one row a table, in milliseconds, and then gets
the arena and the true row counts. Tables of one op lie one after the other. If together they exceed the
arena, they wrap round and share addresses. A batch touches a small share of the arena, so shared rows are
rare, and the kernels see the same spread of addresses.

Ops run in rounds, each once a round. Between two runs of one op, the others evict it from the caches, as
other layers and batches do in training, at no additional cost. A finished op makes room for the next. When
too few are left to evict each other, the caches are overwritten before each run. The order changes from round
to round, and each op lies elsewhere in the arena, so that none profits from the same neighbour.

Repeats of an op are thus seconds apart, and neighbouring runs show the machine's slowdown at each moment
(timing.SlowdownLog). Timings are corrected to the machine's usual speed. A reference op, which runs in every
round from the first to the last, shows that speed.

Shapes: T tables of an op, F features, L lookups, B batch, W columns of all its shards together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from shardcore.core.catalog import OPTIMIZERS, PRECISIONS
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import MIN_WIDTH, OUTPUT_BYTES, PRECISION_BYTES, Setting, Shard
from shardcore.core.validation import (
    MOST_ROWS,
    require,
)
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure import devices, fused_op, hardware, timing
from shardcore.measure.config import KernelConfig
from shardcore.measure.index_streams import IndexStreams
from shardcore.step import access, memory
from shardcore.step.lower import is_sequence_op

T = TypeVar("T")
HELD_OUT_TIMES = 3
"""Most runs of a held-out op (dataset.split_of_sample), in max_repeats."""
_LONGEST_MS = 1000.0
"""No op goes on once its runs took so long in all and are min_repeats: ten ops would take a third of the time."""
_REFERENCE_RUNS = 48
"""Runs of the reference op that make one sample of it."""
_SEED = 0
"""Seed of the batches that are measured."""
_FIRST_LAUNCH_MS, _LAUNCHES = 20.0, 1.5
"""Busy time of a device before a run: 20 ms at first, then 1.5 times as long as the last launches took."""


class KernelBench:
    """Benchmark of fused embedding ops of one Setting on one device ("cpu" or "cuda"), over one arena of weights.

    reference: a group that runs in every round. Each _REFERENCE_RUNS of its runs yield a sample of it.
    reference_ms: forward + backward of the reference at the device's usual speed (from `calibrate`, or an
        earlier dataset). Without it, timings are at the mean slowdown of some thousand runs.
    kernel_s: seconds inside timed kernels so far, including warm-ups and the reference.
    kept_s: seconds of these in runs that entered a median.
    """

    def __init__(
        self,
        setting: Setting,
        device: str = "cpu",
        config: KernelConfig | None = None,
        reference: ComputeRequest | None = None,
        reference_ms: float | None = None,
    ):
        self._device = devices.device_by_name(device)
        hardware.require_fbgemm(device)
        # Unsupported settings are refused before memory is taken.
        fused_op.require_trainable(setting, self._device.place)
        self.setting, self.device, self.config = setting, device, config or KernelConfig()
        self.streams = IndexStreams(
            self._device.place, self._device.max_stream_bytes(), self._device.drawing_threads
        )
        self.kernel_s = self.kept_s = 0.0
        place, dtype = self._device.place, getattr(torch, PRECISIONS[setting.precision].torch)
        elements = self.config.arena_bytes // PRECISION_BYTES[setting.precision]
        try:
            # Written once. Else the first ops would pay for the operating system's page faults.
            self._arena = torch.empty(elements, dtype=dtype, device=place).uniform_(-0.01, 0.01)
            # The arena has most rows if all are of the least width.
            rows = min(self.config.state_rows or MOST_ROWS, max(1, elements // MIN_WIDTH))
            # All ops share the state, too. Its elements are one a cell or one a row.
            self._states = [
                torch.zeros(elements if per == "cell" else rows, device=place)
                for per in OPTIMIZERS[setting.optimizer].states
            ]
        except RuntimeError as error:
            raise ShardCoreError(
                f"an arena of {memory.size_text(self.config.arena_bytes)} with the state of "
                f"{setting.optimizer} does not fit {device}: "
                f"make it smaller ({' '.join(str(error).split())[:100]})"
            ) from None
        # One gradient serves all ops. It grows with the largest one's outputs.
        self._gradient = torch.full((1,), 1e-3, device=place)
        self._caches = timing.HardwareCaches(self._device.cache_evict_bytes(), place)
        self._launch_ms = _FIRST_LAUNCH_MS
        # Timings depend on the arena's size: rows lie further apart in a larger one.
        versions = {**self._device.software_versions(), "arena": memory.size_text(self.config.arena_bytes)}
        self._software = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        self._numbers = itertools.count()
        self._active: list[KernelRun] = []
        self._finished = 0
        # The seed decides nothing but the order of runs.
        self._order = random.Random(0)
        self._reference = self.prepare(reference) if reference else None
        self.reference_ms = reference_ms

    @property
    def reference_ms(self) -> float | None:
        """Known ms of the reference op, which fixes the scale of the slowdown. May be set while no request is
        active."""
        return self._reference_ms

    @reference_ms.setter
    def reference_ms(self, value: float | None) -> None:
        self._reference_ms = value
        # Twice the runs that an op's repeats span, so that each of these has neighbours on both sides.
        kept = 2 * max(HELD_OUT_TIMES * self.config.max_repeats + 1, _REFERENCE_RUNS)
        known = {self._reference.number: math.log(value)} if value and self._reference else None
        self._log = timing.SlowdownLog(known, kept * (self.config.interleave + 1))

    @property
    def active_requests(self) -> list[ComputeRequest]:
        """Requests that are being measured."""
        return [run.request for run in self._active]

    def measure(self, requests: Iterable[ComputeRequest]) -> Iterator[ComputeSample]:
        """Measure requests. Yields a sample for each, in the order in which they finish, and samples of the reference
        op.

        The sample of a request that fails holds the error.
        """
        for request in requests:
            yield from self.add(request)
        yield from self.finish()

    def add(self, request: ComputeRequest) -> list[ComputeSample]:
        """Start to measure a request, once there is room. Returns samples that finished meanwhile, also failed ones."""
        finished = []
        # There is room once an op has finished.
        while len(self._active) >= self.config.interleave:
            finished += self._run_round()
        try:
            self._active.append(self._retry_without_cache(lambda: self.prepare(request)))
        except self._device.request_errors as error:
            finished.append(self._failed_sample(request, error))
        return finished

    def finish(self, seconds: float = math.inf) -> list[ComputeSample]:
        """Measure active requests to their end, or start no round after `seconds`. Returns finished samples."""
        finished, until = [], time.monotonic() + seconds
        while self._active:
            finished += self._run_round()
            if time.monotonic() > until and self._active:
                return finished
        # The reference's last sample has its runs since the one before.
        if self._reference and len(self._reference.times_ms) >= self.config.min_repeats:
            finished.append(self._sample_of_run(self._reference))
        return finished

    def calibrate(self, requests: Iterable[ComputeRequest], seconds: float = 5.0) -> float:
        """Median forward + backward ms of the reference op, over `seconds` of runs.

        requests: ops that run in turn with it. Give `interleave` of them, so that the reference finds the
            caches as it will when measuring.
        """
        runs, totals, until = [], [], time.monotonic() + seconds
        if (reference := self._reference) is None:
            raise ShardCoreError("there is no reference op to calibrate by; give the bench one")
        for request in requests:
            try:
                runs.append(self._retry_without_cache(lambda r=request: self.prepare(r)))
            except self._device.request_errors:
                continue

        # At least ten rounds, for machines on which one takes the whole time.
        while time.monotonic() < until or len(totals) < 10:
            of_round = [sum(self._run_in_turn(run, len(runs))) for run in (*runs, reference)]
            totals.append(of_round[-1])
        return float(np.median(totals))

    def _run_round(self) -> list[ComputeSample]:
        """Run the reference op and each active op once, in random order. Returns finished samples."""
        turn = [*self._active, *([self._reference] if self._reference else [])]
        # No op profits from the same neighbour in each round.
        self._order.shuffle(turn)
        active = len(self._active)
        failed = [sample for run in turn if (sample := self._run_repeat(run, active))]
        return failed + self._collect_settled()

    def _run_repeat(self, run: KernelRun, n_active_ops: int) -> ComputeSample | None:
        """Run an op once more, one of so many. Returns a sample with the error if the run fails."""
        try:
            forward, backward = self._retry_without_cache(lambda: self._run_in_turn(run, n_active_ops))
        except self._device.request_errors as error:
            # Without the reference, the usual speed is not known, so nothing can go on.
            if run is self._reference:
                raise ShardCoreError(f"the reference op failed: {error}") from None
            self._active.remove(run)
            return self._failed_sample(run.request, error)
        # The first run warms up: it loads code and allocates buffers.
        if run.warm:
            run.times_ms.append((forward, backward, self._log.add_timing(run.number, forward + backward)))
        run.warm = True
        return None

    def _retry_without_cache(self, work: Callable[[], T]) -> T:
        """Call a function; if memory runs out, drop cached id streams and call the function once more."""
        try:
            return work()
        except torch.OutOfMemoryError:
            self.streams.clear()
        # After the except block: the error's traceback keeps tensors of the failed try alive.
        self._device.release_memory()
        return work()

    def _collect_settled(self) -> list[ComputeSample]:
        """Samples of active ops whose median is known to the tolerance, or whose time is over."""
        # Fitting the slowdown is costly, so it waits until an op may be done.
        full = [run for run in self._active if len(run.times_ms) >= self.config.min_repeats]
        if not full:
            return []
        slowdown, finished = self._log.fit_slowdown(), []
        for run in full:
            totals = _corrected_times(run, slowdown).sum(1)
            is_known = timing.relative_ci(totals) <= self.config.timing_tolerance(self.device)
            is_trained_on = dataset.split_of_sample(dataset.compute_id(self.setting, run.request)) == "train"
            most = self.config.max_repeats * (1 if is_trained_on else HELD_OUT_TIMES)
            if is_known or len(totals) >= most or totals.sum() >= _LONGEST_MS:
                self._active.remove(run)
                self.kept_s += sum(forward + backward for forward, backward, _ in run.times_ms) / 1e3
                finished.append(self._sample_of_run(run, slowdown))
        if self._reference and len(self._reference.times_ms) >= _REFERENCE_RUNS:
            finished.append(self._sample_of_run(self._reference, slowdown))
        return finished

    def prepare(self, request: ComputeRequest, seed: int = _SEED) -> KernelRun:
        """Build a request's fused op over the arena, with the batch that `seed` draws.

        Raises ShardCoreError if a shard is larger than the arena or of another precision than the setting's,
        or if the batch takes too much memory.
        """
        shape = self._checked_batch_shape(request)
        indices, offsets = self.streams.lookup_stream(request, seed)
        # A sequence has an output for each lookup.
        rows, width = len(indices) if request.shards[0].table.sequence else shape.rows, shape.width
        if self._gradient.numel() < rows * width:
            self._gradient = torch.full((rows * width,), 1e-3, device=self._device.place)
        return KernelRun(
            next(self._numbers),
            request,
            self._build_op(request.shards),
            indices,
            offsets,
            self._gradient[: rows * width].view(-1 if shape.uneven else (rows, width)),
            [[n] for n in shape.values] if shape.uneven else None,
        )

    def prefetch(self, requests: Iterable[ComputeRequest]) -> None:
        """Begin to draw the ids of coming requests in background threads, if the device leaves cores for them.

        Requests that cannot run are skipped: `add` will refuse them.
        """
        if self._device.drawing_threads:
            self.streams.prefetch(filter(self._can_run, requests), _SEED)

    def _can_run(self, request: ComputeRequest) -> bool:
        """Tell if a request has a valid shape and precision."""
        try:
            self._checked_batch_shape(request)
        except ShardCoreError:
            return False
        return True

    def run_once_ms(self, run: KernelRun) -> float:
        """Run an op once. Returns forward + backward ms of the clock."""
        return sum(self._run_once(run))

    def _run_in_turn(self, run: KernelRun, active: int) -> tuple[float, float]:
        """Run an op once, in turn with the other active ops. Where they are too few to evict each other from the
        caches, overwrite the caches first.
        """
        # Half a window of ops is enough to fill the caches between two runs.
        if 2 * active < self.config.interleave:
            self._caches.evict_caches()
        return self._run_once(run)

    def _run_once(self, run: KernelRun) -> tuple[float, float]:
        """Run an op once. Returns forward and backward ms of the clock."""
        # Kernels queue up behind this. Else the marks would time Python's launches, not the device.
        self._device.keep_busy(self._launch_ms)
        began = time.perf_counter()
        marks = [self._device.record_mark()]
        output = run.forward()
        marks.append(self._device.record_mark())
        output.backward(run.gradient)
        marks.append(self._device.record_mark())
        # Launch times vary. Follow a rise at once and a fall slowly.
        self._launch_ms = max(_LAUNCHES * 1e3 * (time.perf_counter() - began), 0.9 * self._launch_ms)
        forward, backward = self._device.elapsed_ms(marks)
        self.kernel_s += (forward + backward) / 1e3
        return forward, backward

    def _checked_batch_shape(self, request: ComputeRequest) -> _BatchShape:
        """Shape of a request's batch. Raises ShardCoreError for another precision or too large a batch."""
        other = {s.table.precision for s in request.shards} - {self.setting.precision}
        # An op of FBGEMM has weights of one type.
        require(
            not other,
            f"shards have weights in {', '.join(other)}; the setting's are in {self.setting.precision}",
        )
        return _batch_shape(request, self._device.max_batch_bytes())

    def _build_op(self, shards: tuple[Shard, ...]) -> torch.nn.Module:
        """Build the fused op of some shards over the arena, with their row counts and offsets."""
        # [F] table of each feature, as FBGEMM keeps properties of tables by feature.
        of_feature = [i for i, s in enumerate(shards) for _ in range(s.table.features)]
        op: Any = fused_op.build_fused_op(
            [s.width for s in shards],
            self.setting.optimizer,
            self.setting.precision,
            self._device.place,
            of_feature,
            shards[0].table.sequence,
        )
        memory_of = self._device.memory_of
        rows, cells = [s.rows for s in shards], [s.rows * s.width for s in shards]
        # The backward pass sorts ids by row, over this many rows and bits.
        op.total_hash_size = sum(rows)
        op.total_hash_size_bits = int(math.log2(float(sum(rows))) + 1)
        # FBGEMM numbers the rows of all tables one after another.
        starts, places = [0, *np.cumsum(rows)], fused_op.arena_offsets(cells, self._arena.numel(), shards)
        op.hash_size_cumsum = self._int64_tensor([*(starts[i] for i in of_feature), starts[-1]])
        op.rows_per_table = self._int64_tensor(rows[i] for i in of_feature)
        # TBE's weights are one flat buffer, here the arena. Offsets are in its elements.
        op.weights_offsets = self._int64_tensor(places[i] for i in of_feature)
        setattr(op, f"weights_{memory_of}", torch.nn.Parameter(self._arena))
        # State is set as weights are: shared memory, with each table's place in it.
        kept = zip(OPTIMIZERS[self.setting.optimizer].states, self._states, strict=True)
        for n, (per, state) in enumerate(kept, 1):
            of_state = fused_op.arena_offsets(cells if per == "cell" else rows, state.numel(), shards)
            setattr(op, f"momentum{n}_offsets", self._int64_tensor(of_state[i] for i in of_feature))
            setattr(op, f"momentum{n}_{memory_of}", torch.nn.Parameter(state))
        return op

    def _int64_tensor(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor([int(v) for v in values], dtype=torch.int64, device=self._device.place)

    def _sample_of_run(self, run: KernelRun, slowdown: Callable[[int], float] | None = None) -> ComputeSample:
        """Sample of an op's timings, which are then cleared."""
        times = _corrected_times(run, slowdown or self._log.fit_slowdown())
        totals = times.sum(1)
        sample = dataclasses.replace(
            self._failed_sample(run.request),
            error=None,
            forward=timing.timing_spread(times[:, 0]),
            backward=timing.timing_spread(times[:, 1]),
            slowdown=float(np.median(np.array(run.times_ms)[:, :2].sum(1) / totals)),
            relative_ci=timing.relative_ci(totals),
        )
        # The reference op runs on: its next sample is of later runs.
        run.times_ms = []
        return sample

    def _failed_sample(self, request: ComputeRequest, error: Exception | str = "") -> ComputeSample:
        """Sample of a request without a timing, with an error."""
        self._finished += 1
        return ComputeSample(
            dataset.compute_id(self.setting, request),
            self.setting,
            request,
            None,
            None,
            time.time(),
            hardware.one_line_message(error),
            order=self._finished - 1,
            software=self._software,
        )


@dataclass(eq=False)
class KernelRun:
    """A fused op with a prepared batch, ready to be timed.

    number: number of the op in the slowdown log.
    indices, offsets: [L] and [F × B + 1].
    gradient: [B, W] gradient of the outputs. [L, W] for a sequence.
    values: [F, 1] distinct values of each feature, if some table is deduplicated. Offsets then have one entry
        for each value and a last one, and the gradient is flat. None: each feature has B.
    warm: True after the first run.
    times_ms: forward ms, backward ms and number in the slowdown log of each repeat.
    """

    number: int
    request: ComputeRequest
    op: torch.nn.Module
    indices: torch.Tensor
    offsets: torch.Tensor
    gradient: torch.Tensor
    values: list[list[int]] | None = None
    warm: bool = False
    times_ms: list[tuple[float, float, int]] = dataclasses.field(default_factory=list)

    def forward(self) -> torch.Tensor:
        """Outputs of the fused op for the prepared batch."""
        # As in TorchRec, FBGEMM gets the number of values of each feature if these differ.
        return self.op(self.indices, self.offsets, batch_size_per_feature_per_rank=self.values)


def _corrected_times(run: KernelRun, slowdown: Callable[[int], float]) -> np.ndarray:
    """[repeats, 2] forward and backward ms of an op, divided by the machine's slowdown."""
    # Forward and backward of a run have the same slowdown.
    return np.array(run.times_ms)[:, :2] / [[slowdown(number)] for _, _, number in run.times_ms]


class _BatchShape(NamedTuple):
    """Shape of an op's batch and outputs.

    values: [F] distinct values of each feature.
    rows: rows of outputs: one a sample. Sequences: the expected number of lookups.
    width: columns of a row.
    uneven: True if features have different numbers of values. All outputs are then one row.
    """

    values: list[int]
    rows: int
    width: int
    uneven: bool


def _batch_shape(request: ComputeRequest, most_bytes: int) -> _BatchShape:
    """Shape of a request's batch and outputs, before ids are drawn.

    most_bytes: limit of its ids, offsets, outputs and gradients together.

    Raises ShardCoreError if it exceeds that, and for an op that FBGEMM cannot run.
    """
    sequence, values, widths = is_sequence_op(request.shards), [], []
    for s in request.shards:
        # Values are per feature, as those of a table may differ.
        values += access.bag_counts_by_feature(s.table, request.batch)
        widths += [s.width] * s.table.features
    looked_up = sum(round(request.batch * s.table.lookups_per_sample) for s in request.shards)
    # Sequences have an output for each lookup, whatever the number of distinct values.
    uneven = not sequence and any(s.table.has_variable_batch for s in request.shards)
    if sequence:
        rows, width = looked_up, widths[0]
    elif uneven:
        rows, width = 1, sum(n * w for n, w in zip(values, widths, strict=True))
    else:
        rows, width = request.batch, sum(widths)
    # Ids and offsets of 8 bytes; outputs and their gradients.
    n_bytes = 8 * (looked_up + sum(values)) + 2 * OUTPUT_BYTES * rows * width
    require(
        n_bytes <= most_bytes,
        f"a batch of {request.batch} has {n_bytes / 2**30:.1f} GiB of ids and outputs; on this machine it may have "
        f"{most_bytes / 2**30:.1f}: it needs fewer samples, or lookups of each",
    )
    return _BatchShape(values, rows, width, uneven)
