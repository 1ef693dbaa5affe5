"""Plans of TorchRec as placements of ours: each rank's shards, and their kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Topology
from shardcore.core.types import Placement, Shard, Table
from shardcore.core.validation import require
from shardcore.step.kinds import (
    SHARDING_KINDS,
    even_row_ranges,
    kind_of_torchrec_type,
    kind_on_one_device,
    kinds_on_all_devices,
    shards_by_device,
)


def placements_from_torchrec(
    shardings: Mapping[str, Any], tables: Mapping[str, Table], topology: Topology
) -> list[Placement]:
    """Placements equal to TorchRec's shardings of one collection's tables, before consolidation.

    shardings: ParameterSharding by the collection's names of tables, as in an EmbeddingModuleShardingPlan.
    tables: ours by these names.

    Raises ShardCoreError for a table that is not known or not in the plan, a rank that has no device, a
    sharding type that is no kind's, and shards that are not as the type has them.
    """
    if missing := sorted(set(tables) ^ set(shardings)):
        raise ShardCoreError(
            f"the plan has tables {sorted(shardings)[:5]}, of {sorted(tables)[:5]} "
            f"expected; differing are {missing[:5]}"
        )
    return [
        p
        for name, sharding in shardings.items()
        for p in _placements_of_table(sharding, tables[name], name, topology)
    ]


def _placements_of_table(sharding: Any, table: Table, name: str, topology: Topology) -> list[Placement]:
    of_columns = (
        Counter(s.shard_offsets[1] for s in sharding.sharding_spec.shards) if sharding.sharding_spec else {}
    )
    sharding_kind = kind_of_torchrec_type(
        sharding.sharding_type, topology, max(of_columns.values(), default=None)
    )
    if sharding_kind is None:
        raise ShardCoreError(
            f"the plan shards table {name!r} {sharding.sharding_type}; known are "
            f"{', '.join(dict.fromkeys(t for k in SHARDING_KINDS.values() for t in k.torchrec))}"
        )
    if sharding_kind.dense_gradient:  # TorchRec takes no account of ranks there
        kind = (sharding_kind if len(topology) > 1 else kind_on_one_device(table)).name
        return [Placement(kind, Shard.whole(table), topology.ranks)]
    if sharding.sharding_spec is None:
        raise ShardCoreError(
            f"the plan shards table {name!r} {sharding.sharding_type} without a sharding_spec; it needs one"
        )
    # Ranges of rows by column range: all ranks with the same columns divide one shard.
    by_columns: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    # Ranks that get no rows count: a table may have fewer rows than there are ranks.
    shards = Counter((s.shard_offsets[1], s.shard_sizes[1]) for s in sharding.sharding_spec.shards)
    has_groups_of_one = any(len(group) == 1 for group in sharding_kind.possible_groups(topology))
    for (low, width), n in shards.items():
        require(
            not sharding_kind.divides_rows or n != 1 or has_groups_of_one,
            f"the plan has columns {low} to {low + width} of table {name!r} in one "
            f"shard; TorchRec divides rows over ranks in {sharding.sharding_type}",
        )
    for shard in sharding.sharding_spec.shards:
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        if rows and columns:
            rank = shard.placement.rank()
            require(
                0 <= rank < len(topology.ranks),
                f"the plan puts table {name!r} on rank {rank}; there are ranks 0 to {len(topology.ranks) - 1}",
            )
            ranges = by_columns.setdefault((column, column + columns), {})
            ranges[topology.ranks[rank]] = (row, row + rows)
    placements = []
    for (low, high), ranges in by_columns.items():
        if len(ranges) == 1:  # as on the only host, or device
            sharding_kind = kind_on_one_device(table)
        elif tuple(ranges) == topology.ranks and sharding_kind.divides_rows:
            sharding_kind = next(k for k in kinds_on_all_devices(topology) if k.divides_rows)
        placement = Placement(sharding_kind.name, Shard(table, 0, table.rows, low, high), tuple(ranges))
        # TorchRec finds a row's rank by division, so uneven ranges would look up wrong rows.
        is_even = not sharding_kind.divides_rows or even_row_ranges(table.rows, len(ranges)) is not None
        expected = {d: (s.row_lo, s.row_hi) for d, s in shards_by_device(placement)} if is_even else None
        require(
            ranges == expected,
            f"the plan has rows {list(ranges.values())[:4]} of table {name!r} on ranks; "
            f"TorchRec runs {sharding.sharding_type} with even ranges only",
        )
        placements.append(placement)
    return placements
