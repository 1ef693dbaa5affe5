"""ProfileModel: a cost model in closed form, with the rates of a hardware profile.

An op takes its floor, forward and backward, and the ms of its shards (profile_law.py). Each shard is encoded
as these ms. So an op costs their sum, and never less as work grows.

Shapes: N shards, F = 4 features, G ops, D devices, K models; ... any leading dimensions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardcore.core.catalog import DENSE_OPTIMIZERS
from shardcore.core.errors import SettingMismatch
from shardcore.core.payloads import payload_by_name
from shardcore.core.tiers import BELOW
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.core.types import Problem, Setting, Shard
from shardcore.cost import profile_law
from shardcore.cost.heads import Head, LinearHead
from shardcore.cost.known_errors import NOT_MEASURED
from shardcore.cost.model import (
    LOOKUPS,
    CorrectionFactor,
    CostModel,
    PredictedQuantity,
    UncertainRates,
    device_phase_ms,
    predicted_total_ms,
    round_encodings,
    step_ms,
    with_predicted_dense_ms,
)
from shardcore.cost.profile import HOST_GBPS, MEASUREMENTS, RATES, Profile, load_network
from shardcore.cost.profile_law import Rates
from shardcore.step.collectives import carried_payload
from shardcore.step.exchanges import ChannelTerms, CollectiveTerms, OwnWork, with_payload_share
from shardcore.step.kinds import Channel
from shardcore.step.lower import Workload
from shardcore.step.scopes import group_members

_OF_LOOKUPS = (
    "forward_", "backward_", "sort_lookup", "weighted_lookup", "read_gbps", "repeat_gbps",
    "stream_gbps", "update_gbps",
)  # fmt: skip
"""Rates that a factor of lookups corrects, by the start of their names."""
_OF_EXCHANGES = {
    "all_to_all_": PredictedQuantity(Channel("all_to_all"), "forward"),
    "reduce_scatter_": PredictedQuantity(Channel("reduce_scatter"), "forward"),
    "all_gather_": PredictedQuantity(Channel("reduce_scatter"), "backward"),
    "all_reduce_": PredictedQuantity(Channel("all_reduce"), "backward"),
}
"""The exchange whose factor corrects rates of a profile, by the start of their names."""


@dataclass(frozen=True, eq=False)
class ProfileModel(CostModel):
    """A CostModel from a hardware profile. It holds for any problem.

    profile: the rates.
    setting: setting of the problem. Its hardware is the profile's name.
    replica_optimizer: dense optimizer of replicas, a name of catalog.DENSE_OPTIMIZERS.
    host_gbps: bandwidth to host memory that the topology gives. None: the profile's.
    slower: GB/s of the link to host memory over those of another tier's, by tier.
    device_bytes: bytes of the distinct rows that a batch touches on a device, in the mean. They share its L2.
    fetches_ahead: whether caches fetch the next batch's rows during a step (model.fetch_wait_ms).
    at: values of the rates, in place of the profile's: floats, or [K, 1] of many models (steps_ms).
    """

    profile: Profile
    setting: Setting
    replica_optimizer: str = "sgd"
    host_gbps: float | None = None
    slower: Mapping[str, float] | None = None
    device_bytes: float = 0.0
    fetches_ahead: bool = False
    at: Rates | None = None

    def for_problem(self, problem: Problem) -> ProfileModel:
        """The model at a problem's batch, optimizer, precision and payloads, on its topology's network.

        Raises SettingMismatch for a problem of other hardware, or on another network than the profile's.
        """
        hardware = problem.topology.hardware or self.profile.name
        if not self.profile.covers_hardware(hardware):
            raise SettingMismatch(
                f"problem {problem.name!r} is for hardware {hardware!r}, the profile for {self.profile.name!r}; give "
                "a profile of that hardware, or a model trained on it by --model, or change the problem's topology"
            )
        profile, network = self.profile, problem.topology.network
        if network and network != profile.network:
            if profile.network:
                raise SettingMismatch(
                    f"problem {problem.name!r} is on network {network!r}, the profile on {profile.network!r}; give "
                    f"{profile.name} without a network, or change the problem's topology"
                )
            profile = profile.on_network(load_network(network))
        gbps = {memory.tier: memory.gbps for memory in problem.topology.memory}
        host_gbps = gbps.pop(BELOW[0], None)
        of_host = host_gbps or self.profile.rate_values["host_read_gbps"]
        return dataclasses.replace(
            self,
            profile=profile,
            setting=problem.setting(hardware),
            replica_optimizer=problem.replica_optimizer,
            host_gbps=host_gbps,
            slower={tier: of_host / x for tier, x in gbps.items()},
            device_bytes=profile_law.distinct_row_bytes(problem.tables, problem.global_batch)
            / len(problem.topology),
            fetches_ahead=problem.job.fetches_ahead,
        )

    # --- ops ------------------------------------------------------------------------------------------------

    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[..., N, 4] encodings of shards: 1, then ms forward, backward and on the link, without the op's floor."""
        if not len(shards):
            return np.zeros((0, 4))
        work = profile_law.shard_work(
            shards, batch or self.setting.batch, self.setting.optimizer, self.device_bytes, self.slower
        )
        forward, backward = (
            law(self._rate_values, work) for law in (profile_law.forward_ms, profile_law.backward_ms)
        )
        looked_up = fetched = np.zeros(len(shards))
        if self.fetches_ahead:
            looked_up, fetched = profile_law.link_ms(self._rate_values, work)
        parts = (np.ones(len(shards)), forward - fetched, backward, looked_up + fetched)
        return round_encodings(np.stack(np.broadcast_arrays(*parts), -1))

    @cached_property
    def _rate_values(self) -> Rates:
        """Values of the profile's rates by name. Those of host memory follow the topology's link."""
        values = dict(self.at or self.profile.rate_values)
        if self.host_gbps is not None:
            faster = self.host_gbps / values["host_read_gbps"]
            values |= {name: faster * values[name] for name in HOST_GBPS}
        return values

    @cached_property
    def _grouped_rate_values(self) -> Rates:
        """Values of the profile's rates that broadcast against [..., groups, members]."""
        return {name: np.asarray(value)[..., None] for name, value in self._rate_values.items()}

    @property
    def dense_tflops(self) -> float:
        """TFLOP/s that dense parts of models reach on the profile's hardware."""
        return self._rate_values["dense_tflops"]

    @cached_property
    def heads(self) -> Sequence[Head]:
        """One linear head with rates of 1, as encodings are ms already, and the op's floor as its launch."""
        floors = [profile_law.op_floor_ms(self._rate_values, part) for part in ("forward", "backward")]
        # Rates of many models are [K, 1].
        terms = np.zeros((*np.shape(floors[0])[:-1], 3, 5))
        terms[..., 1:] = np.column_stack([np.zeros(3), np.eye(3)])
        # The first number of an encoding counts shards.
        terms[..., :2, 0] = np.stack(floors, -1).reshape(terms.shape[:-2] + (2,))
        return (LinearHead(terms),)

    def corrected_by(
        self, factors: Mapping[PredictedQuantity, CorrectionFactor], lineage: Mapping[str, Any] | None = None
    ) -> ProfileModel:
        """The model of the profile with its rates corrected. Lookups share one factor in both directions."""
        both = [factors[q] for q in LOOKUPS]
        of_lookups = CorrectionFactor(
            float(np.sqrt(np.prod([f.value for f in both]))), max(f.sd for f in both), 0
        )
        prefixes = dict.fromkeys(_OF_LOOKUPS, of_lookups) | {
            prefix: factors[q] for prefix, q in _OF_EXCHANGES.items()
        }
        words = f"corrected by traces of {lineage['job']}" if lineage else "corrected by traces"
        rates = dict(self.profile.rates)
        for name, rate in self.profile.rates.items():
            if factor := next((f for prefix, f in prefixes.items() if name.startswith(prefix)), None):
                latency_us = 1e3 * factor.latency_ms * name.endswith("_latency_us")
                # Rates are times, or bytes in a time.
                per_time = rate.unit == "GB/s"
                rates[name] = dataclasses.replace(
                    rate,
                    value=rate.value / factor.value if per_time else rate.value * factor.value + latency_us,
                    uncertainty=min(rate.uncertainty, factor.sd) or factor.sd,
                    source=f"{rate.source}; {words}",
                )
        return dataclasses.replace(self, profile=dataclasses.replace(self.profile, rates=rates))

    # --- collectives ----------------------------------------------------------------------------------------

    def channel_terms(self, channel: Channel, topology: Topology) -> ChannelTerms:
        """Terms of a channel's collective, from the profile's rates. A skew costs no more than the waiting."""
        row, members = channel.definition, group_members(channel.group, topology)
        work, domains, directions = (
            self._device_work(channel, topology),
            topology.domain_numbers[:, :0],
            dict[str, CollectiveTerms](),
        )
        for direction in row.directions if members.shape[1] > 1 else ():
            # The profile names what a channel runs: ids travel in all-to-alls, reduce-scatters go back as all-gathers.
            collective = "all_to_all" if row.ids else channel.collective
            if (collective, direction) == ("reduce_scatter", "backward"):
                collective = "all_gather"
            own = topology.domain_numbers[:, members[0]]
            domains, terms = profile_law.collective_terms(
                self._grouped_rate_values, collective, own, row.exchanges, topology
            )
            # Only outputs and their gradients are cast. Ids travel as they are.
            directions[direction] = with_payload_share(
                terms,
                payload_by_name(carried_payload(row, direction, self.setting.payloads[direction])).size_ratio,
            )
        return ChannelTerms(channel, members, domains, directions, work, work)

    def _device_work(self, channel: Channel, topology: Topology) -> OwnWork:
        """A device's time around a collective: to bucketize and order ids, or to update replicas.

        Of replicas, their gradients are made dense, and their optimizer steps over all weights.
        """
        row, byte_ms = (
            channel.definition,
            {
                name: 1 / (self._rate_values[name] * BYTES_PER_MS_PER_GBPS)
                for name in ("dense_gbps", "order_gbps", "bucketize_gbps")
            },
        )
        if row.dense:
            optimizer = DENSE_OPTIMIZERS[self.replica_optimizer]
            # Gradients: zeroed, added to, read. Weights and state of cells: read and written, temporary tensors
            # too.
            passes = 3 + 2 + 2 * (optimizer.states.count("cell") + optimizer.scratch)
            return OwnWork(byte_ms=passes * byte_ms["dense_gbps"])
        if not row.ids or len(topology) < 2:
            return OwnWork()
        # Each device has equally many ids of its own samples.
        return OwnWork(
            byte_ms=byte_ms["order_gbps"],
            mean_byte_ms=byte_ms["bucketize_gbps"] if row.work else 0.0,
        )

    def out_of_range(self, workload: Workload) -> list[str]:
        """One sentence: prices are of a profile, not measured here, with their relative error."""
        return [f"{NOT_MEASURED} (band ±{self.step_error_band(workload):.0%})"]

    def with_rates_off(self, names: Container[str], errors: float) -> ProfileModel:
        """The model with some rates so many standard errors slower, or faster if negative. Sizes in bytes stay."""
        values = dict(self.profile.rate_values)
        for name, rate in self.profile.rates.items():
            if name in names and rate.unit != "bytes":
                values[name] *= math.exp(errors * rate.uncertainty * (-1 if rate.unit == "GB/s" else 1))
        return dataclasses.replace(self, profile=self.profile.with_values(values))

    def uncertain_rates(self, workload: Workload) -> Sequence[UncertainRates]:
        """Ops and collectives, with the error of a step that each causes."""
        return [
            UncertainRates(
                measured,
                self.embeddings_error_band(workload, rates),
                tuple(self.with_rates_off(rates, by) for by in (-1, 1)),
            )
            for measured, (rates, _) in MEASUREMENTS.items()
        ]

    def step_error_band(self, workload: Workload) -> float:
        """Relative standard error of a step's predicted ms, dense part included. Given ms of that have no error."""
        step = with_predicted_dense_ms(workload, self)
        dense_ms, total_ms = step.job.dense_ms, predicted_total_ms(step, self)
        is_given = workload.job.dense_mflops is None
        dense_error = 0.0 if is_given else self.profile.rates["dense_tflops"].uncertainty
        # Errors of rates are independent.
        errors_ms = (total_ms - dense_ms) * self.embeddings_error_band(workload), dense_ms * dense_error
        return math.hypot(*errors_ms) / total_ms if total_ms else 0.0

    def embeddings_error_band(self, workload: Workload, names: Container[str] = RATES) -> float:
        """Relative standard error of a step's predicted ms without its dense part.

        From the uncertainties of the profile's rates.

        names: rates whose errors count.
        """
        no_dense = dataclasses.replace(
            workload.job, dense_forward_ms=None, dense_backward_ms=None, dense_mflops=None
        )
        step = dataclasses.replace(workload, job=no_dense)
        if not any(step.ops):
            return 0.0

        def price_rates(many: Sequence[Rates]) -> np.ndarray:
            return self.steps_ms(step, [dataclasses.replace(self, at=values) for values in many])

        return float(self.profile.error_band(price_rates, names))

    def steps_ms(self, workload: Workload, models: Sequence[ProfileModel]) -> np.ndarray:
        """[K] ms of a step under K models that differ in their rates only.

        Work is counted once, and the law runs once over arrays: much faster than a model after another.
        Operations of a dense part take their ms at this model's rate.
        """
        workload = with_predicted_dense_ms(workload, self)
        many = dataclasses.replace(
            self,
            at={name: np.array([[model._rate_values[name]] for model in models]) for name in RATES},
            host_gbps=None,  # already in these values
        )
        forward_ms, backward_ms, link_ms = device_phase_ms(workload, many)  # [K, D]
        # Bytes are the same under all models, and broadcast.
        compute_ms = forward_ms + backward_ms
        comm = many.comm_cost(workload.traffic[:, None], compute_ms, workload.topology)
        return step_ms(compute_ms, comm, workload.job, link_ms + backward_ms)
