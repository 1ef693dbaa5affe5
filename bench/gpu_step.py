"""A TorchRec job on one GPU, a step of it traced: a helper of bench/gpu_acceptance.py.

    python -m bench.gpu_step DIR --batch 65536

It trains a small DLRM in a TrainPipelineSparseDist over NCCL, with TorchRec's own plan, and leaves
ShardCoreProfiler's folder. `shardcore job read DIR` then shows where the time of a step goes. It needs
TorchRec besides torch and FBGEMM.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench import common
from shardcore.torchrec.profiler import FIRST, ShardCoreProfiler

TABLES = ((1_000_000, 128, 10), (4_000_000, 64, 10), (100_000, 32, 5), (1_000, 16, 1), (2_000_000, 128, 3))
"""Rows, columns and lookups of a sample."""
DENSE, HIDDEN, BATCHES = 13, 512, 4
STEPS = FIRST + 10


class Dlrm(nn.Module):
    """Tables, and layers over their outputs and the dense features."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables
        width = sum(dim for _, dim, _ in TABLES) + DENSE
        self.layers = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.tables(batch.sparse_features).values()
        out = self.layers(torch.cat([pooled, batch.dense_features], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(out, batch.labels)
        return loss, out.detach()


def run_traced_job(batch: int, folder: Path) -> None:
    """Train a few steps of a DLRM, one of them traced into a folder."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.datasets.utils import Batch
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    names = [f"f{i}" for i in range(len(TABLES))]
    configs = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=dim, feature_names=[names[i]])
        for i, (rows, dim, _) in enumerate(TABLES)
    ]
    tables = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.01})
    model: Any = DistributedModelParallel(Dlrm(tables), device=torch.device("cuda"))
    optimizer = torch.optim.SGD(model.module.layers.parameters(), lr=0.01)
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, torch.device("cuda"))
    rng = torch.Generator().manual_seed(0)

    def draw_batch() -> Any:
        ids = [
            torch.randint(0, rows, (batch * lookups,), generator=rng, dtype=torch.int64)
            for rows, _, lookups in TABLES
        ]
        lengths = torch.cat([torch.full((batch,), lookups, dtype=torch.int64) for *_, lookups in TABLES])
        return Batch(
            torch.rand(batch, DENSE, generator=rng),
            KeyedJaggedTensor(names, torch.cat(ids), lengths=lengths),
            torch.rand(batch, generator=rng).round(),
        )

    batches = itertools.cycle([draw_batch() for _ in range(BATCHES)])
    profiler = ShardCoreProfiler(model, folder, every=STEPS)
    for _ in range(STEPS):
        pipeline.progress(batches)
        profiler.step()
    torch.cuda.synchronize()


def main() -> None:
    parser = common.bench_parser(
        __doc__, {"folder": (Path, "of the job's traces")}, batch=(65_536, "samples of a step")
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        run_traced_job(args.batch, args.folder)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
