"""A job whose heat moves and of which a rank gets slow: traced, its model corrected, re-planned and moved.

The job trains on gloo ranks of this machine. Lookups of its tables change, and a rank is stopped half of the time
(SIGSTOP and SIGCONT by another process). ShardCoreProfiler traces a few steps, the profile `cpu` is corrected by
them, `propose` re-plans from the plan in use, and `reshard` moves the job. Then three jobs of the same drift take
turns: the one that moved, one that never did, and one that started with a plan searched afresh.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardcore.core.job import Job
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.cost.profile import load_profile
from shardcore.plans import traced_job
from shardcore.plans.replan import ReplanConfig
from shardcore.search import SHARDERS, Budget
from shardcore.torchrec.plan_files import from_json, to_json
from shardcore.torchrec.profiler import ShardCoreProfiler
from shardcore.torchrec.reshard import reshard
from shardcore.torchrec.sharding_plan import to_torchrec

TABLES, ROWS, BATCH = 10, 50_000, 256
"""Tables of a job, rows of each, and samples of a rank in a step."""
EVALS = 2000
"""Plans priced in each search."""
TRACED, ROUNDS, TURN = 3, 30, 6
"""Traced steps; turns of each job, and steps of one, of which the first is not timed."""
STOPPED_MS = 2.0
"""The slow rank runs, and is stopped, for as long in turn."""
OPTIMIZER = "rowwise_adagrad"


def problem(hosts: int, per_host: int, seed: int) -> Problem:
    rng = np.random.default_rng([43, seed])
    tables = tuple(
        Table(f"t{i}", ROWS, int(rng.choice([16, 32, 64])), float(rng.integers(2, 40)), collection="bags")
        for i in range(TABLES)
    )
    devices = tuple(Device(1 << 34, host=f"h{h}") for h in range(hosts) for _ in range(per_host))
    return Problem(
        "drift", tables, Topology(devices), BATCH * len(devices), OPTIMIZER, job=Job(pipeline="none")
    )


def drifted(given: Problem) -> Problem:
    """The heat of each table is that of another."""
    pooling = [t.pooling for t in given.tables]
    return replace(
        given,
        tables=tuple(replace(t, pooling=p) for t, p in zip(given.tables, sorted(pooling), strict=True)),
    )


class Model(nn.Module):
    def __init__(self, given: Problem, device: str) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name]
                )
                for t in given.tables
            ],
            device=torch.device(device),
        )
        self.names = [t.name for t in given.tables]
        self.top = nn.Linear(sum(t.dim for t in given.tables), 1, device=device)

    def forward(self, features: Any) -> torch.Tensor:
        pooled = self.bags(features)
        return self.top(torch.cat([pooled[name] for name in self.names], 1)).square().mean()


class Trainer:
    """A job with a plan."""

    def __init__(self, exported: Any, given: Problem) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
        self.model = DistributedModelParallel(
            Model(given, "meta"), device=torch.device("cpu"), plan=exported, sharders=cast(Any, [sharder])
        )
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = torch.optim.SGD(dense.values(), lr=0.01)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()


def batches(given: Problem, seed: int, n: int = 4) -> list[Any]:
    from torchrec import KeyedJaggedTensor

    rng, made = np.random.default_rng([seed, dist.get_rank()]), []
    for _ in range(n):
        lengths = np.stack([rng.poisson(t.pooling, BATCH) for t in given.tables])
        ids = rng.integers(0, ROWS, lengths.sum())
        made.append(
            KeyedJaggedTensor(
                keys=[t.name for t in given.tables],
                values=torch.from_numpy(ids),
                lengths=torch.from_numpy(lengths.ravel()),
            )
        )
    return made


def planned(given: Problem, model: Any, seed: int) -> Plan:
    """A plan searched afresh, of whole tables and columns."""
    return SHARDERS["anneal_columns"](given, model.for_problem(given), seed=seed, budget=Budget(EVALS))


@contextmanager
def half_speed(slow: bool) -> Iterator[None]:
    """Stop this process half of the time, if it is the slow one."""
    if not slow:
        yield
        return
    parent, child = os.getpid(), os.fork()
    if not child:
        while os.getppid() == parent:
            for sent in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(parent, sent)
                time.sleep(STOPPED_MS / 1e3)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.kill(parent, signal.SIGCONT)


def drift(rank: int, on: Problem, folder: str, seed: int) -> dict[str, Any]:
    """A job drifts and moves. ms of each job's turns on this rank, and what was found on the way."""
    given = problem(len(on.topology.hosts), len(on.topology.on_hosts[0]), seed)
    now = drifted(given)
    old = _of_rank_0(lambda: _exported(planned(given, load_profile("cpu").model(), seed), given))
    job, stays = (Trainer(from_json(old), given) for _ in range(2))
    for batch in batches(given, seed) * 2:
        job.step(batch)
        stays.step(batch)
    new = batches(now, seed)
    # A process that is forked from here has gloo's threads no more, and only sends signals.
    with half_speed(rank == 1):
        profiler = ShardCoreProfiler(
            job.model, Path(folder) / "job", every=100, steps=TRACED, job=Job(pipeline="none")
        )
        for step in range(40):
            job.step(new[step % len(new)])
            profiler.step()
        dist.barrier()
        proposed, fresh, about = _of_rank_0(lambda: _replanned(Path(folder) / "job", seed))
        start = time.perf_counter()
        moved = reshard(job.model, from_json(proposed), job.optimizer)
        pause_s = time.perf_counter() - start
        jobs = {"moved": job, "stays": stays, "fresh": Trainer(from_json(fresh), given)}
        turns_ms = _turns(jobs, new, seed)
    return {**about, "tables": len(moved.tables), "pause_s": pause_s, "turns_ms": turns_ms}


def _of_rank_0(made: Callable[[], Any]) -> Any:
    """Result of rank 0, sent to all ranks."""
    found: list[Any] = [made() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def _exported(plan: Plan, given: Problem) -> Any:
    return to_json(to_torchrec(plan, given, Model(given, "meta"), "cpu"))


def _replanned(folder: Path, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """TorchRec's plans: proposed from the traces for the job, and searched afresh. What was found."""
    model = load_profile("cpu").model()
    job = traced_job.read(folder)
    checked = traced_job.check(job, model)
    corrected = checked.model.for_problem(checked.problem)
    proposal = traced_job.propose(
        checked, model, ReplanConfig(seed=seed, space="columns", budget=Budget(EVALS))
    )
    now = checked.after.plan if proposal is None else proposal.now.plan
    fresh = planned(checked.problem, corrected, seed)
    exported = [_exported(p, checked.problem) for p in (now, fresh)]
    about = {
        "step_ms": job.total_ms,
        "predicted_ms": [checked.before.cost.total_ms, checked.after.cost.total_ms],
        "proposed_ms": proposal and proposal.now.cost.total_ms,
        # [step][rank] of traced lookups, and of the model's.
        "lookups_ms": [
            [sum(rank.ms.get(f"lookup_{way}", 0.0) for way in ("forward", "backward")) for rank in step.ranks]
            for step in job.traced.steps
        ],
        "model_lookups_ms": list(checked.before.cost.compute_ms),
        "speeds": [d.speed for d in checked.problem.topology.devices],
        "remarks": list(checked.remarks)[:5],
    }
    return exported[0], exported[1], about


def _turns(jobs: dict[str, Trainer], new: list[Any], seed: int) -> dict[str, list[float]]:
    """Median ms of a step in each turn, by job. Jobs take turns in another order each round."""
    rng, found = np.random.default_rng(seed), {name: [] for name in jobs}
    for _ in range(ROUNDS):
        for name in rng.permutation(sorted(jobs)):
            took_ms = []
            dist.barrier()
            for step in range(TURN):
                start = time.perf_counter()
                jobs[name].step(new[step % len(new)])
                took_ms.append(1e3 * (time.perf_counter() - start))
            found[name].append(float(np.median(took_ms[1:])))
    return found


def result(rows: list[dict[str, Any]]) -> str:
    """Cases in words: each round's step of the slowest rank, over that of the fresh job in the same round."""
    over, gains, speeds, failed = [], [], [], 0
    for row in rows:
        if not all(isinstance(f, dict) and "turns_ms" in f for f in row["found"]):
            failed += 1
            continue
        slowest = {
            name: np.max([f["turns_ms"][name] for f in row["found"]], axis=0)
            for name in row["found"][0]["turns_ms"]
        }
        over.append(float(np.median(slowest["moved"] / slowest["fresh"])) - 1)
        gains.append(1 - float(np.median(slowest["moved"] / slowest["stays"])))
        speeds.append(row["found"][0]["speeds"][1])
    if not over:
        return f"{failed} failed"
    return (
        f"step of the moved job over the fresh one's {', '.join(f'{x:+.1%}' for x in over)}; "
        f"{sum(x <= 0.02 for x in over)} of {len(over)} within 2%; {', '.join(f'{x:.0%}' for x in gains)} less than of "
        f"the job that stayed; slow rank's traced speed {', '.join(f'{x:.2f}' for x in speeds)}; {failed} failed"
    )
