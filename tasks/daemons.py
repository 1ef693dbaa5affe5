"""Background processes that outlive the command which started them.

A file holds a daemon's process id. A mark in the process's environment shows which daemon it is. So an id that now
belongs to another process, such as after a reboot, is recognised. The mark also finds processes that a killed daemon
has left.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardcore.core.errors import ShardCoreError, escape_unprintable
from tasks import owned
from tasks.processes import is_running

_MARK = "SHARDCORE_DAEMON"
ALLOWED_HOSTS = "SHARDCORE_ALLOWED_HOSTS"
"""stack.allowed_hosts, in the environment of services."""
STORES = (
    "PREFECT_SERVER_DATABASE_CONNECTION_URL",
    "MLFLOW_BACKEND_STORE_URI",
    "MLFLOW_ARTIFACTS_DESTINATION",
    ALLOWED_HOSTS,
)
"""Environment variables that state where a service keeps its data, and to whom it answers."""
_TAIL_BYTES = 64 << 10
"""End of a log in which its last lines are looked for."""
_CLOCK_S = 1.0
"""Largest difference between the clocks of processes and of files."""


@dataclass(frozen=True)
class Daemon:
    """A background process of the stack, started, watched and ended by its id file.

    name: name of its files.
    command: command, which runs in the current folder.
    env: whole environment of the process.
    folder: folder of its id and its log.
    """

    name: str
    command: tuple[str, ...]
    env: dict[str, str]
    folder: Path

    @property
    def log_path(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"

    def start(self) -> None:
        """Start the daemon's process with a new log. The previous log is kept as NAME.log.1."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self.log_path.exists():
            self.log_path.replace(self.log_path.with_name(f"{self.log_path.name}.1"))
        with open(self.log_path, "wb") as log:
            subprocess.Popen(
                self.command,
                env={**self.env, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._write_process_id,
            )

    def process(self) -> psutil.Process | None:
        """Process of the daemon. None if the daemon does not run."""
        try:
            process = psutil.Process(int(self._id_file.read_text()))
            return (
                process
                if owned.has_variable(process.pid, _MARK, self._mark) and is_running(process)
                else None
            )
        except (OSError, ValueError, psutil.Error):
            return None

    def start_time(self) -> float | None:
        """Start time of the daemon, Unix s. None if the daemon does not run.

        This is the clock of files, which the records of services use, too. psutil's counts from the boot, whose time is
        known to a second only. It decides if the clock was set back since.
        """
        try:
            process = self.process()
            return process and min(self._id_file.stat().st_mtime, process.create_time() + 2 * _CLOCK_S)
        except (FileNotFoundError, psutil.Error):  # it was stopped meanwhile
            return None

    def runs_as_configured(self) -> bool:
        """Tell if the daemon runs. Raises ShardCoreError if it runs with another command or other data stores."""
        process = self.process()
        if process is not None and (
            process.cmdline() != list(self.command)
            or self._store_variables(process.environ()) != self._store_variables(self.env)
        ):
            raise ShardCoreError(
                f"{self.name} (process {process.pid}) runs with other settings than those "
                "of now; end it first"
            )
        return process is not None

    @staticmethod
    def _store_variables(env: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in env.items() if name in STORES}

    def has_died(self) -> bool:
        """Tell if the daemon ended without being stopped."""
        return self._id_file.exists() and self.process() is None

    def leftover_processes(self) -> list[psutil.Process]:
        """Running descendants of the daemon, which may have ended."""
        leader = self.process()
        session = self._session_id()
        return [
            p
            for p in psutil.process_iter()
            if p != leader
            and (owned.has_variable(p.pid, _MARK, self._mark) or (session and _session_id_of(p) == session))
            and is_running(p)
        ]

    def stop(self, patience_s: float = 15.0) -> None:
        """End the daemon, then its descendants. Kill processes that still run after patience_s."""
        owned.end_processes(lambda: list(filter(None, [self.process()])), patience_s)
        owned.end_processes(self.leftover_processes, patience_s / 3)
        self._id_file.unlink(missing_ok=True)

    def last_log_lines(self, count: int) -> list[str]:
        """Last lines of the daemon's log, with control characters escaped."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return [
                    escape_unprintable(line)
                    for line in log.read().decode(errors="replace").splitlines()
                    if line.strip()
                ][-count:]
        except FileNotFoundError:
            return []

    @property
    def _id_file(self) -> Path:
        return self.folder / f"{self.name}.pid"

    @property
    def _mark(self) -> str:
        return str(self.folder.resolve() / self.name)

    # The process itself writes its id before its command runs. So none runs without an id in the file.
    def _write_process_id(self) -> None:
        self._id_file.write_text(str(os.getpid()))

    def _session_id(self) -> int:
        """Id of the POSIX session that the daemon leads or led. 0 if unknown.

        Some of Ray's processes overwrite their environment, and with it the mark. Only their session identifies them.
        """
        try:
            pid, started = int(self._id_file.read_text()), self._id_file.stat().st_mtime
        except (OSError, ValueError):
            return 0
        if started < psutil.boot_time():
            return 0
        if self.process() is not None:
            return pid
        try:
            # A killed leader keeps its id until it is reaped, which may take seconds.
            holder = psutil.Process(pid)
            return pid if not is_running(holder) and holder.create_time() < started + _CLOCK_S else 0
        except psutil.NoSuchProcess:
            return pid
        except psutil.Error:
            return 0


def _session_id_of(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0
