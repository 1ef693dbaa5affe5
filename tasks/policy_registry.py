"""Policies in the MLflow model registry: one registered model for each policy and hardware."""

from __future__ import annotations

from pathlib import Path

import mlflow
from mlflow.entities.model_registry import ModelVersion

from shardcore.core.errors import ShardCoreError
from shardcore.io import model_files
from shardcore.search.learned.policy import POLICY_JSON, Policy, read_policy
from tasks import paths, registry
from tasks.registry import CHAMPION, DIGEST_TAG

POLICY = "policy"
"""Artifact with a policy's files."""
COST_MODEL_TAG = "shardcore.cost_model_digest"
"""Tag of a policy: digest of the cost model that it was trained against."""


def registered_policy_name(name: str, hardware: str) -> str:
    return f"shardcore-policy-{name}-{hardware}"


def register_policy(client: mlflow.MlflowClient, folder: Path) -> ModelVersion:
    """Register a sharding policy's files as a model version, and make it champion. Returns the version.

    A version with the same files is reused. Its tags name the version of the cost model that it was trained against.

    Raises ShardCoreError if that is not registered.
    """
    policy, digest = read_policy(folder), model_files.model_digest(folder, "policy")
    trained_on = policy.meta.get("provenance", {}).get("model_digest")
    cost_name = registry.registered_model_name(policy.setting.hardware)
    of_digest = {v.tags.get(DIGEST_TAG): v for v in client.search_model_versions(f"name = '{cost_name}'")}
    if trained_on not in of_digest:
        raise ShardCoreError(
            f"policy in {folder} was trained against cost model {trained_on}, of "
            f"which {cost_name!r} has no version; train it again (dvc repro train_policy)"
        )
    name = registered_policy_name(policy.name, policy.setting.hardware)
    version = registry.find_version_by_digest(client, name, digest, _load_policy)
    if version is None:
        tags = {
            DIGEST_TAG: digest,
            COST_MODEL_TAG: str(trained_on),
            "cost_model": cost_name,
            "cost_model_version": str(of_digest[trained_on].version),
        }
        version = _upload_policy(client, folder, name, tags)
    client.set_registered_model_alias(name, CHAMPION, version.version)
    return version


def _upload_policy(
    client: mlflow.MlflowClient, folder: Path, name: str, tags: dict[str, str]
) -> ModelVersion:
    """Create a policy's model version from its training run, or from a new run if MLflow lacks the training run."""
    run_id = registry.find_run_id(DIGEST_TAG, tags[DIGEST_TAG])
    with registry.tagged_run(run_id=run_id, run_name=None if run_id else "register-policy") as begun:
        mlflow.log_artifacts(str(folder), POLICY)  # the run's own files may be gone
    registry.create_model_if_missing(client, name)
    source = f"{begun.info.artifact_uri}/{POLICY}"
    return client.create_model_version(name, source, begun.info.run_id, tags=tags)


def champion_policy(client: mlflow.MlflowClient, name: str, hardware: str) -> tuple[Policy, ModelVersion]:
    """Champion of a sharding policy for a hardware, and its version. Raises ShardCoreError without a champion."""
    registered = registered_policy_name(name, hardware)
    version = registry.find_version(client, registered, CHAMPION)
    if version is None:
        raise ShardCoreError(
            f"there is no policy {name!r} for {hardware!r}: set train_policy.algorithm "
            f"in {paths.PARAMS} to it, run `dvc repro train_policy` and then "
            f"`python -m flows.promote` ({registered!r} has no alias {CHAMPION!r} at "
            f"{mlflow.get_tracking_uri()})"
        )
    return _load_policy(version), version


def _load_policy(version: ModelVersion) -> Policy:
    return registry.download_and_load(version, POLICY_JSON, lambda found: read_policy(found[0]))
