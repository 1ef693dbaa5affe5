"""Capacity planning: the cheapest cluster, of machines that can be had, that trains a problem fast enough.

The question is that of Hercules (Ke et al., HPCA 2022). Each number of hosts of each offer is a problem of
its own: the same tables and global batch, on its devices. Its plan is searched, and its step priced by the
offer's cost model. A cluster has machines of one offer: TorchRec divides a batch evenly, so the slowest would
hold up all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardcore import memory, progress
from shardcore.cost.model import CostModel, price
from shardcore.documents import open_document
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.limits import MOST_BYTES, MOST_DEVICES, MOST_SPEED, require, require_name, require_within
from shardcore.schema import build
from shardcore.search.budget import Budget
from shardcore.search.sharders import Sharder
from shardcore.step.links import Link
from shardcore.step_cost import StepCost
from shardcore.topology import Device, Topology, default_reserve
from shardcore.types import Plan, Problem
from shardcore.workload import lower

_LEAST_S = 1e-3
"""For the clusters that are left when the time is up: each still gets a plan."""
MOST_PRICE = 1e9
"""Of an hour, in any currency; and watts."""


@dataclass(frozen=True)
class Offer:
    """A type of machine.

    name: of the offer.
    devices: of one machine.
    memory_bytes: of each device.
    price_per_hour: of one machine, in any currency.
    model: folder of the cost model of its devices.
    most_hosts: machines that can be had.
    watts: of one machine. None: not known.
    speed: of a device, relative to what the model was measured on.
    links: of its devices, as in Topology.
    """

    name: str
    devices: int
    memory_bytes: int
    price_per_hour: float
    model: str
    most_hosts: int = 1
    watts: float | None = None
    speed: float = 1.0
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        require_name(self.name, "an offer")
        require_within(self, f"offer {self.name!r}", devices=(1, MOST_DEVICES), memory_bytes=(1, MOST_BYTES),
                       price_per_hour=(0, MOST_PRICE), watts=(0, MOST_PRICE), most_hosts=(1, MOST_DEVICES),
                       speed=(1 / MOST_SPEED, MOST_SPEED))
        require(self.devices * self.most_hosts <= MOST_DEVICES, f"offer {self.name!r} has most_hosts "
                f"{self.most_hosts} of {self.devices} devices; a problem has {MOST_DEVICES} devices at most")
        self.topology(1)  # for its refusals

    def topology(self, hosts: int) -> Topology:
        devices = tuple(Device(self.memory_bytes, self.speed, f"host-{h}")
                        for h in range(hosts) for _ in range(self.devices))
        return Topology(devices, links=self.links)


@dataclass(frozen=True)
class Target:
    """What a cluster has to reach. One of them.

    step_ms: of a step, at most.
    samples_per_s: at least.
    price_per_hour: of the cluster, at most; the fastest that it buys is wanted.
    """

    step_ms: float | None = None
    samples_per_s: float | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in vars(self).items() if v is not None}
        require(len(given) == 1 and min(given.values()) > 0,
                f"the target has {given or 'nothing'}; it needs one of {', '.join(vars(self))}, above 0")


@dataclass(frozen=True)
class Cluster:
    """Some machines of an offer, with the best plan found on them.

    problem: the tables on its devices.
    plan, cost: None where there is no plan.
    why: there is no plan.
    """

    offer: Offer
    hosts: int
    problem: Problem
    plan: Plan | None = None
    cost: StepCost | None = None
    why: str = ""

    @property
    def words(self) -> str:
        return f"{self.hosts} x {self.offer.name!r}"

    @property
    def step_ms(self) -> float:
        """ms of a step; infinite without a plan."""
        return self.cost.total_ms if self.cost else float("inf")

    @property
    def samples_per_s(self) -> float:
        return 1e3 * self.problem.global_batch / self.step_ms

    @property
    def price_per_hour(self) -> float:
        return self.hosts * self.offer.price_per_hour

    @property
    def watts(self) -> float | None:
        return None if self.offer.watts is None else self.hosts * self.offer.watts

    def meets(self, target: Target) -> bool:
        if self.cost is None:
            return False
        if target.price_per_hour is not None:
            return self.price_per_hour <= target.price_per_hour
        if target.step_ms is not None:
            return self.step_ms <= target.step_ms
        return self.samples_per_s >= target.samples_per_s


@dataclass(frozen=True)
class Offers:
    """What a file of offers holds."""

    offers: tuple[Offer, ...]

    def __post_init__(self) -> None:
        names = [offer.name for offer in self.offers]
        require(bool(names), "there are no offers; it needs one or more")
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"there are two offers {twice!r}; each needs a name of its own")


def read_offers(path: str | Path) -> tuple[Offer, ...]:
    """The offers of a file. Raises ShardCoreError naming what is wrong in it."""
    return build(Offers, open_document(path, "offers"), str(path), also=("schema", "version")).offers


def clusters(problem: Problem, offers: Iterable[Offer]) -> Iterator[Cluster]:
    """Every number of hosts of every offer whose devices divide the batch evenly. Not searched yet.

    A problem that keeps free what is the default on its own devices keeps free what is the default on theirs.

    Raises ShardCoreError for a problem whose constraints name devices.
    """
    pinned = dict(problem.constraints.pinned)
    require(not pinned, f"problem {problem.name!r} has constraints.pinned {pinned}; clusters differ in their "
            "devices, so it needs none")
    by_default = problem.constraints.reserved_bytes == default_reserve(problem.topology.devices)
    for offer in offers:
        if by_default:
            reserved = default_reserve(offer.topology(1).devices)
            problem = replace(problem, constraints=replace(problem.constraints, reserved_bytes=reserved))
        for hosts in range(1, offer.most_hosts + 1):
            if problem.global_batch % (hosts * offer.devices) == 0:
                # Names are limited to 100 characters, and to those of files. Offers have any.
                offered = re.sub("[^A-Za-z0-9._-]+", "-", offer.name)
                name = f"{problem.name[:60]}.{hosts}x{offered[:30]}"
                yield Cluster(offer, hosts, replace(problem, name=name, topology=offer.topology(hosts)))


def searched(cluster: Cluster, model: CostModel, sharder: Sharder, seed: int = 0,
             budget: Budget | None = None, others: Iterable[Cluster] = ()) -> Cluster:
    """The cluster with the cheapest plan, or why there is none.

    others: clusters whose plans it may have too: as many hosts of as many devices. So more memory is never
        dearer.
    """
    problem, plans, why = cluster.problem, [], ""
    own = model.for_problem(problem)
    try:
        plans.append(sharder(problem, own, seed=seed, budget=budget))
    except ShardCoreError as error:  # such as constraints that mean nothing on one device
        why = str(error)
    plans += (replace(other.plan, provenance=other.plan.provenance | {"setting": str(own.setting)})
              for other in others if other.plan and memory.fits(other.plan, problem))
    costs = [price(lower(plan, problem), own) for plan in plans]
    if not plans:
        return replace(cluster, why=why)
    best = min(range(len(plans)), key=lambda i: costs[i].total_ms)
    provenance = plans[best].provenance | {"predicted_ms": costs[best].total_ms}
    return replace(cluster, plan=replace(plans[best], provenance=provenance), cost=costs[best])


def sweep(problem: Problem, offers: Sequence[Offer], models: Mapping[str, CostModel], sharder: Sharder,
          seed: int = 0, budget: Budget | None = None, seconds: float | None = None) -> list[Cluster]:
    """All clusters, searched.

    models: by the offers' `model`.
    budget: of each search. seconds: of all, shared evenly by those that are left. None: no limit.

    Raises SettingMismatch for a model of another setting than the problem's. Raises ShardCoreError where no
    number of hosts divides the batch, and as `clusters`.
    """
    # Before any search: a model of another setting would end them all. Offers have hardware of their own.
    anywhere = replace(problem, topology=replace(problem.topology, hardware=None))
    for offer in offers:
        anywhere.require_setting(models[offer.model].for_problem(anywhere).setting)
    asked, found = list(clusters(problem, offers)), []
    require(bool(asked), f"problem {problem.name!r} has global_batch {problem.global_batch}, which no number "
            f"of hosts of offers {', '.join(offer.name for offer in offers)} divides evenly")
    whole = Budget(seconds=seconds).start()
    for cluster in asked:
        shape = cluster.hosts, cluster.offer.devices
        others = [other for other in found if (other.hosts, other.offer.devices) == shape]
        own = budget
        if seconds is not None:
            share = max(seconds - whole.seconds(), _LEAST_S) / (len(asked) - len(found))
            own = replace(budget or Budget(), seconds=share)
        with progress.part(f"cluster {len(found) + 1} of {len(asked)}, {cluster.words}"):
            found.append(searched(cluster, models[cluster.offer.model], sharder, seed, own, others))
    return found


def best_of_each(found: Sequence[Cluster], target: Target) -> list[Cluster]:
    """The best cluster of each offer that meets the target, the best of all first.

    The cheapest is best, or with a target price the fastest. Ties go to less power, then to the faster.
    Power that is not known counts as most.

    Raises ShardCoreError where no cluster meets it, naming the nearest.
    """
    meeting = sorted((c for c in found if c.meets(target)), key=lambda c: _rank(c, target))
    if not meeting:
        planned = [c for c in found if c.cost]
        if not planned:
            raise Infeasible(f"no cluster of {len(found)} has a plan; such as {found[-1].words}: "
                             f"{found[-1].why}")
        key, asked = next((k, v) for k, v in vars(target).items() if v is not None)
        near = min(planned, key=lambda c: c.price_per_hour if key == "price_per_hour" else c.step_ms)
        raise ShardCoreError(f"no cluster of {len(found)} reaches {key} {asked:g}; the nearest, "
                             f"{near.words}, has {getattr(near, key):.4g}")
    first: dict[str, Cluster] = {}
    for cluster in meeting:
        first.setdefault(cluster.offer.name, cluster)
    return list(first.values())


def _rank(cluster: Cluster, target: Target) -> tuple[float, ...]:
    cost, ms = cluster.price_per_hour, cluster.step_ms
    watts = float("inf") if cluster.watts is None else cluster.watts
    return (ms, cost, watts) if target.price_per_hour is not None else (cost, watts, ms)


def frontier(found: Sequence[Cluster]) -> list[Cluster]:
    """Clusters that none is both cheaper and faster than, by rising price."""
    kept: list[Cluster] = []
    for cluster in sorted((c for c in found if c.cost), key=lambda c: (c.price_per_hour, c.step_ms)):
        if not kept or cluster.step_ms < kept[-1].step_ms:
            kept.append(cluster)
    return kept
