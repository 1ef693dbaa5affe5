"""Conformance suite for sharders: what every search has to fulfil."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import CostModel, price
from shardcore.search import Budget
from shardcore.step import memory
from shardcore.step.kinds import kind_on_one_device, sharding_kind_by_name
from shardcore.step.lower import lower
from shardcore.testing.plans import cheapest_plans_of_tiny_problems, check_plan
from shardcore.testing.problems import (
    BATCH,
    CASES,
    MIB,
    NOTHING_FITS,
    column_placement,
    problem_with_hidden_plan,
    problem_with_slack,
    small_problem_model,
    table_bytes,
    with_room_for_batch,
)


def require_error(kind: type[ShardCoreError], call: Callable[[], Any]) -> str:
    """Message of the error that a call raises. Raises AssertionError if the call raises no such error."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


class SharderConformance:
    """Promises of a sharder. Subclasses define `search`.

    name: algorithm, in the provenance of its plans.
    budget: of most searches here.
    drawn: number of drawn problems in a test.
    at_most: bound on the mean cost, relative to the cheapest of all plans, of problems for which that is known.
    columns_alone: the cheapest among plans that cut by columns only.
    names_remedies: errors say what does not fit and what would help, in ShardCore's words.
    """

    name = ""
    budget: Budget | None = Budget(evals=300)
    drawn = 10
    at_most = math.inf
    columns_alone = False
    names_remedies = True

    def search(
        self, problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None
    ) -> Plan:
        raise NotImplementedError

    def search_checked_plan(self, problem: Problem, seed: int = 0) -> Plan:
        """Plan that the sharder finds, after checks that every plan has to pass. Raises AssertionError if one fails."""
        plan = self.search(problem, small_problem_model(problem), seed=seed, budget=self.budget)
        check_plan(plan, problem)
        return plan

    def require_plan_with_provenance(self, problem: Problem) -> None:
        """Assert that the sharder's plan states its algorithm, seed and predicted cost."""
        plan = self.search_checked_plan(problem, 3)
        assert (plan.provenance["algorithm"], plan.provenance["seed"]) == (self.name, 3)
        json.dumps(plan.provenance, allow_nan=False)
        assert (
            plan.provenance["predicted_ms"]
            == price(lower(plan, problem), small_problem_model(problem)).total_ms
        )

    def test_plans_are_valid_and_say_where_they_come_from(self) -> None:
        for problem in CASES.values():
            self.require_plan_with_provenance(problem)

    def test_without_a_budget_there_is_a_plan_too(self) -> None:
        problem = CASES["more devices than tables"]
        check_plan(self.search(problem, small_problem_model(problem)), problem)

    def test_the_same_seed_gives_the_same_plan(self) -> None:
        for case in ("tight memory", "rows to cut"):
            first, second = (self.search_checked_plan(CASES[case], 5) for _ in range(2))
            assert first == second and first.provenance == second.provenance, case

    def test_a_plan_is_found_if_a_hidden_one_exists(self) -> None:
        """A sharder finds a plan if devices hold exactly the bytes that some table-wise plan needs."""
        for seed in range(self.drawn):
            self.search_checked_plan(problem_with_hidden_plan(seed), seed)

    def test_a_plan_is_found_if_a_hidden_one_meets_the_constraints(self) -> None:
        for seed in range(self.drawn):
            self.search_checked_plan(problem_with_hidden_plan(seed, pinned=True), seed)

    def test_little_slack_is_enough_where_tables_may_be_cut(self) -> None:
        for seed in range(self.drawn):
            rng = np.random.default_rng(seed)
            n_devices = int(rng.choice([2, 3, 4]))
            problem = problem_with_slack(seed, n_devices, float(rng.uniform(1.02, 2.0)))
            try:
                self.search_checked_plan(with_room_for_batch(problem), seed)
            except Infeasible:
                # Four columns of the largest table, or its outputs when rows are cut, may exceed the slack.
                outputs = max(8 * BATCH * t.dim for t in problem.tables)
                grain = outputs + max(table_bytes(t, width=4) for t in problem.tables)
                memory_bytes = sum(d.memory_bytes for d in problem.topology.devices)
                assert memory_bytes - sum(map(table_bytes, problem.tables)) < n_devices * grain

    def test_not_a_byte_more_than_a_device_has_is_used(self) -> None:
        """A sharder does not put a table on the faster device if the table exceeds its memory by a few bytes."""
        pair = (Table("less", 1000, 4, 10.0, Zipf(0)), Table("more", 1005, 4, 11.0, Zipf(0)))
        constraints = Constraints(unsplit=("less", "more"))
        for speeds in ((2.0, 1.0), (1.0, 2.0)):
            topology = Topology(tuple(Device(MIB, speed) for speed in speeds))
            problem = Problem("bytes", pair, topology, BATCH, constraints=constraints)
            fast, slow = speeds.index(2.0), speeds.index(1.0)
            only = Plan((column_placement(pair[0], fast), column_placement(pair[1], slow)))
            exact = memory.used_bytes(only, problem)
            problem = replace(problem, topology=Topology(tuple(map(Device, exact, speeds))))
            homes = {p.shard.table.name: p.devices[0] for p in self.search_checked_plan(problem).placements}
            assert homes == {"less": fast, "more": slow}
            whole = replace(constraints, kinds=tuple((t.name, (kind_on_one_device(t).name,)) for t in pair))
            for device in (0, 1):  # nothing else fits, nor does this with a byte less
                less = [n - (i == device) for i, n in enumerate(exact)]
                topology = Topology(tuple(map(Device, less, speeds)))
                tighter = replace(problem, topology=topology, constraints=whole)
                require_error(Infeasible, lambda: self.search_checked_plan(tighter))  # noqa: B023 (called at once)

    def test_a_table_of_which_four_columns_fit_no_device_is_divided_by_rows_where_it_may_live(self) -> None:
        others = [Table(f"t{i}", 1000, 16, 1.0) for i in range(2)]
        # Four columns: 640,000 bytes; a third of its rows: 430,000 for 8 columns, half of them: 320,000 for 4.
        for dim, hosts, pinned, devices in (
            (8, "aaa", (), (0, 1, 2)),
            (4, "aabbcc", (("tall", ("b",)),), (2, 3)),
        ):
            tall = Table("tall", 40_000, dim, 1.0)
            topology = Topology(tuple(Device(600_000, host=h) for h in hosts))
            problem = Problem("p", (tall, *others), topology, BATCH, constraints=Constraints(pinned=pinned))
            [placed] = self.search_checked_plan(problem).placements_by_table()["tall"]
            assert sharding_kind_by_name(placed.kind).divides_rows
            assert (placed.shard, placed.devices) == (Shard.whole(tall), devices)

    def test_no_plan_is_cheaper_than_the_cheapest_of_all(self) -> None:
        ratios = []
        for problem, least_ms, least_by_columns_ms in cheapest_plans_of_tiny_problems():
            plan = self.search(problem, small_problem_model(problem), budget=Budget(evals=5000))
            least = least_by_columns_ms if self.columns_alone else least_ms
            ratios.append(plan.provenance["predicted_ms"] / least)
        assert min(ratios) >= 1 - 1e-9
        assert np.mean(ratios) <= self.at_most, ratios

    def test_infeasible_names_what_does_not_fit_and_what_would_help(self) -> None:
        for case, (problem, words) in NOTHING_FITS.items():
            message = require_error(
                Infeasible,
                lambda: self.search_checked_plan(with_room_for_batch(problem)),  # noqa: B023
            )
            for word in words if self.names_remedies else ():
                assert word in message, f"{case}: {word!r} is not in {message!r}"

    def test_a_problem_for_another_setting_is_refused(self) -> None:
        other = AnalyticModel(Setting("made-up", 96))
        message = require_error(SettingMismatch, lambda: self.search(CASES["one device"], other))
        assert "batch: 48 against 96" in message
