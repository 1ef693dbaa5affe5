"""Links to pages of the services, for pages of flow runs. Without an address, they are plain text."""

from __future__ import annotations

import os

import mlflow


def model_version(name: str, version: str) -> str:
    """Markdown for a version of a registered model."""
    uri = mlflow.get_tracking_uri()
    return _link(
        f"{name} version {version}",
        uri if uri.startswith("http") else "",
        f"#/models/{name}/versions/{version}",
    )


def ray_dashboard() -> str | None:
    """Markdown for the Ray dashboard. Its address is RAY_API_SERVER_ADDRESS, which Ray's own tools read, too."""
    address = os.environ.get("RAY_API_SERVER_ADDRESS", "")
    return _link("Ray dashboard", address, "") if address.startswith("http") else None


def _link(text: str, address: str, page: str) -> str:
    return f"[{text}]({address.rstrip('/')}/{page})" if address else text
