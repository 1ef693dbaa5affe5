"""Pooling and reuse from what FBGEMM itself reports: real reports of real ops, one of them of a sharded
job."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import wrapped_training

pytest.importorskip("torchrec")

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch.distributed._shard.metadata import ShardMetadata
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    get_module_to_default_sharders,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EnumerableShardingSpec, ShardingPlan
from training import in_processes

from shardcore.cli import main
from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Shard, Table
from shardcore.io import files
from shardcore.step import access
from shardcore.tables import streams
from shardcore.torchrec import fbgemm_statistics
from shardcore.torchrec.fbgemm_statistics import (
    TablePart,
    matched,
    read_statistics,
    reported_tables,
    rows_by_count,
    write_tables_of_ops,
)
from shardcore.torchrec.planner import problem_for
from shardcore.torchrec.sharding_plan import to_torchrec

ONE, BATCH, STEPS = Topology((Device(10**9),)), 256, 2
TABLES = {
    "a": (20000, 8, ["f0", "f1"]),
    "b": (20000, 8, ["f2"]),
    "c": (5000, 4, ["f3"]),
    "d": (300, 12, ["f4"]),
}
ALPHA = dict(f0=1.0, f1=0.5, f2=1.2, f3=0.8, f4=0.3)
POOLING = {"a": 17.0, "b": 8.0, "c": 8.0, "d": 8.0}
"""Of f1 9 lookups, of the others 8. Tables a and b have the same shape."""


class Model(torch.nn.Module):
    def __init__(self, device: str = "meta", names: str = "abcd") -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=f)
                for n, (r, d, f) in TABLES.items()
                if n in names
            ],
        )


def step(seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ids and lengths of each feature."""
    found = {}
    for rows, _, features in TABLES.values():
        for i, f in enumerate(features):
            ids, offsets = streams.stream(Table(f, rows, 4, 8.0 + i, Zipf(ALPHA[f])), BATCH, seed)
            found[f] = ids, np.diff(offsets)
    return found


def kjt(seed: int) -> KeyedJaggedTensor:
    ids, lengths = zip(*step(seed).values(), strict=True)
    return KeyedJaggedTensor(
        keys=list(ALPHA),
        values=torch.from_numpy(np.concatenate(ids)),
        lengths=torch.from_numpy(np.concatenate(lengths)).int(),
    )


def reported_in(folder: Path, work: Callable[[Path], None]) -> None:
    """Run ops in a process of their own: FBGEMM asks only once in a process whether to report."""
    assert in_processes(1, _reporting, (folder, work), 200) == [0]


def _reporting(rank: int, folder: Path, work: Callable[[Path], None]) -> None:
    os.environ |= {"FBGEMM_TBE_REPORT_INPUT_PARAMS": "1", "FBGEMM_REPORT_INPUT_PARAMS_BUCKET": str(folder)}
    work(folder)


def op_of_three_tables(folder: Path) -> None:
    """The tables a, c and d, at two steps."""
    shapes = [TABLES[n] for n in "acd"]
    op = SplitTableBatchedEmbeddingBagsCodegen(
        [(r, d, EmbeddingLocation.HOST, ComputeDevice.CPU) for r, d, _ in shapes],
        feature_table_map=[0, 0, 1, 2],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    )
    for seed in range(STEPS):
        ids, lengths = zip(*(step(seed)[f] for _, _, features in shapes for f in features), strict=True)
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        op(torch.from_numpy(np.concatenate(ids)), torch.from_numpy(offsets)).sum().backward()


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    reported_in(folder, op_of_three_tables)
    assert len(list(folder.iterdir())) == STEPS
    return folder


def test_tables_are_known_by_shape(reports):
    problem = problem_for(Model(names="acd"), ONE, BATCH, reports)
    assert {t.name: t.pooling for t in problem.tables} == {n: POOLING[n] for n in "acd"}
    assert {t.access.batch for t in problem.tables} == {BATCH}
    found = [(t.name, t.rows, t.pooling, t.features, t.weighted) for t in reported_tables(reports)]
    assert found == [("t0", 20000, 17.0, 2, False), ("t1", 5000, 8.0, 1, False), ("t2", 300, 8.0, 1, False)]
    assert problem_for(Model(names="acd"), ONE, BATCH, str(next(reports.iterdir()))).tables[0].pooling == 17.0


def test_reuse_is_near_that_of_the_data(reports):
    reported = problem_for(Model(names="acd"), ONE, BATCH, reports)
    for table in reported.tables:
        unique = [
            len(np.unique(np.concatenate([step(seed)[f][0] for f in TABLES[table.name][2]])))
            for seed in range(STEPS)
        ]
        found = access.unique_rows(Shard.whole(table), BATCH)
        assert found == pytest.approx(np.mean(unique), rel=0.25)
        assert sum(table.access.bins) == pytest.approx(1)


def test_tables_of_like_shape_need_names(reports):
    with pytest.raises(
        ShardCoreError,
        match="1 tables of 20000 rows and dim 8, .* which is table 'a' .there "
        "are a, b.; call write_tables_of_ops",
    ):
        problem_for(Model(names="ab"), ONE, BATCH, reports)


def sharded_job(folder: Path) -> None:
    """On one rank, table b in two parts of its columns."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    given = problem_for(Model(), ONE, BATCH, dict.fromkeys(ALPHA, 8.0))
    plan = to_torchrec(
        Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in given.tables)), given, Model(), "cpu"
    )
    plan.plan["bags"]["b"] = replace(
        plan.plan["bags"]["b"],
        sharding_type="column_wise",
        ranks=[0, 0],
        sharding_spec=(
            EnumerableShardingSpec([ShardMetadata([0, c], [20000, 4], "rank:0/cpu") for c in (0, 4)])
        ),
    )
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        sharder = EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        )
        model = DistributedModelParallel(
            Model("cpu"), device=torch.device("cpu"), plan=plan, sharders=[sharder]
        )
        write_tables_of_ops(model, folder)
        model.module.bags(kjt(0)).wait()
    finally:
        dist.destroy_process_group()


class Named(torch.nn.Module):
    """A collection whose path has the names that wrappers give theirs, and a wrapped one."""

    def __init__(self) -> None:
        super().__init__()
        wrapped = wrapped_training.Model()
        self.module = torch.nn.Module()
        self.module._embedding_module = wrapped.bags
        self.collided = wrapped.collided
        self.processed = wrapped.processed
        self.over = torch.nn.Linear(2, 2)  # so that DDP wraps the rest


def job_with_names_of_wrappers(folder: Path) -> None:
    """On one rank, by a plan that is made by hand, for ShardCore divides rows over several."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        model, plan = Named(), {}
        for path, kind in (
            ("module._embedding_module", table_wise(0, compute_kernel="fused")),
            ("collided", row_wise(compute_kernel="fused")),
            ("processed", table_wise(0, compute_kernel="fused")),
        ):
            of = model.get_submodule(path)
            sharder = get_module_to_default_sharders()[type(of)]
            kinds = dict.fromkeys(sharder.shardable_parameters(of), kind)
            plan[path] = construct_module_sharding_plan(of, kinds, sharder, 1, 1, "cpu")
        write_tables_of_ops(
            DistributedModelParallel(model, device=torch.device("cpu"), plan=ShardingPlan(plan)), folder
        )
    finally:
        dist.destroy_process_group()


def test_parts_go_by_the_path_in_the_model(tmp_path):
    """Only what the job and its wrappers add is left out, whatever the model calls its own."""
    reported_in(tmp_path, job_with_names_of_wrappers)
    parts = [part for path in tmp_path.glob("tbe-*-tables.json") for part in json.loads(path.read_text())]
    assert {part["table"]: part["module"] for part in parts} == {
        "a": "module._embedding_module",
        "e": "collided",
        "c": "processed",
        "d": "processed",
    }


def test_a_sharded_job_says_which_tables_its_ops_hold(tmp_path):
    """Tables a and b are told apart."""
    reported_in(tmp_path, sharded_job)
    held = [f.part for f in read_statistics(tmp_path)]
    assert sorted((p.col_lo, p.col_hi) for p in held if p.table == "b") == [(0, 4), (4, 8)]
    out = tmp_path.with_suffix(".json")
    assert main(["problem", str(tmp_path), "--devices", "2", "--batch", "512", "--out", str(out)]) == 0
    assert {t.name: (t.rows, t.dim, t.pooling) for t in files.read_problem(out).tables} == {
        n: (r, d, POOLING[n]) for n, (r, d, _) in TABLES.items()
    }
    reported, measured = (problem_for(Model(), ONE, BATCH, source) for source in (tmp_path, [kjt(0)]))
    assert {t.name: t.pooling for t in reported.tables} == POOLING
    for found, true in zip(reported.tables, measured.tables, strict=True):
        unique, wanted = (access.unique_rows(Shard.whole(t), BATCH) for t in (found, true))
        assert unique == pytest.approx(wanted, rel=0.25)


def test_parts_by_rows_add_up_and_parts_by_columns_do_not(reports):
    c = next(f for f in read_statistics(reports) if f.rows == 5000)
    parts = [
        replace(c, part=TablePart("bags", "c", lo, lo + 2500, col, col + 2))
        for lo in (0, 2500)
        for col in (0, 2)
    ]
    pooling, reuse = matched(parts, {"c": ("bags", "c", 5000, 4)})["c"]
    assert pooling == 2 * c.pooling
    assert reuse == Reuse(tuple(c.seen / c.seen.sum()), BATCH)
    with pytest.raises(ShardCoreError, match="FBGEMM reported 2500 of the 5000 rows, as table 'c' has"):
        matched(parts[:2], {"c": ("bags", "c", 5000, 4)})


def test_rows_by_count_where_no_other_ids_are_left():
    assert rows_by_count([0.5, 0.25, 0.25], 1.0, 1.0, 8, 100)[:3].tolist() == [0, 2, 1]
    assert rows_by_count([2 / 100] * 20, 1.0, 2.0, 100, 10**6).sum() == pytest.approx(20 + 60 / 1.5, rel=0.01)


def test_what_is_no_report_is_refused(reports, tmp_path):
    with pytest.raises(ShardCoreError, match="has no reports of FBGEMM .*FBGEMM_TBE_REPORT_INPUT_PARAMS=1"):
        read_statistics(tmp_path)
    with pytest.raises(
        ShardCoreError, match="did not report a table of 20000 rows and dim 8, as table 'b' has"
    ):
        problem_for(
            Model(names="bcd"),
            ONE,
            BATCH,
            _changed(reports, tmp_path, embedding_specs=[[2, 8], [5000, 4], [300, 12]]),
        )
    for change, said in (
        ({"feature_table_map": [0]}, "ValueError"),
        ({"embedding_specs": None}, "embedding_specs is None"),
        ({"embedding_specs": []}, "ValueError: feature_table_map"),
    ):
        with pytest.raises(ShardCoreError, match=f"is not what FBGEMM 1.8 writes .{said}"):
            read_statistics(_changed(reports, tmp_path, **change))
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(ShardCoreError, match="report.json"):
        read_statistics(tmp_path / "report.json")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"feature_table_map": [0, 0, -1, 2]}, "feature_table_map"),
        ({"batch_params": {"Bs": [256.5] * 4}}, "Bs"),
        ({"batch_params": {"Bs": ["a"] + [256] * 3}, "pooling_params": {"Ls": [2**53, 8, 8, 8]}}, "Bs"),
        ({"batch_params": {"Bs": [[0]] + [256] * 3}, "pooling_params": {"Ls": [2e8, 8, 8, 8]}}, "Bs"),
        ({"pooling_params": {"Ls": [2e8] * 4}}, "Ls has 2e.08"),
        ({"indices_params_list": [{"heavy_hitters": [0.1], "zipf_q": "2", "zipf_s": 1.1}] * 4}, "zipf_q"),
        ({"pooling_params": {"Ls": [True] * 4}}, "Ls"),
        ({"indices_params_list": [{"heavy_hitters": [-1]}] * 4}, "heavy_hitters"),
    ],
)
def test_numbers_that_fbgemm_does_not_write_are_refused(change, said, tmp_path):
    law = {"heavy_hitters": [0.2, 0.1], "zipf_q": 2.0, "zipf_s": 1.1}
    sound = {
        "embedding_specs": [[900, 8], [300, 12], [70, 4]],
        "feature_table_map": [0, 0, 1, 2],
        "pooling_params": {"Ls": [8.0] * 4},
        "batch_params": {"Bs": [256] * 4},
        "indices_params_list": [law] * 4,
    }
    (tmp_path / "report.json").write_text(json.dumps(sound))
    assert len(fbgemm_statistics.reported_tables(tmp_path / "report.json")) == 3
    (tmp_path / "report.json").write_text(json.dumps(sound | {"weighted": True}))
    assert all(t.weighted for t in fbgemm_statistics.reported_tables(tmp_path / "report.json"))
    (tmp_path / "report.json").write_text(json.dumps(sound | change))
    with pytest.raises(ShardCoreError, match=said):
        fbgemm_statistics.reported_tables(tmp_path / "report.json")


def test_steps_of_other_tables_are_refused(reports, tmp_path):
    """An op has the same tables at each step."""
    first = next(reports.iterdir())
    report = json.loads(first.read_text())
    rows, dim = report["embedding_specs"][0]
    for step, specs in enumerate(([rows, dim], [rows + 1, dim])):
        report["embedding_specs"][0] = specs
        (tmp_path / f"tbe-x-config-estimation-{step}.json").write_text(json.dumps(report))
    with pytest.raises(
        ShardCoreError, match="reports of one op have a table of .* they need to be of one job"
    ):
        read_statistics(tmp_path)


def _changed(reports: Path, folder: Path, **change) -> Path:
    path = folder / "report.json"
    path.write_text(json.dumps(json.loads(next(reports.iterdir()).read_text()) | change))
    return path
