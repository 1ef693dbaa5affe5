"""The gate between a trained model and the champion."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import mlflow
from mlflow.entities import Metric
from mlflow.entities.model_registry import ModelVersion
from prefect import get_run_logger, task

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_COUNT, Record, describe_differences, number_within
from shardcore.cost import (
    accuracy,
    composite,
    known_errors,
    neural,
    replay_metrics,
    study,
    traced_training,
    training,
)
from shardcore.io import dataset, files, model_files, replays, traced_samples
from shardcore.io.traced_samples import TracedSample
from shardcore.report import model_report
from shardcore.search.learned.policy import POLICY_JSON
from tasks import console, model_history, paths, policy_registry, publish_claim, registry

TRACED_ERROR = "traced_error"
"""Tag of a version: its error on held-out steps of running jobs, percent."""
_REPLAYS_TAG, _PRECISIONS_TAG = "shardcore.replays_digest", "precisions"


@dataclass(frozen=True)
class PromoteConfig(Record):
    """Conditions under which a challenger becomes champion.

    may_lose: points of score that a challenger may lose, and by which its error of replayed plans may be beyond the
      explained one (see replay_metrics.unexplained_error), and still pass.
    approval: True if a challenger that passed waits for a person's approval.
    also: folders of models for other precisions of weights, of the same hardware and optimizer. They become part of the
      version without being judged, so that tables of several precisions can be planned.
    """

    may_lose: Annotated[float, number_within(0, MOST_COUNT)] = 0.0
    approval: bool = False
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Promotion:
    """Result of judging a newly trained model against the champion.

    model: name of the registered model.
    challenger: version of the challenger.
    champion: version of the champion afterwards. None: there is none yet.
    reason: the reason, in words.
    """

    model: str
    challenger: str
    champion: str | None
    reason: str


def score_of_metrics(metrics: dict[str, float]) -> float:
    """Score of a cost model: mean absolute percentage error over compute and exchanges. Lower is better."""
    comm = [metrics[k] for k in ("forward_comm_mape", "backward_comm_mape") if k in metrics]
    return (metrics["compute_mape"] + sum(comm) / len(comm)) / 2 if comm else metrics["compute_mape"]


@task(task_run_name="promote-model")
@registry.one_line_errors()
def promote_model(
    folder: Path,
    measurements: Path,
    config: PromoteConfig,
    approve: bool = False,
    will_publish: bool = False,
    replayed: Path = paths.REPLAYS,
    traced: Path = paths.TRACED,
) -> Promotion:
    """Register a cost model's files as challenger, and make the challenger champion unless the champion is better.

    folder: folder of the model's files.
    measurements: dataset whose held-out samples decide which one is better.
    config: with config.approval, a challenger that passed becomes champion only with `approve`.
    approve: True if a person approves.
    will_publish: True if the caller publishes afterwards, so that nobody else has to.
    replayed: replays by `evaluate`. A model that errs more on them than its errors of ops and exchanges explain does
      not pass. The champion is also better if it surely errs less, or chooses better among their plans.
    traced: dataset of traced steps of running jobs. If some are held out, they decide in place of the measurements, as
      the purpose of a model is to predict jobs.
    """
    logger = get_run_logger()
    model, digest = neural.load(folder), model_files.model_digest(folder)
    whole = composite.load_models([folder, *config.also])
    client = registry.connect_to_mlflow()
    tags = _lineage_tags(model.meta["provenance"]) | {
        "setting": str(whole.setting),
        _PRECISIONS_TAG: whole.setting.precision,
    }
    trained_by = registry.find_run_id(registry.DIGEST_TAG, digest)
    challenger = registry.register_model(client, folder, trained_by, tags, config.also)
    name, version = challenger.name, str(challenger.version)
    before = registry.find_version(client, name, registry.CHAMPION)
    champion = None if before is None else str(before.version)
    kept = replays.read_all_replays(replayed, model.setting)
    if kept:
        _log_replay_metrics(client, challenger, replay_metrics.judge_replays(kept, model))

    def log_result(champion: str | None, reason: str) -> Promotion:
        logger.info("%s: %s", name, reason, extra=console.RESULT)
        return Promotion(name, version, champion, reason)

    if champion == version:
        return log_result(champion, f"version {version} is champion already")
    if before and not approve and model_history.was_rolled_back(client, before, version):
        return log_result(
            champion,
            f"version {champion} stays champion: a person went back to it from version {version}; "
            "--approve overrules",
        )
    held_out = traced_training.split_samples(
        [s for s in traced_samples.read_traced_samples([traced]) if traced_training.is_model_for(whole, s)]
    ).held_out
    if held_out:
        if dataset.dataset_settings(measurements):  # this score decides nothing, and is recorded for people
            _score_by_measurements(client, model, measurements, challenger)
        new = _score_by_traces(client, whole, held_out, challenger)
    else:
        new = _score_by_measurements(client, model, measurements, challenger)
    passed, reason = _gate_verdict(new, kept, before, config)
    dropped = {*(before.tags.get(_PRECISIONS_TAG, "").split("+") if before else ()), ""} - {
        "",
        *whole.setting.precision.split("+"),
    }
    if dropped:
        reason += (
            f"; it has no model for {' and '.join(sorted(dropped))}, as champion {champion} has: name "
            "one in promote.also"
        )
    client.set_model_version_tag(name, version, model_history.GATE, ("passed, " if passed else "") + reason)
    if not passed:
        stays = f"version {champion} stays champion" if champion else "no version is champion yet"
        return log_result(champion, f"{stays}; challenger {version} {reason}")
    if config.approval and not approve:
        return log_result(champion, f"challenger {version} awaits approval; {reason}")
    # Publishing is claimed before the alias is set. Else the watch could see the new champion and publish, too.
    if will_publish:
        publish_claim.claim_publishing(client, name, version)
    client.set_registered_model_alias(name, registry.CHAMPION, version)
    return log_result(version, f"version {version} is champion, {reason}")


def _lineage_tags(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Registry tags on the origin of a model: provenance values, and the job, steps and digest of its traces."""
    tags = {name: str(value) for name, value in provenance.items() if name != "job"}
    if of_job := provenance.get("job"):
        tags |= {
            "job": of_job["job"],
            "job.steps": ", ".join(map(str, of_job["steps"])),
            "job.traces": files.json_digest(of_job["traces"]),
        }
    return tags


@task(task_run_name="promote-policy")
@registry.one_line_errors()
def promote_policy(folder: Path) -> str | None:
    """Register a sharding policy's files, if the folder has any, as champion. Returns the version.

    There is no gate, as a plan that a policy proposes is published only if the cost model finds it cheaper.
    """
    if not (folder / POLICY_JSON).exists():
        return None
    try:
        version = policy_registry.register_policy(registry.connect_to_mlflow(), folder)
    except ShardCoreError as error:  # no reason not to promote the cost model
        get_run_logger().warning("%s", error)
        return None
    get_run_logger().info(
        "%s: version %s is champion, trained against cost model version %s",
        version.name,
        version.version,
        version.tags["cost_model_version"],
    )
    return str(version.version)


def _log_replay_metrics(
    client: mlflow.MlflowClient, version: ModelVersion, replays: Sequence[replay_metrics.PlanReplay]
) -> None:
    """Log replay metrics (replays/*) and a plot to the MLflow run of a model version, once for each set of replays."""
    known = files.json_digest(replay_metrics.csv_rows(replays))
    if version.tags.get(_REPLAYS_TAG) == known or version.run_id is None:
        return
    now_ms = int(1000 * time.time())
    client.log_batch(
        version.run_id,
        [Metric(f"replays/{k}", v, now_ms, 0) for k, v in replay_metrics.flat_metrics(replays).items()],
    )
    client.log_figure(
        version.run_id, model_report.replay_scatter_figure(replays, "Replayed plans"), "replays.png"
    )
    client.set_model_version_tag(version.name, version.version, _REPLAYS_TAG, known)


@dataclass(frozen=True)
class ModelScore:
    """A challenger's error on held-out samples, and the way to judge a champion by the same samples.

    error: error of the challenger, percent.
    text: the error in words.
    model: model that is compared by replays.
    of: function from a champion to its error and its model to compare by replays. It returns None for another setting.
    """

    error: float
    text: str
    model: Any
    of: Callable[[Any], tuple[float, Any] | None]


def _score_by_traces(
    client: mlflow.MlflowClient, whole: Any, held_out: Sequence[TracedSample], challenger: ModelVersion
) -> ModelScore:
    """Score of a challenger model on held-out traced steps of running jobs."""
    jobs = " and ".join(dict.fromkeys(sample.job for sample in held_out))
    error = traced_training.mean_percent_error(whole, held_out)
    client.set_model_version_tag(challenger.name, challenger.version, TRACED_ERROR, f"{error:.4f}")

    def judge_champion(champion: Any) -> tuple[float, Any] | None:
        if not all(traced_training.is_model_for(champion, sample) for sample in held_out):
            return None
        return traced_training.mean_percent_error(champion, held_out), champion

    return ModelScore(error, f"error {error:.2f}% on held-out traces of {jobs}", whole, judge_champion)


def _score_by_measurements(
    client: mlflow.MlflowClient, model: neural.NeuralModel, measurements: Path, challenger: ModelVersion
) -> ModelScore:
    """Score of a challenger model on held-out measurements, also recorded as a tag of the model version."""
    known = training.read_held_out_samples(model, measurements)
    found = study.judge_test_split(model, known)
    error, noise = score_of_metrics(found), found.get("repeatability", "")
    for tag, value in (
        ("score", f"{error:.4f}"),
        (model_history.NOISE, str(noise)),
        (model_history.ACCURACY, accuracy.accuracy_summary(found)),
    ):
        client.set_model_version_tag(challenger.name, challenger.version, tag, value)

    def judge_champion(champion: Any) -> tuple[float, Any] | None:
        # Errors of different settings cannot be compared.
        trained = [m for m in known_errors.trained_models(champion) if isinstance(m, neural.NeuralModel)]
        like = next((m for m in trained if m.setting == model.setting), None)
        return like and (score_of_metrics(training.judge_model(like, known)), like)

    text = f"score {error:.2f}% (mean error on this machine's held-out groups and exchanges)"
    return ModelScore(error, text, model, judge_champion)


def _gate_verdict(
    new: ModelScore,
    replay_sets: Sequence[replays.ReplaySet],
    before: ModelVersion | None,
    config: PromoteConfig,
) -> tuple[bool, str]:
    """Verdict of the promotion gate on a challenger, and its reason."""
    rows = replay_metrics.judge_replays(replay_sets, new.model)
    found = replay_metrics.flat_metrics(rows) if rows else None
    if found and replay_metrics.unexplained_error(found) > config.may_lose:
        return False, f"errs on replayed plans: {replay_metrics.describe_accuracy(found)}"
    if before is None:
        return True, f"{new.text}, the first"
    try:
        champion = registry.download_model(before)
    except ShardCoreError as error:  # it was made by another version of ShardCore
        return True, f"{new.text}; champion {before.version} cannot be read any more: {error}"
    if (judged := new.of(champion)) is None:
        return True, f"{new.text}; champion {before.version} is for another setting: " + describe_differences(
            champion.setting, new.model.setting
        )
    old_error, old_model = judged
    if new.error > old_error + config.may_lose:
        return False, f"lost by {new.error - old_error:.2f} points: {new.text} against {old_error:.2f}%"
    if lost := replay_sets and replay_metrics.challenger_rejection(
        rows, replay_metrics.judge_replays(replay_sets, old_model)
    ):
        return False, f"lost by replayed plans: {lost}"
    return True, f"{new.text} against {old_error:.2f}% of champion {before.version}"
