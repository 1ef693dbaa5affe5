"""Fused FBGEMM ops, forward and backward, measured on one device.

Building an op with its own weights costs seconds of allocation for milliseconds of kernel. Here one arena of
weights, touched once, serves every op: an op is built with one row a table, in milliseconds, and then given
the arena and the true row counts. Tables of one op lie one after the other; where they exceed the arena
together they wrap round and share addresses. A batch touches a small part of the arena, so shared rows are
rare, and the kernels see the same spread of addresses.

Ops run in turn: between two runs of one op, the others evict it from the caches, as other layers and other
batches do in training, and cost nothing. A finished op makes room for the next. Where too few are left to
evict each other, the caches are overwritten before each run. The order changes from round to round, and each
op lies elsewhere in the arena, so that none profits from the same neighbour.

Repeats of an op are thus spread over seconds, and runs side by side tell the machine's slowdown at each
moment (timing.SlowdownLog); timings are given at its usual speed, which a reference op ties down: it runs in
every round, from the first to the last.

Shapes: T tables of an op, L lookups, B batch, W columns of all its shards together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardcore.core.catalog import OPTIMIZERS, PRECISIONS
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import MIN_WIDTH, PRECISION_BYTES, Setting, Shard
from shardcore.core.validation import MOST_BYTES, MOST_REPEATS, MOST_ROWS, require_within
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure import devices, fused_op, hardware, timing
from shardcore.measure.index_streams import IndexStreams
from shardcore.measure.op_shape import OpShape, op_shape
from shardcore.step import memory

_REFERENCE_RUNS = 48
"""Runs of the reference that make one sample of it."""
_SEED = 0
"""Of the batches that are measured."""
_FIRST_LAUNCH_MS, _LAUNCHES = 20.0, 1.5
"""A device is kept busy for so many times as long as the last launches took, and at first for 20 ms."""


@dataclass(frozen=True)
class KernelConfig:
    """How ops are measured.

    arena_bytes: weights shared by all ops, the largest shard that can be measured.
    tolerance: repeats stop when the median of forward + backward is known to this fraction (95%). None: the
        device's.
    min_repeats, max_repeats: of an op.
    interleave: ops in turn.
    state_rows: rows of an optimizer's state that there is room for. Tables beyond it share them. None: as
        many as an arena of the narrowest rows has.
    """

    arena_bytes: int = 1 << 30
    tolerance: float | None = None
    min_repeats: int = 6
    max_repeats: int = 24
    interleave: int = 16
    state_rows: int | None = None

    def __post_init__(self) -> None:
        require_within(
            self,
            "kernel config",
            arena_bytes=(1, MOST_BYTES),
            state_rows=(1, MOST_ROWS),
            min_repeats=(1, MOST_REPEATS),
            max_repeats=(self.min_repeats, MOST_REPEATS),
            interleave=(1, MOST_REPEATS),
        )
        if not (self.tolerance is None or 0 < self.tolerance < 1):
            raise ShardCoreError(
                f"kernel config has tolerance {self.tolerance}; it needs a share within 0 and 1, such as 0.05"
            )

    def tolerance_on(self, device: str) -> float:
        return self.tolerance or devices.device_of(device).tolerance


class KernelBench:
    """Measures requests of one Setting on one device ("cpu" or "cuda"); holds the arena and the tables' index
    streams.

    reference: a group that runs in every round; each time it has run often enough, a sample of it is among
    those returned. reference_ms: its forward + backward at the device's usual speed (from `calibrate`, or an
    earlier dataset); without it, a timing is at the mean slowdown of some thousand runs.
    """

    def __init__(
        self,
        setting: Setting,
        device: str = "cpu",
        config: KernelConfig | None = None,
        reference: ComputeRequest | None = None,
        reference_ms: float | None = None,
    ):
        self._device = devices.device_of(device)
        hardware.require_fbgemm(device)
        fused_op.require_trains(setting, self._device.place)
        self.setting, self.device, self.config = setting, device, config or KernelConfig()
        self.streams = IndexStreams(
            self._device.place, self._device.stream_bytes(), self._device.drawing_threads
        )
        self.kernel_s = 0.0
        """Seconds inside timed kernels so far, warm-ups and the reference included."""
        self.kept_s = 0.0
        """Seconds of them in runs that entered a median."""
        dtype = getattr(torch, PRECISIONS[setting.precision].torch)
        elements = self.config.arena_bytes // PRECISION_BYTES[setting.precision]
        try:
            place = self._device.place
            self._arena = torch.empty(elements, dtype=dtype, device=place).uniform_(-0.01, 0.01)
            # Of rows there are most where all are narrow.
            rows = min(self.config.state_rows or MOST_ROWS, max(1, elements // MIN_WIDTH))
            self._states = [
                torch.zeros(elements if per == "cell" else rows, device=place)
                for per in OPTIMIZERS[setting.optimizer].states
            ]
        except RuntimeError as error:
            raise ShardCoreError(
                f"an arena of {memory.gib(self.config.arena_bytes)} with the state of "
                f"{setting.optimizer} does not fit {device}: "
                f"make it smaller ({' '.join(str(error).split())[:100]})"
            ) from None
        self._gradient = torch.full((1,), 1e-3, device=place)
        self._caches = timing.Caches(self._device.evict_bytes(), place)
        self._launch_ms = _FIRST_LAUNCH_MS
        versions = {**self._device.versions(), "arena": memory.gib(self.config.arena_bytes)}
        self._software = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        self._numbers = itertools.count()
        self._active: list[Run] = []
        self._finished = 0
        self._order = random.Random(0)
        self._reference = self.prepare(reference) if reference else None
        self.reference_ms = reference_ms

    @property
    def reference_ms(self) -> float | None:
        """May be set while nothing is active."""
        return self._reference_ms

    @reference_ms.setter
    def reference_ms(self, value: float | None) -> None:
        self._reference_ms = value
        kept = 2 * (self.config.interleave + 1) * max(self.config.max_repeats + 1, _REFERENCE_RUNS)
        known = {self._reference.number: math.log(value)} if value and self._reference else None
        self._log = timing.SlowdownLog(known, kept)

    @property
    def active(self) -> list[ComputeRequest]:
        """Requests that were added and did not finish yet."""
        return [run.request for run in self._active]

    def measure(self, requests: Iterable[ComputeRequest]) -> Iterator[ComputeSample]:
        """Yield one sample a request (and the reference's), in the order in which they finish; a request that
        fails yields its error."""
        for request in requests:
            yield from self.add(request)
        yield from self.finish()

    def add(self, request: ComputeRequest) -> list[ComputeSample]:
        """Take a request in, once there is room for it; the samples that finished meanwhile, and its own
        where it failed."""
        finished = []
        while len(self._active) >= self.config.interleave:
            finished += self._round()
        try:
            self._active.append(self._with_room(lambda: self.prepare(request)))
        except self._device.request_errors as error:
            finished.append(self._failed(request, error))
        return finished

    def finish(self, seconds: float = math.inf) -> list[ComputeSample]:
        """Run what was taken in to its end, or for somewhat longer than so many seconds; the samples that
        this finished."""
        finished, until = [], time.monotonic() + seconds
        while self._active:
            finished += self._round()
            if time.monotonic() > until and self._active:
                return finished
        if self._reference and len(self._reference.times_ms) >= self.config.min_repeats:
            finished.append(self._sample(self._reference))
        return finished

    def calibrate(self, requests: Iterable[ComputeRequest], seconds: float = 5.0) -> float:
        """The reference's forward + backward in ms at the slowdown that the machine has for so many seconds,
        in which other requests run in turn with it: give as many as will when measuring (`interleave`), for
        the reference to find the same caches."""
        runs, totals, until = [], [], time.monotonic() + seconds
        for request in requests:
            try:
                runs.append(self._with_room(lambda r=request: self.prepare(r)))
            except self._device.request_errors:
                continue
        while time.monotonic() < until or len(totals) < 10:
            for run in [*runs, self._reference]:
                if 2 * len(runs) < self.config.interleave:
                    self._caches.evict()
                total = sum(self._once(run))
            totals.append(total)
        return float(np.median(totals))

    def _round(self) -> list[ComputeSample]:
        """Run the reference and each op in turn once; the samples that this finished."""
        turn = [*self._active, *([self._reference] if self._reference else [])]
        self._order.shuffle(turn)
        crowded = 2 * len(self._active) >= self.config.interleave
        failed = [sample for run in turn if (sample := self._repeat(run, crowded))]
        return failed + self._settled()

    def _repeat(self, run: Run, crowded: bool) -> ComputeSample | None:
        """Run an op once more; its sample if that failed."""
        if not crowded:
            self._caches.evict()
        try:
            forward, backward = self._with_room(lambda: self._once(run))
        except self._device.request_errors as error:
            if run is self._reference:
                raise ShardCoreError(f"the reference op failed: {error}") from None
            self._active.remove(run)
            return self._failed(run.request, error)
        if run.warm:
            run.times_ms.append((forward, backward, self._log.add(run.number, forward + backward)))
        run.warm = True
        return None

    def _with_room(self, work: Callable[[], Any]) -> Any:
        """What `work` gives. Out of memory, it is tried once more without the streams that are kept."""
        try:
            return work()
        except torch.OutOfMemoryError:
            self.streams.clear()
        # Only here, where the error no longer holds what it was raised among.
        self._device.release()
        return work()

    def _settled(self) -> list[ComputeSample]:
        """Samples of the ops whose median is known well enough, or as well as is to be."""
        full = [run for run in self._active if len(run.times_ms) >= self.config.min_repeats]
        if not full:
            return []
        slowdown, finished = self._log.fit(), []
        for run in full:
            times = _at_usual_speed(run, slowdown)
            if len(times) >= self.config.max_repeats or timing.relative_ci(
                times.sum(1)
            ) <= self.config.tolerance_on(self.device):
                self._active.remove(run)
                self.kept_s += sum(forward + backward for forward, backward, _ in run.times_ms) / 1e3
                finished.append(self._sample(run, slowdown))
        if self._reference and len(self._reference.times_ms) >= _REFERENCE_RUNS:
            finished.append(self._sample(self._reference, slowdown))
        return finished

    def prepare(self, request: ComputeRequest, seed: int = _SEED) -> Run:
        """Build a request's op over the arena, with the batch that `seed` draws. Raises ShardCoreError where
        a shard is larger than the arena or of another precision than the setting's, and where the batch takes
        more memory than may be."""
        shape = self._shape(request)
        indices, offsets = self.streams.lookups(request, seed)
        rows, width = len(indices) if request.shards[0].table.sequence else shape.rows, shape.width
        if self._gradient.numel() < rows * width:
            self._gradient = torch.full((rows * width,), 1e-3, device=self._device.place)
        return Run(
            next(self._numbers),
            request,
            self._build(request.shards),
            indices,
            offsets,
            self._gradient[: rows * width].view(-1 if shape.several else (rows, width)),
            [[n] for n in shape.values] if shape.several else None,
        )

    def expect(self, requests: Iterable[ComputeRequest]) -> None:
        """Begin to draw the ids of requests that `add` will be given, if the device leaves cores for that.

        Those that cannot run are left for `add` to refuse.
        """
        if self._device.drawing_threads:
            self.streams.expect(filter(self._runs, requests), _SEED)

    def _runs(self, request: ComputeRequest) -> bool:
        try:
            self._shape(request)
        except ShardCoreError:
            return False
        return True

    def once_ms(self, run: Run) -> float:
        """Run forward and backward once; their ms together, as the clock shows them."""
        return sum(self._once(run))

    def _once(self, run: Run) -> tuple[float, float]:
        """Run forward and backward once; their ms."""
        # Else the marks would time how Python launches, not what the device runs.
        self._device.keep_busy(self._launch_ms)
        began = time.perf_counter()
        marks = [self._device.mark()]
        output = run.forward()
        marks.append(self._device.mark())
        output.backward(run.gradient)
        marks.append(self._device.mark())
        self._launch_ms = max(_LAUNCHES * 1e3 * (time.perf_counter() - began), 0.9 * self._launch_ms)
        forward, backward = self._device.elapsed_ms(marks)
        self.kernel_s += (forward + backward) / 1e3
        return forward, backward

    def _shape(self, request: ComputeRequest) -> OpShape:
        other = {s.table.precision for s in request.shards} - {self.setting.precision}
        if other:
            raise ShardCoreError(f"shards have weights in {other.pop()}; the setting is ({self.setting})")
        return op_shape(request, self._device.batch_bytes())

    def _build(self, shards: tuple[Shard, ...]) -> torch.nn.Module:
        """An op over the arena: built with one row a table, then given its true row counts and places in the
        arena."""
        # The number of the table of each feature: FBGEMM keeps what it knows of tables by feature.
        of_feature = [i for i, s in enumerate(shards) for _ in range(s.table.features)]
        op = fused_op.build(
            [s.width for s in shards],
            self.setting.optimizer,
            self.setting.precision,
            self._device.place,
            of_feature,
            shards[0].table.sequence,
        )
        memory_of = self._device.memory_of
        rows, cells = [s.rows for s in shards], [s.rows * s.width for s in shards]
        op.total_hash_size = sum(rows)
        op.total_hash_size_bits = int(math.log2(float(sum(rows))) + 1)
        starts, places = [0, *np.cumsum(rows)], fused_op.places(cells, self._arena.numel(), shards)
        op.hash_size_cumsum = self._int64([*(starts[i] for i in of_feature), starts[-1]])
        op.rows_per_table = self._int64(rows[i] for i in of_feature)
        op.weights_offsets = self._int64(places[i] for i in of_feature)
        setattr(op, f"weights_{memory_of}", torch.nn.Parameter(self._arena))
        kept = zip(OPTIMIZERS[self.setting.optimizer].states, self._states, strict=True)
        for n, (per, state) in enumerate(kept, 1):
            of_state = fused_op.places(cells if per == "cell" else rows, state.numel(), shards)
            setattr(op, f"momentum{n}_offsets", self._int64(of_state[i] for i in of_feature))
            setattr(op, f"momentum{n}_{memory_of}", torch.nn.Parameter(state))
        return op

    def _int64(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor([int(v) for v in values], dtype=torch.int64, device=self._device.place)

    def _sample(self, run: Run, slowdown: Callable[[int], float] | None = None) -> ComputeSample:
        """The sample of a run's timings, which are then forgotten."""
        times = _at_usual_speed(run, slowdown or self._log.fit())
        clock = np.array([forward + backward for forward, backward, _ in run.times_ms])
        sample = dataclasses.replace(
            self._failed(run.request),
            error=None,
            forward=timing.spread(times[:, 0]),
            backward=timing.spread(times[:, 1]),
            slowdown=float(np.median(clock / times.sum(1))),
            relative_ci=timing.relative_ci(times.sum(1)),
        )
        run.times_ms = []
        return sample

    def _failed(self, request: ComputeRequest, error: Exception | str = "") -> ComputeSample:
        reason = " ".join(str(error).split())[:300]
        self._finished += 1
        return ComputeSample(
            dataset.compute_id(self.setting, request),
            self.setting,
            request,
            None,
            None,
            time.time(),
            reason,
            order=self._finished - 1,
            software=self._software,
        )


@dataclass(eq=False)
class Run:
    """One op, ready to run, with a number of its own: over indices [L] and offsets [T × B + 1]; gradient [B,
    W] of its outputs, [L, W] of a sequence's. values: [T, 1] of each feature, where a table has fewer than
    samples (deduplicated); offsets are then as many, and the gradient is flat. times_ms: of each repeat
    forward, backward, and its number in the slowdown log."""

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
        """The op's outputs. As TorchRec does, FBGEMM is told how many values features have if they differ."""
        return self.op(self.indices, self.offsets, batch_size_per_feature_per_rank=self.values)


def _at_usual_speed(run: Run, slowdown: Callable[[int], float]) -> np.ndarray:
    """[repeats, 2] forward and backward ms."""
    return np.array(
        [
            (forward / slowdown(number), backward / slowdown(number))
            for forward, backward, number in run.times_ms
        ]
    )
