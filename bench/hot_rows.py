"""What hot rows on every rank save: bytes that leave a device, and a host, in a step of TorchRec.

    python -m bench.hot_rows --batch 8192 --out hot_rows.jsonl        # some minutes

Models of sequence tables: of the calibrated pool, and with power laws. Four gloo ranks on two emulated hosts
(LOCAL_WORLD_SIZE 2) run one step each way. Every collective is counted (bench/traffic.py), those of DDP
included, by where its bytes go. An all-reduce counts as a ring of the ranks in order: 2 (n - 1) / n of its
bytes leave each rank for the next one, which is on another host for one rank of each host.

Arms: TorchRec's row_wise; the same with its index deduplication (set_ec_index_dedup), which does not run on a
CPU, so its bytes are computed from the same ids; hot rows on every rank and row_wise for the others, with the
threshold that costs fewest bytes. Hot ids are those of 16 other batches. Predicted bytes and memory are
`lower`'s, from the tables' statistics.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore.core.access_statistics import Zipf
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.io import files
from shardcore.io.hot_ids import HotIds
from shardcore.report.text import markdown_table
from shardcore.step.kinds import ways
from shardcore.step.lower import lower
from shardcore.tables.generate import generate_pool
from shardcore.tables.heat import row_counts
from shardcore.tables.hot_rows import hot_counts, with_hot_rows
from shardcore.tables.streams import stream
from shardcore.torchrec.hot_cold import HotColdEmbeddingCollection
from shardcore.torchrec.sharding_plan import to_torchrec

sys.path.append(str(Path(__file__).parents[1] / "tests" / "torchrec"))

import training

N, PER_HOST, DIM, OTHER_BATCHES = 4, 2, 32, 16


def models(n_tables: int, seed: int) -> dict[str, tuple[Table, ...]]:
    rng = np.random.default_rng(seed)
    pool = [t for t in generate_pool() if 1 <= t.pooling <= 30 and 10_000 <= t.rows <= 2_000_000]
    some = [pool[i] for i in rng.choice(len(pool), n_tables, replace=False)]
    made = {"calibrated pool": some}
    for alpha in (0.9, 1.05, 1.2):
        made[f"power law {alpha}"] = [
            Table(f"z{i}", int(rng.integers(50_000, 1_000_000)), DIM, float(rng.integers(5, 30)), Zipf(alpha))
            for i in range(n_tables)
        ]
    return {
        name: tuple(
            replace(
                t,
                name=f"t{i}",
                dim=DIM,
                precision="fp32",
                features=1,
                weighted=False,
                sequence=True,
                collection="ec",
            )
            for i, t in enumerate(tables)
        )
        for name, tables in made.items()
    }


def planned(problem: Problem) -> Plan:
    """Hot rows everywhere, others divided by rows."""
    row = next(k for k in ways(problem.topology) if k.divides_rows)
    return Plan(
        tuple(
            Placement(problem.kinds_of.get(t.name, (row.name,))[0], Shard.whole(t), problem.topology.ranks)
            for t in problem.tables
        )
    )


def best_threshold(problem: Problem) -> float:
    """Lookups from which rows are hot, such that fewest bytes leave a device."""
    return min(
        (len(problem.topology) * 2.0**k for k in range(-1, 6)),
        key=lambda least: predicted(with_hot_rows(problem, hot_counts(problem, least)))["bytes"],
    )


def leave(collective: str, topology: Topology) -> np.ndarray:
    """[2] of the bytes of a rank's collective, those that leave it and its host, if all ranks get as many."""
    n, per_host = len(topology), len(topology.on_hosts[0])
    if collective == "all_reduce":  # a ring
        return np.array([2 * (n - 1) / n, 2 * (n - 1) / n])
    return np.array([(n - 1) / n, per_host * (n - per_host) / n])


def predicted(problem: Problem) -> dict[str, float]:
    """Mean bytes that leave a device and a host, and the most that a device holds."""
    work = lower(planned(problem), problem, fits=False)
    leaving = np.zeros(2)
    for channel, n in zip(work.channels, work.traffic, strict=True):
        ways = 1 if "ids" in channel.collective or channel.collective == "all_reduce" else 2
        leaving += ways * n.mean() * leave(channel.collective, problem.topology)
    return {"bytes": leaving[0], "host_bytes": leaving[1], "memory": float(max(work.memory_bytes))}


def counted(problem: Problem, hot: dict[str, int], seed: int) -> list[float]:
    """[2] mean bytes that leave a device, and a host, in a step."""
    with tempfile.TemporaryDirectory() as folder:
        codes = training.in_processes(N, _step, (problem, hot, seed, folder), 600)
        if any(codes):
            raise SystemExit(f"processes ended with {codes}")
        leaving = np.mean([json.loads(Path(f"{folder}/{r}.json").read_text()) for r in range(N)], 0)
        return (leaving * (1, PER_HOST)).tolist()


class Leaving(TorchDispatchMode):
    """Counts bytes that leave a rank for others, and for those of other hosts.

    rank: its number. bytes: [2] of all collectives so far.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.bytes = rank, np.zeros(2)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name not in ("alltoall_base_", "allreduce_"):
                raise ValueError(f"TorchRec ran {name}, which bench.hot_rows does not know")
            self._add(name, args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args) -> None:
        if name == "allreduce_":
            last = self.rank % PER_HOST == PER_HOST - 1  # the next rank of the ring is on another host
            self.bytes += 2 * (N - 1) / N * sum(t.nbytes for t in args[0]) * np.array([1, last])
            return
        source, splits = args[1], np.array(args[4] or [1] * N, dtype=float)
        to = splits / splits.sum() * source.nbytes if splits.sum() else splits
        away = np.arange(N) // PER_HOST != self.rank // PER_HOST
        self.bytes += to.sum() - to[self.rank], to[away].sum()


def deduplicated(problem: Problem, seed: int) -> list[float]:
    """[2] mean bytes that would leave a device and a host if each rank sent each of its ids once."""
    found, local, job, n = 0.0, problem.local_batch, problem.job, len(problem.topology)
    for table in problem.tables:
        ids, offsets = stream(table, problem.global_batch, seed)
        unique = sum(len(np.unique(ids[offsets[r * local] : offsets[(r + 1) * local]])) for r in range(n))
        # Rows go one way, and their gradients the other.
        found += unique / n * (job.id_bytes + 2 * 4 * table.dim) + local * job.length_bytes
    return (found * leave("all_to_all", problem.topology)).tolist()


def _step(rank: int, problem: Problem, hot: dict[str, int], seed: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(N), LOCAL_WORLD_SIZE=str(PER_HOST), LOCAL_RANK=str(rank % PER_HOST)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=N)
    configs = [
        EmbeddingConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[f"f_{t.name}"]
        )
        for t in problem.tables
    ]
    model = torch.nn.Module()
    if hot:
        tables = {t.name: t for t in problem.tables}
        ids = {
            name: HotIds.of_counts(
                name,
                sum(
                    row_counts(tables[name], stream(tables[name], problem.global_batch, seed + 1 + k)[0])
                    for k in range(OTHER_BATCHES)
                ),
                n,
            )
            for name, n in hot.items()
        }
        model.ec = HotColdEmbeddingCollection(configs, ids)
    else:
        model.ec = EmbeddingCollection(configs, device=torch.device("cpu"))
    model.forward = lambda batch: model.ec(batch)
    given = with_hot_rows(problem, hot)
    sharder = EmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD})
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        sharders=[sharder],
        plan=to_torchrec(planned(given), given, model, "cpu"),
    )
    batch = _batch(problem, rank, seed)
    for counting in (False, True):  # DDP's first step also exchanges what it needs to know
        with Leaving(rank) if counting else warnings.catch_warnings() as count:
            found = sharded(batch)
            sum(found[f"f_{t.name}"].values().sum() for t in problem.tables).backward()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(count.bytes.tolist()))
    dist.barrier()
    os._exit(0)


def _batch(problem: Problem, rank: int, seed: int) -> Any:
    from torchrec import KeyedJaggedTensor

    local, values, lengths = problem.local_batch, [], []
    for table in problem.tables:
        ids, offsets = stream(table, problem.global_batch, seed)
        own = offsets[rank * local : (rank + 1) * local + 1]
        values.append(ids[own[0] : own[-1]])
        lengths.append(np.diff(own))
    return KeyedJaggedTensor(
        keys=[f"f_{t.name}" for t in problem.tables],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--batch", type=int, default=8192, help="global")
    p.add_argument("--tables", type=int, default=5, help="of a model")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, required=True, help="a line for each model; run again, it goes on")
    p.add_argument(
        "--per-host",
        type=int,
        default=PER_HOST,
        help="devices of each of the two hosts; other "
        f"than {PER_HOST}, nothing is counted and all arms are computed",
    )
    args = p.parse_args()
    topology = Topology(tuple(Device(1 << 36, host=f"h{i}") for i in range(2) for _ in range(args.per_host)))
    done = {
        json.loads(line)["model"]: json.loads(line)
        for line in (args.out.read_text().splitlines() if args.out.exists() else ())
    }

    def own(problem: Problem, hot: dict[str, int], computed: dict[str, float]) -> list[float]:
        if args.per_host != PER_HOST:
            return [computed["bytes"], computed["host_bytes"]]
        return counted(problem, hot, args.seed)

    for name, tables in models(args.tables, args.seed).items():
        if name in done:
            continue
        problem = Problem("sequences", tables, topology, args.batch)
        least = best_threshold(problem)
        hot = hot_counts(problem, least)
        ours, theirs = predicted(with_hot_rows(problem, hot)), predicted(problem)
        done[name] = {
            "model": name,
            "batch": args.batch,
            "seed": args.seed,
            "least": least,
            "hot_rows": sum(hot.values()) / sum(t.rows for t in tables),
            "row_wise": own(problem, {}, theirs),
            "dedup": deduplicated(problem, args.seed),
            "hot": own(problem, hot, ours),
            "predicted": ours,
            "predicted_row_wise": theirs,
        }
        files.write_atomic(args.out, "".join(json.dumps(x) + "\n" for x in done.values()).encode())
    for at, what in enumerate(("device", "host")):
        key = ("bytes", "host_bytes")[at]
        print(f"\nMiB that leave a {what}:\n")
        print(
            markdown_table(
                [
                    "model",
                    "hot from",
                    "rows hot",
                    "row-wise",
                    "deduplicated",
                    "hot rows",
                    "fewer",
                    "predicted / counted",
                    "memory",
                ],
                [
                    [
                        x["model"],
                        f"{x['least']:g}",
                        f"{x['hot_rows']:.2%}",
                        *(f"{x[arm][at] / 2**20:.1f}" for arm in ("row_wise", "dedup", "hot")),
                        f"{1 - x['hot'][at] / x['row_wise'][at]:.0%}",
                        f"{x['predicted'][key] / x['hot'][at]:.3f}, "
                        f"{x['predicted_row_wise'][key] / x['row_wise'][at]:.3f}",
                        f"{x['predicted']['memory'] / x['predicted_row_wise']['memory']:.2f}",
                    ]
                    for x in done.values()
                ],
            )
        )


if __name__ == "__main__":
    main()
