"""State of a process of this machine."""

import psutil


def is_running(process: psutil.Process) -> bool:
    """Tell if a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
