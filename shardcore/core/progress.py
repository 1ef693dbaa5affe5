"""Progress of long work: the library reports it, the caller shows it. And the clock that budgets go by.

    with report_to_listener(show):  # show(phase, best_ms, left_s)
        SHARDERS["anneal"](problem, model, budget=Budget(seconds=60))

Without a listener a report does nothing. Loops over all tables `tick`: the last report is made again, and
work that an `until` limits ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol, TypeVar

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


class _Report(NamedTuple):
    phase: str
    best_ms: float | None
    left_s: float | None
    at_s: float


Item = TypeVar("Item")
_TICK_S, _ITEMS = 0.5, 256
"""Seconds after which a report is made again, and items between two looks at the clock."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_latest: ContextVar[_Report | None] = ContextVar("latest", default=None)
_end_s: ContextVar[float] = ContextVar("end", default=math.inf)
_stopped_s = 0.0
"""Seconds for which the clock stood still."""


@contextmanager
def report_to_listener(listener: Listener | None) -> Iterator[None]:
    """Context manager: send progress reports made in the with block to a listener; None drops them."""
    token, latest = _listener.set(listener), _latest.set(None)
    try:
        yield
    finally:
        _listener.reset(token)
        _latest.reset(latest)


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
        _latest.set(_Report(phase, best_ms, left_s, clock()))
        listener(phase, best_ms, left_s)


def tick() -> None:
    """Repeat the last progress report if half a second old. Raises OutOfTime past the end of an enclosing
    `deadline`."""
    last, now_s = _latest.get(), clock()
    if now_s > _end_s.get():
        raise OutOfTime
    if last is not None and now_s - last.at_s > _TICK_S:
        report(last.phase, last.best_ms, last.left_s and max(0.0, last.left_s - (now_s - last.at_s)))


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
