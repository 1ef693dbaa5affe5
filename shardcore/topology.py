"""The devices that tables live on, and how they are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from shardcore.limits import (
    MOST_BYTES,
    MOST_CUDA_COLUMNS,
    MOST_DEVICES,
    MOST_DIM,
    MOST_GBPS,
    MOST_MS,
    MOST_SPEED,
    PATH_NAME,
    is_path_name,
    require,
    require_name,
    require_type,
    require_types,
    require_within,
)

LINKS = ("within_host_gbps", "between_hosts_gbps", "host_link_gbps", "latency_ms")
"""What a topology may give of its links."""
BYTES_PER_MS_PER_GBPS = 1e6
GIB = 1 << 30
DEFAULT_RESERVE = 0.15
"""The share of the smallest device that is kept free where a problem's file does not say how much.

It is for the dense part. TorchRec's planner takes as much by default.
"""


@dataclass(frozen=True)
class Device:
    """One accelerator.

    memory_bytes: what embeddings may use.
    speed: of its compute, relative to the measured hardware (2 is twice as fast).
    host: the name of the machine that it is in.
    """

    memory_bytes: int
    speed: float = 1.0
    host: str = "host-0"

    def __post_init__(self) -> None:
        require_types(self, "a device")
        object.__setattr__(self, "speed", float(self.speed))
        require_name(self.host, "a device's host")
        require_within(self, "a device", memory_bytes=(1, MOST_BYTES))
        require(1 / MOST_SPEED <= self.speed <= MOST_SPEED,
                f"a device has speed {self.speed}; it needs {1 / MOST_SPEED:g} to {MOST_SPEED:g}, 1 being "
                "the measured hardware")


def default_reserve(devices: Sequence[Device]) -> int:
    """Bytes that are kept free on each device where a problem's file does not say how many."""
    return int(DEFAULT_RESERVE * min(device.memory_bytes for device in devices))


@dataclass(frozen=True)
class Topology:
    """The devices and how they are joined.

    devices: of all hosts, in the order of their numbers.
    hardware: the setting's name of a device ("nvidia-h200"); None: whatever the cost model was measured on.
    within_host_gbps, between_hosts_gbps: bandwidths per device, GB/s; None: as the cost model measured them.
    host_link_gbps: bandwidth of each host to the others, GB/s, where its devices share one link. Given
      instead of between_hosts_gbps.
    latency_ms: of a collective, ms; None: as the cost model measured it.
    host_memory_bytes: of each host, what tables may use. None: none.
    host_memory_gbps: bandwidth between a device and its host's memory, GB/s. Given, not measured.
    """

    devices: tuple[Device, ...]
    hardware: str | None = None
    within_host_gbps: float | None = None
    between_hosts_gbps: float | None = None
    latency_ms: float | None = None
    host_link_gbps: float | None = None
    host_memory_bytes: int | None = None
    host_memory_gbps: float | None = None

    def __post_init__(self) -> None:
        require_types(self, "topology")
        require(1 <= len(self.devices) <= MOST_DEVICES,
                f"a topology has {len(self.devices) or 'no'} devices; it needs 1 to {MOST_DEVICES}")
        require(self.hardware is None or is_path_name(self.hardware),
                f"topology has hardware {self.hardware!r}; it needs {PATH_NAME}, such as 'nvidia-h200'")
        gbps = (1 / MOST_GBPS, MOST_GBPS)
        require_within(self, "topology", within_host_gbps=gbps, between_hosts_gbps=gbps, host_link_gbps=gbps,
                       host_memory_gbps=gbps, host_memory_bytes=(1, MOST_BYTES))
        require(self.between_hosts_gbps is None or self.host_link_gbps is None,
                f"topology has between_hosts_gbps {self.between_hosts_gbps} and host_link_gbps "
                f"{self.host_link_gbps}; it needs the first where each device has a link of its own to other "
                "hosts, and the second where those of a host share one")
        require_within(self, "topology", latency_ms=(0, MOST_MS))

    @classmethod
    def of_hosts(cls, hosts: int, devices: int, memory_gib: float, **given: Any) -> Topology:
        """A topology of equal hosts.

        devices: of each host.
        memory_gib: of each device, what embeddings may use.
        given: other fields of a Topology, such as hardware="nvidia-h100" and within_host_gbps=400.
        """
        for what, value in (("hosts", hosts), ("devices", devices)):
            require_type(value, int, what, "a whole number")
            require(1 <= value <= MOST_DEVICES, f"{what} is {value}; it needs 1 to {MOST_DEVICES}")
        require_type(memory_gib, (int, float), "memory_gib", "a number")
        require(0 < memory_gib * GIB <= MOST_BYTES,
                f"memory_gib is {memory_gib}; it needs more than 0, at most {MOST_BYTES // GIB:,}")
        return cls(tuple(Device(int(memory_gib * GIB), host=f"host-{h}") for h in range(hosts)
                         for _ in range(devices)), **given)

    def __repr__(self) -> str:
        sizes = sorted({device.memory_bytes / GIB for device in self.devices})
        memory = f"{sizes[0]:.4g}" if len(sizes) == 1 else f"{sizes[0]:.4g} to {sizes[-1]:.4g}"
        given = "".join(f", {f.name} {value}" for f in fields(self)
                        if f.name != "devices" and (value := getattr(self, f.name)) is not None)
        return f"Topology({len(self.devices)} devices on {len(self.hosts)} hosts, {memory} GiB each{given})"

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d.host for d in self.devices))

    @cached_property
    def on_hosts(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each of `hosts`."""
        found: dict[str, list[int]] = {host: [] for host in self.hosts}
        for d, device in enumerate(self.devices):
            found[device.host].append(d)
        return tuple(map(tuple, found.values()))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The devices as TorchRec numbers them, host by host."""
        return tuple(d for devices in self.on_hosts for d in devices)

    @cached_property
    def equal_hosts(self) -> bool:
        """Whether all hosts have the same number of devices."""
        return len({len(devices) for devices in self.on_hosts}) == 1

    @property
    def on_cpu(self) -> bool:
        """True if its devices are CPUs. Hardware that is not named counts as a GPU."""
        return (self.hardware or "").startswith("cpu")

    @property
    def most_columns(self) -> int:
        """The most columns of a shard that FBGEMM runs there."""
        return MOST_DIM if self.on_cpu else MOST_CUDA_COLUMNS

    @property
    def gives_links(self) -> bool:
        """Whether it gives bandwidths or latency, so that its exchanges are not priced as measured."""
        return any(getattr(self, name) is not None for name in LINKS)

    @property
    def gives_slowest(self) -> bool:
        """Whether it gives the bandwidth of the slowest links: between hosts, if it has several."""
        if len(self.hosts) == 1:
            return self.within_host_gbps is not None
        return (self.between_hosts_gbps, self.host_link_gbps) != (None, None)

    @property
    def gives_host_memory(self) -> bool:
        """Whether tables may have rows in host memory."""
        return self.host_memory_bytes is not None and self.host_memory_gbps is not None

    def among(self, devices: Sequence[int]) -> Topology:
        """Some of the devices, while the others do the same: they share what hosts have with them."""
        picked, link, memory = set(devices), self.host_link_gbps, self.host_memory_bytes
        if link is not None or memory is not None:
            share = min(n / len(of) for of in self.on_hosts if (n := len(picked.intersection(of))))
            link, memory = link and link * share, memory and int(memory * share)
        return replace(self, devices=tuple(self.devices[d] for d in devices), host_link_gbps=link,
                       host_memory_bytes=memory)

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.hardware, self.within_host_gbps, self.between_hosts_gbps,
                     self.latency_ms, self.host_link_gbps, self.host_memory_bytes, self.host_memory_gbps))

    def __hash__(self) -> int:  # of thousands of devices, and looked up often
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_hash"}
