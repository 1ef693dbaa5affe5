"""The communication model: one law for any number of devices, each collective and way with rates of its own; and its fit to
measured exchanges.

A transfer takes a latency, linear in LATENCY_TERMS, and then as long as the slower kind of link: bytes go over those within hosts
and those between hosts at once, and each takes a time that is linear in its terms. All rates are 0 or more, so more bytes never
take less. The terms of a device come from its own bytes, sums and maxima over devices, and who shares a host: exchanging two
devices of a host, or two hosts, exchanges their times.

The explicit link model is the same law with bandwidths and a latency that a topology gives instead of fitted rates
(explicit_links), for links that nobody could measure.

Where replays tell how many times as long as alone a collective takes in a step (steps.py), prices have that factor on what was
measured; accuracy is that of the law alone.

Only FP32 payloads are priced: a Workload carries no payload precision, so exchanges measured in BF16 are left out.

Shapes: D devices, E exchange terms, S samples; ... any leading dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardcore.cost.metrics import mape
from shardcore.cost.rates import fit_law
from shardcore.types import OUTPUT_BYTES, CommSample, Topology

LATENCY_TERMS = ("once", "messages", "far_rounds", "skew_ms")
"""once = 1; messages that a device sends; rounds that wait for a link between hosts, one of an all-to-all, whose messages go all
at once; by how much the first starts before the last, SKEW_LIMIT_MS at most (who waited long takes up its work late)."""
NEAR_TERMS = ("near_bytes", "near_busiest_bytes")
"""Over links within hosts: a device's own bytes, out and in; and the most that any device has in one direction."""
FAR_TERMS = ("far_bytes", "far_busiest_bytes", "port_busiest_bytes", "uplink_bytes")
"""Over links between hosts: the same; the most that any device has over links of both kinds in one direction, which may share its
port; and the most that any host has, as its devices may share its uplink. All 0 on one host."""
EXCHANGE_TERMS = (*LATENCY_TERMS, *NEAR_TERMS, *FAR_TERMS)
LATENCY, NEAR, FAR = slice(0, 4), slice(4, 6), slice(6, 10)

WAYS = {"all_to_all": ("forward", "backward"), "reduce_scatter": ("forward", "backward"), "all_reduce": ("backward",)}
"""What runs of a collective; backward of a reduce-scatter is an all-gather."""
SKEW_LIMIT_MS = 10.0
FEWEST_SAMPLES = 4
"""Of a collective with fewer nothing is fitted."""
BYTES_PER_MS_PER_GBPS = 1e6
LEAST_IN_STEP, MOST_IN_STEP = 1e-3, 1e3
"""A collective takes in a step so many times as long as alone. Beyond these, replays told nothing of it."""

# --- terms -------------------------------------------------------------------------------------------------------------

Terms = Sequence[np.ndarray | float]
"""One of each of EXCHANGE_TERMS, in a shape that broadcasts to [..., D]."""


def exchange_terms(collective: str, owned_bytes: np.ndarray, hosts: np.ndarray, skew_ms: np.ndarray | float = 0.0) -> Terms:
    """Terms of a collective in which each device has owned_bytes [..., D] as in workload.Traffic.

    hosts [D]: the number of each device's host. skew_ms [...]: between the first and the last start.
    """
    owned = np.asarray(owned_bytes, dtype=float)
    skew = np.minimum(np.asarray(skew_ms, dtype=float), SKEW_LIMIT_MS)[..., None]
    if collective == "all_to_all":
        far_rounds, *of_links = _all_to_all(owned, hosts)
    else:  # all give as much to a reduce-scatter as the one with most, padded; an all-reduce is one and an all-gather
        far_rounds, *of_links = _ring(2 * owned if collective == "all_reduce" else owned.max(-1, keepdims=True), hosts)
    return [1.0, len(hosts) - 1.0, far_rounds, skew, *of_links]


def _all_to_all(owned: np.ndarray, hosts: np.ndarray) -> Terms:
    """far_rounds and the link terms of an all-to-all. Each device sends every other owned / D or, the other way, receives as
    much from each: the terms are the same."""
    n_devices, total = len(hosts), owned.sum(-1, keepdims=True)
    if not np.ptp(hosts):
        out, into = owned * (n_devices - 1) / n_devices, (total - owned) / n_devices
        return [0.0, out + into, _busiest(out, into), 0.0, 0.0, 0.0, 0.0]
    _, number, sizes = np.unique(hosts, return_inverse=True, return_counts=True)
    order = np.argsort(number, kind="stable")  # devices by their hosts: a matrix of both could have 2^32 cells
    on_host = np.add.reduceat(owned[..., order], np.cumsum(sizes) - sizes, axis=-1)
    size, of_host = sizes[number], on_host[..., number]
    near_out, near_in = owned * (size - 1) / n_devices, (of_host - owned) / n_devices
    far_out, far_in = owned * (n_devices - size) / n_devices, (total - of_host) / n_devices
    leaves, enters = on_host * (n_devices - sizes) / n_devices, (total - on_host) * sizes / n_devices
    return [1.0, near_out + near_in, _busiest(near_out, near_in), far_out + far_in, _busiest(far_out, far_in),
            _busiest(near_out + far_out, near_in + far_in), _busiest(leaves, enters)]


def _busiest(out: np.ndarray, into: np.ndarray) -> np.ndarray:
    return np.maximum(out.max(-1, keepdims=True), into.max(-1, keepdims=True))


def _ring(owned: np.ndarray, hosts: np.ndarray) -> Terms:
    """far_rounds and the link terms of a ring (Patarasuk and Yuan 2009): (D - 1) / D of the bytes leave and enter every device,
    and every host, in D - 1 rounds, each as slow as its slowest link."""
    n_devices, several = len(hosts), float(np.ptp(hosts) > 0)
    moved = owned * (n_devices - 1) / n_devices
    far = several * moved
    return [several * (n_devices - 1), 2 * moved, moved, 2 * far, far, far, far]


# --- prices ------------------------------------------------------------------------------------------------------------


def transfer_ms(terms: Terms, rates: np.ndarray) -> np.ndarray:
    """[..., D] ms from terms and rates [E]."""
    latency, near, far = (sum((r * t for r, t in zip(rates[part], terms[part], strict=True) if r), np.zeros(()))
                          for part in (LATENCY, NEAR, FAR))
    return latency + np.maximum(near, far)


def collective_ms(w: Mapping[str, np.ndarray], collective: str, owned_bytes: np.ndarray, topology: Topology,
                  skew_ms: np.ndarray | float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """[..., D] ms forward and backward of a collective (see exchange_terms; the skew is that of the forward exchange, and no rate
    of a backward one has it); 0 where it does not run: no device owns anything, or there is but one."""
    owned, n_devices = np.asarray(owned_bytes, dtype=float), len(topology)
    forward, backward = np.zeros_like(owned), np.zeros_like(owned)
    if n_devices == 1 or not owned.any():
        return forward, backward
    rates = {way: explicit_links(in_step(w, collective, way) * rates_of(w, collective, way), topology)
             for way in WAYS[collective]}
    terms = exchange_terms(collective, owned, _counted_hosts(topology, np.stack(list(rates.values()))), skew_ms)
    runs = owned > 0 if collective == "all_reduce" else np.broadcast_to((owned > 0).any(-1, keepdims=True), owned.shape)
    backward = np.where(runs, transfer_ms(terms, rates["backward"]), 0.0)
    if "forward" in rates:
        forward = np.where(runs, transfer_ms(terms, rates["forward"]), 0.0)
    return forward, backward


def weight(collective: str, way: str) -> str:
    """The name of its rates among a model's weights, where it was measured."""
    return f"exchange_{collective}_{way}"


def rates_of(w: Mapping[str, np.ndarray], collective: str, way: str) -> np.ndarray:
    """[E] rates: the collective's own or, where it was not measured, those of the all-to-all; 0 where that was not either."""
    return w.get(weight(collective, way), w.get(weight("all_to_all", way), np.zeros(len(EXCHANGE_TERMS))))


def step_weight(collective: str, way: str) -> str:
    """The name of how many times as long as alone it takes in a step, among a model's weights, where steps.py found that."""
    return f"exchange_in_step_{collective}_{way}"


def in_step(w: Mapping[str, np.ndarray], collective: str, way: str) -> float:
    """Its factor or, where it ran in too few steps, the all-to-all's; 1 where that did too."""
    found = w.get(step_weight(collective, way), w.get(step_weight("all_to_all", way)))
    return 1.0 if found is None else float(found[0])


def is_measured(w: Mapping[str, np.ndarray], collective: str) -> bool:
    return all(weight(collective, way) in w for way in WAYS[collective])


def measured_links(w: Mapping[str, np.ndarray], collective: str) -> set[str]:
    """Of "within" and "between" (hosts): the links that the rates of a collective know."""
    rates = np.stack([rates_of(w, collective, way) for way in WAYS[collective]])
    return {name for name, part in (("within", NEAR), ("between", FAR)) if rates[:, part].any()}


def explicit_links(rates: np.ndarray, topology: Topology) -> np.ndarray:
    """The explicit link model: rates [E] in which the latency and the bandwidths per device that the topology gives, within hosts
    and between hosts, replace what was fitted. The busiest device's bytes decide."""
    rates = rates.copy()
    if topology.latency_ms is not None:
        rates[LATENCY] = (topology.latency_ms, 0, 0, 0)
    if topology.within_host_gbps:
        rates[NEAR] = (0, 1 / (topology.within_host_gbps * BYTES_PER_MS_PER_GBPS))
    if topology.between_hosts_gbps:
        rates[FAR] = (0, 1 / (topology.between_hosts_gbps * BYTES_PER_MS_PER_GBPS), 0, 0)
    return rates


def _counted_hosts(topology: Topology, rates: np.ndarray) -> np.ndarray:
    """[D] hosts as numbers. Where rates [..., E] only know links within hosts, all devices count as on one; where they only know
    those between hosts, each counts as one."""
    if not rates[..., FAR].any():
        return np.zeros(len(topology), dtype=int)
    if not rates[..., NEAR].any():
        return np.arange(len(topology))
    number = {host: k for k, host in enumerate(topology.hosts)}
    return np.array([number[d.host] for d in topology.devices])


def hosts_alike(topology: Topology) -> bool:
    """Whether all hosts have the same number of devices."""
    return len(set(Counter(d.host for d in topology.devices).values())) == 1


def even_is_least(w: Mapping[str, np.ndarray], topology: Topology) -> bool:
    """Whether no division of a collective's bytes over devices takes less than the even one, forward for the last device and
    backward for the devices' mean by speed: the law is convex, and where hosts are alike, exchanging devices leaves it as it is.
    Backward, a device's own bytes may count, but then all devices have to be alike."""
    alike = len(topology.hosts) == 1 and len({d.speed for d in topology.devices}) == 1
    return hosts_alike(topology) and (alike or not own_bytes_count(w, topology))


def own_bytes_count(w: Mapping[str, np.ndarray], topology: Topology) -> bool:
    """Whether a backward exchange takes a device longer for its own bytes, beside those of the busiest."""
    return any(explicit_links(rates_of(w, c, "backward"), topology)[[NEAR.start, FAR.start]].any() for c in WAYS)


# --- fit ---------------------------------------------------------------------------------------------------------------


def fit(train_side: Sequence[CommSample], validation: Sequence[CommSample],
        note: Callable[[str, int, dict[str, float]], None]) -> dict[str, np.ndarray]:
    """Rates [E] of each collective that was measured, each way, named as `weight` does."""
    rates = {}
    for collective, ways in WAYS.items():
        known, unseen = ([s for s in side if s.request.collective == collective] for side in (train_side, validation))
        for way in ways if len(known) >= FEWEST_SAMPLES else ():
            (terms, measured), (unseen_terms, unseen_measured) = observed(known, way), observed(unseen or known, way)
            rates[weight(collective, way)] = law = _fit_rates(terms, measured)
            log_error = np.log(np.maximum(transfer_ms(terms, law), 1e-9) / measured)
            note(f"{way}_comm" if collective == "all_to_all" else f"{collective}_{way}", 0,
                 {"train_loss": float(np.abs(log_error).mean()),
                  "validation_mape": mape(transfer_ms(unseen_terms, law), unseen_measured)})
    return rates


def _fit_rates(terms: np.ndarray, measured: np.ndarray, rounds: int = 8) -> np.ndarray:
    """[E] rates of transfer_ms from terms [E, S]: which links are the slower is assumed, the linear law is fitted, and so on
    until it agrees."""
    far_decides = terms[FAR].any(0)
    for _ in range(rounds):
        decisive = terms.copy()
        decisive[NEAR, far_decides], decisive[FAR, ~far_decides] = 0, 0
        rates = _fit_shared(decisive, measured)
        before, far_decides = far_decides, rates[FAR] @ terms[FAR] > rates[NEAR] @ terms[NEAR]
        if (before == far_decides).all():
            break
    return rates


def _fit_shared(terms: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """fit_law; terms that are always equal share their rate evenly."""
    different, which, times = np.unique(terms, axis=0, return_inverse=True, return_counts=True)
    return (fit_law(different.T, measured) / times)[which.ravel()]


def priced(samples: Sequence[CommSample]) -> list[CommSample]:
    """The exchanges that the model prices: those in FP32. What was over before the last rank's start has no transfer time to
    compare with."""
    return [s for s in samples if s.request.payload == "fp32"
            and (s.error or min(x.median_ms for way in WAYS[s.request.collective] for x in getattr(s, way)) > 0)]


def observed(samples: Sequence[CommSample], way: str) -> tuple[np.ndarray, np.ndarray]:
    """Terms [E, sum of D] and measured transfer ms [sum of D] of all samples' ranks."""
    terms = [_sample_terms(s, way) for s in samples]
    return np.concatenate(terms, axis=1), np.array([x.median_ms for s in samples for x in getattr(s, way)])


def _sample_terms(sample: CommSample, way: str) -> np.ndarray:
    """[E, D]"""
    r = sample.request
    hosts = np.arange(len(r.widths)) // (len(r.widths) // r.hosts)
    first = way == WAYS[r.collective][0]  # only the first exchange is entered at start_ms
    terms = exchange_terms(r.collective, owned_bytes(sample), hosts, max(r.start_ms) - min(r.start_ms) if first else 0.0)
    return np.stack([np.broadcast_to(t, len(hosts)) for t in terms])


def owned_bytes(sample: CommSample) -> np.ndarray:
    return np.array(sample.request.widths, dtype=float) * sample.request.batch * OUTPUT_BYTES


# --- accuracy ----------------------------------------------------------------------------------------------------------


def predicted(w: Mapping[str, np.ndarray], samples: Sequence[CommSample], way: str) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and measured transfer ms [sum of D] of all samples' ranks; the samples are of one collective."""
    terms, measured = observed(samples, way)
    return transfer_ms(terms, rates_of(w, samples[0].request.collective, way)), measured


def errors(w: Mapping[str, np.ndarray], samples: Sequence[CommSample]) -> dict[str, float]:
    """Mean absolute error in percent of one rank's transfer: flat metrics, "<way>_comm_mape" of all-to-alls and
    "<collective>_<way>_mape" of the others; those of a kind without samples are left out."""
    found = {}
    for collective, ways in WAYS.items():
        of_kind = [s for s in samples if s.request.collective == collective]
        for way in ways if of_kind else ():
            name = f"{way}_comm_mape" if collective == "all_to_all" else f"{collective}_{way}_mape"
            found[name] = mape(*predicted(w, of_kind, way))
    return found
