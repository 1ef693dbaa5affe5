"""How bench/steps.py trains plans in TorchRec and times their steps: one rank, and what all ranks saw.

Shapes: D ranks.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from shardcore.core.catalog import OPTIMIZERS, PRECISIONS
from shardcore.core.types import Plan, Problem, Setting
from shardcore.io.dataset import ReferenceOp
from shardcore.io.measurements import TimingSpread
from shardcore.measure import local_ranks, own_core
from shardcore.measure.kernels import KernelBench, KernelConfig
from shardcore.measure.timing import timing_spread
from shardcore.tables import streams
from shardcore.torchrec.sharding_plan import to_torchrec

DENSE, HIDDEN = 13, 256
"""Features of a sample beside the ids, and the width of the dense part's hidden layer."""
BATCHES, TURN, LEARNING_RATE, EVICT_BYTES = 4, 3, 0.01, 64 << 20
TIMEOUT_S = 240.0
_REFERENCE_RUNS = 4
"""Of the reference op, a round."""
LARGE = 1 << 12
"""Elements of zeros that only tables have."""
LOOKUP, POOLED, DENSE_PART, GRADIENT, UPDATED = range(5)
"""Marks of a step: lookup begun, pooled outputs received, dense part begun, the outputs' gradients known,
weights updated."""


@dataclass(frozen=True)
class Steps:
    """Times of a plan's steps in TorchRec.

    share: median share of the embedding part in the whole step.
    """

    embedding: TimingSpread
    whole: TimingSpread
    share: float


class InArena(TorchFunctionMode):
    """Context in which zero tensors as large as tables lie in one memory arena and keep their content."""

    def __init__(self, arena: torch.Tensor) -> None:
        super().__init__()
        self.arena, self.used = arena, 0

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros:
            n = args[0]
            if isinstance(n, int) and n > LARGE and kwargs.get("dtype") == self.arena.dtype:
                self.used += n
                return self.arena[self.used - n : self.used]
        elif func is torch.Tensor.uniform_:
            if args[0].untyped_storage().data_ptr() == self.arena.untyped_storage().data_ptr():
                return args[0]
        return func(*args, **kwargs)


@dataclass(eq=False)
class Trainer:
    """A plan's model in TorchRec's pipeline, and when its steps passed their marks, in s of the host's clock:
    of each turn [TURN, 5]."""

    pipeline: Any
    batches: Iterator[Any]
    turns: list[np.ndarray] = field(default_factory=list)
    _marks: list[float] = field(default_factory=list)

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        problem: Problem,
        setting: Setting,
        arena: torch.Tensor,
        batches: Sequence[Any],
        cache: torch.Tensor,
    ) -> Trainer:
        pipeline, optimizer, model = build_pipeline(plan, problem, setting, arena)
        trainer = cls(pipeline, itertools.cycle(batches))
        trainer.pipeline.progress(trainer.batches)  # traces the model, so marks come after it
        inner = model.module
        inner.tables.register_forward_pre_hook(lambda *_: trainer.record_mark())
        inner.dense.register_forward_pre_hook(
            lambda _, inputs: trainer._hook_dense_backward(inputs[0], cache)
        )
        optimizer.register_step_pre_hook(lambda *_: trainer.record_mark())
        return trainer

    def record_mark(self) -> None:
        self._marks.append(time.perf_counter())

    def _hook_dense_backward(self, inputs: torch.Tensor, cache: torch.Tensor) -> None:
        self.record_mark()
        cache.add_(1)
        dist.barrier()
        inputs.register_hook(lambda _: self.record_mark())
        self.record_mark()

    def train_turn(self) -> None:
        self._marks.clear()
        for _ in range(TURN):
            self.pipeline.progress(self.batches)
        self.turns.append(np.array(self._marks).reshape(TURN, 5))


def build_pipeline(
    plan: Plan, problem: Problem, setting: Setting, arena: torch.Tensor
) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A plan's model in TorchRec's pipeline, the optimizer of its dense part and replicas, and the model itself."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    cpu, module = torch.device("cpu"), _build_model(problem)
    fused = {
        "optimizer": EmbOptimType[OPTIMIZERS[setting.optimizer].theirs],
        "learning_rate": LEARNING_RATE,
    }
    exported = to_torchrec(plan, problem, module, "cpu")
    of_tables: Any = exported.plan["tables"]
    sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=fused)]
    with InArena(arena):
        model = DistributedModelParallel(module, device=cpu, plan=exported, sharders=sharders)
    copied = [
        f"embedding_bags.{name}." for name, s in of_tables.items() if s.sharding_type == "data_parallel"
    ]
    dense = [p for name, p in model.named_parameters() if any(part in name for part in ("dense.", *copied))]
    optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE)
    return TrainPipelineSparseDist(model, optimizer, cpu), optimizer, model


def _build_model(problem: Problem) -> torch.nn.Module:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.modules.embedding_configs import DataType

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    EmbeddingBagConfig(
                        name=t.name,
                        num_embeddings=t.rows,
                        embedding_dim=t.dim,
                        feature_names=[t.name],
                        data_type=DataType[PRECISIONS[t.precision].theirs],
                        init_fn=lambda _: None,
                    )
                    for t in problem.tables
                ],
            )
            columns = DENSE + sum(t.dim for t in problem.tables)
            self.dense = torch.nn.Sequential(
                torch.nn.Linear(columns, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
            )

        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            pooled = self.tables(batch.sparse_features).values()
            logits = self.dense(torch.cat([batch.dense_features, pooled], 1)).squeeze(1)
            return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits

    return Model()


def rank_batch(problem: Problem, rank: int, seed: int) -> Any:
    """Rank's share of the global batch that a replay of the same seed looks up."""
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch

    local = problem.local_batch
    values, lengths = [], []
    for table in problem.tables:
        ids, offsets = streams.draw_lookups(table, problem.global_batch, seed)
        mine = offsets[rank * local : (rank + 1) * local + 1]
        values.append(ids[mine[0] : mine[-1]])
        lengths.append(np.diff(mine))
    features = KeyedJaggedTensor(
        keys=[t.name for t in problem.tables],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)).int(),
    )
    return Batch(torch.randn(local, DENSE), features, torch.rand(local).round())


def run_rank(
    rank: int,
    init_method: str,
    say: Callable[[Any], None],
    given: Sequence[tuple[Problem, dict[str, Plan]]],
    setting: Setting,
    rounds: int,
    elements: int,
    reference: ReferenceOp,
) -> None:
    """Train as one rank of a gang: send time marks of each problem's steps, by plan."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(len(given[0][0].topology)),
        LOCAL_WORLD_SIZE=str(len(given[0][0].topology)),
    )
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    arena = torch.empty(elements, dtype=getattr(torch, PRECISIONS[setting.precision].torch)).fill_(0.01)
    cache = torch.zeros(EVICT_BYTES // 4)
    bench = KernelBench(setting, "cpu", KernelConfig(max(s.bytes for s in reference[0].shards)))
    beside = bench.prepare(reference[0])
    say(None)
    with local_ranks.report_lost_ranks():
        dist.init_process_group("gloo", init_method, rank=rank, world_size=len(given[0][0].topology))
        own_core.take_core(rank)
        for problem, plans in given:
            batches = [rank_batch(problem, rank, seed) for seed in range(BATCHES)]
            trainers = {}
            for name, plan in plans.items():
                trainers[name] = Trainer.of_plan(plan, problem, setting, arena, batches, cache)
                say(None)
            own_core.deprioritize_network_threads()
            reference_ms = []
            for index in range(-1, rounds):
                for i in np.random.default_rng([index + 1]).permutation(len(trainers)):
                    list(trainers.values())[i].train_turn()
                for _ in range(_REFERENCE_RUNS):
                    cache.add_(1)
                    reference_ms.append(bench.run_once_ms(beside))
                say(None)
            slowdown = float(np.median(reference_ms)) / reference[1]
            say({name: np.stack(trainer.turns[1:]) / slowdown for name, trainer in trainers.items()})
            del trainers
            gc.collect()


def combine_ranks(marks_s: Sequence[np.ndarray]) -> Steps:
    """Combine the time marks of all ranks into a plan's steps. marks_s: times in s of each of the D ranks, [turns,
    steps of a turn, 5 marks of a step].
    """
    marks = np.stack(marks_s) * 1e3
    now, following = marks[:, :, :-1], marks[:, :, 1:]
    began = np.minimum(now[..., GRADIENT].max(0), now[..., UPDATED])
    embedding = (now[..., UPDATED] - began + following[..., POOLED] - following[..., LOOKUP]).max(0).ravel()
    whole = (following[..., POOLED].max(0) - now[..., DENSE_PART].max(0)).ravel()
    return Steps(timing_spread(embedding), timing_spread(whole), float(np.median(embedding / whole)))
