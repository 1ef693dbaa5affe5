"""Annealing's count of memory against its plans', to the byte, with tables of all kinds."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cuts import draw_all_kinds, with_memory
from shapes import column, on_hosts, row

from shardcore.core.constraints import Constraints
from shardcore.core.job import PIPELINES
from shardcore.core.topology import Memory
from shardcore.core.types import Plan, Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.search.anneal import compiled
from shardcore.search.anneal.reshard import Reshard
from shardcore.search.anneal.sharder import AnnealingSearch, copy_state
from shardcore.search.budget import Budget
from shardcore.search.state.packing import least_excess_plan
from shardcore.search.state.shards import priced_plan
from shardcore.step.engine.arrays import FEATURES, FREE, LACK, LOOKUPS, NEXT
from shardcore.step.kinds import merged_placements, sharding_kind_for_table, shards_by_device
from shardcore.step.memory import (
    host_tier_bytes,
    max_op_features,
    may_exceed_op_limits,
    plan_fits,
    require_op_limits,
    used_bytes,
)
from shardcore.step.shard_memory import exchanged_amounts


def model_of(problem: Problem) -> AnalyticModel:
    hardware = problem.topology.hardware or "made-up"
    return AnalyticModel(Setting(hardware, problem.global_batch, problem.precision, problem.optimizer))


def annealed(problem: Problem, seed: int = 0, kind: str = "all") -> AnnealingSearch:
    search = AnnealingSearch(problem, model_of(problem), Budget(evals=2000).start(), seed)
    for _ in search.run_rounds(kind):
        pass
    return search


def require_exact(search: AnnealingSearch) -> Plan:
    """Assert that the plan of a search takes what annealing counts. Returns the plan."""
    problem = search.problem
    plan = priced_plan(search.best.placements, problem, search.model)
    assert plan_fits(plan, problem)
    # With no free byte, a device lacks all that it takes.
    none_free, n = search.best.fixed.devices.copy(), len(problem.topology)
    none_free[:, FREE] = -1e-300
    state = copy_state(search.best.state)
    compiled.refresh_state(search.head, search.best.fixed._replace(devices=none_free), state)
    assert state.devices[:n, LACK].tolist() == used_bytes(plan, problem)
    on_host = Counter({host: 0 for host in problem.topology.hosts})
    for placement in plan.placements:
        for d, shard in shards_by_device(placement):
            on_host[problem.topology.devices[d].host] += host_tier_bytes(shard, problem)
    assert state.hosts[0, :-1, -1].tolist() == list(on_host.values())
    return plan


@pytest.mark.parametrize(
    "seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, *range(3, 8)))]
)
def test_a_plan_takes_what_annealing_counts_to_the_byte(seed):
    """Every second problem has just enough memory, and half have caches in it. All pipelines, and dense parts."""
    pipeline = list(PIPELINES)[seed % len(PIPELINES)]
    dense = {
        "dense_bytes": 5000,
        "activation_bytes": 9000 * seed,
        "update_bytes": 3000 * seed,
        "input_bytes": 700,
    }
    problem = draw_all_kinds(seed, caches=seed % 4 > 1)
    kinds = problem.constraints.kinds
    if PIPELINES[pipeline].looks_up_ahead:  # no replicas run
        kinds = tuple(pair for pair in kinds if "data_parallel" not in pair[1])
    constraints = replace(problem.constraints, kinds=kinds)
    problem = replace(problem, job=replace(problem.job, pipeline=pipeline, **dense), constraints=constraints)
    if seed % 2:
        _, lacks = least_excess_plan(with_memory(problem, (1,) * 4))
        problem = with_memory(problem, (int(1.02 * (lacks + 1)),) * 4)
    require_exact(annealed(problem, seed))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_a_plan_costs_what_annealing_counts_with_tables_of_fixed_kinds(seed):
    """Some tables of fixed kinds share an op, and collectives, with tables that annealing places."""
    drawn = draw_all_kinds(seed, caches=seed % 2)
    # Ranges of rows are equal.
    problem = replace(drawn, tables=tuple(replace(t, rows=-(-t.rows // 4) * 4) for t in drawn.tables))
    search = annealed(problem, seed)
    plan = priced_plan(search.best.placements, problem, search.model)
    assert search.best.ms == pytest.approx(plan.provenance["predicted_ms"], rel=1e-9)
    # Tables of several collections that are kept together have the cost of their own ops.
    parts = search.best.space.cache.parts
    assert search.best.fixed.options[:, NEXT].any() == any(len({run for run, _ in of}) > 1 for of in parts)


def test_ordered_row_ranges_run_in_the_op_of_tables_of_a_fixed_kind():
    """Each row range of an ordered table is an item, so no group of devices has their op."""
    tables = (
        Table("large", 4000, 64, 4.0, ordered=True),
        *(Table(f"t{i}", 400, 16, 4.0) for i in range(4)),
        Table("fixed", 800, 32, 3.0),
    )
    topology = on_hosts("xyxy", 1 << 40, hardware="cpu-some")
    constraints = Constraints(kinds=(("fixed", ("row",)),), min_widths=(("large", 64),))
    problem = Problem("p", tables, topology, 64, constraints=constraints)
    by_columns = [column(t, int(t.name != "large")) for t in tables if t.name != "fixed"]
    whole = used_bytes(priced_plan(by_columns, problem, model_of(problem)), problem)
    problem = with_memory(problem, (int(0.6 * max(whole)),) * 4)
    search = annealed(problem)
    plan = require_exact(search)
    assert "row" in {run.name for run in search.best.space.cache.kinds}
    assert {p.kind for p in plan.placements if p.shard.table.name in ("large", "fixed")} == {"row"}
    assert search.best.ms == pytest.approx(plan.provenance["predicted_ms"], rel=1e-9)


def test_rows_in_host_memory_count_also_where_groups_share_their_tables():
    tables = tuple(Table(f"t{i}", 64 * (i + 1), 16, 4.0, load_factor=0.25) for i in range(6))
    topology = on_hosts("xyxy", 1 << 30, hardware="cpu-some", memory=(Memory("host", 1 << 30, 25.0),))
    plan = Plan(tuple(row(t, topology) for t in tables))
    problem = Problem("p", tables, topology, 64)
    search = AnnealingSearch(problem, model_of(problem), Budget(evals=10).start(), 0)
    search.best = search.starts.start_from_reshard(Reshard(plan, tables=0), "all")
    assert require_exact(search).placements == plan.placements


@pytest.mark.parametrize("kind", ["all", "columns"])
@pytest.mark.parametrize("seed", range(2))
def test_an_op_has_no_more_features_and_ids_than_fbgemm_runs(seed, kind):
    """All devices together may run few more features than there are. Most lookups are of few tables."""
    rng, batch, most = np.random.default_rng(seed), 1 << 20, max_op_features(1 << 20)
    topology = on_hosts("xyxy", 1 << 50, hardware="nvidia-h200")
    share = rng.dirichlet(np.full(20, 2.0))
    tables = tuple(
        Table(
            f"t{i}",
            int(rng.integers(10**5, 10**6)),
            int(rng.choice([8, 16])),
            float(rng.choice([0.01, 40.0], p=[0.7, 0.3])),
            features=1 + int(3.6 * most * x),
        )
        for i, x in enumerate(share)
    )
    problem = Problem("p", tables, topology, batch, constraints=Constraints(together=(("t0", "t1"),)))
    assert may_exceed_op_limits(problem)
    search = annealed(problem, seed, kind)
    plan = require_exact(search)
    require_op_limits(plan, problem)
    counted, runs = search.best.state.ops[: len(topology)], search.best.space.cache.runs
    features, ids = np.zeros((2, len(topology), len(runs)))
    for placement in merged_placements(plan.placements):
        for d, shard in shards_by_device(placement):
            run = sharding_kind_for_table(placement.kind, shard.table)
            features[d, runs.index(run)] += shard.table.features
            ids[d, runs.index(run)] += exchanged_amounts(run, shard, problem)[2]
    assert counted[..., LOOKUPS] == pytest.approx(ids)
    assert counted[..., FEATURES].tolist() == features.tolist()
    assert search.best.fixed.ops_limited and len(search.best.fixed.limits) == len(runs)
