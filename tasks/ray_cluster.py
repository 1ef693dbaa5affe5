"""A connection to Ray: RAY_ADDRESS, or a local Ray for as long as the context lasts. Actors are in a namespace named after the
flow run, which the dashboard and `ray list actors` show beside their names."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardcore.types import ShardCoreError
from tasks import services

_LOCAL_OBJECT_STORE_BYTES = 256 << 20  # requests and timings are small


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Connect to Ray; raises ShardCoreError where RAY_ADDRESS does not answer."""
    import ray
    from prefect import runtime

    address = os.environ.get("RAY_ADDRESS")
    options = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": runtime.flow_run.name or None}
    try:
        if address and address != "local":
            if address != "auto":
                services.require_answer(address, "Ray (RAY_ADDRESS)")
            ray.init(address=address, **options)
        else:
            ray.init(address="local", object_store_memory=_LOCAL_OBJECT_STORE_BYTES, include_dashboard=False, **options)
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        if isinstance(error, ShardCoreError):
            raise
        raise ShardCoreError(f"cannot connect to Ray at {address or 'local'}: {' '.join(str(error).split())[:200]}") from None
    try:
        yield
    finally:
        ray.shutdown()
