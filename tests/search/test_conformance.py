"""The conformance suite itself: it covers all sharders and notices broken ones. And: which sharders find a plan."""

import re
from dataclasses import replace

import numpy as np
import pytest
from shapes import column, host_row, on_hosts, replica, row
from suites import SHIPPED, suite

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import MIN_WIDTH, Plan, Problem, Shard
from shardcore.search import LEARNED, SHARDERS, Budget, compare
from shardcore.search.learned.policy import NETS
from shardcore.step.kinds import shards_by_device as production_shards
from shardcore.step.ways import consolidate_placements
from shardcore.testing.plans import check_plan, placement_counts, shards_by_device
from shardcore.testing.problems import (
    BATCH,
    CASES,
    DEEP,
    HUGE,
    MIB,
    SMALL,
    draw_random_tables,
    small_problem_model,
    table_bytes,
    with_room_for_batch,
)


def test_every_sharder_is_in_the_suite():
    assert {*SHARDERS} <= {*SHIPPED} <= {*SHARDERS, *LEARNED, "torchrec"}
    learned = [LEARNED[name] for name in SHIPPED if name in LEARNED]
    assert {name for name, _ in learned} == set(NETS)
    assert {cuts for _, cuts in learned} == {cuts for _, cuts in LEARNED.values()}


def without_a_table(plan: Plan) -> Plan:
    return Plan(plan.placements[1:])


def with_a_table_twice(plan: Plan) -> Plan:
    return Plan(consolidate_placements([*plan.placements, plan.placements[0]]))


def with_the_halves_of_a_table_on_one_device(plan: Plan) -> Plan:
    first = next(p for p in plan.placements if p.shard.width > MIN_WIDTH)
    halves = [
        replace(first, shard=replace(first.shard, col_hi=first.shard.col_lo + MIN_WIDTH)),
        replace(first, shard=replace(first.shard, col_lo=first.shard.col_lo + MIN_WIDTH)),
    ]
    return Plan((*halves, *(p for p in plan.placements if p != first)))


def on_a_device_that_is_not_there(plan: Plan) -> Plan:
    return Plan((replace(plan.placements[0], devices=(99,)), *plan.placements[1:]))


def all_on_the_first_device(plan: Plan) -> Plan:
    return Plan(consolidate_placements(replace(p, devices=(0,)) for p in plan.placements))


@pytest.mark.parametrize(
    "spoil",
    [
        without_a_table,
        with_a_table_twice,
        with_the_halves_of_a_table_on_one_device,
        on_a_device_that_is_not_there,
        all_on_the_first_device,
    ],
)
def test_the_suite_catches_a_broken_sharder(spoil, monkeypatch):
    def broken(problem, model, *, seed=0, budget=None):
        return replace(
            spoil(sound(problem, model, seed=seed)), provenance={"algorithm": "broken", "seed": seed}
        )

    sound = SHARDERS["size_greedy"]
    monkeypatch.setitem(SHARDERS, "broken", broken)
    with pytest.raises((AssertionError, ShardCoreError)):
        suite("broken").require_plan_with_provenance(CASES["tight memory"])
    check_plan(
        sound(CASES["tight memory"], small_problem_model(CASES["tight memory"])), CASES["tight memory"]
    )


@pytest.mark.parametrize("table", [HUGE, DEEP])
def test_the_suites_own_counts_are_exact_for_large_tables(table):
    whole, last = Shard.whole(table), table.rows - 1
    above, corner = Shard(table, 0, last, 0, table.dim), Shard(table, last, table.rows, 0, 4)
    assert placement_counts(table, [whole]) == {1} and placement_counts(table, []) == {0}
    assert placement_counts(table, [whole, corner]) == {1, 2}  # four cells twice
    assert placement_counts(table, [above, corner]) == ({1} if table.dim == 4 else {0, 1})
    assert placement_counts(table, [above]) == {0, 1}


def test_the_suites_own_parts_are_those_of_the_layouts():
    where = on_hosts("xyxy")
    for placement in (
        column(HUGE, 2, 4, 8),
        row(HUGE, where),
        host_row(HUGE, (1, 3), 0, 32),
        replica(HUGE, where),
    ):
        assert shards_by_device(placement) == list(production_shards(placement))


@pytest.mark.parametrize(
    "problem, message",
    [
        (
            Problem(
                "kept",
                SMALL,
                Topology((Device(MIB),) * 2),
                BATCH,
                constraints=Constraints(reserved_bytes=2 * MIB),
            ),
            "hold 0 bytes.* too little .* more per device",
        ),
        (
            Problem(
                "whole",
                (HUGE, *SMALL),
                Topology((Device(HUGE.bytes // 2),) * 4),
                BATCH,
                constraints=Constraints(unsplit=("huge",)),
            ),
            "'huge', which must stay whole.* 1.3 MiB.* 0.6 MiB.* more per device",
        ),
    ],
)
def test_what_would_help_is_found_however_much_that_takes(problem, message):
    """One sharder stands for all, as this takes seconds."""
    with pytest.raises(Infeasible, match=message):
        suite("size_greedy").search_checked_plan(with_room_for_batch(problem))


TRIES_MORE_CUTS = {"portfolio", "anneal", "anneal_columns"}
"""Annealing begins with greedy plans of many cuts. One of them may fit where `packing`, the last resort of all
others, finds nothing."""
TRIES_REPLICAS = {"portfolio", "anneal", "torchrec"}
"""A small table may fit on all devices where none of its shards does. With many tables, packing tries that
for few."""


def tight(seed: int) -> Problem:
    """Tables that take 95% to 125% of unequal devices, as sums of their own peaks. Some stay whole, some are pinned
    to one or two devices."""
    rng = np.random.default_rng(seed)
    n_devices, optimizer = int(rng.choice([2, 3, 4])), str(rng.choice(["exact_sgd", "rowwise_adagrad"]))
    tables = draw_random_tables(rng, int(rng.integers(3, 13)))
    shares = rng.dirichlet(np.full(n_devices, 20.0)) * rng.uniform(0.8, 1.05)
    needed = sum(table_bytes(t, optimizer) for t in tables)
    devices = tuple(Device(max(1, int(needed * s)), float(rng.choice([0.5, 1, 2]))) for s in shares)
    unsplit = tuple(t.name for t in tables if rng.random() < 0.2)
    pinned = tuple(
        (t.name, tuple(rng.integers(n_devices, size=2).tolist())) for t in tables if rng.random() < 0.15
    )
    return with_room_for_batch(
        Problem(f"tight-{seed}", tables, Topology(devices), BATCH, optimizer, Constraints(0, unsplit, pinned))
    )


@pytest.mark.long
def test_none_is_infeasible_where_another_finds_a_plan():
    """Some may find plans where others do not: those that TRIES_MORE_CUTS and TRIES_REPLICAS name, and no others."""
    with_a_plan, only_exceptions = 0, 0
    for seed in range(4):
        problem = tight(seed)
        outcomes = {
            name: compare.run_sharder(name, problem, small_problem_model(problem), seed, Budget(evals=1))
            for name in SHARDERS
        }
        solved = {name for name, outcome in outcomes.items() if outcome.plan}
        assert solved in (set(), TRIES_MORE_CUTS, TRIES_REPLICAS, set(SHARDERS)), (problem.name, solved)
        errors = [outcome.error for outcome in outcomes.values() if not outcome.plan]
        # No message names a lack of less than nothing.
        assert all("does not fit" in error and not re.search(r" -\d", error) for error in errors)
        with_a_plan += bool(solved)
        only_exceptions += solved in (TRIES_MORE_CUTS, TRIES_REPLICAS)
    assert with_a_plan >= 2 and only_exceptions <= 1, (with_a_plan, only_exceptions)
