"""Collectives of a step, counted in TorchRec's real processes, for tests.

Every collective passes a TorchDispatchMode, which counts the bytes that a rank puts in and gets out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import training
from drawn_collections import (
    INPUT,
    SPLITS,
    Calls,
    Drawn,
    batches_of,
    drawn,
    expected,
    ids_of,
    in_order,
    lengths_of,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore.core.catalog import PRECISIONS
from shardcore.core.topology import Topology
from shardcore.io import writing
from shardcore.step.kinds import Channel
from shardcore.step.scopes import SCOPES, groups_in_topology
from shardcore.torchrec.settings import qcomms_from_job
from shardcore.torchrec.sharding_plan import to_torchrec

_PARTS = {"SplitsAllToAllAwaitable": SPLITS, "KJTAllToAllTensorsAwaitable": INPUT}
"""TorchRec's classes whose collectives carry no outputs."""
_COLLECTIVES = {
    "alltoall_base_": "all_to_all",
    "_reduce_scatter_base_": "reduce_scatter",
    "_allgather_base_": "reduce_scatter",
    # The same of parts of unequal size.
    "reduce_scatter_": "reduce_scatter",
    "allgather_": "reduce_scatter",
    "allreduce_": "all_reduce",
}

# --- what is counted ---------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts the bytes in and out of every collective of c10d, by what it carries."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.calls: dict[str, list[list[int]]] = {}
        self.topology = topology
        self.direction = "forward"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name not in _COLLECTIVES:
                raise ValueError(f"TorchRec ran {name}, which is not known here")
            self._add(name, args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args) -> None:
        if name == "allreduce_":
            into = source = args[0]
            group = args[1]
        else:
            into, source, group = args[:3]
        what = _carried() or f"{self.direction} {self._channel(name, group).description}"
        self.calls.setdefault(what, []).append(
            [sum(t.numel() * t.element_size() for t in _flat(tensors)) for tensors in (source, into)]
        )

    def _channel(self, name: str, group) -> Channel:
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
        scope = next(
            name for name in SCOPES if sorted(ranks) in map(sorted, groups_in_topology(self.topology, name))
        )
        return Channel(_COLLECTIVES[name], scope)


def _flat(tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else [t for inner in tensors for t in _flat(inner)]


def _carried() -> str:
    """Bytes of a collective other than outputs and gradients, by TorchRec's class that runs it."""
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
            sequence = tables[0].sequence
            config = EmbeddingConfig if sequence else EmbeddingBagConfig
            configs = [
                config(
                    name=t.name,
                    num_embeddings=t.rows,
                    embedding_dim=t.dim,
                    data_type=DataType[PRECISIONS[t.precision].theirs],
                    feature_names=model.features[t.name],
                )
                for t in tables
            ]
            if sequence:
                collection = EmbeddingCollection(device=torch.device(device), tables=configs)
            else:
                weighted = tables[0].weighted
                collection = EmbeddingBagCollection(
                    device=torch.device(device), is_weighted=weighted, tables=configs
                )
            setattr(self, name, collection)

    def forward(self, batches):
        found = []
        for name, collection in self.named_children():
            outputs = collection(batches[name])
            outputs = outputs.to_dict() if hasattr(outputs, "to_dict") else outputs
            found += [
                (x if isinstance(x, torch.Tensor) else x.values()).flatten()
                for _, x in sorted(outputs.items())
            ]
        return torch.cat(found)


def counted(model: Drawn, seed: int, limit_s: float = 120) -> list[Calls]:
    """Bytes counted in TorchRec's processes, in the form of `expected`."""
    n = len(model.problem.topology)
    with tempfile.TemporaryDirectory() as folder:
        codes = training.in_processes(n, _step, (model, seed, folder), limit_s)
        if any(codes):
            raise SystemExit(f"model {seed}: processes ended with {codes}")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(n)]


def _step(rank: int, model: Drawn, seed: int, folder: str) -> None:
    from torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry

    topology = model.problem.topology
    training.start_rank(rank, topology, folder)
    codecs = get_qcomm_codecs_registry(qcomms_from_job(model.problem.job), device=torch.device("cpu"))
    exported = to_torchrec(model.plan, model.problem, Model(model, "meta"), "cpu")
    sharded = training.sharded(Model(model, "cpu"), exported, "EXACT_SGD", 0.1, codecs)
    batch = _batch(model, seed, rank)
    # The first step of DDP also exchanges what it needs to know of its parameters.
    sharded(batch).sum().backward()
    with Count(topology) as count:
        pooled = sharded(batch)
        count.direction = "backward"
        pooled.sum().backward()
    writing.write_json(f"{folder}/{rank}.json", in_order(count.calls))
    dist.barrier()
    os._exit(0)


def _batch(model: Drawn, seed: int, rank: int):
    """For each collection its features, with weights if it has them."""
    from torchrec import KeyedJaggedTensor

    lengths, ids = lengths_of(model, seed, rank), ids_of(model, seed, rank)
    batches, rng = batches_of(model), np.random.default_rng([seed, rank, 2])
    dtype, job, found = {4: torch.int32, 8: torch.int64}, model.problem.job, {}
    for name, tables in model.collections.items():
        own = list(dict.fromkeys(f for t in tables for f in model.features[t.name]))
        values = np.concatenate([ids[f] for f in own])
        variable = {}
        if any(t.strides for t in tables):
            # Samples have some bag of each feature. Without these indices TorchRec runs no such batch.
            of_samples = [rng.integers(0, batches[f], model.problem.local_batch) for f in own]
            variable = {
                "stride_per_key_per_rank": [[batches[f]] for f in own],
                "inverse_indices": (own, torch.from_numpy(np.stack(of_samples))),
            }
        found[name] = KeyedJaggedTensor(
            keys=own,
            values=torch.from_numpy(values).to(dtype[job.id_bytes]),
            weights=torch.ones(len(values)) if tables[0].weighted else None,
            lengths=torch.from_numpy(np.concatenate([lengths[f] for f in own])).to(dtype[job.length_bytes]),
            **variable,
        )
    return found


# --- both --------------------------------------------------------------------------------------------------


def differences(seed: int, model: Drawn | None = None, limit_s: float = 120) -> list[str]:
    """Differences between counted and expected bytes, rank by rank. model: None: the one of the seed."""
    model, found = model or drawn(seed), []
    for rank, (ours, theirs) in enumerate(
        zip(expected(model, seed), counted(model, seed, limit_s), strict=True)
    ):
        found += [
            f"rank {rank}: {name}: [in, out] bytes {ours.get(name, [])} expected, {theirs.get(name, [])} counted"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
    return found
