"""AnalyticModel: a CostModel in closed form, for tests and as the baseline that a trained model has to beat.

Shapes: N shards, F = 4 drivers, G groups, D devices; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from shardcore.cost.exchange import hosts_alike
from shardcore.cost.model import CommCost, Compiled
from shardcore.tables.access import access_share, lookups, unique_rows
from shardcore.types import PRECISION_BYTES, Setting, Shard, ShardCoreError, Topology
from shardcore.workload import Traffic

MS_PER_NS = 1e-6
MS_PER_US = 1e-3
BYTES_PER_MS_PER_GBPS = 1e6


@dataclass(frozen=True)
class AnalyticModel:
    """Costs from what an op has to do, each driver at a constant rate.

    compute = launch (once for a fused op, which is why fusing pays) + tables + lookups + bytes gathered + bytes updated
    transfer = latency + bytes that leave a device / bandwidth, the same for all: nobody is done before the last sender
    waiting = max over devices of (compute + backward transfer) - the own

    The defaults are of the order of a data-centre GPU; they were not measured. A topology's own bandwidths and latency go
    before the model's. Raises ShardCoreError for a negative cost or a bandwidth that is not positive.
    """

    setting: Setting
    launch_us: float = 50.0
    table_us: float = 3.0
    lookup_ns: float = 0.05
    gather_gbps: float = 800.0
    update_gbps: float = 300.0
    exchange_latency_ms: float = 0.05
    exchange_gbps: float = 25.0

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not (value > 0 if field.name.endswith("gbps") else value >= 0):
                raise ShardCoreError(f"analytic model has {field.name} {value}; bandwidths need to be positive, costs 0 or more")

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, 4]: 1 (a table), lookups, lookups × width in bytes (gathered), unique rows × width in bytes (updated)."""
        batch = batch or self.setting.batch
        return np.array([_drivers(s, batch) for s in shards], dtype=float).reshape(-1, 4)

    def head(self, sums: np.ndarray) -> np.ndarray:
        """[G] ms of groups [G, 4]; 0 for an empty group. Monotone in every driver, and less than the sum of its parts."""
        sums = np.asarray(sums, dtype=float)
        return self.launch_ms * np.minimum(1.0, sums[..., 0]) + sums @ self._rates()

    def compiled(self) -> Compiled:
        """`head` for one group at a time."""
        from shardcore.cost import compiled

        return Compiled(compiled.linear, np.concatenate([[self.launch_ms], self._rates()]))

    def _rates(self) -> np.ndarray:
        """[4] ms for each of the drivers."""
        return np.array([
            self.table_us * MS_PER_US,
            self.lookup_ns * MS_PER_NS,
            1 / (self.gather_gbps * BYTES_PER_MS_PER_GBPS),
            1 / (self.update_gbps * BYTES_PER_MS_PER_GBPS),
        ])

    @property
    def launch_ms(self) -> float:
        """What fusing two ops saves, exactly (see model.Bounding)."""
        return self.launch_us * MS_PER_US

    def rates(self, least: np.ndarray) -> np.ndarray:
        """[4] ms for each of the drivers, whatever the load (see model.Bounding)."""
        return self._rates()

    def takes_all_alike(self, topology: Topology) -> bool:
        """See model.Bounding."""
        return True

    def even_is_least(self, topology: Topology) -> bool:
        """See model.Bounding. The transfer is convex in the bytes and alike for all devices; exchanging devices that have as many
        on their host leaves it as it is."""
        return hosts_alike(topology)

    def comm(self, traffic: Traffic, compute_ms: np.ndarray, topology: Topology) -> CommCost:
        """Transfer and waiting, [..., D] ms. The all-reduce goes round a ring, so it moves its bytes twice."""
        pooled = self._transfer_ms(traffic.all_to_all, topology) + self._transfer_ms(traffic.reduce_scatter, topology)
        backward = pooled + 2 * self._transfer_ms(traffic.all_reduce, topology)
        ready = compute_ms + backward
        return CommCost(pooled, backward, ready.max(-1, keepdims=True) - ready)

    def _transfer_ms(self, sent_bytes: np.ndarray, topology: Topology) -> np.ndarray:
        """[..., D] ms of one collective that spreads each device's bytes [..., D] evenly over all devices."""
        n_devices = len(topology)
        if n_devices == 1:
            return np.zeros_like(sent_bytes)
        own, all_bytes = sent_bytes / n_devices, sent_bytes.sum(-1, keepdims=True) / n_devices
        hosts = [d.host for d in topology.devices]
        same_host = np.array([[a == b for b in hosts] for a in hosts]) & ~np.eye(n_devices, dtype=bool)
        other_host = ~same_host & ~np.eye(n_devices, dtype=bool)
        within = np.maximum(own * same_host.sum(1), own @ same_host)  # a link is as busy as the busier of its two directions
        between = np.maximum(own * other_host.sum(1), own @ other_host)
        slowest = np.maximum(
            within / ((topology.within_host_gbps or self.exchange_gbps) * BYTES_PER_MS_PER_GBPS),
            between / ((topology.between_hosts_gbps or self.exchange_gbps) * BYTES_PER_MS_PER_GBPS),
        ).max(-1, keepdims=True)
        latency = self.exchange_latency_ms if topology.latency_ms is None else topology.latency_ms
        return np.broadcast_to(np.where(all_bytes > 0, latency + slowest, 0.0), np.shape(sent_bytes))


def _drivers(shard: Shard, batch: int) -> tuple[float, float, float, float]:
    row_bytes = shard.width * PRECISION_BYTES[shard.table.precision]
    n_lookups = lookups(shard.table, batch) * access_share(shard)
    return 1.0, n_lookups, n_lookups * row_bytes, unique_rows(shard, batch) * row_bytes
