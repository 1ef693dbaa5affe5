"""Bad input ends within seconds in one clear line; a kill loses nothing."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from shardcore import dataset, files, store

NOWHERE = "127.0.0.1:9"


def one_line_error(done):
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stdout
    return lines[0]


@pytest.fixture(scope="module")
def empty(new_project):
    return new_project()


@pytest.mark.parametrize("stage, env, named", [
    ("measure", {"RAY_ADDRESS": NOWHERE}, ["Ray", NOWHERE]),
    ("train", {"MLFLOW_TRACKING_URI": f"http://{NOWHERE}"}, ["MLflow", NOWHERE]),
    ("publish", {"PREFECT_API_URL": f"http://{NOWHERE}/api"}, ["Prefect", NOWHERE]),
])
def test_an_address_that_does_not_answer_is_named(empty, stage, env, named):
    error = one_line_error(empty.run(f"flows.{stage}", check=False, timeout=60, **env))
    assert all(word in error for word in named)


def test_no_champion_is_named(empty):
    files_error = one_line_error(empty.run("flows.publish", check=False))
    assert "champion" in files_error and "shardcore-cost-" in files_error


def test_an_unknown_parameter_is_named_before_anything_runs(empty):
    empty.set_params("train", epoch=3)
    error = one_line_error(empty.run("flows.refresh", check=False))
    assert "section 'train' has an unknown key 'epoch'" in error
    assert not (empty.folder / "data/pool.json").exists()


def test_a_damaged_part_stops_the_stage_by_name_and_loses_nothing(project):
    folder = project.folder / "data/measurements"
    [part] = folder.glob("compute-*.parquet")
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    try:
        assert part.name in one_line_error(project.run("flows.measure", check=False))
    finally:
        part.write_bytes(whole)


def test_a_problem_that_cannot_be_planned_is_named_and_the_others_are_published(project):
    good = files.read_problem(project.folder / "problems/draw-0.json")
    data = files.problem_to_json(good)
    big = dict(data, name="too-big", topology={"devices": [{"count": 2, "memory_bytes": 1 << 20}]})
    other = dict(data, name="other-batch", global_batch=128)
    for body in (big, other):
        files.write_json(project.folder / f"{body['name']}.json", body)
    error = one_line_error(project.run("shardcore", "plan", "too-big.json", "--model", "data/model", "--out", "x.json",
                                       check=False))
    assert re.search(r"'too-big' does not fit: .*[KMG]iB.* too little.*It would fit with", error)
    shutil.copy(project.folder / "too-big.json", project.folder / "problems")
    (project.folder / "plans/pool-0-00/current").unlink()
    try:
        error = one_line_error(project.run("flows.publish", check=False))
    finally:
        (project.folder / "problems/too-big.json").unlink()
    assert "1 of 3 problems have no new plan" in error and "'too-big' does not fit" in error
    assert store.load_plan(project.folder / "plans", "pool-0-00")[0].placements
    assert "too-big" in (project.folder / "plans/report.md").read_text()
    error = one_line_error(project.run("shardcore", "plan", "other-batch.json", "--model", "data/model", "--out", "x.json",
                                       check=False))
    assert "batch 128" in error and "batch 64" in error
    assert not (project.folder / "x.json").exists()


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
