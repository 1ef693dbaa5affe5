"""A cluster in a box: hosts that this machine emulates, so that ranks exchange over links of a chosen rate.

A network namespace is a host to gloo: it has a network card and addresses. A bridge in another namespace
joins them. `tbf` shapes what each host sends, and at the bridge what it receives. Hosts in pods have a bridge
a pod, and another one joins the pods, over links that are shaped in the same way.

Real: processes, gloo, TCP, and queues and sharing on the links. Emulated: the links' rates. Ranks of all
hosts share this machine's cores, so compute among them measures the scheduler. Links lose nothing
(_QUEUE_BYTES), as those of GPU clusters, and TCP is tuned for that (_TCP).

Namespaces have no names. Each lives as long as the file by which its maker holds it, or a process in it. So
nothing is left behind even where the maker is killed, and two boxes may have equal addresses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import Record, number_within, require
from shardcore.io.measurements import LINK_GBIT_S, EmulatedLinks
from shardcore.measure.hosts import CLONE_NEWNET, INTERFACE, EmulatedHost, call_libc, run_in_thread

_BRIDGE = "bridge0"
_GBIT = 1e9
_MTU = 9000
"""Packet size of GPU clusters. With 1,500 bytes, 5% of a link's rate would go to headers."""
_PACKET_BYTES = 16 << 10
"""Most bytes that a link is given at once (gso_max_size: segmentation offload hands over several packets)."""
_BURST_BYTES, _BURST_S = 20 << 10, 200e-6
"""Burst of a link after a pause. It has to hold what a link is given at once, and the bytes of a late timer."""
_QUEUE_BYTES = 64 << 20
"""Queue of a link: more than all sockets of its senders hold, so nothing is lost."""
_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_early_retrans": "0",
    "tcp_rto_min_us": "2000000",
}
"""Kernel settings of each host. Nothing is lost, so Reno's windows only grow, and retransmissions are waste. BBR,
the default of some machines, paces each connection below the rate it saw: equally loaded links then idle for
a fifth of an exchange (docs/benchmarks/2026-11-25-emulated-hosts.md). Kernels before 6.11 lack the last
setting.
"""
_TOOLS = ("nsenter", "ip", "tc")


@dataclass(frozen=True)
class Box(Record, noun="box"):
    """Emulated hosts of one machine: names, ranks and links.

    hosts: number of hosts.
    ranks_per_host: ranks of each.
    between_gbit_s: rate of each host's link, Gbit/s each way, which its ranks share. With pods: of each pod's
      link.
    within_gbit_s: rate of each host's loopback, Gbit/s, which all transfers among its ranks share. None: not
      limited.
    pods: number of pods that hosts are divided into evenly. 1: none.
    pod_gbit_s: rate of each host's link in its pod, Gbit/s each way.
    """

    hosts: Annotated[int, number_within(2, 64)] = 2
    ranks_per_host: Annotated[int, number_within(1, 64)] = 2
    between_gbit_s: Annotated[float, number_within(*LINK_GBIT_S)] = 0.4
    within_gbit_s: Annotated[float | None, number_within(*LINK_GBIT_S)] = None
    pods: int = 1
    pod_gbit_s: Annotated[float | None, number_within(*LINK_GBIT_S)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.links  # checks pods and rates
        require(
            self.hosts % self.pods == 0,
            f"box has pods {self.pods}, which do not divide its {self.hosts} hosts evenly",
        )

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def links(self) -> EmulatedLinks:
        return EmulatedLinks(self.between_gbit_s, self.within_gbit_s, self.pods, self.pod_gbit_s)


@contextmanager
def emulated_hosts(config: Box) -> Iterator[list[EmulatedHost]]:
    """Emulate hosts while the context lasts. Yields the place of each rank, host by host.

    Needs root, and Linux' ip, tc and tbf. Raises ShardCoreError where one is missing.
    """
    # Tools and rights are checked first, so that no box fails half made.
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        raise ShardCoreError(f"a cluster in a box needs Linux' {', '.join(_TOOLS)}; here is no {missing[0]}")
    if os.geteuid():
        raise ShardCoreError(
            f"a cluster in a box needs root, to make network namespaces; this is user {os.geteuid()}"
        )
    networks: list[int] = []
    try:
        # One network more than hosts: the switch that joins them.
        for _ in range(config.hosts + 1):
            networks.append(run_in_thread(_enter_new_network_namespace))
        # Processes of any parent can open these, as long as this process has them open.
        switch, *of_hosts = (f"/proc/{os.getpid()}/fd/{network}" for network in networks)
        _connect_hosts(config, switch, of_hosts)
        places = [
            EmulatedHost(i, _host_address(i), namespace, config.links) for i, namespace in enumerate(of_hosts)
        ]
        yield [place for place in places for _ in range(config.ranks_per_host)]
    # Closing the last file of a network removes it with its links.
    finally:
        for network in networks:
            os.close(network)


def _enter_new_network_namespace() -> int:
    """Move the calling thread to a new network namespace. Returns an open file, which keeps the namespace alive."""
    try:
        call_libc("unshare", CLONE_NEWNET)
    except OSError as error:
        raise _tool_error("unshare", str(error)) from None
    # These settings belong to a namespace, so they are written from within it.
    for name, value in _TCP.items():
        setting = Path("/proc/sys/net/ipv4", name)
        # Older kernels lack some settings.
        if setting.exists():
            setting.write_text(value)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _connect_hosts(config: Box, switch: str, of_hosts: Sequence[str]) -> None:
    """Connect each emulated host to a network bridge, with rate limits in both directions.

    Pods have a bridge each, with a link to one that joins them all.
    """
    # Large segments would exceed the burst of the shaper.
    up = f"mtu {_MTU} gso_max_size {_PACKET_BYTES} up"
    _run_tool("ip", switch, [f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up"])
    bridges, host_gbit_s = [_BRIDGE] * config.hosts, config.between_gbit_s
    if config.pod_gbit_s is not None:
        host_gbit_s, each = config.pod_gbit_s, config.hosts // config.pods
        bridges = [f"pod{i // each}" for i in range(config.hosts)]
        for pod in dict.fromkeys(bridges):
            # A packet enters the joining bridge by `up`, and the pod's bridge by `down`.
            _run_tool(
                "ip",
                switch,
                [
                    f"link add {pod} type bridge",
                    f"link set {pod} {up}",
                    f"link add {pod}up type veth peer name {pod}down",
                    f"link set {pod}up master {pod} {up}",
                    f"link set {pod}down master {_BRIDGE} {up}",
                ],
            )
            shape = _rate_limit(config.between_gbit_s)
            _run_tool("tc", switch, [f"qdisc add dev {pod}{end} root {shape}" for end in ("up", "down")])
    shape = _rate_limit(host_gbit_s)
    for i, (host, bridge) in enumerate(zip(of_hosts, bridges, strict=True)):
        peer = f"link add port{i} type veth peer name {INTERFACE} netns {host}"
        _run_tool("ip", switch, [peer, f"link set port{i} master {bridge} {up}"])
        # Shape both directions: the port at the bridge limits what the host receives.
        _run_tool("tc", switch, [f"qdisc add dev port{i} root {shape}"])
        address = f"address add {_host_address(i)}/16 dev {INTERFACE}"
        _run_tool("ip", host, [f"link set lo {up}", f"link set {INTERFACE} {up}", address])
        # And the host's own interface limits what it sends.
        _run_tool("tc", host, [f"qdisc add dev {INTERFACE} root {shape}"])
        if config.within_gbit_s is not None:
            _run_tool("tc", host, [f"qdisc add dev lo root {_rate_limit(config.within_gbit_s)}"])


def _rate_limit(gbit_s: float) -> str:
    bits = gbit_s * _GBIT
    # At high rates a burst has to last until the shaper's timer fires again.
    return f"tbf rate {bits:.0f}bit burst {max(_BURST_BYTES, bits / 8 * _BURST_S):.0f} limit {_QUEUE_BYTES}"


def _host_address(host: int) -> str:
    return f"10.88.0.{host + 1}"


def _run_tool(tool: str, network: str, lines: Sequence[str]) -> None:
    """Run lines of the tools ip or tc in a network namespace."""
    # All lines in one process, instead of an nsenter for each.
    command = ["nsenter", f"--net={network}", tool, "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise _tool_error(tool, done.stderr)


def _tool_error(tool: str, message: str) -> ShardCoreError:
    reason = " ".join(message.split())[:200] or "it ended"
    return ShardCoreError(f"a cluster in a box cannot be made here: {tool}: {reason}")
