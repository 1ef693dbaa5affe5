"""The screen of a flow run as a program: stages, progress, results, warnings and errors.

Everything else (all lines of Prefect, DVC, Ray and MLflow) goes to a log file in logs/. Flows and tasks log as usual,
and Prefect's pages have all of it. A log record is shown if it is a warning of ours, or has `extra=STAGE` or
`extra=RESULT`. Progress is shown and not logged, so it may change often.

Without `start_program` nothing is shown, as runs of deployments have their pages. In a refresh, `dvc repro` runs each
stage in a process of its own. This process marks the lines to show, and the refresh shows them (`show_if_marked`).
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

from shardcore.measure.tally import duration_text
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
    def show(self, kind: str, message: str, fraction: float = 0.0) -> None: ...


_display: _Display | None = None


# --- what flows and tasks show ------------------------------------------------------------------------------


def show(kind: str, message: str, fraction: float = 0.0) -> None:
    """Show a line of a flow run on the screen.

    kind: "stage", "progress", "result", "warning" or "text".
    message: the line.
    fraction: progress, 0 to 1.
    """
    if _display:
        _display.show(kind, message, fraction)


def show_progress(fraction: float, message: str) -> None:
    """Show the progress of long work on the screen.

    fraction: share that is done, 0 to 1.
    message: description of the work.
    """
    show("progress", message, fraction)


# --- who shows it -------------------------------------------------------------------------------------------


class _ErrorTolerantStream:
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


class _StageSpinner(SpinnerColumn):
    """Spinner that keeps turning when the progress bar is full."""

    def render(self, task: Task) -> RenderableType:
        return self.spinner.render(task.get_time())


class _PresentWorkColumn(ProgressColumn):
    """Column with the present work of a stage, or the time that the stage has run while its work is unknown."""

    def get_table_column(self) -> Column:
        return Column(no_wrap=True, overflow="ellipsis", ratio=1)

    def render(self, task: Task) -> Text:
        return Text(task.fields["doing"] or f"{duration_text(task.elapsed or 0.0)} so far")


class Screen:
    """Screen of a flow run: lines, and a live progress line.

    On a terminal, a live line below them shows the stage, its progress and its rate. Elsewhere an occasional line does.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic):
        self._out, self._clock, self._began, self._shown_s = (
            _ErrorTolerantStream(out),
            clock,
            clock(),
            clock(),
        )
        self._stage = ""
        self._live: Progress | None = None
        terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._terminal = _Terminal(file=cast(TextIO, self._out), force_terminal=True) if terminal else None

    def show(self, kind: str, message: str, fraction: float = 0.0) -> None:
        if kind == "progress":
            self._show_progress(message, fraction)
            return
        if kind == "result":
            message = f"  {message} ({duration_text(self._clock() - self._began)})"
        elif kind == "warning":
            message = f"  warning: {message}"
        self._print_line(message)
        if kind == "stage":
            self.begin_stage(message.partition(", ")[0])

    def begin_stage(self, stage: str) -> None:
        """Start the clock of a stage, and show on the live line that the stage runs."""
        self._began = self._shown_s = self._clock()
        self._stage = stage
        if self._terminal:
            self._start_live_line(self._terminal)

    def clear_live_line(self) -> None:
        """Remove the live progress line from the terminal."""
        if self._live:
            self._live.stop()
            self._live = None

    def _start_live_line(self, terminal: Console) -> Progress:
        """Show a new live progress line for the current stage."""
        self.clear_live_line()
        self._live = live = Progress(
            _StageSpinner(),
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR),
            _PresentWorkColumn(),
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

    def _show_progress(self, message: str, fraction: float) -> None:
        if self._terminal:
            live = self._live or self._start_live_line(self._terminal)
            # Without a total the bar pulses: nothing is done yet.
            live.update(live.task_ids[0], total=1.0 if fraction else None, completed=fraction, doing=message)
        elif self._clock() - self._shown_s >= _LINE_EVERY_S:
            self._shown_s = self._clock()
            self._print_line(f"  {100 * fraction:3.0f}%  {message}")

    def _print_line(self, text: str) -> None:
        if self._terminal:
            self._terminal.out(text, highlight=False)
        else:
            self._out.write(f"{text}\n")
            self._out.flush()


class _Relay:
    """Display that prints marked lines, for the parent process to show."""

    def show(self, kind: str, message: str, fraction: float = 0.0) -> None:
        print(_MARK + json.dumps([kind, message, fraction]), flush=True)


def show_if_marked(line: str) -> bool:
    """Show a line of output that a child process marked for display. Returns False for an unmarked line."""
    if not line.startswith(_MARK):
        return False
    show(*json.loads(line.removeprefix(_MARK)))
    return True


class _ScreenHandler(logging.Handler):
    """Logging handler that shows warnings and results on the screen."""

    _prefect = f"{paths.package_folder('prefect')}{os.sep}"

    def emit(self, record: logging.LogRecord) -> None:
        kind = getattr(record, "shown", None)
        if record.levelno >= logging.WARNING and not record.pathname.startswith(self._prefect):
            # Prefect's own warnings report how a run ended. `Program.print_failure` does so once, at the end.
            kind = "warning"
        if kind:
            show(kind, record.getMessage())


# --- as a program -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A flow run as a program on a terminal: its screen, log file and error stream.

    screen: screen of its lines. None: another process shows them.
    log: file of all other output. None: another process has it.
    err: stream for the reason why it failed.
    began: time of its start, on the monotonic clock.
    """

    screen: Screen | None
    log: Path | None
    err: TextIO
    began: float = field(default_factory=time.monotonic)

    def print_end(self) -> None:
        if self.screen:
            self.screen.clear_live_line()
            self.screen.show(
                "text", f"done in {duration_text(time.monotonic() - self.began)}; log: {self.log}"
            )

    def print_failure(self, line: str) -> None:
        """Print in one line why the flow run failed."""
        if self.screen:
            self.screen.clear_live_line()
        with suppress(OSError):
            print(f"{line}; log: {self.log}" if self.log else line, file=self.err, flush=True)


def is_relayed() -> bool:
    """Tell if a refresh runs this process by `dvc repro`, and shows its marked lines."""
    return RELAYED.items() <= os.environ.items()


def start_program(name: str) -> Program:
    """Start the screen and the log file of the flow `name`.

    All other output of this process, and of those that it starts, goes to a log file. Raises OSError if that cannot be
    written.
    """
    global _display
    for logger in map(logging.getLogger, _RUN_LOGGERS):
        logger.addHandler(_ScreenHandler())
    if is_relayed():
        _display = _Relay()
        return Program(None, None, sys.stderr)
    log = _new_log_path(name)
    out, err = (os.fdopen(os.dup(stream.fileno()), "w") for stream in (sys.stdout, sys.stderr))
    _redirect_output(log)
    _display = screen = Screen(out)
    screen.show("text", f"{name}: every line of Prefect, DVC, Ray and MLflow goes to {log}")
    screen.begin_stage(name)
    return Program(screen, log, err)


def _new_log_path(name: str) -> Path:
    """Path of a new log file. Deletes old log files except the newest."""
    LOGS.mkdir(exist_ok=True)
    for old in sorted(LOGS.glob("[0-9]*.log"))[: 1 - KEPT_LOGS]:  # names sort by time
        old.unlink(missing_ok=True)
    return LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}.log"


def _redirect_output(log: Path) -> None:
    """Redirect standard output and error to a log file, also for compiled code and child processes."""
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
