"""Drawn problems: tables of a pool at random dims, as in NeuroShard's benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.errors import ShardCoreError
from shardcore.limits import MOST_DEVICES, MOST_DIM, MOST_TABLES, require_within
from shardcore.memory import table_bytes
from shardcore.topology import Device, Topology
from shardcore.types import MIN_WIDTH, Problem, Setting, Table

DIMS = (4, 8, 16, 32, 64, 128)
"""Dims that NeuroShard gives each table of its pool."""
DEVICES = (2, 4, 8)
"""Numbers of devices in the plans that groups imitate. A local batch is the global batch divided by one of
these."""


_MOST_SLACK = 1e6


@dataclass(frozen=True)
class ProblemConfig:
    """Which problems are drawn.

    devices: number of equal devices.
    min_tables: fewest tables.
    max_tables: most tables.
    max_dim: largest dim of a table.
    slack: memory of all devices over the tables' needs.
    """

    devices: int = 4
    min_tables: int = 10
    max_tables: int = 60
    max_dim: int = 128
    slack: float = 1.5

    def __post_init__(self) -> None:
        require_within(self, "problem config", devices=(1, MOST_DEVICES), min_tables=(1, MOST_TABLES),
                       max_tables=(self.min_tables, MOST_TABLES), max_dim=(MIN_WIDTH, MOST_DIM),
                       slack=(1, _MOST_SLACK))


def draw_problem(pool: Sequence[Table], index: int, setting: Setting, seed: int = 0,
            config: ProblemConfig | None = None) -> Problem:
    """Problem `index` of a setting: tables of the pool without replacement, each at a random dim of DIMS."""
    config = config or ProblemConfig()
    # Tables without lookups take no time.
    live = [t for t in pool if t.pooling > 0]
    if len(live) < config.min_tables:
        raise ShardCoreError(f"the pool has {len(live)} tables with lookups; a problem needs at least "
                             f"{config.min_tables}")
    rng = np.random.default_rng([3, seed, index])
    n = min(int(rng.integers(config.min_tables, config.max_tables + 1)), len(live))
    dims = [d for d in DIMS if d <= config.max_dim]
    tables = tuple(dataclasses.replace(live[i], dim=int(rng.choice(dims)), precision=setting.precision)
                   for i in rng.choice(len(live), n, replace=False))
    need = sum(table_bytes(t, setting.batch, setting.optimizer) for t in tables)
    # A problem must have a solution: every table fits a device at its narrowest.
    narrowest = max(table_bytes(t, setting.batch, setting.optimizer, MIN_WIDTH) for t in tables)
    device = Device(max(int(need * config.slack / config.devices), narrowest))
    topology = Topology((device,) * config.devices)
    return Problem(f"pool-{seed}-{index:02d}", tables, topology, setting.batch, setting.optimizer)
