"""Devices that tables live on, and the links between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import (
    DEFAULT_ROWS_OVER,
    LEVELS,
    ROWS_OVER,
    Link,
    domain_members,
    domain_numbers,
    host_names,
    joining_levels,
    pod_of_host,
)
from shardcore.core.tiers import BELOW, Memory
from shardcore.core.validation import (
    MOST_BYTES,
    MOST_CUDA_COLUMNS,
    MOST_DEVICES,
    MOST_DIM,
    MOST_SPEED,
    Record,
    entry_count_within,
    number_within,
    one_of,
    require,
    require_name,
    require_path_name,
    require_type,
)

BYTES_PER_MS_PER_GBPS = 1e6
GIB = 1 << 30
_DOMAIN_LEVELS = tuple(LEVELS)[1:-1]
"""Levels whose links need devices that they join. Others may be given of any hardware."""
DEFAULT_RESERVE = 0.15
"""The share of the smallest device that is kept free where a problem's file gives no reserve.

It is for the dense part. TorchRec's planner takes as much by default.
"""


@dataclass(frozen=True)
class Device(Record, noun="device"):
    """One accelerator.

    memory_bytes: bytes that embeddings may use.
    speed: speed of its compute, relative to the measured hardware (2 is twice as fast).
    host: the name of the machine that it is in.
    """

    memory_bytes: Annotated[int, number_within(1, MOST_BYTES)]
    speed: Annotated[float, number_within(1 / MOST_SPEED, MOST_SPEED)] = 1.0
    host: Annotated[str, require_name] = "host-0"


def default_reserved_bytes(devices: Sequence[Device]) -> int:
    """Bytes kept free on each device where a problem's file gives no reserve."""
    return int(DEFAULT_RESERVE * min(device.memory_bytes for device in devices))


@dataclass(frozen=True)
class Topology(Record, noun="topology", hash_once=True):
    """Devices and the links between them.

    devices: devices of all hosts, in the order of their numbers.
    hardware: the setting's name of a device ("nvidia-h200"); None: whatever the cost model was measured on.
    network: name of the network between hosts, for hardware profiles; None: the one that comes with the profile.
    links: links of some levels. Those of others are as the cost model measured them.
    memory: memory of tiers below the devices, where tables may have rows.
    rows_over: domain over which TorchRec's table_row_wise divides rows, a key of ROWS_OVER. Pods need to be of
      one size, and the job needs TORCHREC_RESOLVED_POD_SIZE. None: a plan may have either. Searches then
      take hosts, as jobs do that lack the variable, until a decision takes pods (RowDomains).
    """

    devices: Annotated[tuple[Device, ...], entry_count_within(1, MOST_DEVICES)]
    hardware: Annotated[str | None, require_path_name] = None
    links: tuple[Link, ...] = ()
    memory: tuple[Memory, ...] = ()
    rows_over: Annotated[str | None, one_of(ROWS_OVER)] = None
    network: Annotated[str | None, require_path_name] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = [link.level for link in self.links]
        ordered = sorted(levels, key=list(LEVELS).index)
        require(
            levels == ordered,
            f"topology gives links {', '.join(levels)}; it needs them from the innermost out: {', '.join(ordered)}",
        )
        for name, axis, known in (("links", "level", LEVELS), ("memory", "tier", BELOW)):
            by_name = {getattr(x, axis): x for x in getattr(self, name)}
            require(
                len(by_name) == len(getattr(self, name)),
                f"topology gives {name} of {', '.join(getattr(x, axis) for x in getattr(self, name))}; it needs at "
                f"most one of each {axis}",
            )
            # In one order: equal topologies have equal files.
            object.__setattr__(self, name, tuple(by_name[x] for x in known if x in by_name))
        for above, below in pairwise(self.memory):
            require(
                below.gbps <= above.gbps,
                f"topology has memory {below.tier} of {below.gbps:g} GB/s a device and {above.tier} of "
                f"{above.gbps:g}; {below.tier} needs to be no faster",
            )
        self._require_valid_links()
        if why_not := self._why_no_row_division(self.rows_over):
            raise ShardCoreError(f"topology has rows_over {self.rows_over!r}, and {why_not}")

    def _require_valid_links(self) -> None:
        """Raise ShardCoreError for links that join no devices, and for outer links that are faster than inner links."""

        def device_gbps(link: Link, all_send: bool) -> float:
            """Bandwidth of a device on a link in GB/s: alone, or when all devices that share the link send."""
            share = max(map(len, self.devices_sharing_link(link.level))) if link.shared and all_send else 1
            return (link.gbps or 0.0) / share

        for inner, outer in pairwise(link for link in self.links if link.gbps):
            # An outer link of one device may be faster than its share of an inner one that others leave to it.
            ours, theirs = (device_gbps(link, all_send=outer.shared) for link in (outer, inner))
            require(
                ours <= theirs * (1 + 1e-9),  # shares are quotients
                f"topology has links {outer.level} of {ours:g} GB/s a device and {inner.level} of {theirs:g}; outer "
                "ones need to be no faster than inner ones",
            )
        for level in _DOMAIN_LEVELS:
            require(
                self.link(level).gbps is None or self.joins_devices(level),
                f"topology gives links {level}, and no {LEVELS[level].rows_over} has several hosts; it needs hosts "
                "with names such as 'pod-0/host-1'",
            )

    def _why_no_row_division(self, domain: str | None) -> str:
        """Reason that TorchRec cannot divide a table's rows over domains of this kind ("host", "pod"); "" if it can."""
        if domain in (None, DEFAULT_ROWS_OVER):
            return ""
        level = ROWS_OVER[domain]
        if not self.joins_devices(level):
            return (
                f"no {domain} has several hosts; it needs {DEFAULT_ROWS_OVER!r}, or hosts with names such as "
                "'pod-0/host-1'"
            )
        for of, members in (
            (domain, self.devices_by_domain(level)),
            (DEFAULT_ROWS_OVER, self.devices_by_host),
        ):
            if len(sizes := sorted(set(map(len, members)))) > 1:
                return (
                    f"a {of} has {' or '.join(map(str, sizes))} devices; TorchRec needs as many in each, or rows_over "
                    f"{DEFAULT_ROWS_OVER!r}"
                )
        return ""

    @classmethod
    def of_hosts(
        cls, hosts: int, devices: int, memory_gib: float, *, pods: int = 1, **given: Any
    ) -> Topology:
        """A topology of equal hosts.

        devices: number of devices of each host.
        memory_gib: GiB of each device that embeddings may use.
        pods: number of pods that hosts are divided into evenly. 1: none.
        given: other fields of a Topology, such as hardware="nvidia-h100" and links=make_links(within_host=400).
        """
        for what, value in (("hosts", hosts), ("devices", devices), ("pods", pods)):
            require_type(value, int, what, "a whole number")
            require(1 <= value <= MOST_DEVICES, f"{what} is {value}; it needs 1 to {MOST_DEVICES}")
        require_type(memory_gib, (int, float), "memory_gib", "a number")
        require(
            0 < memory_gib * GIB <= MOST_BYTES,
            f"memory_gib is {memory_gib}; it needs more than 0, at most {MOST_BYTES // GIB:,}",
        )
        names = host_names(hosts * devices, hosts, pods)
        return cls(tuple(Device(int(memory_gib * GIB), host=name) for name in names), **given)

    def __repr__(self) -> str:
        sizes = sorted({device.memory_bytes / GIB for device in self.devices})
        memory = f"{sizes[0]:.4g}" if len(sizes) == 1 else f"{sizes[0]:.4g} to {sizes[-1]:.4g}"
        pods = "".join(
            f" in {len(self.devices_by_domain(level))} {LEVELS[level].rows_over}s"
            for level in _DOMAIN_LEVELS
            if self.joins_devices(level)
        )
        words = [
            f"{len(self.devices)} devices on {len(self.hosts)} hosts{pods}, {memory} GiB each",
            *(f"{what} {name}" for what in ("hardware", "network") if (name := getattr(self, what))),
            *(link.description for link in self.links),
            *(f"{x.bytes / GIB:.4g} GiB {x.tier} memory a host" for x in self.memory),
        ]
        return f"Topology({', '.join(words)})"

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Host names, pod by pod, in TorchRec's order of ranks."""
        names = dict.fromkeys(d.host for d in self.devices)
        number = {pod: i for i, pod in enumerate(dict.fromkeys(map(pod_of_host, names)))}
        return tuple(sorted(names, key=lambda name: number[pod_of_host(name)]))

    @cached_property
    def devices_by_host(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each host, in the order of `hosts`."""
        return self.devices_by_domain(next(iter(LEVELS)))

    def devices_by_domain(self, level: str) -> tuple[tuple[int, ...], ...]:
        """Devices of each domain (host, pod, cluster) that a level of links joins, in TorchRec's order of ranks."""
        return tuple(
            tuple(self.ranks[i] for i in domain)
            for domain in domain_members([self.devices[d].host for d in self.ranks], level)
        )

    @property
    def row_domain(self) -> str:
        """Kind of domain (host, pod) over which tables' rows are divided, of ROWS_OVER: `rows_over`, or the default."""
        return self.rows_over or DEFAULT_ROWS_OVER

    @cached_property
    def row_domains(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each domain (host or pod) over which tables' rows are divided.

        These are the domains of towers, too: TorchRec groups ranks in one way only.
        """
        return self.devices_by_domain(ROWS_OVER[self.row_domain])

    def joins_devices(self, level: str) -> bool:
        """True if a level of links joins devices which no inner level joins, such as the hosts of a pod."""
        return self._levels_joining_devices[list(LEVELS).index(level)]

    def devices_sharing_link(self, level: str) -> tuple[tuple[int, ...], ...]:
        """Groups of devices that share one link at a level, if devices share links: the hosts or pods that the links
        connect.
        """
        names = list(LEVELS)
        inner = (
            x.level for x in reversed(self.links) if x.gbps and names.index(x.level) < names.index(level)
        )
        return self.devices_by_domain(next(inner, names[0]))

    @cached_property
    def _levels_joining_devices(self) -> list[bool]:
        return joining_levels(self.domain_numbers)

    @cached_property
    def device_indices(self) -> tuple[int, ...]:
        return tuple(range(len(self)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Devices in TorchRec's order of ranks, host by host."""
        order = {host: i for i, host in enumerate(self.hosts)}
        return tuple(sorted(self.device_indices, key=lambda d: order[self.devices[d].host]))

    @cached_property
    def equal_hosts(self) -> bool:
        """True if all hosts have the same number of devices."""
        return len({len(devices) for devices in self.devices_by_host}) == 1

    @property
    def equal_domains(self) -> bool:
        """True if all hosts, and all pods, have equally many devices, so that swapping domains changes nothing."""
        return all(len({len(devices) for devices in self.devices_by_domain(level)}) == 1 for level in LEVELS)

    @property
    def on_cpu(self) -> bool:
        """True if the topology's devices are CPUs. Unnamed hardware counts as a GPU."""
        return (self.hardware or "").startswith("cpu")

    @property
    def max_shard_columns(self) -> int:
        """Largest number of columns of a shard that FBGEMM runs on the topology's devices."""
        return MOST_DIM if self.on_cpu else MOST_CUDA_COLUMNS

    def link(self, level: str) -> Link:
        """Link between devices at a level. Its bandwidth and latency are None if the topology does not give them."""
        return next((link for link in self.links if link.level == level), Link(level))

    @cached_property
    def domain_numbers(self) -> np.ndarray:
        """[K, D] number of the domain (host, pod, cluster) of each device at each level of links."""
        return domain_numbers([d.host for d in self.devices])

    def outermost_link(self, domains: np.ndarray) -> Link:
        """Links of the outermost level that joins some given devices.

        domains: [K, n], columns of `domain_numbers`.
        """
        joined = [
            name for name, joins_some in zip(LEVELS, joining_levels(domains), strict=True) if joins_some
        ]
        return self.link(joined[-1] if joined else next(iter(LEVELS)))

    @cached_property
    def slowest_link(self) -> Link:
        """Links of the outermost level that joins devices of the topology."""
        return self.outermost_link(self.domain_numbers)

    def memory_of(self, tier: str) -> Memory | None:
        """Memory of a tier below the devices, such as host memory; None where tables may have no rows in the tier."""
        return next((memory for memory in self.memory if memory.tier == tier), None)

    def restricted_to(self, devices: Sequence[int]) -> Topology:
        """Topology of some of the devices, with their fraction of shared links and host memory."""
        picked = set(devices)

        def picked_fraction(domains: Sequence[Sequence[int]]) -> float:
            return min(n / len(domain) for domain in domains if (n := len(picked.intersection(domain))))

        some = self.with_devices(self.devices[d] for d in devices)
        links = tuple(
            replace(x, gbps=x.gbps * picked_fraction(self.devices_sharing_link(x.level)))
            if x.shared and x.gbps
            else x
            for x in some.links
        )
        memory = tuple(
            replace(x, bytes=max(1, int(x.bytes * picked_fraction(self.devices_by_host))))
            for x in self.memory
        )
        return replace(some, links=links, memory=memory)

    def with_devices(self, devices: Iterable[Device]) -> Topology:
        """Topology of other devices, without links and row domains that would not exist among the new devices."""
        bare = Topology(tuple(devices), self.hardware, memory=self.memory, network=self.network)
        return replace(
            bare,
            links=tuple(
                x for x in self.links if x.level not in _DOMAIN_LEVELS or bare.joins_devices(x.level)
            ),
            rows_over=None if bare._why_no_row_division(self.rows_over) else self.rows_over,
        )

    def __len__(self) -> int:
        return len(self.devices)
