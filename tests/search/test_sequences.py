"""Sequences in every search: an op and collectives of their own, and no kind that sums."""

from dataclasses import replace

import numpy as np
import pytest
from shapes import on_hosts

from shardcore.core.types import Problem
from shardcore.cost.model import price
from shardcore.search import SHARDERS, Budget
from shardcore.search.bound.lower_bound import bound
from shardcore.step.lower import lower
from shardcore.testing.problems import BATCH, MIB, draw_tables, model_for


def problem(seed: int = 3, memory: int = MIB) -> Problem:
    """Half of the tables are sequences."""
    drawn = draw_tables(np.random.default_rng(seed), 10)
    tables = tuple(replace(t, sequence=i % 2 == 0, rows=t.rows + 8) for i, t in enumerate(drawn))
    return Problem("p", tables, on_hosts("aabb", memory), BATCH)


@pytest.mark.parametrize("name", [n for n in SHARDERS if n != "torchrec"])
def test_plans_of_all_sharders_run_sequences_by_themselves(name):
    given = problem()
    plan = SHARDERS[name](given, model_for(given), seed=1, budget=Budget(evals=5_000))
    workload = lower(plan, given)
    for op in (op for ops in workload.ops for op in ops):
        assert len({s.table.sequence for s in op.shards}) == 1
    assert max(len(ops) for ops in workload.ops) > 1
    assert price(workload, model_for(given)).total_ms == plan.provenance["predicted_ms"]


def test_annealing_divides_the_rows_of_a_hot_sequence():
    """Over all devices. Over those of a host TorchRec runs none."""
    given = problem(memory=4 * MIB)
    hot = replace(given.tables[0], rows=40_000, dim=4, pooling=900.0)
    given = replace(given, tables=(hot, *given.tables[1:]))
    plan = SHARDERS["anneal"](given, model_for(given), seed=1, budget=Budget(evals=20_000))
    [kind] = {p.kind for p in plan.placements if p.shard.table == hot}
    assert kind in ("row", "data_parallel")


def test_nothing_is_proved_of_sequences():
    given = problem()
    assert bound(given, model_for(given)).proved_ms is None
    pooled = replace(given, tables=tuple(replace(t, sequence=False) for t in given.tables))
    assert bound(pooled, model_for(pooled)).proved_ms > 0
