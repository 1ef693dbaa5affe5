import dataclasses

import numpy as np
import pytest

from shardcore import memory
from shardcore.types import Constraints, Device, Infeasible, Placement, Plan, Problem, Shard, ShardCoreError, Table, Topology
from shardcore.workload import COLUMN, REPLICATED, ROW, lower

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


def test_tables_kept_together_share_a_device():
    def plan(device_of_c):
        return place((Shard.whole(A), (0,)), (Shard.whole(B), (1,)), (Shard.whole(C), (device_of_c,)))
    problem = dataclasses.replace(PROBLEM, constraints=Constraints(pinned=(("b", (1,)),), together=(("a", "c"),)))
    lower(plan(0), problem)
    with pytest.raises(ShardCoreError, match="table 'c' on device 1 and 'a' on device 0; they need to be together"):
        lower(plan(1), problem)


def test_a_device_that_holds_too_much_is_named():
    tight = dataclasses.replace(PROBLEM, constraints=Constraints(reserved_bytes=(1 << 20) - 1000))
    with pytest.raises(Infeasible, match="device 0 of problem 'p' would hold"):
        lower(PLAN, tight)


def test_rowwise_adagrad_keeps_one_number_a_row():
    shard = Shard.whole(A)
    assert memory.shard_bytes(shard, 64, "rowwise_adagrad") - memory.shard_bytes(shard, 64, "exact_sgd") == 4 * 100
