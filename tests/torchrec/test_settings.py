"""Kernels, memory tiers and quantised collectives of a TorchRec plan: kept through ours, named where a price
leaves them out."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import training
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from fbgemm_gpu.tbe.ssd import ASSOC, SSDTableBatchedEmbeddingBags
from torchrec.distributed.batched_embedding_kernel import _populate_ssd_tbe_params
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_sharding import group_tables
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import (
    CacheParams,
    CacheStatistics,
    CommOp,
    DataType,
    KeyValueParams,
    ShardingPlan,
)
from torchrec.distributed.utils import add_params_from_parameter_sharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType, TimestampBasedEvictionPolicy
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardcore.core.access_statistics import ManagedCollision
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.io import files
from shardcore.search import Budget
from shardcore.step.kinds import WHOLE_ROWS, shards_by_device
from shardcore.step.memory import MIB, host_tier_bytes, private_cache_mib, resident_bytes
from shardcore.torchrec.plan_files import read_qcomms, read_torchrec, write_torchrec
from shardcore.torchrec.planner import ShardCorePlanner
from shardcore.torchrec.settings import (
    job_from_qcomms,
    kernel_settings,
    payloads_of_sharders,
    qcomms_from_job,
    unpriced_plan_lines,
)
from shardcore.torchrec.sharding_plan import from_torchrec, to_torchrec

MODULE = training.Model()
GIVEN = training.problem(1, 2)
QCOMMS = QCommsConfig(CommType.FP16, CommType.BF16, backward_loss_scale=0.5)


def whole(device: int = 0) -> Plan:
    return Plan(tuple(Placement("column", Shard.whole(t), (device,)) for t in GIVEN.tables))


def tiered(**cache) -> ShardingPlan:
    """Table a cached in UVM, d on SSD, left.c with outputs of its own type; b replicated."""
    tables = {t.name: t for t in GIVEN.tables}
    plan = to_torchrec(
        Plan(
            (
                *(p for p in whole().placements if p.shard.table.name != "b"),
                Placement("data_parallel", Shard.whole(tables["b"]), (0, 1)),
            )
        ),
        GIVEN,
        MODULE,
    )
    left = plan.plan["left"]
    cache = CacheParams(
        **{"algorithm": CacheAlgorithm.LFU, "load_factor": 0.2, "precision": DataType.FP16} | cache
    )
    left["a"] = replace(left["a"], compute_kernel="fused_uvm_caching", cache_params=cache, enforce_hbm=False)
    left["c"] = replace(left["c"], output_dtype=DataType.BF16)
    left["d"] = replace(
        left["d"],
        compute_kernel="key_value",
        key_value_params=KeyValueParams(ssd_storage_directory="/x", ps_hosts=(("::1", 2000), ("::1", 2001))),
    )
    return plan


def sender(qcomms=QCOMMS) -> EmbeddingBagCollectionSharder:
    registry = get_qcomm_codecs_registry(qcomms, device=torch.device("cuda"))
    return EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)


def test_a_plan_that_was_read_is_written_again_as_it_was(tmp_path):
    theirs, path = tiered(), tmp_path / "plan.json"
    ours = from_torchrec(theirs, GIVEN, MODULE)
    assert set(ours.provenance["torchrec"]) == {"a", "left.c", "d"}
    assert to_torchrec(ours, GIVEN, MODULE) == theirs
    files.write_plan(path, ours, GIVEN)
    assert to_torchrec(files.read_plan(path, GIVEN), GIVEN, MODULE) == theirs


def test_settings_go_with_their_tables():
    moved = Plan(whole(1).placements, from_torchrec(tiered(), GIVEN, MODULE).provenance)
    found, old = to_torchrec(moved, GIVEN, MODULE).plan["left"], tiered().plan["left"]
    assert {n: s.ranks for n, s in found.items()} == {n: [1] for n in "abcd"}
    assert all(kernel_settings(found[n], n) == kernel_settings(old[n], n) != {} for n in "acd")
    assert (
        to_torchrec(moved, GIVEN, MODULE, like=to_torchrec(whole(), GIVEN, MODULE))
        .plan["left"]["a"]
        .compute_kernel
        == "fused"
    )


def test_a_plan_of_plain_kernels_has_no_settings():
    assert from_torchrec(to_torchrec(whole(), GIVEN, MODULE), GIVEN, MODULE).provenance == {
        "algorithm": "torchrec plan"
    }


def test_no_kernel_is_lost_in_a_replica():
    replicated = Plan(tuple(Placement("data_parallel", Shard.whole(t), (0, 1)) for t in GIVEN.tables))
    with pytest.raises(ShardCoreError, match="replicates table 'a', which has kernel fused_uvm_caching"):
        to_torchrec(replicated, GIVEN, MODULE, like=tiered())


class Statistics(CacheStatistics):
    expected_lookups, cacheability = 1.0, 0.5

    def expected_miss_rate(self, clf: float) -> float:
        return 1 - clf


def test_load_factors_reach_torchrec():
    tables = tuple(replace(t, load_factor={"a": 0.25, "d": 0.0}.get(t.name, 1.0)) for t in GIVEN.tables)
    given = replace(
        GIVEN, tables=tables, topology=replace(GIVEN.topology, memory=(Memory("host", 1 << 30, 25.0),))
    )
    plan = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in tables))
    made = to_torchrec(plan, given, MODULE)
    found = {name: sharding for module in made.plan.values() for name, sharding in module.items()}
    assert (found["a"].compute_kernel, found["d"].compute_kernel) == ("fused_uvm_caching", "fused_uvm")
    assert found["a"].cache_params == CacheParams(CacheAlgorithm.LRU, load_factor=0.25)
    assert found["d"].cache_params is None
    assert {found[name].compute_kernel for name in found.keys() - {"a", "d"}} == {"fused"}
    # What else a TorchRec plan says of a cache stays.
    again = to_torchrec(plan, given, MODULE, like=tiered())
    kept = next(module["a"] for module in again.plan.values() if "a" in module).cache_params
    assert (kept.algorithm, kept.precision, kept.load_factor) == (CacheAlgorithm.LFU, DataType.FP16, 0.25)


def test_what_no_file_can_hold_is_read_and_not_dropped():
    theirs = tiered(stats=Statistics())
    ours = from_torchrec(theirs, GIVEN, MODULE)
    with pytest.raises(ShardCoreError, match="table 'a', cache_params, stats is a Statistics; .* as `like`"):
        to_torchrec(ours, GIVEN, MODULE)
    assert to_torchrec(ours, GIVEN, MODULE, like=theirs) == theirs


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"nowhere": {"compute_kernel": "fused"}}, "settings of table 'nowhere'"),
        ({"a": {"compute_kernel": "fused", "ranks": [1]}}, "table 'a' of the plan's provenance has 'ranks'"),
        ({"a": {"cache_params": {"load_factor": 0.2}}}, "and no compute_kernel"),
        ({"a": {"compute_kernel": "fused", "colour": "blue"}}, "'colour'"),
        ({"a": {"compute_kernel": "fused", "output_dtype": "FP3"}}, "'FP3'; known are"),
    ],
)
def test_settings_are_checked(settings, said):
    with pytest.raises(ShardCoreError, match=said):
        to_torchrec(Plan(whole().placements, {"torchrec": settings}), GIVEN, MODULE)


def test_quantised_collectives_are_kept_in_the_file(tmp_path):
    path, plan = tmp_path / "plan.json", tiered()
    for qcomms in (QCOMMS, QCommsConfig(CommType.FP8, CommType.FP8, fp8_quantize_dim=32), None):
        write_torchrec(path, plan, qcomms)
        assert read_torchrec(path) == plan
        assert read_qcomms(path) == qcomms
    write_torchrec(path, plan, QCOMMS)
    path.write_text(path.read_text().replace("FP16", "FP32"))
    with pytest.raises(ShardCoreError, match="edited"):
        read_qcomms(path)


def test_what_a_price_leaves_out_is_named():
    sharder = sender()
    assert unpriced_plan_lines(to_torchrec(whole(), GIVEN, MODULE), [EmbeddingBagCollectionSharder()]) == []
    said = unpriced_plan_lines(tiered(), [sharder])
    assert len(said) == 6
    leave = "replicas (data_parallel) of 'b' leave the fused optimizer: a dense optimizer of the job has to train them"
    assert said[0].startswith(f"{leave}; they are priced as if updated in backward, and its step")
    assert unpriced_plan_lines(tiered(), [sharder], dense_update=True)[0] == leave
    said = said[1:]
    assert said[0].startswith(
        "table 'a' of module 'left' is priced as fused, in device memory; "
        "it has kernel fused_uvm_caching, cache_params="
    )
    assert said[3] == (
        "pooled_embeddings_all_to_all of EmbeddingBagCollectionSharder is priced with fp32 "
        "forward, fp32 backward; it sends fp16 forward, bf16 backward"
    )
    adam = replace(GIVEN, optimizer="adam", job=Job(replica_optimizer="adagrad"))
    assert (
        "fused optimizer (adam): a dense optimizer of the job (adagrad)"
        in unpriced_plan_lines(tiered(), [], adam)[0]
    )
    assert "the job (adam) has to train" in unpriced_plan_lines(tiered(), [], replace(adam, job=Job()))[0]
    of_plan = said[:3]
    plain = to_torchrec(whole(), GIVEN, MODULE)
    as_sent = Job(forward_payload="fp16", backward_payload="bf16")
    sending = replace(GIVEN, job=as_sent)
    assert unpriced_plan_lines(tiered(), [sharder], sending)[1:] == of_plan
    assert len(unpriced_plan_lines(tiered(), [sharder], replace(GIVEN, job=Job(forward_payload="fp16")))) == 6
    assert unpriced_plan_lines(plain, [EmbeddingBagCollectionSharder()], sending) == [
        f"pooled_embeddings_{op} of EmbeddingBagCollectionSharder is priced with fp16 forward, bf16 backward; it "
        "sends fp32 forward, fp32 backward"
        for op in ("all_to_all", "reduce_scatter")
    ]


def test_the_payloads_of_sharders_are_priced():
    sharder = sender()

    def planned(sharders, job=None):
        planner = ShardCorePlanner(
            GIVEN.topology,
            4,
            model=AnalyticModel(Setting("cpu", 8)),
            job=job,
            budget=Budget(evals=200),
            lookups=dict.fromkeys(("f0", "f1", "f2", "f3", "f4"), 2.0),
        )
        planner.plan(MODULE, sharders)
        return planner

    assert (
        planned([sharder]).problem.job
        == job_from_qcomms(QCOMMS)
        == Job(forward_payload="fp16", backward_payload="bf16")
    )
    # Sharders that take no module of the model do not count.
    assert planned([EmbeddingCollectionSharder(), sharder]).problem.job == job_from_qcomms(QCOMMS)
    # A job that is given counts as given. Sharders that differ are told apart.
    for said in (
        planned([sharder], Job()).unpriced,
        planned([sharder, EmbeddingBagCollectionSharder()]).unpriced,
    ):
        assert [line.split()[0] for line in said if "it sends" in line] == [
            "pooled_embeddings_all_to_all",
            "pooled_embeddings_reduce_scatter",
        ]


def test_the_sharder_of_a_wrapper_sends_as_the_one_within():
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder

    within = sender()
    assert payloads_of_sharders([FeatureProcessedEmbeddingBagCollectionSharder(within)]) == ("fp16", "bf16")
    assert payloads_of_sharders([FeatureProcessedEmbeddingBagCollectionSharder()]) == ("fp32", "fp32")


@pytest.mark.parametrize(
    "qcomms, payloads",
    [
        (QCommsConfig(CommType.INT8, CommType.FP16), ("int8", "fp16")),
        (QCommsConfig(CommType.FP8, CommType.FP8, fp8_quantize_dim=256), ("fp8-256", "fp8-256")),
        (QCommsConfig(CommType.FP8, CommType.BF16), ("fp8", "bf16")),
        (QCommsConfig(CommType.MX4, CommType.MX4, mx4_quantize_dim=64), ("mx4-64", "mx4-64")),
        (QCommsConfig(CommType.FP32, CommType.MX4), ("fp32", "mx4")),
        # Left out backward, TorchRec's block is that of forward.
        (QCommsConfig(CommType.MX4, CommType.MX4, mx4_quantize_dim=16), ("mx4-16", "mx4-16")),
        (
            QCommsConfig(CommType.MX4, CommType.MX4, mx4_quantize_dim=16, mx4_quantize_dim_bwd=32),
            ("mx4-16", "mx4"),
        ),
        (
            QCommsConfig(CommType.FP8, CommType.FP8, fp8_quantize_dim=256, fp8_quantize_dim_bwd=0),
            ("fp8-256", "fp8"),
        ),
    ],
)
def test_codecs_with_scales_are_payloads(qcomms, payloads):
    """Also where TorchRec sends others in a reduce-scatter, and back to a config."""
    sharders, job = [sender(qcomms)], job_from_qcomms(qcomms)
    assert tuple(job.payloads.values()) == payloads == payloads_of_sharders(sharders)
    assert job_from_qcomms(qcomms_from_job(job)) == job
    given = replace(GIVEN, job=job)
    plain = to_torchrec(whole(), GIVEN, MODULE)
    assert not [line for line in unpriced_plan_lines(plain, sharders, given) if "is priced with" in line]


def test_payloads_that_no_price_has_are_refused_by_name():
    odd = QCommsConfig(CommType.FP8, CommType.FP16, fp8_quantize_dim=6)
    with pytest.raises(ShardCoreError, match="QCommsConfig has forward_precision fp8-6; priced are fp32"):
        job_from_qcomms(odd)


def test_index_deduplication_of_sharders_is_told():
    plain = to_torchrec(whole(), GIVEN, MODULE)
    assert unpriced_plan_lines(plain, [EmbeddingCollectionSharder()]) == []
    assert unpriced_plan_lines(plain, [EmbeddingCollectionSharder(use_index_dedup=True)]) == [
        "EmbeddingCollectionSharder has use_index_dedup, which sends each id once; ids are priced as if it sent all"
    ]


def ssd_problem() -> tuple[Problem, EmbeddingBagCollection]:
    """Tables of two widths and precisions on SSD, two of them equal, and one in device memory."""
    shapes = {
        "small": (1_000, 64, "fp32", 0.05),
        "one": (3_000_000, 64, "fp32", 0.01),
        "two": (3_000_000, 64, "fp32", 0.01),
        "most": (700_001, 64, "fp32", 0.2),
        "fp16": (2_000_000, 32, "fp16", 0.1),
        "wide": (100_000, 512, "fp32", 0.001),
        "here": (1_000, 64, "fp32", 1.0),
    }
    tables = tuple(
        Table(
            name, rows, dim, 2.0, precision=precision, load_factor=share, tier="ssd" if share < 1 else "host"
        )
        for name, (rows, dim, precision, share) in shapes.items()
    )
    types = {"fp32": DataType.FP32, "fp16": DataType.FP16}
    configs = [
        EmbeddingBagConfig(
            name=t.name,
            num_embeddings=t.rows,
            embedding_dim=t.dim,
            data_type=types[t.precision],
            feature_names=[t.name],
        )
        for t in tables
    ]
    memory = (Memory("ssd", 1 << 34, 2.0),)
    topology = Topology((Device(1 << 34),) * 2, memory=memory)
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    return Problem("ssd", tables, topology, 64, "rowwise_adagrad"), module


def built(sharding_plan: ShardingPlan, problem: Problem, rank: int) -> list[tuple[list[str], dict]]:
    """Tables of each op on SSD of a rank, and the arguments that TorchRec gives it."""
    ours, local = {t.name: t for t in problem.tables}, []
    for name, sharding in sharding_plan.plan[""].items():
        for shard in (s for s in sharding.sharding_spec.shards if s.placement.rank() == rank):
            rows, columns = shard.shard_sizes
            local.append(
                ShardedEmbeddingTable(
                    num_embeddings=ours[name].rows,
                    embedding_dim=ours[name].dim,
                    name=name,
                    data_type=DataType[ours[name].precision.upper()],
                    feature_names=[name],
                    embedding_names=[name],
                    pooling=PoolingType.SUM,
                    local_rows=rows,
                    local_cols=columns,
                    compute_kernel=EmbeddingComputeKernel(sharding.compute_kernel),
                    fused_params=add_params_from_parameter_sharding(None, sharding),
                )
            )
    [groups] = group_tables([local])
    return [
        ([t.name for t in group.embedding_tables], _populate_ssd_tbe_params(group))
        for group in groups
        if group.compute_kernel is EmbeddingComputeKernel.KEY_VALUE
    ]


@pytest.mark.parametrize("kind", ["column", "row", "cut"])
def test_memory_of_tables_on_ssd_is_that_of_the_ops_that_torchrec_makes(kind):
    """Each table is an op with its own cache: weights, id and time of each cached row, and FBGEMM's state."""
    problem, module = ssd_problem()
    placements = []
    for t in problem.tables:
        whole = Shard.whole(t)
        if kind == "row":
            placements.append(Placement("row", whole, (0, 1)))
        elif kind == "cut":
            halves = replace(whole, col_hi=t.dim // 2), replace(whole, col_lo=t.dim // 2)
            placements += [Placement("column", half, (d,)) for d, half in enumerate(halves)]
        else:
            placements.append(Placement("column", whole, (0,)))
    plan = Plan(tuple(placements))
    theirs = to_torchrec(plan, problem, module, "cuda")
    held = {s.table.name: s for p in plan.placements for d, s in shards_by_device(p) if d == 0}
    on_ssd = {name for name, s in held.items() if s.table.in_host_memory}
    ops = built(theirs, problem, 0)
    assert sorted(names for names, _ in ops) == sorted([name] for name in on_ssd)
    for [name], arguments in ops:
        shard, rows = held[name], arguments["cache_sets"] * ASSOC
        a_row = shard.width * arguments["weights_precision"].bit_rate() // 8
        [(state, _, dtype)] = EmbOptimType.EXACT_ROWWISE_ADAGRAD.ssd_state_splits([(shard.rows, shard.width)])
        expected = rows * (a_row + 2 * torch.int64.itemsize), state.dev_size * dtype.itemsize
        assert resident_bytes(WHOLE_ROWS, shard, problem) == expected, name
        assert host_tier_bytes(shard, problem) == shard.rows * a_row
        # A whole set, or whole MiB, may be more than was asked for.
        assert abs(rows * a_row - shard.table.load_factor * shard.rows * a_row) <= max(MIB, ASSOC * a_row)


def test_settings_of_tables_on_ssd_stay_and_are_written_again_the_same():
    problem, module = ssd_problem()
    plan = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in problem.tables))
    theirs = to_torchrec(plan, problem, module, "cuda")
    of_module = theirs.plan[""]
    of_module["one"].key_value_params = replace(
        of_module["one"].key_value_params, ssd_storage_directory="/ssd"
    )
    again = to_torchrec(from_torchrec(theirs, problem, module), problem, module, "cuda")
    assert again.plan[""]["one"].key_value_params == of_module["one"].key_value_params
    assert {n: s.key_value_params for n, s in again.plan[""].items()} == {
        n: s.key_value_params for n, s in of_module.items()
    }
    assert not unpriced_plan_lines(again, [], problem)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "partial_rowwise_adam", "adam"])
def test_memory_of_kv_zch_is_that_of_its_op_and_its_blocks(optimizer, precision):
    """By FBGEMM's own law of a row, and the header that TorchRec's eviction policies ask for."""
    table = Table(
        "t",
        4_000_000,
        68,
        2.0,
        precision=precision,
        load_factor=0.01,
        managed_collision=ManagedCollision(form="kv_zch", eviction="timestamp", buckets=20),
    )
    topology = Topology((Device(1 << 34),) * 2, memory=(Memory("host", 1 << 40, 20.0),))
    problem, shard = Problem("kv", (table,), topology, 64, optimizer), Shard(table, 0, 2_000_000, 0, 68)
    types = DataType[precision.upper()]
    # A virtual table has as many rows as there may be ids.
    virtual = ShardedEmbeddingTable(
        num_embeddings=1 << 40,
        embedding_dim=68,
        name="t",
        data_type=types,
        feature_names=["t"],
        embedding_names=["t"],
        local_rows=1 << 39,
        local_cols=68,
        compute_kernel=EmbeddingComputeKernel(table.kernel),
        use_virtual_table=True,
        total_num_buckets=20,
        fused_params={"max_l1_cache_size": private_cache_mib(shard)},
    )
    [[group]] = group_tables([[virtual]])
    arguments = _populate_ssd_tbe_params(group)
    theirs = EmbOptimType[{"rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}.get(optimizer, optimizer.upper())]
    each = arguments["weights_precision"].bit_rate() // 8
    row = SSDTableBatchedEmbeddingBags.cache_row_dim.func(
        SimpleNamespace(
            max_D=68,
            enable_optimizer_offloading=True,
            load_ckpt_without_opt=False,
            optimizer_state_dim=-(-theirs.state_size_nbytes(68) // each),
        )
    )
    policy = TimestampBasedEvictionPolicy()
    policy.init_metaheader_config(types, 68)
    header = policy.get_meta_header_len() * each
    on_device = sum(state.dev_size for state, _, _ in theirs.ssd_state_splits([(10, 68)], {}, True))
    cached = arguments["cache_sets"] * ASSOC * (row * each + 2 * torch.int64.itemsize)
    assert resident_bytes(WHOLE_ROWS, shard, problem) == (cached, on_device)
    assert host_tier_bytes(shard, problem) == 2_000_000 * (header + row * each)


def test_hash_tables_of_other_kernels_are_not_exported():
    problem, module = ssd_problem()
    other = ManagedCollision(form="dynamicemb", eviction="lfu")
    tables = (*problem.tables[:-1], replace(problem.tables[-1], rows=1024, managed_collision=other))
    configs = [config for config in module.embedding_bag_configs()]
    configs[-1].num_embeddings = 1024
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    plan = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in tables))
    with pytest.raises(
        ShardCoreError, match="'here' is a hash table of form dynamicemb, which ShardCore prices"
    ):
        to_torchrec(plan, replace(problem, tables=tables), module, "cuda")


@pytest.mark.parametrize("precision", [CommType.FP8, CommType.FP16, CommType.MX4])
@pytest.mark.parametrize("field", ["output_dtype", "fp8_output_dtype"])
def test_output_types_are_refused_wherever_they_arrive(field, precision):
    """Codecs are read as their config is."""
    config = QCommsConfig(precision, precision, **{field: SparseType.BF16})
    for read in (lambda: job_from_qcomms(config), lambda: payloads_of_sharders([sender(config)])):
        with pytest.raises(ShardCoreError, match="output_dtype .*outputs are priced in FP32 at both ends"):
            read()


def test_operations_without_a_codec_send_fp32():
    registry = get_qcomm_codecs_registry(QCOMMS, [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL], torch.device("cuda"))
    some = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    assert payloads_of_sharders([some]) == ("fp32", "fp32")
    assert payloads_of_sharders([EmbeddingCollectionSharder(qcomm_codecs_registry=registry)]) == (
        "fp32",
        "fp32",
    )
    said = unpriced_plan_lines(to_torchrec(whole(), GIVEN, MODULE), [some], GIVEN)
    assert [line.split()[0] for line in said] == ["pooled_embeddings_all_to_all"]
