import dataclasses
import os
import signal
import threading
import time

import pytest

from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.step_cost import PARTS
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.measure.replay import ReplayConfig
from shardcore.step.lower import lower
from tasks import actors
from tasks.measure import MeasureConfig
from tasks.replay import devices_of_a_host, replaying, step_devices, why_no_steps

MIB = 1 << 20
SETTING = Setting("test", 240)
CONFIG = ReplayConfig(repeats=4, warmups=2, batches=2, arena_bytes=8 * MIB, evict_bytes=MIB, timeout_s=60)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def workload(tables):
    problem = Problem("replayed", tables, Topology((Device(64 * MIB),) * 2), SETTING.batch)
    return lower(
        Plan(tuple(Placement("column", Shard.whole(t), (i % 2,)) for i, t in enumerate(tables))), problem
    )


def test_one_gang_replays_problem_after_problem_and_ends(tables, workload, actor_processes):
    def on_each_one(*some):
        plan = Plan(tuple(Placement("column", Shard.whole(t), (i,)) for i, t in enumerate(some)))
        return lower(plan, Problem("replayed", some, Topology((Device(64 * MIB),) * 2), SETTING.batch))

    with replaying(2, SETTING, CONFIG) as run:
        costs = run([workload, workload])
        ranks = {p.pid for p in actor_processes("ReplayRank")}
        assert len(costs) == 2 and len(ranks) == 2
        for cost in costs:
            for part in PARTS:
                assert len(getattr(cost, part)) == 2 and min(getattr(cost, part)) >= 0
            assert 0 < cost.step.median_ms and cost.step.repeats == CONFIG.repeats
            assert cost.oversubscribed  # each host of this cluster has one CPU
        [again] = run([on_each_one(*tables[2:4])])
        assert again.total_ms > 0 and {p.pid for p in actor_processes("ReplayRank")} == ranks
        output = r"rank 0 of 2 failed: shard large\[0:500000, 0:16\] is 30.5 MiB; the arena holds"
        with pytest.raises(ShardCoreError, match=output):
            run([on_each_one(Table("large", 500_000, 16, 4.0), tables[2])])
    deadline = time.monotonic() + 60
    while actor_processes("ReplayRank", "ray::replay"):
        assert time.monotonic() < deadline, "ranks outlive their gang"
        time.sleep(0.05)


def test_devices_of_a_host_share_no_core_and_divide_the_batch():
    assert devices_of_a_host(4, SETTING.batch) == 1  # each host of this cluster has one CPU


def test_steps_need_two_devices_of_a_host_and_a_table_that_fits(tables):
    config = MeasureConfig(arena_bytes=8 * MIB)
    assert step_devices(config, SETTING.batch) == 1
    assert "no host has two devices" in why_no_steps(tables, SETTING, 1, config)
    assert why_no_steps(tables, SETTING, 2, config) is None
    large = [dataclasses.replace(t, rows=10**8) for t in tables]
    assert (
        why_no_steps(large, SETTING, 2, config) == "no table of the pool with lookups fits 8 MiB at "
        "a dim of 4"
    )


def test_a_workload_of_another_setting_is_refused(workload):
    other = dataclasses.replace(SETTING, batch=512)
    with pytest.raises(SettingMismatch, match="batch: 240 against 512"), replaying(2, other, CONFIG) as run:
        run([workload])


@pytest.mark.parametrize(
    "number, timeout_s, message",
    [
        (signal.SIGKILL, 60, "rank [01] of 2 failed: its process died"),
        (signal.SIGSTOP, 10, "does not answer|no word for"),
    ],
    ids=["dies", "hangs"],
)
def test_a_rank_that_dies_or_hangs_ends_the_gang_and_is_named(
    workload, actor_processes, monkeypatch, number, timeout_s, message
):
    monkeypatch.setattr(actors, "_PROBE_S", 1.0)
    monkeypatch.setattr(actors, "_GRACE_S", 0.2)
    struck, over = [], threading.Event()

    def disturb():
        while not (found := actor_processes("ray::replay")):
            if over.wait(0.02):
                return
        os.kill(found[0].pid, number)
        struck.append(found[0])

    forever = dataclasses.replace(CONFIG, repeats=10**6, timeout_s=timeout_s)
    try:
        with pytest.raises(ShardCoreError, match=message), replaying(2, SETTING, forever) as run:
            # The title of a process shows that its rank replays. A probe resets the title, 5 s after the call. So the
            # call has to come after both ranks have started.
            deadline = time.monotonic() + 120
            while len(actor_processes("ReplayRank")) < 2:
                assert time.monotonic() < deadline, "a rank has not started"
                time.sleep(0.05)
            threading.Thread(target=disturb, daemon=True).start()
            run([workload])
    finally:
        over.set()
    assert struck
