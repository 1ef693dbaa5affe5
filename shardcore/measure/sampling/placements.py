"""Placements of the tables of a drawn problem, so that groups are measured as plans have them.

Sharders are not used here, as an edit of a search must not change the wanted samples. `_place_greedily` places tables
by simple loads. Plans of NeuroShard's search, and plans that `_place_greedily` cannot find, were recorded once in
recorded_plans.json (tests/measure/sampling/record_draws.py). A plan of NeuroShard that was not recorded is
imitated: the costliest tables are halved. The quality of a plan does not matter here.

Shapes: D devices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from shardcore.core.types import MIN_WIDTH, PRECISION_BYTES, Problem, Setting, Shard, Table
from shardcore.io import files
from shardcore.measure.sampling.problems import DEVICES, ProblemConfig, draw_problem, sample_table_bytes

NEUROSHARD = "neuroshard"
PLANNERS = ("random", "size_greedy", "dim_greedy", "lookup_greedy", "size_lookup_greedy", NEUROSHARD)
"""Ways to place tables. The list is fixed: another one would change earlier draws."""
RECORDED = Path(__file__).parent / "recorded_plans.json"
SCHEMA, VERSION = "shardcore/recorded_plans", 1
_PLANNED_SEED = 2**32 - 2
"""Reserved for problems whose plans are measured. `evaluate` never sees them."""
_CUTS = 5
"""Halvings of the costliest shards, if NeuroShard's plan was not recorded."""

Columns = list[dict[int, int]]
"""A plan whose tables are whole or cut by columns. For each device: {index of the table: number of columns}."""


def draw_planned_problem(
    pool: Sequence[Table], rng: np.random.Generator, setting: Setting
) -> tuple[Problem, str] | None:
    """Draw a problem of the pool's tables, and the name of a planner. None if no table has lookups, or devices do not
    divide the batch."""
    live = sum(t.pooling > 0 for t in pool)
    if not live:
        return None
    shape = ProblemConfig(int(rng.choice(DEVICES)), min(10, live), 60, int(rng.choice([32, 64, 128])))
    if setting.batch % shape.devices:
        return None
    drawn = draw_problem(pool, int(rng.integers(1 << 31)), setting, _PLANNED_SEED, shape, sample_table_bytes)
    return drawn, str(rng.choice(PLANNERS))


def place_shards(drawn: Problem, planner: str) -> list[tuple[Shard, ...]] | None:
    """[D] shards that a planner places on each device, by table name; None if a table fits no device."""
    # A record takes precedence. `compute_placement` only imitates what was recorded.
    columns = recorded_placement(drawn, planner) or compute_placement(drawn, planner)
    if columns is None:
        return None
    shards: list[list[Shard]] = [[] for _ in columns]
    # By name, so that an op's shards do not depend on the order of the problem's tables.
    for i, table in sorted(enumerate(drawn.tables), key=lambda x: x[1].name):
        for device, shard in cut_columns(table, {d: of[i] for d, of in enumerate(columns) if i in of}):
            shards[device].append(shard)
    return [tuple(s) for s in shards]


def cut_columns(table: Table, widths: Mapping[int, int]) -> list[tuple[int, Shard]]:
    """Shards of a table with given numbers of columns on given devices, from left to right.

    widths: number of columns, by device.
    """
    dealt, lo = [], 0
    for device, width in sorted(widths.items()):
        dealt.append((device, Shard(table, 0, table.rows, lo, lo + width)))
        lo += width
    return dealt


# --- computed placements ------------------------------------------------------------------------------------


def compute_placement(drawn: Problem, planner: str) -> Columns | None:
    """Placement of a problem's tables by a greedy planner, after halving tables that fit no device; None if one still
    does not fit."""
    shards = [(i, width) for i in range(len(drawn.tables)) for width in _fitting_widths(drawn, i)]
    load = _LOADS[planner]
    if planner == NEUROSHARD:
        for _ in range(_CUTS):
            # NeuroShard cuts the dearest tables, which limit the balance.
            wide = [shard for shard in shards if shard[1] > MIN_WIDTH]
            if wide:
                i, width = max(wide, key=lambda shard: load(drawn.tables[shard[0]], shard[1]))
                shards.remove((i, width))
                shards += [(i, half) for half in _halve_width(width)]
    return _place_greedily(drawn, shards, load)


_LOADS: Mapping[str, Callable[[Table, int], float]] = {
    "random": lambda table, width: 0.0,
    "size_greedy": lambda table, width: table.rows * width * PRECISION_BYTES[table.precision],
    "dim_greedy": lambda table, width: width,
    "lookup_greedy": lambda table, width: _lookup_load(table, width),
    "size_lookup_greedy": lambda table, width: _lookup_load(table, width) * math.log10(table.rows),
    NEUROSHARD: lambda table, width: _lookup_load(table, width),
}
"""Load of a shard that each planner balances. 0: each shard goes to a random device."""


def _lookup_load(table: Table, width: int) -> float:
    # Not simplified: the rounding decides between equal loads, and so keeps draws as they were.
    """Load of a shard by lookups: pooling × width."""
    return table.pooling * width * table.rows / table.rows


def _width_bytes(drawn: Problem, i: int, width: int) -> int:
    """Bytes of `width` columns of table number i on a device."""
    return sample_table_bytes(drawn.tables[i], drawn, width) if width else 0


def _fitting_widths(drawn: Problem, i: int) -> list[int]:
    """Widths of the shards of table number i, halved until each fits an empty device."""
    waiting, widths, free = [drawn.tables[i].dim], [], drawn.topology.devices[0].memory_bytes
    while waiting:
        width = waiting.pop()
        if width > MIN_WIDTH and _width_bytes(drawn, i, width) > free:
            # The last one is taken next, so reversed halves keep columns in order.
            waiting += reversed(_halve_width(width))
        else:
            widths.append(width)
    return widths


def _halve_width(width: int) -> tuple[int, int]:
    """Two halves of a width in multiples of MIN_WIDTH: 12 columns make 4 and 8."""
    left = width // (2 * MIN_WIDTH) * MIN_WIDTH
    return left, width - left


def _place_greedily(
    drawn: Problem, shards: Sequence[tuple[int, int]], load: Callable[[Table, int], float]
) -> Columns | None:
    """Place shards (table, columns) by falling load, each on the least loaded device with free memory.

    If all loads are 0, each goes to a random device with free memory. Shards of a table on one device become
    one. None if a shard finds no device.
    """
    # A fixed seed, as a problem must have one placement everywhere.
    rng = np.random.default_rng(0)
    tables, devices = drawn.tables, drawn.topology.devices
    loads = [load(tables[i], width) for i, width in shards]
    left, sums = np.array([d.memory_bytes for d in devices]), np.zeros(len(devices))
    columns: Columns = [{} for _ in devices]
    # Ties are broken by bytes and then by order, so that the result is the same on every machine.
    for n in sorted(range(len(shards)), key=lambda n: (-loads[n], -_width_bytes(drawn, *shards[n]), n)):
        i, width = shards[n]
        before = [of.get(i, 0) for of in columns]
        # The bytes that are added. All columns of a row on one device share its optimizer state.
        extra = np.array(
            [_width_bytes(drawn, i, was + width) - _width_bytes(drawn, i, was) for was in before]
        )
        fits = extra <= left
        if not fits.any():
            return None
        if any(loads):
            after = np.where(fits, sums + loads[n], np.inf)
            least = np.flatnonzero(after == after.min())
            # Among equally loaded devices, the emptiest, so that room for large tables is left.
            device = int(least[left[least].argmax()])
        else:
            device = int(rng.choice(np.flatnonzero(fits)))
        sums[device] += loads[n]
        left[device] -= extra[device]
        columns[device][i] = columns[device].get(i, 0) + width
    return columns


# --- recorded plans -----------------------------------------------------------------------------------------


def recorded_placement(drawn: Problem, planner: str) -> Columns | None:
    """Recorded placement of a problem by a planner; None if there is none, or if its tables do not fit."""
    lines = recorded_plans().get(recorded_plan_key(drawn, planner))
    if lines is None:
        return None
    columns = [_parse_plan_line(line, drawn) for line in lines]
    # Tables of the recorded pool may have had fewer rows (see `key`), so memory is checked again.
    held = [sum(_width_bytes(drawn, i, width) for i, width in of.items()) for of in columns]
    return (
        columns
        if all(h <= d.memory_bytes for h, d in zip(held, drawn.topology.devices, strict=True))
        else None
    )


@lru_cache
def recorded_plans() -> dict[str, list[str]]:
    """Text lines of each recorded plan, one for each device, by `recorded_plan_key`."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))["plans"] if RECORDED.exists() else {}


def recorded_plan_key(drawn: Problem, planner: str) -> str:
    """Key of a problem's recorded plan, without rows and access statistics, which differ a little between machines."""
    tables = [[t.name, t.dim] for t in drawn.tables]
    identity = [len(drawn.topology), drawn.global_batch, drawn.precision, drawn.optimizer, tables]
    return f"{planner}-{files.json_digest(identity)}"


def recorded_plan_line(device_of_shard: Mapping[int, int], drawn: Problem) -> str:
    """Text of a device's tables in a recorded plan: table indices, with ":columns" where cut."""
    entries = sorted(device_of_shard.items())
    return " ".join(f"{i}" if width == drawn.tables[i].dim else f"{i}:{width}" for i, width in entries)


def _parse_plan_line(text: str, drawn: Problem) -> dict[int, int]:
    """Columns by table index of a device's line in a recorded plan."""
    pairs = (entry.partition(":") for entry in text.split())
    return {int(i): int(width or drawn.tables[int(i)].dim) for i, _, width in pairs}
