"""The local search beats what it is measured against, and cuts by rows where that pays."""

import numpy as np
import pytest
from test_conformance import BATCH, check_plan, draw_problem, model_for

from shardcore.search import SHARDERS, Budget
from shardcore.search.local import local
from shardcore.types import Device, Problem, Shard, ShardCoreError, Table, Topology, Zipf

MIB = 2**20


def cost(plan) -> float:
    return plan.provenance["predicted_ms"]


@pytest.mark.parametrize("space", ["columns", "all"])
def test_it_is_no_worse_than_neuroshard_on_average_and_cheaper_with_time(space):
    ratios = {2_000: [], 60_000: []}
    for seed in range(4):
        problem = draw_problem(seed, 20, [8 * MIB] * 4)
        theirs = cost(SHARDERS["neuroshard"](problem, model_for(problem)))
        for evals, found in ratios.items():
            plan = local(problem, model_for(problem), budget=Budget(evals=evals), space=space)
            check_plan(plan, problem)
            found.append(cost(plan) / theirs)
    assert np.mean(ratios[60_000]) < min(1.0, np.mean(ratios[2_000]))


def test_a_hot_table_is_cut_by_rows_where_that_may_be():
    hot = Table("hot", 100_003, 32, 60.0, Zipf(0.2))  # rows that no number of shares divides evenly
    small = tuple(Table(f"t{i}", 500, 8, 1.0) for i in range(4))
    problem = Problem("hot", (hot, *small), Topology((Device(64 * MIB),) * 3), BATCH)
    by_rows, by_columns = (local(problem, model_for(problem), budget=Budget(evals=20_000), space=s) for s in ("all", "columns"))
    check_plan(by_rows, problem)
    assert any(not p.shard.full_rows for p in by_rows.placements) and cost(by_rows) < cost(by_columns)
    assert all(p.shard.full_rows for p in by_columns.placements)


def test_memory_for_exactly_half_the_rows_is_enough():
    table = Table("t", 2001, 4, 10.0, Zipf(0.0))
    room = Shard(table, 0, 1001, 0, 4).bytes + 2 * BATCH * 4 * 4
    problem = Problem("half", (table,), Topology((Device(room), Device(room))), BATCH)
    check_plan(local(problem, model_for(problem), budget=Budget(evals=500)), problem)


def test_an_unknown_space_is_named():
    problem = draw_problem(0, 3, [MIB] * 2)
    with pytest.raises(ShardCoreError, match="no space 'rows'; there are all, columns, halves"):
        local(problem, model_for(problem), space="rows")
