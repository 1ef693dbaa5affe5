"""AnalyticModel: a CostModel in closed form. For tests, and as the baseline that a trained model has to beat.

Shapes: N shards, F = 4 drivers, G ops, C channels, D devices; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from shardcore.core.links import LEVELS, joins
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.core.types import PRECISION_BYTES, Problem, Setting, Shard
from shardcore.core.validation import require
from shardcore.cost.composite import Composite, composed
from shardcore.cost.link_counts import link_counts
from shardcore.cost.model import ClosedForm, round_encodings
from shardcore.step.access import access_share, unique_rows_of
from shardcore.step.kinds import Channel
from shardcore.step.lower import Workload

CLOSED_FORM = "not measured: closed-form model"
MS_PER_NS = 1e-6
MS_PER_US = 1e-3


@dataclass(frozen=True)
class AnalyticModel(ClosedForm):
    """Costs from the work of an op, each driver at a constant rate.

    compute = launch (once for a fused op, which is why fusing pays) + tables + lookups + bytes gathered + bytes updated

    transfer = latency + bytes that leave a device / bandwidth, the same for all: none is done before the last sender

    waiting = max over devices of (compute + backward transfer) - the device's own

    The defaults have the order of magnitude of a data-centre GPU. They were not measured. Bandwidths and
    latency of a topology take precedence over the model's.

    Raises ShardCoreError for a negative cost, or a bandwidth that is not positive.
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
            require(
                value > 0 if field.name.endswith("gbps") else value >= 0,
                f"analytic model has {field.name} {value}; bandwidths need to be positive, costs 0 or more",
            )

    def for_problem(self, problem: Problem) -> AnalyticModel | Composite:
        """See model.CostModel."""
        return composed((self.in_device_memory(problem),), problem)

    def in_device_memory(self, problem: Problem) -> AnalyticModel:
        """The model at the batch and with the payloads of a problem. Its formulas hold for any."""
        job = problem.job
        setting = replace(
            self.setting,
            batch=problem.global_batch,
            forward_payload=job.forward_payload,
            backward_payload=job.backward_payload,
        )
        return replace(self, setting=setting)

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, 4] drivers: 1 (a table), lookups, bytes gathered, bytes updated.

        Gathered bytes are lookups × width. Updated bytes are unique rows × width.
        """
        # Ops of replicas run over the local batch, so callers may pass another one.
        batch = batch or self.setting.batch
        row_bytes = np.array([s.width * PRECISION_BYTES[s.table.precision] for s in shards], dtype=float)
        # A shard of a row range only sees the lookups of its rows.
        lookups = batch * np.array([s.table.looked_up * access_share(s) for s in shards], dtype=float)
        updated_bytes = unique_rows_of(shards, batch) * row_bytes
        return round_encodings(
            np.stack([np.ones(len(shards)), lookups, lookups * row_bytes, updated_bytes], 1)
        )

    @property
    def terms(self) -> np.ndarray:
        """[3, 5] See model.LinearHead. It does not divide costs into forward and backward: all count backward."""
        terms = np.zeros((3, 5))
        terms[1] = (
            self.launch_us * MS_PER_US,
            self.table_us * MS_PER_US,
            self.lookup_ns * MS_PER_NS,
            1 / (self.gather_gbps * BYTES_PER_MS_PER_GBPS),
            1 / (self.update_gbps * BYTES_PER_MS_PER_GBPS),
        )
        return terms

    def own_work_ms(self, channel: Channel, entered_bytes: np.ndarray) -> np.ndarray:
        """[..., D] ms in which devices put ids in buckets: each reads and writes equally many, those of its samples."""
        # All devices have equally many ids before they travel: the mean of what arrives.
        own_bytes = entered_bytes.mean(-1, keepdims=True) * bool(channel.row.work)
        # Twice: ids are read once and written once.
        ms = 2 * own_bytes / (self.gather_gbps * BYTES_PER_MS_PER_GBPS)
        return np.broadcast_to(ms, np.shape(entered_bytes))

    def out_of_range(self, workload: Workload) -> list[str]:
        """See model.CostModel. Its setting names a device that was not measured."""
        return [CLOSED_FORM]

    def collective_ms(
        self, channel: Channel, way: str, sent_bytes: np.ndarray, units: np.ndarray, topology: Topology
    ) -> np.ndarray:
        """See model.ClosedForm."""
        row = channel.row
        # Inputs of a ring are padded to the largest.
        owned = sent_bytes.max(-1, keepdims=True) if row.ring else sent_bytes
        counts, slowest = link_counts(row.ring, owned, units, channel.scope.across), np.zeros(())
        # All levels transfer at the same time, and the slowest decides. A link is as busy as its busier way.
        # link_counts gives bytes for each level. A level that joins no devices carries none.
        for level, of, used in zip(LEVELS, counts, joins(units), strict=True):
            if used:
                link = topology.link(level)
                busiest = of["uplink" if link.shared else "busiest"]
                slowest = np.maximum(
                    slowest, busiest / ((link.gbps or self.exchange_gbps) * BYTES_PER_MS_PER_GBPS)
                )
        # Every message crosses the outermost link that the group uses, so its latency counts.
        given = topology.outermost(units).latency_ms
        latency = self.exchange_latency_ms if given is None else given
        # An all-reduce passes its bytes twice.
        return row.passes * (latency + slowest)
