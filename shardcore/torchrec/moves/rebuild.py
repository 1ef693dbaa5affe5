"""A running job's collection built anew, as it was before it was sharded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardcore.torchrec.modules import Collection


def unsharded_copy(collection: Collection, init_fn: Any = None) -> Any:
    """Unsharded module with the tables of a sharded collection, on the meta device: shapes without memory.

    init_fn: replaces the initialization of weights.
    """
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

    module, meta = collection.module, torch.device("meta")
    tables = [replace(c, init_fn=init_fn) if init_fn else c for c in collection.table_configs]
    if collection.is_pooled:
        return EmbeddingBagCollection(tables=tables, is_weighted=module._is_weighted, device=meta)
    # Options of the constructor that the sharded module still has.
    others = {
        name: value
        for name in ("need_indices", "use_gather_select", "use_gather_select_per_sharding")
        if (value := getattr(module, f"_{name}", None))
    }
    return EmbeddingCollection(tables=tables, device=meta, **others)


def leave_uninitialized(weight: torch.Tensor) -> None:
    """Initializer that leaves a weight as it is, for tables whose rows a move writes."""
    pass


class WithoutInit(torch.overrides.TorchFunctionMode):
    """Context that leaves new weights uninitialised, as a move overwrites all of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # TorchRec fills new weights by uniform_, also where init_fn is given.
        if func is torch.Tensor.uniform_:
            return args[0]
        return func(*args, **(kwargs or {}))


def restore_table_configs(module: Any, old: Collection) -> None:
    """Set a rebuilt collection's table configs to those of the old collection, with their initializers."""
    configs = old.table_configs
    setattr(module, "_embedding_bag_configs" if old.is_pooled else "_embedding_configs", configs)
    module._table_name_to_config = {c.name: c for c in configs}
