"""Measuring on a GPU, rehearsed: every path runs once, with a stand-in where CUDA is called (fake_cuda.py).

This proves the paths, not the timings.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardcore.core.types import Setting
from shardcore.io import dataset

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
NAME = "nvidia-h100-80gb-hbm3-rehearsal"
COMMAND = (
    "measure --device cuda --batch 64 --tolerance 0.5 --max-repeats 6 --max-shards 4 --interleave 4".split()
)


@pytest.fixture
def measuring(tmp_path):
    """Starts `python -m shardcore measure --device cuda`; the folder of what is to happen."""
    folder, started = tmp_path / "cuda", []
    folder.mkdir()
    env = {
        **os.environ,
        "SHARDCORE_REHEARSAL": "fake_cuda:FakeCuda",
        "FAKE_CUDA": str(folder),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
    }

    def start(*arguments):
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "shardcore", *COMMAND, "--out", str(tmp_path / "data"), *arguments],
                env=env,
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        return started[-1]

    start.folder, start.data = folder, tmp_path / "data"
    yield start
    for process in started:
        process.kill()
        process.communicate()


def measured(data):
    return dataset.read_compute_samples(data, Setting(NAME, 64))


def test_an_op_starts_on_a_device_that_is_busy_and_ids_are_drawn_again_where_they_do_not_fit(measuring):
    output, _ = (process := measuring("--samples", "12", "--minutes", "2")).communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"measuring for {NAME}, batch 64, fp32, exact_sgd" in output
    found = measured(measuring.data)
    assert sum(s.error is None for s in found) >= 12
    busy = [float(line.split()[1]) for line in (measuring.folder / "log").read_text().splitlines()]
    assert len(busy) > 12 * 6 and min(busy) > 0
    assert {x.software for x in found} == {found[0].software} and "driver none" in found[0].software
    assert max(s.bytes for x in found for s in x.request.shards) <= 64 << 20  # the default arena


@pytest.mark.parametrize(
    "happens, message",
    [("out_of_memory", ""), ("fault", "illegal memory access"), ("hang", "it hung: no op ended for 3 s")],
)
def test_what_fails_once_costs_no_sample(measuring, happens, message):
    process = measuring("--samples", "8", "--minutes", "2", "--hang-s", "3")
    assert any("; the reference op takes" in line for line in iter(process.stdout.readline, ""))
    (measuring.folder / happens).touch()
    heard, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and message in heard, heard
    assert not (measuring.folder / happens).exists()
    assert len({s.id for s in measured(measuring.data) if s.error is None}) >= 8
    assert ("release" in (measuring.folder / "log").read_text()) == (happens == "out_of_memory")


def test_the_time_is_over_when_it_was_to_be(measuring):
    """Draws are endless, so only the time ends it. A slow machine may have no sample at first."""
    for minutes in ("0.5", "2"):
        process = measuring("--minutes", minutes)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        if measuring.data.exists() and measured(measuring.data):
            return
    raise AssertionError(output)


def test_a_kill_keeps_what_was_measured(measuring):
    process = measuring("--minutes", "2", "--chunk", "4")
    deadline = time.monotonic() + 100
    while not list(measuring.data.glob("compute-*.parquet")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert measured(measuring.data)
