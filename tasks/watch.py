"""`python -m tasks.watch`: run the publishing deployment whenever the champion changes.

It does not matter who set the alias: the gate, or a person in MLflow. The watch remembers nothing itself. The
registered model records what was published last (tasks/publish_claim.py). Prefect recognises a run that was
requested already by its key. So the watch can be killed at any moment. A new one does what is left to do,
once.
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
"""Wait after the first failed run. After the second it is twice as long."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

logger = logging.getLogger("shardcore.watch")


def watched() -> publish_claim.PublishState:
    """The state of the model that this project publishes under."""
    state = publish_claim.read(
        mlflow.MlflowClient(), _model(*map(_changed, (paths.PARAMS, paths.MEASUREMENTS)))
    )
    if not state.due(time.time()):
        return state
    # A claim is made before the alias is set. Read once more, so that a claim between two reads is seen.
    return publish_claim.read(mlflow.MlflowClient(), state.model)


def publish_once(state: publish_claim.PublishState, now: float) -> str:
    """Request the publishing run of a champion, unless it was requested already. Retry failed runs.

    Returns a line on the state.
    """
    key = f"{state.model} {state.champion} after {state.at}"
    run: Any = None
    what = f"plans under {state.model} version {state.champion}"
    for attempt in range(1, ATTEMPTS + 1):
        if run is not None and now < run.state.timestamp.timestamp() + RETRY_S * (attempt - 1):
            return f"{what}: run {run.name!r} ended {run.state.name}; another one follows"
        # The idempotency key makes Prefect return an existing run instead of a second one.
        run = _run_deployment(f"{key}, {attempt}")
        if not run.state.is_final():
            return f"{what}: run {run.name!r} is {run.state.name}"
    return (
        f"{what}: run {run.name!r} ended {run.state.name}, the last of {ATTEMPTS}; once that is mended, "
        f"`prefect deployment run {DEPLOYMENT}`"
    )


def step() -> str:
    """Check once, act if publishing is due. Returns a line on the state.

    Never raises for what time or a person can mend.
    """
    try:
        state = watched()
    except ShardCoreError as error:
        return str(error)
    except Exception as error:
        return f"the registry at {mlflow.get_tracking_uri()} does not answer: {_short(error)}"
    if state.champion is None:
        return f"{state.model} has no champion yet"
    if not state.due(time.time()):
        what = f"plans under {state.model} version {state.champion}"
        if state.champion == state.published:
            return f"{what} are published"
        same = state.champion == state.publishing
        return (
            f"{what} {'are' if same else f'follow those under version {state.publishing}, which are'} "
            "being published"
        )
    try:
        return publish_once(state, time.time())
    except Exception as error:
        return f"Prefect at {os.environ.get('PREFECT_API_URL')} cannot run {DEPLOYMENT}: {_short(error)}"


def watch() -> None:
    """Check every EVERY_S for as long as the process lives. Log each new state once."""
    last = ""
    while True:
        line = step()
        if line != last:
            logger.info("%s", line)
            last = line
        time.sleep(EVERY_S)


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stdout, level=logging.WARNING)
    logger.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    services.reach_directly(os.environ)
    # The next check is the retry.
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
def _model(*_changes: float) -> str:
    """The model's name. Arguments change with params.yaml or the measurements, which renews the cache."""
    wanted = params.section("setting", SettingConfig)
    return registry.model_name(wanted.of_dataset_or_local(paths.MEASUREMENTS).hardware)


def _changed(path: Any) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _short(error: Exception) -> str:
    """One line, the same each time for the same error."""
    return _ADDRESS.sub("", " ".join(f"{type(error).__name__}: {error}".split()))[:200]


if __name__ == "__main__":
    main()
