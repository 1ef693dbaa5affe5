"""A KernelBench in a process of its own, so that what ends or hangs that process costs one request and never the run.

The process is fed over a pipe: while it works on one request the next one lies ready. Every second, or more
often, it says how many seconds its kernels have run; where that stands still too long it has hung. A process
that ended or hung is replaced; what it had not finished is tried again one by one, which finds the request
that does it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection

import torch

from shardcore.errors import ShardCoreError
from shardcore.limits import WAITS_S, require_within
from shardcore.measure import local_ranks
from shardcore.measure.kernels import KernelBench, KernelConfig
from shardcore.measurements import ComputeRequest, ComputeSample
from shardcore.samples import dataset
from shardcore.types import Setting

_START_S = 300.0
"""Seconds that a process may take to start and to touch its arena."""
_STARTS = 3
"""Processes that may be killed while they start (memory was short, say) before measuring gives up."""
_BEAT_S = 1.0
_BEATS = 4
"""Times that a process speaks before it counts as hung, at least."""


class _Ended(Exception):
    """The measuring process is gone, or hangs; the message says why."""


class SupervisedBench:
    """A KernelBench behind a process boundary: a context manager, whose process starts at its begin and has ended after it.

    hang_s: the process has hung where no run of an op ended for so long. The rest as in KernelBench; give reference_ms, or call
    calibrate before measuring. Raises ShardCoreError where no process can start: FBGEMM is missing, there is no such device,
    the arena does not fit.
    """

    def __init__(self, setting: Setting, device: str = "cpu", config: KernelConfig | None = None,
                 reference: ComputeRequest | None = None, reference_ms: float | None = None, hang_s: float = 60.0):
        self.setting, self.device, self.config, self.hang_s = setting, device, config or KernelConfig(), hang_s
        require_within(self, "a measuring process", hang_s=WAITS_S)
        self.reference, self.reference_ms = reference, reference_ms
        self._process = None
        self._counts, self._ended_counts = (0.0, 0.0), (0.0, 0.0)

    @property
    def kernel_s(self) -> float:
        """Seconds inside timed kernels so far, warm-ups included."""
        return self._counts[0] + self._ended_counts[0]

    @property
    def kept_s(self) -> float:
        """Seconds in runs that entered a median so far."""
        return self._counts[1] + self._ended_counts[1]

    def __enter__(self) -> SupervisedBench:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def calibrate(self, requests: Sequence[ComputeRequest], seconds: float = 5.0) -> float:
        """Find and keep the reference op's ms on this machine, as KernelBench.calibrate. A process that ends meanwhile is
        replaced and tries half of the requests; raises ShardCoreError where the reference op alone ends it."""
        while True:
            try:
                self._start()
                self._send((list(requests), seconds))
                self.reference_ms = self._hear(self.hang_s)
                return self.reference_ms
            except _Ended as error:
                self._end()
                if not requests:
                    raise ShardCoreError(f"the reference op cannot be measured on {self.device}: {error}") from None
                requests = requests[: len(requests) // 2]

    def measure(self, requests: Iterable[ComputeRequest]) -> Iterator[ComputeSample]:
        """Yield one sample a request as they finish, and the reference op's among them; a request that fails, or that ends or
        hangs the process, yields its error. Requests are taken from the iterable as there is room for them."""
        feed = iter(requests)
        while (unfinished := (yield from self._run(feed))) is not None:
            for request in unfinished:
                if (yield from self._run(iter([request]))):
                    key = dataset.compute_id(self.setting, request)
                    yield ComputeSample(key, self.setting, request, None, None, time.time(), self._reason)

    def _run(self, feed: Iterator[ComputeRequest]) -> Generator[ComputeSample, None, list[ComputeRequest] | None]:
        """Measure until the feed is at its end, or the process at its: the requests that it left unfinished."""
        unfinished, unanswered, more = [], 0, True
        try:
            self._start()
            while more or unanswered:
                while more and unanswered < 2:  # few, so that sending never waits for a process that hangs
                    request = next(feed, None)
                    more = request is not None
                    unfinished += [request] if more else []
                    self._send(request)
                    unanswered += 1
                samples = self._hear(self.hang_s)
                unanswered -= 1
                for sample in samples:
                    if sample.request in unfinished:
                        unfinished.remove(sample.request)
                    yield sample
                if not (more or unanswered) and unfinished:
                    self._send(None)
                    unanswered += 1
        except _Ended as error:
            self._reason = str(error)
            self._end()
            return unfinished
        except BaseException:  # given up in the middle: what the process still does is nobody's
            self._end()
            raise
        return None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for attempt in range(_STARTS):
            if self._process:
                return
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, name=f"measure-{self.device}", daemon=True, args=(
                theirs, self.setting, self.device, self.config, self.reference, self.reference_ms,
                min(_BEAT_S, self.hang_s / _BEATS)))
            self._process.start()
            theirs.close()  # so that the pipe ends when the process does
            try:
                self._hear(_START_S)
            except _Ended as error:
                self._end()
                if attempt + 1 == _STARTS:
                    raise ShardCoreError(f"the measuring process cannot start on {self.device}: {error}") from None

    def _send(self, command: object) -> None:
        try:
            self._pipe.send(command)
        except OSError:
            raise _Ended(self._exit()) from None

    def _hear(self, patience_s: float) -> object:
        """The process's next answer. Raises _Ended, or ShardCoreError where it cannot measure at all."""
        due = time.monotonic() + patience_s
        while True:
            if not self._pipe.poll(max(0.0, due - time.monotonic())):
                raise _Ended(f"it hung: nothing was run for {patience_s:g} s")
            try:
                kind, value, counts = self._pipe.recv()
            except (EOFError, OSError):
                raise _Ended(self._exit()) from None
            if counts != self._counts:
                self._counts, due = counts, time.monotonic() + patience_s
            if kind == "refused":
                self._end()
                raise ShardCoreError(value)
            if kind == "fault":
                raise _Ended(value)
            if kind == "answer":
                return value

    def _exit(self) -> str:
        self._process.join(1)
        code = self._process.exitcode
        if code is not None and code < 0:
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"it ended the process by {signal.Signals(-code).name}{memory}"
        return f"it ended the process with exit code {code}"

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.join(10)  # one that is stuck in a driver cannot end
            self._pipe.close()
            self._process = None
            self._ended_counts, self._counts = (self.kernel_s, self.kept_s), (0.0, 0.0)


def _serve(pipe: Connection, setting: Setting, device: str, config: KernelConfig, reference: ComputeRequest | None,
           reference_ms: float | None, beat_s: float) -> None:
    """The process: answers a request with the samples that finished meanwhile, None (no more requests come) with
    those that finish within beat_s, requests and seconds to calibrate by with reference_ms. Between answers it says every beat_s
    that it lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends it
    local_ranks.end_with_parent()
    torch.set_num_threads(1)  # a device of a CPU is one core
    try:
        bench = KernelBench(setting, device, config, reference, reference_ms)
    except ShardCoreError as error:
        return pipe.send(("refused", str(error), (0.0, 0.0)))
    except Exception as error:
        return pipe.send(("fault", _line(error), (0.0, 0.0)))
    sending = threading.Lock()

    def say(kind: str, value: object = None) -> None:
        try:
            with sending:
                pipe.send((kind, value, (bench.kernel_s, bench.kept_s)))
        except OSError:  # the parent is gone
            os._exit(1)

    def beat() -> None:
        while True:
            time.sleep(beat_s)
            say("beat")

    say("answer")
    threading.Thread(target=beat, daemon=True).start()
    try:
        while True:
            command = pipe.recv()
            if command is None:
                say("answer", bench.finish(beat_s))
            elif isinstance(command, tuple):
                bench.reference_ms = bench.calibrate(*command)
                say("answer", bench.reference_ms)
            else:
                say("answer", bench.add(command))
    except EOFError:  # the parent is gone
        return
    except Exception as error:  # a CUDA fault, say, which spoils the process: it is replaced whatever it was
        say("fault", _line(error))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
