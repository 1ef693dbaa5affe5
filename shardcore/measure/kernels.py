"""Fused FBGEMM ops, forward and backward, measured on one device.

Building an op with its own weights costs seconds of allocation for milliseconds of kernel. Here one arena of weights,
touched once, serves every op. An op is built with one row a table, in milliseconds, and then gets the arena and the
true row counts. Tables of one op lie one after the other. Where they exceed the arena together they wrap round and
share addresses. A batch touches a small share of the arena, so shared rows are rare, and the kernels see the same
spread of addresses.

Ops run in turn: between two runs of one op, the others evict it from the caches, as other layers and other batches do
in training, and cost nothing. A finished op makes room for the next. Where too few are left to evict each other, the
caches are overwritten before each run. The order changes from round to round, and each op lies elsewhere in the
arena, so that none profits from the same neighbour.

So repeats of an op are spread over seconds, and neighbouring runs show the machine's slowdown at each moment
(timing.SlowdownLog). Timings are at its usual speed, which a reference op ties down: it runs in every round, from the
first to the last.

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
from shardcore.core.validation import MOST_BYTES, MOST_REPEATS, MOST_ROWS, require, require_within
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure import devices, fused_op, hardware, timing
from shardcore.measure.index_streams import IndexStreams
from shardcore.step import access, memory
from shardcore.step.lower import is_sequence

T = TypeVar("T")
_REFERENCE_RUNS = 48
"""Runs of the reference that make one sample of it."""
_SEED = 0
"""Seed of the batches that are measured."""
_FIRST_LAUNCH_MS, _LAUNCHES = 20.0, 1.5
"""A device is kept busy for 1.5 times as long as the last launches took, and at first for 20 ms."""


@dataclass(frozen=True)
class KernelConfig:
    """Settings of measured ops.

    arena_bytes: weights shared by all ops, the largest shard that can be measured.
    tolerance: repeats stop when the median of forward + backward is known to this fraction (95%). None: the device's.
    min_repeats, max_repeats: of an op.
    interleave: ops in turn.
    state_rows: rows of an optimizer's state. Tables beyond it share them. None: as many as an arena of the narrowest
        rows has.
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
        require(
            self.tolerance is None or 0 < self.tolerance < 1,
            f"kernel config has tolerance {self.tolerance}; it needs a share within 0 and 1, such as 0.05",
        )

    def tolerance_on(self, device: str) -> float:
        return self.tolerance or devices.device_of(device).tolerance


class KernelBench:
    """Measures requests of one Setting on one device ("cpu" or "cuda"), over one arena.

    reference: a group that runs in every round. Each time it has run often enough, its sample is among the results.
    reference_ms: its forward + backward at the device's usual speed (from `calibrate`, or an earlier dataset).
        Without it, a timing is at the mean slowdown of some thousand runs.
    kernel_s: seconds inside timed kernels so far, warm-ups and the reference included.
    kept_s: seconds of them in runs that entered a median.
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
        # Before memory is taken: unsupported settings are refused at once.
        fused_op.require_trains(setting, self._device.place)
        self.setting, self.device, self.config = setting, device, config or KernelConfig()
        self.streams = IndexStreams(
            self._device.place, self._device.stream_bytes(), self._device.drawing_threads
        )
        self.kernel_s = self.kept_s = 0.0
        place, dtype = self._device.place, getattr(torch, PRECISIONS[setting.precision].torch)
        elements = self.config.arena_bytes // PRECISION_BYTES[setting.precision]
        try:
            # Written once, or the first ops would pay for the operating system's page faults.
            self._arena = torch.empty(elements, dtype=dtype, device=place).uniform_(-0.01, 0.01)
            # An arena has most rows where all are narrow.
            rows = min(self.config.state_rows or MOST_ROWS, max(1, elements // MIN_WIDTH))
            # State is shared like weights: a number a cell, or a number a row.
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
        # One gradient serves all ops. It grows with the largest one's outputs.
        self._gradient = torch.full((1,), 1e-3, device=place)
        self._caches = timing.Caches(self._device.evict_bytes(), place)
        self._launch_ms = _FIRST_LAUNCH_MS
        # Timings depend on the arena's size, too: rows lie further apart in a larger one.
        versions = {**self._device.versions(), "arena": memory.gib(self.config.arena_bytes)}
        self._software = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        self._numbers = itertools.count()
        self._active: list[Run] = []
        self._finished = 0
        # A fixed seed: only the order of runs depends on it.
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
        # Twice the runs of all ops in turn, so that each run kept has neighbours on both sides.
        kept = 2 * (self.config.interleave + 1) * max(self.config.max_repeats + 1, _REFERENCE_RUNS)
        known = {self._reference.number: math.log(value)} if value and self._reference else None
        self._log = timing.SlowdownLog(known, kept)

    @property
    def active(self) -> list[ComputeRequest]:
        """Requests that were added and did not finish yet."""
        return [run.request for run in self._active]

    def measure(self, requests: Iterable[ComputeRequest]) -> Iterator[ComputeSample]:
        """Yield one sample a request (and the reference's), in the order in which they finish.

        A request that fails yields its error.
        """
        for request in requests:
            yield from self.add(request)
        yield from self.finish()

    def add(self, request: ComputeRequest) -> list[ComputeSample]:
        """Take a request in, once there is room. Returns samples that finished meanwhile, failed ones too."""
        finished = []
        # Room in the window: rounds go on until an op finishes.
        while len(self._active) >= self.config.interleave:
            finished += self._round()
        try:
            self._active.append(self._with_room(lambda: self.prepare(request)))
        except self._device.request_errors as error:
            finished.append(self._failed(request, error))
        return finished

    def finish(self, seconds: float = math.inf) -> list[ComputeSample]:
        """Run active requests to their end, or for somewhat longer than so many seconds. Returns their samples."""
        finished, until = [], time.monotonic() + seconds
        while self._active:
            finished += self._round()
            if time.monotonic() > until and self._active:
                return finished
        # The reference's last sample, from what it ran since the last one.
        if self._reference and len(self._reference.times_ms) >= self.config.min_repeats:
            finished.append(self._sample(self._reference))
        return finished

    def calibrate(self, requests: Iterable[ComputeRequest], seconds: float = 5.0) -> float:
        """The reference's forward + backward in ms, at the machine's slowdown in so many seconds.

        requests: run in turn with it. Give as many as will when measuring (`interleave`), for the reference to find
            the same caches.
        """
        runs, totals, until = [], [], time.monotonic() + seconds
        if (reference := self._reference) is None:
            raise ShardCoreError("there is no reference op to calibrate by; give the bench one")
        for request in requests:
            try:
                runs.append(self._with_room(lambda r=request: self.prepare(r)))
            except self._device.request_errors:
                continue

        def total_ms(run: Run) -> float:
            # Few ops do not evict each other, so do it for them.
            if 2 * len(runs) < self.config.interleave:
                self._caches.evict()
            return self.once_ms(run)

        # Ten at least, for machines on which one round takes the whole time.
        while time.monotonic() < until or len(totals) < 10:
            for run in runs:
                total_ms(run)
            totals.append(total_ms(reference))
        return float(np.median(totals))

    def _round(self) -> list[ComputeSample]:
        """Run the reference and each active op once. Returns the samples that this finished."""
        turn = [*self._active, *([self._reference] if self._reference else [])]
        # No op profits from the same neighbour in each round.
        self._order.shuffle(turn)
        # Half a window of ops is enough to fill the caches between two runs.
        crowded = 2 * len(self._active) >= self.config.interleave
        failed = [sample for run in turn if (sample := self._repeat(run, crowded))]
        return failed + self._settled()

    def _repeat(self, run: Run, crowded: bool) -> ComputeSample | None:
        """Run an op once more. Returns its sample if that failed."""
        if not crowded:
            self._caches.evict()
        try:
            forward, backward = self._with_room(lambda: self._once(run))
        except self._device.request_errors as error:
            # Without the reference no slowdown is known, so nothing can go on.
            if run is self._reference:
                raise ShardCoreError(f"the reference op failed: {error}") from None
            self._active.remove(run)
            return self._failed(run.request, error)
        # The first run warms up: it loads code and allocates buffers.
        if run.warm:
            run.times_ms.append((forward, backward, self._log.add(run.number, forward + backward)))
        run.warm = True
        return None

    def _with_room(self, work: Callable[[], T]) -> T:
        """The result of `work`. Out of memory, it is tried once more without the streams that are kept."""
        try:
            return work()
        except torch.OutOfMemoryError:
            self.streams.clear()
        # Only here, where the error no longer holds what it was raised among.
        self._device.release()
        return work()

    def _settled(self) -> list[ComputeSample]:
        """Samples of the ops whose median is known well enough, or that ran often enough."""
        # Fitting the slowdown is costly, so only if an op may be done.
        full = [run for run in self._active if len(run.times_ms) >= self.config.min_repeats]
        if not full:
            return []
        slowdown, finished = self._log.fit(), []
        for run in full:
            totals = _at_usual_speed(run, slowdown).sum(1).tolist()
            is_known = timing.relative_ci(totals) <= self.config.tolerance_on(self.device)
            if is_known or len(totals) >= self.config.max_repeats:
                self._active.remove(run)
                self.kept_s += sum(forward + backward for forward, backward, _ in run.times_ms) / 1e3
                finished.append(self._sample(run, slowdown))
        if self._reference and len(self._reference.times_ms) >= _REFERENCE_RUNS:
            finished.append(self._sample(self._reference, slowdown))
        return finished

    def prepare(self, request: ComputeRequest, seed: int = _SEED) -> Run:
        """Build a request's op over the arena, with the batch that `seed` draws.

        Raises ShardCoreError where a shard is larger than the arena or of another precision than the setting's, and
        where the batch takes too much memory.
        """
        shape = self._shape(request)
        indices, offsets = self.streams.lookups(request, seed)
        # Outputs of a sequence are as many as its lookups.
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
        """Clock ms of one run forward and backward."""
        return sum(self._once(run))

    def _once(self, run: Run) -> tuple[float, float]:
        """Clock ms of one run: forward, backward."""
        # Else the marks would time how Python launches, not what the device runs.
        self._device.keep_busy(self._launch_ms)
        began = time.perf_counter()
        marks = [self._device.mark()]
        output = run.forward()
        marks.append(self._device.mark())
        output.backward(run.gradient)
        marks.append(self._device.mark())
        # Launch times vary: follow a rise at once, and a fall slowly.
        self._launch_ms = max(_LAUNCHES * 1e3 * (time.perf_counter() - began), 0.9 * self._launch_ms)
        forward, backward = self._device.elapsed_ms(marks)
        self.kernel_s += (forward + backward) / 1e3
        return forward, backward

    def _shape(self, request: ComputeRequest) -> _Shape:
        other = {s.table.precision for s in request.shards} - {self.setting.precision}
        # FBGEMM's op has one type of weights.
        require(not other, f"shards have weights in {', '.join(other)}; the setting is ({self.setting})")
        return _shape_of(request, self._device.batch_bytes())

    def _build(self, shards: tuple[Shard, ...]) -> torch.nn.Module:
        """An op over the arena: built with one row a table, then given its true row counts and places."""
        # The number of the table of each feature: FBGEMM keeps properties of tables by feature.
        of_feature = [i for i, s in enumerate(shards) for _ in range(s.table.features)]
        op: Any = fused_op.build(
            [s.width for s in shards],
            self.setting.optimizer,
            self.setting.precision,
            self._device.place,
            of_feature,
            shards[0].table.sequence,
        )
        memory_of = self._device.memory_of
        rows, cells = [s.rows for s in shards], [s.rows * s.width for s in shards]
        # Its sort of ids by row goes by these.
        op.total_hash_size = sum(rows)
        op.total_hash_size_bits = int(math.log2(float(sum(rows))) + 1)
        # FBGEMM numbers the rows of all tables one after another.
        starts, places = [0, *np.cumsum(rows)], fused_op.places(cells, self._arena.numel(), shards)
        op.hash_size_cumsum = self._int64([*(starts[i] for i in of_feature), starts[-1]])
        op.rows_per_table = self._int64(rows[i] for i in of_feature)
        # In elements of the arena, where TBE's weights are one flat buffer.
        op.weights_offsets = self._int64(places[i] for i in of_feature)
        setattr(op, f"weights_{memory_of}", torch.nn.Parameter(self._arena))
        # States are set as weights were: shared memory, with each table's place in it.
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
        totals = times.sum(1)
        clock = np.array([forward + backward for forward, backward, _ in run.times_ms])
        sample = dataclasses.replace(
            self._failed(run.request),
            error=None,
            forward=timing.spread(times[:, 0]),
            backward=timing.spread(times[:, 1]),
            slowdown=float(np.median(clock / totals)),
            relative_ci=timing.relative_ci(totals),
        )
        run.times_ms = []
        # The op may run on: its next sample is of later repeats.
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
    """One op, ready to run.

    number: in the slowdown log.
    indices, offsets: [L] and [F × B + 1].
    gradient: [B, W] of its outputs, [L, W] of a sequence's.
    values: [F, 1] of each feature, where a table has fewer than samples (deduplicated). Offsets are then as many, and
        the gradient is flat. None: all have B.
    warm: True after the first run.
    times_ms: of each repeat forward, backward, and its number in the slowdown log.
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
        """The op's outputs."""
        # As TorchRec does, FBGEMM gets the number of values of each feature if they differ.
        return self.op(self.indices, self.offsets, batch_size_per_feature_per_rank=self.values)


def _at_usual_speed(run: Run, slowdown: Callable[[int], float]) -> np.ndarray:
    """[repeats, 2] forward and backward ms."""
    slowdowns = np.array([slowdown(number) for _, _, number in run.times_ms])
    # Forward and backward of a run have the same slowdown.
    return np.array(run.times_ms)[:, :2] / slowdowns[:, None]


class _Shape(NamedTuple):
    """Shape of an op's batch and outputs.

    values: [F] distinct values of each feature.
    rows: of outputs: one for each lookup of sequences, as expected, or for each sample.
    width: columns of a row.
    several: True if features have different numbers of values. All outputs are one row then.
    """

    values: list[int]
    rows: int
    width: int
    several: bool


def _shape_of(request: ComputeRequest, most_bytes: int) -> _Shape:
    """The shape of a request, before ids are drawn. most_bytes: of its ids and outputs.

    Raises ShardCoreError for a larger one, and for an op that FBGEMM cannot run.
    """
    sequence, values, widths = is_sequence(request.shards), [], []
    for s in request.shards:
        # Values are per feature, as those of a table may differ.
        values += access.values_of_features(s.table, request.batch)
        widths += [s.width] * s.table.features
    looked_up = sum(round(request.batch * s.table.looked_up) for s in request.shards)
    # Sequences have an output for each lookup, so fewer values need no other shape.
    several = not sequence and any(s.table.is_variable for s in request.shards)
    if sequence:
        rows, width = looked_up, widths[0]
    elif several:
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
    return _Shape(values, rows, width, several)
