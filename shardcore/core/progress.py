"""Progress of long work: the library reports it, the caller shows it. And the clock that budgets go by.

    with report_to_listener(show):  # show(phase, best_ms, left_s)
        SHARDERS["anneal"](problem, model, budget=Budget(seconds=60))

Without a listener a report does nothing. Reports come when work begins or gets on, so a listener that shows time going
on keeps a clock, as the command's progress line does. Loops over all tables `tick`: work that a `deadline` limits ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

COMPILING = "compiling the search"
"""Phase in which functions are compiled. No clock counts it."""


class Listener(Protocol):
    """A function that receives progress reports. Reports come often, so the listener decides which to show."""

    def __call__(self, phase: str, best_ms: float | None, left_s: float | None) -> None:
        """Receive one progress report.

        phase: present work, in a few words.
        best_ms: cost of the best plan so far.
        left_s: seconds until the phase ends. None where unknown.
        """


class OutOfTime(Exception):
    """Raised by `tick` when the time limit of the work is over."""


Item = TypeVar("Item")
_ITEMS = 256
"""Items between two looks at the clock."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_end_s: ContextVar[float] = ContextVar("end", default=math.inf)
_stopped_s = 0.0
"""Seconds for which the clock stood still."""


@contextmanager
def report_to_listener(listener: Listener | None) -> Iterator[None]:
    """Context manager: send progress reports made in the with block to a listener; None drops them."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def prefixed_phases(name: str) -> Iterator[None]:
    """Context manager: prefix the phases of progress reports with a name, such as that of one search of several."""
    outer = _listener.get()
    inner = outer and (lambda phase, best_ms, left_s: outer(f"{name}: {phase}", best_ms, left_s))
    with report_to_listener(inner):
        report("begins")
        yield


def report(phase: str, best_ms: float | None = None, left_s: float | None = None) -> None:
    """Send a progress report to the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(phase, best_ms, left_s)


def tick() -> None:
    """Raise OutOfTime past the end of an enclosing `deadline`."""
    if clock() > _end_s.get():
        raise OutOfTime


def iterate_with_progress(items: Iterable[Item]) -> Iterator[Item]:
    """Iterate over a long sequence, calling `tick` every few items."""
    for i, item in enumerate(items):
        if i % _ITEMS == 0:
            tick()
        yield item


@contextmanager
def deadline(end_s: float) -> Iterator[None]:
    """Context manager: let `tick` raise OutOfTime in the with block once `clock` is past `end_s`."""
    token = _end_s.set(min(end_s, _end_s.get()))
    try:
        yield
    finally:
        _end_s.reset(token)


def clock() -> float:
    """Seconds of a monotonic clock that stands still while functions are compiled."""
    return time.monotonic() - _stopped_s


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Context manager: stop `clock` in the with block. Stops do not nest."""
    global _stopped_s
    began = time.monotonic()
    try:
        yield
    finally:
        _stopped_s += time.monotonic() - began
