"""Tiers of memory that rows of tables are in. One row of TIERS defines each, the fastest first.

All rows of a table are in one tier. If that is not the devices' own, a cache in device memory may have some.
Topologies give the capacity of tiers below the devices; their links are given, not measured.
To add a tier, add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardcore.core.validation import MOST_BYTES, MOST_GBPS, require, require_types, require_within


@dataclass(frozen=True)
class MemoryTier:
    """A tier of memory.

    name: name in topologies, tables and files.
    words: for people.
    kernel: TorchRec's compute kernel of tables that have all rows there and no cache. "": it has none.
    cached_kernel: the same with a cache in device memory.
    torchrec: in TorchRec's topology, the memory of a device and the bandwidth to it. None: it has neither.
    """

    name: str
    words: str
    kernel: str
    cached_kernel: str = ""
    torchrec: tuple[str, str] | None = None


TIERS: Mapping[str, MemoryTier] = {
    row.name: row
    for row in (
        MemoryTier("device", "device memory", "fused"),
        MemoryTier("host", "host memory", "fused_uvm", "fused_uvm_caching", ("ddr", "hbm_to_ddr_mem_bw")),
    )
}
"""By name. The first is the devices' own, whose size each device gives."""
DEVICE, *BELOW = TIERS


@dataclass(frozen=True)
class Memory:
    """Memory of a tier below the devices, as a topology gives it.

    tier: a name of BELOW.
    bytes: bytes of each host that tables may use.
    gbps: bandwidth between a device and it, GB/s. Given, not measured.
    """

    tier: str
    bytes: int
    gbps: float

    def __post_init__(self) -> None:
        require_types(self, "a memory")
        require(self.tier in BELOW, f"a memory has tier {self.tier!r}; known are {', '.join(BELOW)}")
        require_within(self, f"memory {self.tier}", bytes=(1, MOST_BYTES), gbps=(1 / MOST_GBPS, MOST_GBPS))
