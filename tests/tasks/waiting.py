"""Waits of the tests of processes."""

import time


def until(condition, timeout_s=120):
    """Wait for what is true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
    return found
