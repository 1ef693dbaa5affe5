"""What promoting does with a champion that this ShardCore cannot read."""

import contextlib
import dataclasses
import os
from unittest import mock

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law
from prefect.logging import disable_run_logger

from shardcore import dataset, files
from shardcore.cost import fit, neural
from tasks import registry
from tasks.promote import PromoteConfig, promote_model


@pytest.fixture
def store(tmp_path):
    with contextlib.chdir(tmp_path), mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db"):
        yield tmp_path


def test_a_champion_of_other_features_is_replaced(store):
    samples, comm = compute_samples(linear_law, 120), comm_samples(20)
    tables = list({t.name: t for s in samples for t in (x.table for x in s.request.shards)}.values())
    dataset.write_compute(store / "measured", samples, dataset.write_pool(store / "measured", tables))
    dataset.write_comm(store / "measured", comm)
    model = fit.train(samples, comm, SETTING, fit.FitConfig(epochs=2)).model
    neural.save(dataclasses.replace(model, weights={**model.weights, "rates": 2 * model.weights["rates"]}), store / "old")
    neural.save(model, store / "new")
    client = registry.connect()
    old = registry.register(client, store / "old", None, {})
    [kept] = (p.parent for p in store.rglob("model.json") if p.parents[0] not in (store / "old", store / "new"))
    meta, weights = files.read_model(kept)
    files.write_model(kept, {**meta, "conditions": ["width"]}, weights)
    client.set_registered_model_alias(old.name, registry.CHAMPION, old.version)
    with disable_run_logger():
        champion = promote_model.fn(store / "new", store / "measured", PromoteConfig())
    assert champion != str(old.version)
    assert str(registry.find(client, old.name, registry.CHAMPION).version) == champion
