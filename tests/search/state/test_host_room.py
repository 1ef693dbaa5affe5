"""Plans with rows in host memory fit in the memory of every host."""

from dataclasses import replace

import pytest

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.plans.diff import diff_plans
from shardcore.plans.replan import ReplanConfig, replan
from shardcore.search import SHARDERS, Budget
from shardcore.step.lower import lower

MODEL = AnalyticModel(Setting("made-up", 64))
TABLES = tuple(Table(f"h{i}", 10_000, 16, 5.0, load_factor=0.0) for i in range(4))
FAST_FIRST = (*(Device(1 << 26, 4.0, "a"),) * 2, *(Device(1 << 26, 1.0, "b"),) * 2)
PROBLEM = Problem(
    "hosts", TABLES, Topology(FAST_FIRST, memory=(Memory("host", 5 * TABLES[0].bytes // 2, 25.0),)), 64
)


@pytest.mark.parametrize("name", SHARDERS)
def test_tables_in_host_memory_are_spread_over_hosts_where_one_does_not_hold_them(name):
    """A host holds two tables. The first one's devices are four times as fast, so that searches prefer it."""
    plan = SHARDERS[name](PROBLEM, MODEL, budget=Budget(evals=500))
    assert lower(plan, PROBLEM) and plan.provenance["algorithm"] == name
    assert sum(p.devices[0] < 2 for p in plan.placements) == 2


@pytest.mark.parametrize("name", ["size_greedy", "neuroshard", "anneal"])
def test_hosts_hold_tables_to_the_byte(name):
    memory = Memory("host", 2 * TABLES[0].bytes, 10.0)
    exactly = replace(PROBLEM, topology=replace(PROBLEM.topology, memory=(memory,)))
    assert lower(SHARDERS[name](exactly, MODEL, budget=Budget(evals=500)), exactly)
    smaller = replace(memory, bytes=memory.bytes - 1)
    kinds, names = tuple((t.name, ("column",)) for t in TABLES), tuple(t.name for t in TABLES)
    whole = Constraints(kinds=kinds, unsplit=names)
    less = replace(PROBLEM, topology=replace(PROBLEM.topology, memory=(smaller,)), constraints=whole)
    with pytest.raises(
        Infeasible,
        match=r"host '[ab]' of problem 'hosts' would hold .* of rows in host "
        r"memory; it may hold 1.2 MiB there, .* too little",
    ):
        SHARDERS[name](less, MODEL, budget=Budget(evals=500))


def test_what_no_host_holds_is_refused():
    with pytest.raises(Infeasible, match="host 'a' of problem 'hosts' would hold"):
        small = replace(PROBLEM.topology, memory=(Memory("host", TABLES[0].bytes - 1, 25.0),))
        SHARDERS["size_greedy"](replace(PROBLEM, topology=small), MODEL)


def test_what_is_pinned_takes_room_and_what_is_kept_together_stays_so():
    """A table is pinned to the first host, so the two that are kept together go to the other."""
    constraints = Constraints(pinned=(("h0", (0,)),), together=(("h1", "h2"),))
    plan = SHARDERS["size_greedy"](replace(PROBLEM, constraints=constraints), MODEL)
    home = {p.shard.table.name: PROBLEM.topology.devices[p.devices[0]].host for p in plan.placements}
    assert home == {"h0": "a", "h1": "b", "h2": "b", "h3": "a"}


def test_re_plans_fit_in_host_memory_too():
    old = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in TABLES))
    plan = replan(old, PROBLEM, MODEL, ReplanConfig(budget=Budget(evals=500)))
    assert lower(plan, PROBLEM)


def test_tables_leave_a_host_that_holds_too_much_within_the_limits():
    """All four are on the first device, whose host holds two."""
    equal = tuple(replace(device, speed=1.0) for device in FAST_FIRST)
    problem = replace(PROBLEM, topology=replace(PROBLEM.topology, devices=equal))
    old = Plan(tuple(Placement("column", Shard.whole(t), (0,)) for t in TABLES))
    plan = replan(old, problem, MODEL, ReplanConfig(2, budget=Budget(evals=500)))
    assert lower(plan, problem) and len(diff_plans(old, plan).moves) == 2
    with pytest.raises(Infeasible):
        replan(old, problem, MODEL, ReplanConfig(1, budget=Budget(evals=500)))
