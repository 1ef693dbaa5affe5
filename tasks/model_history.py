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
from shardcore.report.models_page import ModelRecord
from tasks import registry

CHAMPIONS = "shardcore.champions"
NOISE, ACCURACY, GATE = "noise", "accuracy", "gate"
"""Tags of a version: error of a timing itself in percent, errors of its model in words, and the gate's reason."""
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
            replay_error=metrics.get("mape"),
            replay_noise=metrics.get("noise"),
            gate=v.tags.get(GATE, ""),
            accuracy=v.tags.get(ACCURACY, ""),
            replays=replay_metrics.verdict(metrics) if "explained_mape" in metrics else "",
            setting=v.tags.get("setting", ""),
            reigns=tuple(reigns.get(str(v.version), ())),
            data=v.tags.get("data", ""),
        )
        for v in client.search_model_versions(f"name = '{name}'")
        for metrics in [_replay_figures(client, v)]
    ]


def refusal(client: mlflow.MlflowClient, name: str) -> str | None:
    """The reason why a model's challenger is not champion, while there is no champion. None: there is none."""
    challenger = registry.find(client, name, registry.CHALLENGER)
    if challenger is None or registry.find(client, name, registry.CHAMPION):
        return None
    gate = challenger.tags.get(GATE, "was not judged")
    return f"no version of {name} is champion: challenger {challenger.version} {gate}"


def _changes(client: mlflow.MlflowClient, name: str) -> list[tuple[str, float]]:
    try:
        changes = json.loads(client.get_registered_model(name).tags.get(CHAMPIONS, "[]"))
        return [(str(version), float(at)) for version, at in changes if 0 <= float(at) <= MOST_UNIX_S]
    except (ValueError, TypeError, RecursionError, OverflowError):  # the tag was edited by hand
        return []


def _replay_figures(client: mlflow.MlflowClient, version: ModelVersion) -> Mapping[str, float]:
    """Figures of replays in a version's run. {} if there is none, or it was deleted."""
    try:
        metrics = client.get_run(version.run_id).data.metrics if version.run_id else {}
    except MlflowException:
        return {}
    figures = {k.removeprefix("replays/"): v for k, v in metrics.items() if k.startswith("replays/")}
    return figures if all(map(math.isfinite, figures.values())) else {}


def _number(value: str | float | None) -> float | None:
    try:
        number = float("nan" if value is None else value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
