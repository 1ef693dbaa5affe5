"""Scopes of a collective's groups: which devices exchange with each other. One row of SCOPES defines each.

Kinds of sharding, cost models, measurements and replays take their groups from here.
To add a scope, add a row, and let a channel of a kind use it (kinds.SHARDING_KINDS).

Shapes: G groups, n devices of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import LEVELS, domain_members
from shardcore.core.topology import Topology

Group = tuple[int, ...]
"""Devices that exchange with each other, or share one shard, in the order in which row ranges are dealt."""
Domains = Sequence[Sequence[int]]
"""Devices of each domain: of each host, or of each pod."""


@dataclass(frozen=True)
class Scope:
    """Which devices join in a collective: all, those of a domain (host, pod), or one of each. Domains need one size.

    name: as channels and files give it.
    words: for people, after those of a collective.
    domain: level of links that joins a domain, a name of links.LEVELS. The outermost: all devices.
    across: True if a group has one device of each domain, by their order there. Such groups share the domains' links.
      Otherwise a group is a domain.
    """

    name: str
    words: str
    domain: str
    across: bool = False

    def device_groups(self, domains: Domains) -> tuple[Group, ...]:
        """Device groups of this scope, from the devices of each domain (host, pod); () if domain sizes differ."""
        if len({len(devices) for devices in domains}) != 1:
            return ()
        return tuple(zip(*domains, strict=True) if self.across else map(tuple, domains))

    @property
    def outermost_level(self) -> str:
        """Name of the outermost level of links that groups in this scope cross."""
        return _OUTERMOST if self.across else self.domain


_INNERMOST, *_, _OUTERMOST = LEVELS
WORLD, HOST, CROSS, POD, CROSS_POD = "world", "host", "cross", "pod", "cross_pod"

SCOPES: Mapping[str, Scope] = {
    row.name: row
    for row in (
        Scope(WORLD, "", _OUTERMOST),
        Scope(HOST, " within a host", _INNERMOST),
        Scope(CROSS, " across hosts", _INNERMOST, across=True),
        Scope(POD, " within a pod", "within_pod"),
        Scope(CROSS_POD, " across pods", "within_pod", across=True),
    )
}
"""By name. The first has all devices."""


def scopes_of_domain(level: str) -> tuple[str, str]:
    """Names of the two scopes of a domain, such as a host: groups within domains, and groups across domains."""
    within, across = (
        next(row.name for row in SCOPES.values() if row.domain == level and row.across == far)
        for far in (False, True)
    )
    return within, across


def scope_by_name(name: str) -> Scope:
    """The definition of a scope. Raises ShardCoreError for an unknown name."""
    if name not in SCOPES:
        raise ShardCoreError(f"scope {name!r} is not known; known are {', '.join(SCOPES)}")
    return SCOPES[name]


def groups_among_hosts(hosts: Sequence[str], scope: str) -> tuple[Group, ...]:
    """The groups of a scope among devices given by the names of their hosts."""
    row = scope_by_name(scope)
    return row.device_groups(domain_members(hosts, row.domain))


@lru_cache(maxsize=128)
def groups_in_topology(topology: Topology, scope: str) -> tuple[Group, ...]:
    """The groups of devices of a scope in a topology. () if its domains differ in size."""
    row = scope_by_name(scope)
    return row.device_groups(topology.devices_by_domain(row.domain))


@lru_cache(maxsize=128)
def group_members(scope: str, topology: Topology) -> np.ndarray:
    """[G, n] devices of each group of a scope in a topology. [0, 0] if there are none."""
    groups = groups_in_topology(topology, scope)
    return np.array(groups) if groups else np.zeros((0, 0), dtype=int)
