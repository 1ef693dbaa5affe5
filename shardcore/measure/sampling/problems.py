"""Drawn problems: tables of a pool at random dims, as in NeuroShard's benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import MIN_WIDTH, OUTPUT_BYTES, PRECISION_BYTES, Problem, Setting, Table
from shardcore.core.validation import MOST_DEVICES, MOST_DIM, MOST_TABLES, Record, number_within, require
from shardcore.step.memory import local_batch_bytes, table_peak_bytes

DIMS = (4, 8, 16, 32, 64, 128)
"""Dims that NeuroShard gives each table of its pool."""
DEVICES = (2, 4, 8)
"""Numbers of devices in the plans that groups imitate. A local batch is the global batch over one of these."""


@dataclass(frozen=True)
class ProblemConfig(Record):
    """Distribution from which problems are drawn, to measure groups of their plans.

    devices: number of equal devices.
    min_tables: fewest tables.
    max_tables: most tables.
    max_dim: largest dim of a table.
    slack: memory of all devices over the bytes of all tables.
    """

    devices: Annotated[int, number_within(1, MOST_DEVICES)] = 4
    min_tables: Annotated[int, number_within(1, MOST_TABLES)] = 10
    max_tables: Annotated[int, number_within(1, MOST_TABLES)] = 60
    max_dim: Annotated[int, number_within(MIN_WIDTH, MOST_DIM)] = 128
    slack: Annotated[float, number_within(1, 1e6)] = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.min_tables <= self.max_tables,
            f"{self.noun} has max_tables {self.max_tables}; it needs its min_tables, {self.min_tables}, or more",
        )


def draw_problem(
    pool: Sequence[Table],
    index: int,
    setting: Setting,
    seed: int = 0,
    config: ProblemConfig | None = None,
    bytes_of: Callable[[Table, Problem, int], int] = table_peak_bytes,
) -> Problem:
    """Draw problem number `index` of a setting: tables of the pool without replacement, each at a random dim.

    bytes_of: bytes of a table's columns (see `with_sized_devices`), if not those of a plan with its local batch.
    """
    config = config or ProblemConfig()
    # Tables without lookups take no time, so placing them is no problem.
    live = [t for t in pool if t.pooling > 0]
    if len(live) < config.min_tables:
        raise ShardCoreError(
            f"the pool has {len(live)} tables with lookups; a problem needs at least {config.min_tables}"
        )
    rng = np.random.default_rng([3, seed, index])
    n = min(int(rng.integers(config.min_tables, config.max_tables + 1)), len(live))
    dims = [d for d in DIMS if d <= config.max_dim]
    tables = tuple(
        dataclasses.replace(live[i], dim=int(rng.choice(dims)), precision=setting.precision)
        for i in rng.choice(len(live), n, replace=False)
    )
    # Devices of one byte for now: their memory follows from the tables (`with_sized_devices`).
    topology = Topology((Device(1),) * config.devices)
    drawn = Problem(f"pool-{seed}-{index:02d}", tables, topology, setting.batch, setting.optimizer)
    return with_sized_devices(
        drawn, config.slack, bytes_of, local_batch_bytes(drawn) if bytes_of is table_peak_bytes else 0
    )


def with_sized_devices(
    drawn: Problem, slack: float, bytes_of: Callable[[Table, Problem, int], int], more: int = 0
) -> Problem:
    """The problem on equal devices that together have `slack` times the bytes of its tables.

    bytes_of: bytes of a table's columns. Draws of samples and of problems count them differently.
    more: further bytes of each device.
    """
    need = sum(bytes_of(t, drawn, t.dim) for t in drawn.tables)
    # A problem must have a solution, so each device has room for any table's narrowest shard.
    narrowest = max(bytes_of(t, drawn, MIN_WIDTH) for t in drawn.tables)
    device = Device(max(int(need * slack / len(drawn.topology)), narrowest) + more)
    return dataclasses.replace(drawn, topology=Topology((device,) * len(drawn.topology)))


def sample_table_bytes(table: Table, drawn: Problem, width: int) -> int:
    """Bytes of a table's columns as drawn samples count them: weights, optimizer state, outputs and their gradients.

    Plans count memory more exactly by now. Draws do not, so that the wanted samples stay as they were.
    """
    state = {"rowwise_adagrad": 4}.get(drawn.optimizer, 0)
    row_bytes = width * PRECISION_BYTES[table.precision] + state
    return table.rows * row_bytes + 2 * drawn.global_batch * width * OUTPUT_BYTES
