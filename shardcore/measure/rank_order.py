"""Which ranks are near each other, found from how long messages between them take (Cloud Collectives, 2021).

Ranks that share a host, a rack or a switch exchange messages faster than others. Names of hosts do not tell
racks, and names may mislead in containers. Times do not.

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
"""Groups are told apart where messages between them take at least so many times as long as within."""

Groups = tuple[tuple[int, ...], ...]
"""Ranks that are near each other. Groups, and the ranks of each, are ordered by their lowest rank."""


@dataclass(frozen=True)
class Links:
    """What links between ranks carry.

    within_gbps: GB/s of one rank to another of its group.
    between_gbps: GB/s of one rank to another group's, while all ranks send. None with one group.
    host_gbps: GB/s of a group to others, where its ranks share a link. None where each has its own.
    latency_ms: of a collective of all ranks that carries next to nothing.
    """

    within_gbps: float | None
    between_gbps: float | None
    host_gbps: float | None
    latency_ms: float


def levels(pair_ms: np.ndarray) -> list[Groups]:
    """Groups of ranks that are near each other, the smallest first. Empty where all are alike.

    pair_ms: [D, D] ms of a message between two ranks. The diagonal does not count.

    Groups merge by the mean of the logarithms between them (average linkage). A level is a number of groups
    at which the next merge costs CLEAR times as much as the last, and its logarithm is half of the largest at
    least. So disturbed pairs of a host make no level below one of slow links. Nor does one slow pair: three
    quarters of the pairs between groups need to be as clearly apart from the median pair within.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    n = len(pair_ms)
    times = np.asarray(pair_ms, dtype=float)
    own = np.eye(n, dtype=bool)
    require(
        times.shape == (n, n) and n >= 2,
        f"times of pairs have shape {list(np.shape(pair_ms))}; they "
        "need one of each rank to each, of 2 or more",
    )
    require(
        bool((times[~own] > 0).all() and np.isfinite(times[~own]).all()),
        "times of pairs need to be finite and above 0 ms",
    )
    if n == 2:
        return []
    apart = np.log(np.where(own, 1.0, (times + times.T) / 2))
    np.fill_diagonal(apart, 0.0)
    apart -= apart[~own].min()  # linkage wants distances of 0 or more
    merges = linkage(squareform(apart, checks=False), method="average")
    gaps, found = np.diff(merges[:, 2]), []
    # After merge k there are n - 1 - k groups.
    for k in range(n - 2):
        if gaps[k] >= max(np.log(CLEAR), gaps.max() / 2):
            labels = fcluster(merges, n - 1 - k, criterion="maxclust")
            same = labels[:, None] == labels
            if np.quantile(times[~same], 0.25) >= CLEAR * np.median(times[same & ~own]):
                found.append(_ordered(labels))
    return found


def _ordered(labels: np.ndarray) -> Groups:
    first: dict[int, list[int]] = {}
    for rank, label in enumerate(labels.tolist()):
        first.setdefault(label, []).append(rank)
    return tuple(map(tuple, first.values()))


def order(found: Sequence[Groups], ranks: int) -> tuple[int, ...]:
    """The ranks such that those of every group follow one another."""
    place = {
        rank: tuple(next(i for i, group in enumerate(groups) if rank in group) for groups in reversed(found))
        for rank in range(ranks)
    }
    return tuple(sorted(range(ranks), key=lambda rank: (place[rank], rank)))


def problem_of(found: Sequence[Groups], links: Links, before: Problem) -> Problem:
    """The problem on the topology of ranks in `order`. Pins stay with their devices, now given by numbers."""
    place = {rank: i for i, rank in enumerate(order(found, len(before.topology)))}
    pinned = tuple(
        (name, tuple(sorted(place[d] for d in before.pinned[name])))
        for name, _ in before.constraints.pinned
        if name in before.pinned
    )
    return replace(
        before,
        topology=topology_of(found, links, before.topology),
        constraints=replace(before.constraints, pinned=pinned),
    )


def topology_of(found: Sequence[Groups], links: Links, before: Topology) -> Topology:
    """The topology of ranks in `order`: groups of the first level as hosts, with their links.

    before: has the memory and speed of each rank's device. They move with the rank.
    """
    n = len(before)
    groups = found[0] if found else (tuple(range(n)),)
    require(
        sum(map(len, groups)) == n,
        f"the problem has {n} devices and the gang {sum(map(len, groups))} ranks; they need to be as many",
    )
    arranged = order(found, n)
    host = {
        rank: f"host-{i}"
        for i, group in enumerate(sorted(groups, key=lambda g: arranged.index(g[0])))
        for rank in group
    }
    devices = tuple(replace(before.devices[rank], host=host[rank]) for rank in arranged)
    inner, *_, outer = LEVELS
    near = Link(inner, links.within_gbps, latency_ms=links.latency_ms)
    far = Link(outer, links.host_gbps or links.between_gbps, bool(links.host_gbps), links.latency_ms)
    return replace(before, devices=devices, links=(near, far)[: len(groups)])
