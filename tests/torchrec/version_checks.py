"""Run under the TorchRec that comes first on PYTHONPATH: plan, export and read plans, and train on one rank.

    python version_checks.py VERSION

It ends with code 0 if all checks hold. Its last line names the failure otherwise.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torchrec
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams, ShardingEnv

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import Budget
from shardcore.torchrec.modules import tables_of_model
from shardcore.torchrec.plan_files import plan_to_json, read_torchrec, write_torchrec
from shardcore.torchrec.planner import ShardCorePlanner
from shardcore.torchrec.sharding_plan import from_torchrec, to_torchrec

LOOKUPS = {"a": 3.0, "b": 2.0, "c": 5.0, "s": 1.0}
CONSTRAINTS = {
    "rows": ParameterConstraints(sharding_types=["row_wise"]),
    "columns": ParameterConstraints(sharding_types=["column_wise"], min_partition=16),
    "cached": ParameterConstraints(
        compute_kernels=["fused_uvm_caching"], cache_params=CacheParams(load_factor=0.25)
    ),
}


class Model(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        bags = [("rows", 400, 8, "a"), ("columns", 100, 64, "b"), ("cached", 600, 16, "c")]
        self.bags = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=[f])
                for n, rows, dim, f in bags
            ],
        )
        self.sequences = EmbeddingCollection(
            device=torch.device(device),
            tables=[EmbeddingConfig(name="s", num_embeddings=90, embedding_dim=8, feature_names=["s"])],
        )

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(ids).values().sum() + self.sequences(ids)["s"].values().sum()


def planner(ranks: int, device: str, constraints: dict[str, ParameterConstraints]) -> ShardCorePlanner:
    topology = Topology(world_size=ranks, compute_device=device, hbm_cap=1 << 30, ddr_cap=1 << 34)
    model = AnalyticModel(Setting("cpu", 16 * ranks))
    return ShardCorePlanner(
        topology, 16, constraints, model=model, lookups=LOOKUPS, budget=Budget(evals=200), reserved=0.0
    )


def check_plans(sharders: list) -> None:
    """A plan keeps the constraints, and is the same after export and reading."""
    module, ours = Model("meta"), planner(4, "cuda", CONSTRAINTS)
    plan = ours.plan(module, sharders)
    bags = plan.plan["bags"]
    assert bags["rows"].sharding_type == "row_wise" and len(bags["rows"].sharding_spec.shards) == 4
    assert bags["columns"].sharding_type == "column_wise"
    assert all(shard.shard_sizes[1] >= 16 for shard in bags["columns"].sharding_spec.shards)
    assert (bags["cached"].compute_kernel, bags["cached"].cache_params.load_factor) == (
        "fused_uvm_caching",
        0.25,
    )
    read_back = from_torchrec(plan, ours.problem, module)
    assert read_back.placements == ours.our_plan.placements
    exported = to_torchrec(ours.our_plan, ours.problem, module)
    assert from_torchrec(exported, ours.problem, module).placements == read_back.placements
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_torchrec(path, plan)
        assert plan_to_json(read_torchrec(path, module)) == plan_to_json(plan)


def check_refusals(sharders: list) -> None:
    """Constraints that cannot be right are refused by name."""
    for wrong, words in (
        (ParameterConstraints(sharding_types=["diagonal_wise"]), "diagonal_wise"),
        (ParameterConstraints(min_partition="x"), "min_partition"),
    ):
        try:
            planner(4, "cuda", {"rows": wrong}).plan(Model("meta"), sharders)
        except ShardCoreError as error:
            assert words in str(error) and "'rows'" in str(error), error
        else:
            raise AssertionError(f"{wrong} was not refused")


def check_step(sharders: list) -> None:
    """TorchRec trains a step under a plan, and the running model is read as the plain one."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        module, ours = Model("cpu"), planner(1, "cpu", {})
        plain = {name: t.config.embedding_dim for name, t in tables_of_model(module).items()}
        plan = ours.collective_plan(module, sharders, dist.GroupMember.WORLD)
        running = DistributedModelParallel(
            module,
            ShardingEnv.from_process_group(dist.GroupMember.WORLD),
            torch.device("cpu"),
            plan,
            sharders,
        )
        ids = KeyedJaggedTensor(list(LOOKUPS), torch.arange(8), lengths=torch.ones(8).int())
        running(ids).backward()
        assert {name: t.config.embedding_dim for name, t in tables_of_model(running).items()} == plain
        assert from_torchrec(plan, ours.problem, running).placements == ours.our_plan.placements
        dist.destroy_process_group()


if __name__ == "__main__":
    asked = sys.argv[1]
    assert torchrec.__version__ == asked, f"TorchRec is {torchrec.__version__}, not {asked}"
    both = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    check_plans(both)
    check_refusals(both)
    check_step(both)
