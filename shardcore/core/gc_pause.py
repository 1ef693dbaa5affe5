"""Fewer runs of Python's cyclic garbage collector while much is made and kept.

A problem of 100,000 tables is millions of objects, none of them garbage. Looking at all of them again and
again took a quarter of a plan's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLD = (200_000, 20, 1000)
"""For gc.set_threshold: objects made, and younger generations collected, between two runs."""


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Context manager: run Python's cyclic garbage collector rarely, and restore its thresholds at exit."""
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
