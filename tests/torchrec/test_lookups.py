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
from shardcore.core.types import Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.step.access import bag_count
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


def batch(first: int, second: int, ranks: int = 2) -> KeyedJaggedTensor:
    """A batch of all ranks: samples of f0 have 5 ids each, those of f1 have 3."""
    lengths = torch.tensor([5] * first + [3] * second)
    return KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.arange(int(lengths.sum())),
        lengths=lengths,
        stride_per_key_per_rank=[[(n + r) // ranks for r in range(ranks)] for n in (first, second)],
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
            lookups=batch(2, 8, ranks=4),
            algorithm="size_greedy",
        )
        return made.plan(model()).plan["m"], made.problem

    plain, problem = plan(None)
    assert "host_row" not in problem.restricted_kinds_by_table["t0"]
    assert {s.sharding_type for s in plain.values()} == {"table_wise"}
    assert plan(["table_row_wise"])[0]["t0"].sharding_type == "table_row_wise"
    with pytest.raises(ShardCoreError, match="table 't0' of module 'm' runs grid_shard, .*VBE.*allow ano"):
        plan(["grid_shard"])


def plan(lookups, asked=None, batch_size=4):
    made = ShardCorePlanner(
        TWO,
        batch_size,
        asked,
        model=AnalyticModel(Setting("gpu", 8)),
        lookups=lookups,
        algorithm="size_greedy",
    )
    made.plan(model())
    return made.problem, made.unpriced


def test_outputs_are_those_of_each_features_stride():
    for lookups in (batch(2, 8), iter([batch(2, 8)])):
        problem, unpriced = plan(lookups)
        assert [t.strides for t in problem.tables] == [(0.25,), (1.0,)]
        assert [bag_count(t, problem.global_batch) for t in problem.tables] == [2, 8]
        assert not any("VBE" in line for line in unpriced)
    alike = KeyedJaggedTensor(
        keys=["f0", "f1"], values=torch.arange(16), lengths=torch.ones(16, dtype=torch.int64)
    )
    assert [t.strides for t in plan(alike)[0].tables] == [(), ()]
    with pytest.raises(ShardCoreError, match="table 't1' may run data_parallel only, and feature 'f0'"):
        plan(batch(2, 8), {"t1": ParameterConstraints(sharding_types=["data_parallel"])})


def test_constraints_give_batches_and_poolings_of_features():
    """Factors are of a bag, as TorchRec's estimator multiplies them."""
    asked = {
        "t0": ParameterConstraints(pooling_factors=[5.0], batch_sizes=[2], num_poolings=[3.0]),
        "t1": ParameterConstraints(pooling_factors=[3.0], batch_sizes=[4]),
    }
    problem, _ = plan(None, asked)
    assert [(t.strides, t.pooling) for t in problem.tables] == [((1.5,), 7.5), ((), 3.0)]
    assert not any("data_parallel" in kinds for kinds in problem.restricted_kinds_by_table.values())
    # Strides of data are measured, so they come first.
    assert [t.strides for t in plan(batch(2, 8), asked)[0].tables] == [(0.25,), (1.0,)]


@pytest.mark.parametrize("field", ["batch_sizes", "num_poolings"])
@pytest.mark.parametrize("value", [[2, 2], [0]])
def test_numbers_that_are_not_one_for_each_feature_are_refused(field, value):
    right = f"'t0' has {field} .* for its 1 features f0; it needs one above 0 for each"
    with pytest.raises(ShardCoreError, match=right):
        plan(None, {"t0": ParameterConstraints(**{field: value}), "t1": ParameterConstraints()})


def test_strides_that_do_not_add_up_are_refused():
    odd = batch(2, 8)
    odd._stride_per_key = [2, 7]
    with pytest.raises(ShardCoreError, match=r"strides \[2, 7\], 9 in all, and 10 lengths; they need to add"):
        problem_for(model(), TWO, 8, odd)
    with pytest.raises(ShardCoreError, match=r"'t' has strides \(1.0, 2.0\) for its 1 features"):
        Table("t", 10, 8, 1.0, strides=(1.0, 2.0))
    with pytest.raises(ShardCoreError, match=r"'t' has strides \(0.0,\).*above 0"):
        Table("t", 10, 8, 1.0, strides=(0.0,))


def test_data_is_deduplicated_once():
    with pytest.raises(ShardCoreError, match=r"deduplicated has \['f0'\], but feature 'f0' has a number of"):
        problem_for(model(), TWO, 8, batch(2, 8), deduplicated=[["f0"]])


def test_a_batch_says_of_how_many_ranks_it_is():
    """Local batches of a data loader, each of one rank, give what a step of all ranks gives."""
    step, local = batch(4, 8), batch(2, 4, ranks=1)
    whole = problem_for(model(), TWO, 8, step).tables
    for given in ([local, local], [step, local, local], [step, step]):
        found = problem_for(model(), TWO, 8, given).tables
        assert [(t.pooling, t.strides) for t in found] == [(t.pooling, t.strides) for t in whole]
    with pytest.raises(
        ShardCoreError, match="lookups has 4 samples of feature 'f0'; it needs a global batch"
    ):
        problem_for(model(), TWO, 8, local)
    odd = batch(4, 8)
    odd._stride_per_key_per_rank = torch.tensor([[4], [8]])
    object.__setattr__(odd, "stride_per_key_per_rank", lambda: [[2, 2], [8]])
    with pytest.raises(
        ShardCoreError, match=r"stride_per_key_per_rank \[\[2, 2\], \[8\]\]; each feature needs"
    ):
        problem_for(model(), TWO, 8, odd)


def test_weights_of_ids_travel_where_the_collection_does_not_use_them():
    """TorchRec sends what the batch has."""
    ids = {"keys": ["f0", "f1"], "values": torch.arange(16), "lengths": torch.ones(16, dtype=torch.int64)}
    plain, weighted = KeyedJaggedTensor(**ids), KeyedJaggedTensor(**ids, weights=torch.ones(16))
    for batches, counted in ((plain, False), (weighted, True), ([plain, weighted], True)):
        assert [t.weighted for t in problem_for(model(), TWO, 8, batches).tables] == [counted] * 2
