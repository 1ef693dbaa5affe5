"""Kinds of sharding that constraints allow, widths of shards, and placements of them."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import column, host_row, on_hosts, replica, row, with_room

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Shard, Table
from shardcore.plans.replan import ReplanConfig, replan
from shardcore.search import SHARDERS, Budget
from shardcore.step.kinds import shards_by_device
from shardcore.step.lower import lower, require_full_cover
from shardcore.step.memory import used_bytes
from shardcore.step.ways import (
    allowed_devices_of_shard,
    alternative_row_divisions,
    consolidate_placements,
    fixed_placements,
    placements_of_bundles,
    row_division,
    sharding_kind_of_shard,
)
from shardcore.testing.problems import draw_random_problem, small_problem_model

MIB = 2**20
ASKED = {"t0": "data_parallel", "t2": "row"}


def problem(kinds: dict[str, str] = ASKED, memory_bytes: int = MIB) -> Problem:
    return replace(
        with_room(draw_random_problem(3, 8, [memory_bytes] * 2)),
        constraints=Constraints(kinds=tuple((name, (kind,)) for name, kind in kinds.items())),
    )


def plan(of: Problem, algorithm: str = "size_greedy") -> Plan:
    return SHARDERS[algorithm](of, small_problem_model(of), budget=Budget(evals=200))


def kinds(plan: Plan) -> dict[str, str]:
    return {p.shard.table.name: p.kind for p in plan.placements}


def test_an_unknown_kind_is_refused():
    with pytest.raises(ShardCoreError, match="has kind 'magic'; known are"):
        plan(problem({"t0": "magic"}))


def test_a_table_that_none_of_its_kinds_can_run_is_refused_with_those_that_can():
    one = replace(problem(), topology=Topology((Device(64 * MIB),)))
    with pytest.raises(
        ShardCoreError,
        match=r"runs table 't0' by data_parallel \(constraints.kinds\): no "
        r"devices share .* It needs column",
    ):
        plan(one)


def test_replicas_that_do_not_fit_are_refused():
    large = problem({f"t{i}": "data_parallel" for i in range(7)}, memory_bytes=20_000)
    with pytest.raises(
        Infeasible,
        match=r"'t0', .* and 2 more, on all devices \(constraints.kinds\), take "
        "on each 0.4 MiB .* may hold 0.1 MiB, 0.2 MiB too little.* It would fit with 0.3 MiB",
    ):
        plan(large)


def test_what_is_on_all_devices_is_named_where_it_leaves_others_too_little():
    given = problem({f"t{i}": "data_parallel" for i in range(7)})
    beside = Plan((*fixed_placements(given), column(given.tables[7], 0)))
    topology = Topology((Device(max(used_bytes(beside, given)) - 1),) * 2)
    constraints = Constraints(kinds=(*given.constraints.kinds, ("t7", ("column",))), unsplit=("t7",))
    short = replace(given, topology=topology, constraints=constraints)
    with pytest.raises(
        Infeasible,
        match=r"table 't7', which must stay whole .* bytes too little \(.* of "
        r"each is for tables on all devices: constraints.kinds\)",
    ):
        plan(short)


def test_replicas_alone_fit_to_the_byte():
    given = problem({f"t{i}": "data_parallel" for i in range(8)})
    only = Plan(fixed_placements(given))
    used = used_bytes(only, given)
    exact, short = (replace(given, topology=Topology(tuple(Device(n - k) for n in used))) for k in (0, 1))
    for algorithm in SEARCHES:
        assert kinds(plan(exact, algorithm)) == kinds(only)
        with pytest.raises(Infeasible, match="1 byte too little.* with 1 byte more per device"):
            plan(short, algorithm)


def test_unknown_tables_are_refused():
    with pytest.raises(ShardCoreError, match="constraints.kinds of \\['absent'\\], which it does not have"):
        problem({"absent": "row"})


def test_a_plan_is_improved_with_its_kinds_kept():
    of = problem()
    old = plan(of, "random")
    result = replan(
        old, of, small_problem_model(of), ReplanConfig(max_moved_tables=2, budget=Budget(evals=300))
    )
    assert {name: kinds(result)[name] for name in ASKED} == ASKED
    was = {p.shard.table.name: p.devices for p in old.placements}
    moved = {p.shard.table.name for p in result.placements if was[p.shard.table.name] != p.devices}
    assert len(moved) <= 2


@pytest.mark.parametrize(
    "others", [{"pinned": (("t2", (0,)),)}, {"together": (("t1", "t2"),)}, {"unsplit": ("t2",)}]
)
def test_constraints_that_contradict_each_other_are_both_named(others):
    contradictory = problem({"t2": "row"})
    contradictory = replace(contradictory, constraints=replace(contradictory.constraints, **others))
    [name] = others
    with pytest.raises(
        ShardCoreError,
        match=rf"table 't2' in constraints.kinds \(row, on all devices\) and "
        rf"in constraints.{name}; it needs to be in one",
    ):
        plan(contradictory)


# --- sets of kinds, and widths ------------------------------------------------------------------------------

SEARCHES = ("size_greedy", "neuroshard", "anneal_columns", "anneal")
GIB = 2**30
LARGE = Table("large", 40_000_000, 128, 20.0)
SMALL = Table("small", 1000, 64, 1.0)


def searched(algorithm, tables, devices, batch=65536, **constraints) -> Plan:
    """Plan on devices of 16 GiB, 8 on a host. It passes all checks of `lower`."""
    topology = Topology(tuple(Device(16 * GIB, host=f"h{d // 8}") for d in range(devices)))
    of = Problem("p", tuple(tables), topology, batch, constraints=Constraints(**constraints))
    result = SHARDERS[algorithm](of, small_problem_model(of), budget=Budget(evals=300))
    lower(result, of)
    return result


def of_table(result: Plan, name: str) -> list[tuple[str, int, int]]:
    """Kind, columns and number of devices of each placement of a table."""
    return [(p.kind, p.shard.width, len(p.devices)) for p in result.placements if p.shard.table.name == name]


@pytest.mark.parametrize("algorithm", SEARCHES)
@pytest.mark.parametrize(
    "kinds, devices, placed",
    [
        (("host_row",), 16, ("host_row", 128, 8)),
        (("row", "host_row"), 16, ("row", 128, 16)),
        (("data_parallel", "row"), 16, ("row", 128, 16)),
        (("host_row", "row"), 8, ("row", 128, 8)),
    ],
)
def test_a_table_is_run_by_one_of_its_kinds(algorithm, kinds, devices, placed):
    plan = searched(algorithm, [LARGE, SMALL], devices, kinds=(("large", kinds),))
    assert of_table(plan, "large") == [placed]


@pytest.mark.parametrize("algorithm", SEARCHES)
def test_a_table_may_be_whole_or_divided_by_rows_but_not_cut(algorithm):
    """A table larger than a device, and a small one, under TorchRec's ["table_wise", "row_wise"]."""
    constraints = {
        "kinds": (("large", ("column", "row")), ("small", ("column", "row"))),
        "min_widths": (("large", 128), ("small", 64)),
    }
    plan = searched(algorithm, [LARGE, SMALL], 8, **constraints)
    assert of_table(plan, "large") == [("row", 128, 8)]
    assert of_table(plan, "small") in ([("column", 64, 1)], [("row", 64, 8)])


@pytest.mark.parametrize("algorithm", SEARCHES)
def test_tables_divided_within_hosts_are_spread_over_them(algorithm):
    tables = [replace(LARGE, name=f"large{i}", rows=100_000_000) for i in range(4)]
    plan = searched(algorithm, tables, 16, kinds=tuple((t.name, ("host_row",)) for t in tables))
    assert sorted(p.devices[0] for p in plan.placements) == [0, 0, 8, 8]


@pytest.mark.parametrize("algorithm", SEARCHES)
def test_shards_are_as_wide_as_asked(algorithm):
    hot = Table("hot", 10_000, 96, 500.0)
    plan = searched(algorithm, [hot, SMALL], 4, kinds=(("hot", ("column",)),), min_widths=(("hot", 30),))
    assert {width % 32 for _, width, _ in of_table(plan, "hot")} == {0}


@pytest.mark.parametrize("algorithm", SEARCHES)
@pytest.mark.parametrize("dim, devices", [(4096, 2), (4100, 3)])
def test_tables_wider_than_fbgemm_runs_are_cut(algorithm, dim, devices):
    wide = Table("wide", 1000, dim, 1.0)
    widths = [width for _, width, _ in of_table(searched(algorithm, [wide, SMALL], devices, 600), "wide")]
    assert max(widths) <= 2048 and sum(widths) == dim


@pytest.mark.parametrize(
    "constraints, devices, message",
    [
        ({}, 1, "'wide': it has 4100 columns, .* CUDA op runs at most 2048 .* needs 3 devices, .* on 1"),
        ({"pinned": (("wide", (0, 1)),)}, 4, "it needs 3 devices, and it may live on 2"),
        ({"unsplit": ("wide",)}, 4, "'wide': no cut of its 4100 columns into shards of at most 2048"),
        (
            {"min_widths": (("wide", 2052),)},
            4,
            "'wide': no cut of its 4100 columns into shards of at most 2048",
        ),
        (
            {"kinds": (("wide", ("row",)),)},
            4,
            "row has all 4100 columns in a shard; .* 2048. It needs column",
        ),
    ],
)
def test_wide_tables_that_cannot_be_cut_are_refused(constraints, devices, message):
    with pytest.raises(ShardCoreError, match=message):
        searched("size_greedy", [Table("wide", 1000, 4100, 1.0)], devices, 600, **constraints)


@pytest.mark.parametrize("algorithm", SEARCHES)
@pytest.mark.parametrize(
    "dim, rows, constraints, placed",
    [
        (12, 1_000_000, {}, [("row", 12, 2)]),
        (20, 600_000, {}, [("row", 20, 2)]),
        (24, 500_000, {"kinds": (("hist", ("column",)),)}, [("column", 12, 1)] * 2),
        (40, 300_000, {"kinds": (("hist", ("column",)),)}, [("column", 20, 1)] * 2),
    ],
)
def test_sequences_are_divided_by_rows_or_cut_into_equal_parts(algorithm, dim, rows, constraints, placed):
    """No device holds such a table whole."""
    hist = Table("hist", rows, dim, 1.0, sequence=True)
    topology = Topology((Device(35 * MIB),) * 2)
    of = Problem("p", (hist, SMALL), topology, 48, constraints=Constraints(**constraints))
    plan = SHARDERS[algorithm](of, small_problem_model(of), budget=Budget(evals=300))
    lower(plan, of)
    assert of_table(plan, "hist") == placed


def test_sequences_of_a_collection_are_cut_equally_wide():
    kinds = tuple((f"hist{i}", ("column",)) for i in range(2))
    tables = tuple(
        Table(f"hist{i}", rows, 24, 1.0, sequence=True) for i, rows in enumerate((500_000, 900_000))
    )
    of = Problem("p", tables, Topology((Device(35 * MIB),) * 7), 49, constraints=Constraints(kinds=kinds))
    for algorithm in SEARCHES:
        plan = SHARDERS[algorithm](of, small_problem_model(of), budget=Budget(evals=300))
        lower(plan, of)
        assert {p.shard.width for p in plan.placements} == {8} and len(plan.placements) == 6


# --- shards and placements ----------------------------------------------------------------------------------


def of_tables(tables, hosts: str, **constraints) -> Problem:
    return Problem("p", tuple(tables), on_hosts(hosts), 48, constraints=Constraints(**constraints))


def test_rows_of_ordered_tables_rise_with_torchrecs_ranks():
    """TorchRec numbers devices host by host. Rows that are not ordered may be on any device of the group."""
    ordered, other = Table("ordered", 10, 4, 1.0, ordered=True), Table("other", 10, 4, 1.0)
    apart = of_tables([ordered, other], "xyxy")
    for table in (ordered, other):
        assert row_division(table, apart) == row(table, apart.topology)
    assert row_division(ordered, apart).devices == (0, 2, 1, 3)
    assert row_division(ordered, of_tables([ordered], "aaaa")).devices == (0, 1, 2, 3)
    pinned = of_tables([ordered, other], "xyxy", pinned=(("ordered", ("y",)), ("other", (0, 1))))
    assert [row_division(t, pinned) for t in (ordered, other)] == [host_row(ordered, (1, 3)), None]
    most = of_tables([ordered], "xyxy", pinned=(("ordered", (1, 2, 3)),))  # a host, and one more
    assert row_division(ordered, most) == host_row(ordered, (1, 3))
    unequal = of_tables([ordered, other], "xyy", pinned=(("ordered", ("y",)),))
    assert [row_division(t, unequal) for t in (ordered, other)] == [None, row(other, unequal.topology)]
    assert row_division(ordered, of_tables([ordered], "aa", unsplit=("ordered",))) is None
    assert row_division(ordered, of_tables([ordered], "aa", pinned=(("ordered", (1,)),))) is None
    few = Table("few", 3, 4, 1.0)  # over four devices the last would have none, over two it has one
    assert row_division(few, of_tables([few], "xyxy")) == host_row(few, (0, 2))
    assert row_division(replace(few, rows=1), of_tables([few], "xyxy")) is None
    [within] = alternative_row_divisions(apart)
    assert [row_division(t, within).kind for t in (ordered, other)] == ["host_row", "host_row"]
    [within] = alternative_row_divisions(
        of_tables([ordered, other], "xyxy", kinds=(("other", ("column", "row")),))
    )
    assert [row_division(t, within).kind for t in (ordered, other)] == ["host_row", "row"]
    assert within.restricted_kinds_by_table == {
        "ordered": ("column", "host_row", "data_parallel"),
        "other": ("column", "row"),
    }
    assert all(not list(alternative_row_divisions(p)) for p in (pinned, most, of_tables([ordered], "aaaa")))
    second = Shard(ordered, 3, 6, 0, 4)
    assert [
        allowed_devices_of_shard(Shard.whole(ordered), apart),
        allowed_devices_of_shard(second, apart),
    ] == [(0, 1, 2, 3), (2,)]
    assert allowed_devices_of_shard(Shard(other, 3, 6, 0, 4), apart) == (2,)
    assert allowed_devices_of_shard(Shard(ordered, 5, 10, 0, 4), pinned) == (3,)
    assert [sharding_kind_of_shard(s, apart).name for s in (Shard.whole(ordered), second)] == [
        "column",
        "row",
    ]
    assert sharding_kind_of_shard(Shard(ordered, 5, 10, 0, 4), pinned).name == "host_row"


def test_shards_become_placements_and_row_ranges_one():
    table = Table("t", 10, 8, 1.0)
    other = Table("other", 1000, 16, 1.0)
    problem = of_tables([table, other], "xyxy")
    ranges = [s for _, s in shards_by_device(row(table, problem.topology))]
    whole = (Shard.whole(other),)
    placements = placements_of_bundles(
        [(ranges[3],), whole, *((s,) for s in ranges[:3])], [3, 1, 0, 2, 1], problem
    )
    assert set(placements) == {row(table, problem.topology), column(other, 1)}
    for devices in ([3, 1, 0, 1, 2], [3, 1, 0, 2, 2]):
        with pytest.raises(RuntimeError, match="a search placed rows of table 't'"):
            placements_of_bundles([(ranges[3],), whole, *((s,) for s in ranges[:3])], devices, problem)
    with pytest.raises(RuntimeError, match="a search placed rows of table 't'"):
        placements_of_bundles([(s,) for s in ranges[:3]], [0, 2, 1], problem)


@given(data=st.data(), of_hosts=st.booleans())
def test_consolidate_keeps_columns_per_group_and_covers_the_table(data, of_hosts):
    table, where = Table("t", 10, 64, 1.0), on_hosts("xyxy")
    edges = [0, *sorted(4 * e for e in data.draw(st.sets(st.integers(1, 15)))), 64]
    placements = []
    for a, b in itertools.pairwise(edges):
        if of_hosts and data.draw(st.booleans()):
            placements.append(host_row(table, data.draw(st.sampled_from([(0, 2), (1, 3)])), a, b))
        else:
            placements.append(column(table, data.draw(st.integers(0, 3)), a, b))
    result = consolidate_placements(data.draw(st.permutations(placements)))

    def columns(placements) -> Counter:
        """Columns of each owner."""
        widths = Counter()
        for p in placements:
            widths[p.kind, p.devices] += p.shard.width
        return widths

    assert columns(result) == columns(placements)
    assert len(result) == len(columns(placements))
    assert consolidate_placements(result) == result
    require_full_cover(Plan(result), Problem("p", (table,), where, 48))


def test_consolidate_keeps_replicas_and_does_not_hide_faults():
    table = Table("t", 10, 16, 1.0)
    problem = of_tables([table], "aa")
    everywhere = replica(table, problem.topology)
    assert consolidate_placements([everywhere]) == (everywhere,)
    for wrong in (
        [column(table, 0, 0, 8)],
        [column(table, 0), column(table, 1, 8, 16)],
        [everywhere, column(table, 0)],
        [everywhere, everywhere],
    ):
        with pytest.raises(ValueError, match="plan places"):
            require_full_cover(Plan(consolidate_placements(wrong)), problem)
