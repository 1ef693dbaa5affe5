"""Scopes of a collective's groups: which devices exchange with each other. One row of SCOPES defines each.

Kinds of sharding, cost models, measurements and replays take their groups from here.
To add a scope, add a row, and let a channel of a kind use it (kinds.LAYOUTS).

Shapes: G groups, n devices of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Topology

Group = tuple[int, ...]
"""Devices that exchange with each other, or share one shard, in the order in which row ranges are dealt."""
OnHosts = Sequence[Sequence[int]]
"""Devices of each host. Scopes but the world ask for hosts of one size."""


@dataclass(frozen=True)
class Scope:
    """A scope of groups.

    name: as channels and files give it.
    words: for people, after those of a collective.
    of: the groups, for hosts of one size.
    within: True if each group is within a host.
    across: True if groups have one device of each host. They run side by side over the links of hosts.
    """

    name: str
    words: str
    of: Callable[[OnHosts], tuple[Group, ...]]
    within: bool = False
    across: bool = False

    def groups(self, on_hosts: OnHosts) -> tuple[Group, ...]:
        """The groups on these hosts. There are none where they need hosts of one size."""
        even = len({len(devices) for devices in on_hosts}) == 1
        return self.of(on_hosts) if even or not (self.within or self.across) else ()


WORLD, HOST, CROSS = "world", "host", "cross"

SCOPES: Mapping[str, Scope] = {
    row.name: row
    for row in (
        Scope(WORLD, "", lambda on_hosts: (tuple(d for devices in on_hosts for d in devices),)),
        Scope(HOST, " within a host", lambda on_hosts: tuple(map(tuple, on_hosts)), within=True),
        # By their order on the host.
        Scope(CROSS, " across hosts", lambda on_hosts: tuple(zip(*on_hosts, strict=True)), across=True),
    )
}
"""By name. The first has all devices."""


def scope_of(name: str) -> Scope:
    """The row of a scope. Raises ShardCoreError for an unknown name."""
    if name not in SCOPES:
        raise ShardCoreError(f"scope {name!r} is not known; known are {', '.join(SCOPES)}")
    return SCOPES[name]


def even_hosts(n_devices: int, hosts: int) -> OnHosts:
    """Devices that are numbered host by host, as many on each."""
    each = n_devices // hosts
    return [range(i, i + each) for i in range(0, n_devices, each)]


@lru_cache(maxsize=128)
def groups_in(topology: Topology, scope: str) -> tuple[Group, ...]:
    """The groups of a scope. None where they need hosts of one size."""
    return scope_of(scope).groups(topology.on_hosts)


@lru_cache(maxsize=128)
def groups_of(scope: str, topology: Topology) -> np.ndarray:
    """[G, n] devices of each group of a scope. [0, 0] where there are none."""
    groups = groups_in(topology, scope)
    return np.array(groups) if groups else np.zeros((0, 0), dtype=int)
