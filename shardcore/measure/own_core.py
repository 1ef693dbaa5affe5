"""A core for each rank, which other ranks of its host cannot take.

Otherwise the scheduler moves threads between cores. A rank that has its outputs goes on to compute, perhaps
on the core where another rank's network thread waits, while another core idles until the scheduler's next
tick. That takes 2 to 4 ms, in an exchange of 0.3 ms (docs/decisions/measuring.md).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NETWORK = "gloo_tcp_loop"


def take_core(index: int) -> Collection[int]:
    """Pin all threads of this process to one CPU core. Returns the cores used before.

    index: number of this rank among those of its host, from 0. With more ranks than cores, some share one.
    Returns the cores that it had, for `restore_cores`. Does nothing where threads cannot be given cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ()
    had = sorted(os.sched_getaffinity(0))
    _set_affinity({had[index % len(had)]})
    deprioritize_network_threads()
    return had


def restore_cores(cores: Collection[int]) -> None:
    """Let all threads of this process run on some CPU cores again, after `take_core`."""
    if cores:
        _set_affinity(cores)


def deprioritize_network_threads() -> None:
    """Give gloo's network threads the scheduler's batch class. To be called after each new process group.

    Such a thread polls without rest from when data arrives until the rank asks for it. As a batch thread, it
    makes room at once for the thread that will ask.
    """
    for thread in _THREADS.glob("*"):
        # A thread may end while this reads its name.
        with suppress(OSError):
            if (thread / "comm").read_text().strip() == _NETWORK:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def _set_affinity(cores: Collection[int]) -> None:
    # Each thread has cores of its own: threads that torch and gloo have started would keep theirs.
    """Set the CPU affinity of all threads of this process."""
    for thread in _THREADS.glob("*"):
        with suppress(OSError):
            os.sched_setaffinity(int(thread.name), cores)
