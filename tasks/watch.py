"""`python -m tasks.watch`: run the publishing deployment whenever the champion changes.

It does not matter whether the gate or a person in MLflow sets the alias. The watch remembers nothing: the registered
model records what was published last (tasks/publish_claim.py), and Prefect recognises by its key a run that was
requested before. So the watch can be killed at any moment, and a new one does what is left to do, once.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from functools import lru_cache
from typing import Any

import mlflow

from shardcore.core.errors import ShardCoreError
from tasks import params, paths, publish_claim, registry, services
from tasks.setting import SettingConfig

DEPLOYMENT = "publish/local"
EVERY_S = 3.0
ATTEMPTS = 3
RETRY_S = 20.0
"""Wait after the first failed run. It is twice as long after the second."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Address of an object in an error, which differs each time."""
logger = logging.getLogger("shardcore.watch")


def publish_state_of_project() -> publish_claim.PublishState:
    """Publishing state of the registered model under which this project publishes plans."""
    state = publish_claim.read_publish_state(
        mlflow.MlflowClient(), _model_name_at(*map(_modified_at, (paths.PARAMS, paths.MEASUREMENTS)))
    )
    if not state.is_due(time.time()):
        return state
    # A claim is made before the alias is set. It is read again after the alias, so that no claim is missed.
    return publish_claim.read_publish_state(mlflow.MlflowClient(), state.model)


def request_publishing(state: publish_claim.PublishState, now: float) -> str:
    """Request a flow run that publishes plans under a champion, unless requested already. Retry failed runs.

    Returns a line about the state.
    """
    key = f"{state.model} {state.champion} after {state.at}"
    run: Any = None
    what = f"plans under {state.model} version {state.champion}"
    for attempt in range(1, ATTEMPTS + 1):
        # A run that ended later than now did so by a clock that was ahead, which nothing waits for.
        if run is not None and 0 <= now - run.state.timestamp.timestamp() < RETRY_S * (attempt - 1):
            return f"{what}: run {run.name!r} ended {run.state.name}; another one follows"
        # The idempotency key makes Prefect return an existing run instead of a second one.
        run = _run_deployment(f"{key}, {attempt}")
        if not run.state.is_final():
            return f"{what}: run {run.name!r} is {run.state.name}"
        # It may have published what the state, which was read before, does not show. The next check does.
        if now < run.state.timestamp.timestamp() <= time.time():
            return f"{what}: run {run.name!r} has just ended {run.state.name}"
    return (
        f"{what}: run {run.name!r} ended {run.state.name}, the last of {ATTEMPTS}; once that is mended, "
        f"`prefect deployment run {DEPLOYMENT}`"
    )


def check_registry_once() -> str:
    """Check the registry once, and request publishing if due. Returns a line on the state.

    It never raises for what time or a person can mend.
    """
    try:
        state = publish_state_of_project()
    except ShardCoreError as error:
        return str(error)
    except Exception as error:
        return f"the registry at {mlflow.get_tracking_uri()} does not answer: {_short_error(error)}"
    if state.champion is None:
        return f"{state.model} has no champion yet"
    if not state.is_due(time.time()):
        what = f"plans under {state.model} version {state.champion}"
        if state.champion == state.published:
            return f"{what} are published"
        same = state.champion == state.publishing
        return (
            f"{what} {'are' if same else f'follow those under version {state.publishing}, which are'} "
            "being published"
        )
    try:
        return request_publishing(state, time.time())
    except Exception as error:
        return (
            f"Prefect at {os.environ.get('PREFECT_API_URL')} cannot run {DEPLOYMENT}: {_short_error(error)}"
        )


def watch() -> None:
    """Watch the model registry for a new champion, for ever, and log each new state."""
    last = ""
    while True:
        line = check_registry_once()
        if line != last:
            logger.info("%s", line)
            last = line
        time.sleep(EVERY_S)


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stdout, level=logging.WARNING)
    logger.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    services.bypass_proxy(os.environ)
    # One retry of MLflow's client is enough, as the next check comes soon.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    if not os.environ.get("PREFECT_API_URL"):
        sys.exit(
            "error: PREFECT_API_URL is not set; the watch needs a Prefect server on which a worker runs "
            "deployments"
        )
    watch()


def _run_deployment(key: str) -> Any:
    from prefect.deployments import run_deployment

    return run_deployment(DEPLOYMENT, timeout=0, idempotency_key=key, tags=["watch"])


@lru_cache(maxsize=1)
def _model_name_at(*_changes: float) -> str:
    """Name of the registered model to watch, cached until a modification time in the arguments changes."""
    wanted = params.read_section("setting", SettingConfig)
    return registry.registered_model_name(wanted.dataset_or_local_setting(paths.MEASUREMENTS).hardware)


def _modified_at(path: Any) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _short_error(error: Exception) -> str:
    """Message of an error in one line, without memory addresses."""
    return _ADDRESS.sub("", " ".join(f"{type(error).__name__}: {error}".split()))[:200]


if __name__ == "__main__":
    main()
