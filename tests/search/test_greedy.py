"""The baselines' rules, the cuts before them and the packing behind them."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import column, host_row, on_hosts, replica, row, with_room
from shardcore.search.best_fit import best_fit
from shardcore.search.free_memory import FreeMemory, bytes_alone

from shardcore.constraints import Constraints
from shardcore.cost.analytic import AnalyticModel
from shardcore.layouts import shards_on
from shardcore.search import SHARDERS
from shardcore.search.feasible import feasible_shards
from shardcore.search.greedy import looked_up
from shardcore.search.packing import pack
from shardcore.search.shards import consolidate, halve_columns, join_columns
from shardcore.step.memory_account import table_bytes
from shardcore.topology import Device, Topology
from shardcore.types import Plan, Problem, Setting, Shard, Table
from shardcore.workload import require_cover

BATCH = 48  # 2, 3, 4 and 24 devices divide it
MIB = 2**20


def problem_of(tables, memory=(MIB, MIB), speeds=None, **fields) -> Problem:
    devices = tuple(Device(m, s) for m, s in zip(memory, speeds or [1.0] * len(memory), strict=True))
    return with_room(Problem("p", tuple(tables), Topology(devices), BATCH, **fields))


def device_of(name: str, problem: Problem, seed: int = 0) -> dict[str, int]:
    """Each table's device, of a plan that cuts none."""
    plan = SHARDERS[name](problem, AnalyticModel(Setting("made-up", BATCH)), seed=seed)
    return {p.shard.table.name: p.devices[0] for p in plan.placements}


# Each table leads one measure: wide the columns, long the bytes, busy the lookups; busy has the fewest rows.
WIDE, LONG = Table("wide", 100, 64, 1.0), Table("long", 4000, 4, 5.0)
BUSY, REST = Table("busy", 10, 8, 50.0), Table("rest", 20, 8, 6.0)


@pytest.mark.parametrize("name, first, others", [
    ("size_greedy", "long", {"wide", "busy", "rest"}),  # 16,000 cells against 6,400 + 80 + 160
    ("dim_greedy", "wide", {"long", "busy", "rest"}),  # 64 columns against 4 + 8 + 8
    ("lookup_greedy", "busy", {"wide", "long", "rest"}),  # 400 elements a sample against 64 + 20 + 48
    ("size_lookup_greedy", "busy", {"wide", "long", "rest"}),  # 400 against 128 + 72 + 62
])
def test_each_greedy_balances_its_own_measure(name, first, others):
    devices = device_of(name, problem_of([WIDE, LONG, BUSY, REST]))
    assert {devices[o] for o in others} == {1 - devices[first]}


def test_size_lookup_weighs_rows_by_their_logarithm():
    # Lookups 50 | 20 + 20; times the logarithm 80 + 50 | 80.
    problem = problem_of([Table("flat", 10, 4, 12.5), Table("deep0", 10**4, 4, 5.0),
                          Table("deep1", 10**4, 4, 5.0)])
    by_lookups, by_both = device_of("lookup_greedy", problem), device_of("size_lookup_greedy", problem)
    assert by_lookups["deep0"] == by_lookups["deep1"] != by_lookups["flat"]
    assert by_both["deep0"] != by_both["deep1"]


def test_a_fast_device_takes_more():
    tables = [Table(f"t{i}", 100, 8, 4.0) for i in range(12)]
    devices = list(device_of("dim_greedy", problem_of(tables, speeds=[1.0, 2.0])).values())
    assert devices.count(1) == 8


def test_a_table_goes_where_it_is_done_first_and_of_equals_where_most_room_is():
    table = Table("t", 100, 8, 4.0)
    for name in ("size_greedy", "dim_greedy", "lookup_greedy", "size_lookup_greedy"):
        assert device_of(name, problem_of([table], speeds=[1.0, 2.0])) == {"t": 1}
        assert device_of(name, problem_of([table], memory=(MIB, 2 * MIB, MIB))) == {"t": 1}
        assert device_of(name, problem_of([table], memory=(2 * MIB, MIB, 2 * MIB))) == {"t": 0}


def test_what_is_looked_up_is_pooling_times_columns_of_the_rows_there_are():
    table = Table("t", 100, 16, 3.0)
    assert looked_up(Shard.whole(table)) == 48 and looked_up(Shard(table, 25, 75, 4, 8)) == 6


def test_tables_kept_together_weigh_as_much_as_all_of_them():
    tables = [Table(n, 100, dim, 1.0) for n, dim in (("a", 16), ("b", 16), ("c", 24), ("d", 8))]
    devices = device_of("dim_greedy", problem_of(tables, constraints=Constraints(together=(("a", "b"),))))
    assert devices["a"] == devices["b"] != devices["c"] == devices["d"]


def test_random_uses_its_seed_and_every_device():
    problem = problem_of([Table(f"t{i}", 100, 8, 4.0) for i in range(30)], memory=(MIB,) * 3)
    plans = [device_of("random", problem, seed) for seed in range(3)]
    assert plans[0] != plans[1] != plans[2] and set(plans[0].values()) == {0, 1, 2}
    assert device_of("random", problem, 1) == plans[1]


def test_fit_halves_columns_or_divides_rows_and_nothing_that_fits():
    wide, deep, small = (Table("wide", 1000, 24, 1.0), Table("deep", 50_000, 4, 1.0),
                         Table("small", 10, 8, 1.0))
    problem = problem_of([wide, deep, small], memory=(10**5, 10**6, 10**6))
    half = table_bytes(wide, problem, 12)
    assert feasible_shards(problem) == [Shard.whole(t) for t in problem.tables]
    shards = [s for _, s in shards_on(row(deep, on_hosts("a" * 24)))]
    share = bytes_alone(shards[0], problem)
    tight = problem_of([wide, deep, small], memory=(share + half,) * 24)
    found = feasible_shards(tight)
    assert [(s.width, s.rows) for s in found if s.table == wide] == [(12, 1000), (12, 1000)]
    assert [s for s in found if s.table == deep] == shards
    assert Shard.whole(small) in found


def test_halves_are_multiples_of_four_columns():
    shard = Shard.whole(Table("t", 5, 12, 1.0))
    assert [h.width for h in halve_columns(shard)] == [4, 8]
    assert halve_columns(replace(shard, col_hi=4)) is None


@given(data=st.data(), of_hosts=st.booleans())
def test_consolidate_keeps_columns_per_group_and_covers_the_table(data, of_hosts):
    table, where = Table("t", 10, 64, 1.0), on_hosts("xyxy", MIB)
    edges = [0, *sorted(4 * e for e in data.draw(st.sets(st.integers(1, 15)))), 64]
    placements = []
    for a, b in zip(edges, edges[1:], strict=False):
        by_host = of_hosts and data.draw(st.booleans())
        placements.append(host_row(table, data.draw(st.sampled_from([(0, 2), (1, 3)])), a, b) if by_host
                          else column(table, data.draw(st.integers(0, 3)), a, b))
    shuffled = data.draw(st.permutations(placements))
    result = consolidate(shuffled)

    def columns(ps):
        widths = Counter()
        for p in ps:
            widths[p.kind, p.devices] += p.shard.width
        return widths

    assert columns(result) == columns(placements)
    assert len(result) == len(columns(placements))
    assert consolidate(result) == result
    require_cover(Plan(result), Problem("p", (table,), where, BATCH))


def test_consolidate_keeps_replicas_and_does_not_hide_faults():
    table = Table("t", 10, 16, 1.0)
    problem = problem_of([table])
    everywhere = replica(table, problem.topology)
    assert consolidate([everywhere]) == (everywhere,)
    for wrong in ([column(table, 0, 0, 8)], [column(table, 0), column(table, 1, 8, 16)],
                  [everywhere, column(table, 0)], [everywhere, everywhere]):
        with pytest.raises(ValueError, match="plan places"):
            require_cover(Plan(consolidate(wrong)), problem)


def test_join_columns_joins_neighbours_only():
    table = Table("t", 10, 16, 1.0)
    a, b, c = (Shard(table, 0, 10, lo, hi) for lo, hi in ((0, 4), (4, 8), (12, 16)))
    assert join_columns([c, b, a]) == [Shard(table, 0, 10, 0, 8), c]
    steps = [Shard(table, 0, 5, 0, 8), Shard(table, 5, 10, 8, 16)]
    assert join_columns(steps) == steps


def test_best_fit_goes_back_where_the_first_choice_was_wrong():
    # Best fit puts 4 beside 4, and the last 3 nowhere: only 4 + 3 + 3 twice fills both devices.
    sizes = [4, 4, 3, 3, 3, 3]
    devices, certain = best_fit(sizes, [10, 10], nodes=100)
    assert certain and sorted(np.bincount(devices, weights=sizes)) == [10, 10]
    assert best_fit([6, 6, 6], [10, 10], nodes=100) == (None, True)
    assert best_fit(sizes, [10, 10], nodes=2) == best_fit(sizes, [10, 10], nodes=7) == (None, False)
    assert best_fit([], [10], nodes=5) == ([], True)


def test_columns_that_join_others_of_their_table_bring_no_optimizer_state():
    problem = problem_of([Table("t", 1000, 16, 1.0)], optimizer="rowwise_adagrad")
    left, right = halve_columns(Shard.whole(problem.tables[0]))
    room = FreeMemory(problem)
    room.put(left, 1)
    one, both = table_bytes(right.table, problem, 8), table_bytes(right.table, problem)
    assert list(room.extra_bytes(right)) == [one, both - one] and both < 2 * one - 4_000
    room.put(right, 1)
    assert MIB - room.left[1] == both


def test_packing_cuts_where_whole_tables_leave_gaps():
    tables = [Table(f"t{i}", 1000, 16, 1.0) for i in range(3)]
    each = table_bytes(tables[0], problem_of(tables))
    memory = each + table_bytes(tables[0], problem_of(tables), 8)
    problem = problem_of(tables, memory=(memory,) * 2)
    packing = pack(problem, [memory] * 2)
    assert sorted(p.width for p in packing.shards) == [8, 8, 16, 16]
    plan = SHARDERS["size_greedy"](problem, AnalyticModel(Setting("made-up", BATCH)))
    assert plan.provenance["packed"] and len(plan.placements) == 4
    kept = replace(problem, constraints=Constraints(unsplit=("t0", "t1", "t2")))
    assert pack(kept, [memory] * 2) is None


def test_packing_divides_rows_where_no_column_fits_a_gap():
    deep = Table("deep", 10_000, 4, 1.0)
    outputs = table_bytes(deep, problem_of([deep])) - deep.bytes
    quarter = Shard(deep, 0, 2500, 0, 4)
    free = [bytes_alone(quarter, problem_of([deep], memory=(1,) * 4))] * 4
    packing = pack(problem_of([deep], memory=free), free)
    assert sorted(p.rows for p in packing.shards) == [2500] * 4
    assert pack(problem_of([deep], memory=[f - 16 for f in free]), [f - 16 for f in free]) is None
    # Four columns fit a device each, but a third of such tables does not fit the gaps that two leave.
    tables = [Table(f"t{i}", 5000, 4, 1.0) for i in range(4)]
    free = [2 * deep.bytes // 3 + 4 * outputs] * 3
    assert pack(problem_of(tables, memory=free), free) is not None
    assert pack(problem_of(tables, memory=free, constraints=Constraints(unsplit=("t0", "t1", "t2", "t3"))),
                free) is None
