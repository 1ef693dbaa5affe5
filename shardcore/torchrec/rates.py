"""Rates of lookups and links, for planners with their own cost formulas.

Published planners take bandwidths from a data sheet.
Here they come from the model under which all sharders are compared, so that no peer is misinformed.
The model's rates also follow the topology's links.

Shapes: D devices.
"""

from __future__ import annotations

import numpy as np

from shardcore.core.types import OUTPUT_BYTES, Problem, Shard
from shardcore.cost.model import CostModel
from shardcore.search.greedy import looked_up
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.lower import traffic_of_outputs

_COLUMNS = 256


def lookup_ms(problem: Problem, model: CostModel) -> float:
    """ms to look up one element for each sample of the global batch. 0 where nothing is looked up.

    Forward + backward at speed 1, with all tables as one op.
    """
    # One op with all tables: launches of single ops would hide the rate.
    shards = [Shard.whole(t) for t in problem.tables]
    elements = sum(map(looked_up, shards))
    return float(model.head(model.encode(shards).sum(0, keepdims=True))[0]) / elements if elements else 0.0


def exchange_ms(problem: Problem, model: CostModel) -> float:
    """ms that one more column on one device adds to its exchanges, forward + backward.

    All devices start with the same number of columns.
    """
    n = len(problem.topology)
    # Two points: an even plan, and the same with twice the columns on device 0.
    columns = np.full((2, n), float(_COLUMNS))
    columns[1, 0] *= 2
    traffic = traffic_of_outputs({WHOLE_ROWS: columns * problem.global_batch * OUTPUT_BYTES}, problem)
    before, after = model.comm(traffic, np.zeros((2, n)), problem.topology).total_ms[:, 0]
    # The difference leaves out latencies, which both plans have.
    return float(after - before) / _COLUMNS


def column_bytes(problem: Problem) -> float:
    """Bytes that one column's pooled outputs and gradients put on a device's links."""
    n = len(problem.topology)
    # A device keeps its own share of the batch: (n - 1) / n leave.
    return 2 * problem.global_batch * OUTPUT_BYTES * (n - 1) / n
