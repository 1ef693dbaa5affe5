"""Prefect artifacts, which show progress and results on a run's page.

A run does not need them. If Prefect does not answer, it logs a warning and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import httpx
from prefect import artifacts, get_run_logger

from tasks import services


def create_progress_artifact(progress: float, key: str, description: str) -> UUID | None:
    return _call_or_warn(
        key, lambda: artifacts.create_progress_artifact(progress, key=key, description=description)
    )


def update_progress_artifact(artifact_id: UUID | None, progress: float, description: str) -> None:
    """Update a Prefect progress artifact. artifact_id None: do nothing, as creating the artifact failed."""
    if artifact_id is not None:
        _call_or_warn(
            "progress",
            lambda: artifacts.update_progress_artifact(artifact_id, progress, description=description),
        )


def create_markdown_artifact(markdown: str, key: str, description: str) -> None:
    _call_or_warn(key, lambda: artifacts.create_markdown_artifact(markdown, key=key, description=description))


def _call_or_warn(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except httpx.HTTPError as error:
        get_run_logger().warning(
            "%s is not shown on the run's page: %s", what, services.unreachable_prefect_text(error)
        )
        return None
