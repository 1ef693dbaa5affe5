"""Under which version of a cost model plans were last published, and who is at it now.

Both are tags of the registered model, beside the alias that they are about. They outlive every process, so
whoever looks next knows what is left to do. Times are in seconds since 1970.

  shardcore.published     {"version", "at"}       every problem was gone through under this version
  shardcore.publishing    {"version", "until"}    somebody is at it, and renews the claim before `until`
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlflow
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from tasks import registry

PUBLISHED, PUBLISHING = "shardcore.published", "shardcore.publishing"
CLAIM_S = 60.0
"""How long a claim holds without being renewed: longer than one problem takes, short enough to wait for after
a crash."""


@dataclass(frozen=True)
class PublishState:
    """What is on record at a registered model; None: nothing.

    model: its name.
    champion: the version that is champion.
    published: the version under which all plans were last published.
    at: when that was.
    publishing: the version under which somebody publishes now.
    until: when that claim ends, unless it is renewed.
    """

    model: str
    champion: str | None
    published: str | None = None
    at: float | None = None
    publishing: str | None = None
    until: float | None = None

    def due(self, now: float) -> bool:
        """Whether plans have to be published: the champion is another version than the last one, and nobody
        is publishing, under whichever version. A run that is asked for before those are done would answer two
        changes (see watch.publish_once)."""
        if self.champion is None or self.champion == self.published:
            return False
        return self.publishing is None or now > (self.until or 0.0)


def read(client: mlflow.MlflowClient, model: str) -> PublishState:
    """The state of a registered model; one that does not exist has no champion."""
    try:
        found = client.get_registered_model(model)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return PublishState(model, None)
        raise
    champion = found.aliases.get(registry.CHAMPION)
    published, publishing = _tag(found.tags, PUBLISHED), _tag(found.tags, PUBLISHING)
    return PublishState(
        model, None if champion is None else str(champion), published=published.get("version"),
        at=published.get("at"), publishing=publishing.get("version"), until=publishing.get("until"))


def claim(client: mlflow.MlflowClient, model: str, version: str) -> None:
    """Say that this process publishes under a version, for the next CLAIM_S."""
    _set(client, model, PUBLISHING, {"version": str(version), "until": time.time() + CLAIM_S})


@contextmanager
def publishing(client: mlflow.MlflowClient, version: ModelVersion,
               everything: bool = True) -> Iterator[Callable[[], None]]:
    """Publish under a version, for all problems: claimed while it lasts, on record at its end, neither after
    an exception. Yields the function that renews the claim. Without `everything` nothing is put on record."""
    if not everything:
        yield lambda: None
        return
    model = version.name
    claim(client, model, version.version)
    try:
        yield lambda: claim(client, model, version.version)
        _set(client, model, PUBLISHED, {"version": str(version.version), "at": time.time()})
    finally:
        client.delete_registered_model_tag(model, PUBLISHING)


def _set(client: mlflow.MlflowClient, model: str, tag: str, value: dict) -> None:
    client.set_registered_model_tag(model, tag, json.dumps(value))


def _tag(tags: dict[str, str], name: str) -> dict:
    """A tag's value; one edited by hand into something else counts as none."""
    try:
        value = json.loads(tags.get(name, "{}"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
