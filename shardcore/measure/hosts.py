"""Hosts on which ranks run: real machines, or network namespaces that one machine emulates.

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
class EmulatedHost:
    """Emulated host of a rank: a network namespace of this machine.

    host: its number.
    address: its address.
    namespace: file of its network, which the maker of the host holds open.
    links: those of all emulated hosts.
    """

    host: int
    address: str
    namespace: str
    links: EmulatedLinks

    def enter_network(self) -> None:
        """Move the calling thread, and all threads started from it later, to the emulated host's network.

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

    def move_process(self) -> None:
        """Move this process to the emulated host, with gloo on the host's link."""
        self.enter_network()
        os.environ |= {HOST_VARIABLE: str(self.host), "GLOO_SOCKET_IFNAME": INTERFACE}


def emulated_host_number() -> str | None:
    """Number of the emulated host that this process runs on; None if hosts are real."""
    return os.environ.get(HOST_VARIABLE)


def host_name() -> str:
    """Name of this process's host: in the cluster that started the process (NODE_VARIABLE), else of the machine."""
    emulated = emulated_host_number()
    machine = socket.gethostname() + ("" if emulated is None else f" host {emulated}")
    return os.environ.get(NODE_VARIABLE, machine)


def machine_id() -> str:
    """Id of this machine, equal for all processes that share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def run_in_thread(work: Callable[[], T]) -> T:
    """Run a function in a new thread and return its result. Only that thread's network namespace may change."""
    # A pool of one thread: leaving the context joins it.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def call_libc(name: str, *arguments: int) -> None:
    """Call a function of libc by name, such as setns. Raises OSError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
