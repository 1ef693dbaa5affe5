"""One suite for every entry of SHARDERS, and every peer of bench/: what a plan has to be, whoever made it.

It runs in two files, of which one is long: each takes all of this and names SHARDERS_HERE (see conftest.py).
"""

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import untrained
from shapes import column, host_row, row, with_room

from bench.peers import PEERS
from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, SettingMismatch
from shardcore.core.topology import Device, Topology
from shardcore.core.types import MIN_WIDTH, Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.search import LEARNED, SHARDERS, Budget, greedy
from shardcore.search import sharder as sharder_of
from shardcore.search.state.shards import consolidate
from shardcore.step import memory, memory_account
from shardcore.step.kinds import LAYOUTS, WHOLE_ROWS, possible_groups
from shardcore.step.lower import lower
from shardcore.step.memory import used_bytes
from shardcore.torchrec import sharder as torchrec_peer
from shardcore.torchrec.sharding_plan import sharded

BATCH = 48  # 1, 2, 3 and 4 devices divide it
FILES = {
    "sharders": (
        "random",
        *greedy.ORDERS,
        "neuroshard",
        "anneal",
        "anneal_columns",
        "portfolio",
        "torchrec",
        "dreamshard",
        "dreamshard_direct_columns",
        "autoshard",
    ),
    "peers": ("embark", "milp"),
}
"""By file (test_conformance_NAME.py), the sharders that it is for.

Of learned ones, each network and each way to cut."""
EXAMPLES = {
    "random": 3,
    **dict.fromkeys(greedy.ORDERS, 2),
    "size_greedy": 15,
    "anneal_columns": 3,
    "portfolio": 5,
    "milp": 4,
    "torchrec": 3,
    "embark": 5,
    **dict.fromkeys(LEARNED, 2),
}
"""Drawn problems of a test: few for those that share their implementation with another, or are slow; 10 for
others."""
SMALL_BUDGET = Budget(evals=300)


def model_for(problem: Problem) -> AnalyticModel:
    setting = Setting("made-up", problem.global_batch, problem.tables[0].precision, problem.optimizer)
    # A slow network and a short launch, so that balance of compute and of communication both matter at this
    # size.
    return AnalyticModel(
        setting, launch_us=2, table_us=1, lookup_ns=10, exchange_latency_ms=0.001, exchange_gbps=1
    )


def drawn(sharder: str, **strategies):
    """Run a test on drawn problems, the same each time: what fails once in a hundred runs makes a suite red
    by chance."""
    how = settings(max_examples=EXAMPLES.get(sharder, 10), deadline=None, derandomize=True, database=None)
    return lambda test: how(given(**strategies)(test))()


def table_bytes(table: Table, optimizer: str = "exact_sgd", width: int | None = None) -> int:
    """What a table of a problem takes, or some of its columns, as searches count it."""
    of_one = Problem("one", (table,), Topology((Device(1),)), BATCH, optimizer)
    return memory_account.table_bytes(table, of_one, width)


def draw_tables(rng: np.random.Generator, n: int, dims=(4, 8, 12, 16, 32)) -> tuple[Table, ...]:
    return tuple(
        Table(
            f"t{i}",
            int(rng.integers(1, 400)),
            int(rng.choice(dims)),
            float(rng.choice([0, 1, 2.5, 10, 30])),
            Zipf(float(rng.uniform(0, 1.5))),
        )
        for i in range(n)
    )


def draw_problem(
    seed: int, n_tables: int, memory: list[int], speeds: list[float] | None = None, **fields
) -> Problem:
    rng = np.random.default_rng(seed)
    devices = tuple(Device(m, s) for m, s in zip(memory, speeds or [1.0] * len(memory), strict=True))
    return Problem(f"drawn-{seed}", draw_tables(rng, n_tables), Topology(devices), BATCH, **fields)


def with_slack(seed: int, n_devices: int, slack: float, **fields) -> Problem:
    """Devices that hold the tables' bytes × slack together."""
    loose = draw_problem(seed, 12, [1] * n_devices, **fields)
    needed = sum(table_bytes(t, loose.optimizer) for t in loose.tables)
    return replace(loose, topology=Topology((Device(int(needed * slack / n_devices)),) * n_devices))


def on_hosts(problem: Problem, constraints: Constraints) -> Problem:
    """The first half of the devices on host a, the others on b."""
    half = len(problem.topology) // 2
    devices = tuple(replace(d, host="a" if i < half else "b") for i, d in enumerate(problem.topology.devices))
    return replace(problem, topology=Topology(devices), constraints=constraints)


HUGE = Table("huge", 5000, 64, 20.0)
DEEP = Table("deep", 200_000, 4, 3.0)
SMALL = tuple(Table(f"small{i}", 50 + i, 8, 2.0) for i in range(5))
MIB = 2**20
CASES = {
    "one device": draw_problem(0, 8, [64 * MIB]),
    "one table": Problem("one", (SMALL[0],), Topology((Device(MIB),) * 4), BATCH),
    "more devices than tables": draw_problem(1, 2, [MIB] * 4),
    "unequal memory": draw_problem(2, 15, [MIB // 2, MIB, 3 * MIB]),
    "unequal speed": draw_problem(3, 15, [MIB] * 3, [1.0, 2.0, 0.5]),
    "tight memory": with_slack(4, 4, 1.05),
    "adagrad, tight": with_slack(5, 3, 1.08, optimizer="rowwise_adagrad"),
    "a full device": draw_problem(6, 6, [2000, MIB]),
    "all empty": Problem(
        "empty", tuple(replace(t, pooling=0.0) for t in SMALL), Topology((Device(MIB),) * 2), BATCH
    ),
    "a table to cut": Problem("cut", (HUGE, *SMALL), Topology((Device(HUGE.bytes // 2),) * 3), BATCH),
    "rows to cut": Problem("rows", (DEEP, *SMALL), Topology((Device(DEEP.bytes // 2),) * 3), BATCH),
    "rows and columns to cut": Problem(
        "both", (replace(HUGE, rows=50_000), *SMALL), Topology((Device(700_000),) * 24), BATCH
    ),
    "unsplit": replace(with_slack(7, 3, 1.3), constraints=Constraints(unsplit=("t0", "t3", "t7"))),
    "all unsplit": replace(
        with_slack(8, 3, 1.4), constraints=Constraints(unsplit=tuple(f"t{i}" for i in range(12)))
    ),
    "reserved more than one has": replace(
        draw_problem(6, 6, [2000, MIB]), constraints=Constraints(reserved_bytes=3000)
    ),
    "reserved": replace(draw_problem(9, 10, [MIB] * 2), constraints=Constraints(reserved_bytes=MIB // 2)),
    "pinned": replace(
        with_slack(10, 4, 1.3),
        constraints=Constraints(
            pinned=(("t0", (0,)), ("t3", (0,)), ("t5", (1, 2)), ("t6", (3, 1)), ("t9", (0, 1, 2, 3)))
        ),
    ),
    "pinned to hosts": on_hosts(
        with_slack(11, 4, 1.15),
        Constraints(pinned=tuple((f"t{i}", ("a",) if i < 4 else ("b",)) for i in range(8))),
    ),
    "pinned, to cut": on_hosts(
        Problem("cut", (HUGE, *SMALL), Topology((Device(HUGE.bytes * 6 // 10),) * 4), BATCH),
        Constraints(pinned=(("huge", ("b",)), ("small0", (2,)))),
    ),
    "together": replace(
        with_slack(12, 3, 1.4), constraints=Constraints(together=(("t0", "t1", "t2"), ("t3", "t7"), ("t8",)))
    ),
    "given kinds": replace(
        with_slack(20, 4, 4.0),
        constraints=Constraints(
            unsplit=("t1",),
            pinned=(("t4", (0, 1)),),
            kinds=(("t0", ("data_parallel",)), ("t2", ("row",)), ("t7", ("data_parallel",))),
        ),
    ),
    "all by given kinds": replace(
        with_slack(21, 2, 3.0),
        constraints=Constraints(kinds=tuple((f"t{i}", ("data_parallel",)) for i in range(12))),
    ),
    "together and pinned, tight": on_hosts(
        with_slack(19, 4, 1.3, optimizer="rowwise_adagrad"),
        Constraints(
            unsplit=("t1",),
            together=(("t0", "t2", "t4"), ("t5", "t6")),
            pinned=(("t2", ("b",)), ("t5", (0, "b")), ("t8", ("a",))),
        ),
    ),
}
CASES = {case: with_room(problem) for case, problem in CASES.items()}
every_case = pytest.mark.parametrize("case", CASES)


def times_placed(table: Table, shards: Iterable[Shard]) -> set[int]:
    """How often cells of a table are placed, counted apart from `lower`: one count for each rectangle between
    the edges of all shards, so exact however large the table is."""
    shards = list(shards)
    rows = sorted({0, table.rows, *(edge for s in shards for edge in (s.row_lo, s.row_hi))})
    columns = sorted({0, table.dim, *(edge for s in shards for edge in (s.col_lo, s.col_hi))})
    times = np.zeros((len(rows) - 1, len(columns) - 1), dtype=int)
    for s in shards:
        times[
            bisect_left(rows, s.row_lo) : bisect_left(rows, s.row_hi),
            bisect_left(columns, s.col_lo) : bisect_left(columns, s.col_hi),
        ] += 1
    return set(times.flat)


def parts_of(placement: Placement) -> list[tuple[int, Shard]]:
    """What each device has, worked out apart from `layouts`."""
    shard, n = placement.shard, len(placement.devices)
    if placement.kind in ("column", "data_parallel"):
        return [(d, shard) for d in placement.devices]
    each = math.ceil(shard.rows / n)
    return [
        (d, replace(shard, row_lo=i * each, row_hi=min((i + 1) * each, shard.rows)))
        for i, d in enumerate(placement.devices)
    ]


def check_plan(plan: Plan, problem: Problem) -> None:
    """What every plan has to be, so that TorchRec trains it."""
    workload = lower(plan, problem)
    for table in problem.tables:
        mine = [p for p in plan.placements if p.shard.table == table]
        sharded(mine, problem.topology)
        once = (s for p in mine for _, s in (parts_of(p)[:1] if p.kind == "data_parallel" else parts_of(p)))
        times = times_placed(table, once)
        assert times == {1}, f"cells of {table.name} are placed {times} times"
    assert list(workload.memory_bytes) == memory.used_bytes(plan, problem)
    together = Counter((p.shard.table.name, d) for p in plan.placements for d in p.devices)
    assert max(together.values()) == 1, (
        f"several shards of one table on one device: {together.most_common(1)}"
    )
    assert plan.placements == consolidate(plan.placements)
    split = {p.shard.table.name for p in plan.placements for _, s in parts_of(p) if s != Shard.whole(s.table)}
    assert not split & set(problem.constraints.unsplit)
    homes = {
        t.name: {d for p in plan.placements if p.shard.table == t for d in p.devices} for t in problem.tables
    }
    for name, where in problem.constraints.pinned:
        hosts = [problem.topology.devices[d].host for d in range(len(problem.topology))]
        assert all(d in where or hosts[d] in where for d in homes[name]), (
            f"{name} is on {homes[name]}, pinned to {where}"
        )
    for group in problem.constraints.together:
        assert not split & set(group) and len(set.union(*(homes[name] for name in group))) == 1, (
            f"{group} is not together"
        )


def solve(
    sharder: str, problem: Problem, seed: int = 0, budget: Budget | None = SMALL_BUDGET, model=None
) -> Plan:
    if sharder == "torchrec" and not torchrec_peer.installed():
        pytest.skip(f"TorchRec is not installed: {torchrec_peer.INSTALL}")
    if sharder in LEARNED:
        search = sharder_of(sharder, untrained(LEARNED[sharder][0]))
        budget = budget and Budget(evals=min(budget.evals, 100))  # random plans of a random policy
    else:
        search = {**SHARDERS, **PEERS}[sharder]
    return search(problem, model or model_for(problem), seed=seed, budget=budget)


@every_case
def test_plan_is_valid_and_says_where_it_comes_from(sharder, case):
    problem = CASES[case]
    plan = solve(sharder, problem, 3)
    check_plan(plan, problem)
    assert (plan.provenance["algorithm"], plan.provenance["seed"]) == (sharder, 3)
    json.dumps(plan.provenance, allow_nan=False)
    assert plan.provenance["predicted_ms"] == price(lower(plan, problem), model_for(problem)).total_ms


def test_without_a_budget_there_is_a_plan_too(sharder):
    problem = CASES["more devices than tables"]
    check_plan(solve(sharder, problem, budget=None), problem)


@pytest.mark.parametrize("case", ["unequal memory", "tight memory", "rows to cut"])
def test_same_seed_same_plan(sharder, case):
    first, second = (solve(sharder, CASES[case], 5, Budget(evals=200)) for _ in range(2))
    assert first == second and first.provenance == second.provenance


def test_a_problem_with_a_hidden_plan_gets_one(sharder):
    """Devices hold exactly what some table-wise plan puts on them, to the byte."""

    @drawn(
        sharder,
        seed=st.integers(0, 10**6),
        n_tables=st.integers(1, 9),
        whole=st.booleans(),
        n_devices=st.sampled_from([1, 2, 3, 4]),
        optimizer=st.sampled_from(["exact_sgd", "rowwise_adagrad"]),
    )
    def gets_one(seed, n_tables, n_devices, whole, optimizer):
        rng = np.random.default_rng(seed)
        tables = draw_tables(rng, n_tables)
        memory = np.zeros(n_devices, dtype=int)
        for table in tables:
            memory[rng.integers(n_devices)] += table_bytes(table, optimizer)
        devices = tuple(Device(int(m) or 1, float(rng.choice([0.5, 1, 2]))) for m in memory)
        unsplit = tuple(t.name for t in tables) if whole else ()
        problem = Problem("hidden", tables, Topology(devices), BATCH, optimizer, Constraints(unsplit=unsplit))
        problem = with_room(problem)
        check_plan(solve(sharder, problem, seed), problem)


def test_a_hidden_plan_that_meets_pins_and_groups_gets_one(sharder):
    """As above; some tables are pinned to the hidden plan's devices and others, and some that it has on one
    are kept together."""

    @drawn(
        sharder,
        seed=st.integers(0, 10**6),
        n_tables=st.integers(1, 9),
        n_devices=st.sampled_from([2, 3, 4]),
        whole=st.booleans(),
    )
    def gets_one(seed, n_tables, n_devices, whole):
        rng = np.random.default_rng(seed)
        tables = draw_tables(rng, n_tables)
        homes = rng.integers(n_devices, size=n_tables)
        memory = np.bincount(homes, list(map(table_bytes, tables)), n_devices).astype(int)
        devices = tuple(
            Device(int(m) or 1, float(rng.choice([0.5, 1, 2])), f"host-{d // 2}")
            for d, m in enumerate(memory)
        )
        home_of = {t.name: int(d) for t, d in zip(tables, homes, strict=True)}
        pinned = tuple(
            (
                t,
                (devices[d].host,)
                if rng.random() < 0.3
                else (d, *rng.integers(n_devices, size=rng.integers(2)).tolist()),
            )
            for t, d in home_of.items()
            if rng.random() < 0.4
        )
        groups = [
            tuple(t for t, d in home_of.items() if d == home and rng.random() < 0.5)
            for home in range(n_devices)
        ]
        constraints = Constraints(
            0, tuple(t.name for t in tables) if whole else (), pinned, tuple(filter(None, groups))
        )
        problem = Problem("hidden", tables, Topology(devices), BATCH, constraints=constraints)
        problem = with_room(problem)
        check_plan(solve(sharder, problem, seed), problem)


def test_little_slack_is_enough_where_tables_may_be_cut(sharder):
    @drawn(
        sharder, seed=st.integers(0, 10**6), n_devices=st.sampled_from([2, 3, 4]), slack=st.floats(1.02, 2.0)
    )
    def is_enough(seed, n_devices, slack):
        problem = with_slack(seed, n_devices, slack)
        try:
            check_plan(solve(sharder, with_room(problem), seed), with_room(problem))
        except Infeasible:
            # Four columns of the largest table, or its outputs when rows are cut, may be more than the slack.
            grain = max(8 * BATCH * t.dim for t in problem.tables) + max(
                table_bytes(t, width=4) for t in problem.tables
            )
            spare = sum(d.memory_bytes for d in problem.topology.devices) - sum(
                map(table_bytes, problem.tables)
            )
            assert spare < n_devices * grain


@pytest.mark.parametrize("speeds", [(2.0, 1.0), (1.0, 2.0)])
def test_not_a_byte_more_than_a_device_has_is_used(sharder, speeds):
    """Two tables that stay whole, one 0.5% larger: the faster device would be the place for it, and lacks a
    few bytes."""
    pair = (Table("less", 1000, 4, 10.0, Zipf(0)), Table("more", 1005, 4, 11.0, Zipf(0)))
    problem = Problem(
        "bytes",
        pair,
        Topology(tuple(Device(MIB, speed) for speed in speeds)),
        BATCH,
        constraints=Constraints(unsplit=("less", "more")),
    )
    only = Plan((column(pair[0], speeds.index(2.0)), column(pair[1], speeds.index(1.0))))
    exact = used_bytes(only, problem)
    problem = replace(problem, topology=Topology(tuple(map(Device, exact, speeds))))
    homes = {p.shard.table.name: p.devices[0] for p in solve(sharder, problem).placements}
    assert homes == {"less": speeds.index(2.0), "more": speeds.index(1.0)}
    for device in (0, 1):  # nothing else fits, nor does this with a byte less
        less = [
            replace(d, memory_bytes=d.memory_bytes - (i == device))
            for i, d in enumerate(problem.topology.devices)
        ]
        with pytest.raises(Infeasible):
            solve(
                sharder,
                replace(
                    problem,
                    topology=Topology(tuple(less)),
                    constraints=replace(
                        problem.constraints, kinds=tuple((t.name, ("column",)) for t in pair)
                    ),
                ),
            )


def test_a_table_of_which_four_columns_fit_no_device_is_divided_as_torchrec_trains_rows(sharder):
    large, others = Table("large", 40_000, 8, 1.0), [Table(f"t{i}", 1000, 16, 1.0) for i in range(2)]
    # Four columns: 640,000 bytes; a third of its rows: 430,000.
    problem = Problem("tall", (large, *others), Topology((Device(600_000),) * 3), BATCH)
    plan = solve(sharder, problem)
    assert [p for p in plan.placements if p.shard.table == large] == [row(large, problem.topology)]


def test_rows_of_a_table_pinned_to_a_host_are_divided_over_that(sharder):
    tall, others = Table("tall", 40_000, 4, 1.0), [Table(f"t{i}", 1000, 16, 1.0) for i in range(2)]
    devices = tuple(Device(600_000, host=h) for h in "aabbcc")
    problem = Problem(
        "host", (tall, *others), Topology(devices), BATCH, constraints=Constraints(pinned=(("tall", ("b",)),))
    )
    plan = solve(sharder, problem)
    assert [p for p in plan.placements if p.shard.table == tall] == [host_row(tall, (2, 3))]
    check_plan(plan, problem)


def every_plan(problem: Problem, columns_alone: bool = False):
    """Every plan, up to which columns a group of devices holds, that has each table in one kind of
    sharding."""

    def ways(t: Table):
        for layout in (WHOLE_ROWS,) if columns_alone else LAYOUTS.values():
            groups = possible_groups(layout, t.rows, problem.topology, None)
            columns = t.dim // MIN_WIDTH if layout.cuts_columns else 1
            for dealt in combinations_with_replacement(groups, columns):
                edges = [t.dim * i // columns for i in range(columns + 1)]
                yield [
                    Placement(layout.name, Shard(t, 0, t.rows, *edges[i : i + 2]), g)
                    for i, g in enumerate(dealt)
                ]

    for choice in product(*(list(ways(t)) for t in problem.tables)):
        yield Plan(consolidate(p for placements in choice for p in placements))


def tiny_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    speeds = [1.0, 1.0] if seed % 2 else [1.0, 2.0]
    return Problem(
        "tiny", draw_tables(rng, 3, dims=(4, 8, 16)), Topology(tuple(Device(MIB, s) for s in speeds)), BATCH
    )


@cache
def optima() -> list[tuple[Problem, float, float]]:
    """Problems, and the least ms of all plans and of those that cut by columns alone."""
    problems = [tiny_problem(seed) for seed in range(6)]
    return [
        (
            p,
            *(
                min(price(lower(plan, p), model_for(p)).total_ms for plan in every_plan(p, alone))
                for alone in (False, True)
            ),
        )
        for p in problems
    ]


AT_MOST = {"portfolio": 1 + 1e-9, "anneal": 1 + 1e-9, "anneal_columns": 1 + 1e-9, "neuroshard": 1.10}
"""Mean cost over that of the cheapest of all plans, of those for which that is known."""


def test_never_better_than_brute_force_and_near_it(sharder):
    ratios = []
    for problem, least, by_columns in optima():
        ms = solve(sharder, problem, budget=Budget(evals=5000)).provenance["predicted_ms"]
        ratios.append(ms / (by_columns if sharder == "anneal_columns" else least))
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) <= AT_MOST.get(sharder, np.inf), ratios


PIGEON = table_bytes(Table("p0", 10_000, 32, 1.0))
"""Bytes of a table of 10,000 rows and 32 columns, and about those of one of 40,000 rows and 8 columns."""
FOUR_SMALL = sum(map(table_bytes, SMALL[:4]))
NOTHING_FITS = {
    "sum": (
        Problem("sum", (HUGE, *SMALL), Topology((Device(HUGE.bytes // 4),) * 3), BATCH),
        [
            "'sum'",
            "6 tables take 1.4 MiB",
            "3 devices may hold 1.0 MiB",
            "0.4 MiB too little",
            "more per device",
            "more devices",
        ],
    ),
    "side by side": (
        Problem(
            "pigeons",
            tuple(Table(f"p{i}", 10_000, 32, 1.0) for i in range(3)),
            Topology((Device(19 * PIGEON // 10),) * 2),
            BATCH,
            constraints=Constraints(unsplit=("p0", "p1", "p2")),
        ),
        [
            "'p0'",
            "'p1'",
            "'p2'",
            "must stay whole",
            "no way was found to pack them side by side",
            "more per device",
            "1 more device like",
        ],
    ),
    "pinned to a device": (
        Problem(
            "device",
            SMALL,
            Topology((Device(FOUR_SMALL // 2), Device(MIB))),
            BATCH,
            constraints=Constraints(pinned=tuple((f"small{i}", (0,)) for i in range(4))),
        ),
        [
            "tables pinned to device 0 (constraints.pinned), 'small0', 'small1', 'small2', 'small3', take",
            "with their outputs; it may hold",
            "bytes too little",
            "more per device",
            "or without its pins and groups",
        ],
    ),
    "pinned to a host": (
        on_hosts(
            Problem("host", (HUGE, *SMALL), Topology((Device(HUGE.bytes // 3),) * 6), BATCH),
            Constraints(pinned=(("huge", ("b",)), ("small0", (3,)), ("small1", ("a",)))),
        ),
        [
            "tables pinned to devices 3, 4, 5 (constraints.pinned), 'huge', 'small0', take 1.3 MiB",
            "they may hold",
            "more per device",
            "without its pins and groups",
        ],
    ),
    "a group too large": (
        Problem(
            "group",
            SMALL,
            Topology((Device(FOUR_SMALL // 2),) * 4),
            BATCH,
            constraints=Constraints(together=(("small0", "small1", "small2", "small3"),)),
        ),
        [
            "the group 'small0', 'small1', 'small2', 'small3', kept on one device (constraints.together)",
            "the largest device may hold",
            "or without its pins and groups",
        ],
    ),
    "a pinned table too large": (
        replace(draw_problem(2, 8, [3000, MIB]), constraints=Constraints(pinned=(("t2", (0,)),))),
        ["table 't2', which must stay whole (constraints.pinned)", "device where it may live"],
    ),
    "groups side by side": (
        Problem(
            "groups",
            tuple(Table(f"p{i}", 40_000, 8, 1.0) for i in range(6)),
            Topology((Device(28 * PIGEON // 10),) * 2 + (Device(15 * PIGEON // 10),)),
            BATCH,
            constraints=Constraints(together=(("p0", "p1"), ("p2", "p3"), ("p4", "p5"))),
        ),
        ["must stay whole (constraints.together)", "side by side"],
    ),
    "outputs": (
        Problem(
            "batch",
            SMALL[:1],
            Topology((Device(4 * MIB),) * 4),
            2**16,
            constraints=Constraints(kinds=(("small0", ("column", "row")),)),
        ),
        [
            "4 columns of table 'small0' take 12.",
            "may hold 7.",
            "divides evenly over all 4 devices, take ",
            "more per device",
        ],
    ),
    "rows on a small device": (
        Problem("deep", (DEEP,), Topology((Device(MIB), Device(2 * MIB), Device(MIB // 2))), BATCH),
        [
            "4 columns of table 'deep' take 3.1 MiB with outputs; the largest device may hold 2.0 MiB",
            "its rows, which TorchRec divides evenly over all 3 devices, take 1.0 MiB on device",
        ],
    ),
    "rows where they may not be": (
        Problem(
            "deep",
            (DEEP,),
            Topology((Device(2 * MIB),) * 3),
            BATCH,
            constraints=Constraints(pinned=(("deep", (0, 1)),)),
        ),
        [
            "4 columns of table 'deep' take 3.1 MiB",
            "where it may live may hold 2.0 MiB",
            "TorchRec divides rows over all devices, or a whole host",
            "without its pins",
        ],
    ),
    "fewer rows than devices": (
        Problem(
            "flat",
            (replace(DEEP, rows=9),),
            Topology((Device(3000),) * 8),
            96,
            constraints=Constraints(kinds=(("deep", ("column", "row")),)),
        ),
        ["4 columns of table 'deep'", "cannot divide 9 rows over 8 devices"],
    ),
}


@pytest.mark.parametrize("case", NOTHING_FITS)
def test_infeasible_names_what_does_not_fit_and_what_would_help(sharder, case):
    problem, words = with_room(NOTHING_FITS[case][0]), NOTHING_FITS[case][1]
    with pytest.raises(Infeasible) as error:
        solve(sharder, problem)
    for word in words:
        assert word in str(error.value)


def test_a_problem_for_another_setting_is_refused(sharder):
    with pytest.raises(SettingMismatch, match="batch 48.*batch 96"):
        solve(sharder, CASES["one device"], model=AnalyticModel(Setting("made-up", 96)))
