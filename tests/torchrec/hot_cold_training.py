"""Models with hot rows on every rank, trained by DistributedModelParallel on gloo processes.

They are compared with an unsharded run. For the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

import training
from shapes import column, replica, row

from shardcore.core.access_statistics import Zipf
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.io.hot_ids import HotIds
from shardcore.tables.hot_rows import with_hot_rows
from shardcore.torchrec.hot_cold import HotColdEmbeddingCollection
from shardcore.torchrec.moves.checkpoints import load_rows, save_rows
from shardcore.torchrec.sharding_plan import to_torchrec

SHAPES = {"a": (60, 16, ["f0", "f1"]), "b": (41, 16, ["f2"]), "c": (30, 16, ["f3"])}
HOT = {"a": (0, 3, 7, 8, 20, 59), "b": (5, 40)}
OTHERS = {"a": (1, 3, 30), "c": (0, 1, 2, 3)}
"""Hot ids of tables, at first and later."""
BATCH, STEPS, RATE = 8, 20, 0.3


def problem(n_hosts: int, per_host: int) -> Problem:
    tables = tuple(
        Table(
            name,
            rows,
            dim,
            2.0 * len(features),
            Zipf(1.1),
            features=len(features),
            sequence=True,
            collection="ec",
        )
        for name, (rows, dim, features) in SHAPES.items()
    )
    devices = tuple(Device(1 << 30, host=f"h{h}") for h in range(n_hosts) for _ in range(per_host))
    return Problem("hot", tables, Topology(devices), BATCH * len(devices))


class Model(nn.Module):
    """hot: ids by table. None: an EmbeddingCollection of whole tables."""

    def __init__(self, hot: dict[str, tuple[int, ...]] | None, device: str = "cpu") -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig

        super().__init__()
        configs = [
            EmbeddingConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=f)
            for n, (r, d, f) in SHAPES.items()
        ]
        ids = {name: HotIds(name, SHAPES[name][0], np.array(of)) for name, of in (hot or {}).items()}
        self.ec = (
            EmbeddingCollection(configs, device=torch.device(device))
            if hot is None
            else HotColdEmbeddingCollection(configs, ids, device)
        )
        self.top = nn.Linear(16, 4, device=device)

    def forward(self, batch: Any) -> torch.Tensor:
        found = self.ec(batch)
        return torch.cat([self.top(found[f].values()) for _, _, fs in SHAPES.values() for f in fs])


def plan(of: Problem, cut: bool) -> Plan:
    """Hot rows on all devices. Others by row, or on a device each."""
    placements = []
    for i, table in enumerate(of.tables):
        if table.name in dict(of.constraints.kinds):
            placements.append(replica(table, of.topology))
        else:
            placements.append(row(table, of.topology) if cut else column(table, i % len(of.topology)))
    return Plan(tuple(placements))


def batch(seed: int) -> Any:
    from torchrec import KeyedJaggedTensor

    rng, keys = np.random.default_rng(seed), [f for _, _, fs in SHAPES.values() for f in fs]
    rows = [r for r, _, fs in SHAPES.values() for _ in fs]
    lengths = rng.integers(0, 4, (len(keys), BATCH))
    values = np.concatenate(
        [(rng.random(n) ** 2 * r).astype(int) for r, n in zip(rows, lengths.sum(1), strict=True)]
    )
    return KeyedJaggedTensor(
        keys=keys, values=torch.from_numpy(values), lengths=torch.from_numpy(lengths.ravel())
    )


def sharded(hot: dict[str, tuple[int, ...]], given: Problem, cut: bool, optimizer: str) -> nn.Module:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder

    of = with_hot_rows(given, {name: len(ids) for name, ids in hot.items()})
    model = Model(hot, "meta")
    fused = {"optimizer": EmbOptimType[optimizer], "learning_rate": RATE, "eps": 1e-8}
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=to_torchrec(plan(of, cut), of, model, "cpu"),
        sharders=[EmbeddingCollectionSharder(fused_params=fused)],
    )


def dense_optimizer(parameters: Any, optimizer: str) -> torch.optim.Optimizer:
    return (
        torch.optim.SGD(parameters, lr=RATE)
        if optimizer == "EXACT_SGD"
        else torch.optim.Adagrad(parameters, lr=RATE, eps=1e-8)
    )


def in_processes(n_hosts: int, per_host: int, work: Callable[..., str], *args: Any) -> list[str]:
    """Run work(rank, problem, folder, *args) on each rank. It returns "" if nothing is wrong."""
    found = training.on_ranks(problem(n_hosts, per_host), work, *args)
    return ["the rank died or hung" if words is None else words for words in found]


def train_and_move(rank: int, given: Problem, folder: str, optimizer: str) -> str:
    """Train half of the steps, save, load with other hot ids and another plan, and train the others."""
    n = len(given.topology)
    torch.manual_seed(3)
    whole = Model(None)
    top = {k: v.clone() for k, v in whole.top.state_dict().items()}
    reference = dense_optimizer(whole.parameters(), optimizer)
    model = sharded(HOT, given, True, optimizer)
    for name, weight in _inner(model).ec.hot.items():
        # The model was made on the meta device.
        most = whole.ec.embeddings[name].weight.shape[0] ** -0.5
        if not 0 < weight.abs().max() <= most:
            return f"hot rows of {name} are filled with up to {weight.abs().max()}, not {most}"
    _fill(model, whole)
    _inner(model).top.load_state_dict(top)
    dense = dense_optimizer(_dense(model), optimizer)
    for step in range(STEPS):
        if step == STEPS // 2:
            save_rows(model, f"{folder}/saved", dense)
            top_state = _inner(model).top.state_dict()
            states = [dense.state[p] for p in _inner(model).top.parameters()]
            model = sharded(OTHERS, given, False, optimizer)
            _inner(model).top.load_state_dict(top_state)
            dense = dense_optimizer(_dense(model), optimizer)
            for p, state in zip(_inner(model).top.parameters(), states, strict=True):
                dense.state[p] = state
            load_rows(model, f"{folder}/saved", dense)
        batches = [batch(step * 10 + r) for r in range(n)]
        out, references = model(batches[rank]), [whole(b) for b in batches]
        if (apart := (out - references[rank]).abs().max().item()) > 1e-4:
            return f"step {step}: outputs differ by {apart:.1e}"
        dense.zero_grad()
        reference.zero_grad()
        _loss(out).backward()
        torch.stack([_loss(r) for r in references]).mean().backward()
        dense.step()
        reference.step()
    apart = _apart(model, whole)
    return f"parameters differ by {apart:.1e}" if apart > 1e-4 else ""


def _loss(out: torch.Tensor) -> torch.Tensor:
    return ((out - 1) ** 2).sum() / (10 * BATCH)


def _inner(model: nn.Module) -> Model:
    return next(m for m in model.modules() if isinstance(m, Model))


def _dense(model: nn.Module) -> list[nn.Parameter]:
    inner = _inner(model)
    return [*inner.ec.hot.values(), *inner.top.parameters()]


def _rows(model: nn.Module):
    """This rank's parts of tables, each with its table, ids and first column."""
    from shardcore.torchrec.moves.checkpoints import _parts_of_model

    for part in (named.part for named in _parts_of_model(model, None)):
        yield part.key[1], torch.from_numpy(part.row_ids), part.columns, part.tensors["weights"]


def _fill(model: nn.Module, whole: Model) -> None:
    for table, ids, (lo, hi), tensor in _rows(model):
        tensor.copy_(whole.ec.embeddings[table].weight.detach()[ids, lo:hi])


def _apart(model: nn.Module, whole: Model) -> float:
    found = [
        (tensor - whole.ec.embeddings[table].weight.detach()[ids, lo:hi]).abs().max().item()
        for table, ids, (lo, hi), tensor in _rows(model)
    ]
    return max(found)


def other_ids_on_a_rank(rank: int, given: Problem, folder: str) -> str:
    hot = HOT if rank == 0 else {**HOT, "b": (5, 39)}
    model = sharded(hot, given, True, "EXACT_SGD")
    model(batch(0))
    return ""


def no_hot_ids_on_a_rank(rank: int, given: Problem, folder: str) -> str:
    from torchrec import KeyedJaggedTensor

    features = [name for _, _, names in SHAPES.values() for name in names]
    Model(HOT if rank == 0 else {}).ec(
        KeyedJaggedTensor(
            keys=features,
            values=torch.zeros(len(features), dtype=torch.long),
            lengths=torch.ones(len(features), dtype=torch.long),
        )
    )
    return ""


def save_over_other_rows(rank: int, given: Problem, folder: str) -> str:
    other = Path(folder, "rows")
    if rank == 0:
        other.mkdir()
        (other / ".metadata").write_bytes(b"")
    save_rows(sharded(HOT, given, True, "EXACT_SGD"), other)
    return ""


def another_checkpoint(rank: int, given: Problem, folder: str) -> str:
    state = sharded(HOT, given, True, "EXACT_SGD").state_dict()
    model = sharded({**HOT, "b": (5, 39)}, given, True, "EXACT_SGD")
    model.load_state_dict(state)
    return ""


def refusals(rank: int, given: Problem, folder: str, works: tuple[str, ...]) -> str:
    """The refusal of each job, a line each, one after the other in the same processes."""
    said = []
    for work in works:
        try:
            said.append(globals()[work](rank, given, folder))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}".replace("\n", " "))
    return "\n".join(said)
