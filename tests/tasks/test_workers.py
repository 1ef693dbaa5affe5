import logging
import os
import re
import signal
import time

import pytest
from ray_fixtures import raylet
from waiting import until

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest
from shardcore.measure import supervise
from shardcore.measure.device_bench import BenchSpec
from shardcore.measure.kernels import KernelConfig
from shardcore.measure.sampling.groups import GroupConfig, draw_compute_request
from shardcore.measure.supervise import Supervisor
from tasks.ray_transport import RayFleet

SETTING = Setting("test", 64)
CONFIG = KernelConfig(arena_bytes=1 << 24, min_repeats=2, max_repeats=2, interleave=3)
GROUPS = GroupConfig(max_shards=4, max_shard_bytes=1 << 22, planned=0.0)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def requests(tables):
    live = [t for t in tables if t.pooling]
    draws = (draw_compute_request(live, i, SETTING, 0, GROUPS) for i in range(40))
    return list({dataset.compute_id(SETTING, r): r for r in draws}.values())[:24]


class Poison(ComputeRequest):
    """A request that has a call made in whatever process receives it."""

    call = (os._exit, (3,))

    def __reduce__(self):
        return self.call


class Sleep(Poison):
    call = (time.sleep, (10_000,))


def workers(requests, hang_s=60.0, count=2, chunk=4):
    fleet = RayFleet(BenchSpec(SETTING, "cpu", CONFIG, requests[0]))
    return Supervisor(fleet, count, reference_ms=1.0, chunk=chunk, hang_s=hang_s)


def measure(fleet, requests, disturb=lambda: None):
    """All that came back, and the samples by id; `disturb` is called when the first came."""
    finished = []
    for some in fleet.measure(requests):
        if not finished:
            disturb()
        finished += some
    assert sum(f.settled for f in finished) == len(requests)
    reference = dataset.compute_id(SETTING, requests[0])
    samples = [s for f in finished for s in f.samples if s.id != reference]
    assert sorted(s.id for s in samples) == sorted(dataset.compute_id(SETTING, r) for r in requests[1:])
    return finished, {s.id: s for s in samples}


def test_every_request_is_measured_once_though_a_worker_died_before_calibrating(requests, actor_processes):
    with workers(requests) as fleet:
        fleet.reference_ms = None
        os.kill(actor_processes("DeviceWorker")[0].pid, signal.SIGKILL)
        fleet.calibrate(requests, seconds=0.1)
        found_ms = fleet.reference_ms
        assert 0 < found_ms < 1000
        fleet.calibrate(requests)  # it is known now
        finished, samples = measure(fleet, requests)
        assert fleet.reference_ms == found_ms and not any(s.error for s in samples.values())
        reference = [s for f in finished for s in f.samples if s.request == requests[0]]
        assert len(reference) >= 2 and sum(f.kernel_s for f in finished) > 0
        assert list(fleet.measure([])) == []
    until(lambda: not actor_processes("DeviceWorker", "measure[compute]"))


def test_requests_that_end_or_hang_their_worker_are_found_and_cost_no_others(requests, caplog):
    bad = {9: "its process died: Worker unexpectedly exits", 15: "it hung: no op ended for 1 s"}
    for (i, _), kind in zip(bad.items(), (Poison, Sleep), strict=True):
        requests[i] = kind(requests[i].shards, requests[i].batch)
    with caplog.at_level(logging.WARNING), workers(requests, hang_s=1) as fleet:
        _, samples = measure(fleet, requests)
    failed = {s.id: s for s in samples.values() if s.error}
    assert set(failed) == {dataset.compute_id(SETTING, requests[i]) for i in bad}
    for i, output in bad.items():
        assert re.match(f"ended its worker: {output}", failed[dataset.compute_id(SETTING, requests[i])].error)
    assert "measured again one by one" in caplog.text


def test_a_node_lost_in_the_middle_costs_no_sample_and_the_others_do_the_rest(
    requests, another_node, actor_processes, caplog
):
    """Its raylet and its actor are killed, and no replacement finds room."""

    def lose_it():
        lost = raylet(another_node)
        for process in [
            p for p in actor_processes("DeviceWorker", "measure[compute]") if p.ppid() == lost.pid
        ] + [lost]:
            process.kill()

    with caplog.at_level(logging.WARNING), workers(requests, count=3) as fleet:
        finished, samples = measure(fleet, requests, lose_it)
    assert len({f.device for f in finished if f.settled}) >= 2  # those that live had a chunk each
    assert not any(s.error for s in samples.values()) and caplog.text.count("measured again one by one") == 1


def test_a_call_brings_back_what_has_finished_in_time_whatever_its_chunk(requests, monkeypatch):
    monkeypatch.setattr("shardcore.measure.supervise.PART_S", 0.0)
    with workers(requests, count=1, chunk=100) as fleet:
        finished, samples = measure(fleet, requests)
    assert not any(s.error for s in samples.values())
    assert len(finished) >= len(requests) > max(f.settled for f in finished) + 10


def test_without_a_worker_it_says_so_and_why(requests, monkeypatch):
    """No worker starts, as this cluster has no GPU."""
    monkeypatch.setattr(supervise, "START_S", 0.1)
    with (
        pytest.raises(ShardCoreError, match="1 measuring workers found no free device in 0.1 s"),
        Supervisor(RayFleet(BenchSpec(SETTING, "cuda", CONFIG, requests[0]))),
    ):
        pass
