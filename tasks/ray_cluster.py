"""A connection to Ray: to RAY_ADDRESS, or to a local Ray that lasts as long as the context.

Actors are in a namespace that is named after the flow run. The dashboard and `ray list actors` show it. A local Ray
listens only at loopback and asks for a token, as the stack's does. Its folder is the run's (tasks.owned).
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from shardcore.core.errors import ShardCoreError
from tasks import console, lost_runs, owned, processes, services

_LOCAL_OBJECT_STORE_BYTES = 256 << 20  # requests and timings are small
_LOCAL_RAY = {
    # Without it, a worker that asked for no GPU sees all of them.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray on one machine. A cluster of several listens at all addresses.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # No other head will be started, so all processes end soon after it.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}

_NEEDED = ("gcs_server", "raylet")
"""Processes of a local Ray without which it does not work."""
_LOOK_EVERY_S, _LAST_WORDS_S = 0.5, 5.0
"""Time between two checks of these, and time in which a run may end after the loss of Ray."""
_ASK_EVERY_S, _ASKED = 2.0, 3
"""Time between two checks of a cluster's head, and failed checks in a row after which it is lost."""


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Connect to the Ray cluster while the context lasts. Raises ShardCoreError if RAY_ADDRESS does not answer."""
    import ray
    from prefect.runtime import flow_run

    address = os.environ.get("RAY_ADDRESS") or "local"
    options = {
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "namespace": flow_run.name or None,
    }
    is_local, connected = address == "local", threading.Event()
    lost, every_s, checks = (
        (_local_ray_loss_check(), _LOOK_EVERY_S, 1)
        if is_local
        else (_ray_head_loss_check(address, connected), _ASK_EVERY_S, _ASKED)
    )
    with (
        owned.owned_run() if is_local else nullcontext(),
        _raising_on_ray_loss(lost, every_s, checks) as is_still_there,
    ):
        try:
            if is_local:
                secure_local_ray()
                with owned.marking_servers():
                    ray.init(
                        address=address,
                        object_store_memory=_LOCAL_OBJECT_STORE_BYTES,
                        include_dashboard=False,
                        _node_ip_address=services.LOOPBACK[0],
                        **options,
                    )
            else:
                if address != "auto":
                    services.require_reachable(address, "Ray (RAY_ADDRESS)")
                ray.init(address=address, **options)
        except ShardCoreError:
            raise
        except Exception as error:  # Ray raises many types, including Exception itself
            raise ShardCoreError(
                f"cannot connect to Ray at {address}: {' '.join(str(error).split())[:200]}"
            ) from None
        connected.set()
        try:
            yield
        finally:
            if is_still_there():
                ray.shutdown()
            else:
                # shutdown would wait a minute for what is lost, also at the end of the process.
                atexit.unregister(ray.shutdown)


def _local_ray_loss_check() -> Callable[[], str]:
    """Function that returns which process of a local Ray has ended. "" if all run."""
    needed: dict[str, psutil.Process] = {}

    def loss_reason() -> str:
        if len(needed) < len(_NEEDED):  # only until all are found, as listing processes disturbs measurements
            with suppress(psutil.NoSuchProcess):
                needed.update({name: p for p in psutil.Process().children() if (name := p.name()) in _NEEDED})
        ended = [name for name, process in needed.items() if not processes.is_running(process)]
        return f"this run's Ray has lost its {' and its '.join(ended)}; {owned.GOES_ON}" if ended else ""

    return loss_reason


def _ray_head_loss_check(address: str, connected: threading.Event) -> Callable[[], str]:
    """Function that returns why a Ray cluster's head is lost. "" if the head answers, or before connecting."""
    import ray

    def loss_reason() -> str:
        if not connected.is_set():
            return ""
        head = ray.get_runtime_context().gcs_address if address == "auto" else address
        try:
            services.require_reachable(head, "Ray")
        except ShardCoreError:
            return f"Ray's head at {head} does not answer any more; {owned.GOES_ON}"
        return ""

    return loss_reason


@contextmanager
def _raising_on_ray_loss(
    lost: Callable[[], str], every_s: float, checks: int
) -> Iterator[Callable[[], bool]]:
    """Raise ShardCoreError in the context soon after Ray is lost.

    If Ray's code does not react to an interrupt in time, the reason is printed and this process ends. Yields a function
    to call before Ray is shut down. It tells if Ray is still there.

    lost: function that returns how Ray was lost. "": it is not lost.
    every_s: time between two calls of it.
    checks: calls in a row that have to report a loss.
    """
    from prefect.runtime import flow_run

    over, run = threading.Event(), flow_run.id

    def watch_for_loss() -> None:
        missed, reason = 0, ""
        while missed < checks:
            if over.wait(every_s):
                return
            reason = lost()
            missed = missed + 1 if reason else 0
        # An interrupt reaches the main thread even while it waits.
        os.kill(os.getpid(), signal.SIGINT)
        if not over.wait(_LAST_WORDS_S):
            console.show("warning", reason)
            print(f"error: {reason}", file=sys.stderr, flush=True)
            with suppress(OSError, ValueError):
                lost_runs.crash_run(lost_runs.PrefectApi.from_environment(), run, reason)
            os._exit(1)

    threading.Thread(target=watch_for_loss, daemon=True).start()
    try:
        yield lambda: not lost() and not over.set()
    except BaseException:
        # The error is the run's own if Ray was still there when the run gave it up.
        if over.is_set() or not (reason := lost()):
            raise
        raise ShardCoreError(reason) from None
    finally:
        over.set()


def secure_local_ray() -> None:
    """Configure the local Ray that starts next to listen only at loopback, with a token known to this process."""
    from ray import _raylet  # compiled, so type checkers do not know its names
    from ray._private import ray_constants

    raylet: Any = _raylet

    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(_write_token()), **_LOCAL_RAY})
    # Ray has read these settings when it was imported, so they are set again.
    ray_constants.ENABLE_RAY_CLUSTER = False
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _write_token() -> Path:
    file, path = tempfile.mkstemp(prefix="ray-token-")  # only its owner can read it
    with open(file, "w") as token:
        token.write(secrets.token_urlsafe(32))
    return Path(path)
