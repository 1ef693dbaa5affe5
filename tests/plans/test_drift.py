"""Distance of a plan from the best after its tables' statistics have changed, in the library and on the
command line."""

from dataclasses import replace

import numpy as np
import pytest
from laws import SETTING

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.plans.diff import diff_plans
from shardcore.plans.drift import plan_drift, with_fresh_tables
from shardcore.plans.replan import ReplanConfig
from shardcore.report import plan_report
from shardcore.search import SHARDERS, Budget
from shardcore.step.lower import lower

MODEL = AnalyticModel(
    SETTING, launch_us=2, table_us=1, lookup_ns=10, exchange_latency_ms=0.001, exchange_gbps=4
)
BUDGET = Budget(evals=20_000)


@pytest.fixture(scope="module")
def shifted():
    """A problem and its plan; and the problem as it is now, a few tables being looked up much more."""
    rng = np.random.default_rng(0)
    tables = tuple(
        Table(f"t{i}", int(rng.integers(100, 4000)), 16, float(rng.uniform(1, 10)), Zipf(1.0))
        for i in range(24)
    )
    problem = Problem("shifting", tables, Topology((Device(4 << 20),) * 4), SETTING.batch)
    plan = SHARDERS["anneal"](problem, MODEL, budget=BUDGET)
    busiest = {p.shard.table.name for p in plan.placements if p.devices == (0,)}
    now = replace(
        problem, tables=tuple(replace(t, pooling=3 * t.pooling) if t.name in busiest else t for t in tables)
    )
    return plan, problem, now


def test_a_plan_falls_behind_and_a_few_moves_bring_most_of_it_back(shifted):
    plan, problem, now = shifted
    found = plan_drift(plan, problem, now, MODEL, ReplanConfig(3, budget=BUDGET))
    assert found.planned_ms == pytest.approx(plan.provenance["predicted_ms"])
    assert (
        found.best_ms <= found.replan_ms < found.now_ms
        and found.cost_above_best == found.now_ms / found.best_ms - 1 > 0.1
    )
    assert 1 <= len(found.moves.moves) <= 3 and found.is_replan_worthwhile
    assert price(lower(found.replan, now), MODEL).total_ms == found.replan_ms
    assert found.now_ms - found.replan_ms > 0.5 * (found.now_ms - found.best_ms)
    assert found.moves == diff_plans(plan, found.replan, now)
    text = plan_report.plan_drift_text(found)
    dearer = 100 * (found.now_ms / found.planned_ms - 1)
    assert (
        dearer > 0
        and f"costs {found.now_ms:.3f} ms now, +{dearer:.1f}% against the {found.planned_ms:.3f} ms" in text
    )
    assert f"{found.cost_above_best:.1%} behind" in text and "of 3 that may" in text and "which pays." in text


def test_nothing_has_to_move_where_nothing_changed_or_nothing_may(shifted):
    plan, problem, now = shifted
    same = plan_drift(plan, problem, problem, MODEL, ReplanConfig(budget=BUDGET))
    assert same.now_ms == same.planned_ms and same.cost_above_best < 0.02 and not same.is_replan_worthwhile
    none = plan_drift(plan, problem, now, MODEL, ReplanConfig(0, budget=BUDGET))
    assert not none.moves and none.replan_ms == none.now_ms and not none.is_replan_worthwhile
    assert "No better plan was found within that limit" in plan_report.plan_drift_text(none)
    dear = plan_drift(plan, problem, now, MODEL, ReplanConfig(3, budget=BUDGET), threshold=0.9)
    assert dear.moves and not dear.is_replan_worthwhile
    assert "does not pay (at least 90.0% asked)" in plan_report.plan_drift_text(dear)


@pytest.mark.parametrize("evals", [1, 30, 100, 300])
def test_the_best_is_never_dearer_than_the_replan_nor_this_than_the_plan(shifted, evals):
    """However little of the search there is."""
    found = plan_drift(*shifted, MODEL, ReplanConfig(4, budget=Budget(evals=evals)))
    assert found.best_ms <= found.replan_ms <= found.now_ms and found.cost_above_best >= 0
    for costs, plan in ((found.best_ms, found.best), (found.replan_ms, found.replan)):
        assert price(lower(plan, shifted[2]), MODEL).total_ms == costs


def test_grown_tables_drift_and_what_they_had_counts_as_moved(shifted):
    plan, problem, now = shifted
    grown = replace(now, tables=tuple(replace(t, rows=t.rows * 3 // 2) for t in now.tables))
    found = plan_drift(plan, problem, grown, MODEL, ReplanConfig(3, budget=BUDGET))
    assert not found.moves.added and not found.moves.removed and 1 <= len(found.moves.moves) <= 3
    old = {t.name: t for t in problem.tables}
    assert {m.table: m.bytes for m in found.moves.moves} == {
        m.table: old[m.table].bytes for m in found.moves.moves
    }
    assert found.moves.new_cell_bytes == sum(t.bytes - old[t.name].bytes for t in grown.tables)
    assert "24 tables of another shape" in plan_report.plan_drift_text(found)


def test_a_plan_that_is_none_any_more_is_refused(shifted):
    plan, problem, now = shifted
    with pytest.raises(Infeasible):
        plan_drift(
            plan,
            problem,
            replace(now, topology=Topology((Device(20_000),) * 4)),
            MODEL,
            ReplanConfig(budget=BUDGET),
        )


def test_fresh_statistics_replace_those_of_the_same_tables_alone(shifted):
    _, problem, now = shifted
    assert with_fresh_tables(problem, now.tables) == now
    one = replace(now.tables[5], pooling=77.0, access=Zipf(0.25))
    changed = with_fresh_tables(problem, [one, Table("other", 5, 4, 1.0)])
    assert changed.tables == (*problem.tables[:5], one, *problem.tables[6:])
    for shape in ({"rows": 9}, {"dim": 8}, {"features": 3}):
        assert with_fresh_tables(problem, [replace(one, **shape)]).tables[5] == replace(one, **shape)
    with pytest.raises(ShardCoreError, match="none of the 1 tables.*'shifting'"):
        with_fresh_tables(problem, [Table("other", 5, 4, 1.0)])
