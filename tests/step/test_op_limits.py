"""Limits of one FBGEMM op on CUDA, against FBGEMM itself, and plans that keep to them."""

from dataclasses import replace

import pytest
from shapes import column, on_hosts, replica

from shardcore.core.errors import Infeasible
from shardcore.core.types import Plan, Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.step.lower import lower
from shardcore.step.memory import MOST_IDS, TooManyInOneOp, max_op_features, require_op_limits

SEARCHES = ("size_greedy", "neuroshard", "anneal_columns", "anneal")


@pytest.mark.parametrize("features", [1, 2, 3, 100, 4095, 4096, 5000])
def test_fbgemm_packs_so_many_features_and_samples(features):
    torch = pytest.importorskip("torch")
    pytest.importorskip("fbgemm_gpu")
    batch = 1
    while max_op_features(2 * batch) >= features and 2 * batch < 1 << 31:
        batch *= 2
    packed = torch.ops.fbgemm.get_infos_metadata
    packed(torch.zeros(1), batch, features)
    if 2 * batch < 1 << 31:
        with pytest.raises(RuntimeError, match="Not enough infos bits"):
            packed(torch.zeros(1), 2 * batch, features)


def problem(tables, devices: int, batch: int, hardware: str | None = None) -> Problem:
    return Problem("many", tuple(tables), on_hosts("a" * devices, 1 << 44, hardware=hardware), batch)


def bags(n: int, features: int = 1, pooling: float = 1.0) -> list[Table]:
    return [Table(f"t{i}", 1000, 4 + 12 * (i % 2), pooling, features=features) for i in range(n)]


def plan(of: Problem, name: str) -> Plan:
    return SHARDERS[name](
        of, AnalyticModel(Setting(of.topology.hardware or "x", of.global_batch)), budget=Budget(evals=100)
    )


def test_too_many_features_on_one_device_are_refused_but_on_a_cpu():
    given = problem(bags(20, 100), 1, 1 << 22)
    with pytest.raises(
        Infeasible,
        match="device 0 of problem 'many' would run 2000 features in one op "
        r"\(column\) over 4194304 samples; .* at most 511 features: it needs more devices",
    ):
        plan(given, "size_greedy")
    on_cpu = problem(bags(20, 100), 1, 1 << 22, "cpu-x")
    lower(plan(on_cpu, "size_greedy"), on_cpu)


@pytest.mark.parametrize("name", SEARCHES)
def test_features_are_spread_where_some_devices_would_run_too_many(name):
    """The tables with most features are the smallest, so balancing by size puts them together."""
    most = max_op_features(1 << 20)
    heavy = [Table(f"h{i}", 10, 4, 0.001, features=most // 2) for i in range(8)]
    large = [Table(f"l{i}", 100_000, 64, 40.0) for i in range(3)]
    given = problem([*heavy, *large], 6, 3 << 18)
    found = plan(given, name)
    lower(found, given)


def test_ids_of_an_op_are_counted_by_32_bits():
    one = problem([Table("long", 10**6, 8, 2100.0)], 4, 1 << 20)
    whole = Plan((column(one.tables[0], 0),))
    with pytest.raises(TooManyInOneOp, match=f"2.2e.09 ids in one op .column.; .* at most {MOST_IDS}"):
        require_op_limits(whole, one)
    with pytest.raises(TooManyInOneOp):
        lower(whole, one)
    # A replica runs over a device's own samples.
    require_op_limits(Plan((replica(one.tables[0], one.topology),)), one)
    require_op_limits(whole, replace(one, global_batch=1 << 19))


def test_searches_divide_ids_that_one_device_could_not_count():
    given = problem([Table(f"long{i}", 10**6, 8, 1100.0) for i in range(4)], 4, 1 << 20)
    found = plan(given, "size_greedy")
    lower(found, given)
    alone = [p.devices[0] for p in found.placements if len(p.devices) == 1]
    assert len(set(alone)) == len(alone)
