"""Groups of ranks that are near each other, from times of messages between them (Cloud Collectives, 2021).

Ranks that share a host, a rack or a switch exchange messages faster than others. Names of hosts do not show
racks, and they may mislead in containers. Times do neither.

Shapes: D ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardcore.core.links import LEVELS, Link
from shardcore.core.topology import Topology
from shardcore.core.validation import require

if TYPE_CHECKING:
    from shardcore.core.types import Problem

CLEAR = 2.0
"""Least ratio of message times between groups to times within them."""

Groups = tuple[tuple[int, ...], ...]
"""Ranks that are near each other. Groups, and the ranks of each, are ordered by their lowest rank."""


@dataclass(frozen=True)
class OutwardLinks:
    """Bandwidth of links between near groups of ranks at one level, or between all groups.

    gbps: GB/s of one rank to another group's, while all ranks send.
    shared_gbps: GB/s of a group to others, where its ranks share a link. None where each rank has one.
    """

    gbps: float
    shared_gbps: float | None = None


@dataclass(frozen=True)
class MeasuredLinks:
    """Measured bandwidths of the links between ranks, by level.

    within_gbps: GB/s of one rank to another of its group, at the first level.
    outward: links of the groups of each level, the first level first. Empty with one group.
    latency_ms: time of a collective of all ranks with next to no data.
    """

    within_gbps: float | None
    outward: tuple[OutwardLinks, ...]
    latency_ms: float


def find_levels(pair_ms: np.ndarray) -> list[Groups]:
    """Hierarchical groups of near ranks from pairwise message times, smallest groups first; empty if all ranks are
    equally near.

    pair_ms: [D, D] ms of a message between two ranks. The diagonal does not count.

    Ranks are merged into groups step by step, by the mean logarithm of the times between them (average
    linkage). A level is a step after which times jump: by the factor CLEAR at least, and in logarithms by at
    least half of the largest jump. So, beside slow links, disturbed pairs of a host make no level. Nor does
    one slow pair: three quarters of the pairs between groups need to take CLEAR times as long as the median
    pair within.

    Raises ShardCoreError for times of another shape, and for times that are not finite and above 0.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    n = len(pair_ms)
    times = np.asarray(pair_ms, dtype=float)
    require(
        times.shape == (n, n) and n >= 2,
        f"times of pairs have shape {list(np.shape(pair_ms))}; they need one of each rank to each, of 2 or more",
    )
    diagonal = np.eye(n, dtype=bool)
    others = times[~diagonal]
    is_valid = bool((others > 0).all() and np.isfinite(others).all())
    require(is_valid, "times of pairs need to be finite and above 0 ms")
    # Two ranks have one time, with nothing to compare it with.
    if n == 2:
        return []
    # Logarithms, as links of different levels differ by factors. The mean of both directions, as a link has
    # one time.
    apart = np.log(np.where(diagonal, 1.0, (times + times.T) / 2))
    np.fill_diagonal(apart, 0.0)
    apart -= apart[~diagonal].min()  # linkage wants distances of 0 or more
    merges = linkage(squareform(apart, checks=False), method="average")
    # Column 2 is the distance of each merge. A jump from one merge to the next separates two levels of links.
    gaps, accepted = np.diff(merges[:, 2]), []
    for k in range(n - 2):
        if gaps[k] >= max(np.log(CLEAR), gaps.max() / 2):
            # After merge k, counted from 0, there are n - 1 - k groups.
            labels = fcluster(merges, n - 1 - k, criterion="maxclust")
            same = labels[:, None] == labels
            # The fastest quarter of pairs between groups may be so by chance.
            if np.quantile(times[~same], 0.25) >= CLEAR * np.median(times[same & ~diagonal]):
                members: dict[int, list[int]] = {}
                for rank, label in enumerate(labels.tolist()):
                    members.setdefault(label, []).append(rank)
                accepted.append(tuple(map(tuple, members.values())))
    return accepted


def order_ranks(levels: Sequence[Groups], ranks: int) -> tuple[int, ...]:
    """Ranks in an order in which the members of every group are consecutive."""

    def group_numbers(rank: int) -> tuple[int, ...]:
        """Number of the rank's group at each level, from the outermost in."""
        return tuple(next(i for i, g in enumerate(groups) if rank in g) for groups in reversed(levels))

    # Outermost groups first, so that groups of inner levels stay together.
    return tuple(sorted(range(ranks), key=lambda rank: (group_numbers(rank), rank)))


def reorder_problem(levels: Sequence[Groups], links: MeasuredLinks, old_problem: Problem) -> Problem:
    """The problem on the measured topology, with ranks in the order of `order_ranks`. Pins follow their devices."""
    place = {rank: i for i, rank in enumerate(order_ranks(levels, len(old_problem.topology)))}
    pinned = tuple(
        (name, tuple(sorted(place[d] for d in old_problem.pinned_devices[name])))
        for name, _ in old_problem.constraints.pinned
        if name in old_problem.pinned_devices
    )
    return replace(
        old_problem,
        topology=measured_topology(levels, links, old_problem.topology),
        constraints=replace(old_problem.constraints, pinned=pinned),
    )


def measured_topology(levels: Sequence[Groups], links: MeasuredLinks, before: Topology) -> Topology:
    """Topology of ranks in measured order: hosts from the first level of links, pods from the second.

    Further levels become part of the links between pods.

    before: memory and speed of each rank's device. They move with the rank.
    """
    n = len(before)
    groups = levels[0] if levels else (tuple(range(n)),)
    ranks = sum(map(len, groups))
    require(ranks == n, f"the problem has {n} devices and the gang {ranks} ranks; they need to be as many")
    arranged = order_ranks(levels, n)
    in_order = sorted(groups, key=lambda group: arranged.index(group[0]))
    host = {rank: f"host-{i}" for i, group in enumerate(in_order) for rank in group}
    if len(levels) > 1:
        pods = sorted(levels[1], key=lambda group: arranged.index(group[0]))
        host |= {rank: f"pod-{i}/{host[rank]}" for i, group in enumerate(pods) for rank in group}
    devices = tuple(replace(before.devices[rank], host=host[rank]) for rank in arranged)
    inner, in_pod, outer = LEVELS
    measured = [Link(inner, links.within_gbps, latency_ms=links.latency_ms)]
    # Devices of the largest domain of each level, which share the links out of it.
    sharing = [max(map(len, level)) for level in levels]
    outward = [(in_pod, links.outward[0], sharing[0])] if len(levels) > 1 else []
    outward += [(outer, links.outward[-1], sharing[min(1, len(levels) - 1)])] if links.outward else []
    fastest = share = links.within_gbps or np.inf
    for name, link, n in outward:
        # Timings scatter, but an outer link of a rank, or its share of one, is no faster than an inner one.
        fastest = min(fastest, link.gbps)
        gbps = min(link.shared_gbps, share * n) if link.shared_gbps else fastest
        share = gbps / n if link.shared_gbps else min(share, gbps)
        measured.append(Link(name, gbps, bool(link.shared_gbps), links.latency_ms))
    return replace(before.with_devices(devices), links=tuple(measured))
