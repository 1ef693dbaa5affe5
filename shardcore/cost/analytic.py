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
from shardcore.cost.model import CommCost, Compiled, Law, round_encodings
from shardcore.cost.step_comm import step_comm
from shardcore.step.access import access_share, unique_rows_of
from shardcore.step.collectives import carried_as
from shardcore.step.kinds import Channel
from shardcore.step.lower import Workload
from shardcore.step.output_bytes import payload_bytes
from shardcore.step.scopes import groups_of

CLOSED_FORM = "not measured: closed-form model"
MS_PER_NS = 1e-6
MS_PER_US = 1e-3


@dataclass(frozen=True)
class AnalyticModel(Law):
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

    def head(self, sums: np.ndarray) -> np.ndarray:
        """[G] ms of ops from summed encodings [G, 4]; 0 for an empty op.

        It grows with every driver. A fused op costs less than its shards run one by one.
        """
        sums = np.asarray(sums, dtype=float)
        # One launch for any number of shards, none for an empty op: min(1, count).
        return self.launch_ms * np.minimum(1.0, sums[..., 0]) + sums @ self._rates()

    def compiled(self) -> Compiled:
        """`head` for one op at a time."""
        from shardcore.cost import compiled

        # The order is that of compiled.linear: launch, then rates.
        parameters = np.concatenate([[self.launch_ms], self._rates()])
        # All of an op counts as its update, as in `forward_share`.
        return Compiled(compiled.ready(compiled.linear), parameters, parameters)

    def _rates(self) -> np.ndarray:
        """[4] ms per unit of each driver."""
        return np.array(
            [
                self.table_us * MS_PER_US,
                self.lookup_ns * MS_PER_NS,
                1 / (self.gather_gbps * BYTES_PER_MS_PER_GBPS),
                1 / (self.update_gbps * BYTES_PER_MS_PER_GBPS),
            ]
        )

    def forward_share(self, sums: np.ndarray) -> np.ndarray:
        """[G] zeros: this model does not divide costs into forward and backward."""
        return np.zeros(np.shape(sums)[:-1])

    @property
    def launch_ms(self) -> float:
        """Exact ms that fusing two ops saves (see model.BoundableCostModel)."""
        return self.launch_us * MS_PER_US

    def rates(self, least: np.ndarray) -> np.ndarray:
        """[..., 4] ms per unit of each driver, whatever the load (see model.BoundableCostModel)."""
        return np.broadcast_to(self._rates(), np.shape(least))

    def comm(self, traffic: np.ndarray, compute_ms: np.ndarray, topology: Topology) -> CommCost:
        """Transfer and waiting, [..., D] ms."""
        payloads = self.setting.payloads

        def transfers(
            channel: Channel, sent: np.ndarray, skew_ms: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray]:
            row, ms = channel.row, {way: np.zeros(np.shape(sent)) for way in payloads}
            for way in row.ways:
                # Only outputs and their gradients are cast. Ids travel as they are.
                travels = payload_bytes(sent, carried_as(row, way, payloads[way]))
                # An all-reduce passes its bytes twice.
                ms[way] += row.passes * self._transfer_ms(channel, travels, topology)
            return ms["forward"] + self._id_work_ms(channel, sent), ms["backward"]

        return step_comm(transfers, self._id_work_ms, traffic, compute_ms, len(topology) > 1)

    def _id_work_ms(self, channel: Channel, received_bytes: np.ndarray) -> np.ndarray:
        """[..., D] ms in which devices put ids in buckets: each reads and writes equally many, those of its samples."""
        # All devices have equally many ids before they travel: the mean of what arrives.
        own_bytes = received_bytes.mean(-1, keepdims=True) * bool(channel.row.work)
        # Twice: ids are read once and written once.
        ms = 2 * own_bytes / (self.gather_gbps * BYTES_PER_MS_PER_GBPS)
        return np.broadcast_to(ms, np.shape(received_bytes))

    def out_of_range(self, workload: Workload) -> list[str]:
        """See model.CostModel. Its setting names a device that was not measured."""
        return [CLOSED_FORM]

    def _transfer_ms(self, channel: Channel, sent_bytes: np.ndarray, topology: Topology) -> np.ndarray:
        """[..., D] ms of one collective.

        Each device's bytes [..., D] are spread evenly over the devices of its group.
        """
        members = groups_of(channel.group, topology)
        ms = np.zeros(np.shape(sent_bytes))
        if members.shape[1] < 2 or not np.any(sent_bytes):
            return ms
        # [..., G, n] bytes of the n devices of each of G groups. All groups have the same shape, so the first
        # one's units [K, n] stand for all.
        grouped, units = sent_bytes[..., members], topology.units[:, members[0]]
        # Inputs of a ring are padded to the largest.
        owned = grouped.max(-1, keepdims=True) if channel.row.ring else grouped
        counts, slowest = link_counts(channel.row.ring, owned, units, channel.scope.across), 0.0
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
        # No bytes, no call: latency only where the collective runs.
        any_bytes = grouped.sum(-1, keepdims=True) > 0
        ms[..., members] = np.where(any_bytes, latency + slowest, 0.0)
        return ms
