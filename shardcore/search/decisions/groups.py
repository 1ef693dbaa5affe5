"""Sharding groups: their size and layout, by the cost of a step and of synchronising replicas.

Every way to divide the devices gives a problem, the one of a group (see shardcore/step/sharding_groups.py).
A step of the whole job then takes

    total = step of a group + time to synchronise / steps between two

A synchronisation is one all-reduce of weights and one of optimizer state, among the replicas of each device.
By a ring, 2 (R - 1) / R of the bytes leave and enter each device. The cost model prices it, by the topology's
links or as it measured all-reduces. Rows in host memory cross the link to their device and back, too. All
devices wait for the last.

All groups communicate at once. Where devices of a host share its link, and the topology states no bandwidths,
this is too cheap: a price has one group's bytes on it.

Shapes: C channels, M devices of a group, R groups.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.step_cost import StepCost
from shardcore.core.topology import Topology
from shardcore.core.types import Problem
from shardcore.cost.model import CostModel, first_argmin, price
from shardcore.search.decisions.driver import Decision, FoundPlan, Proposal, ProposalOutcome
from shardcore.search.sharders import SHARDERS
from shardcore.step.kinds import CHANNELS, Channel, row_domain_of, shards_by_device
from shardcore.step.lower import Workload, lower
from shardcore.step.memory import host_tier_bytes, usable_bytes, used_bytes
from shardcore.step.sharding_groups import (
    GroupedPlan,
    Grouping,
    describe_grouping,
    host_index_by_appearance,
    parse_group_sizes,
    possible_groupings,
    problem_of_group,
    replica_devices,
    replicated_gradient_bytes,
    synced_bytes,
)

_ALL_REDUCE = CHANNELS.index(Channel("all_reduce"))
EVEN_BYTES = "size_greedy"
"""A sharder that deals bytes evenly.

Sharders see the step, not the synchronisation, which takes as long as the device with most bytes. So its plan
is weighed against that of the sharder.
"""


@dataclass(frozen=True)
class GroupedCost:
    """The cost of a step in groups.

    step: cost of a step of one group.
    dense_gradients_ms: extra time of replicated tables' gradients among all devices, not only a group.
    sync_ms: time of one synchronisation of the replicas.
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
    def sync_ms_per_step(self) -> float:
        """ms of a synchronisation of the groups, spread over the steps between two."""
        return self.sync_ms / self.sync_every

    @property
    def total_ms(self) -> float:
        return self.step_ms + self.sync_ms_per_step


@dataclass(frozen=True, kw_only=True)
class InGroups(Proposal):
    """Proposal to divide a problem's devices into groups that each hold all tables."""

    grouping: Grouping


@dataclass(frozen=True, kw_only=True)
class FoundGroups(FoundPlan):
    """A plan of one group. Its problem is that of the group.

    whole: problem of all devices, with the tables of the group's.
    """

    whole: Problem
    grouping: Grouping
    cost: GroupedCost

    @property
    def grouped_plan(self) -> GroupedPlan:
        return GroupedPlan(self.grouping, self.plan, self.problem)

    @property
    def description(self) -> str:
        """Text on the chosen groups of devices."""
        every, groups = self.grouping.sync_every, describe_grouping(self.grouping, self.whole)
        if self.grouping.size == len(self.whole.topology):
            return groups
        return f"{groups}, synchronised every {f'{every} steps' if every > 1 else 'step'}"


@dataclass(frozen=True)
class Groups(Decision, noun="groups"):
    """Choose the sharding groups: groups of devices that each hold all tables and train in parallel.

    size: "auto" for every size that divides the devices, or one of them.
    sync_every: steps from one synchronisation of the replicas to the next.
    """

    size: str | int = "auto"
    sync_every: int = 1

    name: ClassVar[str] = "sharding groups"
    level: ClassVar[int] = 1

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[InGroups, ProposalOutcome, None]:
        """Divisions of the devices into groups of adjacent or of interleaved devices, the largest groups first. One
        group of all devices is the plain problem.
        """
        # Sizes are few, as they divide the number of devices, so all are searched.
        ways = possible_groupings(problem, self.sync_every, parse_group_sizes(str(self.size), problem))
        for i, grouping in enumerate(ways):
            refused, proposed = None, problem
            # A refused way is listed in the ledger, with the reason.
            try:
                proposed = problem_of_group(problem, grouping)
            except ShardCoreError as error:
                refused = error
            yield InGroups(
                words=describe_grouping(grouping, problem),
                problem=proposed,
                refused=refused,
                more=len(ways) - 1 - i,
                grouping=grouping,
            )

    def adopt(self, proposal: InGroups, found: FoundPlan, problem: Problem, model: CostModel) -> FoundGroups:
        """Add the cost of synchronisation. Keeps the cheaper of the searched plan and one with even bytes."""
        whole, group, grouping = problem, found.problem, proposal.grouping
        model, plans = model.for_problem(group), [found.plan]
        # One group synchronises nothing, so even bytes bring it nothing.
        if grouping.size < len(whole.topology):
            # Rows over the same domains: another decision may have chosen them.
            domain = row_domain_of(group.topology, found.plan.placements)
            decided = replace(group, topology=replace(group.topology, rows_over=domain))
            with suppress(Infeasible):
                plans.append(SHARDERS[EVEN_BYTES](decided, model))
        # The search minimised a step. What counts is a step with its share of a synchronisation.
        costs = [grouped_cost(GroupedPlan(grouping, plan, group), whole, model) for plan in plans]
        best = first_argmin([cost.total_ms for cost in costs])
        chosen = {**vars(found), "plan": plans[best], "ms": costs[best].total_ms}
        # Inner decisions change tables and constraints, of the group and so of all.
        whole = replace(whole, tables=group.tables, constraints=group.constraints)
        return FoundGroups(**chosen, whole=whole, grouping=grouping, cost=costs[best])

    def ledger_facts(self, outcome: ProposalOutcome) -> Mapping[str, Any]:
        found = outcome.found
        if not isinstance(found, FoundGroups):
            return {}
        used, may_hold = used_bytes(found.plan, found.problem), usable_bytes(found.problem)
        shares = [n_bytes / max(1, free) for n_bytes, free in zip(used, may_hold, strict=True)]
        fullest = max(range(len(shares)), key=shares.__getitem__)
        return {
            "step ms": found.cost.step_ms,
            "sync ms a step": found.cost.sync_ms_per_step,
            "fullest device": f"{shares[fullest]:.0%} ({fullest})",
        }


def grouped_cost(grouped: GroupedPlan, problem: Problem, model: CostModel) -> GroupedCost:
    """Cost of a step of a grouped plan.

    problem: the problem of all devices.
    model: cost model for the problem of a group.
    """
    topology, grouping = problem.topology, grouped.grouping
    step, dense, sync = price(lower(grouped.plan, grouped.problem), model), 0.0, 0.0
    if grouping.size < len(topology):
        if n_bytes := replicated_gradient_bytes(grouped.plan):
            # Tables on all devices of each group have one gradient in the whole job.
            of_all = _comm_ms(_all_reduce_workload(n_bytes, topology, problem), model)
            of_group = _comm_ms(_all_reduce_workload(n_bytes, grouped.problem.topology, problem), model)
            # The step already has the all-reduce within a group.
            dense = max(0.0, of_all - of_group)
        # All devices average their weights, then their state. Each waits for the last.
        for works in synchronisation_workloads(grouped, problem):
            sync += max((_comm_ms(work, model) for work in works), default=0.0)
        sync += _host_rows_ms(grouped)
    return GroupedCost(step, dense, sync, grouping.sync_every)


def _host_rows_ms(grouped: GroupedPlan) -> float:
    """ms in which rows in host memory cross the link to devices and back, by a law as for cache misses."""
    topology = grouped.problem.topology
    ms, gbps = [0.0] * len(topology), {memory.tier: memory.gbps for memory in topology.memory}
    for placement in grouped.plan.placements:
        for device, shard in shards_by_device(placement):
            if n_bytes := host_tier_bytes(shard, grouped.problem):
                # Down to be averaged, and back.
                ms[device] += 2 * n_bytes / gbps[shard.table.tier] / 1e6
    return max(ms)


def synchronisation_workloads(
    grouped: GroupedPlan, problem: Problem
) -> tuple[list[Workload], list[Workload]]:
    """All-reduces of a synchronisation between groups: of weights, and of optimizer state.

    One for each way in which replicas are spread over hosts, of the device with most bytes.

    problem: the problem of all devices.
    """
    topology, group = problem.topology, grouped.problem
    # All sets of replicas communicate at once, so of equal sets the one with most bytes ends last.
    largest: dict[tuple[int, ...], tuple[int, int, Topology]] = {}
    replicated, of_group = synced_bytes(grouped.plan, group), replica_devices(topology, grouped.grouping)
    for (weights, state), devices in zip(replicated, of_group, strict=True):
        among = topology.restricted_to(devices)
        # Replicas with the same spread over hosts are priced once: the last of them counts.
        spread = host_index_by_appearance([d.host for d in among.devices])
        most_weights, most_state, _ = largest.get(spread, (0, 0, among))
        largest[spread] = max(most_weights, weights), max(most_state, state), among
    return (
        [_all_reduce_workload(weights, among, group) for weights, _, among in largest.values() if weights],
        [_all_reduce_workload(state, among, group) for _, state, among in largest.values() if state],
    )


def _all_reduce_workload(n_bytes: int, topology: Topology, problem: Problem) -> Workload:
    """Workload of only an all-reduce of `n_bytes` on each device."""
    n_devices = len(topology)
    traffic = np.zeros((len(CHANNELS), n_devices))  # [C, M]
    # The same bytes on each device, as replicas are equal.
    traffic[_ALL_REDUCE] = n_bytes
    return Workload(
        ops=((),) * n_devices,
        traffic=traffic,
        memory_bytes=(0,) * n_devices,
        topology=topology,
        global_batch=problem.global_batch,
        job=problem.job,
    )


def _comm_ms(work: Workload, model: CostModel) -> float:
    """ms of a workload's backward collectives."""
    if len(work.topology) < 2:  # no other replica
        return 0.0
    return float(model.comm_cost(work.traffic, np.zeros(len(work.topology)), work.topology).backward_ms.max())
