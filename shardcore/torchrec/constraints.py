"""TorchRec's ParameterConstraints as constraints and tables of ours, table by table.

They go by a table's name in its collection, `theirs` by ours.
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
from shardcore.core.types import Placement, Plan, Table
from shardcore.core.validation import require_type, shown
from shardcore.step.kinds import LAYOUTS, WHOLE_ROWS, layout_of, layout_of_torchrec
from shardcore.torchrec import fields
from shardcore.torchrec.modules import ModelTable
from shardcore.torchrec.sharding_plan import sharded

if TYPE_CHECKING:
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.types import ShardingPlan

    Asked = Mapping[str, ParameterConstraints]
    Tables = Mapping[str, ModelTable]

REPLICAS = tuple(layout.name for layout in LAYOUTS.values() if layout.dense_gradient)
"""Kinds that run the dense kernel."""
KERNELS = {
    kernel: (tier, has_cache)
    for tier in BELOW
    for kernel, has_cache in ((TIERS[tier].kernel, False), (TIERS[tier].cached_kernel, True))
    if kernel
}
"""Kernels with rows below device memory: the tier that has all, and whether a cache has some."""
CACHED = 0.2
"""Share of rows in a cache where nobody says. TorchRec's and FBGEMM's default."""
NO_KERNELS = {"quant": "runs inference", "virtual": "has no rows to place before its ids come"}
"""Kernels that no plan has, by a part of their names, and why."""


def require_constraints(asked: Asked | None) -> None:
    """Raise ShardCoreError for constraints that are none of TorchRec's, and for fields of another type."""
    from torchrec.distributed.planner import ParameterConstraints

    require_type(asked, (Mapping, NoneType), "constraints", "ParameterConstraints by table, or None")
    for name, c in (asked or {}).items():
        what = f"ParameterConstraints of table {shown(name)}"
        require_type(c, ParameterConstraints, f"constraints of table {shown(name)}", "ParameterConstraints")
        for field, kind, right in (
            ("sharding_types", str, "a list of sharding types, such as ['row_wise'], or None"),
            ("compute_kernels", str, "a list of kernels, such as ['fused'], or None"),
            ("pooling_factors", Real, "a list of numbers, one for each feature"),
        ):
            value = getattr(c, field)
            if not (
                (value is None and kind is str)
                or (
                    isinstance(value, Iterable)
                    and not isinstance(value, str)
                    and all(isinstance(v, kind) for v in value)
                )
            ):
                raise ShardCoreError(f"{what} has {field} {shown(value)}; it needs to be {right}")
        require_type(
            c.min_partition, (int, NoneType), f"{what}: min_partition", "a number of columns, or None"
        )


def require_possible(asked: Asked, theirs: Tables, compute_device: str) -> list[str]:
    """Effects of constraints that a price leaves out, a line each.

    Raises ShardCoreError for constraints that no plan of ours can keep, naming table, field and value.
    """
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel

    of_name, lines = {t.name: t for t in theirs.values()}, []
    kernels = {kernel.value for kernel in EmbeddingComputeKernel}
    for name, c in asked.items():
        what = f"ParameterConstraints of table {name!r}"
        if name not in of_name:
            raise ShardCoreError(
                f"constraints are for table {name!r}, which the model does not have; it has "
                f"{', '.join(map(repr, sorted(of_name)[:5]))}{', ...' * (len(of_name) > 5)}"
            )
        values = fields.values_of(c)
        if set(c.num_poolings or ()) == {1}:  # as if left out
            del values["num_poolings"]
        lines += fields.check(type(c), values, what)
        for kernel in c.compute_kernels or ():
            if kernel not in kernels:
                raise ShardCoreError(
                    f"{what} has compute kernel {kernel!r}; TorchRec's are {', '.join(sorted(kernels))}"
                )
            if why := next((why for part, why in NO_KERNELS.items() if part in kernel), None):
                raise ShardCoreError(
                    f"{what} has compute_kernels {c.compute_kernels}; {kernel} {why}: leave it out"
                )
        for of in c.sharding_types or ():
            if layout_of_torchrec(of) is None:
                known = [of for layout in LAYOUTS.values() for of in layout.torchrec]
                raise ShardCoreError(f"{what} has sharding type {of!r}; known are {', '.join(known)}")
        if not _asked_kinds(c):
            raise ShardCoreError(
                f"{what} has sharding_types {c.sharding_types} and compute_kernels "
                f"{c.compute_kernels}; 'dense' runs data_parallel tables, and no others"
            )
        if c.device_group not in (None, compute_device):
            raise ShardCoreError(
                f"{what} has device_group {c.device_group!r}; the topology's "
                f"compute_device is {compute_device!r}, and all tables of a plan live there"
            )
        features = of_name[name].config.feature_names
        if c.feature_names is not None and sorted(c.feature_names) != sorted(features):
            raise ShardCoreError(f"{what} has feature_names {c.feature_names}; the table's are {features}")
    return lines


def pooling_of(asked: Asked, theirs: Tables) -> dict[str | tuple[str, str], float]:
    """Lookups by feature and by (table, feature), an entry of pooling_factors each.

    TorchRec's default is one for every feature. It gives way to what another table of the feature states.
    """
    pooling: dict[str | tuple[str, str], float] = {}
    for key, table in theirs.items():
        found, features = asked.get(table.name), table.config.feature_names
        if found is None:
            raise ShardCoreError(
                f"table {table.name!r} has no constraints; it needs ParameterConstraints(pooling_factors=[mean "
                f"lookups per sample of {', '.join(features)}]), or give the planner `lookups`"
            )
        by_default = list(found.pooling_factors) == [1.0]
        factors = found.pooling_factors * len(features) if by_default else found.pooling_factors
        if len(factors) != len(features):
            raise ShardCoreError(
                f"table {table.name!r} has pooling_factors {factors} for its "
                f"{len(features)} features {', '.join(features)}; it needs one for each"
            )
        stated = dict(zip(features, factors, strict=True))
        own = {} if by_default else {(key, feature): factor for feature, factor in stated.items()}
        pooling = stated | pooling if by_default else pooling | stated | own
    return pooling


def default_pooling(asked: Asked, theirs: Tables) -> list[str]:
    """A line where tables have TorchRec's default of one lookup a sample, which nobody may have meant."""
    names = [t.name for t in theirs.values() if (c := asked.get(t.name)) and list(c.pooling_factors) == [1.0]]
    shown = ", ".join(map(repr, names[:5])) + ", ..." * (len(names) > 5)
    return (
        [
            f"tables {shown} are priced with one lookup a sample, for their pooling_factors are [1.0]; that "
            "is TorchRec's default too"
        ]
        if names
        else []
    )


def unused_pooling(asked: Asked, theirs: Tables) -> list[str]:
    """A line where tables state pooling_factors beside lookups, which count instead."""
    names = [t.name for t in theirs.values() if (c := asked.get(t.name)) and list(c.pooling_factors) != [1.0]]
    shown = ", ".join(map(repr, names[:5])) + ", ..." * (len(names) > 5)
    return [f"pooling_factors of tables {shown} are not used: the planner has lookups"] if names else []


# --- what the search may choose -----------------------------------------------------------------------------


_ALL_TYPES = tuple(t for layout in LAYOUTS.values() for t in layout.torchrec)
CUTS = {t for layout in LAYOUTS.values() if layout.cuts_columns for t in layout.torchrec[1:]}
"""TorchRec's sharding types that cut columns."""


def ours(asked: Asked, theirs: Tables, topology: Topology, compute_device: str) -> Constraints:
    """Constraints of a search: the kinds that may run each table, and the fewest columns of its shards."""
    kinds, widths = {}, {}
    for name, table in theirs.items():
        c = asked.get(table.name)
        found = c and _kinds_of(c, topology, f"ParameterConstraints of table {table.name!r}")
        if compute_device == "cpu" and not table.pooled:
            # The dense kernel pools there, so sequences have no replicas.
            found = tuple(kind for kind in found or LAYOUTS if kind not in REPLICAS) or found
        if found is not None:
            kinds[name] = found
        if c is None:
            continue
        types, dim = set(c.sharding_types or ()), table.config.embedding_dim
        if least := dim if types and not types & CUTS else c.min_partition:
            widths[name] = min(least, dim)
    return Constraints(kinds=tuple(kinds.items()), min_widths=tuple(widths.items()))


def _kinds_of(c: ParameterConstraints, topology: Topology, what: str) -> tuple[str, ...] | None:
    """Kinds that sharding_types and compute_kernels leave a table, of those on the topology. None: all.

    what: the constraints, for messages. Raises ShardCoreError if the topology has none of the kinds.
    """
    kinds = _asked_kinds(c)
    there = tuple(kind for kind in kinds if _is_on(kind, topology))
    if not there:
        able = [t for layout in LAYOUTS.values() if _is_on(layout.name, topology) for t in layout.torchrec]
        raise ShardCoreError(
            f"{what} has sharding_types {c.sharding_types}; with {len(topology)} devices in all and "
            f"{len(topology.on_hosts[0])} on a host ShardCore runs a table by {', '.join(able)}"
        )
    return None if set(kinds) == set(LAYOUTS) else there


def _asked_kinds(c: ParameterConstraints) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(layout_of_torchrec(t).name for t in c.sharding_types or _ALL_TYPES))
    kernels = set(c.compute_kernels or ())
    if kernels == {"dense"}:
        return tuple(kind for kind in kinds if kind in REPLICAS)
    # TorchRec replicates with its dense kernel alone.
    replicates = not kernels or ("dense" in kernels and kernel_of(c) == "fused")
    return tuple(kind for kind in kinds if replicates or kind not in REPLICAS)


def _is_on(kind: str, topology: Topology) -> bool:
    return bool(layout_of(kind).groups(topology)) and (len(topology) > 1 or kind == WHOLE_ROWS.name)


def kernel_of(c: ParameterConstraints) -> str:
    """Kernel of a table that is not replicated. Dense kernels are for replicas."""
    return next((k for k in c.compute_kernels or () if k != "dense"), "fused")


def uses_host_memory(asked: Asked) -> bool:
    return any(kernel_of(c) in KERNELS for c in asked.values())


def applied(tables: tuple[Table, ...], asked: Asked, theirs: Tables, topology: Topology) -> tuple[Table, ...]:
    """The tables with weights of lookups, and with rows in host memory if the topology gives that."""
    found = []
    for table in tables:
        if c := asked.get(theirs[table.name].name):
            table = replace(table, weighted=table.weighted or c.is_weighted)
            tier, has_cache = KERNELS.get(kernel_of(c), ("", False))
            if topology.memory_of(tier):
                given = getattr(c.cache_params, "load_factor", None)
                share = (CACHED if given is None else given) if has_cache else 0.0
                table = replace(table, load_factor=share, tier=tier)
        found.append(table)
    return tuple(found)


def broken(plan: Plan, asked: Asked, theirs: Tables, topology: Topology) -> dict[str, str]:
    """By table, the sharding type of the plan, where the table's sharding_types do not have it."""
    placed: dict[str, list[Placement]] = defaultdict(list)
    for p in plan.placements:
        placed[p.shard.table.name].append(p)
    found = {}
    for name, table in theirs.items():
        types = getattr(asked.get(table.name), "sharding_types", None)
        kind = sharded(placed[name], topology).sharding_type
        if types and kind not in types and _as_cut(kind) not in types:
            found[name] = kind
    return found


def _as_cut(sharding_type: str) -> str:
    """The type of a table that is cut by columns, into one part: so a whole one may be written."""
    layout = layout_of_torchrec(sharding_type)
    return layout.torchrec_cut if sharding_type == layout.torchrec_whole else sharding_type


def as_asked(plan: ShardingPlan, asked: Asked, theirs: Tables) -> list[str]:
    """Write whole tables under a type that they may have: as whole, or as cut into one part.

    Others of a collection that may be written as cut, too, join those that have to be: they run as one op.

    Returns a line for each collection where types that were asked for make an op more than is priced.
    """
    lines = []
    for path in dict.fromkeys(t.path for t in theirs.values() if t.pooled and not t.replica):
        allowed = {
            t.name: getattr(asked.get(t.name), "sharding_types", None)
            for t in theirs.values()
            if t.path == path
        }
        shardings = plan.plan[path]
        layouts = {name: layout_of_torchrec(shardings[name].sharding_type) for name in allowed}
        as_cut = {
            layouts[name].torchrec_cut
            for name, types in allowed.items()
            if shardings[name].sharding_type == layouts[name].torchrec_cut
            or (types and shardings[name].sharding_type not in types)
        }
        for name, types in allowed.items():
            whole, cut = layouts[name].torchrec_whole, layouts[name].torchrec_cut
            written = cut if cut in as_cut and (not types or cut in types) else shardings[name].sharding_type
            if types and written not in types:
                written = whole
            shardings[name] = replace(shardings[name], sharding_type=written)
        runs = {shardings[name].sharding_type for name in allowed}
        lines += [
            f"module {path!r} runs {layout.torchrec_whole} and {layout.torchrec_cut} tables, for their "
            "sharding_types allow no single one; they are priced as one op"
            for layout in LAYOUTS.values()
            if layout.cuts_columns and {layout.torchrec_whole, layout.torchrec_cut} <= runs
        ]
    return lines


def without(
    kinds: Mapping[str, tuple[str, ...]], refused: Mapping[str, str], asked: Asked, theirs: Tables
) -> dict[str, tuple[str, ...]]:
    """Kinds of tables, without those that ran as a type that was not asked for.

    Raises ShardCoreError if they leave a table none.
    """
    left = dict(kinds)
    for name, found in refused.items():
        left[name] = tuple(k for k in kinds[name] if found not in layout_of(k).torchrec)
        if not left[name]:
            types = asked[theirs[name].name].sharding_types
            raise ShardCoreError(
                f"the plan shards table {name!r} {found}; its constraints have "
                f"sharding_types {', '.join(types)}: allow it too"
            )
    return left


def require_no_grid(plan: ShardingPlan) -> None:
    """Raise ShardCoreError for a table that runs as grid_shard: TorchRec has it not for VBE."""
    for path, module in plan.plan.items():
        for name, sharding in module.items():
            if sharding.sharding_type == "grid_shard":
                raise ShardCoreError(
                    f"table {name!r} of module {path!r} runs grid_shard, for its "
                    "sharding_types allow no other, and its batches have sizes of their own "
                    "(VBE), which TorchRec's grid_shard does not take: allow another type"
                )


def settings_of(asked: Asked, theirs: Tables) -> ShardingPlan:
    """The constraints' kernel settings, in the form of a plan."""
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

    modules: dict[str, Any] = {}
    for table in theirs.values():
        if c := asked.get(table.name):
            modules.setdefault(table.path, EmbeddingModuleShardingPlan())[table.name] = ParameterSharding(
                "",
                kernel_of(c),
                cache_params=c.cache_params,
                enforce_hbm=c.enforce_hbm,
                stochastic_rounding=c.stochastic_rounding,
                bounds_check_mode=c.bounds_check_mode,
                output_dtype=c.output_dtype,
                key_value_params=c.key_value_params,
            )
    return ShardingPlan(modules)
