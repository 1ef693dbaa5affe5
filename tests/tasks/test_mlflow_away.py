"""An MLflow that does not answer, or stops to while a task talks to it: one line names it."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import mlflow
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool
from prefect.logging import disable_run_logger

from flows.train import TrainConfig, train_model
from shardcore.core.errors import ShardCoreError
from shardcore.cost import fit, neural
from shardcore.io import dataset
from tasks import registry
from tasks.promote import PromoteConfig, promote_model
from tasks.publish import PublishConfig, publish_plans
from tasks.setting import SettingConfig

ADDRESS = "http://127.0.0.1:9"
WANTED = SettingConfig(SETTING.hardware, SETTING.batch)
MEASUREMENTS, MODEL = Path("data/measurements"), Path("data/model")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The current folder of these tests, with measurements and a model; its MLflow does not answer."""
    folder = tmp_path_factory.mktemp("away")
    env = {"MLFLOW_TRACKING_URI": ADDRESS, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    with contextlib.chdir(folder), mock.patch.dict(os.environ, env), disable_run_logger():
        MEASUREMENTS.mkdir(parents=True)
        compute, comm = compute_samples(linear_law, 60), comm_samples(20)
        dataset.write_compute_samples(MEASUREMENTS, compute, dataset.write_pool(MEASUREMENTS, pool()))
        dataset.write_collective_samples(MEASUREMENTS, comm)
        model = fit.train(compute, comm, SETTING, fit.FitConfig(epochs=1, hidden=(4,))).model
        model.meta["provenance"] = {}
        neural.save(model, MODEL)
        yield


def work():
    return {
        "train": lambda: train_model.fn(MEASUREMENTS, WANTED, TrainConfig(epochs=1), MODEL),
        "promote": lambda: promote_model.fn(MODEL, MEASUREMENTS, PromoteConfig()),
        "publish": lambda: publish_plans.fn([], "plans", WANTED, PublishConfig()),
    }


@pytest.mark.parametrize("task", work())
def test_an_address_that_does_not_answer_is_named_before_work_begins(place, task):
    with pytest.raises(
        ShardCoreError,
        match=r"^MLflow \(MLFLOW_TRACKING_URI\) does not answer at "
        rf"{ADDRESS}: .+; start it, or",
    ):
        work()[task]()


@pytest.mark.parametrize(
    "task, message",
    [
        (
            "train",
            rf"^MLflow failed at {ADDRESS}: .+; what was finished is kept, and a rerun goes on from there$",
        ),
        (
            "promote",
            rf"^MLflow failed at {ADDRESS}: .+; what was finished is kept, and a rerun goes on from there$",
        ),
        ("publish", r"^the registry cannot say which version of 'shardcore-cost-law' is champion: .+"),
    ],
)
def test_a_server_that_goes_away_meanwhile_is_named_in_one_line(place, monkeypatch, task, message):
    monkeypatch.setattr(
        registry, "connect_to_mlflow", mlflow.MlflowClient
    )  # as it answered when it was looked at
    before = (MODEL / "model.json").read_bytes()
    with pytest.raises(ShardCoreError, match=message) as raised:
        work()[task]()
    assert "\n" not in str(raised.value)
    assert (MODEL / "model.json").read_bytes() == before


def test_what_the_server_says_is_told_in_one_line(place):
    with (
        pytest.raises(ShardCoreError, match=r"^MLflow failed at .*: of two lines; what was"),
        registry.one_line_errors(),
    ):
        raise mlflow.exceptions.MlflowException("of two\n lines")
    with pytest.raises(ZeroDivisionError), registry.one_line_errors():
        raise ZeroDivisionError
