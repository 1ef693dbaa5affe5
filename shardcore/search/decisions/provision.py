"""Capacity planning: the cheapest cluster, of machines that can be had, that trains a problem fast enough.

The question is that of Hercules (Ke et al., HPCA 2022). Each number of hosts of each offer is one problem:
the same tables and global batch, on its devices. Its plan is searched, and its step priced by the offer's
cost model. A cluster has machines of one offer: TorchRec divides a batch evenly, so the slowest would hold
up all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import Link
from shardcore.core.topology import Device, Topology, default_reserved_bytes
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import (
    MOST_BYTES,
    MOST_DEVICES,
    MOST_SPEED,
    Record,
    first_duplicate,
    number_within,
    require,
    require_name,
)
from shardcore.cost.model import CostModel
from shardcore.io.envelope import read_record
from shardcore.search.decisions.driver import Decision, Proposal, ProposalOutcome

MOST_PRICE = 1e9
"""The highest price of an hour, in any currency."""


@dataclass(frozen=True)
class Offer(Record):
    """An offered type of machine, with devices, price and cost model.

    name: name of the offer.
    devices: devices of one machine.
    memory_bytes: memory of each device.
    price_per_hour: price of one machine, in any currency.
    model: folder of the cost model of its devices. "": `hardware` prices them.
    hardware: profile of its devices, in place of a model: a name, or a file.
    most_hosts: machines that can be had.
    speed: speed of a device, relative to what the model was measured on.
    links: links of its devices, as in Topology.
    reserved_bytes: bytes of each device that stay free, for the dense part, for buffers, and for what the allocator
      loses to fragmentation. None: as the problem has it.
    """

    name: Annotated[str, require_name]
    devices: Annotated[int, number_within(1, MOST_DEVICES)]
    memory_bytes: Annotated[int, number_within(1, MOST_BYTES)]
    price_per_hour: Annotated[float, number_within(0, MOST_PRICE)]
    model: str = ""
    hardware: str = ""
    most_hosts: Annotated[int, number_within(1, MOST_DEVICES)] = 1
    speed: Annotated[float, number_within(1 / MOST_SPEED, MOST_SPEED)] = 1.0
    links: tuple[Link, ...] = ()
    reserved_bytes: Annotated[int | None, number_within(0, MOST_BYTES)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.model) != bool(self.hardware),
            f"offer {self.name!r} has model {self.model!r} and hardware {self.hardware!r}; it needs one of the two",
        )
        require(
            self.devices * self.most_hosts <= MOST_DEVICES,
            f"offer {self.name!r} has most_hosts "
            f"{self.most_hosts} of {self.devices} devices; a problem has {MOST_DEVICES} devices at most",
        )
        require(
            (self.reserved_bytes or 0) < self.memory_bytes,
            f"offer {self.name!r} has reserved_bytes {self.reserved_bytes} of memory_bytes {self.memory_bytes}; it "
            "needs fewer",
        )
        # Speeds, memory and links are checked where they become devices.
        self.topology(1)  # for its refusals

    @property
    def model_or_hardware(self) -> str:
        """Name of the cost model, or of the hardware, that prices the offer."""
        return self.model or self.hardware

    def topology(self, hosts: int) -> Topology:
        # Equal devices, host after host.
        of_hosts = (Device(self.memory_bytes, self.speed, f"host-{h}") for h in range(hosts))
        return Topology(tuple(d for d in of_hosts for _ in range(self.devices)), links=self.links)


@dataclass(frozen=True)
class ProvisionTarget:
    """The aim of a cluster. Exactly one field is given.

    step_ms: time of a step, at most.
    samples_per_s: samples at least.
    price_per_hour: price of the cluster, at most; the fastest that it buys is wanted.
    """

    step_ms: float | None = None
    samples_per_s: float | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in vars(self).items() if v is not None}
        require(
            len(given) == 1 and min(given.values()) > 0,
            f"the target has {given or 'nothing'}; it needs one of {', '.join(vars(self))}, above 0",
        )

    @property
    def name_and_value(self) -> tuple[str, float]:
        """Name and value of the target's only field that is given."""
        return next((k, v) for k, v in vars(self).items() if v is not None)


@dataclass(frozen=True, kw_only=True)
class Cluster(Proposal):
    """Proposal of a cluster: a number of machines of one offer.

    problem: the tables on its devices.
    """

    offer: Offer
    hosts: int

    @property
    def price_per_hour(self) -> float:
        return self.hosts * self.offer.price_per_hour

    def samples_per_s(self, step_ms: float) -> float:
        return 1e3 * self.problem.global_batch / step_ms


@dataclass(frozen=True)
class Offers:
    """The content of a file of offers."""

    offers: tuple[Offer, ...]

    def __post_init__(self) -> None:
        require(bool(self.offers), "there are no offers; it needs one or more")
        twice = first_duplicate(offer.name for offer in self.offers)
        require(twice is None, f"there are two offers {twice!r}; each needs another name")


def read_offers(path: str | Path) -> tuple[Offer, ...]:
    """Read machine offers from a file. Raises ShardCoreError naming what is wrong in the file."""
    return read_record(Offers, path, "offers").offers


def cluster_of_offer(problem: Problem, offer: Offer, hosts: int) -> Cluster:
    """Cluster of a number of hosts of an offer, with the problem's tables and global batch. Not searched yet.

    It keeps free what the offer says. Without that, a problem that keeps free the default on its devices keeps free the
    default on these.

    Raises ShardCoreError for a problem whose constraints name devices, and where the devices do not divide the batch.
    """
    pinned, kept = dict(problem.constraints.pinned), problem.constraints.reserved_bytes
    require(
        not pinned,
        f"problem {problem.name!r} has constraints.pinned {pinned}; clusters differ in their "
        "devices, so it needs none",
    )
    topology = offer.topology(hosts)
    # A reserve that is not the default was chosen, so it stays as it is on any devices.
    by_default = kept == default_reserved_bytes(problem.topology.devices)
    reserved = default_reserved_bytes(topology.devices) if by_default else kept
    # Names are limited to 100 characters, and to those of files. Offers have any.
    offered = re.sub("[^A-Za-z0-9._-]+", "-", offer.name)
    return Cluster(
        words=f"{hosts} x {offer.name!r}",
        offer=offer,
        hosts=hosts,
        problem=replace(
            problem,
            name=f"{problem.name[:60]}.{hosts}x{offered[:30]}",
            topology=topology,
            constraints=replace(
                problem.constraints,
                reserved_bytes=reserved if offer.reserved_bytes is None else offer.reserved_bytes,
            ),
        ),
    )


def candidate_clusters(problem: Problem, offers: Iterable[Offer]) -> Iterator[Cluster]:
    """Clusters of every number of hosts of every offer whose devices divide the batch evenly. Not searched yet.

    Raises ShardCoreError as `cluster_of_offer`.
    """
    for offer in offers:
        for hosts in range(1, offer.most_hosts + 1):
            if problem.global_batch % (hosts * offer.devices) == 0:
                yield cluster_of_offer(problem, offer, hosts)


@dataclass(frozen=True)
class Provision(Decision):
    """Choose the cluster to rent or buy.

    models: cost models by the offers' `model_or_hardware`.
    """

    offers: tuple[Offer, ...]
    models: Mapping[str, CostModel]
    target: ProvisionTarget

    name: ClassVar[str] = "clusters"
    level: ClassVar[int] = 0
    changes: ClassVar[str] = "devices of the cluster"
    searches_all: ClassVar[bool] = True
    against: ClassVar[Mapping[str, str]] = {
        "memory tiers": "offers do not say what hosts have for tables",
        "plan to start from": "it is of other devices than clusters have",
    }

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Cluster, ProposalOutcome, None]:
        """Clusters of every number of hosts of every offer.

        Raises SettingMismatch for a model of another setting than the problem's. Raises ShardCoreError where
        no number of hosts divides the batch, and as `candidate_clusters`.
        """
        # Before any search: a model of another setting would end them all. Offers have other hardware.
        anywhere = replace(problem, topology=replace(problem.topology, hardware=None))
        for offer in self.offers:
            anywhere.require_setting(self.models[offer.model_or_hardware].for_problem(anywhere).setting)
        proposed, plans = (
            list(candidate_clusters(problem, self.offers)),
            defaultdict[tuple[int, int], list[Plan]](list),
        )
        require(
            bool(proposed),
            f"problem {problem.name!r} has global_batch {problem.global_batch}, which no "
            f"number of hosts of offers {', '.join(offer.name for offer in self.offers)} divides evenly",
        )
        for i, cluster in enumerate(proposed):
            # Plans name devices by number, so clusters of the same shape can run each other's. So more memory is
            # never dearer.
            same_shape = plans[cluster.hosts, cluster.offer.devices]
            model, more = self.models[cluster.offer.model_or_hardware], len(proposed) - 1 - i
            outcome = yield replace(cluster, model=model, more=more, plans=tuple(same_shape))
            if outcome.found:
                same_shape.append(outcome.found.plan)

    def winning_outcome(self, outcomes: Sequence[ProposalOutcome]) -> ProposalOutcome:
        return best_cluster_of_each_offer(outcomes, self.target)[0]

    def winning_reason(self, outcomes: Sequence[ProposalOutcome]) -> str:
        key, aim = self.target.name_and_value
        return f"{'fastest' if key == 'price_per_hour' else 'cheapest'} with {key} {aim:g}"

    def ledger_facts(self, outcome: ProposalOutcome) -> Mapping[str, Any]:
        samples_per_s = outcome.proposal.samples_per_s(outcome.ms) if outcome.found else None
        return {"price_per_hour": outcome.proposal.price_per_hour, "samples_per_s": samples_per_s}


def best_cluster_of_each_offer(
    outcomes: Sequence[ProposalOutcome], target: ProvisionTarget
) -> list[ProposalOutcome]:
    """Best cluster of each offer that meets the target, the best of all first.

    The cheapest is best, or with a target price the fastest. Ties go to the faster, or the cheaper.

    Raises ShardCoreError where no cluster meets it, naming the nearest.
    """
    key, aim = target.name_and_value

    def target_value(outcome: ProposalOutcome) -> float:
        """A cluster's value in the target's unit."""
        cluster: Cluster = outcome.proposal
        return {
            "step_ms": outcome.ms,
            "samples_per_s": cluster.samples_per_s(outcome.ms),
            "price_per_hour": cluster.price_per_hour,
        }[key]

    def sort_key(outcome: ProposalOutcome) -> tuple[float, ...]:
        price = outcome.proposal.price_per_hour
        return (outcome.ms, price) if key == "price_per_hour" else (price, outcome.ms)

    # A cluster without a plan reaches no target.
    planned = [x for x in outcomes if x.found]
    meeting = [
        x for x in planned if (target_value(x) >= aim if key == "samples_per_s" else target_value(x) <= aim)
    ]
    if not meeting:
        # Nearest is the cheapest for a price, and the fastest for a time or a rate.
        near = min(planned, key=target_value if key == "price_per_hour" else lambda x: x.ms)
        raise ShardCoreError(
            f"no cluster of {len(outcomes)} reaches {key} {aim:g}; the nearest, "
            f"{near.proposal.words}, has {target_value(near):.4g}"
        )
    first: dict[str, ProposalOutcome] = {}
    # In order of rank, so the first of each offer is its best.
    for outcome in sorted(meeting, key=sort_key):
        first.setdefault(outcome.proposal.offer.name, outcome)
    return list(first.values())
