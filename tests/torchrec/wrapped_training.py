"""A model whose collections are plain and wrapped, planned by ShardCorePlanner and trained on gloo processes.

What the wrapper of feature processors gives is compared with an unsharded run. Managed collision maps ids to
rows by itself, so what is compared there is the ranks: an id has one row, whichever rank asks for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

import training

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import Budget
from shardcore.torchrec.planner import ShardCorePlanner

BATCH, STEPS, RATE, ROWS, RAW_IDS, LONGEST = 8, 12, 0.3, 64, 40, 4
PLAIN, RAW = ("f0", "f1", "f2", "f3"), ("r0", "r1")
PATHS = {"bags", "rows", "processed", "collided", "collided_rows"}


class Model(nn.Module):
    """EBC `bags` (f0), EC `rows` (f1), FPEBC `processed` (f2, f3), MC-EBC and MC-EC of raw ids (r0, r1)."""

    def __init__(self) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingCollection
        from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
        from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
        from torchrec.modules.mc_embedding_modules import (
            ManagedCollisionEmbeddingBagCollection,
            ManagedCollisionEmbeddingCollection,
        )

        super().__init__()
        self.bags = EmbeddingBagCollection(pooled("a", ["f0"]))
        self.rows = EmbeddingCollection(sequences("b", ["f1"]))
        self.processed = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(pooled("c", ["f2"]) + pooled("d", ["f3"]), is_weighted=True),
            PositionWeightedModuleCollection({"f2": LONGEST, "f3": LONGEST}),
        )
        bags, rows = EmbeddingBagCollection(pooled("e", ["r0"])), EmbeddingCollection(sequences("g", ["r1"]))
        self.collided = ManagedCollisionEmbeddingBagCollection(
            bags, remapping("e", bags.embedding_bag_configs()), return_remapped_features=True
        )
        self.collided_rows = ManagedCollisionEmbeddingCollection(
            rows, remapping("g", rows.embedding_configs()), return_remapped_features=True
        )

    def forward(self, plain, raw):
        """Outputs that an unsharded run has too, and those of managed collision with its rows."""
        same = [self.bags(plain)["f0"], *(self.processed(plain)[f] for f in ("f2", "f3"))]
        collided, rows = self.collided(raw)
        collided_rows, rows_of_rows = self.collided_rows(raw)
        return (
            torch.cat(same, 1),
            self.rows(plain)["f1"].values(),
            collided["r0"],
            collided_rows["r1"].values(),
            rows["r0"].values(),
            rows_of_rows["r1"].values(),
        )


def pooled(name: str, features: list[str]):
    from torchrec import EmbeddingBagConfig

    return [EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=8, feature_names=features)]


def sequences(name: str, features: list[str]):
    from torchrec import EmbeddingConfig

    return [EmbeddingConfig(name=name, num_embeddings=ROWS, embedding_dim=8, feature_names=features)]


def remapping(table: str, configs):
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    one = MCHManagedCollisionModule(
        ROWS, torch.device("cpu"), DistanceLFU_EvictionPolicy(), 1, input_hash_size=2**20
    )
    return ManagedCollisionCollection({table: one}, configs)


def batch(seed: int):
    """Ids of rows, and raw ids of RAW_IDS values up to 2^20."""
    from torchrec import KeyedJaggedTensor

    rng = np.random.default_rng(seed)
    raw_ids = np.random.default_rng(0).choice(2**20, RAW_IDS, replace=False)

    def jagged(keys, ids):
        lengths = rng.integers(0, LONGEST + 1, (len(keys), BATCH))
        return KeyedJaggedTensor(
            keys=list(keys),
            values=torch.from_numpy(rng.choice(ids, lengths.sum())),
            lengths=torch.from_numpy(lengths.ravel()),
        )

    return jagged(PLAIN, np.arange(ROWS)), jagged(RAW, raw_ids)


def planner(n: int, asked=None) -> ShardCorePlanner:
    """asked: sharding types, by table. The others are not replicated: replicas have an optimizer apart."""
    from torchrec.distributed.planner import ParameterConstraints

    types = dict.fromkeys("abcdeg", ["table_wise", "row_wise"] if n > 1 else None) | (asked or {})
    constraints = {
        name: ParameterConstraints(pooling_factors=[2.0], sharding_types=types[name]) for name in "abcdeg"
    }
    made = ShardCorePlanner(
        Topology((Device(10**9),) * n),
        BATCH,
        constraints,
        model=AnalyticModel(Setting("cpu", BATCH * n)),
        budget=Budget(evals=200),
    )
    made.compute_device = "cpu"
    return made


def train(n: int) -> list[str | None]:
    """For each rank what is wrong, "" if nothing is. None: it died or hung."""
    given = Problem("wrapped", (Table("a", ROWS, 8, 2.0),), Topology((Device(10**9),) * n), BATCH * n)
    return training.on_ranks(given, _trained)


def sharders():
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder

    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    bags, rows = EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)
    return [
        bags,
        rows,
        FeatureProcessedEmbeddingBagCollectionSharder(bags),
        ManagedCollisionEmbeddingBagCollectionSharder(bags),
        ManagedCollisionEmbeddingCollectionSharder(rows),
    ]


def _trained(rank: int, given: Problem, folder: str) -> str:
    from torchrec.distributed import DistributedModelParallel

    n = len(given.topology)
    torch.manual_seed(1)
    whole = Model()
    torch.manual_seed(1)
    model = Model()
    plan = planner(n).collective_plan(model, sharders())
    if set(plan.plan) != PATHS:
        return f"the plan has modules {sorted(plan.plan)}"
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders())
    _copy_tables(model, whole)
    dense = [p for name, p in model.named_parameters() if "_feature_processors" in name]
    if len(dense) != 2:
        return f"the model has {len(dense)} position weights"
    ours, theirs = torch.optim.SGD(dense, lr=RATE), torch.optim.SGD(whole.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        batches = [batch(100 * step + r) for r in range(n)]
        found = model(*batches[rank])
        reference = [whole(*b) for b in batches]
        for mine, other in zip(found[:2], reference[rank][:2], strict=True):
            if (apart := (mine - other).abs().max().item()) > 1e-5:
                return f"step {step}, outputs differ by {apart:.1e}"
        ours.zero_grad()
        theirs.zero_grad()
        loss = _loss(found[:4])
        losses.append(loss.item())
        loss.backward()
        torch.stack([_loss(of[:4]) for of in reference]).mean().backward()
        ours.step()
        theirs.step()
    if not losses[-1] < 0.9 * losses[0]:
        return f"the loss went from {losses[0]} to {losses[-1]}"
    return _one_row_an_id(rank, n, model, batch(10_000)[1])


def _loss(outputs):
    return sum(((x - 1) ** 2).sum() / BATCH for x in outputs)


def _copy_tables(model: nn.Module, whole: nn.Module) -> None:
    """The weights of an unsharded model into the shards of a rank, whatever is around the collections."""
    reference = {name: value for name, value in whole.state_dict().items() if name.endswith(".weight")}
    for name, value in ((name, value) for name, value in model.state_dict().items() if name in reference):
        for shard in value.local_shards() if hasattr(value, "local_shards") else ():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.detach().copy_(reference[name][row : row + rows, column : column + columns])


def _one_row_an_id(rank: int, n: int, model: nn.Module, raw) -> str:
    """Ask for the same raw ids on all ranks, after training."""
    plain = batch(0)[0]
    *_, collided, _sequences, rows, rows_of_rows = model(plain, raw)
    for what, feature, found in (("MC-EBC", "r0", rows), ("MC-EC", "r1", rows_of_rows)):
        ids = raw[feature].values()
        everywhere = [torch.empty_like(found) for _ in range(n)]
        dist.all_gather(everywhere, found.contiguous())
        if not all(torch.equal(everywhere[0], other) for other in everywhere):
            return f"{what}: ranks have other rows for the same ids"
        if not len(ids) // 3 < len(found.unique()) <= len(ids.unique()):
            return f"{what}: {len(ids.unique())} ids have {len(found.unique())} rows"
    outputs = [torch.empty_like(collided) for _ in range(n)]
    dist.all_gather(outputs, collided.detach().contiguous())
    return "" if all(torch.equal(outputs[0], other) for other in outputs) else "MC-EBC: outputs differ"
