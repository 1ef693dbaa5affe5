"""A running job's model as a Problem and the Plan in use: from its DistributedModelParallel."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from shardcore.core.catalog import OPTIMIZERS, PRECISIONS, named
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.step.ways import consolidate
from shardcore.tables.public import DEFAULT_ACCESS
from shardcore.torchrec.modules import path_in_model
from shardcore.torchrec.placements import placements_of
from shardcore.torchrec.unsharded import configs_of

if TYPE_CHECKING:
    from torch import nn


class ShardedCollection(NamedTuple):
    """A sharded collection of a job: its path in the model, and its module."""

    path: str
    module: Any

    @property
    def configs(self) -> list[Any]:
        return configs_of(self.module)


def collections_of(model: nn.Module) -> list[ShardedCollection]:
    """The sharded collections of a job's model. Raises ShardCoreError where it has none."""
    found = [
        ShardedCollection(path_in_model(path, model), module)
        # A sharded collection has a plan and an input distribution.
        for path, module in model.named_modules()
        if hasattr(module, "module_sharding_plan") and hasattr(module, "input_dist")
        if hasattr(module, "_embedding_bag_configs") or hasattr(module, "_embedding_configs")
    ]
    if not found:
        raise ShardCoreError(
            f"model is a {type(model).__name__} without sharded collections; it needs to be a "
            "DistributedModelParallel"
        )
    return found


def problem_of(
    model: nn.Module, pooling: Mapping[str, float], local_batch: int, world_size: int, job: Job
) -> tuple[Problem, Plan, dict[str, tuple[str, ...]]]:
    """The problem of a running job, the plan in use, and the features of each table.

    pooling: mean lookups of a sample, by feature. Reuse of ids is a default.

    Raises ShardCoreError for features without lookups, data types and optimizers that are not in the catalog, and
    tables with rows outside of device memory, and as `placements_of` does.
    """
    topology = _topology(world_size)
    collections = collections_of(model)
    # Tables of several collections may share a name.
    uses = Counter(config.name for c in collections for config in c.configs)
    tables: list[Table] = []
    features: dict[str, tuple[str, ...]] = {}
    placements = []
    for collection in collections:
        path, module, by_name = collection.path, collection.module, {}
        for config in collection.configs:
            name = config.name if uses[config.name] == 1 else f"{path}.{config.name}"
            if unknown := [f for f in config.feature_names if f not in pooling]:
                raise ShardCoreError(
                    f"table {name!r} has feature {unknown[0]!r}, which the batch does not have"
                )
            precision = named(config.data_type.name, PRECISIONS)
            if precision is None:
                raise ShardCoreError(
                    f"table {name!r} has data type {config.data_type.name}, which has no cost model"
                )
            by_name[config.name] = Table(
                name,
                config.num_embeddings,
                config.embedding_dim,
                sum(pooling[f] for f in config.feature_names),
                DEFAULT_ACCESS,
                precision=precision,
                features=len(config.feature_names),
                weighted=bool(getattr(module, "_is_weighted", False)),
                sequence=not hasattr(module, "_embedding_bag_configs"),
                # Collections have separate ops and exchanges, so a table keeps its own.
                collection=path,
            )
            features[name] = tuple(config.feature_names)
        tables += by_name.values()
        placements += placements_of(module.module_sharding_plan, by_name, topology)
    problem = Problem(
        "job", tuple(tables), topology, local_batch * world_size, _optimizer(collections), job=job
    )
    # Consolidated: all columns of a table on one device are one shard.
    return problem, Plan(consolidate(placements), {"algorithm": "torchrec plan"}), features


def _topology(world_size: int) -> Topology:
    """Devices of the job, those of a host together, with the memory that this rank sees."""
    import torch

    # torchrun states ranks of a host. Without it all are on one.
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if torch.cuda.is_available():
        memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        # Ranks of a CPU host share its memory.
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_host
    return Topology(
        tuple(Device(memory_bytes, host=f"host-{rank // per_host}") for rank in range(world_size))
    )


def _optimizer(collections: list[ShardedCollection]) -> str:
    """Our name of the optimizer of the fused ops. Raises ShardCoreError for one that is not in the catalog."""
    # FBGEMM's op knows its optimizer, whichever way the job set it.
    names = dict.fromkeys(op.optimizer.name for c in collections for op in _fused_ops(c.module))
    known = {named(name, OPTIMIZERS) for name in names}
    if None in known or len(known) > 1:
        raise ShardCoreError(
            f"the job trains tables under {', '.join(names)}; ShardCore prices one of "
            f"{', '.join(o.theirs for o in OPTIMIZERS.values())}"
        )
    # All tables may be replicas, which have no fused op.
    return next(iter(known)) or "exact_sgd" if known else "exact_sgd"


def _fused_ops(module: nn.Module) -> Iterator[Any]:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    return (
        op
        for lookup in getattr(module, "_lookups", ())
        for op in lookup.modules()
        if isinstance(op, SplitTableBatchedEmbeddingBagsCodegen)
    )
