"""The one way to improve a plan that there is: what is left of it is the start, and little of it moves."""

from dataclasses import replace

import numpy as np
import pytest

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.plans.diff import diff_plans
from shardcore.plans.replan import ReplanConfig, renumber_devices, replan, tables_forced_to_move
from shardcore.report import plan_report
from shardcore.search import SHARDERS, Budget
from shardcore.step.lower import lower

MODEL = AnalyticModel(Setting("made-up", 240), lookup_ns=20)
BUDGET = Budget(evals=3_000)
MIB = 1 << 20


@pytest.fixture
def problem() -> Problem:
    rng = np.random.default_rng(0)
    tables = tuple(
        Table(f"t{i}", int(rng.integers(100, 4000)), 16, float(rng.uniform(1, 10))) for i in range(12)
    )
    return Problem("again", tables, Topology((Device(2 * MIB),) * 4), 240)


@pytest.fixture
def old(problem) -> Plan:
    return SHARDERS["size_greedy"](problem, MODEL)


def cost(plan: Plan, problem: Problem) -> float:
    return price(lower(plan, problem), MODEL).total_ms


@pytest.mark.parametrize("most", [0, 1, 3, None])
def test_no_more_tables_move_than_may_and_the_plan_is_no_dearer(problem, old, most):
    found = replan(old, problem, MODEL, ReplanConfig(most, budget=BUDGET))
    assert len(diff_plans(old, found).moves) <= (12 if most is None else most) and cost(
        found, problem
    ) <= cost(old, problem)


def test_for_a_thousandth_of_the_cost_nothing_moves(problem):
    heavy = (replace(t, pooling=200 * t.pooling) for t in problem.tables)
    tables = (*heavy, Table("crumb", 100, 4, 0.05))
    problem = replace(problem, tables=tables, topology=Topology((Device(1 << 30),) * 4))
    best = SHARDERS["anneal_columns"](problem, MODEL, budget=Budget(evals=50_000))
    slowest = int(np.argmax(price(lower(best, problem), MODEL).compute_ms))
    others = (p for p in best.placements if p.shard.table.name != "crumb")
    old = Plan((*others, Placement("column", Shard.whole(tables[-1]), (slowest,))))
    assert 1 + 1e-6 < cost(old, problem) / cost(best, problem) < 1.001
    assert set(replan(old, problem, MODEL, ReplanConfig(space="columns", budget=BUDGET)).placements) == set(
        old.placements
    )


def test_a_plan_that_is_kept_keeps_its_columns(problem):
    """Also where a plan of a search would number them in another order."""
    table, free = problem.tables[0], [p for p in SHARDERS["size_greedy"](problem, MODEL).placements]
    halves = (Shard(table, 0, table.rows, lo, lo + table.dim // 2) for lo in (0, table.dim // 2))
    apart = [Placement("column", half, (d,)) for half, d in zip(halves, (2, 0), strict=True)]
    old = Plan((*(p for p in free if p.shard.table != table), *apart))
    kept = replan(old, problem, MODEL, ReplanConfig(0, budget=BUDGET))
    assert not diff_plans(old, kept).moves and set(kept.placements) == set(old.placements)


def test_no_more_bytes_move_than_may(problem, old):
    found = replan(old, problem, MODEL, ReplanConfig(max_moved_bytes=100_000, budget=BUDGET))
    assert 0 < diff_plans(old, found).bytes <= 100_000


@pytest.mark.parametrize("space, kept", [(None, "halves"), ("columns", "columns")])
def test_it_is_searched_where_the_old_plan_was_unless_told(problem, old, space, kept):
    by_halves = Plan(old.placements, {"space": "halves"})
    found = replan(by_halves, problem, MODEL, ReplanConfig(space=space, seed=5, budget=BUDGET))
    assert (
        found.provenance["space"] == kept
        and found.provenance["seed"] == 5
        and found.provenance["evals"] <= 4_000
    )


def test_what_is_new_or_was_on_a_device_that_is_gone_is_placed_and_does_not_count(problem, old):
    tables = (*problem.tables, Table("new", 200, 16, 3.0))
    fewer = replace(problem, topology=Topology(problem.topology.devices[:3]), tables=tables)
    found = replan(old, fewer, MODEL, ReplanConfig(0, budget=BUDGET))
    homes = {p.shard.table.name: p.devices for p in found.placements}
    stay = [p for p in old.placements if p.devices != (3,)]
    assert (
        0 < len(stay) < 12
        and all(homes[p.shard.table.name] == p.devices for p in stay)
        and lower(found, fewer)
    )


def test_what_a_device_cannot_hold_any_more_has_to_move(problem):
    """Memory shrank, or tables grew."""
    alone = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in problem.tables))
    total = sum(t.bytes for t in problem.tables)
    roomy = replace(problem, topology=Topology((Device(2 * total),) * 4))
    smaller = replace(roomy, topology=Topology((Device(total * 2 // 3), *roomy.topology.devices[1:])))
    grown = replace(roomy, tables=tuple(replace(t, rows=3 * t.rows) for t in problem.tables))
    for now in (smaller, grown):
        forced = tables_forced_to_move(alone, now)
        found = replan(alone, now, MODEL, ReplanConfig(0, budget=BUDGET))
        moved = diff_plans(alone, found, now, forced)
        assert lower(found, now) and 0 < len(forced) < 12
        assert {m.table for m in moved.forced_moves.moves} == forced and not moved.voluntary_moves.moves
        assert moved.forced_moves.bytes == sum(t.bytes for t in problem.tables if t.name in forced)
        text = plan_report.replan_text(moved, ReplanConfig(0))
        assert "had to" in text and "nothing by choice; " in text
        assert "more than the limit of 0 tables, which does not count what had to move" in text
        assert "the limit" not in plan_report.replan_text(moved, ReplanConfig(12))
    assert not tables_forced_to_move(alone, roomy)


def test_rows_that_grow_do_not_escape_the_limits(problem, old):
    grown = replace(
        problem,
        tables=tuple(
            replace(t, rows=t.rows * 3 // 2, pooling=t.pooling * (1 + i % 3))
            for i, t in enumerate(problem.tables)
        ),
        topology=Topology((Device(8 * MIB),) * 4),
    )
    for config in (ReplanConfig(2, budget=BUDGET), ReplanConfig(max_moved_bytes=300_000, budget=BUDGET)):
        moved = diff_plans(old, replan(old, grown, MODEL, config), grown)
        assert not moved.added and max(config.moves_beyond_limits(moved)) <= 0 and len(moved.resized) == 12
    assert diff_plans(old, replan(old, grown, MODEL, ReplanConfig(2, budget=BUDGET))).moves


@pytest.mark.parametrize("gone", [(0,), (1,), (3,), (0, 2)])
@pytest.mark.parametrize("replaced", [True, False], ids=["stays in the problem", "leaves it"])
def test_tables_of_a_named_device_move_and_the_others_stay(problem, old, gone, replaced):
    devices = problem.topology.devices
    fewer = problem if replaced else replace(problem, topology=Topology(devices[len(gone) :]))
    was, of = renumber_devices(old, problem, fewer, gone)
    found = replan(was, of, MODEL, ReplanConfig(0, budget=BUDGET))
    moved = diff_plans(was, found, fewer, tables_forced_to_move(was, of))
    on_gone = {p.shard.table.name for p in old.placements if p.devices[0] in gone}
    assert (
        {m.table for m in moved.forced_moves.moves} == on_gone and not moved.voluntary_moves.moves and on_gone
    )
    assert lower(found, fewer)
    left = [d for d in range(4) if d not in gone]
    homes = {p.shard.table.name: p.devices[0] for p in found.placements}
    now = {d: d if replaced else left.index(d) for d in left}
    assert all(
        homes[p.shard.table.name] == now[p.devices[0]]
        for p in old.placements
        if p.shard.table.name not in on_gone
    )
    assert set(homes.values()) <= set(now.values())


def test_what_has_to_move_is_cut_where_no_device_has_room_for_it_whole():
    """Two of three devices stay, each with room for half of a table."""
    tables = tuple(Table(f"t{i}", 4000, 64, 2.0) for i in range(3))
    size = tables[0].bytes
    problem = Problem("tight", tables, Topology((Device(size + size // 2 + 450_000),) * 3), 240)
    old = Plan(tuple(Placement("column", Shard.whole(t), (i,)) for i, t in enumerate(tables)))
    fewer = replace(problem, topology=Topology(problem.topology.devices[:2]))
    was, of = renumber_devices(old, problem, fewer, (0,))
    for config in (ReplanConfig(0, budget=BUDGET), ReplanConfig(max_moved_bytes=0, budget=BUDGET)):
        found = replan(was, of, MODEL, config)
        assert {p.shard.table.name: p.devices for p in found.placements if p.shard.width == 64} == {
            "t1": (0,),
            "t2": (1,),
        }
        assert sorted(p.devices for p in found.placements if p.shard.table.name == "t0") == [(0,), (1,)]
        assert lower(found, fewer)
    whole = replace(fewer, constraints=Constraints(unsplit=("t0",)))
    with pytest.raises(Infeasible):
        replan(was, whole, MODEL, ReplanConfig(0, budget=BUDGET))


def test_devices_that_cannot_be_gone_are_refused_by_name(problem, old):
    three = replace(problem, topology=Topology(problem.topology.devices[:3]))
    for gone, now, said in (
        ((4,), problem, "device 4 of problem 'again'.*0 to 3"),
        ((0, 1, 2, 3), problem, "all 4 devices"),
        (
            (1,),
            replace(three, topology=Topology(three.topology.devices[:2])),
            "has 2 devices; 'again' has 3 without device 1",
        ),
    ):
        with pytest.raises(ShardCoreError, match=said):
            renumber_devices(old, problem, now, gone)
    pinned = replace(problem, constraints=Constraints(pinned=(("t3", (2,)),)))
    with pytest.raises(Infeasible, match="'t3' may live on device 2 only"):
        renumber_devices(old, pinned, pinned, (2,))


def test_limits_that_mean_nothing_are_refused():
    for given in ({"max_moved_tables": -1}, {"max_moved_bytes": 1 << 63}):
        with pytest.raises(ShardCoreError, match=f"re-plan config has {next(iter(given))}"):
            ReplanConfig(**given)


def test_a_plan_that_no_search_can_start_from_gives_way_to_one_afresh_unless_moves_are_limited(problem, old):
    alone = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in problem.tables))
    half = Device(sum(t.bytes for t in problem.tables) // 2)
    small = replace(problem, topology=Topology((half, *problem.topology.devices[1:])))
    assert lower(replan(alone, small, MODEL, ReplanConfig(budget=BUDGET)), small)
    on_two = Plan((replace(old.placements[0], devices=(0, 1)), *old.placements[1:]))
    with pytest.raises(ShardCoreError, match="a shard lives on one"):
        replan(on_two, problem, MODEL, ReplanConfig(3, budget=BUDGET))
    assert lower(replan(on_two, problem, MODEL, ReplanConfig(budget=BUDGET)), problem)
    with pytest.raises(Infeasible):
        replan(
            old, replace(problem, topology=Topology((Device(1000),) * 4)), MODEL, ReplanConfig(budget=BUDGET)
        )


@pytest.mark.parametrize("config", [ReplanConfig(budget=BUDGET), ReplanConfig(2, budget=BUDGET)])
def test_a_plan_stays_if_no_cheaper_one_is_found(problem, old, config, monkeypatch):
    """The search finds none at all, or a dearer one."""
    dear = SHARDERS["random"](problem, MODEL)

    def none(*args, **given):
        raise Infeasible("no plan")

    for search in (none, lambda *args, **given: dear):
        monkeypatch.setattr("shardcore.plans.replan.search_with_annealing", search)
        found = replan(old, problem, MODEL, config)
        assert found.placements == old.placements
        assert found.provenance["predicted_ms"] == cost(old, problem)
    by_rows = SHARDERS["anneal"](problem, MODEL, budget=BUDGET)
    found = replan(by_rows, problem, MODEL, replace(config, space="columns"))
    assert {p.kind for p in found.placements} == {"column"}  # a plan of another space does not stay


def test_where_all_tables_are_new_it_searches_afresh(problem, old):
    others = replace(problem, tables=tuple(replace(t, name=f"new-{t.name}") for t in problem.tables))
    found = replan(old, others, MODEL, ReplanConfig(0, budget=BUDGET))
    assert lower(found, others) and {p.shard.table for p in found.placements} == set(others.tables)


def test_a_table_with_a_part_on_a_device_that_is_gone_is_placed_anew(problem, old):
    cut, *others = old.placements
    table = cut.shard.table
    halves = [
        Placement("column", Shard(table, 0, table.rows, lo, lo + 8), (d,)) for lo, d in ((0, 0), (8, 3))
    ]
    stay = [p for p in others if p.devices != (3,)]
    fewer = replace(problem, topology=Topology(problem.topology.devices[:3]))
    found = replan(Plan((*halves, *others)), fewer, MODEL, ReplanConfig(0, budget=BUDGET))
    assert lower(found, fewer) and set(stay) <= set(found.placements)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_tables_that_are_kept_together_count_each(problem, most):
    together = replace(
        problem,
        constraints=Constraints(together=(tuple(f"t{i}" for i in range(4)),)),
        topology=Topology((Device(8 * MIB),) * 4),
    )
    alone = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in problem.tables))
    found = replan(alone, together, MODEL, ReplanConfig(most, budget=BUDGET))
    assert 0 < len(diff_plans(alone, found).moves) <= most and cost(found, together) < cost(alone, together)


@pytest.mark.parametrize("seed", range(3))
def test_no_more_bytes_of_cut_tables_move_than_may(seed):
    """Columns that a device keeps may have other numbers once they are dealt out in order."""
    rng, placements = np.random.default_rng(seed), []
    tables = tuple(
        Table(f"t{i}", int(rng.integers(500, 8000)), 64, float(rng.uniform(1, 30))) for i in range(5)
    )
    for table in tables:
        low = 0
        for device, blocks in zip(rng.permutation(4)[:3], rng.multinomial(13, [1 / 3] * 3) + 1, strict=True):
            high = low + 4 * int(blocks)
            placements.append(Placement("column", Shard(table, 0, table.rows, low, high), (int(device),)))
            low = high
    problem, old = Problem("cut", tables, Topology((Device(8 * MIB),) * 4), 240), Plan(tuple(placements))
    found = replan(old, problem, MODEL, ReplanConfig(max_moved_bytes=150_000, space="columns", budget=BUDGET))
    assert diff_plans(old, found).bytes <= 150_000 and cost(found, problem) <= cost(old, problem)


def test_what_constraints_move_does_not_count(problem, old):
    """One table is pinned elsewhere, another is to be divided over all devices."""
    homes = {p.shard.table.name: p.devices[0] for p in old.placements}
    asked = Constraints(pinned=(("t0", ((homes["t0"] + 1) % 4,)),), kinds=(("t1", ("row",)),))
    found = replan(old, replace(problem, constraints=asked), MODEL, ReplanConfig(0, budget=BUDGET))
    assert {m.table for m in diff_plans(old, found).moves} == {"t0", "t1"}
