"""Memory that a step takes of a device, by part: by hand, and as torch sees it in TorchRec's processes."""

import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shapes import column, on_hosts, replica, row

from shardcore.core.access_statistics import ManagedCollision
from shardcore.core.catalog import DENSE_OPTIMIZERS, PRECISIONS
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.step import memory
from shardcore.step.kinds import (
    SHARDING_KINDS,
    WHOLE_ROWS,
    merged_placements,
    sharding_kind_for_table,
    shards_by_device,
)
from shardcore.step.lower import lower
from shardcore.step.memory import columns_of_run, local_batch_memory_terms, table_peak_bytes
from shardcore.step.memory_timeline import OF_ENTERED
from shardcore.step.shard_memory import buffers_per_term, exchanged_amounts, local_batch_shares

TABLE, OTHER = Table("t", 1000, 8, 3.0), Table("u", 500, 16, 2.0)
GIB = 2**30


def problem_of(*tables, hardware="nvidia-h200", n=2, optimizer="exact_sgd", batch=64) -> Problem:
    return Problem("p", tables or (TABLE, OTHER), Topology((Device(GIB),) * n, hardware), batch, optimizer)


def local_of(plan: Plan, problem: Problem) -> dict:
    """Bytes of each buffer of a local batch, by run."""
    shares = local_batch_shares(plan.placements, problem)
    terms, found = local_batch_memory_terms(shares, problem), {}
    for r, run in enumerate(shares):
        each = list(zip(terms[columns_of_run(r)], buffers_per_term(run, problem), strict=False))
        names = {name for _, of in each for name in of}
        found[run] = {name: sum(n * of.get(name, 0) for n, of in each) for name in names}
        found[run]["sent"] = shares[run].sent
    return found


def test_a_plan_and_a_problem_in_the_wrong_order_are_one_line():
    plan = Plan((column(TABLE, 0), column(OTHER, 1)))
    with pytest.raises(ShardCoreError, match="plan is .*; it needs to be a Plan"):
        memory.used_bytes(problem_of(), plan)


@pytest.mark.filterwarnings("error")
def test_bytes_beyond_64_bits_are_counted():
    """A million lookups of 2^40 samples: nothing holds them, which a refusal has to say."""
    table = Table("t", 10**6, 64, 1e6)
    problem = Problem("p", (table,), Topology((Device(1 << 40, host="h"),)), 1 << 40)
    [used] = memory.used_bytes(Plan((column(table, 0),)), problem)
    assert used > 8e6 * 2**40 > 2**63 / 2


def test_what_a_whole_table_takes_by_hand():
    """A phase at a time: ids arrive in 3 buffers; later they are 2, beside outputs or what is sorted."""
    arrived, pooled, sorting = 64 * (3 * 8 + 4), 64 * 8 * 4, 64 * 3 * 52
    weights, offsets = 1000 * 8 * 4, 64 * 8
    on_gpu, on_cpu = problem_of(), problem_of(hardware="cpu-some")
    assert table_peak_bytes(TABLE, on_gpu) == weights + offsets + 2 * arrived + pooled + sorting
    assert table_peak_bytes(TABLE, on_cpu) == weights + offsets + max(3 * arrived, 2 * arrived + 2 * pooled)
    busy = replace(TABLE, pooling=30.0)  # its ids take more than its outputs
    assert table_peak_bytes(busy, on_cpu) == weights + offsets + 3 * 64 * (30 * 8 + 4)
    # No hardware: that of a GPU, which takes more.
    assert table_peak_bytes(TABLE, problem_of(hardware=None)) == table_peak_bytes(TABLE, on_gpu)


@pytest.mark.parametrize("payload", ["fp16", "bf16"])
def test_16_bits_take_more_at_first_by_hand(payload):
    """A codec clamps outputs to a tensor of FP32, and casts that. Only then is what travels half as large."""
    arrived, pooled, offsets = 64 * (3 * 8 + 4), 64 * 8 * 4, 64 * 8
    plain = problem_of(hardware="cpu-some")
    short = replace(plain, job=Job(forward_payload=payload))
    assert table_peak_bytes(TABLE, short) == 1000 * 8 * 4 + offsets + max(
        3 * arrived, 2 * arrived + 2.5 * pooled
    )
    each = buffers_per_term(WHOLE_ROWS, short)[OF_ENTERED]
    assert [pooled * each[f"first{what}"] for what in ("", " there", " back", " cast", " clamped")] == [
        pooled,
        pooled / 2,
        pooled,
        pooled / 2,
        pooled,
    ]
    # Gradients are cast once a device, in the order in which they are sent.
    back = replace(plain, job=Job(backward_payload=payload))
    given = Plan((column(TABLE, 0), column(OTHER, 1)))
    ordered = 32 * (8 + 16) * 4
    [found] = local_of(given, back).values()
    assert [found[f"local{what}"] for what in ("", " there", " back", " recast", " clamped")] == [
        ordered,
        ordered,
        ordered / 2,
        ordered / 2,
        ordered,
    ]
    [found] = local_of(given, short).values()
    assert (found["local there"], found["local decoded"], found["local recast"]) == (ordered / 2, ordered, 0)


def test_a_sequence_of_16_bits_is_clamped_to_two_tensors_by_hand():
    """Lookups are clamped in the order of tables, and once more in that of devices. Then they are cast."""
    sequence, job = replace(TABLE, sequence=True), Job(forward_payload="fp16")
    problem = replace(problem_of(sequence, OTHER, hardware="cpu-some"), job=job)
    arrived, lookups, offsets = 64 * (3 * 8 + 4), 64 * 3 * 8 * 4, 64 * 8
    assert table_peak_bytes(sequence, problem) == 1000 * 8 * 4 + offsets + 2 * arrived + 3.5 * lookups


def test_parts_say_what_payloads_of_16_bits_take():
    """Outputs dominate here: gradients of all tables, in order, clamped and cast."""
    wide = Table("wide", 8, 512, 1.0)
    problem = replace(problem_of(wide, hardware="cpu-some", n=1), job=Job(backward_payload="bf16"))
    [found] = memory.memory_by_part(Plan((column(wide, 0),)), problem)
    outputs = 64 * 512 * 4
    assert (found.phase, found.parts["payloads"], found.parts["output gradients"]) == (
        "gradients cast",
        2.5 * outputs,
        outputs,
    )


def test_a_cut_copies_ids():
    """Two halves take what the table does, and its ids once more on their device and twice to be sent."""
    problem = problem_of(hardware="cpu-some")
    whole, half = (table_peak_bytes(TABLE, problem, width) for width in (8, 4))
    local_ids, ids = 32 * (3 * 8 + 4), 64 * (3 * 8 + 4)
    assert 2 * half - whole >= 2 * ids + 2 * 2 * local_ids


@pytest.mark.parametrize(
    "optimizer, cell, row_bytes, of_replicas",
    [
        ("exact_sgd", 0, 0, "sgd"),
        ("rowwise_adagrad", 0, 4, "rowwise_adagrad"),
        ("exact_adagrad", 4, 0, "adagrad"),
        ("adam", 8, 0, "adam"),
        ("partial_rowwise_adam", 4, 4, "adam"),
        ("lamb", 8, 0, "adam"),
    ],
)
def test_optimizer_state(optimizer, cell, row_bytes, of_replicas):
    """FBGEMM keeps it so, whatever updates replicas. Their state has the type of their weights."""
    half, given = Shard(replace(TABLE, precision="fp16"), 0, 1000, 0, 4), problem_of(optimizer=optimizer)
    assert given.replica_optimizer == of_replicas
    copied = next(sharding_kind for sharding_kind in SHARDING_KINDS.values() if sharding_kind.dense_gradient)
    for name, state in (
        ("sgd", 0),
        ("adagrad", 1000 * 2 * 4),
        ("rowwise_adagrad", 1000 * 2),
        ("adam", 1000 * 2 * 2 * 4),
    ):
        job = Job(replica_optimizer=None if name == of_replicas else name)
        problem = replace(given, job=job)
        assert memory.resident_bytes(WHOLE_ROWS, half, problem) == (8000, 1000 * (4 * cell + row_bytes))
        assert memory.resident_bytes(copied, half, problem) == (8000, state)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_state_of_replicas_is_what_their_optimizer_keeps(name, precision):
    """In the real class, after a step. Torch's keep a count of steps too."""
    module, _, theirs = DENSE_OPTIMIZERS[name].theirs.rpartition(".")
    optimizer = getattr(pytest.importorskip(module), theirs)
    table = Table("t", 100, 8, 1.0, precision=precision)
    weights = torch.nn.Parameter(torch.zeros(100, 8, dtype=getattr(torch, PRECISIONS[precision].torch)))
    weights.grad = torch.ones_like(weights)
    stepped = optimizer([weights], lr=0.1)
    stepped.step()
    kept = sum(n.numel() * n.element_size() for n in stepped.state[weights].values() if n.numel() > 1)
    problem = replace(problem_of(table), job=Job(replica_optimizer=name))
    copied = next(sharding_kind for sharding_kind in SHARDING_KINDS.values() if sharding_kind.dense_gradient)
    assert memory.resident_bytes(copied, Shard.whole(table), problem)[1] == kept


def test_parts_of_a_replica_are_weights_gradients_and_buckets():
    """Gradients are there twice when they are reduced: the kernel's own, and DDP's buckets."""
    big = Table("big", 100_000, 64, 1.0)
    problem = problem_of(big)  # its optimizer is SGD, without scratch
    [found, _] = memory.memory_by_part(Plan((replica(big, problem.topology),)), problem)
    assert (found.phase, found.parts["weights"], found.parts["dense gradients"]) == (
        "gradients of replicas",
        big.bytes,
        2 * big.bytes,
    )
    assert found.parts["sorting"] == 0 and found.bytes == sum(found.parts.values())


@pytest.mark.parametrize("name, scratch", [("sgd", 0), ("adagrad", 1), ("rowwise_adagrad", 1), ("adam", 2)])
def test_a_dense_optimizer_has_scratch_of_the_largest_replica(name, scratch):
    big, small = Table("big", 100_000, 64, 1.0), Table("small", 1000, 8, 1.0)
    problem = replace(problem_of(big, small), job=Job(replica_optimizer=name))
    [found, _] = memory.memory_by_part(
        Plan(tuple(replica(t, problem.topology) for t in problem.tables)), problem
    )
    all_of_them = big.bytes + small.bytes
    assert found.parts["dense gradients"] == max(2 * all_of_them, all_of_them + scratch * big.bytes)
    assert (found.phase == "dense update") == (scratch > 1)


def test_received_outputs_are_the_same_for_all_plans_on_all_devices():
    problem = problem_of(replace(OTHER, dim=512), hardware="cpu-some")
    [table] = problem.tables
    each = [
        local_of(plan, problem).values()
        for plan in (
            Plan((column(table, 0),)),
            Plan((row(table, problem.topology),)),
            Plan((replica(table, problem.topology),)),
        )
    ]
    assert [found["local"] for [found] in each] == [32 * 512 * 4] * 3


def test_runs_are_in_the_order_of_their_first_tables():
    """TorchRec makes them so, collection by collection."""
    tables = [Table(name, 1000, 8, 3.0, collection=name[0]) for name in ("b0", "b1", "a0", "a1", "b2")]
    problem = problem_of(*tables)
    b0, b1, a0, a1, b2 = tables
    plan = Plan(
        (
            column(a1, 0),
            replica(b2, problem.topology),
            row(a0, problem.topology),
            row(b1, problem.topology),
            column(b0, 1),
        )
    )
    assert [(run.collection, run.name) for run in local_of(plan, problem)] == [
        ("b", "column"),
        ("b", "row"),
        ("b", "data_parallel"),
        ("a", "row"),
        ("a", "column"),
    ]


def test_the_order_of_kinds_decides_what_is_there_at_once():
    """Gradients go back from the last kind to the first. What rows gather first waits for what follows."""
    divided, whole = Table("divided", 1000, 64, 1.0), Table("whole", 1000, 256, 1.0)
    found = []
    for tables in ((divided, whole), (whole, divided)):
        problem = problem_of(*tables, hardware="cpu-some")
        plan = Plan((row(divided, problem.topology), column(whole, 0)))
        found.append(memory.memory_by_part(plan, problem)[1])
    assert [device.phase for device in found] == ["gradients in order"] * 2
    gathered = 64 * 64 * 4
    assert found[1].parts["payloads"] - found[0].parts["payloads"] == 2 * gathered + gathered // 2
    assert found[1].bytes - found[0].bytes == 2 * gathered + gathered // 2


def test_gradients_of_all_outputs_live_until_the_last_kind_has_its_own():
    """The first kind has its own last. But replicas come after all exchanges. Columns that are cut have a copy."""
    a, b = Table("a", 100, 64, 1.0), Table("b", 100, 64, 1.0)
    problem = problem_of(a, b)
    on, outputs = problem.topology, 32 * 2 * 64 * 4
    for plan, needs in (
        ((row(a, on), column(b, 0)), [(outputs, outputs), (0, 0)]),
        ((column(a, 0), replica(b, on)), [(0, 0), (outputs, outputs)]),
        ((column(a, 0, 0, 32), column(a, 1, 32), row(b, on)), [(outputs, 0), (0, 0)]),
    ):
        each = local_of(Plan(plan), problem).values()
        assert [(n.get("gradient", 0), n["uncut"]) for n in each] == needs


def summed(plan: Plan, problem: Problem) -> list[int]:
    """[D] bytes of a plan as searches count them: sums over shards, and a local batch."""
    account = memory.memory_account(placements := merged_placements(plan.placements), problem)
    return (
        np.rint((account.base + account.device_loads(placements))[:, : account.phases].max(1))
        .astype(int)
        .tolist()
    )


JOBS = [
    Job(),
    Job(forward_payload="fp16"),
    Job(backward_payload="bf16"),
    Job(replica_optimizer="adam"),
    Job(forward_payload="bf16", backward_payload="fp16"),
]


@pytest.mark.parametrize("job", JOBS[:3])
@pytest.mark.parametrize("hardware", ["cpu-x", None])
@pytest.mark.parametrize("sequence", [False, True])
def test_searches_count_what_whole_tables_take(job, hardware, sequence):
    """Equal tables are largest in one phase. So their peaks add up, but for what a local batch adds then."""
    tables = [Table(f"t{i}", 1000, 64, 2.0, sequence=sequence) for i in range(8)]
    problem = replace(problem_of(*tables, hardware=hardware), job=job)
    local, each = (f(problem) for f in (memory.local_batch_bytes, memory.peak_bytes_function))
    for n_tables in range(1, len(tables)):
        plan = Plan(tuple(column(t, int(i >= n_tables)) for i, t in enumerate(tables)))
        used = memory.used_bytes(plan, problem)
        assert summed(plan, problem) == used
        # A quarter of the tables is half of an even share. With more, the local batch adds less.
        peaks = local + sum(
            each(sharding_kind_for_table("column", t), Shard.whole(t)) for t in tables[:n_tables]
        )
        assert peaks == used[0] if n_tables == 2 else peaks >= used[0] or n_tables == 1


@pytest.mark.parametrize("seed", range(40))
def test_sums_over_shards_are_what_a_plan_takes(seed):
    """To the byte, of all kinds, on two devices and on two hosts of two, with sequences and features."""
    pytest.importorskip("torchrec")
    import training
    from peaks import drawn

    rng = np.random.default_rng(seed)
    given = training.problem(*((1, 2), (2, 2))[seed // 2 % 2], ordered=seed % 5 == 0)
    given = replace(
        given,
        topology=replace(given.topology, hardware=[None, "cpu-x"][seed % 2]),
        job=JOBS[seed % len(JOBS)],
        optimizer=str(rng.choice(list(memory.STATE_BYTES))),
    )
    for problem, plan in ((given, training.draw(given, rng)), drawn(seed)):
        assert summed(plan, problem) == memory.used_bytes(plan, problem)


@pytest.mark.parametrize("job", JOBS[:3])
def test_sums_over_tables_are_what_a_device_has(job):
    """To the byte. But an op's cache has whole sets of rows, of all its tables together. Here all are as wide."""
    rng = np.random.default_rng(0)
    tables = [
        Table(
            f"t{i}",
            int(rng.integers(1, 10**6)),
            4 * int(rng.integers(1, 33)),
            float(rng.choice([0, 1, 7.5, 100])),
            features=1 + i % 3,
            weighted=i % 5 == 0,
            sequence=i % 7 == 0,
        )
        for i in range(200)
    ]
    host = replace(problem_of().topology, memory=(Memory("host", 1 << 40, 1.0),))
    some = tuple(replace(t, load_factor=(1.0, 0.0)[i % 2]) for i, t in enumerate(tables))
    cached = tuple(
        replace(t, load_factor=(1.0, 0.0, 0.3)[i % 3], dim=128 if i % 3 == 2 else t.dim)
        for i, t in enumerate(tables)
    )
    plan_of = lambda given: Plan(tuple(column(t, 0) for t in given))  # noqa: E731
    problem = replace(problem_of(), tables=some, job=job, topology=host)
    assert summed(plan_of(some), problem) == memory.used_bytes(plan_of(some), problem)
    problem = replace(problem, tables=cached)
    more = np.subtract(memory.used_bytes(plan_of(cached), problem), summed(plan_of(cached), problem))
    # Two ops: tables with pooled outputs, and sequences.
    assert more[1] == 0 and 0 <= more[0] < 2 * memory.CACHE_SET_ROWS * (128 * 4 + memory.CACHED_ROW_BYTES)


@pytest.mark.parametrize("optimizer", ["exact_sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("factor", [0.0, 0.1, 0.999])
def test_rows_in_host_memory_leave_a_cache_a_map_and_state_of_rows(factor, optimizer):
    plain = replace(
        problem_of(optimizer=optimizer),
        topology=Topology((Device(1 << 30),) * 2, memory=(Memory("host", 1 << 30, 1.0),)),
    )
    tiered = replace(TABLE, load_factor=factor)
    (a_cell, a_row), peak = memory.STATE_BYTES[optimizer], memory.peak_bytes_function(plain)
    for width in (4, 8):
        shard = Shard(tiered, 0, 1000, 0, width)
        cached = round(1000 * factor)
        held = cached * (4 * width + 16) + 1000 * 4 * (factor > 0), 1000 * a_row
        assert memory.resident_bytes(WHOLE_ROWS, shard, plain) == held
        assert memory.host_tier_bytes(shard, plain) == 1000 * width * (4 + a_cell)
        # All else is the same: ids and outputs.
        whole = Shard(TABLE, 0, 1000, 0, width)
        resident = sum(memory.resident_bytes(WHOLE_ROWS, whole, plain))
        assert peak(WHOLE_ROWS, whole) - peak(WHOLE_ROWS, shard) == resident - sum(held)
    assert memory.host_tier_bytes(whole, plain) == 0


def cached(name: str, rows: int, dim: int, load_factor: float = 0.2, precision: str = "fp32") -> Table:
    return Table(name, rows, dim, 2.0, load_factor=load_factor, precision=precision)


@pytest.mark.parametrize(
    "tables",
    [
        (cached("a", 4_000_000, 128), cached("b", 1_000_000, 1024)),
        (cached("a", 4_000_000, 128), cached("b", 1_000_000, 1024, 1.0)),
        (cached("a", 4_000_000, 128), cached("b", 1_000_000, 1024, 0.0)),
        (cached("a", 4_000_001, 128, 0.1), cached("b", 33, 64, 0.5), cached("c", 1000, 512, 0.9)),
        (cached("a", 9, 8),),
        (cached("a", 4_000, 128, precision="fp16"), cached("b", 1_000, 256, precision="fp16")),
    ],
)
def test_a_cache_is_as_wide_as_the_widest_shard_of_its_op(tables, monkeypatch):
    """By FBGEMM's own op, on the meta device, as if there was a card with room for it."""
    pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    where = {
        "fused": EmbeddingLocation.DEVICE,
        "fused_uvm": EmbeddingLocation.MANAGED,
        "fused_uvm_caching": EmbeddingLocation.MANAGED_CACHING,
    }
    few = [t for t in tables if 0 < t.load_factor < 1]
    op = SplitTableBatchedEmbeddingBagsCodegen(
        [(t.rows, t.dim, where[t.kernel], ComputeDevice.CUDA) for t in tables],
        device=torch.device("meta"),
        weights_precision=SparseType(tables[0].precision),
        cache_load_factor=sum(t.rows * t.load_factor for t in few) / sum(t.rows for t in few),
    )
    names = ("weights_dev", "lxu_cache_weights", "lxu_cache_state", "lxu_state", "cache_index_table_map")
    real = sum(x.numel() * x.element_size() for x in (getattr(op, name) for name in names))
    own = Topology((Device(1 << 40),), memory=(Memory("host", 1 << 40, 1.0),))
    problem = Problem("p", tables, own, 64)
    [device] = memory.memory_by_part(Plan(tuple(column(t, 0) for t in tables)), problem)
    # A row of a cache's last set more or less.
    assert device.parts["weights"] == pytest.approx(real, rel=1e-6, abs=32 * (4 * op.max_D_cache + 16))
    # Of another precision, or on another device, a table has a cache of another op.
    alone = [memory.memory_by_part(Plan((column(t, 0),)), replace(problem, tables=(t,)))[0] for t in tables]
    other = (tables[0], *(replace(t, precision="bf16") for t in tables[1:]))
    if tables[0].precision == "fp32":
        apart = memory.memory_by_part(
            Plan(tuple(column(t, 0) for t in other)), replace(problem, tables=other)
        )[0]
        halves = [
            memory.memory_by_part(Plan((column(t, 0),)), replace(problem, tables=(t,)))[0] for t in other[1:]
        ]
        if len(tables) == 2:
            assert apart.parts["weights"] == sum(x.parts["weights"] for x in (alone[0], *halves))


@pytest.mark.parametrize("rows, cached_rows", [(62, 32), (64, 32), (66, 64)])
def test_a_cache_has_whole_sets_of_rows(rows, cached_rows):
    table = cached("a", rows, 8, 0.5)
    own = Topology((Device(1 << 40),), memory=(Memory("host", 1 << 40, 1.0),))
    [device] = memory.memory_by_part(Plan((column(table, 0),)), Problem("p", (table,), own, 64))
    # Each with its id and its last batch. All rows are mapped to their table.
    assert device.parts["weights"] == cached_rows * (8 * 4 + 16) + rows * 4


def test_managed_collision_takes_bytes_for_each_row_and_lookup():
    """Bytes of rows and lookups of the device's range. Searches count the same."""
    table = replace(TABLE, managed_collision=ManagedCollision(32, 40))
    plain, problem = problem_of(TABLE), problem_of(table)
    two = problem.topology
    for placed, rows, lookups in ((column(table, 0), 1000, 64 * 3), (row(table, two), 500, 64 * 1.5)):
        before = replace(placed, shard=replace(placed.shard, table=TABLE))
        more = (
            memory.memory_by_part(Plan((placed,)), problem)[0].parts["weights"]
            - memory.memory_by_part(Plan((before,)), plain)[0].parts["weights"]
        )
        assert more == rows * 32 + lookups * 40
    assert table_peak_bytes(table, problem) - table_peak_bytes(TABLE, plain) == 1000 * 32 + 64 * 3 * 40


@pytest.mark.parametrize("eviction, row_bytes", [("step", 17), ("timestamp_lfu", 25)])
def test_dynamicemb_takes_its_id_digest_and_scores_and_a_size_of_each_bucket(eviction, row_bytes):
    """LinearBucketTable of recsys-examples allocates 8, 1 and 8 bytes a row, and 4 for 128 rows."""
    collision = ManagedCollision(form="dynamicemb", eviction=eviction)
    plain, hashed = replace(TABLE, rows=1024), replace(TABLE, rows=1024, managed_collision=collision)
    used = [
        memory.used_bytes(Plan((row(t, problem_of(t).topology),)), problem_of(t)) for t in (hashed, plain)
    ]
    assert np.subtract(*used).tolist() == [512 * row_bytes + 4 * 4] * 2


def test_a_host_that_cannot_hold_its_rows_is_named():
    table = replace(TABLE, load_factor=0.5)
    own = Topology(
        (Device(1 << 30, host="a"), Device(1 << 30, host="b")), memory=(Memory("host", 31_999, 1.0),)
    )
    plan = Plan((Placement("column", Shard.whole(table), (1,)),))
    with pytest.raises(Infeasible, match="host 'b' of problem .* would hold 32000 bytes of rows"):
        memory.require_fits(plan, Problem("p", (table,), own, 64))
    memory.require_fits(plan, Problem("p", (table,), replace(own, memory=(Memory("host", 32_000, 1.0),)), 64))


def test_rows_of_a_divided_table_take_the_ids_in_them():
    problem = problem_of(hardware="cpu-some", n=4)
    parts = [shard for _, shard in shards_by_device(row(TABLE, problem.topology))]
    kind = next(sharding_kind for sharding_kind in SHARDING_KINDS.values() if sharding_kind.name == "row")
    assert sum(exchanged_amounts(kind, shard, problem)[0] for shard in parts) == 64 * (3 * 8 + 4 * 4)


def test_a_short_last_range_of_rows_takes_no_more_than_the_others():
    """Each device sends ids to as many as there are, however few rows the last has."""
    table = Table("t", 100_001, 8, 3.0)
    problem = problem_of(table, n=2)
    kind = next(sharding_kind for sharding_kind in SHARDING_KINDS.values() if sharding_kind.divides_rows)
    first, last = (Shard(table, lo, hi, 0, 8) for lo, hi in ((0, 100_000), (100_000, 100_001)))
    peak = memory.peak_bytes_function(problem)
    assert peak(kind, last) < peak(kind, first)


def test_what_does_not_fit_is_said_by_part_and_by_how_much():
    problem = replace(problem_of(), topology=on_hosts("xx", 40_000))
    with pytest.raises(
        Infeasible,
        match=r"device 0 .* would hold 100096 bytes \(weights .*\); it may hold "
        r"40000 bytes, 60096 bytes too little. It would fit with",
    ):
        lower(Plan((column(TABLE, 0), column(OTHER, 0))), problem)


LONG = Table("s", 1000, 4, 4000.0, sequence=True, collection="sequences")
SHORT = Table("b", 1000, 8, 2.0, collection="tables")


def test_a_divided_sequence_keeps_where_each_id_was_by_hand():
    """Eleven local batches: 3 in the pipeline, 2 each of ids permuted, arrived and bucketized, and places."""
    problem = problem_of(LONG, hardware="cpu-some", batch=256)
    plan = Plan((row(LONG, problem.topology),))
    local = 128 * 4000 * 8
    [buffers] = local_of(plan, problem).values()
    assert buffers["sent"] == 3 * local + 128 * 3 * 4
    [device, _] = memory.memory_by_part(plan, problem)
    assert device.parts["ids"] == pytest.approx(11 * local, rel=1e-3)
    pooled = replace(LONG, sequence=False)
    [buffers] = local_of(Plan((row(pooled, problem.topology),)), replace(problem, tables=(pooled,))).values()
    assert buffers["sent"] == 2 * local + 128 * 3 * 4


def test_memory_of_the_dense_part_is_in_the_phases_in_which_it_is_there():
    plan, plain = Plan((column(TABLE, 0), column(OTHER, 1))), problem_of()
    before = memory.memory_by_part(plan, plain)[0]
    always = replace(plain, job=Job(dense_bytes=1000))
    assert memory.used_bytes(plan, always) == [n + 1000 for n in memory.used_bytes(plan, plain)]
    for name, phase, part in (
        ("activation_bytes", "dense part", "activations"),
        ("update_bytes", "dense update", "dense gradients"),
    ):
        found = memory.memory_by_part(plan, replace(plain, job=Job(**{name: GIB})))[0]
        # What is alive in another phase does not add up with it.
        assert found.phase == phase and found.parts[part] == GIB and found.bytes < before.bytes + GIB
    three = memory.memory_by_part(plan, replace(plain, job=Job(input_bytes=GIB)))[0]
    assert three.parts["ids"] - 3 * GIB < before.bytes


def test_pipelines_that_do_more_ahead_take_more():
    plan, plain = Plan((column(TABLE, 0), column(OTHER, 1))), problem_of(hardware="cpu-some")
    order = ["none", "sparse_dist", "fused", "semi_sync"]
    found = [memory.used_bytes(plan, replace(plain, job=Job(name))) for name in order]
    assert found == sorted(found) and found[0] < found[1] < found[3]


def test_replicas_under_a_pipeline_that_looks_up_ahead_are_refused():
    problem = replace(problem_of(), job=Job("semi_sync"))
    plan = Plan((replica(TABLE, problem.topology), column(OTHER, 1)))
    with pytest.raises(
        ShardCoreError, match="by data_parallel; data_parallel has replicas, which the semi_sync"
    ):
        lower(plan, problem)


@pytest.mark.long
@pytest.mark.parametrize("divided", [True, False])
def test_long_sequences_take_what_torch_sees(divided):
    """The holder has by far the most. TR 1924: ids of 9 to 11 local batches, outputs of the global one.

    The median of the steps: on a busy machine gloo's threads may free a buffer of ids a moment late.
    """
    pytest.importorskip("torchrec")
    import peaks

    two = Topology((Device(2**34, host="h"),) * 2, "cpu")
    problem = Problem("long", (SHORT, LONG), two, 256)
    plan = Plan((column(SHORT, 0), row(LONG, two) if divided else column(LONG, 1)))
    [found] = peaks.measured([(problem, plan, ())])
    assert memory.used_bytes(plan, problem)[1] == pytest.approx(statistics.median(found[1]), rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("seed", [100, 101])
def test_the_count_is_the_peak_that_torch_sees(seed):
    """In TorchRec's own processes, under its pipeline, where most of it is weights, or ids.

    Where outputs dominate steps differ: gloo's threads free their buffers sooner or later.
    """
    pytest.importorskip("torchrec")
    import peaks

    [row] = peaks.compared([seed])
    assert all(-peaks.BELOW <= share <= peaks.ABOVE for share in peaks.off(row, "used_bytes")), row
