"""Hosts of ranks, real ones and those that one machine emulates.

An emulated host is a network namespace, which is a host to gloo: it has a network card and addresses. A checkout makes
such hosts (bench/hosts.py). A gang's ranks enter them here, and know of them.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardcore.core.errors import ShardCoreError
from shardcore.io.measurements import EmulatedLinks

T = TypeVar("T")
HOST_VARIABLE = "SHARDCORE_BOX_HOST"
"""Environment variable of processes in a box: the number of their host."""
NODE_VARIABLE = "SHARDCORE_NODE"
"""Environment variable of a process that a cluster started: its host's name or address there."""
INTERFACE = "eth0"
"""The network card of an emulated host."""
CLONE_NEWNET = 0x40000000
"""Linux' number for network namespaces, of setns and unshare."""


@dataclass(frozen=True)
class Place:
    """The host of a rank.

    host: its number.
    address: its address.
    namespace: file of its network, which the maker of the host holds open.
    links: those of all emulated hosts.
    """

    host: int
    address: str
    namespace: str
    links: EmulatedLinks

    def enter(self) -> None:
        """Move the calling thread, and all that it starts from now on, to this host.

        Raises ShardCoreError where the host is gone.
        """
        # setns moves the calling thread only. Threads that it starts later follow.
        try:
            with open(self.namespace) as network:
                call_libc("setns", network.fileno(), CLONE_NEWNET)
        except FileNotFoundError:
            raise ShardCoreError(f"host {self.host} of the box is gone: its maker ended") from None
        except OSError as error:
            raise ShardCoreError(f"host {self.host} of the box cannot be entered: {error.strerror}") from None

    def settle(self) -> None:
        """Move this process to this host, with gloo on its link."""
        self.enter()
        os.environ |= {HOST_VARIABLE: str(self.host), "GLOO_SOCKET_IFNAME": INTERFACE}


def own_host() -> str | None:
    """The number of the emulated host that this process runs on. None: it is in no box."""
    return os.environ.get(HOST_VARIABLE)


def host_name() -> str:
    """Name of this process's host: that in its cluster, if it is of one (NODE_VARIABLE), else the machine's."""
    emulated = own_host()
    machine = socket.gethostname() + ("" if emulated is None else f" host {emulated}")
    return os.environ.get(NODE_VARIABLE, machine)


def machine_id() -> str:
    """Name of this machine, equal for processes that share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def in_thread(work: Callable[[], T]) -> T:
    """Run work in a thread of its own, which ends with it. Only that thread changes its network."""
    # A pool of one thread: leaving the context joins it.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def call_libc(name: str, *arguments: int) -> None:
    """Call a function of libc; Python has setns and unshare from 3.12 on. Raises OSError where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
