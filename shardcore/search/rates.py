"""What peers with formulas of their own have to know of the hardware: the rates of lookups and of links, as the model has them.

The published planners take bandwidths from a data sheet. Ours come from the model that all sharders are compared under, so that a
peer is not judged on a machine that it does not know; and with the model they follow the topology's links.

Shapes: D devices.
"""

from __future__ import annotations

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.layouts import WHOLE_ROWS
from shardcore.search.greedy import looked_up
from shardcore.types import OUTPUT_BYTES, Problem, Shard
from shardcore.workload import traffic_of_widths

_COLUMNS = 256


def lookup_ms(problem: Problem, model: CostModel) -> float:
    """ms for one element of each sample of the global batch, forward and backward at speed 1: all tables as one op; 0 where
    nothing is looked up."""
    shards = [Shard.whole(t) for t in problem.tables]
    elements = sum(map(looked_up, shards))
    return float(model.head(model.encode(shards).sum(0, keepdims=True))[0]) / elements if elements else 0.0


def exchange_ms(problem: Problem, model: CostModel) -> float:
    """ms that one more column on one device adds to its exchanges, forward and backward, where each has the same number."""
    n = len(problem.topology)
    columns = np.full((2, n), float(_COLUMNS))
    columns[1, 0] *= 2
    traffic = traffic_of_widths({WHOLE_ROWS: columns}, problem)
    before, after = model.comm(traffic, np.zeros((2, n)), problem.topology).total_ms[:, 0]
    return float(after - before) / _COLUMNS


def column_bytes(problem: Problem) -> float:
    """Bytes that one column of pooled outputs and its gradients put on a device's links."""
    n = len(problem.topology)
    return 2 * problem.global_batch * OUTPUT_BYTES * (n - 1) / n
