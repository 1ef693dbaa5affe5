"""The baselines' rules, and the cuts before them."""

from dataclasses import replace

import pytest
from shapes import column, on_hosts, row, with_room

from shardcore.core.constraints import Constraints
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS
from shardcore.search.greedy import looked_up_elements
from shardcore.search.state.feasible import feasible_shards
from shardcore.step.kinds import shards_by_device
from shardcore.step.lower import lower
from shardcore.step.memory import used_bytes

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


@pytest.mark.parametrize(
    "name, first, others",
    [
        ("size_greedy", "long", {"wide", "busy", "rest"}),  # 16,000 cells against 6,400 + 80 + 160
        ("dim_greedy", "wide", {"long", "busy", "rest"}),  # 64 columns against 4 + 8 + 8
        ("lookup_greedy", "busy", {"wide", "long", "rest"}),  # 400 elements a sample against 64 + 20 + 48
        ("size_lookup_greedy", "busy", {"wide", "long", "rest"}),  # 400 against 128 + 72 + 62
    ],
)
def test_each_greedy_balances_its_own_measure(name, first, others):
    devices = device_of(name, problem_of([WIDE, LONG, BUSY, REST]))
    assert {devices[o] for o in others} == {1 - devices[first]}


def test_size_lookup_weighs_rows_by_their_logarithm():
    # Lookups 50 | 20 + 20; times the logarithm 80 + 50 | 80.
    problem = problem_of(
        [Table("flat", 10, 4, 12.5), Table("deep0", 10**4, 4, 5.0), Table("deep1", 10**4, 4, 5.0)]
    )
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
    assert (
        looked_up_elements(Shard.whole(table)) == 48 and looked_up_elements(Shard(table, 25, 75, 4, 8)) == 6
    )


def test_tables_kept_together_weigh_as_much_as_all_of_them():
    tables = [Table(n, 100, dim, 1.0) for n, dim in (("a", 16), ("b", 16), ("c", 24), ("d", 8))]
    devices = device_of("dim_greedy", problem_of(tables, constraints=Constraints(together=(("a", "b"),))))
    assert devices["a"] == devices["b"] != devices["c"] == devices["d"]


def test_random_uses_its_seed_and_every_device():
    problem = problem_of([Table(f"t{i}", 100, 8, 4.0) for i in range(30)], memory=(MIB,) * 3)
    plans = [device_of("random", problem, seed) for seed in range(3)]
    assert plans[0] != plans[1] != plans[2] and set(plans[0].values()) == {0, 1, 2}
    assert device_of("random", problem, 1) == plans[1]


def test_tables_that_fit_no_device_are_halved_or_divided_by_rows():
    shapes = (("wide", 1000, 24), ("deep", 50_000, 4), ("small", 10, 8))
    wide, deep, small = (Table(name, rows, dim, 1.0) for name, rows, dim in shapes)
    problem = problem_of([wide, deep, small], memory=(10**5, 10**6, 10**6))
    assert feasible_shards(problem) == [Shard.whole(t) for t in problem.tables]
    where = on_hosts("a" * 24)
    given = Problem("p", problem.tables, where, BATCH)
    halves = (column(wide, 0, 0, 12), column(wide, 1, 12, 24))
    both = used_bytes(Plan((*halves, row(deep, where), column(small, 2))), given)
    shards = feasible_shards(replace(given, topology=on_hosts("a" * 24, max(both))))
    assert [(s.width, s.rows) for s in shards if s.table == wide] == [(12, 1000), (12, 1000)]
    assert [s for s in shards if s.table == deep] == [s for _, s in shards_by_device(row(deep, where))]
    assert Shard.whole(small) in shards


@pytest.mark.parametrize("name", ["size_greedy", "dim_greedy", "neuroshard"])
def test_rows_are_divided_by_the_kind_with_the_cheapest_plan(name):
    """Within a host where links between hosts are slow; over all devices where most work is on these rows."""
    cheapest = []
    for between_gbps, pooling in ((1.0, 1.0), (200.0, 400.0)):
        topology = Topology(
            on_hosts("aabb", 1000 * MIB).devices,
            links=make_links(within_host=200.0, between_hosts=between_gbps),
        )
        cold = tuple(Table(f"t{i}", 1000, 8, 1.0) for i in range(4))
        problem = Problem("p", (Table("deep", 9000, 16, pooling), *cold), topology, 8192)

        def costs(*kinds, problem=problem):
            plan = SHARDERS[name](
                replace(problem, constraints=Constraints(kinds=(("deep", kinds),))),
                AnalyticModel(Setting("made-up", 8192)),
            )
            assert not plan.provenance["packed"]
            return plan.provenance["predicted_ms"], next(
                p.kind for p in plan.placements if p.shard.table.name == "deep"
            )

        by_row, by_host_row = costs("row"), costs("host_row")
        assert costs("row", "host_row") == min(by_row, by_host_row)
        cheapest.append(min(by_row, by_host_row)[1])
    assert cheapest == ["host_row", "row"]


@pytest.mark.parametrize("name", ["random", "size_greedy", "lookup_greedy", "neuroshard"])
def test_what_has_few_places_is_placed_first(name):
    """The busiest tables would fill the device that the others are pinned to."""
    busy = tuple(Table(f"busy{i}", 1000, 16, 40.0) for i in range(4))
    pinned = tuple(Table(f"t{i}", 1000, 16, 1.0) for i in range(3))
    given = problem_of(
        [*busy, *pinned],
        (MIB,) * 3,
        constraints=Constraints(together=(("busy0", "busy1"),), pinned=tuple((t.name, (2,)) for t in pinned)),
    )
    only = Plan(tuple(column(t, d) for t, d in zip(given.tables, (0, 0, 1, 1, 2, 2, 2), strict=True)))
    problem = replace(
        given,
        topology=Topology(tuple(Device(n + (d < 2) * MIB) for d, n in enumerate(used_bytes(only, given)))),
    )
    for seed in range(5):
        plan = SHARDERS[name](problem, AnalyticModel(Setting("made-up", BATCH)), seed=seed)
        assert not plan.provenance["packed"]
        lower(plan, problem)
        assert {p.shard.table.name for p in plan.placements if p.devices == (2,)} == {"t0", "t1", "t2"}
