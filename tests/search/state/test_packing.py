"""Packing: a plan is found wherever one fits. Small problems are compared with all their plans."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from cuts import draw_all_kinds
from cuts import with_memory as with_each
from shapes import column, on_hosts, replica, row

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import MIN_WIDTH, Placement, Plan, Problem, Shard, Table
from shardcore.search import SHARDERS, Budget
from shardcore.search.state.packing import excess_bytes, least_excess_plan
from shardcore.step import memory
from shardcore.step.lower import lower
from shardcore.step.ways import cut_into_equal_parts
from shardcore.testing.problems import small_problem_model


def ways(table: Table, topology: Topology):
    """A table whole on each device, in halves, by rows, and replicated."""
    n = len(topology)
    yield from ((column(table, d),) for d in range(n))
    if n == 1:
        return
    yield (row(table, topology),)
    yield (replica(table, topology),)
    if table.dim == MIN_WIDTH:
        return
    halves = cut_into_equal_parts(Shard.whole(table), 2, MIN_WIDTH)
    if not (table.sequence and halves[0].width != halves[1].width):
        yield from (
            tuple(Placement("column", s, (d,)) for s, d in zip(halves, pair, strict=True))
            for pair in permutations(range(n), 2)
        )


def least_memory(of: Problem) -> int:
    """The least memory of each device with which some plan fits: all plans are tried."""
    least = []
    for each in product(*(list(ways(t, of.topology)) for t in of.tables)):
        plan = Plan(tuple(p for placements in each for p in placements))
        used = memory.used_bytes(plan, of)
        least.append(max(used[d] for p in plan.placements for d in p.devices))
    return min(least)


def small(seed: int) -> Problem:
    """2 or 3 tables on 1 to 3 devices. Weights, outputs or ids take most memory."""
    rng = np.random.default_rng(seed)
    most = ("weights", "outputs", "ids")[seed % 3]
    rows = (100, 5000) if most == "weights" else (5, 200)
    tables = tuple(
        Table(
            f"t{i}",
            int(rng.integers(*rows)),
            int(rng.choice([4, 8, 12, 16, 32, 64])),
            float(rng.choice([20, 100] if most == "ids" else [1, 2, 5])),
            sequence=bool(rng.random() < 0.3),
        )
        for i in range(rng.integers(2, 4))
    )
    devices = "a" * int(rng.integers(1, 4))
    return Problem(f"small-{seed}", tables, on_hosts(devices), 6 * int(rng.integers(2, 40)))


def with_memory(of: Problem, n_bytes: int) -> Problem:
    """The problem with so many bytes on each device."""
    return with_each(of, [n_bytes] * len(of.topology))


@pytest.mark.parametrize(
    "seed", [1, 5, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 2, 3, 4))]
)
def test_no_sharder_refuses_what_some_plan_fits(seed):
    given = small(seed)
    least = least_memory(given)
    for times in (1.0, 1.1):
        tight = with_memory(given, int(times * least))
        for name in ("size_greedy", "neuroshard", "anneal"):
            lower(SHARDERS[name](tight, small_problem_model(tight), budget=Budget(evals=50)), tight)


@pytest.mark.parametrize("seed", range(12, 15))
def test_what_is_said_to_be_lacking_is_enough_and_not_much_more(seed):
    given = small(seed)
    least = least_memory(given)
    short = with_memory(given, least // 2)
    plan, lacks = least_excess_plan(short)
    assert lacks == excess_bytes(plan, short)
    assert lacks <= least - least // 2  # finer cuts than halves may need less
    assert least_excess_plan(with_memory(given, least // 2 + lacks))[1] <= 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_where_cached_tables_differ_in_width_what_a_plan_takes_is_enough(seed):
    """A cache is as wide as its op's widest table, so narrow tables take less away from wide ones."""
    rng = np.random.default_rng(seed)
    narrow = [
        Table(f"n{i}", int(rng.integers(20_000, 90_000)), 16, 3.0 + i, load_factor=0.25) for i in range(12)
    ]
    wide = Table("wide", 3_000, 128, 5.0, load_factor=0.25)
    topology = on_hosts("xxx", 1 << 30, memory=(Memory("host", 1 << 40, 25.0),))
    ample = Problem("caches", (*narrow, wide), topology, 66)
    plan = Plan(tuple(column(t, 2 if t is wide else i % 2) for i, t in enumerate(ample.tables)))
    tight = with_memory(ample, max(memory.used_bytes(plan, ample)))
    for name in ("size_greedy", "neuroshard", "anneal"):
        lower(SHARDERS[name](tight, small_problem_model(tight), budget=Budget(evals=50)), tight)


@pytest.mark.parametrize("seed", [1, 7, *(pytest.param(seed, marks=pytest.mark.long) for seed in (3, 5))])
def test_what_fits_by_one_packing_is_not_refused_with_just_its_memory(seed):
    given = draw_all_kinds(seed, caches=seed % 4 > 1)
    least = least_excess_plan(with_memory(given, 1))[1] + 1
    assert least_excess_plan(with_memory(given, least))[1] <= 0


# --- large ones ---------------------------------------------------------------------------------------------


def sequences_beside_bags(memory_bytes: int, **constraints) -> Problem:
    """Like a published job: two sequence tables that no device holds whole, beside many bags (r04)."""
    rng = np.random.default_rng(0)
    bags = (
        Table(
            f"bag{i}",
            int(rng.integers(100, 20_000)),
            int(rng.choice([8, 64, 128])),
            float(rng.choice([1, 5, 40])),
        )
        for i in range(70)
    )
    history = (Table(f"history{i}", 100_000, 128, 100.0, sequence=True, collection="ec") for i in range(2))
    return Problem(
        "job", (*history, *bags), on_hosts("aabb", memory_bytes), 256, constraints=Constraints(**constraints)
    )


def test_sequences_are_divided_where_that_makes_a_problem_fit():
    least = least_excess_plan(sequences_beside_bags(1))[1] + 1
    given = sequences_beside_bags(least)
    plan = SHARDERS["size_greedy"](given, small_problem_model(given))
    lower(plan, given)
    histories = [p for p in plan.placements if p.shard.table.sequence]
    assert any(len(p.devices) > 1 or p.shard != Shard.whole(p.shard.table) for p in histories)
    # The search near a plan that fits returns a cheaper one, where there is some room.
    roomy = sequences_beside_bags(least * 12 // 10)
    annealed = SHARDERS["anneal"](roomy, small_problem_model(roomy), budget=Budget(evals=1000))
    lower(annealed, roomy)
    assert annealed.provenance["predicted_ms"] <= plan.provenance["predicted_ms"]


def test_constraints_are_kept_by_plans_that_just_fit():
    constraints = {
        "kinds": (("bag0", ("data_parallel",)), ("bag1", ("row", "host_row"))),
        "unsplit": ("bag2",),
        "pinned": (("bag3", (2, 3)),),
        "together": (("bag4", "bag5"),),
        "min_widths": (("bag6", 64),),
    }
    least = least_excess_plan(sequences_beside_bags(1, **constraints))[1] + 1
    given = sequences_beside_bags(least, **constraints)
    for name in ("size_greedy", "anneal_columns"):
        lower(SHARDERS[name](given, small_problem_model(given), budget=Budget(evals=100)), given)


# --- constraints --------------------------------------------------------------------------------------------

BATCH = 48
TABLES = tuple(Table(f"t{i}", 1000, 16, 1.0) for i in range(6))


def problem_of(tables, hosts: str, **constraints) -> Problem:
    return Problem("p", tuple(tables), on_hosts(hosts), BATCH, constraints=Constraints(**constraints))


def just_for(plan: Plan, given: Problem, less: int = 0) -> Problem:
    """The problem with the memory that a plan takes, or so many bytes less on each device."""
    return with_each(given, [n - less for n in memory.used_bytes(plan, given)])


def greedily(given: Problem, name: str = "size_greedy") -> Plan:
    plan = SHARDERS[name](given, small_problem_model(given), budget=Budget(evals=100))
    lower(plan, given)
    return plan


@pytest.mark.parametrize("name", ["size_greedy", "neuroshard", "anneal"])
def test_a_table_pinned_to_a_host_is_cut_as_its_devices_have_room(name):
    """t0 fits device 0 best, but the wide table needs all of host a: 16, 16 and 12 columns, not halves."""
    wide = Table("wide", 1000, 44, 1.0)
    given = problem_of(
        [wide, TABLES[0]],
        "aaab",
        unsplit=("t0",),
        pinned=(("wide", ("a",)),),
        kinds=(("wide", ("column",)), ("t0", ("column",))),
    )
    only = Plan(
        (column(wide, 0, 0, 16), column(wide, 1, 16, 32), column(wide, 2, 32, 44), column(TABLES[0], 3))
    )
    plan = greedily(just_for(only, given), name)
    assert sorted((p.shard.table.name, p.shard.width, p.devices) for p in plan.placements) == [
        ("t0", 16, (3,)),
        ("wide", 12, (2,)),
        ("wide", 16, (0,)),
        ("wide", 16, (1,)),
    ]
    with pytest.raises(Infeasible, match="does not fit"):
        greedily(just_for(only, given, less=1), name)


@pytest.mark.parametrize("name", ["size_greedy", "neuroshard", "anneal"])
def test_tables_kept_together_fit_a_device_to_the_byte(name):
    """Device 1 holds three tables. The device that t4 is pinned to has no room for more."""
    given = problem_of(
        TABLES,
        "aaa",
        together=(("t0", "t1", "t2"),),
        pinned=(("t4", (0,)), ("t1", (1, 2))),
        unsplit=("t3", "t5"),
        kinds=tuple((t.name, ("column",)) for t in TABLES),
    )
    only = Plan(tuple(column(t, d) for t, d in zip(TABLES, (1, 1, 1, 2, 0, 2), strict=True)))
    plan = greedily(just_for(only, given), name)
    assert [p.devices for p in plan.placements] == [p.devices for p in only.placements]
    with pytest.raises(Infeasible, match="does not fit"):
        greedily(just_for(only, given, less=1), name)


def test_tables_are_cut_where_whole_ones_leave_gaps():
    tables = TABLES[:3]
    given = problem_of(tables, "aa", kinds=tuple((t.name, ("column",)) for t in tables))
    only = Plan(
        (column(tables[0], 0), column(tables[1], 1), column(tables[2], 0, 0, 8), column(tables[2], 1, 8, 16))
    )
    plan = greedily(just_for(only, given))
    assert sorted(p.shard.width for p in plan.placements) == [8, 8, 16, 16] and plan.provenance["packed"]
    unsplit = replace(given.constraints, unsplit=tuple(t.name for t in tables))
    with pytest.raises(Infeasible, match="must stay whole"):
        greedily(replace(just_for(only, given), constraints=unsplit))


def test_rows_are_divided_where_no_column_fits():
    deep = Table("deep", 10_000, 4, 1.0)
    given = problem_of([deep], "aaaa")
    only = Plan((row(deep, given.topology),))
    assert greedily(just_for(only, given)).placements == only.placements
    with pytest.raises(Infeasible, match="its rows, which TorchRec divides evenly over all 4 devices, take"):
        greedily(just_for(only, given, less=1))
    # Four columns fit a device each, but all of such tables do not fit the gaps that they leave.
    tables = [Table(f"t{i}", 5000, 4, 1.0) for i in range(4)]
    given = problem_of(tables, "aaa")
    only = Plan((*(column(t, d) for d, t in enumerate(tables[:3])), row(tables[3], given.topology)))
    assert {p.kind for p in greedily(just_for(only, given)).placements} == {"column", "row"}
    unsplit = Constraints(unsplit=tuple(t.name for t in tables))
    with pytest.raises(Infeasible, match="does not fit"):
        greedily(replace(just_for(only, given), constraints=unsplit))


def test_columns_are_poured_to_the_last_that_fits():
    wide = Table("wide", 1000, 64, 1.0)
    only = Constraints(kinds=(("wide", ("column",)),))
    plan = Plan((column(wide, 0, 0, 28), column(wide, 1, 28, 52), column(wide, 2, 52, 64)))
    given = Problem("poured", (wide,), Topology((Device(1 << 40),) * 3), 66, constraints=only)
    exact = memory.used_bytes(plan, given)
    given = replace(given, topology=Topology(tuple(map(Device, exact))))
    poured, lacks = least_excess_plan(given)
    assert lacks <= 0 and {p.devices[0]: p.shard.width for p in poured.placements} == {0: 28, 1: 24, 2: 12}
    less = replace(given, topology=Topology(tuple(Device(n - (d == 0)) for d, n in enumerate(exact))))
    assert least_excess_plan(less)[1] > 0


def test_many_alike_fill_devices_to_the_last():
    tables = [Table(f"t{i}", 1000, 16, 1.0) for i in range(100)]
    given = problem_of(tables, "aaaa", unsplit=tuple(t.name for t in tables))
    full = just_for(Plan(tuple(column(t, i % 4) for i, t in enumerate(tables))), given)
    plan, lacks = least_excess_plan(full)
    assert lacks == 0 and np.bincount([p.devices[0] for p in plan.placements]).tolist() == [25] * 4
    less = replace(
        full, constraints=replace(full.constraints, kinds=tuple((t.name, ("column",)) for t in tables))
    )
    assert least_excess_plan(with_memory(less, memory.used_bytes(plan, full)[0] - 1))[1] > 0


def test_memory_that_was_given_in_gb_is_named():
    given = replace(problem_of(TABLES[:1], "aa"), topology=Topology((Device(80), Device(80))))
    with pytest.raises(
        Infeasible, match="a device has memory_bytes 80; it needs to be in bytes, such as 80000000000"
    ):
        greedily(given)
