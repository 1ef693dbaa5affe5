"""Ids in annealing: kept up to date, and worth what they cost."""

from dataclasses import replace

import numpy as np
import pytest
from shapes import arriving, on_hosts

from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.types import Plan, Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.search import Budget
from shardcore.search.anneal import compiled, sharder
from shardcore.search.portfolio import search_with_annealing
from shardcore.step.engine.arrays import ARRIVED, ENTERED
from shardcore.step.kinds import sharding_kind_by_name
from shardcore.step.lower import lower
from shardcore.testing.problems import BATCH, MIB, draw_random_tables, small_problem_model

HIDDEN = Job(dense_forward_ms=1e3, dense_backward_ms=1e3)
"""A dense part that hides all ids."""


@pytest.mark.parametrize(
    "hosts, sequences, several",
    [
        ("aaa", False, False),
        pytest.param("aabb", True, False, marks=pytest.mark.long),
        ("aabb", True, True),
    ],
)
def test_what_exchanges_carry_is_that_of_the_plan_whatever_moved_before(
    hosts, sequences, several, monkeypatch
):
    drawn = draw_random_tables(np.random.default_rng(1), 12)
    tables = (
        replace(
            t,
            features=1 + i % 3,
            sequence=sequences and i % 4 == 0,
            collection="users" if several and i % 3 == 0 else "",
        )
        for i, t in enumerate(drawn)
    )
    problem = Problem("p", tuple(tables), on_hosts(hosts), BATCH)
    model, seen = small_problem_model(problem), []
    exact = sharder.AnnealingSearch._model_costs_ms

    def checked(search, start, states):
        names = ("ops", "hosts", "held", "group")
        kept = [[getattr(state, name).copy() for name in names] for state in states]
        costs = exact(search, start, states)
        for state, was, ms in zip(states, kept, costs, strict=True):
            assert all(map(np.array_equal, was, (getattr(state, name) for name in names)))
            # The hottest sequences may be in parts, each a table of the search's problem.
            require_exact(start.maker.problem, replace(start, state=state), ms)
        return costs

    def require_exact(problem, start, ms):
        state, fixed = start.state, start.fixed
        plan = Plan(tuple(start.space.placements(state.held, state.group)))
        # All ranges of divided rows count as the first. The last one may have fewer rows.
        runs, expected = start.space.cache.runs, arriving(plan, problem)
        nothing = np.zeros(len(fixed.host))
        ops = state.ops[: len(fixed.host)]
        more = ops[..., ARRIVED].T - np.array([expected.get(run, nothing) for run in runs])
        divided = any(sharding_kind_by_name(p.kind).divides_rows for p in plan.placements)
        assert (more >= 0).all() and (divided or not more.any())
        assert divided or ms == pytest.approx(price(lower(plan, problem), model).total_ms, rel=1e-9)
        carried = np.concatenate([ops[..., ENTERED], ops[..., ARRIVED]], 1)
        of_hosts = np.zeros_like(state.hosts[0, :, :-1])
        np.add.at(of_hosts, fixed.host, carried)
        of_hosts[-1] = carried.sum(0)
        assert np.array_equal(state.hosts[0, :, :-1], of_hosts)
        seen.append(len({p.kind for p in plan.placements}))

    monkeypatch.setattr(sharder.AnnealingSearch, "_model_costs_ms", checked)
    search_with_annealing(problem, model, seed=1, budget=Budget(evals=5_000))
    assert len(seen) > 20 and max(seen) > 1


@pytest.mark.parametrize("gbps", [0.001, pytest.param(5.0, marks=pytest.mark.long)])
def test_fetches_ahead_are_those_of_the_plan_whatever_moved_before(gbps, monkeypatch):
    """Exchanges of this model are linear, so that the compiled cost is exact. Caches are of equal tables."""
    drawn = draw_random_tables(np.random.default_rng(1), 8)
    hot = [Table(f"hot{i}", 1000, 16, 20.0, load_factor=0.1) for i in range(6)]
    tables = (*hot, *(replace(t, load_factor=0.0) for t in drawn[:2]), *drawn[2:])
    where = on_hosts("aaa", 1 << 40, memory=(Memory("host", 1 << 30, gbps),))
    problem = Problem(
        "p", tables, where, BATCH, job=Job("prefetch", dense_forward_ms=0.1, dense_backward_ms=0.1)
    )
    model, exact, waits = (
        small_problem_model(problem).for_problem(problem),
        sharder.AnnealingSearch._model_costs_ms,
        [],
    )

    def checked(search, start, states):
        costs = exact(search, start, states)
        for state, ms in zip(states, costs, strict=True):
            require_exact(search, replace(start, state=state), ms)
        return costs

    def require_exact(search, start, ms):
        cost = price(lower(Plan(tuple(start.placements)), problem), model)
        # All ranges of divided rows count as the first. The last one may have fewer rows.
        divided = any(sharding_kind_by_name(p.kind).divides_rows for p in start.placements)
        assert divided or ms == pytest.approx(cost.total_ms, rel=1e-9)
        # The state's own log leads elsewhere: back to the best plan met.
        copy = sharder.copy_state(start.state)
        compiled_ms = compiled.refresh_state(search.head, start.fixed, copy) + problem.job.dense_ms
        assert compiled_ms == pytest.approx(ms, rel=1e-6)
        waits.append((max(cost.fetch_wait_ms), ms))

    monkeypatch.setattr(sharder.AnnealingSearch, "_model_costs_ms", checked)
    plan = search_with_annealing(problem, model, seed=1, budget=Budget(evals=5_000))
    assert len(waits) > 20 and all(wait > 0 for wait, _ in waits) == (gbps < 1)
    if gbps < 1:
        # Six fetches on three devices: two on each, whatever else is there.
        link = price(lower(plan, problem), model).link_ms
        assert max(link) < 1.2 * np.mean(link)


def test_columns_are_cut_only_where_that_is_worth_the_ids():
    """The wide table is most of the compute. Each device has a table, so each part of it brings more ids."""
    tables = (Table("wide", 1000, 64, 50.0), *(Table(f"narrow{i}", 1000, 16, 50.0) for i in range(3)))
    model = replace(AnalyticModel(Setting("any", BATCH)), gather_gbps=1.0, lookup_ns=0, exchange_latency_ms=0)
    cut = []
    for between_gbps in (0.01, 100.0):
        for job in (Job(), HIDDEN):
            where = replace(on_hosts("aabb", 64 * MIB), links=make_links(between_hosts=between_gbps))
            given = Problem("p", tables, where, BATCH, job=job)
            plan = search_with_annealing(given, model, budget=Budget(evals=5_000), space="columns")
            cut.append(sum(p.shard.table.name == "wide" for p in plan.placements) > 1)
    assert cut == [False, True, True, True]
