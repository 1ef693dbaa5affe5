"""Rates of exchanges in the compiled search: lines in bytes, which the terms of a model give.

Shapes: D devices, X exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.core.progress import iterate_with_progress
from shardcore.core.types import Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.step.access import output_bytes
from shardcore.step.exchange_lines import linear_exchange_costs, linear_work_cost
from shardcore.step.exchanges import cached_channel_terms
from shardcore.step.id_bytes import received_id_bytes
from shardcore.step.kinds import Channel, ShardingKind
from shardcore.step.scopes import WORLD

_DENSE_BYTES = 2.0**23
"""Bytes of gradients of replicas, around which their exchange is a line."""


def exchange_cost_rates(
    problem: Problem, model: CostModel, sharding_kinds: Sequence[ShardingKind]
) -> np.ndarray:
    """[X, 8] ms per byte of the exchanges of runs, for arrays.SearchProblem: of outputs first, then of ids."""
    rates = np.zeros((2 * len(sharding_kinds), 8))
    for i, run in enumerate(sharding_kinds if len(problem.topology) > 1 else ()):
        rates[i, :5] = output_exchange_rates(problem, model, run)
        if run.ids:
            rates[len(sharding_kinds) + i] = id_exchange_rates(problem, model, run.ids)
    return rates


def output_exchange_rates(problem: Problem, model: CostModel, sharding_kind: ShardingKind) -> np.ndarray:
    """[5] ms per byte of outputs, for both exchanges of a step of a sharding kind: own, busiest, host_busiest, total,
    once.

    A step waits for backward on each device, and for the longest forward.
    """
    topology, line = problem.topology, np.zeros(5)
    of_kind = sharding_kind.collection, sharding_kind.sequence
    tables = [t for t in iterate_with_progress(problem.tables) if (t.collection, t.sequence) == of_kind]
    # Around an even division: the rates are for the plans that a search ends with.
    mean = sum(output_bytes(Shard.whole(t), problem.global_batch) for t in tables) / len(topology)
    if sharding_kind.dense_gradient:
        mean = _DENSE_BYTES
    entering = sharding_kind.channels_in_job(problem.job, topology).items()
    channels = {channel: bytes_of(1.0, 1.0, problem) for channel, bytes_of in entering}
    for channel, direction, of_direction in linear_exchange_costs(model, channels, topology, mean, mean):
        line += _kind_cost_line(of_direction, channel, direction, sharding_kind, problem)
    if sharding_kind.device_groups(topology) == (topology.ranks,):
        # All devices have the same bytes: the mean.
        line = np.array([0.0, 0.0, 0.0, line[:-1].sum(), line[-1]])
    return _rates_from_line(line, problem)


def id_exchange_rates(problem: Problem, model: CostModel, channel: Channel) -> np.ndarray:
    """[8] ms per byte of received ids: five as in `output_exchange_rates`, then of work: busiest, total, once.

    All devices wait for the last, so the largest ms is the cost on each.
    """
    n_bytes = sum(received_id_bytes(Shard.whole(t), problem) for t in iterate_with_progress(problem.tables))
    mean = n_bytes / len(problem.topology)
    [(_, _, line)] = linear_exchange_costs(model, {channel: 1.0}, problem.topology, mean, mean)
    work = linear_work_cost(cached_channel_terms(model, channel, problem.topology).work)
    of_all, of_work = (_rates_from_line(_busiest_device_line(x), problem) for x in (line, work))
    return np.concatenate([of_all, of_work[[1, 3, 4]]])


def _kind_cost_line(
    line: np.ndarray, channel: Channel, direction: str, sharding_kind: ShardingKind, problem: Problem
) -> np.ndarray:
    """[5] cost line of an exchange channel under a sharding kind: per byte of a device, of the busiest device, and so
    on.
    """
    own, busiest, host, mean, once = line.tolist()
    shared, across = len(sharding_kind.device_groups(problem.topology)[0]) > 1, channel.scope.across
    if shared and channel.group != WORLD:
        # Devices of a domain have equally many bytes, each as many as their mean.
        busiest, host = busiest + host, 0.0
        if not across:
            own, busiest, mean = own + busiest + mean, 0.0, 0.0
    elif across:
        # Towers divide what crosses domains evenly over the devices of one.
        own, busiest, host = 0.0, 0.0, own + busiest + host
    elif channel.group != WORLD:
        # The mean of a group is that of its domain.
        host, mean = host + mean, 0.0
    line = np.array([own, busiest, host, mean, once])
    return _busiest_device_line(line) if direction == "forward" else line


def _busiest_device_line(line: np.ndarray) -> np.ndarray:
    """[5] coefficients of a cost that is linear in bytes, each device charged with the bytes of the busiest one."""
    own, busiest, *rest = line.tolist()
    return np.array([0.0, own + busiest, *rest])


def _rates_from_line(line: np.ndarray, problem: Problem) -> np.ndarray:
    """[5] rates from a line of exchange_lines.LINE: per byte of a whole host, and of all devices, instead of their
    means.
    """
    own, busiest, host, mean, once = line.tolist()
    n, n_hosts = len(problem.topology), len(problem.topology.hosts)
    if n_hosts == 1:
        host, mean = 0.0, mean + host
    if n_hosts == n:
        busiest, host = busiest + host, 0.0
    # No constant below 0: it would reward a search for exchanges.
    return np.array([own, busiest, host * n_hosts / n, mean / n, max(0.0, once)])
