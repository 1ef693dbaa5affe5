"""Drawn groups of shards, each measured as one fused op: random groups, and groups of plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from shardcore.core.types import MIN_WIDTH, PRECISION_BYTES, Setting, Shard, Table
from shardcore.core.validation import MOST_BYTES, MOST_DIM, Record, Share, number_within, require
from shardcore.io.measurements import ComputeRequest
from shardcore.measure.sampling import placements
from shardcore.measure.sampling.problems import DEVICES, DIMS
from shardcore.step.access import output_bytes

REPLICATED_BYTES = 64 << 20
"""Larger tables are not worth replicating."""
_REFERENCE_SEED = 2**32 - 1
"""Reserved for the reference op."""
_REFERENCE_SHARDS = 8
_NARROW = 32
"""The widest shard of a narrow group, in columns."""


@dataclass(frozen=True)
class GroupConfig(Record):
    """Distribution from which groups of shards are drawn, to be measured as one fused op.

    max_shards: most shards of a group
    max_width: most columns of a shard
    max_shard_bytes: most bytes of a shard's weights.
    any_width: share of widths from all multiples of 4, log-uniform. Other widths are powers of two.
    row_ranges: share of shards that are a row range.
    one_sided: share of random groups with shards of at most 32 columns only, or with wider ones only. Kernels
        are chosen by the widest shard (see features.WIDTH_CLASSES).
    duplicates: share of shards that repeat a shard of the group.
    planned: share of groups that are a device's op in a plan.
    replicated: share of data-parallel groups, which have small tables and a local batch.
    smaller_batches: share of the other groups that run at a half, a quarter or an eighth of the batch. A
        model then holds for the batches between, too.
    sequences: share of groups whose lookups are not pooled, as in an EmbeddingCollection
    """

    max_shards: Annotated[int, number_within(1, 1 << 16)] = 30
    max_width: Annotated[int, number_within(MIN_WIDTH, MOST_DIM)] = 256
    max_shard_bytes: Annotated[int, number_within(4 * MIN_WIDTH, MOST_BYTES)] = 1 << 30
    any_width: Share = 0.25
    row_ranges: Share = 0.1
    one_sided: Share = 0.2
    duplicates: Share = 0.02
    planned: Share = 0.3
    replicated: Share = 0.1
    smaller_batches: Share = 0.2
    # Data-parallel groups have none. Such an op has one width.
    sequences: Annotated[Share, "SHARE"] = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.planned + self.replicated <= 1,
            f"group config has planned {self.planned} and replicated {self.replicated}; it needs shares that sum to 1 "
            "at most",
        )


def draw_compute_request(
    pool: Sequence[Table], index: int, setting: Setting, seed: int = 0, config: GroupConfig | None = None
) -> ComputeRequest:
    """Draw the group of shards number `index` to measure as one op: random, data-parallel, or a device's op of a
    plan."""
    config = config or GroupConfig()
    require(bool(pool), "the pool has no tables to draw from")
    rng = np.random.default_rng([1, seed, index])
    # One number decides between the three kinds of groups: their shares are exclusive.
    kind = rng.random()
    if kind > 1 - config.replicated:
        # Each device looks up a replica only for its share of the batch.
        batch = max(1, setting.batch // int(rng.choice(DEVICES)))
        most = min(config.max_shard_bytes, REPLICATED_BYTES)
        config = dataclasses.replace(config, row_ranges=0.0, max_shard_bytes=most)
        return ComputeRequest(_draw_random_group(pool, rng, setting, config), batch)
    shards = _draw_planned_group(pool, rng, setting, config) if kind < config.planned else ()
    if not shards:
        # Another stream, so that groups without a side are those of earlier versions.
        narrowest, widest = _draw_width_range(np.random.default_rng([8, seed, index]), config)
        shards = _draw_random_group(pool, rng, setting, config, narrowest, widest)
    smaller = int(rng.choice(DEVICES)) if rng.random() < config.smaller_batches else 1
    batch = max(1, setting.batch // smaller)
    # Another stream, so that all other groups are those of earlier versions.
    if np.random.default_rng([9, seed, index]).random() < config.sequences:
        shards = _to_sequences(shards, batch, config) or shards
    return ComputeRequest(shards, batch)


def _to_sequences(shards: Sequence[Shard], batch: int, config: GroupConfig) -> tuple[Shard, ...]:
    """Shards as unpooled sequences, those of the first shard's width; empty if all have too large outputs."""
    unpooled = [dataclasses.replace(s, table=dataclasses.replace(s.table, sequence=True)) for s in shards]
    small = [s for s in unpooled if output_bytes(s, batch) <= config.max_shard_bytes]
    # FBGEMM's op of sequences has one width.
    return tuple(s for s in small if s.width == small[0].width)


def reference_request(
    pool: Sequence[Table], setting: Setting, config: GroupConfig | None = None
) -> ComputeRequest:
    """The reference op of a pool, which runs throughout a measurement to show the machine's slowdown.

    It has typical shards of the pool, and is large enough to slow down as other ops do.
    """
    # A reserved seed, so that every dataset of a pool has the same reference.
    rng = np.random.default_rng([1, _REFERENCE_SEED])
    config = config or GroupConfig()
    chosen = rng.integers(len(pool), size=_REFERENCE_SHARDS).tolist()
    tables = [dataclasses.replace(pool[i], precision=setting.precision) for i in chosen]
    return ComputeRequest(tuple(_draw_shard(t, rng, config) for t in tables), setting.batch)


def _draw_planned_group(
    pool: Sequence[Table], rng: np.random.Generator, setting: Setting, config: GroupConfig
) -> tuple[Shard, ...]:
    """Draw the shards of one device in a plan, without shards that exceed the config; empty if none is left."""
    planned = placements.draw_planned_problem(pool, rng, setting)
    of_devices = placements.place_shards(*planned) if planned else None
    if not of_devices:
        return ()
    # Devices without shards run no op.
    ops = [shards for shards in of_devices if shards]
    chosen = ops[rng.integers(len(ops))]
    small = [s for s in chosen if s.bytes <= config.max_shard_bytes and s.width <= config.max_width]
    return tuple(small[: config.max_shards])


def _draw_width_range(rng: np.random.Generator, config: GroupConfig) -> tuple[int, int]:
    """Draw the smallest and largest number of columns for the shards of a random group."""
    whole = (MIN_WIDTH, config.max_width)
    if rng.random() >= config.one_sided or config.max_width <= _NARROW:
        return whole
    return (MIN_WIDTH, _NARROW) if rng.random() < 0.5 else (_NARROW + MIN_WIDTH, config.max_width)


def _draw_random_group(
    pool: Sequence[Table],
    rng: np.random.Generator,
    setting: Setting,
    config: GroupConfig,
    narrowest: int = MIN_WIDTH,
    widest: int = MOST_DIM,
) -> tuple[Shard, ...]:
    """Draw 1 to max_shards shards of the pool's tables, with replacement, at random widths.

    Three quarters of the groups have at most 15. NeuroShard draws groups so; here shards are also cut as a
    search cuts.
    """
    shards: list[Shard] = []
    most = min(15, config.max_shards) if rng.random() < 0.75 else config.max_shards
    for _ in range(rng.integers(1, most + 1)):
        if shards and rng.random() < config.duplicates:
            shards.append(shards[int(rng.integers(len(shards)))])
        else:
            table = dataclasses.replace(pool[int(rng.integers(len(pool)))], precision=setting.precision)
            shards.append(_draw_shard(table, rng, config, narrowest, widest))
    return tuple(shards)


def _draw_shard(
    table: Table,
    rng: np.random.Generator,
    config: GroupConfig,
    narrowest: int = MIN_WIDTH,
    most: int = MOST_DIM,
) -> Shard:
    """Draw a shard of a table, of `narrowest` to `most` columns; fewer for a large table."""
    element_bytes = PRECISION_BYTES[table.precision]
    lo, hi = 0, table.rows
    if rng.random() < config.row_ranges and table.rows >= 64:
        # Log-uniform: from 0.7 down to 1/16 of the rows.
        share = 2.0 ** -rng.uniform(0.5, 4)
        hi = max(1, int(table.rows * share))
        lo = int(rng.integers(0, table.rows - hi + 1))
        hi += lo
    # As wide as max_shard_bytes allows for these rows, in multiples of MIN_WIDTH.
    widest = config.max_shard_bytes // ((hi - lo) * element_bytes) // MIN_WIDTH * MIN_WIDTH
    widest = max(MIN_WIDTH, min(config.max_width, most, widest))
    # max_shard_bytes may leave a large table fewer columns than asked for.
    narrowest = min(narrowest, max(d for d in DIMS if d <= widest))
    # Log-uniform in blocks of MIN_WIDTH columns, as kernels move vectors of four.
    if rng.random() < config.any_width:
        blocks = narrowest / MIN_WIDTH * (widest / narrowest) ** rng.random()
        width = min(widest, round(blocks) * MIN_WIDTH)
    else:
        width = int(rng.choice([d for d in DIMS if narrowest <= d <= widest]))
    # Even at MIN_WIDTH, rows may exceed max_shard_bytes, so rows are cut.
    hi = min(hi, lo + max(1, config.max_shard_bytes // (width * element_bytes)))
    return Shard(dataclasses.replace(table, dim=width), lo, hi, 0, width)
