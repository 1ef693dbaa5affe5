"""Workers: one Ray actor a device, sharing out the requests among them.

A worker's ops run in turn in a window that is carried over from call to call, so no time is lost at the ends
of chunks, and what was handed to it is outstanding until its sample is back. A worker that dies or hangs is
replaced, and its outstanding requests are measured again, each alone in a worker that has nothing else: so
the one that kills is found, recorded with its reason, and costs nothing else. Where no replacement starts
(its host is gone, its device is spoilt), the others do the rest.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch

from shardcore.errors import ShardCoreError
from shardcore.measure import hardware, kernels
from shardcore.measurements import ComputeRequest, ComputeSample
from shardcore.samples import dataset
from shardcore.types import Setting
from tasks import actors

_logger = logging.getLogger(__name__)
_PROBE_S = 5.0
PART_S = 5.0
"""A call brings back what has finished after so many seconds, whatever the chunk: more is not lost where the
run is killed."""


@ray.remote(max_restarts=0, concurrency_groups={"watch": 1})
class DeviceWorker:
    """One device of the cluster, measuring compute; the reference op runs throughout, so drift shows."""

    def __init__(self, setting: Setting, device: str, config: kernels.KernelConfig, reference: ComputeRequest,
                 reference_ms: float | None):
        torch.set_num_threads(1)  # a device of a CPU is one core
        self._device = device
        self._bench = kernels.KernelBench(setting, device, config, reference, reference_ms)

    def hardware(self) -> str:
        return hardware.hardware_name(self._device)

    def calibrate(self, requests: Sequence[ComputeRequest], seconds: float) -> float:
        return self._bench.calibrate(requests, seconds)

    def use_reference(self, reference_ms: float) -> None:
        self._bench.reference_ms = reference_ms

    @ray.method(concurrency_group="watch")  # so that it answers while the device works
    def kernel_s(self) -> float:
        return self._bench.kernel_s

    def measure(self, requests: Sequence[ComputeRequest], last: bool,
                seconds: float) -> tuple[list[ComputeSample], float, int]:
        """Take requests in for so many seconds, one at least; with `last`, run what was taken in. The samples
        that finished meanwhile, the reference's among them, the seconds spent in kernels, and how many
        requests were taken in."""
        before, began, samples, taken = self._bench.kernel_s, time.monotonic(), [], 0
        for request in requests:
            if taken and time.monotonic() > began + seconds:
                break
            samples += self._bench.add(request)
            taken += 1
        if last and taken == len(requests):
            samples += self._bench.finish(seconds)
        return samples, self._bench.kernel_s - before, taken


@dataclass(frozen=True)
class Finished:
    """What came back from one device: samples (the reference's too), how many of the requests they settle,
    seconds in kernels."""

    device: str
    samples: list[ComputeSample]
    settled: int
    kernel_s: float


@dataclass(eq=False)
class _Device:
    """A place in the fleet: its actor, the call under way and its requests, when to look whether that hangs,
    its seconds in kernels when last looked at, and what was handed to it, by id."""

    name: str
    actor: Any
    call: Any = None
    chunk: list[ComputeRequest] = field(default_factory=list)
    due: float = 0.0
    kernel_s: float | None = None
    starting: bool = False
    alone: bool = False
    handed: dict[str, ComputeRequest] = field(default_factory=dict)


def chunk_size(waiting: int, devices: int, most: int) -> int:
    """Requests of the next call: ever fewer towards the end, so that all devices end together."""
    return min(most, -(-waiting // (2 * devices)))


class Workers:
    """`count` actors that measure on "cpu" or "cuda" devices of the connected cluster; a context manager,
    which frees them.

    reference_ms: the reference op's ms at the devices' usual speed; without it, calibrate first. chunk:
    requests a call at most; hang_s: a device has hung where no op ended for so long. Raises ShardCoreError
    where an actor cannot start or the devices are of different hardware.
    """

    def __init__(self, count: int, device: str, setting: Setting, config: kernels.KernelConfig,
                 reference: ComputeRequest,
                 reference_ms: float | None = None, chunk: int = 16, hang_s: float = 60.0,
                 logger: logging.Logger | logging.LoggerAdapter = _logger):
        self.reference_ms, self._logger = reference_ms, logger
        self._setting, self._kind, self._config, self._reference = setting, device, config, reference
        self._chunk, self._hang_s = chunk, hang_s
        self._waiting: deque[ComputeRequest] = deque()
        self._suspects: deque[ComputeRequest] = deque()
        self._starts: Counter[str] = Counter()
        self._devices = [_Device(f"device {i}", self._actor(f"device {i}")) for i in range(count)]

    def __enter__(self) -> Workers:
        try:
            found = actors.when_started([d.actor.hardware.remote() for d in self._devices])
            if len(set(found)) > 1:  # a setting may carry a name of its own for one kind of hardware
                raise ShardCoreError(f"the cluster's devices are of different hardware, "
                                     f"{sorted(set(found))}; measure ({self._setting}) on one kind at a time")
            self._hardware = found[0]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for device in self._devices:
            ray.kill(device.actor)

    def calibrate(self, requests: Sequence[ComputeRequest], seconds: float = 5.0) -> None:
        """Find reference_ms where it is not known, in so many seconds. One figure for all, so that their
        timings are at one slowdown: the mean of what each finds, all running at once."""
        if self.reference_ms is not None:
            return
        few, found, ended = list(requests[: self._config.interleave]), [], []
        calls = [d.actor.calibrate.options(name="measure[compute] calibrate").remote(few, seconds)
                 for d in self._devices]
        for device, call in zip(self._devices, calls, strict=True):
            try:
                found.append(ray.get(call, timeout=actors.START_S))
            except ray.exceptions.RayError:  # its host is gone, or one of the few ends or hangs its worker
                ended.append(device)
        if not found:  # one of the few ends every worker: measuring will find which
            self._start_again(self._devices[0])
            found = actors.when_started([self._devices[0].actor.calibrate.remote([], seconds)])
        self.reference_ms = sum(found) / len(found)
        for device in ended:
            self._start_again(device)
        actors.when_started([d.actor.use_reference.remote(self.reference_ms) for d in self._devices
                             if d not in ended])

    def measure(self, requests: Sequence[ComputeRequest]) -> Iterator[list[Finished]]:
        """Measure requests (of different ids), all devices at once; yields what came back, until all is. A
        request that ends or hangs its worker again when it is alone is among the samples with its reason.

        Raises ShardCoreError where no worker is left.
        """
        self._waiting.extend(requests)
        finished: list[Finished] = []
        while True:
            for device in self._devices:
                if device.call is None:
                    self._hand_out(device)
            if finished:  # only now, so that the devices have work meanwhile
                yield finished
            if not (self._waiting or self._suspects or any(d.handed for d in self._devices)):
                return
            finished = self._collect()

    def _actor(self, name: str) -> Any:
        self._starts[name] += 1  # Ray may take a while to free the name of one that died
        again = f", start {self._starts[name]}" if self._starts[name] > 1 else ""
        name = f"measure[compute] {name}{again}"
        return DeviceWorker.options(name=name, num_gpus=int(self._kind == "cuda"), num_cpus=1).remote(
            self._setting, self._kind, self._config, self._reference, self.reference_ms)

    def _hand_out(self, device: _Device) -> None:
        """Give an idle device its next call: a suspect alone, a chunk, or the word that there is no more."""
        device.alone = not device.handed and bool(self._suspects)
        if device.alone:
            chunk = [self._suspects.popleft()]
        else:
            n = chunk_size(len(self._waiting), len(self._devices), self._chunk)
            chunk = [self._waiting.popleft() for _ in range(n)]
        device.chunk = chunk
        device.handed.update((dataset.compute_id(self._setting, r), r) for r in chunk)
        if not device.handed:
            return
        last = device.alone or not self._waiting
        name = f"measure[compute] {device.name}, {len(self._waiting) + len(self._suspects)} waiting"
        device.call = device.actor.measure.options(name=name).remote(chunk, last, PART_S)
        device.due, device.kernel_s = time.monotonic() + self._hang_s, None

    def _collect(self) -> list[Finished]:
        """Wait for calls to end, one at least or a second; what they brought."""
        calls = {d.call: d for d in self._devices if d.call is not None}
        ray.wait(list(calls), num_returns=1, timeout=1.0)
        ended = set(ray.wait(list(calls), num_returns=len(calls), timeout=0)[0])
        finished = []
        for call, device in calls.items():
            late = call not in ended and self._hangs(device)
            if not (late or call in ended):
                continue
            device.call = None
            try:
                answer = ray.get(call, timeout=0 if late else None)
            except ray.exceptions.RayError as error:  # it died, it hung, or its device is spoilt
                hung = f"it hung: no op ended for {self._hang_s:g} s"
                finished += self._replace(device, hung if late else actors.reason(error))
                continue
            if device.starting:
                device.starting = False
                if answer != self._hardware:
                    finished += self._retire(device, f"it is {answer}, the others {self._hardware}")
            else:
                samples, kernel_s, taken = answer
                left = device.chunk[taken:]
                self._waiting.extendleft(reversed(left))
                for request in left:
                    del device.handed[dataset.compute_id(self._setting, request)]
                settled = sum(device.handed.pop(s.id, None) is not None for s in samples)
                finished.append(Finished(device.name, samples, settled, kernel_s))
        return finished

    def _hangs(self, device: _Device) -> bool:
        """Whether a device that has been silent for a while did no more kernels since it was last looked at.
        """
        if device.starting or time.monotonic() < device.due:
            return time.monotonic() > device.due
        try:
            kernel_s = ray.get(device.actor.kernel_s.remote(), timeout=_PROBE_S)
        except ray.exceptions.RayError:  # dead, which its call will tell, or stuck
            return True
        hangs = kernel_s == device.kernel_s
        device.kernel_s, device.due = kernel_s, time.monotonic() + self._hang_s
        return hangs

    def _replace(self, device: _Device, reason: str) -> list[Finished]:
        """A fresh actor for one that ended (one that Ray restarts would fail the next, innocent call)."""
        if device.starting:
            return self._retire(device, reason)
        failed, finished = list(device.handed.values()), []
        if device.alone:
            finished = [Finished(device.name, [self._failed(r, reason)], 1, 0.0) for r in failed]
        else:
            self._logger.warning("%s: %s; %d samples are measured again one by one", device.name, reason,
                                 len(failed))
            self._suspects.extend(failed)
        self._start_again(device)
        return finished

    def _start_again(self, device: _Device) -> None:
        """A fresh actor; whether it starts, the others need not wait to see."""
        ray.kill(device.actor)
        device.actor, device.handed, device.starting = self._actor(device.name), {}, True
        device.call, device.due = device.actor.hardware.remote(), time.monotonic() + actors.START_S

    def _retire(self, device: _Device, reason: str) -> list[Finished]:
        ray.kill(device.actor)
        self._devices.remove(device)
        if not self._devices:
            raise ShardCoreError(f"no measuring actor is left, the last cannot start again: {reason}; what "
                                 "was done is kept")
        self._logger.warning("%s does not start again and is left out: %s", device.name, reason)
        return []

    def _failed(self, request: ComputeRequest, reason: str) -> ComputeSample:
        return ComputeSample(dataset.compute_id(self._setting, request), self._setting, request, None, None,
                             time.time(),
                             f"ended its worker: {reason}")
