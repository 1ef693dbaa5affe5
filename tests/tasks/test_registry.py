"""What the registry gives to those who plan: a model that works, or a word of which version does not."""

import contextlib
import dataclasses
import os
from unittest import mock

import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law

from shardcore import files
from shardcore.cost import fit, neural
from shardcore.types import ShardCoreError
from tasks import registry


@pytest.fixture
def client(tmp_path):
    with contextlib.chdir(tmp_path), mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db"):
        yield registry.connect()


def test_a_champion_that_is_no_working_model_is_refused_by_name(client, tmp_path):
    model = fit.train(compute_samples(linear_law, 60), comm_samples(20), SETTING, fit.FitConfig(epochs=1)).model
    model = dataclasses.replace(model, meta={**model.meta, "provenance": {}})
    neural.save(model, tmp_path / "model")
    version = registry.register(client, tmp_path / "model", None, {})
    client.set_registered_model_alias(version.name, registry.CHAMPION, version.version)
    assert registry.champion(client, SETTING.hardware)[0].meta == model.meta
    [kept] = (p.parent for p in tmp_path.rglob(files.MODEL_JSON) if p.parent != tmp_path / "model")
    without = {k: v for k, v in model.weights.items() if k != "rates"}
    rates = model.weights["rates"]
    for weights in (without, {**without, "rates": rates[:1]}, {**without, "rates": rates * np.nan}):
        neural.save(dataclasses.replace(model, weights=weights), kept)
        with pytest.raises(ShardCoreError, match=f"version 1 of {version.name} holds a model that gives no costs"):
            registry.champion(client, SETTING.hardware)
    (kept / files.MODEL_WEIGHTS).write_bytes(b"\x80\x04.")
    with pytest.raises(ShardCoreError, match="weights.safetensors does not match the digest"):
        registry.champion(client, SETTING.hardware)
