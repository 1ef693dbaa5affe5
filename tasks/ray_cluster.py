"""A connection to Ray: RAY_ADDRESS, or a local Ray for as long as the context lasts. Actors are in a namespace named after the
flow run, which the dashboard and `ray list actors` show beside their names.

A local Ray listens at loopback only and asks for a token, as the stack's does. Its folder is the run's (tasks.owned).
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from shardcore.types import ShardCoreError
from tasks import owned, services

_LOCAL_OBJECT_STORE_BYTES = 256 << 20  # requests and timings are small
_LOCAL_RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a cluster of more than one machine listens at all addresses
              "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # nobody will start another head: all ends with it

_NEEDED = ("gcs_server", "raylet")
_LOOK_EVERY_S, _LAST_WORDS_S = 0.5, 5.0


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Connect to Ray; raises ShardCoreError where RAY_ADDRESS does not answer."""
    import ray
    from prefect import runtime

    address = os.environ.get("RAY_ADDRESS") or "local"
    options = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": runtime.flow_run.name or None}
    with owned.owned() if address == "local" else nullcontext():
        try:
            if address == "local":
                _close()
                with owned.serving():
                    ray.init(address=address, object_store_memory=_LOCAL_OBJECT_STORE_BYTES, include_dashboard=False,
                             _node_ip_address=services.LOOPBACK[0], **options)
            else:
                if address != "auto":
                    services.require_answer(address, "Ray (RAY_ADDRESS)")
                ray.init(address=address, **options)
        except ShardCoreError:
            raise
        except Exception as error:  # of many kinds, a bare one among them
            raise ShardCoreError(f"cannot connect to Ray at {address}: {' '.join(str(error).split())[:200]}") from None
        with _ending_with(ray._private.worker._global_node if address == "local" else None):
            yield


@contextmanager
def _ending_with(node: Any) -> Iterator[None]:
    """End the connection. Raise ShardCoreError soon after the head or raylet of our own node has ended: Ray may wait for them
    for a minute. Where that is not heard, for Ray waits in its own code, end this process."""
    import ray

    over = threading.Event()

    def lost() -> str:
        kinds = [kind for kind, _ in node.dead_processes() if kind in _NEEDED] if node else []
        return f"the {kinds[0]} of this run's Ray has ended; {services.GOES_ON}" if kinds else ""

    def end() -> None:
        time.sleep(_LAST_WORDS_S)
        if not over.is_set():
            print(f"error: {lost()}", file=sys.stderr, flush=True)
        os._exit(1)

    def watch() -> None:
        while not over.wait(_LOOK_EVERY_S):
            if lost():
                os.kill(os.getpid(), signal.SIGINT)
                return end()

    if node:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except BaseException:
        if not (said := lost()):
            raise
        threading.Thread(target=end, daemon=True).start()  # Ray's own end, at exit, waits for them too
        raise ShardCoreError(said) from None
    finally:
        over.set()
        if not lost():
            ray.shutdown()


def _close() -> None:
    """Have the Ray that starts next listen at loopback and ask for a token of its own, and this process know it."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config

    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(_write_token()), **_LOCAL_RAY})
    ray_constants.ENABLE_RAY_CLUSTER = False  # read, as the two settings, when Ray was imported
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _write_token() -> Path:
    file, path = tempfile.mkstemp(prefix="ray-token-")  # its owner alone can read it
    with open(file, "w") as token:
        token.write(secrets.token_urlsafe(32))
    return Path(path)
