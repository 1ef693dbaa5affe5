"""A small DLRM of MLPerf's shape trains with a ShardCore plan, beside TorchRec's own plan, in alternation.

    torchrun --standalone --nproc_per_node=2 train.py

Tables, multi-hot sizes and skew are those of MLPerf DLRM-DCNv2 (Criteo 1TB, multi-hot), with rows and columns
scaled down; the clicks are synthetic: each id has a hidden score, which the model has to learn. Step times
are compared. --check trains an unsharded copy on every rank too, with the batches of all ranks, and compares
parameters at the end.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM_DCN

import shardcore
from shardcore import Setting
from shardcore.core.job import Job
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import Budget
from shardcore.tables import streams
from shardcore.tables.public import public_pool
from shardcore.torchrec.plan_files import write_torchrec
from shardcore.torchrec.planner import ShardCorePlanner

ROWS_SCALE, DIM, BATCH, LEARNING_RATE = 400, 32, 512, 1.0
"""batch: samples of a rank, without --model. rate: of the tables."""
DENSE = 13
TABLES = [replace(t, rows=max(3, t.rows // ROWS_SCALE), dim=DIM) for t in public_pool("mlperf-dlrm-dcnv2")]


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=t.name,
            num_embeddings=t.rows,
            embedding_dim=t.dim,
            feature_names=[t.name],
            weight_init_min=-0.1,
            weight_init_max=0.1,
        )
        for t in TABLES
    ]
    return DLRM_DCN(
        EmbeddingBagCollection(tables=tables, device=torch.device("cpu")), DENSE, [DIM], [32, 1], 2, 16
    )


def batch(seed: int, samples: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """Dense features [B, 13], ids of the 26 features, clicks [B]."""
    rng = np.random.default_rng(seed)
    dense, score = rng.normal(size=(samples, DENSE)), np.zeros(samples)
    values, lengths = [], []
    for table in TABLES:
        ids, offsets = streams.draw_lookups(table, samples, seed)
        sizes = np.diff(offsets)
        np.add.at(score, np.repeat(np.arange(samples), sizes), np.sin(ids * 12.9898) / np.sqrt(table.pooling))
        values.append(ids)
        lengths.append(sizes)
    score = 2 * (score - score.mean()) / score.std() + 3 * dense[:, 0]
    clicks = rng.random(samples) < 1 / (1 + np.exp(-score))
    features = KeyedJaggedTensor(
        keys=[t.name for t in TABLES],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)).int(),
    )
    return torch.from_numpy(dense).float(), features, torch.from_numpy(clicks).float()


def cost_model(world: int, folder: str | None):
    """The cost model of a folder, or one with made-up rates."""
    if folder:
        return shardcore.load_model(folder)
    # of the order of two CPU cores, not measured
    return AnalyticModel(
        Setting("cpu", BATCH * world),
        launch_us=500,
        table_us=20,
        lookup_ns=20,
        gather_gbps=8,
        update_gbps=2,
        exchange_gbps=1,
    )


def plans(rank: int, world: int, model, out: str | None) -> dict:
    """TorchRec's planner as its users call it, and ours in its place.

    The batch is the one that the cost model was measured for.
    """
    samples = model.setting.batch // world
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    constraints = {
        t.name: ParameterConstraints(
            pooling_factors=[t.pooling],
            compute_kernels=["fused"],
            min_partition=8,
            sharding_types=["table_wise", "column_wise", "row_wise"],
        )
        for t in TABLES
    }
    module, sharders = build(), [EmbeddingBagCollectionSharder()]
    theirs = EmbeddingShardingPlanner(topology, samples, constraints=constraints)
    ours = ShardCorePlanner(
        topology,
        samples,
        model=model,
        budget=Budget(evals=100_000),
        lookups=[batch(seed, samples)[1] for seed in range(world)],
        # Replicas train under the same optimizer as other tables (Trainer), so there may be some.
        job=Job(replica_optimizer="sgd"),
    )
    found = {
        "shardcore": ours.collective_plan(module, sharders),
        "torchrec": theirs.collective_plan(module, sharders),
    }
    if rank == 0 and out:
        write_torchrec(out, found["shardcore"])
    return found


class Trainer:
    """One model, its optimizers and its step; plan None trains it unsharded."""

    def __init__(self, plan, world: int) -> None:
        self.plan, self.times, self.losses = plan, [], []
        self.model = build()
        if plan:
            sharder = EmbeddingBagCollectionSharder(
                fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
            )
            whole = self.model.state_dict()
            self.model = DistributedModelParallel(
                build(), device=torch.device("cpu"), plan=plan, sharders=[sharder]
            )
            # TorchRec draws new weights for shards; a comparison needs the same
            for name, mine, part in shards(self.model):
                mine.copy_(whole[name][part])
        fused = {name for name, _, _ in shards(self.model)}  # their kernels update them
        tables = [
            p
            for n, p in self.model.named_parameters()
            if "embedding_bags" in n and n.removeprefix("module.") not in fused
        ]
        dense = [p for n, p in self.model.named_parameters() if "embedding_bags" not in n]
        self.optimizers = [torch.optim.SGD(dense, lr=0.1, momentum=0.9)]
        if tables:  # data-parallel, or unsharded
            self.optimizers.append(torch.optim.SGD(tables, lr=LEARNING_RATE))

    def step(self, batches) -> None:
        """Over the mean of the batches: a rank's own or, unsharded, all ranks'."""
        began = time.perf_counter()
        loss = torch.stack(
            [
                torch.nn.functional.binary_cross_entropy_with_logits(
                    self.model(dense, features).squeeze(1), clicks
                )
                for dense, features, clicks in batches
            ]
        ).mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.times.append(time.perf_counter() - began)
        self.losses.append(loss.item())


def shards(model: torch.nn.Module):
    """Name, weights and part (rows, columns) of what this rank holds of the sharded tables."""
    for name, value in model.state_dict().items():
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                yield name, shard.tensor.detach(), (slice(row, row + rows), slice(column, column + columns))


def largest_difference(model: torch.nn.Module, whole: torch.nn.Module) -> float:
    reference = whole.state_dict()
    apart = [(mine - reference[name][part]).abs().max() for name, mine, part in shards(model) if mine.numel()]
    apart += [
        (value - reference[name]).abs().max()
        for name, value in model.state_dict().items()
        if not hasattr(value, "local_shards")
    ]
    worst = torch.stack(apart).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def slowest_ms(trainer: Trainer) -> np.ndarray:
    """[steps] ms of the slowest rank, without the first quarter."""
    times = torch.tensor(trainer.times[len(trainer.times) // 4 :])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return 1e3 * times.numpy()


def ratio(times: np.ndarray, of: np.ndarray, seed: int = 0) -> str:
    """Median of one step's time over another's, step by step, with the 95% interval of a bootstrap over
    steps."""
    each = times / of
    drawn = np.median(np.random.default_rng(seed).choice(each, (2000, len(each))), axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"{np.median(each):.2f} (95% interval {low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", help="folder of a cost model measured here (python -m shardcore train)")
    parser.add_argument("--check", action="store_true", help="train an unsharded copy too, and compare")
    parser.add_argument("--out", help="write our plan there, as a file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = cost_model(world, args.model)
    samples, found = model.setting.batch // world, plans(rank, world, model, args.out)
    trainers = {name: Trainer(plan, world) for name, plan in found.items()}
    unsharded = Trainer(None, world) if args.check else None
    for step in range(args.steps):
        batches = [batch(step * world + r, samples) for r in range(world)]
        for trainer in list(trainers.values())[:: 1 if step % 2 else -1]:
            dist.barrier()
            trainer.step([batches[rank]])
        if unsharded:
            unsharded.step(batches)

    times = {
        name: slowest_ms(trainer)
        for name, trainer in [*trainers.items(), ("unsharded", unsharded)]
        if trainer
    }
    for name, trainer in trainers.items():
        kinds = [s.sharding_type for module in trainer.plan.plan.values() for s in module.values()]
        losses = torch.tensor(trainer.losses)
        dist.all_reduce(losses)
        losses /= world
        say = (
            f"{name:10} loss {losses[:5].mean():.4f} -> {losses[-5:].mean():.4f}   step "
            f"{np.median(times[name]):.1f} ms   "
            + ", ".join(f"{kinds.count(k)} {k}" for k in sorted(set(kinds)))
        )
        if unsharded:
            say += f"   differs from unsharded by {largest_difference(trainer.model, unsharded.model):.1e}"
        if rank == 0:
            print(say, flush=True)
    if rank == 0:
        print(
            "step time  "
            + ",   ".join(
                f"{name} over shardcore {ratio(ms, times['shardcore'])}"
                for name, ms in times.items()
                if name != "shardcore"
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
