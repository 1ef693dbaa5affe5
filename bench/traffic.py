"""Are the bytes that `lower` says the bytes that TorchRec sends? Collectives counted in its real processes.

    python -m bench.traffic --models 200 --out traffic.jsonl

Each model is drawn: one to three collections, pooled, pooled with weights, or of sequences. Their tables have
one to three features, and share some. Weights are FP32 or FP16. Ids have 32 or 64 bits. Outputs and gradients
travel in FP32, FP16 or BF16. (On CPU, TorchRec sends FP16 for BF16.) The plan has all kinds of sharding.
DistributedModelParallel runs one step of it on 2 or 4 gloo processes. Every collective passes a
TorchDispatchMode, which counts what a rank puts in and gets out. Those counts are compared with a Workload
that was made for the same ids: rank by rank, each exchange of each collection by itself, to the byte.

A line of --out is a model. Run again, it goes on from there. Exits 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore import files, report
from shardcore.export.torchrec import to_torchrec
from shardcore.fused import PRECISIONS
from shardcore.inputs import Lookups, count_bytes, input_bytes
from shardcore.job import PAYLOADS, Job
from shardcore.layouts import CROSS, HOST, ID_CHANNELS, WORLD, Channel, Layout, run_of, shards_on
from shardcore.outputs import payload_bytes
from shardcore.topology import Device, Topology
from shardcore.types import CAST, COLLECTIVES, OUTPUT_BYTES, Plan, Problem, Shard, Table
from shardcore.workload import lower

sys.path.append(str(Path(__file__).parents[1] / "tests" / "export"))

import training  # noqa: E402  (the tests' own)

SHAPES = ((1, 2), (2, 2), (1, 4))
"""Hosts, and devices on each."""
SPLITS, INPUT = "splits", "input"
"""Counts of what travels, and ids with their lengths."""
_PARTS = {"SplitsAllToAllAwaitable": SPLITS, "KJTAllToAllTensorsAwaitable": INPUT}
"""TorchRec's classes whose collectives carry no outputs."""
_COLLECTIVES = {"alltoall_base_": "all_to_all", "_reduce_scatter_base_": "reduce_scatter",
                "_allgather_base_": "reduce_scatter", "allreduce_": "all_reduce"}
_SPECIAL: dict[str, Callable[[Table], bool]] = {
    "weights of lookups": lambda t: t.weighted, "sequences": lambda t: t.sequence,
    "tables of several features": lambda t: t.features > 1}
"""What tables of a model may have, in the report's words."""
_SHORT, _MIXED = "payloads of 16 bits", "weights in FP32 and FP16"


@dataclass(frozen=True)
class Drawn:
    """A model to train for a step.

    problem: its tables, each with its collection. Its job has the types of ids and lengths.
    features: of each table. Tables may share them.
    plan: a plan of the problem.
    """

    problem: Problem
    features: dict[str, list[str]]
    plan: Plan

    @property
    def collections(self) -> dict[str, list[Table]]:
        found: dict[str, list[Table]] = {}
        for table in self.problem.tables:
            found.setdefault(table.collection, []).append(table)
        return found


def drawn(seed: int, shape: tuple[int, int] | None = None) -> Drawn:
    """A random model and plan."""
    rng = np.random.default_rng(seed)
    hosts, per_host = shape or SHAPES[rng.integers(len(SHAPES))]
    devices = tuple(Device(10**9, host=f"host-{h}") for h in range(hosts) for _ in range(per_host))
    tables, features = [], {}
    for c in range(rng.integers(1, 4)):
        sequence, names = bool(rng.random() < 0.3), []
        weighted, dim = bool(not sequence and rng.random() < 0.4), 4 * int(rng.integers(1, 9))
        for i in range(rng.integers(1, 6)):
            own = [f"f{c}_{len(names) + k}" for k in range(rng.choice([1, 2, 3], p=[0.6, 0.2, 0.2]))]
            # About a third of the tables share a feature with another.
            own = [names[rng.integers(len(names))], *own[1:]] if names and rng.random() < 0.3 else own
            names = list(dict.fromkeys([*names, *own]))
            # An EmbeddingCollection has one dim.
            dim = dim if sequence else 4 * int(rng.integers(1, 9))
            tables.append(Table(f"c{c}_t{i}", int(rng.integers(4, 60)), dim, 2.0 * len(own),
                                features=len(own), weighted=weighted, sequence=sequence, collection=f"c{c}"))
            features[tables[-1].name] = own
    given = Problem("drawn", tuple(tables), Topology(devices), len(devices) * int(rng.integers(1, 9)))
    plan, (id_bytes, length_bytes) = training.draw(given, rng), map(int, rng.choice([4, 8], 2))
    # Drawn apart, so that the models are those of earlier versions.
    payloads = map(str, np.random.default_rng([seed, 1]).choice(list(PAYLOADS), 2, p=[0.5, 0.3, 0.2]))
    job = Job(id_bytes=id_bytes, length_bytes=length_bytes,
              **dict(zip(("forward_payload", "backward_payload"), payloads, strict=True)))
    half = np.random.default_rng([seed, 2]).random(len(tables)) < 0.3
    mixed = {t.name: replace(t, precision="fp16") for t, short in zip(tables, half, strict=True) if short}
    given = replace(given, job=job, tables=tuple(mixed.get(t.name, t) for t in tables))
    return Drawn(given, features, Plan(tuple(
        replace(p, shard=replace(p.shard, table=mixed.get(p.shard.table.name, p.shard.table)))
        for p in plan.placements)))


# --- what is expected --------------------------------------------------------------------------------------


def lengths_of(model: Drawn, seed: int, rank: int) -> dict[str, np.ndarray]:
    """For each feature how many ids each sample of a rank has."""
    rng = np.random.default_rng([seed, rank])
    return {feature: rng.integers(0, 5, model.problem.local_batch)
            for feature in sorted({f for own in model.features.values() for f in own})}


def ids_of(model: Drawn, seed: int, rank: int) -> dict[str, np.ndarray]:
    """For each feature the ids that a rank's samples look up: within the rows of every table that has it."""
    rng = np.random.default_rng([seed, rank, 1])
    rows = {f: min(t.rows for t in model.problem.tables if f in model.features[t.name])
            for own in model.features.values() for f in own}
    return {f: rng.integers(0, rows[f], lengths.sum())
            for f, lengths in lengths_of(model, seed, rank).items()}


def given_lookups(model: Drawn, seed: int) -> Lookups:
    """The lookups of a drawn batch, counted."""
    ids = [ids_of(model, seed, rank) for rank in range(len(model.problem.topology))]

    def of(shard: Shard) -> np.ndarray:
        mine = [np.concatenate([of_rank[f] for f in model.features[shard.table.name]]) for of_rank in ids]
        return np.array([np.count_nonzero((i >= shard.row_lo) & (i < shard.row_hi)) for i in mine])
    return of


Calls = dict[str, list[list[int]]]
"""By what is carried, bytes in and out of each collective, rising. Of _SUMMED, of all together."""


def expected(model: Drawn, seed: int) -> list[Calls]:
    """For each rank the collectives of a step."""
    n, job = len(model.problem.topology), model.problem.job
    sent, received = input_bytes(model.plan, model.problem, given_lookups(model, seed))
    counts = count_bytes(model.plan, model.problem)
    hosts = model.problem.topology.on_hosts
    groups = {WORLD: (tuple(range(n)),), HOST: hosts, CROSS: tuple(zip(*hosts, strict=True))}
    exchanges = [*pooled_exchanges(model), *sequence_exchanges(model, given_lookups(model, seed))]
    found = []
    for rank in range(n):
        mine = {SPLITS: [[counts, counts]], INPUT: [[sent[rank], received[rank]]]}
        for channel, there, back in exchanges:
            [group] = (g for g in groups[channel.group] if rank in g)
            # All ranks of a group take part if any has something.
            if not there[list(group)].any():
                continue
            # What enters on the way there leaves on the way back.
            ways = {"forward": [there[rank], back[rank]], "backward": [back[rank], there[rank]]}
            for way in COLLECTIVES[channel.collective]:
                cast = getattr(job, f"{way}_payload") if channel.collective in CAST else "fp32"
                mine.setdefault(f"{way} {channel.words}", []).append(
                    [payload_bytes(n_bytes, cast) for n_bytes in ways[way]])
        found.append(_in_order(mine))
    return found


Exchange = tuple[Channel, np.ndarray, np.ndarray]
"""A collective, and [D] bytes that enter and leave it forward."""


def pooled_exchanges(model: Drawn) -> Iterator[Exchange]:
    """Those of pooled tables and replicas. They do not depend on the ids."""
    pooled = tuple(t for t in model.problem.tables if not t.sequence)
    if not pooled:
        return
    work = lower(Plan(tuple(p for p in model.plan.placements if not p.shard.table.sequence)),
                 replace(model.problem, tables=pooled))
    n, hosts = len(model.problem.topology), model.problem.topology.on_hosts
    groups = {WORLD: (tuple(range(n)),), HOST: hosts, CROSS: tuple(zip(*hosts, strict=True))}
    for channel, there in zip(work.channels, work.traffic, strict=True):
        # The workload's ids are those that statistics make us expect.
        if channel in ID_CHANNELS or not there.any():
            continue
        back = there.copy()
        for group in map(list, groups[channel.group] if channel.collective != "all_reduce" else ()):
            # An all-to-all deals out what each has, evenly. A reduce-scatter leaves its share of a sum.
            of_all = there[group].sum() if channel.collective == "all_to_all" else there[group]
            back[group] = of_all / len(group)
        yield channel, there, back


def sequence_exchanges(model: Drawn, lookups: Lookups) -> Iterator[Exchange]:
    """Those of sequences, for given lookups.

    A row of each lookup goes from the device that has it to the one that asked. Of a collection, TorchRec
    runs tables cut by columns apart from whole ones.
    """
    found: dict[tuple[Layout, bool], np.ndarray] = {}
    for placement in model.plan.placements:
        table = placement.shard.table
        if table.sequence:
            run = run_of(placement.kind, table), placement.shard.width < table.dim
            mine = found.setdefault(run, np.zeros((2, len(model.problem.topology))))
            for device, shard in shards_on(placement):
                asked = OUTPUT_BYTES * shard.width * lookups(shard)
                mine[0, device] += asked.sum()
                mine[1] += asked
    for (run, _), (there, back) in found.items():
        [channel] = run.channels
        yield channel, there, back


def _in_order(calls: Mapping[str, Iterable[Sequence[float]]]) -> Calls:
    found = {}
    for name, pairs in calls.items():
        whole = sorted([round(b) for b in pair] for pair in pairs)
        found[name] = [[sum(side) for side in zip(*whole, strict=True)]] if _is_summed(name) else whole
    return {name: pairs for name, pairs in found.items() if any(map(any, pairs))}


def _is_summed(name: str) -> bool:
    """Ids are several tensors. DDP makes buckets of gradients."""
    return name in (SPLITS, INPUT) or Channel("all_reduce").words in name


# --- what is counted ---------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts the bytes in and out of every collective of c10d, by what it carries."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.calls: dict[str, list[list[int]]] = {}
        self.topology = topology
        self.way = "forward"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name not in _COLLECTIVES:
                raise ValueError(f"TorchRec ran {name}, which bench.traffic does not know")
            self._add(name, args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args) -> None:
        if name == "allreduce_":
            into = source = args[0]
            group = args[1]
        else:
            into, source, group = args[:3]
        what = _carried() or f"{self.way} {self._channel(name, group).words}"
        self.calls.setdefault(what, []).append(
            [sum(t.numel() * t.element_size() for t in _flat(tensors)) for tensors in (source, into)])

    def _channel(self, name: str, group) -> Channel:
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
        hosts = {self.topology.devices[r].host for r in ranks}
        several = len(ranks) < len(self.topology)
        return Channel(_COLLECTIVES[name], (HOST if len(hosts) == 1 else CROSS) if several else WORLD)


def _flat(tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else [t for inner in tensors for t in _flat(inner)]


def _carried() -> str:
    """What a collective carries beside outputs and gradients, by the class of TorchRec that runs it."""
    frame = sys._getframe(1)
    while frame:
        for name, what in _PARTS.items():
            if frame.f_code.co_qualname.startswith(name):
                return what
        frame = frame.f_back
    return ""


class Model(nn.Module):
    """The collections of a drawn model."""

    def __init__(self, model: Drawn, device: str) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
        from torchrec.modules.embedding_configs import DataType

        super().__init__()
        for name, tables in model.collections.items():
            if tables[0].sequence:
                setattr(self, name, EmbeddingCollection(device=torch.device(device), tables=[
                    EmbeddingConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim,
                                    data_type=DataType[PRECISIONS[t.precision].theirs],
                                    feature_names=model.features[t.name]) for t in tables]))
                continue
            setattr(self, name, EmbeddingBagCollection(
                device=torch.device(device), is_weighted=tables[0].weighted, tables=[
                    EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim,
                                       data_type=DataType[PRECISIONS[t.precision].theirs],
                                       feature_names=model.features[t.name]) for t in tables]))

    def forward(self, batches):
        found = []
        for name, collection in self.named_children():
            outputs = collection(batches[name])
            outputs = outputs.to_dict() if hasattr(outputs, "to_dict") else outputs
            found += [(x if isinstance(x, torch.Tensor) else x.values()).flatten()
                      for _, x in sorted(outputs.items())]
        return torch.cat(found)


def counted(model: Drawn, seed: int, limit_s: float = 120) -> list[Calls]:
    """As `expected`, counted in TorchRec's processes."""
    n = len(model.problem.topology)
    with tempfile.TemporaryDirectory() as folder:
        codes = training.in_processes(n, _step, (model, seed, folder), limit_s)
        if any(codes):
            raise SystemExit(f"model {seed}: processes ended with {codes}")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(n)]


def _step(rank: int, model: Drawn, seed: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    topology = model.problem.topology
    n, local = len(topology), len(topology) // len(topology.hosts)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(local),
                      LOCAL_RANK=str(rank % local))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n)
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    codecs = get_qcomm_codecs_registry(QCommsConfig(
        forward_precision=CommType(model.problem.job.forward_payload),
        backward_precision=CommType(model.problem.job.backward_payload)), device=torch.device("cpu"))
    sharded = DistributedModelParallel(
        Model(model, "cpu"), device=torch.device("cpu"),
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused, qcomm_codecs_registry=codecs),
                  EmbeddingCollectionSharder(fused_params=fused, qcomm_codecs_registry=codecs)],
        plan=to_torchrec(model.plan, model.problem, Model(model, "meta"), "cpu"))
    batch = _batch(model, seed, rank)
    # The first step of DDP also exchanges what it needs to know of its parameters.
    sharded(batch).sum().backward()
    with Count(topology) as count:
        pooled = sharded(batch)
        count.way = "backward"
        pooled.sum().backward()
    files.write_json(f"{folder}/{rank}.json", _in_order(count.calls))
    dist.barrier()
    os._exit(0)


def _batch(model: Drawn, seed: int, rank: int):
    """For each collection its features, with weights if it has them."""
    from torchrec import KeyedJaggedTensor

    lengths, ids = lengths_of(model, seed, rank), ids_of(model, seed, rank)
    dtype, job, found = {4: torch.int32, 8: torch.int64}, model.problem.job, {}
    for name, tables in model.collections.items():
        own = list(dict.fromkeys(f for t in tables for f in model.features[t.name]))
        values = np.concatenate([ids[f] for f in own])
        found[name] = KeyedJaggedTensor(
            keys=own, values=torch.from_numpy(values).to(dtype[job.id_bytes]),
            weights=torch.ones(len(values)) if tables[0].weighted else None,
            lengths=torch.from_numpy(np.concatenate([lengths[f] for f in own])).to(dtype[job.length_bytes]))
    return found


# --- both --------------------------------------------------------------------------------------------------


def differences(seed: int, shape: tuple[int, int] | None = None) -> list[str]:
    """What TorchRec sends otherwise than is expected, rank by rank."""
    model, found = drawn(seed, shape), []
    for rank, (ours, theirs) in enumerate(zip(expected(model, seed), counted(model, seed), strict=True)):
        found += [f"rank {rank}: {name}: [in, out] bytes {ours.get(name, [])} expected, "
                  f"{theirs.get(name, [])} counted"
                  for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    return found


def _is_short(job: Job) -> bool:
    return min(PAYLOADS[job.forward_payload], PAYLOADS[job.backward_payload]) < OUTPUT_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.traffic", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200, help="to draw (200)")
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each model")
    args = parser.parse_args()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {row["seed"]: row for row in map(json.loads, lines)}
    for seed in range(args.models):
        if seed in done:
            continue
        model = drawn(seed)
        done[seed] = {"seed": seed, "devices": len(model.problem.topology),
                      "tables": len(model.problem.tables),
                      "collections": len(model.collections),
                      "kinds": sorted({p.kind for p in model.plan.placements}),
                      "differences": differences(seed)}
        with args.out.open("a") as f:
            f.write(json.dumps(done[seed]) + "\n")
        print(f"\r{len(done)} of {args.models}", end="", file=sys.stderr, flush=True)
    rows = [done[seed] for seed in range(args.models)]
    kinds = Counter(kind for row in rows for kind in row["kinds"])
    print(report.text_table(("models with", "models", "to the byte"), [
        (what, len(some), sum(not r["differences"] for r in some))
        for what, some in [("any", rows), *((kind, [r for r in rows if kind in r["kinds"]])
                                            for kind in sorted(kinds)),
                           ("several collections", [r for r in rows if r["collections"] > 1]),
                           *((what, [r for r in rows if any(map(has, drawn(r["seed"]).problem.tables))])
                             for what, has in _SPECIAL.items()),
                           (_SHORT, [r for r in rows if _is_short(drawn(r["seed"]).problem.job)]),
                           (_MIXED, [r for r in rows if "+" in drawn(r["seed"]).problem.precision])]]))
    for row in rows:
        for words in row["differences"]:
            print(f"model {row['seed']}: {words}")
    sys.exit(any(row["differences"] for row in rows))


if __name__ == "__main__":
    main()
