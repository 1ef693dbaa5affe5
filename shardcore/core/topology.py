"""Devices that tables live on, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from shardcore.core.links import LEVELS, Link, joins, pod_of, unit_members, units_of
from shardcore.core.tiers import BELOW, Memory
from shardcore.core.validation import (
    MOST_BYTES,
    MOST_CUDA_COLUMNS,
    MOST_DEVICES,
    MOST_DIM,
    MOST_SPEED,
    PATH_NAME,
    is_path_name,
    require,
    require_known,
    require_name,
    require_type,
    require_types,
    require_within,
)

BYTES_PER_MS_PER_GBPS = 1e6
GIB = 1 << 30
ROWS_OVER = ("pod", "host")
DEFAULT_RESERVE = 0.15
"""The share of the smallest device that is kept free where a problem's file gives no reserve.

It is for the dense part. TorchRec's planner takes as much by default.
"""


@dataclass(frozen=True)
class Device:
    """One accelerator.

    memory_bytes: bytes that embeddings may use.
    speed: of its compute, relative to the measured hardware (2 is twice as fast).
    host: the name of the machine that it is in.
    """

    memory_bytes: int
    speed: float = 1.0
    host: str = "host-0"

    def __post_init__(self) -> None:
        require_types(self, "a device")
        require_name(self.host, "a device's host")
        require_within(self, "a device", memory_bytes=(1, MOST_BYTES), speed=(1 / MOST_SPEED, MOST_SPEED))


def default_reserve(devices: Sequence[Device]) -> int:
    """Bytes that are kept free on each device where a problem's file gives no reserve."""
    return int(DEFAULT_RESERVE * min(device.memory_bytes for device in devices))


@dataclass(frozen=True)
class Topology:
    """Devices and the links between them.

    devices: of all hosts, in the order of their numbers.
    hardware: the setting's name of a device ("nvidia-h200"); None: whatever the cost model was measured on.
    links: of some levels. Those of others are as the cost model measured them.
    memory: of tiers below the devices, where tables may have rows.
    rows_over: unit over which TorchRec's table_row_wise divides rows, one of ROWS_OVER. A pod, if there are
      any, all of one size, and the job has TORCHREC_RESOLVED_POD_SIZE.
    """

    devices: tuple[Device, ...]
    hardware: str | None = None
    links: tuple[Link, ...] = ()
    memory: tuple[Memory, ...] = ()
    rows_over: str = "pod"

    def __post_init__(self) -> None:
        require_types(self, "topology")
        require_known(self, "topology", rows_over=ROWS_OVER)
        require(
            1 <= len(self.devices) <= MOST_DEVICES,
            f"a topology has {len(self.devices) or 'no'} devices; it needs 1 to {MOST_DEVICES}",
        )
        require(
            self.hardware is None or is_path_name(self.hardware),
            f"topology has hardware {self.hardware!r}; it needs {PATH_NAME}, such as 'nvidia-h200'",
        )
        for name, axis, known in (("links", "level", LEVELS), ("memory", "tier", BELOW)):
            by_name = {getattr(x, axis): x for x in getattr(self, name)}
            require(
                len(by_name) == len(getattr(self, name)),
                f"topology gives {name} of "
                f"{', '.join(getattr(x, axis) for x in getattr(self, name))}; it needs at most one of "
                f"each {axis}",
            )
            # In one order: equal topologies have equal files.
            object.__setattr__(self, name, tuple(by_name[x] for x in known if x in by_name))
        self._require_levels()

    def _require_levels(self) -> None:
        """Raise ShardCoreError for links of pods where there are none, and for links that grow faster outward."""
        own = [(link.level, link.gbps) for link in self.links if link.gbps and not link.shared]
        for (inner, inner_gbps), (outer, outer_gbps) in pairwise(own):
            require(
                outer_gbps <= inner_gbps,
                f"topology has links {outer} of {outer_gbps:g} GB/s and {inner} of {inner_gbps:g}; outer links of a "
                "device need to be no faster than inner ones",
            )
        require(
            self.link("within_pod").gbps is None or self.has_pods,
            "topology gives links within_pod, and no pod has several hosts; it needs hosts with names such as "
            "'pod-0/host-1'",
        )

    @classmethod
    def of_hosts(cls, hosts: int, devices: int, memory_gib: float, **given: Any) -> Topology:
        """A topology of equal hosts.

        devices: of each host.
        memory_gib: GiB of each device that embeddings may use.
        given: other fields of a Topology, such as hardware="nvidia-h100" and links=links_of(within_host=400).
        """
        for what, value in (("hosts", hosts), ("devices", devices)):
            require_type(value, int, what, "a whole number")
            require(1 <= value <= MOST_DEVICES, f"{what} is {value}; it needs 1 to {MOST_DEVICES}")
        require_type(memory_gib, (int, float), "memory_gib", "a number")
        require(
            0 < memory_gib * GIB <= MOST_BYTES,
            f"memory_gib is {memory_gib}; it needs more than 0, at most {MOST_BYTES // GIB:,}",
        )
        return cls(
            tuple(
                Device(int(memory_gib * GIB), host=f"host-{h}") for h in range(hosts) for _ in range(devices)
            ),
            **given,
        )

    def __repr__(self) -> str:
        sizes = sorted({device.memory_bytes / GIB for device in self.devices})
        memory = f"{sizes[0]:.4g}" if len(sizes) == 1 else f"{sizes[0]:.4g} to {sizes[-1]:.4g}"
        given = f", hardware {self.hardware}" if self.hardware else ""
        given += "".join(f", {link.words}" for link in self.links)
        given += "".join(f", {x.bytes / GIB:.4g} GiB {x.tier} memory a host" for x in self.memory)
        pods = f" in {len(self.on_units('within_pod'))} pods" if self.has_pods else ""
        return f"Topology({len(self.devices)} devices on {len(self.hosts)} hosts{pods}, {memory} GiB each{given})"

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Names of hosts, pod by pod: TorchRec's pods have consecutive ranks."""
        names = dict.fromkeys(d.host for d in self.devices)
        number = {pod: i for i, pod in enumerate(dict.fromkeys(map(pod_of, names)))}
        return tuple(sorted(names, key=lambda name: number[pod_of(name)]))

    @cached_property
    def on_hosts(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each of `hosts`."""
        found: dict[str, list[int]] = {host: [] for host in self.hosts}
        for d, device in enumerate(self.devices):
            found[device.host].append(d)
        return tuple(map(tuple, found.values()))

    def on_units(self, level: str) -> tuple[tuple[int, ...], ...]:
        """The devices of each unit that a level of links joins, such as each host, as TorchRec numbers them."""
        members = unit_members([self.devices[d].host for d in self.ranks], level)
        return tuple(tuple(self.ranks[i] for i in unit) for unit in members)

    @cached_property
    def has_pods(self) -> bool:
        """True if some pod has several hosts."""
        return joins(self.units)[list(LEVELS).index("within_pod")]

    @cached_property
    def indices(self) -> tuple[int, ...]:
        return tuple(range(len(self)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The devices as TorchRec numbers them, host by host."""
        return tuple(d for devices in self.on_hosts for d in devices)

    @cached_property
    def equal_hosts(self) -> bool:
        """True if all hosts have the same number of devices."""
        return len({len(devices) for devices in self.on_hosts}) == 1

    @property
    def on_cpu(self) -> bool:
        """True if its devices are CPUs. Hardware that is not named counts as a GPU."""
        return (self.hardware or "").startswith("cpu")

    @property
    def most_columns(self) -> int:
        """The most columns of a shard that FBGEMM runs there."""
        return MOST_DIM if self.on_cpu else MOST_CUDA_COLUMNS

    def link(self, level: str) -> Link:
        """Links of a level. With nothing given where it gives none."""
        return next((link for link in self.links if link.level == level), Link(level))

    @cached_property
    def units(self) -> np.ndarray:
        """[K, D] number of the unit that each device is in at each level of links."""
        return units_of([d.host for d in self.devices])

    def outermost(self, units: np.ndarray) -> Link:
        """The outermost links between some devices. units: [K, n], columns of `units`."""
        joined = [name for name, joins_some in zip(LEVELS, joins(units), strict=True) if joins_some]
        return self.link(joined[-1] if joined else next(iter(LEVELS)))

    @cached_property
    def slowest(self) -> Link:
        """The outermost links between its devices."""
        return self.outermost(self.units)

    def memory_of(self, tier: str) -> Memory | None:
        """Memory of a tier below the devices. None: tables may have no rows there."""
        return next((memory for memory in self.memory if memory.tier == tier), None)

    def among(self, devices: Sequence[int]) -> Topology:
        """Some of the devices, while the others do the same: they share what hosts have with them."""
        picked = set(devices)
        share = min(n / len(of) for of in self.on_hosts if (n := len(picked.intersection(of))))
        links = tuple(replace(x, gbps=x.gbps * share) if x.shared and x.gbps else x for x in self.links)
        memory = tuple(replace(x, bytes=max(1, int(x.bytes * share))) for x in self.memory)
        return replace(self, devices=tuple(self.devices[d] for d in devices), links=links, memory=memory)

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __hash__(self) -> int:  # of thousands of devices, and looked up often
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_hash"}
