"""Plans for problems that do not fit in device memory."""

from dataclasses import replace

import numpy as np
import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.links import links_of
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide as decided
from shardcore.search.decisions.memory_tiers import (
    decide,
    largest_to_host,
    one_load_factor,
    tiers_of,
    with_load_factors,
)
from shardcore.search.decisions.tiers import Tiers, filled
from shardcore.step.lower import lower
from shardcore.step.memory import require_fits

MODEL = AnalyticModel(Setting("made-up", 1024))
TABLES = tuple(Table(f"t{i}", 20_000 + 3_000 * i, 16, 4.0 + i, Zipf(0.6 + 0.1 * i)) for i in range(8))


def problem(memory_bytes: int = 5 << 20, tables=TABLES, host_bytes: int = 1 << 30) -> Problem:
    topology = Topology((Device(memory_bytes),) * 4, memory=(Memory("host", host_bytes, 5.0),))
    return Problem("large", tables, topology, 1024)


def found(of: Problem, algorithm: str = "anneal_columns"):
    return decided(of, MODEL, [Tiers()], SHARDERS[algorithm], budget=Budget(evals=300))


def test_what_does_not_fit_gets_a_plan_within_all_memories():
    asked = problem()
    with pytest.raises(Infeasible):
        SHARDERS["anneal_columns"](asked, MODEL)
    best = found(asked)
    assert max(lower(best.plan, best.problem).memory_bytes) <= 5 << 20
    assert any(table.in_host_memory for table in best.problem.tables)
    assert best.plan.provenance["predicted_ms"] == best.ms


def test_it_is_faster_than_with_simpler_load_factors():
    asked, best = problem(), found(problem())
    for how in (largest_to_host, one_load_factor):
        # With room to spare, for these fill all memory at once.
        other = replace(how(asked).problem, topology=problem(6 << 20).topology)
        plan = SHARDERS["anneal_columns"](other, MODEL.for_problem(other), budget=Budget(evals=300))
        assert best.ms < plan.provenance["predicted_ms"], how.__name__


def test_where_host_memory_holds_few_tables_whole_ones_stay_on_devices():
    """Caches of both would leave both in host memory, which holds one."""
    tables = (Table("a", 300_000, 16, 4.0, Zipf(1.0)), Table("b", 299_000, 16, 4.0, Zipf(1.0)))
    topology = Topology((Device(22 << 20),), memory=(Memory("host", 20 << 20, 5.0),))
    found = decide(Problem("two", tables, topology, 64))
    assert sorted(t.load_factor for t in found.problem.tables) == [0.0, 1.0]


def test_what_fits_stays_in_device_memory():
    [only] = found(problem(1 << 28)).outcomes
    assert not any(table.in_host_memory for table in only.found.problem.tables)


def test_memory_that_is_left_on_a_device_goes_to_its_tables():
    asked = with_load_factors(problem(), {t.name: 0.1 for t in TABLES})
    plan = SHARDERS["size_greedy"](asked, MODEL.for_problem(asked))
    better, now = filled(plan, asked, MODEL)
    assert tiers_of(better).link_bytes < 0.5 * tiers_of(asked).link_bytes
    assert now.provenance["predicted_ms"] < plan.provenance["predicted_ms"]
    assert [p.devices for p in now.placements] == [p.devices for p in plan.placements]
    lower(now, better)


@pytest.mark.parametrize("algorithm", sorted(SHARDERS))
def test_every_sharder_takes_load_factors(algorithm):
    asked = decide(problem(), -(1 << 20)).problem
    found = SHARDERS[algorithm](asked, MODEL.for_problem(asked), budget=Budget(evals=200))
    lower(found, asked)
    held = {t.name for t in asked.tables if t.in_host_memory}
    assert not {p.shard.table.name for p in found.placements if p.kind == "data_parallel"} & held


@pytest.mark.parametrize("load_factor", [1.0, 0.5])
def test_tables_that_replicas_would_suit_are_none_with_rows_in_host_memory(load_factor):
    small = tuple(Table(f"s{i}", 100, 16, 50.0, Zipf(1.0), load_factor=load_factor) for i in range(4))
    slow = replace(problem(1 << 26).topology, links=links_of(within_host=0.01, latency_ms=0.1))
    asked = Problem("small", small, slow, 1024)
    found = SHARDERS["anneal"](asked, MODEL.for_problem(asked), budget=Budget(evals=2_000))
    assert lower(found, asked)
    assert any(p.kind == "data_parallel" for p in found.placements) is (load_factor == 1)


def test_a_replica_has_no_rows_in_host_memory():
    asked = with_load_factors(problem(), {"t0": 0.1})
    plan = Plan(tuple(Placement("data_parallel", Shard.whole(t), (0, 1, 2, 3)) for t in asked.tables))
    with pytest.raises(ShardCoreError, match="by data_parallel, with load_factor 0.1"):
        lower(plan, asked)


def test_what_hosts_cannot_hold_is_refused():
    with pytest.raises(Infeasible, match="in host memory, which may hold 1.0 MiB"):
        found(problem(host_bytes=1 << 20))
    two = replace(
        problem(),
        topology=replace(
            problem().topology,
            memory=(Memory("host", 11 << 20, 5.0),),
            devices=tuple(Device(5 << 20, host=f"host-{i // 2}") for i in range(4)),
        ),
    )
    asked = with_load_factors(two, {t.name: 0.1 for t in TABLES})
    plan = Plan(tuple(Placement("column", Shard.whole(t), (i % 2,)) for i, t in enumerate(asked.tables)))
    with pytest.raises(Infeasible, match="host 'host-0' of problem 'large' would hold 14.9 MiB of rows"):
        lower(plan, asked)


@pytest.mark.parametrize("dims", [(4, 128), (8, 512)])
def test_tables_of_unlike_widths_share_a_cache_that_fits(dims):
    """A cached row of a narrow table is as wide as the widest of its op, so few narrow ones are cached."""
    rng = np.random.default_rng(0)
    tables = tuple(
        Table(f"t{i}", int(10 ** rng.uniform(4, 5)), int(rng.choice(dims)), 5.0) for i in range(10)
    )
    room = sum(t.bytes for t in tables) // 4
    problem = Problem(
        "p", tables, Topology((Device(room),) * 2, memory=(Memory("host", 1 << 36, 25.0),)), 256
    )
    model = AnalyticModel(Setting("made-up", 256)).for_problem(problem)
    for outcome in decided(problem, model, [Tiers()], SHARDERS["size_greedy"]).outcomes:
        if outcome.found:
            require_fits(outcome.found.plan, outcome.found.problem)
