"""The optimizer that a job's tables train under counts in memory, whichever way it was set."""

import pytest

pytest.importorskip("torchrec")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner import Topology as TheirTopology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import Budget
from shardcore.step import memory
from shardcore.tables.public import public_pool
from shardcore.torchrec.planner import ShardCorePlanner, plan_for, problem_for

GIB = 2**30
TWO, LOOKUPS = Topology((Device(GIB),) * 2), {"f0": 1.0, "f1": 1.0}
MLPERF_ROWS = tuple(t.rows for t in public_pool("mlperf-dlrm-dcnv2"))


def model(rows=(1000, 2000), dim=64) -> nn.Module:
    return nn.ModuleDict(
        {
            "m": EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    EmbeddingBagConfig(
                        name=f"t{i}", num_embeddings=n, embedding_dim=dim, feature_names=[f"f{i}"]
                    )
                    for i, n in enumerate(rows)
                ],
            )
        }
    )


def planned(module, sharders=(), optimizer="exact_sgd", hbm_cap=GIB, devices=2, job=None) -> ShardCorePlanner:
    made = ShardCorePlanner(
        TheirTopology(devices, "cuda", hbm_cap=hbm_cap),
        1024,
        algorithm="size_greedy",
        model=AnalyticModel(Setting("gpu", 1024 * devices, "fp32", optimizer)),
        lookups={f"f{i}": 1.0 for i in range(26)},
        job=job,
    )
    made.plan(module, sharders)
    return made


def in_backward(module, kind, apply=_apply_optimizer_in_backward):
    apply(kind, list(module.parameters()), {"lr": 0.1})
    return module


@pytest.mark.parametrize(
    "kind, optimizer",
    [(torch.optim.SGD, "exact_sgd"), (torch.optim.Adagrad, "exact_adagrad"), (torch.optim.Adam, "adam")],
)
@pytest.mark.parametrize("apply", [_apply_optimizer_in_backward, apply_optimizer_in_backward])
def test_an_optimizer_of_the_weights_counts(kind, optimizer, apply):
    module = in_backward(model(), kind, apply)
    assert planned(module).problem.optimizer == optimizer
    assert problem_for(module, TWO, 2048, LOOKUPS).optimizer == optimizer
    _, problem = plan_for(module, TWO, AnalyticModel(Setting("gpu", 2048)), LOOKUPS, "size_greedy")
    assert problem.optimizer == optimizer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_of_the_sharders_counts(optimizer):
    fused = {"optimizer": EmbOptimType[OPTIMIZERS[optimizer].theirs], "learning_rate": 0.1}
    made = planned(model(), [EmbeddingBagCollectionSharder(fused_params=fused)])
    assert made.problem.optimizer == optimizer
    # As TorchRec does, weights before sharders.
    module = in_backward(model(), torch.optim.Adam)
    assert planned(module, [EmbeddingBagCollectionSharder(fused_params=fused)]).problem.optimizer == "adam"


def test_what_counts_as_the_optimizer_is_told():
    assert (
        "no optimizer is set on the tables' weights or in fused_params; their state counts as under "
        "rowwise_adagrad, the cost model's"
    ) in planned(model(), optimizer="rowwise_adagrad").unpriced
    module = in_backward(model(), torch.optim.Adagrad)
    line = (
        "tables are priced as under exact_sgd, for which the cost model is; they train under "
        "exact_adagrad, whose state memory counts"
    )
    assert line in planned(module).unpriced
    job = Job(replica_optimizer="adagrad")
    assert not [s for s in planned(module, optimizer="exact_adagrad", job=job).unpriced if "adagrad" in s]
    fused = {"optimizer": EmbOptimType.ADAM, "gather_uvm_cache_stats": True, "eps": 1e-8}
    assert (
        "fused_params of EmbeddingBagCollectionSharder has gather_uvm_cache_stats True; what counting takes is not "
        "priced"
    ) in planned(model(), [EmbeddingBagCollectionSharder(fused_params=fused)]).unpriced


def test_optimizers_that_differ_are_refused_by_name():
    module = model()
    _apply_optimizer_in_backward(torch.optim.Adam, [module.m.embedding_bags.t0.weight], {"lr": 0.1})
    with pytest.raises(
        ShardCoreError,
        match="model trains table 't0' under ADAM and table 't1' under "
        "EXACT_SGD .FBGEMM's default.; ShardCore counts and prices one",
    ):
        planned(module)
    fused = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.LAMB})
    with pytest.raises(ShardCoreError, match="table 't0' under ADAM and table 't1' under LAMB; ShardCore"):
        planned(module, [fused])
    _apply_optimizer_in_backward(torch.optim.Adam, [module.m.embedding_bags.t1.weight], {"lr": 0.1})
    assert planned(module, [fused]).problem.optimizer == "adam"


def test_optimizers_that_no_count_has_are_refused_by_name():
    with pytest.raises(ShardCoreError, match="table 't0' trains under Adadelta; known are EXACT_SGD, "):
        planned(in_backward(model(), torch.optim.Adadelta))
    fused = {"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB}
    with pytest.raises(ShardCoreError, match="table 't0' trains under PARTIAL_ROWWISE_LAMB; known are EXACT"):
        planned(model(), [EmbeddingBagCollectionSharder(fused_params=fused)])
    with pytest.raises(ShardCoreError, match="optimizer is 'lamb'; the model's weights have 'adam' in back"):
        problem_for(in_backward(model(), torch.optim.Adam), TWO, 2048, LOOKUPS, "lamb")
    twice = in_backward(in_backward(model(), torch.optim.Adam), torch.optim.SGD)
    with pytest.raises(ShardCoreError, match="table 't0' has optimizers Adam, SGD in backward; TorchRec ta"):
        planned(twice)


@pytest.mark.parametrize(
    "kind, times", [(torch.optim.SGD, 1), (torch.optim.Adagrad, 2), (torch.optim.Adam, 3)]
)
def test_the_state_of_mlperfs_tables_counts(kind, times):
    """Per-cell Adagrad keeps a number for each weight, Adam two."""
    made = planned(in_backward(model(MLPERF_ROWS, 128), kind), hbm_cap=80 * GIB, devices=8)
    held = memory.used_bytes(made.our_plan, made.problem)
    weights = sum(MLPERF_ROWS) * 128 * 4
    assert sum(held) == pytest.approx(times * weights, rel=0.02)


def test_state_that_does_not_fit_is_refused():
    """Its weights would."""
    on = {"hbm_cap": 16 * GIB}
    planned(in_backward(model((40_000_000,), 128), torch.optim.SGD), **on)
    with pytest.raises(Infeasible, match="take 38.. GiB with outputs; its 2 devices may hold 27.2 GiB"):
        planned(in_backward(model((40_000_000,), 128), torch.optim.Adagrad), **on)


@pytest.mark.parametrize(
    "optimizer, device",
    [
        *((optimizer, "meta") for optimizer in OPTIMIZERS),
        # FBGEMM trains no others on CPUs.
        *((optimizer, "cpu") for optimizer in ("exact_sgd", "rowwise_adagrad", "exact_adagrad")),
    ],
)
def test_state_is_counted_as_fbgemm_allocates_it(optimizer, device):
    """Bytes of all tensors that an op keeps, within 5%. On the meta device it is CUDA's op."""
    tables = tuple(Table(f"t{i}", rows, dim, 1.0) for i, (rows, dim) in enumerate(((20_000, 32), (9000, 64))))
    problem = Problem("p", tables, Topology((Device(GIB),)), 8, optimizer)
    parts = memory.memory_by_part(
        Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in tables)), problem
    )[0].parts
    place = (
        (EmbeddingLocation.HOST, ComputeDevice.CPU)
        if device == "cpu"
        else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    )
    op = SplitTableBatchedEmbeddingBagsCodegen(
        [(t.rows, t.dim, *place) for t in tables],
        optimizer=EmbOptimType[OPTIMIZERS[optimizer].theirs],
        device=torch.device(device),
    )
    kept = [*op.parameters(), *op.buffers(), *(x for of in op.split_optimizer_states() for x in of)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in kept}
    assert parts["weights"] + parts["optimizer state"] == pytest.approx(sum(storages.values()), rel=0.05)


@pytest.mark.parametrize(
    "fused, dense, same",
    [
        ("EXACT_SGD", "sgd", True),
        ("EXACT_ROWWISE_ADAGRAD", "rowwise_adagrad", True),
        ("ADAM", "adam", True),
        ("EXACT_ADAGRAD", "adam", False),
        ("EXACT_ROWWISE_ADAGRAD", "adagrad", False),
        ("PARTIAL_ROWWISE_ADAM", "adam", False),
        ("EXACT_SGD", None, False),
    ],
)
def test_tables_are_replicated_by_default_only_where_their_optimizer_stays(fused, dense, same):
    """A dense optimizer of the job trains replicas, not the fused one."""
    sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType[fused]})]

    def made(constraints=None):
        planner = ShardCorePlanner(
            TheirTopology(2, "cuda", hbm_cap=GIB),
            1024,
            constraints,
            model="nvidia-h100-sxm",
            lookups={"f0": 2.0},
            job=Job(replica_optimizer=dense),
            budget=Budget(evals=200),
        )
        kinds = {s.sharding_type for s in planner.plan(model((10_000,), 64), sharders).plan["m"].values()}
        return kinds, [line for line in planner.unpriced if "replica" in line]

    kinds, lines = made()
    assert (kinds == {"data_parallel"}) == same
    if same:
        assert lines[0].startswith("replicas (data_parallel) of 't0' leave the fused optimizer (")
    else:
        assert lines[0].startswith("no table is replicated by default: replicas leave the fused ")
    # Who names the kind has it, and is told.
    kinds, lines = made({"t0": ParameterConstraints(sharding_types=["data_parallel"])})
    assert kinds == {"data_parallel"} and "of 't0' leave the fused optimizer" in lines[0]
