"""One suite for every entry of SHARDERS: what a plan has to be, whoever made it."""

import json
from collections import Counter
from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.export.torchrec import Ranks, layout
from shardcore.memory import free_bytes, shard_bytes
from shardcore.search import SHARDERS, Budget
from shardcore.search.pieces import consolidate, even_rows
from shardcore.types import (
    MIN_WIDTH,
    Constraints,
    Device,
    Infeasible,
    Placement,
    Plan,
    Problem,
    Setting,
    SettingMismatch,
    Shard,
    ShardCoreError,
    Table,
    Topology,
    Zipf,
)
from shardcore.workload import lower

BATCH = 48  # 1, 2, 3 and 4 devices divide it
every_sharder = pytest.mark.parametrize("name", SHARDERS)


def model_for(problem: Problem) -> AnalyticModel:
    setting = Setting("made-up", problem.global_batch, problem.tables[0].precision, problem.optimizer)
    # A slow network and a short launch, so that balance of compute and of communication both matter at this size.
    return AnalyticModel(setting, launch_us=2, table_us=1, lookup_ns=10, exchange_latency_ms=0.001, exchange_gbps=1)


def draw_tables(rng: np.random.Generator, n: int, dims=(4, 8, 12, 16, 32)) -> tuple[Table, ...]:
    return tuple(Table(f"t{i}", int(rng.integers(1, 400)), int(rng.choice(dims)), float(rng.choice([0, 1, 2.5, 10, 30])),
                       Zipf(float(rng.uniform(0, 1.5)))) for i in range(n))


def draw_problem(seed: int, n_tables: int, memory: list[int], speeds: list[float] | None = None, **fields) -> Problem:
    rng = np.random.default_rng(seed)
    devices = tuple(Device(m, s) for m, s in zip(memory, speeds or [1.0] * len(memory), strict=True))
    return Problem(f"drawn-{seed}", draw_tables(rng, n_tables), Topology(devices), BATCH, **fields)


def with_slack(seed: int, n_devices: int, slack: float, **fields) -> Problem:
    """Devices that hold the tables' bytes × slack together."""
    loose = draw_problem(seed, 12, [1] * n_devices, **fields)
    needed = sum(shard_bytes(Shard.whole(t), BATCH, loose.optimizer) for t in loose.tables)
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
    "all empty": Problem("empty", tuple(replace(t, pooling=0.0) for t in SMALL), Topology((Device(MIB),) * 2), BATCH),
    "a table to cut": Problem("cut", (HUGE, *SMALL), Topology((Device(HUGE.bytes // 2),) * 3), BATCH),
    "rows to cut": Problem("rows", (DEEP, *SMALL), Topology((Device(DEEP.bytes // 2),) * 3), BATCH),
    "rows and columns to cut": Problem("both", (replace(HUGE, rows=50_000), *SMALL), Topology((Device(700_000),) * 24), BATCH),
    "unsplit": replace(with_slack(7, 3, 1.3), constraints=Constraints(unsplit=("t0", "t3", "t7"))),
    "all unsplit": replace(with_slack(8, 3, 1.4), constraints=Constraints(unsplit=tuple(f"t{i}" for i in range(12)))),
    "reserved more than one has": replace(draw_problem(6, 6, [2000, MIB]), constraints=Constraints(reserved_bytes=3000)),
    "reserved": replace(draw_problem(9, 10, [MIB] * 2), constraints=Constraints(reserved_bytes=MIB // 2)),
    "pinned": replace(with_slack(10, 4, 1.3), constraints=Constraints(
        pinned=(("t0", (0,)), ("t3", (0,)), ("t5", (1, 2)), ("t6", (3, 1)), ("t9", (0, 1, 2, 3))))),
    "pinned to hosts": on_hosts(with_slack(11, 4, 1.15), Constraints(
        pinned=tuple((f"t{i}", ("a",) if i < 4 else ("b",)) for i in range(8)))),
    "pinned, to cut": on_hosts(Problem("cut", (HUGE, *SMALL), Topology((Device(HUGE.bytes * 6 // 10),) * 4), BATCH),
                               Constraints(pinned=(("huge", ("b",)), ("small0", (2,))))),
    "together": replace(with_slack(12, 3, 1.4), constraints=Constraints(together=(("t0", "t1", "t2"), ("t3", "t7"), ("t8",)))),
    "together and pinned, tight": on_hosts(with_slack(19, 4, 1.05, optimizer="rowwise_adagrad"), Constraints(
        unsplit=("t1",), together=(("t0", "t2", "t4"), ("t5", "t6")), pinned=(("t2", ("b",)), ("t5", (0, "b")), ("t8", ("a",))))),
}
every_case = pytest.mark.parametrize("case", CASES)


def check_plan(plan: Plan, problem: Problem) -> None:
    """What every plan has to be, so that TorchRec trains it. Cells are counted here one by one where the tables are small, apart
    from `lower`."""
    workload = lower(plan, problem)
    for table in problem.tables:
        layout([p for p in plan.placements if p.shard.table == table], Ranks.of(problem.topology))
        if table.rows * table.dim <= 50_000:
            cells = np.zeros((table.rows, table.dim), dtype=int)
            for p in plan.placements:
                if p.shard.table == table:
                    cells[p.shard.row_lo:p.shard.row_hi, p.shard.col_lo:p.shard.col_hi] += 1
            assert (cells == 1).all(), f"cells of {table.name} are placed {set(cells.flat)} times"
    assert all(used <= free or used == 0 for used, free in zip(workload.memory_bytes, free_bytes(problem), strict=True))
    together = Counter((p.shard.table.name, p.shard.row_lo, d) for p in plan.placements for d in p.devices)
    assert max(together.values()) == 1, f"several column shards of one table on one device: {together.most_common(1)}"
    assert plan.placements == consolidate(plan.placements)
    split = {p.shard.table.name for p in plan.placements if p.shard != Shard.whole(p.shard.table)}
    assert not split & set(problem.constraints.unsplit)
    homes = {t.name: {d for p in plan.placements if p.shard.table == t for d in p.devices} for t in problem.tables}
    for name, where in problem.constraints.pinned:
        hosts = [problem.topology.devices[d].host for d in range(len(problem.topology))]
        assert all(d in where or hosts[d] in where for d in homes[name]), f"{name} is on {homes[name]}, pinned to {where}"
    for group in problem.constraints.together:
        assert not split & set(group) and len(set.union(*(homes[name] for name in group))) == 1, f"{group} is not together"


def solve(name: str, problem: Problem, **arguments) -> Plan:
    return SHARDERS[name](problem, model_for(problem), **arguments)


@every_sharder
@every_case
def test_plan_is_valid_and_says_where_it_comes_from(name, case):
    problem = CASES[case]
    plan = solve(name, problem, seed=3)
    check_plan(plan, problem)
    assert (plan.provenance["algorithm"], plan.provenance["seed"]) == (name, 3)
    json.dumps(plan.provenance, allow_nan=False)
    assert plan.provenance["predicted_ms"] == price(lower(plan, problem), model_for(problem)).total_ms


@every_sharder
@pytest.mark.parametrize("case", ["unequal memory", "tight memory", "rows to cut"])
def test_same_seed_same_plan(name, case):
    problem, budget = CASES[case], Budget(evals=200)
    first, second = (solve(name, problem, seed=5, budget=budget) for _ in range(2))
    assert first == second and first.provenance == second.provenance


@every_sharder
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n_tables=st.integers(1, 9), n_devices=st.sampled_from([1, 2, 3, 4]), whole=st.booleans(),
       optimizer=st.sampled_from(["exact_sgd", "rowwise_adagrad"]))
def test_a_problem_with_a_hidden_plan_gets_one(name, seed, n_tables, n_devices, whole, optimizer):
    """Devices hold exactly what some table-wise plan puts on them, to the byte."""
    rng = np.random.default_rng(seed)
    tables = draw_tables(rng, n_tables)
    memory = np.ones(n_devices, dtype=int)
    for table in tables:
        memory[rng.integers(n_devices)] += shard_bytes(Shard.whole(table), BATCH, optimizer)
    devices = tuple(Device(int(m) - 1 or 1, float(rng.choice([0.5, 1, 2]))) for m in memory)
    unsplit = tuple(t.name for t in tables) if whole else ()
    problem = Problem("hidden", tables, Topology(devices), BATCH, optimizer, Constraints(unsplit=unsplit))
    check_plan(solve(name, problem, seed=seed, budget=Budget(evals=300)), problem)


@every_sharder
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n_tables=st.integers(1, 9), n_devices=st.sampled_from([2, 3, 4]), whole=st.booleans())
def test_a_hidden_plan_that_meets_pins_and_groups_gets_one(name, seed, n_tables, n_devices, whole):
    """As above; some tables are pinned to the hidden plan's devices and others, and some that it has on one are kept together."""
    rng = np.random.default_rng(seed)
    tables = draw_tables(rng, n_tables)
    homes = rng.integers(n_devices, size=n_tables)
    memory = np.bincount(homes, [shard_bytes(Shard.whole(t), BATCH, "exact_sgd") for t in tables], n_devices).astype(int)
    devices = tuple(Device(int(m) or 1, float(rng.choice([0.5, 1, 2])), f"host-{d // 2}") for d, m in enumerate(memory))
    home_of = {t.name: int(d) for t, d in zip(tables, homes, strict=True)}
    pinned = tuple((t, (devices[d].host,) if rng.random() < 0.3 else (d, *rng.integers(n_devices, size=rng.integers(2)).tolist()))
                   for t, d in home_of.items() if rng.random() < 0.4)
    groups = [tuple(t for t, d in home_of.items() if d == home and rng.random() < 0.5) for home in range(n_devices)]
    constraints = Constraints(0, tuple(t.name for t in tables) if whole else (), pinned, tuple(filter(None, groups)))
    problem = Problem("hidden", tables, Topology(devices), BATCH, constraints=constraints)
    check_plan(solve(name, problem, seed=seed, budget=Budget(evals=300)), problem)


@every_sharder
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), n_devices=st.sampled_from([2, 3, 4]), slack=st.floats(1.02, 2.0))
def test_little_slack_is_enough_where_tables_may_be_cut(name, seed, n_devices, slack):
    problem = with_slack(seed, n_devices, slack)
    try:
        check_plan(solve(name, problem, seed=seed, budget=Budget(evals=300)), problem)
    except Infeasible:
        # Four columns of the largest table, or its outputs when rows are cut, may be more than the slack.
        grain = max(8 * BATCH * t.dim for t in problem.tables) + max(shard_bytes(Shard(t, 0, t.rows, 0, 4), BATCH, "exact_sgd")
                                                                     for t in problem.tables)
        spare = sum(free_bytes(problem)) - sum(shard_bytes(Shard.whole(t), BATCH, "exact_sgd") for t in problem.tables)
        assert spare < n_devices * grain


def every_plan(problem: Problem, columns_alone: bool = False):
    """Every plan, up to which columns a device holds, that cuts each table by columns, divides its rows over all devices, or
    replicates it."""
    n = len(problem.topology)

    def ways(t: Table):
        for dealt in combinations_with_replacement(range(n), t.dim // MIN_WIDTH):
            yield [Placement(Shard(t, 0, t.rows, MIN_WIDTH * i, MIN_WIDTH * (i + 1)), (d,)) for i, d in enumerate(dealt)]
        if not columns_alone:
            if ranges := even_rows(t.rows, n):
                yield [Placement(Shard(t, *rows, 0, t.dim), (d,)) for d, rows in enumerate(ranges)]
            yield [Placement(Shard.whole(t), tuple(range(n)))]

    for choice in product(*(list(ways(t)) for t in problem.tables)):
        yield Plan(consolidate(p for placements in choice for p in placements))


def tiny_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    speeds = [1.0, 1.0] if seed % 2 else [1.0, 2.0]
    return Problem("tiny", draw_tables(rng, 4, dims=(4, 8, 16)), Topology(tuple(Device(MIB, s) for s in speeds)), BATCH)


@pytest.fixture(scope="module")
def optima():
    problems = [tiny_problem(seed) for seed in range(6)]
    return [(p, min(price(lower(plan, p), model_for(p)).total_ms for plan in every_plan(p))) for p in problems]


@every_sharder
def test_never_better_than_brute_force(name, optima):
    ratios = [solve(name, p).provenance["predicted_ms"] / optimum for p, optimum in optima]
    assert min(ratios) >= 1 - 1e-9
    if name == "neuroshard":
        assert np.mean(ratios) < 1.10, ratios


NOTHING_FITS = {
    "sum": (Problem("sum", (HUGE, *SMALL), Topology((Device(HUGE.bytes // 4),) * 3), BATCH),
            ["'sum'", "6 tables take 1.3 MiB", "3 devices may hold 0.9 MiB", "0.4 MiB too little",
             "more per device", "more devices"]),
    "unsplit": (Problem("whole", (HUGE, *SMALL), Topology((Device(HUGE.bytes // 2),) * 4), BATCH,
                        constraints=Constraints(unsplit=("huge",))),
                ["'huge'", "must stay whole", "1.2 MiB", "0.6 MiB", "more per device"]),
    "side by side": (Problem("pigeons", tuple(Table(f"p{i}", 1000, 32, 1.0) for i in range(3)), Topology((Device(240_000),) * 2),
                             96, constraints=Constraints(unsplit=("p0", "p1", "p2"))),
                     ["'p0'", "'p1'", "'p2'", "must stay whole", "do not fit side by side", "every assignment", "more per device",
                      "1 more device like"]),
    "pinned to a device": (Problem("device", SMALL, Topology((Device(15_000), Device(MIB))), BATCH, constraints=Constraints(
        pinned=tuple((f"small{i}", (0,)) for i in range(4)))),
                           ["tables pinned to device 0 (constraints.pinned), 'small0', 'small1', 'small2', 'small3', take",
                            "18880 bytes", "it may hold 15000 bytes, 3880 bytes too little", "more per device",
                            "or without its pins and groups"]),
    "pinned to a host": (on_hosts(Problem("host", (HUGE, *SMALL), Topology((Device(HUGE.bytes // 3),) * 6), BATCH), Constraints(
        pinned=(("huge", ("b",)), ("small0", (3,)), ("small1", ("a",))))),
                         ["tables pinned to devices 3, 4, 5 (constraints.pinned), 'huge', 'small0', take 1.2 MiB",
                          "they may hold", "more per device", "without its pins and groups"]),
    "a group too large": (Problem("group", SMALL, Topology((Device(15_000),) * 4), BATCH, constraints=Constraints(
        together=(("small0", "small1", "small2", "small3"),))),
                          ["the group 'small0', 'small1', 'small2', 'small3', kept on one device (constraints.together)",
                           "the largest device may hold", "or without its pins and groups"]),
    "a pinned table too large": (replace(draw_problem(2, 8, [3000, MIB]), constraints=Constraints(pinned=(("t2", (0,)),))),
                                 ["table 't2', which must stay whole (constraints.pinned)", "device where it may live"]),
    "groups side by side": (Problem("groups", tuple(Table(f"p{i}", 1000, 8, 1.0) for i in range(6)),
                                    Topology((Device(110_000),) * 2 + (Device(60_000),)), 96,
                                    constraints=Constraints(together=(("p0", "p1"), ("p2", "p3"), ("p4", "p5")))),
                            ["must stay whole (constraints.together)", "do not fit side by side", "every assignment"]),
    "outputs": (Problem("batch", SMALL[:1], Topology((Device(19 * MIB // 10),) * 4), 2**16),
                ["4 columns of table 'small0' take 2.0 MiB with outputs", "1.9 MiB",
                 "divides evenly over all 4 devices, take 4.0", "more per device"]),
    "rows on a small device": (Problem("deep", (DEEP,), Topology((Device(MIB), Device(2 * MIB), Device(MIB // 2))), BATCH),
                               ["4 columns of table 'deep' take 3.1 MiB with outputs; the largest device may hold 2.0 MiB",
                                "its rows, which TorchRec divides evenly over all 3 devices, take 1.0 MiB on device 0"]),
    "rows where they may not be": (Problem("deep", (DEEP,), Topology((Device(2 * MIB),) * 3), BATCH, constraints=Constraints(
        pinned=(("deep", (0, 1)),))), ["4 columns of table 'deep' take 3.1 MiB", "where it may live may hold 2.0 MiB",
                                       "TorchRec divides rows over all devices, or a whole host", "without its pins"]),
    "fewer rows than devices": (Problem("flat", (replace(DEEP, rows=9),), Topology((Device(1500),) * 8), 96), [
        "4 columns of table 'deep'", "cannot divide 9 rows over 8 devices"]),
    "no memory left": (Problem("kept", SMALL, Topology((Device(MIB),) * 2), BATCH,
                               constraints=Constraints(reserved_bytes=2 * MIB)),
                 ["0 bytes", "too little", "more per device"]),
}


@every_sharder
@pytest.mark.parametrize("case", NOTHING_FITS)
def test_infeasible_names_what_does_not_fit_and_what_would_help(name, case):
    problem, words = NOTHING_FITS[case]
    with pytest.raises(Infeasible) as error:
        solve(name, problem)
    for word in words:
        assert word in str(error.value)


@every_sharder
def test_a_problem_for_another_setting_is_refused(name):
    problem = CASES["one device"]
    with pytest.raises(SettingMismatch, match="batch 48.*batch 96"):
        SHARDERS[name](problem, AnalyticModel(Setting("made-up", 96)))


def without_a_table(plan: Plan) -> Plan:
    return Plan(plan.placements[1:])


def with_a_table_twice(plan: Plan) -> Plan:
    return Plan(consolidate([*plan.placements, plan.placements[0]]))


def with_the_halves_of_a_table_on_one_device(plan: Plan) -> Plan:
    first = next(p for p in plan.placements if p.shard.width > MIN_WIDTH)
    halves = [replace(first, shard=replace(first.shard, col_hi=first.shard.col_lo + MIN_WIDTH)),
              replace(first, shard=replace(first.shard, col_lo=first.shard.col_lo + MIN_WIDTH))]
    return Plan((*halves, *(p for p in plan.placements if p != first)))


def on_a_device_that_is_not_there(plan: Plan) -> Plan:
    return Plan((replace(plan.placements[0], devices=(99,)), *plan.placements[1:]))


def all_on_the_first_device(plan: Plan) -> Plan:
    return Plan(consolidate(replace(p, devices=(0,)) for p in plan.placements))


@pytest.mark.parametrize("spoil", [without_a_table, with_a_table_twice, with_the_halves_of_a_table_on_one_device,
                                   on_a_device_that_is_not_there, all_on_the_first_device])
def test_the_suite_itself_catches_a_broken_sharder(spoil, monkeypatch):
    def broken(problem, model, *, seed=0, budget=None):
        return replace(spoil(sound(problem, model, seed=seed)), provenance={"algorithm": "broken", "seed": seed})

    sound = SHARDERS["size_greedy"]
    monkeypatch.setitem(SHARDERS, "broken", broken)
    with pytest.raises((AssertionError, ShardCoreError)):
        test_plan_is_valid_and_says_where_it_comes_from("broken", "tight memory")
    check_plan(sound(CASES["tight memory"], model_for(CASES["tight memory"])), CASES["tight memory"])
