"""A core for each rank, which other ranks of its host cannot take.

Otherwise the scheduler moves threads between cores. A rank that has its outputs goes on to compute, perhaps
on the core where another rank's network thread waits, while a core idles until the scheduler's next tick.
That takes 2 to 4 ms, in an exchange of 0.3 ms (docs/decisions/measuring.md).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NETWORK = "gloo_tcp_loop"


def take(index: int) -> Collection[int]:
    """Give all threads of this process one core.

    index: of this rank among those of its host. Where there are more ranks than cores, some share one.
    Returns the cores it had, for `give_back`. Where threads cannot be given cores, nothing happens.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ()
    had = sorted(os.sched_getaffinity(0))
    # Ranks are numbered from 0 on each host. If there are more ranks than cores, some share one.
    _allow({had[index % len(had)]})
    let_network_wait()
    return had


def give_back(cores: Collection[int]) -> None:
    """Let all threads of this process run on these cores again."""
    if cores:
        _allow(cores)


def let_network_wait() -> None:
    """Give gloo's network threads the scheduler's class for batch work. To be called for each process group.

    Such a thread polls without rest from when data arrives until the rank asks for it. A batch thread makes
    room at once for the thread that will ask.
    """
    for thread in _THREADS.glob("*"):
        # Threads come and go.
        with suppress(OSError):
            if (thread / "comm").read_text().strip() == _NETWORK:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def _allow(cores: Collection[int]) -> None:
    # All threads: those that torch and gloo have started keep their old cores otherwise.
    for thread in _THREADS.glob("*"):
        with suppress(OSError):
            os.sched_setaffinity(int(thread.name), cores)
