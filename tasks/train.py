"""Training the cost models, tracked in MLflow."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import yaml
from mlflow.entities import Metric
from prefect import get_run_logger, task

from shardcore import dataset, files, report
from shardcore.cost import accuracy, fit, neural
from shardcore.types import ComputeSample
from tasks import paths, registry
from tasks.setting import SettingConfig


def data_version() -> str:
    """DVC's hash of the measurements, from dvc.lock; "unversioned" outside a DVC stage, where they may have changed since."""
    if "DVC_STAGE" not in os.environ:
        return "unversioned"
    try:
        lock = yaml.safe_load(Path("dvc.lock").read_text())
        return next(o["md5"] for o in lock["stages"]["measure"]["outs"] if o["path"] == str(paths.MEASUREMENTS))
    except (OSError, KeyError, TypeError, StopIteration):
        return "unversioned"


def git_commit() -> str:
    """The commit of this folder, with "-dirty" where tracked files differ from it."""
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], capture_output=True,
                               text=True, check=False)
    except OSError:
        return "no git"
    return found.stdout.strip() or "no git"


@task(task_run_name="train-model")
def train_model(measurements: Path, wanted: SettingConfig, config: fit.FitConfig, folder: Path) -> dict[str, float]:
    """Train on the measurements, write the model's files, log the run; the metrics on the test split."""
    logger = get_run_logger()
    client = registry.connect()
    setting = wanted.of_dataset(measurements)
    compute, comm = dataset.read_compute(measurements, setting), dataset.read_comm(measurements, setting)
    logger.info("training for %s on %d groups and %d exchanges", setting, len(compute), len(comm))

    def progress(model: str, epoch: int, values: dict[str, float]) -> None:
        if epoch % 50 == 0:
            logger.info("%s, epoch %d: %s", model, epoch, ", ".join(f"{k} {v:.4g}" for k, v in values.items()))

    with mlflow.start_run(run_name=f"train-{setting.hardware}") as run:
        version, commit = data_version(), git_commit()
        mlflow.log_params({**dataclasses.asdict(config), **{f"setting_{k}": v for k, v in dataclasses.asdict(setting).items()}})
        mlflow.set_tags({"git_commit": commit, "data_version": version})
        _log_dataset(compute, version)
        trained = fit.train(compute, comm, setting, config, progress)
        found = [r for r in trained.curves if r["model"] == "compute"]
        best = min(found, key=lambda r: r["validation_mape"])
        logger.info("compute: best after epoch %d of %d, validation error %.1f%%", best["epoch"], found[-1]["epoch"],
                    best["validation_mape"])
        if best["epoch"] == 0:
            logger.warning("the learned correction did not improve on the physical baseline, which is kept: measure more, or on "
                           "a quieter machine")
        mlflow.log_metric("compute_best_epoch", best["epoch"])
        model = dataclasses.replace(trained.model, meta={**trained.model.meta, "provenance": {
            "data_version": version, "git_commit": commit, "seed": config.seed}})
        held_out = accuracy.held_out(compute), accuracy.held_out(comm)
        metrics = accuracy.evaluate(model, *held_out)
        mlflow.log_metrics({f"test_{k}": v for k, v in metrics.items()})
        _log_curves(client, run.info.run_id, trained.curves)
        _log_figures(model, held_out[0], trained.curves)
        neural.save(model, folder)
        files.write_csv(folder.parent / "curves.csv", trained.curves)
        mlflow.set_tag(registry.DIGEST_TAG, files.model_digest(folder))
    return metrics


def _log_dataset(compute: list[ComputeSample], version: str) -> None:
    frame = pd.DataFrame({"id": [s.id for s in compute], "shards": [len(s.request.shards) for s in compute],
                          "total_ms": [s.total_ms if s.forward else None for s in compute]})
    with warnings.catch_warnings(action="ignore"):  # that a path could be other sources too; that integers cannot be missing
        data = mlflow.data.from_pandas(frame, source=str(paths.MEASUREMENTS), name="measurements", digest=version[:36])
        mlflow.log_input(data, context="training")


def _log_curves(client: mlflow.MlflowClient, run_id: str, rows: list[dict[str, Any]]) -> None:
    metrics = [Metric(f"{r['model']}_{k}", float(v), 0, r["epoch"]) for r in rows for k, v in r.items()
               if k not in ("model", "epoch")]
    for i in range(0, len(metrics), 1000):
        client.log_batch(run_id, metrics=metrics[i:i + 1000])


def _log_figures(model: neural.NeuralModel, compute: list[ComputeSample], rows: list[dict[str, Any]]) -> None:
    measured = [s for s in compute if s.error is None]
    if not measured:
        return
    total = pd.Series([s.total_ms for s in measured]).to_numpy()
    mlflow.log_figure(report.predicted_against_measured(total, accuracy.predict(model, measured), "held-out groups"),
                      "predicted_against_measured.png")
    metric = next((k for k in rows[0] if k.startswith("validation")), None) if rows else None
    if metric:
        mlflow.log_figure(report.curves(rows, metric, "training"), "curves.png")
