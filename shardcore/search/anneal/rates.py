"""Costs of exchanges in the compiled search: linear in bytes, fitted to the model.

Shapes: N probes, D devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from shardcore.core.progress import ticking
from shardcore.core.topology import Topology
from shardcore.core.types import Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.step.access import output_bytes
from shardcore.step.id_bytes import received_bytes
from shardcore.step.kinds import CHANNELS, Layout
from shardcore.step.lower import traffic_of_outputs

_TERMS = ("own", "busiest", "host_busiest", "total", "once")
"""Terms of an exchange in arrays.SearchProblem."""
_WORK = ("busiest", "total", "once")
"""Terms of the work that devices have with ids: "work_busiest" and so on."""
_TRACE = 1e-9
"""Rates below this share of the largest are 0."""
_PROBES = 64
"""Divisions of the columns that rates are fitted to."""


def rates_of(problem: Problem, model: CostModel, runs: Sequence[Layout]) -> np.ndarray:
    """[X, 8] rates of the exchanges of runs: the field of arrays.SearchProblem."""
    return np.array(
        [list(rates(problem, model, run).values()) for rates in (exchange_rates, id_rates) for run in runs]
    )


def exchange_rates(problem: Problem, model: CostModel, layout: Layout) -> dict[str, float]:
    """ms per byte of outputs of a kind, for both exchanges of a step.

    Keys are own, busiest, host_busiest, total and once (see arrays.SearchProblem), and those of work, all 0.
    They are fitted to the model's costs of some divisions of the outputs, by least squares, none below 0.
    """
    topology, n = problem.topology, len(problem.topology)
    if n == 1:
        return _NOTHING
    if layout.dense_gradient:
        # An all-reduce is linear in its bytes: two points give its rate and its fixed cost.
        low, high = spread_ms(problem, model, layout, np.array([2.0**22, 2.0**24])).max(1)
        rate = max(0.0, high - low) / (2.0**24 - 2.0**22)
        return {**_NOTHING, "total": rate / n, "once": max(0.0, low - rate * 2.0**22)}
    # Loads around an even division: the rates are for the plans that a search ends with.
    of_layout = layout.collection, layout.sequence
    tables = [t for t in ticking(problem.tables) if (t.collection, t.sequence) == of_layout]
    outputs = _probes(sum(output_bytes(Shard.whole(t), problem.global_batch) for t in tables) / n, n)
    # Devices of a group share the same tables, so they send equally much. A single group keeps its uneven probes.
    for group in layout.groups(topology) if len(layout.groups(topology)) > 1 else ():
        outputs[:, group] = outputs[:, group[:1]]
    cost = model.comm(traffic_of_outputs({layout: outputs}, problem), np.zeros(outputs.shape), topology)
    # A step waits for backward on each device, and for the longest forward.
    rates = _fitted(outputs, cost.backward_ms + cost.forward_ms.max(1, keepdims=True), topology, _TERMS)
    if layout.groups(topology) == (tuple(range(n)),):
        # All devices have the same bytes. Each is the busiest, and has an n-th of the total.
        each = rates["own"] + rates["busiest"] + rates["host_busiest"] * max(map(len, topology.on_hosts))
        rates = {"total": rates["total"] + each / n, "once": rates["once"]}
    return {**_NOTHING, **rates}


def id_rates(problem: Problem, model: CostModel, layout: Layout) -> dict[str, float]:
    """ms per byte of ids that devices receive, with the keys of `exchange_rates`. 0 for kinds without ids.

    `own` is 0: the longest transfer counts.
    """
    n = len(problem.topology)
    if n == 1 or not layout.ids:
        return _NOTHING
    # At least a byte, as a fit to loads of 0 gives no rates.
    n_bytes = sum(received_bytes(Shard.whole(t), problem) for t in ticking(problem.tables))
    id_bytes = _probes(max(n_bytes, 1.0) / n, n)
    traffic = np.zeros((len(CHANNELS), *id_bytes.shape))
    traffic[CHANNELS.index(layout.ids)] = id_bytes
    cost = model.comm(traffic, np.zeros(id_bytes.shape), problem.topology)
    # All devices wait for the last, so the largest ms is the cost on each.
    longest, work = (
        np.broadcast_to(ms.max(1, keepdims=True), id_bytes.shape)
        for ms in (cost.input_ms, cost.input_work_ms)
    )
    of_work = _fitted(id_bytes, work, problem.topology, _WORK)
    return {
        **_NOTHING,
        **_fitted(id_bytes, longest, problem.topology, _TERMS[1:]),
        **{f"work_{name}": rate for name, rate in of_work.items()},
    }


_NOTHING = dict.fromkeys((*_TERMS, *(f"work_{name}" for name in _WORK)), 0.0)


def _probes(mean: float, n: int) -> np.ndarray:
    """[N, D] loads of devices, from nearly even to uneven, around a mean."""
    # Always the same probes, so that equal problems get equal rates.
    rng = np.random.default_rng(0)
    spread = rng.uniform(0.01, 0.5, (_PROBES, 1))
    # Log-normal, so never below 0. The first factor varies the total, which tells a fixed cost from a rate.
    return mean * np.exp(rng.normal(0, 0.3, (_PROBES, 1)) + rng.normal(0, 1, (_PROBES, n)) * spread)


def _fitted(loads: np.ndarray, ms: np.ndarray, topology: Topology, names: Sequence[str]) -> dict[str, float]:
    """Rates of these terms by least squares, none below 0. loads, ms: [N, D]."""
    from scipy.optimize import nnls

    # Devices host by host, and where those of each host begin. A matrix of devices by hosts would fill memory.
    begins = np.cumsum([0, *map(len, topology.on_hosts)])[:-1]
    of_hosts = np.add.reduceat(loads[:, topology.ranks], begins, axis=1)
    # With one host its load is the total: two equal columns would leave their rates open.
    busiest_host = of_hosts.max(1, keepdims=True) * (len(begins) > 1)
    largest, total = loads.max(1, keepdims=True), loads.sum(1, keepdims=True)
    arrays = np.broadcast_arrays(loads, largest, busiest_host, total, 1.0)  # as _TERMS
    terms = np.stack([arrays[_TERMS.index(name)] for name in names], -1).reshape(-1, len(names))
    # Scale columns to 1, so that the least squares are well conditioned.
    scale = np.maximum(terms.max(0), 1e-300)
    # No rate below 0: it would reward a search for bytes.
    # SciPy only says which rates are above 0, as the last bits of what it finds depend on the processor.
    found = nnls(terms / scale, ms.ravel())[0]
    above = found > _TRACE * found.max()
    found[above] = _least_squares((terms / scale).T[above], ms.ravel())
    return dict(zip(names, map(float, np.maximum(found * above, 0.0) / scale), strict=True))


def _least_squares(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[K] rates of independent terms [K, N] nearest to values [N], by Gram and Schmidt's method."""
    left = [*terms, values]
    upper = np.zeros((len(terms), len(left)))
    for i, j in combinations(range(len(left)), 2):
        upper[i, j] = (left[i] * left[j]).sum() / (left[i] * left[i]).sum()
        left[j] = left[j] - upper[i, j] * left[i]
    rates = np.zeros(len(terms))
    for i in reversed(range(len(terms))):
        rates[i] = upper[i, -1] - (upper[i, :-1] * rates).sum()
    return rates


def spread_ms(problem: Problem, model: CostModel, layout: Layout, n_bytes: np.ndarray) -> np.ndarray:
    """[N, D] ms of exchanging gradients of bytes [N], in a kind that is on all devices."""
    # [C, N, D], the same bytes on each device.
    traffic = np.zeros((len(CHANNELS), len(n_bytes), len(problem.topology)))
    for channel, entering in layout.channels_in(problem.job, problem.topology).items():
        traffic[CHANNELS.index(channel)] += entering(n_bytes, 0, problem)[:, None]
    return np.asarray(model.comm(traffic, np.zeros(traffic.shape[1:]), problem.topology).backward_ms)
