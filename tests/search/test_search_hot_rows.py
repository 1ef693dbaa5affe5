"""How many rows to have on every device: found by searching a plan for each threshold."""

from dataclasses import replace

import pytest

from shardcore.access_statistics import Zipf
from shardcore.cost.analytic import AnalyticModel
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.search import SHARDERS, Budget
from shardcore.search.hot_rows import try_thresholds
from shardcore.search.tried import best_of
from shardcore.topology import Device, Topology
from shardcore.types import Problem, Setting, Table
from shardcore.workload import lower

TABLES = tuple(Table(f"t{i}", 20_000, 32, 20.0, Zipf(1.2), sequence=True, collection="ec") for i in range(3))
MODEL = AnalyticModel(Setting("made-up", 1024), exchange_gbps=0.5, exchange_latency_ms=0.01)


def problem(memory_bytes: int = 1 << 28, **change) -> Problem:
    tables = tuple(replace(t, **change) for t in TABLES)
    return Problem("hot", tables, Topology((Device(memory_bytes),) * 4), 1024)


def tried(of: Problem):
    return try_thresholds(of, MODEL, SHARDERS["anneal"], budget=Budget(evals=300))


def test_hot_rows_make_a_step_shorter_and_fewer_bytes_travel():
    found = tried(problem())
    best = best_of(found)
    assert found[0].least_lookups is None
    assert best.least_lookups is not None and best.ms < 0.8 * found[0].ms
    assert {p.kind for p in best.plan.placements if p.shard.table.name.endswith("_hot")} == {"data_parallel"}
    with_hot, without = (lower(t.plan, t.problem).traffic.sum() for t in (best, found[0]))
    assert with_hot < 0.5 * without


@pytest.mark.long
def test_no_more_memory_than_there_is():
    needed = max(lower(t.plan, t.problem).memory_bytes[0] for t in tried(problem()) if t.plan)
    tight = problem(int(0.9 * needed))
    found = tried(tight)
    assert all(max(lower(t.plan, t.problem).memory_bytes) <= 0.9 * needed for t in found if t.plan)
    with pytest.raises(Infeasible):
        best_of(tried(problem(1 << 20)))


def test_pooled_tables_have_no_hot_rows():
    with pytest.raises(ShardCoreError, match="no sequence tables that are looked up"):
        tried(problem(sequence=False))


def test_one_device_has_no_other_to_have_hot_rows_on():
    of = replace(problem(), topology=Topology((Device(1 << 28),)))
    assert [t.least_lookups for t in tried(of)] == [None]
