"""The formulas of the trained models. Arrays come in a mapping `w` of weights: numpy's to predict, torch's to train (`xp` is the
module that they belong to), so that each formula stands here once.

Compute: a physical baseline per shard, times a learned correction, plus one launch an op.

    encode(shard) = [1, forward ms, backward ms],  ms = rates · drivers × exp(CORRECTION tanh(network(conditions)))
    op            = launch × min(count, 1) + sum over its shards

Rates, launch and exponentials are positive, so a shard more never costs less. Conditions are clipped to the range that was
measured: beyond it the drivers go on growing, and the correction stays that of the nearest shard known. That a fused op costs
less than its shards one by one is the launch that they share: with launch = 1.4 mean shards it is 1.4, 1.9, 2.1, 2.2 times less
for 2, 5, 10, 15 shards, and NeuroShard saw 1.3, 1.8, 2.1, 2.2 on GPUs.

Communication: linear in what a device sends and receives and in the busiest device's load, for any number of devices.

Shapes: N shards, K drivers, C conditions, G groups, D devices, E exchange terms; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from shardcore.types import Topology

CORRECTION = 1.5
"""Corrections lie between exp(-1.5) and exp(1.5): a factor of 4.5."""

EXCHANGE_TERMS = ("once", "peers", "sent_bytes", "received_bytes", "busiest_bytes")
"""What the time of an exchange is linear in: once = 1; peers = D - 1; the device's own bytes out and in; the largest of those of
any device (ranks that share a host's memory, or have to take turns, are done late together)."""
BYTES_PER_MS_PER_GBPS = 1e6


# --- compute -----------------------------------------------------------------------------------------------------------


def encode(w: Mapping[str, Any], drivers: Any, conditions: Any, xp: ModuleType = np) -> Any:
    """[N, 3] encodings of shards, all at least 0: count, forward ms, backward ms."""
    x = (xp.clip(conditions, w["condition_low"], w["condition_high"]) - w["condition_mean"]) / w["condition_sd"]
    layers = sum(name.startswith("network.") for name in w) // 2
    for i in range(layers):
        x = xp.tanh(x @ w[f"network.{i}.weight"] + w[f"network.{i}.bias"])
    costs = drivers @ w["rates"] * xp.exp(CORRECTION * x)
    return xp.concatenate([drivers[:, :1], costs], 1)  # the first driver counts shards


def parts(w: Mapping[str, Any], sums: Any, xp: ModuleType = np) -> Any:
    """[..., 2] forward and backward ms of groups from their summed encodings [..., 3]; 0 where the count is 0."""
    return w["launch"] * xp.clip(sums[..., :1], 0.0, 1.0) + sums[..., 1:]


# --- communication -----------------------------------------------------------------------------------------------------


def exchange_terms(owned_bytes: np.ndarray, backward: bool = False) -> np.ndarray:
    """[..., D, E] terms of an all-to-all in which each device owns owned_bytes [..., D] of the global batch's pooled outputs:
    forward it sends the others their samples, backward it receives their gradients."""
    owned = np.asarray(owned_bytes, dtype=float)
    n_devices = owned.shape[-1]
    out, into = owned * (n_devices - 1) / n_devices, (owned.sum(-1, keepdims=True) - owned) / n_devices
    sent, received = (into, out) if backward else (out, into)
    busiest = np.broadcast_to(np.maximum(out, into).max(-1, keepdims=True), owned.shape)
    return np.stack([np.ones_like(owned), np.full_like(owned, n_devices - 1), sent, received, busiest], -1)


def exchange_ms(w: Mapping[str, np.ndarray], owned_bytes: np.ndarray, topology: Topology | None, backward: bool) -> np.ndarray:
    """[..., D] ms of an all-to-all (see exchange_terms); 0 where no device owns anything, or there is but one.

    Bandwidths and a latency that the topology gives replace the fitted ones: bytes then go over the links within and between
    hosts at once, and the slower of the two decides.
    """
    rates = w["exchange_backward" if backward else "exchange_forward"]
    terms = exchange_terms(owned_bytes, backward)
    n_devices = terms.shape[-2]
    latency, transfer = terms[..., :2] @ rates[:2], terms[..., 2:] @ rates[2:]
    if topology is not None and topology.latency_ms is not None:
        latency = np.full_like(transfer, topology.latency_ms)
    if topology is not None and (topology.within_host_gbps or topology.between_hosts_gbps):
        transfer = _over_links(np.asarray(owned_bytes, dtype=float), topology, rates)
    runs = (np.asarray(owned_bytes).sum(-1, keepdims=True) > 0) & (n_devices > 1)
    return np.where(runs, latency + transfer, 0.0)


def _over_links(owned: np.ndarray, topology: Topology, rates: np.ndarray) -> np.ndarray:
    within, between = link_ms_per_byte(topology, rates)
    same_host = _same_host(topology)
    other_host = ~same_host & ~np.eye(len(topology), dtype=bool)
    part = owned / len(topology)  # what a device exchanges with each other one

    def busier_direction(peers: np.ndarray) -> np.ndarray:
        return np.maximum(part * peers.sum(1), part @ peers.T)

    return np.maximum(busier_direction(same_host) * within, busier_direction(other_host) * between)


def ring_ms(w: Mapping[str, np.ndarray], owned_bytes: np.ndarray, topology: Topology) -> np.ndarray:
    """[..., D] ms of an all-reduce of owned_bytes [..., D] on each device: 2 (D - 1) / D of them, round a ring, over its slowest
    link (Patarasuk and Yuan 2009). Nobody measures it yet: latency and bandwidth are those of the backward all-to-all."""
    owned, n_devices = np.asarray(owned_bytes, dtype=float), len(topology)
    rates = w["exchange_backward"]
    within, between = link_ms_per_byte(topology, rates)
    slowest = max(within, between) if len(topology.hosts) > 1 else within
    latency = rates[0] + rates[1] * (n_devices - 1) if topology.latency_ms is None else topology.latency_ms
    runs = (owned > 0) & (n_devices > 1)
    return np.where(runs, latency + 2 * (n_devices - 1) / n_devices * owned * slowest, 0.0)


def link_ms_per_byte(topology: Topology, rates: np.ndarray) -> tuple[float, float]:
    """Of links within a host and between hosts: the topology's bandwidth or, where it gives none, what was fitted for devices
    that all send and receive alike."""
    fitted = float(rates[2:].sum())
    within, between = ((1 / (gbps * BYTES_PER_MS_PER_GBPS) if gbps else fitted)
                       for gbps in (topology.within_host_gbps, topology.between_hosts_gbps))
    return within, between


def _same_host(topology: Topology) -> np.ndarray:
    """[D, D]: pairs of different devices on one host."""
    hosts = np.array([d.host for d in topology.devices])
    return (hosts[:, None] == hosts) & ~np.eye(len(hosts), dtype=bool)
