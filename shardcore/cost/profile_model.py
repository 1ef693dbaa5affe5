"""ProfileModel: a cost model in closed form, with the rates of a hardware profile.

An op takes, forward and backward:

    a floor for the op + one for each shard + lookups + rows read once + rows read again + outputs or gradients
    backward also: rows and optimizer state that are updated

Each shard's part is encoded in ms, so that an op costs their sum and its floor. It never falls as work grows.

Collectives follow the law of collective_model.py, with rates that follow from the profile and the devices of a group.

Shapes: N shards, F = 3 features, G ops, D devices, E exchange terms; ... any leading dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardcore.core.catalog import DENSE_OPTIMIZERS, OPTIMIZERS
from shardcore.core.errors import SettingMismatch
from shardcore.core.links import LEVELS, joins
from shardcore.core.tiers import BELOW
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.core.types import PRECISION_BYTES, Problem, Setting, Shard
from shardcore.cost import collective_model
from shardcore.cost.collective_model import EXCHANGE_TERMS, ORDER
from shardcore.cost.model import CommCost, Compiled
from shardcore.cost.profile import Profile
from shardcore.step.access import access_share, distinct_values, unique_rows_of
from shardcore.step.collectives import COLLECTIVES
from shardcore.step.kinds import CHANNELS, Channel
from shardcore.step.lower import Workload
from shardcore.step.scopes import groups_of
from shardcore.step.traffic import channels_of
from shardcore.tables.host_rows import link_bytes_of

MS_PER_US, MS_PER_NS = 1e-3, 1e-6
OUTPUT_BYTES = 4
DEFAULT_BATCH = 65536
_THEIRS = {("reduce_scatter", "backward"): "all_gather"}
"""Collectives of a profile that run for one of a step, where they have another name."""


@dataclass(frozen=True, eq=False)
class ProfileModel:
    """A CostModel and BoundableCostModel from a hardware profile. It holds for any problem.

    profile: the rates.
    setting: of the problem. Its hardware is the profile's name.
    replica_optimizer: dense optimizer of replicas, a name of catalog.DENSE_OPTIMIZERS.
    host_gbps: bandwidth to host memory that the topology gives. None: the profile's.
    """

    profile: Profile
    setting: Setting = None  # type: ignore[assignment]
    replica_optimizer: str = "sgd"
    host_gbps: float | None = None

    def __post_init__(self) -> None:
        if self.setting is None:
            object.__setattr__(self, "setting", Setting(self.profile.name, DEFAULT_BATCH))

    def for_problem(self, problem: Problem) -> ProfileModel:
        """The model of a problem: any batch, optimizer, precision and payload. See model.CostModel.

        Raises SettingMismatch for a problem of other hardware.
        """
        job, hardware = problem.job, problem.topology.hardware or self.profile.name
        if not self.profile.is_of(hardware):
            raise SettingMismatch(
                f"problem {problem.name!r} is for hardware {hardware!r}, the profile for {self.profile.name!r}; give "
                "that of the problem's hardware, or change its topology"
            )
        memory = problem.topology.memory_of(BELOW[0])
        return dataclasses.replace(
            self,
            setting=Setting(
                hardware,
                problem.global_batch,
                problem.precision,
                problem.optimizer,
                job.forward_payload,
                job.backward_payload,
            ),
            replica_optimizer=problem.replica_optimizer,
            host_gbps=memory.gbps if memory else None,
        )

    # --- ops ------------------------------------------------------------------------------------------------

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, 3] 1 for a shard, and its ms forward and backward without the op's floor."""
        codes = np.zeros((len(shards), 3))
        if len(shards):
            codes[:, 0] = 1
            codes[:, 1:] = self._shards_ms(shards, batch or self.setting.batch)
        return codes

    def _shards_ms(self, shards: Sequence[Shard], batch: int) -> np.ndarray:
        """[N, 2] ms of shards, forward and backward."""
        of = self._ms
        tables = [s.table for s in shards]
        share = np.array([access_share(s) for s in shards])
        lookups = batch * np.array([t.looked_up for t in tables]) * share
        unique = np.minimum(unique_rows_of(shards, batch), np.maximum(lookups, 0))
        width = np.array([s.width for s in shards], dtype=float)
        element = np.array([PRECISION_BYTES[t.precision] for t in tables], dtype=float)
        weighted = np.array([t.weighted for t in tables], dtype=float)
        outputs = np.array(
            [batch * t.looked_up if t.sequence else distinct_values(t, batch) for t in tables], dtype=float
        )
        below = np.array([t.in_host_memory for t in tables])
        # Memory is read in whole granules: narrow rows waste some of each.
        row_bytes = self._granules(width * element)
        output_bytes = outputs * width * OUTPUT_BYTES
        state = OPTIMIZERS[self.setting.optimizer]
        state_bytes = state.state_bytes("cell") * width + self._granules(
            np.full(len(shards), float(state.state_bytes("row")))
        )
        repeats = np.maximum(lookups - unique, 0) * row_bytes
        cached = np.minimum(1.0, self._value("l2_bytes") / np.maximum(unique * row_bytes, 1.0))
        read_ms = of("read_gbps", unique * row_bytes)
        again_ms = of("repeat_gbps", repeats * cached) + of("read_gbps", repeats * (1 - cached))
        forward = (
            of("forward_table_us")
            + of("forward_lookup_ns", lookups)
            + of("weighted_lookup_ns", lookups * weighted)
            + of("stream_gbps", output_bytes)
            + np.where(below & ~self._cached(shards), 0.0, read_ms + again_ms)
        )
        # Gradients of samples are read once a lookup: the first time from memory.
        first = np.minimum(outputs, lookups)
        gradient_bytes = width * OUTPUT_BYTES
        updated = unique * (2 * row_bytes + 2 * state_bytes)
        backward = (
            of("backward_table_us")
            + of("backward_lookup_ns", lookups)
            + of("weighted_lookup_ns", lookups * weighted)
            + of("stream_gbps", first * gradient_bytes)
            + of("repeat_gbps", (lookups - first) * gradient_bytes)
            + np.where(below & ~self._cached(shards), 0.0, of("update_gbps", updated))
        )
        return np.stack([forward, backward], 1) + self._below_ms(shards, batch)

    def _granules(self, row_bytes: np.ndarray) -> np.ndarray:
        granule = self._value("granule_bytes")
        return np.ceil(row_bytes / granule) * granule

    @staticmethod
    def _cached(shards: Sequence[Shard]) -> np.ndarray:
        return np.array([0 < s.table.load_factor < 1 for s in shards])

    def _below_ms(self, shards: Sequence[Shard], batch: int) -> np.ndarray:
        """[N, 2] ms of the link to host memory."""
        ms = np.zeros((len(shards), 2))
        for i in (i for i, s in enumerate(shards) if s.table.in_host_memory):
            read, update = link_bytes_of(shards[i], batch, self.setting.optimizer)
            way = "host_cache_gbps" if shards[i].table.load_factor else "host_read_gbps"
            slower = 1.0 if self.host_gbps is None else self._value("host_read_gbps") / self.host_gbps
            ms[i] = slower * self._ms(way, read), slower * self._ms("host_update_gbps", update)
            ms[i, 0] += self._ms("host_op_us")
        return ms

    def _value(self, name: str) -> float:
        return self.profile.rates[name].value

    def _ms(self, name: str, count: np.ndarray | float = 1.0) -> np.ndarray | float:
        """ms of a count of bytes, lookups or ops at a rate."""
        value = self._value(name)
        if name.endswith("_gbps"):
            return count / (value * BYTES_PER_MS_PER_GBPS)
        return count * value * (MS_PER_US if name.endswith("_us") else MS_PER_NS)

    def head(self, sums: np.ndarray) -> np.ndarray:
        """[G] ms of ops from summed encodings [G, 3]; 0 for an empty op."""
        sums = np.asarray(sums, dtype=float)
        return self.launch_ms * np.minimum(1.0, sums[..., 0]) + sums[..., 1] + sums[..., 2]

    def forward_share(self, sums: np.ndarray) -> np.ndarray:
        """[G] the share of forward in an op's ms."""
        sums = np.asarray(sums, dtype=float)
        total = self.head(sums)
        forward = self._ms("forward_op_us") * np.minimum(1.0, sums[..., 0]) + sums[..., 1]
        return np.divide(forward, total, out=np.zeros_like(total), where=total > 0)

    def compiled(self) -> Compiled:
        """`head` for one op at a time."""
        from shardcore.cost import compiled

        return Compiled(compiled.ready(compiled.linear), np.array([self.launch_ms, 0.0, 1.0, 1.0]))

    # --- bounds ---------------------------------------------------------------------------------------------

    @property
    def lower(self) -> ProfileModel:
        """Itself (see model.CostModel)."""
        return self

    @property
    def launch_ms(self) -> float:
        """Exact ms that fusing two ops saves (see model.BoundableCostModel)."""
        return float(self._ms("forward_op_us") + self._ms("backward_op_us"))

    def rates(self, least: np.ndarray) -> np.ndarray:
        """[..., 3] ms per unit of each feature (see model.BoundableCostModel)."""
        return np.broadcast_to([0.0, 1.0, 1.0], np.shape(least))

    def takes_all_alike(self, topology: Topology) -> bool:
        """True: the busiest device's bytes count for all (see model.BoundableCostModel)."""
        return True

    def even_is_least(self, topology: Topology) -> bool:
        """True where hosts are equal: the law is convex (see model.BoundableCostModel)."""
        return topology.equal_hosts

    # --- collectives ----------------------------------------------------------------------------------------

    def comm(self, traffic: np.ndarray, compute_ms: np.ndarray, topology: Topology) -> CommCost:
        """Transfer and waiting, [..., D] ms, and the dense update of replicas."""
        payloads = {"forward": self.setting.forward_payload, "backward": self.setting.backward_payload}
        cost = collective_model.step_comm(self._weights(topology), traffic, compute_ms, topology, payloads)
        return dataclasses.replace(cost, backward_ms=cost.backward_ms + self._dense_ms(traffic))

    def _dense_ms(self, traffic: np.ndarray) -> np.ndarray:
        """[..., D] ms of replicas: their gradients are made dense, and their optimizer steps over all weights."""
        state = DENSE_OPTIMIZERS[self.replica_optimizer].state_bytes("cell") / 4
        # Zeros and gradients are written, gradients and weights are read, weights and state are read and written.
        passes = 5 + 2 * state
        dense = sum(
            (sent for c, sent in zip(channels_of(traffic), traffic, strict=True) if c.row.dense), np.zeros(())
        )
        return np.asarray(self._ms("dense_gbps", passes * dense))

    def _weights(self, topology: Topology) -> Mapping[str, np.ndarray]:
        return _weights(_Key(self.profile), topology)

    def out_of_range(self, workload: Workload) -> list[str]:
        """See model.CostModel. The first sentence says that nothing was measured here, and the band."""
        percent = 100 * self.band(workload)
        return [f"profile: published measurements, not of your machine (band ±{percent:.0f}%)"]

    def band(self, workload: Workload) -> float:
        """Relative standard error of a step that the profile itself expects."""
        return float(np.median([rate.uncertainty for rate in self.profile.rates.values()]))


class _Key:
    """A profile as a key of a cache, by identity."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def __hash__(self) -> int:
        return id(self.profile)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.profile is other.profile


@lru_cache(maxsize=64)
def _weights(key: _Key, topology: Topology) -> Mapping[str, np.ndarray]:
    """Rates of collectives among the devices of a topology, as collective_model has them."""
    rates = {name: rate.value for name, rate in key.profile.rates.items()}
    weights: dict[str, np.ndarray] = {
        ORDER: np.array([0.0, 1 / (rates["order_gbps"] * BYTES_PER_MS_PER_GBPS)])
    }
    for row in COLLECTIVES.values():
        if row.work:
            weights[row.work.weight] = np.array([0.0, 1 / (rates["bucketize_gbps"] * BYTES_PER_MS_PER_GBPS)])
    for channel in CHANNELS:
        members = groups_of(channel.group, topology)
        if members.shape[1] > 1 and not channel.row.work:
            for way in channel.row.ways:
                weights[collective_model.weight(channel, way)] = _channel_rates(
                    channel, way, rates, topology.units[:, members[0]]
                )
    return weights


def _channel_rates(channel: Channel, way: str, rates: Mapping[str, float], units: np.ndarray) -> np.ndarray:
    """[E] rates of a channel among devices in units [K, n]."""
    theirs = _THEIRS.get((channel.collective, way), channel.collective)
    theirs = "all_to_all" if channel.row.ids else theirs
    found = np.zeros(len(EXCHANGE_TERMS))
    for level, used in zip(LEVELS.values(), joins(units), strict=True):
        if used:
            # The outermost level that a group uses sets its latency.
            found[EXCHANGE_TERMS.index("once")] = rates[f"{theirs}_{level.name}_latency_us"] * MS_PER_US
        found[EXCHANGE_TERMS.index(level.each)] = 1 / (
            rates[f"{theirs}_{level.name}_gbps"] * BYTES_PER_MS_PER_GBPS
        )
    return found
