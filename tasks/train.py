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
from shardcore.cost import accuracy, drift_correction, fit, known_errors, neural, study, training
from shardcore.cost.metrics import coverage
from shardcore.io import dataset, model_files, replays, schema, traced_samples, writing
from shardcore.io.measurements import ComputeSample
from shardcore.report import model_report
from tasks import console, paths, registry
from tasks.commit import git_commit
from tasks.setting import SettingConfig

_LEVELS = (50, 60, 70, 80, 90, 95, 99)
"""Percent of measurements that an interval should hold, at which calibration is logged."""


@dataclass(frozen=True)
class TrainConfig(fit.FitConfig):
    """FitConfig, and fields of the stage.

    datasets: shipped folders whose samples lend the shape of costs (cost/lending.py). None: all whose settings differ
      from this one in hardware only, and traced steps of jobs on this hardware.
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


def lenders(setting: Setting) -> list[Path]:
    """Shipped folders with samples that differ from a setting in hardware only, or with traced steps of its jobs."""
    return [
        folder
        for folder in sorted(p for p in paths.DATASETS.glob("*") if p.is_dir())
        if any(training.is_alike(held, setting) for held in dataset.settings(folder))
        or setting in traced_samples.settings(folder)
    ]


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
    shipped = lenders(setting) if config.datasets is None else list(map(Path, config.datasets))
    data = training.read(measurements, setting, shipped)
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
        own = {measurements: (version, data.known.compute)}
        lent = {Path(x.name): (replays.parts_digest(Path(x.name)), x.known.compute) for x in data.lent}
        mlflow.log_params(
            {
                **dataclasses.asdict(config),
                **{f"setting_{k}": v for k, v in dataclasses.asdict(setting).items()},
            }
        )
        mlflow.set_tags({"git_commit": commit, "data_version": version})
        _log_datasets({**own, **lent})
        trained = training.train(
            data,
            config.fit,
            progress,
            provenance={
                "data_version": version,
                "git_commit": commit,
                "seed": config.seed,
            },
        )
        model = trained.model
        epochs = [r for r in trained.curves if r["model"] == "compute"]
        # A law of other machines may be as good as it is.
        from_nothing = trained.start is None or trained.start.law is None
        if from_nothing and min(epochs, key=lambda r: r["validation_mape"])["epoch"] == 0:
            logger.warning(
                "the learned correction did not improve on the physical baseline, which is kept: "
                "measure more, or on a quieter machine"
            )
        for line in (*trained.of_lent, trained.of_steps, trained.of_traces):
            if line:
                logger.info("%s", line)
        if trained.traced_errors:
            before, after = trained.traced_errors
            mlflow.log_metrics({"traced/error_before": before, "traced/error": after})
        for sentence in known_errors.worse_than_usual(model):
            logger.warning("%s", sentence)
        studied = _study(model, data.known, config)
        card = model_report.model_card(model, studied, registry.model_name(setting.hardware))
        mlflow.log_metrics(studied.flat_metrics())
        _log_curves(client, run.info.run_id, trained.curves, studied.curve)
        _log_figures(model, accuracy.held_out(data.known.compute))
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
) -> model_report.StudyResults:
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
    studied = model_report.StudyResults(
        metrics,
        study.unseen_tables(known.compute, model.setting, config.fit),
        metrics["test"].get("repeatability"),
        curve,
    )
    if curve:
        logger.info("%s", model_report.doubling_gain_sentence(curve, studied.repeatability))
    return studied


# --- MLflow -------------------------------------------------------------------------------------------------


def _log_datasets(folders: Mapping[Path, tuple[str, Sequence[ComputeSample]]]) -> None:
    """Log each folder as an input of the run, with its version."""
    for folder, (version, own) in folders.items():
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
) -> None:
    timed, of = [s for s in held_out if s.error is None], f", {model.setting.hardware}"
    if timed:
        measured, predicted = np.array([s.total_ms for s in timed]), accuracy.predict(model, timed)
        shards = np.array([len(s.request.shards) for s in timed])
        # MLflow draws it: over the percent of measurements that an interval is to hold, the percent that it held.
        for level in _LEVELS:
            held = coverage(*accuracy.intervals(model, timed, level / 100), measured)
            mlflow.log_metric("calibration/held", held, step=level)
        for name, figure in {
            "predicted_against_measured": model_report.prediction_scatter_figure(
                measured, predicted, f"Held-out groups{of}"
            ),
            "error_by_size": model_report.error_by_size_figure(
                measured, predicted, shards, f"Errors on held-out groups{of}"
            ),
        }.items():
            mlflow.log_figure(figure, f"{name}.png")
