"""Problems and plans with towers, and what a step of them sends.

Towers become constraints.pinned and job.tower_ratio: an ordinary problem, which every search, price and check
reads as it reads any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.core.validation import require
from shardcore.search.state.shards import on_all_devices
from shardcore.step.kinds import ID_CHANNELS
from shardcore.step.lower import Workload, lower
from shardcore.step.scopes import groups_of


def as_towers(problem: Problem, host_of: Mapping[str, str], ratio: float) -> Problem:
    """The problem with its tables pinned to hosts, and with outputs that cross hosts `ratio` times smaller.

    Raises ShardCoreError for hosts that cannot have towers.
    """
    topology = problem.topology
    on_host = dict(zip(topology.hosts, map(frozenset, topology.on_hosts), strict=True))
    pinned = tuple(
        (t.name, tuple(sorted(on_host[host_of[t.name]] & set(problem.allowed_devices(t.name)))))
        for t in problem.tables
        if not _everywhere(t, problem)
    )
    return replace(
        problem,
        constraints=replace(problem.constraints, pinned=pinned),
        job=replace(problem.job, tower_ratio=float(ratio)),
    )


def as_planned(plan: Plan, problem: Problem) -> Problem:
    """The problem as a plan with towers has it: by its placements, and the ratio in its provenance.

    The problem itself for a plan without towers. Raises ShardCoreError for an entry that is no ratio, or a
    table on several hosts.
    """
    if "tower_ratio" not in plan.provenance:
        return problem
    ratio, devices = plan.provenance["tower_ratio"], problem.topology.devices
    require(
        isinstance(ratio, int | float) and not isinstance(ratio, bool),
        f"plan has tower_ratio {ratio!r} in its provenance; it needs a number, 1 or more",
    )
    host_of: dict[str, str] = {}
    for placement in plan.placements:
        name = placement.shard.table.name
        if _everywhere(placement.shard.table, problem):
            continue
        for host in (devices[d].host for d in placement.devices):
            require(
                host_of.setdefault(name, host) == host,
                f"plan has towers, but table {name!r} on hosts {host_of[name]!r} and {host!r}; it needs one",
            )
    return as_towers(problem, host_of, ratio)


def _everywhere(table: Table, problem: Problem) -> bool:
    """Tell if a table is no tower's: a sequence of a kind that is on all devices, as hot rows are."""
    return table.sequence and on_all_devices(table, problem)


@dataclass(frozen=True)
class TowerTraffic:
    """Bytes of outputs that a step of a plan sends forward, in FP32. Backward gradients take as many.

    within_bytes, across_bytes: between devices of a host, and between hosts.
    plain_within_bytes, plain_across_bytes: the same if the job had no towers.
    ratio: of the towers.
    """

    within_bytes: float
    across_bytes: float
    plain_within_bytes: float
    plain_across_bytes: float
    ratio: float


def tower_traffic(plan: Plan, problem: Problem) -> TowerTraffic | None:
    """Bytes of a plan with towers and without. None for a problem without towers."""
    if problem.job.tower_ratio is None:
        return None
    plain = replace(problem, job=replace(problem.job, tower_ratio=None))
    return TowerTraffic(
        *_sent(lower(plan, problem, fits=False)),
        *_sent(lower(plan, plain, fits=False)),
        problem.job.tower_ratio,
    )


def _sent(workload: Workload) -> Iterable[float]:
    """Bytes of outputs that devices send to others of their host, and to other hosts.

    Hosts are of equal size. Of the n parts of what a device enters, it keeps one.
    """
    entered = [
        (_leaving(c.group, workload.topology), float(sent.sum()))
        for c, sent in zip(workload.channels, workload.traffic, strict=True)
        if c not in ID_CHANNELS and "forward" in c.row.ways
    ]
    return (sum(share[i] * n_bytes for share, n_bytes in entered) for i in range(2))


def _leaving(scope: str, topology: Topology) -> tuple[float, float]:
    """Shares of what enters that go to devices of the own host, and to other hosts."""
    first = groups_of(scope, topology)[0]
    hosts = [topology.devices[d].host for d in first]
    n, mates = len(hosts), hosts.count(hosts[0])
    return (mates - 1) / n, (n - mates) / n
