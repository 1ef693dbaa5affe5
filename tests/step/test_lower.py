import dataclasses
import pickle
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from given_ids import count_bytes
from hypothesis import given
from hypothesis import strategies as st
from shapes import ALL_REDUCE, ALL_TO_ALL, column, entering, host_row, on_hosts, replica, row, sends

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.step import memory
from shardcore.step.kinds import CHANNELS, IDS, SHARDING_KINDS
from shardcore.step.lower import Op, lower, require_full_cover, traffic_of_outputs
from shardcore.step.ways import consolidate_placements

A, B, C = Table("a", 100, 8, 2.0), Table("b", 60, 4, 1.0), Table("c", 10, 16, 3.0)
PROBLEM = Problem("p", (A, B, C), Topology((Device(1 << 20),) * 2), 64)


TWO = PROBLEM.topology


def place(*placements):
    return Plan(placements)


PLAN = place(column(A, 0, 0, 4), column(A, 1, 4, 8), row(B, TWO), replica(C, TWO))


def test_a_plan_runs_one_op_a_kind_and_device():
    work = lower(PLAN, PROBLEM)
    assert [[(op.kind, op.batch, len(op.shards)) for op in ops] for ops in work.ops] == [
        [("column", 64, 1), ("row", 64, 1), ("data_parallel", 32, 1)]
    ] * 2
    assert entering(work.traffic) == {
        "all_to_all": [64 * 4 * 4] * 2,
        "reduce_scatter": [64 * 4 * 4] * 2,
        "all_reduce": [10 * 16 * 4] * 2,
    }
    weights = 100 * 4 * 4 + 30 * 4 * 4 + 10 * 16 * 4
    assert memory.memory_by_part(PLAN, PROBLEM)[0].parts["weights"] == weights
    assert work.memory_bytes == tuple(memory.used_bytes(PLAN, PROBLEM))


@pytest.mark.parametrize(
    "plan, named",
    [
        (place(column(A, 0), column(B, 1)), ["0 of the 160 cells of table 'c'"]),
        (place(column(A, 0, 0, 4), column(B, 1), column(C, 0)), ["400 of the 800 cells of table 'a'"]),
        (
            place(column(A, 0), column(A, 1, 4, 8), column(B, 1), column(C, 0)),
            ["cells twice", "a[0:100, 4:8]"],
        ),
        (place(column(A, 0), row(A, TWO), column(B, 1), column(C, 0)), ["cells twice", "a[0:100, 0:8]"]),
        (place(column(A, 2), column(B, 1), column(C, 0)), ["device 2", "0 to 1"]),
        (
            place(column(A, 1), column(B, 1), Placement("data_parallel", Shard.whole(C), (0, 2))),
            ["device 2", "0 to 1"],
        ),
        (
            place(column(A, 1), column(B, 1), Placement("column", Shard.whole(C), (0, 1))),
            ["c[0:10, 0:16] by column", "lives on"],
        ),
        (place(column(dataclasses.replace(A, pooling=9.0), 0), column(B, 1), column(C, 0)), ["'a'"]),
    ],
)
def test_a_plan_that_does_not_cover_its_problem_is_refused(plan, named):
    with pytest.raises(ShardCoreError) as error:
        lower(plan, PROBLEM)
    assert all(word in str(error.value) for word in named), str(error.value)


SPREAD = on_hosts("axxa", 1 << 20)
"""Of which ranks are 0, 3, 1, 2."""


@pytest.mark.parametrize(
    "constraints, named",
    [
        (
            Constraints(unsplit=("a",)),
            ["cuts table 'a'", "a[0:100, 0:4]", "must stay whole (constraints.unsplit)"],
        ),
        (
            Constraints(unsplit=("b",)),
            ["cuts table 'b'", "b[0:15, 0:4]", "must stay whole (constraints.unsplit)"],
        ),
        (Constraints(together=(("a", "c"),)), ["cuts table 'a'", "(constraints.together)"]),
        (
            Constraints(kinds=(("a", ("row", "host_row")),)),
            ["a[0:100, 0:4] by column", "needs row or host_row"],
        ),
        (
            Constraints(min_widths=(("a", 8),)),
            ["4 columns of table 'a' on device 0", "8 or more", "min_widths"],
        ),
        (Constraints(pinned=(("a", (1,)),)), ["cuts table 'a'", "(constraints.pinned)"]),
        (
            Constraints(pinned=(("b", (1, 2)),)),
            ["b[0:60, 0:4] on device 0", "table 'b' may only live on devices 1, 2"],
        ),
        (
            Constraints(pinned=(("c", ("x",)),)),
            ["c[0:10, 0:16] on device 0", "table 'c' may only live on devices 1, 2"],
        ),
        (
            Constraints(together=(("c",),)),
            ["'c' on devices 0, 3, 1, 2", "together on one (constraints.together)"],
        ),
    ],
)
def test_a_plan_that_breaks_a_constraint_is_refused(constraints, named):
    problem = dataclasses.replace(PROBLEM, topology=SPREAD, constraints=constraints)
    plan = place(column(A, 0, 0, 4), column(A, 1, 4, 8), row(B, SPREAD), replica(C, SPREAD))
    with pytest.raises(ShardCoreError) as error:
        lower(plan, problem)
    assert all(word in str(error.value) for word in named), str(error.value)


def test_rows_over_a_host_respect_pins_and_tables_that_stay_whole():
    plan = place(column(A, 0), host_row(B, (1, 2)), column(C, 3))
    lower(
        plan, dataclasses.replace(PROBLEM, topology=SPREAD, constraints=Constraints(pinned=(("b", ("x",)),)))
    )
    for constraints, said in (
        (Constraints(pinned=(("b", ("a", 1)),)), "on device 2; table 'b' may only live on devices 0, 1, 3"),
        (Constraints(unsplit=("b",)), r"cuts table 'b', one shard being b\[0:30, 0:4\]"),
    ):
        with pytest.raises(ShardCoreError, match=said):
            lower(plan, dataclasses.replace(PROBLEM, topology=SPREAD, constraints=constraints))


def test_a_column_too_few_or_too_many_is_noticed_however_large_the_table():
    large = Table("large", 10**7, 8, 1.0)
    problem = Problem("p", (large,), Topology((Device(10**9),) * 2), 2)
    lower(place(column(large, 0, 0, 4), column(large, 1, 4, 8)), problem)
    with pytest.raises(ShardCoreError, match="40000000 of the 80000000 cells"):
        lower(place(column(large, 0, 0, 4)), problem)
    for twice in (column(large, 1, 0, 4), row(large, problem.topology), replica(large, problem.topology)):
        with pytest.raises(ShardCoreError, match="cells twice"):
            lower(place(column(large, 0, 0, 4), column(large, 1, 4, 8), twice), problem)


def test_shards_cover_a_table_in_whatever_order_they_are_listed():
    wide = Table("wide", 100, 16, 2.0)
    problem = Problem("p", (wide,), on_hosts("aabb"), 64)
    quarters = [
        column(wide, 0, 0, 4),
        column(wide, 3, 4, 8),
        host_row(wide, (0, 1), 8, 12),
        host_row(wide, (2, 3), 12, 16),
    ]
    for order in permutations(quarters):
        lower(place(*order), problem)
        with pytest.raises(ShardCoreError, match="cells twice"):
            lower(place(*order[:3], column(wide, 1, 0, 16)), problem)
    with pytest.raises(ShardCoreError, match="cells twice"):
        lower(place(*quarters[:3], column(wide, 1, 8, 16)), problem)


def test_tables_kept_together_share_a_device():
    def plan(device_of_c):
        return place(column(A, 0), column(B, 1), column(C, device_of_c))

    problem = dataclasses.replace(
        PROBLEM, constraints=Constraints(pinned=(("b", (1,)),), together=(("a", "c"),))
    )
    lower(plan(0), problem)
    with pytest.raises(
        ShardCoreError, match="table 'c' on device 1 and 'a' on device 0; they need to be together"
    ):
        lower(plan(1), problem)


@pytest.mark.parametrize("n_bytes", [10**3, 10**6, 10**9])
@pytest.mark.parametrize("reserved", [0, 12_345])
def test_a_device_holds_what_it_has_to_the_byte(n_bytes, reserved):
    table = Table("t", n_bytes, 4, 1.0)
    plan = place(column(table, 1))
    ample = Problem("p", (table,), Topology((Device(1), Device(1 << 40))), 64)
    needed = memory.used_bytes(plan, ample)[1]
    assert needed > 16 * n_bytes
    one_less = Topology((Device(1), Device(needed + reserved - 1)))
    problem = dataclasses.replace(ample, topology=one_less, constraints=Constraints(reserved_bytes=reserved))
    with pytest.raises(Infeasible, match="device 1 of problem 'p' would hold .*; it may hold "):
        lower(plan, problem)
    enough = dataclasses.replace(problem, topology=Topology((Device(1), Device(needed + reserved))))
    # The first, where even less than nothing is free, has no shard.
    assert lower(plan, enough).memory_bytes[1] == needed
    assert memory.usable_bytes(enough) == [1 - reserved, needed]


@pytest.mark.parametrize(
    "n_bytes, shown",
    [
        (3 * 2**30, "3.0 GiB"),
        (2**30 // 10 + 1, "0.1 GiB"),
        (2**30 // 11, "93.1 MiB"),
        (2**20, "1.0 MiB"),
        (104_857, "104857 bytes"),
        (0, "0 bytes"),
        (-(2**30), "-1.0 GiB"),
    ],
)
def test_sizes_for_people(n_bytes, shown):
    assert memory.size_text(n_bytes) == shown


def test_what_devices_exchange_adds_up_by_kind():
    """Four devices on two hosts, unlike in all but the replica."""
    d, where = Table("d", 41, 8, 1.0), on_hosts("xyxy", 1 << 20)
    problem = Problem("p", (A, B, C, d), where, 48)
    plan = place(
        column(A, 0, 0, 4), column(A, 2, 4, 8), row(B, where), host_row(d, (1, 3)), replica(C, where)
    )
    work = lower(plan, problem)
    copy = ("data_parallel", 12, ["c[0:10, 0:16]"])
    assert [[(op.kind, op.batch, [s.label for s in op.shards]) for op in ops] for ops in work.ops] == [
        [("column", 48, ["a[0:100, 0:4]"]), ("row", 48, ["b[0:15, 0:4]"]), copy],
        [("row", 48, ["b[30:45, 0:4]"]), ("host_row", 48, ["d[0:21, 0:8]"]), copy],
        [("column", 48, ["a[0:100, 4:8]"]), ("row", 48, ["b[15:30, 0:4]"]), copy],
        [("row", 48, ["b[45:60, 0:4]"]), ("host_row", 48, ["d[21:41, 0:8]"]), copy],
    ]
    assert entering(work.traffic) == {
        "all_to_all": [48 * 4 * 4, 0, 48 * 4 * 4, 0],
        "reduce_scatter": [48 * 4 * 4] * 4,
        "reduce_scatter_host": [0, 48 * 8 * 4, 0, 48 * 8 * 4],
        "all_to_all_cross": [0, 24 * 8 * 4, 0, 24 * 8 * 4],
        "all_reduce": [10 * 16 * 4] * 4,
    }
    # Ids of rows divided over all devices, and over those of a host, travel by themselves.
    assert work.traffic.shape == (2 * len(CHANNELS), 4) and work.traffic.dtype == float
    everywhere, columns, ranges = 15 * 4 * 4 + 10 * 16 * 4, 100 * 4 * 4, [rows * 8 * 4 for rows in (21, 20)]
    assert [device.parts["weights"] for device in memory.memory_by_part(plan, problem)] == [
        everywhere + columns,
        everywhere + ranges[0],
        everywhere + columns,
        everywhere + ranges[1],
    ]
    assert (work.topology, work.global_batch) == (problem.topology, 48)


def test_shards_of_a_kind_on_a_device_are_one_op_and_add_their_bytes():
    other, where = dataclasses.replace(B, name="other"), on_hosts("aabb")
    problem = Problem("p", (A, B, other), where, 64)
    work = lower(place(column(A, 1), host_row(B, (0, 1)), host_row(other, (0, 1))), problem)
    assert work.ops[0] == (Op("host_row", (Shard(B, 0, 30, 0, 4), Shard(other, 0, 30, 0, 4)), 64),)
    assert entering(work.traffic) == {
        "all_to_all": [0, 64 * 8 * 4, 0, 0],
        "reduce_scatter_host": [64 * 8 * 4] * 2 + [0, 0],
        "all_to_all_cross": [32 * 8 * 4] * 2 + [0, 0],
    }
    assert work.ops[2:] == ((), ())


def test_each_collection_runs_ops_and_exchanges_of_its_own():
    """Pooled tables and sequences of one name are two collections. All replicas are reduced together."""
    where = on_hosts("aaaa")
    a, b, copy = (dataclasses.replace(A, name=name, collection="users") for name in ("a2", "b2", "c2"))
    sequence = dataclasses.replace(a, name="s", sequence=True)
    problem = Problem("p", (A, a, b, C, copy, sequence), where, 64)
    work = lower(
        place(
            column(A, 0),
            column(a, 0),
            row(b, where),
            replica(C, where),
            replica(copy, where),
            column(sequence, 1),
        ),
        problem,
    )
    assert [
        [(op.kind, op.sharding_kind.collection, [s.table.name for s in op.shards]) for op in ops]
        for ops in work.ops[:2]
    ] == [
        [
            ("column", "", ["a"]),
            ("data_parallel", "", ["c"]),
            ("column", "users", ["a2"]),
            ("row", "users", ["b2"]),
            ("data_parallel", "users", ["c2"]),
        ],
        [
            ("data_parallel", "", ["c"]),
            ("row", "users", ["b2"]),
            ("data_parallel", "users", ["c2"]),
            ("column", "users", ["s"]),
        ],
    ]
    users, of_a = work.ops[0][2].sharding_kind, [64 * 8 * 4, 0, 0, 0]
    assert list(work.traffic_slots.values()) == [0, 0, 1, 0, 0, 2]
    assert pickle.loads(pickle.dumps(work)).traffic_slots == work.traffic_slots
    assert work.entering_bytes(SHARDING_KINDS["column"], ALL_TO_ALL).tolist() == of_a
    assert work.entering_bytes(users, ALL_TO_ALL).tolist() == of_a
    assert work.entering_bytes(users, IDS)[0] == work.entering_bytes(SHARDING_KINDS["column"], IDS)[0] > 0
    assert (
        work.entering_bytes(SHARDING_KINDS["data_parallel"], ALL_REDUCE).tolist()
        == [(10 * 16 + 100 * 8) * 4] * 4
    )
    # An exchange more has a latency more.
    model = AnalyticModel(Setting("m", 64), exchange_latency_ms=1.0)
    once = np.add.reduce(work.traffic.reshape(3, len(CHANNELS), 4))
    merged = dataclasses.replace(work, traffic=once)
    more = [price(w, model).forward_comm_ms[3] for w in (work, merged)]
    assert more[0] == pytest.approx(more[1] + 2.0, abs=1e-3)


@given(data=st.data(), sequence=st.booleans(), of_hosts=st.booleans())
def test_parts_of_a_table_on_a_device_cost_what_one_shard_of_their_columns_does(data, sequence, of_hosts):
    """In any order, with other shards between: price, memory and ids are those of the consolidated plan."""
    table, where = Table("t", 1000, 32, 5.0, sequence=sequence), on_hosts("xyxy")
    problem = Problem("p", (table, B), where, 64)
    edges = [0, *sorted(4 * e for e in data.draw(st.sets(st.integers(1, 7)))), 32]
    parts = [
        host_row(table, data.draw(st.sampled_from([(0, 2), (1, 3)])), a, b)
        if of_hosts and not sequence
        else column(table, data.draw(st.integers(0, 1)), a, b)
        for a, b in pairwise(edges)
    ]
    plan = place(*data.draw(st.permutations([*parts, column(B, 0)])))
    model, works = (
        AnalyticModel(Setting("m", 64)),
        [lower(p, problem) for p in (plan, place(*consolidate_placements(plan.placements)))],
    )
    assert price(works[0], model).device_ms == pytest.approx(price(works[1], model).device_ms)
    assert works[0].memory_bytes == works[1].memory_bytes
    np.testing.assert_array_equal(works[0].traffic, works[1].traffic)
    assert count_bytes(plan, problem) == count_bytes(place(*consolidate_placements(plan.placements)), problem)
    for ops in works[0].ops:
        assert set(Counter(s.table.name for op in ops for s in op.shards).values()) <= {1}


def test_a_table_in_many_parts_on_one_device_is_whole():
    table = Table("t", 100_000, 128, 20.0)
    problem = Problem(
        "p", (table, B), Topology((Device(1 << 34),) * 2), 4096, constraints=Constraints(unsplit=("t",))
    )
    parts, whole = ([column(table, 0, lo, lo + wide) for lo in range(0, 128, wide)] for wide in (4, 128))
    works = [lower(place(*of, column(B, 1)), problem) for of in (parts, whole)]
    assert works[0].ops == works[1].ops
    assert works[0].memory_bytes == works[1].memory_bytes
    assert place(*parts) != place(*whole)


def test_traffic_of_columns_without_shards():
    problem = dataclasses.replace(PROBLEM, topology=on_hosts("aabb"))
    widths = np.array([[[0, 4, 8, 12], [4, 4, 4, 4]]])
    outputs = 64 * 4 * widths
    found = traffic_of_outputs(
        {SHARDING_KINDS["column"]: outputs, SHARDING_KINDS["host_row"]: 2 * outputs}, problem
    )
    np.testing.assert_array_equal(
        found, sends(all_to_all=256 * widths, reduce_scatter_host=512 * widths, all_to_all_cross=256 * widths)
    )


def test_devices_that_hold_the_same_replicas_share_their_op_and_its_price():
    work = lower(PLAN, PROBLEM)
    assert work.ops[0][2] is work.ops[1][2] and work.ops[0][0] is not work.ops[1][0]
    model, asked = AnalyticModel(Setting("made-up", 64)), []

    class Counted(AnalyticModel):
        def encode(self, shards, batch=None):
            asked.extend(shards)
            return super().encode(shards, batch)

    assert price(work, Counted(model.setting)).total_ms == price(work, model).total_ms
    ops = {id(op): op for ops in work.ops for op in ops}.values()
    assert len(ops) == 5 < sum(map(len, work.ops)) and len(asked) == sum(len(op.shards) for op in ops)


@pytest.mark.parametrize(
    "plan, columns",
    [
        (lambda t, on: place(column(t, 0)), "4096 columns of table 'wide' by column on device 0"),
        (
            lambda t, on: place(column(t, 0, 0, 2000), column(t, 0, 2000, 2052), column(t, 1, 2052)),
            "2052 col",
        ),
        (lambda t, on: place(row(t, on)), "4096 columns of table 'wide' by row on devices 0, 1"),
        (lambda t, on: place(replica(t, on)), "4096 columns of table 'wide' by data_parallel"),
    ],
)
def test_shards_wider_than_fbgemm_runs_are_refused_but_on_a_cpu(plan, columns):
    wide = Table("wide", 10, 4096, 1.0)
    problem = Problem("p", (wide,), Topology((Device(1 << 30),) * 2), 64)
    plan = plan(wide, problem.topology)
    with pytest.raises(ShardCoreError, match=f"{columns}.* at most 2048"):
        require_full_cover(plan, problem)
    on_cpu = dataclasses.replace(TWO, hardware="cpu-x")
    require_full_cover(plan, dataclasses.replace(problem, topology=on_cpu))
    require_full_cover(place(column(wide, 0, 0, 2048), column(wide, 1, 2048)), problem)


def test_cells_that_are_placed_twice_are_found_among_many_parts():
    n = 500
    wide = Table("wide", 10, n * 4, 1.0)
    problem = Problem("p", (wide,), Topology((Device(1 << 30),)), 64)
    parts = [column(wide, 0, 4 * i, 4 * i + 4) for i in range(n)]
    order = np.random.default_rng(0).permutation(n)
    require_full_cover(place(*(parts[i] for i in order)), problem)
    for i in (1, n // 2):
        doubled = [*parts[:i], column(wide, 0, 4 * i - 4, 4 * i + 4), *parts[i + 1 :]]
        with pytest.raises(ShardCoreError, match="places cells twice: wide"):
            require_full_cover(place(*(doubled[k] for k in order)), problem)
