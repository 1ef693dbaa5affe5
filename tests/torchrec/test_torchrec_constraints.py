"""TorchRec's ParameterConstraints in a plan: kinds, widths, kernels and lookups."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from planning import CONSTRAINTS, MODEL, MODULE, planner, table_in
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner import Topology as TheirTopology
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.cost.analytic import AnalyticModel
from shardcore.step.kinds import SHARDING_KINDS
from shardcore.torchrec.constraints import constraints_by_problem_name, lookups_per_sample
from shardcore.torchrec.modules import tables_of_model


def of_one_table(types=None, *, rows=4000, dim=4, memory=10**9, hosts=1, per_host=4, pooling=20.0, **asked):
    """The sharding of a table in a plan for these sharding types."""
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])],
    )
    on = Topology(tuple(Device(int(memory), host=f"h{h}") for h in range(hosts) for _ in range(per_host)))
    made = planner({"t": ParameterConstraints(pooling_factors=[pooling], sharding_types=types, **asked)}, on)
    return made.plan(module).plan[""]["t"]


def with_a(**asked) -> dict[str, ParameterConstraints]:
    return {**CONSTRAINTS, "a": ParameterConstraints(**{"pooling_factors": [10.0], **asked})}


def test_planner_keeps_constraints():
    from torchrec.distributed.types import CacheParams

    asked = ParameterConstraints(
        sharding_types=["table_wise"],
        compute_kernels=["dense", "fused_uvm_caching"],
        pooling_factors=[10.0],
        cache_params=CacheParams(load_factor=0.3),
        output_dtype=DataType.FP16,
    )
    made = planner(
        {
            **CONSTRAINTS,
            "a": asked,
            "b": ParameterConstraints(
                sharding_types=["table_wise", "column_wise"], pooling_factors=[1.0, 1.0]
            ),
        }
    )
    plan = made.plan(MODULE).plan["left"]["a"]
    assert made.problem.constraints.min_widths == (("a", 16),)
    assert len(plan.sharding_spec.shards) == 1
    assert (plan.compute_kernel, plan.cache_params, plan.output_dtype) == (
        "fused_uvm_caching",
        asked.cache_params,
        DataType.FP16,
    )
    with pytest.raises(ShardCoreError, match="sharding_types .*table_row_wise.*; with 4 devices"):
        planner(
            {
                **CONSTRAINTS,
                "a": ParameterConstraints(sharding_types=["table_row_wise"], pooling_factors=[1.0]),
            },
            algorithm="size_greedy",
        ).plan(MODULE)


def test_the_search_chooses_among_the_sharding_types_that_are_allowed():
    def kind(types, **given):
        return of_one_table(types, pooling=5000.0, **given).sharding_type

    assert kind(None) == "row_wise"  # replicas change the optimizer, so somebody has to name them
    assert kind(["data_parallel", "row_wise", "table_wise"]) == "data_parallel"
    assert kind(["table_wise", "row_wise"]) == "row_wise"  # too narrow for columns
    assert kind(["table_wise", "column_wise"]) == "table_wise"
    assert kind(["column_wise"]) == "column_wise"
    # One host has no grid.
    assert kind(["data_parallel", "grid_shard"]) == "data_parallel"
    assert kind(["table_row_wise"], hosts=2) == "table_row_wise"
    assert kind(["row_wise", "table_wise"], hosts=1, per_host=1) == "table_wise"


def test_a_table_larger_than_a_device_gets_the_allowed_type_that_fits():
    larger = {"rows": 1_000_000, "dim": 64, "memory": 150e6}
    assert of_one_table(["table_wise", "row_wise"], **larger).sharding_type == "row_wise"
    assert of_one_table(["table_wise", "column_wise"], **larger).sharding_type == "column_wise"
    on_hosts = of_one_table(["table_wise", "table_row_wise"], **larger, hosts=2)
    assert on_hosts.sharding_type == "table_row_wise"
    assert {s.shard_sizes[1] for s in on_hosts.sharding_spec.shards} == {64}
    with pytest.raises(Infeasible, match="'t'"):
        of_one_table(["table_wise"], **larger)


@pytest.mark.parametrize(
    "types, kinds",
    [
        (["grid_shard"], {"grid_shard"}),
        (["table_wise", "grid_shard"], {"table_wise", "grid_shard"}),
        (["column_wise"], {"column_wise"}),
        (["table_row_wise"], {"table_row_wise"}),
        (["table_row_wise", "column_wise"], {"table_row_wise", "column_wise"}),
        (["row_wise", "grid_shard"], {"row_wise", "grid_shard"}),
    ],
)
def test_a_plan_never_has_a_sharding_type_that_was_not_asked_for(types, kinds):
    """TorchRec has a type for whole tables of a kind and one for cut ones: either may be asked for alone."""
    for memory in (150e6, 1e9):
        found = of_one_table(types, rows=1_000_000, dim=64, memory=memory, hosts=2, per_host=2)
        assert found.sharding_type in kinds
    with pytest.raises(
        ShardCoreError,
        match="has sharding_types .'table_column_wise'.; ShardCore writes such plans as column_wise: allow it too",
    ):
        of_one_table(["table_column_wise"], rows=1_000_000, dim=64, memory=150e6)


def test_a_whole_table_that_may_only_be_cut_is_written_as_cut_into_one_part():
    """Tables of its collection that may be written so, too, join its op."""
    made = planner(
        {
            **with_a(sharding_types=["column_wise"]),
            "d": ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[4.0]),
        },
        algorithm="size_greedy",
    )
    plan = made.plan(MODULE)
    assert any("'left' runs table_wise and column_wise tables" in line for line in made.unpriced)
    assert {name: s.sharding_type for name, s in plan.plan["left"].items()} == {
        "a": "column_wise",
        "b": "column_wise",
        "c": "column_wise",
        "d": "table_wise",
    }
    assert all(len(s.sharding_spec.shards) == 1 for s in plan.plan["left"].values())


@pytest.mark.parametrize(
    "kernels, allowed",
    [
        (["fused"], {"table_wise", "row_wise"}),
        (["dense"], {"data_parallel"}),
        (["dense", "fused"], {"table_wise", "row_wise", "data_parallel"}),
    ],
)
def test_compute_kernels_say_whether_a_table_may_be_replicated(kernels, allowed):
    found = of_one_table(rows=40, pooling=500.0, compute_kernels=kernels)
    assert found.sharding_type in allowed and found.compute_kernel in kernels


def test_kernels_that_no_sharding_type_runs_are_refused():
    with pytest.raises(
        ShardCoreError,
        match="sharding_types .'table_wise'. and compute_kernels .'dense'.; "
        "'dense' runs data_parallel tables, and no others",
    ):
        of_one_table(["table_wise"], compute_kernels=["dense"])
    for kernel, why in (
        ("quant", "quant runs inference"),
        ("ssd_virtual_table", "has no rows to place"),
        ("fused_triton", "fused_triton is not FBGEMM's kernel, which cost models measured"),
        ("customized_kernel", "customized_kernel is not FBGEMM's kernel"),
    ):
        with pytest.raises(ShardCoreError, match=f"compute_kernels .*{kernel}.*{why}.*leave it out"):
            of_one_table(compute_kernels=[kernel])


def test_settings_that_contradict_the_job_are_refused_by_name():
    for field, value, why in (
        ("device_group", "cpu", "the topology's compute_device is 'cuda'"),
        ("feature_names", ["g"], "the table's are .'f'."),
        ("num_poolings", [2.0, 1.0], "one above 0 for each"),
        ("use_virtual_table", True, "a virtual table has no rows"),
    ):
        with pytest.raises(ShardCoreError, match=f"table 't' has {field} .*{why}"):
            of_one_table(**{field: value})
    of_one_table(num_poolings=[1.0], device_group="cuda", feature_names=["f"])


def test_pooling_factors_have_an_entry_for_each_feature():
    def lookups(factors, **more):
        made = planner({**CONSTRAINTS, "b": ParameterConstraints(pooling_factors=factors), **more})
        made.plan(MODULE)
        return {t.name: t.pooling for t in made.problem.tables}

    found = lookups([5.0, 1.0])
    # As TorchRec counts, each table has its own, though e has feature f2 too.
    assert (found["b"], found["e"], found["a"], found["left.c"]) == (6.0, 1.5, 10.0, 3.0)
    # TorchRec's default is one for each, unless another table of the feature says more.
    assert lookups([1.0])["b"] == 2.5
    assert lookups([1.0], e=ParameterConstraints())["b"] == 2.0
    for wrong in ([5.0], [5.0, 1.0, 1.0], []):
        with pytest.raises(ShardCoreError, match="'b' has pooling_factors .* for its 2 features f1, f2; it"):
            lookups(wrong)


def test_tables_on_ssd_have_the_cache_that_torchrec_gives_them():
    from torchrec.distributed.types import CacheParams, KeyValueParams

    rowwise = AnalyticModel(replace(MODEL.setting, optimizer="rowwise_adagrad"))
    theirs = TheirTopology(4, "cuda", hbm_cap=10**9, ssd_cap=10**12, ssd_mem_bw=3e6)

    def made(model=rowwise, topology=theirs, **asked):
        found = planner(with_a(compute_kernels=["key_value"], **asked), topology, model=model)
        sharding = found.plan(MODULE).plan["left"]["a"]
        return found, {t.name: t for t in found.problem.tables}["a"], sharding

    found, table, sharding = made()
    assert (table.tier, table.load_factor, sharding.compute_kernel) == ("ssd", 0.2, "key_value")
    assert found.topology.memory == (Memory("ssd", 4 * 10**12, 3.0),)
    assert "SSD is TorchRec's ssd_cap of each device, its link 3 GB/s (ssd_mem_bw)" in found.unpriced
    assert not any(line.startswith("table 'a'") for line in found.unpriced)
    # A fifth of the rows is less than a MiB here, and settings that are no placement stay.
    params = KeyValueParams(ssd_storage_directory="/ssd", max_l1_cache_size=7)
    found, table, sharding = made(key_value_params=params, cache_params=CacheParams(load_factor=0.7))
    assert table.load_factor == 0.2
    assert sharding.key_value_params.ssd_storage_directory == "/ssd"
    assert any("load_factor 0.7, which TorchRec 1.8 drops" in line for line in found.unpriced)
    with pytest.raises(ShardCoreError, match="no optimizer 'exact_sgd', only rowwise_adagrad"):
        made(MODEL)
    with pytest.raises(ShardCoreError, match="ssd_cap 0 on a rank, and tables have rows in SSD"):
        made(topology=TheirTopology(4, "cuda", hbm_cap=10**9, ssd_cap=0))


def test_tables_in_host_memory_are_priced_there():
    """On a topology that has host memory. FBGEMM's default caches a fifth of the rows."""
    from torchrec.distributed.types import CacheParams

    def made(**asked):
        found = planner(with_a(**asked), TheirTopology(4, "cuda", hbm_cap=10**9, ddr_cap=10**9))
        return found, found.plan(MODULE).plan["left"]["a"]

    def table_a(found):
        return {t.name: t for t in found.problem.tables}["a"]

    for kernel, cache, share in (
        ("fused_uvm", None, 0.0),
        ("fused_uvm_caching", None, 0.2),
        ("fused_uvm_caching", CacheParams(load_factor=0.5), 0.5),
    ):
        found, sharding = made(compute_kernels=[kernel], cache_params=cache)
        assert table_a(found).load_factor == share and sharding.compute_kernel == kernel
        assert found.topology.memory_of("host").bytes == 4 * 10**9
        assert not any(line.startswith("table 'a'") for line in found.unpriced)
        assert any("host memory is TorchRec's ddr_cap" in line for line in found.unpriced)
    # Without host memory it counts as on the device, and that is told.
    bare = planner(with_a(compute_kernels=["fused_uvm"]))
    assert bare.plan(MODULE).plan["left"]["a"].compute_kernel == "fused_uvm"
    assert table_a(bare).load_factor == 1
    assert any(
        line.startswith(
            "table 'a' of module 'left' is priced as fused, in device memory; it has kernel fused_uvm"
        )
        for line in bare.unpriced
    )


def test_weights_of_lookups_may_be_asked_for():
    made = planner(with_a(is_weighted=True))
    made.plan(MODULE)
    assert [t.name for t in made.problem.tables if t.weighted] == ["a"]


@pytest.mark.parametrize(
    "constraints, said",
    [
        ({**CONSTRAINTS, "absent": ParameterConstraints()}, "constraints are for table 'absent', which the"),
        (with_a(compute_kernels=["bogus"]), "table 'a' has compute kernel 'bogus'; TorchRec's are .*fused"),
        (with_a(sharding_types=["sideways"]), "table 'a' has sharding type 'sideways'; known are"),
        (with_a(batch_sizes=[7, 7]), r"table 'a' has batch_sizes \[7, 7\] for its 1 features"),
    ],
)
def test_constraints_that_mean_nothing_here_are_refused_by_name(constraints, said):
    with pytest.raises(ShardCoreError, match=said):
        planner(constraints).plan(MODULE)


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_a_table_gets_the_only_kind_that_its_sharding_types_name(kind):
    found = planner(with_a(sharding_types=[kind])).plan(MODULE)
    assert found.plan["left"]["a"].sharding_type == kind
    assert found.plan["left"]["a"].ranks == [0, 1, 2, 3]


def test_no_table_is_cut_below_its_min_partition():
    def widths(least):
        wide = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=n, num_embeddings=1000, embedding_dim=64, feature_names=[n])
                for n in "uv"
            ],
        )
        asked = {n: ParameterConstraints(pooling_factors=[20.0], min_partition=least) for n in "uv"}
        plan = planner(asked, algorithm="anneal_columns").plan(wide)
        return {
            name: [shard.shard_sizes[1] for shard in s.sharding_spec.shards]
            for name, s in plan.plan[""].items()
        }

    assert min(min(cuts) for cuts in widths(None).values()) < 48
    assert all(min(cuts) >= 48 for cuts in widths(48).values())


def test_a_min_partition_that_leaves_no_plan_is_named():
    """Cut, the table fits. Whole, it fits nowhere."""
    larger = {"rows": 100_000, "dim": 64, "memory": 20 << 20, "per_host": 2, "pooling": 2.0}
    of_one_table(["column_wise"], **larger)
    with pytest.raises(Infeasible, match="'t'"):
        of_one_table(["column_wise"], **larger, min_partition=48)


def test_lookups_of_nobody_s_choice_are_told():
    one = planner({"t": ParameterConstraints()})
    one.plan(table_in(DataType.FP32))
    assert any("'t' are priced with one lookup a sample" in line for line in one.unpriced)
    given = planner({}, lookups={"f0": 1.0})
    given.plan(table_in(DataType.FP32))
    assert not any("one lookup a sample" in line for line in given.unpriced)


def test_a_stated_pooling_factor_of_a_shared_feature_beats_the_default_of_another_table():
    """TorchRec's default is one lookup a sample. Tables a and c of one collection share feature f0."""
    asked = {**CONSTRAINTS, "c": ParameterConstraints(min_partition=8)}
    theirs = tables_of_model(MODULE)
    assert theirs["left.c"].config.feature_names == ["f0"] and theirs["a"].config.feature_names == ["f0"]
    assert (
        lookups_per_sample(constraints_by_problem_name(asked, theirs, "cuda", {})[0], theirs, {})["f0"]
        == 10.0
    )


def test_pooling_factors_beside_lookups_are_told():
    made = planner({"t": ParameterConstraints(pooling_factors=[7.0])}, lookups={"f0": 2.0})
    made.plan(table_in(DataType.FP32))
    assert made.problem.tables[0].pooling == 2.0
    assert "pooling_factors of tables 't' are not used: the planner has lookups" in made.unpriced


@pytest.mark.parametrize("device, replicated", [("cuda", True), ("cpu", False)])
def test_sequences_have_no_replicas_on_a_cpu(device, replicated):
    """TorchRec's dense kernel pools there."""
    module = EmbeddingCollection(
        device=torch.device("meta"),
        tables=[EmbeddingConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])],
    )
    job = Job(replica_optimizer="sgd")
    made = planner({}, TheirTopology(2, device, hbm_cap=10**9, ddr_cap=10**9), lookups={"f": 500.0}, job=job)
    made.plan(module)
    assert ("data_parallel" in made.problem.restricted_kinds_by_table.get("t", SHARDING_KINDS)) == replicated
    asked = {"t": ParameterConstraints(sharding_types=["data_parallel"])}
    with pytest.raises(ShardCoreError, match="plan replicates table 't' of the EmbeddingCollection ''; on a"):
        planner(asked, TheirTopology(2, "cpu")).plan(module)


def cached(fused=None, **given):
    """The planner of a table in host memory with a cache, and the table's sharding. fused: fused_params."""
    on = TheirTopology(2, "cuda", hbm_cap=1 << 30, ddr_cap=1 << 33)
    job = given.pop("job", None)
    kernels = given.pop("compute_kernels", ["fused_uvm_caching"])
    asked = {"t": ParameterConstraints(compute_kernels=kernels, pooling_factors=[5.0], **given)}
    made = planner(asked, on, algorithm="size_greedy", job=job)
    fused = {"optimizer": EmbOptimType.EXACT_SGD, **(fused or {})}
    return made, made.plan(table_in(DataType.FP32), [EmbeddingBagCollectionSharder(fused_params=fused)]).plan[
        ""
    ]["t"]


def test_a_cache_has_the_settings_that_only_fused_params_give():
    """TorchRec merges both; a table's own come first."""
    for fused, own, counted in (
        ({}, None, 0.2),
        ({"cache_load_factor": 0.9}, None, 0.9),
        ({"cache_load_factor": 0.9}, CacheParams(load_factor=0.4), 0.4),
        ({"cache_load_factor": 0.9}, CacheParams(precision=DataType.FP32), 0.9),
    ):
        made, sharding = cached(fused, cache_params=own)
        assert made.problem.tables[0].load_factor == sharding.cache_params.load_factor == counted
    _, sharding = cached({"cache_algorithm": CacheAlgorithm.LFU})
    assert sharding.cache_params.algorithm == CacheAlgorithm.LFU


@pytest.mark.parametrize(
    "fused, own, named",
    [
        ({"cache_sets": 7}, None, "fused_params of EmbeddingBagCollectionSharder has cache_sets 7"),
        ({"cache_precision": DataType.FP16}, None, "has cache_precision"),
        (
            {"weight_decay_mode": WeightDecayMode.COUNTER},
            None,
            "has weight_decay_mode .*further state of rows",
        ),
        ({"uvm_non_rowwise_momentum": True}, None, "has uvm_non_rowwise_momentum True; state is counted"),
        ({"colour": 1}, None, "has colour 1, which this ShardCore does not know; leave it out"),
        ({}, CacheParams(precision=DataType.FP16), "cache_params of table 't', .* has precision"),
    ],
)
def test_settings_of_caches_that_no_price_has_are_refused_by_name(fused, own, named):
    with pytest.raises(ShardCoreError, match=named):
        cached(fused, cache_params=own)


def test_settings_of_caches_that_a_price_leaves_out_are_told():
    made, _ = cached({"cache_algorithm": CacheAlgorithm.LFU, "weight_decay_mode": WeightDecayMode.DECOUPLE})
    assert [line.split("; ")[1] for line in made.unpriced if "LFU" in line and "; misses" in line] == [
        "misses are priced as those of an LRU cache"
    ] * 2
    assert not any("weight_decay_mode" in line for line in made.unpriced)
    made, _ = cached(cache_params=CacheParams(reserved_memory=1.0))
    assert any("reserved_memory 1.0; where less memory is free" in line for line in made.unpriced)


def test_caches_that_fetch_ahead_are_priced_so():
    for fused, own in (
        ({}, CacheParams(prefetch_pipeline=True)),
        ({"prefetch_pipeline": True}, None),
    ):
        made, sharding = cached(fused, cache_params=own)
        assert made.problem.job.pipeline == "prefetch" and sharding.cache_params.prefetch_pipeline
        made, _ = cached(fused, cache_params=own, job=Job("fused"))
        assert any(
            "'t' have prefetch_pipeline True; they are priced under the job's pipeline 'fused'" in line
            for line in made.unpriced
        )
    made, sharding = cached()
    assert made.problem.job.pipeline == "sparse_dist" and sharding.cache_params.prefetch_pipeline is None
    # TorchRec's pipeline needs ops that are built for it.
    assert cached(job=Job("prefetch"))[1].cache_params.prefetch_pipeline
    with pytest.raises(
        ShardCoreError, match="tables 't' have prefetch_pipeline False, and pipeline 'prefetch'"
    ):
        cached(cache_params=CacheParams(prefetch_pipeline=False), job=Job("prefetch"))
