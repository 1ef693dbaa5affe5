"""Drawn steps: problems with random plans, each replayed as a step of training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from shardcore.core.topology import Device, Topology
from shardcore.core.types import MIN_WIDTH, PRECISION_BYTES, Placement, Plan, Problem, Setting, Shard, Table
from shardcore.core.validation import MOST_BYTES, require
from shardcore.measure.sampling.placements import cut_columns
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.step.kinds import (
    WHOLE_ROWS,
    ShardingKind,
    even_row_share,
    kind_on_one_device,
    kinds_on_all_devices,
)

_SHARED = ((False, False), (True, False), (False, True), (False, False), (True, False), (True, True))
"""Plans of a problem: True if some tables have divided rows, and if some are replicated. Others are cut by columns."""
_STEP_SEED = 2**32 - 3
"""Reserved for problems whose steps are replayed."""
_STEP_TABLES = (8, 24)
"""Fewest and most tables of a step."""
_STEP_DIMS = (16, 32, 64, 128)
_COPIED_BYTES = 4 << 20
"""Larger tables are not replicated in a step. Their gradients would hide the time of a small exchange."""
_DIVIDED = 0.4
"""Share of a step's tables that are divided by rows, in plans with divided rows."""

Plans = list[tuple[str, Plan]]
"""Plans of a problem, each with the names of the kinds of its tables."""


def draw_plans_of_measured_steps(
    pool: Sequence[Table], n: int, setting: Setting, devices: int, max_table_bytes: int, seed: int = 0
) -> list[tuple[Problem, Plans]]:
    """Draw the first n plans whose steps are measured, by problem."""
    problems: list[tuple[Problem, Plans]] = []
    while (missing := n - sum(len(plans) for _, plans in problems)) > 0:
        drawn, plans = draw_step_plans(pool, len(problems), setting, devices, max_table_bytes, seed)
        problems.append((drawn, plans[:missing]))
    return problems


def draw_step_plans(
    pool: Sequence[Table], index: int, setting: Setting, devices: int, max_table_bytes: int, seed: int = 0
) -> tuple[Problem, Plans]:
    """Draw problem number `index` whose steps are measured, with its random plans.

    Plans are random, so loads are uneven, and every collective runs with many bytes and with few. A problem
    without tables small enough to replicate has fewer plans. `devices` must divide the batch.

    Raises ShardCoreError if no table of the pool has lookups and fits max_table_bytes.
    """
    rng = np.random.default_rng([4, seed, index])
    # Tables that fit, by dim. Fewer do at larger ones.
    fitting = {dim: fitting_tables(pool, setting, max_table_bytes, dim) for dim in (MIN_WIDTH, *_STEP_DIMS)}
    require(
        bool(fitting[MIN_WIDTH]),
        f"none of the pool's {len(pool)} tables has lookups and fits {max_table_bytes >> 20} MiB at a dim of "
        f"{MIN_WIDTH}: no step can be replayed; give more memory, or ask for no steps",
    )
    enough = min(_STEP_TABLES[0], len(fitting[MIN_WIDTH]))
    # Wide tables are large: only dims at which enough tables fit are drawn.
    max_dim = int(rng.choice([dim for dim in _STEP_DIMS if len(fitting[dim]) >= enough] or [MIN_WIDTH]))
    fewest, most = (min(n, len(fitting[max_dim])) for n in _STEP_TABLES)
    shape = ProblemConfig(devices, fewest, most, max_dim)
    drawn = draw_problem(fitting[max_dim], int(rng.integers(1 << 31)), setting, _STEP_SEED, shape)
    # Any random plan must fit: these steps measure time, not memory.
    room = Device(MOST_BYTES)
    drawn = dataclasses.replace(drawn, name=f"steps-{seed}-{index:02}", topology=Topology((room,) * devices))
    return drawn, draw_random_plans(drawn, rng)


def draw_random_plans(drawn: Problem, rng: np.random.Generator) -> Plans:
    """Draw random plans of a problem, with several kinds of sharding each. Devices need room for any plan."""
    small = [t for t in drawn.tables if t.bytes <= _COPIED_BYTES]
    dividing, replicating = _shared_kinds(drawn.topology)
    plans = []
    for divides, replicates in _SHARED:
        # Without small tables nothing can be replicated.
        if small or not replicates:
            kinds = [dividing] * divides + [replicating] * replicates
            names = ", ".join(kind.name for kind in (WHOLE_ROWS, *kinds))
            plans.append((names, _draw_step_plan(drawn, kinds, small, rng)))
    return plans


def _shared_kinds(topology: Topology) -> tuple[ShardingKind, ShardingKind]:
    """The topology's first kind of sharding that divides rows, and its first that replicates tables."""
    dividing, replicating = (
        # On one device no kind divides rows or replicates, and WHOLE_ROWS stands in.
        next((k for k in kinds_on_all_devices(topology) if k.divides_rows == divides), WHOLE_ROWS)
        for divides in (True, False)
    )
    return dividing, replicating


def fitting_tables(
    pool: Sequence[Table], setting: Setting, max_table_bytes: int, dim: int = MIN_WIDTH
) -> list[Table]:
    """Tables of the pool that have lookups and are small enough, at some dim, for measured steps."""
    row_bytes = dim * PRECISION_BYTES[setting.precision]
    return [t for t in pool if t.pooling > 0 and t.rows * row_bytes <= max_table_bytes]


def _draw_step_plan(
    drawn: Problem, sharing: Sequence[ShardingKind], small: Sequence[Table], rng: np.random.Generator
) -> Plan:
    """Draw a random plan: some tables are sharded by the kinds in `sharing`, the others cut by columns.

    small: tables of which up to three are replicated, if a kind of `sharing` replicates.
    """
    everywhere = drawn.topology.ranks
    dividing, replicating = _shared_kinds(drawn.topology)
    chosen = rng.permutation(len(small))[: rng.integers(1, 4)] if replicating in sharing else ()
    copied = {small[i].name for i in chosen}
    placements: list[Placement] = []
    for table in drawn.tables:
        if table.name in copied:
            placements.append(Placement(replicating.name, Shard.whole(table), everywhere))
        elif dividing in sharing and rng.random() < _DIVIDED and even_row_share(table.rows, len(everywhere)):
            placements.append(Placement(dividing.name, Shard.whole(table), everywhere))
        else:
            cut = _draw_column_shards(table, everywhere, rng)
            placements += [
                Placement(kind_on_one_device(table).name, shard, (device,)) for device, shard in cut
            ]
    # Sorted, so that plans are equal whatever the order of their tables.
    placements.sort(key=lambda p: (p.shard.table.name, p.shard.row_lo, p.shard.col_lo))
    return Plan(tuple(placements))


def _draw_column_shards(
    table: Table, devices: Sequence[int], rng: np.random.Generator
) -> list[tuple[int, Shard]]:
    """Draw a cut of a table into one to three column-wise shards of random widths, on random devices."""
    blocks = table.dim // MIN_WIDTH
    n_shards = min(blocks, len(devices), int(rng.choice([1, 2, 3], p=[0.6, 0.3, 0.1])))
    # Distinct cuts in blocks of MIN_WIDTH, so that no shard is empty.
    cuts = [0, *sorted(rng.choice(np.arange(1, blocks), n_shards - 1, replace=False)), blocks]
    widths = [int(hi - lo) * MIN_WIDTH for lo, hi in itertools.pairwise(cuts)]
    chosen = map(int, rng.choice(devices, n_shards, replace=False))
    return cut_columns(table, dict(zip(chosen, widths, strict=True)))
