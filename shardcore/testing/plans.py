"""Checks of plans that share no code with the search."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, product

import numpy as np

from shardcore.core.types import MIN_WIDTH, Placement, Plan, Problem, Shard, Table
from shardcore.cost.model import price
from shardcore.step import memory
from shardcore.step.kinds import SHARDING_KINDS, possible_groups
from shardcore.step.lower import lower
from shardcore.step.ways import consolidate_placements
from shardcore.testing.problems import MIB, draw_random_problem, small_problem_model
from shardcore.torchrec.sharding_plan import torchrec_sharding


def placement_counts(table: Table, shards: Iterable[Shard]) -> set[int]:
    """Set of how many shards cover each cell of a table, computed without `lower`.

    One count for each rectangle between the edges of all shards: exact, however large the table is.
    """
    shards = list(shards)
    rows = sorted({0, table.rows, *(edge for s in shards for edge in (s.row_lo, s.row_hi))})
    columns = sorted({0, table.dim, *(edge for s in shards for edge in (s.col_lo, s.col_hi))})
    times = np.zeros((len(rows) - 1, len(columns) - 1), dtype=int)
    for s in shards:
        times[
            bisect_left(rows, s.row_lo) : bisect_left(rows, s.row_hi),
            bisect_left(columns, s.col_lo) : bisect_left(columns, s.col_hi),
        ] += 1
    return set(times.flat)


def shards_by_device(placement: Placement) -> list[tuple[int, Shard]]:
    """Shards of a placement, each with its device, computed without `step.kinds` to check that module."""
    shard, n = placement.shard, len(placement.devices)
    if placement.kind in ("column", "data_parallel"):
        return [(d, shard) for d in placement.devices]
    each = math.ceil(shard.rows / n)
    return [
        (d, replace(shard, row_lo=i * each, row_hi=min((i + 1) * each, shard.rows)))
        for i, d in enumerate(placement.devices)
    ]


def check_plan(plan: Plan, problem: Problem) -> None:
    """Assert that a plan covers each table once, keeps the constraints, is trainable by TorchRec, and fits memory."""
    workload = lower(plan, problem)
    for table in problem.tables:
        mine = [p for p in plan.placements if p.shard.table == table]
        torchrec_sharding(mine, problem.topology)
        once = (
            s
            for p in mine
            for _, s in (shards_by_device(p)[:1] if p.kind == "data_parallel" else shards_by_device(p))
        )
        times = placement_counts(table, once)
        assert times == {1}, f"cells of {table.name} are placed {times} times"
    assert list(workload.memory_bytes) == memory.used_bytes(plan, problem)
    together = Counter((p.shard.table.name, d) for p in plan.placements for d in p.devices)
    assert max(together.values()) == 1, (
        f"several shards of one table on one device: {together.most_common(1)}"
    )
    assert plan.placements == consolidate_placements(plan.placements)
    split = {
        p.shard.table.name
        for p in plan.placements
        for _, s in shards_by_device(p)
        if s != Shard.whole(s.table)
    }
    assert not split & set(problem.constraints.unsplit)
    homes = {
        t.name: {d for p in plan.placements if p.shard.table == t for d in p.devices} for t in problem.tables
    }
    for name, where in problem.constraints.pinned:
        hosts = [problem.topology.devices[d].host for d in range(len(problem.topology))]
        assert all(d in where or hosts[d] in where for d in homes[name]), (
            f"{name} is on {homes[name]}, pinned to {where}"
        )
    for group in problem.constraints.together:
        assert not split & set(group) and len(set.union(*(homes[name] for name in group))) == 1, (
            f"{group} is not together"
        )


def all_plans(problem: Problem, columns_alone: bool = False) -> Iterator[Plan]:
    """All plans of a small problem with one sharding type per table. Plans that permute equal columns count once."""

    def table_placements(t: Table) -> Iterator[list[Placement]]:
        for sharding_kind in (x for x in SHARDING_KINDS.values() if x.is_on_one_device or not columns_alone):
            groups = possible_groups(sharding_kind, t.rows, problem.topology, None)
            columns = t.dim // MIN_WIDTH if sharding_kind.cuts_columns else 1
            for dealt in combinations_with_replacement(groups, columns):
                edges = [t.dim * i // columns for i in range(columns + 1)]
                yield [
                    Placement(sharding_kind.name, Shard(t, 0, t.rows, *edges[i : i + 2]), g)
                    for i, g in enumerate(dealt)
                ]

    for choice in product(*(list(table_placements(t)) for t in problem.tables)):
        yield Plan(consolidate_placements(p for placements in choice for p in placements))


def draw_tiny_problem(seed: int) -> Problem:
    """Draw a problem of three small tables on two devices, small enough to enumerate its plans."""
    return draw_random_problem(seed, 3, [MIB, MIB], [1.0, 2.0 - seed % 2], dims=(4, 8, 16))


@cache
def cheapest_plans_of_tiny_problems() -> list[tuple[Problem, float, float]]:
    """Tiny problems, each with the least ms of all plans and of column-wise plans alone."""
    found = []
    for problem in map(draw_tiny_problem, range(6)):
        model = small_problem_model(problem)
        of_all, by_columns = (
            min(price(lower(plan, problem), model).total_ms for plan in all_plans(problem, alone))
            for alone in (False, True)
        )
        found.append((problem, of_all, by_columns))
    return found
