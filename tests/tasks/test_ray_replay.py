import dataclasses
import os
import signal
import threading
import time

import pytest
import ray

from shardcore.measure.replay import ReplayConfig
from shardcore.types import (
    Device,
    Placement,
    Plan,
    Problem,
    Setting,
    SettingMismatch,
    Shard,
    ShardCoreError,
    StepCost,
    Topology,
)
from shardcore.workload import lower
from tasks.measure import MeasureConfig
from tasks.replay import devices_of_a_host, replay, replaying, step_devices, why_no_steps

MIB = 1 << 20
SETTING = Setting("test", 240)
CONFIG = ReplayConfig(repeats=4, warmups=2, batches=2, arena_bytes=8 * MIB, evict_bytes=MIB, timeout_s=60)

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def workload(tables):
    problem = Problem("replayed", tables, Topology((Device(64 * MIB),) * 2), SETTING.batch)
    return lower(Plan(tuple(Placement(Shard.whole(t), (i % 2,)) for i, t in enumerate(tables))), problem)


def test_plans_are_replayed_by_a_gang_of_actors_that_ends(workload, actor_processes):
    costs = replay.fn([workload, workload], SETTING, CONFIG)
    assert len(costs) == 2
    for cost in costs:
        for part in dataclasses.fields(StepCost):
            assert len(getattr(cost, part.name)) == 2 and min(getattr(cost, part.name)) >= 0
        assert 0 < cost.step.median_ms and cost.step.repeats == CONFIG.repeats
        assert cost.oversubscribed  # each host of this cluster has one CPU
    deadline = time.monotonic() + 15
    while actor_processes("ReplayRank", "ray::replay") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not actor_processes("ReplayRank", "ray::replay")


def test_one_gang_replays_problem_after_problem(tables, actor_processes):
    found = []
    with replaying(2, SETTING, CONFIG) as run:
        for some in (tables[:2], tables[2:4]):
            problem = Problem("replayed", some, Topology((Device(64 * MIB),) * 2), SETTING.batch)
            found += run([lower(Plan(tuple(Placement(Shard.whole(t), (i,)) for i, t in enumerate(some))), problem)])
            assert len(actor_processes("ReplayRank")) == 2
    assert len(found) == 2 and all(cost.total_ms > 0 for cost in found)


def test_devices_of_a_host_share_no_core_and_divide_the_batch():
    assert devices_of_a_host(4, SETTING.batch) == 1  # each host of this cluster has one CPU


def test_steps_need_two_devices_of_a_host_and_a_table_that_fits(tables):
    config = MeasureConfig(arena_bytes=8 * MIB)
    assert step_devices(config, SETTING.batch) == 1
    assert "no host has two devices" in why_no_steps(tables, SETTING, 1, config)
    assert why_no_steps(tables, SETTING, 2, config) is None
    large = [dataclasses.replace(t, rows=10**8) for t in tables]
    assert why_no_steps(large, SETTING, 2, config) == "no table of the pool with lookups fits 8 MiB at a dim of 4"


def test_a_workload_of_another_setting_is_refused(workload):
    with pytest.raises(SettingMismatch, match=r"batch 240.*batch 512"):
        replay.fn([workload], dataclasses.replace(SETTING, batch=512), CONFIG)


@pytest.mark.parametrize("number, timeout_s, said", [
    (signal.SIGKILL, 60, "rank [01] of 2 failed: its process died"),
    (signal.SIGSTOP, 5, "does not answer|no word for"),
], ids=["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_the_gang_and_is_named(workload, actor_processes, number, timeout_s, said):
    def disturb():
        while len(found := actor_processes("ReplayRank", "ray::replay")) < 2:
            time.sleep(0.1)
        time.sleep(3)
        os.kill(found[0].pid, number)

    threading.Thread(target=disturb, daemon=True).start()
    forever = dataclasses.replace(CONFIG, repeats=10**9, timeout_s=timeout_s)
    with pytest.raises(ShardCoreError, match=said):
        replay.fn([workload], SETTING, forever)


def test_what_does_not_fit_is_named(workload):
    with pytest.raises(ShardCoreError, match=r"rank 0 of 2 failed: shard cold\[0:50000, 0:16\] is 3.1 MiB; the arena holds"):
        replay.fn([workload], SETTING, dataclasses.replace(CONFIG, arena_bytes=MIB))
    assert ray.cluster_resources()["CPU"] == 2
