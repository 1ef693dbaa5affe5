"""Links to pages of the services, for pages of flow runs. Without an address, they are plain text."""

from __future__ import annotations

import os

import mlflow


def model_version(name: str, version: str) -> str:
    """Markdown for a version of a registered model."""
    return _link(f"{name} version {version}", _mlflow(), f"#/models/{name}/versions/{version}")


def mlflow_run(experiment_id: str, run_id: str) -> str:
    """Markdown for a run in MLflow."""
    return _link(f"run {run_id}", _mlflow(), f"#/experiments/{experiment_id}/runs/{run_id}")


def ray_dashboard() -> str | None:
    """Markdown for the Ray dashboard. Its address is RAY_API_SERVER_ADDRESS, which Ray's own tools read, too."""
    address = os.environ.get("RAY_API_SERVER_ADDRESS", "")
    return _link("Ray dashboard", address, "") if address.startswith("http") else None


def _mlflow() -> str:
    uri = mlflow.get_tracking_uri()
    return uri if uri.startswith("http") else ""


def _link(text: str, address: str, page: str) -> str:
    return f"[{text}]({address.rstrip('/')}/{page})" if address else text
