"""Jobs on gloo processes that save and load checkpoints, for the tests: what each rank found, as JSON."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.append(str(Path(__file__).parents[1]))

import hot_cold_training as hot_cold
import reshard_jobs as jobs
import training
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from shardcore.core.errors import ShardCoreError
from shardcore.torchrec.moves.checkpoints import load_rows, save_rows, start_saving_rows

ADAGRAD, PIECE_MIB = "EXACT_ADAGRAD", 2**-10
"""A KiB: tables are written in several pieces."""


def in_processes(hosts: int, per_host: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run work(rank, problem, folder, *args) on each rank (see `training.on_ranks`)."""
    return training.on_ranks(jobs.problem(hosts, per_host), work, *args, limit_s=300)


def state_of(job: Any) -> dict[str, Any]:
    """What a TorchRec job gives to DCP."""
    return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}


def pairs(
    rank: int, given: Any, folder: str, seeds: list[int], optimizers: list[str], ours: bool
) -> list[Any]:
    """Rows of jobs loaded into other plans: kinds of each table before and after, and the largest difference.

    ours: False for a checkpoint of DCP alone.
    """
    found = []
    for seed in seeds:
        for optimizer in optimizers:
            before, after = jobs.pair(given, optimizer, np.random.default_rng([9, seed]))
            job = jobs.Job.of(given, before, jobs.Settings(optimizer, seed=seed))
            job.train(0)
            path = f"{folder}/{seed}-{optimizer}"
            if ours:
                save_rows(job.model, path, job.optimizer, PIECE_MIB)
            else:
                dcp.save(state_of(job), checkpoint_id=path)
            other = jobs.Job.of(given, after, jobs.Settings(optimizer, seed=seed + 1))
            load_rows(other.model, path, other.optimizer)
            kinds = [{p.shard.table.name: p.kind for p in plan.placements} for plan in (before, after)]
            found.append(
                {
                    "kinds": [[kinds[0][table], kinds[1][table]] for table in kinds[0]],
                    "apart": jobs.apart(job.whole(), other.whole()),
                    "steps": [_steps(job), _steps(other)],
                }
            )
    return found


def _steps(job: Any) -> int:
    """The most steps that an optimizer of a table counts, on all ranks."""
    most = torch.tensor(max((part.step or 0 for part in job.parts()), default=0))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def read_by_dcp(rank: int, given: Any, folder: str, optimizer: str) -> dict[str, Any]:
    """Rows that we saved, read by DCP: as whole tables, by a TorchRec job, and as a file of torch.save."""
    before, _ = jobs.pair(given, optimizer, np.random.default_rng([9, 1]))
    job = jobs.Job.of(given, before, jobs.Settings(optimizer))
    job.train(0)
    save_rows(job.model, f"{folder}/rows", job.optimizer, PIECE_MIB)
    whole = {
        f"{'.'.join(filter(None, key))}".replace(f".{key[1]}", f".{_form(key[0])}.{key[1]}.weight"): rows
        for (key, tensor), rows in job.whole().items()
        if tensor == "weights"
    }
    state = {name: torch.zeros(rows.shape) for name, rows in whole.items()}
    dcp.load(state, checkpoint_id=f"{folder}/rows")
    found = {"tables": max(float((state[name] - whole[name]).abs().max()) for name in whole)}
    other = jobs.Job.of(given, before, jobs.Settings(optimizer, seed=1))
    tables = {name: of for name, of in other.model.state_dict().items() if not name.startswith("top")}
    states = other.model.fused_optimizer.state_dict()["state"]
    dcp.load({**tables, "state": states}, checkpoint_id=f"{folder}/rows")
    # State of replicas is in another optimizer.
    replicas = {p.shard.table.name for p in before.placements if p.kind == "data_parallel"}
    one, two = (
        {k: v for k, v in j.whole().items() if k[1] == "weights" or k[0][1] not in replicas}
        for j in (job, other)
    )
    found["job"] = jobs.apart(one, two)
    found["states"] = len(one) - len(whole)
    dist.barrier()
    if rank == 0:
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(f"{folder}/rows", f"{folder}/rows.pt")
        saved = torch.load(f"{folder}/rows.pt")
        found["file"] = max(float((saved[name] - whole[name]).abs().max()) for name in whole)
        found["keys"] = sorted(saved)
    return found


def _form(path: str) -> str:
    return "embeddings" if path == "sequence" else "embedding_bags"


def save_while_training(rank: int, given: Any, folder: str, optimizer: str) -> dict[str, Any]:
    """A job trains on while it saves, twice. Rows are those of when it began."""
    before, after = jobs.pair(given, optimizer, np.random.default_rng([9, 2]))
    job = jobs.Job.of(given, before, jobs.Settings(optimizer))
    found: dict[str, Any] = {"apart": [], "refused": ""}
    for i in range(2):
        job.train(i)
        whole = job.whole()
        saving = start_saving_rows(job.model, f"{folder}/rows-{i}", job.optimizer, PIECE_MIB)
        for step in range(3):
            job.train(10 + step)
        saving.wait()
        other = jobs.Job.of(given, after, jobs.Settings(optimizer, seed=1))
        load_rows(other.model, f"{folder}/rows-{i}", other.optimizer)
        found["apart"].append(jobs.apart(whole, other.whole()))
    found["done"], found["trained"] = saving.is_done(), jobs.apart(whole, job.whole()) > 0
    try:
        start_saving_rows(job.model, f"{folder}/rows-0", job.optimizer)
    except ShardCoreError as error:
        found["refused"] = str(error)
    return found


def full_disk_on_a_rank(rank: int, given: Any, folder: str, waits: bool) -> list[str]:
    """The refusal of a save of which rank 1 may not write so much, and of the folder. Then it has room, and saves."""
    given = jobs.problem(1, 2, times=100)
    before, _ = jobs.pair(given, "EXACT_SGD", np.random.default_rng([9, 2]))
    job = jobs.Job.of(given, before, jobs.Settings(times=100))
    path, limits, found = Path(folder, "rows"), resource.getrlimit(resource.RLIMIT_FSIZE), []
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    for work in (
        lambda: save_rows(job.model, path) if waits else start_saving_rows(job.model, path).wait(),
        lambda: load_rows(job.model, path),
    ):
        try:
            work()
        except ShardCoreError as error:
            found.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    save_rows(job.model, path)
    load_rows(job.model, path)
    return found


def dense_kernel(rank: int, given: Any, folder: str) -> str:
    """The refusal of a table that is divided by row under TorchRec's dense kernel."""
    bags = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])],
        device=torch.device("meta"),
    )
    sharder = EmbeddingBagCollectionSharder()
    kinds = {"t": row_wise(compute_kernel="dense")}
    plan = ShardingPlan({"bags": construct_module_sharding_plan(bags, kinds, sharder, 2, 2, "cpu")})
    model = torch.nn.ModuleDict({"bags": bags})
    job = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    try:
        save_rows(job, f"{folder}/rows")
    except ShardCoreError as error:
        return str(error)
    return ""


def save_until_killed(rank: int, given: Any, folder: str, root: str, after_s: float) -> None:
    """Save again and again, each time other weights, until all ranks are killed."""
    job = _large_job()
    dist.barrier()
    threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    for i in itertools.count():
        for part in job.parts():
            part.tensors["weights"].fill_(i)
        save_rows(job.model, f"{root}/{i}", job.optimizer, PIECE_MIB * 64)


def load_what_was_saved(rank: int, given: Any, folder: str, root: str) -> dict[str, Any]:
    """Of each folder, the weights that it loads, or why it is refused. Then a save into the last one."""
    job, found = _large_job(), {}
    for i in range(len(os.listdir(root))):
        try:
            load_rows(job.model, f"{root}/{i}", job.optimizer)
            values = [float(x) for p in job.parts() for x in p.tensors["weights"].unique()]
            found[i] = sorted(set(values))
        except ShardCoreError as error:
            found[i] = str(error)
    dist.barrier()
    if isinstance(found[i], str):
        save_rows(job.model, f"{root}/{i}", job.optimizer)
        load_rows(job.model, f"{root}/{i}", job.optimizer)
    return found


def _large_job() -> Any:
    given = jobs.problem(1, 2, times=200)
    before, _ = jobs.pair(given, ADAGRAD, np.random.default_rng([9, 2]))
    return jobs.Job.of(given, before, jobs.Settings(ADAGRAD, times=200))


def peak_mib(rank: int, given: Any, folder: str, mib: int) -> list[float]:
    """MiB of memory that a save and a load of a table take at their peaks."""
    model = EmbeddingCollection(
        [EmbeddingConfig(name="t", num_embeddings=mib * 4096, embedding_dim=64, feature_names=["f"])]
    )
    save_rows(
        EmbeddingCollection([replace(model.embedding_configs()[0], num_embeddings=9)]), f"{folder}/first"
    )
    found = []
    for work in (save_rows, load_rows):
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak_kib()
        work(model, f"{folder}/rows")
        found.append((_peak_kib() - before) / 1024)
    return found


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def hot_rows(rank: int, given: Any, folder: str, ours: bool) -> dict[str, Any]:
    """A job with hot rows under another optimizer than the others, loaded into one with the same hot ids."""
    on, found = hot_cold.problem(1, 2), {}
    jobs_ = []
    for cut, seed in ((True, 1), (False, 2)):
        torch.manual_seed(seed)
        model = hot_cold.sharded(hot_cold.HOT, on, cut, "EXACT_ROWWISE_ADAGRAD")
        dense = torch.optim.Adam(hot_cold._dense(model), lr=0.1)
        hot_cold._loss(model(hot_cold.batch(seed * 10 + rank))).backward()
        dense.step()
        jobs_.append((model, dense))
    (model, dense), (other, its) = jobs_
    if ours:
        save_rows(model, f"{folder}/rows", dense, PIECE_MIB)
    else:
        names = {p: f"ec.hot.{name}" for name, p in hot_cold._inner(model).ec.hot.items()}
        state = {names[p]: s for p, s in dense.state.items() if p in names}
        both = {**model.fused_optimizer.state_dict()["state"], **state}
        dcp.save({"model": model.state_dict(), "optimizer": {"state": both}}, checkpoint_id=f"{folder}/rows")
    load_rows(other, f"{folder}/rows", its)
    apart = []
    for a, b in zip(*(hot_cold._inner(m).ec.hot.values() for m in (model, other)), strict=True):
        apart += [float((a - b).abs().max())]
        apart += [
            float((dense.state[a][n] - its.state[b][n]).abs().max())
            for n in ("exp_avg", "exp_avg_sq", "step")
        ]
    found["hot"] = max(apart)
    wholes = [_cold_rows(m) for m in (model, other)]
    found["cold"] = [
        max(float((wholes[0][k] - wholes[1][k]).abs().max()) for k in wholes[0]),
        sorted(wholes[0]) == sorted(wholes[1]),
    ]
    try:
        load_rows(
            hot_cold.sharded(hot_cold.OTHERS, on, True, "EXACT_ROWWISE_ADAGRAD"), f"{folder}/rows", None
        )
    except ShardCoreError as error:
        found["other ids"] = str(error)
    return found


def _cold_rows(model: Any) -> dict[str, torch.Tensor]:
    """Rows and state of a job's sharded tables, those of all ranks."""
    from shardcore.torchrec.modules import collections_of_model
    from shardcore.torchrec.moves.rows import DenseOptimizer, parts_on_rank

    gathered: list[Any] = [None] * dist.get_world_size()
    mine = [
        (part.key[1], name, part.rows, t.float().clone())
        for c in collections_of_model(model)
        for part in parts_on_rank(c, DenseOptimizer())
        for name, t in part.tensors.items()
    ]
    dist.all_gather_object(gathered, mine)
    tables: dict[str, list[Any]] = {}
    for table, name, rows, tensor in (x for of in gathered for x in of):
        tables.setdefault(f"{table}.{name}", []).append((rows, tensor))
    return {k: torch.cat([t for _, t in sorted(v, key=lambda x: x[0])]) for k, v in tables.items()}
