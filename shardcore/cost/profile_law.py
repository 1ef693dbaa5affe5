"""The law of hardware profiles: ms of an op's shards and of collectives, from rates.

Work of a shard is counted once. Rates then give its ms, so that a fit to published timings prices work again
and again.

A pass over a shard takes

    a constant + lookups + the larger of two: instructions of lookups, and bytes that move

where "the larger" is smooth. Backward also sorts lookups.

Bytes of rows that a batch reads once come from memory. Those read again come from L2 as far as it holds the
rows, the most popular first. So bandwidth falls as tables outgrow it, and the less the more uneven accesses
are.

Collectives follow the law of exchanges (exchanges.py), with a ramp, and a smooth maximum over levels of links: chunks
pass one level after the other, which overlaps, but not wholly.

Rates may be arrays: of many profiles at once, with a leading dimension each.

Shapes: N shards, K levels of links, n devices of a group; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.links import LEVELS, Link, joining_levels
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Topology
from shardcore.core.types import OUTPUT_BYTES, PRECISION_BYTES, Shard, Table
from shardcore.step.access import access_concentration, access_share, output_rows, unique_rows_of_shards
from shardcore.step.exchanges import CollectiveTerms, merge_unknown_levels, transfer_ms
from shardcore.step.link_counts import link_byte_counts
from shardcore.tables.host_rows import link_bytes_of_shard

MS_PER_US, MS_PER_NS = 1e-3, 1e-6
Rates = Mapping[str, Any]
"""Values of profile.RATES, by name: floats, or arrays that broadcast against work."""
_SHARPNESS = 3.0
"""Exponent of the smooth maximum. What is near both limits takes 26% longer than by either alone."""
_RAMP_DEVICES = 16
"""Devices on several hosts that a ramp is given for."""
_SUMS = 3
"""Generation from which switches within a host sum. NVIDIA's are those of H100."""
NEAR, *_, FAR = LEVELS
"""Levels of links that rates are known for: within hosts, and between them. Others count if their GB/s are given."""


@dataclass(frozen=True, eq=False)
class OpWork:
    """Work of shards in an op over a batch. Each field is [N].

    lookups, unique: rows that are looked up, and distinct ones.
    evenness: exponent e; a share x of the distinct rows, the most popular ones, has x^e of lookups. 1: even
      access.
    op_row_bytes: bytes of the distinct rows of the whole op, which share L2.
    width: columns. element_bytes: of one weight.
    outputs: rows of pooled outputs, or of all lookups where they are not pooled.
    weighted: 1 if lookups have weights, else 0.
    row_state_bytes, cell_state_bytes: optimizer state of a row: of its row, and of its cells.
    resident: 1 if lookups read device memory, 0 if they read host memory.
    host_read_bytes, host_update_bytes, cache_bytes: bytes that cross the link to host memory.
    """

    lookups: np.ndarray
    unique: np.ndarray
    evenness: np.ndarray
    op_row_bytes: np.ndarray
    width: np.ndarray
    element_bytes: np.ndarray
    outputs: np.ndarray
    weighted: np.ndarray
    row_state_bytes: np.ndarray
    cell_state_bytes: np.ndarray
    resident: np.ndarray
    host_read_bytes: np.ndarray
    host_update_bytes: np.ndarray
    cache_bytes: np.ndarray


def shard_work(
    shards: Sequence[Shard],
    batch: int,
    optimizer: str,
    op_row_bytes: float = 0.0,
    slower: Mapping[str, float] | None = None,
) -> OpWork:
    """Work of each shard of an op over a batch: lookups, distinct rows, bytes.

    op_row_bytes: bytes of the distinct rows of the op, as far as they are known. Each shard has its own at
      least.
    slower: GB/s of the link to host memory over those of another tier's, by tier. Its bytes count as so many
        more.
    """
    tables = [s.table for s in shards]
    lookups = batch * np.array(
        [t.lookups_per_sample * access_share(s) for t, s in zip(tables, shards, strict=True)]
    )
    width = np.array([s.width for s in shards], dtype=float)
    state = OPTIMIZERS[optimizer]
    link = [link_bytes_of_shard(s, batch, optimizer) * (slower or {}).get(s.table.tier, 1.0) for s in shards]
    link = np.array(link).reshape(-1, 2)
    below = np.array([t.in_host_memory for t in tables], dtype=bool)
    has_cache = np.array([t.load_factor > 0 for t in tables], dtype=bool)
    unique = np.minimum(unique_rows_of_shards(shards, batch), lookups)
    return OpWork(
        lookups=lookups,
        unique=unique,
        evenness=np.log(access_concentration(tables, unique)) / np.log(0.25),
        op_row_bytes=np.full(len(shards), op_row_bytes),
        width=width,
        element_bytes=np.array([PRECISION_BYTES[t.precision] for t in tables], dtype=float),
        outputs=np.array([output_rows(s, batch) for s in shards], dtype=float),
        weighted=np.array([t.weighted for t in tables], dtype=float),
        row_state_bytes=np.full(len(shards), float(state.state_bytes("row"))),
        cell_state_bytes=state.state_bytes("cell") * width,
        resident=(~below | has_cache).astype(float),
        host_read_bytes=np.where(below & ~has_cache, link[:, 0], 0.0),
        host_update_bytes=link[:, 1],
        cache_bytes=np.where(has_cache, link[:, 0], 0.0),
    )


# --- ops ----------------------------------------------------------------------------------------------------


FLOORS: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward_op_us",),
    "backward": ("backward_op_us", "backward_kernels_us"),
    "kernels": ("backward_kernels_us",),
}
"""Rates of the floor of an op, by its pass. `kernels`: backward, timed without launches and sorting."""


def op_floor_ms(rates: Rates, part: str) -> Any:
    """Least ms of an op in one pass, however little work it has."""
    return rates["compute_factor"] * sum(rates[name] for name in FLOORS[part]) * MS_PER_US


def forward_ms(rates: Rates, work: OpWork) -> np.ndarray:
    """[N] forward ms of shards: their lookups, without the op's floor."""
    row_bytes = _round_up_to_granules(rates, work.width * work.element_bytes)
    again = np.maximum(work.lookups - work.unique, 0) * row_bytes * work.resident
    # L2 keeps the rows that are hit most, of all shards of the op.
    held = rates["l2_bytes"] / np.maximum(np.maximum(work.unique * row_bytes, work.op_row_bytes), 1.0)
    in_l2 = np.minimum(1.0, held) ** work.evenness
    once = work.unique * row_bytes * work.resident + again * (1 - in_l2)
    moved = (
        _ms_at_rate(rates, "read_gbps", once)
        + _ms_at_rate(rates, "repeat_gbps", again * in_l2)
        + _ms_at_rate(rates, "stream_gbps", work.outputs * work.width * OUTPUT_BYTES)
    )
    own = _ms_at_rate(rates, "forward_lookup_ns", work.lookups) + _ms_at_rate(
        rates, "weighted_lookup_ns", work.lookups * work.weighted
    )
    return rates["compute_factor"] * (
        _ms_at_rate(rates, "forward_table_us", 1.0)
        + _smooth_max(own, moved)
        + _host_tables_ms(rates, work)
        + _ms_at_rate(rates, "cache_lookup_ns", work.lookups * (work.cache_bytes > 0))
        + _ms_at_rate(rates, "host_read_gbps", work.host_read_bytes)
        + _ms_at_rate(rates, "host_cache_gbps", work.cache_bytes)
    )


def link_ms(rates: Rates, work: OpWork) -> tuple[np.ndarray, np.ndarray]:
    """[N] forward ms of shards on the link to host memory: lookups without a cache, and fetches of caches."""
    return (
        rates["compute_factor"] * _ms_at_rate(rates, "host_read_gbps", work.host_read_bytes),
        rates["compute_factor"] * _ms_at_rate(rates, "host_cache_gbps", work.cache_bytes),
    )


def backward_ms(rates: Rates, work: OpWork, sorts: bool = True) -> np.ndarray:
    """[N] backward ms of shards: gradients and update, without the op's floor.

    sorts: False for kernels timed without their sort.
    """
    row_bytes = _round_up_to_granules(rates, work.width * work.element_bytes)
    state_bytes = work.cell_state_bytes + _round_up_to_granules(rates, work.row_state_bytes)
    # A lookup reads the gradient of its sample, the first one from memory.
    gradient_bytes = work.width * OUTPUT_BYTES
    first = np.minimum(work.outputs, work.lookups)
    again = (work.lookups - first) * gradient_bytes
    updated = work.unique * (2 * row_bytes * work.resident + 2 * state_bytes * (work.host_update_bytes == 0))
    moved = (
        _ms_at_rate(rates, "stream_gbps", first * gradient_bytes)
        + _ms_at_rate(rates, "repeat_gbps", again)
        + _ms_at_rate(rates, "update_gbps", updated)
    )
    own = _ms_at_rate(rates, "backward_lookup_ns", work.lookups) + _ms_at_rate(
        rates, "weighted_lookup_ns", work.lookups * work.weighted
    )
    return rates["compute_factor"] * (
        _ms_at_rate(rates, "backward_table_us", 1.0)
        + _ms_at_rate(rates, "sort_lookup_ns", work.lookups * sorts)
        + _smooth_max(own, moved)
        + _host_tables_ms(rates, work)
        + _ms_at_rate(rates, "cache_lookup_ns", work.lookups * (work.cache_bytes > 0))
        + _ms_at_rate(rates, "host_update_gbps", work.host_update_bytes)
    )


def _host_tables_ms(rates: Rates, work: OpWork) -> np.ndarray:
    """[N] constant ms of shards with rows in host memory; 0 for other shards."""
    return _ms_at_rate(rates, "host_table_us", (work.cache_bytes + work.host_read_bytes > 0).astype(float))


def distinct_row_bytes(tables: Sequence[Table], batch: int) -> float:
    """Bytes of the distinct rows of tables that a batch touches."""
    unique = unique_rows_of_shards([Shard.whole(t) for t in tables], batch)
    return float(
        sum(n * t.dim * PRECISION_BYTES[t.precision] for n, t in zip(unique.tolist(), tables, strict=True))
    )


def _round_up_to_granules(rates: Rates, n_bytes: np.ndarray) -> np.ndarray:
    """Bytes rounded up to whole granules, the unit in which memory is read."""
    return np.ceil(n_bytes / rates["granule_bytes"]) * rates["granule_bytes"]


def _smooth_max(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Smooth maximum of two times in ms."""
    return (one**_SHARPNESS + other**_SHARPNESS) ** (1 / _SHARPNESS)


def _ms_at_rate(rates: Rates, name: str, count: np.ndarray | float) -> np.ndarray:
    """ms that a number of bytes, lookups or ops takes at a named rate of a profile."""
    if name.endswith("_gbps"):
        return np.asarray(count / (rates[name] * BYTES_PER_MS_PER_GBPS))
    return np.asarray(count * rates[name] * (MS_PER_US if name.endswith("_us") else MS_PER_NS))


# --- collectives --------------------------------------------------------------------------------------------


def collective_terms(
    rates: Rates, collective: str, domains: np.ndarray, exchanges: int = 1, topology: Topology | None = None
) -> tuple[np.ndarray, CollectiveTerms]:
    """[K, n] numbers of the domains (hosts, pods) of n devices, and terms of a collective among these devices.

    collective: a name of profile.PROFILED_COLLECTIVES.
    domains: [K, n] of each device, by level of links.
    exchanges: calls, one after another, of which all but the last are small.
    topology: gives links in place of the profile's.
    """
    n, ring = domains.shape[1], collective != "all_to_all"
    links = [topology.link(name) if topology else Link(name) for name in LEVELS]
    latency_ms = topology.outermost_link(domains).latency_ms if topology else None
    known = [bool(link.gbps) or link.level in (NEAR, FAR) for link in links]
    hosts, domains = len(np.unique(domains[0])), merge_unknown_levels(domains, known)
    used = joining_levels(domains)
    level = FAR if any(used[1:]) else NEAR
    if latency_ms is None:
        rounds = _rounds_between_hosts(collective, n, hosts)
        once_us = rates[f"{collective}_{level}_latency_us"] + rounds * rates[f"{collective}_round_us"]
    else:
        once_us = latency_ms / MS_PER_US
    # Protocols for large messages cost more once. Between hosts that grows with the root of the number of devices.
    # Rings pay it in each round, for a device's part of the bytes. All-reduces may go through trees instead.
    in_rounds = level == FAR and ring and collective != "all_reduce"
    size = n / _RAMP_DEVICES if in_rounds else 1.0
    more = (n - 1) / (_RAMP_DEVICES - 1) if in_rounds else (n / _RAMP_DEVICES) ** 0.5 if level == FAR else 1.0
    factor = rates["exchange_factor"]
    shares = _ring_shares(rates, collective, domains, links) if ring else [1.0] * len(LEVELS)
    levels = [dict[str, Any]() for _ in LEVELS]
    for of_level, link, share, is_used in zip(levels, links, shares, used, strict=True):
        if is_used:
            gbps = link.gbps or rates[f"{collective}_{link.level}_gbps"]
            count = "uplink" if link.shared else "busiest"
            of_level[count] = factor * share / (gbps * BYTES_PER_MS_PER_GBPS)
    return domains, CollectiveTerms(
        once_ms=factor * exchanges * once_us * MS_PER_US,
        levels=levels,
        ramp_ms=factor * more * rates[f"{collective}_{level}_ramp_us"] * MS_PER_US,
        ramp_bytes=size * rates[f"{collective}_{level}_ramp_bytes"],
        sharpness=_SHARPNESS,
    )


def _ring_shares(rates: Rates, collective: str, domains: np.ndarray, links: Sequence[Link]) -> list[Any]:
    """[K] bytes that a collective sends on links of each level, relative to those that a ring of all devices sends."""
    n, passes = domains.shape[1], 2 if collective == "all_reduce" else 1
    each = n / len(np.unique(domains[0]))
    moved = passes * (1 - 1 / n)
    # Switches that sum take all of a device's bytes once, and give its part of the sum to all. A ring
    # takes them twice, but for its own part.
    sums = (collective == "all_reduce" and each > 1) & np.greater_equal(rates["switch_generation"], _SUMS)
    shares = [np.where(sums, 1 + 1 / each, moved) / moved]
    for inner, link in zip(domains, links[1:], strict=False):
        # Then hosts exchange sums, else a ring passes all devices. Rails: what leaves a host spreads over
        # the links of its devices.
        n_inner = len(np.unique(inner))
        n_links = 1 if link.shared else n / n_inner
        shares.append(passes * (1 - 1 / np.where(sums, n_inner, n)) / n_links / moved)
    return shares


def collective_ms(rates: Rates, collective: str, sent_bytes: np.ndarray, domains: np.ndarray) -> np.ndarray:
    """[..., 1] ms of a collective among n devices, the same for all, as none ends before the last sender.

    sent_bytes: [..., n] as in lower.Workload.traffic. domains: [K, n]. collective: as in `collective_terms`.
    """
    domains, terms = collective_terms(rates, collective, domains)
    ring, busiest = collective != "all_to_all", sent_bytes.max(-1, keepdims=True)
    owned = busiest * (2 if collective == "all_reduce" else 1) if ring else sent_bytes
    return transfer_ms(terms, link_byte_counts(ring, owned, domains, False), busiest)


def _rounds_between_hosts(collective: str, n: int, hosts: int) -> float:
    """Rounds of a collective over links between hosts, beyond the rounds of two devices.

    An all-to-all sends to each device of other hosts. A ring passes all devices. All-reduces of small
    messages go up and down a tree of hosts.
    """
    if hosts < 2:
        return 0.0
    if collective == "all_to_all":
        return n - n / hosts
    return float(np.log2(hosts)) if collective == "all_reduce" else n - 1.0
