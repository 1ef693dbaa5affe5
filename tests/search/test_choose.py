"""The plan that several models find good."""

from dataclasses import replace

import numpy as np
import pytest
from conformance import BATCH, MIB, draw_problem, model_for
from test_bound import contended

from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.cost.neural import physical
from shardcore.search import SHARDERS, Budget
from shardcore.search.choose import candidates, choose
from shardcore.types import (
    Device,
    Infeasible,
    Placement,
    Plan,
    Problem,
    Setting,
    Shard,
    ShardCoreError,
    Table,
    Topology,
    Zipf,
)
from shardcore.workload import lower

PROBLEM = draw_problem(1, 12, [MIB] * 2)


def test_the_least_regret_over_both_models_wins():
    fast, slow = model_for(PROBLEM), replace(model_for(PROBLEM), lookup_ns=0.0, table_us=40.0)
    plans = [SHARDERS[n](PROBLEM, fast) for n in ("random", "lookup_greedy", "dim_greedy", "neuroshard")]
    found = choose(plans, PROBLEM, [fast, slow])
    ms = np.array([[price(lower(p, PROBLEM), m).total_ms for m in (fast, slow)] for p in plans])
    assert np.array(found.total_ms) == pytest.approx(ms) and found.cheapest == ms[:, 0].argmin()
    regret = (ms / ms.min(0)).max(1)
    assert regret[found.chosen] == pytest.approx(regret.min()) and found.plan == plans[found.chosen]
    assert choose(plans, PROBLEM, [fast]).chosen == found.cheapest


def test_what_costs_least_more_than_the_best_under_each_model_is_chosen():
    """By hand: under one model a device costs the lookups of its tables, under the other the number of its tables."""
    tables = tuple(Table(name, 100, 4, pooling, Zipf(0)) for name, pooling in zip("abcdefg", (6, 1, 1, 1, 1, 1, 1), strict=True))
    problem = Problem("seven", tables, Topology((Device(MIB),) * 2), BATCH)
    free = AnalyticModel(Setting("made-up", BATCH), launch_us=0, table_us=0, lookup_ns=0, gather_gbps=1e12, update_gbps=1e12,
                         exchange_latency_ms=0, exchange_gbps=1e12)
    by_lookups, by_tables = replace(free, lookup_ns=1e6 / BATCH), replace(free, table_us=1e3)
    plans = [Plan(tuple(Placement(Shard.whole(t), (int(t.name not in first),)) for t in tables))
             for first in ("a", "ab", "abc")]
    found = choose(plans, problem, [by_lookups, by_tables])
    assert np.round(found.total_ms, 6).tolist() == [[6, 6], [7, 5], [8, 4]]
    assert (found.chosen, found.cheapest) == (1, 0)  # regrets 6 / 4, 5 / 4, 8 / 6
    assert choose(plans[::2], problem, [by_lookups, by_tables]).chosen == 1
    again = choose([plans[2], plans[0], plans[0]], problem, [by_lookups])
    assert (again.chosen, again.cheapest) == (1, 1)


def test_candidates_are_different_plans_within_one_budget():
    models = [model_for(PROBLEM), replace(model_for(PROBLEM), lookup_ns=0.0)]
    plans = candidates(PROBLEM, models, "random", range(3), Budget(evals=100))
    assert 2 <= len(plans) <= 3 and len(set(plans)) == len(plans)
    both = candidates(PROBLEM, models, "neuroshard", range(2), Budget(evals=400))
    assert len(both) == 2 and all(p.provenance["evals"] <= 100 for p in both)
    assert len(candidates(PROBLEM, models, "random", range(3), Budget(evals=2))) >= 2  # one evaluation each at least
    small = replace(PROBLEM, topology=Topology((Device(100),) * 2))
    with pytest.raises(Infeasible):
        candidates(small, models, "neuroshard", range(1))


def test_the_physical_model_is_rates_and_launch_alone():
    model, shards = contended(0), [Shard.whole(t) for t in PROBLEM.tables]
    simple = physical(model)
    codes = simple.encode(shards)
    assert codes[:, -2:] == pytest.approx(codes[:, :-2] @ model.weights["rates"])
    assert simple.head(codes.sum(0)) == pytest.approx(model.launch_ms + codes[:, -2:].sum())
    learned = model.encode(shards)
    assert (learned[:, :-2] == codes[:, :-2]).all() and model.head(learned.sum(0)) != simple.head(codes.sum(0))
    with pytest.raises(ShardCoreError, match="was fine-tuned"):
        physical(replace(model, meta={"provenance": {"start": {}}}))
