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
from shardcore.report.models_page import ModelRecord

CHAMPIONS = "shardcore.champions"
NOISE = "noise"
"""Tag of a version: mean spread of the measurements that it was judged on, percent."""
_MOST = 100
"""Most changes that are kept, as MLflow limits the size of a tag."""


def note_champion(client: mlflow.MlflowClient, version: ModelVersion) -> None:
    """Note that plans are published under a version from now on."""
    known = _changes(client, version.name)
    if not known or known[-1][0] != str(version.version):
        kept = [*known, (str(version.version), round(time.time()))][-_MOST:]
        client.set_registered_model_tag(version.name, CHAMPIONS, json.dumps(kept, separators=(",", ":")))


def went_back(client: mlflow.MlflowClient, champion: ModelVersion, version: str) -> bool:
    """Tell if a person went back from this version: plans were under it, and the champion is older."""
    return int(champion.version) < int(version) and version in dict(_changes(client, champion.name))


def history(client: mlflow.MlflowClient, name: str) -> list[ModelRecord]:
    """All versions of a model."""
    changes = _changes(client, name)
    reigns: dict[str, list[tuple[float, float | None]]] = {}
    for i, (version, begin) in enumerate(changes):
        end = changes[i + 1][1] if i + 1 < len(changes) else None
        reigns.setdefault(version, []).append((begin, end))
    return [
        ModelRecord(
            version=str(v.version),
            registered_at=v.creation_timestamp / 1000,
            error=_number(v.tags.get("score")),
            noise=_number(v.tags.get(NOISE)),
            replay_error=_number(metrics.get("replays/mape")),
            replay_noise=_number(metrics.get("replays/noise")),
            gate=v.tags.get("gate", ""),
            setting=v.tags.get("setting", ""),
            reigns=tuple(reigns.get(str(v.version), ())),
            data=v.tags.get("data", ""),
        )
        for v in client.search_model_versions(f"name = '{name}'")
        for metrics in [_metrics(client, v)]
    ]


def _changes(client: mlflow.MlflowClient, name: str) -> list[tuple[str, float]]:
    try:
        changes = json.loads(client.get_registered_model(name).tags.get(CHAMPIONS, "[]"))
        return [(str(version), float(at)) for version, at in changes if 0 <= float(at) <= MOST_UNIX_S]
    except (ValueError, TypeError, RecursionError, OverflowError):  # the tag was edited by hand
        return []


def _metrics(client: mlflow.MlflowClient, version: ModelVersion) -> Mapping[str, float]:
    """Metrics of a version's run. {} if there is none, or it was deleted."""
    try:
        return client.get_run(version.run_id).data.metrics if version.run_id else {}
    except MlflowException:
        return {}


def _number(value: str | float | None) -> float | None:
    try:
        number = float("nan" if value is None else value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
