"""The screen of a flow run as a program: stages, progress, results, warnings and errors.

Everything else (all lines of Prefect, DVC, Ray and MLflow) goes to a log file in logs/. Flows and tasks log as usual,
and Prefect's pages have all of it. A log record is shown if it is a warning of ours, or has `extra=STAGE` or
`extra=RESULT`. Progress is shown and not logged, so it may change often.

Without `start` nothing is shown, as runs of deployments have their pages. In a refresh, `dvc repro` runs each stage in
a process of its own. This process marks the lines to show, and the refresh shows them (`relayed`).
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from shardcore.measure.tally import duration
from tasks import paths

LOGS = Path("logs")
KEPT_LOGS = 20
STAGE, RESULT = {"shown": "stage"}, {"shown": "result"}
RELAYED = {"SHARDCORE_RELAYED": "1"}
"""Environment variable of a process whose marked lines another process shows."""
_MARK = "shown: "
_RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
_LINE_EVERY_S = 30.0
"""Time between two lines of progress without a terminal."""
_BAR = 12
"""Width of the progress bar, in characters."""
_DRAWN_PER_S = 2.0
"""Drawings of the live line a second. More would disturb measurements."""


class _Display(Protocol):
    def show(self, kind: str, message: str, share: float = 0.0) -> None: ...


_display: _Display | None = None


# --- what flows and tasks show ------------------------------------------------------------------------------


def show(kind: str, message: str, share: float = 0.0) -> None:
    """Show a line.

    kind: "stage", "progress", "result", "warning" or "text".
    message: the line.
    share: progress, 0 to 1.
    """
    if _display:
        _display.show(kind, message, share)


def progress(share: float, message: str) -> None:
    """Show the progress of long work.

    share: share that is done, 0 to 1.
    message: description of the work.
    """
    show("progress", message, share)


# --- who shows it -------------------------------------------------------------------------------------------


class _Lasting:
    """A stream that ignores errors, so that a run goes on when nobody reads its output any more."""

    def __init__(self, out: TextIO):
        self._out = out

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._out.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._out.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


class _Terminal(Console):
    @property
    def size(self) -> ConsoleDimensions:  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody sets it
        # The size of `file`, which is the terminal, as stdout and stderr are the log by now.
        with suppress(OSError):
            columns, lines = os.get_terminal_size(self.file.fileno())
            return ConsoleDimensions(columns or 80, lines or 25)
        return ConsoleDimensions(80, 25)

    def show_cursor(self, show: bool = True) -> bool:
        return False  # a cursor that is hidden would stay so after a kill


class _Turning(SpinnerColumn):
    """A spinner that goes on after the last part is done, as the stage does."""

    def render(self, task: Task) -> RenderableType:
        return self.spinner.render(task.get_time())


class _Doing(ProgressColumn):
    """The present work of a stage. Until this is known, the time that the stage has run."""

    def get_table_column(self) -> Column:
        return Column(no_wrap=True, overflow="ellipsis", ratio=1)

    def render(self, task: Task) -> Text:
        return Text(task.fields["doing"] or f"{duration(task.elapsed or 0.0)} so far")


class Screen:
    """Lines for a person.

    On a terminal, a live line below them shows the stage, its progress and its rate. Elsewhere an occasional line does.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic):
        self._out, self._clock, self._began, self._shown_s = _Lasting(out), clock, clock(), clock()
        self._stage = ""
        self._live: Progress | None = None
        terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._terminal = _Terminal(file=cast(TextIO, self._out), force_terminal=True) if terminal else None

    def show(self, kind: str, message: str, share: float = 0.0) -> None:
        if kind == "progress":
            self._progress(message, share)
            return
        if kind == "result":
            message = f"  {message} ({duration(self._clock() - self._began)})"
        elif kind == "warning":
            message = f"  warning: {message}"
        self._line(message)
        if kind == "stage":
            self.begin(message.partition(", ")[0])

    def begin(self, stage: str) -> None:
        """Count the time of a stage from now, and show that it runs."""
        self._began = self._shown_s = self._clock()
        self._stage = stage
        if self._terminal:
            self._draw(self._terminal)

    def clear(self) -> None:
        """Remove the live line."""
        if self._live:
            self._live.stop()
            self._live = None

    def _draw(self, terminal: Console) -> Progress:
        """Show the live line of the stage, whose progress is not known yet."""
        self.clear()
        self._live = live = Progress(
            _Turning(),
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR),
            _Doing(),
            console=terminal,
            transient=True,
            expand=True,
            refresh_per_second=_DRAWN_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        live.add_task(self._stage, total=None, doing="")
        live.start()
        return live

    def _progress(self, message: str, share: float) -> None:
        if self._terminal:
            live = self._live or self._draw(self._terminal)
            # Without a total the bar pulses: nothing is done yet.
            live.update(live.task_ids[0], total=1.0 if share else None, completed=share, doing=message)
        elif self._clock() - self._shown_s >= _LINE_EVERY_S:
            self._shown_s = self._clock()
            self._line(f"  {100 * share:3.0f}%  {message}")

    def _line(self, text: str) -> None:
        if self._terminal:
            self._terminal.out(text, highlight=False)
        else:
            self._out.write(f"{text}\n")
            self._out.flush()


class _Relay:
    """Prints marked lines, for another process to show."""

    def show(self, kind: str, message: str, share: float = 0.0) -> None:
        print(_MARK + json.dumps([kind, message, share]), flush=True)


def relayed(line: str) -> bool:
    """Show a line if another process has marked it. Returns True if so."""
    if not line.startswith(_MARK):
        return False
    show(*json.loads(line.removeprefix(_MARK)))
    return True


class _ForPeople(logging.Handler):
    """A handler that shows the log records for a person."""

    _prefect = f"{paths.package('prefect')}{os.sep}"

    def emit(self, record: logging.LogRecord) -> None:
        kind = getattr(record, "shown", None)
        if record.levelno >= logging.WARNING and not record.pathname.startswith(self._prefect):
            # Prefect's own warnings report how a run ended. `Program.failed` does so once, at the end.
            kind = "warning"
        if kind:
            show(kind, record.getMessage())


# --- as a program -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """This process as a person sees it.

    screen: screen of its lines. None: another process shows them.
    log: file of all other output. None: another process has it.
    err: stream for the reason why it failed.
    began: time of its start, on the monotonic clock.
    """

    screen: Screen | None
    log: Path | None
    err: TextIO
    began: float = field(default_factory=time.monotonic)

    def ended(self) -> None:
        if self.screen:
            self.screen.clear()
            self.screen.show("text", f"done in {duration(time.monotonic() - self.began)}; log: {self.log}")

    def failed(self, line: str) -> None:
        """Print in one line why the run ended."""
        if self.screen:
            self.screen.clear()
        with suppress(OSError):
            print(f"{line}; log: {self.log}" if self.log else line, file=self.err, flush=True)


def is_relayed() -> bool:
    """Tell if `dvc repro` runs this process for a refresh, which shows its marked lines."""
    return RELAYED.items() <= os.environ.items()


def start(name: str) -> Program:
    """Show a person the flow `name` from now on.

    All other output of this process, and of those that it starts, goes to a log file. Raises OSError if that cannot be
    written.
    """
    global _display
    for logger in map(logging.getLogger, _RUN_LOGGERS):
        logger.addHandler(_ForPeople())
    if is_relayed():
        _display = _Relay()
        return Program(None, None, sys.stderr)
    log = _new_log(name)
    out, err = (os.fdopen(os.dup(stream.fileno()), "w") for stream in (sys.stdout, sys.stderr))
    _redirect(log)
    _display = screen = Screen(out)
    screen.show("text", f"{name}: every line of Prefect, DVC, Ray and MLflow goes to {log}")
    screen.begin(name)
    return Program(screen, log, err)


def _new_log(name: str) -> Path:
    """Path of a new log. Of older logs only the newest are kept."""
    LOGS.mkdir(exist_ok=True)
    for old in sorted(LOGS.glob("[0-9]*.log"))[: 1 - KEPT_LOGS]:  # names sort by time
        old.unlink(missing_ok=True)
    return LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}.log"


def _redirect(log: Path) -> None:
    """Send all output to the log, also that of compiled code and of other processes."""
    with open(log, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            # A file descriptor also serves what does not go through Python.
            os.dup2(file.fileno(), stream.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    root = logging.getLogger()
    # By name, as only flows import Prefect's handler. It writes a terminal's colours.
    for handler in [h for h in root.handlers if type(h).__name__ == "PrefectConsoleHandler"]:
        plain = logging.StreamHandler(sys.stderr)
        plain.setFormatter(handler.formatter)
        root.removeHandler(handler)
        root.addHandler(plain)
