"""Rates of exchanges in the compiled search: lines in bytes, which the terms of a model give.

Shapes: D devices, X exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.core.progress import ticking
from shardcore.core.types import Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.step.access import output_bytes
from shardcore.step.exchange_lines import exchange_lines, work_line
from shardcore.step.exchanges import terms_of
from shardcore.step.id_bytes import received_bytes
from shardcore.step.kinds import Channel, Layout
from shardcore.step.scopes import WORLD

_DENSE_BYTES = 2.0**23
"""Bytes of gradients of replicas, around which their exchange is a line."""


def rates_of(problem: Problem, model: CostModel, runs: Sequence[Layout]) -> np.ndarray:
    """[X, 8] rates of the exchanges of runs: the field of arrays.SearchProblem. Of outputs, then of ids."""
    rates = np.zeros((2 * len(runs), 8))
    for i, run in enumerate(runs if len(problem.topology) > 1 else ()):
        rates[i, :5] = output_rates(problem, model, run)
        if run.ids:
            rates[len(runs) + i] = id_rates(problem, model, run.ids)
    return rates


def output_rates(problem: Problem, model: CostModel, layout: Layout) -> np.ndarray:
    """[5] ms of a kind for a byte of outputs, for both exchanges of a step: own, busiest, host_busiest, total, once.

    A step waits for backward on each device, and for the longest forward.
    """
    topology, line = problem.topology, np.zeros(5)
    of_layout = layout.collection, layout.sequence
    tables = [t for t in ticking(problem.tables) if (t.collection, t.sequence) == of_layout]
    # Around an even division: the rates are for the plans that a search ends with.
    mean = sum(output_bytes(Shard.whole(t), problem.global_batch) for t in tables) / len(topology)
    if layout.dense_gradient:
        mean = _DENSE_BYTES
    entering = layout.channels_in(problem.job, topology).items()
    channels = {channel: bytes_of(1.0, 1.0, problem) for channel, bytes_of in entering}
    for channel, way, of_way in exchange_lines(model, channels, topology, mean, mean):
        line += _of_step(of_way, channel, way, layout, problem)
    if layout.groups(topology) == (topology.ranks,):
        # All devices have the same bytes: the mean.
        line = np.array([0.0, 0.0, 0.0, line[:-1].sum(), line[-1]])
    return _as_rates(line, problem)


def id_rates(problem: Problem, model: CostModel, channel: Channel) -> np.ndarray:
    """[8] ms for a byte of ids that devices receive: as `output_rates`, then of work: busiest, total, once.

    All devices wait for the last, so the largest ms is the cost on each.
    """
    n_bytes = sum(received_bytes(Shard.whole(t), problem) for t in ticking(problem.tables))
    mean = n_bytes / len(problem.topology)
    [(_, _, line)] = exchange_lines(model, {channel: 1.0}, problem.topology, mean, mean)
    work = work_line(terms_of(model, channel, problem.topology).work)
    of_all, of_work = (_as_rates(_of_last(x), problem) for x in (line, work))
    return np.concatenate([of_all, of_work[[1, 3, 4]]])


def _of_step(line: np.ndarray, channel: Channel, way: str, layout: Layout, problem: Problem) -> np.ndarray:
    """[5] a line of a channel in a device's own bytes, those of the busiest one, and so on, of a layout."""
    own, busiest, host, mean, once = line.tolist()
    shared, across = len(layout.groups(problem.topology)[0]) > 1, channel.scope.across
    if shared and channel.group != WORLD:
        # Devices of a unit have equally many bytes, each as many as their mean.
        busiest, host = busiest + host, 0.0
        if not across:
            own, busiest, mean = own + busiest + mean, 0.0, 0.0
    elif across:
        # Towers divide what crosses units evenly over the devices of one.
        own, busiest, host = 0.0, 0.0, own + busiest + host
    elif channel.group != WORLD:
        # The mean of a group is that of its unit.
        host, mean = host + mean, 0.0
    line = np.array([own, busiest, host, mean, once])
    return _of_last(line) if way == "forward" else line


def _of_last(line: np.ndarray) -> np.ndarray:
    """[5] the line of the device that takes longest: that with most bytes."""
    own, busiest, *rest = line.tolist()
    return np.array([0.0, own + busiest, *rest])


def _as_rates(line: np.ndarray, problem: Problem) -> np.ndarray:
    """[5] a line in exchange_lines.LINE as rates: the host's mean device as all of the host, the mean as the total."""
    own, busiest, host, mean, once = line.tolist()
    n, n_hosts = len(problem.topology), len(problem.topology.hosts)
    if n_hosts == 1:
        host, mean = 0.0, mean + host
    if n_hosts == n:
        busiest, host = busiest + host, 0.0
    # No constant below 0: it would reward a search for exchanges.
    return np.array([own, busiest, host * n_hosts / n, mean / n, max(0.0, once)])
