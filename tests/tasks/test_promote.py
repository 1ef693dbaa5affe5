"""What promoting does with a champion that this ShardCore cannot read, and with what was replayed."""

import contextlib
import dataclasses
import os
import re
import shutil
from unittest import mock

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool
from prefect.logging import disable_run_logger

from shardcore import dataset, files, replays, sampling
from shardcore.cost import fit, neural
from shardcore.cost.model import price
from shardcore.measure.replay import ReplayConfig
from shardcore.search import SHARDERS
from shardcore.types import Replayed, Spread
from tasks import publication, registry
from tasks.promote import PromoteConfig, promote_model


@pytest.fixture
def store(tmp_path):
    with contextlib.chdir(tmp_path), mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db"):
        yield tmp_path


@pytest.fixture
def trained(store):
    """A model and the measurements that it was trained on."""
    samples, comm = compute_samples(linear_law, 120), comm_samples(20)
    tables = list({t.name: t for s in samples for t in (x.table for x in s.request.shards)}.values())
    dataset.write_compute(store / "measured", samples, dataset.write_pool(store / "measured", tables))
    dataset.write_comm(store / "measured", comm)
    return fit.train(samples, comm, SETTING, fit.FitConfig(epochs=2)).model


def scaled(model, by):
    return dataclasses.replace(model, weights={**model.weights, "rates": by * model.weights["rates"]})


def promote(store, model, approve=False, will_publish=False, **config):
    neural.save(model, store / "new")
    with disable_run_logger():
        return promote_model.fn(store / "new", store / "measured", PromoteConfig(**config), approve, will_publish,
                                replayed=store / "replays")


def replay_as_priced_by(model, store, problems):
    """Replays of random plans that cost exactly what the model says."""
    for i in range(problems):
        drawn = sampling.problem(pool(), i, SETTING, 1, sampling.ProblemConfig(2, 4, 8, 32))
        made = [("random", SHARDERS["random"](drawn, model, seed=seed)) for seed in range(8)]

        def run(workloads):
            costs = [dataclasses.asdict(price(w, model)) for w in workloads]
            return [Replayed(**c, step=Spread(1.0, 1.0, 1.0, 9), oversubscribed=False) for c in costs]

        replays.keep(store / "replays" / drawn.name, drawn, made, SETTING, ReplayConfig(), run)


def test_a_challenger_that_chooses_worse_among_replayed_plans_does_not_follow(store, trained):
    client = registry.connect()
    assert promote(store, trained).champion == "1"
    replay_as_priced_by(trained, store, 6)
    worse = scaled(trained, 1e-3)  # nearly all that matters to it is the exchange
    found = promote(store, worse, may_lose=1000.0)
    assert (found.challenger, found.champion) == ("2", "1")
    assert re.search("lost by replayed plans: (regret|Kendall tau) of .* on the same replays of 6 problems", found.reason)
    runs = [client.get_run(client.get_model_version(found.model, v).run_id) for v in ("1", "2")]
    assert "reality_regret" not in runs[0].data.metrics and runs[1].data.metrics["reality_regret"] > 0
    assert "replays.png" in [a.path for a in client.list_artifacts(runs[1].info.run_id)]
    promote(store, worse)
    assert len(client.get_metric_history(runs[1].info.run_id, "reality_regret")) == 1
    for path in sorted((store / "replays").iterdir())[:2]:
        shutil.rmtree(path)
    assert promote(store, worse, may_lose=1000.0).champion == "2"  # 4 problems say too little


def test_a_champion_of_other_features_is_replaced(store, trained):
    neural.save(scaled(trained, 2), store / "old")
    neural.save(trained, store / "new")
    client = registry.connect()
    old = registry.register(client, store / "old", None, {})
    [kept] = (p.parent for p in store.rglob("model.json") if p.parents[0] not in (store / "old", store / "new"))
    meta, weights = files.read_model(kept)
    files.write_model(kept, {**meta, "conditions": ["width"]}, weights)
    client.set_registered_model_alias(old.name, registry.CHAMPION, old.version)
    champion = promote(store, trained).champion
    assert champion != str(old.version)
    assert str(registry.find(client, old.name, registry.CHAMPION).version) == champion


def test_with_approval_a_challenger_that_passed_waits_and_one_that_lost_is_not_to_be_approved(store, trained):
    client = registry.connect()
    waits = promote(store, trained, approval=True)
    assert waits.champion is None and "challenger 1 awaits approval; held-out error" in waits.reason
    assert publication.read(client, waits.model).champion is None
    assert client.get_model_version(waits.model, "1").tags["gate"].startswith("passed, held-out error")
    assert promote(store, trained, approve=True, will_publish=True, approval=True).champion == "1"
    state = publication.read(client, waits.model)
    assert (state.champion, state.publishing) == ("1", "1")  # nobody else is to publish for now
    lost = promote(store, scaled(trained, 3), approve=True, approval=True)
    assert (lost.challenger, lost.champion) == ("2", "1") and "lost by" in lost.reason
