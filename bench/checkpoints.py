"""Checkpoints of a TorchRec job: ShardCore's, DCP's own, and torch.save of each rank, in bytes, seconds and memory.

    torchrun --nproc-per-node 2 -m bench.checkpoints --gib 2 --out rows.jsonl

Four tables under row-wise Adagrad: by row twice, whole, and cut by columns. Another job has the first two whole, the
third by row, and the parts of the fourth on each other's ranks. Each arm waits until its bytes are on the disk, and
loads them from the page cache. Seconds are those of the slowest rank; memory is a rank's peak less what it had before.
The best of --repeats.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from bench.common import bench_parser, print_progress, write_rows
from shardcore.report.text import text_table
from shardcore.torchrec.moves.checkpoints import load_rows, save_rows, start_saving_rows

DIM = 64
FUSED = {"compute_kernel": "fused"}  # on a CPU, TorchRec would choose a dense one


def sharded_model(kinds: Mapping[str, Callable], rows: int) -> Any:
    """A job's model with its tables sharded by these kinds."""
    bags = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=DIM, feature_names=[n])
            for n in kinds
        ],
    )
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    ranks = dist.get_world_size()
    plan = construct_module_sharding_plan(bags, dict(kinds), sharder, ranks, ranks, "cpu")
    return DistributedModelParallel(
        torch.nn.ModuleDict({"bags": bags}),
        device=torch.device("cpu"),
        plan=ShardingPlan({"bags": plan}),
        sharders=[sharder],
    )


def job_state(model: Any) -> dict[str, Any]:
    """What a TorchRec job gives to DCP."""
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def own_tensors(model: Any) -> list[torch.Tensor]:
    """Tensors of this rank's shards and their state."""
    state = job_state(model)
    states = [of for states in state["optimizer"]["state"].values() for of in states.values()]
    return [s.tensor for of in (*state["model"].values(), *states) for s in of.local_shards()]


def save_own_file(model: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{dist.get_rank()}.pt", "wb") as file:
        torch.save(own_tensors(model), file)
        os.fsync(file.fileno())


def load_own_file(model: Any, folder: Path) -> None:
    for own, saved in zip(own_tensors(model), torch.load(folder / f"{dist.get_rank()}.pt"), strict=True):
        own.copy_(saved)


def memory_mib(name: str) -> float:
    """MiB of this process: VmRSS, or VmHWM, its peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measured(work: Callable[[], Any]) -> dict[str, Any]:
    """Seconds and MiB that a call takes, the most of all ranks, or its error."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, start, error = memory_mib("VmRSS"), time.perf_counter(), ""
    try:
        work()
    except BaseException as failure:  # CheckpointException is none
        error = str(failure).strip().splitlines()[-1][:120]
    found = torch.tensor([time.perf_counter() - start, memory_mib("VmHWM") - before])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {"s": round(float(found[0]), 2), "mib": round(float(found[1])), "error": error}


def main() -> None:
    parser = bench_parser(
        __doc__, gib=2.0, repeats=3, folder=(Path(tempfile.gettempdir()), "on the disk"), out=Path
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rows = int(args.gib * 2**30) // (4 * DIM * 4)
    parts = column_wise(ranks=list(range(dist.get_world_size())), **FUSED)
    job = sharded_model(
        {"a": row_wise(**FUSED), "b": row_wise(**FUSED), "c": table_wise(rank=0, **FUSED), "d": parts}, rows
    )
    names: list[Any] = [tempfile.mkdtemp(dir=args.folder)]
    dist.broadcast_object_list(names)
    ours, alone, own = (Path(names[0], name) for name in ("rows", "dcp", "own"))
    saving: list[Any] = []
    phases: list[dict[str, Callable[[], Any]]] = [
        {
            "save, save_rows": lambda: save_rows(job, ours),
            "save, DCP alone": lambda: save(job_state(job), checkpoint_id=alone),
            "save, torch.save of each rank": lambda: save_own_file(job, own),
        },
        {
            "load, load_rows": lambda: load_rows(job, ours),
            "load, load_rows of DCP's": lambda: load_rows(job, alone),
            "load, DCP alone": lambda: load(job_state(job), checkpoint_id=alone),
            "load, torch.load of each rank": lambda: load_own_file(job, own),
        },
        {"save, start_saving_rows": lambda: saving.append(start_saving_rows(job, own / "started"))},
        {"save, wait for start_saving_rows": lambda: saving.pop().wait()},
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    sizes = {}
    for i in range(args.repeats):
        # In another order each time: an arm may leave work to the disk, or memory to the next.
        for name, work in (
            arm for of in phases for arm in [*of.items()][i % len(of) :] + [*of.items()][: i % len(of)]
        ):
            found.setdefault(name, []).append(measured(work))
            if dist.get_rank() == 0:
                print_progress(name, found[name][-1])
        sizes = {path.name: sum(p.stat().st_size for p in path.glob("*.*")) for path in (ours, alone, own)}
        dist.barrier()
        if dist.get_rank() == 0:
            for path in (ours, alone, own):
                shutil.rmtree(path)
        dist.barrier()
    save_rows(job, ours)
    save(job_state(job), checkpoint_id=alone)
    turned = column_wise(ranks=list(reversed(range(dist.get_world_size()))), **FUSED)
    other = sharded_model(
        {
            "a": table_wise(rank=0, **FUSED),
            "b": table_wise(rank=1, **FUSED),
            "c": row_wise(**FUSED),
            "d": turned,
        },
        rows,
    )
    for name, work in {
        "load under another plan, load_rows": lambda: load_rows(other, ours),
        "load under another plan, load_rows of DCP's": lambda: load_rows(other, alone),
        "load under another plan, DCP alone": lambda: load(job_state(other), checkpoint_id=alone),
    }.items():
        found[name] = [measured(work) for _ in range(args.repeats)]
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])
        best = {name: min(runs, key=lambda run: run["s"]) for name, runs in found.items()}
        print(text_table(["", "s", "MiB", ""], [[n, *map(str, run.values())] for n, run in best.items()]))
        print("MiB on disk:", {name: round(size / 2**20, 1) for name, size in sizes.items()})
        if args.out:
            write_rows(args.out, [{"arm": name, **run} for name, runs in found.items() for run in runs])
    dist.barrier()


if __name__ == "__main__":
    main()
