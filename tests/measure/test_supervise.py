"""Measuring in a process of its own, and the command around it: what dies or hangs costs one request."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting, Shard, Table
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure.device_bench import BenchSpec, Counts
from shardcore.measure.kernels import KernelConfig
from shardcore.measure.local_workers import LocalFleet, LocalWorker
from shardcore.measure.supervise import Supervisor, WorkerEnded, chunk_size

SETTING = Setting("test", 256)
HUGE = ComputeRequest((Shard.whole(Table("huge", 10_000_000, 64, 1.0, Zipf(1.0))),), 256)


def supervised(config=None, reference=None, reference_ms=None, hang_s=60.0):
    transport = LocalFleet(
        BenchSpec(SETTING, "cpu", config or KernelConfig(arena_bytes=8 << 20), reference), hang_s
    )
    return Supervisor(transport, reference_ms=reference_ms, hang_s=hang_s)


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
                not (running := [p.pid for p in children() if p.pid not in struck])
                or bench._devices[0].counted[0] == 0
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


@pytest.mark.long
def test_the_request_that_hangs_in_company_and_kills_alone_is_recorded_and_the_others_are_measured(tables):
    """Requests that ran beside it are measured by the next process. One that fails alone costs no other.

    Each process gets the reference's usual ms, here a thousand times the real ones.
    """
    slow, quick = (
        ComputeRequest((Shard.whole(t),) * n, batch)
        for t, n, batch in ((tables[1], 8, 4096), (tables[4], 1, 8))
    )
    reference = ComputeRequest((Shard.whole(tables[3]),), 64)
    config = KernelConfig(arena_bytes=8 << 20, tolerance=1e-9, min_repeats=200, max_repeats=200, interleave=2)
    with supervised(config, reference, reference_ms=1e3, hang_s=2) as bench:
        os.kill(children()[0].pid, signal.SIGINT)  # Ctrl-C is for the parent to answer, though all get it
        with signalled(bench, signal.SIGSTOP, signal.SIGKILL) as struck:
            found = list(bench.measured_samples([HUGE, slow, quick]))
        assert len(struck) == 2 and not set(struck) & {p.pid for p in children()}
        assert 0 < bench.kept_s < bench.kernel_s > list(struck.values())[1] > next(iter(struck.values())) > 0
        samples = {s.request: s for s in found}
    assert set(samples) == {HUGE, slow, quick, reference} and sum(s.request != reference for s in found) == 3
    assert (
        samples[slow].error == "ended its worker: it was killed by SIGKILL (out of memory?)"
        and samples[slow].forward is None
    )
    assert "huge" in samples[HUGE].error and "arena" in samples[HUGE].error and samples[quick].error is None
    assert 0 < samples[quick].slowdown < 0.1
    assert not children()


class Sleep(ComputeRequest):
    """A request that holds up whatever process receives it; that goes on saying that it lives."""

    def __reduce__(self):
        return time.sleep, (10_000,)


def test_a_process_that_lives_and_runs_no_op_hangs(tables):
    sleep = Sleep((Shard.whole(tables[4]),), 8)
    with supervised(hang_s=0.3) as bench:
        [sample] = bench.measured_samples([sleep])
    assert sample.request == sleep and sample.error == "ended its worker: it hung: no op ended for 0.3 s"
    assert not children()


class Struck:
    """A transport whose workers end whenever they calibrate by so many requests; keeps by how many they were
    told to."""

    spec, counts = BenchSpec(SETTING), Counts()

    def __init__(self, fewest: int):
        self.fewest, self.told, self.ongoing = fewest, [], ()

    def start(self, name, reference_ms):
        return self

    def wait(self, workers, timeout_s):
        return workers

    def call(self, *call, label="") -> None:
        self.ongoing = call

    def answer(self):
        method, *arguments = self.ongoing
        if method != "calibrate":
            return "it"
        assert arguments[1] == 2.0
        self.told.append(len(arguments[0]))
        if self.told[-1] >= self.fewest:
            raise WorkerEnded("it hung")
        return 7.0

    def end(self) -> None:
        pass


class Draws:
    """A transport whose worker takes long to answer. Meanwhile it draws ids, or nothing happens."""

    spec = BenchSpec(SETTING)

    def __init__(self, draws: bool):
        self.draws, self.counts, self.waits, self.ongoing = draws, Counts(), 0, ()

    def start(self, name, reference_ms):
        return self

    def wait(self, workers, timeout_s):
        time.sleep(0.1)
        self.waits += 1
        self.counts = self.counts._replace(drawn=self.counts.drawn + self.draws)
        return workers if self.ongoing[0] == "hardware" or self.waits > 10 else []

    def call(self, *call, label="") -> None:
        self.ongoing, self.waits = call, 0

    def answer(self):
        method, *arguments = self.ongoing
        if method == "hardware":
            return "it"
        [request] = arguments[0]
        return [ComputeSample(dataset.compute_id(SETTING, request), SETTING, request, None, None, 0.0, "")], 1

    def update_counts(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize("draws", [True, False])
def test_a_worker_that_draws_ids_does_not_hang(draws):
    with Supervisor(Draws(draws), reference_ms=1.0, hang_s=0.3) as bench:
        [sample] = bench.measured_samples([HUGE])
    assert sample.error == ("" if draws else "ended its worker: it hung: no op ended for 0.3 s")


def test_calibrating_leaves_out_what_ends_the_process():
    with Supervisor(struck := Struck(fewest=2)) as bench:
        assert bench.calibrate([HUGE] * 9, 2.0) == bench.reference_ms == 7.0 and struck.told == [9, 4, 2, 1]
    with (
        pytest.raises(ShardCoreError, match="the reference op cannot be measured on cpu: it hung"),
        Supervisor(struck := Struck(fewest=0)) as bench,
    ):
        bench.calibrate([HUGE] * 3, 2.0)
    assert struck.told == [3, 1, 0]


def test_calls_tell_who_watches_how_many_requests_wait(tables, monkeypatch):
    labels, call = [], LocalWorker.call

    def labelled(self, *arguments, label=""):
        labels.append(label)
        call(self, *arguments, label=label)

    monkeypatch.setattr(LocalWorker, "call", labelled)
    requests = [ComputeRequest((Shard.whole(tables[i]),), 64) for i in range(5)]
    with supervised(reference_ms=1.0) as bench:
        assert len(list(bench.measured_samples(requests))) == 5
    assert [label for label in labels if label][:5] == [f"{n} waiting" for n in (4, 3, 2, 1, 0)]


def test_what_cannot_start_is_one_clear_error():
    with pytest.raises(ShardCoreError, match="arena.*does not fit cpu"):
        with supervised(KernelConfig(arena_bytes=1 << 50)):
            pass
    assert not children()


@pytest.mark.parametrize(
    "waiting, devices, most, sizes",
    [
        (40, 2, 8, [8, 8, 6, 5, 4, 3, 2, 1, 1, 1, 1]),
        (5, 1, 16, [3, 1, 1]),
        (3, 4, 16, [1, 1, 1]),
        (0, 1, 4, []),
    ],
)
def test_calls_get_smaller_towards_the_end(waiting, devices, most, sizes):
    found = []
    while left := waiting - sum(found):
        found.append(chunk_size(left, devices, most))
        assert found[-1] > 0
    assert found == sizes and chunk_size(0, devices, most) == 0
