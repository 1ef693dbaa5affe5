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

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardcore.cost.metrics import mape
from shardcore.cost.nnls import fit_law
from shardcore.layouts import CHANNELS, CROSS, HOST, WORLD, Channel
from shardcore.measurements import CommSample
from shardcore.topology import Topology
from shardcore.types import OUTPUT_BYTES

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
ALL_TO_ALL = Channel("all_to_all")
"""Whose rates stand for those of a channel that was not measured."""
SKEW_LIMIT_MS = 10.0
FEWEST_SAMPLES = 4
"""Of a collective with fewer nothing is fitted."""
BYTES_PER_MS_PER_GBPS = 1e6
LEAST_IN_STEP, MOST_IN_STEP = 1e-3, 1e3
"""A collective takes in a step so many times as long as alone. Beyond these, replays told nothing of it."""

# --- terms -------------------------------------------------------------------------------------------------------------

Terms = Sequence[np.ndarray | float]
"""One of each of EXCHANGE_TERMS, in a shape that broadcasts to [..., D]."""


def exchange_terms(channel: Channel, owned_bytes: np.ndarray, hosts: np.ndarray,
                   skew_ms: np.ndarray | float = 0.0) -> Terms:
    """Terms of a collective in groups of n devices, which have owned_bytes [..., n] as in workload.Workload.traffic.

    hosts [n]: the number of each device's host. skew_ms [...]: between the first and the last start. Of CROSS groups, which share
    their hosts' links, the axis before the last is that of the groups.
    """
    owned = np.asarray(owned_bytes, dtype=float)
    skew = np.minimum(np.asarray(skew_ms, dtype=float), SKEW_LIMIT_MS)[..., None]
    if channel.collective == "all_to_all":
        far_rounds, *of_links = _all_to_all(owned, hosts, channel.group == CROSS)
    else:  # all give as much to a reduce-scatter as the one with most, padded; an all-reduce is one and an all-gather
        twice = channel.collective == "all_reduce"
        far_rounds, *of_links = _ring(2 * owned if twice else owned.max(-1, keepdims=True), hosts)
    return [1.0, len(hosts) - 1.0, far_rounds, skew, *of_links]


def _all_to_all(owned: np.ndarray, hosts: np.ndarray, shares_links: bool) -> Terms:
    """far_rounds and the link terms of an all-to-all. Each device sends every other owned / n or, the other way, receives as
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
    if shares_links:
        leaves, enters = leaves.sum(-2, keepdims=True), enters.sum(-2, keepdims=True)
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


def collective_ms(w: Mapping[str, np.ndarray], channel: Channel, owned_bytes: np.ndarray, topology: Topology,
                  skew_ms: np.ndarray | float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """[..., D] ms forward and backward of a channel.

    skew_ms: of the forward exchange, and no rate of a backward one has it. 0 in groups where it does not run: no device owns
    anything, or there is only one.
    """
    owned = np.asarray(owned_bytes, dtype=float)
    forward, backward = np.zeros_like(owned), np.zeros_like(owned)
    members, hosts = groups_of(channel, topology)
    if members.shape[1] < 2 or not owned.any():
        return forward, backward
    rates = {way: explicit_links(in_step(w, channel, way) * rates_of(w, channel, way), topology)
             for way in WAYS[channel.collective]}
    grouped = owned[..., members]
    skew = np.asarray(skew_ms, dtype=float)[..., None]
    terms = exchange_terms(channel, grouped, _counted(hosts, np.stack(list(rates.values()))), skew)
    all_run = np.broadcast_to((grouped > 0).any(-1, keepdims=True), grouped.shape)
    runs = grouped > 0 if channel.collective == "all_reduce" else all_run
    backward[..., members] = np.where(runs, transfer_ms(terms, rates["backward"]), 0.0)
    if "forward" in rates:
        forward[..., members] = np.where(runs, transfer_ms(terms, rates["forward"]), 0.0)
    return forward, backward


def groups_of(channel: Channel, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """[G, n] the devices of each group of a channel, and [n] numbers of their hosts. Groups within and across hosts need hosts of
    one size; elsewhere there are none."""
    if channel.group == WORLD:
        number = {host: k for k, host in enumerate(topology.hosts)}
        return np.arange(len(topology))[None], np.array([number[d.host] for d in topology.devices])
    if not topology.equal_hosts:
        return np.zeros((0, 0), dtype=int), np.zeros(0, dtype=int)
    on_hosts = np.array(topology.on_hosts)
    if channel.group == HOST:
        return on_hosts, np.zeros(on_hosts.shape[1], dtype=int)
    return on_hosts.T, np.arange(on_hosts.shape[0])


def _name(channel: Channel) -> str:
    return channel.collective if channel.group == WORLD else f"{channel.collective}_{channel.group}"


def weight(channel: Channel, way: str) -> str:
    """The name of its rates among a model's weights, where it was measured."""
    return f"exchange_{_name(channel)}_{way}"


def _found(w: Mapping[str, np.ndarray], name: Callable[[Channel, str], str], channel: Channel, way: str) -> np.ndarray | None:
    """A channel's own or, where it has none, those of its collective among all devices, or of the all-to-all."""
    tried = (channel, Channel(channel.collective), ALL_TO_ALL)
    return next((w[name(c, way)] for c in tried if name(c, way) in w), None)


def rates_of(w: Mapping[str, np.ndarray], channel: Channel, way: str) -> np.ndarray:
    """[E] rates: the channel's own, or another's (see _found); 0 where no all-to-all was measured either."""
    found = _found(w, weight, channel, way)
    return np.zeros(len(EXCHANGE_TERMS)) if found is None else found


def step_weight(channel: Channel, way: str) -> str:
    """The name of how many times as long as alone it takes in a step, among a model's weights, where steps.py found that."""
    return f"exchange_in_step_{_name(channel)}_{way}"


def in_step(w: Mapping[str, np.ndarray], channel: Channel, way: str) -> float:
    """Its factor, or another's (see _found) where it ran in too few steps; 1 where no all-to-all ran in enough."""
    found = _found(w, step_weight, channel, way)
    return 1.0 if found is None else float(found[0])


def stands_for(w: Mapping[str, np.ndarray], channel: Channel) -> str:
    """The channel whose rates a channel has that was not measured, in words."""
    own = Channel(channel.collective)
    return f"the {(own if is_measured(w, own) else ALL_TO_ALL).words}"


def is_measured(w: Mapping[str, np.ndarray], channel: Channel) -> bool:
    return all(weight(channel, way) in w for way in WAYS[channel.collective])


def measured_links(w: Mapping[str, np.ndarray], channel: Channel) -> set[str]:
    """Of "within" and "between" (hosts): the links that the rates of a channel know."""
    rates = np.stack([rates_of(w, channel, way) for way in WAYS[channel.collective]])
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


def _counted(hosts: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """[n] hosts as numbers. Where rates [..., E] only know links within hosts, all devices count as on one; where they only know
    those between hosts, each counts as one."""
    if not rates[..., FAR].any():
        return np.zeros_like(hosts)
    return hosts if rates[..., NEAR].any() else np.arange(len(hosts))


def even_is_least(w: Mapping[str, np.ndarray], topology: Topology) -> bool:
    """Whether no division of a collective's bytes over devices takes less than the even one, forward for the last device and
    backward for the devices' mean by speed: the law is convex, and where hosts are alike, exchanging devices leaves it as it is.
    Backward, a device's own bytes may count, but then all devices have to be alike."""
    alike = len(topology.hosts) == 1 and len({d.speed for d in topology.devices}) == 1
    return topology.equal_hosts and (alike or not own_bytes_count(w, topology))


def own_bytes_count(w: Mapping[str, np.ndarray], topology: Topology) -> bool:
    """Whether a backward exchange takes a device longer for its own bytes, beside those of the busiest."""
    return any(explicit_links(rates_of(w, c, "backward"), topology)[[NEAR.start, FAR.start]].any() for c in CHANNELS)


# --- fit ---------------------------------------------------------------------------------------------------------------


def fit(train_side: Sequence[CommSample], validation: Sequence[CommSample],
        note: Callable[[str, int, dict[str, float]], None]) -> dict[str, np.ndarray]:
    """Rates [E] of each collective that was measured, each way, named as `weight` does."""
    rates = {}
    for collective, ways in WAYS.items():
        known, unseen = ([s for s in side if s.request.collective == collective] for side in (train_side, validation))
        for way in ways if len(known) >= FEWEST_SAMPLES else ():
            (terms, measured), (unseen_terms, unseen_measured) = observed(known, way), observed(unseen or known, way)
            rates[weight(Channel(collective), way)] = law = _fit_rates(terms, measured)
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
    terms = exchange_terms(Channel(r.collective), owned_bytes(sample), hosts, max(r.start_ms) - min(r.start_ms) if first else 0.0)
    return np.stack([np.broadcast_to(t, len(hosts)) for t in terms])


def owned_bytes(sample: CommSample) -> np.ndarray:
    return np.array(sample.request.widths, dtype=float) * sample.request.batch * OUTPUT_BYTES


# --- accuracy ----------------------------------------------------------------------------------------------------------


def predicted(w: Mapping[str, np.ndarray], samples: Sequence[CommSample], way: str) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and measured transfer ms [sum of D] of all samples' ranks; the samples are of one collective."""
    terms, measured = observed(samples, way)
    return transfer_ms(terms, rates_of(w, Channel(samples[0].request.collective), way)), measured


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
