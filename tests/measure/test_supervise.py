"""Measuring in a process of its own, and the command around it: what dies or hangs costs one request."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardcore import dataset, files, replays, sampling
from shardcore.__main__ import main
from shardcore.measure.kernels import KernelConfig
from shardcore.measure.supervise import SupervisedBench
from shardcore.types import ComputeRequest, Setting, Shard, ShardCoreError, Table, Zipf

ROOT = Path(__file__).parents[2]
SETTING = Setting("test", 256)
CONFIG = KernelConfig(arena_bytes=8 << 20, tolerance=0.2, min_repeats=3, max_repeats=5, interleave=4)
SHAPE = sampling.GroupConfig(max_shards=4, max_shard_bytes=1 << 20)


def children():
    return [p for p in multiprocessing.active_children() if p.name.startswith("measure-")]


def signal_while_measuring(bench, number, times):
    """Send a signal to the bench's process while it runs ops, and again to those that replace it."""
    def run():
        before = None
        for _ in range(times):
            while not (found := [p.pid for p in children() if p.pid != before]):
                time.sleep(0.02)
            before, ran_s = found[0], bench.kernel_s
            while bench.kernel_s == ran_s:
                time.sleep(0.02)
            os.kill(before, number)

    threading.Thread(target=run, daemon=True).start()


def test_the_request_that_kills_twice_is_recorded_and_the_others_are_measured(tables):
    """Killed in company, then alone: that one fails. What ran beside it is measured by the next process."""
    slow, quick = (ComputeRequest((Shard.whole(t),) * n, batch) for t, n, batch in ((tables[1], 8, 4096), (tables[4], 1, 8)))
    config = KernelConfig(arena_bytes=8 << 20, tolerance=1e-9, min_repeats=300, max_repeats=300, interleave=2)
    with SupervisedBench(SETTING, "cpu", config) as bench:
        signal_while_measuring(bench, signal.SIGKILL, times=2)
        samples = {s.request: s for s in bench.measure([slow, quick])}
        assert 0 < bench.kept_s < bench.kernel_s  # also of the processes that are gone
    assert set(samples) == {slow, quick} and samples[quick].error is None
    assert "SIGKILL" in samples[slow].error and samples[slow].forward is None
    assert not children()


def test_a_process_that_hangs_is_replaced_and_every_request_measured(tables):
    too_large = ComputeRequest((Shard.whole(Table("huge", 10_000_000, 64, 1.0, Zipf(1.0))),), 256)
    requests = [too_large, *(sampling.compute_request(tables[:5], i, SETTING, config=SHAPE) for i in range(40))]
    control = sampling.control_request(tables[:5], SETTING, SHAPE)
    config = KernelConfig(arena_bytes=8 << 20, tolerance=1e-9, min_repeats=60, max_repeats=60, interleave=4)
    with SupervisedBench(SETTING, "cpu", config, control, hang_s=4) as bench:
        assert bench.calibrate(requests[1:4]) == bench.control_ms > 0
        signal_while_measuring(bench, signal.SIGSTOP, times=1)
        samples = [s for s in bench.measure(requests) if s.request != control]
    assert sorted(s.id for s in samples) == sorted(dataset.compute_id(SETTING, r) for r in requests)
    [failed] = [s for s in samples if s.error]
    assert failed.request == too_large and "huge" in failed.error and "arena" in failed.error


def test_what_cannot_start_is_one_clear_error():
    with pytest.raises(ShardCoreError, match="arena.*does not fit cpu"):
        with SupervisedBench(SETTING, "cpu", KernelConfig(arena_bytes=1 << 60)):
            pass
    assert not children()


@pytest.fixture
def command(tables, tmp_path):
    files.write_pool(tmp_path / "pool.json", tables)
    return ["measure", "--device", "cpu", "--pool", str(tmp_path / "pool.json"), "--batch", "64", "--max-shards", "4",
            "--arena-gib", "0.0078125", "--max-repeats", "6", "--tolerance", "0.9", "--out", str(tmp_path / "data")]


def test_the_command_says_what_is_missing_measures_it_and_goes_on(command, tables, tmp_path, capsys):
    assert main([*command, "--samples", "10", "--exchanges", "4", "--steps", "3", "--dry-run"]) == 0
    assert "10 of the first 10 samples are missing" in (said := capsys.readouterr().out) and "4 exchanges are missing" in said
    assert "3 of the first 3 steps are missing" in said
    assert not (tmp_path / "data").exists()
    assert main([*command, "--samples", "10", "--exchanges", "4", "--steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "10 samples" in said and "in kernels" in said and "entered a median" in said and "4 of 4 exchanges" in said
    assert "3 of 3 steps" in said and len(replays.digests(tmp_path / "data")) == 1
    [setting] = dataset.settings(tmp_path / "data")
    shape = sampling.GroupConfig(max_shards=4, max_shard_bytes=8 << 20)
    control = dataset.compute_id(setting, sampling.control_request(tables[:5], setting, shape))
    first = dataset.read_ids(tmp_path / "data", "compute")
    assert len(first) == 11 and control in first and len(dataset.read_comm(tmp_path / "data")) == 4
    assert main([*command, "--samples", "12", "--again", "2"]) == 0
    assert int(re.search(r"(\d+) samples, ", capsys.readouterr().out)[1]) >= 4  # and those that other work disturbed
    assert first < dataset.read_ids(tmp_path / "data", "compute") and len(dataset.read_compute(tmp_path / "data")) == 13
    assert len([s for s in dataset.read_repeats(tmp_path / "data") if s[0].id != control]) >= 2
    assert main(["report", str(tmp_path / "data")]) == 0 and re.search(r"steps +3 plans of 1 problems", capsys.readouterr().out)
    assert main([*command, "--samples", "12", "--steps", "4"]) == 0 and "1 of 1 steps" in capsys.readouterr().out
    assert main([*command, "--samples", "12", "--steps", "4"]) == 0
    assert "already" in (said := capsys.readouterr().out) and "steps" not in said
    assert main([*command, "--ranks", "3", "--exchanges", "4"]) == 1 and "divides the batch of 64" in capsys.readouterr().err
    assert main([*command, "--ranks", "64", "--steps", "4"]) == 1 and "need as many cores" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(command, tmp_path):
    run = subprocess.Popen([sys.executable, "-m", "shardcore", *command, "--chunk", "100000"], cwd=ROOT, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, start_new_session=True)
    while "a second" not in run.stdout.readline():
        pass
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of its processes
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 130 and not errors
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # the last of them is gone a moment later
            os.killpg(run.pid, 0)
            time.sleep(0.1)
    assert dataset.read_compute(tmp_path / "data")  # though no chunk was full


def test_killed_and_resumed_it_has_every_sample_once(tables, tmp_path):
    """SIGKILL while it measures (bench/kills.py does it at random moments, against an undisturbed run)."""
    folder, pool = tmp_path / "data", tmp_path / "pool.json"
    files.write_pool(pool, tables)
    command = [sys.executable, "-m", "shardcore", "measure", "--pool", str(pool), "--samples", "48", "--out", str(folder),
               "--batch", "64", "--max-shards", "6", "--arena-gib", "0.03125", "--chunk", "8", "--minutes", "60",
               "--tolerance", "0.9"]
    with open(tmp_path / "said.txt", "w") as said:
        run = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    while run.poll() is None and not list(folder.glob("compute-*.parquet")):
        time.sleep(0.02)
    assert run.poll() is None, (tmp_path / "said.txt").read_text()
    run.kill()
    run.wait()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # its measuring process sees that it is alone
            os.killpg(run.pid, 0)
            time.sleep(0.1)
    kept = dataset.read_ids(folder, "compute")
    assert kept
    for path in folder.glob(".*.tmp"):  # a kill may leave one half written, which goes when no other host can still be writing it
        os.utime(path, (time.time() - 7200,) * 2)
    assert subprocess.run(command, capture_output=True).returncode == 0
    samples = dataset.read_compute(folder)
    assert kept <= {s.id for s in samples} and len(samples) == 49  # and the control group
    repeats = dataset.read_repeats(folder)
    assert len(repeats) <= 1 and not list(folder.glob(".*.tmp"))  # none but the control group was measured twice

