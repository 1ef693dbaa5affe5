"""Measuring in a process of its own, and the command around it: what dies or hangs costs one request."""

import multiprocessing
import os
import signal
import threading
from contextlib import contextmanager

import pytest

from shardcore.errors import ShardCoreError
from shardcore.measure.kernels import KernelConfig
from shardcore.measure.supervise import SupervisedBench, _Ended
from shardcore.measurements import ComputeRequest
from shardcore.types import Setting, Shard, Table, Zipf

SETTING = Setting("test", 256)
HUGE = ComputeRequest((Shard.whole(Table("huge", 10_000_000, 64, 1.0, Zipf(1.0))),), 256)


def children():
    return [p for p in multiprocessing.active_children() if p.name.startswith("measure-")]


@contextmanager
def signalled(bench, *numbers):
    """While it lasts: as soon as the bench's process has run ops since its start, it gets the first of these
    signals, the process that replaces it the next one, and so on. Gives the processes that got one, and the
    seconds that kernels had run by then."""
    struck, ended = {}, threading.Event()

    def strike():
        for number in numbers:
            while (
                not (running := [p.pid for p in children() if p.pid not in struck]) or bench._counts[0] == 0
            ):
                if ended.wait(0.02):
                    return
            struck[running[0]] = bench.kernel_s
            os.kill(running[0], number)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield struck
    finally:
        ended.set()
        thread.join()


def test_the_request_that_hangs_in_company_and_kills_alone_is_recorded_and_the_others_are_measured(tables):
    """What ran beside it is measured by the next process; what fails in itself costs nobody else anything.
    The reference's usual ms (a thousand times what it takes) go from process to process."""
    slow, quick = (
        ComputeRequest((Shard.whole(t),) * n, batch)
        for t, n, batch in ((tables[1], 8, 4096), (tables[4], 1, 8))
    )
    reference = ComputeRequest((Shard.whole(tables[3]),), 64)
    config = KernelConfig(arena_bytes=8 << 20, tolerance=1e-9, min_repeats=200, max_repeats=200, interleave=2)
    with SupervisedBench(SETTING, "cpu", config, reference, reference_ms=1e3, hang_s=2) as bench:
        os.kill(children()[0].pid, signal.SIGINT)  # Ctrl-C is for the parent to answer, though all get it
        with signalled(bench, signal.SIGSTOP, signal.SIGKILL) as struck:
            found = list(bench.measure([HUGE, slow, quick]))
        assert len(struck) == 2 and not set(struck) & {p.pid for p in children()}
        assert 0 < bench.kept_s < bench.kernel_s > list(struck.values())[1] > list(struck.values())[0] > 0
        samples = {s.request: s for s in found}
    assert set(samples) == {HUGE, slow, quick, reference} and sum(s.request != reference for s in found) == 3
    assert (
        samples[slow].error == "it ended the process by SIGKILL (out of memory?)"
        and samples[slow].forward is None
    )
    assert "huge" in samples[HUGE].error and "arena" in samples[HUGE].error and samples[quick].error is None
    assert 0 < samples[quick].slowdown < 0.1
    assert not children()


def test_a_process_that_lives_and_runs_no_op_hangs():
    """It says so every 0.02 s, and answers in the end, when nobody waits for it any more."""
    bench, given_up = SupervisedBench(SETTING), threading.Event()
    bench._pipe, theirs = multiprocessing.Pipe()

    def live():
        for _ in range(500):
            theirs.send(("beat", None, (1.0, 0.5)))
            if given_up.wait(0.02):
                return
        theirs.send(("answer", "late", (1.0, 0.5)))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(_Ended, match="it hung: nothing was run for 0.3 s"):
            bench._hear(0.3)
    finally:
        given_up.set()
        thread.join()
    assert (bench.kernel_s, bench.kept_s) == (1.0, 0.5)


class Struck(SupervisedBench):
    """Its process ends whenever it calibrates by so many requests; says by how many it was told to."""

    def __init__(self, fewest: int):
        super().__init__(SETTING)
        self.fewest, self.told = fewest, []

    def _start(self) -> None:
        pass

    def _send(self, command) -> None:
        requests, seconds = command
        assert seconds == 2.0
        self.told.append(len(requests))

    def _hear(self, patience_s: float) -> float:
        if self.told[-1] >= self.fewest:
            raise _Ended("it hung")
        return 7.0


def test_calibrating_leaves_out_what_ends_the_process():
    bench = Struck(fewest=2)
    assert bench.calibrate([HUGE] * 9, 2.0) == bench.reference_ms == 7.0 and bench.told == [9, 4, 2, 1]
    with pytest.raises(ShardCoreError, match="the reference op cannot be measured on cpu: it hung"):
        (bench := Struck(fewest=0)).calibrate([HUGE] * 3, 2.0)
    assert bench.told == [3, 1, 0]


def test_what_cannot_start_is_one_clear_error():
    with pytest.raises(ShardCoreError, match="arena.*does not fit cpu"):
        with SupervisedBench(SETTING, "cpu", KernelConfig(arena_bytes=1 << 50)):
            pass
    assert not children()
