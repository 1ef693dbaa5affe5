"""Progress of long work: the library reports it, the caller shows it. And the clock that budgets go by.

    with listening(show):  # show(phase, best_ms, left_s)
        SHARDERS["anneal"](problem, model, budget=Budget(seconds=60))

Without a listener a report does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

COMPILING = "compiling the search"
"""Phase in which functions are compiled. No clock counts it."""


class Listener(Protocol):
    """Hears of progress. Reports come often, so it decides which to show."""

    def __call__(self, phase: str, best_ms: float | None, left_s: float | None) -> None:
        """Take one report.

        phase: present work, in a few words.
        best_ms: cost of the best plan so far.
        left_s: seconds until the phase ends. None where unknown.
        """


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_stopped_s = 0.0
"""Seconds for which the clock stood still."""


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Give reports made within to a listener. None: to nobody."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Put a name before the phases reported within, such as that of one of several searches."""
    outer = _listener.get()
    inner = outer and (lambda phase, best_ms, left_s: outer(f"{name}: {phase}", best_ms, left_s))
    with listening(inner):
        report("begins")
        yield


def report(phase: str, best_ms: float | None = None, left_s: float | None = None) -> None:
    """Report progress to the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(phase, best_ms, left_s)


def clock() -> float:
    """Seconds of a monotonic clock that stands still while functions are compiled."""
    return time.monotonic() - _stopped_s


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Stop `clock` within. Stops do not nest."""
    global _stopped_s
    began = time.monotonic()
    try:
        yield
    finally:
        _stopped_s += time.monotonic() - began
