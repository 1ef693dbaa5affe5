"""Bad input ends within seconds in one clear line; a kill loses nothing."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from shardcore import dataset

NOWHERE = "127.0.0.1:9"


@pytest.fixture(scope="module")
def empty(new_project):
    return new_project()


@pytest.mark.parametrize("stage, env, named", [
    ("measure", {"RAY_ADDRESS": NOWHERE}, ["Ray", NOWHERE]),
    ("train", {"MLFLOW_TRACKING_URI": f"http://{NOWHERE}"}, ["MLflow", NOWHERE]),
    ("publish", {"PREFECT_API_URL": f"http://{NOWHERE}/api"}, ["Prefect", NOWHERE]),
])
def test_an_address_that_does_not_answer_is_named(empty, stage, env, named):
    error = empty.error_of(f"flows.{stage}", timeout=60, **env)
    assert all(word in error for word in named)


def test_no_champion_is_named(empty):
    files_error = empty.error_of("flows.publish")
    assert "champion" in files_error and "shardcore-cost-" in files_error


def test_an_unknown_parameter_is_named_before_anything_runs(empty):
    empty.set_params("train", epoch=3)
    error = empty.error_of("flows.refresh")
    assert "section 'train' has an unknown key 'epoch'" in error
    assert not (empty.folder / "data/pool.json").exists()


def test_a_refresh_killed_at_a_random_moment_ends_with_every_sample_once(new_project):
    project = new_project()
    project.set_params("measure", compute_samples=60, comm_samples=12, chunk=5)
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    command = [sys.executable, "-m", "tasks.services", sys.executable, "-m", "flows.refresh", "measure"]
    started = subprocess.Popen(command, cwd=project.folder, env=project.env,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    time.sleep(rng.uniform(8, 25))
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    log = project.run("flows.refresh", "measure").stdout
    assert "up to date" in log
    folder = project.folder / "data/measurements"
    samples = dataset.read_compute(folder)
    assert len(samples) == len({s.id for s in samples}) == 61 and len(dataset.read_comm(folder)) == 12  # and the control group
