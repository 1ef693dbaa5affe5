"""Deployments, and what follows when somebody changes the champion: flows in this process, and (`long`) a
worker and the watch.

One project, whose models are of known laws, so nothing has to be measured.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from unittest import mock

import pytest
import yaml
from job_folders import traced_step
from laws import SETTING, cache_law, comm_samples, compute_samples, linear_law, pool
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flows import load_flow_from_entrypoint
from prefect.logging import disable_run_logger
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.states import Completed, Crashed
from scratch import kill_group, until

from flows.promote import promote
from flows.publish import publish
from flows.refresh import refresh
from shardcore.core.errors import ShardCoreError, Unreachable
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem
from shardcore.cost import fit, neural
from shardcore.io import dataset, files, traced_samples, writing
from shardcore.plans import store
from shardcore.search import Budget
from shardcore.search.explain import explain
from tasks import publish_claim, registry, watch
from tasks.refresh import reproduce_stage

pytestmark = pytest.mark.long
NAMES = ("one", "two")
LATER = 4e9
SAMPLES = {law: compute_samples(law, 120) for law in (linear_law, cache_law)}


def write_model(folder, law, seed=0):
    neural.save(
        fit.train(SAMPLES[law], comm_samples(20), SETTING, fit.FitConfig(epochs=20, seed=seed)).model, folder
    )


@pytest.fixture(scope="module")
def project(new_project):
    """A project with measurements, a model, and two problems, for which the models of the two laws find other
    plans; deployed."""
    made = new_project()
    made.set_params("setting", hardware=SETTING.hardware, batch=SETTING.batch)
    made.set_params("publish", threshold=0.0)
    measured = made.folder / "data/measurements"
    dataset.write_compute_samples(measured, SAMPLES[linear_law], dataset.write_pool(measured, pool()))
    dataset.write_collective_samples(measured, comm_samples(20))
    files.write_pool(made.folder / "data/pool.json", pool())
    for name, some in zip(NAMES, (pool()[:9], pool()[6:]), strict=True):
        problem = Problem(name, tuple(some), Topology((Device(1 << 28),) * 2), SETTING.batch)
        files.write_problem(made.folder / f"problems/{name}.json", problem)
    return made


@pytest.fixture(scope="module")
def api(project):
    """A client of the server, which this process uses too; the project's deployments are there."""
    settings = {
        PREFECT_API_URL: project.env["PREFECT_API_URL"],
        PREFECT_LOGGING_TO_API_ENABLED: False,
        PREFECT_API_AUTH_STRING: project.env["PREFECT_API_AUTH_STRING"],
    }
    with temporary_settings(settings), get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="local", type="process"), overwrite=True)
        project.run("prefect", "--no-prompt", "deploy", "--all")
        yield client


@pytest.fixture
def inside(project, api):
    """This process runs flows and looks, in the project's folder, as a command there would, but explains
    plans in short; a client of its registry."""
    with (
        contextlib.chdir(project.folder),
        mock.patch.dict(os.environ, project.env),
        mock.patch("shardcore.plans.publisher._EXPLAIN", Budget(evals=100)),
    ):
        watch._model_name_at.cache_clear()
        yield registry.connect_to_mlflow()


@pytest.fixture(scope="module")
def worker(project, api):
    with project.started(
        "prefect", "worker", "start", "--pool", "local", PREFECT_WORKER_QUERY_SECONDS="1"
    ) as run:
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
    if not (project.folder / law.__name__).exists():
        write_model(project.folder / law.__name__, law)
    here = {"MLFLOW_TRACKING_URI": project.env["MLFLOW_TRACKING_URI"]}
    with contextlib.chdir(project.folder), mock.patch.dict(os.environ, here):
        registry.connect_to_mlflow()
        return str(
            registry.register_model(
                client, project.folder / law.__name__, None, {"data_version": law.__name__}
            ).version
        )


def published(project, client, name, version):
    """Waits until plans are published under a version; the problems' current plans and the last decisions."""
    until(lambda: publish_claim.read_publish_state(client, name).published == version, every_s=1.0)
    return {
        n: (store.load_plan(project.folder / "plans", n)[0], store.last_decision(project.folder / "plans", n))
        for n in NAMES
    }


def test_deployments_are_of_one_pool_with_checked_parameters(project, api):
    for flow in ("refresh", "promote", "publish", "job"):
        found = api.read_deployment_by_name(f"{flow}/local")
        # Runs wait for those of the other deployments, too: the pool has the limit.
        assert found.work_pool_name == "local" and found.global_concurrency_limit is None
        assert found.description and "shardcore" in found.tags
        assert load_flow_from_entrypoint(found.entrypoint).name == flow
        assert all(p.get("description") for p in found.parameter_openapi_schema["properties"].values())
    refresh = api.read_deployment_by_name("refresh/local")
    assert [(s.slug, s.active) for s in refresh.schedules] == [("nightly", False)]
    for wrong in ({"target": "trains"}, {"push": "perhaps"}, {"overrides": {"train": 3}}):
        with pytest.raises(PrefectHTTPStatusError, match="Validation failed"):
            api.create_flow_run_from_deployment(refresh.id, parameters=wrong)


def test_the_run_of_a_change_is_asked_for_once_and_again_where_it_failed(project, api):
    state, output = publish_claim.PublishState("m", "7", "6", 12.5), []
    there = len(runs(api, "publish"))
    for crashed in range(watch.ATTEMPTS):
        for _ in range(2):
            # no worker takes it
            assert watch.request_publishing(state, LATER).endswith(("is Scheduled", "is Late"))
        [run] = [r for r in runs(api, "publish") if not r.state.is_final()]
        assert "watch" in run.tags and len(runs(api, "publish")) == there + crashed + 1
        api.set_flow_run_state(run.id, Crashed(), force=True)
        ended = api.read_flow_run(run.id).state.timestamp.timestamp()
        output.append(watch.request_publishing(state, ended + watch.RETRY_S * (crashed + 1) - 5))
        if crashed + 1 < watch.ATTEMPTS:
            assert output[-1].endswith(f"run {run.name!r} ended Crashed; another one follows")
    assert "the last of 3; once that is mended, `prefect deployment run publish/local`" in output[-1]
    for run in runs(api, "publish"):
        api.delete_flow_run(run.id)


def test_a_run_that_ends_after_the_state_was_read_is_not_asked_for_again(project, api):
    state, there = publish_claim.PublishState("m", "7", "6", 13.5), len(runs(api, "publish"))
    watch.request_publishing(state, LATER)
    [run] = [r for r in runs(api, "publish") if not r.state.is_final()]
    api.set_flow_run_state(run.id, Completed(), force=True)
    ended = api.read_flow_run(run.id).state.timestamp.timestamp()
    assert watch.request_publishing(state, ended - 0.5).endswith("has just ended Completed")
    assert len(runs(api, "publish")) == there + 1
    api.delete_flow_run(run.id)


# --- who changes the champion: one run for each change ------------------------------------------------------


class Changes:
    """A registered model of its own with three versions (no files: the watch reads none), and who sets its
    champion."""

    def __init__(self, client, folder, name):
        self.client, self.name = client, name
        client.create_registered_model(self.name)
        self.versions = [client.create_model_version(self.name, str(folder)) for _ in range(3)]

    def champion(self, number):
        self.client.set_registered_model_alias(self.name, registry.CHAMPION, str(number))

    def published(self, number):
        """Publish as a run does. Returns the line of the watch meanwhile."""
        with publish_claim.claimed_publishing(self.client, self.versions[number - 1]):
            return watch.check_registry_once()


@pytest.fixture
def changes(inside, tmp_path):
    """Changes of a champion, in an empty folder without measurements."""
    hardware = f"machine-{uuid.uuid4()}"
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"setting": {"hardware": hardware}}))
    with contextlib.chdir(tmp_path):
        watch._model_name_at.cache_clear()
        yield Changes(inside, tmp_path, registry.registered_model_name(hardware))


def test_each_change_of_the_champion_is_published_once_whoever_made_it(api, changes):
    """Set, set to another version, and set back: which is another change, though the version was published
    before."""
    there = {r.id for r in runs(api, "publish")}

    def asked():
        return [r for r in runs(api, "publish") if r.id not in there]

    what = f"plans under {changes.name} version"
    assert watch.check_registry_once() == f"{changes.name} has no champion yet" and not asked()
    for n, version in enumerate((1, 2, 1, 3), 1):
        changes.champion(version)
        for _ in range(2):  # another look, or another watch: nothing is remembered here
            assert watch.check_registry_once().startswith(f"{what} {version}: run ") and len(asked()) == n
        assert changes.published(version) == f"{what} {version} are being published"
        [run] = [r for r in asked() if not r.state.is_final()]
        api.set_flow_run_state(run.id, Completed(), force=True)
        assert watch.check_registry_once() == f"{what} {version} are published" and len(asked()) == n
        changes.champion(version)  # the same again is no change
        assert watch.check_registry_once() == f"{what} {version} are published" and len(asked()) == n
    changes.champion(2)
    changes.champion(3)  # set back before anybody looked
    assert watch.check_registry_once() == f"{what} 3 are published" and len(asked()) == 4
    assert all("watch" in r.tags for r in asked())


def test_a_change_while_plans_are_published_is_published_after_them(api, changes):
    there = len(runs(api, "publish"))
    changes.champion(1)
    with publish_claim.claimed_publishing(changes.client, changes.versions[0]):
        assert watch.check_registry_once().endswith("version 1 are being published")
        changes.champion(2)
        assert watch.check_registry_once().endswith(
            "version 2 follow those under version 1, which are being published"
        )
    assert len(runs(api, "publish")) == there
    for _ in range(2):
        assert "version 2: run " in watch.check_registry_once() and len(runs(api, "publish")) == there + 1
    changes.champion(3)
    for until_s, asked in ((time.time() + 60, there + 1), (time.time() - 1, there + 2)):  # by who was killed
        claim = json.dumps({"version": "3", "until": until_s})
        changes.client.set_registered_model_tag(changes.name, publish_claim.PUBLISHING, claim)
        watch.check_registry_once()
        assert len(runs(api, "publish")) == asked
    for run in runs(api, "publish"):
        api.delete_flow_run(run.id)


def test_the_watch_says_what_does_not_answer_and_looks_again(api, changes, monkeypatch):
    changes.champion(3)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
        assert watch.check_registry_once().startswith(
            "Prefect at http://127.0.0.1:9/api cannot run publish/local: "
        )
    monkeypatch.undo()
    assert ": run " in watch.check_registry_once()
    for run in runs(api, "publish"):
        api.delete_flow_run(run.id)


# --- flows --------------------------------------------------------------------------------------------------


def decisions(project, name="one"):
    return list(store.decision_history(project.folder / "plans", name))


def test_a_champion_set_by_hand_is_what_publish_uses_and_set_back_its_plans_are_restored(project, inside):
    name = registry.registered_model_name(SETTING.hardware)
    versions = [registered(project, inside, law) for law in (linear_law, cache_law)]
    plans = []
    for version in (versions[0], versions[1], versions[0]):
        inside.set_registered_model_alias(name, registry.CHAMPION, version)
        publish()
        state = publish_claim.read_publish_state(inside, name)
        assert state.published == state.champion == version and state.publishing is None
        assert abs(state.at - time.time()) < 600
        plans.append({n: store.load_plan(project.folder / "plans", n)[0] for n in NAMES})
    assert plans[2] == plans[0] and all(
        set(plans[0][n].placements) != set(plans[1][n].placements) for n in NAMES
    )
    for n in NAMES:
        back, other, first = decisions(project, n)
        assert [d.outcome for d in (first, other, back)] == ["first", "better", "restored"]
        assert [d.provenance["model_version"] for d in (first, other, back)] == [*versions, versions[0]]
        assert other.previous_ms > other.candidate_ms > 0  # both under the second model
        assert {"model", "data_version", "git_commit", "algorithm", "budget_evals", "seed"} <= set(
            plans[0][n].provenance
        )
    assert "| one |" in (project.folder / "plans/report.md").read_text()
    assert "<h1>shardcore-cost-" in (project.folder / "plans/models.html").read_text()


@pytest.fixture
def champion(project, inside):
    """Its version; plans may be published under it or not."""
    version = registered(project, inside, linear_law)
    inside.set_registered_model_alias(
        registry.registered_model_name(SETTING.hardware), registry.CHAMPION, version
    )
    return version


def test_a_problem_that_cannot_be_planned_is_named_and_the_others_are_published(
    project, inside, champion, monkeypatch
):
    good = files.read_problem(project.folder / "problems/one.json")
    bad = {
        "too-big": {"topology": Topology((Device(1 << 16),) * 2)},
        "other-batch": {"global_batch": 1 << 20},
        "one": {},
        "report.md": {},
        "odd": {},
    }

    def explained(priced, problem, *rest):
        if problem.name == "odd":
            raise ZeroDivisionError("of a defect in the code")
        return explain(priced, problem, *rest)

    monkeypatch.setattr("shardcore.plans.publisher.explain", explained)
    made = []
    for file, (name, fields) in enumerate(bad.items()):
        made.append(project.folder / f"problems/z{file}.json")
        files.write_problem(made[-1], dataclasses.replace(good, name=name, **fields))
    name = registry.registered_model_name(SETTING.hardware)
    inside.delete_registered_model_tag(name, publish_claim.PUBLISHED)
    try:
        with pytest.raises(ShardCoreError) as error:
            publish()
    finally:
        for path in made:
            path.unlink()
    output = str(error.value)
    assert re.match(
        r"5 of 7 problems have no new plan: problems/z0.json: problem 'too-big' does not fit.* "
        r"report.md and the log say why also of z1, z2, z3 \.\.\.$",
        output,
    ), output
    assert all(store.load_plan(project.folder / "plans", n)[0].placements for n in NAMES)
    report = (project.folder / "plans/report.md").read_text()
    for reason in (
        "'too-big' does not fit",
        "batch 1048576",
        "is named 'one' too",
        "'report.md' has the name of the file beside",
        "ZeroDivisionError('of a defect in the code')",
    ):
        assert reason in report
    assert "| one |" in report and "| two |" in report
    assert (
        publish_claim.read_publish_state(inside, name).published == champion
    )  # every problem was gone through


def test_plans_that_a_store_did_not_take_do_not_count_as_published(project, inside, champion, monkeypatch):
    def not_taken(*_):
        raise Unreachable("s3://plans did not answer")

    name = registry.registered_model_name(SETTING.hardware)
    inside.delete_registered_model_tag(name, publish_claim.PUBLISHED)
    monkeypatch.setattr("shardcore.plans.publisher.Publisher.publish", not_taken)
    with pytest.raises(ShardCoreError, match="problems/one.json: s3://plans did not answer"):
        publish()
    found = publish_claim.read_publish_state(inside, name)
    assert found.published is None and found.is_due(time.time())


def test_some_problems_or_plans_elsewhere_are_not_on_record(project, inside, champion):
    name = registry.registered_model_name(SETTING.hardware)
    inside.set_registered_model_tag(name, publish_claim.PUBLISHED, '{"version": "of before", "at": 1.0}')
    before = publish_claim.read_publish_state(inside, name)
    with pytest.raises(
        ShardCoreError, match="1 of 2 problems have no new plan: none.json: cannot read none.json"
    ):
        publish(problems=["problems/one.json", "none.json"], plans="elsewhere")
    assert store.load_plan(project.folder / "elsewhere", "one")[0].placements
    publish(problems=["problems/one.json"])
    publish(plans="elsewhere")
    assert publish_claim.read_publish_state(inside, name) == before and store.published_problem_names(
        project.folder / "elsewhere"
    ) == sorted(NAMES)


def test_a_refresh_that_promotes_publishes_itself_and_commits_what_it_pushed(
    project, api, inside, monkeypatch
):
    """Parameters overridden, data pushed, dvc.lock and params.yaml committed, promoted, published."""
    name = registry.registered_model_name(SETTING.hardware)
    git = ["git", "-C", str(project.folder)]
    write_model(project.folder / "data/model", linear_law, seed=1)
    for stage in yaml.safe_load((project.folder / "dvc.yaml").read_text())["stages"].values():
        for out in (
            project.folder / next(iter([o] if isinstance(o, str) else o))
            for kind in ("outs", "metrics", "plots")
            for o in stage.get(kind, ())
        ):
            if not out.exists():
                writing.write_atomic(out if out.suffix else out / "part.json", b"{}")
    project.run("dvc", "commit", "--force")  # so all of it counts as made by the stages
    project.run("dvc", "remote", "add", "--default", "store", str(project.folder / "remote"))
    for key, value in (("name", "t"), ("email", "t@example.org")):
        subprocess.run([*git, "config", f"user.{key}", value], check=True)
    before = len(runs(api, "publish"))
    project.edit("README.md")  # somebody's, which stays theirs
    seen = []

    def publish_after_a_look():
        """The watch looks between promotion and publishing."""
        seen.append(watch.check_registry_once())
        return publish()

    # The name flows.refresh is taken by the flow, so reach its module through it.
    monkeypatch.setitem(refresh.fn.__globals__, "publish", publish_after_a_look)
    done = refresh(overrides={"promote": {"may_lose": 100.0}}, push=True)
    assert all(n in done for n in NAMES)
    assert len(seen) == 1 and seen[0].endswith("are being published")
    state = publish_claim.read_publish_state(inside, name)
    assert (
        state.champion
        == state.published
        == str(registry.find_version(inside, name, registry.CHALLENGER).version)
    )
    assert watch.check_registry_once().endswith(f"version {state.champion} are published")
    assert len(runs(api, "publish")) == before  # the watch had nothing to do
    assert yaml.safe_load((project.folder / "params.yaml").read_text())["promote"] == {"may_lose": 100.0}
    changed = subprocess.check_output([*git, "show", "--name-only", "--format=%s", "HEAD"], text=True).split(
        "\n"
    )
    assert changed[0] == "Refresh of stage evaluate" and set(changed[1:]) - {""} == {
        "dvc.lock",
        "params.yaml",
    }
    lock = yaml.safe_load(subprocess.check_output([*git, "show", "HEAD:dvc.lock"], text=True))
    [md5] = (out["md5"] for out in lock["stages"]["tables"]["outs"])
    pushed = project.folder / "remote/files/md5" / md5[:2] / md5[2:]
    assert pushed.read_bytes() == (project.folder / "data/pool.json").read_bytes()
    [page] = [a for a in api.read_artifacts() if a.key == "refresh" and "promote.may_lose" in a.data]
    assert "nothing changed" in page.data and all(n in page.data for n in NAMES)
    assert promote() == state.champion  # again: nothing changes, and the page says so
    pages = [a.data for a in api.read_artifacts() if a.key == "promotion"]
    assert any(f"version {state.champion} is champion already" in page for page in pages)


def test_repro_says_which_stages_ran_and_why_one_failed(api, tmp_path):
    stages = {
        "tables": {"cmd": "echo 1 > pool", "outs": ["pool"]},
        "measure": {"cmd": "true", "deps": ["pool"]},
        "train": {"cmd": "echo 'error: 7 is too few'; false", "deps": ["pool"]},
    }
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    (tmp_path / "params.yaml").write_text("{}")
    with contextlib.chdir(tmp_path), disable_run_logger():
        subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], check=True)
        first, again = ([(s.stage, s.ran) for s in reproduce_stage.fn("measure")] for _ in range(2))
        assert first[0] == ("tables", True) and first[1][0] == "measure" and again[0] == ("tables", False)
        with pytest.raises(ShardCoreError, match="^7 is too few$"):
            reproduce_stage.fn("train")
        with pytest.raises(
            ShardCoreError, match="stage 'all' is not known; there are tables, measure, train, evaluate"
        ):
            reproduce_stage.fn("all")


# --- all of it at once, with a worker and the watch ---------------------------------------------------------


def test_whoever_sets_the_champion_plans_follow_once(project, api, worker, request):
    client, name = project.mlflow(), registry.registered_model_name(SETTING.hardware)
    ours, other = (registered(project, client, law) for law in (linear_law, cache_law))
    for run in runs(api, "publish"):
        api.delete_flow_run(run.id)
    client.set_registered_model_tag(name, publish_claim.PUBLISHED, "{}")
    shutil.rmtree(project.folder / "plans", ignore_errors=True)
    with project.started("tasks.watch") as killed:
        client.set_registered_model_alias(name, "champion", ours)
        first = published(project, client, name, ours)
        client.set_registered_model_alias(name, "champion", other)
        until(lambda: f"version {other}" in killed.log())
        kill_group(killed.process)  # it has asked for the run, and says no more
    watching = request.getfixturevalue("watching")
    index = (project.folder / "plans/index.html").read_text()
    for problem, (_, decision) in first.items():
        page = f"{problem}/versions/{decision.current}/report.html"
        assert f'href="{page}"' in index and (project.folder / "plans" / page).exists()
    second = published(project, client, name, other)
    assert all(set(second[n][0].placements) != set(first[n][0].placements) for n in NAMES)
    client.set_registered_model_alias(name, "champion", ours)
    third = published(project, client, name, ours)
    until(lambda: f"version {ours} are published" in watching.log())
    for n in NAMES:
        assert third[n][0] == first[n][0] and third[n][1].outcome == "restored"
        assert (
            second[n][0].provenance["model_version"] == other
            and third[n][0].provenance["model_version"] == ours
        )
        assert {"model", "data_version", "git_commit", "algorithm", "budget_evals", "seed"} <= set(
            third[n][0].provenance
        )
    until(lambda: all(r.state.is_final() for r in runs(api, "publish")), every_s=0.5)
    assert [(r.state.name, "watch" in r.tags) for r in runs(api, "publish")] == [("Completed", True)] * 3


def test_a_running_job_corrects_the_champion_and_plans_of_all_problems_follow(project, api, worker, request):
    client, name = project.mlflow(), registry.registered_model_name(SETTING.hardware)
    ours = registered(project, client, linear_law)
    request.getfixturevalue("watching")
    client.set_registered_model_alias(name, "champion", ours)
    published(project, client, name, ours)
    traced_step(project.folder / "dlrm")
    asked = api.create_flow_run_from_deployment(
        api.read_deployment_by_name("job/local").id, parameters={"folder": "dlrm", "plans": "plans"}
    )
    until(lambda: api.read_flow_run(asked.id).state.is_final(), every_s=0.5)
    assert api.read_flow_run(asked.id).state.name == "Completed", worker.log()[-3000:]
    # A version like others, with the job and its traces on record.
    corrected = client.get_model_version_by_alias(name, "champion")
    assert str(corrected.version) != ours and corrected.tags["job.steps"] == "dlrm-00001000"
    assert corrected.tags["gate"].startswith("passed, error") and f"champion {ours}" in corrected.tags["gate"]
    plan, _ = store.load_plan(project.folder / "plans", "dlrm")
    assert plan.provenance["model_version"] == str(corrected.version)
    published(project, client, name, str(corrected.version))
    assert "<svg" in (project.folder / "data/jobs/dlrm/job.html").read_text()
    [run] = client.search_runs(
        [client.get_experiment_by_name("shardcore").experiment_id], "tags.stage = 'job'"
    )
    assert run.data.metrics["measured_ms"] == 18.0
    # What the job showed joins the next training.
    assert traced_samples.traced_settings(project.folder / "datasets/jobs") == [SETTING]
    [page] = [a for a in api.read_artifacts() if a.key == "job"]
    assert "step 18.0 ms measured" in page.data
    assert "no new traced step" in project.run("flows.job", "dlrm").stdout
