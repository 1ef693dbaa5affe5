"""State of a process of this machine, and a lock among processes."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def exclusive_lock(file: Path) -> Iterator[None]:
    """Hold an exclusive lock of a file while the context lasts. Waits until no other process holds the lock."""
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_running(process: psutil.Process) -> bool:
    """Tell if a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
