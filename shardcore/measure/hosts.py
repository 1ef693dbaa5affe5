"""A cluster in a box: hosts that are network namespaces of this machine, joined by links of a given rate.

To gloo they are hosts: each has its own interface, address and routes, and all bytes between two of them pass
their links (a `tbf` queue each way). What is emulated are the hosts and the rates of their links. Processes,
gloo, TCP and the collectives are real. All hosts share this machine's cores, so compute is not.

Each namespace lives as long as the process that holds it, and has no name. Holders die with the thread that
made the box. So nothing is left behind, even if that is killed: interfaces and bridge vanish with their
namespaces. Boxes neither see each other, nor the network of the machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from shardcore.errors import ShardCoreError
from shardcore.limits import require_within

MOST_HOSTS = 64
INTERFACE = "e0"
"""The interface of each host."""
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux",
          "setpriv": "util-linux"}
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of <sched.h>."""
_BURST_KIB = 64
"""What a link passes at once: at least what a timer tick of 4 ms lets through at 100 Mbit/s."""
_QUEUE_MS = 200
_START_S = 10.0


@dataclass(frozen=True)
class BoxConfig:
    """A cluster in a box.

    hosts: how many.
    ranks_per_host: of a gang.
    link_mbit: Mbit/s of each host's link, in each direction. Its ranks share it.
    """

    hosts: int = 2
    ranks_per_host: int = 2
    link_mbit: int = 400

    def __post_init__(self) -> None:
        require_within(self, "box", hosts=(1, MOST_HOSTS), ranks_per_host=(1, MOST_HOSTS),
                       link_mbit=(1, 100_000))

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def words(self) -> str:
        """For people, wherever its figures stand."""
        return f"{self.hosts} emulated hosts of {self.ranks_per_host} ranks, links of {self.link_mbit} Mbit/s"


@dataclass(frozen=True)
class Host:
    """One host of a box.

    network: path of its namespace.
    address: of its interface.
    """

    network: str
    address: str

    def enter(self) -> None:
        """Move this thread, and those that it will start, to the host. Sockets made before stay outside."""
        with open(self.network) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                raise ShardCoreError(f"cannot enter {self.network}: {os.strerror(ctypes.get_errno())}; a box "
                                     "needs root")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def lacks() -> str | None:
    """Why this machine can hold no box, as far as that can be told before. None where nothing is lacking."""
    if os.geteuid():
        return f"a cluster in a box needs root; this is user {os.geteuid()}"
    missing = next((tool for tool in _TOOLS if not shutil.which(tool)), None)
    return missing and f"a cluster in a box needs the command {missing}, of the package {_TOOLS[missing]}"


@contextmanager
def box(config: BoxConfig) -> Iterator[tuple[Host, ...]]:
    """The hosts of a box, which is gone afterwards.

    Raises ShardCoreError where this machine can hold none.
    """
    if why := lacks():
        raise ShardCoreError(why)
    with ExitStack() as holders:
        switch, *hosts = (holders.enter_context(_network()) for _ in range(1 + config.hosts))
        _run(switch, "ip", "link", "add", "br0", "type", "bridge")
        _run(switch, "ip", "link", "set", "br0", "up")
        for number, host in enumerate(hosts, 1):
            port = f"port{number}"
            _run(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE,
                 "netns", str(host))
            _run(switch, "ip", "link", "set", port, "master", "br0", "up")
            _run(host, "ip", "addr", "add", f"{_address(number)}/16", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _run(host, "ip", "link", "set", interface, "up")
            for at, interface in ((switch, port), (host, INTERFACE)):
                _run(at, "tc", "qdisc", "add", "dev", interface, "root", "tbf", "rate",
                     f"{config.link_mbit}mbit", "burst", f"{_BURST_KIB}kb", "latency", f"{_QUEUE_MS}ms")
        yield tuple(Host(f"/proc/{host}/ns/net", _address(number)) for number, host in enumerate(hosts, 1))


def _address(number: int) -> str:
    return f"10.88.0.{number}"


@contextmanager
def _network() -> Iterator[int]:
    """A process that holds a network namespace of its own."""
    own = os.readlink("/proc/self/ns/net")
    # The kernel kills it when this thread ends, however that happens.
    holder = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"],
                              stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              text=True)
    try:
        deadline = time.monotonic() + _START_S
        while not _holds(holder.pid, own):
            if holder.poll() is not None or time.monotonic() > deadline:
                holder.kill()
                said = " ".join(holder.communicate()[1].split())[:200]
                raise ShardCoreError(f"cannot make a network namespace: {said or 'no answer'}")
            time.sleep(0.005)
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def _holds(pid: int, outside: str) -> bool:
    """Whether a process has become `sleep` in another network than ours."""
    try:
        with open(f"/proc/{pid}/comm") as name:
            return name.read().strip() == "sleep" and os.readlink(f"/proc/{pid}/ns/net") != outside
    except OSError:
        return False


def _run(holder: int, *command: str) -> None:
    """Run a command in the network of a holder."""
    done = subprocess.run(["nsenter", "--target", str(holder), "--net", *command], capture_output=True,
                          text=True)
    if done.returncode:
        said = " ".join((done.stderr + done.stdout).split())[:200]
        raise ShardCoreError(f"a cluster in a box: `{' '.join(command)}` failed: {said}")


def host_of_rank(rank: int, hosts: Sequence[Host], ranks: int) -> Host:
    """Ranks are numbered host by host, equally many on each."""
    return hosts[rank * len(hosts) // ranks]
