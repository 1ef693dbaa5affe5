"""price and group_op_ms: what a model says of a Workload."""

import dataclasses

import numpy as np
import pytest
from laws import pool
from shapes import column, replica, row

from shardcore.core.errors import SettingMismatch
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost import nets
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import at_confidence, group_op_ms, price
from shardcore.search.state.shards import priced_plan
from shardcore.step.kinds import ID_CHANNELS
from shardcore.step.lower import lower

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


def test_group_op_ms_of_empty_groups(any_model):
    shards = [Shard.whole(t) for t in TABLES]
    costs = group_op_ms([[], shards, [], shards[:1]], any_model)
    assert costs[[0, 2]].tolist() == [0, 0] and costs[1] > costs[3] > 0
    assert group_op_ms([[], []], any_model).tolist() == [0, 0]
    assert group_op_ms([], any_model).shape == (0,)
    assert group_op_ms([shards], any_model, 64) == pytest.approx(
        any_model.op_ms(any_model.encode(shards, 64).sum(0))
    )


def test_trained_model_tells_forward_from_backward(model):
    cost = price(lower(spread_plan(2), problem(1, 1)), model)
    for device in range(2):
        sums = model.encode([Shard.whole(t) for t in TABLES[device::2]]).sum(0)
        parts = (cost.forward_compute_ms[device], cost.backward_compute_ms[device])
        assert parts == pytest.approx(nets.op_ms(model.weights, sums))


CLOSED = ("not measured: closed-form model",)


def test_a_price_says_what_was_not_measured(model):
    """Also that of a cautious model, and a plan. Whose setting is a card's name, the more."""
    task, analytic = problem(1, 1), AnalyticModel(Setting("nvidia-h100", 256))
    work = lower(spread_plan(2), task)
    assert price(work, analytic).extrapolated == CLOSED
    on_first = [column(t, 0) for t in TABLES]
    assert priced_plan(on_first, task, analytic).provenance["extrapolated"] == list(CLOSED)
    unnamed = ("the topology names no hardware: prices are those of law",)
    assert price(work, model).extrapolated == price(work, at_confidence(model, 0.9)).extrapolated == unnamed
    named = dataclasses.replace(task, topology=dataclasses.replace(task.topology, hardware="law"))
    assert price(lower(spread_plan(2), named), model).extrapolated == ()
    assert "extrapolated" not in priced_plan(on_first, named, model).provenance
    other = dataclasses.replace(task, topology=dataclasses.replace(task.topology, hardware="nvidia-h100"))
    assert price(lower(spread_plan(2), other), model).extrapolated == (
        "the topology has nvidia-h100; the model was measured on law",
    )


@pytest.mark.parametrize(
    "kind, sequence, said",
    [
        ("row", False, "row shards: their reduce-scatter is priced with the rates of the all-to-all"),
        ("row", True, "table 't' is a sequence: its lookups are priced from pooled ones"),
        ("data_parallel", False, "table 't' is replicated: its dense kernel is priced as a fused op"),
        ("data_parallel", False, "data_parallel shards: their all-reduce is priced with the rates"),
    ],
)
def test_kinds_that_were_never_measured_are_named(model, kind, sequence, said):
    table = dataclasses.replace(TABLES[0], name="t", sequence=sequence)
    topology = Topology((Device(1 << 30),) * 2, "law")
    cost = price(
        lower(Plan((Placement(kind, Shard.whole(table), (0, 1)),)), Problem("p", (table,), topology, 256)),
        model,
    )
    assert any(line.startswith(said) for line in cost.extrapolated), cost.extrapolated
    # The plan without that kind has no such line.
    whole = price(lower(Plan((column(TABLES[0], 0),)), Problem("p", TABLES[:1], topology, 256)), model)
    assert whole.extrapolated == ()


def test_rows_in_host_memory_are_priced_by_a_link_that_is_given():
    table = dataclasses.replace(TABLES[0], load_factor=0.5)
    topology = Topology((Device(1 << 30),), memory=(Memory("host", 1 << 30, 25.0),))
    task = Problem("p", (table,), topology, 256)
    cost = price(lower(Plan((column(table, 0),)), task), AnalyticModel(SETTING).for_problem(task))
    assert cost.extrapolated == (
        *CLOSED,
        f"table {table.name!r} has rows in host memory: the topology gives the 25 GB/s of their link, not measured",
    )


def test_replicas_run_at_the_local_batch(any_model):
    one = dataclasses.replace(problem(1, 1), tables=TABLES[:1])
    shard = Shard.whole(TABLES[0])
    cost = price(lower(Plan((replica(TABLES[0], one.topology),)), one), any_model)
    local = any_model.op_ms(any_model.encode([shard], 128).sum(0, keepdims=True))[0]
    assert cost.compute_ms == pytest.approx((local, local))
    assert cost.forward_comm_ms == (0, 0) and min(cost.backward_comm_ms) > 0
    assert np.isfinite(cost.total_ms)


def test_ids_that_the_dense_part_does_not_hide_make_a_step_longer(any_model):
    """In TorchRec's pipeline ids travel while the dense part runs; without one the step waits for them."""

    def cost(**job):
        return price(lower(spread_plan(2), dataclasses.replace(problem(1, 1), job=Job(**job))), any_model)

    alone = cost()
    ids_ms = alone.input_ms[0]
    assert alone.input_ms == (ids_ms, ids_ms) and ids_ms > 0 and alone.dense_ms == 0
    embeddings_ms = alone.total_ms - ids_ms
    for pipeline, hidden in (("none", 0.0), ("sparse_dist", 1.0)):
        for share in (0.25, 4.0):
            dense = {"dense_forward_ms": share * ids_ms / 2, "dense_backward_ms": share * ids_ms / 2}
            found = cost(pipeline=pipeline, **dense)
            left_ms = max(0.0, ids_ms - hidden * share * ids_ms)
            assert found.input_ms == pytest.approx([left_ms] * 2)
            assert found.total_ms == pytest.approx(embeddings_ms + left_ms + share * ids_ms)
            assert found.compute_ms == alone.compute_ms
    assert cost(id_bytes=4).input_ms[0] < ids_ms


def test_no_dense_part_hides_what_devices_do_with_ids():
    """To put ids in buckets, each device reads and writes those of its own samples."""
    model, given = AnalyticModel(SETTING, gather_gbps=0.1), problem(1, 1)
    plan = Plan(tuple(row(t, given.topology) for t in TABLES))
    work_ms = 2 * max(x.mean() for x in lower(plan, given).traffic[-len(ID_CHANNELS) :]) / 1e5
    alone = price(lower(plan, given), model).input_ms[0]
    assert alone > work_ms > 0
    travels_ms = alone - work_ms
    for hidden_ms, left_ms in ((travels_ms / 2, alone - travels_ms / 2), (1e3, work_ms)):
        job = Job(dense_forward_ms=hidden_ms, dense_backward_ms=0.0)
        cost = price(lower(plan, dataclasses.replace(given, job=job)), model)
        assert cost.input_ms == pytest.approx([left_ms] * 2)


def test_a_model_is_for_the_payloads_of_its_problems_job(any_model):
    given = dataclasses.replace(problem(1, 1), global_batch=any_model.setting.batch)
    short = dataclasses.replace(given, job=Job(forward_payload="fp16", backward_payload="bf16"))
    workload = lower(spread_plan(2), given)
    model = any_model.for_problem(short)
    assert (model.setting.forward_payload, model.setting.backward_payload) == ("fp16", "bf16")
    long_ms, short_ms = (price(workload, m) for m in (any_model.for_problem(given), model))
    assert max(short_ms.forward_comm_ms) < max(long_ms.forward_comm_ms)
    assert max(short_ms.backward_comm_ms) < max(long_ms.backward_comm_ms)
    assert short_ms.compute_ms == long_ms.compute_ms and short_ms.input_ms == long_ms.input_ms
    with pytest.raises(
        SettingMismatch, match="forward_payload: fp16 against fp32, backward_payload: bf16 against fp32"
    ):
        short.require_setting(any_model.setting)


def test_halving_columns_of_tables_of_many_lookups_over_two_hosts_raises_the_price(any_model):
    """Each half needs all ids. Outputs and lookups stay as even as they were."""
    a, b = (Table(name, 10_000, 8, 50.0) for name in "ab")
    where = Topology(
        (Device(1 << 30, host="a"), Device(1 << 30, host="b")),
        links=make_links(between_hosts=0.01, latency_ms=0.0),
    )
    given = Problem("p", (a, b), where, 256)

    def ms(*placements):
        return price(lower(Plan(placements), given), any_model).total_ms

    halves = ms(*(column(t, d, 4 * d, 4 * d + 4) for t in (a, b) for d in (0, 1)))
    assert halves > 1.5 * ms(column(a, 0), column(b, 1))
