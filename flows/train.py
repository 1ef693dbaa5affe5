"""train: train cost models of the measured setting."""

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
from prefect import flow, get_run_logger, task

from flows import program
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost import accuracy, fit, neural, study, training
from shardcore.cost.metrics import interval_coverage
from shardcore.io import dataset, model_files, replays, schema, traced_samples, writing
from shardcore.io.measurements import ComputeSample
from shardcore.report import model_report
from shardcore.stages import train as stage
from tasks import console, params, paths, registry
from tasks.commit import git_commit
from tasks.progress import RunProgress
from tasks.setting import SettingConfig

_LEVELS = (50, 60, 70, 80, 90, 95, 99)
"""Percent of measurements that an interval should hold, at which calibration is logged."""


@dataclass(frozen=True)
class TrainConfig(fit.FitConfig):
    """Training of cost models: FitConfig, and fields of the stage.

    datasets: shipped folders whose samples give the shape of costs (cost/auxiliary_samples.py). None: all whose
      settings differ from this one in hardware only, and traced steps of jobs on this hardware.
    learning_curve: True to also train on parts of the samples. That takes as long as two further trainings of ops.
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


def data_version() -> str:
    """DVC's hash of the measurements, from dvc.lock. "unversioned" outside a DVC stage."""
    if "DVC_STAGE" not in os.environ:
        return "unversioned"
    try:
        lock = schema.read_yaml("dvc.lock")
        return next(
            o["md5"] for o in lock["stages"]["measure"]["outs"] if o["path"] == str(paths.MEASUREMENTS)
        )
    except (ShardCoreError, KeyError, TypeError, StopIteration):
        return "unversioned"


def auxiliary_folders(setting: Setting) -> list[Path]:
    """Shipped dataset folders of auxiliary samples: of settings that differ in hardware only, or of traced jobs."""
    return [
        folder
        for folder in sorted(p for p in paths.DATASETS.glob("*") if p.is_dir())
        if any(training.differs_in_hardware_only(held, setting) for held in dataset.dataset_settings(folder))
        or setting in traced_samples.traced_settings(folder)
    ]


@task(task_run_name="train-model")
@registry.one_line_errors()
def train_model(
    measurements: Path, setting_config: SettingConfig, config: TrainConfig, folder: Path
) -> dict[str, float]:
    """Train a cost model on measurements, and log the run to MLflow. Returns the metrics on the test split.

    Writes the model's files to `folder`, and curves.csv and card.md beside it.
    """
    client, progress = registry.connect_to_mlflow(), RunProgress()
    setting = setting_config.dataset_setting(measurements)
    shipped = auxiliary_folders(setting) if config.datasets is None else list(map(Path, config.datasets))
    data = training.read_training_data(measurements, setting, shipped)
    with registry.tagged_run(run_name=f"train-{setting.hardware}") as run:
        provenance = {"data_version": data_version(), "git_commit": git_commit(), "seed": config.seed}
        _log_inputs(data, config, provenance)
        fitting = params.part_of_config(config, fit.FitConfig)
        trained = stage.train(data, fitting, progress, provenance=provenance)
        model = trained.model
        studied = stage.study_model(model, data, fitting, progress, config.learning_curve)
        card = model_report.model_card(model, studied, registry.registered_model_name(setting.hardware))
        mlflow.log_metrics(studied.flat_metrics())
        if trained.traced_errors:
            mlflow.log_metrics(
                dict(zip(("traced/error_before", "traced/error"), trained.traced_errors, strict=True))
            )
        _log_curves(client, run.info.run_id, trained.curves, studied.curve)
        _log_figures(model, accuracy.held_out_samples(data.known.compute))
        mlflow.log_text(card, registry.CARD)
        mlflow.set_tag("mlflow.note.content", card)  # the run's description
        # Files come last, so that a failed run leaves no model that looks trained.
        neural.save(model, folder)
        writing.write_csv(folder.with_name("curves.csv"), trained.curves)
        writing.write_atomic(folder.with_name(registry.CARD), card.encode())
        mlflow.set_tag(registry.DIGEST_TAG, model_files.model_digest(folder))
    return dict(studied.metrics["test"])


# --- MLflow -------------------------------------------------------------------------------------------------


def _log_inputs(data: training.TrainingData, config: TrainConfig, provenance: Mapping[str, Any]) -> None:
    """Log training parameters and data versions to MLflow, and each folder of samples as an input."""
    setting = {f"setting_{k}": v for k, v in dataclasses.asdict(data.setting).items()}
    mlflow.log_params({**dataclasses.asdict(config), **setting})
    mlflow.set_tags({key: provenance[key] for key in ("git_commit", "data_version")})
    folders = {data.folder: (provenance["data_version"], data.known.compute)}
    for auxiliary in data.auxiliary:
        folders[Path(auxiliary.name)] = replays.dataset_digest(Path(auxiliary.name)), auxiliary.known.compute
    for folder, (version, samples) in folders.items():
        frame = pd.DataFrame(
            {
                "id": [s.id for s in samples],
                "shards": [len(s.request.shards) for s in samples],
                "total_ms": [s.total_ms for s in samples],
            }
        )
        # MLflow warns that a path could also be another kind of source, and that integers cannot be missing.
        with warnings.catch_warnings(action="ignore"):
            source = from_pandas(frame, source=str(folder), name=folder.name, digest=version[:36])
            mlflow.log_input(source, context="training")


def _log_curves(
    client: mlflow.MlflowClient,
    run_id: str,
    rows: Sequence[Mapping[str, Any]],
    curve: study.LearningCurve | None,
) -> None:
    """Log training curves by epoch, and the learning curve by number of samples, to MLflow."""
    by_epoch = (
        Metric(f"{r['model']}/{k}", float(v), 0, r["epoch"])
        for r in rows
        for k, v in r.items()
        if k not in ("model", "epoch")
    )
    by_samples = (
        Metric("learning_curve/test_mape", error, 0, n) for n, error in (curve.rows if curve else ())
    )
    registry.log_curves(client, run_id, [*by_epoch, *by_samples])


def _log_figures(
    model: neural.NeuralModel,
    held_out: Sequence[ComputeSample],
) -> None:
    timed, of = [s for s in held_out if s.error is None], f", {model.setting.hardware}"
    if timed:
        measured, predicted = np.array([s.total_ms for s in timed]), accuracy.predict_op_ms(model, timed)
        # MLflow draws it: over the percent of measurements that an interval is to hold, the percent that it held.
        for level in _LEVELS:
            held = interval_coverage(*accuracy.confidence_intervals(model, timed, level / 100), measured)
            mlflow.log_metric("calibration/held", held, step=level)
        figure = model_report.prediction_scatter_figure(measured, predicted, f"Held-out groups{of}")
        mlflow.log_figure(figure, "predicted_against_measured.png")


@flow(name="train")
def train() -> None:
    setting = params.read_section("setting", SettingConfig)
    config = params.read_section("train", TrainConfig)
    metrics = train_model(paths.MEASUREMENTS, setting, config, paths.MODEL)
    logger = get_run_logger()
    logger.info("on the test split: %s", ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
    logger.info("%s", accuracy.accuracy_summary(metrics), extra=console.RESULT)


if __name__ == "__main__":
    program.run_as_program(train)
