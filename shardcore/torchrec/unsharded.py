"""A running job's collections as they were before they were sharded, and its tables as a Problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.torchrec.modules import tables_of
from shardcore.torchrec.rows import collections_of


def configs_of(module: Any) -> list[Any]:
    """TorchRec's configs of a sharded collection's tables."""
    # TorchRec keeps the configs under a name for each type of collection.
    return (
        module._embedding_bag_configs
        if hasattr(module, "_embedding_bag_configs")
        else module._embedding_configs
    )


def unsharded_of(module: Any, init_fn: Any = None) -> Any:
    """A sharded collection as it was before it was sharded, on the meta device."""
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

    # init_fn replaces initialization, for weights that a move overwrites.
    tables = [replace(c, init_fn=init_fn) if init_fn else c for c in configs_of(module)]
    # On meta: shapes without memory.
    meta = torch.device("meta")
    if hasattr(module, "_embedding_bag_configs"):
        return EmbeddingBagCollection(tables=tables, is_weighted=module._is_weighted, device=meta)
    # Options of the constructor that the sharded module still has.
    others = {
        name: value
        for name in ("need_indices", "use_gather_select", "use_gather_select_per_sharding")
        if (value := getattr(module, f"_{name}", None))
    }
    return EmbeddingCollection(tables=tables, device=meta, **others)


def unsharded_model(job: nn.Module) -> nn.Module:
    """The collections of a job's model at their paths, unsharded, on the meta device, for `to_torchrec`."""
    model = nn.Module()
    for path, module in collections_of(job).items():
        if not path:
            return unsharded_of(module)
        # Modules on the way to a collection are empty: only paths matter.
        parent, (*names, last) = model, path.split(".")
        for name in names:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(last, unsharded_of(module))
    return model


def unpriced_problem_of(job: Any) -> Problem:
    """A job's tables and ranks, without what a plan's price needs: lookups, batch and memory."""
    tables = tables_of(unsharded_model(job))
    n, per_host = dist.get_world_size(), ranks_per_host(job)
    # Memory without limit, as nothing is planned here.
    devices = tuple(Device(1 << 50, host=f"host-{rank // per_host}") for rank in range(n))
    return Problem(
        "job",
        tuple(
            Table(
                name,
                t.config.num_embeddings,
                t.config.embedding_dim,
                # One lookup a sample stands for unknown ones.
                1.0,
                precision=t.config.data_type.value.lower(),
                sequence=not t.pooled,
                collection=t.path,
            )
            for name, t in tables.items()
        ),
        Topology(devices),
        n,
    )


def ranks_per_host(job: Any) -> int:
    from torchrec.distributed.comm import get_local_size

    return get_local_size(job._env.world_size)


def no_init(weight: torch.Tensor) -> None:
    pass


class WithoutInit(torch.overrides.TorchFunctionMode):
    """Leave new weights as they are: all of them are written by the move."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # TorchRec fills new weights by uniform_, also where init_fn is given.
        if func is torch.Tensor.uniform_:
            return args[0]
        return func(*args, **(kwargs or {}))


def restore_configs(module: Any, old: Any) -> None:
    """Give a collection the configs of the old one, with their initialization."""
    configs = configs_of(old)
    for name in ("_embedding_bag_configs", "_embedding_configs"):
        if hasattr(module, name):
            setattr(module, name, configs)
    module._table_name_to_config = {c.name: c for c in configs}
