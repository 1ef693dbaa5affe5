"""What TorchRec's ParameterConstraints ask of a plan of ours, table by table.

They go by a table's name in its collection, `theirs` by ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardcore.errors import ShardCoreError
from shardcore.export.torchrec import sharded
from shardcore.export.torchrec_modules import ModelTable
from shardcore.layouts import LAYOUTS, WHOLE_ROWS, layout_of_torchrec, ways
from shardcore.topology import Topology
from shardcore.types import Placement, Plan

if TYPE_CHECKING:
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.types import ShardingPlan

    Asked = Mapping[str, ParameterConstraints]
    Tables = Mapping[str, ModelTable]

WHOLE_TYPES = {layout.torchrec_whole for layout in LAYOUTS.values() if not layout.divides_rows}
"""TorchRec's sharding types that do not cut a table."""


def require_possible(asked: Asked, theirs: Tables) -> None:
    """Raise ShardCoreError for constraints that no plan of ours can keep.

    That is of tables that the model lacks, of types and kernels that TorchRec lacks, and of batches that
    differ by feature.
    """
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel

    names, kernels = {t.name for t in theirs.values()}, {kernel.value for kernel in EmbeddingComputeKernel}
    for name, c in asked.items():
        if name not in names:
            raise ShardCoreError(f"constraints are for table {name!r}, which the model does not have; it has "
                                 f"{', '.join(map(repr, sorted(names)[:5]))}{', ...' * (len(names) > 5)}")
        for kernel in c.compute_kernels or ():
            if kernel not in kernels:
                raise ShardCoreError(f"constraints of table {name!r} have compute kernel {kernel!r}; "
                                     f"TorchRec's are {', '.join(sorted(kernels))}")
        for of in c.sharding_types or ():
            if layout_of_torchrec(of) is None:
                known = [of for layout in LAYOUTS.values() for of in layout.torchrec]
                raise ShardCoreError(f"constraints of table {name!r} have sharding type {of!r}; known are "
                                     f"{', '.join(known)}")
        if c.batch_sizes:
            raise ShardCoreError(f"constraints of table {name!r} have batch_sizes {c.batch_sizes}; ShardCore "
                                 "prices one batch for all features, so leave them out")


def pooling_of(asked: Asked, theirs: Tables) -> dict[str, float]:
    """Lookups by feature. A single factor holds for every feature of its table.

    Of a feature of several tables, TorchRec's default of one gives way to what another table states.
    """
    pooling: dict[str, float] = {}
    for table in theirs.values():
        found, features = asked.get(table.name), table.config.feature_names
        if found is None:
            raise ShardCoreError(f"table {table.name!r} has no constraints; it needs "
                                 f"ParameterConstraints(pooling_factors=[mean lookups per sample of "
                                 f"{', '.join(features)}]), or give the planner `lookups`")
        factors = (found.pooling_factors * len(features) if len(found.pooling_factors) == 1
                   else found.pooling_factors)
        if len(factors) != len(features):
            raise ShardCoreError(f"table {table.name!r} has {len(factors)} pooling_factors for its "
                                 f"{len(features)} features")
        stated = dict(zip(features, factors, strict=True))
        pooling = stated | pooling if list(found.pooling_factors) == [1.0] else pooling | stated
    return pooling


def default_pooling(asked: Asked, theirs: Tables) -> list[str]:
    """A line where tables have TorchRec's default of one lookup a sample, which nobody may have meant."""
    names = [t.name for t in theirs.values() if (c := asked.get(t.name)) and list(c.pooling_factors) == [1.0]]
    shown = ", ".join(map(repr, names[:5])) + ", ..." * (len(names) > 5)
    return [f"tables {shown} are priced with one lookup a sample, for their pooling_factors are [1.0]; that "
            "is TorchRec's default too"] if names else []


def whole(asked: Asked, theirs: Tables) -> tuple[str, ...]:
    """Tables, by our names, that no sharding type asked for cuts."""
    return tuple(name for name, t in theirs.items() if (types := types_of(asked, t))
                 and set(types) <= WHOLE_TYPES)


def kinds(asked: Asked, theirs: Tables, topology: Topology) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Tables whose sharding types all are of one kind that is on all devices, and that kind."""
    for name, table in theirs.items():
        of = {layout_of_torchrec(t) for t in types_of(asked, table) or ()}
        if len(of) == 1 and (layout := of.pop()) in ways(topology):
            yield name, (layout.name,)


def types_of(asked: Asked, table: ModelTable) -> list[str] | None:
    found = asked.get(table.name)
    return found.sharding_types if found else None


def too_narrow(plan: Plan, asked: Asked, theirs: Tables) -> tuple[str, ...]:
    """Tables, by our names, that a plan cuts to fewer columns than their min_partition."""
    least = {name: c.min_partition or 0 for name, t in theirs.items() if (c := asked.get(t.name))}
    return tuple(dict.fromkeys(
        p.shard.table.name for p in plan.placements
        if p.shard.width < min(p.shard.table.dim, least.get(p.shard.table.name, 0))))


def kept_whole(names: Sequence[str], asked: Asked, theirs: Tables) -> str:
    """That tables, by our names, are not cut because of their min_partition, and what would be right."""
    shown = ", ".join(f"{name!r} ({asked[theirs[name].name].min_partition})" for name in names[:5])
    return (f"tables {shown}{', ...' * (len(names) > 5)} were kept whole, for a cut was narrower than their "
            "min_partition (a smaller one allows more plans)")


def broken(plan: Plan, asked: Asked, theirs: Tables, topology: Topology) -> str:
    """Why the plan breaks a sharding_types constraint. "": it breaks none."""
    placed: dict[str, list[Placement]] = defaultdict(list)
    for p in plan.placements:
        placed[p.shard.table.name].append(p)
    for name, table in theirs.items():
        types, kind = types_of(asked, table), sharded(placed[name], topology).sharding_type
        # Whoever allows cuts by columns takes a whole table too.
        taken = kind == WHOLE_ROWS.torchrec_whole and WHOLE_ROWS.torchrec_cut
        if types and kind not in types and taken not in types:
            return (f"the plan found shards table {name!r} {kind}; its constraints ask for "
                    f"{', '.join(types)}: allow it, or only {WHOLE_ROWS.torchrec_whole} to keep it whole")
    return ""


def settings_of(asked: Asked, theirs: Tables) -> ShardingPlan:
    """The constraints' kernel settings, in the form of a plan."""
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

    modules: dict[str, Any] = {}
    for table in theirs.values():
        if c := asked.get(table.name):
            # Dense kernels are for replicas, which to_torchrec chooses itself.
            kernel = next((k for k in c.compute_kernels or () if k != "dense"), "fused")
            modules.setdefault(table.path, EmbeddingModuleShardingPlan())[table.name] = ParameterSharding(
                "", kernel, cache_params=c.cache_params, enforce_hbm=c.enforce_hbm,
                stochastic_rounding=c.stochastic_rounding,
                bounds_check_mode=c.bounds_check_mode, output_dtype=c.output_dtype,
                key_value_params=c.key_value_params)
    return ShardingPlan(modules)
