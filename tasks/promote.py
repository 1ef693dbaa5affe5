"""The gate between a trained model and the champion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlflow
from prefect import get_run_logger, task

from shardcore import files
from shardcore.cost import accuracy, neural, settle
from shardcore.types import ShardCoreError
from tasks import registry


@dataclass(frozen=True)
class PromoteConfig:
    """may_lose: how many points of score a challenger may lose and still be called at least as good."""

    may_lose: float = 0.0


def score(metrics: dict[str, float]) -> float:
    """Lower is better: the mean of the models' absolute percentage errors (compute counts as much as both exchanges)."""
    comm = [metrics[k] for k in ("forward_comm_mape", "backward_comm_mape") if k in metrics]
    return (metrics["compute_mape"] + sum(comm) / len(comm)) / 2 if comm else metrics["compute_mape"]


@task(task_run_name="promote-model")
def promote_model(folder: Path, measurements: Path, config: PromoteConfig) -> str:
    """Register the model's files as challenger, and make it champion unless the champion is better on the same held-out data;
    the version that is champion afterwards."""
    logger = get_run_logger()
    model, digest = neural.load(folder), files.model_digest(folder)
    known = settle.read([measurements, *model.meta["provenance"].get("datasets", {})], model.setting)
    data = accuracy.held_out(known.compute), accuracy.held_out(known.comm)
    if not any(s.error is None for s in data[0]):
        raise ShardCoreError(f"{measurements} holds no held-out samples for ({model.setting}) to judge {folder} by; measure more")
    client = registry.connect()
    runs = mlflow.search_runs(filter_string=f"tags.`{registry.DIGEST_TAG}` = '{digest}'", max_results=1, output_format="list")
    tags = {k: str(v) for k, v in model.meta["provenance"].items()} | {"setting": str(model.setting)}
    challenger = registry.register(client, folder, runs[0].info.run_id if runs else None, tags)
    name = challenger.name
    before = registry.find(client, name, registry.CHAMPION)
    if before is not None and str(before.version) == str(challenger.version):
        logger.info("%s: version %s is champion already", name, before.version)
        return str(before.version)
    new = score(accuracy.evaluate(model, *data))
    client.set_model_version_tag(name, challenger.version, "score", f"{new:.4f}")
    if before is not None:
        try:
            old_model = registry.download(client, before)
        except ShardCoreError as error:  # registered by a ShardCore that computed other features
            old_model = None
            logger.warning("%s: champion %s cannot be read any more and is replaced: %s", name, before.version, error)
        if old_model is not None and old_model.setting == model.setting:
            old = score(accuracy.evaluate(old_model, *data))
            if new > old + config.may_lose:
                logger.warning("%s: version %s stays champion; challenger %s lost by %.2f points of held-out error (%.2f%% "
                               "against %.2f%%)", name, before.version, challenger.version, new - old, new, old)
                return str(before.version)
            logger.info("%s: challenger %s at %.2f%% against champion %s at %.2f%%", name, challenger.version, new,
                        before.version, old)
        elif old_model is not None:
            logger.info("%s: champion %s is for another setting (%s)", name, before.version, old_model.setting)
    client.set_registered_model_alias(name, registry.CHAMPION, challenger.version)
    logger.info("%s: version %s is champion, held-out error %.2f%%", name, challenger.version, new)
    return str(challenger.version)
