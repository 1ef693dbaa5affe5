"""EMBark's rules: what it cuts and how, what it replicates."""

import pytest
from shapes import with_room

from bench.peers.embark import EmbarkConfig, embark, replicated_kind
from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import Budget
from shardcore.step.kinds import sharding_kind_for_table, shards_by_device
from shardcore.step.memory import local_batch_bytes, peak_bytes_function, table_peak_bytes

BATCH, MIB = 64, 2**20
HOT = Table("hot", 1000, 64, 40.0, Zipf(0))
MODEL = AnalyticModel(
    Setting("made-up", BATCH),
    launch_us=0,
    table_us=0,
    gather_gbps=0.1,
    exchange_gbps=10,
    exchange_latency_ms=0,
)
COOL = tuple(Table(f"cool{i}", 500 + i, 16, 2.0, Zipf(0)) for i in range(6))


def problem_of(*tables, memory=(MIB,) * 4, speeds=(1.0,) * 4, **fields) -> Problem:
    return with_room(Problem("p", tables, Topology(tuple(map(Device, memory, speeds))), BATCH, **fields))


def exactly(free: tuple[int, ...], *tables: Table, **fields) -> Problem:
    """A problem with so many bytes for shards on each device."""
    local = local_batch_bytes(problem_of(*tables))
    topology = Topology(
        tuple(
            Device(local + n, speed)
            for n, speed in zip(free, fields.pop("speeds", (1.0,) * len(free)), strict=True)
        )
    )
    return Problem("p", tables, topology, BATCH, **fields)


def plan_of(
    problem: Problem, rounds=20, ratio: float | None = 1.0, narrowest=32, rows=0.0, **arguments
) -> Plan:
    config = EmbarkConfig(rounds, (rows,), (ratio,), (narrowest,))
    return embark(problem, MODEL, config=config, **arguments)


def replica_bytes(table: Table, problem: Problem) -> int:
    return peak_bytes_function(problem)(
        sharding_kind_for_table(replicated_kind(problem).name, table), Shard.whole(table)
    )


def parts(plan: Plan, name: str) -> list[tuple[int, int]]:
    """Rows and columns of each part of a table."""
    return [
        (s.rows, s.width)
        for p in plan.placements
        if p.shard.table.name == name
        for _, s in shards_by_device(p)
    ]


def test_the_first_round_is_greedy_and_later_ones_cut_the_hottest():
    # so not all are cut by rows
    problem = problem_of(HOT, *COOL, constraints=Constraints(unsplit=("cool0",)))
    assert all(len(parts(plan_of(problem, rounds=1), t.name)) == 1 for t in problem.tables)
    plan = plan_of(problem)
    assert len(parts(plan, "hot")) == 4
    assert plan.provenance["predicted_ms"] < plan_of(problem, rounds=1).provenance["predicted_ms"]


@pytest.mark.parametrize(
    "table, ratio, expected",
    [
        (HOT, 0.0, (500, 64)),  # even: rows
        (HOT, 1000.0, (1000, 32)),  # parts by rows exchange all columns each
        (Table("hot", 1000, 32, 40.0), 1000.0, (500, 32)),  # too narrow for columns
        (Table("hot", 1000, 64, 40.0, ordered=True), 0.0, (1000, 32)),  # the first rows are the hottest
    ],
)
def test_rows_or_columns_whichever_the_next_pass_ends_cheaper(table, ratio, expected):
    plan = plan_of(problem_of(table, memory=(MIB,) * 2, speeds=(1.0,) * 2), ratio=ratio)
    assert parts(plan, "hot") == [expected] * 2


def test_columns_become_narrower_where_that_is_swept():
    table = Table("hot", 1000, 32, 40.0)
    assert parts(plan_of(problem_of(table), ratio=1000.0, narrowest=8), "hot") == [(1000, 8)] * 4


def test_a_table_that_fits_nowhere_is_cut_though_it_is_cool():
    large = Table("large", 3000, 32, 0.1)
    constraints = Constraints(unsplit=("cool0",))
    plan = plan_of(
        problem_of(large, COOL[0], memory=(large.bytes * 2 // 3,) * 4, constraints=constraints), rounds=2
    )
    assert parts(plan, "large") == [(750, 32)] * 4 and not plan.provenance["packed"]


def test_small_tables_are_replicated_as_far_as_that_is_allowed_and_fits():
    small = Table("small", 20, 8, 1.0)
    bound = tuple(Table(name, 20, 8, 1.0) for name in ("whole", "pinned", "one", "other"))
    constraints = Constraints(unsplit=("whole",), pinned=(("pinned", (0, 1)),), together=(("one", "other"),))
    problem = problem_of(HOT, small, *bound, constraints=constraints)
    plan = plan_of(problem, rows=0.5)
    assert {p.shard.table.name for p in plan.placements if p.kind == "data_parallel"} == {"small"}

    everywhere = replica_bytes(small, problem)
    alone = table_peak_bytes(small, problem)
    tight = exactly((everywhere - 1,) * 3 + (alone,), small)
    sweep = EmbarkConfig(replicated_rows=(0.0, 0.5))
    assert all(p.kind == "column" for p in embark(tight, MODEL, config=sweep).placements)


def test_replicas_take_room_from_what_is_placed():
    small, ample = Table("small", 20, 8, 1.0), problem_of(HOT)
    hot, copy = table_peak_bytes(HOT, ample), replica_bytes(small, ample)
    # Beside replicas a local batch stays longer in memory, which planners that add up numbers do not count.
    kept = local_batch_bytes(ample)
    problem = exactly(
        (hot, hot + copy - 1, hot + copy + kept, hot),
        HOT,
        small,
        speeds=(2.0, 2.0, 1.0, 2.0),
        constraints=Constraints(unsplit=("hot",)),
    )
    plan = plan_of(problem, rows=0.5)
    assert {p.shard.table.name: p.devices for p in plan.placements} == {"hot": (2,), "small": (0, 1, 2, 3)}


def test_a_faster_device_looks_up_more():
    same = tuple(Table(f"t{i}", 500, 16, 10.0) for i in range(12))
    plan = plan_of(problem_of(*same, speeds=(1.0, 1.0, 1.0, 3.0)), rounds=1, ratio=0.0)
    held = [sum(p.devices == (d,) for p in plan.placements) for d in range(4)]
    assert held == [2, 2, 2, 6]


def test_a_budget_ends_the_sweep_with_a_plan():
    for budget in (Budget(evals=1), Budget(seconds=1e-9)):
        assert embark(problem_of(HOT, *COOL), MODEL, budget=budget).provenance["evals"] == 1


@pytest.mark.parametrize(
    "fields", [{"rounds": 0}, {"narrowest": ()}, {"bw_ratio": ()}, {"replicated_rows": ()}]
)
def test_a_config_that_runs_nothing_is_refused(fields):
    with pytest.raises(ShardCoreError, match="rounds"):
        EmbarkConfig(**fields)
