"""Tiers of memory that rows of tables are in. One row of TIERS defines each, the fastest first.

All rows of a table are in one tier. If that is not the devices' own, a cache in device memory may have some.
Topologies give the capacity of tiers below the devices; their links are given, not measured.
To add a tier, add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from shardcore.core.validation import MOST_BYTES, MOST_GBPS, Record, number_within, one_of


@dataclass(frozen=True)
class MemoryTier:
    """A tier of memory for tables' rows: device memory, host memory or SSD.

    name: name in topologies, tables and files.
    words: for people.
    kernel: TorchRec's compute kernel of tables that have all rows there and no cache. "": it has none.
    cached_kernel: the same with a cache in device memory.
    torchrec: in TorchRec's topology, the memory of a device and the bandwidth to it. None: it has neither.
    most_cached: the largest load factor of a cache.
    shares_cache: True if tables of an op share a cache, of whole sets. Else each table has its own, of whole
        MiB.
    row_bytes: bytes of device memory for each row, cached or not.
    holds_cells: True if optimizer state of cells is there, too. Else it is in device memory, for all rows.
    holds_state: True if all state of a row lies behind its weights, there and in its cache, as FBGEMM packs
        it.
    header_bytes: bytes of each row there, before its weights.
    is_synced: True if TorchRec's DMPCollection synchronises its tables among sharding groups.
    optimizers, precisions: those that its kernels run. (): all.
    """

    name: str
    words: str
    kernel: str
    cached_kernel: str = ""
    torchrec: tuple[str, str] | None = None
    most_cached: float = 1.0
    shares_cache: bool = True
    row_bytes: int = 0
    holds_cells: bool = True
    holds_state: bool = False
    header_bytes: int = 0
    is_synced: bool = True
    optimizers: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()

    def why_unsupported(self, precision: str, optimizer: str) -> str:
        """Reason that the tier's kernels cannot run tables of a precision under an optimizer; "" if they can."""
        for what, value, known in (
            ("weights", precision, self.precisions),
            ("optimizer", optimizer, self.optimizers),
        ):
            if known and value not in known:
                return f"TorchRec's {self.cached_kernel} has no {what} {value!r}, only {', '.join(known)}"
        return ""


TIERS: Mapping[str, MemoryTier] = {
    row.name: row
    for row in (
        MemoryTier("device", "device memory", "fused"),
        # FBGEMM's map of rows to tables (cache_index_table_map) has 4 bytes a row.
        MemoryTier(
            "host",
            "host memory",
            "fused_uvm",
            "fused_uvm_caching",
            ("ddr", "hbm_to_ddr_mem_bw"),
            row_bytes=4,
        ),
        # FBGEMM's SSDTableBatchedEmbeddingBags, as TorchRec 1.8 builds it (batched_embedding_kernel.py). The
        # cache has 20% of rows, or max_l1_cache_size: TorchRec drops load factors
        # (_get_weighted_avg_cache_load_factor). KeyValueEmbeddingFusedOptimizer fails where an optimizer has
        # two states. DMPCollection synchronises SplitTableBatchedEmbeddingBagsCodegen only
        # (model_parallel.py).
        MemoryTier(
            "ssd",
            "SSD",
            "",
            "key_value",
            ("ssd", "ssd_mem_bw"),
            most_cached=0.2,
            shares_cache=False,
            holds_cells=False,
            is_synced=False,
            optimizers=("rowwise_adagrad",),
            precisions=("fp32", "fp16"),
        ),
    )
}
"""By name. The first is the devices' own, whose size each device gives."""
DEVICE, *BELOW = TIERS


@dataclass(frozen=True)
class Memory(Record, noun="memory"):
    """Memory of a tier below the devices, as a topology gives it.

    tier: a name of BELOW.
    bytes: bytes of each host that tables may use.
    gbps: bandwidth between a device and it, GB/s. Given, not measured.
    """

    tier: Annotated[str, one_of(BELOW)]
    bytes: Annotated[int, number_within(1, MOST_BYTES)]
    gbps: Annotated[float, number_within(1 / MOST_GBPS, MOST_GBPS)]
