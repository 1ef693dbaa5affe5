"""Placements of the tables of a drawn problem, so that groups are measured as plans have them.

Sharders are not used here, as an edit of a search must not change the wanted samples. `_greedy` places tables
by simple loads. Plans of NeuroShard's search, and plans that `_greedy` cannot find, were recorded once in
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
from shardcore.measure.sampling.problems import DEVICES, ProblemConfig, draw_problem, drawn_bytes

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


def planned(pool: Sequence[Table], rng: np.random.Generator, setting: Setting) -> tuple[Problem, str] | None:
    """A problem of the pool, and one of PLANNERS. None if no table has lookups, or devices do not divide the batch."""
    live = sum(t.pooling > 0 for t in pool)
    if not live:
        return None
    shape = ProblemConfig(int(rng.choice(DEVICES)), min(10, live), 60, int(rng.choice([32, 64, 128])))
    if setting.batch % shape.devices:
        return None
    drawn = draw_problem(pool, int(rng.integers(1 << 31)), setting, _PLANNED_SEED, shape, drawn_bytes)
    return drawn, str(rng.choice(PLANNERS))


def place(drawn: Problem, planner: str) -> list[tuple[Shard, ...]] | None:
    """[D] the shards of each device, in order of table names. None if `_greedy` finds no device for some table."""
    # A record takes precedence. `computed` only imitates what was recorded.
    columns = recorded(drawn, planner) or computed(drawn, planner)
    if columns is None:
        return None
    shards: list[list[Shard]] = [[] for _ in columns]
    # By name, so that an op's shards do not depend on the order of the problem's tables.
    for i, table in sorted(enumerate(drawn.tables), key=lambda x: x[1].name):
        for device, shard in deal_columns(table, {d: of[i] for d, of in enumerate(columns) if i in of}):
            shards[device].append(shard)
    return [tuple(s) for s in shards]


def deal_columns(table: Table, widths: Mapping[int, int]) -> list[tuple[int, Shard]]:
    """The shards of a table with these columns on these devices, from the left, in order of devices.

    widths: number of columns, by device.
    """
    dealt, lo = [], 0
    for device, width in sorted(widths.items()):
        dealt.append((device, Shard(table, 0, table.rows, lo, lo + width)))
        lo += width
    return dealt


# --- computed placements ------------------------------------------------------------------------------------


def computed(drawn: Problem, planner: str) -> Columns | None:
    """The tables placed by `_greedy`, after halving those that fit no device. None if some finds no device."""
    shards = [(i, width) for i in range(len(drawn.tables)) for width in _fitting(drawn, i)]
    load = _LOADS[planner]
    if planner == NEUROSHARD:
        for _ in range(_CUTS):
            # NeuroShard cuts the dearest tables, which limit the balance.
            wide = [shard for shard in shards if shard[1] > MIN_WIDTH]
            if wide:
                i, width = max(wide, key=lambda shard: load(drawn.tables[shard[0]], shard[1]))
                shards.remove((i, width))
                shards += [(i, half) for half in _halves(width)]
    return _greedy(drawn, shards, load)


_LOADS: Mapping[str, Callable[[Table, int], float]] = {
    "random": lambda table, width: 0.0,
    "size_greedy": lambda table, width: table.rows * width * PRECISION_BYTES[table.precision],
    "dim_greedy": lambda table, width: width,
    "lookup_greedy": lambda table, width: _looked_up(table, width),
    "size_lookup_greedy": lambda table, width: _looked_up(table, width) * math.log10(table.rows),
    NEUROSHARD: lambda table, width: _looked_up(table, width),
}
"""Load of a shard that each planner balances. 0: each shard goes to a random device."""


def _looked_up(table: Table, width: int) -> float:
    # Not simplified: the rounding decides between equal loads, and so keeps draws as they were.
    return table.pooling * width * table.rows / table.rows


def _bytes(drawn: Problem, i: int, width: int) -> int:
    """Bytes of `width` columns of table i on a device."""
    return drawn_bytes(drawn.tables[i], drawn, width) if width else 0


def _fitting(drawn: Problem, i: int) -> list[int]:
    """Widths of the shards of table i, halved until each fits an empty device."""
    waiting, widths, free = [drawn.tables[i].dim], [], drawn.topology.devices[0].memory_bytes
    while waiting:
        width = waiting.pop()
        if width > MIN_WIDTH and _bytes(drawn, i, width) > free:
            # The last one is taken next, so reversed halves keep columns in order.
            waiting += reversed(_halves(width))
        else:
            widths.append(width)
    return widths


def _halves(width: int) -> tuple[int, int]:
    """Two halves in multiples of MIN_WIDTH: 12 columns make 4 and 8."""
    left = width // (2 * MIN_WIDTH) * MIN_WIDTH
    return left, width - left


def _greedy(
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
    for n in sorted(range(len(shards)), key=lambda n: (-loads[n], -_bytes(drawn, *shards[n]), n)):
        i, width = shards[n]
        before = [of.get(i, 0) for of in columns]
        # The bytes that are added. All columns of a row on one device share its optimizer state.
        extra = np.array([_bytes(drawn, i, was + width) - _bytes(drawn, i, was) for was in before])
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


def recorded(drawn: Problem, planner: str) -> Columns | None:
    """The recorded plan of a problem. None if there is none, or if its tables do not fit."""
    lines = recorded_plans().get(key(drawn, planner))
    if lines is None:
        return None
    columns = [_parsed(line, drawn) for line in lines]
    # Tables of the recorded pool may have had fewer rows (see `key`), so memory is checked again.
    held = [sum(_bytes(drawn, i, width) for i, width in of.items()) for of in columns]
    return (
        columns
        if all(h <= d.memory_bytes for h, d in zip(held, drawn.topology.devices, strict=True))
        else None
    )


@lru_cache
def recorded_plans() -> dict[str, list[str]]:
    """Lines of each recorded plan, one a device, by `key`."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))["plans"] if RECORDED.exists() else {}


def key(drawn: Problem, planner: str) -> str:
    """Key of a recorded plan. Rows and accesses are left out, as pools made on other machines differ a little."""
    tables = [[t.name, t.dim] for t in drawn.tables]
    identity = [len(drawn.topology), drawn.global_batch, drawn.precision, drawn.optimizer, tables]
    return f"{planner}-{files.digest(identity)}"


def line(of: Mapping[int, int], drawn: Problem) -> str:
    """Text of a device's tables in a recorded plan: indices in the problem, with ":columns" where cut."""
    entries = sorted(of.items())
    return " ".join(f"{i}" if width == drawn.tables[i].dim else f"{i}:{width}" for i, width in entries)


def _parsed(text: str, drawn: Problem) -> dict[int, int]:
    pairs = (entry.partition(":") for entry in text.split())
    return {int(i): int(width or drawn.tables[int(i)].dim) for i, _, width in pairs}
