"""Which groups to train in: their size and layout, by the cost of a step and of synchronising replicas.

Each candidate is a problem of its own: that of one group (see shardcore/sharding_groups.py). Any sharder
solves it. A step of the whole job then takes

    total = step of a group + time to synchronise / steps between two

A synchronisation is one all-reduce of weights and one of optimizer state, among the replicas of each device.
By a ring, 2 (R - 1) / R of the bytes leave and enter each device. The cost model prices it, by the topology's
links or as it measured all-reduces. All devices wait for the last.

All groups communicate at once. Where devices of a host share its link, and the topology states no bandwidths,
this is too cheap: a price has one group's bytes on it.

Shapes: C channels, M devices of a group, R groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from shardcore import progress
from shardcore.cost.model import CostModel, price
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.layouts import CHANNELS, Channel
from shardcore.memory import held_bytes, used_bytes
from shardcore.search.budget import Budget
from shardcore.search.sharders import SHARDERS, Sharder
from shardcore.sharding_groups import (
    GroupedPlan,
    Grouping,
    groupings,
    numbered,
    problem_of_group,
    replicas,
    replicated_gradient_bytes,
    synced_bytes,
)
from shardcore.step_cost import StepCost
from shardcore.topology import Topology
from shardcore.types import Problem
from shardcore.workload import Workload, lower

_ALL_REDUCE = CHANNELS.index(Channel("all_reduce"))
EVEN_BYTES = "size_greedy"
"""A sharder that deals bytes evenly.

Sharders see the step, not the synchronisation, which takes as long as the device with most bytes. So its plan
is tried beside that of the sharder that was asked for.
"""


@dataclass(frozen=True)
class GroupedCost:
    """What a step in groups costs.

    step: of one group.
    dense_gradients_ms: that gradients of replicated tables take longer among all devices than in a group.
    sync_ms: one synchronisation of the replicas.
    sync_every: steps from one to the next.
    """

    step: StepCost
    dense_gradients_ms: float
    sync_ms: float
    sync_every: int

    @property
    def step_ms(self) -> float:
        return self.step.total_ms + self.dense_gradients_ms

    @property
    def sync_ms_a_step(self) -> float:
        return self.sync_ms / self.sync_every

    @property
    def total_ms(self) -> float:
        return self.step_ms + self.sync_ms_a_step


@dataclass(frozen=True)
class Candidate:
    """One way to divide the devices.

    found: its plan. None: there is none.
    cost: of that plan.
    fullest: device of a group that has the least free, and the share of its memory that it holds.
    why: there is no plan.
    """

    grouping: Grouping
    found: GroupedPlan | None = None
    cost: GroupedCost | None = None
    fullest: tuple[int, float] | None = None
    why: str = ""


def cost_of(grouped: GroupedPlan, problem: Problem, model: CostModel) -> GroupedCost:
    """What a step of a grouped plan costs.

    problem: the whole. model: for the problem of a group.
    """
    topology, grouping = problem.topology, grouped.grouping
    step, dense, sync = price(lower(grouped.plan, grouped.problem), model), 0.0, 0.0
    if grouping.size < len(topology):
        if n_bytes := replicated_gradient_bytes(grouped.plan):
            of_all, of_group = (_comm_ms(_all_reduce(n_bytes, among, problem), model)
                                for among in (topology, grouped.problem.topology))
            dense = max(0.0, of_all - of_group)
        # All devices average their weights, then their state. Each waits for the last.
        sync = sum(max((_comm_ms(part, model) for part in parts), default=0.0)
                   for parts in synchronisation(grouped, problem))
    return GroupedCost(step, dense, sync, grouping.sync_every)


def synchronisation(grouped: GroupedPlan, problem: Problem) -> tuple[list[Workload], list[Workload]]:
    """The all-reduces of a synchronisation: of weights, and then of optimizer state.

    One for each way in which replicas are spread over hosts, of the device with most bytes.
    problem: the whole.
    """
    topology = problem.topology
    largest: dict[tuple[int, ...], tuple[int, int]] = {}
    of_links: dict[tuple[int, ...], Topology] = {}
    for (weights, state), devices in zip(synced_bytes(grouped.plan, grouped.problem),
                                         replicas(topology, grouped.grouping), strict=True):
        among = topology.among(devices)
        # Replicas that are spread alike over hosts are priced once: the last of them counts.
        spread = numbered([d.host for d in among.devices])
        before = largest.get(spread, (0, 0))
        largest[spread] = max(before[0], weights), max(before[1], state)
        of_links[spread] = among
    return tuple([_all_reduce(both[i], of_links[spread], grouped.problem)
                  for spread, both in largest.items() if both[i]] for i in range(2))


def _all_reduce(n_bytes: int, topology: Topology, problem: Problem) -> Workload:
    """An all-reduce of so many bytes of each device, and nothing else."""
    n_devices = len(topology)
    traffic = np.zeros((len(CHANNELS), n_devices))
    traffic[_ALL_REDUCE] = n_bytes
    return Workload(ops=((),) * n_devices, traffic=traffic, memory_bytes=(0,) * n_devices, topology=topology,
                    global_batch=problem.global_batch, job=problem.job)


def _comm_ms(work: Workload, model: CostModel) -> float:
    """ms of a workload's backward collectives."""
    if len(work.topology) < 2:
        return 0.0
    return float(model.comm(work.traffic, np.zeros(len(work.topology)), work.topology).backward_ms.max())


def candidates(problem: Problem, model: CostModel, sharder: Sharder, among: Iterable[int],
               sync_every: int = 1, *, seed: int = 0, budget: Budget | None = None) -> list[Candidate]:
    """Every size of `among` in both layouts, with a plan or why there is none.

    among: sizes that divide the devices evenly (see sharding_groups.sizes). That of all devices is the plain
      plan.
    budget: of each search.

    The plan of EVEN_BYTES is tried too, and kept where it is cheaper in all.
    """
    found = []
    for grouping in groupings(problem, sync_every, among):
        try:
            with progress.part(f"groups of {grouping.size}, {grouping.layout}"):
                found.append(_searched(problem, grouping, model, sharder, seed, budget))
        except ShardCoreError as error:
            found.append(Candidate(grouping, why=str(error)))
    return found


def _searched(problem: Problem, grouping: Grouping, model: CostModel, sharder: Sharder, seed: int,
              budget: Budget | None) -> Candidate:
    own = problem_of_group(problem, grouping)
    fitting = model.for_problem(own)
    own.require_setting(fitting.setting)
    plans = [sharder(own, fitting, seed=seed, budget=budget)]
    if grouping.size < len(problem.topology):
        with suppress(Infeasible):
            plans.append(SHARDERS[EVEN_BYTES](own, fitting, seed=seed, budget=budget))
    tried = [GroupedPlan(grouping, plan, own) for plan in plans]
    grouped = min(tried, key=lambda one: cost_of(one, problem, fitting).total_ms)
    shares = [used / max(1, free)
              for used, free in zip(used_bytes(grouped.plan, own), held_bytes(own), strict=True)]
    fullest = max(range(len(shares)), key=shares.__getitem__)
    return Candidate(grouping, grouped, cost_of(grouped, problem, fitting), (fullest, shares[fullest]))


def best(of: Sequence[Candidate]) -> Candidate:
    """The cheapest candidate; of equal ones the largest group, whose replicas differ least.

    Raises Infeasible, with the reason of the largest group, if none has a plan.
    """
    having = [c for c in of if c.cost]
    if not having:
        raise Infeasible(f"no groups have a plan; of {of[0].grouping.size} devices, {of[0].why}")
    return min(having, key=lambda c: (c.cost.total_ms, -c.grouping.size))
