"""Explanations against the model's own costs, and in words."""

import dataclasses
import json
from dataclasses import replace

import pytest
from policies import untrained
from shapes import column, with_room

from shardcore.core import progress
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible
from shardcore.core.job import Job
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Shard, Table
from shardcore.core.validation import MOST_BYTES
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import CommCost, CostModel, price, price_plan
from shardcore.report import plan_report
from shardcore.search import BASELINES, SHARDERS, Budget, sharder
from shardcore.search.explain import Explanation, explain
from shardcore.step.kinds import ID_CHANNELS
from shardcore.step.lower import lower
from shardcore.step.memory import local_batch_bytes, table_peak_bytes, used_bytes
from shardcore.testing.problems import BATCH, MIB, draw_random_problem, small_problem_model

PROBLEM = draw_random_problem(1, 12, [MIB] * 2)
SMALL = Budget(evals=300)


def explained(plan: Plan, problem: Problem, model: CostModel, *budget: Budget, **more) -> Explanation:
    return explain(price_plan(plan, problem, model), problem, model, *budget, **more)


def solved(problem: Problem, algorithm: str = "neuroshard") -> Plan:
    return SHARDERS[algorithm](problem, small_problem_model(problem), budget=SMALL)


def test_an_alternative_that_means_nothing_is_told_and_the_rest_stands():
    """Ten rows cannot be divided over eight devices. No device may have more memory than these."""
    tables = (Table("small", 10, 8, 2.0), *PROBLEM.tables[:4])
    devices = (Device(MOST_BYTES),) * 4
    problem = replace(
        PROBLEM,
        tables=tables,
        topology=Topology(devices),
        constraints=Constraints(kinds=(("small", ("row",)),)),
    )
    result = explained(solved(problem, "size_greedy"), problem, small_problem_model(problem), SMALL)
    refused = [a for a in result.changes if a.total_ms is None]
    assert len(refused) == 1 and "more devices" in refused[0].what and "rows" in refused[0].error


@pytest.fixture(scope="module")
def heard():
    """What is explained of a plan of NeuroShard's, and the phases that were heard of."""
    phases: list[str] = []
    with progress.report_to_listener(lambda phase, best_ms, left_s: phases.append(phase)):
        return explained(solved(PROBLEM), PROBLEM, small_problem_model(PROBLEM), SMALL), phases


def test_progress_names_the_alternative_that_is_searched(heard):
    result, phases = heard
    # On a slow machine a report is made again.
    begun = dict.fromkeys(phase.removesuffix(": begins") for phase in phases if phase.endswith(": begins"))
    assert [a.what for a in (*result.baselines, *result.changes)] == [*begun]


def test_the_bounding_device_is_the_last_and_its_shards_cost_what_it_saves_without_them():
    plan, model = solved(PROBLEM, "size_greedy"), small_problem_model(PROBLEM)
    result = explained(plan, PROBLEM, model, SMALL)
    cost = price(lower(plan, PROBLEM), model)
    assert result.total_ms == cost.total_ms and result.cost == cost
    assert cost.waiting_ms[result.device] == min(cost.waiting_ms) and result.limit in ("compute", "exchange")
    first = result.shards[0]
    assert first.saves_ms == max(s.saves_ms for s in result.shards)
    shards = [p.shard for p in plan.placements if result.device in p.devices]
    rest = [s for s in shards if s.label != first.shard]
    assert len(rest) == len(shards) - 1
    without = model.op_ms(model.encode(rest).sum(0, keepdims=True))[0]
    assert first.saves_ms == pytest.approx(cost.compute_ms[result.device] - without)
    assert {s.shard for s in result.shards} == {s.label for s in shards}


class OwnLink(AnalyticModel):
    """Backward, each device waits for what it sends itself, at 1 GB/s; forward is free."""

    def comm_cost(self, traffic, compute_ms, topology):
        backward = traffic[: -len(ID_CHANNELS)].sum(0) / 1e6
        ready = compute_ms + backward
        nothing = 0 * backward
        return CommCost(nothing, backward, ready.max(-1, keepdims=True) - ready, nothing, nothing)


def test_the_device_that_bounds_a_plan_need_not_be_the_one_that_computes_most():
    tables = Table("narrow", 100, 4, 50.0), Table("wide", 100, 64, 1.0), Table("small", 100, 4, 1.0)
    topology = Topology((Device(MIB), Device(MIB, 2.0)))
    problem = Problem("p", tables, topology, BATCH, constraints=Constraints(reserved_bytes=100))
    placements = tuple(column(t, d) for t, d in zip(tables, (0, 1, 1), strict=True))
    plan = Plan(placements, {"algorithm": "size_greedy"})
    model = OwnLink(
        Setting("made-up", BATCH), launch_us=0, table_us=1, lookup_ns=1, gather_gbps=1e9, update_gbps=1e9
    )
    result = explained(plan, problem, model, SMALL, known={})
    compute_ms = 1e-3 + 2400e-6, (2e-3 + 96e-6) / 2
    assert result.cost.compute_ms == pytest.approx(compute_ms, rel=1e-3)
    sent = tuple(BATCH * 4 * width for width in (4, 68))
    assert (result.device, result.limit, result.widest, result.exchange_bytes) == (1, "exchange", 1, sent)
    # 8 bytes an id, and 4 for the length of each sample.
    assert result.input_bytes == (BATCH * (50 * 8 + 4), BATCH * (2 * 8 + 2 * 4))
    assert result.total_ms == pytest.approx(compute_ms[1] + sent[1] / 1e6, rel=1e-3)
    assert [s.shard for s in result.shards] == ["wide[0:100, 0:64]", "small[0:100, 0:4]"]
    assert [x.what for x in result.baselines] == ["searched again, same memory"]
    assert [s.saves_ms for s in result.shards] == pytest.approx([compute_ms[1] / 2] * 2, rel=1e-2)
    assert [(s.kind, s.bytes) for s in result.shards] == [("column", 25_600), ("column", 1600)]
    assert result.memory_bytes == tuple(used_bytes(plan, problem)) and result.free_bytes == (MIB - 100,) * 2
    assert sum(result.memory.parts.values()) == result.memory_bytes[result.fullest]
    assert result.memory.parts["weights"] == (1600, 27_200)[result.fullest] and result.reserved_bytes == 100
    assert result.balance == pytest.approx(sum(compute_ms) / 2 / compute_ms[0], rel=1e-3)
    slow = replace(model, lookup_ns=1000)  # now compute is what takes longest, and on the first device
    result = explained(plan, problem, slow, SMALL, known={})
    assert (result.device, result.limit) == (0, "compute")


def test_alternatives_are_baselines_memory_and_the_next_number_of_devices(heard):
    result, _ = heard
    assert [a.what for a in result.baselines] == [
        *BASELINES,
        "portfolio",
        "anneal",
        "anneal_columns",
        "searched again, same memory",
    ]
    assert result.baselines[-1].total_ms == result.total_ms
    for baseline in result.baselines[: len(BASELINES)]:
        plan = SHARDERS[baseline.what](PROBLEM, small_problem_model(PROBLEM))
        assert baseline.total_ms == plan.provenance["predicted_ms"]
    *memory, devices = result.changes
    assert [a.what for a in memory] == ["10% more memory on each device", "50% more memory on each device"]
    assert memory[1].total_ms <= memory[0].total_ms <= result.total_ms and devices.what == "1 more device: 3"
    assert result.searched == "neuroshard, seed 0, 300 evaluations each"
    four = replace(PROBLEM, tables=PROBLEM.tables[:3], topology=Topology((Device(MIB),) * 4))
    what = explained(solved(four), four, small_problem_model(four), SMALL).changes[-1].what
    assert what == f"2 more devices: 6 (the next number that divides the batch of {BATCH})"
    odd = replace(PROBLEM, tables=PROBLEM.tables[:3], global_batch=2)
    # no number of devices up to 8 divides 2
    assert len(explained(solved(odd), odd, small_problem_model(odd), SMALL).changes) == 2


def test_a_plan_of_a_policy_stands_beside_what_searches_its_alternatives():
    """Without it the search's own gain would look like that of more memory."""
    problem = replace(PROBLEM, tables=PROBLEM.tables[:4])
    model = small_problem_model(problem)
    plan = sharder("dreamshard", untrained("dreamshard"))(problem, model)
    for known in (None, {}):
        result = explained(plan, problem, model, Budget(evals=2000), known=known)
        assert result.searched == "anneal, seed 0, 2,000 evaluations each"
        assert result.baselines[-1].what == "anneal" and result.baselines[-1].total_ms <= result.total_ms
        assert result.changes[1].total_ms == pytest.approx(result.baselines[-1].total_ms, rel=0.01)


def test_more_memory_helps_where_memory_is_what_binds():
    free = draw_random_problem(3, 10, [1] * 2)
    need, every = sum(table_peak_bytes(t, free) for t in free.tables), local_batch_bytes(free)
    tight = replace(free, topology=Topology(tuple(Device(int(need * s) + every) for s in (0.8, 0.25))))
    result = explained(solved(tight), tight, small_problem_model(tight), SMALL)
    assert result.changes[1].total_ms < result.total_ms
    text = plan_report.explanation_text(result)
    for words in (
        "50% more memory on each device",
        "No plan takes less than",
        "is fullest",
        "memory of the fullest device",
        "sorting",
    ):
        assert words in text


def test_the_fullest_device_is_that_of_which_most_is_taken():
    """The device that holds most may have more room left."""
    large, small = Table("large", 20_000, 16, 1.0), Table("small", 10_000, 16, 1.0)
    problem = Problem("p", (large, small), Topology((Device(16 * MIB), Device(MIB))), BATCH)
    plan = Plan((column(large, 0), column(small, 1)))
    result = explained(plan, problem, small_problem_model(problem), SMALL, known={})
    assert result.memory_bytes[0] > result.memory_bytes[1] and result.fullest == 1
    assert result.memory.parts["weights"] == small.bytes


def test_it_is_plain_data_and_reads_well_for_one_device_and_for_a_plan_from_elsewhere():
    problem = draw_random_problem(2, 4, [MIB])
    placements = tuple(column(t, 0) for t in problem.tables)
    elsewhere = Plan(placements, {"algorithm": "by hand"})
    result = explained(elsewhere, problem, small_problem_model(problem), SMALL)
    json.dumps(dataclasses.asdict(result), allow_nan=False)
    assert "Nothing is exchanged." in plan_report.explanation_text(result)
    assert result.searched.startswith("anneal, seed 0")


def test_a_plan_that_does_not_fit_is_refused():
    plan = solved(PROBLEM)
    with pytest.raises(Infeasible):
        explained(
            plan, replace(PROBLEM, topology=Topology((Device(100),) * 2)), small_problem_model(PROBLEM), SMALL
        )


@pytest.mark.parametrize("dense_ms, limit", [(0.0, "fetching"), (1e4, "exchange")])
def test_a_device_whose_cache_fetches_longest_is_the_last(dense_ms, limit):
    """The dense part counts as exchange, in which it does not compute."""
    tables = (
        *(Table(f"t{i}", 1000, 16, 5.0) for i in range(3)),
        Table("cached", 1000, 16, 5.0, load_factor=0.1),
    )
    topology = Topology((Device(MIB),) * 4, memory=(Memory("host", MIB, 0.001),))
    job = Job("prefetch", dense_forward_ms=dense_ms, dense_backward_ms=dense_ms)
    problem = with_room(Problem("fetches", tables, topology, BATCH, job=job))
    plan = Plan(tuple(column(t, i) for i, t in enumerate(tables)), {"algorithm": "size_greedy"})
    result = explained(plan, problem, small_problem_model(problem).for_problem(problem), SMALL, known={})
    waits = limit == "fetching"
    assert (result.limit, any(result.cost.fetch_wait_ms)) == (limit, waits)
    assert result.device == 3 or not waits
    words = f"{max(result.cost.link_ms):.3f} ms of the link to host memory at most, of which "
    assert (
        words + f"{max(result.cost.fetch_wait_ms):.3f} ms are waited for."
        in plan_report.explanation_sentences(result)[0]
    )


def test_each_cut_says_what_the_step_costs_without_it():
    table, other = Table("cut", 1000, 16, 9.0), Table("whole", 1000, 16, 5.0)
    problem = with_room(Problem("two", (table, other), Topology((Device(MIB),) * 2), BATCH))
    parts = [replace(column(table, d), shard=Shard(table, 0, 1000, 4 * d, 4 + 12 * d)) for d in (0, 1)]
    plan, uncut = (Plan((*some, column(other, 0))) for some in (parts, [column(table, 1)]))
    model = small_problem_model(problem)
    result = explained(plan, problem, model, SMALL)
    costs_ms = [price(lower(p, problem), model).total_ms for p in (plan, uncut)]
    assert result.cuts_ms == {"cut": pytest.approx(costs_ms[1] - costs_ms[0])}
    assert "whole where its widest part is" in plan_report.explanation_text(result)
