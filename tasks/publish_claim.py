"""State of publishing: the version of a cost model under which plans were last published, and a claim by who publishes.

Both are tags of the registered model, beside the alias. They outlive every process, so anyone can see what is left to
do. Times are Unix s.

  shardcore.published     {"version", "at"}       all problems were published under this version
  shardcore.publishing    {"version", "until"}    somebody publishes, and renews the claim before `until`
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import mlflow
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from shardcore.core.validation import MOST_UNIX_S
from tasks import registry

PUBLISHED, PUBLISHING = "shardcore.published", "shardcore.publishing"
CLAIM_S = 60.0
"""Time for which a claim holds without renewal: short enough to wait for after a crash."""
_RENEWALS = 3
"""Renewals in each CLAIM_S, by a thread, however long a problem takes."""


@dataclass(frozen=True)
class PublishState:
    """The record of a registered model. None: nothing is recorded.

    model: name of the model.
    champion: version of the champion.
    published: version under which all plans were last published.
    at: time of that, Unix s.
    publishing: version under which somebody publishes now.
    until: end of this claim unless it is renewed, Unix s.
    """

    model: str
    champion: str | None
    published: str | None = None
    at: float | None = None
    publishing: str | None = None
    until: float | None = None

    def is_due(self, now: float) -> bool:
        """Tell if plans have to be published: the champion is unpublished, and no process is publishing.

        A run that is requested during another one would answer two changes (see watch.request_publishing).
        """
        if self.champion is None or self.champion == self.published:
            return False
        # A claim of a clock that was ahead would hold as long as it was ahead. Hosts' clocks may differ by a renewal.
        return (
            self.publishing is None or not now <= (self.until or 0.0) <= now + CLAIM_S + CLAIM_S / _RENEWALS
        )


def read_publish_state(client: mlflow.MlflowClient, model: str) -> PublishState:
    """Read the publishing state of a registered model. A missing model has no champion."""
    try:
        registered = client.get_registered_model(model)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return PublishState(model, None)
        raise
    champion = registered.aliases.get(registry.CHAMPION)
    published, publishing = _read_tag(registered.tags, PUBLISHED), _read_tag(registered.tags, PUBLISHING)
    return PublishState(
        model,
        None if champion is None else str(champion),
        published=published.get("version"),
        at=_valid_time(published.get("at")),
        publishing=publishing.get("version"),
        until=_valid_time(publishing.get("until")),
    )


def claim_publishing(client: mlflow.MlflowClient, model: str, version: str) -> None:
    """Claim publishing plans under a model version, for the next CLAIM_S."""
    value = json.dumps({"version": str(version), "until": time.time() + CLAIM_S})
    client.set_registered_model_tag(model, PUBLISHING, value)


@contextmanager
def claimed_publishing(
    client: mlflow.MlflowClient, version: ModelVersion, everything: bool = True
) -> Iterator[None]:
    """Claim publishing plans under a model version while the context lasts, and record the publishing at the end.

    It is not recorded after an exception.

    everything: True if all problems are published. False: nothing is claimed or recorded.
    """
    if not everything:
        yield
        return
    model, ended = version.name, threading.Event()

    def renew_claim() -> None:
        while not ended.wait(CLAIM_S / _RENEWALS):
            with suppress(MlflowException):  # the next renewal may succeed
                claim_publishing(client, model, version.version)

    claim_publishing(client, model, version.version)
    renewing = threading.Thread(target=renew_claim, name="renew-claim", daemon=True)
    renewing.start()
    try:
        yield
        value = json.dumps({"version": str(version.version), "at": time.time()})
        client.set_registered_model_tag(model, PUBLISHED, value)
    finally:
        ended.set()
        renewing.join()
        client.delete_registered_model_tag(model, PUBLISHING)


def _read_tag(tags: dict[str, str], name: str) -> dict:
    """JSON object in a tag of a registered model. {} if the tag is invalid."""
    try:
        value = json.loads(tags.get(name, "{}"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _valid_time(value: Any) -> float | None:
    """Time in a tag's value, Unix s. None if the value is not a valid time."""
    known = isinstance(value, int | float) and 0 <= value <= MOST_UNIX_S
    return float(value) if known else None
