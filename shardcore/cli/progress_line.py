"""Progress of a command on standard error, once it has run for a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO
from weakref import WeakSet

from shardcore.core import progress
from shardcore.core.errors import escape_unprintable

if TYPE_CHECKING:
    from shardcore.measure.tally import Tally

COMPILING_S = 15
"""Approximate seconds in which one core compiles all that a search runs."""
_SILENT_S = 1.0
"""Work that ends sooner shows nothing."""
_TERMINAL_S, _LINES_S = 0.5, 5.0
"""Seconds between two updates: of the line on a terminal, and of lines elsewhere."""
_TOLD_OF_COMPILING: WeakSet[TextIO] = WeakSet()
"""Streams in which it was said that the search is compiled. A command has several progress lines."""


@contextmanager
def showing_progress(
    phase: str = "", out: TextIO | None = None, silent_s: float = _SILENT_S
) -> Iterator[ProgressLine]:
    """Show progress reports on a live line while the context lasts.

    phase: what is reported first. out: None is standard error. silent_s: seconds before the first report is shown.
    """
    # A command's standard error escapes control characters, with which a terminal's line is rewritten.
    line = ProgressLine(out or getattr(sys.stderr, "stream", sys.stderr), silent_s)
    with progress.report_to_listener(line.take_report):
        if phase:
            progress.report(phase)
        try:
            yield line
        finally:
            line.stop()


class ProgressLine:
    """The latest report, which a thread shows again and again, so that the time goes on during long steps.

    On a terminal, one line is rewritten. Anything else gets a line every few seconds. It is also the progress of a
    stage (stages/progress.py): the end of each kind of work has a permanent line.
    """

    def __init__(self, out: TextIO, silent_s: float) -> None:
        self.out, self.silent_s, self.rewrites = out, silent_s, out.isatty()
        self._report: tuple[str, float | None, float | None] | None = None
        self._compiles = False
        self._began_s = self._heard_s = time.monotonic()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._show_repeatedly, daemon=True)
        self._thread.start()

    def take_report(self, phase: str, best_ms: float | None, left_s: float | None) -> None:
        """Take a progress report to show (see progress.Listener). A report of compiling is shown at once."""
        self._compiles = phase.endswith(progress.COMPILING)
        self._report, self._heard_s = (phase, best_ms, left_s), time.monotonic()
        if self._compiles and self.out not in _TOLD_OF_COMPILING:
            _TOLD_OF_COMPILING.add(self.out)
            self._show_report()

    def print_line(self, text: str) -> None:
        """Write a permanent line above the live progress line."""
        self._write(
            f"\r{escape_unprintable(text)}\x1b[K\n" if self.rewrites else f"{escape_unprintable(text)}\n"
        )

    def info(self, text: str, *values: object, **_: object) -> None:
        self.print_line(text % values)

    warning = info

    def show(self, tally: Tally) -> None:
        progress.report(tally.progress_line)
        if tally.done == tally.total:
            self.print_line(tally.progress_line)

    def stop(self) -> None:
        """Stop showing progress, and erase the live line on a terminal."""
        self._ended.set()
        self._thread.join()
        if self.rewrites:
            self._write("\r\x1b[K")

    def _show_repeatedly(self) -> None:
        wait_s = self.silent_s
        while not self._ended.wait(wait_s):
            # Compiling was shown when it began.
            if self.rewrites or not self._compiles:
                self._show_report()
            wait_s = _TERMINAL_S if self.rewrites else _LINES_S

    def _show_report(self) -> None:
        if self._report is None:
            return
        text = report_text(*self._report, time.monotonic() - self._began_s, time.monotonic() - self._heard_s)
        self._write(
            f"\r{escape_unprintable(text)}\x1b[K" if self.rewrites else f"{escape_unprintable(text)}\n"
        )

    def _write(self, text: str) -> None:
        with self._lock:
            self.out.write(text)
            self.out.flush()


def report_text(phase: str, best_ms: float | None, left_s: float | None, now_s: float, since_s: float) -> str:
    """A progress report as one line of text.

    left_s: seconds left at the time of the report. now_s: seconds since the command began. since_s: seconds
        since the report.
    """
    parts = [f"{now_s:.0f} s: {phase}"]
    if phase.endswith(progress.COMPILING):
        parts.append(f"once in this installation, about {COMPILING_S} s of one core")
    if best_ms is not None:
        parts.append(f"best {best_ms:.3f} ms")
    if left_s is not None:
        parts.append(f"{max(0.0, left_s - since_s):.0f} s left")
    return ", ".join(parts)
