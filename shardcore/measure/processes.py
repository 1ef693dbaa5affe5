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


def process_context() -> SpawnContext | ForkServerContext:
    """Context of multiprocessing for starting processes and making their pipes: spawn or forkserver."""
    return (
        multiprocessing.get_context("spawn") if _must_spawn() else multiprocessing.get_context("forkserver")
    )


def make_process(name: str, work: Callable[..., None], arguments: Sequence[Any]) -> BaseProcess:
    """Make a process, not yet started, that runs work(*arguments) with this process's present environment.

    work, arguments: picklable.
    """
    environment = _QUIET | os.environ
    if not _must_spawn():
        _start_forkserver()
    # A daemon, so that it ends with this process if nothing else ends it.
    return process_context().Process(
        target=_run_with_environment, name=name, daemon=True, args=(environment, work, arguments)
    )


@cache
def _must_spawn() -> bool:
    # As torch sees it, like imports in a fork: files of a driver may exist without a GPU, and a GPU without
    # them.
    """Tell if processes have to be spawned, not forked, as on a machine with CUDA."""
    return torch.cuda.is_available()


def _start_forkserver() -> None:
    """Start multiprocessing's forkserver, unless it runs already."""
    forkserver.set_forkserver_preload(_IMPORTED)
    added = _QUIET.keys() - os.environ
    # The server inherits the environment. Other threads may read it meanwhile, so all else stays as it is.
    os.environ.update({name: _QUIET[name] for name in added})
    try:
        forkserver.ensure_running()
    finally:
        for name in added:
            os.environ.pop(name, None)


def _run_with_environment(
    environment: Mapping[str, str], work: Callable[..., None], arguments: Sequence[Any]
) -> None:
    # A fork has the environment of the server's start. It gets that of its maker.
    """Entry point of a process: set environment variables, and run work until its end or the parent's."""
    os.environ.clear()
    os.environ |= environment
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    work(*arguments)


def _exit_with_parent() -> None:
    # The sentinel becomes ready when the parent ends, however that happens.
    """Exit this process when its parent ends."""
    if parent := multiprocessing.parent_process():
        wait([parent.sentinel])
    os._exit(1)
