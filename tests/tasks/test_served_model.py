"""A registered model in the hands of others: loaded and served from an unrelated folder, with only what its
version holds."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import mlflow
import numpy as np
import pytest
from fastapi.testclient import TestClient
from laws import SETTING, comm_samples, compute_samples, linear_law, pool
from mlflow.pyfunc import scoring_server
from tracking import tracked

from shardcore.core.types import Shard
from shardcore.cost import fit, neural
from shardcore.cost.model import group_op_ms
from shardcore.io import files
from tasks import registry
from tasks.served_model import GroupInput, ServedCostModel

TABLE = files.table_to_json(pool()[0])
GROUPS = [
    {"shards": [{"table": files.table_to_json(t)} for t in pool()[:3]]},
    {"shards": [{"table": TABLE, "rows": [0, 100], "columns": [0, 4]}], "batch": 64},
]
BAD = {
    "no list": ("shards", "Expected list"),
    "a table's key misspelt": (
        [{"shards": [{"table": {**TABLE, "pool": 3}}]}],
        "group 0, shard 0, table 't0' has an unknown key 'pool'",
    ),
    "a table too short": (
        [{"shards": [{"table": TABLE, "rows": [0, 10**9]}]}],
        f"the table has [0, {TABLE['rows']})",
    ),
    "another precision": (
        [{"shards": [{"table": {**TABLE, "precision": "fp16"}}]}],
        "'t0' is fp16; the model's tables are fp32",
    ),
    "rows in host memory": (
        [{"shards": [{"table": {**TABLE, "load_factor": 0.1}}]}],
        "table 't0' has load_factor 0.1; a group has no link",
    ),
    "pooled and not": (
        [{"shards": [{"table": TABLE}, {"table": {**TABLE, "name": "s", "sequence": True}}]}],
        "group 0: an op has sequences and pooled tables",
    ),
    "no shards": ([{"batch": 64}], "group 0 lacks the key 'shards'"),
    "an unknown key": ([{"shards": [], "batches": 1}], "unknown key 'batches'; known are shards, batch"),
    "half a sample": ([{"shards": [], "batch": 0.5}], "batch is 0.5; it needs to be a whole number"),
    "one end": (
        [{"shards": [{"table": TABLE, "columns": [4]}]}],
        "columns is [4]; it needs to be [a whole ",
    ),
}


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    """(model, its URI in the registry, environment of a process that knows nothing but where that is)."""
    folder = tmp_path_factory.mktemp("registered")
    trained = fit.train(
        compute_samples(linear_law, 120), comm_samples(20), SETTING, fit.FitConfig(epochs=3)
    ).model
    neural.save(trained, folder / "model")
    (folder / "card.md").write_text("# A card")
    uri = f"sqlite:///{folder}/mlflow.db"
    with tracked(folder, code=True):
        version = registry.register_model(
            registry.connect_to_mlflow(), folder / "model", None, {"data_version": "v"}
        )
        again = registry.register_model(
            registry.connect_to_mlflow(), folder / "model", None, {"data_version": "v"}
        )
        assert again.version == version.version and again.description == "# A card"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"MLFLOW_TRACKING_URI": uri, "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    return trained, f"models:/{version.name}/{version.version}", env


@pytest.fixture(scope="module")
def served(registered):
    """The app of `mlflow models serve`, called without a network."""
    with (
        mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=registered[2]["MLFLOW_TRACKING_URI"]),
        mock.patch.object(sys, "path", list(sys.path)),
    ):  # MLflow sets more in both
        yield TestClient(scoring_server.init(mlflow.pyfunc.load_model(registered[1])))


def ask(served, groups):
    """Status and answer."""
    answer = served.post("/invocations", json={"inputs": groups})
    return answer.status_code, answer.json()


def expected(model):
    tables = pool()[:3]
    return [
        group_op_ms([[Shard.whole(t) for t in tables]], model)[0],
        group_op_ms([[Shard(tables[0], 0, 100, 0, 4)]], model, 64)[0],
    ]


def test_it_answers_with_the_model_s_costs(registered, served):
    status, answer = ask(served, [*GROUPS, {"shards": []}])
    *found, empty = answer["predictions"]
    assert status == 200 and [a["ms"] for a in found] == pytest.approx(expected(registered[0]), rel=1e-12)
    assert all(a["low_ms"] <= a["ms"] <= a["high_ms"] and 0 < a["forward_ms"] < a["ms"] for a in found)
    sums = registered[0].encode([Shard.whole(t) for t in pool()[:3]]).sum(0)
    assert (found[0]["low_ms"], found[0]["high_ms"]) == pytest.approx(
        tuple(registered[0].ms_interval(sums, 0.9))
    )
    assert empty == {"ms": 0, "forward_ms": 0, "low_ms": 0, "high_ms": 0, "extrapolated": []}


def test_it_says_what_was_not_measured(served):
    _, answer = ask(served, [{"shards": [{"table": {**TABLE, "rows": 10**9}}]}, GROUPS[1]])
    beyond, within = (a["extrapolated"] for a in answer["predictions"])
    assert any("'t0' has 1,000,000,000 rows; most measured" in s for s in beyond) and within == []


@pytest.mark.parametrize("groups, message", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(served, groups, message):
    status, answer = ask(served, groups)
    assert status == 400 and message in answer["message"]


@pytest.mark.long
def test_it_loads_where_nothing_of_this_folder_is(registered, tmp_path):
    model, uri, env = registered
    code = (
        f"import json, mlflow, sys; sys.path[:] = [p for p in sys.path if p != {str(Path.cwd())!r}]; "
        f"model = mlflow.pyfunc.load_model({uri!r}); import shardcore; "
        f"print(json.dumps([shardcore.__file__, model.predict(json.loads({json.dumps(GROUPS)!r}))]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    package, answers = json.loads(done.stdout.splitlines()[-1])
    assert (
        Path(package).parents[1].name == "code"
        and Path(files.__file__).parents[1] not in Path(package).parents
    )
    np.testing.assert_allclose([a["ms"] for a in answers], expected(model), rtol=1e-12)


@pytest.mark.parametrize(
    "shard, message",
    [
        ({"table": TABLE, 1: 2, "x": 3}, "has an unknown key"),
        ({"table": TABLE, "rows": [10**400, -(10**5000)]}, "it needs [low, high], 0 to "),
    ],
)
def test_what_only_python_can_ask_is_refused_by_name(registered, shard, message):
    """JSON has text as keys, and its numbers are bounded."""
    with mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=registered[2]["MLFLOW_TRACKING_URI"]):
        model = mlflow.pyfunc.load_model(registered[1]).unwrap_python_model()
        with pytest.raises(mlflow.MlflowException) as error:
            model.predict(None, [{"shards": [shard]}])
    assert message in str(error.value)


def test_a_model_of_several_precisions_serves_tables_of_each(registered, tmp_path):
    for precision in ("fp16", "fp32"):
        neural.save(
            dataclasses.replace(registered[0], setting=dataclasses.replace(SETTING, precision=precision)),
            tmp_path / precision,
        )
    served = ServedCostModel()
    served.load_context(SimpleNamespace(artifacts={"model": str(tmp_path)}))
    half = {"table": {**TABLE, "precision": "fp16"}}
    found = served.predict(
        None,
        [
            GroupInput(shards=s)
            for s in ([half], [{"table": TABLE}], [half, {"table": {**TABLE, "name": "b"}}])
        ],
    )
    each = [
        group_op_ms([[Shard.whole(dataclasses.replace(pool()[0], precision=precision))]], registered[0])[0]
        for precision in ("fp16", "fp32")
    ]
    assert [a["ms"] for a in found] == pytest.approx([*each, sum(each)])
    assert all(a["low_ms"] <= a["ms"] <= a["high_ms"] for a in found)
    with pytest.raises(mlflow.MlflowException, match="'t0' is bf16; the model's tables are fp16.fp32"):
        served.predict(None, [GroupInput(shards=[{"table": {**TABLE, "precision": "bf16"}}])])
