"""Tables that a given kind has to run, beside others that are searched."""

from dataclasses import replace

import pytest
from conformance import draw_problem, model_for
from shapes import column, with_room

from shardcore.constraints import Constraints
from shardcore.errors import Infeasible, ShardCoreError
from shardcore.memory import used_bytes
from shardcore.publish.replan import ReplanConfig, replan
from shardcore.search import SHARDERS, Budget
from shardcore.search.fixed_kinds import set_aside
from shardcore.topology import Device, Topology
from shardcore.types import Placement, Plan, Problem
from shardcore.workload import lower

MIB = 2**20
ASKED = {"t0": "data_parallel", "t2": "row"}


def problem(kinds: dict[str, str] = ASKED, memory_bytes: int = MIB) -> Problem:
    return replace(with_room(draw_problem(3, 8, [memory_bytes] * 2)),
                   constraints=Constraints(kinds=tuple((name, (kind,)) for name, kind in kinds.items())))


def plan(of: Problem, algorithm: str = "size_greedy") -> Plan:
    return SHARDERS[algorithm](of, model_for(of), budget=Budget(evals=200))


def kinds(found: Plan) -> dict[str, str]:
    return {p.shard.table.name: p.kind for p in found.placements}


def test_tables_are_run_as_asked_and_priced_with_the_others():
    found = plan(problem())
    assert {name: kinds(found)[name] for name in ASKED} == ASKED
    assert len(kinds(found)) == 8
    assert found.provenance["algorithm"] == "size_greedy"
    others = plan(problem({}))
    assert found.provenance["predicted_ms"] != others.provenance["predicted_ms"]


def test_a_plan_by_another_kind_is_refused():
    with pytest.raises(ShardCoreError, match=r"by column; it needs \w+ \(constraints.kinds\)"):
        lower(plan(problem({})), problem())


def test_an_unknown_kind_is_refused():
    with pytest.raises(ShardCoreError, match="has kind 'magic'; known are"):
        plan(problem({"t0": "magic"}))


def test_a_table_that_none_of_its_kinds_can_run_is_refused_with_those_that_can():
    one = replace(problem(), topology=Topology((Device(64 * MIB),)))
    with pytest.raises(ShardCoreError, match=r"runs table 't0' by data_parallel \(constraints.kinds\): no "
                       r"devices share .* It needs column"):
        plan(one)


def test_tables_that_do_not_fit_are_refused_by_what_they_take():
    large = problem({f"t{i}": "data_parallel" for i in range(7)}, memory_bytes=20_000)
    with pytest.raises(Infeasible, match=r"has 7 tables that constraints.kinds puts on every device; they "
                       r"take .* of each, and .* is free"):
        plan(large)


def test_what_they_take_is_not_given_to_others():
    of = problem({f"t{i}": "data_parallel" for i in range(4)}, 64 * MIB)
    fixed, others = set_aside(of)
    all_on_first = Plan((*fixed, *(column(t, 0) for t in others.tables)))
    # The second device has room for the replicas, and for next to nothing else.
    devices = tuple(replace(d, memory_bytes=m) for d, m in zip(
        of.topology.devices, (64 * MIB, used_bytes(all_on_first, of)[1] + 1000), strict=True))
    found = plan(replace(of, topology=Topology(devices)))
    assert {p.devices for p in found.placements if p.kind == "column"} == {(0,)}


def test_unknown_tables_are_refused():
    with pytest.raises(ShardCoreError, match="constraints.kinds of \\['absent'\\], which it does not have"):
        problem({"absent": "row"})


def test_a_plan_is_improved_with_its_kinds_kept():
    of = problem()
    old = plan(of, "random")
    found = replan(old, of, model_for(of), ReplanConfig(max_moved_tables=2, budget=Budget(evals=300)))
    assert {name: kinds(found)[name] for name in ASKED} == ASKED
    was = {p.shard.table.name: p.devices for p in old.placements if isinstance(p, Placement)}
    moved = {p.shard.table.name for p in found.placements if was[p.shard.table.name] != p.devices}
    assert len(moved) <= 2


@pytest.mark.parametrize("others", [{"pinned": (("t2", (0,)),)}, {"together": (("t1", "t2"),)},
                                    {"unsplit": ("t2",)}])
def test_constraints_that_contradict_each_other_are_both_named(others):
    asked = problem({"t2": "row"})
    asked = replace(asked, constraints=replace(asked.constraints, **others))
    [name] = others
    with pytest.raises(ShardCoreError, match=rf"table 't2' in constraints.kinds \(row, on all devices\) and "
                       rf"in constraints.{name}; it needs to be in one"):
        plan(asked)
