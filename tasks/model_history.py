"""History of champions. Publishing notes them in a tag of the model, as an alias knows only the present one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping

import mlflow
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from shardcore.core.validation import MOST_UNIX_S
from shardcore.cost import replay_metrics
from shardcore.report.history_pages import ModelRecord
from tasks import registry

CHAMPIONS = "shardcore.champions"
NOISE, ACCURACY, GATE = "noise", "accuracy", "gate"
"""Tags of a version: error of a timing itself in percent, errors of its model in words, and the gate's reason."""
_MOST = 100
"""Most changes that are kept, as MLflow limits the size of a tag."""


def record_champion(client: mlflow.MlflowClient, version: ModelVersion) -> None:
    """Record a model version as champion, from now on, in a tag of the registered model."""
    known = _champion_changes(client, version.name)
    if not known or known[-1][0] != str(version.version):
        kept = [*known, (str(version.version), round(time.time()))][-_MOST:]
        client.set_registered_model_tag(version.name, CHAMPIONS, json.dumps(kept, separators=(",", ":")))


def was_rolled_back(client: mlflow.MlflowClient, champion: ModelVersion, version: str) -> bool:
    """Tell if a person went back from a model version: it was champion, and the present champion is older."""
    return int(champion.version) < int(version) and version in dict(_champion_changes(client, champion.name))


def version_records(client: mlflow.MlflowClient, name: str) -> list[ModelRecord]:
    """Records of all versions of a registered model, with errors and times as champion."""
    changes = _champion_changes(client, name)
    reigns: dict[str, list[tuple[float, float | None]]] = {}
    for i, (version, begin) in enumerate(changes):
        end = changes[i + 1][1] if i + 1 < len(changes) else None
        reigns.setdefault(version, []).append((begin, end))
    return [
        ModelRecord(
            version=str(v.version),
            registered_at=v.creation_timestamp / 1000,
            error=_finite_number(v.tags.get("score")),
            noise=_finite_number(v.tags.get(NOISE)),
            replay_error=metrics.get("mape"),
            replay_noise=metrics.get("noise"),
            gate=v.tags.get(GATE, ""),
            accuracy=v.tags.get(ACCURACY, ""),
            replays=replay_metrics.describe_accuracy(metrics) if "explained_mape" in metrics else "",
            setting=v.tags.get("setting", ""),
            reigns=tuple(reigns.get(str(v.version), ())),
            data=v.tags.get("data", ""),
        )
        for v in client.search_model_versions(f"name = '{name}'")
        for metrics in [_replay_figures(client, v)]
    ]


def refusal_reason(client: mlflow.MlflowClient, name: str) -> str | None:
    """Why a model's challenger is not champion, if the model has no champion. None with a champion."""
    challenger = registry.find_version(client, name, registry.CHALLENGER)
    if challenger is None or registry.find_version(client, name, registry.CHAMPION):
        return None
    gate = challenger.tags.get(GATE, "was not judged")
    return f"no version of {name} is champion: challenger {challenger.version} {gate}"


def _champion_changes(client: mlflow.MlflowClient, name: str) -> list[tuple[str, float]]:
    try:
        changes = json.loads(client.get_registered_model(name).tags.get(CHAMPIONS, "[]"))
        return [(str(version), float(at)) for version, at in changes if 0 <= float(at) <= MOST_UNIX_S]
    except (ValueError, TypeError, RecursionError, OverflowError):  # the tag was edited by hand
        return []


def _replay_figures(client: mlflow.MlflowClient, version: ModelVersion) -> Mapping[str, float]:
    """Replay metrics in the MLflow run of a model version. {} without a run."""
    try:
        metrics = client.get_run(version.run_id).data.metrics if version.run_id else {}
    except MlflowException:
        return {}
    figures = {k.removeprefix("replays/"): v for k, v in metrics.items() if k.startswith("replays/")}
    return figures if all(map(math.isfinite, figures.values())) else {}


def _finite_number(value: str | float | None) -> float | None:
    try:
        number = float("nan" if value is None else value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
