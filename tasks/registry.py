"""The MLflow model registry: versions of a cost model.

A model is named after its hardware. The digest of its files identifies a version.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sqlite3
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import mlflow
import psutil
from mlflow.artifacts import download_artifacts, list_artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS
from requests import RequestException
from sqlalchemy import make_url

from shardcore.core.errors import ShardCoreError, shorten
from shardcore.cost import composite, neural
from shardcore.cost.model import CostModel
from shardcore.io import files, model_files, schema
from tasks import owned, paths, processes, services

T = TypeVar("T")
CHALLENGER, CHAMPION = "challenger", "champion"
EXPERIMENT = "shardcore"
CARD = "card.md"
"""Name of the card's file, beside a model's folder."""
_ARTIFACT = "cost-model"
"""Artifact with a model's files."""
_FOLDER_TAG = "shardcore.folder"
"""Tag of the experiment in SQLite: folder of the database when it was last used."""
_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("model_versions", "source"),
)
"""Tables and columns of MLflow's database that hold absolute paths of artifacts."""
DIGEST_TAG = "shardcore.model_digest"
_PROCESS_TAG = "shardcore.process"


def connect_to_mlflow() -> mlflow.MlflowClient:
    """Connect to MLflow at MLFLOW_TRACKING_URI (default: mlflow.db in the working directory).

    It also ends runs of killed processes. Artifacts of an SQLite database stay in its folder (see `_open_database`).

    Raises ShardCoreError if MLflow does not answer, or its store is a folder.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # With so many retries, a server that restarts within a minute costs only time.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    for name in ("mlflow.store.db.utils", "mlflow.tracking.fluent", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    uri = mlflow.get_tracking_uri()
    scheme, separator, _ = uri.partition("://")
    if scheme == "file" or (not separator and not scheme.startswith("databricks")):
        raise ShardCoreError(
            f"MLflow's store is {uri!r} (MLFLOW_TRACKING_URI), a folder, which MLflow does "
            "not write any more; it needs a database or server, such as "
            "sqlite:///mlflow.db or http://127.0.0.1:5000"
        )
    if uri.startswith("http"):
        services.require_reachable(uri, "MLflow (MLFLOW_TRACKING_URI)")
    try:
        if scheme.startswith("sqlite") and (database := make_url(uri).database) not in (None, ":memory:"):
            _open_database(Path(database).resolve())
        mlflow.set_experiment(EXPERIMENT)
        client = mlflow.MlflowClient()
        _end_abandoned_runs(client)
    except (MlflowException, OSError) as error:
        raise ShardCoreError(f"MLflow cannot be used at {uri}: {_one_line(error)}") from None
    return client


def _open_database(database: Path) -> None:
    """Create MLflow's SQLite database if missing. Adjust artifact paths in a database that was moved or copied.

    Artifacts are in `mlruns` beside the database. MLflow records absolute paths: a moved project would have lost its
    models, and a copy would write into the original.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    # MLflow creates tables and experiments without a lock, so a second process fails.
    with processes.exclusive_lock(database.with_name(f"{database.name}.lock")):
        client = mlflow.MlflowClient()
        client.search_registered_models(max_results=1)  # creates the registry's tables, too
        artifacts = database.parent / "mlruns"
        if (found := client.get_experiment_by_name(EXPERIMENT)) is None:
            experiment_id = client.create_experiment(EXPERIMENT, str(artifacts / EXPERIMENT))
            before = database.parent
        else:
            experiment_id, location = found.experiment_id, Path(found.artifact_location)
            # Without the tag, another program made the experiment, with MLflow's default for locations.
            untagged = location.parents[1] if (artifacts / location.name).exists() else database.parent
            before = Path(found.tags.get(_FOLDER_TAG, untagged))
        if before != database.parent:
            with closing(sqlite3.connect(database)) as connection, connection:
                for table, column in _LOCATIONS:
                    connection.execute(
                        f"UPDATE {table} SET {column} = :now || substr({column}, length(:before) + 1)"
                        f" WHERE substr({column}, 1, length(:before)) = :before",
                        {"before": f"{before}{os.sep}", "now": f"{database.parent}{os.sep}"},
                    )
        client.set_experiment_tag(experiment_id, _FOLDER_TAG, str(database.parent))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors of MLflow's client into a ShardCoreError in one line.

    They occur when its server goes away or its disk is full.
    """
    try:
        yield
    except (MlflowException, RequestException) as error:
        raise ShardCoreError(
            f"MLflow failed at {mlflow.get_tracking_uri()}: {_one_line(error)}; {owned.GOES_ON}"
        ) from None


@contextmanager
def tagged_run(**options: Any) -> Iterator[mlflow.ActiveRun]:
    """Start an MLflow run, tagged with this host and process id."""
    with mlflow.start_run(**options, tags={_PROCESS_TAG: f"{socket.gethostname()} {os.getpid()}"}) as begun:
        yield begun


def log_curves(client: mlflow.MlflowClient, run_id: str, metrics: Sequence[Any]) -> None:
    """Log metrics of many steps to an MLflow run. metrics: mlflow.entities.Metric of each."""
    # MLflow takes at most 1,000 metrics in a request.
    for i in range(0, len(metrics), 1000):
        client.log_batch(run_id, metrics=metrics[i : i + 1000])


def _end_abandoned_runs(client: mlflow.MlflowClient) -> None:
    """Mark MLflow runs of this host as killed if their process is gone."""
    left = f"attributes.status = 'RUNNING' AND tags.`{_PROCESS_TAG}` LIKE '{socket.gethostname()} %'"
    for found in mlflow.search_runs(filter_string=left, output_format="list"):
        if not psutil.pid_exists(int(found.data.tags[_PROCESS_TAG].split()[1])):
            client.set_terminated(found.info.run_id, "KILLED")


def registered_model_name(hardware: str) -> str:
    return f"shardcore-cost-{hardware}"


def find_version(client: mlflow.MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """Version of a registered model with an alias. None if no version has the alias."""
    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST" or (
            error.error_code == "INVALID_PARAMETER_VALUE" and "alias" in str(error)
        ):
            return None
        raise ShardCoreError(
            f"the registry cannot say which version of {name!r} is {alias}: {_one_line(error)}"
        ) from None


def find_version_by_digest(
    client: mlflow.MlflowClient, name: str, digest: str, read: Callable[[ModelVersion], object]
) -> ModelVersion | None:
    """Newest version of a registered model whose files have a digest. None if no version has the digest.

    read: function that raises ShardCoreError for a version whose files are gone or damaged. It does not count.
    """
    versions = client.search_model_versions(f"name = '{name}'")
    for version in sorted(versions, key=lambda v: -int(v.version)):
        if version.tags.get(DIGEST_TAG) == digest:
            with suppress(ShardCoreError):
                read(version)
                return version
    return None


def find_run_id(tag: str, value: str) -> str | None:
    """Id of the newest MLflow run in which a tag has a value, as the digest of the model that it trained. None without
    such a run."""
    quoted = value.replace("'", "\\'")
    runs = mlflow.search_runs(filter_string=f"tags.`{tag}` = '{quoted}'", max_results=1, output_format="list")
    return runs[0].info.run_id if runs else None


def create_model_if_missing(client: mlflow.MlflowClient, name: str) -> None:
    """Create a registered model in MLflow if missing."""
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)


def _one_line(error: Exception) -> str:
    """Message of an error, shortened to one line."""
    return shorten(" ".join(str(error).split()), 200)


def register_model(
    client: mlflow.MlflowClient,
    folder: Path,
    run_id: str | None,
    tags: dict[str, str],
    also: Sequence[str | Path] = (),
) -> ModelVersion:
    """Register a cost model's files as a model version, and make it challenger. Returns the version.

    A version with the same files is reused. The card beside the folder becomes its description.

    run_id: run that trained the model. None: a new run is made.
    also: folders of models for other precisions, which become part of the version.
    """
    digest = "+".join(map(model_files.model_digest, [folder, *also]))
    name = registered_model_name(composite.load_models([folder, *also]).setting.hardware)
    # A rerun with the same files must not make a second version.
    version = find_version_by_digest(client, name, digest, download_model)
    if version is None:
        version = _upload_model(client, [folder, *also], name, run_id, {**tags, DIGEST_TAG: digest})
    client.set_registered_model_alias(name, CHALLENGER, version.version)
    if (card := folder.with_name(CARD)).exists():
        version = client.update_model_version(name, version.version, schema.read_text(card))
    return version


def _upload_model(
    client: mlflow.MlflowClient,
    folders: Sequence[str | Path],
    name: str,
    run_id: str | None,
    tags: dict[str, str],
) -> ModelVersion:
    with (
        tagged_run(run_id=run_id, run_name=None if run_id else "register"),
        warnings.catch_warnings(action="ignore"),
        tempfile.TemporaryDirectory() as temporary,
    ):
        each = [one for folder in folders for one in model_files.model_folders(folder)]
        whole = Path(temporary, "model") if len(each) > 1 else each[0]
        for one in each if len(each) > 1 else ():
            shutil.copytree(one, whole / neural.load(one).setting.precision)
        info = mlflow.pyfunc.log_model(
            name=_ARTIFACT,
            python_model=str(Path(__file__).with_name("served_model.py")),
            artifacts={"model": str(whole)},
            code_paths=[str(Path(files.__file__).parents[1])],
            pip_requirements=["torch", "numpy", "pyarrow", "safetensors", "PyYAML"],
        )
        if not run_id:  # the model was trained elsewhere, with another registry
            meta = neural.load(each[0]).meta
            split = "stated" if meta.get("judged_by") else "validation"
            mlflow.log_metrics({f"{split}/{k}": v for k, v in meta["metrics"].items()})
    create_model_if_missing(client, name)
    version = client.create_model_version(name, info.model_uri, tags=tags, model_id=info.model_id)
    client.set_logged_model_tags(
        info.model_id, {MLFLOW_MODEL_VERSIONS: json.dumps([{"name": name, "version": version.version}])}
    )
    return version


def download_model(version: ModelVersion) -> CostModel:
    """Download a registered version's cost model, and load its safetensors and JSON. Runs no code of the registry."""
    return download_and_load(version, model_files.MODEL_JSON, composite.load_models)


def download_and_load(version: ModelVersion, name: str, load: Callable[[Sequence[Path]], T]) -> T:
    """Download a registered version's files, and load the folders that have a file `name`."""
    what = f"version {version.version} of {version.name}"
    with tempfile.TemporaryDirectory() as temporary:
        place = mlflow.MlflowClient().get_model_version_download_uri(version.name, version.version)
        if not list_artifacts(place):
            raise ShardCoreError(
                f"the files of {what} are gone: {place} has none; put them back, or run `python -m flows.promote`, "
                f"which registers those in {paths.MODEL.parent} again"
            )
        path = download_artifacts(f"models:/{version.name}/{version.version}", dst_path=temporary)
        folders = [p.parent for p in Path(path).rglob(name)]
        if not folders:
            raise ShardCoreError(f"{what} holds no {name}; it was not registered by ShardCore")
        try:
            return load(folders)
        except ShardCoreError as error:
            raise ShardCoreError(f"{what} holds no model that works: {error}") from None


def champion_model(client: mlflow.MlflowClient, hardware: str) -> tuple[CostModel, ModelVersion]:
    """Champion cost model of a hardware, and its version. Raises ShardCoreError without a champion."""
    name = registered_model_name(hardware)
    version = find_version(client, name, CHAMPION)
    if version is None:
        raise ShardCoreError(
            f"model {name!r} has no version with the alias {CHAMPION!r} in the registry at "
            f"{mlflow.get_tracking_uri()}; run `python -m flows.promote`, or set the alias "
            "in MLflow"
        )
    return download_model(version), version
