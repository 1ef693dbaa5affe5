"""Runs that own their processes and temporary files, which end with the run, however it ends.

A run is `python -m tasks.services …`, or a flow that is started alone. It has a temporary folder, which is TMPDIR for
everything that it starts. All its processes have the folder's path in their environment.

A guardian is a small process in a session of its own. It waits until the run has ended or was killed. Then it ends
every process with that path in its environment, and removes the folder. If both were killed, the next run does this: no
process holds the folder's lock then. Servers end last, as flows still report to a Prefect server how they ended, and
return their actors to Ray.

This file is also the guardian's program, so it imports nothing of its package.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress

import psutil

RUN = "SHARDCORE_OWNED"
"""Environment variable of everything that a run starts: the run's folder."""
SERVES = "SHARDCORE_SERVES"
"""Environment variable of servers, which other processes of the run need until the end."""
GOES_ON = "what was finished is kept, and a rerun goes on from there"
_LAST_WORDS_S, _SERVERS_S = 5.0, 3.0
"""Time in which processes may end after SIGTERM, and then after SIGKILL, and the same for servers."""
_EVERY_S = 0.05
_PREFIX, _LOCK = "shardcore-", "lock"
"""Prefix of the names of runs' folders, and the file in them that a run and its guardian lock."""
_LONGEST_BASE = 18
"""Most bytes of the parent of runs' folders. Ray's sockets add 70 bytes to its folder, and may have 107 in all."""


@contextmanager
def owned_run() -> Iterator[None]:
    """End all processes started in the context when the context ends. In an outer owned run, end them with that run."""
    if os.environ.get(RUN):
        yield
        return
    end_abandoned_runs()
    # Only this process has the write end, so the pipe closes however this process ends.
    read, write = os.pipe()
    guardian = subprocess.Popen(
        [sys.executable, "-P", __file__, short_temporary_folder()],
        stdin=read,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,
    )
    os.close(read)
    assert guardian.stdout is not None  # it is a pipe
    folder = guardian.stdout.readline().strip()
    if not folder:
        raise OSError(f"no temporary folder can be made in {short_temporary_folder()}")
    held = _lock_folder(folder)
    try:
        # SPT_NOENV keeps processes that change their title (Ray's workers) from overwriting their environment.
        with environment({RUN: folder, "TMPDIR": folder, "SPT_NOENV": "1"}):
            tempfile.tempdir = None  # forget the cached value
            yield
    finally:
        tempfile.tempdir = None
        with suppress(BrokenPipeError):
            os.write(write, b"ended")
        os.close(write)
        # If somebody killed the guardian, its work is done here.
        if guardian.wait():
            _clean_up_run(folder)
        os.close(held)
        guardian.stdout.close()


def marking_servers() -> AbstractContextManager[None]:
    """Mark processes started in the context as servers, which end after the run's remaining processes."""
    return environment({SERVES: "1"})


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the context lasts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def end_with_parent() -> None:
    """End this process when its parent process ends, even if the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        # The parent may have ended before prctl took effect.
        if RUN in os.environ and not has_variable(os.getppid(), RUN, os.environ[RUN]):
            raise SystemExit("the process that started this one has ended")


def end_abandoned_runs() -> None:
    """End processes and remove folders of runs that were killed together with their guardian processes."""
    base = short_temporary_folder()
    for name in os.listdir(base):
        folder = os.path.join(base, name)
        with suppress(OSError):  # the folder is no run's, is another user's, or is held by somebody
            if name.startswith(_PREFIX) and os.lstat(folder).st_uid == os.geteuid():
                held = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _clean_up_run(folder)
                finally:
                    os.close(held)


def _lock_folder(folder: str) -> int:
    """Lock a run's folder as long as this process lives.

    Returns the descriptor of the lock's file.
    """
    held = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def short_temporary_folder() -> str:
    """The temporary folder, or /tmp if the temporary folder's path is too long for Ray's sockets."""
    base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) <= _LONGEST_BASE or not os.access("/tmp", os.W_OK) else "/tmp"


# --- the guardian -------------------------------------------------------------------------------------------


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=sys.argv[1])
    _lock_folder(folder)
    with suppress(OSError):  # the run may have ended already
        print(folder, flush=True)
        # Nothing was read: the run was killed, or native code such as Ray's ended its process.
        if not sys.stdin.buffer.read():
            print(f"error: this run was ended before its end; {GOES_ON}", file=sys.stderr, flush=True)
    _clean_up_run(folder)


def _clean_up_run(folder: str) -> None:
    """End a run's processes, and remove its folder."""

    def run_processes() -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and has_variable(p.pid, RUN, folder)]

    def clients() -> list[psutil.Process]:
        return [p for p in run_processes() if not has_variable(p.pid, SERVES, "1")]

    end_processes(clients, _LAST_WORDS_S)
    end_processes(run_processes, _SERVERS_S)
    # A process that is ending may still write into the folder.
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(_EVERY_S)


def end_processes(running: Callable[[], Collection[psutil.Process]], patience_s: float) -> None:
    """Terminate processes until none is left, and kill those that still run after patience_s.

    running: lists them. Processes that others start while they end are thus ended, too.
    """
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        until, asked = time.monotonic() + patience_s, set[psutil.Process]()
        while left := set(running()):
            for process in left - asked:
                with suppress(psutil.NoSuchProcess):
                    ask(process)
            asked |= left
            if time.monotonic() > until:
                break
            time.sleep(_EVERY_S)
        else:
            return


def has_variable(pid: int, name: str, value: str) -> bool:
    """Tell if a process was started with an environment variable of a value. False if the process has ended."""
    try:
        return psutil.Process(pid).environ().get(name) == value
    except (psutil.Error, OSError):
        return False


if __name__ == "__main__":
    main()
