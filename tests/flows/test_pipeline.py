"""The whole pipeline at toy size, through DVC, Prefect, Ray and MLflow as a user runs them: what it builds, keeps and refuses."""

import dataclasses
import json
import re
import shutil

import yaml

from shardcore import dataset, files, replays, store
from shardcore.cost import neural


def measured_at(project):
    return {s.id: s.measured_at for s in dataset.read_compute(project.folder / "data/measurements")}


def stages_run(log):
    return set(re.findall(r"Running stage '(\w+)'", log))


def test_refresh_builds_everything_and_says_what_to_look_at(project):
    log = (project.folder / "log").read_text()
    assert stages_run(log) == {"tables", "measure", "train", "evaluate"}
    assert re.search(r"pool-0-00 +\d+ +2 +\d+\.\d+", log) and "Where to look next" in log
    assert len(dataset.read_compute(project.folder / "data/measurements")) == 121  # and the control group
    assert "24 exchanges and 2 steps of plans" in log and replays.digests(project.folder / "data/measurements")
    metrics = json.loads((project.folder / "data/evaluation/metrics.json").read_text())
    assert 0 < metrics["accuracy"]["compute_mape"] < 100 and metrics["sharders"]["local_solved"] == 1
    assert metrics["reality"]["mape"] > 0 and metrics["reality"]["random_relative_cost"] > 0
    assert "problem 1 of 1 replayed" in log
    for name in ("predictions.csv", "predictions.png", "sharders.csv", "replays/replays.csv", "replays/replays.png"):
        assert (project.folder / "data/evaluation" / name).stat().st_size > 100
    for i in range(2):
        plan, problem = store.load_plan(project.folder / "plans", f"pool-0-0{i}")
        assert plan.provenance["algorithm"] == "local_columns" and plan.provenance["model_version"] == "1"
        assert problem.global_batch == 64


def test_the_run_in_mlflow_names_its_data_and_commit(project):
    client = project.mlflow()
    [run] = client.search_runs([client.get_experiment_by_name("shardcore").experiment_id], "tags.data_version != ''")
    lock = yaml.safe_load((project.folder / "dvc.lock").read_text())
    version = lock["stages"]["measure"]["outs"][0]["md5"]
    assert run.data.tags["data_version"] == version and re.fullmatch(r"[0-9a-f]{40}(-dirty)?", run.data.tags["git_commit"])
    assert run.inputs.dataset_inputs[0].dataset.digest == version[:36]
    assert {f"{split}_compute_mape" for split in ("train", "validation", "test")} <= set(run.data.metrics)
    assert run.data.params["setting_batch"] == "64"
    assert {"card.md", "calibration.png", "error_by_size.png", "predicted_against_measured.png", "training_curves.png"} <= {
        a.path for a in client.list_artifacts(run.info.run_id)}
    assert any(len(client.get_metric_history(run.info.run_id, k)) > 5 for k in run.data.metrics)
    [published, *_] = client.search_runs([run.info.experiment_id], "tags.stage = 'publish'")
    pages = {a.path for a in client.list_artifacts(published.info.run_id, "plans")}
    assert pages == {f"plans/pool-0-0{i}.html" for i in range(2)}
    [model] = client.search_registered_models()
    assert re.match(r"shardcore-cost-", model.name) and set(model.aliases) == {"challenger", "champion"}
    assert client.get_model_version(model.name, "1").description == (project.folder / "data/card.md").read_text()


def test_a_damaged_part_stops_the_stage_by_name_and_loses_nothing(project):
    folder = project.folder / "data/measurements"
    [part] = folder.glob("compute-*.parquet")
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    try:
        assert part.name in project.error_of("flows.measure")
    finally:
        part.write_bytes(whole)


def test_a_problem_that_cannot_be_planned_is_named_and_the_others_are_published(project):
    good = files.read_problem(project.folder / "problems/draw-0.json")
    data = files.problem_to_json(good)
    big = dict(data, name="too-big", topology={"devices": [{"count": 2, "memory_bytes": 1 << 20}]})
    other = dict(data, name="other-batch", global_batch=128)
    for body in (big, other):
        files.write_json(project.folder / f"{body['name']}.json", body)
    error = project.error_of("shardcore", "plan", "too-big.json", "--model", "data/model", "--out", "x.json")
    assert re.search(r"'too-big' does not fit: .*[KMG]iB.* too little.*It would fit with", error)
    shutil.copy(project.folder / "too-big.json", project.folder / "problems")
    (project.folder / "plans/pool-0-00/current").unlink()
    try:
        error = project.error_of("flows.publish")
    finally:
        (project.folder / "problems/too-big.json").unlink()
    assert "1 of 3 problems have no new plan" in error and "'too-big' does not fit" in error
    assert store.load_plan(project.folder / "plans", "pool-0-00")[0].placements
    assert "too-big" in (project.folder / "plans/report.md").read_text()
    error = project.error_of("shardcore", "plan", "other-batch.json", "--model", "data/model", "--out", "x.json")
    assert "batch 128" in error and "batch 64" in error
    assert not (project.folder / "x.json").exists()


def test_a_second_run_has_nothing_to_do(project):
    log = project.run("dvc", "repro").stdout
    assert "up to date" in log and not stages_run(log)


def test_comment_edits_rerun_exactly_their_stages_and_measure_nothing(project):
    before = measured_at(project)
    project.edit("shardcore/measure/kernels.py")
    log = project.run("dvc", "repro").stdout
    assert stages_run(log) == {"measure", "evaluate"} and ", 0 of them to measure" in log
    assert "problem 1 of 1 as kept" in log
    assert measured_at(project) == before
    project.edit("shardcore/search/greedy.py")
    stale = project.run("dvc", "status").stdout
    assert set(re.findall(r"^(\w+):$", stale, re.MULTILINE)) == {"measure", "evaluate"}  # groups come from plans too


def test_more_samples_keep_those_already_measured(project):
    before = measured_at(project)
    project.set_params("measure", compute_samples=140)
    log = project.run("dvc", "repro", "measure").stdout
    after = measured_at(project)
    assert ", 20 of them to measure" in log and len(after) == 141
    assert sum(after[k] != before[k] for k in before) <= 1  # the control group, where it is now better known


def test_promotion_is_idempotent_and_keeps_the_better_model(project):
    client = project.mlflow()
    [model] = client.search_registered_models()
    assert "champion already" in project.run("flows.promote").stdout
    assert len(client.search_model_versions(f"name = '{model.name}'")) == 1
    good = neural.load(project.folder / "data/model")
    worse = {**good.weights, "rates": 3 * good.weights["rates"]}
    neural.save(dataclasses.replace(good, weights=worse), project.folder / "data/model")
    log = project.run("flows.promote").stdout
    assert re.search(r"version 1 stays champion; challenger 2 lost by \d+\.\d+ points", log), log[-2000:]
    [model] = client.search_registered_models()
    assert {k: str(v) for k, v in model.aliases.items()} == {"challenger": "2", "champion": "1"}


def test_a_champion_set_by_hand_is_what_publish_uses(project):
    client = project.mlflow()
    [model] = client.search_registered_models()
    client.set_registered_model_alias(model.name, "champion", "2")
    project.run("flows.publish")
    decision = store.last(project.folder / "plans", "pool-0-00")
    assert decision.provenance["model_version"] == "2" and decision.previous_ms > 0  # the old plan under this model
    client.set_registered_model_alias(model.name, "champion", "1")
    project.run("dvc", "checkout", "--force", "data/model")


def test_the_library_plans_with_the_same_files_alone(project):
    arguments = ["problems/draw-0.json", "--model", "data/model", "--budget-evals", "50", "--seed", "3"]
    for name in ("a", "b"):
        project.run("shardcore", "plan", *arguments, "--out", f"{name}.json")
    assert (project.folder / "a.json").read_bytes() == (project.folder / "b.json").read_bytes()
    priced = project.run("shardcore", "price", "a.json", "--problem", "problems/draw-0.json", "--model", "data/model",
                         "--out", "cost.json")
    assert priced.returncode == 0 and files.read_json(project.folder / "cost.json")["total_ms"] > 0
