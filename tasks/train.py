"""Training the cost models, tracked in MLflow."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.data.pandas_dataset import from_pandas
from mlflow.entities import Metric
from prefect import get_run_logger, task

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost import accuracy, drift_correction, fit, known_errors, neural, pace, study, training
from shardcore.cost.metrics import coverage
from shardcore.io import dataset, model_files, replays, schema, traced_samples, writing
from shardcore.io.measurements import ComputeSample
from shardcore.report import model_report
from tasks import console, paths, registry
from tasks.commit import git_commit
from tasks.setting import SettingConfig


@dataclass(frozen=True)
class TrainConfig(fit.FitConfig):
    """FitConfig, and fields of the stage.

    datasets: shipped folders whose samples of the same setting are added, for training and evaluation. None: all that
      have any, unless their machine is faster or slower (see cost/pace.py), and traced steps of jobs.
    learning_curve: True to also train on parts of the samples. That takes as long as two further trainings.
    """

    datasets: tuple[str, ...] | None = None
    learning_curve: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for folder in self.datasets or ():
            if Path(folder).parts[:1] != (str(paths.DATASETS),) or ".." in Path(folder).parts:
                raise ShardCoreError(
                    f"train config has the dataset {folder!r}; it needs to be a folder in "
                    f"{paths.DATASETS}/, which DVC watches"
                )

    @property
    def fit(self) -> fit.FitConfig:
        return fit.FitConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(fit.FitConfig)})


def data_version() -> str:
    """DVC's hash of the measurements, from dvc.lock. "unversioned" outside a DVC stage, as they may have changed."""
    if "DVC_STAGE" not in os.environ:
        return "unversioned"
    try:
        lock = schema.read_yaml("dvc.lock")
        return next(
            o["md5"] for o in lock["stages"]["measure"]["outs"] if o["path"] == str(paths.MEASUREMENTS)
        )
    except (ShardCoreError, KeyError, TypeError, StopIteration):
        return "unversioned"


def named(folders: Sequence[str], setting: Setting) -> list[Path]:
    """Folders that train.datasets names. Those of other hardware only do not join, with a warning."""
    joined = []
    for folder in map(Path, folders):
        hardware = {held.hardware for held in dataset.settings(folder)}
        if hardware and setting.hardware not in hardware:
            of = ", ".join(sorted(hardware))
            get_run_logger().warning("%s is of %s, not of %s: it does not join", folder, of, setting.hardware)
        else:
            joined.append(folder)
    return joined


def of_same_hardware(setting: Setting, measurements: Path) -> tuple[list[Path], dict[str, str]]:
    """Shipped folders with samples of a setting that are added, and others of the setting, with the reason.

    Two machines may have one name. So a folder whose ops take much longer or shorter than here is not added. A folder
    of only traced steps is added: the speed of jobs is what it shows.
    """
    joined, refused = [], {}
    own = dataset.read_compute(measurements, setting)
    for folder in sorted(p for p in paths.DATASETS.glob("*") if p.is_dir()):
        if setting not in dataset.settings(folder):
            if setting in traced_samples.settings(folder):
                joined.append(folder)
            continue
        ratio = pace.pace(own, dataset.read_compute(folder, setting))
        if pace.is_equal(ratio):
            joined.append(folder)
        else:
            refused[str(folder)] = (
                f"ops take {ratio:.2f} times as long here; measure on a quiet machine, "
                "or name it in train.datasets"
            )
    return joined, refused


@task(task_run_name="train-model")
@registry.plain_errors()
def train_model(
    measurements: Path, wanted: SettingConfig, config: TrainConfig, folder: Path
) -> dict[str, float]:
    """Train on the measurements, and log the run. Returns the metrics on the test split.

    Writes the model's files to `folder`, and curves.csv and card.md beside it.
    """
    logger = get_run_logger()
    client = registry.connect()
    setting = wanted.of_dataset(measurements)
    shipped, refused = (
        of_same_hardware(setting, measurements)
        if config.datasets is None
        else (named(config.datasets, setting), {})
    )
    for path, why in refused.items():
        logger.warning("%s is of the same hardware, but does not join: %s", path, why)
    for path in shipped:
        if not (dataset.settings(path) or replays.digests(path) or traced_samples.digests(path)):
            raise ShardCoreError(
                f"{path} holds neither samples nor replays nor traced steps; train.datasets in params.yaml "
                "names dataset folders"
            )
    data = training.read([measurements, *shipped], setting)
    for warning in data.warnings:
        logger.warning("%s", warning)
    logger.info("%s", data)

    work = console.Work("epochs", config.epochs)

    def progress(model: str, epoch: int, values: dict[str, float]) -> None:
        # Models of exchanges are fitted in one step, without epochs.
        if model == "compute":
            work.done(epoch)
        if epoch % 10 == 0:
            logger.info(
                "%s, epoch %d: %s", model, epoch, ", ".join(f"{k} {v:.4g}" for k, v in values.items())
            )

    with registry.run(run_name=f"train-{setting.hardware}") as run:
        version, commit = data_version(), git_commit()
        versions = {measurements: version, **{path: replays.parts_digest(path) for path in shipped}}
        mlflow.log_params(
            {
                **dataclasses.asdict(config),
                **{f"setting_{k}": v for k, v in dataclasses.asdict(setting).items()},
            }
        )
        mlflow.set_tags({"git_commit": commit, "data_version": version})
        _log_datasets(data.known.compute, versions)
        joined = {"datasets": {str(path): versions[path] for path in shipped}} if shipped else {}
        trained = training.train(
            data,
            config.fit,
            progress,
            provenance={
                "data_version": version,
                "git_commit": commit,
                "seed": config.seed,
                **joined,
                **({"not_joined": refused} if refused else {}),
            },
        )
        model = trained.model
        epochs = [r for r in trained.curves if r["model"] == "compute"]
        if min(epochs, key=lambda r: r["validation_mape"])["epoch"] == 0:
            logger.warning(
                "the learned correction did not improve on the physical baseline, which is kept: "
                "measure more, or on a quieter machine"
            )
        if trained.of_steps:
            logger.info("%s", trained.of_steps)
        if trained.of_traces:
            logger.info("%s", trained.of_traces)
        if trained.traced_errors:
            before, after = trained.traced_errors
            mlflow.log_metrics({"traced/error_before": before, "traced/error": after})
        for sentence in known_errors.worse_than_usual(model):
            logger.warning("%s", sentence)
        studied = _study(model, data.known, config)
        card = model_report.model_card(model, studied, registry.model_name(setting.hardware))
        mlflow.log_metrics(studied.flat())
        _log_curves(client, run.info.run_id, trained.curves, studied.curve)
        _log_figures(model, accuracy.held_out(data.known.compute), studied)
        mlflow.log_text(card, registry.CARD)
        mlflow.set_tag("mlflow.note.content", card)  # the run's description
        # Files come last, so that a failed run leaves no model that looks trained.
        neural.save(model, folder)
        writing.write_csv(folder.with_name("curves.csv"), trained.curves)
        writing.write_atomic(folder.with_name(registry.CARD), card.encode())
        mlflow.set_tag(registry.DIGEST_TAG, model_files.model_digest(folder))
    return dict(studied.metrics["test"])


def _study(
    model: neural.NeuralModel, known: drift_correction.Measurements, config: TrainConfig
) -> model_report.Studied:
    logger = get_run_logger()

    def progress(_: str, samples: int, values: dict[str, float]) -> None:
        console.progress(samples / len(known.compute), f"learning curve: trained on {samples} groups")
        logger.info(
            "learning curve, trained on %d groups: held-out error %.1f%%", samples, values["test_mape"]
        )

    metrics = {split: training.judge(model, known, split) for split in ("train", "validation")}
    metrics["test"] = study.judge_test_split(model, known)
    curve = (
        study.learning_curve(known.compute, model.setting, config.fit, progress)
        if config.learning_curve
        else None
    )
    studied = model_report.Studied(
        metrics,
        study.unseen_tables(known.compute, model.setting, config.fit),
        metrics["test"].get("repeatability"),
        curve,
    )
    if curve:
        logger.info("%s", model_report.doubling(curve, studied.repeatability))
    return studied


# --- MLflow -------------------------------------------------------------------------------------------------


def _log_datasets(compute: Sequence[ComputeSample], versions: Mapping[Path, str]) -> None:
    """Log each folder as an input of the run, with its version."""
    for folder, version in versions.items():
        ids = dataset.read_ids(folder, "compute")
        own = [s for s in compute if s.id in ids]
        frame = pd.DataFrame(
            {
                "id": [s.id for s in own],
                "shards": [len(s.request.shards) for s in own],
                "total_ms": [s.total_ms for s in own],
            }
        )
        # MLflow warns that a path could also be another kind of source, and that integers cannot be missing.
        with warnings.catch_warnings(action="ignore"):
            data = from_pandas(frame, source=str(folder), name=folder.name, digest=version[:36])
            mlflow.log_input(data, context="training")


def _log_curves(
    client: mlflow.MlflowClient,
    run_id: str,
    rows: Sequence[Mapping[str, Any]],
    curve: study.LearningCurve | None,
) -> None:
    """Log training curves by epoch, and the learning curve by samples."""
    metrics = [
        Metric(f"{r['model']}/{k}", float(v), 0, r["epoch"])
        for r in rows
        for k, v in r.items()
        if k not in ("model", "epoch")
    ]
    metrics += [
        Metric("learning_curve/test_mape", error, 0, samples)
        for samples, error in (curve.rows if curve else ())
    ]
    # MLflow takes at most 1,000 metrics in a request.
    for i in range(0, len(metrics), 1000):
        client.log_batch(run_id, metrics=metrics[i : i + 1000])


def _log_figures(
    model: neural.NeuralModel,
    held_out: Sequence[ComputeSample],
    studied: model_report.Studied,
) -> None:
    timed, of = [s for s in held_out if s.error is None], f", {model.setting.hardware}"
    if studied.curve:
        figure = model_report.learning_curve(studied.curve, studied.repeatability, f"Learning curve{of}")
        mlflow.log_figure(figure, "learning_curve.png")
    if timed:
        measured, predicted = np.array([s.total_ms for s in timed]), accuracy.predict(model, timed)
        shards = np.array([len(s.request.shards) for s in timed])
        found = [
            coverage(*accuracy.intervals(model, timed, level / 100), measured)
            for level in model_report.LEVELS
        ]
        for name, figure in {
            "predicted_against_measured": model_report.predicted_against_measured(
                measured, predicted, f"Held-out groups{of}"
            ),
            "error_by_size": model_report.error_by_size(
                measured, predicted, shards, f"Errors on held-out groups{of}"
            ),
            "calibration": model_report.calibration(
                model_report.LEVELS, found, len(timed), f"Intervals on held-out groups{of}"
            ),
        }.items():
            mlflow.log_figure(figure, f"{name}.png")
