"""Reading of a TorchRec model's modules."""

import warnings
from dataclasses import replace

import pytest
import torch

pytest.importorskip("torchrec")

from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import RowWiseAdagrad

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard
from shardcore.step import memory
from shardcore.torchrec.modules import collections_of_model, tables_of_model
from shardcore.torchrec.planner import problem_for
from shardcore.torchrec.sharding_plan import to_torchrec

ROWS, LOOKUPS, CPU = 10_000, 640, torch.device("cpu")


def evicting(policy, interval):
    return MCHManagedCollisionModule(
        zch_size=ROWS, device=CPU, eviction_policy=policy, eviction_interval=interval, input_hash_size=1 << 40
    )


@pytest.mark.parametrize(
    "made",
    [
        lambda: evicting(DistanceLFU_EvictionPolicy(), 2),
        lambda: evicting(LFU_EvictionPolicy(), 5),
        lambda: evicting(LRU_EvictionPolicy(), 1),
        lambda: HashZchManagedCollisionModule(zch_size=ROWS, device=CPU, total_num_buckets=2),
        lambda: HashZchManagedCollisionModule(
            zch_size=ROWS,
            device=CPU,
            total_num_buckets=8,
            max_probe=64,
            input_hash_size=1 << 40,
            eviction_policy_name=HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
            eviction_config=HashZchEvictionConfig(features=["f"], single_ttl=1),
        ),
    ],
)
def test_managed_collision_takes_what_its_modules_hold(made):
    """By hand 32 bytes a row under DistanceLFU. A rank's own module has its rows, and ids of its lookups."""
    bags = EmbeddingBagCollection(
        device=CPU,
        tables=[EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = made()
    wrapped = ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection({"t": module}, bags.embedding_bag_configs())
    )
    problem = problem_for(wrapped, Topology((Device(1 << 30),) * 2), 64, {"f": LOOKUPS / 64})
    [table] = problem.tables
    of_rank = module.rebuild_with_output_id_range((0, ROWS // 2), [0, ROWS // 2, ROWS], CPU)
    if isinstance(module, MCHManagedCollisionModule):
        own = torch.arange(LOOKUPS // 2)  # what arrives at a rank
        of_rank.train()
        of_rank.profile({"f": JaggedTensor(own, lengths=torch.ones(len(own), dtype=torch.int64))})
    tensors = [
        *of_rank.buffers(),
        *of_rank.parameters(),
        *filter(torch.is_tensor, [getattr(of_rank, "_history_accumulator", None)]),
    ]
    # Identities of MPZCH are a buffer and a parameter, of one storage.
    real = sum(x.numel() * x.element_size() for x in {x.data_ptr(): x for x in tensors}.values())
    plan = Plan((Placement("row", Shard.whole(table), (0, 1)),))
    counted = memory.memory_by_part(plan, problem)[0].parts["weights"] - ROWS // 2 * 8 * 4
    assert counted == real
    collision = table.managed_collision
    assert (collision.routing, collision.input_size) == (
        ("contiguous", 1 << 40) if module.input_size() else ("round_robin", 0)
    )
    if isinstance(module, HashZchManagedCollisionModule):
        assert collision.buckets == module.buckets()
    # The catalog of forms has the same bytes of a row.
    assert replace(collision, row_bytes=None).row_bytes == collision.row_bytes
    if isinstance(getattr(module, "_eviction_policy", None), DistanceLFU_EvictionPolicy):
        assert (collision.row_bytes, collision.eviction) == (32, "distancelfu")


def test_a_job_has_the_tables_of_its_model(tmp_path):
    """Sharded or not, within DistributedModelParallel or beside it, with the optimizer of its fused ops."""
    import torch.distributed as dist
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import DistributedModelParallel

    def model() -> nn.ModuleDict:
        bags = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
        rows = EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["g"])
        meta = torch.device("meta")
        made = nn.ModuleDict(
            {
                "x": EmbeddingBagCollection(tables=[bags], device=meta, is_weighted=True),
                "y": EmbeddingCollection(tables=[rows], device=meta),
            }
        )
        apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
        return made

    def problem(module: nn.Module) -> Problem:
        return problem_for(module, Topology((Device(1 << 30),)), 64, {"f": 2.0, "g": 3.0})

    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        where = Topology((Device(1 << 30),), hardware="cpu")
        plan = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in problem(model()).tables))
        made = model()
        exported = to_torchrec(plan, replace(problem(made), topology=where), made)
        job = DistributedModelParallel(made, device=CPU, plan=exported)
        assert [type(c.module).__name__ for c in collections_of_model(job)] == [
            "ShardedEmbeddingBagCollection",
            "ShardedEmbeddingCollection",
        ]
        assert problem(job) == problem(model())
        assert problem(job).optimizer == "rowwise_adagrad"
        assert list(tables_of_model(nn.ModuleDict({"a": job, "b": model()["x"]}))) == [
            "a.x.t",
            "a.y.t",
            "b.t",
        ]
    finally:
        dist.destroy_process_group()
