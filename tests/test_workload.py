import dataclasses
from itertools import permutations

import numpy as np
import pytest

from shardcore import memory, workload
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.types import (
    Constraints,
    Device,
    Infeasible,
    Placement,
    Plan,
    Problem,
    Setting,
    Shard,
    ShardCoreError,
    Table,
    Topology,
)
from shardcore.workload import COLUMN, REPLICATED, ROW, Traffic, device_names, lower, require_cover

A, B, C = Table("a", 100, 8, 2.0), Table("b", 60, 4, 1.0), Table("c", 10, 16, 3.0)
PROBLEM = Problem("p", (A, B, C), Topology((Device(1 << 20),) * 2), 64)


def place(*entries):
    return Plan(tuple(Placement(shard, devices) for shard, devices in entries))


PLAN = place((Shard(A, 0, 100, 0, 4), (0,)), (Shard(A, 0, 100, 4, 8), (1,)), (Shard(B, 0, 20, 0, 4), (0,)),
             (Shard(B, 20, 60, 0, 4), (1,)), (Shard.whole(C), (0, 1)))


def test_a_plan_runs_one_op_a_kind_and_device():
    work = lower(PLAN, PROBLEM)
    assert [[(op.kind, op.batch, len(op.shards)) for op in ops] for ops in work.ops] == [
        [(COLUMN, 64, 1), (ROW, 64, 1), (REPLICATED, 32, 1)]] * 2
    np.testing.assert_array_equal(work.traffic.all_to_all, [64 * 4 * 4] * 2)
    np.testing.assert_array_equal(work.traffic.reduce_scatter, [64 * 4 * 4] * 2)
    np.testing.assert_array_equal(work.traffic.all_reduce, [10 * 16 * 4] * 2)
    weights = 100 * 4 * 4 + 20 * 4 * 4 + 10 * 16 * 4
    outputs = 2 * 4 * (64 * 4 + 64 * 4 + 32 * 16)
    assert work.memory_bytes[0] == weights + outputs + 10 * 16 * 4  # and the replica's dense gradient


@pytest.mark.parametrize("plan, named", [
    (place((Shard.whole(A), (0,)), (Shard.whole(B), (1,))), ["0 of the 160 cells of table 'c'"]),
    (place((Shard.whole(A), (0,)), (Shard(A, 0, 100, 4, 8), (1,)), (Shard.whole(B), (1,)), (Shard.whole(C), (0,))),
     ["cells twice", "a[0:100, 4:8]"]),
    (place((Shard.whole(A), (2,)), (Shard.whole(B), (1,)), (Shard.whole(C), (0,))), ["device 2", "0 to 1"]),
    (place((Shard.whole(A), (1,)), (Shard.whole(B), (1,)), (Shard.whole(C), (0, 2))), ["device 2", "0 to 1"]),
    (place((Shard.whole(dataclasses.replace(A, pooling=9.0)), (0,)), (Shard.whole(B), (1,)), (Shard.whole(C), (0,))), ["'a'"]),
])
def test_a_plan_that_does_not_cover_its_problem_is_refused(plan, named):
    with pytest.raises(ShardCoreError) as error:
        lower(plan, PROBLEM)
    assert all(word in str(error.value) for word in named), str(error.value)


@pytest.mark.parametrize("constraints, named", [
    (Constraints(unsplit=("a",)), ["cuts table 'a'", "a[0:100, 0:4]", "must stay whole (constraints.unsplit)"]),
    (Constraints(together=(("a", "c"),)), ["cuts table 'a'", "(constraints.together)"]),
    (Constraints(pinned=(("a", (1,)),)), ["cuts table 'a'", "(constraints.pinned)"]),
    (Constraints(pinned=(("b", (1, 2)),)), ["b[0:20, 0:4] on device 0", "table 'b' may live on devices 1, 2 alone"]),
    (Constraints(pinned=(("c", ("x",)),)), ["c[0:10, 0:16] on device 0", "table 'c' may live on devices 1, 2 alone"]),
    (Constraints(together=(("c",),)), ["'c' on devices 0, 1", "together on one (constraints.together)"]),
])
def test_a_plan_that_breaks_a_constraint_is_refused(constraints, named):
    devices = (Device(1 << 20), Device(1 << 20, host="x"), Device(1 << 20, host="x"), Device(1 << 20))
    problem = dataclasses.replace(PROBLEM, topology=Topology(devices), constraints=constraints)
    with pytest.raises(ShardCoreError) as error:
        lower(PLAN, problem)
    assert all(word in str(error.value) for word in named), str(error.value)


def test_one_cell_too_few_or_too_many_is_noticed_however_large_the_table():
    large = Table("large", 10**7, 8, 1.0)
    problem = Problem("p", (large,), Topology((Device(10**9),) * 2), 2)

    def plan(low):
        return place((Shard(large, 0, 10**7, 0, 4), (0,)), (Shard(large, 0, 5 * 10**6, 4, 8), (1,)),
                     (Shard(large, low, 10**7, 4, 8), (1,)))

    lower(plan(5 * 10**6), problem)
    for low, said in ((5 * 10**6 + 1, "79999996 of the 80000000 cells"), (5 * 10**6 - 1, "cells twice")):
        with pytest.raises(ShardCoreError, match=said):
            lower(plan(low), problem)


def test_shards_cover_a_table_in_whatever_order_they_are_listed():
    problem = Problem("p", (A,), Topology((Device(1 << 20),)), 64)
    quarters = [(Shard(A, *rows, *columns), (0,)) for rows in ((0, 40), (40, 100)) for columns in ((0, 4), (4, 8))]
    for order in permutations(quarters):
        lower(place(*order), problem)
    for rows, columns in (((39, 100), (4, 8)), ((0, 41), (4, 8)), ((40, 100), (0, 8))):
        with pytest.raises(ShardCoreError, match="cells twice"):
            lower(place((Shard(A, *rows, *columns), (0,)), *quarters[:3]), problem)


def test_devices_for_people():
    assert device_names([3]) == "device 3" and device_names(range(2)) == "devices 0, 1"
    assert device_names(range(8)) == "devices 0, 1, 2, 3, 4, 5, 6, 7" and device_names(range(10)).endswith("6, 7 and 2 more")


def test_tables_kept_together_share_a_device():
    def plan(device_of_c):
        return place((Shard.whole(A), (0,)), (Shard.whole(B), (1,)), (Shard.whole(C), (device_of_c,)))
    problem = dataclasses.replace(PROBLEM, constraints=Constraints(pinned=(("b", (1,)),), together=(("a", "c"),)))
    lower(plan(0), problem)
    with pytest.raises(ShardCoreError, match="table 'c' on device 1 and 'a' on device 0; they need to be together"):
        lower(plan(1), problem)


@pytest.mark.parametrize("n_bytes", [10**3, 10**6, 10**9])
@pytest.mark.parametrize("reserved", [0, 12_345])
def test_a_device_holds_what_it_has_to_the_byte(n_bytes, reserved):
    table = Table("t", n_bytes, 4, 1.0)
    plan, needed = place((Shard.whole(table), (1,))), 16 * n_bytes + 2 * 64 * 16
    one_less = Topology((Device(1), Device(needed + reserved - 1)))
    problem = Problem("p", (table,), one_less, 64, constraints=Constraints(reserved_bytes=reserved))
    with pytest.raises(Infeasible, match="device 1 of problem 'p' would hold .*; it may hold "):
        lower(plan, problem)
    enough = dataclasses.replace(problem, topology=Topology((Device(1), Device(needed + reserved))))
    assert lower(plan, enough).memory_bytes == (0, needed)  # on the first, where even less than nothing is free, is nothing
    assert memory.free_bytes(enough) == [1 - reserved, needed]


def test_memory_is_weights_state_outputs_and_a_replicas_dense_gradient():
    half = Shard(A, 10, 60, 4, 8)  # 50 rows, 4 columns
    assert memory.shard_bytes(half, 64, "exact_sgd") == 50 * 4 * 4 + 2 * 64 * 4 * 4
    assert memory.shard_bytes(half, 64, "rowwise_adagrad") == 50 * 4 * 4 + 2 * 64 * 4 * 4 + 50 * 4
    assert memory.shard_bytes(half, 64, "exact_sgd", replicated=True) == 2 * 50 * 4 * 4 + 2 * 64 * 4 * 4
    small = Shard.whole(Table("h", 100, 8, 2.0, precision="fp16"))  # outputs and dense gradients are FP32
    assert memory.shard_bytes(small, 64, "exact_sgd") == 100 * 8 * 2 + 2 * 64 * 8 * 4
    assert memory.shard_bytes(small, 64, "exact_sgd", replicated=True) == 100 * 8 * 2 + 2 * 64 * 8 * 4 + 100 * 8 * 4


@pytest.mark.parametrize("n_bytes, shown", [(3 * 2**30, "3.0 GiB"), (2**30 // 10 + 1, "0.1 GiB"), (2**30 // 11, "93.1 MiB"),
                                            (2**20, "1.0 MiB"), (104_857, "104857 bytes"), (0, "0 bytes"),
                                            (-(2**30), "-1.0 GiB")])
def test_sizes_for_people(n_bytes, shown):
    assert memory.gib(n_bytes) == shown


def test_what_devices_exchange_adds_up_by_kind():
    """Three devices, unlike in all: a replica counts on each of its own only, its op over the local batch."""
    problem = dataclasses.replace(PROBLEM, topology=Topology((Device(1 << 20),) * 3), global_batch=48)
    plan = place((Shard(A, 0, 100, 0, 4), (0,)), (Shard(A, 0, 100, 4, 8), (2,)), (Shard(B, 0, 20, 0, 4), (2,)),
                 (Shard(B, 20, 60, 0, 4), (2,)), (Shard.whole(C), (2, 0)))
    work = lower(plan, problem)
    assert [[(op.kind, op.batch, [s.label for s in op.shards]) for op in ops] for ops in work.ops] == [
        [(COLUMN, 48, ["a[0:100, 0:4]"]), (REPLICATED, 16, ["c[0:10, 0:16]"])], [],
        [(COLUMN, 48, ["a[0:100, 4:8]"]), (ROW, 48, ["b[0:20, 0:4]", "b[20:60, 0:4]"]), (REPLICATED, 16, ["c[0:10, 0:16]"])]]
    assert work.traffic.all_to_all.tolist() == [48 * 4 * 4, 0, 48 * 4 * 4]
    assert work.traffic.reduce_scatter.tolist() == [0, 0, 48 * 8 * 4]
    assert work.traffic.all_reduce.tolist() == [10 * 16 * 4, 0, 10 * 16 * 4]
    replica = 2 * 10 * 16 * 4 + 2 * 16 * 16 * 4
    column = 100 * 4 * 4 + 2 * 48 * 4 * 4
    ranges = (20 + 40) * 4 * 4 + 2 * 48 * 4 * 4 * 2
    assert work.memory_bytes == (column + replica, 0, column + ranges + replica)
    assert (work.topology, work.global_batch) == (problem.topology, 48)
    columns = Traffic.of_columns(np.array([1, 2]))
    assert {t.dtype for t in (work.traffic.all_to_all, work.traffic.reduce_scatter, work.traffic.all_reduce)} == {np.dtype(float)}
    assert [t.tolist() for t in (columns.all_to_all, columns.reduce_scatter, columns.all_reduce)] == [[1, 2], [0, 0], [0, 0]]


def test_devices_that_hold_the_same_copies_share_their_op_and_its_price():
    work = lower(PLAN, PROBLEM)
    assert work.ops[0][2] is work.ops[1][2] and work.ops[0][0] is not work.ops[1][0]
    model, asked = AnalyticModel(Setting("made-up", 64)), []

    class Counted(AnalyticModel):
        def encode(self, shards, batch=None):
            asked.append(shards)
            return super().encode(shards, batch)

    assert price(work, Counted(model.setting)).total_ms == price(work, model).total_ms
    assert len(asked) == 5  # of six ops


def test_a_table_in_many_parts_is_checked_in_a_moment(monkeypatch):
    """Also cells that are placed twice are found, wherever they are."""
    compared = []
    monkeypatch.setattr(workload, "_overlap", lambda a, b, of=workload._overlap: compared.append(a) or of(a, b))
    n = 600
    tall = Table("tall", n * 4, 8, 1.0)
    problem = Problem("p", (tall,), Topology((Device(1 << 20),)), 64)
    parts = [Shard(tall, r * 8, r * 8 + 8, c, c + 4) for r in range(n // 2) for c in (0, 4)]
    order = np.random.default_rng(0).permutation(n)
    require_cover(place(*((parts[i], (0,)) for i in order)), problem)
    assert len(compared) < n
    wide = dataclasses.replace(parts[0], row_lo=0, row_hi=16)
    for i in (1, n // 2):
        doubled = [*parts[:i], dataclasses.replace(parts[i], row_lo=parts[i].row_lo - 1) if i > 1 else wide, *parts[i + 1:]]
        with pytest.raises(ShardCoreError, match="places cells twice: tall"):
            require_cover(place(*((doubled[k], (0,)) for k in order)), problem)
