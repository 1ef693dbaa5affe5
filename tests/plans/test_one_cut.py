"""One cut for many machines: what is the same on all, what a machine without a plan says, and that it repeats."""

from dataclasses import replace
from functools import partial

import pytest

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price_plan
from shardcore.plans.one_cut import cut_of_plan, plan_each, plan_with_cut
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.provision import Offer
from shardcore.step.kinds import sharding_kind_by_name
from shardcore.step.ways import consolidate_placements

GIB = 1 << 30
BATCH = 4096
TABLES = (
    Table("hot", 2_000_000, 128, 60.0),
    Table("wide", 500_000, 128, 30.0),
    *(Table(f"t{i}", 100_000 * (i + 1), 64, 5.0 + i) for i in range(6)),
    Table("tiny", 200, 32, 3.0),
)
PROBLEM = Problem("p", TABLES, Topology.of_hosts(1, 2, memory_gib=8), BATCH, "rowwise_adagrad")
FAST = AnalyticModel(Setting("gpu", BATCH, optimizer="rowwise_adagrad"), lookup_ns=2.0)
SLOW = AnalyticModel(Setting("gpu", BATCH, optimizer="rowwise_adagrad"), lookup_ns=50.0)
MODELS = {"fast": FAST, "slow": SLOW}
LINKS = make_links(within_host=200.0, between_hosts=25.0)
FOUR = Offer("four", 4, 8 * GIB, 1.0, "fast", links=make_links(within_host=200.0))
TWO_HOSTS = Offer("two hosts", 4, 4 * GIB, 1.0, "slow", most_hosts=2, links=LINKS)
SEARCH = partial(SHARDERS["portfolio"], budget=Budget(evals=600))


def plans_of(found) -> list[Plan]:
    return [outcome.found.plan for outcome, _ in found]


def each(*offers: Offer, problem: Problem = PROBLEM, same: str = "columns"):
    return plan_each(problem, offers, MODELS, SEARCH, same)


def column_ranges(plan: Plan) -> dict[str, set[tuple[int, int]]]:
    return {
        name: {(p.shard.col_lo, p.shard.col_hi) for p in placements}
        for name, placements in plan.placements_by_table().items()
    }


@pytest.mark.parametrize("same", ["columns", "replicas", "kinds"])
def test_tables_have_the_same_columns_on_one_host_and_on_two_and_what_else_was_asked_for(same):
    found = each(FOUR, TWO_HOSTS, same=same)
    one, other = plans_of(found)
    assert column_ranges(one) == column_ranges(other)
    of_kind = {
        "columns": lambda kind: None,
        "replicas": lambda kind: sharding_kind_by_name(kind).dense_gradient,
    }.get(same, lambda kind: kind)
    kinds = [{p.shard.table.name: of_kind(p.kind) for p in plan.placements} for plan in (one, other)]
    assert kinds[0] == kinds[1]
    for outcome, own_ms in found:
        priced = price_plan(outcome.found.plan, outcome.found.problem, MODELS[outcome.proposal.model])
        assert outcome.ms == pytest.approx(priced.cost.total_ms) and outcome.ms >= own_ms * (1 - 1e-9)


def test_no_two_parts_of_a_table_are_on_one_device():
    # The hot table is cut on eight devices, and so on four.
    found = each(FOUR, TWO_HOSTS, problem=replace(PROBLEM, tables=TABLES[:3]))
    for plan in plans_of(found):
        for placements in plan.placements_by_table().values():
            devices = [d for p in placements for d in p.devices]
            assert len(set(devices)) == len(devices)


def test_the_same_seed_finds_the_same_plans_again():
    assert plans_of(each(FOUR, TWO_HOSTS)) == plans_of(each(FOUR, TWO_HOSTS))


def test_one_offer_and_equal_offers_lose_nothing():
    for offers in ((FOUR,), (FOUR, replace(FOUR, name="again"))):
        found = each(*offers)
        assert [outcome.ms for outcome, _ in found] == [own_ms for _, own_ms in found]


def test_an_offer_without_room_says_what_is_too_little_and_the_others_go_on():
    tight = replace(FOUR, name="tight", memory_bytes=10 << 20)
    uneven = replace(FOUR, name="uneven", devices=3)
    four, small, three, two = each(FOUR, tight, uneven, TWO_HOSTS)
    assert four[0].found and two[0].found
    assert isinstance(small[0].error, Infeasible) and "too little" in str(small[0].error)
    assert small[1] == float("inf")
    assert "global_batch 4096, which 3 devices do not divide evenly" in str(three[0].error)


def test_an_offer_that_holds_the_tables_but_not_in_the_cut_of_the_others_is_named():
    # One device has no parts of a table on different devices, and no replicas.
    single = Offer("single", 1, 64 * GIB, 1.0, "fast")
    alone, four = each(single, FOUR)
    assert alone[0].found and four[0].found
    assert column_ranges(alone[0].found.plan) == {t.name: {(0, t.dim)} for t in TABLES}
    parts = {t.name: (None, (64,) if t.name == "hot" else ()) for t in TABLES}
    with pytest.raises(Infeasible, match="up to 2 column parts, .* of 1 devices"):
        plan_with_cut(alone[0].found.problem, FAST, parts, "columns", SEARCH)


def test_no_offer_with_a_plan_is_an_error_of_the_first():
    with pytest.raises(Infeasible, match="does not fit"):
        each(replace(FOUR, memory_bytes=10 << 20))
    pinned = replace(PROBLEM, constraints=Constraints(pinned=[("hot", [0])]))
    with pytest.raises(ShardCoreError, match=r"constraints.pinned \{'hot': \(0,\)\}; clusters differ"):
        each(FOUR, TWO_HOSTS, problem=pinned)


def test_constraints_of_the_problem_are_kept():
    constraints = Constraints(
        kinds=[("tiny", ["data_parallel"]), ("hot", ["column"])],
        min_widths=[("hot", 64)],
        unsplit=["wide"],
        together=[["t0", "t1"]],
    )
    for plan in plans_of(each(FOUR, TWO_HOSTS, problem=replace(PROBLEM, constraints=constraints))):
        of = plan.placements_by_table()
        assert {p.kind for p in of["tiny"]} == {"data_parallel"} and {p.kind for p in of["hot"]} == {"column"}
        assert min(p.shard.width for p in of["hot"]) >= 64 and len(of["wide"]) == 1
        assert of["t0"][0].devices == of["t1"][0].devices


def test_an_offers_reserve_stays_free_on_it_and_the_problems_on_others():
    kept = replace(PROBLEM, constraints=Constraints(reserved_bytes=1 * GIB))
    own = replace(FOUR, reserved_bytes=3 * GIB)
    found = each(own, TWO_HOSTS, problem=kept)
    assert [x.found.problem.constraints.reserved_bytes for x, _ in found] == [3 * GIB, 1 * GIB]
    with pytest.raises(ShardCoreError, match=f"offer 'four' has reserved_bytes {8 * GIB} of memory_bytes"):
        replace(FOUR, reserved_bytes=8 * GIB)


def test_a_cut_of_unequal_parts_keeps_its_columns_on_every_machine():
    cut = {t.name: (None, (96,) if t.name == "hot" else ()) for t in TABLES}
    plan = plan_with_cut(PROBLEM, FAST, cut, "columns", SEARCH)
    assert column_ranges(plan)["hot"] == {(0, 96), (96, 128)}
    assert cut_of_plan(plan, PROBLEM, "columns") == cut
    # TorchRec's plans have columns in the order of ranks, so that an export has the same ones.
    assert consolidate_placements(plan.placements) == plan.placements


def test_plans_of_several_machines_are_canonical_so_that_their_exports_have_the_same_columns():
    for plan in plans_of(each(FOUR, TWO_HOSTS, problem=replace(PROBLEM, tables=TABLES[:3]))):
        assert consolidate_placements(plan.placements) == plan.placements
