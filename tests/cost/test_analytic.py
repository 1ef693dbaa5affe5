"""AnalyticModel against hand-worked numbers, and what any CostModel has to be."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import host_row, on_hosts, row, sends

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import group_op_ms, price
from shardcore.step.access import unique_rows
from shardcore.step.lower import lower
from shardcore.tables.generate import PoolConfig, generate_pool

MODEL = AnalyticModel(
    Setting("made-up", 1000),
    launch_us=10,
    table_us=1,
    lookup_ns=100,
    gather_gbps=1,
    update_gbps=0.5,
    exchange_latency_ms=0.25,
    exchange_gbps=2,
)
TABLE = Table("t", 500, 8, 2.0, Zipf(1.0))


def test_compute_adds_up():
    whole = Shard.whole(TABLE)
    # 10 us + 1 us + 2,000 lookups × 100 ns + 64,000 bytes at 1 GB/s + unique rows × 32 bytes at 0.5 GB/s
    expected = 0.010 + 0.001 + 0.2 + 0.064 + unique_rows(whole, 1000) * 32 / 0.5e6
    assert group_op_ms([[whole]], MODEL)[0] == pytest.approx(expected)
    np.testing.assert_allclose(MODEL.encode([whole]), [[1, 2000, 64_000, unique_rows(whole, 1000) * 32]])
    np.testing.assert_allclose(MODEL.encode([whole], 500)[0, :3], [1, 1000, 32_000])


def test_parts_of_a_table_share_its_load():
    left, right = Shard(TABLE, 0, 500, 0, 4), Shard(TABLE, 0, 500, 4, 8)
    upper, lower_ = Shard(TABLE, 0, 100, 0, 8), Shard(TABLE, 100, 500, 0, 8)
    whole, columns, rows = (
        MODEL.encode([Shard.whole(TABLE)])[0],
        MODEL.encode([left, right]),
        MODEL.encode([upper, lower_]),
    )
    np.testing.assert_allclose(columns.sum(0), whole * [2, 2, 1, 1])  # both look up every id
    np.testing.assert_allclose(rows.sum(0), whole * [2, 1, 1, 1])
    assert rows[1, 1] == pytest.approx(4 * rows[0, 1])


def test_nothing_costs_nothing():
    np.testing.assert_array_equal(MODEL.op_ms(np.zeros((3, 4))), 0)
    assert MODEL.encode([]).shape == (0, 4)
    idle = Shard.whole(Table("idle", 5, 4, 0.0))
    # it still takes its part of a launch
    assert group_op_ms([[idle], []], MODEL) == pytest.approx([0.011, 0])


@given(sums=st.lists(st.tuples(*[st.floats(0, 1e9)] * 4), min_size=2, max_size=2))
def test_monotone_and_fusing_never_costs_more(sums):
    a, b = (np.array([np.rint(s[0]), *s[1:]]) for s in sums)
    one, other, both = MODEL.op_ms(np.array([a, b, a + b]))
    assert max(one, other) <= both * (1 + 1e-12) and both <= (one + other) * (1 + 1e-12)


def topology(n: int, **fields) -> Topology:
    return Topology((Device(2**30),) * n, **fields)


def test_transfer_is_latency_and_the_busiest_devices_bytes():
    # Device 0 sends 3 of its 4 MB, which takes 1.5 ms at 2 GB/s; all wait for it.
    cost = MODEL.comm_cost(
        sends(all_to_all=np.array([4e6, 1e6, 0, 0])), np.array([1.0, 3.0, 0.0, 2.0]), topology(4)
    )
    np.testing.assert_allclose(cost.forward_ms, [1.75] * 4)
    np.testing.assert_allclose(cost.backward_ms, [1.75] * 4)
    np.testing.assert_allclose(cost.waiting_ms, [2, 0, 3, 1])


def test_the_topologys_own_links_go_first():
    traffic, compute = sends(all_to_all=np.full(4, 4e6)), np.zeros(4)
    hosts = Topology(
        tuple(Device(2**30, host=h) for h in "aabb"),
        links=make_links(within_host=10, between_hosts=1, latency_ms=0.0),
    )
    # 2 of 4 MB leave the host, 1 GB/s
    np.testing.assert_allclose(MODEL.comm_cost(traffic, compute, hosts).forward_ms, [2.0] * 4)
    one_host = topology(4, links=make_links(within_host=3.0, latency_ms=1.0))
    np.testing.assert_allclose(MODEL.comm_cost(traffic, compute, one_host).forward_ms, [2.0] * 4)


def test_a_link_is_as_busy_as_the_busier_of_its_directions():
    """The device alone on its host sends nothing and receives 1 MB from each of three."""
    hosts = Topology(
        tuple(Device(2**30, host=h) for h in "aaab"),
        links=make_links(within_host=10, between_hosts=1, latency_ms=0.0),
    )
    cost = MODEL.comm_cost(sends(all_to_all=np.array([4e6, 4e6, 4e6, 0.0])), np.zeros(4), hosts)
    np.testing.assert_allclose(cost.forward_ms, [3.0] * 4)
    slow_within = dataclasses.replace(
        hosts, links=make_links(within_host=0.1, between_hosts=0.1, latency_ms=0.0)
    )
    cost = MODEL.comm_cost(sends(all_to_all=np.array([4e6, 0.0, 0.0, 0.0])), np.zeros(4), slow_within)
    np.testing.assert_allclose(cost.forward_ms, [20.0] * 4)  # 2 of 4 MB stay on the host


def test_devices_of_a_host_share_its_link():
    shared = on_hosts("aabb", links=make_links(0.0, shared=True, within_host=10.0, between_hosts=1.0))
    even = MODEL.comm_cost(sends(all_to_all=np.full(4, 4e6)), np.zeros(4), shared)
    np.testing.assert_allclose(even.forward_ms, [4.0] * 4)  # 2 of 4 MB of each device leave the host
    one = MODEL.comm_cost(sends(all_to_all=np.array([4e6, 0, 0, 0])), np.zeros(4), shared)
    np.testing.assert_allclose(one.forward_ms, [2.0] * 4)
    # Exchanges across hosts, one of each device of a host, share its link too.
    problem = Problem("p", (TABLE,), shared, 1000)
    apart = dataclasses.replace(
        problem,
        topology=on_hosts("aabb", links=make_links(within_host=10.0, between_hosts=1.0, latency_ms=0.0)),
    )
    across = [
        price(lower(Plan((host_row(TABLE, (0, 1)),)), p), MODEL).forward_comm_ms[2] for p in (problem, apart)
    ]
    assert across == pytest.approx([2 * 8000 / 1e6, 8000 / 1e6])


def test_each_collective_runs_only_where_it_has_bytes():
    some = np.array([2e6, 2e6])  # 1 MB leaves each device: 0.25 + 0.5 ms
    compute = np.zeros(2)
    rows = MODEL.comm_cost(sends(all_to_all=some, reduce_scatter=some), compute, topology(2))
    np.testing.assert_allclose([rows.forward_ms[0], rows.backward_ms[0]], [1.5, 1.5])
    replicas = MODEL.comm_cost(sends(all_reduce=some), compute, topology(2))
    np.testing.assert_allclose([replicas.forward_ms[0], replicas.backward_ms[0]], [0, 1.5])
    alone = MODEL.comm_cost(sends(all_to_all=np.array([5e6])), np.array([1.0]), topology(1))
    assert alone.total_ms == [0]


def test_rows_over_a_host_and_over_all_devices():
    """8 columns of a batch of 1,000: 32,000 bytes, of which a ring over all four devices moves three quarters
    over each link. Those of host a: a half to the other, then half of the rest to the other host."""
    where = on_hosts("aabb", links=make_links(within_host=10.0, between_hosts=1.0, latency_ms=0.5))
    problem = Problem("p", (TABLE,), where, 1000)
    world, of_host = (
        price(lower(Plan((p,)), problem), MODEL) for p in (row(TABLE, where), host_row(TABLE, (0, 1)))
    )
    assert world.forward_comm_ms == world.backward_comm_ms == pytest.approx([0.5 + 3 * 8000 / 1e6] * 4)
    within, across = 0.5 + 16000 / 10e6, 0.5 + 8000 / 1e6
    assert (
        of_host.forward_comm_ms
        == of_host.backward_comm_ms
        == pytest.approx([within + across] * 2 + [across] * 2)
    )
    halves = lower(Plan((host_row(TABLE, (0, 1), 0, 4), host_row(TABLE, (2, 3), 4, 8))), problem)
    assert price(halves, MODEL).forward_comm_ms == pytest.approx([1 + 8000 / 10e6 + 4000 / 1e6] * 4)


def test_shards_encoded_at_once_are_the_same_shards_one_by_one():
    some = (*generate_pool(PoolConfig(tables=60))[:4], Table("idle", 1000, 16, 0.0), Table("few", 9, 16, 3.0))
    tables = [dataclasses.replace(t, name=f"t{i}", ordered=i % 2 == 1) for i, t in enumerate(some)]
    shards = [
        Shard(t, lo, hi, 0, width)
        for t in tables
        for width in (4, t.dim)
        for lo, hi in ((0, t.rows), (0, 1 + t.rows // 2), (t.rows // 2, t.rows))
    ]
    model = AnalyticModel(Setting("gpu", 4096))
    assert np.array_equal(model.encode(shards), np.concatenate([model.encode([s]) for s in shards]))
    assert model.encode([]).shape == (0, 4)


def test_price_of_a_plan():
    other = Table("o", 100, 4, 1.0)
    problem = Problem("p", (TABLE, other), Topology((Device(2**30), Device(2**30, speed=2.0))), 1000)
    plan = Plan(
        (Placement("column", Shard.whole(TABLE), (0,)), Placement("column", Shard.whole(other), (1,)))
    )
    cost = price(lower(plan, problem), MODEL)
    single = group_op_ms([[Shard.whole(TABLE)], [Shard.whole(other)]], MODEL)
    transfer_ms = 0.25 + 1000 * 8 * 4 / 2 / 2e6
    assert cost.compute_ms == pytest.approx([single[0], single[1] / 2])
    assert cost.waiting_ms == pytest.approx([0, single[0] - single[1] / 2])
    # Device 0 receives most: the ids of TABLE.
    ids_ms = 0.25 + 1000 * (TABLE.pooling * 8 + 4) / 2 / 2e6
    assert cost.input_ms == pytest.approx([ids_ms] * 2)
    assert cost.total_ms == pytest.approx(single[0] + 2 * transfer_ms + ids_ms)


@pytest.mark.parametrize("wrong", [{"launch_us": -1}, {"exchange_gbps": 0}])
def test_constants_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ShardCoreError, match=f"{next(iter(wrong))} .*need"):
        AnalyticModel(Setting("made-up", 1000), **wrong)
