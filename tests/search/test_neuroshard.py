"""NeuroShard's search: its bookkeeping against `price`, its inner rule against a plain reading of it, its
beam and budget."""

from dataclasses import replace

import numpy as np
import pytest
from cuts import BATCH, MODEL, draw_cuts, draw_problem, on_two_hosts, plan_of, total_ms
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shapes import with_room

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Shard, Table
from shardcore.cost.model import group_op_ms
from shardcore.search import SHARDERS, Budget
from shardcore.search.lockstep import PlanBatch, place_in_order, search_space_by_columns
from shardcore.search.neuroshard import GreedyGrid, NeuroShardConfig, search_with_neuroshard
from shardcore.step.lower import lower
from shardcore.step.memory import plan_fits, table_peak_bytes, usable_bytes
from shardcore.step.options import ShardOptions
from shardcore.step.ways import allowed_devices_of_shard


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), rows=st.booleans())
def test_columns_are_exchangeable_in_cost(seed, rows):
    rng = np.random.default_rng(seed)
    problem = on_two_hosts(draw_problem(seed, n_tables=6))
    shards = draw_cuts(rng, problem, rows)
    cache = ShardOptions(problem, MODEL, shards)
    devices = [int(rng.choice(allowed_devices_of_shard(s, problem))) for s in shards]
    dealt = [s for bundle in cache.deal_bundles([cache.shard_key(s) for s in shards]) for s in bundle]
    assert total_ms(dealt, devices, problem) == pytest.approx(total_ms(shards, devices, problem), rel=1e-9)


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_tables_kept_together_are_one_bundle_that_costs_what_they_cost_fused(seed):
    rng = np.random.default_rng(seed)
    constraints = Constraints(
        together=(("t1", "t4", "t5"), ("t0", "t3")), pinned=(("t4", (0, 2)), ("t2", (1,)))
    )
    problem = replace(draw_problem(seed, n_tables=6, n_devices=3), constraints=constraints)
    space = search_space_by_columns(problem, MODEL, [Shard.whole(t) for t in problem.tables], cut=True)
    cache = space.cache
    keys = cache.shard_keys([Shard.whole(t) for t in problem.tables])
    bundles = cache.deal_bundles(keys)
    together = {frozenset(s.table.name for s in bundle) for bundle in bundles}
    assert together == {*map(frozenset, constraints.together), frozenset({"t2"})}
    devices = [int(rng.choice(np.flatnonzero(cache.allowed[item]))) for item, _ in keys]
    pairs = [(s, d) for bundle, d in zip(bundles, devices, strict=True) for s in bundle]
    shards, where = zip(*pairs, strict=True)
    cache.add_merged_shards(keys)
    batch = PlanBatch(space, np.array([keys]))
    for key, device in zip(keys, devices, strict=True):
        batch.place_shard(*key, device)
    # price checks the pins
    assert batch.cost_ms()[0, 0] == pytest.approx(total_ms(shards, where, problem), rel=1e-9)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    rows=st.booleans(),
    optimizer=st.sampled_from(["exact_sgd", "rowwise_adagrad"]),
)
@example(seed=100, rows=True, optimizer="exact_sgd")  # halves that meet leave no table cut by columns
def test_the_grids_totals_are_the_prices_of_its_plans(seed, rows, optimizer):
    rng = np.random.default_rng(seed)
    problem = draw_problem(seed, n_tables=6, memory=500_000, optimizer=optimizer)
    problem = on_two_hosts(problem) if rows else problem
    shards = draw_cuts(rng, problem, rows)
    space = search_space_by_columns(problem, MODEL, shards, cut=False)
    cache = space.cache
    keys = [cache.shard_key(s) for s in shards]
    scales = (1.0, 1.2, float("inf"))
    # Costs at random, so that shards come in any order.
    costs, grid = rng.random((3, len(keys))), GreedyGrid(scales)
    made = place_in_order(space, np.array([keys] * 3), costs, 3, grid.device_scores)
    totals, over_bytes, devices, orders = made.total_ms, made.excess_bytes, made.devices, made.order
    assert totals.shape == over_bytes.shape == (3, 3) and devices.shape == (3, 3, len(keys))
    for c, k in np.argwhere(np.isfinite(totals)):
        placed = [shards[i] for i in orders[c]], devices[c, k], problem
        assert totals[c, k] == pytest.approx(total_ms(*placed), rel=1e-9)
        assert plan_fits(plan_of(*placed), problem)
        columns = np.bincount(devices[c, k], weights=[shards[i].width for i in orders[c]], minlength=4)
        # Row ranges have a device each to go to, and pinned tables few, whatever the cap.
        free = cache.allowed.all()
        assert columns.max() <= scales[k] * columns.mean() + 1e-6 or np.isinf(scales[k]) or not free


def test_where_a_budget_is_less_than_the_first_search_takes_there_is_some_plan_that_fits(monkeypatch):
    monkeypatch.setattr("shardcore.search.beam._PROBED", 16)  # as of far more tables
    problem = draw_problem(0, n_tables=200, memory=2**30)
    plan = search_with_neuroshard(problem, MODEL, budget=Budget(seconds=0.001))
    assert (plan.provenance["packed"], plan.provenance["evals"]) == (True, 0)
    lower(plan, problem)  # raises where it is none
    with pytest.raises(Infeasible, match="does not fit"):
        search_with_neuroshard(
            draw_problem(0, n_tables=200, memory=2**20), MODEL, budget=Budget(seconds=0.001)
        )


def plain_greedy_ms(problem: Problem, scale: float) -> float:
    """The published inner pass, word by word, for equal devices and whole tables."""
    shards = [Shard.whole(t) for t in problem.tables]
    n_devices, memory = len(problem.topology), usable_bytes(problem)[0]
    single = group_op_ms([[s] for s in shards], MODEL)
    mean = sum(s.width for s in shards) / n_devices
    held: list[list[Shard]] = [[] for _ in range(n_devices)]
    devices = [0] * len(shards)

    def memory_of(group):
        return sum(table_peak_bytes(s.table, problem) for s in group)

    for i in sorted(range(len(shards)), key=lambda i: (-single[i], -shards[i].bytes)):
        options = [
            d
            for d in range(n_devices)
            if memory_of([*held[d], shards[i]]) <= memory
            and sum(s.width for s in [*held[d], shards[i]]) <= scale * mean
        ]
        if not options:
            return float("inf")
        devices[i] = min(options, key=lambda d: (group_op_ms([held[d]], MODEL)[0], memory_of(held[d])))
        held[devices[i]].append(shards[i])
    return total_ms(shards, devices, problem)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_without_cuts_it_is_the_best_of_the_published_passes(seed):
    problem = draw_problem(seed)
    equal = tuple(replace(d, speed=1.0) for d in problem.topology.devices)
    problem = replace(problem, topology=Topology(equal))
    config = NeuroShardConfig(steps=0)
    best_ms = min(plain_greedy_ms(problem, scale or np.inf) for scale in config.scales)
    plan = search_with_neuroshard(problem, MODEL, config=config)
    assert plan.provenance["predicted_ms"] == pytest.approx(best_ms, rel=1e-9)


def test_cutting_the_table_that_costs_most_pays():
    cold = tuple(Table(f"cold{i}", 9000 + i, 8, 1.0) for i in range(3))
    tables = (*cold, Table("hot", 100, 64, 50.0), Table("large", 10_000, 32, 1.0))
    problem = Problem("hot", tables, Topology((Device(2**22),) * 4), BATCH)
    model = replace(MODEL, gather_gbps=1, lookup_ns=0)  # columns are what costs
    whole = search_with_neuroshard(problem, model, config=NeuroShardConfig(steps=0))
    cut = search_with_neuroshard(problem, model)
    assert cut.provenance["predicted_ms"] < 0.6 * whole.provenance["predicted_ms"]
    assert sum(p.shard.table.name == "hot" for p in cut.placements) == 4
    kept = search_with_neuroshard(replace(problem, constraints=Constraints(unsplit=("hot",))), model)
    assert sum(p.shard.table.name == "hot" for p in kept.placements) == 1


def test_a_pass_without_cap_solves_what_the_caps_forbid():
    """One wide table beside narrow ones: no device may hold it within 1.5 × the mean of columns."""
    tables = (Table("wide", 50, 64, 1.0), *(Table(f"t{i}", 50, 4, 1.0) for i in range(3)))
    whole = Constraints(unsplit=("wide",))
    problem = Problem("wide", tables, Topology((Device(2**20),) * 4), BATCH, constraints=whole)
    assert not search_with_neuroshard(problem, MODEL).provenance["packed"]
    capped = NeuroShardConfig(scales=NeuroShardConfig().scales[:-1])
    assert search_with_neuroshard(problem, MODEL, config=capped).provenance["packed"]


def test_the_cap_does_not_hold_for_pinned_tables():
    tables = tuple(Table(f"t{i}", 50, 16, 1.0) for i in range(8))
    # three times the mean of the columns
    pinned = Constraints(pinned=tuple((t.name, (0,)) for t in tables[:6]))
    problem = Problem("pinned", tables, Topology((Device(2**20),) * 4), BATCH, constraints=pinned)
    plan = search_with_neuroshard(
        problem, MODEL, config=NeuroShardConfig(scales=NeuroShardConfig().scales[:-1], steps=0)
    )
    assert not plan.provenance["packed"] and sum(p.devices == (0,) for p in plan.placements) == 6


def test_where_no_pass_fits_cuts_go_where_memory_is_short():
    """Six tables on four devices that hold one and a half each: two are to be cut, though many others cost
    more."""
    tables = (
        *(Table(f"t{i}", 5000, 32, 20.0) for i in range(6)),
        *(Table(f"small{i}", 50, 8, 90.0) for i in range(30)),
    )
    ample = Problem("short", tables, Topology((Device(1),) * 4), BATCH)
    small = sum(table_peak_bytes(t, ample) for t in tables[6:])
    # Beside their share of the small tables.
    each = int(1.7 * table_peak_bytes(tables[0], ample)) + small // 4
    problem = with_room(replace(ample, topology=Topology((Device(each),) * 4)))
    plan = search_with_neuroshard(problem, MODEL, config=NeuroShardConfig(candidates=4))
    annealed = SHARDERS["anneal_columns"](problem, MODEL, budget=Budget(evals=20_000))
    assert not plan.provenance["packed"]
    assert plan.provenance["predicted_ms"] < 1.02 * annealed.provenance["predicted_ms"]


@pytest.mark.parametrize("evals", [1, 13, 100])
def test_a_budget_in_evaluations_is_kept_and_more_is_never_worse(evals):
    problem = draw_problem(3)
    plan = search_with_neuroshard(problem, MODEL, budget=Budget(evals=evals))
    assert plan.provenance["evals"] <= max(evals, 12)  # the first inner search always runs
    more = search_with_neuroshard(problem, MODEL, budget=Budget(evals=2 * evals))
    assert more.provenance["predicted_ms"] <= plan.provenance["predicted_ms"]


def test_a_budget_in_seconds_that_is_gone_still_gives_a_plan():
    plan = search_with_neuroshard(draw_problem(3), MODEL, budget=Budget(seconds=1e-9))
    assert plan.provenance["evals"] == 12


def test_the_result_does_not_depend_on_how_much_runs_in_lockstep(monkeypatch):
    problem = draw_problem(5, n_tables=8)
    together = search_with_neuroshard(problem, MODEL)
    monkeypatch.setattr("shardcore.search.beam._ROWS_AT_ONCE", 1)
    assert search_with_neuroshard(problem, MODEL) == together


@pytest.mark.parametrize(
    "make",
    [
        lambda: NeuroShardConfig(beam=0),
        lambda: NeuroShardConfig(scales=()),
        lambda: Budget(evals=0),
        lambda: Budget(seconds=-1.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ShardCoreError, match="needs"):
        make()
