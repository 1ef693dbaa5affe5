"""Plans to and from TorchRec: round trips, what is refused, and real training of some of all kinds."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import training  # noqa: E402  (beside this file)

from shardcore import files  # noqa: E402
from shardcore.cli import main  # noqa: E402
from shardcore.export.torchrec import Ranks, from_torchrec, layout, tables_of, to_torchrec  # noqa: E402
from shardcore.export.torchrec_json import from_json, read_torchrec, to_json, write_torchrec  # noqa: E402
from shardcore.types import Device, Placement, Plan, Shard, ShardCoreError, Table, Topology  # noqa: E402

MODULE = training.Model(sequence=True)
TABLE = Table("t", 24, 16, 2.0)
FOUR = Ranks.of(Topology((Device(10**9),) * 4))
HOSTS = Ranks.of(Topology(tuple(Device(10**9, host=h) for h in "xyxy")))
"""Devices 0 and 2 on one host, so that ranks are not devices."""


def rows(*parts, table=TABLE, columns=(0, 16)):
    return [Placement(Shard(table, lo, hi, *columns), (device,)) for device, lo, hi in parts]


@pytest.mark.parametrize("uneven", [False, True])
def test_random_plans_come_back(uneven):
    """So do a thousand in bench/torchrec.py."""
    rng = np.random.default_rng(5)
    for hosts, per_host in ((1, 4), (2, 2), (2, 4), (3, 2), (1, 1)):
        given = training.problem(hosts, per_host, sequence=True)
        for _ in range(20):
            assert not training.lost(training.draw(given, rng, uneven), given, MODULE, rng, uneven)


def test_columns_and_whole_tables_are_one_op():
    given = training.problem(1, 4)
    t = {x.name: x for x in given.tables}
    plan = Plan((Placement(Shard.whole(t["a"]), (3,)), Placement(Shard.whole(t["b"]), (0, 1, 2, 3)),
                 Placement(Shard(t["left.c"], 0, 40, 0, 4), (2,)), Placement(Shard(t["left.c"], 0, 40, 4, 32), (0,)),
                 Placement(Shard.whole(t["d"]), (1,)), Placement(Shard.whole(t["inner.right.c"]), (0,)),
                 Placement(Shard.whole(t["e"]), (1,))))
    theirs = to_torchrec(plan, given, training.Model()).plan
    assert {n: s.sharding_type for n, s in theirs["left"].items()} == {
        "a": "column_wise", "b": "data_parallel", "c": "column_wise", "d": "column_wise"}
    assert {n: s.sharding_type for n, s in theirs["inner.right"].items()} == {"c": "table_wise", "e": "table_wise"}
    assert {s.compute_kernel for m in theirs.values() for n, s in m.items() if n != "b"} == {"fused"}
    assert theirs["left"]["b"].compute_kernel == "dense"
    parts = [(s.placement.rank(), s.shard_offsets, s.shard_sizes, str(s.placement))
             for s in theirs["left"]["c"].sharding_spec.shards]
    assert parts == [(0, [0, 0], [40, 28], "rank:0/cuda:0"), (2, [0, 28], [40, 4], "rank:2/cuda:2")]


def test_names_of_tables():
    assert list(tables_of(MODULE)) == ["a", "b", "left.c", "d", "inner.right.c", "e", "s", "t"]
    assert [t.path for t in tables_of(MODULE).values()] == ["left"] * 4 + ["inner.right"] * 2 + ["sequence"] * 2


def test_ranks_are_host_by_host():
    assert HOSTS.devices == (0, 2, 1, 3) and HOSTS.hosts == ((0, 1), (2, 3))
    assert Ranks.of(Topology(tuple(Device(10**9, host=h) for h in "xxy"))).hosts == ()
    assert layout([Placement(Shard.whole(TABLE), (2,))], HOSTS).parts == ((1, Shard.whole(TABLE)),)
    found = layout(rows((1, 0, 12), (3, 12, 24)), HOSTS)
    assert found.sharding_type == "table_row_wise"
    assert [(rank, s.row_lo, s.row_hi) for rank, s in found.parts] == [(2, 0, 12), (3, 12, 24)]


def test_rows_are_dealt_in_the_order_of_ranks_unless_ordered():
    falling = [(3, 0, 6), (2, 6, 12), (1, 12, 18), (0, 18, 24)]
    assert [(r, s.row_lo) for r, s in layout(rows(*falling), FOUR).parts] == [(0, 0), (1, 6), (2, 12), (3, 18)]
    with pytest.raises(ShardCoreError, match="table 't' by rows at"):
        layout(rows(*falling, table=replace(TABLE, ordered=True)), FOUR)


def test_the_last_device_need_not_be_the_last_rank():
    """But where uneven rows are allowed, each device keeps as many as the plan gives it."""
    table = Table("t", 23, 16, 2.0)
    parts = rows((0, 0, 6), (2, 6, 11), (1, 11, 17), (3, 17, 23), table=table)
    assert [(r, s.row_lo, s.row_hi) for r, s in layout(parts, HOSTS).parts] == [(0, 0, 6), (1, 6, 12), (2, 12, 18), (3, 18, 23)]
    found = layout(parts, HOSTS, uneven_rows=True)
    assert [(r, s.row_lo, s.row_hi) for r, s in found.parts] == [(0, 0, 6), (1, 6, 11), (2, 11, 17), (3, 17, 23)]


def test_grid_has_one_part_per_device():
    """TorchRec's fused kernel fails on two parts of unequal widths of one table on one rank."""
    parts = [*rows((0, 0, 12), (2, 12, 24), columns=(0, 4)), *rows((1, 0, 12), (3, 12, 24), columns=(4, 8)),
             *rows((0, 0, 12), (2, 12, 24), columns=(8, 16))]
    found = layout(parts, HOSTS)
    assert found.sharding_type == "grid_shard"
    assert [(rank, s.col_lo, s.col_hi) for rank, s in found.parts] == [(0, 0, 12), (1, 0, 12), (2, 12, 16), (3, 12, 16)]


@pytest.mark.parametrize("parts, ranks, said", [
    (rows((2, 0, 7), (0, 7, 24)), FOUR,
     "table 't' by rows over devices 0, 2; TorchRec needs one row range on each of the 4 devices"),
    (rows((0, 0, 7), (1, 7, 12), (2, 12, 18), (3, 18, 24)), FOUR, r"by rows at \[7, 12, 18\]; TorchRec cuts at \[6, 12, 18\]"),
    (rows((0, 0, 7), (2, 7, 24)), HOSTS, r"by rows at \[7\]; TorchRec cuts at \[12\]"),
    (rows((0, 0, 3), (1, 3, 6), (2, 6, 8), (3, 8, 9), table=Table("t", 9, 16, 2.0)), FOUR, "of 9 rows over 4 devices"),
    ([Placement(Shard.whole(TABLE), (0, 1))], FOUR, "replicates .* on devices 0, 1; TorchRec replicates whole tables"),
    ([*rows((0, 0, 12), (2, 12, 24), columns=(0, 8)), *rows((1, 0, 24), columns=(8, 16))], HOSTS, "columns .8, 16., by rows"),
])
def test_refuses_what_torchrec_cannot(parts, ranks, said):
    with pytest.raises(ShardCoreError, match=said):
        layout(parts, ranks)


def test_refuses_sequences_that_torchrec_cannot():
    given = training.problem(2, 2, sequence=True)
    others = [Placement(Shard.whole(t), (0,)) for t in given.tables if t.name != "s"]
    s = next(t for t in given.tables if t.name == "s")
    for parts, device, said in (
            (rows((0, 0, 15), (1, 15, 30), table=s, columns=(0, 8)), "cuda", "over one host"),
            ([Placement(Shard.whole(s), (0, 1, 2, 3))], "cpu", "on a CPU TorchRec cannot")):
        with pytest.raises(ShardCoreError, match=f"'s' of the EmbeddingCollection 'sequence' *.*{said}"):
            to_torchrec(Plan((*others, *parts)), given, MODULE, device)
    assert to_torchrec(Plan((*others, Placement(Shard.whole(s), (0, 1, 2, 3)))), given, MODULE, "cuda")


def test_refuses_another_model():
    given = training.problem(1, 2)
    plan = Plan(tuple(Placement(Shard.whole(t), (0,)) for t in given.tables))
    with pytest.raises(ShardCoreError, match="the problem lacks 's'"):
        to_torchrec(plan, given, MODULE)
    other = replace(given, tables=(replace(given.tables[0], rows=25), *given.tables[1:]))
    with pytest.raises(ShardCoreError, match=r"'a' has \(rows, dim\) \(25, 16\) in problem 'model' and \(24, 16\) in the model"):
        to_torchrec(Plan(tuple(Placement(Shard.whole(t), (0,)) for t in other.tables)), other, training.Model())
    theirs = to_torchrec(plan, given, training.Model())
    del theirs.plan["left"]["a"]
    with pytest.raises(ShardCoreError, match=r"differing are \['a'\]"):
        from_torchrec(theirs, given, training.Model())


def test_settings_of_a_plan_are_kept(tmp_path):
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
    from torchrec.distributed.types import CacheParams, DataType, KeyValueParams

    given = training.problem(1, 2)
    plan = Plan(tuple(Placement(Shard.whole(t), (0,)) for t in given.tables))
    theirs = to_torchrec(plan, given, training.Model())
    theirs.plan["left"]["a"] = replace(
        theirs.plan["left"]["a"], compute_kernel="fused_uvm_caching", bounds_check_mode=BoundsCheckMode.IGNORE,
        output_dtype=DataType.BF16, cache_params=CacheParams(CacheAlgorithm.LFU, 0.2, precision=DataType.FP16),
        key_value_params=KeyValueParams(ssd_storage_directory="/x", ps_hosts=(("::1", 2000), ("::1", 2001))))
    write_torchrec(tmp_path / "plan.json", theirs)
    assert read_torchrec(tmp_path / "plan.json") == theirs
    moved = Plan(tuple(Placement(Shard.whole(t), (1,)) for t in given.tables))
    kept = to_torchrec(moved, given, training.Model(), like=theirs).plan["left"]["a"]
    assert replace(kept, ranks=[0], sharding_spec=theirs.plan["left"]["a"].sharding_spec) == theirs.plan["left"]["a"]
    assert kept.ranks == [1]


ODD = [
    ("colour", "blue", " has 'colour'"),
    ("sharding_type", "bogus", "sharding_type is 'bogus'; TorchRec knows data_parallel"),
    ("compute_kernel", "bogus", "compute_kernel is 'bogus'; TorchRec knows dense"),
    ("ranks", [-1], "ranks has -1; ranks are 0 to 65535"),
    ("ranks", [1 << 40], "ranks has 1099511627776; ranks are 0 to 65535"),
    ("ranks", [0.5], "ranks is 0.5; it needs to be int"),
    ("sharding_spec", [{"offsets": [0, 0], "sizes": [-4, 4], "placement": "rank:0/cpu"}], "sharding_spec: "),
]


def test_files_are_checked(tmp_path):
    given, path = training.problem(1, 2), tmp_path / "plan.json"
    write_torchrec(path, to_torchrec(Plan(tuple(Placement(Shard.whole(t), (0,)) for t in given.tables)), given, training.Model()))
    whole = path.read_text()
    for text, said in ((whole.replace('"ranks": [', '"ranks": [1, ', 1), "edited"), (whole[:-40], "not whole JSON"),
                       (whole.replace("torchrec-plan", "plan"), "expected 'shardcore/torchrec-plan'"),
                       (whole.replace('"version": 2', '"version": 9'), "version 9")):
        path.write_text(text)
        with pytest.raises(ShardCoreError, match=said):
            read_torchrec(path)
    body = to_json(to_torchrec(Plan(tuple(Placement(Shard.whole(t), (0,)) for t in given.tables)), given, training.Model()))
    for key, value, said in ODD:
        odd = {**body, "left": {**body["left"], "a": {**body["left"]["a"], key: value}}}
        with pytest.raises(ShardCoreError, match="table 'a' of module 'left'.*" + said):
            from_json(odd)


def test_command_writes_what_a_job_reads(tmp_path, capsys):
    given = replace(training.problem(1, 4), tables=training.problem(1, 4).tables[:2])
    plan = Plan((Placement(Shard(given.tables[0], 0, 24, 0, 4), (1,)), Placement(Shard(given.tables[0], 0, 24, 4, 16), (0,)),
                 Placement(Shard.whole(given.tables[1]), (3,))))
    paths = [str(tmp_path / name) for name in ("problem.json", "plan.json", "torchrec.json")]
    files.write_problem(paths[0], given)
    files.write_plan(paths[1], plan, given)
    command = ["export", paths[1], "--problem", paths[0], "--module", "sparse.bags", "--out", paths[2]]
    assert main(command) == 0
    found = read_torchrec(paths[2]).plan["sparse.bags"]
    assert {n: s.ranks for n, s in found.items()} == {"a": [0, 1], "b": [3]}
    files.write_plan(paths[1], Plan((*rows((0, 0, 5), (1, 5, 24), table=given.tables[0]), plan.placements[2])), given)
    assert main(command) == 1
    assert "table 'a' by rows over devices 0, 1" in capsys.readouterr().err
