"""The predicted effect of a move of one shard, against the price of the changed plan."""

import re
from dataclasses import replace

import numpy as np
import pytest
from laws import SETTING, trained

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.job import Job
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price_plan
from shardcore.cost.profile import load_profile
from shardcore.plans import what_if as what_if_of
from shardcore.plans.what_if import WhatIf, price_single_moves
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.step.kinds import merged_placements
from shardcore.step.memory import plan_fits

MIB = 1 << 20
TABLES = (
    *(Table(f"t{i}", 200 * (i + 1), 16, 1.0 + i % 5, Zipf(1.0)) for i in range(14)),
    *(Table(f"s{i}", 900, 8, 3.0, collection="clicks", sequence=True) for i in range(3)),
    Table("rows", 5000, 16, 2.0),
    Table("copies", 50, 8, 1.0),
)
PROBLEM = Problem(
    "mixed",
    TABLES,
    Topology(tuple(Device(4 * MIB, host=f"h{i // 2}", speed=1.0 + (i == 3)) for i in range(4))),
    SETTING.batch,
    constraints=Constraints(pinned=(("t0", (0, 1)),), together=(("t1", "t2"),)),
)


def mixed_plan() -> Plan:
    """Whole tables in turn, one cut in two, one divided by rows, one replicated; t1 and t2 stay together."""
    placements = [
        Placement("column", Shard.whole(t), (i % 4,)) for i, t in enumerate(TABLES[:17]) if i not in (1, 2, 5)
    ]
    placements += [Placement("column", Shard.whole(TABLES[i]), (1,)) for i in (1, 2)]
    cut = TABLES[5]
    placements += [Placement("column", Shard(cut, 0, cut.rows, 8 * k, 8 * k + 8), (3 * k,)) for k in range(2)]
    placements.append(Placement("row", Shard.whole(TABLES[17]), (0, 1, 2, 3)))
    placements.append(Placement("data_parallel", Shard.whole(TABLES[18]), (0, 1, 2, 3)))
    return Plan(tuple(placements))


@pytest.fixture(scope="session")
def model():
    return trained()


def moved(move, plan: Plan) -> Plan:
    """The plan after a move."""
    placements = merged_placements(plan.placements)
    at = next(i for i, p in enumerate(placements) if (p.shard, p.devices) == (move.shard, move.devices[:1]))
    return Plan((*placements[:at], replace(placements[at], devices=move.devices[1:]), *placements[at + 1 :]))


def all_moves(known) -> list:
    return [move for of_table in known.of_table.values() for move in of_table]


def require_priced(moves, plan, problem, model) -> None:
    """Each move is priced as the plan after it."""
    for move in moves:
        after = price_plan(moved(move, plan), problem, model, fits=False)
        cost, used = after.cost, after.workload.memory_bytes
        assert move.total_ms == pytest.approx(cost.total_ms, rel=1e-9)
        busy = np.array(cost.compute_ms) + cost.forward_comm_ms + cost.backward_comm_ms
        for x in move.changed:
            assert (
                x.busy_ms == pytest.approx(busy[x.device], rel=1e-9)
                and abs(x.used_bytes - used[x.device]) <= 1
            )
        last = int(np.argmax(np.array(cost.compute_ms) + cost.backward_comm_ms))
        assert move.last == last
        assert [x.device for x in move.changed] == [*dict.fromkeys((*move.devices, last))]
        assert bool(move.refused) == (not plan_fits(after.plan, problem))


@pytest.mark.parametrize("name", ["closed form", "profile", "trained"])
def test_all_moves_are_priced_as_the_plans_after_them(name, monkeypatch):
    monkeypatch.setattr(what_if_of, "OF_TABLE", 99)
    models = {
        "closed form": lambda: AnalyticModel(SETTING),
        "profile": lambda: load_profile("nvidia-h100-sxm").cost_model(),
        "trained": trained,
    }
    plan, model = mixed_plan(), models[name]().for_problem(PROBLEM)
    known = price_single_moves(price_plan(plan, PROBLEM, model), PROBLEM, model)
    moves = all_moves(known)
    assert len(moves) > 30
    require_priced(moves, plan, PROBLEM, model)
    totals = sorted(move.total_ms for move in moves if not move.refused)
    assert [move.total_ms for move in known.best] == totals[: what_if_of.BEST]


def test_a_move_to_a_full_device_says_what_it_lacks():
    small = replace(PROBLEM.topology.devices[2], memory_bytes=1 << 19)
    devices = [small if i == 2 else d for i, d in enumerate(PROBLEM.topology.devices)]
    problem = replace(PROBLEM, topology=PROBLEM.topology.with_devices(devices), constraints=Constraints())
    plan = Plan(tuple(replace(p, devices=(0,)) if p.devices == (2,) else p for p in mixed_plan().placements))
    model = AnalyticModel(SETTING)
    known = price_single_moves(price_plan(plan, problem, model, fits=False), problem, model)
    refused = [move for move in all_moves(known) if move.refused]
    require_priced(all_moves(known), plan, problem, model)
    assert refused and all(re.match("device 2 lacks ", move.refused) for move in refused)


def test_a_shard_moves_only_where_its_table_may_and_not_onto_columns_of_its_own(monkeypatch):
    monkeypatch.setattr(what_if_of, "OF_TABLE", 99)
    model = AnalyticModel(SETTING)
    known = price_single_moves(price_plan(mixed_plan(), PROBLEM, model), PROBLEM, model)
    assert [move.devices for move in known.of_table["t0"]] == [(0, 1)]  # pinned
    assert {move.devices for move in known.of_table["t5"]} == {(0, 1), (0, 2), (3, 1), (3, 2)}
    assert not {"t1", "t2", "rows", "copies"} & {*known.of_table}
    assert known.stays["t1"] == "it needs to stay together with t2 (constraints.together)"


def test_of_each_table_the_best_moves_are_kept_those_that_fit_first():
    model = AnalyticModel(SETTING)
    known = price_single_moves(price_plan(mixed_plan(), PROBLEM, model), PROBLEM, model)
    for moves in known.of_table.values():
        order = [(bool(move.refused), move.total_ms) for move in moves]
        assert order == sorted(order) and len(order) <= what_if_of.OF_TABLE
    assert len(known.best) == what_if_of.BEST


def test_of_very_large_plans_few_moves_are_looked_at(monkeypatch):
    model = AnalyticModel(SETTING)
    whole = price_single_moves(price_plan(mixed_plan(), PROBLEM, model), PROBLEM, model)
    monkeypatch.setattr(what_if_of, "_WORK", 1)
    monkeypatch.setattr(what_if_of, "_AT_ONCE", 1)
    monkeypatch.setattr(what_if_of, "OF_TABLE", 1)
    few = price_single_moves(price_plan(mixed_plan(), PROBLEM, model), PROBLEM, model)
    assert {*few.of_table} == {*whole.of_table} and all(len(moves) == 1 for moves in few.of_table.values())
    require_priced(few.best, mixed_plan(), PROBLEM, model)


def test_a_plan_without_shards_of_one_device_has_no_moves():
    problem = replace(PROBLEM, tables=(TABLES[17],), constraints=Constraints())
    plan = Plan((Placement("row", Shard.whole(TABLES[17]), (0, 1, 2, 3)),))
    known = price_single_moves(
        price_plan(plan, problem, AnalyticModel(SETTING)), problem, AnalyticModel(SETTING)
    )
    assert known == WhatIf()


@pytest.mark.parametrize("gbps", [1e-4, 10.0])
def test_moves_of_other_tables_leave_what_a_cache_fetches(gbps):
    cached = replace(TABLES[13], load_factor=0.1)
    topology = replace(PROBLEM.topology, memory=(Memory("host", 1 << 30, gbps),))
    problem = replace(
        PROBLEM, tables=(*TABLES[:13], cached, *TABLES[14:]), topology=topology, job=Job("prefetch")
    )
    plan = rebind_tables(mixed_plan(), problem)
    model = load_profile("nvidia-h100-sxm").cost_model().for_problem(problem)
    priced = price_plan(plan, problem, model)
    known = price_single_moves(priced, problem, model)
    assert known.stays["t13"] == "some of its rows are not in device memory"
    require_priced(all_moves(known), plan, problem, model)
    assert any(priced.cost.fetch_wait_ms) == (gbps < 1)
