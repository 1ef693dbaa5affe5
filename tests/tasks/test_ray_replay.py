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
from shardcore.measure import local_ranks
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.step.lower import lower
from tasks import ray_transport
from tasks.ray_transport import RayTransport

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

    with RayTransport() as transport:

        def run(some):
            return replay_all(some, SETTING, CONFIG, transport)

        costs = run([workload, workload])
        ranks = {p.pid for p in actor_processes("RankProcess")}
        assert len(costs) == 2 and len(ranks) == 2
        for cost in costs:
            for part in PARTS:
                assert len(getattr(cost, part)) == 2 and min(getattr(cost, part)) >= 0
            assert 0 < cost.step.median_ms and cost.step.repeats == CONFIG.repeats
            assert cost.oversubscribed  # each host of this cluster has one CPU
        [again] = run([on_each_one(*tables[2:4])])
        assert again.total_ms > 0 and {p.pid for p in actor_processes("RankProcess")} == ranks
        output = r"^shard large\[0:500000, 0:16\] is 30.5 MiB; the arena holds"
        with pytest.raises(ShardCoreError, match=output):
            run([on_each_one(Table("large", 500_000, 16, 4.0), tables[2])])
    deadline = time.monotonic() + 60
    while actor_processes("RankProcess", "ray::replay"):
        assert time.monotonic() < deadline, "ranks outlive their gang"
        time.sleep(0.05)


def test_a_workload_of_another_setting_is_refused(workload):
    other = dataclasses.replace(SETTING, batch=512)
    with RayTransport() as transport, pytest.raises(SettingMismatch, match="batch: 240 against 512"):
        replay_all([workload], other, CONFIG, transport)


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
    monkeypatch.setattr(ray_transport, "_PROBE_S", 1.0)
    monkeypatch.setattr(local_ranks, "_GRACE_S", 0.2)
    struck, over = [], threading.Event()

    def disturb():
        while not (found := actor_processes("ray::replay")):
            if over.wait(0.02):
                return
        os.kill(found[0].pid, number)
        struck.append(found[0])

    forever = dataclasses.replace(CONFIG, repeats=10**6, timeout_s=timeout_s)
    try:
        with RayTransport() as transport, pytest.raises(ShardCoreError, match=message):
            transport.prepare(2)
            # The title of a process shows that its rank replays. A probe resets the title, 5 s after the call. So the
            # call has to come after both ranks have started.
            deadline = time.monotonic() + 120
            while len(actor_processes("RankProcess")) < 2:
                assert time.monotonic() < deadline, "a rank has not started"
                time.sleep(0.05)
            threading.Thread(target=disturb, daemon=True).start()
            replay_all([workload], SETTING, forever, transport)
    finally:
        over.set()
    assert struck
