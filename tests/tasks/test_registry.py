"""Models from the registry: one that works, or an error that names the version."""

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pytest
from laws import SETTING, trained
from mlflow.entities import Metric
from tracking import empty_database, quick_mlflow, tracked

from shardcore.core.errors import ShardCoreError
from shardcore.cost import neural
from shardcore.io import model_files
from tasks import registry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def client(tmp_path):
    with tracked(tmp_path):
        yield registry.connect_to_mlflow()


def test_runs_of_processes_that_are_gone_are_ended_and_others_go_on(client):
    gone = subprocess.Popen(["true"])
    gone.wait()

    def left_by(host, pid):
        return client.create_run(
            mlflow.get_experiment_by_name("shardcore").experiment_id,
            tags={registry._PROCESS_TAG: f"{host} {pid}"},
        ).info.run_id

    here = socket.gethostname()
    left, ours, elsewhere = (
        left_by(here, gone.pid),
        left_by(here, os.getpid()),
        left_by(f"not-{here}", gone.pid),
    )
    registry.connect_to_mlflow()
    assert [client.get_run(run).info.status for run in (left, ours, elsewhere)] == [
        "KILLED",
        "RUNNING",
        "RUNNING",
    ]


def test_curves_have_more_points_than_a_request_may_have(client):
    with registry.tagged_run(run_name="long") as run:
        registry.log_curves(client, run.info.run_id, [Metric("cost", 1.0, 0, i) for i in range(1001)])
    assert len(client.get_metric_history(run.info.run_id, "cost")) == 1001


def test_an_alias_that_nobody_set_is_none_and_a_registry_that_cannot_tell_is_named(
    client, tmp_path, monkeypatch
):
    assert registry.find_version(client, "nothing", registry.CHAMPION) is None
    client.create_registered_model("empty")
    assert registry.find_version(client, "empty", registry.CHAMPION) is None
    with pytest.raises(
        ShardCoreError, match="'shardcore-cost-empty' has no version with the alias 'champion'.*flows.promote"
    ):
        registry.champion_model(client, "empty")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = mlflow.MlflowClient("http://127.0.0.1:9", "http://127.0.0.1:9")
    with pytest.raises(ShardCoreError, match="the registry cannot say which version of 'empty' is champion"):
        registry.find_version(away, "empty", registry.CHAMPION)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ShardCoreError, match="MLFLOW_TRACKING_URI. does not answer at http://127.0.0.1:9"):
        registry.connect_to_mlflow()


def test_a_champion_that_is_no_working_model_is_refused_by_name(client, tmp_path):
    model = trained()
    model = dataclasses.replace(model, meta={**model.meta, "provenance": {}})
    neural.save(model, tmp_path / "model")
    version = registry.register_model(client, tmp_path / "model", None, {})
    client.set_registered_model_alias(version.name, registry.CHAMPION, version.version)
    assert registry.champion_model(client, SETTING.hardware)[0].meta == model.meta
    # It was trained without a run of this registry, so the run that registers it has the figures.
    logged = client.get_run(
        version.run_id
        or client.search_runs([mlflow.get_experiment_by_name("shardcore").experiment_id])[0].info.run_id
    ).data.metrics
    assert {f"validation/{k}": v for k, v in model.meta["metrics"].items()} == pytest.approx(logged)
    assert logged["validation/compute_mape"] > 0 and not model.meta.get("judged_by")
    [kept] = (p.parent for p in tmp_path.rglob(model_files.MODEL_JSON) if p.parent != tmp_path / "model")
    without = {k: v for k, v in model.weights.items() if k != "rates"}
    rates = model.weights["rates"]
    for weights in (without, {**without, "rates": rates[:1]}, {**without, "rates": rates * np.nan}):
        model_files.write_model(kept, model_files.read_model(tmp_path / "model")[0], weights)
        output = f"version 1 of {version.name} holds no model that works: model in .*: weight 'rates' "
        with pytest.raises(ShardCoreError, match=output):
            registry.champion_model(client, SETTING.hardware)
    (kept / model_files.MODEL_WEIGHTS).write_bytes(b"\x80\x04.")
    with pytest.raises(ShardCoreError, match="weights.safetensors does not match the digest"):
        registry.champion_model(client, SETTING.hardware)


@pytest.mark.parametrize("store", ["./mlruns", "mlruns", "/data/mlruns", "file:///data/mlruns"])
def test_a_store_that_is_a_folder_is_refused_in_a_whole_sentence(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with pytest.raises(
        ShardCoreError,
        match="a folder, which MLflow does not write any more; it needs a "
        "database or server, such as sqlite:///mlflow.db or http://127.0.0.1:5000$",
    ):
        registry.connect_to_mlflow()
    assert not list(tmp_path.iterdir())


# --- projects that are moved or copied ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return trained()


@pytest.fixture
def project(tmp_path, monkeypatch, model):
    """A function that enters a project of this name, in which a model was trained."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def enter(name):
        monkeypatch.chdir(tmp_path / name)
        return registry.connect_to_mlflow()

    (tmp_path / "first").mkdir()
    (tmp_path / "first/mlflow.db").write_bytes(empty_database())
    client = enter("first")
    neural.save(dataclasses.replace(model, meta={**model.meta, "provenance": {}}), Path("data/model"))
    with registry.tagged_run(run_name="train"):
        mlflow.log_text("card", registry.CARD)
        mlflow.set_tag(registry.DIGEST_TAG, model_files.model_digest(Path("data/model")))
    with quick_mlflow():
        promoted(client)
        yield enter


def promoted(client):
    """The version of data/model, which becomes champion."""
    run_id = registry.find_run_id(registry.DIGEST_TAG, model_files.model_digest(Path("data/model")))
    version = registry.register_model(client, Path("data/model"), run_id, {})
    client.set_registered_model_alias(version.name, registry.CHAMPION, version.version)
    return str(version.version)


def files_in(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and "mlflow.db" not in path.name)


def log_something():
    with registry.tagged_run(run_name="later") as run:
        mlflow.log_text("later", "later.txt")
    return Path(mlflow.MlflowClient().get_run(run.info.run_id).info.artifact_uri, "later.txt")


@pytest.mark.parametrize("moved", [pytest.param("second", marks=pytest.mark.long), "a b/thi rd"])
def test_a_moved_project_keeps_its_champion_and_logs_into_its_own_folder(project, tmp_path, moved):
    (tmp_path / moved).parent.mkdir(exist_ok=True)
    (tmp_path / "first").rename(tmp_path / moved)
    client = project(moved)
    assert registry.champion_model(client, SETTING.hardware)[1].version == 1 and promoted(client) == "1"
    assert log_something().is_relative_to(tmp_path / moved) and log_something().exists()
    assert not (tmp_path / "first").exists()
    (tmp_path / moved).rename(tmp_path / "first")  # and back
    assert registry.champion_model(project("first"), SETTING.hardware)[1].version == 1


def test_a_copied_project_leaves_the_original_alone_and_both_go_on(project, tmp_path):
    shutil.copytree(tmp_path / "first", tmp_path / "first-copy")
    before = files_in(tmp_path / "first")
    client = project("first-copy")
    assert promoted(client) == "1" and log_something().is_relative_to(tmp_path / "first-copy")
    assert files_in(tmp_path / "first") == before
    shutil.rmtree(tmp_path / "first-copy")
    client = project("first")
    assert registry.champion_model(client, SETTING.hardware)[1].version == 1
    assert log_something().is_relative_to(tmp_path / "first")


def test_artifacts_elsewhere_stay_there_when_the_project_is_moved(project, tmp_path):
    (tmp_path / "other").mkdir()
    with contextlib.chdir(tmp_path / "other"):
        client = mlflow.MlflowClient()
        client.create_experiment(registry.EXPERIMENT, str(tmp_path / "big/mlruns/1"))
        registry.connect_to_mlflow()
    (tmp_path / "other").rename(tmp_path / "moved")
    project("moved")
    assert log_something().is_relative_to(tmp_path / "big/mlruns/1")


@pytest.mark.parametrize("harm", ["gone", pytest.param("damaged", marks=pytest.mark.long)])
def test_files_that_are_gone_are_named_and_registered_again(project, tmp_path, harm):
    client = project("first")
    place = Path(client.get_model_version_download_uri(registry.registered_model_name(SETTING.hardware), "1"))
    if harm == "gone":
        shutil.rmtree(tmp_path / "first/mlruns")
        error = f"the files of version 1 .* are gone: {place} has none.*flows.promote"
    else:
        [weights] = place.rglob(model_files.MODEL_WEIGHTS)
        weights.write_bytes(b"")
        error = "version 1 .* holds no model that works"
    with pytest.raises(ShardCoreError, match=error):
        registry.champion_model(client, SETTING.hardware)
    assert promoted(client) == "2" and promoted(client) == "2"
    assert registry.champion_model(client, SETTING.hardware)[1].version == 2


@pytest.mark.long
def test_processes_that_make_a_database_at_once_all_get_it(tmp_path):
    code = (
        "from tasks import registry; "
        "registry.connect_to_mlflow().create_registered_model('m' + __import__('sys').argv[1])"
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/new/mlflow.db",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i)], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
        )
        for i in range(4)
    ]
    ended = [(process.communicate()[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [0] * 4, ended
    found = mlflow.MlflowClient(env["MLFLOW_TRACKING_URI"]).search_registered_models()
    assert {model.name for model in found} == {"m0", "m1", "m2", "m3"}
