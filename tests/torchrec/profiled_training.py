"""A job with a ShardCoreProfiler, on gloo processes."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import training

from shardcore.core.types import Plan, Problem
from shardcore.torchrec.profiler import ShardCoreProfiler
from shardcore.torchrec.sharding_plan import to_torchrec


def work(rank: int, given: Problem, plan: Plan, folder: Path, steps: int, every: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    n = len(given.topology)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=n)
    exported = to_torchrec(plan, given, training.Model("cpu", sequence=True), "cpu")
    model = training.sharded(
        training.Model("cpu", sequence=True), exported, "EXACT_ROWWISE_ADAGRAD", rate=0.1
    )
    profiler = ShardCoreProfiler(model, folder, every=every, steps=2, keep=1)
    for step in range(steps):
        pooled, rows = model(training._batch(100 * step + rank))
        training._loss(pooled, rows).backward()
        profiler.step()
    dist.barrier()
    os._exit(0)
