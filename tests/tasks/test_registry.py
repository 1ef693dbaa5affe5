"""Models from the registry: one that works, or an error that names the version."""

import dataclasses
import os
import socket
import subprocess

import mlflow
import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law
from tracking import tracked

from shardcore.core.errors import ShardCoreError
from shardcore.cost import fit, neural
from shardcore.io import model_files
from tasks import registry


@pytest.fixture
def client(tmp_path):
    with tracked(tmp_path):
        yield registry.connect()


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
    registry.connect()
    assert [client.get_run(run).info.status for run in (left, ours, elsewhere)] == [
        "KILLED",
        "RUNNING",
        "RUNNING",
    ]


def test_an_alias_that_nobody_set_is_none_and_a_registry_that_cannot_tell_is_named(
    client, tmp_path, monkeypatch
):
    assert registry.find(client, "nothing", registry.CHAMPION) is None
    client.create_registered_model("empty")
    assert registry.find(client, "empty", registry.CHAMPION) is None
    with pytest.raises(
        ShardCoreError, match="'shardcore-cost-empty' has no version with the alias 'champion'.*flows.promote"
    ):
        registry.champion(client, "empty")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = mlflow.MlflowClient("http://127.0.0.1:9", "http://127.0.0.1:9")
    with pytest.raises(ShardCoreError, match="the registry cannot say which version of 'empty' is champion"):
        registry.find(away, "empty", registry.CHAMPION)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ShardCoreError, match="MLFLOW_TRACKING_URI. does not answer at http://127.0.0.1:9"):
        registry.connect()


def test_a_champion_that_is_no_working_model_is_refused_by_name(client, tmp_path):
    model = fit.train(
        compute_samples(linear_law, 60), comm_samples(20), SETTING, fit.FitConfig(epochs=1)
    ).model
    model = dataclasses.replace(model, meta={**model.meta, "provenance": {}})
    neural.save(model, tmp_path / "model")
    version = registry.register(client, tmp_path / "model", None, {})
    client.set_registered_model_alias(version.name, registry.CHAMPION, version.version)
    assert registry.champion(client, SETTING.hardware)[0].meta == model.meta
    # It was trained without a run of this registry, so the run that registers it has the figures.
    logged = client.get_run(
        version.run_id
        or client.search_runs([mlflow.get_experiment_by_name("shardcore").experiment_id])[0].info.run_id
    ).data.metrics
    assert {f"validation/{k}": v for k, v in model.meta["metrics"].items()} == pytest.approx(logged)
    assert logged["validation/compute_mape"] > 0
    [kept] = (p.parent for p in tmp_path.rglob(model_files.MODEL_JSON) if p.parent != tmp_path / "model")
    without = {k: v for k, v in model.weights.items() if k != "rates"}
    rates = model.weights["rates"]
    for weights in (without, {**without, "rates": rates[:1]}, {**without, "rates": rates * np.nan}):
        model_files.write_model(kept, model_files.read_model(tmp_path / "model")[0], weights)
        output = f"version 1 of {version.name} holds no model that works: model in .*: weight 'rates' "
        with pytest.raises(ShardCoreError, match=output):
            registry.champion(client, SETTING.hardware)
    (kept / model_files.MODEL_WEIGHTS).write_bytes(b"\x80\x04.")
    with pytest.raises(ShardCoreError, match="weights.safetensors does not match the digest"):
        registry.champion(client, SETTING.hardware)


@pytest.mark.parametrize("store", ["./mlruns", "mlruns", "/data/mlruns", "file:///data/mlruns"])
def test_a_store_that_is_a_folder_is_refused_in_a_whole_sentence(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with pytest.raises(
        ShardCoreError,
        match="a folder, which MLflow does not write any more; it needs a "
        "database or server, such as sqlite:///mlflow.db or http://127.0.0.1:5000$",
    ):
        registry.connect()
    assert not list(tmp_path.iterdir())
