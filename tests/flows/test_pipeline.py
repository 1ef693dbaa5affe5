"""The whole pipeline at toy size, through DVC, Prefect, Ray and MLflow as a user runs them: what it builds,
keeps and refuses."""

import json
import re
import subprocess

import httpx
import pytest
import yaml
from scratch import TOY, with_logs

from flows.tables import TablesConfig, make_pool
from shardcore.core.types import Setting
from shardcore.io import dataset, files, replays
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.plans import store
from shardcore.search import SHARDERS

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def project(new_project):
    """A project with two problems, refreshed once; `log` in its folder holds what that printed."""
    made = new_project()
    pool = make_pool.fn(TablesConfig(**TOY["tables"]))
    for i in range(2):
        problem = draw_problem(pool, i, Setting("any", 64), 0, ProblemConfig(2, 8, 12, max_dim=32))
        files.write_problem(made.folder / f"problems/draw-{i}.json", problem)
    made.set_params("measure", step_samples=2)
    made.set_params("evaluate", replay_problems=1)
    made.set_params("promote", may_lose=1000.0)  # however busy the machine is
    commit = "git -c user.name=t -c user.email=t@example.org commit -qam asked".split()
    subprocess.run(commit, cwd=made.folder, env=made.env, check=True)
    (made.folder / "log").write_text(made.run("flows.refresh").stdout)
    return made


def measured_at(project):
    return {s.id: s.measured_at for s in dataset.read_compute_samples(project.folder / "data/measurements")}


def stale(project):
    """The stages that DVC would run."""
    return set(re.findall(r"^(\w+):$", project.run("dvc", "status").stdout, re.MULTILINE))


def stages_run(log):
    return set(re.findall(r"Running stage '(\w+)'", log))


def test_a_person_sees_stages_results_and_the_table_and_the_log_has_the_rest(project):
    shown = (project.folder / "log").read_text()
    # which there may be
    lines = [line for line in shown.splitlines() if not re.match(r" +\d+%  |  warning: ", line)]
    first, *_, last = lines
    assert re.match(r"refresh: every line of .* goes to logs/\S+-refresh-\d+\.log$", first)
    assert re.fullmatch(r"done in .*; log: " + re.escape(first.split()[-1]), last)
    heads = [line for line in lines if line.startswith("stage ")]
    assert heads == [
        f"stage {i}/6: {stage}"
        for i, stage in enumerate(("tables", "measure", "train", "evaluate", "promote", "publish"), 1)
    ]
    results = [lines[lines.index(head) + 1] for head in heads]  # in a line each
    assert all(
        re.fullmatch(pattern + r" \((\d+ s|\d+ min)\)", result)
        for pattern, result in zip(
            (
                r"  40 tables \(\d+ empty\), .*",
                r"  measured 120 groups, 24 exchanges and 2 steps of plans",
                r"  error on this machine's held-out samples: ops .* groups.*, exchanges .* all-to-alls.*",
                r"  error on this machine's held-out samples: ops .* groups.*, exchanges .* all-to-alls.*; "
                r"replayed plans: error \d+\.\d% \(bias [+-]\d+\.\d%, noise \d+\.\d%\) on .* explain an error of .*",
                r"  shardcore-cost-\S+: version 1 is champion, score \d+\.\d+% \(mean error on .*\), the first",
                r"  2 plans under shardcore-cost-\S+ version 1: 2 first",
            ),
            results,
            strict=True,
        )
    ), results
    assert len(lines) < 45 and len(shown.splitlines()) < 70, shown
    noise = ("Beginning ", "Finished in state", "View at", "Task run", "Running stage", "Warning", "shown: ")
    assert not [line for line in lines if any(word in line for word in noise)]
    log = with_logs(first, project.folder)
    for line in (
        "Running stage 'measure':",
        "120 compute samples wanted",
        "Finished in state Completed()",
        "epochs: ",
        "pool-0-00: first, ",
        *(r.strip().rsplit(" (", 1)[0] for r in results),
    ):
        assert line in log
    assert "already exists" not in log and "type hint" not in log and "shown: " not in log


def test_prefect_has_what_a_stage_logged_with_its_run(project):
    def asked(what, **query):
        user, _, password = project.env["PREFECT_API_AUTH_STRING"].partition(":")
        return httpx.post(
            f"{project.env['PREFECT_API_URL']}/{what}/filter", json=query, timeout=30, auth=(user, password)
        ).json()

    for flow, output in (
        ("measure", "measured 120 groups, 24 exchanges and 2 steps of plans"),
        ("refresh", "Running stage 'train':"),
    ):
        ids = [r["id"] for r in asked("flow_runs", flows={"name": {"any_": [flow]}})]
        logged = asked("logs", logs={"flow_run_id": {"any_": ids}}, limit=200, sort="TIMESTAMP_ASC")
        assert output in [line["message"] for line in logged]


def test_the_stages_change_no_file_that_git_tracks(project):
    """Or every model and plan would be of a "dirty" commit."""
    [run] = (r for r in runs_in_mlflow(project) if r.data.tags.get("data_version"))
    decisions = [store.load_plan(project.folder / "plans", f"pool-0-0{i}")[0].provenance for i in range(2)]
    for commit in (run.data.tags["git_commit"], *(d["git_commit"] for d in decisions)):
        assert re.fullmatch(r"[0-9a-f]{40}", commit)


def runs_in_mlflow(project):
    client = project.mlflow()
    return client.search_runs([client.get_experiment_by_name("shardcore").experiment_id])


def test_refresh_builds_everything_and_says_what_to_look_at(project):
    log = with_logs((project.folder / "log").read_text(), project.folder)
    assert stages_run(log) == {"tables", "measure", "train", "evaluate"}
    assert re.search(r"pool-0-00 +\d+ +2 +\d+\.\d+", log) and "Where to look next" in log
    assert (
        len(dataset.read_compute_samples(project.folder / "data/measurements")) == 121
    )  # and the reference op
    assert "24 exchanges and 2 steps of plans" in log and "problem 1 of 1 replayed" in log
    metrics = json.loads((project.folder / "data/evaluation/figures.json").read_text())
    shown = json.loads((project.folder / "data/evaluation/metrics.json").read_text())
    assert sum(map(len, shown.values())) <= 12
    assert 0 < metrics["accuracy"]["compute_mape"] < 100 and metrics["sharders"]["anneal_solved"] == 1
    for name in ("predictions.csv", "predictions.png", "sharders.csv"):
        assert (project.folder / "data/evaluation" / name).stat().st_size > 100
    for i in range(2):
        plan, problem = store.load_plan(project.folder / "plans", f"pool-0-0{i}")
        assert plan.provenance["model_version"] == "1"
        assert plan.provenance["algorithm"] in SHARDERS  # with so few trials a baseline may be cheaper
        assert problem.global_batch == 64


def test_the_run_in_mlflow_names_its_data_and_commit(project):
    client = project.mlflow()
    [run] = client.search_runs(
        [client.get_experiment_by_name("shardcore").experiment_id], "tags.data_version != ''"
    )
    lock = yaml.safe_load((project.folder / "dvc.lock").read_text())
    version = lock["stages"]["measure"]["outs"][0]["md5"]
    assert run.data.tags["data_version"] == version and re.fullmatch(
        r"[0-9a-f]{40}(-dirty)?", run.data.tags["git_commit"]
    )
    assert run.inputs.dataset_inputs[0].dataset.digest == version[:36]
    assert {f"{split}/compute_mape" for split in ("train", "validation", "test")} <= set(run.data.metrics)
    assert run.data.params["setting_batch"] == "64"
    assert {
        "card.md",
        "predicted_against_measured.png",
    } <= {a.path for a in client.list_artifacts(run.info.run_id)}
    assert any(len(client.get_metric_history(run.info.run_id, k)) > 5 for k in run.data.metrics)
    [model] = client.search_registered_models()
    assert re.match(r"shardcore-cost-", model.name) and set(model.aliases) == {"challenger", "champion"}
    assert (
        client.get_model_version(model.name, "1").description == (project.folder / "data/card.md").read_text()
    )


def test_a_second_run_has_nothing_to_do(project):
    log = project.run("dvc", "repro", "evaluate").stdout
    assert "up to date" in log and not stages_run(log)


def test_the_policys_stage_is_off_and_then_makes_an_empty_folder(project):
    assert not (project.folder / "data/policy").exists()
    assert stages_run(project.run("dvc", "repro").stdout) == {"train_policy"}
    assert not list((project.folder / "data/policy").iterdir())
    assert not stages_run(project.run("dvc", "repro").stdout)


def test_steps_are_measured_and_plans_of_held_out_problems_replayed_where_that_is_asked_for(project):
    assert replays.replay_digests(project.folder / "data/measurements")
    [setting] = dataset.dataset_settings(project.folder / "data/measurements")
    # ran beside replays where there is one
    reference = dataset.reference_op(project.folder / "data/measurements", setting)
    for folder, plans in (("data/measurements/replays", 2), ("data/evaluation/replays", 1)):
        costs = [
            cost
            for kept in replays.read_all_replays(project.folder / folder, setting)
            for cost in kept.costs.values()
        ]
        assert len(costs) >= plans and {cost.slowdown != 1 for cost in costs} == {reference is not None}
    metrics = json.loads((project.folder / "data/evaluation/figures.json").read_text())
    shown = json.loads((project.folder / "data/evaluation/metrics.json").read_text())
    assert sum(map(len, shown.values())) <= 12 and shown["replays"]["mape"] > 0
    assert metrics["replays"]["mape"] > 0 and metrics["replays"]["random_relative_cost"] > 0
    for name in ("replays.csv", "replays.png"):
        assert (project.folder / "data/evaluation/replays" / name).stat().st_size > 100


def test_edits_make_just_the_stages_stale_that_depend_on_them_and_more_samples_keep_those_there(project):
    """A comment in the code of measuring, and a parameter."""
    before, stale_before = measured_at(project), stale(project)
    project.edit("shardcore/measure/kernels.py")
    assert not subprocess.check_output(
        ["git", "status", "--porcelain", "--untracked=no", "data"], cwd=project.folder
    )
    assert stale(project) - stale_before == {"measure", "evaluate"}
    project.set_params("measure", compute_samples=140)
    log = with_logs(project.run("dvc", "repro", "measure").stdout, project.folder)
    after = measured_at(project)
    assert stages_run(log) == {"measure"} and ", 20 of them to measure" in log and len(after) == 141
    assert sum(after[k] != before[k] for k in before) <= 1  # the reference op, where it is now better known
