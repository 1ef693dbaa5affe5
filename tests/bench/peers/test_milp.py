"""The mixed-integer arm: optimal where costs add up, a plan whatever its limits."""

from itertools import product

import numpy as np
import pytest

from bench.peers.milp import GROUP, MilpConfig, milp
from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget

BATCH, MIB = 96, 2**20
ADDITIVE = AnalyticModel(
    Setting("made-up", BATCH),
    launch_us=0,
    table_us=0,
    lookup_ns=1000,
    gather_gbps=1e9,
    update_gbps=1e9,
    exchange_latency_ms=0,
    exchange_gbps=1e9,
)
UNCUT = MilpConfig(shares=(float("inf"),))


def problem_of(poolings, speeds, dim=4, **fields) -> Problem:
    tables = tuple(Table(f"t{i}", 100, dim, p, Zipf(0)) for i, p in enumerate(poolings))
    return Problem("p", tables, Topology(tuple(Device(8 * MIB, s) for s in speeds)), BATCH, **fields)


@pytest.mark.parametrize(
    "poolings, speeds",
    [
        ((3, 3, 2, 2, 2), (1, 1)),  # by falling cost to the idlest: 7, not 6
        ((7, 6, 5, 5, 4, 3, 3), (1, 1, 1)),
        ((9, 5, 4, 4, 4, 2), (1, 2)),
    ],
)
def test_where_costs_add_up_it_is_optimal(poolings, speeds):
    plan = milp(problem_of(poolings, speeds), ADDITIVE, config=UNCUT)
    load = np.zeros(len(speeds))
    for p in plan.placements:
        load[p.devices[0]] += p.shard.table.pooling
    least = min(
        max(
            sum(p for p, d in zip(poolings, where, strict=True) if d == device) / speed
            for device, speed in enumerate(speeds)
        )
        for where in product(range(len(speeds)), repeat=len(poolings))
    )
    assert (load / speeds).max() == pytest.approx(least)


def test_what_is_exchanged_counts():
    """Nothing is looked up: widths of 3 + 3 and 2 + 2 + 2 are what makes exchanges equal."""
    tables = tuple(Table(f"t{i}", 100, 4 * k, 0.0) for i, k in enumerate((3, 3, 2, 2, 2)))
    problem = Problem("p", tables, Topology((Device(MIB),) * 2), BATCH)
    model = AnalyticModel(
        Setting("made-up", BATCH), launch_us=0, table_us=0, exchange_latency_ms=0, exchange_gbps=1
    )
    widths = [0, 0]
    for p in milp(problem, model, config=UNCUT).placements:
        widths[p.devices[0]] += p.shard.width
    assert widths == [24, 24]


def test_constraints_hold_at_the_optimum():
    constraints = Constraints(pinned=(("t2", (1,)),), together=(("t0", "t1"),))
    plan = milp(problem_of((3, 3, 2, 2, 2), (1, 1), constraints=constraints), ADDITIVE, config=UNCUT)
    where = {p.shard.table.name: p.devices[0] for p in plan.placements}
    assert where["t0"] == where["t1"] == 0 and where["t2"] == where["t3"] == where["t4"] == 1


def test_the_costliest_are_halved():
    problem = problem_of((50, 1, 1, 1), (1, 1), dim=64)
    model = AnalyticModel(Setting("made-up", BATCH), lookup_ns=0, gather_gbps=0.1)
    cut = [p for p in milp(problem, model).placements if p.shard.table.name == "t0"]
    assert [p.shard.width for p in cut] == [32, 32]


@pytest.mark.parametrize("budget", [Budget(seconds=1e-9), Budget(evals=1)])
def test_a_plan_comes_within_any_budget(budget):
    problem = problem_of(range(1, 30), (1, 1, 2))
    plan = milp(problem, ADDITIVE, budget=budget)
    assert plan.provenance["predicted_ms"] <= 1.1 * milp(problem, ADDITIVE).provenance["predicted_ms"]


def test_many_devices_are_solved_in_groups():
    rng = np.random.default_rng(0)
    problem = problem_of(rng.uniform(1, 9, 3 * GROUP), (1.0,) * (GROUP + 4))
    assert problem.global_batch % len(problem.topology) == 0
    plan = milp(problem, ADDITIVE, config=UNCUT)
    assert (
        plan.provenance["predicted_ms"]
        <= SHARDERS["lookup_greedy"](problem, ADDITIVE).provenance["predicted_ms"] + 1e-9
    )


@pytest.mark.parametrize(
    "fields",
    [{"surrogates": ()}, {"surrogates": ("guess",)}, {"shares": (0.0,)}, {"nodes": 0}, {"gap": -1.0}],
)
def test_a_config_that_makes_no_sense_is_refused(fields):
    with pytest.raises(ShardCoreError, match="needs"):
        MilpConfig(**fields)
