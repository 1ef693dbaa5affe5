"""Supervised measuring: one worker a device shares out the requests. A crash or a hang costs one request.

The policy stands here once, over a small Transport: local processes (local_workers.py) or Ray actors
(tasks/workers.py). A worker's window of ops is carried over from call to call, so no time is lost at the ends of
chunks. A request is outstanding from its call until its sample is back. A worker that dies or hangs is replaced. Its
outstanding requests are suspects: each is measured again, one at a time. That finds the one that kills, which is
recorded with its reason. Where no replacement starts (its host is gone), the others do the rest.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import WAITS_S, require_within
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure.device_bench import BenchSpec, Counts

W = TypeVar("W", bound="Worker")
_logger = logging.getLogger(__name__)
START_S = 300.0
"""Seconds that a worker may take to start and to touch its arena."""
PART_S = 5.0
"""Seconds after which a call brings back finished samples, whatever the chunk. At most so much is lost at a kill."""
_STARTS = 3
"""Workers of one device that may die while they start (memory was short, say) before it is given up."""


class Ended(Exception):
    """A worker is gone, hangs, or its device is spoilt. The message gives the reason."""


class Refused(Ended):
    """A worker cannot measure at all: FBGEMM is missing, the arena does not fit."""


class Worker(Protocol):
    """A DeviceBench elsewhere, with one call at a time.

    counts: of its last message.
    """

    counts: Counts

    def call(self, method: str, *arguments: Any, label: str = "") -> None:
        """Begin a call. label: for people who watch calls."""

    def answer(self) -> Any:
        """The result of a call that has ended. Raises Ended where the worker is gone."""

    def look(self) -> None:
        """Update counts, if the worker still sends them."""

    def end(self) -> None: ...


class Transport(Protocol[W]):
    """A place where workers run."""

    spec: BenchSpec

    def start(self, name: str, reference_ms: float | None) -> W: ...

    def wait(self, workers: Sequence[W], timeout_s: float) -> Sequence[W]:
        """Workers whose call has ended, once one has or time is up."""
        ...

    def room(self) -> str:
        """A description of its devices, for errors."""
        ...


@dataclass(frozen=True)
class Finished:
    """Results of one call to a device.

    samples: of requests, and of the reference.
    settled: number of requests that have their sample.
    kernel_s: seconds in kernels.
    """

    device: str
    samples: list[ComputeSample]
    settled: int
    kernel_s: float


@dataclass(eq=False)
class _Device(Generic[W]):
    """A device of the fleet, and its worker.

    starts: tries to start the worker; 0 once that runs.
    busy: True while a call is under way.
    chunk, kernel_s: requests of the call under way, and its seconds in kernels.
    due: time of the next check for a hang.
    seen: counts at the last check in this call.
    counted: counts of the worker that are in the totals.
    outstanding: requests by id.
    has_suspect: True if that is a suspect.
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


def chunk_size(waiting: int, devices: int, most: int) -> int:
    """Requests of the next call: ever fewer towards the end, so that all devices end together."""
    # Half of what is left, over all devices: chunks shrink as the end comes near.
    return min(most, -(-waiting // (2 * devices)))


class Supervisor(Generic[W]):
    """`count` workers of a transport; a context manager, which starts and ends them.

    reference_ms: the reference op's ms at the devices' usual speed. Without it, calibrate first.
    chunk: most requests of a call.
    hang_s: a device has hung where no op ended for so long.
    kernel_s: seconds of all workers inside timed kernels so far.
    kept_s: seconds of them in runs that entered a median.

    Raises ShardCoreError where a worker cannot start or the devices are of different hardware.
    """

    def __init__(
        self,
        transport: Transport[W],
        count: int = 1,
        reference_ms: float | None = None,
        chunk: int = 1,
        hang_s: float = 60.0,
        logger: logging.Logger | logging.LoggerAdapter = _logger,
    ):
        self.hang_s, self.reference_ms = hang_s, reference_ms
        require_within(self, "a measuring process", hang_s=WAITS_S)
        self._transport, self.spec, self._chunk, self._logger = transport, transport.spec, chunk, logger
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
                self._devices.append(_Device(name, self._transport.start(name, self.reference_ms)))
                # The first answer tells that the worker started, and on what.
                self._call(self._devices[-1], "hardware")
            hardware = set()
            # Workers start at the same time, so wait for all of them together.
            while any(d.starts for d in self._devices):
                for device, name, error in self._answers():
                    if error:
                        self._restart(device, error)
                    else:
                        device.starts = 0
                        hardware.add(name)
            if len(hardware) > 1:  # a setting may name one kind of hardware otherwise
                raise ShardCoreError(
                    f"the cluster's devices are of different hardware, {sorted(hardware)}; measure "
                    f"({self.spec.setting}) on one kind at a time"
                )
            [self._hardware] = hardware
        # Also Ctrl-C: no worker may stay behind.
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for device in self._devices:
            device.worker.end()

    def calibrate(self, requests: Sequence[ComputeRequest], seconds: float = 5.0) -> float:
        """The reference op's ms, measured for so many seconds where it is not known.

        It is the mean over all devices, running at once, so that their timings are at one slowdown. Where every
        worker ends, fresh ones try half of the requests. Raises ShardCoreError where the reference op without any
        ends them.
        """
        # As many ops as a window has, so that the reference finds the same caches.
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
                # A request among them may end workers: with half as many, it is likely to be left out.
                few = few[: len(few) // 2]
            for device in ended:
                self._restart(device)
            if measured_ms:
                # All devices are brought to one level, the mean.
                for device in self._call_all("use_reference", self.reference_ms)[1]:
                    self._restart(device)
        return self.reference_ms

    def measure(self, requests: Iterable[ComputeRequest]) -> Iterator[list[Finished]]:
        """Measure requests (of different ids) on all devices at once. Yields results as they come.

        Requests are read as devices need work. One that ends or hangs its worker again when it runs without others is
        among the samples with its reason.

        Raises ShardCoreError where no worker is left.
        """
        feed, finished = iter(requests), []
        # endless draws have no length
        self._unfed = len(requests) if isinstance(requests, Sized) else 0
        # Requests may be drawn without end, so only these are taken from the feed.
        ahead = 2 * len(self._devices) * self._chunk  # from which chunk_size gives full chunks
        while True:
            for device in self._devices:
                # Idle devices get work before results are handed on, which may take long.
                if not device.busy:
                    fed = list(itertools.islice(feed, max(0, ahead - len(self._waiting))))
                    self._waiting.extend(fed)
                    self._unfed = max(0, self._unfed - len(fed))
                    self._hand_out(device)
            if finished:  # only now, so that the devices have work meanwhile
                yield finished
            # Outstanding requests count: their samples are not back.
            if not (self._waiting or self._suspects or any(d.outstanding for d in self._devices)):
                return
            finished = self._collect()

    def samples(self, requests: Iterable[ComputeRequest]) -> Iterator[ComputeSample]:
        return (sample for some in self.measure(requests) for finished in some for sample in finished.samples)

    def _hand_out(self, device: _Device[W]) -> None:
        """Give an idle device its next call: one suspect, a chunk, or no more requests."""
        # A suspect runs alone, so that the one that ends a worker is known.
        if not device.outstanding:
            device.has_suspect = bool(self._suspects)
        n = chunk_size(len(self._waiting), len(self._devices), self._chunk)
        if device.has_suspect:
            device.chunk = [] if device.outstanding else [self._suspects.popleft()]
        else:
            device.chunk = [self._waiting.popleft() for _ in range(n)]
        device.outstanding.update((self._id(r), r) for r in device.chunk)
        if device.outstanding:
            waiting = self._unfed + len(self._waiting) + len(self._suspects)
            # The last call also runs its window to the end.
            last = device.has_suspect or not self._waiting
            self._call(device, "take", device.chunk, last, PART_S, label=f"{waiting} waiting")

    def _collect(self) -> list[Finished]:
        """Wait for calls to end. Returns their results."""
        finished = []
        for device, answer, error in self._answers():
            # A device that starts answers with its hardware, not with samples.
            if device.starts:
                self._started(device, answer, error)
            elif error:
                finished += self._replace(device, error)
            else:
                samples, taken = answer
                left = device.chunk[taken:]
                # Requests that the worker had no time for go back in their order.
                self._waiting.extendleft(reversed(left))
                for request in left:
                    # They were never taken in, so they are no suspects.
                    del device.outstanding[self._id(request)]
                settled = sum(device.outstanding.pop(s.id, None) is not None for s in samples)
                finished.append(Finished(device.name, samples, settled, device.kernel_s))
        return finished

    def _call_all(self, method: str, *arguments: Any) -> tuple[list[Any], dict[_Device[W], Ended]]:
        """Answers of a call to every idle device, and the devices that it ended.

        Where none is idle, waits a while for one that starts.
        """
        called, answers, ended = [d for d in self._devices if not d.busy], [], {}
        for device in called:
            self._call(device, method, *arguments)
        while True:
            for device, answer, error in self._answers():
                if device.starts:
                    self._started(device, answer, error)
                elif error:
                    ended[device] = error
                else:
                    answers.append(answer)
            # Devices that start meanwhile do not count.
            if len(answers) + len(ended) == len(called):
                return answers, ended

    def _call(self, device: _Device[W], method: str, *arguments: Any, label: str = "") -> None:
        device.busy, device.seen, device.kernel_s = True, None, 0.0
        # A start takes longer than an op may.
        device.due = time.monotonic() + (START_S if device.starts else self.hang_s)
        device.worker.call(method, *arguments, label=label)

    def _answers(self) -> list[tuple[_Device[W], Any, Ended | None]]:
        """Wait for calls to end, one at least or a second. Each device's answer, or the reason why it has none."""
        working = {d.worker: d for d in self._devices if d.busy}
        ended, answers = self._transport.wait(list(working), 1.0), []
        # Each device is looked at in every round, so that none hangs unnoticed.
        for worker, device in working.items():
            try:
                if worker in ended:
                    device.busy = False
                    answers.append((device, worker.answer(), None))
                else:
                    self._look(device)
            except Ended as error:
                device.busy = False
                answers.append((device, None, error))
            self._count(device)
        return answers

    def _look(self, device: _Device[W]) -> None:
        """Raise Ended where a device starts for too long, or ran no kernel and drew no ids since the last check."""
        if (now := time.monotonic()) < device.due:
            return
        # A worker without a free device shows that only by not starting.
        if device.starts:
            late = sum(d.starts > 0 and now >= d.due for d in self._devices)
            raise Refused(
                f"{late} measuring workers found no free device in {START_S:g} s; {self._transport.room()}"
            )
        device.worker.look()
        # Counts also grow while ids are drawn, which takes long for large batches.
        if device.worker.counts == device.seen:
            raise Ended(f"it hung: no op ended for {self.hang_s:g} s")
        device.seen, device.due = device.worker.counts, now + self.hang_s

    def _count(self, device: _Device[W]) -> None:
        counts, before = device.worker.counts, device.counted
        # Counts of a worker only grow. The difference is what this call added.
        self.kernel_s += counts.kernel_s - before.kernel_s
        self.kept_s += counts.kept_s - before.kept_s
        device.kernel_s += counts.kernel_s - before.kernel_s
        device.counted = counts

    def _replace(self, device: _Device[W], reason: Ended) -> list[Finished]:
        """Start a fresh worker for one that ended. Its outstanding requests become suspects, or failed samples."""
        failed, samples, setting = device.outstanding, [], self.spec.setting
        # A suspect runs alone, so it ended its worker.
        if device.has_suspect:
            why = f"ended its worker: {reason}"
            samples = [
                ComputeSample(key, setting, r, None, None, time.time(), why) for key, r in failed.items()
            ]
        else:
            self._logger.warning(
                "%s: %s; %d samples are measured again one by one", device.name, reason, len(failed)
            )
            # One of them may have ended the worker, or none: each is measured again alone.
            self._suspects.extend(failed.values())
        kernel_s = device.kernel_s
        self._restart(device)
        return [Finished(device.name, [sample], 1, kernel_s) for sample in samples]

    def _restart(self, device: _Device[W], error: Ended | None = None) -> None:
        """Start a fresh worker. The others go on meanwhile. error: of the last one's start."""
        device.worker.end()
        # A refusal will not change, and several failed starts mean a lasting cause.
        if error and (isinstance(error, Refused) or device.starts == _STARTS):
            raise ShardCoreError(f"a measuring worker cannot start: {error}")
        # A fresh worker counts from 0.
        device.outstanding, device.counted, device.starts = {}, Counts(), device.starts + 1
        device.worker = self._transport.start(device.name, self.reference_ms)
        self._call(device, "hardware")

    def _started(self, device: _Device[W], hardware: str | None, error: Ended | None) -> None:
        """A replacement has started, or not. A device without one is left out."""
        try:
            if error:
                self._restart(device, error)
            # A setting names one hardware, so others' timings would not be comparable.
            elif hardware != self._hardware:
                raise ShardCoreError(f"it is {hardware}, the others {self._hardware}")
            else:
                device.starts = 0
        # The others go on: only without any device does measuring end.
        except ShardCoreError as reason:
            device.worker.end()
            self._devices.remove(device)
            if not self._devices:
                raise ShardCoreError(
                    f"no measuring worker is left: {reason}; what was done is kept"
                ) from None
            self._logger.warning("%s is left out: %s", device.name, reason)

    def _id(self, request: ComputeRequest) -> str:
        return dataset.compute_id(self.spec.setting, request)
