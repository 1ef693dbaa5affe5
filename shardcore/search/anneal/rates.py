"""What exchanges cost in the compiled search: linear in widths, fitted to the model.

Shapes: N probes, D devices.
"""

from __future__ import annotations

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.layouts import CHANNELS, Layout
from shardcore.types import MIN_WIDTH, Problem
from shardcore.workload import traffic_of_widths

_PROBES = 64
"""Divisions of the columns that rates are fitted to."""


def exchange_rates(problem: Problem, model: CostModel, layout: Layout) -> dict[str, float]:
    """ms per unit of width of a kind, for both exchanges of a step.

    Keys are own, busiest, host_busiest, total and once (see records.SearchProblem).
    They are fitted to the model's costs of some divisions of the columns, by least squares, none below 0.
    """
    from scipy.optimize import nnls

    topology, n = problem.topology, len(problem.topology)
    names = ("own", "busiest", "host_busiest", "total", "once")
    if n == 1:
        return dict.fromkeys(names, 0.0)
    rng = np.random.default_rng(0)
    mean = sum(t.dim for t in problem.tables) / MIN_WIDTH / n
    # Probes range from nearly even to uneven divisions, around the problem's own mean.
    spread = rng.uniform(0.01, 0.5, (_PROBES, 1))
    width = mean * np.exp(rng.normal(0, 0.3, (_PROBES, 1)) + rng.normal(0, 1, (_PROBES, n)) * spread)
    for group in layout.groups(topology) if len(layout.groups(topology)) > 1 else ():  # all alike
        width[:, group] = width[:, group[:1]]
    number = {h: i for i, h in enumerate(topology.hosts)}
    on_host = np.eye(len(number))[[number[d.host] for d in topology.devices]]
    busiest_host = (width @ on_host).max(1, keepdims=True) if len(number) > 1 else np.zeros((_PROBES, 1))
    terms = np.stack(np.broadcast_arrays(width, width.max(1, keepdims=True), busiest_host,
                                         width.sum(1, keepdims=True), 1.0), -1)
    terms = terms.reshape(-1, len(names))
    # Scale columns to 1, so that the least squares are well conditioned.
    scale = np.maximum(terms.max(0), 1e-300)
    cost = model.comm(traffic_of_widths({layout: MIN_WIDTH * width}, problem),
                      np.zeros(width.shape), topology)
    # A step waits for backward on each device, and for the longest forward.
    ms = cost.backward_ms + cost.forward_ms.max(1, keepdims=True)
    return dict(zip(names, map(float, nnls(terms / scale, ms.ravel())[0] / scale), strict=True))


def shared_rates(problem: Problem, model: CostModel, layout: Layout, size: int) -> dict[str, float]:
    """ms of a layout's exchanges for what its groups of `size` devices share.

    Keys are those of records.SearchProblem, without "shared_".
    """
    n = len(problem.topology)
    if layout.dense_gradient:
        # An all-reduce is linear in its cells: two points give its rate and its fixed cost.
        low, high = spread_ms(problem, model, layout, np.array([2.0**20, 2.0**22])).max(1)
        rate = max(0.0, high - low) / (2.0**22 - 2.0**20)
        return {"total": rate, "once": max(0.0, low - rate * 2.0**20)}
    of = exchange_rates(problem, model, layout)
    most = max(map(len, problem.topology.on_hosts))
    if size == n:
        return {"total": of["own"] + of["busiest"] + of["host_busiest"] * most + of["total"] * n,
                "once": of["once"]}
    return {"own": of["own"], "busiest": of["busiest"] + of["host_busiest"] * size,
            "total": of["total"] * size, "once": of["once"]}


def spread_ms(problem: Problem, model: CostModel, layout: Layout, cells: np.ndarray) -> np.ndarray:
    """[N, D] ms of exchanging gradients of cells [N], in a kind that is on all devices."""
    traffic = np.zeros((len(CHANNELS), len(cells), len(problem.topology)))
    for channel, entering in layout.channels.items():
        traffic[CHANNELS.index(channel)] += entering(cells, 1, problem)[:, None]
    return np.asarray(model.comm(traffic, np.zeros(traffic.shape[1:]), problem.topology).backward_ms)
