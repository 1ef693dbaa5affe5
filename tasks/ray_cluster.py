"""A connection to Ray: RAY_ADDRESS, or a local Ray while the context lasts.

Actors are in a namespace named after the flow run. The dashboard and `ray list actors` show it.

A local Ray listens only at loopback and asks for a token, as the stack's does. Its folder is the run's
(tasks.owned).
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
    # Or a worker that asked for no GPU sees all.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A cluster of more than one machine would listen at all addresses.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Nobody will start another head: everything ends with it.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}

_NEEDED = ("gcs_server", "raylet")
_LOOK_EVERY_S, _LAST_WORDS_S = 0.5, 5.0
_ASK_EVERY_S, _ASKED = 2.0, 3
"""Time between two questions to a cluster's head, and how many in a row it may leave open."""


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Connect to Ray. Raises ShardCoreError if RAY_ADDRESS does not answer."""
    import ray
    from prefect.runtime import flow_run

    address = os.environ.get("RAY_ADDRESS") or "local"
    options = {
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "namespace": flow_run.name or None,
    }
    of_our_own, connected = address == "local", threading.Event()
    lost, every_s, looks = (
        (_lost_process(), _LOOK_EVERY_S, 1)
        if of_our_own
        else (_lost_head(address, connected), _ASK_EVERY_S, _ASKED)
    )
    with owned.owned() if of_our_own else nullcontext(), _ending_with_it(lost, every_s, looks) as still_there:
        try:
            if of_our_own:
                _close()
                with owned.serving():
                    ray.init(
                        address=address,
                        object_store_memory=_LOCAL_OBJECT_STORE_BYTES,
                        include_dashboard=False,
                        _node_ip_address=services.LOOPBACK[0],
                        **options,
                    )
            else:
                if address != "auto":
                    services.require_answer(address, "Ray (RAY_ADDRESS)")
                ray.init(address=address, **options)
        except ShardCoreError:
            raise
        except Exception as error:  # Ray raises many kinds, Exception itself among them
            raise ShardCoreError(
                f"cannot connect to Ray at {address}: {' '.join(str(error).split())[:200]}"
            ) from None
        connected.set()
        try:
            yield
        finally:
            if still_there():
                ray.shutdown()
            else:
                # It would wait a minute for what is lost, also when the process ends.
                atexit.unregister(ray.shutdown)


def _lost_process() -> Callable[[], str]:
    """Tells which process of our own Ray has ended. "": none."""
    found: dict[str, psutil.Process] = {}

    def lost() -> str:
        if len(found) < len(_NEEDED):  # looking disturbs measurements, so stop once all are found
            with suppress(psutil.NoSuchProcess):
                found.update({name: p for p in psutil.Process().children() if (name := p.name()) in _NEEDED})
        ended = [name for name, process in found.items() if not processes.is_running(process)]
        return f"this run's Ray has lost its {' and its '.join(ended)}; {owned.GOES_ON}" if ended else ""

    return lost


def _lost_head(address: str, connected: threading.Event) -> Callable[[], str]:
    """Tells that the head of a cluster does not answer. "": it does, or we have not connected yet."""
    import ray

    def lost() -> str:
        if not connected.is_set():
            return ""
        head = ray.get_runtime_context().gcs_address if address == "auto" else address
        try:
            services.require_answer(head, "Ray")
        except ShardCoreError:
            return f"Ray's head at {head} does not answer any more; {owned.GOES_ON}"
        return ""

    return lost


@contextmanager
def _ending_with_it(lost: Callable[[], str], every_s: float, looks: int) -> Iterator[Callable[[], bool]]:
    """Raise ShardCoreError soon after Ray is lost.

    Ray itself may wait for a minute. If Ray's own code does not react to the interrupt in time, say so and
    end this process. Yields the function to call before Ray is shut down: whether it is still there.

    lost: says how it was lost. "": it was not.
    every_s: time between two calls of that.
    looks: calls one after the other that say so.
    """
    from prefect.runtime import flow_run

    over, run = threading.Event(), flow_run.id

    def watch() -> None:
        missed, reason = 0, ""
        while missed < looks:
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
                lost_runs.crash(lost_runs.Api.of_client(), run, reason)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield lambda: not lost() and not over.set()
    except BaseException:
        # What was there when the run let Ray go did not end the run.
        if over.is_set() or not (reason := lost()):
            raise
        raise ShardCoreError(reason) from None
    finally:
        over.set()


def _close() -> None:
    """Make the Ray that starts next listen only at loopback, with a token that this process knows."""
    from ray import _raylet  # compiled: no type checker sees its names
    from ray._private import ray_constants

    raylet: Any = _raylet

    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(_write_token()), **_LOCAL_RAY})
    # Ray read this, and the two settings, when it was imported.
    ray_constants.ENABLE_RAY_CLUSTER = False
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _write_token() -> Path:
    file, path = tempfile.mkstemp(prefix="ray-token-")  # only its owner can read it
    with open(file, "w") as token:
        token.write(secrets.token_urlsafe(32))
    return Path(path)
