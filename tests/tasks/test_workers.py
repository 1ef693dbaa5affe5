import logging
import os
import re
import signal
import time

import pytest

from shardcore import dataset, sampling
from shardcore.measure.kernels import KernelConfig
from shardcore.types import ComputeRequest, Setting
from tasks.workers import Workers

SETTING = Setting("test", 64)
CONFIG = KernelConfig(arena_bytes=1 << 24, min_repeats=2, max_repeats=2, interleave=3)
GROUPS = sampling.GroupConfig(max_shards=4, max_shard_bytes=1 << 22, planned=0.0)

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def requests(tables):
    live = [t for t in tables if t.pooling]
    draws = (sampling.compute_request(live, i, SETTING, 0, GROUPS) for i in range(40))
    return list({dataset.compute_id(SETTING, r): r for r in draws}.values())[:24]


class Poison(ComputeRequest):
    """A request that has a call made in whatever process receives it."""

    call = (os._exit, (3,))

    def __reduce__(self):
        return self.call


class Sleep(Poison):
    call = (time.sleep, (10_000,))


def workers(requests, hang_s=60.0, count=2):
    return Workers(count, "cpu", SETTING, CONFIG, requests[0], control_ms=1.0, chunk=4, hang_s=hang_s)


def measure(fleet, requests, disturb=lambda: None):
    """All that came back, and the samples by id; `disturb` is called when the first came."""
    finished = []
    for some in fleet.measure(requests):
        if not finished:
            disturb()
        finished += some
    assert sum(f.settled for f in finished) == len(requests)
    control = dataset.compute_id(SETTING, requests[0])
    samples = [s for f in finished for s in f.samples if s.id != control]
    assert sorted(s.id for s in samples) == sorted(dataset.compute_id(SETTING, r) for r in requests[1:])
    return finished, {s.id: s for s in samples}


def test_every_request_is_measured_once_on_all_devices_and_the_control_beside_them(requests):
    with workers(requests) as fleet:
        finished, samples = measure(fleet, requests)
        assert not any(s.error for s in samples.values())
    assert {f.device for f in finished} == {"device 0", "device 1"}
    control = [s for f in finished for s in f.samples if s.request == requests[0]]
    assert len(control) >= 2 and sum(f.kernel_s for f in finished) > 0


def test_calibrating_gives_one_figure_to_all(requests):
    with workers(requests) as fleet:
        fleet.control_ms = None
        fleet.calibrate(requests)
        assert 0 < fleet.control_ms < 1000


def test_a_worker_killed_before_calibrating_is_replaced_and_nothing_is_lost(requests, actor_processes):
    with workers(requests) as fleet:
        fleet.control_ms = None
        os.kill(actor_processes("DeviceWorker")[0].pid, signal.SIGKILL)
        fleet.calibrate(requests)
        _, samples = measure(fleet, requests)
    assert not any(s.error for s in samples.values())


@pytest.mark.parametrize("kind, hang_s, said", [(Poison, 60, "its process died: Worker unexpectedly exits"),
                                                (Sleep, 1, "it hung: no op ended for 1 s")])
def test_the_one_request_that_ends_its_worker_is_found_and_costs_no_other(requests, caplog, kind, hang_s, said):
    bad = kind(requests[9].shards, requests[9].batch)
    requests = [*requests[:9], bad, *requests[10:]]
    with caplog.at_level(logging.WARNING), workers(requests, hang_s) as fleet:
        _, samples = measure(fleet, requests)
    failed = [s for s in samples.values() if s.error]
    assert [s.request for s in failed] == [bad]
    assert re.match(f"ended its worker: {said}", failed[0].error)
    assert "measured again one by one" in caplog.text


def test_a_worker_killed_in_the_middle_is_replaced_and_nothing_is_lost(requests, actor_processes):
    def kill_one():
        os.kill(actor_processes("DeviceWorker", "measure[compute]")[0].pid, signal.SIGKILL)

    with workers(requests) as fleet:
        _, samples = measure(fleet, requests, kill_one)
    assert not any(s.error for s in samples.values())
