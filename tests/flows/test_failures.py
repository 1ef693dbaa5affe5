"""Bad input ends within seconds in one clear line; what is killed or damaged loses nothing, and the next run
completes.

The tests with `outcome` do what they are named after to real processes, at an instant drawn from `seed`.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import mlflow
import psutil
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool
from scratch import Project, Server, copy_project, kill_group, timings, until, with_logs
from sealing import edit

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem
from shardcore.cost import fit, neural
from shardcore.io import dataset, files, model_files
from shardcore.plans import store
from tasks import publish_claim, registry

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def prefect(tmp_path_factory):
    with Server.of_prefect(tmp_path_factory.mktemp("prefect")) as server:
        yield server


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    with Server.of_mlflow(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture(scope="module")
def new_project(tmp_path_factory, prefect):
    """Makes scratch projects in which nothing was run yet."""
    return lambda: copy_project(tmp_path_factory.mktemp("project"), f"{prefect.url}/api", prefect.folder)


@pytest.fixture(scope="module")
def empty(new_project):
    return new_project()


def test_no_champion_is_named(empty):
    shown = empty.run("flows.publish").stdout
    assert (
        "is champion: plans for it are under cpu, profile: published measurements, not of your machine"
        in shown
    )


def test_an_unknown_parameter_is_named_before_anything_runs(empty):
    empty.set_params("train", epoch=3)
    error = empty.error_of("flows.refresh")
    assert "section 'train' has an unknown key 'epoch'" in error
    assert not (empty.folder / "data/pool.json").exists()


def test_a_refresh_killed_at_a_random_moment_ends_with_every_sample_once(new_project, rng, outcome):
    project = new_project()
    project.set_params("measure", compute_samples=30, comm_samples=12, chunk=5)
    with project.started("tasks.services", sys.executable, "-m", "flows.refresh", "measure") as run:
        time.sleep(rng.uniform(5, 20))
        outcome.hit = run.process.poll() is None
        run.process.kill()  # what it had started ends by itself, and is waited for by nobody
        run.process.wait()
        before = timings(project)
        log = project.run("flows.refresh", "measure").stdout
    [outcome.said] = re.findall(r"stage measure is up to date", log)
    folder = project.folder / "data/measurements"
    outcome.lost = len(before - timings(project))
    samples = dataset.read_compute_samples(folder)
    outcome.completed = (
        len(samples) == len({s.id for s in samples}) == 31
        and len(dataset.read_collective_samples(folder)) == 12
    )
    assert outcome.lost == 0 and outcome.completed  # 31 with the reference op


def of_the_run(folder: Path) -> list[psutil.Process]:
    """The living processes that have their temporary files in a folder below this one, as all of a run
    have."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("TMPDIR", "").startswith(f"{folder}/")
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def killed(new_project):
    """A project with a pool."""
    project = new_project()
    files.write_pool(project.folder / "data/pool.json", pool())
    return project


PYTHON = Path(sys.executable).name


@pytest.mark.parametrize(
    "victim",
    [
        f"{PYTHON} -m tasks.services",
        f"{PYTHON} -m prefect server",
        f"{PYTHON} -m flows.measure",
        f"{PYTHON} -P",
    ],
)
def test_of_a_killed_flow_nothing_is_left_and_while_it_ran_it_was_closed_to_others(killed, victim):
    """The flow starts a Prefect server and a Ray."""
    project = killed
    shutil.rmtree(project.folder / "data/measurements", ignore_errors=True)
    goes_on = victim == f"{PYTHON} -P"  # without its guardian
    project.set_params("measure", compute_samples=1000, comm_samples=0, step_samples=0)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as temporary:
        with project.started("flows.measure", PREFECT_API_URL="", TMPDIR=temporary) as run:
            until(lambda: timings(project), timeout_s=240)
            listening, victims = set(), []
            for process in [top := psutil.Process(run.process.pid), *top.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # it ended meanwhile
                    listening |= {
                        c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN
                    }
                    program, *rest = process.cmdline()
                    victims += [process] if " ".join([Path(program).name, *rest]).startswith(victim) else []
            assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
            [found] = victims
            found.kill()
            code = run.process.wait(240)
            assert (code == 0) == goes_on, run.log()
            deadline = time.monotonic() + 60  # 15 s are promised; and a machine may be four times as slow
            while left := of_the_run(Path(temporary)) + os.listdir(temporary):
                assert time.monotonic() < deadline, left
                time.sleep(0.1)
    if victim.endswith("flows.measure"):
        project.set_params("measure", compute_samples=len(timings(project)))
        assert "measured" in project.run("flows.measure").stdout


# --- services killed, disks full, files damaged -------------------------------------------------------------


@pytest.fixture(scope="module")
def measuring(new_project):
    """A project with a pool, whose measurements take some seconds."""
    project = new_project()
    files.write_pool(project.folder / "data/pool.json", pool())
    project.set_params("measure", compute_samples=60, comm_samples=6, chunk=4)
    return project


@pytest.fixture(scope="module")
def trained(new_project, tracking):
    """A project with measurements (of a known law), a model trained on them, and a problem."""
    project = new_project()
    project.env["MLFLOW_TRACKING_URI"] = tracking.url
    project.set_params("setting", hardware=SETTING.hardware, batch=SETTING.batch)
    project.set_params("train", epochs=2)
    measured, compute, comm = (
        project.folder / "data/measurements",
        compute_samples(linear_law, 120),
        comm_samples(20),
    )
    dataset.write_compute_samples(measured, compute, dataset.write_pool(measured, pool()))
    dataset.write_collective_samples(measured, comm)
    neural.save(
        fit.train(compute, comm, SETTING, fit.FitConfig(epochs=2)).model, project.folder / "data/model"
    )
    problem = Problem("small", tuple(pool()[:8]), Topology((Device(1 << 30),) * 2), SETTING.batch)
    files.write_problem(project.folder / "problems/small.json", problem)
    return project


@pytest.fixture(scope="module")
def promoted(trained):
    """`trained`, its model champion."""
    trained.run("flows.promote")
    return trained


def other_model(project: Project, rng: random.Random) -> None:
    """A model a little different from the project's, as a training would leave it."""
    model = neural.load(project.folder / "data/model")
    weights = {**model.weights, "rates": model.weights["rates"] * rng.uniform(0.99, 1.01)}
    neural.save(dataclasses.replace(model, weights=weights), project.folder / "data/model")


def test_a_prefect_server_restarted_during_a_flow_costs_only_time(measuring, prefect, rng, outcome):
    shutil.rmtree(measuring.folder / "data/measurements", ignore_errors=True)
    with measuring.started("flows.measure") as run:
        until(lambda: "Beginning flow run" in run.log())
        time.sleep(rng.uniform(0, 8))
        prefect.kill()
        outcome.hit = run.process.poll() is None
        prefect.start()
        code = run.process.wait(120)
    assert code == 0 and "Traceback" not in run.log(), run.log()
    query = json.dumps(
        {"sort": "START_TIME_DESC", "limit": 1, "flows": {"name": {"any_": ["measure"]}}}
    ).encode()
    asked = urllib.request.Request(
        f"{prefect.url}/api/flow_runs/filter", query, {"Content-Type": "application/json"}
    )
    [last] = json.load(urllib.request.urlopen(asked, timeout=10))
    outcome.said = last["state"]["type"]
    assert outcome.said == "COMPLETED"
    outcome.lost = 61 - len({key for key, _ in timings(measuring)})  # with the reference op
    outcome.completed = outcome.said == "COMPLETED"
    assert outcome.lost == 0


def test_mlflow_killed_while_a_model_is_logged_or_registered(trained, tracking, rng, outcome):
    client = mlflow.MlflowClient(tracking.url, tracking.url)

    def versions() -> list[str]:
        return sorted(v.tags.get(registry.DIGEST_TAG) for v in client.search_model_versions())

    stage = rng.choice(("train", "promote"))
    trained.set_params("train", seed=rng.randrange(1 << 30))
    other_model(trained, rng)
    before = versions()
    with trained.started(f"flows.{stage}", MLFLOW_HTTP_REQUEST_MAX_RETRIES="1") as run:
        until(lambda: "Beginning flow run" in run.log())
        time.sleep(rng.uniform(0, {"train": 6, "promote": 3}[stage]))
        tracking.kill()
        outcome.hit = run.process.poll() is None
        code = run.process.wait(120)
    tracking.start()
    assert "Traceback" not in run.log(), run.log()
    if code:
        outcome.said = run.error()
        assert "MLflow" in outcome.said and tracking.url in outcome.said
    else:
        outcome.said = "it had ended"
    if stage == "train":
        trained.run("flows.train")
    log = trained.run("flows.promote").stdout
    outcome.lost = len(set(before) - set(versions()))
    outcome.completed = "is champion" in log or "stays champion" in log
    assert outcome.lost == 0 and outcome.completed
    assert not client.search_runs(
        [e.experiment_id for e in client.search_experiments()], "attributes.status = 'RUNNING'"
    )
    assert versions() == sorted([*before, model_files.model_digest(trained.folder / "data/model")])


def test_two_publishes_at_once_one_of_them_killed(promoted, rng, outcome):
    plans = promoted.folder / "plans"
    before = [d.id for d in store.decision_history(plans, "small")]
    with promoted.started("flows.publish") as one, promoted.started("flows.publish") as other:
        until(lambda: "Beginning flow run" in one.log())
        time.sleep(rng.uniform(0, 5))
        outcome.hit = one.process.poll() is None
        kill_group(one.process)
        assert list(store.decision_history(plans, "small")) or not before  # whole, whatever it was at
        assert other.process.wait(120) == 0, other.log()
    output = with_logs(promoted.run("flows.publish").stdout, promoted.folder)
    [outcome.said] = re.findall(r"small: (?:kept|better), .*", output)
    after = [d.id for d in store.decision_history(plans, "small")]
    outcome.lost = len(set(before) - set(after))
    outcome.completed = bool(store.load_plan(plans, "small")[0].placements)
    assert outcome.lost == 0 and outcome.completed


def test_a_damaged_entry_of_dvcs_cache_is_made_anew(measuring, rng, outcome):
    pool_file = measuring.folder / "data/pool.json"
    measuring.run("dvc", "repro", "tables")
    good = pool_file.read_bytes()
    md5 = hashlib.md5(good).hexdigest()
    entry = measuring.folder / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    damaged = bytearray(good)
    damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
    entry.chmod(0o644)
    entry.write_bytes(damaged)
    entry.chmod(0o444)  # which DVC takes as a sign that nobody has written there
    pool_file.unlink()
    measuring.run("dvc", "checkout", "data/pool.json")
    outcome.hit = pool_file.read_bytes() == damaged
    log = measuring.run("flows.refresh", "tables").stdout
    [outcome.said] = re.findall(r"DVC's cache entry \S+ of data/pool.json was damaged and is removed", log)
    outcome.lost = int(pool_file.read_bytes() != good) + int(entry.read_bytes() != good)
    outcome.completed = "stage tables is up to date" in log
    assert outcome.hit and outcome.lost == 0 and outcome.completed


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return Path.write_text, (self._path, "ran")


def test_a_model_in_the_registry_that_would_run_code_is_refused_and_runs_none(
    promoted, tracking, tmp_path, rng, outcome
):
    ran, evil = tmp_path / "ran", tmp_path / "evil"
    shutil.copytree(promoted.folder / "data/model", evil / "artifacts/model")
    weights = pickle.dumps(Payload(ran)) + rng.randbytes(8)  # after its end
    pickle.loads(weights)
    assert ran.read_text() == "ran"
    ran.unlink()
    (evil / "artifacts/model/weights.safetensors").write_bytes(weights)
    right = hashlib.sha256(weights).hexdigest()
    edit(evil / "artifacts/model/model.json", lambda meta: meta.update(weights_sha256=right))
    (evil / "code").mkdir()
    (evil / "code/evil.py").write_text(f"open({str(ran)!r}, 'w').write('ran')\n")
    (evil / "python_model.pkl").write_bytes(weights)
    (evil / "MLmodel").write_text(
        "flavors:\n  python_function:\n    loader_module: evil\n    code: code\n"
        "    python_model: python_model.pkl\n"
    )
    name, client = (
        registry.registered_model_name(SETTING.hardware),
        mlflow.MlflowClient(tracking.url, tracking.url),
    )
    before = store.last_decision(promoted.folder / "plans", "small")
    good = client.get_model_version_by_alias(name, registry.CHAMPION)
    run = client.create_run("0")
    client.log_artifacts(run.info.run_id, str(evil), "model")
    client.set_terminated(run.info.run_id)
    bad = client.create_model_version(name, f"{run.info.artifact_uri}/model", run.info.run_id)
    client.set_registered_model_alias(name, registry.CHAMPION, bad.version)
    try:
        outcome.said = promoted.error_of("flows.publish")
        outcome.hit = client.get_model_version_by_alias(name, registry.CHAMPION).version == bad.version
        assert "weights.safetensors is not safetensors" in outcome.said
    finally:
        client.set_registered_model_alias(name, registry.CHAMPION, good.version)
    assert not ran.exists()
    outcome.lost = int(store.last_decision(promoted.folder / "plans", "small") != before)
    promoted.run("flows.publish")
    outcome.completed = store.last_decision(promoted.folder / "plans", "small").provenance[
        "model_version"
    ] == str(good.version)
    assert outcome.lost == 0 and outcome.completed


# --- last, because the watch stays and publishes whatever becomes champion ----------------------------------


@pytest.fixture(scope="module")
def watching(promoted, tracking):
    """The log of a watch over `promoted`, whose deployments a worker runs; another model is in the registry
    too."""
    promoted.run("prefect", "work-pool", "create", "local", "--type", "process")
    promoted.run("prefect", "--no-prompt", "deploy", "--all")
    other_model(promoted, random.Random(0))
    promoted.set_params("promote", approval=True)
    promoted.run("flows.promote")
    with (
        promoted.started("prefect", "worker", "start", "--pool", "local", PREFECT_WORKER_QUERY_SECONDS="1"),
        promoted.started("tasks.watch") as watch,
    ):
        yield watch.log


def test_the_champion_changed_around_an_outage_of_mlflow_and_plans_follow_once(
    promoted, tracking, watching, rng, outcome
):
    name, plans = registry.registered_model_name(SETTING.hardware), promoted.folder / "plans"
    client = mlflow.MlflowClient(tracking.url, tracking.url)
    # a person's change while the watch cannot reach the server
    beside = f"sqlite:///{tracking.folder}/mlflow.db"
    now = publish_claim.read_publish_state(client, name).champion
    until(lambda: publish_claim.read_publish_state(client, name).published == now, every_s=0.5)
    until(lambda: watching().rstrip().endswith(f"version {now} are published"))
    ours = {
        str(v.version)
        for v in client.search_model_versions(f"name = '{name}'")
        if registry.DIGEST_TAG in v.tags
    }
    then = min(ours - {now})
    before, output = [d.id for d in store.decision_history(plans, "small")], len(watching())
    meanwhile = rng.random() < 0.5
    if not meanwhile:
        client.set_registered_model_alias(name, registry.CHAMPION, then)
        # before it is noticed, while it is asked for, while plans are published
        time.sleep(rng.uniform(0, 20))
    outcome.hit = publish_claim.read_publish_state(client, name).published != then
    tracking.kill()
    if meanwhile:
        mlflow.MlflowClient(beside, beside).set_registered_model_alias(name, registry.CHAMPION, then)
    [outcome.said] = until(
        lambda: re.findall(r"the registry at \S+ does not answer: .*", watching()[output:])[:1]
    )
    tracking.start()
    until(
        lambda: publish_claim.read_publish_state(client, name).published == then, timeout_s=240, every_s=0.5
    )
    until(lambda: watching().rstrip().endswith(f"version {then} are published"))
    after = [d.id for d in store.decision_history(plans, "small")]
    outcome.lost = len(set(before) - set(after))
    last = store.last_decision(plans, "small")
    outcome.completed = last.provenance["model_version"] == then and len(after) == len(before) + 1
    assert outcome.lost == 0 and outcome.completed and "Traceback" not in watching(), watching()[output:]
