"""The train and evaluate tasks on synthetic measurements: what the run in MLflow holds, and datasets that
lend the shape of costs."""

import dataclasses
import re
import shutil
from pathlib import Path

import mlflow
import pytest
import yaml
from laws import SETTING, cache_law, comm_samples, compute_samples, pool
from prefect.logging import disable_run_logger
from traced_jobs import factors_of, sample
from tracking import tracked

from flows.train import TrainConfig, auxiliary_folders, data_version, train_model
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting
from shardcore.cost import accuracy, collective_model, fit, neural
from shardcore.cost.model import price
from shardcore.cost.step_factors import FEWEST_STEPS
from shardcore.io import dataset, files, model_files, replays, schema, traced_samples
from shardcore.io.measurements import StepSample, TimingSpread
from shardcore.measure.replay import ReplayConfig
from shardcore.search import SHARDERS
from shardcore.stages.evaluate import CandidateModel, EvaluateConfig, judge_model
from tasks import params, registry
from tasks.setting import SettingConfig

WANTED = SettingConfig(SETTING.hardware, SETTING.batch)
MEASUREMENTS, SHIPPED = Path("data/measurements"), Path("datasets/x")
QUICK = {"epochs": 2, "hidden": (4,)}
OTHER = Setting("other", SETTING.batch)
SAMPLES = list({s.id: s for s in compute_samples(cache_law, 260, noise=0.05)}.values())


def write(folder, compute, comm=()):
    folder.mkdir(parents=True)
    dataset.write_compute_samples(folder, compute, dataset.write_pool(folder, pool()))
    if comm:
        dataset.write_collective_samples(folder, comm)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The current folder of these tests; its MLflow holds their runs. The dataset is of another machine."""
    folder = tmp_path_factory.mktemp("place")
    with tracked(folder), disable_run_logger():
        write(MEASUREMENTS, SAMPLES, comm_samples(30))
        write(SHIPPED, compute_samples(cache_law, 200, OTHER, noise=0.05))
        write(Path("datasets/other"), compute_samples(cache_law, 60, Setting("law", 64)))
        yield folder


def train(**config):
    return train_model.fn(MEASUREMENTS, WANTED, TrainConfig(**QUICK, **config), Path("data/model"))


@pytest.fixture(scope="module")
def joined(place):
    """(metrics, run) of a training on both."""
    metrics = train(datasets=(str(SHIPPED),))
    return (
        metrics,
        mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("shardcore").experiment_id])[0],
    )


def test_the_run_holds_parameters_curves_metrics_figures_and_the_card(joined):
    metrics, run = joined
    client, run_id = mlflow.MlflowClient(), run.info.run_id
    assert run.data.params["epochs"] == "2" and run.data.params["datasets"] == "('datasets/x',)"
    assert [m.step for m in client.get_metric_history(run_id, "compute/validation_mape")] == [0, 1, 2]
    assert len(client.get_metric_history(run_id, "learning_curve/test_mape")) == 3
    held = {m.step: m.value for m in client.get_metric_history(run_id, "calibration/held")}
    assert list(held) == [50, 60, 70, 80, 90, 95, 99] and 0 <= held[50] <= held[99] <= 100
    for split in ("train", "validation", "test"):
        assert (
            0 < run.data.metrics[f"{split}/compute_mape"] < 100
            and f"{split}/compute_coverage_90" in run.data.metrics
        )
    assert (
        run.data.metrics["test/compute_mape"] == metrics["compute_mape"]
        and "learning_curve/gain" in run.data.metrics
    )
    assert run.data.tags[registry.DIGEST_TAG] == model_files.model_digest("data/model")
    artifacts = {a.path for a in client.list_artifacts(run_id)}
    assert artifacts == {"card.md", "predicted_against_measured.png"}
    card = Path("data/card.md").read_text()
    assert (
        mlflow.artifacts.load_text(f"{run.info.artifact_uri}/card.md")
        == run.data.tags["mlflow.note.content"]
        == card
    )


def test_a_dataset_of_another_machine_lends_and_counts_nowhere(joined):
    _, run = joined
    model = neural.load("data/model")
    own = [s for s in dataset.read_compute_samples(MEASUREMENTS)]
    assert sum(v for k, v in model.meta["samples"].items() if k.startswith("compute")) == len(own)
    inputs = {d.dataset.name: d.dataset.digest for d in run.inputs.dataset_inputs}
    version = files.json_digest(sorted(p.name for p in SHIPPED.iterdir()))
    assert inputs == {"measurements": "unversioned", "x": version}
    auxiliary = model.meta["provenance"]["lent"]["datasets/x"]
    assert (auxiliary["digest"], auxiliary["hardware"], auxiliary["exchanges"]) == (version, "other", 0)
    assert f"| datasets/x (other), version {version} | lends ops " in Path("data/card.md").read_text()


def test_a_model_is_evaluated_on_own_samples(joined):
    candidate = CandidateModel(neural.load("data/model"), [], MEASUREMENTS, EvaluateConfig(), None)
    metrics = judge_model(candidate, Path("data/evaluation"))
    assert metrics == joined[0] and metrics["n_compute"] == len(accuracy.held_out_samples(SAMPLES))
    assert len(Path("data/evaluation/predictions.csv").read_text().splitlines()) == metrics["n_compute"] + 1


def test_shipped_samples_that_differ_in_hardware_only_lend_unasked(place):
    """One folder has another batch, and one is of another kind of device."""
    apart = compute_samples(cache_law, 60, dataclasses.replace(SETTING, hardware="cpu-apart"))
    write(Path("datasets/apart"), apart)
    assert auxiliary_folders(SETTING) == [SHIPPED]
    assert auxiliary_folders(apart[0].setting) == [Path("datasets/apart")]
    shutil.rmtree("datasets/apart")


@pytest.mark.long
def test_traced_steps_of_jobs_join_unasked_and_are_on_record(joined):
    truth = neural.load("data/model").corrected_by(factors_of(2.0, 2.0))
    for number in (1000, 2000):
        traced_samples.add_traced_sample("datasets/jobs", sample(truth, number))
    train(learning_curve=False)
    provenance = neural.load("data/model").meta["provenance"]
    assert list(provenance["lent"]) == ["datasets/x"]
    assert provenance["job"]["steps"] == ["dlrm-00001000"]
    [run, *_] = mlflow.search_runs(output_format="list", max_results=1)
    assert run.data.metrics["traced/error"] < run.data.metrics["traced/error_before"] / 2
    shutil.rmtree("datasets/jobs")


@pytest.mark.long
def test_without_datasets_and_learning_curve_there_is_neither(joined):
    metrics = train(learning_curve=False, datasets=())
    assert metrics["n_compute"] == len(accuracy.held_out_samples(SAMPLES))
    assert (
        "lent" not in neural.load("data/model").meta["provenance"]
        and "Twice" not in Path("data/card.md").read_text()
    )


@pytest.mark.long
def test_own_replays_tell_what_exchanges_take_in_steps(place):
    train(learning_curve=False, datasets=())
    model, topology = neural.load("data/model"), Topology((Device(1 << 30),) * 2)
    problem = Problem("p", tuple(pool(12)), topology, SETTING.batch)
    made = [("random", SHARDERS["random"](problem, model, seed=seed)) for seed in range(FEWEST_STEPS)]

    def replay(workloads):
        """Replay on a machine where exchanges take 1.4 times as long in steps as alone."""
        costs = [price(w, model) for w in workloads]
        longer = [
            [tuple(1.4 * ms for ms in part) for part in (c.forward_comm_ms, c.backward_comm_ms)]
            for c in costs
        ]
        return [
            StepSample(
                c.forward_compute_ms,
                c.backward_compute_ms,
                *comm,
                c.waiting_ms,
                TimingSpread(1, 1, 1, 3),
                False,
            )
            for c, comm in zip(costs, longer, strict=True)
        ]

    replays.add_missing_replays(MEASUREMENTS, problem, made, SETTING, ReplayConfig(), replay)
    train(learning_curve=False, datasets=())
    found = neural.load("data/model")
    shutil.rmtree(MEASUREMENTS / dataset.REPLAYS)
    assert found.meta["steps"] == FEWEST_STEPS
    assert collective_model.step_factor(
        found.weights, collective_model.ALL_TO_ALL, "forward"
    ) == pytest.approx(1.4, rel=1e-3)
    output = "8: all-to-all forward 1.40, all-to-all backward 1.40"
    assert output in Path("data/card.md").read_text()


def test_the_stage_s_own_options_do_not_change_the_model(place):
    config = TrainConfig(**QUICK, datasets=("datasets/x",), learning_curve=False)
    same = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("datasets", "learning_curve")}
    fitting = params.part_of_config(config, fit.FitConfig)
    assert (
        type(fitting) is fit.FitConfig
        and dataclasses.asdict(fitting) == same
        and same["epochs"] == QUICK["epochs"]
    )
    assert schema.build_record(TrainConfig, {"datasets": ["datasets/x"]}, "train").datasets == ("datasets/x",)


@pytest.mark.parametrize(
    "datasets, message",
    [
        (
            ("datasets/other",),
            r"datasets/other holds samples of other settings than .*batch: 64 against 256.*; to lend their shape",
        ),
        (("datasets/none",), r"datasets/none holds samples of other settings than .*: none; to lend"),
        (("data/x",), "has the dataset 'data/x'; it needs to be a folder in datasets/"),
        (("datasets/../x",), "it needs to be a folder in datasets/"),
        (("/datasets/x",), "it needs to be a folder in datasets/"),
    ],
)
def test_a_dataset_that_cannot_join_is_named(place, datasets, message):
    with pytest.raises(ShardCoreError, match=message):
        train(datasets=datasets)


def test_the_version_of_the_data_is_what_dvc_says_of_the_measurements_and_only_in_its_stage(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    outs = [{"path": "data/other", "md5": "a"}, {"path": "data/measurements", "md5": "b.dir"}]
    Path("dvc.lock").write_text(yaml.safe_dump({"stages": {"measure": {"outs": outs}}}))
    monkeypatch.delenv("DVC_STAGE", raising=False)
    assert data_version() == "unversioned"
    monkeypatch.setenv("DVC_STAGE", "train")
    assert data_version() == "b.dir"
    for broken in ("", "stages: {}", yaml.safe_dump({"stages": {"measure": {"outs": outs[:1]}}})):
        Path("dvc.lock").write_text(broken)
        assert data_version() == "unversioned"


def test_unknown_keys_stay_errors():
    with pytest.raises(
        ShardCoreError, match=re.escape("train has an unknown key 'dataset'; known are epochs")
    ):
        schema.build_record(TrainConfig, {"dataset": []}, "train")
