"""How many rows to have on every device: found by searching a plan for each threshold."""

from dataclasses import replace

import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.hot_rows import HotRows
from shardcore.step.lower import lower

TABLES = tuple(Table(f"t{i}", 20_000, 32, 20.0, Zipf(1.2), sequence=True, collection="ec") for i in range(3))
MODEL = AnalyticModel(Setting("made-up", 1024), exchange_gbps=0.5, exchange_latency_ms=0.01)


def problem(memory_bytes: int = 1 << 28, **change) -> Problem:
    tables = tuple(replace(t, **change) for t in TABLES)
    return Problem("hot", tables, Topology((Device(memory_bytes),) * 4), 1024)


def found(of: Problem):
    return decide(of, MODEL, [HotRows()], SHARDERS["anneal"], budget=Budget(evals=300))


def test_hot_rows_make_a_step_shorter_and_fewer_bytes_travel():
    best = found(problem())
    plain = best.outcomes[0].found
    assert plain.problem == problem()
    assert best.problem != problem() and best.ms < 0.8 * plain.ms
    assert {p.kind for p in best.plan.placements if p.shard.table.name.endswith("_hot")} == {"data_parallel"}
    with_hot, without = (lower(t.plan, t.problem).traffic.sum() for t in (best, plain))
    assert with_hot < 0.5 * without


@pytest.mark.long
def test_no_more_memory_than_there_is():
    def used(of: Problem) -> list[int]:
        planned = [x.found for x in found(of).outcomes if x.found]
        return [max(lower(x.plan, x.problem).memory_bytes) for x in planned]

    needed = max(used(problem()))
    assert max(used(problem(int(0.9 * needed)))) <= 0.9 * needed
    with pytest.raises(Infeasible, match="none of 2 proposals of hot rows has a plan; no hot rows: "):
        found(problem(1 << 20))


def test_pooled_tables_have_no_hot_rows():
    with pytest.raises(ShardCoreError, match="no sequence tables that are looked up"):
        found(problem(sequence=False))


def test_one_device_has_no_other_to_have_hot_rows_on():
    of = replace(problem(), topology=Topology((Device(1 << 28),)))
    assert [x.proposal.words for x in found(of).outcomes] == ["no hot rows"]
