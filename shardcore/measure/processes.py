"""Processes that measure, or take part in a gang. They end when this process does, however that ends.

On a machine without a GPU, each is forked from a server that has imported torch and FBGEMM and done nothing
else, so it starts at once. On a machine with a GPU, each starts anew: importing may initialise CUDA, which
forks cannot use.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

_IMPORTED = [
    "shardcore.measure.replay",
    "shardcore.measure.supervise",
    "shardcore.measure.id_transfer",
    "fbgemm_gpu.split_table_batched_embeddings_ops_training",
]
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment variable that torch reads once. Else each rank in a box warns that host addresses have no names."""


def context() -> SpawnContext | ForkServerContext:
    """Multiprocessing's way to start processes here, which also makes their pipes."""
    return multiprocessing.get_context("spawn") if _spawns() else multiprocessing.get_context("forkserver")


def made(name: str, work: Callable[..., None], arguments: Sequence[Any]) -> BaseProcess:
    """A process, not yet started, that runs work(*arguments) in the environment that this process has now.

    work, arguments: picklable.
    """
    environment = _QUIET | os.environ
    if not _spawns():
        _start_server()
    # A daemon, so that it ends with this process if nothing else ends it.
    return context().Process(target=_run, name=name, daemon=True, args=(environment, work, arguments))


@cache
def _spawns() -> bool:
    # As torch sees it, like imports in a fork: files of a driver may exist without a GPU, and a GPU without
    # them.
    return torch.cuda.is_available()


def _start_server() -> None:
    """Start the server that forks processes. Does nothing if it runs."""
    forkserver.set_forkserver_preload(_IMPORTED)
    added = _QUIET.keys() - os.environ
    # The server inherits the environment. Other threads may read it meanwhile, so all else stays as it is.
    os.environ.update({name: _QUIET[name] for name in added})
    try:
        forkserver.ensure_running()
    finally:
        for name in added:
            os.environ.pop(name, None)


def _run(environment: Mapping[str, str], work: Callable[..., None], arguments: Sequence[Any]) -> None:
    # A fork has the environment of the server's start. It gets that of its maker.
    os.environ.clear()
    os.environ |= environment
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work(*arguments)


def _end_with_parent() -> None:
    # The sentinel becomes ready when the parent ends, however that happens.
    if parent := multiprocessing.parent_process():
        wait([parent.sentinel])
    os._exit(1)
