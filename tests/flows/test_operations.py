"""Deployments, and what follows when somebody changes the champion: a server, a worker and the watch, on one project.

Its models are of known laws, so nothing has to be measured.
"""

import contextlib
import os
import subprocess
from unittest import mock

import pytest
import yaml
from laws import SETTING, cache_law, comm_samples, compute_samples, linear_law, pool
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed
from scratch import kill_group, until

from shardcore import dataset, files, store
from shardcore.cost import fit, neural
from shardcore.types import Device, Problem, Topology
from tasks import publication, registry, watch

NAMES = ("one", "two")
LATER = 4e9
SAMPLES = {law: compute_samples(law, 120) for law in (linear_law, cache_law)}


def write_model(folder, law, seed=0):
    neural.save(fit.train(SAMPLES[law], comm_samples(20), SETTING, fit.FitConfig(epochs=2, seed=seed)).model, folder)


@pytest.fixture(scope="module")
def project(new_project):
    """A project with measurements, a model, and two problems, for which the models of the two laws find other plans; deployed."""
    made = new_project()
    made.set_params("setting", hardware=SETTING.hardware, batch=SETTING.batch)
    made.set_params("publish", threshold=0.0)
    measured = made.folder / "data/measurements"
    dataset.write_compute(measured, SAMPLES[linear_law], dataset.write_pool(measured, pool()))
    dataset.write_comm(measured, comm_samples(20))
    files.write_pool(made.folder / "data/pool.json", pool())
    for name, some in zip(NAMES, (pool()[:9], pool()[9:]), strict=True):
        problem = Problem(name, tuple(some), Topology((Device(1 << 28),) * 2), SETTING.batch)
        files.write_problem(made.folder / f"problems/{name}.json", problem)
    return made


@pytest.fixture(scope="module")
def api(project):
    """A client of the server, which this process uses too; the project's deployments are there."""
    settings = {PREFECT_API_URL: project.env["PREFECT_API_URL"]}
    with temporary_settings(settings), get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="local", type="process"))
        project.run("prefect", "--no-prompt", "deploy", "--all")
        yield client


@pytest.fixture(scope="module")
def worker(project, api):
    with project.started("prefect", "worker", "start", "--pool", "local", PREFECT_WORKER_QUERY_SECONDS="1") as run:
        yield run


@pytest.fixture(scope="module")
def watching(project, worker):
    with project.started("tasks.watch") as run:
        yield run


def runs(api, flow):
    """The runs of a flow's deployment."""
    deployment = api.read_deployment_by_name(f"{flow}/local").id
    return api.read_flow_runs(deployment_filter=DeploymentFilter(id={"any_": [deployment]}))


def registered(project, client, law):
    """The version of a law's model."""
    write_model(project.folder / law.__name__, law)
    here = {"MLFLOW_TRACKING_URI": project.env["MLFLOW_TRACKING_URI"]}
    with contextlib.chdir(project.folder), mock.patch.dict(os.environ, here):
        registry.connect()
        return str(registry.register(client, project.folder / law.__name__, None, {"data_version": law.__name__}).version)


def published(project, client, name, version):
    """Waits until plans are published under a version; the problems' current plans and the last decisions."""
    until(lambda: publication.read(client, name).published == version, every_s=1.0)
    return {n: (store.load_plan(project.folder / "plans", n)[0], store.last(project.folder / "plans", n)) for n in NAMES}


def test_deployments_run_once_at_a_time_with_checked_parameters(project, api):
    for flow in ("refresh", "promote", "publish"):
        found = api.read_deployment_by_name(f"{flow}/local")
        assert found.global_concurrency_limit.limit == 1 and found.concurrency_options.collision_strategy == "ENQUEUE"
        assert found.description and "shardcore" in found.tags
        assert all(p.get("description") for p in found.parameter_openapi_schema["properties"].values())
    refresh = api.read_deployment_by_name("refresh/local")
    assert [(s.slug, s.active) for s in refresh.schedules] == [("nightly", False)]
    for wrong in ({"target": "trains"}, {"push": "perhaps"}, {"overrides": {"train": 3}}):
        with pytest.raises(PrefectHTTPStatusError, match="Validation failed"):
            api.create_flow_run_from_deployment(refresh.id, parameters=wrong)


def test_the_run_of_a_change_is_asked_for_once_and_again_where_it_failed(project, api):
    state, said = publication.Publication("m", "7", "6", 12.5), []
    for crashed in range(watch.ATTEMPTS):
        for _ in range(2):
            assert watch.publish_once(state, LATER).endswith("is Scheduled")
        [run] = [r for r in runs(api, "publish") if not r.state.is_final()]
        assert "watch" in run.tags and len(runs(api, "publish")) == crashed + 1
        api.set_flow_run_state(run.id, Crashed(), force=True)
        ended = api.read_flow_run(run.id).state.timestamp.timestamp()
        said.append(watch.publish_once(state, ended + watch.RETRY_S * (crashed + 1) - 5))
        if crashed + 1 < watch.ATTEMPTS:
            assert said[-1].endswith(f"run {run.name!r} ended Crashed; another one follows")
    assert "the last of 3; once that is mended, `prefect deployment run publish/local`" in said[-1]
    for run in runs(api, "publish"):
        api.delete_flow_run(run.id)


@pytest.mark.long
def test_whoever_sets_the_champion_plans_follow_once(project, api, worker, request):
    client, name = project.mlflow(), registry.model_name(SETTING.hardware)
    for version, law in (("1", linear_law), ("2", cache_law)):
        assert registered(project, client, law) == version
    with project.started("tasks.watch") as killed:
        client.set_registered_model_alias(name, "champion", "1")
        first = published(project, client, name, "1")
        client.set_registered_model_alias(name, "champion", "2")
        until(lambda: "version 2" in killed.log())
        kill_group(killed.process)  # it has asked for the run, and says no more
    watching = request.getfixturevalue("watching")
    second = published(project, client, name, "2")
    assert all(set(second[n][0].placements) != set(first[n][0].placements) for n in NAMES)
    client.set_registered_model_alias(name, "champion", "1")
    third = published(project, client, name, "1")
    until(lambda: "version 1 are published" in watching.log())
    for n in NAMES:
        assert third[n][0] == first[n][0] and third[n][1].outcome == "restored"
        assert second[n][0].provenance["model_version"] == "2" and third[n][0].provenance["model_version"] == "1"
        assert {"model", "data_version", "git_commit", "algorithm", "budget_evals", "seed"} <= set(third[n][0].provenance)
    until(lambda: all(r.state.is_final() for r in runs(api, "publish")), every_s=0.5)
    assert [(r.state.name, "watch" in r.tags) for r in runs(api, "publish")] == [("Completed", True)] * 3


def test_a_refresh_that_promotes_publishes_itself_and_commits_what_it_pushed(project, api, worker, watching):
    """A run of the deployment: parameters overridden, data pushed, dvc.lock and params.yaml committed, promoted, published."""
    client, name = project.mlflow(), registry.model_name(SETTING.hardware)
    git = ["git", "-C", str(project.folder)]
    write_model(project.folder / "data/model", linear_law, seed=1)
    for stage in yaml.safe_load((project.folder / "dvc.yaml").read_text())["stages"].values():
        for out in (project.folder / next(iter([o] if isinstance(o, str) else o))
                    for kind in ("outs", "metrics", "plots") for o in stage.get(kind, ())):
            if not out.exists():
                files.write_atomic(out if out.suffix else out / "part.json", b"{}")
    project.run("dvc", "commit", "--force")  # so all of it counts as made by the stages
    project.run("dvc", "remote", "add", "--default", "store", str(project.folder / "remote"))
    for key, value in (("name", "t"), ("email", "t@example.org")):
        subprocess.run([*git, "config", f"user.{key}", value], check=True)
    before = len(runs(api, "publish"))
    until(watching.log)
    done = project.run("prefect", "deployment", "run", "refresh/local", "-p", "push=true", "-p",
                       'overrides={"promote": {"may_lose": 100.0}}', "--watch", check=False)
    assert done.returncode == 0, worker.log()[-4000:]
    state = publication.read(client, name)
    assert state.champion == state.published == str(registry.find(client, name, registry.CHALLENGER).version)
    until(lambda: f"version {state.champion} are published" in watching.log())
    assert len(runs(api, "publish")) == before  # the watch had nothing to do
    assert yaml.safe_load((project.folder / "params.yaml").read_text())["promote"] == {"may_lose": 100.0}
    changed = subprocess.check_output([*git, "show", "--name-only", "--format=%s", "HEAD"], text=True).split("\n")
    assert changed[0] == "Refresh of stage evaluate" and set(changed[1:]) - {""} == {"dvc.lock", "params.yaml"}
    lock = yaml.safe_load(subprocess.check_output([*git, "show", "HEAD:dvc.lock"], text=True))
    [md5] = (out["md5"] for out in lock["stages"]["tables"]["outs"])
    pushed = project.folder / "remote/files/md5" / md5[:2] / md5[2:]
    assert pushed.read_bytes() == (project.folder / "data/pool.json").read_bytes()
    [page] = [a for a in api.read_artifacts() if a.key == "refresh"]
    assert "promote.may_lose" in page.data and "nothing changed" in page.data and all(n in page.data for n in NAMES)


def test_a_failed_run_says_so_and_some_problems_elsewhere_are_not_on_record(project, worker):
    client, name = project.mlflow(), registry.model_name(SETTING.hardware)
    before = publication.read(client, name)
    failed = project.run("prefect", "deployment", "run", "publish/local", "-p", 'problems=["problems/one.json", "none.json"]',
                         "-p", "plans=elsewhere", "--watch", check=False)
    assert failed.returncode == 1 and "Failed" in failed.stdout
    assert store.load_plan(project.folder / "elsewhere", "one")[0].placements
    assert publication.read(client, name) == before
