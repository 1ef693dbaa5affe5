"""Grouped plans that TorchRec's DMPCollection trains on gloo processes, beside unsharded runs of the same
data.

TorchRec 1.8 asserts that DMPCollection runs on GPUs, and numbers the devices of a host. `dmp_collection`
reads its module as `python -O` would, without assertions, and takes the numbers off: a CPU has none. The rest
is TorchRec's: groups, ranks of the plan, forward, backward, sync.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

import training
from shapes import column, replica, row

from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.step.kinds import SHARDING_KINDS
from shardcore.step.sharding_groups import GroupedPlan, Grouping, devices_of_groups, problem_of_group
from shardcore.torchrec.dmp_collection import read_dmp_collection, to_dmp_collection, write_dmp_collection

LEARNING_RATE, EPS, BATCH = 0.5, 1e-8, 4
TABLES = {"a": (24, 16), "b": (50, 8), "c": (40, 32), "d": (10, 8), "e": (33, 8)}


class Model(nn.Module):
    """Tables, and a dense part: one weight for each pooled output."""

    def __init__(self) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        self.tables = EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=[f"f_{n}"])
                for n, (r, d) in TABLES.items()
            ],
        )
        self.dense = nn.Parameter(torch.linspace(0.5, 1.5, sum(d for _, d in TABLES.values())))

    def forward(self, features: Any) -> torch.Tensor:
        found = self.tables(features).to_dict()
        return torch.cat([found[f"f_{n}"] for n in TABLES], 1) * self.dense


def problem(n_hosts: int, per_host: int, optimizer: str = "exact_sgd") -> Problem:
    devices = tuple(Device(10**9, host=f"host-{h}") for h in range(n_hosts) for _ in range(per_host))
    return Problem(
        "grouped",
        tuple(Table(n, r, d, 2.0) for n, (r, d) in TABLES.items()),
        Topology(devices),
        BATCH * len(devices),
        optimizer,
    )


def grouped(given: Problem, grouping: Grouping) -> GroupedPlan:
    """A plan of a group: whole tables, columns, rows, a replica, and rows of a pod or host where that is a kind."""
    own = problem_of_group(given, grouping)
    a, b, c, d, e = own.tables
    n = len(own.topology)
    if n == 1:
        whole = (column(t, 0) for t in (a, b, c, e))
        return GroupedPlan(grouping, Plan((*whole, replica(d, own.topology))), own)
    # The last kind is that of the largest domains.
    of_domains = [
        (k.name, k.possible_groups(own.topology)[-1:]) for k in SHARDING_KINDS.values() if k.rows_over
    ]
    over_domain = [Placement(kind, Shard.whole(e), group) for kind, groups in of_domains for group in groups]
    placements = [
        column(a, 1),
        row(b, own.topology),
        column(c, 0, 0, 12),
        column(c, n - 1, 12, 32),
        replica(d, own.topology),
        over_domain[-1] if over_domain else column(e, n - 1),
    ]
    return GroupedPlan(grouping, Plan(tuple(placements)), own)


def batch(seed: int) -> Any:
    from torchrec import KeyedJaggedTensor

    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (len(TABLES), BATCH))
    values = np.concatenate(
        [rng.integers(0, r, n) for (r, _), n in zip(TABLES.values(), lengths.sum(1), strict=True)]
    )
    return KeyedJaggedTensor(
        keys=[f"f_{n}" for n in TABLES],
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths.ravel()),
    )


def unsharded() -> Model:
    torch.manual_seed(0)
    return Model()


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return ((outputs - 1) ** 2).sum(1).mean()


def dmp_collection() -> type:
    """TorchRec's DMPCollection, for CPUs."""
    from torch.distributed.remote_device import _remote_device

    name = "torchrec.distributed.model_parallel"
    path = importlib.util.find_spec(name).origin
    module = types.ModuleType(f"{name}_unasserted")
    sys.modules[module.__name__] = module
    exec(compile(Path(path).read_text(), path, "exec", optimize=1), module.__dict__)

    class OnCpu(module.DMPCollection):
        def _remap_sharding_plan(self, plan: Any, **others: Any) -> None:
            super()._remap_sharding_plan(plan, **others)
            for sharding in (s for shardings in plan.plan.values() for s in shardings.values()):
                for shard in sharding.sharding_spec.shards if sharding.sharding_spec else ():
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    return OnCpu


@dataclass(frozen=True)
class Run:
    """A training run: a file for DMPCollection, the name of the fused optimizer, and steps."""

    path: str
    optimizer: str
    steps: int


def work(rank: int, given: Problem, folder: str, runs: Sequence[Run], kept: str) -> str:
    """Run on one rank. Each step's shards of this rank, and the dense part, are kept in a file."""
    for i, run in enumerate(runs):
        torch.save(_trained(rank, run), f"{kept}/trained-{i}-{rank}")
    dist.barrier()
    return ""


def _trained(rank: int, run: Run) -> list[dict[str, Any]]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    fused = {
        "optimizer": EmbOptimType[OPTIMIZERS[run.optimizer].theirs],
        "learning_rate": LEARNING_RATE,
        "eps": EPS,
    }
    arguments, sync_every = read_dmp_collection(run.path)
    whole = unsharded()
    model = dmp_collection()(
        Model(),
        torch.device("cpu"),
        global_pg=dist.group.WORLD,
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
        **arguments,
    )
    with torch.no_grad():
        for name, tensor, (rows, columns) in _parts(model):
            tensor.copy_(whole.state_dict()[f"tables.embedding_bags.{name}.weight"][rows, columns])
    fused_names = {f"tables.embedding_bags.{name}.weight" for name, *_ in _parts(model, replicas=False)}
    own = [p for name, p in model.named_parameters() if name.removeprefix("module.") not in fused_names]
    dense = torch.optim.SGD(own, lr=LEARNING_RATE)
    kept = []
    for step in range(run.steps):
        dense.zero_grad()
        loss_of(model(batch(100 * step + rank))).backward()
        dense.step()
        if (step + 1) % sync_every == 0:
            model.sync()
        kept.append(
            {
                "parts": [
                    (name, tensor.detach().clone(), (rows, columns))
                    for name, tensor, (rows, columns) in _parts(model)
                ],
                "dense": model.module.dense.detach().clone(),
                "ranks": [
                    tuple(dist.get_process_group_ranks(model.device_mesh.get_group(name)))
                    for name in ("shard", "replicate")
                ],
            }
        )
    return kept


def _parts(model: nn.Module, replicas: bool = True) -> list[tuple[str, torch.Tensor, tuple[slice, slice]]]:
    """This rank's shards: table, weights, rows and columns."""
    found = []
    for lookup in model.module.get_submodule("tables")._lookups:
        for op in getattr(lookup, "module", lookup)._emb_modules:
            for table, weights in zip(op._config.embedding_tables, op.split_embedding_weights(), strict=True):
                at, fused = (0, 0), hasattr(op.emb_module, "get_optimizer_state")
                if fused:
                    at = table.local_metadata.shard_offsets
                if replicas or fused:
                    found.append(
                        (
                            table.name,
                            weights,
                            tuple(slice(o, o + n) for o, n in zip(at, weights.shape, strict=True)),
                        )
                    )
    return found


# --- unsharded ----------------------------------------------------------------------------------------------


def expected(
    each: Sequence[Sequence[int]], run: Run, sync_every: int, column_slices: Mapping[str, Sequence[slice]]
) -> list[list[dict[str, torch.Tensor]]]:
    """Parameters of every replica after each step, without any sharding: [steps][R] by name.

    each: [R][M] ranks of each group. One group of all ranks is plain training.
    column_slices: columns of each table that have moments of their own. A table without is the same in all replicas.
    """
    replicas = [unsharded() for _ in each]
    sums = [
        {name: torch.zeros(TABLES[name][0], len(cut)) for name, cut in column_slices.items()} for _ in each
    ]
    kept = []
    for step in range(run.steps):
        for model, ranks in zip(replicas, each, strict=True):
            model.zero_grad()
            torch.stack([loss_of(model(batch(100 * step + rank))) for rank in ranks]).mean().backward()
        together = {
            name: torch.stack([dict(m.named_parameters())[name].grad for m in replicas]).mean(0)
            for name, _ in replicas[0].named_parameters()
        }
        with torch.no_grad():
            for model, own in zip(replicas, sums, strict=True):
                for name, value in model.named_parameters():
                    if (table := name.split(".")[-2] if "." in name else "") not in column_slices:
                        value -= LEARNING_RATE * together[name]
                    else:
                        for i, at in enumerate(column_slices[table]):
                            value[:, at] -= _update(value.grad[:, at], own[table][:, i], run.optimizer)
            if (step + 1) % sync_every == 0:
                for same in (
                    *zip(*(m.parameters() for m in replicas), strict=True),
                    *(tuple(own[name] for own in sums) for name in column_slices),
                ):
                    mean = torch.stack([x.detach() for x in same]).mean(0)
                    for x in same:
                        x.copy_(mean)
        kept.append(
            [
                {
                    name.split(".")[-2] if "." in name else name: value.detach().clone()
                    for name, value in model.named_parameters()
                }
                for model in replicas
            ]
        )
    return kept


def _update(gradient: torch.Tensor, sums: torch.Tensor, optimizer: str) -> torch.Tensor:
    """Update that a fused optimizer subtracts. Row-wise Adagrad adds to the sums of rows."""
    if optimizer == "exact_sgd":
        return LEARNING_RATE * gradient
    sums += (gradient**2).mean(1)
    return LEARNING_RATE * gradient / (sums.sqrt() + EPS)[:, None]


# --- both ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Apart:
    """Distance of a run of DMPCollection from unsharded ones: the largest difference of any number at any
    step.

    replicas: from R unsharded models that average as it does.
    one: from one unsharded model of all data.
    ranks: for each rank, those of its group and of its replicas, as TorchRec made them.
    """

    replicas: float
    one: float
    ranks: list[list[tuple[int, ...]]]


def compare(
    given: Problem,
    groupings: Sequence[Grouping],
    optimizers: Sequence[str],
    steps: int = 3,
    limit_s: float = 240,
) -> list[Apart]:
    """Train each grouping under each optimizer, all in the same processes."""
    n = len(given.topology)
    with tempfile.TemporaryDirectory() as folder:
        runs, asked = [], []
        for grouping in groupings:
            path, plan = f"{folder}/{len(runs)}.json", grouped(given, grouping)
            write_dmp_collection(path, to_dmp_collection(plan, given, "tables", "cpu"), grouping.sync_every)
            runs += [Run(path, optimizer, steps) for optimizer in optimizers]
            asked += [plan] * len(optimizers)
        said = training.on_ranks(given, work, runs, folder, limit_s=limit_s)
        assert said == [""] * n, said
        return [
            _apart(
                given,
                plan,
                run,
                [torch.load(f"{folder}/trained-{i}-{rank}", weights_only=False) for rank in range(n)],
            )
            for i, (plan, run) in enumerate(zip(asked, runs, strict=True))
        ]


def _apart(given: Problem, plan: GroupedPlan, run: Run, trained: Sequence[Sequence[dict[str, Any]]]) -> Apart:
    rank_of = {device: rank for rank, device in enumerate(given.topology.ranks)}
    each = [
        [rank_of[device] for device in group] for group in devices_of_groups(given.topology, plan.grouping)
    ]
    group_of = {rank: number for number, ranks in enumerate(each) for rank in ranks}
    cut = plan.grouping.size > 1
    column_slices = {
        name: [slice(0, 12), slice(12, 32)] if name == "c" and cut else [slice(0, dim)]
        for name, (_, dim) in TABLES.items()
        if name != "d"
    }
    like = expected(each, run, plan.grouping.sync_every, column_slices)
    one = expected([given.topology.ranks], run, 1, column_slices)
    worst = {"replicas": 0.0, "one": 0.0}
    for rank, steps in enumerate(trained):
        for step, found in enumerate(steps):
            for what, reference in (("replicas", like[step][group_of[rank]]), ("one", one[step][0])):
                pairs = [
                    (found["dense"], reference["dense"]),
                    *((tensor, reference[name][at]) for name, tensor, at in found["parts"]),
                ]
                worst[what] = max(worst[what], *((x - y).abs().max().item() for x, y in pairs if x.numel()))
    return Apart(**worst, ranks=[steps[-1]["ranks"] for steps in trained])
