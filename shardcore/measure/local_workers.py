"""Measuring workers as local processes, each with a pipe. Between answers they send heartbeats."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.measure import local_ranks, processes
from shardcore.measure.device_bench import BenchSpec, Counts, DeviceBench
from shardcore.measure.supervise import WorkerEnded, WorkerRefused

_BEAT_S, _BEATS = 1.0, 4
"""Most seconds between two heartbeats, and fewest heartbeats until a process counts as hung."""


class LocalFleet:
    """Measuring processes of this machine, for a Supervisor."""

    def __init__(self, spec: BenchSpec, hang_s: float = 60.0):
        self.spec, self._beat_s = spec, min(_BEAT_S, hang_s / _BEATS)

    def start(self, name: str, reference_ms: float | None) -> LocalWorker:
        return LocalWorker(self.spec, reference_ms, self._beat_s)

    def wait(self, workers: Sequence[LocalWorker], timeout_s: float) -> list[LocalWorker]:
        ready = wait([w.pipe for w in workers], timeout_s)
        for worker in workers:
            if worker.pipe in ready:
                worker.receive()
        return [w for w in workers if w.message]

    def describe_devices(self) -> str:
        return f"this machine has {os.cpu_count()} cores"


class LocalWorker:
    """Measuring worker in a process of this machine.

    message: kind and value of the worker's answer, once received.
    """

    def __init__(self, spec: BenchSpec, reference_ms: float | None, beat_s: float):
        self.pipe, theirs = processes.process_context().Pipe()
        self.message: tuple[str, Any] | None = None
        self.counts = Counts()
        self._process = processes.make_process(
            f"measure-{spec.device}", _serve_calls, (theirs, spec, reference_ms, beat_s)
        )
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does

    def call(self, method: str, *arguments: Any, label: str = "") -> None:
        self.message = None
        with suppress(OSError):  # a process that is gone is noticed by the end of its pipe
            self.pipe.send((method, *arguments))

    def receive(self) -> None:
        """Receive a message of the worker: a heartbeat, an answer, or its end."""
        try:
            kind, value, self.counts = self.pipe.recv()
        except (EOFError, OSError):
            kind, value = "ended", local_ranks.exit_reason(self._process)
        if kind != "beat":
            self.message = kind, value

    def answer(self) -> Any:
        kind, value = self.message or ("ended", "it has not answered yet")
        if kind != "answer":
            raise (WorkerRefused if kind == "refused" else WorkerEnded)(value)
        return value

    def update_counts(self) -> None:
        """Do nothing: heartbeats keep the counts up to date."""

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)  # with a limit, as a process stuck in a driver cannot end
        self.pipe.close()


def _serve_calls(pipe: Connection, spec: BenchSpec, reference_ms: float | None, beat_s: float) -> None:
    """Entry point of a worker's process: answer calls in turn, and send heartbeats with counts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends it
    bench, sending = None, threading.Lock()

    def send_message(kind: str, value: object = None) -> None:
        try:
            with sending:
                pipe.send((kind, value, bench.counts() if bench else Counts()))
        except OSError:  # the parent is gone
            os._exit(1)

    def send_heartbeats() -> None:
        while True:
            time.sleep(beat_s)
            send_message("beat")

    try:
        bench = DeviceBench(spec, reference_ms)
        threading.Thread(target=send_heartbeats, daemon=True).start()
        while True:
            send_message("answer", bench.call(*pipe.recv())[0])
    except EOFError:  # the parent is gone
        return
    except Exception as error:  # the process is replaced whatever it was, as after a CUDA fault no call works
        refused = bench is None and isinstance(error, ShardCoreError)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        send_message("refused" if refused else "ended", reason)
