"""Payloads: bytes as FBGEMM's codec makes them, and problems and plans that keep to what it takes."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.payloads import payload_by_name
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import Budget
from shardcore.search.sharders import SHARDERS
from shardcore.step.access import payload_bytes
from shardcore.step.lower import lower, require_valid_plan


def problem(there: str, back: str, local_batch: int, *dims: int, memory_bytes=10**8, **fields) -> Problem:
    return Problem(
        "p",
        tuple(Table(f"t{i}", 1000 * (i + 1), dim, 5.0, **fields) for i, dim in enumerate(dims)),
        Topology(tuple(Device(memory_bytes) for _ in range(4))),
        4 * local_batch,
        job=Job(forward_payload=there, backward_payload=back),
    )


def whole(p: Problem, kind: str = "column") -> Plan:
    devices = (0,) if kind == "column" else p.topology.ranks
    return Plan(tuple(Placement(kind, Shard.whole(t), devices) for t in p.tables))


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "mx4", "mx4-16", "mx4-64"])
@pytest.mark.parametrize("elements", [0, 64, 192, 4096])
def test_bytes_are_those_that_the_codec_makes(name, elements):
    torch = pytest.importorskip("torch")
    pytest.importorskip("fbgemm_gpu")
    from shardcore.measure.exchanges import quantized_codec

    codec = quantized_codec(name)
    context = codec.create_context()
    sent = codec.encode(torch.ones(elements), context)
    n_bytes = sent.numel() * sent.element_size()
    assert n_bytes == payload_bytes(4 * elements, name)
    if payload_by_name(name).block > 1:
        assert codec.calc_quantized_size(elements, context) == n_bytes


def test_rows_of_8_bits_with_scales_have_the_bytes_that_fbgemm_computes():
    """FBGEMM encodes them on CUDA only; it computes their size anywhere."""
    pytest.importorskip("fbgemm_gpu")
    from shardcore.measure.exchanges import quantized_codec

    codec = quantized_codec("fp8-256")
    assert codec.calc_quantized_size(1024, codec.create_context()) == payload_bytes(4096, "fp8-256") == 1056
    assert payload_bytes(4096, "fp8") == 1024


@pytest.mark.parametrize(
    "there, back, local_batch, kind, words",
    [
        ("int8", "fp32", 3, "column", "column exchanges 36 columns.*take multiples of 32 at local batch 3"),
        ("int8", "fp32", 32, "column", ""),
        ("int8", "fp32", 32, "row", "row sums outputs, and TorchRec's int8 codec fails in a reduce-scatter"),
        ("mx4", "fp32", 3, "column", ""),  # padded forward
        ("fp32", "mx4", 3, "column", "multiples of 32"),
        ("fp8-256", "fp8-256", 4, "column", "multiples of 64 at local batch 4"),
        ("fp8-256", "fp8-256", 4, "row", ""),
        ("fp8", "fp8", 3, "column", ""),
    ],
)
def test_plans_that_a_codec_does_not_carry_are_refused(there, back, local_batch, kind, words):
    p = problem(there, back, local_batch, 64, 36)
    if not words:
        assert lower(whole(p, kind), p)
    else:
        with pytest.raises(ShardCoreError, match=words):
            lower(whole(p, kind), p)


def test_columns_of_a_device_travel_together():
    """60 and 36 columns are three blocks; 36 of them, apart, are not."""
    p = problem("int8", "fp32", 3, 60, 36)
    require_valid_plan(whole(p), p)
    apart = Plan(tuple(replace(x, devices=(i,)) for i, x in enumerate(whole(p).placements)))
    with pytest.raises(ShardCoreError, match="t0.* on device 0; column exchanges 60 columns"):
        require_valid_plan(apart, p)


def test_each_row_of_a_sequence_is_whole_blocks():
    p = problem("int8", "fp32", 32, 36, sequence=True)
    with pytest.raises(ShardCoreError, match="multiples of 32"):
        require_valid_plan(whole(p), p)
    assert problem("int8", "fp32", 32, 64, sequence=True).column_block_width(p.tables[0]) == 36
    assert problem("int8", "fp32", 32, 64, sequence=True).column_multiple(p.tables[0]) == 32


@pytest.mark.parametrize("sharder", ["portfolio", "anneal", "neuroshard", "torchrec", "size_greedy"])
@pytest.mark.parametrize(
    "given",
    [("int8", "fp32", 3, 64, 36, 96), ("fp8-256", "fp8-256", 3, 64, 36, 256), ("fp32", "mx4", 8, 64, 36)],
)
def test_searches_keep_to_what_codecs_carry(sharder, given):
    p = problem(*given)
    model = AnalyticModel(Setting("x", p.global_batch)).for_problem(p)
    plan = SHARDERS[sharder](p, model, seed=0, budget=Budget(evals=100))
    lower(plan, p)
    for x in plan.placements:
        assert x.kind != "column" or x.shard.width % p.column_multiple(x.shard.table) == 0
        assert x.kind != "row" or given[0] != "int8"


def test_a_refusal_names_the_codec():
    p = problem("int8", "fp32", 3, 64, 36, memory_bytes=3 * 10**5)
    model = AnalyticModel(Setting("x", p.global_batch)).for_problem(p)
    with pytest.raises(Infeasible, match="codecs of int8 forward.*codec fails in a reduce-scatter"):
        SHARDERS["portfolio"](p, model, seed=0, budget=Budget(evals=100))


@pytest.mark.parametrize("sharder", ["portfolio", "size_greedy", "torchrec"])
@pytest.mark.parametrize("given", [{"pinned": (("t1", (0,)),)}, {"together": (("t0", "t1"),)}])
def test_a_table_that_constraints_leave_no_kind_with_a_codec_is_refused_by_name(given, sharder):
    """Its other kinds need several devices. More memory would not help."""
    p = replace(problem("int8", "fp32", 3, 64, 36), constraints=Constraints(**given))
    model = AnalyticModel(Setting("x", p.global_batch)).for_problem(p)
    with pytest.raises(ShardCoreError, match="'p' cannot place table 't1': column exchanges 36 columns"):
        SHARDERS[sharder](p, model)


def test_fewer_bytes_cost_less():
    costs = []
    for name in ("fp32", "fp16", "int8", "fp8", "mx4"):
        p = problem(name, name, 32, 64, 64)
        model = AnalyticModel(Setting("x", p.global_batch)).for_problem(p)
        work = lower(whole(p), p)
        costs.append(float(model.comm_cost(work.traffic, np.zeros(4), p.topology).forward_ms.max()))
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 5


def test_a_payload_without_a_cpu_kernel_is_refused_on_cpus():
    p = problem("fp8-256", "fp32", 32, 64)
    with pytest.raises(ShardCoreError, match="'p' has payload 'fp8-256' on CPUs; FBGEMM has that codec on"):
        replace(p, topology=replace(p.topology, hardware="cpu-amd-epyc"))


def test_one_device_sends_nothing_so_any_width_will_do():
    p = problem("int8", "int8", 3, 36)
    alone = replace(p, topology=Topology((Device(10**8),)), constraints=Constraints())
    assert math.isfinite(lower(whole(alone), alone).traffic.sum())
