import dataclasses
import json
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from shardcore import files
from shardcore.__main__ import main
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.measure.replay import ReplayConfig, combine, replay, replay_all
from shardcore.types import (
    ComputeRequest,
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

MIB = 1 << 20
SETTING = Setting("test", 240)
CONFIG = ReplayConfig(repeats=4, warmups=2, batches=2, arena_bytes=8 * MIB, evict_bytes=MIB, timeout_s=60)
FOREVER = dataclasses.replace(CONFIG, repeats=10**9)
PARTS = [f.name for f in dataclasses.fields(StepCost)]


def problem_of(tables, devices) -> Problem:
    return Problem("replayed", tables, Topology((Device(64 * MIB),) * devices), SETTING.batch)


def whole(problem):
    """Whole tables, round-robin."""
    devices = len(problem.topology)
    return lower(Plan(tuple(Placement(Shard.whole(t), (i % devices,)) for i, t in enumerate(problem.tables))), problem)


def mixed_plan(problem) -> Plan:
    """Column, row and replicated shards; with three devices the exchanges are uneven and one device has no op."""
    cold, hot, wide, *rest = problem.tables
    last = len(problem.topology) - 1
    shards = [(Shard(cold, 0, 30_000, 0, 16), (0,)), (Shard(cold, 30_000, 50_000, 0, 16), (last,)),
              (Shard(hot, 0, 3_000, 0, 12), (0,)), (Shard(hot, 0, 3_000, 12, 32), (last,)), (Shard.whole(wide), (0, last))]
    return Plan(tuple(Placement(s, d) for s, d in [*shards, *((Shard.whole(t), (0,)) for t in rest)]))


@pytest.mark.parametrize("devices", [2, 3])
def test_plans_run_in_alternation_and_their_parts_add_up(tables, devices):
    problem = problem_of(tables, devices)
    workloads = [whole(problem), lower(mixed_plan(problem), problem)]
    costs = replay_all(workloads, SETTING, CONFIG)
    assert len(costs) == 2
    for workload, cost in zip(workloads, costs, strict=True):
        for part in PARTS[:4]:
            values = getattr(cost, part)
            assert len(values) == devices
            for device, value in enumerate(values):
                assert value > 0 or "compute" in part and not workload.ops[device] and value >= 0
        assert min(cost.waiting_ms) >= 0
        assert cost.total_ms == max(sum(getattr(cost, p)[d] for p in PARTS) for d in range(devices))
        assert 0 < cost.step.q1_ms <= cost.step.median_ms <= cost.step.q3_ms and cost.step.repeats == CONFIG.repeats
        assert cost.oversubscribed == (devices > len(os.sched_getaffinity(0)))
        assert np.isfinite(price(workload, AnalyticModel(SETTING)).total_ms - cost.total_ms)
    assert not gang()


def test_a_control_group_tells_the_pace(tables):
    problem = problem_of(tables, 2)
    control = ComputeRequest(tuple(map(Shard.whole, problem.tables)), SETTING.batch)
    assert control.shards[0].bytes > 1 << 20
    small = dataclasses.replace(CONFIG, arena_bytes=max(t.bytes for t in problem.tables))
    alone, = replay_all([whole(problem)], SETTING, small)
    slow, fast = (replay_all([whole(problem)], SETTING, small, control=(control, ms))[0] for ms in (1e-3, 1e3))
    assert alone.pace == 1.0 and slow.pace > 10 and 0 < fast.pace < 0.1
    usual = slow.at_usual_pace()
    assert usual.total_ms == pytest.approx(slow.total_ms / slow.pace) and usual.pace == 1.0
    assert usual.step.median_ms == pytest.approx(slow.step.median_ms / slow.pace)


def test_one_device_computes_and_exchanges_nothing(tables):
    cost = replay(whole(problem_of(tables, 1)), dataclasses.replace(SETTING, optimizer="rowwise_adagrad"), CONFIG)
    assert cost.forward_compute_ms[0] > 0 and cost.backward_compute_ms[0] > 0 and cost.waiting_ms == (0.0,)


def test_waiting_and_transfer_are_told_apart_by_the_last_start():
    ms = np.array([[[0.0, 3.0, 5.0, 6.0, 12.0]] * 3,  # begin, gradients received, updated, pooled, outputs received
                   [[1.0, 3.5, 6.0, 8.0, 11.0]] * 3])
    cost = combine(ms / 1e3)
    expected = StepCost(forward_compute_ms=(1.0, 2.0), backward_compute_ms=(2.0, 2.5), forward_comm_ms=(4.0, 3.0),
                        backward_comm_ms=(2.0, 2.5), waiting_ms=(2.0, 0.0))
    for part in PARTS:
        assert getattr(cost, part) == pytest.approx(getattr(expected, part))
    assert cost.total_ms == pytest.approx(11.0) and cost.step.median_ms == pytest.approx(11.0)


def test_a_workload_of_another_setting_is_refused_before_anything_starts(tables):
    problem = problem_of(tables, 2)
    with pytest.raises(SettingMismatch, match=r"batch 240.*batch 512"):
        replay(whole(problem), dataclasses.replace(SETTING, batch=512), CONFIG)
    h200 = dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, hardware="nvidia-h200"))
    with pytest.raises(SettingMismatch, match="nvidia-h200"):
        replay(whole(h200), SETTING, CONFIG)
    with pytest.raises(ShardCoreError, match="3 and 2 devices"):
        replay_all([whole(problem), whole(problem_of(tables, 3))], SETTING, CONFIG)
    fast = dataclasses.replace(problem, topology=Topology((Device(64 * MIB), Device(64 * MIB, speed=2.0))))
    with pytest.raises(ShardCoreError, match="speed"):
        replay(whole(fast), SETTING, CONFIG)
    with pytest.raises(ShardCoreError, match="repeats"):
        ReplayConfig(repeats=0)


def test_a_shard_larger_than_the_arena_is_named(tables):
    with pytest.raises(ShardCoreError, match=r"rank 0 of 2 .*shard cold\[0:50000, 0:16\] is 3.1 MiB; the arena holds 1.0 MiB"):
        replay(whole(problem_of(tables, 2)), SETTING, dataclasses.replace(CONFIG, arena_bytes=MIB))
    assert not gang()


def gang():
    return [p for p in multiprocessing.active_children() if p.name.startswith("replay-rank")]


def signal_rank_1(number, after_s):
    """Once rank 1 has lived for a while, send it a signal."""
    def run():
        while not (found := [p for p in gang() if p.name == "replay-rank-1"]):
            time.sleep(0.05)
        time.sleep(after_s)
        os.kill(found[0].pid, number)

    threading.Thread(target=run, daemon=True).start()


@pytest.mark.parametrize("number, timeout_s, said", [
    (signal.SIGKILL, 60, "rank 1 of 2 failed: it was killed by SIGKILL"),
    (signal.SIGSTOP, 6, "rank (0, )?1 does not answer|no word for 6 s from rank (0, )?1"),
], ids=["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_the_gang_and_is_named(tables, number, timeout_s, said):
    signal_rank_1(number, after_s=4)
    with pytest.raises(ShardCoreError, match=said):
        replay(whole(problem_of(tables, 2)), SETTING, dataclasses.replace(FOREVER, timeout_s=timeout_s))
    assert not gang()


def test_the_command_replays_plans_of_one_problem(tables, tmp_path, capsys):
    problem, other = problem_of(tables, 2), dataclasses.replace(problem_of(tables, 2), name="other")
    files.write_problem(tmp_path / "problem.json", problem)
    files.write_plan(tmp_path / "plan.json", mixed_plan(problem), problem)
    files.write_plan(tmp_path / "other.json", mixed_plan(other), other)
    arguments = ["--problem", str(tmp_path / "problem.json"), "--device", "cpu", "--repeats", "2"]
    plan, out = str(tmp_path / "plan.json"), tmp_path / "replay.json"
    assert main(["replay", plan, plan, *arguments, "--append", str(tmp_path), "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert main(["replay", plan, plan, *arguments, "--append", str(tmp_path)]) == 0  # what it has is not run again
    assert json.loads(capsys.readouterr().out) == written
    [kept] = (tmp_path / "replays").iterdir()
    assert json.loads((kept / "replays.json").read_text())["replays"][0]["total_ms"] == written["replays"][0]["total_ms"]
    assert written["setting"]["batch"] == problem.global_batch and written["setting"]["hardware"]
    for cost in written["replays"]:
        assert cost["plan"] == plan and cost["total_ms"] > 0 and cost["step"]["repeats"] == 2 and set(PARTS) < set(cost)
    assert main(["replay", plan, str(tmp_path / "other.json"), *arguments]) == 1
    assert "'other'" in capsys.readouterr().err
