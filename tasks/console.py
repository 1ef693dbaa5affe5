"""What a person sees of a flow run as a program: stages, progress, results, warnings and errors.

Everything else (all lines of Prefect, DVC, Ray and MLflow) goes to a log file in logs/. Flows and tasks log
as usual, and Prefect's pages have all of it. A record is shown if it is our warning, or logged with
`extra=STAGE` or `extra=RESULT`. Progress is only shown, so it may change often.

Without `start` nothing is shown: runs of deployments have their pages. For a refresh, `dvc repro` runs each
stage as a process of its own. Such a process marks the lines to show, and the refresh shows them (`relayed`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TextIO

LOGS = Path("logs")
KEPT_LOGS = 20
STAGE, RESULT = {"shown": "stage"}, {"shown": "result"}
RELAYED = {"SHARDCORE_RELAYED": "1"}
"""Environment of a process whose marked lines are shown by another process."""
_MARK = "shown: "
_RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
_LINE_EVERY_S = 30.0
"""Time between two lines of progress without a terminal."""
_BAR = 20


class _Display(Protocol):
    def show(self, kind: str, message: str, share: float = 0.0) -> None: ...


_display: _Display | None = None


# --- what flows and tasks say -------------------------------------------------------------------------------


def show(kind: str, message: str, share: float = 0.0) -> None:
    """Show a line.

    kind: "stage", "progress", "result", "warning" or "text".
    message: the line.
    share: of progress, 0 to 1.
    """
    if _display:
        _display.show(kind, message, share)


def progress(share: float, message: str) -> None:
    """Show the progress of long work.

    share: the part that is done, 0 to 1.
    message: what is done.
    """
    show("progress", message, share)


@dataclass
class Work:
    """Long work, shown as it goes on.

    what: its parts, such as "problems compared".
    total: number of parts.
    """

    what: str
    total: int
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self.done(0)

    def done(self, n: int) -> None:
        """Show that n parts are done."""
        left = f", {duration((self.clock() - self._began) * (self.total - n) / n)} left" if n else ""
        progress(n / self.total if self.total else 1.0, f"{self.what}: {n} of {self.total}{left}")


def duration(seconds: float) -> str:
    """Seconds in words: "89 s", "2 min", "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# --- who shows it -------------------------------------------------------------------------------------------


class Screen:
    """Lines for a person. On a terminal, progress is one changing line. Elsewhere an occasional line."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic):
        self._out, self._clock, self._began, self._said = out, clock, clock(), clock()
        self._terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = False

    def show(self, kind: str, message: str, share: float = 0.0) -> None:
        if kind == "progress":
            self._progress(message, share)
            return
        if kind == "stage":
            self._began = self._said = self._clock()
        elif kind == "result":
            message = f"  {message} ({duration(self._clock() - self._began)})"
        elif kind == "warning":
            message = f"  warning: {message}"
        self._write(f"{self._erased()}{message}\n")

    def clear(self) -> None:
        """Remove the line of progress."""
        self._write(self._erased())

    def _progress(self, message: str, share: float) -> None:
        if self._terminal:
            bar = "#" * int(_BAR * share)
            line = f"  [{bar:<{_BAR}}] {100 * share:3.0f}%  {message}"[: self._columns() - 1]
            self._write(f"{self._erased()}{line}")
            self._drawn = True
        elif self._clock() - self._said >= _LINE_EVERY_S:
            self._said = self._clock()
            self._write(f"  {100 * share:3.0f}%  {message}\n")

    def _erased(self) -> str:
        drawn, self._drawn = self._drawn, False
        return "\r\x1b[K" if drawn else ""

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns or 80
        except OSError:
            return 80

    def _write(self, text: str) -> None:
        # A closed terminal is no reason to end the run.
        with suppress(OSError):
            self._out.write(text)
            self._out.flush()


class _Relay:
    """Prints marked lines, for another process to show."""

    def show(self, kind: str, message: str, share: float = 0.0) -> None:
        print(_MARK + json.dumps([kind, message, share]), flush=True)


def relayed(line: str) -> bool:
    """Show a line if another process marked it. Returns whether it was marked."""
    if not line.startswith(_MARK):
        return False
    show(*json.loads(line.removeprefix(_MARK)))
    return True


class _ForPeople(logging.Handler):
    """Shows the records of a run's log that are for a person."""

    _prefect = os.path.dirname(find_spec("prefect").origin) + os.sep

    def emit(self, record: logging.LogRecord) -> None:
        kind = getattr(record, "shown", None)
        if record.levelno >= logging.WARNING and not record.pathname.startswith(self._prefect):
            # Prefect's own warnings say how a run ended. `Program.failed` says that once, at the end.
            kind = "warning"
        if kind:
            show(kind, record.getMessage())


# --- as a program -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """This process as a person sees it.

    screen: shows its lines. None: another process does.
    log: file with everything else. None: another process has it.
    err: where to say why it failed.
    began: when it started, on the monotonic clock.
    """

    screen: Screen | None
    log: Path | None
    err: TextIO
    began: float = field(default_factory=time.monotonic)

    def ended(self) -> None:
        if self.screen:
            self.screen.show("text", f"done in {duration(time.monotonic() - self.began)}; log: {self.log}")

    def failed(self, line: str) -> None:
        """Say in one line why the run ended."""
        if self.screen:
            self.screen.clear()
        with suppress(OSError):
            print(f"{line}; log: {self.log}" if self.log else line, file=self.err, flush=True)


def is_relayed() -> bool:
    """Whether `dvc repro` runs this process for a refresh, which shows its marked lines."""
    return RELAYED.items() <= os.environ.items()


def start(name: str) -> Program:
    """Show a person the flow `name` from now on.

    All other output of this process, and of those that it starts, goes to a log file. Raises OSError if that
    cannot be written.
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
    screen.show("stage", f"{name}: every line of Prefect, DVC, Ray and MLflow goes to {log}")
    return Program(screen, log, err)


def _new_log(name: str) -> Path:
    """Path of a new log. Only the newest older logs are kept."""
    LOGS.mkdir(exist_ok=True)
    for old in sorted(LOGS.glob("[0-9]*.log"))[: 1 - KEPT_LOGS]:  # names sort by time
        old.unlink(missing_ok=True)
    return LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}.log"


def _redirect(log: Path) -> None:
    """Send all output to the log, also of compiled code and other processes."""
    with open(log, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            # Replacing the file descriptor also catches what does not go through Python.
            os.dup2(file.fileno(), stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)
    root = logging.getLogger()
    # Imported by flows only.
    for handler in [h for h in root.handlers if type(h).__name__ == "PrefectConsoleHandler"]:
        # Prefect's handler writes a terminal's colours.
        plain = logging.StreamHandler(sys.stderr)
        plain.setFormatter(handler.formatter)
        root.removeHandler(handler)
        root.addHandler(plain)
