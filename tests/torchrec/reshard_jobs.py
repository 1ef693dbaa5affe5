"""Jobs whose tables move: small models of all kinds of collections, trained by TorchRec on gloo processes.

Each job is a function of its seed, so that one that moved can be compared with one that never did.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.step.kinds import even_row_ranges
from shardcore.torchrec.modules import collections_of_model
from shardcore.torchrec.moves.rows import DenseOptimizer, parts_on_rank
from shardcore.torchrec.sharding_plan import to_torchrec

BATCH, RATE, EPS = 4, 0.1, 1e-8
REPLICAS_ADAM = "EXACT_ADAGRAD, replicas under Adam"
OPTIMIZERS = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")
"""FBGEMM's optimizers that run on a CPU. Its Adam does not: that of replicas is torch's."""
BAGS = {
    "bags": {"a": (24, 16, ["f0"]), "b": (50, 8, ["f1", "f2"]), "c": (40, 32, ["f0"]), "d": (10, 8, ["f3"])},
    "inner.right": {"c": (17, 12, ["f4"]), "e": (33, 20, ["f2"])},
}
SEQUENCES = {"s": (30, 8, ["f5"]), "t": (21, 8, ["f6"])}
ROWS = {"f0": 24, "f1": 50, "f2": 33, "f3": 10, "f4": 17, "f5": 30, "f6": 21}
LEFT, RIGHT = ("f0@a", "f1", "f2", "f0@c", "f3"), ("f4", "f2")
"""Outputs of the two collections of BAGS."""
HALF = {"c", "t"}
"""Tables of FP16."""


@dataclass(frozen=True)
class Settings:
    """A job's settings.

    optimizer: FBGEMM's name, or REPLICAS_ADAM.
    times: rows of tables over those of BAGS and SEQUENCES.
    seed: of weights and batches.
    """

    optimizer: str = "EXACT_SGD"
    times: int = 1
    seed: int = 0


class Model(nn.Module):
    """Two EmbeddingBagCollections with a table's name in common, an EmbeddingCollection and a dense layer."""

    def __init__(self, settings: Settings, device: str) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
        from torchrec.modules.embedding_configs import DataType

        def configs(kind: Any, tables: dict[str, tuple[int, int, list[str]]]) -> list[Any]:
            return [
                kind(
                    name=name,
                    num_embeddings=rows * settings.times,
                    embedding_dim=dim,
                    feature_names=list(features),
                    data_type=DataType.FP16 if name in HALF else DataType.FP32,
                )
                for name, (rows, dim, features) in tables.items()
            ]

        super().__init__()
        of = torch.device(device)
        bags = {
            path: EmbeddingBagCollection(configs(EmbeddingBagConfig, t), device=of)
            for path, t in BAGS.items()
        }
        self.bags = bags["bags"]
        self.inner = nn.ModuleDict({"right": bags["inner.right"]})
        self.sequence = EmbeddingCollection(configs(EmbeddingConfig, SEQUENCES), device=of)
        self.top = nn.Linear(72, 4, device=of)

    def forward(self, features: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss, and outputs."""
        left, right = self.bags(features), self.inner["right"](features)
        rows = self.sequence(features)
        # By name: the order of a collection's outputs follows from its plan.
        lefts = torch.cat([left[name].float() for name in LEFT], 1)
        outputs = torch.cat([lefts, *(right[name].float() for name in RIGHT)], 1)
        sequences = torch.cat([rows["f5"].values().float(), rows["f6"].values().float()])
        top = self.top(lefts)
        loss = ((outputs - 1) ** 2).sum(1).mean() + ((sequences - 1) ** 2).sum() / BATCH + (top**2).mean()
        return loss, outputs


def problem(hosts: int, per_host: int, times: int = 1) -> Problem:
    """The tables of a job and its ranks."""
    shapes = [(path, n, t, False) for path, tables in BAGS.items() for n, t in tables.items()]
    shapes += [("sequence", n, t, True) for n, t in SEQUENCES.items()]
    tables = tuple(
        Table(
            f"{path}.{n}" if n == "c" else n,
            rows * times,
            dim,
            2.0,
            precision="fp16" if n in HALF else "fp32",
            sequence=sequence,
            collection=path,
        )
        for path, n, (rows, dim, _), sequence in shapes
    )
    devices = tuple(Device(1 << 40, host=f"h{h}") for h in range(hosts) for _ in range(per_host))
    return Problem("resharded", tables, Topology(devices), BATCH * len(devices))


def pair(given: Problem, optimizer: str, rng: np.random.Generator) -> tuple[Plan, Plan]:
    """Two plans of all kinds between which optimizer state is exact.

    Row-wise state has a number a row of each part of columns, so such tables keep their parts. Replicas under
    another optimizer than fused tables stay replicas.
    """
    before = {t.name: _drawn(t, given.topology, rng) for t in given.tables}
    after = {}
    for table in given.tables:
        old = before[table.name]
        cuts = [(p.shard.col_lo, p.shard.col_hi) for p in old] if "ROWWISE" in optimizer else None
        new = _drawn(table, given.topology, rng, cuts)
        if optimizer == REPLICAS_ADAM:
            while (new[0].kind == "data_parallel") != (old[0].kind == "data_parallel"):
                new = _drawn(table, given.topology, rng)
        after[table.name] = new
    return tuple(Plan(tuple(p for ps in of.values() for p in ps)) for of in (before, after))  # type: ignore[return-value]


def whole_tables(given: Problem, rng: np.random.Generator) -> Plan:
    """A plan of whole tables, each on a rank."""
    return Plan(
        tuple(
            Placement("column", Shard.whole(t), (int(rng.integers(len(given.topology))),))
            for t in given.tables
        )
    )


def _drawn(
    t: Table, on: Topology, rng: np.random.Generator, cuts: list[tuple[int, int]] | None = None
) -> list[Placement]:
    n, per_host = len(on), len(on.devices_by_host[0])
    whole = [(0, t.dim)]
    kinds = ["whole", "columns"] if cuts is None else ["whole"] if cuts == whole else ["columns"]
    if n > 1 and even_row_ranges(t.rows, n) and "whole" in kinds:
        kinds.append("row")
    # TorchRec replicates no sequences on a CPU. Dense optimizers keep state of FP16 in FP16.
    if n > 1 and not t.sequence and t.precision == "fp32" and "whole" in kinds:
        kinds.append("data_parallel")
    if len(on.hosts) > 1 and not t.sequence and even_row_ranges(t.rows, per_host):
        kinds.append("host_row")
    kind = str(rng.choice(kinds))
    if kind in ("row", "data_parallel"):
        return [Placement(kind, Shard.whole(t), on.ranks)]
    parts = cuts or (whole if kind == "whole" else _columns(t, rng))
    if kind == "host_row":
        hosts = sorted(rng.permutation(len(on.hosts))[: len(parts)])
        if len(hosts) < len(parts):
            kind = "columns"
        else:
            return [
                Placement(kind, Shard(t, 0, t.rows, lo, hi), tuple(on.devices_by_host[h]))
                for h, (lo, hi) in zip(hosts, parts, strict=True)
            ]
    # A rank has one shard of a table, and exports order parts by rank, so that they stay as they are drawn.
    ranks = sorted(rng.permutation(n)[: len(parts)])
    if len(ranks) < len(parts):
        parts, ranks = whole, ranks[:1]
    return [
        Placement("column", Shard(t, 0, t.rows, lo, hi), (int(d),))
        for d, (lo, hi) in zip(ranks, parts, strict=True)
    ]


def _columns(t: Table, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Up to three parts of any widths; of sequences two equal ones, as TorchRec needs."""
    if t.sequence:
        return [(0, t.dim // 2), (t.dim // 2, t.dim)]
    n = min(int(rng.integers(2, 4)), t.dim // 4)
    cuts = [0, *sorted(rng.choice(np.arange(4, t.dim, 4), n - 1, replace=False).tolist()), t.dim]
    return list(itertools.pairwise(cuts))


@dataclass(frozen=True)
class Job:
    """A job in training. given: its problem. optimizer: of the dense layer and of replicas."""

    model: Any
    given: Problem
    optimizer: Any
    settings: Settings

    @staticmethod
    def of(given: Problem, plan: Plan, settings: Settings) -> Job:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

        name = settings.optimizer.split(",")[0]
        fused = {"optimizer": EmbOptimType[name], "learning_rate": RATE, "eps": EPS}
        meta = Model(settings, "meta")
        torch.manual_seed(settings.seed)
        top = nn.Linear(72, 4).state_dict()
        model = DistributedModelParallel(
            meta,
            device=torch.device("cpu"),
            plan=to_torchrec(plan, given, meta, "cpu"),
            sharders=cast(Any, [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]),
        )
        cast(Any, model.module).top.load_state_dict(top)
        job = Job(model, given, _optimizer(model, settings), settings)
        for part in job.parts():
            part.tensors["weights"].copy_(_weights(part, settings))
        return job

    def exported(self, plan: Plan) -> Any:
        return to_torchrec(plan, self.given, self.model, "cpu")

    def parts(self) -> list[Any]:
        optimizer = DenseOptimizer(self.optimizer)
        return [p for c in collections_of_model(self.model) for p in parts_on_rank(c, optimizer)]

    def train(self, step: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss, outputs = self.model(batch(self.settings, step))
        loss.backward()
        self.optimizer.step()
        return outputs.detach()

    def whole(self) -> dict[tuple[Any, str], torch.Tensor]:
        """Weights and cell state of all tables as one, and row state of each part of columns.

        Every rank has them, by table and tensor. For small tables.
        """
        import torch.distributed as dist

        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            gathered,
            [(p.key, p.rows, p.columns, {k: v.cpu() for k, v in p.tensors.items()}) for p in self.parts()],
        )
        found: dict[tuple[Any, str], dict[Any, Any]] = {}
        for key, rows, columns, tensors in (part for of_rank in gathered for part in of_rank):
            for name, tensor in tensors.items():
                cells = tensor[:, None].expand(-1, columns[1] - columns[0]) if tensor.ndim == 1 else tensor
                found.setdefault((key, name), {})[rows, columns] = cells.float()
        whole = {}
        for at, parts in found.items():
            rows, dim = max(r[1] for r, _ in parts), max(c[1] for _, c in parts)
            whole[at] = torch.full((rows, dim), torch.nan)
            for (r, c), cells in parts.items():
                whole[at][r[0] : r[1], c[0] : c[1]] = cells
        return whole

    def has_rows_of(self, whole: dict[tuple[Any, str], torch.Tensor]) -> bool:
        """True if this rank's weights and state are those of the tables as a whole."""
        return all(
            bool((whole[part.key, name][slice(*part.rows), slice(*part.columns)] == cells.float()).all())
            for part in self.parts()
            for name, tensor in part.tensors.items()
            for cells in [tensor[:, None] if tensor.ndim == 1 else tensor]
        )


def _optimizer(model: Any, settings: Settings) -> Any:
    """SGD of the dense layer, and of replicas the optimizer that does as the fused one."""
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    def of_replicas(params: Any) -> torch.optim.Optimizer:
        group: Any = [{"params": list(params)}]  # torch takes no empty list of parameters
        if settings.optimizer == "EXACT_SGD":
            return torch.optim.SGD(group, lr=RATE)
        if settings.optimizer == REPLICAS_ADAM:
            return torch.optim.Adam(group, lr=RATE, eps=EPS)
        kind = RowWiseAdagrad if "ROWWISE" in settings.optimizer else torch.optim.Adagrad
        return kind(group, lr=RATE, eps=EPS)

    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    top = {name: p for name, p in dense.items() if name.startswith("top.")}
    replicas = {name: p for name, p in dense.items() if name not in top}
    return CombinedOptimizer(
        [
            ("fused", model.fused_optimizer),
            ("replicas", KeyedOptimizerWrapper(replicas, of_replicas)),
            ("top", KeyedOptimizerWrapper(top, lambda params: torch.optim.SGD(cast(Any, params), lr=RATE))),
        ]
    )


def _weights(part: Any, settings: Settings) -> torch.Tensor:
    """Weights of a part that follow from the place of each cell, the same under any plan."""
    seed = (sum(map(ord, "".join(part.key))) * 7 + settings.seed) % 1000 + 1
    rows, columns = (torch.arange(*ends, dtype=torch.float64) for ends in (part.rows, part.columns))
    return (torch.sin(rows[:, None] * 0.37 * seed + columns * 1.7 + seed) * 0.3).to(
        part.tensors["weights"].dtype
    )


def batch(settings: Settings, step: int) -> Any:
    """A rank's batch of a step."""
    from torchrec import KeyedJaggedTensor

    rng = np.random.default_rng([settings.seed, step, int(os.environ["RANK"])])
    lengths = rng.integers(0, 4, (len(ROWS), BATCH))
    values = np.concatenate(
        [rng.integers(0, r * settings.times, n) for r, n in zip(ROWS.values(), lengths.sum(1), strict=True)]
    )
    return KeyedJaggedTensor(
        keys=list(ROWS), values=torch.from_numpy(values), lengths=torch.from_numpy(lengths.ravel())
    )


def apart(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> float:
    """The largest difference of two jobs' tables. State of 0 that one does not keep counts as 0."""
    worst = 0.0
    for at in one.keys() | other.keys():
        a, b = one.get(at), other.get(at)
        difference = (a if b is None else b if a is None else a - b).abs()  # type: ignore[union-attr]
        worst = max(worst, float(difference.max()) if not difference.isnan().any() else float("inf"))
    return worst
