"""TorchRec's ParameterConstraints as constraints and tables of ours.

A job keys them by a table's name in its collection. `constraints_by_problem_name` checks them; all other functions
take them keyed by the table's name in the Problem, as `model_tables`, the model's tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Any

from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.tiers import BELOW, TIERS
from shardcore.core.topology import Topology
from shardcore.core.types import Table
from shardcore.core.validation import require, require_type, short_repr
from shardcore.step.kinds import SHARDING_KINDS, ShardingKind, kinds_of_torchrec_type, sharding_kind_by_name
from shardcore.step.memory import MIB
from shardcore.torchrec import fields
from shardcore.torchrec.modules import ModelTable, quote_first_names
from shardcore.torchrec.plan_files import shardings_by_module

if TYPE_CHECKING:
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.types import ShardingPlan

    ByName = Mapping[str, ParameterConstraints]
    Tables = Mapping[str, ModelTable]

REPLICAS = tuple(
    sharding_kind.name for sharding_kind in SHARDING_KINDS.values() if sharding_kind.dense_gradient
)
"""Kinds that run the dense kernel."""
KERNELS = {
    kernel: (tier, has_cache)
    for tier in BELOW
    for kernel, has_cache in ((TIERS[tier].kernel, False), (TIERS[tier].cached_kernel, True))
    if kernel
}
"""Kernels with rows below device memory: the tier that has all, and whether a cache has some."""
CACHED = 0.2
"""Default share of rows in a cache, TorchRec's and FBGEMM's."""
NO_KERNELS = {
    "quant": "runs inference",
    "virtual": "has no rows to place before its ids come",
    **dict.fromkeys(("triton", "customized", "tpu"), "is not FBGEMM's kernel, which cost models measured"),
}
"""Kernels that no plan has, by a substring of their names, and why."""
BY_TYPE = {
    name: kinds_of_torchrec_type(name)
    for sharding_kind in SHARDING_KINDS.values()
    for name in sharding_kind.torchrec
}
"""Our kinds of each sharding type of TorchRec. A topology has one of them."""
WRITTEN = {
    name
    for sharding_kind in SHARDING_KINDS.values()
    for name in (sharding_kind.torchrec_type(cut=False), sharding_kind.torchrec_type(cut=True))
}
"""TorchRec's sharding types that plans of ours are written as."""


def require_constraints(constraints: ByName | None) -> None:
    """Raise ShardCoreError unless constraints are TorchRec ParameterConstraints by table, with fields of the right
    types.
    """
    from torchrec.distributed.planner import ParameterConstraints

    require_type(constraints, (Mapping, NoneType), "constraints", "ParameterConstraints by table, or None")
    for name, c in (constraints or {}).items():
        what = f"ParameterConstraints of table {short_repr(name)}"
        require_type(
            c, ParameterConstraints, f"constraints of table {short_repr(name)}", "ParameterConstraints"
        )
        for field, kind, right in (
            ("sharding_types", str, "a list of sharding types, such as ['row_wise'], or None"),
            ("compute_kernels", str, "a list of kernels, such as ['fused'], or None"),
            ("pooling_factors", Real, "a list of numbers, one for each feature"),
        ):
            value = getattr(c, field)
            # A text is iterable, too, but is no list of texts.
            if isinstance(value, Iterable) and not isinstance(value, str):
                right_type = all(isinstance(v, kind) for v in value)
            else:
                right_type = value is None and kind is str
            require(
                bool(right_type),
                f"{what} has {field} {short_repr(value)}; it needs to be {right}",
            )
        require_type(
            c.min_partition, (int, NoneType), f"{what}: min_partition", "a number of columns, or None"
        )


def constraints_by_problem_name(
    constraints: ByName,
    model_tables: Tables,
    compute_device: str,
    fused_params: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, ParameterConstraints], list[str]]:
    """ParameterConstraints keyed by table names of the Problem, and a line for each effect that the price leaves out.

    fused_params: of each table's sharder, by our names. Caches have their settings where constraints give none.

    Raises ShardCoreError for constraints that no plan of ours can keep, naming table, field and value.
    """
    configs, lines = {t.name: t.config for t in model_tables.values()}, []
    for name, c in constraints.items():
        # Not by `require`: names are sorted for the message alone, and there may be thousands of tables.
        if name not in configs:
            raise ShardCoreError(
                f"constraints are for table {name!r}, which the model does not have; it has "
                f"{quote_first_names(sorted(configs))}"
            )
        lines += _unpriced_constraint_lines(
            c, f"ParameterConstraints of table {name!r}", configs[name].feature_names
        )
        require(
            c.device_group in (None, compute_device),
            f"ParameterConstraints of table {name!r} has device_group {c.device_group!r}; the topology's "
            f"compute_device is {compute_device!r}, and all tables of a plan live there",
        )
    ours = {}
    for key, table in model_tables.items():
        if table.name in constraints:
            ours[key] = c = _with_cache_settings_of_fused_params(
                constraints[table.name], fused_params.get(key, {})
            )
            what = f"of table {table.name!r}, by its constraints or fused_params,"
            cache = fields.field_values(c.cache_params) if c.cache_params else {}
            if cache.get("precision") == table.config.data_type:
                del cache["precision"]
            for field, values in (("cache_params", cache), ("key_value_params", None)):
                if record := getattr(c, field):
                    lines += fields.unpriced_field_lines(
                        type(record), values or fields.field_values(record), f"{field} {what}"
                    )
    return ours, lines


_OF_FUSED_PARAMS = {
    "algorithm": "cache_algorithm",
    "load_factor": "cache_load_factor",
    "reserved_memory": "cache_reserved_memory",
}
"""Fields of cache_params and key_value_params by their names in fused_params, where these differ."""


def _with_cache_settings_of_fused_params(
    constraint: ParameterConstraints, given: Mapping[str, Any]
) -> ParameterConstraints:
    """ParameterConstraints whose unset cache settings are filled in from fused_params, as TorchRec does."""
    from torchrec.distributed.types import CacheParams, KeyValueParams

    for field, kind in (("cache_params", CacheParams), ("key_value_params", KeyValueParams)):
        own = getattr(constraint, field) or kind()
        known = {name: given.get(_OF_FUSED_PARAMS.get(name, name)) for name in fields.field_defaults(kind)}
        added = {name: x for name, x in known.items() if x is not None and getattr(own, name) is None}
        if added and sharded_kernel(constraint) in KERNELS:
            constraint = replace(constraint, **{field: replace(own, **added)})
    return constraint


def prefetch_setting_by_table(constraints: ByName) -> dict[str, bool | None]:
    """prefetch_pipeline of each table whose kernel has a cache; None if the constraints leave it open."""
    return {
        name: getattr(c.cache_params, "prefetch_pipeline", None)
        for name, c in constraints.items()
        if KERNELS.get(sharded_kernel(c), ("", False))[1]
    }


def _unpriced_constraint_lines(constraint: ParameterConstraints, what: str, features: list[str]) -> list[str]:
    """Lines on effects of ParameterConstraints that a price leaves out. Raises ShardCoreError for what no plan can
    keep.
    """
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel

    lines = fields.unpriced_field_lines(type(constraint), fields.field_values(constraint), what)
    for field in ("num_poolings", "batch_sizes"):
        given = getattr(constraint, field)
        require(
            not given or (len(given) == len(features) and all(n > 0 for n in given)),
            f"{what} has {field} {short_repr(given)} for its {len(features)} features {', '.join(features)}; it "
            "needs one above 0 for each",
        )
    if constraint.cache_params is not None and constraint.cache_params.load_factor is not None:
        if any(
            not TIERS[KERNELS[k][0]].shares_cache for k in constraint.compute_kernels or () if k in KERNELS
        ):
            lines.append(
                f"{what} has cache_params with load_factor {constraint.cache_params.load_factor:g}, which TorchRec 1.8 "
                "drops for tables on SSD: caches have 20% of rows, or MiB of key_value_params' max_l1_cache_size"
            )
    kernels = {kernel.value for kernel in EmbeddingComputeKernel}
    for kernel in constraint.compute_kernels or ():
        require(
            kernel in kernels,
            f"{what} has compute kernel {kernel!r}; TorchRec's are {', '.join(sorted(kernels))}",
        )
        if why := next((why for part, why in NO_KERNELS.items() if part in kernel), None):
            raise ShardCoreError(
                f"{what} has compute_kernels {constraint.compute_kernels}; {kernel} {why}: leave it out"
            )
    if unknown := [name for name in constraint.sharding_types or () if name not in BY_TYPE]:
        raise ShardCoreError(f"{what} has sharding type {unknown[0]!r}; known are {', '.join(BY_TYPE)}")
    if types := None if WRITTEN & set(constraint.sharding_types or WRITTEN) else constraint.sharding_types:
        raise ShardCoreError(
            f"{what} has sharding_types {types}; ShardCore writes such plans as "
            f"{BY_TYPE[types[0]][0].torchrec_type(cut=True)}: allow it too"
        )
    require(
        bool(_allowed_kinds(constraint)),
        f"{what} has sharding_types {constraint.sharding_types} and compute_kernels "
        f"{constraint.compute_kernels}; 'dense' runs data_parallel tables, and no others",
    )
    # Order does not matter: features are matched by name.
    require(
        constraint.feature_names is None or sorted(constraint.feature_names) == sorted(features),
        f"{what} has feature_names {constraint.feature_names}; the table's are {features}",
    )
    return lines


def bags_per_sample(constraints: ByName, model_tables: Tables, batch_size: int) -> dict[str, float]:
    """Bags per sample by feature, for features whose batch_sizes or num_poolings differ from one bag a sample.

    batch_size: samples of a rank.
    """
    bags: dict[str, float] = {}
    for key, c in constraints.items():
        features = model_tables[key].config.feature_names
        sizes, poolings = c.batch_sizes or [batch_size] * len(features), c.num_poolings or [1] * len(features)
        strides = [n * size / batch_size for n, size in zip(poolings, sizes, strict=True)]
        if set(strides) != {1.0}:
            for feature, stride in zip(features, strides, strict=True):
                require(
                    bags.setdefault(feature, stride) == stride,
                    f"feature {feature!r} has {bags[feature]:g} and {stride:g} bags a sample, by batch_sizes and "
                    "num_poolings of two tables; it needs the same in both",
                )
    return bags


def lookups_per_sample(
    constraints: ByName, model_tables: Tables, bags: Mapping[str, float]
) -> dict[str | tuple[str, str], float]:
    """Mean lookups per sample by feature and by (table, feature), from the tables' pooling_factors.

    bags: bags of features, as of `bags_per_sample`. Factors are of a bag.

    TorchRec's default is one for every feature. It gives way to the statement of another table.
    """
    pooling: dict[str | tuple[str, str], float] = {}
    for key, table in model_tables.items():
        c, features = constraints.get(key), table.config.feature_names
        if c is None:
            raise ShardCoreError(
                f"table {table.name!r} has no constraints; it needs ParameterConstraints(pooling_factors=[mean "
                f"lookups per sample of {', '.join(features)}]), or give the planner `lookups`"
            )
        # TorchRec's default says nothing of this table, so it must not override another's statement.
        if _has_default_pooling(c):
            pooling = {feature: bags.get(feature, 1.0) for feature in features} | pooling
            continue
        require(
            len(c.pooling_factors) == len(features),
            f"table {table.name!r} has pooling_factors {c.pooling_factors} for its {len(features)} features "
            f"{', '.join(features)}; it needs one for each",
        )
        for feature, factor in zip(features, c.pooling_factors, strict=True):
            # By pair as well: two tables may look up one feature with different means.
            pooling[feature] = pooling[key, feature] = factor * bags.get(feature, 1.0)
    return pooling


def _has_default_pooling(constraint: ParameterConstraints) -> bool:
    return list(constraint.pooling_factors) == [1.0]


def pooling_notes(constraints: ByName, has_lookups: bool) -> list[str]:
    """Lines on tables priced with default pooling_factors, or whose pooling_factors given lookups replace."""
    # Unset factors are reported where they count, and set ones where lookups replace them.
    if not (names := [name for name, c in constraints.items() if _has_default_pooling(c) != has_lookups]):
        return []
    if has_lookups:
        return [f"pooling_factors of tables {quote_first_names(names)} are not used: the planner has lookups"]
    return [
        f"tables {quote_first_names(names)} are priced with one lookup a sample, for their pooling_factors "
        "are [1.0]; that is TorchRec's default too"
    ]


# --- choices of the search ----------------------------------------------------------------------------------


def search_constraints(
    constraints: ByName, model_tables: Tables, topology: Topology, compute_device: str, replicas: bool
) -> Constraints:
    """Constraints of a search from TorchRec's: the kinds that may run each table, and the fewest columns of its shards.

    replicas: whether tables may be replicated whose constraints do not name it.
    """
    kinds, widths = {}, {}
    for key, table in model_tables.items():
        c = constraints.get(key)
        allowed = c and _kinds_on_topology(c, topology, f"ParameterConstraints of table {table.name!r}")
        asked = {kind.name for name in c.sharding_types or () for kind in BY_TYPE[name]} if c else set()
        named = c and (asked & set(REPLICAS) or "dense" in (c.compute_kernels or ()))
        # On a CPU the dense kernel pools, so sequences have no replicas there.
        if (compute_device == "cpu" and not table.pooled) or not (replicas or named or table.replica):
            allowed = tuple(kind for kind in allowed or SHARDING_KINDS if kind not in REPLICAS) or allowed
        if allowed is not None:
            kinds[key] = allowed
        if c is None:
            continue
        # A table keeps all columns unless each of its kinds may run it cut, so that any plan is one that it may have.
        types, dim = set(c.sharding_types or WRITTEN), table.config.embedding_dim
        cuts = {
            sharding_kind.torchrec_type(cut=True)
            for kind in _allowed_kinds(c)
            if (sharding_kind := sharding_kind_by_name(kind)).cuts_columns
        }
        if least := c.min_partition if cuts <= types else dim:
            # A table narrower than min_partition keeps its own width.
            widths[key] = min(least, dim)
    return Constraints(kinds=tuple(kinds.items()), min_widths=tuple(widths.items()))


def _kinds_on_topology(
    constraint: ParameterConstraints, topology: Topology, what: str
) -> tuple[str, ...] | None:
    """Kinds of sharding on a topology that sharding_types and compute_kernels allow a table; None for all kinds.

    what: the constraints, for messages. Raises ShardCoreError if the topology has none of the kinds.
    """
    kinds = _allowed_kinds(constraint)
    possible = tuple(kind for kind in kinds if _is_possible_on(sharding_kind_by_name(kind), topology))
    if not possible:
        able = [
            name
            for name, of in BY_TYPE.items()
            if any(_is_possible_on(sharding_kind, topology) for sharding_kind in of)
        ]
        raise ShardCoreError(
            f"{what} has sharding_types {constraint.sharding_types}; with {len(topology)} devices in all and "
            f"{len(topology.devices_by_host[0])} on a host ShardCore runs a table by {', '.join(able)}"
        )
    return None if set(kinds) == set(SHARDING_KINDS) else possible


def _is_possible_on(sharding_kind: ShardingKind, topology: Topology) -> bool:
    # One device has nothing to divide, and no other replica.
    several = len(topology) > 1 or not (sharding_kind.divides_rows or sharding_kind.dense_gradient)
    return several and bool(sharding_kind.device_groups(topology))


def _allowed_kinds(constraint: ParameterConstraints) -> tuple[str, ...]:
    types = [name for name in constraint.sharding_types or BY_TYPE if name in WRITTEN]
    kinds = tuple(dict.fromkeys(sharding_kind.name for name in types for sharding_kind in BY_TYPE[name]))
    kernels = set(constraint.compute_kernels or ())
    # "dense" alone: replicas, and nothing else.
    if kernels == {"dense"}:
        return tuple(kind for kind in kinds if kind in REPLICAS)
    # TorchRec replicates with its dense kernel alone.
    replicates = not kernels or ("dense" in kernels and sharded_kernel(constraint) == "fused")
    return tuple(kind for kind in kinds if replicates or kind not in REPLICAS)


def sharded_kernel(constraint: ParameterConstraints) -> str:
    """Compute kernel of a sharded table: the first in compute_kernels that is not dense; fused if there is none."""
    return next((k for k in constraint.compute_kernels or () if k != "dense"), "fused")


def apply_constraints_to_tables(
    tables: tuple[Table, ...], constraints: ByName, topology: Topology
) -> tuple[Table, ...]:
    """Tables with the lookup weights and the memory tiers that TorchRec's constraints state."""
    changed = []
    for table in tables:
        if c := constraints.get(table.name):
            table = replace(table, weighted=table.weighted or c.is_weighted)
            # Kernels with rows below device memory name the tier and whether a cache is used.
            tier, has_cache = KERNELS.get(sharded_kernel(c), ("", False))
            if topology.memory_of(tier):
                share = _cached_share(table, c, tier) if has_cache else 0.0
                table = replace(table, load_factor=share, tier=tier)
        changed.append(table)
    return tuple(changed)


def _cached_share(table: Table, constraint: ParameterConstraints, tier: str) -> float:
    """Share of a table's rows that its cache holds."""
    # None is "not given"; 0 would be a value.
    given = getattr(constraint.cache_params, "load_factor", None)
    if TIERS[tier].shares_cache:
        return CACHED if given is None else given
    mib = getattr(constraint.key_value_params, "max_l1_cache_size", None)
    most = TIERS[tier].most_cached
    return most if mib is None else min(most, mib * MIB / table.bytes)


# --- the plan's sharding types ------------------------------------------------------------------------------


def rewrite_to_allowed_types(plan: ShardingPlan, constraints: ByName, model_tables: Tables) -> list[str]:
    """Rewrite the plan's sharding types in place, so that each whole table has a type that its constraints allow.

    Other tables of a collection that may be written as cut join those that must be: they run as one op.

    Returns a line for each collection whose sharding_types make one op more than is priced.
    """
    lines = []
    for path in dict.fromkeys(t.path for t in model_tables.values() if t.pooled and not t.replica):
        allowed = {
            t.name: constraints[key].sharding_types if key in constraints else None
            for key, t in model_tables.items()
            if t.path == path
        }
        shardings = shardings_by_module(plan)[path]
        sharding_kinds = {name: BY_TYPE[shardings[name].sharding_type][0] for name in allowed}
        # Types of cut tables that some table of the collection has to have.
        as_cut = {
            sharding_kinds[name].torchrec_type(cut=True)
            for name, types in allowed.items()
            if shardings[name].sharding_type == sharding_kinds[name].torchrec_type(cut=True)
            or (types and shardings[name].sharding_type not in types)
        }
        for name, types in allowed.items():
            # A table joins the cut type where its own constraints allow that.
            whole, cut = (
                sharding_kinds[name].torchrec_type(cut=False),
                sharding_kinds[name].torchrec_type(cut=True),
            )
            written = cut if cut in as_cut and (not types or cut in types) else shardings[name].sharding_type
            if types and written not in types:
                written = whole
            shardings[name] = replace(shardings[name], sharding_type=written)
        # Both types in one collection are two ops in TorchRec.
        written_types = {shardings[name].sharding_type for name in allowed}
        lines += [
            f"module {path!r} runs {sharding_kind.torchrec_type(cut=False)} and "
            f"{sharding_kind.torchrec_type(cut=True)} tables, for their sharding_types allow no single one; "
            "they are priced as one op"
            for sharding_kind in SHARDING_KINDS.values()
            if sharding_kind in sharding_kinds.values()
            and sharding_kind.cuts_columns
            and {sharding_kind.torchrec_type(cut=False), sharding_kind.torchrec_type(cut=True)}
            <= written_types
        ]
    return lines


def kinds_without_variable_batches() -> set[str]:
    """Kinds of sharding that the installed TorchRec does not run with variable batches (VBE): those that become
    grid_shard where they cut columns, before TorchRec 1.9.
    """
    from torchrec.distributed.sharding.grid_sharding import BaseGridEmbeddingSharding

    # The method by which 1.9 puts outputs of variable batches in order.
    runs_them = "uncombined_embedding_dims" in vars(BaseGridEmbeddingSharding)
    return {
        sharding_kind.name
        for sharding_kind in SHARDING_KINDS.values()
        if sharding_kind.divides_rows and sharding_kind.cuts_columns and not runs_them
    }


def require_no_grid_shard(plan: ShardingPlan) -> None:
    """Raise ShardCoreError for a table sharded by grid_shard, which TorchRec does not support with variable batches
    (VBE).
    """
    for path, module in shardings_by_module(plan).items():
        for name, sharding in module.items():
            sharding_kind = BY_TYPE[sharding.sharding_type][0]
            require(
                sharding.sharding_type != sharding_kind.torchrec_type(cut=True)
                or not (sharding_kind.divides_rows and sharding_kind.cuts_columns),
                f"table {name!r} of module {path!r} runs {sharding_kind.torchrec_type(cut=True)}, for its "
                "sharding_types allow no other, and its batches have sizes of their own (VBE), which TorchRec's "
                f"{sharding_kind.torchrec_type(cut=True)} does not take: allow another type",
            )


def kernel_settings_plan(constraints: ByName, model_tables: Tables) -> ShardingPlan:
    """ShardingPlan that has only the kernels and kernel settings of ParameterConstraints, without placements."""
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

    modules: dict[str, EmbeddingModuleShardingPlan] = defaultdict(EmbeddingModuleShardingPlan)
    # Placement is left empty: only the kernel and its settings matter here.
    for key, c in constraints.items():
        modules[model_tables[key].path][model_tables[key].name] = ParameterSharding(
            "",
            sharded_kernel(c),
            cache_params=c.cache_params,
            enforce_hbm=c.enforce_hbm,
            stochastic_rounding=c.stochastic_rounding,
            bounds_check_mode=c.bounds_check_mode,
            output_dtype=c.output_dtype,
            key_value_params=c.key_value_params,
        )
    return ShardingPlan({**modules})
