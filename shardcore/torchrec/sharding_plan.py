"""A Plan to and from a ShardingPlan of TorchRec 1.8.

Every rule here was tried with DistributedModelParallel.

Each kind of sharding is one or two sharding types of TorchRec:

- Whole rows on a device are table_wise, or column_wise if columns are cut. Widths are any multiples of 4.
- Rows divided over all devices are row_wise. TorchRec sends id i to rank i // ceil(rows / devices), under
any plan.
- Rows divided over one host are table_row_wise, likewise. They are grid_shard if several hosts hold columns.
- A replica on every device is data_parallel. Its kernel is dense. Its optimizer is the user's own.

TorchRec runs one op and one exchange per sharding type. Once a collection has one table cut by columns, its
whole tables are written as column_wise too. They then join that op, as `lower` prices them. table_row_wise
and grid_shard work likewise.

Columns are interchangeable. A device gets only one shard of a table, because TorchRec fails on shards of
unequal widths. So a plan that comes back is consolidated, with as many columns on each device.

Ranks are TorchRec's numbers of devices, host by host (Topology.ranks).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.core.validation import require
from shardcore.step.kinds import ShardingKind, kind_of_torchrec_type, sharding_kind_by_name, shards_by_device
from shardcore.step.lower import require_full_cover
from shardcore.step.memory import MIB, private_cache_mib
from shardcore.step.ways import consolidate_placements
from shardcore.tables.hot_rows import INSIDE, REPLICA, is_hot_table
from shardcore.torchrec.modules import ModelTable, collections_of_model, tables_of_model
from shardcore.torchrec.placements import placements_from_torchrec
from shardcore.torchrec.plan_files import shardings_by_module
from shardcore.torchrec.settings import PLAIN_KERNELS, kernel_settings, sharding_with_settings

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import KeyValueParams, ParameterSharding, ShardingPlan


_PATH = re.compile(r"[\w-]+(\.[\w-]+)*")
"""Names of modules, joined by dots. Those of a list are numbers."""
_WRITE_BUFFER_BYTES = 2 << 30
"""Default of RocksDB's write buffer in FBGEMM's SSDTableBatchedEmbeddingBags."""


@dataclass(frozen=True)
class TableSharding:
    """TorchRec sharding of one table: ShardCore's kind, TorchRec's type, and shards with their ranks.

    sharding_kind: our kind of sharding.
    sharding_type: TorchRec's.
    shards: pairs of rank and shard. Empty for replicas.
    """

    sharding_kind: ShardingKind
    sharding_type: str
    shards: tuple[tuple[int, Shard], ...] = ()


# --- to TorchRec --------------------------------------------------------------------------------------------


def to_torchrec(
    plan: Plan,
    problem: Problem,
    module: nn.Module | str,
    compute_device: str | None = None,
    like: ShardingPlan | None = None,
) -> ShardingPlan:
    """TorchRec ShardingPlan for DistributedModelParallel(module, plan=...), with fused kernels.

    Tables whose load factor is not 1 get TorchRec's kernels with rows in host memory, and its cache.

    module: the model, or the path of the collection of those tables that name none.
    compute_device: "cuda" or "cpu". Default: that of `like`, or else of the hardware that the plan is for.
    like: a TorchRec plan of the same model. Its kernels, cache settings and output types are kept. Default:
      those in the provenance of a plan from `from_torchrec`.

    Raises ShardCoreError for a plan that TorchRec cannot run, and if problem and model differ in tables.
    """
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    # A plan that does not cover each cell once would be built wrongly.
    require_full_cover(plan, problem)
    # A problem that names no hardware is for that of the cost model.
    hardware = problem.topology.hardware or str(plan.provenance.get("setting", ""))
    compute_device = (
        compute_device or _device_type_of_plan(like) or ("cpu" if hardware.startswith("cpu") else "cuda")
    )
    model_tables = (
        _tables_named_in_problem(problem, module)
        if isinstance(module, str)
        else _matching_model_tables(problem, module)
    )
    placements = plan.placements_by_table()
    shardings = {name: torchrec_sharding(placements[name], problem.topology) for name in model_tables}
    # Settings of `like` take precedence over those in the plan's provenance.
    settings = {} if like else plan.provenance.get("torchrec", {})
    earlier = {
        name: sharding_with_settings(of_table, f"table {name!r} of the plan's provenance")
        for name, of_table in settings.items()
    }
    if unknown := sorted(set(earlier) - set(model_tables)):
        raise ShardCoreError(
            f"the plan's provenance has settings of table {unknown[0]!r}; the model has {sorted(model_tables)[:5]}"
        )
    # Sharding types of cut tables, by collection.
    cut = {
        (model_tables[name].path, s.sharding_type)
        for name, s in shardings.items()
        if model_tables[name].pooled
    }
    modules: dict[str, EmbeddingModuleShardingPlan] = defaultdict(EmbeddingModuleShardingPlan)
    for name in [name for name, table in model_tables.items() if table.replica]:
        if not shardings.pop(name).sharding_kind.dense_gradient:
            raise ShardCoreError(
                f"plan places table {name!r} by {placements[name][0].kind}; its rows are hot, "
                "so the model has them on every rank: plan them so (constraints.kinds)"
            )
    if other := next((t for t in problem.tables if t.hash_table_tiers is not None), None):
        form = other.managed_collision.form if other.managed_collision else ""
        raise ShardCoreError(
            f"table {other.name!r} is a hash table of form {form}, which ShardCore prices and does not export; give "
            "TorchRec the plan of a problem without it"
        )
    for number, (name, sharding) in enumerate(shardings.items()):
        table, if_cut = model_tables[name], sharding.sharding_kind.torchrec_type(cut=True)
        # Another table of the collection is cut: join its op.
        if (table.path, if_cut) in cut:
            sharding = replace(sharding, sharding_type=if_cut)
        require(
            not table.sharding_types or sharding.sharding_type in table.sharding_types,
            f"plan shards table {name!r} {sharding.sharding_type}; TorchRec shards module {table.path!r}, "
            f"{table.wrapper_name}, {' or '.join(table.sharding_types)} only: plan it so (constraints.kinds)",
        )
        old = earlier.get(name)
        if like and table.path in like.plan:
            old = shardings_by_module(like)[table.path].get(table.name)
        # An earlier UVM or cached kernel has no counterpart for replicas.
        if (
            sharding.sharding_kind.dense_gradient
            and old is not None
            and old.compute_kernel not in PLAIN_KERNELS
        ):
            raise ShardCoreError(
                f"plan replicates table {name!r}, which has kernel {old.compute_kernel}; TorchRec replicates with "
                "its dense kernel alone, in device memory: change the kernel to 'fused', or the plan"
            )
        modules[table.path][table.name] = _parameter_sharding(sharding, problem, compute_device, old, number)
    _require_sequence_support(shardings, model_tables, compute_device)
    return ShardingPlan({**modules})


def _tables_named_in_problem(problem: Problem, path: str) -> dict[str, ModelTable]:
    """ModelTables made from a problem's own names, for a model that is not at hand.

    path: the collection of tables that name none.

    Raises ShardCoreError for a path that no module of a model has, or that no table is in, and for tables that
    TorchRec does not build in one collection.
    """
    require(
        _PATH.fullmatch(path) is not None,
        f"module is {path!r}; it needs the path of the collection in the model, such as "
        "sparse_arch.embedding_bag_collection",
    )
    named = list(dict.fromkeys(t.collection for t in problem.tables))
    require(
        "" in named or path in named,
        f"module is {path!r}; all tables of problem {problem.name!r} name their "
        f"collections, which are {', '.join(map(repr, named[:5]))}: give one of them",
    )
    hot = {t.name: t.collection or path for t in problem.tables if is_hot_table(t, problem)}
    # Hot rows name their collection, in which the others then lie as `cold`.
    divided = set(hot.values())
    tables, forms = {}, dict[str, str]()
    for table in problem.tables:
        collection = table.collection or path
        # Names have the path of the module that divides tables, not of the collection within.
        outer = collection.removesuffix(INSIDE)
        name = table.name.removeprefix(f"{outer if outer in divided else collection}.")
        # Rows that are not hot and name no collection lie in that of the hot rows.
        if collection in divided and table.sequence and table.name not in hot:
            collection += INSIDE
        form = f"of sequences {table.dim} columns wide" if table.sequence else "pooled"
        if (other := forms.setdefault(collection, form)) != form:
            raise ShardCoreError(
                f"table {table.name!r} is {form}, and another of the collection {collection!r} is {other}; TorchRec "
                "builds a collection of pooled tables, or of sequences of one width: give each a collection"
            )
        tables[table.name] = ModelTable(
            collection, name, None, not table.sequence, table.weighted, replica=table.name in hot
        )
    return tables


def _device_type_of_plan(plan: ShardingPlan | None) -> str | None:
    """Device type, "cuda" or "cpu", in a ShardingPlan's placements; None if the plan has none."""
    for module in shardings_by_module(plan).values() if plan else ():
        for sharding in module.values():
            shards = getattr(sharding.sharding_spec, "shards", ())
            if shards:
                return shards[0].placement.device().type
    return None


def torchrec_sharding(placements: Sequence[Placement], topology: Topology) -> TableSharding:
    """TorchRec's sharding of a table whose placements cover each cell once.

    Raises ShardCoreError if it cannot.
    """
    table, kinds = placements[0].shard.table, sorted({p.kind for p in placements})
    require(
        len(kinds) <= 1,
        f"plan places table {table.name!r} by {' and '.join(kinds)}; TorchRec shards a table by one of them",
    )
    # Ranks are numbered host by host, devices as the problem lists them.
    sharding_kind, rank_of = (
        sharding_kind_by_name(kinds[0]),
        {d: rank for rank, d in enumerate(topology.ranks)},
    )
    if sharding_kind.dense_gradient:
        return TableSharding(sharding_kind, sharding_kind.torchrec_type(cut=False))
    # TorchRec fails on several shards of a table on one rank.
    placements = consolidate_placements(placements)
    shards = tuple((rank_of[d], shard) for p in placements for d, shard in shards_by_device(p))
    return TableSharding(
        sharding_kind,
        sharding_kind.torchrec_type(cut=len(placements) > 1),
        shards,
    )


def _require_sequence_support(
    shardings: Mapping[str, TableSharding], model_tables: Mapping[str, ModelTable], compute_device: str
) -> None:
    """Raise ShardCoreError for a sharding that TorchRec supports for pooled tables only."""
    width: dict[str, int] = {}
    for name, table in model_tables.items():
        if table.pooled or table.replica:
            continue
        sharding, what = shardings[name], f"table {name!r} of the EmbeddingCollection {table.path!r}"
        require(
            sharding.sharding_kind.sequence_channels is not None,
            f"plan cuts {what} by rows over one host; TorchRec does so for EmbeddingBagCollections alone",
        )
        require(
            not sharding.sharding_kind.dense_gradient or compute_device != "cpu",
            f"plan replicates {what}; on a CPU TorchRec cannot, for its dense kernel pools there",
        )
        # Only cut tables need equal widths.
        is_cut = len(sharding.shards) > 1 and sharding.sharding_kind.cuts_columns
        for _, shard in sharding.shards if is_cut else ():
            require(
                width.setdefault(table.path, shard.width) == shard.width,
                f"plan cuts {what} into shards {shard.width} wide, and one {width[table.path]}; TorchRec there "
                "needs all shards of tables cut by columns equally wide",
            )


def _matching_model_tables(problem: Problem, module: nn.Module) -> dict[str, ModelTable]:
    """Tables of the model. Raises ShardCoreError unless the problem has the same tables in the same shapes."""
    ours, model_tables = {t.name: t for t in problem.tables}, tables_of_model(module)
    if missing := sorted(set(model_tables) ^ set(ours)):
        where = "the model lacks" if missing[0] in ours else "the problem lacks"
        raise ShardCoreError(
            f"problem {problem.name!r} has tables {sorted(ours)[:5]}, the model "
            f"{sorted(model_tables)[:5]}; {where} {missing[0]!r}"
        )
    for name, table in model_tables.items():
        pairs = {
            "rows": (ours[name].rows, table.config.num_embeddings),
            "dim": (ours[name].dim, table.config.embedding_dim),
        }
        if differing := [
            f"{field}: {own} against {other}" for field, (own, other) in pairs.items() if own != other
        ]:
            raise ShardCoreError(
                f"table {name!r} has another shape in problem {problem.name!r} than in the model: "
                f"{', '.join(differing)}"
            )
        require(
            ours[name].collection in ("", table.path),
            f"table {name!r} has collection {ours[name].collection!r} in problem "
            f"{problem.name!r} and {table.path!r} in the model",
        )
    return model_tables


def _parameter_sharding(
    sharding: TableSharding, problem: Problem, compute_device: str, old: ParameterSharding | None, number: int
) -> ParameterSharding:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.sharding_plan import placement
    from torchrec.distributed.types import ParameterSharding

    topology = problem.topology
    # Placements name devices by their number on a host.
    per_host = len(topology.devices_by_host[0]) if topology.equal_hosts else len(topology)
    if sharding.sharding_kind.dense_gradient:
        ranks, spec, kernel = list(range(len(topology))), None, "dense"
    else:
        # Shards in the order of ranks, as `ranks` lists them.
        ranks = [rank for rank, _ in sharding.shards]
        shards = []
        for rank, s in sharding.shards:
            at: Any = placement(compute_device, rank, per_host)  # a text, which ShardMetadata parses
            shards.append(ShardMetadata([s.row_lo, s.col_lo], [s.rows, s.width], at))
        spec = EnumerableShardingSpec(shards)
        # A table that was replicated has a dense kernel. It needs a fused one now.
        was = None if old is None else kind_of_torchrec_type(old.sharding_type, topology)
        kernel = "fused" if old is None or (was and was.dense_gradient) else old.compute_kernel
    # Other settings of an earlier plan stay.
    base = old or ParameterSharding(sharding.sharding_type, kernel)
    table = next((shard.table for _, shard in sharding.shards), None)
    if table and table.in_host_memory:
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
        from torchrec.distributed.types import CacheParams

        kernel = table.kernel
        # The op has to be built for a pipeline that fetches ahead.
        ahead = True if problem.job.fetches_ahead else None
        cache = None
        if table.load_factor and not table.shares_cache:
            base = replace(base, key_value_params=_own_cache_settings(sharding, base, number))
            cache = ahead and CacheParams(prefetch_pipeline=ahead)
        elif table.load_factor:
            cache = base.cache_params or CacheParams(CacheAlgorithm.LRU)
            cache = replace(
                cache, load_factor=table.load_factor, prefetch_pipeline=ahead or cache.prefetch_pipeline
            )
        base = replace(base, cache_params=cache)
    return replace(
        base, sharding_type=sharding.sharding_type, compute_kernel=kernel, ranks=ranks, sharding_spec=spec
    )


def _own_cache_settings(sharding: TableSharding, base: ParameterSharding, number: int) -> KeyValueParams:
    """KeyValueParams that give a table on SSD a cache of its own.

    number: the table's number, which makes the settings unique.
    """
    from torchrec.distributed.types import KeyValueParams

    given = base.key_value_params or KeyValueParams()
    largest = max((shard for _, shard in sharding.shards), key=lambda shard: shard.rows)
    # TorchRec runs tables of one width and equal settings as one op, with one cache of max_l1_cache_size for
    # all. So each gets another size of RocksDB's write buffer, by some bytes.
    apart = -(-(given.ssd_rocksdb_write_buffer_size or _WRITE_BUFFER_BYTES) // MIB) * MIB - number
    return replace(given, max_l1_cache_size=private_cache_mib(largest), ssd_rocksdb_write_buffer_size=apart)


# --- from TorchRec ------------------------------------------------------------------------------------------


def plan_in_use(model: nn.Module) -> ShardingPlan:
    """ShardingPlan under which a model's collections are sharded now."""
    from torchrec.distributed.types import ShardingPlan

    sharded_ones = (c for c in collections_of_model(model) if c.is_sharded)
    return ShardingPlan({c.path: c.module.module_sharding_plan for c in sharded_ones})


def from_torchrec(sharding_plan: ShardingPlan, problem: Problem, module: nn.Module) -> Plan:
    """ShardCore Plan, consolidated, equal to a TorchRec ShardingPlan of a model: to price, replay or improve.

    provenance["torchrec"] has the tables' other settings, by our names. `to_torchrec` writes them again.

    Raises ShardCoreError if plan, problem and model differ in tables, and as `placements_from_torchrec` does.
    """
    model_tables = _matching_model_tables(problem, module)
    ours, modules = {t.name: t for t in problem.tables}, shardings_by_module(sharding_plan)
    by_path: dict[str, dict[str, Table]] = defaultdict(dict)
    placements = []
    for name, table in model_tables.items():
        if table.replica:
            # The model has hot rows on every rank. No TorchRec plan names them.
            placements.append(Placement(REPLICA.name, Shard.whole(ours[name]), problem.topology.ranks))
        else:
            by_path[table.path][table.name] = ours[name]
    for path, tables in by_path.items():
        require(
            path in modules,
            f"the TorchRec plan has no module {path!r}; it has {sorted(modules)[:5]}",
        )
        placements += placements_from_torchrec(modules[path], tables, problem.topology)
    settings = {
        name: of_table
        for name, table in model_tables.items()
        if not table.replica
        if (of_table := kernel_settings(modules[table.path][table.name], f"table {name!r}"))
    }
    provenance = {"algorithm": "torchrec plan"} | ({"torchrec": settings} if settings else {})
    plan = Plan(consolidate_placements(placements), provenance)
    require_full_cover(plan, problem)
    return plan
