"""Plans to and from TorchRec: round trips, what is refused, and real training of some of all kinds."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import torch
import training
from shapes import column, host_row, on_hosts, replica, row
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TheirTopology

from shardcore.cli import main
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.io import files
from shardcore.step.ways import consolidate_placements
from shardcore.torchrec.modules import tables_of_model
from shardcore.torchrec.plan_files import plan_from_json, plan_to_json, read_torchrec, write_torchrec
from shardcore.torchrec.sharding_plan import from_torchrec, to_torchrec, torchrec_sharding

MODULE = training.Model(sequence=True)
TABLE = Table("t", 24, 16, 2.0)
FOUR, HOSTS = on_hosts("aaaa"), on_hosts("xyxy")
"""HOSTS: devices 0 and 2 on one host, so that ranks are not devices."""


def test_random_plans_come_back():
    rng = np.random.default_rng(5)
    for hosts, per_host in ((1, 4), (2, 2), (2, 4), (3, 2), (1, 1)):
        given = training.problem(hosts, per_host, sequence=True)
        for _ in range(20):
            assert not training.lost(training.draw(given, rng), given, MODULE, rng)


def test_columns_and_whole_tables_are_one_op():
    given = training.problem(1, 4)
    t = {x.name: x for x in given.tables}
    plan = Plan(
        (
            column(t["a"], 3),
            replica(t["b"], given.topology),
            column(t["left.c"], 2, 0, 4),
            column(t["left.c"], 0, 4, 32),
            column(t["d"], 1),
            column(t["inner.right.c"], 0),
            column(t["e"], 1),
        )
    )
    theirs = to_torchrec(plan, given, training.Model()).plan
    assert {n: s.sharding_type for n, s in theirs["left"].items()} == {
        "a": "column_wise",
        "b": "data_parallel",
        "c": "column_wise",
        "d": "column_wise",
    }
    assert {n: s.sharding_type for n, s in theirs["inner.right"].items()} == {
        "c": "table_wise",
        "e": "table_wise",
    }
    assert {s.compute_kernel for m in theirs.values() for n, s in m.items() if n != "b"} == {"fused"}
    assert theirs["left"]["b"].compute_kernel == "dense"
    parts = [
        (s.placement.rank(), s.shard_offsets, s.shard_sizes, str(s.placement))
        for s in theirs["left"]["c"].sharding_spec.shards
    ]
    assert parts == [(0, [0, 0], [40, 28], "rank:0/cuda:0"), (2, [0, 28], [40, 4], "rank:2/cuda:2")]


def test_rows_over_a_host_are_one_op_with_those_of_cut_tables():
    given = training.problem(2, 2)
    a, *others = given.tables
    b = next(t for t in others if t.name == "b")
    plan = Plan(
        (
            host_row(a, (2, 3)),
            host_row(b, (0, 1), 0, 4),
            host_row(b, (2, 3), 4),
            *(column(t, 1) for t in others if t != b),
        )
    )
    theirs = to_torchrec(plan, given, training.Model()).plan["left"]
    assert {n: s.sharding_type for n, s in theirs.items()} == {
        "a": "grid_shard",
        "b": "grid_shard",
        "c": "table_wise",
        "d": "table_wise",
    }
    assert set(
        from_torchrec(to_torchrec(plan, given, training.Model()), given, training.Model()).placements
    ) == set(plan.placements)


def test_names_of_tables():
    assert list(tables_of_model(MODULE)) == ["a", "b", "left.c", "d", "inner.right.c", "e", "s", "t"]
    assert [t.path for t in tables_of_model(MODULE).values()] == ["left"] * 4 + ["inner.right"] * 2 + [
        "sequence"
    ] * 2


def ranges(found):
    return [(rank, s.row_lo, s.row_hi) for rank, s in found.shards]


def test_ranks_are_host_by_host():
    assert torchrec_sharding([column(TABLE, 2)], HOSTS).shards == ((1, Shard.whole(TABLE)),)
    found = torchrec_sharding([host_row(TABLE, (1, 3))], HOSTS)
    assert found.sharding_type == "table_row_wise" and ranges(found) == [(2, 0, 12), (3, 12, 24)]
    found = torchrec_sharding([row(TABLE, HOSTS)], HOSTS)
    assert found.sharding_type == "row_wise" and ranges(found) == [
        (0, 0, 6),
        (1, 6, 12),
        (2, 12, 18),
        (3, 18, 24),
    ]
    assert torchrec_sharding([replica(TABLE, HOSTS)], HOSTS) == torchrec_sharding(
        [replica(TABLE, FOUR)], FOUR
    )


def test_the_last_rank_has_the_rest():
    table = Table("t", 23, 16, 2.0)
    assert ranges(torchrec_sharding([row(table, HOSTS)], HOSTS)) == [
        (0, 0, 6),
        (1, 6, 12),
        (2, 12, 18),
        (3, 18, 23),
    ]
    assert ranges(torchrec_sharding([host_row(table, (0, 2))], HOSTS)) == [(0, 0, 12), (1, 12, 23)]


def test_grid_has_one_part_per_device():
    """TorchRec's fused kernel fails on two shards of unequal widths of one table on one rank."""
    parts = [host_row(TABLE, (0, 2), 0, 4), host_row(TABLE, (1, 3), 4, 8), host_row(TABLE, (0, 2), 8, 16)]
    found = torchrec_sharding(parts, HOSTS)
    assert found.sharding_type == "grid_shard"
    assert [(rank, s.col_lo, s.col_hi) for rank, s in found.shards] == [
        (0, 0, 12),
        (1, 0, 12),
        (2, 12, 16),
        (3, 12, 16),
    ]
    assert ranges(found) == [(0, 0, 12), (1, 12, 24), (2, 0, 12), (3, 12, 24)]
    assert (
        torchrec_sharding(
            [host_row(TABLE, (0, 2), 0, 4), host_row(TABLE, (0, 2), 4, 16)], HOSTS
        ).sharding_type
        == "table_row_wise"
    )


@pytest.mark.parametrize(
    "placement, theirs",
    [
        (lambda t, on: [column(t, 2)], "table_wise"),
        (lambda t, on: [column(t, 0, 0, 4), column(t, 3, 4, 16)], "column_wise"),
        (lambda t, on: [row(t, on)], "row_wise"),
        (lambda t, on: [host_row(t, (2, 3))], "table_row_wise"),
        (lambda t, on: [host_row(t, (0, 1), 0, 4), host_row(t, (2, 3), 4, 16)], "grid_shard"),
        (lambda t, on: [replica(t, on)], "data_parallel"),
    ],
)
def test_each_kind_goes_to_torchrec_and_comes_back(placement, theirs):
    given = training.problem(2, 2)
    a, *others = given.tables
    plan = Plan(consolidate_placements([*placement(a, given.topology), *(column(t, 1) for t in others)]))
    exported = to_torchrec(plan, given, training.Model())
    assert exported.plan["left"]["a"].sharding_type == theirs
    assert from_torchrec(exported, given, training.Model()).placements == plan.placements


def test_rows_over_a_host_are_on_its_ranks():
    given = training.problem(2, 2)
    a, *others = given.tables
    exported = to_torchrec(
        Plan((host_row(a, (2, 3)), *(column(t, 1) for t in others))), given, training.Model()
    )
    found = exported.plan["left"]["a"]
    assert found.ranks == [2, 3] and found.compute_kernel == "fused"
    assert [(str(s.placement), s.shard_offsets, s.shard_sizes) for s in found.sharding_spec.shards] == [
        ("rank:2/cuda:0", [0, 0], [12, 16]),
        ("rank:3/cuda:1", [12, 0], [12, 16]),
    ]


def test_a_table_of_two_kinds_is_refused():
    with pytest.raises(
        ShardCoreError, match="table 't' by column and host_row; TorchRec shards a table by one of them"
    ):
        torchrec_sharding([host_row(TABLE, (0, 2), 0, 8), column(TABLE, 1, 8, 16)], HOSTS)


def test_refuses_sequences_that_torchrec_cannot():
    given = training.problem(2, 2, sequence=True)
    others = [column(t, 0) for t in given.tables if t.name != "s"]
    s = next(t for t in given.tables if t.name == "s")
    for parts, device, said in (
        ([host_row(s, (0, 1))], "cuda", "over one host"),
        ([replica(s, given.topology)], "cpu", "on a CPU TorchRec cannot"),
    ):
        with pytest.raises(ShardCoreError, match=f"'s' of the EmbeddingCollection 'sequence' *.*{said}"):
            to_torchrec(Plan((*others, *parts)), given, MODULE, device)
    assert to_torchrec(Plan((*others, replica(s, given.topology))), given, MODULE, "cuda")


def test_refuses_another_model():
    given = training.problem(1, 2)
    plan = Plan(tuple(column(t, 0) for t in given.tables))
    with pytest.raises(ShardCoreError, match="the problem lacks 's'"):
        to_torchrec(plan, given, MODULE)
    other = replace(given, tables=(replace(given.tables[0], rows=25), *given.tables[1:]))
    with pytest.raises(
        ShardCoreError, match="'a' has another shape in .* than in the model: rows: 25 against 24$"
    ):
        to_torchrec(Plan(tuple(column(t, 0) for t in other.tables)), other, training.Model())
    theirs = to_torchrec(plan, given, training.Model())
    del theirs.plan["left"]["a"]
    with pytest.raises(ShardCoreError, match=r"differing are \['a'\]"):
        from_torchrec(theirs, given, training.Model())


def test_a_grid_of_one_shard_is_no_column():
    given = training.problem(2, 2)
    theirs = to_torchrec(Plan(tuple(column(t, 0) for t in given.tables)), given, training.Model())
    for kind in ("grid_shard", "table_row_wise", "row_wise"):
        theirs.plan["left"]["a"] = replace(theirs.plan["left"]["a"], sharding_type=kind)
        with pytest.raises(ShardCoreError, match=f"columns 0 to 16 of table 'a' in one shard; .* in {kind}"):
            from_torchrec(theirs, given, training.Model())


def test_a_file_is_checked_against_the_model_that_it_is_read_for(tmp_path):
    given = training.problem(1, 2)
    theirs = to_torchrec(Plan(tuple(column(t, 0) for t in given.tables)), given, training.Model())
    write_torchrec(tmp_path / "plan.json", theirs)
    assert read_torchrec(tmp_path / "plan.json", training.Model()) == theirs
    left = theirs.plan.pop("left")
    write_torchrec(tmp_path / "plan.json", theirs)
    with pytest.raises(ShardCoreError, match="differ in tables .'a', 'b', 'c', 'd'. of module 'left'"):
        read_torchrec(tmp_path / "plan.json", training.Model())
    theirs.plan |= {"left": left, "nonsense": left}
    write_torchrec(tmp_path / "plan.json", theirs)
    with pytest.raises(
        ShardCoreError,
        match="shards module 'nonsense', which is no collection of the model; "
        "those are .'inner.right', 'left'",
    ):
        read_torchrec(tmp_path / "plan.json", training.Model())
    assert set(read_torchrec(tmp_path / "plan.json").plan) == {"left", "inner.right", "nonsense"}


def test_settings_of_a_plan_are_kept(tmp_path):
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
    from torchrec.distributed.types import CacheParams, DataType, KeyValueParams

    given = training.problem(1, 2)
    plan = Plan(tuple(column(t, 0) for t in given.tables))
    theirs = to_torchrec(plan, given, training.Model())
    theirs.plan["left"]["a"] = replace(
        theirs.plan["left"]["a"],
        compute_kernel="fused_uvm_caching",
        bounds_check_mode=BoundsCheckMode.IGNORE,
        output_dtype=DataType.BF16,
        cache_params=CacheParams(CacheAlgorithm.LFU, 0.2, precision=DataType.FP16),
        key_value_params=KeyValueParams(ssd_storage_directory="/x", ps_hosts=(("::1", 2000), ("::1", 2001))),
    )
    write_torchrec(tmp_path / "plan.json", theirs)
    assert read_torchrec(tmp_path / "plan.json") == theirs
    moved = Plan(tuple(column(t, 1) for t in given.tables))
    kept = to_torchrec(moved, given, training.Model(), like=theirs).plan["left"]["a"]
    assert (
        replace(kept, ranks=[0], sharding_spec=theirs.plan["left"]["a"].sharding_spec)
        == theirs.plan["left"]["a"]
    )
    assert kept.ranks == [1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_like_another_is_for_its_devices(device):
    given = training.problem(1, 2)
    theirs = to_torchrec(Plan(tuple(column(t, 0) for t in given.tables)), given, training.Model(), device)
    again = to_torchrec(Plan(tuple(column(t, 1) for t in given.tables)), given, training.Model(), like=theirs)
    specs = [sharding.sharding_spec for module in again.plan.values() for sharding in module.values()]
    assert {s.placement.device().type for spec in specs for s in spec.shards} == {device}


ODD = [
    ("colour", "blue", " has an unknown key 'colour'"),
    ("sharding_type", "bogus", "sharding_type is 'bogus'; TorchRec knows data_parallel"),
    ("compute_kernel", "bogus", "compute_kernel is 'bogus'; TorchRec knows dense"),
    ("ranks", [-1], "ranks is -1; it needs to be 0 or more"),
    ("ranks", [1 << 40], "ranks has 1099511627776; ranks are 0 to 65535"),
    ("ranks", [0.5], "ranks is 0.5; it needs to be a whole number"),
    ("sharding_spec", [{"offsets": [0, 0], "sizes": [-4, 4], "placement": "rank:0/cpu"}], "sharding_spec: "),
    ("sharding_spec", [{"offsets": [0, 0, 0], "sizes": [24, 16, 1], "placement": "rank:0/cpu"}], "offsets"),
    ("sharding_spec", [{"offsets": [0], "sizes": [24], "placement": "rank:0/cpu"}], "offsets"),
    (
        # Before any shard is made.
        "sharding_spec",
        [*[{"offsets": [0, 8], "sizes": [24, 8], "placement": "rank:0/cpu"}] * 2, {"offsets": 3}],
        r"has several shards of the same cells: offsets \[0, 8\]; it needs to be there once",
    ),
    (
        "sharding_spec",
        [{"offsets": [0, 0], "sizes": [24, 16], "placement": "xxx"}],
        "placement 'xxx'; it needs a rank and a device, such as rank:0/cuda:0",
    ),
    ("compute_kernel", "quant", "compute_kernel is 'quant'; TorchRec knows dense"),
    ("compute_kernel", "quant_uvm_caching", "compute_kernel is 'quant_uvm_caching'"),
    ("cache_params", {"load_factor": -1}, "load_factor is -1; it needs to be 0 or more"),
    ("cache_params", {"load_factor": 0}, "load_factor is 0; it needs to be above 0"),
    ("cache_params", {"load_factor": 5}, "load_factor is 5; it needs to be above 0, at most 1"),
    ("cache_params", {"load_factor": 1e-9, "reserved_memory": -1.0}, "reserved_memory is -1.0"),
    ("cache_params", {"stats": 1}, "stats is 1; a file can hold no CacheStatistics"),
    ("cache_params", {"stats": {}}, "stats is {}; a file can hold no CacheStatistics"),
    ("key_value_params", {"ssd_rocksdb_shards": -3}, "ssd_rocksdb_shards is -3"),
    ("key_value_params", {"ps_hosts": [["::1", -2000]]}, "ps_hosts is -2000"),
    ("sharding_type", "grid_shard", "is grid_shard in 1 shards .* it needs shards on several ranks"),
    ("ranks", [5], "has ranks .5.; its shards are on .0."),
    ("ranks", [], "has ranks ..; its shards are on"),
]


def test_files_are_checked(tmp_path):
    given, path = training.problem(1, 2), tmp_path / "plan.json"
    write_torchrec(
        path, to_torchrec(Plan(tuple(column(t, 0) for t in given.tables)), given, training.Model())
    )
    whole = path.read_text()
    for text, said in (
        (whole.replace('"ranks": [', '"ranks": [1, ', 1), "edited"),
        (whole[:-40], "not whole JSON"),
        (whole.replace("torchrec-plan", "plan"), "expected 'shardcore/torchrec-plan'"),
        (whole.replace('"version": 2', '"version": 9'), "version 9"),
    ):
        path.write_text(text)
        with pytest.raises(ShardCoreError, match=said):
            read_torchrec(path)
    body = plan_to_json(to_torchrec(Plan(tuple(column(t, 0) for t in given.tables)), given, training.Model()))
    two = [{"offsets": [0, 8 * i], "sizes": [24, 8], "placement": f"rank:{i}/cpu"} for i in range(2)]
    for kind, needed in (
        ("table_wise", "one shard"),
        ("row_wise", "all columns in each shard"),
        ("table_row_wise", "all columns in each shard"),
    ):
        odd = {
            "left": {"a": {**body["left"]["a"], "ranks": [0, 1], "sharding_spec": two, "sharding_type": kind}}
        }
        with pytest.raises(ShardCoreError, match=f"is {kind} in 2 shards .* it needs {needed}"):
            plan_from_json(odd)
    for key, value, said in ODD:
        odd = {**body, "left": {**body["left"], "a": {**body["left"]["a"], key: value}}}
        with pytest.raises(ShardCoreError, match="table 'a' of module 'left'.*" + said):
            plan_from_json(odd)


def test_command_writes_what_a_job_reads(tmp_path, capsys):
    # The first names no collection.
    first, second = training.problem(1, 4).tables[:2]
    given = replace(training.problem(1, 4), tables=(replace(first, collection=""), second))
    plan = Plan(
        (column(given.tables[0], 1, 0, 4), column(given.tables[0], 0, 4, 16), column(given.tables[1], 3))
    )
    paths = [str(tmp_path / name) for name in ("problem.json", "plan.json", "torchrec.json")]
    files.write_problem(paths[0], given)
    files.write_plan(paths[1], plan, given)
    command = ["export", paths[1], "--problem", paths[0], "--module", "sparse.bags", "--out", paths[2]]
    assert main(command) == 0
    found = read_torchrec(paths[2]).plan
    assert {path: {n: s.ranks for n, s in of.items()} for path, of in found.items()} == {
        "sparse.bags": {"a": [0, 1]},
        "left": {"b": [3]},
    }
    half = Placement("row", Shard(given.tables[0], 0, 24, 0, 8), (0, 1, 2, 3))
    files.write_plan(paths[1], Plan((half, column(given.tables[0], 1, 8, 16), plan.placements[2])), given)
    assert main(command) == 1
    assert (
        "a[0:24, 0:8] by row on devices 0, 1, 2, 3; it needs all rows and all columns"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("device, hardware", [("cpu", "cpu-intel-xeon"), ("cuda", "nvidia-v100")])
@pytest.mark.parametrize("of_problem", [True, False])
def test_a_file_names_the_devices_that_torchrec_itself_names(tmp_path, device, hardware, of_problem):
    given = training.problem(2, 2)
    # The problem tells its hardware, or the plan that of its cost model.
    told = replace(given, topology=replace(given.topology, hardware=hardware if of_problem else None))
    provenance = {} if of_problem else {"setting": f"{hardware}, batch 256, fp32, exact_sgd"}
    plan = Plan(tuple(column(t, i % 4) for i, t in enumerate(told.tables)), provenance)
    paths = [str(tmp_path / name) for name in ("problem.json", "plan.json", "torchrec.json")]
    files.write_problem(paths[0], told)
    files.write_plan(paths[1], plan, told)
    assert main(["export", paths[1], "--problem", paths[0], "--out", paths[2]]) == 0
    topology = TheirTopology(
        world_size=4, local_world_size=2, compute_device=device, **{"hbm_cap": 1 << 30, "ddr_cap": 1 << 30}
    )
    # Cut into many shards, a table is on each rank.
    cut = ParameterConstraints(sharding_types=["column_wise"], min_partition=4)
    theirs = EmbeddingShardingPlanner(topology, constraints=dict.fromkeys("abcde", cut)).plan(
        training.Model(), [EmbeddingBagCollectionSharder()]
    )
    expected = placements(theirs)
    assert len(expected) == 4 and placements(read_torchrec(paths[2])) == expected


def placements(plan) -> set[str]:
    return {
        str(shard.placement)
        for module in plan.plan.values()
        for sharding in module.values()
        for shard in sharding.sharding_spec.shards
    }


@pytest.mark.parametrize(
    "other, said",
    [
        (
            {"dim": 48},
            "of sequences 48 columns wide, and another of the collection 'm' is of sequences 32 columns",
        ),
        ({"sequence": False}, "pooled, and another of the collection 'm' is of sequences 32 columns wide"),
    ],
)
def test_tables_that_torchrec_builds_in_no_collection_are_not_exported(other, said):
    tables = (
        Table("a", 100, 32, 2.0, sequence=True),
        replace(Table("b", 100, 32, 2.0, sequence=True), **other),
    )
    given = Problem("p", tables, Topology((Device(1 << 30),) * 2), 8)
    plan = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in tables))
    with pytest.raises(ShardCoreError, match=f"table 'b' is {said}"):
        to_torchrec(plan, given, "m")
    apart = replace(given, tables=(tables[0], replace(tables[1], collection="n")))
    placed = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in apart.tables))
    assert set(to_torchrec(placed, apart, "m").plan) == {"m", "n"}
    if "dim" in other:
        with pytest.raises(ValueError, match="required to have same embedding dimension"):
            EmbeddingCollection(
                [
                    EmbeddingConfig(
                        name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name]
                    )
                    for t in tables
                ],
                device=torch.device("meta"),
            )
