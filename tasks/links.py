"""Links to pages of the services, for pages of flow runs. Without an address, they are plain text."""

from __future__ import annotations

import os

import mlflow


def model_version_link(name: str, version: str) -> str:
    """Markdown link to a version of a registered model in MLflow."""
    uri = mlflow.get_tracking_uri()
    return _markdown_link(
        f"{name} version {version}",
        uri if uri.startswith("http") else "",
        f"#/models/{name}/versions/{version}",
    )


def ray_dashboard_link() -> str | None:
    """Markdown link to the Ray dashboard at RAY_API_SERVER_ADDRESS. None if the variable is not set."""
    address = os.environ.get("RAY_API_SERVER_ADDRESS", "")
    return _markdown_link("Ray dashboard", address, "") if address.startswith("http") else None


def _markdown_link(text: str, address: str, page: str) -> str:
    return f"[{text}]({address.rstrip('/')}/{page})" if address else text
