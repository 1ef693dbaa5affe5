"""Sharding groups: a plan for a few devices, which all groups of as many devices run (2D parallelism).

The devices are divided into groups of equal size. Each group holds all tables, by the same plan, and trains
on its own share of the batch. Devices at the same position of all groups hold the same shards: they are
replicas. Every few steps, replicas average their weights and optimizer state (arXiv 2508.03854).

The groups are those that TorchRec 1.8 makes (DMPCollection._create_process_groups), over its ranks, host by
host. With R groups of M devices:

- contiguous: group g has ranks g M to g M + M - 1. Lookups stay near, replicas are far apart.
- strided: group g has ranks g, g + R, g + 2 R, ... Replicas are R neighbours.

Shapes: G devices, M of a group, R groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.links import ROWS_OVER, pod_of_host
from shardcore.core.tiers import TIERS
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import MOST_DEVICES, Record, number_within, one_of, require
from shardcore.step import memory
from shardcore.step.kinds import merged_placements, row_domain_of, sharding_kind_for_table, shards_by_device

CONTIGUOUS, STRIDED = "contiguous", "strided"
GROUP_LAYOUTS = (CONTIGUOUS, STRIDED)
"""Assignments of ranks to groups."""
SYNCED_STATES: frozenset[tuple[str, ...]] = frozenset({(), ("row",)})
"""States of the optimizers that DMPCollection synchronises.

It reads the state "sum" of every table (_cache_sync_tensors). Adam and LAMB of FBGEMM have none of that name:
TorchRec 1.8 fails with a KeyError.
"""
SyncEvery = Annotated[int, number_within(1, 1_000_000)]


@dataclass(frozen=True)
class Grouping(Record, noun="groups"):
    """Division of devices into sharding groups, which each hold all tables.

    size: devices of a group.
    layout: one of GROUP_LAYOUTS.
    sync_every: steps from one synchronisation of the replicas to the next.
    """

    size: Annotated[int, number_within(1, MOST_DEVICES)]
    layout: Annotated[str, one_of(GROUP_LAYOUTS)]
    sync_every: SyncEvery = 1


@dataclass(frozen=True)
class GroupedPlan:
    """A plan of one group, and how the devices are divided. It is no Plan of the whole problem.

    problem: problem of one group, as `problem_of_group` makes it.
    """

    grouping: Grouping
    plan: Plan
    problem: Problem


def possible_group_sizes(problem: Problem) -> tuple[int, ...]:
    """Sizes of groups that divide a problem's devices evenly, largest first."""
    n = len(problem.topology)
    # Falling: the first is one group of all devices, the plain case.
    return tuple(size for size in range(n, 0, -1) if n % size == 0)


def possible_groupings(problem: Problem, sync_every: int, among: Iterable[int]) -> tuple[Grouping, ...]:
    """All distinct ways to divide a problem's devices into groups of the given sizes.

    Layouts of one group, and of groups of one device, are the same. They are listed once.
    """
    return tuple(
        Grouping(size, sharding_kind, sync_every)
        for size in among
        # Contiguous stands for both where they coincide.
        for sharding_kind in (GROUP_LAYOUTS if 1 < size < len(problem.topology) else GROUP_LAYOUTS[:1])
    )


def devices_of_groups(topology: Topology, grouping: Grouping) -> tuple[tuple[int, ...], ...]:
    """[R][M] the devices of each sharding group, by their position in the group.

    Raises ShardCoreError for a size that does not divide the devices evenly.
    """
    n, size = len(topology), grouping.size
    require(
        n % size == 0,
        f"groups have size {size}, which does not divide {n} devices evenly; it needs one "
        f"of {', '.join(str(d) for d in range(1, n + 1) if n % d == 0)}",
    )
    # Ranks, not device numbers: TorchRec numbers processes host by host.
    count, ranks = n // size, topology.ranks
    if grouping.layout == CONTIGUOUS:
        return tuple(ranks[g * size : (g + 1) * size] for g in range(count))
    # Every R-th rank, so replicas are neighbours, mostly on one host.
    return tuple(ranks[g::count] for g in range(count))


def replica_devices(topology: Topology, grouping: Grouping) -> tuple[tuple[int, ...], ...]:
    """[M][R] the devices with the same position in all sharding groups, which hold the same shards."""
    # Transposed: position in a group, then group.
    return tuple(zip(*devices_of_groups(topology, grouping), strict=True))


def problem_of_group(problem: Problem, grouping: Grouping) -> Problem:
    """The problem of one sharding group: its devices, links and share of the batch.

    One plan serves all groups. So a device has the least memory, and the lowest speed, of all at its
    position.

    Raises ShardCoreError for what TorchRec cannot run in groups, or what groups make meaningless.
    Raises Infeasible if groups differ in how their devices are spread over hosts.
    """
    topology, p = problem.topology, f"problem {problem.name!r}"
    each = devices_of_groups(topology, grouping)
    # One group is the plain problem, with nothing to synchronise.
    if len(each) == 1:
        return problem
    require(
        OPTIMIZERS[problem.optimizer].states in SYNCED_STATES,
        f"{p} has optimizer {problem.optimizer!r}; replicas of groups need one of "
        f"{', '.join(name for name, o in OPTIMIZERS.items() if o.states in SYNCED_STATES)}, for TorchRec "
        "1.8 synchronises no other",
    )
    apart = next((t for t in problem.tables if t.in_host_memory and not t.lower_tier.is_synced), None)
    require(
        apart is None,
        f"{p} has table {apart and apart.name!r} with kernel {apart and apart.kernel}, which TorchRec 1.8 does not "
        "synchronise among groups; it needs another tier",
    )
    # A pinned device would mean the device at its position in every group.
    pins = dict(problem.constraints.pinned)
    require(
        not pins,
        f"{p} has constraints.pinned {pins}; groups need none, for a device of a group stands for one of each group",
    )
    # Names differ between groups. The pattern of their hosts and pods has to agree, or links would differ.
    for where, domain_of in (("on its hosts", str), ("in its pods", pod_of_host)):
        spread = [
            host_index_by_appearance([domain_of(topology.devices[d].host) for d in group]) for group in each
        ]
        for number, domains in enumerate(spread):
            if domains != spread[0]:
                raise Infeasible(
                    f"group {number} has {_device_counts_text(domains)} devices {where}, group 0 "
                    f"{_device_counts_text(spread[0])}; one plan for all groups needs them alike"
                )
    devices = tuple(
        Device(
            # The weakest device at a position decides, as all run the same shards.
            min(topology.devices[d].memory_bytes for d in same),
            min(topology.devices[d].speed for d in same),
            host=topology.devices[same[0]].host,
        )
        for same in replica_devices(topology, grouping)
    )
    # Names are limited to 100 characters.
    name = f"{problem.name[:70]}.{grouping.layout}-{grouping.size}"
    # Groups have the same pattern of hosts, so the first stands for all.
    links = replace(topology.restricted_to(each[0]), devices=devices)
    if topology.memory:
        # Groups on one host share its memory, by their devices there.
        shares = [
            len(here) / len(topology.devices_by_host[topology.hosts.index(host)])
            for host, here in zip(links.hosts, links.devices_by_host, strict=True)
        ]
        # The smallest share fits on every host.
        tiers = tuple(
            replace(memory, bytes=int(memory.bytes * min(shares)))
            for memory in topology.memory
            if TIERS[memory.tier].is_synced
        )
        links = replace(links, memory=tiers)
    # Each device keeps its share of the batch; a group has the sum.
    return replace(problem, name=name, topology=links, global_batch=problem.local_batch * grouping.size)


def synced_bytes(plan: Plan, problem: Problem) -> list[tuple[int, int]]:
    """[M] bytes of weights, and of optimizer state, that each device averages with its replicas in other groups.

    plan, problem: plan and problem of one group.

    Kinds with a dense gradient have the same weights everywhere at each step, so they are left out.
    NCCL reduces them in place: this takes no more memory.
    """
    synced = [(0, 0)] * len(problem.topology)
    for placement in merged_placements(plan.placements):
        # DDP already sums dense gradients over all groups.
        sharding_kind = sharding_kind_for_table(placement.kind, placement.shard.table)
        if sharding_kind.dense_gradient:
            continue
        for device, shard in shards_by_device(placement):
            # Replicas average all rows, wherever they are, and not what a cache holds of them.
            on_device = replace(shard, table=replace(shard.table, load_factor=1.0))
            weights, state = memory.resident_bytes(sharding_kind, on_device, problem)
            synced[device] = synced[device][0] + weights, synced[device][1] + state
    return synced


def replicated_gradient_bytes(plan: Plan) -> int:
    """Bytes of a plan's dense gradients, which are summed over all devices at each step."""
    return sum(
        p.shard.bytes
        for p in plan.placements
        if sharding_kind_for_table(p.kind, p.shard.table).dense_gradient
    )


def devices_per_domain(problem: Problem, plan: Plan | None = None) -> int:
    """Number of a group's devices on each host (or pod, if rows are divided over pods); all if hosts differ.

    The size of the group where they differ.
    """
    topology = problem.topology
    domains = topology.devices_by_domain(ROWS_OVER[row_domain_of(topology, plan.placements if plan else ())])
    return len(domains[0]) if len(set(map(len, domains))) == 1 else len(topology)


def parse_group_sizes(text: str, problem: Problem) -> tuple[int, ...]:
    """Parse the sizes of sharding groups: "auto", or a number. Raises ShardCoreError for other text."""
    allowed = possible_group_sizes(problem)
    if text == "auto":
        return allowed
    if text.isdecimal() and len(text) < 9 and int(text) in allowed:
        return (int(text),)
    raise ShardCoreError(
        f"--groups is {text[:40]!r}; it needs 'auto' or a size that divides the "
        f"{len(problem.topology)} devices of problem {problem.name!r} evenly: "
        f"{', '.join(map(str, reversed(allowed[-8:])))}{', ...' * (len(allowed) > 8)}"
    )


def describe_grouping(grouping: Grouping, problem: Problem) -> str:
    """A division of devices into groups, as text."""
    size, count = grouping.size, len(problem.topology) // grouping.size
    if count == 1:
        return f"all {size} devices as one group"
    # Groups of one device are the same in both layouts.
    sharding_kind = f"{grouping.layout} " * (size > 1)
    return f"{count} {sharding_kind}groups of {size} device{'s' * (size > 1)}"


def host_index_by_appearance(hosts: list[str]) -> tuple[int, ...]:
    """Names of hosts as numbers, in order of appearance."""
    number = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
    return tuple(number[host] for host in hosts)


def _device_counts_text(hosts: tuple[int, ...]) -> str:
    """The number of devices on each host, as text such as "2 and 2"."""
    return " and ".join(str(hosts.count(h)) for h in range(max(hosts) + 1))
