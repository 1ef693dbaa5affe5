"""AnalyticModel: a CostModel in closed form. For tests, and as the baseline that a trained model has to beat.

Shapes: N shards, F = 4 drivers, G ops, C channels, D devices; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from shardcore.core.links import LEVELS, joining_levels
from shardcore.core.payloads import payload_by_name
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.core.types import PRECISION_BYTES, Shard
from shardcore.core.validation import MOST_GBPS, MOST_MS, Record, number_within
from shardcore.cost.composite import DeviceModel
from shardcore.cost.heads import Head, LinearHead
from shardcore.cost.model import round_encodings
from shardcore.step.access import access_share, unique_rows_of_shards
from shardcore.step.collectives import carried_payload
from shardcore.step.exchanges import (
    ChannelTerms,
    CollectiveTerms,
    OwnWork,
    with_payload_share,
    with_topology_rates,
)
from shardcore.step.kinds import Channel
from shardcore.step.lower import Workload
from shardcore.step.scopes import group_members

CLOSED_FORM = "not measured: closed-form model"
MS_PER_NS = 1e-6
MS_PER_US = 1e-3
Cost = Annotated[float, number_within(0, MOST_MS)]
"""us, ms or ns of a constant."""
Gbps = Annotated[float, number_within(0, MOST_GBPS, above=True)]


@dataclass(frozen=True)
class AnalyticModel(Record, DeviceModel, noun="analytic model"):
    """Costs from the work of an op, each driver at a constant rate.

    compute = launch (once for a fused op, which is why fusing pays) + tables + lookups + bytes gathered + bytes updated

    transfer = latency + bytes that leave a device / bandwidth, the same for all: none is done before the last sender

    waiting = max over devices of (compute + backward transfer) - the device's own

    The defaults have the order of magnitude of a data-centre GPU. They were not measured. Bandwidths and
    latency of a topology take precedence over the model's.

    Raises ShardCoreError for a negative cost, or a bandwidth that is not positive.
    """

    launch_us: Cost = 50.0
    table_us: Cost = 3.0
    lookup_ns: Cost = 0.05
    gather_gbps: Gbps = 800.0
    update_gbps: Gbps = 300.0
    exchange_latency_ms: Cost = 0.05
    exchange_gbps: Gbps = 25.0

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, 4] drivers: 1 (a table), lookups, bytes gathered, bytes updated.

        Gathered bytes are lookups × width. Updated bytes are unique rows × width.
        """
        # Ops of replicas run over the local batch, so callers may pass another one.
        batch = batch or self.setting.batch
        row_bytes = np.array([s.width * PRECISION_BYTES[s.table.precision] for s in shards], dtype=float)
        # A shard of a row range only sees the lookups of its rows.
        lookups = batch * np.array(
            [s.table.lookups_per_sample * access_share(s) for s in shards], dtype=float
        )
        updated_bytes = unique_rows_of_shards(shards, batch) * row_bytes
        return round_encodings(
            np.stack([np.ones(len(shards)), lookups, lookups * row_bytes, updated_bytes], 1)
        )

    @property
    def heads(self) -> Sequence[Head]:
        """The linear law of ops, as one head. The closed form does not tell forward from backward: all ms count as
        backward.
        """
        terms = np.zeros((3, 5))
        terms[1] = (
            self.launch_us * MS_PER_US,
            self.table_us * MS_PER_US,
            self.lookup_ns * MS_PER_NS,
            1 / (self.gather_gbps * BYTES_PER_MS_PER_GBPS),
            1 / (self.update_gbps * BYTES_PER_MS_PER_GBPS),
        )
        return (LinearHead(terms),)

    def out_of_range(self, workload: Workload) -> list[str]:
        """One sentence: the closed-form model was not measured at all."""
        return [CLOSED_FORM]

    def channel_terms(self, channel: Channel, topology: Topology) -> ChannelTerms:
        """Terms of a channel's collective: latency, and bytes over bandwidth. A skew costs no more than the waiting."""
        row, members = channel.definition, group_members(channel.group, topology)
        # Ids are read once and written once, those of a device's own samples: the mean of what arrives.
        work = OwnWork(mean_byte_ms=2 * bool(row.work) / (self.gather_gbps * BYTES_PER_MS_PER_GBPS))
        domains = topology.domain_numbers[:, members[0]] if members.size else topology.domain_numbers[:, :0]
        if members.shape[1] < 2:
            return ChannelTerms(channel, members, domains, {}, work, work)
        # A link is as busy as its busier way.
        own = {"busiest": 1 / (self.exchange_gbps * BYTES_PER_MS_PER_GBPS)}
        levels = with_topology_rates([own] * len(LEVELS), topology)
        used = [
            level if joined else {} for level, joined in zip(levels, joining_levels(domains), strict=True)
        ]
        # Every message crosses the outermost link that the group uses, so its latency counts.
        given = topology.outermost_link(domains).latency_ms
        latency = self.exchange_latency_ms if given is None else given
        # An all-reduce passes its bytes twice.
        terms = CollectiveTerms(row.passes * latency, used)
        directions = {
            direction: with_payload_share(
                terms,
                payload_by_name(carried_payload(row, direction, self.setting.payloads[direction])).size_ratio,
            )
            for direction in row.directions
        }
        return ChannelTerms(channel, members, domains, directions, work, work)
