"""Bytes of a collective on each level of links.

Shapes: K levels, n devices of a group; ... any leading dimensions.
"""

from __future__ import annotations

import numpy as np

from shardcore.core.links import joining_levels

COUNTS = ("bytes", "busiest", "port", "uplink", "shared_uplink", "head_start")
"""Counts that the terms of a level of links multiply (core.links.LinkLevel.terms).

bytes: of the device, out and in.
busiest: the most of any device in one direction.
port: the most of any device over this level and all inner ones, in one direction. They may share a port.
uplink: the most of any inner domain, such as a host. Its devices may share an uplink.
shared_uplink: the mean over inner domains; of an all-to-all without the bytes for one other domain.
    A link that is busier than others is filled all the time. Equally busy links are not, if several domains
    share them: TCP shares unevenly, so in the end some rest while others still carry.
head_start: -1; of a ring, for each round. Its rate stands for a link's burst after a pause, and for bytes
  sent before the last rank's start.

All are 0 where a level joins no devices. Only a ring counts the innermost always.
"""


def link_byte_counts(
    ring: bool, owned: np.ndarray, domains: np.ndarray, shares_links: bool
) -> list[dict[str, np.ndarray | float]]:
    """[K] counts of a collective's bytes on each level of links (COUNTS), each broadcasting to [..., n].

    An all-to-all: each device sends owned / n to every other one. Backward it receives as much, so counts are
    the same. A ring (Patarasuk and Yuan 2009): (n - 1) / n of the bytes leave and enter every device, and
    every domain. They do so in n - 1 rounds, each as slow as its slowest link.
    """
    # [K] levels that join devices which no inner level joins. Others carry nothing.
    used = joining_levels(domains)
    if ring:
        rounds = domains.shape[1] - 1
        moved, levels = owned * rounds / domains.shape[1], []
        for k, joins_some in enumerate(used):
            # The innermost level always counts: a ring passes every device.
            x = moved * float(k == 0 or joins_some)
            of_ring = dict.fromkeys(("busiest", "port", "uplink", "shared_uplink"), x)
            # 2 x: as much enters a device as leaves it. A link rests before each round.
            levels.append({"bytes": 2 * x, "head_start": -float(k > 0 and joins_some) * rounds, **of_ring})
        return levels
    # The innermost domains are single devices.
    levels, inner, leaves_ports, enters_ports = [], np.arange(domains.shape[1]), 0.0, 0.0
    for outer, joins_some in zip(domains, used, strict=True):
        counts = dict.fromkeys(COUNTS, 0.0)
        if joins_some:
            counts, out, into = _level_byte_counts(owned, inner, outer, shares_links)
            # A port carries the bytes of this level and of all levels inside it.
            leaves_ports, enters_ports = leaves_ports + out, enters_ports + into
            counts["port"] = _busiest_bytes(leaves_ports, enters_ports)
        levels.append(counts)
        # The domains of a level are what the next one joins.
        inner = outer
    return levels


def _level_byte_counts(
    owned: np.ndarray, inner: np.ndarray, outer: np.ndarray, shares_links: bool
) -> tuple[dict[str, np.ndarray | float], np.ndarray, np.ndarray]:
    """Counts of an all-to-all's bytes on one level of links, and bytes [..., n] that leave and enter each device
    there.

    inner, outer: [n] domains of the level before, and of this one.
    """
    n = len(inner)
    # Bytes and sizes of the domains around each device: at the level inside, and at this one.
    (of_inner, size_in, first), (of_outer, size_out, _) = (
        _domain_sums(owned, domain) for domain in (inner, outer)
    )
    # Each device sends an equal part to each other one; those of its inner domain count there.
    # out: to devices of the outer domain that are not in the inner one. into: from them.
    out, into = owned * (size_out - size_in) / n, (of_outer - of_inner) / n
    # By inner domain: one entry for each, taken at its first device.
    leaves = (of_inner * (size_out - size_in) / n)[..., first]
    enters = ((of_outer - of_inner) * size_in / n)[..., first]
    # Groups across hosts run side by side over the same uplinks, so bytes of all groups add up.
    if shares_links:
        leaves, enters = leaves.sum(-2, keepdims=True), enters.sum(-2, keepdims=True)
    others = leaves.shape[-1] - 1
    return (
        {
            "bytes": out + into,
            "busiest": _busiest_bytes(out, into),
            "uplink": _busiest_bytes(leaves, enters),
            # Of two domains there is one other, so nothing is left.
            "shared_uplink": leaves.mean(-1, keepdims=True) * (others - 1) / others,
            "head_start": -1.0,
        },
        out,
        into,
    )


def _domain_sums(owned: np.ndarray, domain: np.ndarray) -> tuple[np.ndarray, np.ndarray | int, np.ndarray]:
    """Bytes [..., n] and number of devices [n] of each device's domain (host, pod), and one device of each domain."""
    # Few domains or one device each are the common cases, and cheap.
    if not np.ptp(domain):
        return owned.sum(-1, keepdims=True), len(domain), np.zeros(1, dtype=int)
    _, first, number, sizes = np.unique(domain, return_index=True, return_inverse=True, return_counts=True)
    if len(sizes) == len(domain):
        return owned, 1, first
    # Sort devices by domain and sum runs. A devices × domains matrix could have 2^32 cells.
    order = np.argsort(number, kind="stable")
    on_domain = np.add.reduceat(owned[..., order], np.cumsum(sizes) - sizes, axis=-1)
    return on_domain[..., number], sizes[number], first


def _busiest_bytes(out: np.ndarray, into: np.ndarray) -> np.ndarray:
    """The most bytes of any device, in either direction of its links."""
    return np.maximum(out.max(-1, keepdims=True), into.max(-1, keepdims=True))
