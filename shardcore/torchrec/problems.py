"""A TorchRec model's tables as a Problem, sharded or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.catalog import PRECISIONS, shardcore_name
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.topology import Topology
from shardcore.core.types import Problem, Table
from shardcore.core.validation import require, require_type
from shardcore.step.kinds import SHARDING_KINDS, even_row_share, possible_groups, sharding_kind_by_name
from shardcore.tables.hot_rows import with_hot_rows
from shardcore.tables.public import DEFAULT_ACCESS
from shardcore.torchrec import constraints as constrained
from shardcore.torchrec import fields, optimizers, topologies
from shardcore.torchrec.lookups import (
    LookupData,
    bags_per_sample_by_table,
    deduplication_by_table,
    measure_row_shares,
    pooling_and_access,
    read_lookups,
)
from shardcore.torchrec.modules import ModelTable, tables_of_model
from shardcore.torchrec.topologies import topology_from_torchrec

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.planner import Topology as TheirTopology

    from shardcore.torchrec.lookups import Lookups

    Kinds = Mapping[str, tuple[str, ...]]

RESERVED = 0.15
"""The share of device memory that TorchRec keeps free of embeddings by default."""


def problem_for(
    module: nn.Module,
    topology: Topology | TheirTopology,
    global_batch: int,
    lookups: Lookups | LookupData,
    optimizer: str | None = None,
    constraints: Constraints | None = None,
    name: str = "model",
    job: Job | None = None,
    deduplicated: Sequence[Sequence[str]] = (),
    bags: Mapping[str, float] | None = None,
) -> Problem:
    """Problem with the tables of a TorchRec model, sharded or not.

    Hot rows of a HotColdEmbeddingCollection count as the hottest ones.

    topology: ours, or TorchRec's. Of the latter's memory RESERVED stays free, or nothing if the job has the memory
      of its dense part (dense_memory.py).
    global_batch: samples per step over all devices.
    lookups: one of three. Mean lookups per sample by feature, or by (table, feature): ids then follow
      DEFAULT_ACCESS. Batches of the model's data, a global batch or more of each feature, in one
      KeyedJaggedTensor or several: pooling and reuse are read from them, and where ids lie if that is uneven
      (Table.row_shares). One whose features differ in samples (VBE) says of how many ranks it is
      (stride_per_key_per_rank); its tables get their features' strides, and no replicas, for TorchRec fails
      with them. Weights of ids travel, whether the collection uses them or not. The folder of a job
      that ShardCoreProfiler traced: its newest step has a batch of each rank.
    optimizer: None: the one that the model's weights have (apply_optimizer_in_backward), or else exact_sgd.
    job: properties of a step around the embeddings.
    deduplicated: groups of features that share an inverse index (see Table.dedup). Their tables stay together
      on a device. Lookups have to be batches of data, not deduplicated.
    bags: bags of features, for a sample, where features have batches of their own. None: as the data have them.

    Raises ShardCoreError for a feature without lookups, ids out of range, too few samples, a data type
    without a cost model, another optimizer than the weights have, and settings of tables that are refused
    (see `fields.FIELDS`).
    """
    # Whole tables, as hot rows are divided from them below.
    model_tables = tables_of_model(module, whole=True)
    require_type(global_batch, int, "global_batch", "a whole number, the samples of a step")
    require(
        bool(model_tables),
        "the model has no EmbeddingBagCollection or EmbeddingCollection; there is nothing to place",
    )
    for key, table in model_tables.items():
        # Settings of tables are checked before lookups are read, which takes long.
        fields.unpriced_record_lines(table.config, f"config of table {key!r}")
    set_optimizer = optimizers.optimizer_of_tables(model_tables)
    require(
        optimizer in (None, set_optimizer or optimizer),
        f"optimizer is {optimizer!r}; the model's weights have {set_optimizer!r} in backward: leave it out",
    )
    ours = (
        topology
        if isinstance(topology, Topology)
        else topology_from_torchrec(topology, default_reserved_share(job))
    )
    ours = topologies.with_row_domain_of_environment(ours)
    data = read_lookups(lookups, max(1, global_batch // len(ours)))
    statistics = pooling_and_access(model_tables, data, global_batch)
    # Deduplication happens on a device, so within its share of the batch.
    factors, groups = deduplication_by_table(model_tables, data, deduplicated, global_batch // len(ours))
    bags = data.bags_per_sample if isinstance(data, LookupData) and data.variable else bags or {}
    strides = bags_per_sample_by_table(model_tables, bags)
    weighted = data.weighted if isinstance(data, LookupData) else frozenset[str]()
    tables = tuple(
        replace(
            table_from_model(key, t, *statistics[key]),
            weighted=t.weighted or not weighted.isdisjoint(t.config.feature_names),
            dedup=factors.get(key, 1.0),
            strides=strides.get(key, ()),
        )
        for key, t in model_tables.items()
    )
    if isinstance(data, LookupData):
        tables = measure_row_shares(tables, model_tables, data, len(ours))
    if optimizer is None:
        optimizer = set_optimizer or "exact_sgd"
    problem = Problem(name, tables, ours, global_batch, optimizer, job=job or Job())
    # Tables are read whole and divided here, so hot and cold rows share statistics.
    problem = with_hot_rows(problem, {key: t.hot_rows for key, t in model_tables.items() if t.hot_rows})
    constraints = constraints or Constraints()
    kinds = dict(constraints.kinds) | dict(problem.constraints.kinds)
    # TorchRec's wrappers support some sharding types only.
    kinds |= _kinds_allowed_in_wrappers(model_tables, kinds, ours)
    widths = dict(constraints.min_widths)
    if bags:
        kinds |= _kinds_for_variable_batches(tables, kinds, tuple(bags))
        # grid_shard is host_row that is cut, so where TorchRec does not run it, all columns stay together.
        unable = constrained.kinds_without_variable_batches()
        widths |= {t.name: t.dim for t in tables if set(kinds[t.name]) <= unable}
    constraints = replace(
        constraints,
        together=(*constraints.together, *groups),
        kinds=tuple(kinds.items()),
        min_widths=tuple(widths.items()),
    )
    return replace(problem, constraints=constraints)


def default_reserved_share(job: Job | None) -> float:
    """Share of device memory kept free by default: TorchRec's, or 0 for a job with measured dense memory."""
    return 0.0 if job and job.dense_bytes else RESERVED


def unpriced_problem(model: nn.Module, topology: Topology) -> Problem:
    """Problem of a model's tables for checking and converting plans. Its lookups are made up, so it has no prices."""
    tables = tuple(table_from_model(key, table, 1.0) for key, table in tables_of_model(model).items())
    return Problem("job", tables, topology, len(topology))


def table_from_model(
    name: str, table: ModelTable, pooling: float, access: Reuse | Zipf = DEFAULT_ACCESS
) -> Table:
    """ShardCore Table of a model's table. Raises ShardCoreError for a data type without a cost model."""
    config = table.config
    precision = shardcore_name(config.data_type.name, PRECISIONS)
    if precision is None:
        known = ", ".join(p.theirs for p in PRECISIONS.values())
        raise ShardCoreError(f"table {name!r} has data type {config.data_type.name}; known are {known}")
    return Table(
        name,
        config.num_embeddings,
        config.embedding_dim,
        pooling,
        access,
        precision=precision,
        features=len(config.feature_names),
        weighted=table.weighted,
        sequence=not table.pooled,
        collection=table.path,
        managed_collision=table.managed_collision,
    )


def _kinds_allowed_in_wrappers(
    model_tables: Mapping[str, ModelTable], allowed: Kinds, topology: Topology
) -> dict[str, tuple[str, ...]]:
    """Kinds of sharding of tables whose wrapper module TorchRec shards by some types only.

    allowed: kinds that may run tables.

    Raises ShardCoreError if they leave a table none, or if the topology does not have the only one.
    """
    restricted = {}
    for name, table in model_tables.items():
        if not table.sharding_types:
            continue
        # Types that only TorchRec knows have no kind of ours.
        able = {
            sharding_kind.name
            for t in table.sharding_types
            for sharding_kind in constrained.BY_TYPE.get(t, ())
        }
        kinds = tuple(kind for kind in allowed.get(name, SHARDING_KINDS) if kind in able)
        what = (
            f"table {name!r} is in {table.path!r}, a {table.wrapper_name}, which TorchRec shards "
            f"{' or '.join(table.sharding_types)} only"
        )
        if not kinds:
            raise ShardCoreError(
                f"{what}; constraints have it run by {', '.join(allowed[name])}: allow {', '.join(sorted(able))}"
            )
        require(
            len(topology) != 1 or not all(sharding_kind_by_name(kind).divides_rows for kind in kinds),
            f"{what}; the topology has {len(topology)} device, and it needs 2 or more to divide rows",
        )
        rows, n = table.config.num_embeddings, len(topology)
        if not any(possible_groups(sharding_kind_by_name(kind), rows, topology, None) for kind in kinds):
            right = next(more for more in count(rows) if even_row_share(more, n))
            raise ShardCoreError(
                f"{what}; it divides {rows} rows evenly, and the last of {n} devices would have none: give it {right} "
                "rows, or another number of devices"
            )
        if kinds != tuple(SHARDING_KINDS):
            restricted[name] = kinds
    return restricted


def _kinds_for_variable_batches(
    tables: Sequence[Table], allowed: Kinds, variable: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Kinds of sharding that TorchRec supports for tables whose features have variable batches (VBE).

    It fails with data_parallel, and before 1.9 with grid_shard. There rows are divided over a host only where
    nothing else may run a table.

    Raises ShardCoreError if they leave a table none.
    """
    kinds, unable = {}, constrained.kinds_without_variable_batches()
    for table in tables:
        # Replicas fail with batches of different sizes.
        able = tuple(
            kind for kind in allowed.get(table.name, SHARDING_KINDS) if kind not in constrained.REPLICAS
        )
        kinds[table.name] = tuple(kind for kind in able if kind not in unable) or able
        require(
            bool(able),
            f"table {table.name!r} may run data_parallel only, and feature {variable[0]!r} has batches of a "
            "size of its own (VBE), with which TorchRec fails: allow another kind",
        )
    return kinds
