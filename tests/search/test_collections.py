"""Several collections, and sequences, in every search: each has ops and exchanges of its own."""

from dataclasses import replace

import numpy as np
import pytest
from shapes import on_hosts

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.search import SHARDERS, Budget
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.search.bound.lower_bound import prove_lower_bound
from shardcore.step.lower import lower
from shardcore.testing.problems import BATCH, MIB, draw_random_tables, small_problem_model


def problem(hosts: str = "aabb", several: bool = True) -> Problem:
    """Three collections in turns, the last of which has a sequence too."""
    drawn = draw_random_tables(np.random.default_rng(3), 12)
    tables = (
        replace(t, rows=t.rows + 8, sequence=i == 11, collection="abc"[i % 3] if several else "")
        for i, t in enumerate(drawn)
    )
    return Problem("p", tuple(tables), on_hosts(hosts, MIB), BATCH)


@pytest.mark.parametrize(
    "name",
    [
        # The portfolio anneals.
        pytest.param(name, marks=[pytest.mark.long] if name == "anneal" else [])
        for name in SHARDERS
        if name != "torchrec"
    ],
)
def test_plans_of_all_sharders_run_collections_by_themselves(name):
    given = problem()
    plan = SHARDERS[name](given, small_problem_model(given), seed=1, budget=Budget(evals=300))
    workload = lower(plan, given)
    for op in (op for ops in workload.ops for op in ops):
        assert len({(s.table.collection, s.table.sequence) for s in op.shards}) == 1
    assert max(len(ops) for ops in workload.ops) > 2
    assert price(workload, small_problem_model(given)).total_ms == plan.provenance["predicted_ms"]


@pytest.mark.parametrize("name", ["anneal", pytest.param("anneal_columns", marks=pytest.mark.long)])
def test_a_search_that_knows_of_collections_finds_better_plans(name):
    """Better than a search that counts them as one, with both plans priced as they run. Launches are slow."""
    given, one = problem("aaaa"), problem("aaaa", several=False)
    slow = replace(small_problem_model(given), launch_us=50, exchange_latency_ms=0.05)
    knowing, blind = (SHARDERS[name](p, slow, seed=1, budget=Budget(evals=20_000)) for p in (given, one))
    knowing_ms, blind_ms = (
        price(lower(plan, given), slow).total_ms for plan in (knowing, rebind_tables(blind, given))
    )
    assert knowing_ms <= blind_ms * (1 + 1e-9)
    assert blind_ms > blind.provenance["predicted_ms"]


@pytest.mark.long
def test_what_is_proved_of_several_collections_and_of_sequences_is_below_plans_and_near():
    given = problem()
    sequences = replace(given, tables=tuple(replace(t, sequence=True, collection="") for t in given.tables))
    for asked in (given, sequences):
        model = small_problem_model(asked)
        ms = SHARDERS["anneal"](asked, model, budget=Budget(evals=5_000)).provenance["predicted_ms"]
        assert 0.7 < prove_lower_bound(asked, model).proved_ms / ms <= 1


@pytest.mark.parametrize("algorithm", ["neuroshard", "anneal_columns", "anneal"])
def test_a_sequence_is_not_cut_into_unequal_widths(algorithm):
    """TorchRec refuses that. Unequal widths would even out devices better."""
    rng = np.random.default_rng(4)
    tables = tuple(
        Table(f"t{i}", 2000, int(rng.choice([16, 32, 64, 128])), float(rng.integers(2, 60)), sequence=True)
        for i in range(5)
    )
    sequences = Problem("p", tables, Topology((Device(1 << 30),) * 4), 256)
    model = AnalyticModel(Setting("made-up", 256), lookup_ns=5.0)
    plan = SHARDERS[algorithm](sequences, model, budget=Budget(evals=2000))
    for table in tables:
        assert len({p.shard.width for p in plan.placements if p.shard.table == table}) == 1
