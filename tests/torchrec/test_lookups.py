"""Lookups of batches whose features differ in their numbers of samples (VBE)."""

import pytest

pytest.importorskip("torchrec")

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints

from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.torchrec.planner import ShardCorePlanner, problem_for

TWO = Topology((Device(2**30),) * 2)


def model(rows: int = 1000) -> nn.Module:
    return nn.ModuleDict(
        {
            "m": EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    EmbeddingBagConfig(
                        name=f"t{i}", num_embeddings=rows, embedding_dim=64, feature_names=[f"f{i}"]
                    )
                    for i in range(2)
                ],
            )
        }
    )


def batch(first: int, second: int) -> KeyedJaggedTensor:
    """first samples of f0 with 5 ids each, second of f1 with 3."""
    lengths = torch.tensor([5] * first + [3] * second)
    return KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.arange(int(lengths.sum())),
        lengths=lengths,
        stride_per_key_per_rank=[[first], [second]],
    )


@pytest.mark.parametrize("global_batch", [2, 8])
def test_lookups_of_a_step_are_those_of_each_feature(global_batch):
    found = problem_for(model(), TWO, global_batch, batch(2, 8)).tables
    assert [t.pooling * global_batch for t in found] == [10, 24]
    # Of several steps, the mean.
    found = problem_for(model(), TWO, global_batch, iter([batch(2, 8), batch(4, 8)])).tables
    assert [t.pooling * global_batch for t in found] == [15, 24]


def test_tables_of_such_batches_get_no_replicas():
    """TorchRec fails with data_parallel under VBE."""
    for constraints in (None, Constraints(kinds=(("t0", ("data_parallel", "row")),))):
        kinds = dict(problem_for(model(), TWO, 8, batch(2, 8), constraints=constraints).constraints.kinds)
        assert set(kinds) == {"t0", "t1"}
        assert not any("data_parallel" in of for of in kinds.values())
    with pytest.raises(
        ShardCoreError,
        match="table 't0' may run data_parallel only, and feature 'f0' has "
        "batches of a size of its own .VBE., with which TorchRec fails",
    ):
        problem_for(
            model(), TWO, 8, batch(2, 8), constraints=Constraints(kinds=(("t0", ("data_parallel",)),))
        )


def test_rows_are_divided_over_a_host_only_whole():
    """TorchRec's grid_shard does not take such batches; its table_row_wise does."""
    on_hosts = Topology(tuple(Device(2**30, host=f"h{d // 2}") for d in range(4)))

    def plan(types):
        asked = {"t0": ParameterConstraints(sharding_types=types)}
        made = ShardCorePlanner(
            on_hosts,
            2,
            asked,
            model=AnalyticModel(Setting("gpu", 8)),
            lookups=batch(2, 8),
            algorithm="size_greedy",
        )
        return made.plan(model()).plan["m"], made.problem

    plain, problem = plan(None)
    assert "host_row" not in problem.kinds_of["t0"]
    assert {s.sharding_type for s in plain.values()} == {"table_wise"}
    assert plan(["table_row_wise"])[0]["t0"].sharding_type == "table_row_wise"
    with pytest.raises(ShardCoreError, match="table 't0' of module 'm' runs grid_shard, .*VBE.*allow ano"):
        plan(["grid_shard"])


def test_a_planner_tells_what_such_batches_leave_out():
    def plan(lookups, asked=None):
        made = ShardCorePlanner(
            TWO, 4, asked, model=AnalyticModel(Setting("gpu", 8)), lookups=lookups, algorithm="size_greedy"
        )
        made.plan(model())
        return made.unpriced

    said = "features 'f0', 'f1' have batches of their own sizes (VBE): their lookups are those of the data"
    assert any(said in line for line in plan(batch(2, 8)))
    assert any("(VBE)" in line for line in plan(iter([batch(2, 8)])))
    alike = KeyedJaggedTensor(
        keys=["f0", "f1"], values=torch.arange(16), lengths=torch.ones(16, dtype=torch.int64)
    )
    assert not any("(VBE)" in line for line in plan(alike))
    with pytest.raises(ShardCoreError, match="table 't1' may run data_parallel only, and feature 'f0'"):
        plan(batch(2, 8), {"t1": ParameterConstraints(sharding_types=["data_parallel"])})


def test_data_is_deduplicated_once():
    with pytest.raises(ShardCoreError, match=r"deduplicated has \['f0'\], but feature 'f0' has a number of"):
        problem_for(model(), TWO, 8, batch(2, 8), deduplicated=[["f0"]])
