"""Supervised measuring: one worker a device, sharing out the requests; what ends or hangs a worker costs one
request.

The policy stands here once, over a small Transport: local processes (local_workers.py) or Ray actors
(tasks/workers.py). A worker's window of ops is carried over from call to call, so no time is lost at the ends
of chunks. What was handed to a worker is outstanding until its sample is back. A worker that dies or hangs is
replaced. Its outstanding requests are suspects: each is measured again, alone. That finds the one that kills,
which is recorded with its reason. Where no replacement starts (its host is gone), the others do the rest.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import WAITS_S, require_within
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure.device_bench import BenchSpec, Counts

_logger = logging.getLogger(__name__)
START_S = 300.0
"""Seconds that a worker may take to start and to touch its arena."""
PART_S = 5.0
"""A call brings back what has finished after so many seconds, whatever the chunk: at most so much is lost at
a kill."""
_STARTS = 3
"""Workers of one device that may die while they start (memory was short, say) before it is given up."""


class Ended(Exception):
    """A worker is gone, hangs, or its device is spoilt; the message says why."""


class Refused(Ended):
    """A worker cannot measure at all: FBGEMM is missing, the arena does not fit."""


class Worker(Protocol):
    """A DeviceBench elsewhere, with one call at a time. answer raises Ended where it is gone."""

    counts: Counts
    """As last heard."""

    # label: for people who watch calls
    def call(self, method: str, *arguments: Any, label: str = "") -> None: ...
    def answer(self) -> Any: ...
    def look(self) -> None: ...  # has counts as they are now, if it still tells them
    def end(self) -> None: ...


class Transport(Protocol):
    """Where workers run. wait: those whose call has ended, once one has or time is up; room: what there is,
    for errors."""

    spec: BenchSpec

    def start(self, name: str, reference_ms: float | None) -> Worker: ...
    def wait(self, workers: Sequence[Worker], timeout_s: float) -> Sequence[Worker]: ...
    def room(self) -> str: ...


@dataclass(frozen=True)
class Finished:
    """What came back from one device: samples (the reference's too), how many of the requests they settle,
    and the call's seconds in kernels."""

    device: str
    samples: list[ComputeSample]
    settled: int
    kernel_s: float


@dataclass(eq=False)
class _Device:
    """A place in the fleet.

    starts: tries to start its worker; 0 once that runs.
    busy, chunk, kernel_s: of the call under way: whether there is one, its requests, its seconds in kernels.
    due, seen: when to look whether it hangs, and its counts when last looked at in this call.
    counted: those of its worker's counts that are in the totals.
    handed, alone: what is outstanding, by id, and whether that is a suspect.
    """

    name: str
    worker: Worker | None = None
    starts: int = 0
    busy: bool = False
    chunk: list[ComputeRequest] = field(default_factory=list)
    due: float = 0.0
    seen: Counts | None = None
    counted: Counts = Counts()
    kernel_s: float = 0.0
    alone: bool = False
    handed: dict[str, ComputeRequest] = field(default_factory=dict)


def chunk_size(waiting: int, devices: int, most: int) -> int:
    """Requests of the next call: ever fewer towards the end, so that all devices end together."""
    return min(most, -(-waiting // (2 * devices)))


class Supervisor:
    """`count` workers of a transport; a context manager, which starts and ends them.

    reference_ms: the reference op's ms at the devices' usual speed; without it, calibrate first. chunk:
    requests a call at most; hang_s: a device has hung where no op ended for so long. Raises ShardCoreError
    where a worker cannot start or the devices are of different hardware.
    """

    def __init__(
        self,
        transport: Transport,
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
        self._devices = [_Device(f"device {i}") for i in range(count)]
        self.kernel_s, self.kept_s = 0.0, 0.0
        """Of all workers so far: seconds inside timed kernels, and in runs that entered a median."""

    def __enter__(self) -> Supervisor:
        try:
            for device in self._devices:
                self._start(device)
            found = set()
            while any(d.starts for d in self._devices):
                for device, name, error in self._heard():
                    if error:
                        self._start(device, error)
                    else:
                        device.starts = 0
                        found.add(name)
            if len(found) > 1:  # a setting may carry a name of its own for one kind of hardware
                raise ShardCoreError(
                    "the cluster's devices are of different hardware, "
                    f"{sorted(found)}; measure ({self.spec.setting}) on one kind at a time"
                )
            [self._hardware] = found
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for device in self._devices:
            if device.worker:
                device.worker.end()

    def calibrate(self, requests: Sequence[ComputeRequest], seconds: float = 5.0) -> float:
        """The reference op's ms, found in so many seconds where it is not known. One figure for all, so that
        their timings are at one slowdown: the mean of what each finds, all running at once.

        Where every worker ends, fresh ones try half of the requests. Raises ShardCoreError where the
        reference op alone ends them.
        """
        few = list(requests[: self.spec.config.interleave])
        while self.reference_ms is None:
            found, ended = self._ask("calibrate", few, seconds)
            if found:
                self.reference_ms = sum(found) / len(found)
            elif ended and not few:
                raise ShardCoreError(
                    f"the reference op cannot be measured on {self.spec.device}: {ended.popitem()[1]}"
                )
            elif ended:
                few = few[: len(few) // 2]
            for device in ended:
                self._start(device)
            if found:
                for device in self._ask("use_reference", self.reference_ms)[1]:
                    self._start(device)
        return self.reference_ms

    def measure(self, requests: Iterable[ComputeRequest]) -> Iterator[list[Finished]]:
        """Measure requests (of different ids), all devices at once; yields what came back, until all is. They
        are taken as there is work for them. One that ends or hangs its worker again when alone is among the
        samples with its reason.

        Raises ShardCoreError where no worker is left.
        """
        feed, finished = iter(requests), []
        # what draws endlessly has no length
        self._unfed = len(requests) if isinstance(requests, Sized) else 0
        ahead = 2 * len(self._devices) * self._chunk  # from which chunk_size gives full chunks
        while True:
            for device in self._devices:
                if not device.busy:
                    fed = list(itertools.islice(feed, max(0, ahead - len(self._waiting))))
                    self._waiting.extend(fed)
                    self._unfed = max(0, self._unfed - len(fed))
                    self._hand_out(device)
            if finished:  # only now, so that the devices have work meanwhile
                yield finished
            if not (self._waiting or self._suspects or any(d.handed for d in self._devices)):
                return
            finished = self._collect()

    def samples(self, requests: Iterable[ComputeRequest]) -> Iterator[ComputeSample]:
        return (sample for some in self.measure(requests) for finished in some for sample in finished.samples)

    def _hand_out(self, device: _Device) -> None:
        """Give an idle device its next call: a suspect alone, a chunk, or the word that there is no more."""
        if not device.handed:
            device.alone = bool(self._suspects)
        n = chunk_size(len(self._waiting), len(self._devices), self._chunk)
        if device.alone:
            device.chunk = [] if device.handed else [self._suspects.popleft()]
        else:
            device.chunk = [self._waiting.popleft() for _ in range(n)]
        device.handed.update((self._id(r), r) for r in device.chunk)
        if device.handed:
            waiting = self._unfed + len(self._waiting) + len(self._suspects)
            self._call(
                device,
                "take",
                device.chunk,
                device.alone or not self._waiting,
                PART_S,
                label=f"{waiting} waiting",
            )

    def _collect(self) -> list[Finished]:
        """Wait for calls to end; what they brought."""
        finished = []
        for device, answer, error in self._heard():
            if device.starts:
                self._began(device, answer, error)
            elif error:
                finished += self._replace(device, error)
            else:
                samples, taken = answer
                left = device.chunk[taken:]
                self._waiting.extendleft(reversed(left))
                for request in left:
                    del device.handed[self._id(request)]
                settled = sum(device.handed.pop(s.id, None) is not None for s in samples)
                finished.append(Finished(device.name, samples, settled, device.kernel_s))
        return finished

    def _ask(self, method: str, *arguments: Any) -> tuple[list[Any], dict[_Device, Ended]]:
        """What a call to every idle device answers, and the devices that it ended. Where none is idle, waits
        a while for one that starts."""
        asked, answers, ended = [d for d in self._devices if not d.busy], [], {}
        for device in asked:
            self._call(device, method, *arguments)
        while True:
            for device, answer, error in self._heard():
                if device.starts:
                    self._began(device, answer, error)
                elif error:
                    ended[device] = error
                else:
                    answers.append(answer)
            if len(answers) + len(ended) == len(asked):
                return answers, ended

    def _call(self, device: _Device, method: str, *arguments: Any, label: str = "") -> None:
        device.busy, device.seen, device.kernel_s = True, None, 0.0
        device.due = time.monotonic() + (START_S if device.starts else self.hang_s)
        device.worker.call(method, *arguments, label=label)

    def _heard(self) -> list[tuple[_Device, Any, Ended | None]]:
        """Wait for calls to end, one at least or a second: each device's answer, or why it has none."""
        working = {d.worker: d for d in self._devices if d.busy}
        ended, heard = self._transport.wait(list(working), 1.0), []
        for worker, device in working.items():
            try:
                if worker in ended:
                    device.busy = False
                    heard.append((device, worker.answer(), None))
                else:
                    self._look(device)
            except Ended as error:
                device.busy = False
                heard.append((device, None, error))
            self._count(device)
        return heard

    def _look(self, device: _Device) -> None:
        """Raises Ended where a device starts for too long, or ran no kernel and drew no ids since it was last
        looked at."""
        if (now := time.monotonic()) < device.due:
            return
        if device.starts:
            late = sum(d.starts > 0 and now >= d.due for d in self._devices)
            raise Refused(
                f"{late} measuring workers found no free device in {START_S:g} s; {self._transport.room()}"
            )
        device.worker.look()
        if device.worker.counts == device.seen:
            raise Ended(f"it hung: no op ended for {self.hang_s:g} s")
        device.seen, device.due = device.worker.counts, now + self.hang_s

    def _count(self, device: _Device) -> None:
        kernel_s, kept_s, _ = (
            now - before for now, before in zip(device.worker.counts, device.counted, strict=True)
        )
        self.kernel_s, self.kept_s = self.kernel_s + kernel_s, self.kept_s + kept_s
        device.counted, device.kernel_s = device.worker.counts, device.kernel_s + kernel_s

    def _replace(self, device: _Device, reason: Ended) -> list[Finished]:
        """A fresh worker for one that ended; what it had in hand is suspect, or found."""
        failed, finished = device.handed, []
        if device.alone:
            finished = [
                Finished(
                    device.name,
                    [
                        ComputeSample(
                            key, self.spec.setting, r, None, None, time.time(), f"ended its worker: {reason}"
                        )
                    ],
                    1,
                    device.kernel_s,
                )
                for key, r in failed.items()
            ]
        else:
            self._logger.warning(
                "%s: %s; %d samples are measured again one by one", device.name, reason, len(failed)
            )
            self._suspects.extend(failed.values())
        self._start(device)
        return finished

    def _start(self, device: _Device, error: Ended | None = None) -> None:
        """A fresh worker, whose start the others need not wait to see. error: what ended the last one while
        it started."""
        if device.worker:
            device.worker.end()
        if error and (isinstance(error, Refused) or device.starts == _STARTS):
            raise ShardCoreError(f"a measuring worker cannot start: {error}")
        device.handed, device.counted, device.starts = {}, Counts(), device.starts + 1
        device.worker = self._transport.start(device.name, self.reference_ms)
        self._call(device, "hardware")

    def _began(self, device: _Device, found: str | None, error: Ended | None) -> None:
        """A replacement has started, or not; a device without one is left out."""
        try:
            if error:
                self._start(device, error)
            elif found != self._hardware:
                raise ShardCoreError(f"it is {found}, the others {self._hardware}")
            else:
                device.starts = 0
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
