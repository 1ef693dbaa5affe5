"""A TorchRec job of bench/job_traces.py: one rank trains several plans of a model, and traces the first.

Plans train over one piece of memory, each in a TrainPipelineSparseDist, as a user's job does. They take
turns, in another order each round. The first has a ShardCoreProfiler, which traces TRACED of its steps.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.steps_training import BATCHES, build_pipeline, rank_batch
from shardcore.core.catalog import PRECISIONS
from shardcore.core.types import Plan, Problem, Setting
from shardcore.measure import local_ranks, own_core
from shardcore.torchrec.profiler import ShardCoreProfiler

TRACED = 3
"""Steps that are traced, one after another: the 21st to 23rd of the first plan, within a turn."""
TURN = 8
"""Steps of a turn, of which the first is not timed."""


@dataclass(frozen=True)
class Job:
    """A training job to run and trace: problem, plan and batches.

    plans: by name. The first is traced.
    folder: of its traces.
    rounds: turns of each plan.
    """

    problem: Problem
    plans: Mapping[str, Plan]
    setting: Setting
    folder: Path
    rounds: int


class Trainer:
    """A model sharded by a plan, in TorchRec's training pipeline."""

    def __init__(
        self, plan: Plan, problem: Problem, setting: Setting, arena: torch.Tensor, batches: Sequence[Any]
    ) -> None:
        self._pipeline, _, self.model = build_pipeline(plan, problem, setting, arena)
        self._batches = itertools.cycle(batches)

    def step(self) -> None:
        self._pipeline.progress(self._batches)

    def train_turn(self, after_step: Callable[[], None]) -> list[float]:
        """Train the steps of one turn. Returns ms of each step without `after_step`."""
        times_ms = []
        for _ in range(TURN):
            began_s = time.perf_counter()
            self.step()
            times_ms.append(1e3 * (time.perf_counter() - began_s))
            after_step()
        return times_ms


def run_rank(
    rank: int,
    init_method: str,
    say: Callable[[Any], None],
    job: Job,
) -> None:
    """Train as one rank of a gang. Sends step ms [rounds, TURN - 1] by plan, and ms of the profiler's callback."""
    problem, plans, setting = job.problem, job.plans, job.setting
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    n, local = len(problem.topology), len(problem.topology.devices_by_host[0])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank % local), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(local)
    )
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    elements = sum(t.rows * t.dim for t in problem.tables) + (1 << 16)
    arena = torch.empty(elements, dtype=getattr(torch, PRECISIONS[setting.precision].torch)).fill_(0.01)
    say(None)
    with local_ranks.report_lost_ranks():
        dist.init_process_group("gloo", init_method, rank=rank, world_size=n)
        own_core.take_core(rank)
        batches = [rank_batch(problem, rank, seed) for seed in range(BATCHES)]
        trainers = {name: Trainer(plan, problem, setting, arena, batches) for name, plan in plans.items()}
        say(None)
        own_core.deprioritize_network_threads()
        first = next(iter(trainers))
        profiler = ShardCoreProfiler(trainers[first].model, job.folder, every=TURN * job.rounds, steps=TRACED)
        callback_ms: list[float] = []

        def call_profiler() -> None:
            began_s = time.perf_counter()
            profiler.step()
            callback_ms.append(1e3 * (time.perf_counter() - began_s))

        times_ms: dict[str, list[list[float]]] = {name: [] for name in trainers}
        for index in range(job.rounds):
            for i in np.random.default_rng([index]).permutation(len(trainers)):
                name, trainer = list(trainers.items())[i]
                dist.barrier()
                times_ms[name].append(
                    trainer.train_turn(call_profiler if name == first else lambda: None)[1:]
                )
            say(None)
        say(({name: np.array(ms) for name, ms in times_ms.items()}, np.array(callback_ms)))
        del trainers
        gc.collect()
