"""Seeded draws: groups of shards and communication loads to measure, and problems to evaluate on.

Draw i depends on (seed, i) alone, so asking for more keeps those that were drawn before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.memory import shard_bytes
from shardcore.types import (
    MIN_WIDTH,
    PRECISION_BYTES,
    CommRequest,
    ComputeRequest,
    Device,
    Problem,
    Setting,
    Shard,
    ShardCoreError,
    Table,
    Topology,
)

CONTROL_SEED = 2**32 - 1
"""Kept for the control sample."""

DIMS = (4, 8, 16, 32, 64, 128)
"""Dims that NeuroShard gives each table of its pool."""


@dataclass(frozen=True)
class GroupConfig:
    """Groups of shards. max_shards in one op; max_width of a shard, in columns; max_shard_bytes of a shard's weights;
    any_width: the share of widths drawn from all multiples of 4 rather than the powers of two; row_ranges: the share of shards
    that are a row range; duplicates: the share of shards that are a second copy of one in the group."""

    max_shards: int = 30
    max_width: int = 128
    max_shard_bytes: int = 1 << 30
    any_width: float = 0.25
    row_ranges: float = 0.1
    duplicates: float = 0.02

    def __post_init__(self) -> None:
        if self.max_shards < 1 or self.max_width < MIN_WIDTH or self.max_shard_bytes < 4 * MIN_WIDTH:
            raise ShardCoreError(f"group config {self} needs max_shards of at least 1, max_width of at least {MIN_WIDTH}, and "
                                 f"max_shard_bytes of at least {4 * MIN_WIDTH}")


def compute_request(pool: Sequence[Table], index: int, setting: Setting, seed: int = 0,
                    config: GroupConfig | None = None) -> ComputeRequest:
    """Group `index` of a setting: 1 to max_shards shards, with replacement, of the pool's tables at random widths (NeuroShard's
    draw, widened to the shards that a search makes)."""
    config = config or GroupConfig()
    if not pool:
        raise ShardCoreError("the pool has no tables to draw from")
    rng = np.random.default_rng([1, seed, index])
    shards: list[Shard] = []
    for _ in range(rng.integers(1, config.max_shards + 1)):
        if shards and rng.random() < config.duplicates:
            shards.append(shards[rng.integers(len(shards))])
        else:
            table = dataclasses.replace(pool[rng.integers(len(pool))], precision=setting.precision)
            shards.append(_shard(table, rng, config))
    return ComputeRequest(tuple(shards), setting.batch)


def control_request(pool: Sequence[Table], setting: Setting, config: GroupConfig | None = None) -> ComputeRequest:
    """The group that is measured again and again, so that drift shows: the same for every seed."""
    return compute_request(pool, 0, setting, CONTROL_SEED, config)


def _shard(table: Table, rng: np.random.Generator, config: GroupConfig) -> Shard:
    lo, hi = 0, table.rows
    if rng.random() < config.row_ranges and table.rows >= 64:
        share = 2.0 ** -rng.uniform(0.5, 4)
        hi = max(1, int(table.rows * share))
        lo = int(rng.integers(0, table.rows - hi + 1))
        hi += lo
    widest = config.max_shard_bytes // ((hi - lo) * PRECISION_BYTES[table.precision]) // MIN_WIDTH * MIN_WIDTH
    widest = max(MIN_WIDTH, min(config.max_width, widest))
    if rng.random() < config.any_width:
        width = int(rng.integers(1, widest // MIN_WIDTH + 1)) * MIN_WIDTH
    else:
        width = int(rng.choice([d for d in DIMS if d <= widest]))
    hi = min(hi, lo + max(1, config.max_shard_bytes // (width * PRECISION_BYTES[table.precision])))
    return Shard(dataclasses.replace(table, dim=width), lo, hi, 0, width)


def comm_request(index: int, ranks: int, batch: int, seed: int = 0, max_start_ms: float = 20.0) -> CommRequest:
    """Exchange `index`: random dims placed at random with probability p, else on the least loaded rank, p uniform, so that the
    balance varies (NeuroShard); every other one has start skews up to max_start_ms."""
    rng = np.random.default_rng([2, seed, index, ranks])
    p, widths = rng.random(), [0] * ranks
    for _ in range(rng.integers(ranks, 30 * ranks + 1)):
        rank = int(rng.integers(ranks)) if rng.random() < p else int(np.argmin(widths))
        widths[rank] += int(rng.choice(DIMS))
    starts = rng.uniform(0, max_start_ms, ranks) * (index % 2)
    starts -= starts.min()
    return CommRequest(tuple(widths), batch, tuple(round(float(s), 3) for s in starts))


@dataclass(frozen=True)
class ProblemConfig:
    """Problems as in NeuroShard's benchmark: min_tables to max_tables at dims up to max_dim on `devices` devices. slack:
    memory of all devices over what the tables need."""

    devices: int = 4
    min_tables: int = 10
    max_tables: int = 60
    max_dim: int = 128
    slack: float = 1.5

    def __post_init__(self) -> None:
        if not (self.devices >= 1 and 1 <= self.min_tables <= self.max_tables and self.max_dim >= MIN_WIDTH and self.slack >= 1):
            raise ShardCoreError(f"problem config {self} needs devices of at least 1, 1 <= min_tables <= max_tables, max_dim of "
                                 f"at least {MIN_WIDTH}, and slack of at least 1")


def problem(pool: Sequence[Table], index: int, setting: Setting, seed: int = 0, config: ProblemConfig | None = None) -> Problem:
    """Problem `index` of a setting: tables of the pool without replacement, each at a random dim of DIMS."""
    config = config or ProblemConfig()
    live = [t for t in pool if t.pooling > 0]
    if len(live) < config.min_tables:
        raise ShardCoreError(f"the pool has {len(live)} tables with lookups; a problem needs at least {config.min_tables}")
    rng = np.random.default_rng([3, seed, index])
    n = min(int(rng.integers(config.min_tables, config.max_tables + 1)), len(live))
    dims = [d for d in DIMS if d <= config.max_dim]
    tables = tuple(dataclasses.replace(live[i], dim=int(rng.choice(dims)), precision=setting.precision)
                   for i in rng.choice(len(live), n, replace=False))
    need = sum(shard_bytes(Shard.whole(t), setting.batch, setting.optimizer) for t in tables)
    one_column = max(shard_bytes(Shard(t, 0, t.rows, 0, MIN_WIDTH), setting.batch, setting.optimizer) for t in tables)
    topology = Topology((Device(max(int(need * config.slack / config.devices), one_column)),) * config.devices)
    return Problem(f"pool-{seed}-{index:02d}", tables, topology, setting.batch, setting.optimizer)
