"""What a run starts ends with it, however it ends: its processes, and its temporary files.

A run is `python -m tasks.services …`, or a flow that is started alone. It has a temporary folder, which is TMPDIR for all
that it starts, and whose path all of that carries in its environment. A guardian, a small process in a session of its own,
waits until the run has ended, or was ended. Then it ends what carries the mark and removes the folder. What serves others
ends last: flows tell a Prefect server how they ended, and give their actors back to Ray.

This file is the guardian's program too, so it imports the standard library only. It reads /proc, which Linux has: elsewhere
a run that ends by itself ends what it knows of, and what a killed one leaves stays.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

RUN = "SHARDCORE_OWNED"
"""The run's folder, in the environment of all that it starts."""
SERVES = "SHARDCORE_SERVES"
"""Set for what others of the run need to end well."""
GOES_ON = "what was finished is kept, and a rerun goes on from there"
_LAST_WORDS_S, _SERVERS_S, _KILLED_S = 5.0, 3.0, 2.0
"""How long processes may take to end when they are asked to, servers too, and when they are killed."""
_EVERY_S = 0.05
_LONGEST_BASE = 18
"""Bytes of the folder's parent: paths of Ray's sockets are 70 longer than its folder, and may have 107."""


@contextmanager
def owned() -> Iterator[None]:
    """All that is started within ends with it. Within another's run: as that ends."""
    if os.environ.get(RUN):
        yield
        return
    read, write = os.pipe()  # only this process holds the write end, so it closes however this one ends
    guardian = subprocess.Popen([sys.executable, "-I", "-S", __file__, _base()], stdin=read, stdout=subprocess.PIPE, text=True,
                                cwd="/", start_new_session=True)
    os.close(read)
    folder = guardian.stdout.readline().strip()
    if not folder:
        raise OSError(f"no temporary folder can be made in {_base()}")
    # SPT_NOENV: processes that change their title (Ray's workers) are not to write over their environment.
    ours = {RUN: folder, "TMPDIR": folder, "SPT_NOENV": "1"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    tempfile.tempdir = None  # it is known from before
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        tempfile.tempdir = None
        with suppress(BrokenPipeError):
            os.write(write, b"ended")
        os.close(write)
        if guardian.wait():  # somebody ended it
            _sweep(folder)
        guardian.stdout.close()


@contextmanager
def serving() -> Iterator[None]:
    """What is started within is a server to the others of its run."""
    os.environ[SERVES] = "1"
    try:
        yield
    finally:
        del os.environ[SERVES]


def end_with_parent() -> None:
    """End this process, which another one of its run started, when that one ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if RUN in os.environ and not _carries(os.getppid(), RUN, os.environ[RUN]):  # it had ended before
            raise SystemExit("the process that started this one has ended")


def _base() -> str:
    base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) <= _LONGEST_BASE or not os.access("/tmp", os.W_OK) else "/tmp"


# --- the guardian ------------------------------------------------------------------------------------------------------


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix="shardcore-", dir=sys.argv[1])
    with suppress(OSError):  # the run may have ended already
        print(folder, flush=True)
        if not sys.stdin.buffer.read():  # it was killed, or its native code ended it: Ray's may, with no word of ours
            print(f"error: this run was ended before its end; {GOES_ON}", file=sys.stderr, flush=True)
    _sweep(folder)


def _sweep(folder: str) -> None:
    """End a run's processes, and remove its folder."""
    def all_left() -> list[int]:
        return [pid for pid in _pids() if _carries(pid, RUN, folder)]

    _end(lambda: [pid for pid in all_left() if not _carries(pid, SERVES, "1")], _LAST_WORDS_S)
    _end(all_left, _SERVERS_S)
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(_EVERY_S)


def _end(found: Callable[[], list[int]], patience_s: float) -> None:
    """Ask processes to end, each once, and kill those that have not in time; what they start meanwhile too."""
    for number, seconds in ((signal.SIGTERM, patience_s), (signal.SIGKILL, _KILLED_S)):
        until, asked = time.monotonic() + seconds, set()
        while left := found():
            for pid in set(left) - asked:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            asked.update(left)
            if time.monotonic() > until:
                break
            time.sleep(_EVERY_S)
        else:
            return


def _pids() -> list[int]:
    """Of all other processes."""
    if sys.platform != "linux":
        return []
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _carries(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with a variable in its environment. One that has ended has none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return os.fsencode(f"{name}={value}") in file.read().split(b"\0")
    except OSError:
        return False


if __name__ == "__main__":
    main()
