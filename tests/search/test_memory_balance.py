"""The last step of searches that anneal: fewer bytes on the fullest device, for a tenth of a percent at most."""

from dataclasses import replace

from shapes import column, on_hosts

from shardcore.core.constraints import Constraints
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.search.memory_balance import balance_memory
from shardcore.search.state.shards import CONCESSION, priced_plan
from shardcore.step.memory import used_bytes
from shardcore.testing.plans import check_plan

GIB = 2**30
LARGE = tuple(Table(f"large{i}", 400_000, 16, 4.0) for i in range(4))
SMALL = tuple(Table(f"small{i}", 1000, 16, 4.0) for i in range(12))
PROBLEM = Problem("uneven", (*LARGE, *SMALL), on_hosts("aaaa", GIB), 4096)
MODEL = AnalyticModel(Setting("gpu", PROBLEM.global_batch))


def uneven(problem: Problem = PROBLEM) -> Plan:
    """Four tables of the same cost on each device, and all large ones on device 2."""
    homes = [2, 2, 2, 2, *(i % 3 + (i % 3 == 2) for i in range(12))]
    return priced_plan(
        [column(table, d) for table, d in zip(problem.tables, homes, strict=True)], problem, MODEL
    )


def limit_ms(plan: Plan) -> float:
    return (1 + CONCESSION) * plan.provenance["predicted_ms"]


def balanced(plan: Plan, problem: Problem = PROBLEM, seconds: float | None = None) -> Plan:
    return balance_memory(plan, problem, MODEL, limit_ms(plan), Budget(seconds=seconds).start())


def test_large_tables_change_places_with_small_ones_at_the_same_cost():
    given = uneven()
    plan = balanced(given)
    check_plan(plan, PROBLEM)
    assert sorted(p.devices for p in plan.placements if p.shard.table in LARGE) == [(0,), (1,), (2,), (3,)]
    assert max(used_bytes(plan, PROBLEM)) < 0.5 * max(used_bytes(given, PROBLEM))
    assert plan.provenance["predicted_ms"] <= limit_ms(given)
    assert balanced(given) == plan


def test_no_move_makes_a_plan_dearer_than_the_limit():
    """Two large tables on device 0 cost as much as each small one on the others."""
    costly = tuple(replace(table, pooling=8.0) for table in SMALL[:3])
    problem = replace(PROBLEM, tables=(*LARGE[:2], *costly))
    homes = (0, 0, 1, 2, 3)
    given = priced_plan([column(t, d) for t, d in zip(problem.tables, homes, strict=True)], problem, MODEL)
    assert balanced(given, problem) is given
    twice = balance_memory(given, problem, MODEL, 2 * given.provenance["predicted_ms"], Budget().start())
    assert twice is given  # a device would be slower than the slowest one is
    given = uneven()
    assert (
        balance_memory(given, PROBLEM, MODEL, 0.9 * given.provenance["predicted_ms"], Budget().start())
        is given
    )


def test_constraints_hold():
    large = ("large0", "large1", "large2")
    pinned = replace(PROBLEM, constraints=Constraints(pinned=tuple((name, (2,)) for name in large)))
    plan = balanced(uneven(pinned), pinned)
    check_plan(plan, pinned)
    assert [p.devices for p in plan.placements if p.shard.table.name in large] == [(2,)] * 3
    together = replace(PROBLEM, constraints=Constraints(together=(("large0", "large1", "large2", "large3"),)))
    plan = balanced(uneven(together), together)
    check_plan(plan, together)


def test_a_balanced_plan_fits_to_the_byte():
    """Other devices have no byte more than they hold, and device 2 all that it needs."""
    used = used_bytes(uneven(), PROBLEM)
    devices = tuple(replace(d, memory_bytes=n) for d, n in zip(PROBLEM.topology.devices, used, strict=True))
    tight = replace(PROBLEM, topology=replace(PROBLEM.topology, devices=devices))
    assert balanced(uneven(tight), tight) == uneven(tight)


def test_without_time_a_plan_stays_as_it_is():
    given = uneven()
    assert balanced(given, seconds=1e-9) is given


def test_tables_that_hosts_share_move_to_other_hosts():
    tables = tuple(
        replace(t, rows=40 * t.rows if t in LARGE[:2] else t.rows) for t in (*LARGE[:2], *SMALL[:2])
    )
    problem = Problem("hosts", tables, on_hosts("aabb", GIB), 4096)
    rows = [Placement("host_row", Shard.whole(t), (0, 1) if i < 2 else (2, 3)) for i, t in enumerate(tables)]
    given = priced_plan(rows, problem, MODEL)
    plan = balance_memory(given, problem, MODEL, limit_ms(given), Budget().start())
    check_plan(plan, problem)
    assert {p.devices for p in plan.placements if p.shard.table in tables[:2]} == {(0, 1), (2, 3)}


def test_searches_that_anneal_end_with_it_and_published_rules_do_not(monkeypatch):
    found: list[Plan] = []
    monkeypatch.setattr(
        "shardcore.search.sharders.balance_memory", lambda plan, *_: found.append(plan) or plan
    )
    for name in ("size_greedy", "random", "neuroshard"):
        SHARDERS[name](PROBLEM, MODEL, budget=Budget(evals=300))
    assert not found
    for name in ("portfolio", "anneal", "anneal_columns"):
        assert SHARDERS[name](PROBLEM, MODEL, budget=Budget(evals=300)) is found[-1]
    assert len(found) == 3
