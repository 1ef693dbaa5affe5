"""price and group_costs: what a model says of a Workload."""

import dataclasses

import numpy as np
import pytest
from laws import pool
from shapes import replica

from shardcore.cost import nets
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import group_costs, price
from shardcore.topology import Device, Topology
from shardcore.types import Placement, Plan, Problem, Setting, Shard
from shardcore.workload import lower

SETTING = Setting("law", 256)
TABLES = tuple(pool()[:6])


def problem(*speeds: float) -> Problem:
    """TABLES on a device of each speed."""
    return Problem("p", TABLES, Topology(tuple(Device(1 << 30, s) for s in speeds)), 256)


def spread_plan(n: int) -> Plan:
    return Plan(tuple(Placement("column", Shard.whole(t), (i % n,)) for i, t in enumerate(TABLES)))


@pytest.fixture(params=["analytic", "trained"])
def any_model(request):
    return AnalyticModel(SETTING) if request.param == "analytic" else request.getfixturevalue("model")


def test_group_costs_of_empty_groups(any_model):
    shards = [Shard.whole(t) for t in TABLES]
    costs = group_costs([[], shards, [], shards[:1]], any_model)
    assert costs[[0, 2]].tolist() == [0, 0] and costs[1] > costs[3] > 0
    assert group_costs([[], []], any_model).tolist() == [0, 0]
    assert group_costs([], any_model).shape == (0,)
    assert group_costs([shards], any_model, 64) == pytest.approx(
        any_model.head(any_model.encode(shards, 64).sum(0))
    )


def test_compute_is_that_of_the_groups(any_model):
    task = problem(1, 1)
    cost = price(lower(spread_plan(2), task), any_model)
    groups = [[Shard.whole(t) for t in TABLES[d::2]] for d in range(2)]
    assert cost.compute_ms == pytest.approx(group_costs(groups, any_model))
    assert cost.total_ms == pytest.approx(max(cost.device_ms))


def test_trained_model_tells_forward_from_backward(model):
    cost = price(lower(spread_plan(2), problem(1, 1)), model)
    for device in range(2):
        sums = model.encode([Shard.whole(t) for t in TABLES[device::2]]).sum(0)
        parts = (cost.forward_compute_ms[device], cost.backward_compute_ms[device])
        assert parts == pytest.approx(nets.parts(model.weights, sums))


def test_a_device_twice_as_fast_computes_in_half_the_time(any_model):
    even, uneven = (price(lower(spread_plan(2), problem(1, s)), any_model) for s in (1, 2))
    assert uneven.compute_ms[0] == pytest.approx(even.compute_ms[0])
    assert uneven.compute_ms[1] == pytest.approx(even.compute_ms[1] / 2)


def test_an_idle_device_waits_and_still_exchanges(any_model):
    plan = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in TABLES))
    cost = price(lower(plan, problem(1, 1)), any_model)
    assert cost.compute_ms[1] == 0 and cost.waiting_ms[1] > 0 and cost.forward_comm_ms[1] > 0
    assert cost.waiting_ms[0] == 0


def test_one_device_neither_waits_nor_exchanges(any_model):
    cost = price(lower(spread_plan(1), problem(1)), any_model)
    assert cost.total_ms == pytest.approx(cost.compute_ms[0])
    assert sum(cost.forward_comm_ms + cost.backward_comm_ms + cost.waiting_ms) == 0


def test_replicas_run_at_the_local_batch(any_model):
    one = dataclasses.replace(problem(1, 1), tables=TABLES[:1])
    shard = Shard.whole(TABLES[0])
    cost = price(lower(Plan((replica(TABLES[0], one.topology),)), one), any_model)
    local = any_model.head(any_model.encode([shard], 128).sum(0, keepdims=True))[0]
    assert cost.compute_ms == pytest.approx((local, local))
    assert cost.forward_comm_ms == (0, 0) and min(cost.backward_comm_ms) > 0
    assert np.isfinite(cost.total_ms)
