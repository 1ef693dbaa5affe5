"""Processes of a run that is watched from outside: which are its own, what they are, who listens, and which
is to be struck."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import subprocess
from dataclasses import dataclass, field
from typing import Any

import psutil

MARK = "SHARDCORE_KILLS"
"""In the environment of all that a run starts."""


@dataclass
class Run:
    """One run of a kind, followed: every process that was ever seen of it."""

    process: subprocess.Popen
    mark: str
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    others: set[psutil.Process] = field(default_factory=set)

    def look(self) -> list[psutil.Process]:
        """Its living processes now: those that it started, those of theirs, and those that carry its mark."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process in self.others or self.seen.get(process.pid) == process:
                    continue
                if (
                    process.pid == self.process.pid
                    or process.ppid() in self.seen
                    or process.environ().get(MARK) == self.mark
                ):
                    self.seen[process.pid] = process
                else:
                    self.others.add(process)
        return [p for p in self.seen.values() if living(p)]

    def ended(self) -> bool:
        return self.process.poll() is not None


def living(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def open_to_others(processes: list[psutil.Process]) -> list[str]:
    """Those that listen at more than loopback, and where."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += [
                f"{name_of(process)} at {c.laddr.ip}:{c.laddr.port}"
                for c in process.net_connections("inet")
                if c.status == psutil.CONN_LISTEN
                and not c.laddr.ip.removeprefix("::ffff:").startswith("127.")
            ]
    return found


def name_of(process: psutil.Process) -> str:
    """What a process is, in a word or two."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return "?"
    said = " ".join(command)
    for word, name in (
        ("owned.py", "guardian"),
        ("tasks.services", "tasks.services"),
        ("prefect server", "prefect server"),
        ("mlflow", "mlflow"),
        ("tasks.watch", "watch"),
        ("worker start", "worker"),
        ("flow-run", "flow run"),
        ("-m dvc", "dvc"),
        ("gcs_server", "gcs_server"),
        ("raylet/raylet", "raylet"),
        ("Agent", "ray agent"),
        ("agent", "ray agent"),
        ("ray::", "ray worker"),
        ("default_worker.py", "ray worker"),
        ("dashboard", "ray dashboard"),
        ("ray.scripts", "ray start"),
        ("ray/", "ray process"),
        ("multiprocessing", "multiprocessing"),
    ):
        if word in said:
            return name
    return next(
        (part for part in command if part.startswith("flows.")),
        os.path.basename(command[0]) if command else "?",
    )


def draw_victim(tree: list[psutil.Process], rows: list[dict[str, Any]], rng: random.Random) -> psutil.Process:
    """A process of a kind that the fewest rows so far struck: a random one of these kinds, then a random one
    of its kind."""
    struck = collections.Counter(row["victim"] for row in rows)
    kinds: dict[str, list[psutil.Process]] = {}
    for process in sorted(tree, key=lambda p: p.pid):
        kinds.setdefault(name_of(process), []).append(process)
    fewest = min(struck[kind] for kind in kinds)
    return rng.choice(kinds[rng.choice(sorted(kind for kind in kinds if struck[kind] == fewest))])
