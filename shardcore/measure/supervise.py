"""Supervised measuring: requests are shared out to one worker a device. A crash or a hang costs one request.

This policy serves every Fleet: local processes (local_workers.py) and Ray actors (tasks/ray_transport.py). A
worker gets requests in chunks, one call each. Its ops keep running from call to call, so no time is lost at
the ends of chunks. A request is outstanding from its call until its sample is back.

A worker that dies or hangs is replaced. Its outstanding requests are suspects: each is measured again, one at
a time. That finds the request that ends workers, which is recorded with its reason. If no replacement starts
(its host is gone), the other devices do the rest.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import WAITS_S, number_within, require
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure.device_bench import BenchSpec, Counts

W = TypeVar("W", bound="Worker")
_logger = logging.getLogger(__name__)
START_S = 300.0
"""Longest time in which a worker may start and write its arena."""
PART_S = 5.0
"""Time after which a call returns finished samples, whatever the chunk. A kill loses at most so much."""
_STARTS = 3
"""Workers of one device that may die while they start before it is given up. Memory may be short for a moment."""


class WorkerEnded(Exception):
    """Raised when a measuring worker is gone or hangs, or its device no longer works. The message gives the reason."""


class WorkerRefused(WorkerEnded):
    """Raised when a worker cannot measure at all: FBGEMM is missing, or the arena does not fit."""


class Worker(Protocol):
    """A DeviceBench in another process, which runs one call at a time.

    counts: counts in its last message.
    """

    counts: Counts

    def call(self, method: str, *arguments: Any, label: str = "") -> None:
        """Begin a call of a method in the worker.

        label: text for people who watch calls.
        """

    def answer(self) -> Any:
        """Result of the worker's ended call. Raises Ended if the worker is gone."""

    def update_counts(self) -> None:
        """Ask the worker for its counts of progress, and update `counts`. Workers that send them anyway do nothing."""

    def end(self) -> None: ...


class Fleet(Protocol[W]):
    """A kind of measuring workers (local processes, Ray actors), and how to start one."""

    spec: BenchSpec

    def start(self, name: str, reference_ms: float | None) -> W: ...

    def wait(self, workers: Sequence[W], timeout_s: float) -> Sequence[W]:
        """Workers whose call has ended, after waiting for the first, or for timeout_s."""
        ...

    def describe_devices(self) -> str:
        """Description of the available devices, for error messages."""
        ...


@dataclass(frozen=True)
class FinishedCall:
    """Results of one call of a measuring worker.

    samples: samples of requests and of the reference op.
    settled: number of requests that now have their sample.
    kernel_s: seconds of the call in kernels.
    """

    device: str
    samples: list[ComputeSample]
    settled: int
    kernel_s: float


@dataclass(eq=False)
class _Device(Generic[W]):
    """State of a device of the fleet and its worker.

    starts: tries to start the worker. 0 once it runs.
    busy: True while a call runs.
    chunk, kernel_s: requests of the last call, and its seconds in kernels.
    due: time of the next check for a hang.
    seen: counts at the last check in this call.
    counted: counts of the worker that are in the supervisor's totals.
    outstanding: outstanding requests by id.
    has_suspect: True if the outstanding request is a suspect, which runs alone.
    """

    name: str
    worker: W
    starts: int = 1
    busy: bool = False
    chunk: list[ComputeRequest] = field(default_factory=list)
    due: float = 0.0
    seen: Counts | None = None
    counted: Counts = Counts()
    kernel_s: float = 0.0
    has_suspect: bool = False
    outstanding: dict[str, ComputeRequest] = field(default_factory=dict)


def chunk_size(waiting: int, devices: int, max_size: int) -> int:
    """Number of requests for a worker's next call: its share of half of the waiting requests, at most `max_size`.

    So chunks shrink towards the end, and all devices end together.
    """
    return min(max_size, -(-waiting // (2 * devices)))


class Supervisor(Generic[W]):
    """Context manager that starts, supervises and ends `count` measuring workers of a fleet.

    reference_ms: the reference op's ms at the devices' usual speed. None: call `calibrate` first.
    chunk: most requests of a call.
    hang_s: time without progress after which a device has hung.
    kernel_s: seconds of all workers inside timed kernels so far.
    kept_s: seconds of these in runs that entered a median.

    Entering raises ShardCoreError if a worker cannot start or devices are of different hardware.
    """

    def __init__(
        self,
        fleet: Fleet[W],
        count: int = 1,
        reference_ms: float | None = None,
        chunk: int = 1,
        hang_s: float = 60.0,
        warn: Callable[..., object] = _logger.warning,
    ):
        self.hang_s, self.reference_ms = hang_s, reference_ms
        number_within(*WAITS_S)(hang_s, "a measuring process", "hang_s")
        self._fleet, self.spec, self._chunk, self._warn = fleet, fleet.spec, chunk, warn
        self._waiting: deque[ComputeRequest] = deque()
        self._suspects: deque[ComputeRequest] = deque()
        self._unfed = 0
        self._n_devices = count
        self._devices: list[_Device[W]] = []
        self.kernel_s, self.kept_s = 0.0, 0.0

    def __enter__(self) -> Supervisor:
        try:
            for i in range(self._n_devices):
                name = f"device {i}"
                self._devices.append(_Device(name, self._fleet.start(name, self.reference_ms)))
                # The first answer shows that the worker runs, and on which hardware.
                self._begin_call(self._devices[-1], "hardware")
            hardware = set()
            while any(d.starts for d in self._devices):
                for device, name, error in self._wait_for_answers():
                    if error:
                        self._restart_worker(device, error)
                    else:
                        device.starts = 0
                        hardware.add(name)
            require(
                len(hardware) <= 1,
                f"the cluster's devices are of different hardware, {sorted(hardware)}; measure "
                f"({self.spec.setting}) on one kind at a time",
            )
            [self._hardware] = hardware
        # Ctrl-C, too: no worker may stay behind.
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for device in self._devices:
            device.worker.end()

    def calibrate(self, requests: Sequence[ComputeRequest], seconds: float = 5.0) -> float:
        """Reference op's ms at the devices' usual speed; measured for `seconds` if not yet known.

        All devices measure at once, and the mean counts. If every worker ends, fresh ones try half of the
        requests.

        Raises ShardCoreError if the reference op ends workers even without other requests.
        """
        # As many ops as run in turn when measuring, so that the reference finds the same caches.
        few = list(requests[: self.spec.config.interleave])
        while self.reference_ms is None:
            measured_ms, ended = self._call_all("calibrate", few, seconds)
            if measured_ms:
                self.reference_ms = sum(measured_ms) / len(measured_ms)
            elif ended and not few:
                raise ShardCoreError(
                    f"the reference op cannot be measured on {self.spec.device}: {ended.popitem()[1]}"
                )
            elif ended:
                # One of the requests may end workers. Half of them may do without it.
                few = few[: len(few) // 2]
            for device in ended:
                self._restart_worker(device)
            if measured_ms:
                # The mean for all devices, so that their timings have one level.
                for device in self._call_all("set_usual_reference_ms", self.reference_ms)[1]:
                    self._restart_worker(device)
        return self.reference_ms

    def measure(self, requests: Iterable[ComputeRequest]) -> Iterator[list[FinishedCall]]:
        """Measure requests with distinct ids on all devices at once. Yields results as they come.

        Requests are read as devices need work. One that ends or hangs its worker, and again when it runs
        alone, has a sample with the reason.

        Raises ShardCoreError if no worker is left.
        """
        feed, finished = iter(requests), []
        # Requests still in the feed, as far as known: endless draws have no length.
        self._unfed = len(requests) if isinstance(requests, Sized) else 0
        # The feed may be endless, so only so many wait at a time: enough for chunk_size to give full chunks.
        ahead = 2 * len(self._devices) * self._chunk
        while True:
            for device in self._devices:
                if not device.busy:
                    fed = list(itertools.islice(feed, max(0, ahead - len(self._waiting))))
                    self._waiting.extend(fed)
                    self._unfed = max(0, self._unfed - len(fed))
                    self._assign_next_call(device)
            if finished:  # after handing out, so that devices work while the caller does
                yield finished
            if not (self._waiting or self._suspects or any(d.outstanding for d in self._devices)):
                return
            finished = self._collect_finished()

    def measured_samples(self, requests: Iterable[ComputeRequest]) -> Iterator[ComputeSample]:
        """Measure requests on all devices, and iterate over the samples."""
        return (sample for some in self.measure(requests) for finished in some for sample in finished.samples)

    def _assign_next_call(self, device: _Device[W]) -> None:
        """Give an idle device its next call: a single suspect request, a chunk of requests, or none."""
        # A suspect runs alone, so that the request that ends a worker is found.
        if not device.outstanding:
            device.has_suspect = bool(self._suspects)
        n = chunk_size(len(self._waiting), len(self._devices), self._chunk)
        if device.has_suspect:
            device.chunk = [] if device.outstanding else [self._suspects.popleft()]
        else:
            device.chunk = [self._waiting.popleft() for _ in range(n)]
        device.outstanding.update((self._request_id(r), r) for r in device.chunk)
        if device.outstanding:
            waiting = self._unfed + len(self._waiting) + len(self._suspects)
            # The last call also runs its requests to their end.
            last = device.has_suspect or not self._waiting
            self._begin_call(
                device, "measure_for_seconds", device.chunk, last, PART_S, label=f"{waiting} waiting"
            )

    def _collect_finished(self) -> list[FinishedCall]:
        """Wait for calls to end, and return their results."""
        finished = []
        for device, answer, error in self._wait_for_answers():
            # A device that starts answers with its hardware, not with samples.
            if device.starts:
                self._admit_replacement(device, answer, error)
            elif error:
                finished += self._replace_worker(device, error)
            else:
                samples, taken = answer
                left = device.chunk[taken:]
                # Requests that the worker had no time for wait again, in their order. They are no suspects.
                self._waiting.extendleft(reversed(left))
                for request in left:
                    del device.outstanding[self._request_id(request)]
                settled = sum(device.outstanding.pop(s.id, None) is not None for s in samples)
                finished.append(FinishedCall(device.name, samples, settled, device.kernel_s))
        return finished

    def _call_all(self, method: str, *arguments: Any) -> tuple[list[Any], dict[_Device[W], WorkerEnded]]:
        """Call a method on every idle device. Returns the answers, and the devices whose worker ended.

        If no device is idle, this waits a while for one that starts.
        """
        called, answers, ended = [d for d in self._devices if not d.busy], [], {}
        for device in called:
            self._begin_call(device, method, *arguments)
        while True:
            for device, answer, error in self._wait_for_answers():
                if device.starts:
                    self._admit_replacement(device, answer, error)
                elif error:
                    ended[device] = error
                else:
                    answers.append(answer)
            # Devices that start meanwhile were not called.
            if len(answers) + len(ended) == len(called):
                return answers, ended

    def _begin_call(self, device: _Device[W], method: str, *arguments: Any, label: str = "") -> None:
        """Begin a call on a device, and set the time of its next check."""
        device.busy, device.seen, device.kernel_s = True, None, 0.0
        device.due = time.monotonic() + (START_S if device.starts else self.hang_s)
        device.worker.call(method, *arguments, label=label)

    def _wait_for_answers(self) -> list[tuple[_Device[W], Any, WorkerEnded | None]]:
        """Wait up to a second for calls to end. Returns each device whose call ended, with its answer or error."""
        working = {d.worker: d for d in self._devices if d.busy}
        ended, answers = self._fleet.wait(list(working), 1.0), []
        for worker, device in working.items():
            try:
                if worker in ended:
                    device.busy = False
                    answers.append((device, worker.answer(), None))
                else:
                    self._check_progress(device)
            except WorkerEnded as error:
                device.busy = False
                answers.append((device, None, error))
            self._add_counts(device)
        return answers

    def _check_progress(self, device: _Device[W]) -> None:
        """Raise Ended if a worker takes too long to start, or made no progress since the last check."""
        if (now := time.monotonic()) < device.due:
            return
        # A Ray actor without a free device just does not start.
        if device.starts:
            late = sum(d.starts > 0 and now >= d.due for d in self._devices)
            raise WorkerRefused(
                f"{late} measuring workers found no free device in {START_S:g} s; {self._fleet.describe_devices()}"
            )
        device.worker.update_counts()
        if device.worker.counts == device.seen:
            raise WorkerEnded(f"it hung: no op ended for {self.hang_s:g} s")
        device.seen, device.due = device.worker.counts, now + self.hang_s

    def _add_counts(self, device: _Device[W]) -> None:
        """Add the new counts of a device's worker to the totals."""
        counts, before = device.worker.counts, device.counted
        # A worker counts from its start, so the difference is what is new.
        self.kernel_s += counts.kernel_s - before.kernel_s
        self.kept_s += counts.kept_s - before.kept_s
        device.kernel_s += counts.kernel_s - before.kernel_s
        device.counted = counts

    def _replace_worker(self, device: _Device[W], reason: WorkerEnded) -> list[FinishedCall]:
        """Replace a worker that ended. Its requests are measured again one by one; a request that ran alone has
        failed."""
        failed, samples, setting = device.outstanding, [], self.spec.setting
        # A suspect runs alone, so it is what ended its worker.
        if device.has_suspect:
            why = f"ended its worker: {reason}"
            samples = [
                ComputeSample(key, setting, r, None, None, time.time(), why) for key, r in failed.items()
            ]
        else:
            self._warn("%s: %s; %d samples are measured again one by one", device.name, reason, len(failed))
            self._suspects.extend(failed.values())
        kernel_s = device.kernel_s
        self._restart_worker(device)
        return [FinishedCall(device.name, [sample], 1, kernel_s) for sample in samples]

    def _restart_worker(self, device: _Device[W], error: WorkerEnded | None = None) -> None:
        """Start a new worker for a device.

        error: the reason why the last one did not start.

        Raises ShardCoreError after a refusal, which will not change, and after _STARTS failed starts.
        """
        device.worker.end()
        if error and (isinstance(error, WorkerRefused) or device.starts == _STARTS):
            raise ShardCoreError(f"a measuring worker cannot start: {error}")
        # A fresh worker counts from 0.
        device.outstanding, device.counted, device.starts = {}, Counts(), device.starts + 1
        device.worker = self._fleet.start(device.name, self.reference_ms)
        self._begin_call(device, "hardware")

    def _admit_replacement(self, device: _Device[W], hardware: str | None, error: WorkerEnded | None) -> None:
        """Admit a replacement worker that has started, or start another; drop the device if none can start."""
        try:
            if error:
                self._restart_worker(device, error)
            elif hardware != self._hardware:
                raise ShardCoreError(f"it is {hardware}, the others {self._hardware}")
            else:
                device.starts = 0
        # The other devices go on. Measuring ends only if none is left.
        except ShardCoreError as reason:
            device.worker.end()
            self._devices.remove(device)
            if not self._devices:
                raise ShardCoreError(
                    f"no measuring worker is left: {reason}; what was done is kept"
                ) from None
            self._warn("%s is left out: %s", device.name, reason)

    def _request_id(self, request: ComputeRequest) -> str:
        """Sample id of a request."""
        return dataset.compute_id(self.spec.setting, request)
