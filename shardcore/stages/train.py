"""Train cost models on measurements, and study them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardcore.cost import known_errors, study, training
from shardcore.cost.fit_config import FitConfig
from shardcore.cost.neural import NeuralModel
from shardcore.cost.profile import Profile
from shardcore.report.model_report import StudyResults, doubling_gain_sentence
from shardcore.stages.progress import Progress, StageWork


def train(
    data: training.TrainingData,
    config: FitConfig,
    progress: Progress,
    start: NeuralModel | Profile | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> training.TrainingResult:
    """Train a cost model, and report on the data and the model.

    start, provenance, errors: as of training.train.
    """
    for warning in data.warnings:
        progress.warning("%s", warning)
    progress.info("%s", data)
    work = StageWork(progress, "epochs", config.epochs)

    def report_epoch(model: str, epoch: int, values: dict[str, float]) -> None:
        if model == "compute":  # models of exchanges are fitted in one step, without epochs
            work.show_done(epoch, ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    trained = training.train(data, config, report_epoch, start, provenance)
    errors = {r["epoch"]: r["validation_mape"] for r in trained.curves if r["model"] == "compute"}
    # A law of other machines may be as good as it is.
    from_nothing = start is None and (trained.start is None or trained.start.law is None)
    if from_nothing and min(errors, key=lambda epoch: errors[epoch]) == 0:
        progress.warning(
            "the learned correction did not improve on the physical baseline, which is kept: "
            "measure more, or on a quieter machine"
        )
    for line in (*trained.auxiliary_notes, trained.of_steps, trained.of_traces):
        if line:
            progress.info("%s", line)
    for sentence in known_errors.error_warnings(trained.model):
        progress.warning("%s", sentence)
    return trained


def study_model(
    model: NeuralModel,
    data: training.TrainingData,
    config: FitConfig,
    progress: Progress,
    learning_curve: bool = True,
) -> StudyResults:
    """Judge a cost model on each split of its samples and on unseen tables.

    learning_curve: True to also train on parts of the samples, which takes as long as two further trainings of ops.
    """
    known, curve = data.known, None

    def report_training(_: str, samples: int, values: dict[str, float]) -> None:
        progress.info(
            "learning curve: error of %.1f%% after training on %d groups", values["test_mape"], samples
        )

    metrics = {split: training.judge_model(model, known, split) for split in ("train", "validation")}
    metrics["test"] = study.judge_test_split(model, known)
    if learning_curve:
        curve = study.learning_curve(known.compute, model.setting, config, report_training)
    unseen = study.unseen_table_error(known.compute, model.setting, config)
    studied = StudyResults(metrics, unseen, metrics["test"].get("repeatability"), curve)
    if curve:
        progress.info("%s", doubling_gain_sentence(curve, studied.repeatability))
    return studied
