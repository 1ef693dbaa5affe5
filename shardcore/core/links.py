"""Levels of links between devices. One row of LEVELS defines each, from the innermost out.

A level joins the devices of a domain (a host, a pod, the cluster) that no inner level joins. Topologies give links by
level. Cost models count a collective's bytes on each. All carry theirs at once, so the slowest decides.
To add a level, add a row. Models that do not know it price its bytes as those of the next level out.

Shapes: K levels, n devices.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_GBPS, MOST_MS, Record, number_within, one_of, require


@dataclass(frozen=True)
class LinkLevel:
    """A level of links between devices: within hosts, within pods or between hosts.

    name: name in topologies and files.
    words: for people, after "links".
    domain: name of the domain that it joins, from the name of a device's host.
    terms: exchange terms of a cost model (collective_model.EXCHANGE_TERMS), and what each counts, a name of
      step.link_counts.COUNTS.
    each: the term of the busiest device's bytes.
    shared: that of the busiest inner domain, whose devices may share one link. "": they never do.
    torchrec: argument of TorchRec's Topology for it, and the constant that is its default.
    rows_over: word for its domain, if TorchRec may divide rows of a table over one. "": it does not.
    """

    name: str
    words: str
    domain: Callable[[str], str]
    terms: Mapping[str, str]
    each: str
    shared: str = ""
    torchrec: tuple[str, str] | None = None
    rows_over: str = ""


def pod_of_host(host: str) -> str:
    """Pod of a host, from the host's name: the part before the last slash, as in "pod-0/host-1"; without a slash, the
    whole name."""
    return host.rpartition("/")[0] or host


LEVELS: Mapping[str, LinkLevel] = {
    row.name: row
    for row in (
        LinkLevel(
            "within_host",
            "within hosts",
            lambda host: host,
            {"near_bytes": "bytes", "near_busiest_bytes": "busiest"},
            "near_busiest_bytes",
            torchrec=("intra_host_bw", "INTRA_NODE_BANDWIDTH"),
            rows_over="host",
        ),
        LinkLevel(
            "within_pod",
            "within pods",
            pod_of_host,
            {"pod_bytes": "bytes", "pod_busiest_bytes": "busiest", "pod_uplink_bytes": "uplink"},
            "pod_busiest_bytes",
            "pod_uplink_bytes",
            rows_over="pod",
        ),
        LinkLevel(
            "between_hosts",
            "between hosts",
            lambda host: "",
            {
                "far_bytes": "bytes",
                "far_busiest_bytes": "busiest",
                "port_busiest_bytes": "port",
                "uplink_bytes": "uplink",
                "shared_uplink_bytes": "shared_uplink",
                "head_start": "head_start",
            },
            "far_busiest_bytes",
            "uplink_bytes",
            ("inter_host_bw", "CROSS_NODE_BANDWIDTH"),
        ),
    )
}
"""By name. The outermost joins all devices."""
ROWS_OVER: Mapping[str, str] = {row.rows_over: name for name, row in LEVELS.items() if row.rows_over}
"""Levels by the words for domains over which TorchRec may divide rows."""
DEFAULT_ROWS_OVER = next(iter(ROWS_OVER))
"""The domain that needs nothing of a job."""


@dataclass(frozen=True)
class Link(Record, noun="link"):
    """Links of a level, as a topology gives them.

    level: a name of LEVELS.
    gbps: bandwidth of a device, GB/s each way. None: as the cost model measured it.
    shared: True if gbps is of a link that the devices of an inner domain, such as a host, share.
    latency_ms: latency of a collective that this is the outermost level of. None: as the cost model measured it.
    """

    level: Annotated[str, one_of(LEVELS)]
    gbps: Annotated[float | None, number_within(1 / MOST_GBPS, MOST_GBPS)] = None
    shared: bool = False
    latency_ms: Annotated[float | None, number_within(0, MOST_MS)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.shared or bool(self.gbps and LEVELS[self.level].shared),
            f"link {self.level} has shared {self.shared} and gbps {self.gbps}; only links of hosts and pods are "
            "shared, and their gbps is given",
        )

    @property
    def description(self) -> str:
        """Description of a link's given bandwidth and latency, for people."""
        gbps = [f"{self.gbps:g} GB/s{' shared' * self.shared}"] if self.gbps else []
        latency = [] if self.latency_ms is None else [f"{self.latency_ms:g} ms"]
        return f"{self.level} {', '.join(gbps + latency)}"


def make_links(
    latency_ms: float | None = None, shared: bool = False, **gbps: float | None
) -> tuple[Link, ...]:
    """Links of a topology with one latency: make_links(within_host=400, between_hosts=45, latency_ms=0.03).

    gbps: by level.
    shared: True if those of hosts, and of pods, are shared by the devices of one.
    """
    if unknown := sorted(gbps.keys() - LEVELS):
        raise ShardCoreError(f"a link has level {unknown[0]!r}; known are {', '.join(LEVELS)}")
    return tuple(
        Link(name, gbps.get(name), shared and bool(gbps.get(name) and level.shared), latency_ms)
        for name, level in LEVELS.items()
        if gbps.get(name) is not None or latency_ms is not None
    )


def domain_numbers(hosts: Sequence[str]) -> np.ndarray:
    """[K, n] number of the domain (host, pod, cluster) of each device at each level of links, from the devices' host
    names."""
    number: dict[tuple[str, str], int] = {}
    return np.array(
        [
            [number.setdefault((level.name, level.domain(host)), len(number)) for host in hosts]
            for level in LEVELS.values()
        ]
    )


def domain_members(hosts: Sequence[str], level: str) -> tuple[tuple[int, ...], ...]:
    """Devices of each domain (such as a host) that a level of links joins, from the devices' host names."""
    domain, members = LEVELS[level].domain, defaultdict(list)
    for device, host in enumerate(hosts):
        members[domain(host)].append(device)
    return tuple(map(tuple, members.values()))


def host_names(n_devices: int, hosts: int, pods: int = 1) -> list[str]:
    """Host names of `n_devices` devices that are spread evenly over hosts, and hosts over pods, in order.

    Raises ShardCoreError for hosts that do not divide into so many pods evenly.
    """
    require(
        hosts % pods == 0,
        f"{hosts} hosts were asked for in {pods} pods; it needs as many in each: "
        f"{' or '.join(str(n) for n in range(1, hosts + 1) if hosts % n == 0)} pods",
    )
    of_host, of_pod = n_devices // hosts, n_devices // pods
    in_pod = (lambda d: f"pod-{d // of_pod}/") if pods > 1 else lambda d: ""
    return [f"{in_pod(d)}host-{d // of_host}" for d in range(n_devices)]


def joining_levels(domains: np.ndarray) -> list[bool]:
    """[K] True for each level of links that joins devices which no inner level joins. domains: [K, n]."""
    parts = [domains.shape[1], *(len(set(of)) for of in domains.tolist())]
    return [outer < inner for inner, outer in itertools.pairwise(parts)]
