"""Peaks of memory of training steps in TorchRec's real processes, for tests and for memory_peaks.py.

Each plan is drawn, of all kinds of sharding: weights take most of its memory, or ids, or outputs, or none
does. Some tables have two features. A third of the plans have a collection of sequences too.
DistributedModelParallel trains it under TrainPipelineSparseDist on 2 gloo processes, or on 4 as two hosts.
`torch.profiler` records what every tensor takes, weights and optimizer state included.

Shapes: D devices.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import training
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from shardcore.core.catalog import DENSE_OPTIMIZERS, OPTIMIZERS
from shardcore.core.job import PIPELINES, Job
from shardcore.core.payloads import CASTS
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Table
from shardcore.io import writing
from shardcore.step import memory
from shardcore.torchrec.dense_memory import measured_job
from shardcore.torchrec.sharding_plan import to_torchrec

ABOVE, BELOW = 0.10, 0.05
"""Distances of a count from the peak that are allowed, as shares of it."""
MOSTLY = {
    "weights": ((20_000, 100_000), (16, 64), (1, 3), 2048),
    "ids": ((500, 3000), (4, 8), (20, 60), 8192),
    "outputs": ((500, 3000), (32, 128), (1, 2), 8192),
    "all": ((5_000, 40_000), (8, 64), (5, 20), 8192),
}
"""By the part that takes most memory: least and most rows, dim and pooling of tables, and the batch of two devices."""
SHAPES = ((1, 2), (1, 2), (1, 2), (1, 2), (2, 2))
"""Hosts, and devices on each. A fifth of the plans have two hosts."""
WARM, STEPS, MODULE_STEPS = 3, 30, 6
"""Steps before those that are measured, and these; fewer with a dense part. DDP makes its buckets anew in the third."""

Given = tuple[Problem, Plan, tuple[int, ...]]
"""A problem, a plan, and widths of the layers of a dense part. (): it only sums outputs."""


def drawn(seed: int) -> tuple[Problem, Plan]:
    """A random problem and a plan of it, of all kinds."""
    rng = np.random.default_rng([seed, 19])
    (hosts, per_host), mostly = SHAPES[seed % len(SHAPES)], list(MOSTLY)[seed % len(MOSTLY)]
    rows, dims, pooling, batch = MOSTLY[mostly]
    tables = tuple(
        Table(
            f"t{i}",
            int(rng.integers(*rows)),
            4 * int(rng.integers(dims[0] // 4, dims[1] // 4, endpoint=True)),
            float(rng.integers(*pooling, endpoint=True)),
        )
        for i in range(rng.integers(6, 12))
    )
    devices = tuple(Device(2**34, host=f"host-{h}") for h in range(hosts) for _ in range(per_host))
    tables = (*with_features(tables, seed), *sequences(seed))
    given = Problem(
        f"{mostly}-{seed}",
        tables,
        Topology(devices, "cpu"),
        batch,
        str(rng.choice(["exact_sgd", "rowwise_adagrad"])),
    )
    return replace(given, job=drawn_job(seed)), training.draw(given, rng)


def with_features(tables: tuple[Table, ...], seed: int) -> tuple[Table, ...]:
    """The tables, of which about a third have two features."""
    rng = np.random.default_rng([seed, 21])
    return tuple(
        replace(t, features=1 + int(rng.random() < 1 / 3), collection="sequences" if t.sequence else "tables")
        for t in tables
    )


def sequences(seed: int) -> tuple[Table, ...]:
    """Tables of an EmbeddingCollection, of one dim: every third plan has two or three."""
    if seed % 3:
        return ()
    rng = np.random.default_rng([seed, 22])
    rows, dims, pooling, _ = MOSTLY[list(MOSTLY)[seed % len(MOSTLY)]]
    dim = 8 * int(rng.integers(1, max(1, dims[1] // 16), endpoint=True))
    return with_features(
        tuple(
            Table(
                f"s{i}",
                int(rng.integers(*rows)),
                dim,
                float(rng.integers(1, pooling[1] // 2, endpoint=True)),
                sequence=True,
            )
            for i in range(rng.integers(2, 4))
        ),
        seed,
    )


def features_of(table: Table) -> list[str]:
    return [f"{table.name}.{i}" for i in range(table.features)]


def drawn_job(seed: int) -> Job:
    """Half of them with payloads of 16 bits, one way or both. Half with an optimizer of replicas by name."""
    rng = np.random.default_rng([seed, 20])
    there, back = (str(x) for x in rng.choice(["fp32", *CASTS], 2)) if rng.integers(2) else ("fp32", "fp32")
    of_replicas = str(rng.choice(list(DENSE_OPTIMIZERS))) if rng.integers(2) else None
    return Job(forward_payload=there, backward_payload=back, replica_optimizer=of_replicas)


def drawn_module(seed: int) -> Given:
    """A random problem, a plan of it, and a dense part, under each pipeline in turn.

    Replicas do not train under a pipeline that looks up ahead, so their tables are on a device each.
    """
    rng, pipeline = np.random.default_rng([seed, 23]), list(PIPELINES)[seed % len(PIPELINES)]
    problem, plan = drawn(5 * (seed // len(PIPELINES)) + seed % 4)  # all parts, on one host
    optimizer = str(rng.choice(["sgd", "adagrad", "adam"]))
    job = replace(problem.job, pipeline=pipeline, replica_optimizer=optimizer)
    problem = replace(problem, name=f"{problem.name}-{pipeline}", global_batch=2048, job=job)
    if PIPELINES[pipeline].looks_up_ahead:
        plan = Plan(
            tuple(
                Placement("column", p.shard, (i % len(problem.topology),)) if p.kind == "data_parallel" else p
                for i, p in enumerate(plan.placements)
            )
        )
    widths = (int(2 ** rng.integers(6, 11)) for _ in range(rng.integers(1, 5)))
    return problem, plan, tuple(widths)


# --- what is measured -------------------------------------------------------------------------------------


@dataclass
class Samples(Pipelineable):
    """A batch with dense features and labels."""

    features: KeyedJaggedTensor
    dense: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Samples:
        return Samples(
            *(getattr(self, field.name).to(device, non_blocking=non_blocking) for field in fields(self))
        )

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self) -> Samples:
        return self


DENSE_FEATURES = 13


class Model(nn.Module):
    """The tables, and as dense part layers that only sum their outputs, or layers of some widths."""

    def __init__(self, problem: Problem, widths: Sequence[int] = ()) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

        def configs(kind: type, tables: list[Table]) -> list[Any]:
            return [
                kind(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=features_of(t))
                for t in tables
            ]

        super().__init__()
        pooled, others = ([t for t in problem.tables if t.sequence == s] for s in (False, True))
        meta = torch.device("meta")
        self.tables = EmbeddingBagCollection(device=meta, tables=configs(EmbeddingBagConfig, pooled))
        columns = sum(t.dim * t.features for t in pooled)
        self.layers = None
        if widths:
            sizes = [columns + DENSE_FEATURES, *widths]
            each = [(nn.Linear(n, m), nn.ReLU()) for n, m in pairwise(sizes)]
            self.layers, columns = nn.Sequential(*(x for layers in each for x in layers)), widths[-1]
        self.top = nn.Linear(columns, 1, bias=False)
        self.features = [f for t in others for f in features_of(t)]
        self.sequences = self.of_rows = None
        if others:
            self.sequences = EmbeddingCollection(device=meta, tables=configs(EmbeddingConfig, others))
            self.of_rows = nn.Linear(others[0].dim, 1, bias=False)

    def forward(self, batch):
        features = batch if self.layers is None else batch.features
        pooled, sequences = self.tables(features), self.sequences(features) if self.sequences else {}
        values, rows = pooled.values(), [sequences[f].values() for f in self.features]
        if self.layers is not None:
            values = self.layers(torch.cat([values, batch.dense], dim=1))
        summed = self.top(values)
        loss = summed.mean()
        if self.layers is not None:
            loss = nn.functional.binary_cross_entropy_with_logits(summed, batch.labels)
        return loss + sum(self.of_rows(x).mean() for x in rows), summed.detach()


def batch_of(problem: Problem, rank: int, dense: bool = False):
    """A rank's samples. Each step gets a copy, so that all steps take the same memory. dense: with more than ids."""
    rng = np.random.default_rng([rank, 5])
    keys = {f: t for t in problem.tables for f in features_of(t)}
    lengths = [rng.poisson(t.pooling / t.features, problem.local_batch) for t in keys.values()]
    ids = [rng.integers(0, t.rows, n.sum()) for t, n in zip(keys.values(), lengths, strict=True)]
    given, counts = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(lengths))

    def batches() -> Iterator[KeyedJaggedTensor]:
        while True:  # by torch's allocator, which the profiler sees
            features = KeyedJaggedTensor(
                keys=list(keys), values=given.clone(), lengths=counts.to(torch.int32)
            )
            n = problem.local_batch
            yield Samples(features, torch.zeros(n, DENSE_FEATURES), torch.zeros(n, 1)) if dense else features

    return batches()


def measured(given: Sequence[Given], limit_s: float = 180) -> list[list[list[int]]]:
    """For each plan, [D, steps] the peak bytes of each step. All have the same hosts and devices.

    limit_s: for a plan, in the mean.
    """
    n = len(given[0][0].topology)
    with tempfile.TemporaryDirectory() as folder:
        codes = training.in_processes(n, _train, (given, folder), limit_s * len(given))
        if any(codes):
            raise SystemExit(f"processes of {given[0][0].name} ended with {codes}")
        return [
            [json.loads(Path(f"{folder}/{i}-{rank}.json").read_text()) for rank in range(n)]
            for i in range(len(given))
        ]


def _train(rank: int, given: Sequence[Given], folder: str) -> None:
    training.start_rank(rank, given[0][0].topology, folder)
    count_in_all_threads()
    for i, (problem, plan, widths) in enumerate(given):
        trace = f"{folder}/trace-{rank}.json"
        # From the start, so that weights and optimizer state count as what they really are.
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            _steps(problem, plan, widths, batch_of(problem, rank, bool(widths)))
        profiler.export_chrome_trace(trace)
        gc.collect()  # the next plan starts with nothing
        writing.write_json(f"{folder}/{i}-{rank}.json", peaks(Path(trace)))
        dist.barrier()
    os._exit(0)


def _steps(problem: Problem, plan: Plan, widths: Sequence[int], batches: Iterator[Any]) -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    theirs = {name: EmbOptimType[optimizer.theirs] for name, optimizer in OPTIMIZERS.items()}
    of_replicas = _optimizer_class(problem)
    codecs = get_qcomm_codecs_registry(
        QCommsConfig(CommType(problem.job.forward_payload), CommType(problem.job.backward_payload)),
        device=torch.device("cpu"),
    )
    model = DistributedModelParallel(
        Model(problem, widths),
        device=torch.device("cpu"),
        plan=to_torchrec(plan, problem, Model(problem, widths), "cpu"),
        sharders=[
            sharder(
                fused_params={"optimizer": theirs[problem.optimizer], "learning_rate": 0.01},
                qcomm_codecs_registry=codecs,
            )
            for sharder in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)
        ],
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: of_replicas(parameters, lr=0.01),
    )
    combined = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline = pipeline_of(problem.job.pipeline, model, combined)
    for step in range(WARM + (MODULE_STEPS if widths else STEPS)):
        with torch.profiler.record_function(f"step {step}"):
            pipeline.progress(batches)


class _Stream(torch.cpu.Stream):
    """A stream of a CPU, with the field that TorchRec reads."""

    device = torch.device("cpu")


def pipeline_of(name: str, model: nn.Module, optimizer: Any) -> Any:
    """TorchRec's pipeline of a name, as it runs on a CPU.

    Its streams are those of torch.cpu, which run at once. TorchRec has none there, and then the pipelines with
    lookups ahead and with a prefetch refuse to run. Tensors are not recorded on them.
    """
    from torchrec.distributed.train_pipeline import train_pipelines

    more = {"start_batch": 0} if name == "semi_sync" else {}
    pipeline = getattr(train_pipelines, PIPELINES[name].theirs)(model, optimizer, torch.device("cpu"), **more)
    if name in ("prefetch", "fused", "semi_sync"):
        torch.Tensor.record_stream = lambda tensor, stream: None
        pipeline._stream_context = torch.cpu.stream
        for stream in (x for x in vars(pipeline) if x.endswith("_stream")):
            setattr(pipeline, stream, _Stream())
    return pipeline


def _optimizer_class(problem: Problem) -> type[torch.optim.Optimizer]:
    """The optimizer of replicas."""
    module, _, name = DENSE_OPTIMIZERS[problem.replica_optimizer].theirs.rpartition(".")
    return getattr(import_module(module), name)


def count_in_all_threads() -> None:
    """From now on the profiler's totals include what gloo's threads allocate and free.

    It records what its own threads do. But a flag of torch's allocator makes its total that of all threads.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def peaks(trace: Path) -> list[int]:
    """The peak of each warm step."""
    events = json.loads(trace.read_text())["traceEvents"]
    totals = np.array(
        sorted((e["ts"], e["args"]["Total Allocated"]) for e in events if e.get("name") == "[memory]")
    )
    steps = {
        e["name"]: (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("ph") == "X" and str(e["name"]).startswith("step ")
    }
    bounds = [np.searchsorted(totals[:, 0], steps[f"step {s}"]) for s in range(WARM, len(steps))]
    return [int(totals[first:last, 1].max()) for first, last in bounds]


# --- both -------------------------------------------------------------------------------------------------


def compared(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """For each plan the peak, and the counts, of every device. All of the same shape."""
    given = [(*drawn(seed), ()) for seed in seeds]
    return [
        {"seed": seed, "steps_bytes": found, **counted(seed, found)}
        for seed, found in zip(seeds, measured(given), strict=True)
    ]


def counted(seed: int, steps_bytes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Counted bytes of a plan, and the measured peak, of every device.

    The peak is that of the largest step: a job has to fit it. Steps of the same batch differ: gloo's threads
    free their buffers sooner or later.
    """
    return counted_of(*drawn(seed), steps_bytes)


def counted_of(problem: Problem, plan: Plan, steps_bytes: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {
        "problem": problem.name,
        "kinds": sorted({p.kind for p in plan.placements}),
        "sequences": any(t.sequence for t in problem.tables),
        "peak_bytes": [max(each) for each in steps_bytes],
        "used_bytes": memory.used_bytes(plan, problem),
        "phases": [device.phase for device in memory.memory_by_part(plan, problem)],
    }


def counted_module(seed: int) -> Problem:
    """The problem of `drawn_module`, with the measured memory of its dense part."""
    problem, _, widths = drawn_module(seed)
    of_dense = _optimizer_class(problem)
    batch = next(batch_of(problem, 0, True))
    job = measured_job(
        Model(problem, widths),
        batch,
        lambda parameters: of_dense(parameters, lr=0.01),
        problem.job,
        on_cpu=True,
    )
    return replace(problem, job=job)


def off(row: dict[str, Any], count: str) -> list[float]:
    """[D] by how much a count differs from the peak, as shares of it."""
    return [n / peak - 1 for n, peak in zip(row[count], row["peak_bytes"], strict=True)]
