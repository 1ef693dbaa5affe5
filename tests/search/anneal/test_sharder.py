"""Annealing: its plans against other searches, and all of its space: rows, replicas, plans to start from."""

from dataclasses import replace

import numpy as np
import pytest
from shapes import column, on_hosts, replica, row, with_room

from shardcore.core import progress
from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.search import SHARDERS, Budget
from shardcore.search.anneal import compiled
from shardcore.search.anneal import search_space as spaces
from shardcore.search.anneal.rates import output_exchange_rates
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.lockstep import search_space_by_columns
from shardcore.search.portfolio import search_with_annealing as anneal
from shardcore.step import memory
from shardcore.step.access import output_bytes
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.lower import lower
from shardcore.step.memory import used_bytes
from shardcore.testing.plans import all_plans, check_plan
from shardcore.testing.problems import BATCH, draw_random_problem, small_problem_model, table_bytes

MIB = 2**20


def cost(plan) -> float:
    return plan.provenance["predicted_ms"]


def in_both_spaces(problem: Problem) -> list[Plan]:
    """Plans of the whole space, and by columns only."""
    model, budget = small_problem_model(problem), Budget(evals=20_000)
    return [anneal(problem, model, budget=budget, space=space) for space in ("all", "columns")]


def test_a_hot_table_is_cut_by_rows_where_that_may_be():
    hot = Table("hot", 100_003, 32, 60.0, Zipf(0.2))  # rows that no number of shares divides evenly
    small = tuple(Table(f"t{i}", 500, 8, 1.0) for i in range(4))
    problem = Problem("hot", (hot, *small), Topology((Device(64 * MIB),) * 3), BATCH)
    by_rows, by_columns = in_both_spaces(problem)
    check_plan(by_rows, problem)
    assert row(hot, problem.topology) in by_rows.placements and cost(by_rows) < cost(by_columns)
    assert {p.kind for p in by_columns.placements} == {"column"}


def test_a_table_that_has_to_be_divided_does_not_keep_others_from_it():
    hot, deep = Table("hot", 100_003, 32, 60.0, Zipf(0.2)), Table("deep", 1_200_000, 4, 1.0, Zipf(0.2))
    small = tuple(Table(f"t{i}", 500, 8, 1.0) for i in range(4))
    problem = Problem("deep", (deep, hot, *small), Topology((Device(16 * MIB),) * 3), BATCH)
    plans = in_both_spaces(problem)
    for plan, names in zip(plans, ({"hot", "deep"}, {"deep"}), strict=True):
        check_plan(plan, problem)
        assert {p.shard.table.name for p in plan.placements if p.kind == "row"} == names
    assert cost(plans[0]) < cost(plans[1])
    ordered = replace(problem, tables=(replace(deep, ordered=True), hot, *small))
    check_plan(
        anneal(ordered, small_problem_model(ordered), budget=Budget(evals=2_000), space="all"), ordered
    )


def test_it_finds_the_cheapest_of_all_plans_on_two_hosts():
    """Hot tables, and links between hosts that are slow: rows over one host."""
    tables = tuple(Table(f"t{i}", 1000 + i, 8, 30.0, Zipf(0.2)) for i in range(2))
    where = on_hosts("xyxy", MIB, links=make_links(0.0, within_host=20.0, between_hosts=0.2))
    problem = Problem("hosts", tables, where, BATCH)
    model = replace(small_problem_model(problem), lookup_ns=20)
    least = min(price(lower(plan, problem), model).total_ms for plan in all_plans(problem))
    plan = anneal(problem, model, budget=Budget(evals=20_000))
    check_plan(plan, problem)
    assert cost(plan) == pytest.approx(least, rel=1e-9)
    assert {(p.kind, p.devices) for p in plan.placements} == {("host_row", (0, 2)), ("host_row", (1, 3))}
    again = anneal(problem, model, budget=Budget(evals=20_000), reshard=Reshard(plan, tables=0))
    assert set(again.placements) == set(plan.placements)


def test_tables_that_hosts_share_are_swapped_between_them():
    """Lookups are 3, 3, 2, 2 and 2 parts. Greedily one host gets 7, and no move of one table mends that."""
    parts = (3, 3, 2, 2, 2)
    tables = tuple(Table(f"t{i}", 1000, 8, 10.0 * n, Zipf(0.2)) for i, n in enumerate(parts))
    where = on_hosts("xyxy", MIB, links=make_links(within_host=20.0, between_hosts=0.2, latency_ms=0.0))
    problem = Problem("halves", tables, where, BATCH)
    plan = anneal(problem, replace(small_problem_model(problem), lookup_ns=20), budget=Budget(evals=20_000))
    lookups = {}
    for p in plan.placements:
        assert p.kind == "host_row"
        lookups[p.devices] = lookups.get(p.devices, 0) + p.shard.table.pooling
    assert list(lookups.values()) == [60, 60]


def test_small_tables_live_everywhere_where_that_saves_an_exchange():
    small = tuple(Table(f"s{i}", 4, 64, 1.0, Zipf(0.0)) for i in range(9))
    large = tuple(Table(f"t{i}", 5000, 16, 5.0, Zipf(1.0)) for i in range(4))
    problem = Problem("tiny-rows", (*small, *large), Topology((Device(64 * MIB),) * 4), 1024)
    model = AnalyticModel(
        Setting("made-up", 1024), launch_us=1, table_us=1, exchange_gbps=0.1, exchange_latency_ms=0.001
    )
    plan = SHARDERS["anneal"](problem, model, budget=Budget(evals=20_000))
    check_plan(plan, problem)
    everywhere = {p.shard.table.name for p in plan.placements if p.kind == "data_parallel"}
    assert everywhere and everywhere <= {t.name for t in small}
    assert cost(plan) < 0.8 * cost(anneal(problem, model, budget=Budget(evals=20_000), space="columns"))
    kept = replace(problem, constraints=Constraints(kinds=tuple((t.name, ("column",)) for t in small)))
    assert all(len(p.devices) == 1 for p in anneal(kept, model, budget=Budget(evals=5000)).placements)


def test_copies_take_no_byte_more_than_there_is():
    """All small tables would be copied, for which one device lacks some bytes. As tables are ordered, none is
    divided by rows instead."""
    small = tuple(Table(f"s{i}", 40, 64, 1.0, Zipf(0.0), ordered=True) for i in range(9))
    large = tuple(Table(f"t{i}", 20_000, 8, 5.0, Zipf(1.0), ordered=True) for i in range(4))
    model = AnalyticModel(
        Setting("made-up", 1024), launch_us=1, table_us=1, exchange_gbps=0.1, exchange_latency_ms=0.001
    )

    ample = Problem("copies", (*small, *large), Topology((Device(64 * MIB),) * 4), 1024)
    copies = *(replica(t, ample.topology) for t in small), *(column(t, i % 3) for i, t in enumerate(large))
    needed = used_bytes(Plan(copies), ample)[3]

    def copied(memory):
        problem = replace(ample, topology=Topology((*(Device(64 * MIB),) * 3, Device(memory))))
        plan = anneal(problem, model, budget=Budget(evals=20_000))
        check_plan(plan, problem)
        return sum(p.kind == "data_parallel" for p in plan.placements)

    # With a copy less it takes 20,480 bytes less.
    assert [copied(needed - short) for short in (0, 1, 20_000)] == [9, 8, 8]


def test_copies_fit_where_outputs_are_too_large_to_be_side_by_side():
    small = tuple(Table(f"t{i}", n, 4, 1.0) for i, n in enumerate((3, 2020)))
    problem = Problem("outputs", small, Topology((Device(1),) * 6), 49_152)
    each = memory.table_peak_bytes(small[0], problem)  # rows in six ranges take 39% of it each
    devices = (*(Device(int(0.35 * each)),) * 5, Device(int(1.4 * each), host="b"))
    problem = with_room(replace(problem, topology=Topology(devices)))
    for name in ("anneal", "anneal_columns"):
        plan = SHARDERS[name](problem, small_problem_model(problem), budget=Budget(evals=300))
        check_plan(plan, problem)
        assert "data_parallel" in {p.kind for p in plan.placements}


def test_a_table_cut_by_columns_of_too_few_rows_to_divide_is_kept():
    flat = Table("flat", 9, 32, 10.0)  # over 8 devices ceil(9 / 8) rows each would leave the last none
    problem = Problem("flat", (flat, Table("other", 500, 8, 1.0)), Topology((Device(MIB),) * 8), BATCH)
    old = Plan((column(flat, 0, 0, 16), column(flat, 1, 16, 32), column(problem.tables[1], 2)))
    kept = anneal(problem, small_problem_model(problem), budget=Budget(evals=300), reshard=Reshard(old, 0))
    assert set(kept.placements) == set(old.placements)


def test_memory_for_exactly_half_the_rows_is_enough():
    table = Table("t", 2001, 4, 10.0, Zipf(0.0))
    ample = Problem("half", (table,), Topology((Device(MIB), Device(MIB))), BATCH)
    room = used_bytes(Plan((row(table, ample.topology),)), ample)
    problem = replace(ample, topology=Topology(tuple(map(Device, room))))
    check_plan(anneal(problem, small_problem_model(problem), budget=Budget(evals=500)), problem)
    less = replace(ample, topology=Topology((Device(room[0]), Device(room[1] - 1))))
    with pytest.raises(Infeasible):
        anneal(less, small_problem_model(less), budget=Budget(evals=500))


def test_rates_of_exchanges_are_exact_where_the_law_is_linear():
    problem = draw_random_problem(1, 12, [8 * MIB] * 4)
    plan = SHARDERS["dim_greedy"](problem, small_problem_model(problem))
    own, busiest, _, total, once = output_exchange_rates(problem, small_problem_model(problem), WHOLE_ROWS)
    outputs = np.zeros(4)
    for p in plan.placements:
        outputs[p.devices[0]] += output_bytes(p.shard, BATCH)
    priced = price(lower(plan, problem), small_problem_model(problem))
    predicted_ms = own * outputs + busiest * outputs.max() + total * outputs.sum() + once
    exchange_ms = max(np.add(priced.forward_comm_ms, priced.backward_comm_ms))
    assert predicted_ms.max() == pytest.approx(exchange_ms, rel=1e-6)


def test_the_budget_is_kept_whichever_limit_is_nearer():
    """Without the limit in seconds, 40 million trials would take some 20 s."""
    problem = draw_random_problem(2, 20, [8 * MIB] * 4)
    model = small_problem_model(problem)
    assert anneal(problem, model, budget=Budget(40_000_000, 0.1)).provenance["evals"] < 4_000_000
    assert anneal(problem, model, budget=Budget(seconds=0.1)).provenance["evals"] < 4_000_000
    evals = [anneal(problem, model, budget=Budget(n, 1000.0)).provenance["evals"] for n in (1, 5000)]
    assert 5000 <= evals[1] < 8000 and evals[0] < 3000, evals  # its starts and one round may exceed it


@pytest.fixture(scope="module")
def old() -> tuple[Problem, Plan]:
    problem = draw_random_problem(3, 16, [8 * MIB] * 4)
    return problem, SHARDERS["size_greedy"](problem, small_problem_model(problem))


def test_its_seed_is_used():
    problem = draw_random_problem(4, 20, [8 * MIB] * 4)
    model, budget = small_problem_model(problem), Budget(evals=2000)
    plans = {anneal(problem, model, seed=seed, budget=budget).placements for seed in range(4)}
    assert len(plans) > 1


def test_a_plan_to_start_from_is_refused_where_it_does_not_belong(old):
    problem, plan = old
    model = small_problem_model(problem)
    with pytest.raises(ShardCoreError, match="has devices 0 to 1"):
        two = replace(problem, topology=Topology(problem.topology.devices[:2]))
        anneal(two, model, reshard=Reshard(plan))
    with pytest.raises(ShardCoreError, match="places .* of the .* cells of table"):
        first = plan.placements[0]
        part = replace(first, shard=replace(first.shard, row_hi=first.shard.rows - 1))
        anneal(problem, model, reshard=Reshard(Plan((part, *plan.placements[1:]))))
    with pytest.raises(ShardCoreError, match="at most -1 tables"):
        Reshard(plan, tables=-1)
    with pytest.raises(Infeasible, match="no device room for tables .*'huge'"):
        huge = replace(problem, tables=(*problem.tables, Table("huge", 10**5, 64, 1.0)))
        anneal(huge, model, reshard=Reshard(plan))


def test_without_limits_a_plan_is_as_good_as_a_fresh_one_and_tables_everywhere_stay_so():
    hot = Table("hot", 100_003, 32, 60.0, Zipf(0.2))
    small = tuple(Table(f"t{i}", 500, 8, 1.0) for i in range(4))
    problem = Problem("hot", (hot, *small), Topology((Device(64 * MIB),) * 3), BATCH)
    model, budget = small_problem_model(problem), Budget(evals=20_000)
    fresh = anneal(problem, model, budget=budget)
    greedy = SHARDERS["size_greedy"](problem, model)
    again = anneal(problem, model, budget=budget, reshard=Reshard(greedy))
    assert cost(again) <= cost(fresh) * 1.001
    rows = [p for p in fresh.placements if p.shard.table == hot]
    assert rows == [row(hot, problem.topology)]
    later = replace(problem, tables=(*problem.tables, Table("new", 200, 16, 3.0)))
    kept = anneal(later, model, budget=budget, reshard=Reshard(fresh, tables=1))
    check_plan(kept, later)
    assert [p for p in kept.placements if p.shard.table == hot] == rows


def test_a_shard_that_costs_nothing_leaves_no_launch_behind():
    tables = (
        *(Table(f"idle{i}", 50, 8, 0.0) for i in range(6)),
        *(Table(f"t{i}", 100, 8, 2.0) for i in range(3)),
    )
    problem = Problem("idle", tables, Topology((Device(MIB),) * 3), BATCH)
    model = AnalyticModel(Setting("made-up", BATCH), launch_us=200, table_us=0)
    for seed in range(3):
        plan = anneal(problem, model, seed=seed, budget=Budget(evals=5000))
        others = [cost(SHARDERS[n](problem, model)) for n in ("size_greedy", "dim_greedy", "neuroshard")]
        assert cost(plan) <= min(others) * (1 + 1e-9)


@pytest.mark.parametrize("hosts", ["xxxx", "xyxy"])
def test_collections_have_devices_of_their_own_where_that_saves_launches(hosts):
    """No move of one table saves the launch of a device's second collection."""
    rng = np.random.default_rng(0)
    tables = tuple(
        Table(
            f"t{i}",
            int(10 ** rng.uniform(2, 5)),
            16,
            float(np.exp(rng.uniform(-1, 3))),
            Zipf(1.05),
            collection="ab"[i % 2],
        )
        for i in range(48)
    )
    problem = Problem("collections", tables, on_hosts(hosts, 1024 * MIB), BATCH)
    model = AnalyticModel(
        Setting("made-up", BATCH),
        launch_us=50,
        table_us=2,
        lookup_ns=20,
        exchange_gbps=100,
        exchange_latency_ms=0.001,
    )
    plan = anneal(problem, model, budget=Budget(evals=20_000), space="columns")
    check_plan(plan, problem)
    assert len({(p.shard.table.collection, d) for p in plan.placements for d in p.devices}) == 4
    # Tables of both collections may be pinned to a device.
    pinned = replace(problem, constraints=Constraints(pinned=(("t0", (3,)), ("t1", (3,)))))
    check_plan(anneal(pinned, model, budget=Budget(evals=5_000)), pinned)


def test_an_unknown_space_is_named():
    problem = draw_random_problem(0, 3, [MIB] * 2)
    with pytest.raises(ShardCoreError, match="no space 'rows'; there are all, columns, halves"):
        anneal(problem, small_problem_model(problem), space="rows")


class Clock:
    """A clock that stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("algorithm", ["anneal", "anneal_columns"])
@pytest.mark.parametrize("each_s, greedy_plans, annealed", [(100.0, 1, 0), (1.0, 2, 1), (0.01, 8, 2)])
def test_a_budget_in_seconds_bounds_the_starts_too(algorithm, each_s, greedy_plans, annealed, monkeypatch):
    """The first greedy plan may take any time. All others end in the first quarter of the budget."""
    clock, begun = Clock(), []
    monkeypatch.setattr(progress, "time", clock)
    greedy, anneal = compiled.place_greedily, compiled.anneal

    def slowly(*args):
        begun.append(clock.now - 1000)
        clock.now += each_s
        return greedy(*args)

    def annealed_slowly(*args):
        assert clock.now < 1010
        begun.append("anneal")
        clock.now += 1.0
        return anneal(*args)

    monkeypatch.setattr(compiled, "place_greedily", slowly)
    monkeypatch.setattr(compiled, "anneal", annealed_slowly)
    problem = draw_random_problem(1, 20, [8 * MIB] * 4)
    plan = SHARDERS[algorithm](problem, small_problem_model(problem), budget=Budget(seconds=10.0))
    check_plan(plan, problem)
    starts = begun[: begun.index("anneal")] if annealed else begun
    assert len(starts) == greedy_plans if each_s >= 1 else len(starts) >= greedy_plans, starts
    assert begun.count("anneal") >= annealed
    assert all(s + each_s <= 2.5 for s in starts[1:])


def test_the_parts_of_tables_are_priced_once(monkeypatch):
    """Starts by columns and those with shared tables have the same shards."""
    encoded = []

    class Counted(AnalyticModel):
        def encode(self, shards, batch=None):
            encoded.extend(shards)
            return super().encode(shards, batch)

    problem = draw_random_problem(2, 12, [8 * MIB] * 4)
    anneal(problem, Counted(small_problem_model(problem).setting), budget=Budget(evals=500))
    cut = [s for s in encoded if s.has_all_rows and s.width < s.table.dim]
    assert cut and len(cut) == len(set(cut))


@pytest.mark.long
def test_in_a_large_problem_what_weighs_little_is_not_cut(monkeypatch):
    """Tables that have to be cut still are. Plans cost about as much as in a search of all cuts."""
    heavy = Table("heavy", 40_000, 64, 40.0, Zipf(0.4))
    light = tuple(Table(f"t{i}", 200 + i % 50, 16, 0.01) for i in range(600))
    ample = Problem("large", (heavy, *light), Topology((Device(int(0.5 * heavy.bytes)),) * 4), BATCH)
    more = sum(memory.table_peak_bytes(t, ample) for t in light) // 4
    problem = with_room(replace(ample, topology=Topology((Device(int(0.5 * heavy.bytes) + more),) * 4)))
    model, budget = small_problem_model(problem), Budget(evals=20_000)
    small = anneal(problem, model, budget=budget, space="columns")
    monkeypatch.setattr(spaces, "LARGE", 1)
    large = anneal(problem, model, budget=budget, space="columns")
    check_plan(large, problem)
    assert {p.shard.table.name for p in large.placements if p.shard.width < p.shard.table.dim} == {"heavy"}
    assert cost(large) < 1.02 * cost(small)
    for seed in range(4):
        tight = draw_random_problem(seed, 25, [1] * 3)
        needed = sum(map(table_bytes, tight.tables))
        tight = with_room(replace(tight, topology=Topology((Device(int(1.03 * needed / 3)),) * 3)))
        for space in ("columns", "all"):
            check_plan(
                anneal(tight, small_problem_model(tight), budget=Budget(evals=2000), space=space), tight
            )


def test_tables_without_lookups_cost_no_more_than_those_with_some():
    """They may be replicated, too, so that no output travels."""

    def best(pooling: float) -> float:
        tables = tuple(Table(f"t{i}", 100, 128, pooling) for i in range(12))
        problem = Problem("idle", tables, Topology((Device(1 << 30),) * 4), 8192)
        model = AnalyticModel(Setting("made-up", 8192))
        return price(lower(anneal(problem, model, budget=Budget(evals=2000)), problem), model).total_ms

    assert best(0.0) <= best(0.01) <= best(1.0)


def test_starts_on_thousands_of_devices_keep_to_a_budget_in_evaluations(monkeypatch):
    made, greedy = [], compiled.place_greedily
    monkeypatch.setattr(compiled, "place_greedily", lambda *given: made.append(0) or greedy(*given))
    tables = tuple(Table(f"t{i}", 10_000 + i, 16, 5.0) for i in range(4))

    def starts(hosts: int) -> int:
        problem = Problem("many", tables, Topology.of_hosts(hosts, 8, memory_gib=1), 8 * hosts)
        made.clear()
        plan = anneal(problem, small_problem_model(problem), budget=Budget(evals=1))
        check_plan(plan, problem)
        # Few tables leave most devices idle, unless these share them.
        assert {p.kind for p in plan.placements} != {"column"} or hosts < 100
        return len(made)

    assert starts(513) == 1
    # Fewer devices take no time: all starts are made.
    assert starts(2) > 10


def test_devices_of_a_host_need_no_numbers_in_a_row():
    topology = on_hosts("xyzyxz", MIB)
    problem = Problem("mixed", (Table("t", 100, 8, 1.0),), topology, BATCH)
    space = search_space_by_columns(
        problem, small_problem_model(problem), [Shard.whole(problem.tables[0])], cut=True
    )
    assert space.fixed.host.tolist() == [topology.hosts.index(d.host) for d in topology.devices]
