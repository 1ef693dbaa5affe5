"""A cluster in a box: hosts that this machine emulates, so that ranks exchange over links of a chosen rate.

A network namespace is a host to gloo: a network card and addresses of its own. A bridge in a namespace of its
own joins them. `tbf` shapes what each host sends, and at the bridge what it receives.

What is real: processes, gloo, TCP, and queues and sharing on the links. What is not: the links' rates, and a
core for each rank. Ranks of all hosts share this machine's cores, so compute among them measures the
scheduler. Links lose nothing (_QUEUE_BYTES), as those of GPU clusters, and TCP is told so (_TCP).

Namespaces have no names: each lives as long as its keeper, a process that ends when its standard input does.
So nothing is left behind even where the maker is killed, and boxes side by side have equal addresses.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import LINK_GBIT_S, require_within
from shardcore.io.measurements import EmulatedLinks

HOST_VARIABLE = "SHARDCORE_BOX_HOST"
"""Set for processes in a box: the number of their host."""
_INTERFACE, _BRIDGE = "eth0", "bridge0"
_MOST_HOSTS, _MOST_RANKS = 64, 64
_BITS = 1e9
_MTU = 9000
"""As GPU clusters have it. With 1,500 bytes, 5% of a link's rate would go to headers."""
_PACKET_BYTES = 16 << 10
"""At most so much is handed to a link at once (by gso)."""
_BURST_BYTES, _BURST_S = 20 << 10, 200e-6
"""What a link takes without delay after a pause: it has to hold a packet, and what a late timer missed."""
_QUEUE_BYTES = 64 << 20
"""Of each link: more than all sockets of its senders hold, so nothing is lost."""
_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_early_retrans": "0",
    "tcp_rto_min_us": "2000000",
}
"""Of each host. Nothing is lost, so Reno's windows only grow, and what TCP sends twice is waste. BBR, which a
machine may have by default, paces each connection below what it saw: links that all carry as much then idle
for a fifth of an exchange (docs/benchmarks/2026-11-25-emulated-hosts.md). Kernels before 6.11 lack the last.
"""
_TOOLS = ("unshare", "nsenter", "ip", "tc")
_NETWORK = 0x40000000
"""Linux' CLONE_NEWNET."""


@dataclass(frozen=True)
class Box:
    """hosts of ranks_per_host ranks each.

    between_gbit_s: of each host's link, Gbit/s each way; its ranks share it.
    within_gbit_s: of each host's loopback, Gbit/s, which all transfers among its ranks share; None: as fast
        as it is.
    """

    hosts: int = 2
    ranks_per_host: int = 2
    between_gbit_s: float = 0.4
    within_gbit_s: float | None = None

    def __post_init__(self) -> None:
        require_within(
            self,
            "box",
            hosts=(2, _MOST_HOSTS),
            ranks_per_host=(1, _MOST_RANKS),
            between_gbit_s=LINK_GBIT_S,
            within_gbit_s=LINK_GBIT_S,
        )

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def links(self) -> EmulatedLinks:
        return EmulatedLinks(self.between_gbit_s, self.within_gbit_s)


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    host: number of its host.
    address: of its host.
    namespace, inode: its network's file, and that file's inode. The file is named by a process that may end.
    """

    host: int
    address: str
    namespace: str
    inode: int

    def enter(self) -> None:
        """Have the calling thread, and all that it starts from now on, run on this host.

        Raises ShardCoreError where the host is gone.
        """
        try:
            with open(self.namespace) as network:
                if os.fstat(network.fileno()).st_ino != self.inode:
                    raise ProcessLookupError
                libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12
                if libc.setns(network.fileno(), _NETWORK):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        except (FileNotFoundError, ProcessLookupError):
            raise ShardCoreError(f"host {self.host} of the box is gone: its keeper was ended") from None
        except OSError as error:
            raise ShardCoreError(f"host {self.host} of the box cannot be entered: {error.strerror}") from None

    def settle(self) -> None:
        """Have this process run on this host, and gloo use its link."""
        self.enter()
        os.environ |= {HOST_VARIABLE: str(self.host), "GLOO_SOCKET_IFNAME": _INTERFACE}


def own_host() -> str | None:
    """The number of the emulated host that this process runs on. None: it is in no box."""
    return os.environ.get(HOST_VARIABLE)


def machine_id() -> str:
    """Tells machines apart, whose cores their ranks share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@contextmanager
def box_of(config: Box) -> Iterator[list[Place]]:
    """Emulated hosts while the context lasts: the place of each rank, host by host.

    Needs root, and Linux' ip, tc and tbf. Raises ShardCoreError where there is no such thing.
    """
    _require_root()
    with ExitStack() as kept:
        switch, *of_hosts = (kept.enter_context(_kept_network()) for _ in range(config.hosts + 1))
        _join(config, switch, of_hosts)
        places = [
            Place(i, _address(i), f"/proc/{pid}/ns/net", os.stat(f"/proc/{pid}/ns/net").st_ino)
            for i, pid in enumerate(of_hosts)
        ]
        yield [place for place in places for _ in range(config.ranks_per_host)]


def _require_root() -> None:
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        raise ShardCoreError(f"a cluster in a box needs Linux' {', '.join(_TOOLS)}; here is no {missing[0]}")
    if os.geteuid():
        raise ShardCoreError(
            f"a cluster in a box needs root, to make network namespaces; this is user {os.geteuid()}"
        )


@contextmanager
def _kept_network() -> Iterator[int]:
    """A network namespace, by the process that keeps it. It ends with the context, and with this process."""
    # a group of its own: Ctrl-C is for the maker
    keeper = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", f"{_settle_tcp()}echo; exec cat >/dev/null"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with keeper:  # at the end it has no input, so it ends
        try:
            if not keeper.stdout.readline():
                raise _cannot("unshare --net", keeper.stderr.read())
            yield keeper.pid
        finally:
            keeper.kill()


def _settle_tcp() -> str:
    """Shell code that gives the network it runs in its TCP."""
    files = ((f"/proc/sys/net/ipv4/{name}", value) for name, value in _TCP.items())
    return "".join(f"[ ! -e {path} ] || echo {value} > {path} || exit; " for path, value in files)


def _join(config: Box, switch: int, of_hosts: Sequence[int]) -> None:
    """Give each host a link to a bridge, and each link its rate both ways."""
    ports = range(len(of_hosts))
    links = f"mtu {_MTU} gso_max_size {_PACKET_BYTES} up"
    _run(
        "ip",
        switch,
        [
            f"link add {_BRIDGE} type bridge",
            f"link set {_BRIDGE} up",
            *(f"link add port{i} type veth peer name {_INTERFACE} netns {of_hosts[i]}" for i in ports),
            *(f"link set port{i} master {_BRIDGE} {links}" for i in ports),
        ],
    )
    between = _shape(config.between_gbit_s)
    _run("tc", switch, [f"qdisc add dev port{i} root {between}" for i in ports])
    within = [] if config.within_gbit_s is None else [f"qdisc add dev lo root {_shape(config.within_gbit_s)}"]
    for i, host in enumerate(of_hosts):
        _run(
            "ip",
            host,
            [
                f"link set lo {links}",
                f"link set {_INTERFACE} {links}",
                f"address add {_address(i)}/16 dev {_INTERFACE}",
            ],
        )
        _run("tc", host, [f"qdisc add dev {_INTERFACE} root {between}", *within])


def _shape(gbit_s: float) -> str:
    bits = gbit_s * _BITS
    return f"tbf rate {bits:.0f}bit burst {max(_BURST_BYTES, bits / 8 * _BURST_S):.0f} limit {_QUEUE_BYTES}"


def _address(host: int) -> str:
    return f"10.88.0.{host + 1}"


def _run(tool: str, network: int, lines: Sequence[str]) -> None:
    """Run lines of ip or tc in a network."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{network}/ns/net", tool, "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise _cannot(tool, done.stderr)


def _cannot(what: str, said: str) -> ShardCoreError:
    return ShardCoreError(
        f"a cluster in a box cannot be made here: {what}: {' '.join(said.split())[:200] or 'it ended'}"
    )
