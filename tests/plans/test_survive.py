"""Plans for the loss of a rank or a host, made before the loss."""

from dataclasses import replace

import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Topology
from shardcore.core.types import Problem, Table
from shardcore.cost.profile import load_profile
from shardcore.plans.diff import diff_plans
from shardcore.plans.replan import renumber_devices
from shardcore.plans.survive import prepare_plans, read_prepared_plan, write_prepared_plan
from shardcore.report.survive_report import prepared_plans_text
from shardcore.search import SHARDERS, Budget
from shardcore.step.lower import require_valid_plan

FEW = Budget(evals=300)
TABLES = tuple(Table(f"t{i}", 20_000 * (i + 1), 32, 4.0, Zipf(1.0)) for i in range(9))
MODEL = load_profile("nvidia-h100-sxm").cost_model()


def problem_on(topology, **fields):
    return Problem("job", TABLES, topology, 8 * 16 * len(topology), **fields)


def prepared(problem, unit):
    plan = SHARDERS["size_greedy"](problem, MODEL.for_problem(problem))
    return plan, list(prepare_plans(plan, problem, MODEL, unit, budget=FEW))


def test_ranks_of_a_host_are_one_loss_with_a_plan_for_the_rest():
    problem = problem_on(Topology.of_hosts(1, 4, 1.0))
    _, [one] = prepared(problem, "rank")
    assert one.losses == ("rank 0", "rank 1", "rank 2", "rank 3") and one.reason == ""
    assert len(one.problem.topology) == 3 and one.problem.local_batch == problem.local_batch
    require_valid_plan(one.plan, one.problem)
    state_bytes = sum(t.bytes for t in TABLES) / 3
    assert one.read_bytes >= state_bytes and one.moved_tables >= 1


def test_losses_that_leave_other_devices_have_plans_of_their_own():
    """Without a rank of the first of two hosts, ranks 0 and 1 share none; so with one of the last."""
    two_hosts = problem_on(Topology.of_hosts(2, 2, 1.0))
    assert [one.losses for one in prepared(two_hosts, "rank")[1]] == [
        ("rank 0", "rank 1"),
        ("rank 2", "rank 3"),
    ]
    [host] = prepared(two_hosts, "host")[1]
    assert host.losses == two_hosts.topology.hosts and len(host.problem.topology) == 2
    unequal = [replace(d, speed=1.0 + (i == 0)) for i, d in enumerate(two_hosts.topology.devices)]
    topology = two_hosts.topology.with_devices(unequal)
    assert len(prepared(problem_on(topology), "rank")[1]) == 3


def test_tables_of_devices_that_stay_keep_their_places_where_that_costs_little():
    problem = problem_on(Topology.of_hosts(1, 8, 1.0))
    plan = SHARDERS["portfolio"](problem, MODEL.for_problem(problem), budget=Budget(evals=3000))
    [one] = prepare_plans(plan, problem, MODEL, "rank", budget=FEW)
    of_lost = {p.shard.table.name for p in plan.placements if 0 in p.devices}
    moved = {move.table for move in diff_plans(*renumbered(plan, problem, one)).moves}
    assert moved == of_lost and one.moved_tables == len(moved)
    fresh = SHARDERS["portfolio"](one.problem, MODEL.for_problem(one.problem), budget=FEW)
    assert one.plan.provenance["predicted_ms"] <= 1.05 * fresh.provenance["predicted_ms"]


def renumbered(plan, problem, one):
    old, now = renumber_devices(plan, problem, one.problem, [0])
    return old, one.plan, now


def test_a_loss_that_leaves_too_little_memory_has_the_reason_and_no_plan():
    n_bytes = sum(t.bytes for t in TABLES)
    problem = problem_on(Topology.of_hosts(1, 2, 0.75 * n_bytes / 2**30))
    _, [one] = prepared(problem, "rank")
    assert one.plan is None and "fit" in one.reason
    assert "no plan without rank 0 (and 1 like it): " in prepared_plans_text([one], 1.0)


def test_pins_to_devices_that_are_gone_go_with_them():
    pins = Constraints(pinned=(("t0", (0,)), ("t1", (0, 3))))
    _, [one] = prepared(problem_on(Topology.of_hosts(1, 4, 1.0), constraints=pins), "rank")[0:2]
    assert dict(one.problem.constraints.pinned) == {"t1": (2,)}


def test_a_job_of_one_rank_or_host_is_refused():
    problem = problem_on(Topology.of_hosts(1, 1, 1.0))
    plan = SHARDERS["size_greedy"](problem, MODEL.for_problem(problem))
    for unit in ("rank", "host"):
        with pytest.raises(ShardCoreError, match=f"has one {unit}; a job that loses it has none left"):
            list(prepare_plans(plan, problem, MODEL, unit))


def test_a_restarted_job_reads_the_plan_for_its_devices(tmp_path):
    """Statistics of its tables may differ, and other files and plans in the folder do not matter."""
    problem = problem_on(Topology.of_hosts(1, 4, 1.0))
    _, [one] = prepared(problem, "rank")
    write_prepared_plan(tmp_path, one)
    (tmp_path / "damaged.plan.json").write_text("{")
    tables = tuple(replace(t, pooling=5.0) for t in TABLES)
    three = Problem("model", tables, Topology.of_hosts(1, 3, 1.0), 3 * 128)
    found = read_prepared_plan(tmp_path, three, MODEL.for_problem(three))
    require_valid_plan(found, three)
    assert found.provenance["prepared"].endswith("without-rank-0.plan.json")
    places = {(p.shard.table.name, p.shard.col_lo, p.devices) for p in one.plan.placements}
    assert {(p.shard.table.name, p.shard.col_lo, p.devices) for p in found.placements} == places
    with pytest.raises(ShardCoreError, match="absent'; it needs to be a folder of `plan --survive`"):
        read_prepared_plan(tmp_path / "absent", three, MODEL.for_problem(three))
    two = Problem("model", tables, Topology.of_hosts(1, 2, 1.0), 2 * 128)
    other = replace(three, tables=(replace(TABLES[0], name="other"), *tables[1:]))
    for changed in (two, other):
        assert read_prepared_plan(tmp_path, changed, MODEL.for_problem(changed)) is None
