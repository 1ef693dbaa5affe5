"""The communication model: linear in what a device sends and receives and in the busiest device's load, for any number of
devices; and its fit to measured exchanges.

Shapes: D devices, E exchange terms, S samples; ... any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardcore.cost.metrics import mape
from shardcore.cost.rates import fit_law
from shardcore.types import OUTPUT_BYTES, CommSample, Topology

EXCHANGE_TERMS = ("once", "peers", "sent_bytes", "received_bytes", "busiest_bytes")
"""What the time of an exchange is linear in: once = 1; peers = D - 1; the device's own bytes out and in; the largest of those of
any device (ranks that share a host's memory, or have to take turns, are done late together)."""
BYTES_PER_MS_PER_GBPS = 1e6


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


# --- fit ---------------------------------------------------------------------------------------------------------------


def fit(train_side: Sequence[CommSample], validation: Sequence[CommSample],
        note: Callable[[str, int, dict[str, float]], None]) -> dict[str, np.ndarray]:
    """The rates of exchange_ms, each way."""
    rates: dict[str, np.ndarray] = {f"exchange_{way}": np.zeros(len(EXCHANGE_TERMS)) for way in ("forward", "backward")}
    for way in ("forward", "backward") if train_side else ():
        (terms, measured), (unseen_terms, unseen) = observed(train_side, way), observed(validation, way)
        rates[f"exchange_{way}"] = law = fit_law(terms, measured)
        fitted = terms @ law
        note(f"{way}_comm", 0, {"train_loss": float(np.abs(np.log(np.maximum(fitted, 1e-9) / measured)).mean()),
                                "validation_mape": mape(unseen_terms @ law, unseen)})
    return rates


def priced(samples: Sequence[CommSample]) -> list[CommSample]:
    """The exchanges that the model has terms for: all-to-alls in FP32 on one host. What was over before the last rank's start
    has no transfer time to compare with."""
    return [s for s in samples if (s.request.collective, s.request.payload, s.request.hosts) == ("all_to_all", "fp32", 1)
            and (s.error or min(x.median_ms for x in (*s.forward, *s.backward)) > 0)]


def observed(samples: Sequence[CommSample], way: str) -> tuple[np.ndarray, np.ndarray]:
    """Terms [sum of D, E] and measured transfer ms [sum of D] of all samples' ranks."""
    terms = [exchange_terms(owned_bytes(s), way == "backward") for s in samples]
    return np.concatenate(terms), np.array([x.median_ms for s in samples for x in getattr(s, way)])


def owned_bytes(sample: CommSample) -> np.ndarray:
    return np.array(sample.request.widths, dtype=float) * sample.request.batch * OUTPUT_BYTES
