"""Training: policies learn, the same seed gives the same one, and bad input is refused."""

from dataclasses import replace

import numpy as np
import pytest
from cuts import MODEL
from shapes import with_room

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.search.learned.policy import NETS
from shardcore.search.learned.training import (
    PolicyConfig,
    PolicyProblems,
    PreparedProblem,
    draw_policy_problems,
    make_policy,
    train_policy,
)
from shardcore.tables.held_out import is_held_out

RNG = np.random.default_rng(0)
POOL = tuple(
    Table(
        f"t{i}", int(RNG.integers(10, 3000)), 16, float(RNG.uniform(1, 40)), Zipf(float(RNG.uniform(0, 1.5)))
    )
    for i in range(80)
)
FEW = PolicyProblems(
    devices=3, min_tables=6, max_tables=9, max_dim=32, slack=3.0, problems=6, validation=3, test=4
)
QUICK = PolicyConfig(rounds=3, priced=4, cost_updates=3, policy_updates=2, problems_at_once=2, plans_each=4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "dreamshard" else [pytest.mark.long]) for name in NETS],
)
def test_the_same_seed_gives_the_same_policy_with_metrics_and_curves(name):
    seen = []
    configs = (replace(QUICK, seed=seed, rounds=rounds) for seed, rounds in ((0, 3), (0, 3), (1, 1)))
    first, again, other = (
        make_policy(name, POOL, MODEL, FEW, config, progress=lambda i, values: seen.append(i))
        for config in configs
    )
    assert all((again.policy.weights[k] == v).all() for k, v in first.policy.weights.items())
    assert any((other.policy.weights[k] != v).any() for k, v in first.policy.weights.items())
    assert first.curves == again.curves and seen == [1, 2, 3, 1, 2, 3, 1]
    metrics = first.policy.meta["metrics"]
    assert metrics["validation_cost"] == min(row["validation_cost"] for row in first.curves)
    assert metrics["test_solved"] == 1 and 0 < metrics["test_cost"] <= metrics["test_worst"]


@pytest.mark.long
def test_a_policy_that_the_model_rewards_learns_to_balance():
    """From a random policy to the greedy orders, whose cost is 1, on tables that it never saw."""
    config = PolicyConfig(rounds=12, policy_updates=10, problems_at_once=2, plans_each=8, learning_rate=5e-3)
    trained = make_policy("dreamshard_direct", POOL, MODEL, FEW, config)
    first, last = trained.curves[0]["validation_cost"], trained.policy.meta["metrics"]["validation_cost"]
    assert last < first - 0.1 or last < 1.05
    assert trained.policy.meta["metrics"]["test_cost"] < 1.1


def test_it_stops_when_plans_no_longer_get_better():
    config = replace(QUICK, rounds=50, patience=2, learning_rate=1e-9)
    assert (
        len(
            train_policy(
                "dreamshard_direct", *draw_policy_problems(POOL, MODEL.setting, FEW, 0)[:2], MODEL, config
            ).curves
        )
        == 3
    )


def test_test_problems_have_no_table_of_the_others():
    to_learn, validation, test = draw_policy_problems(POOL, MODEL.setting, FEW, 0)
    names = [{t.name for p in side for t in p.tables} for side in (to_learn, validation, test)]
    assert not names[2] & (names[0] | names[1]) and (len(to_learn), len(validation), len(test)) == (6, 3, 4)
    assert all(is_held_out(t, one_of=2) for p in test for t in p.tables)
    assert {p.tables for p in to_learn}.isdisjoint({p.tables for p in validation})


def test_problems_may_be_drawn_for_the_devices_of_another():
    like = Topology((Device(5, 2.0, "a"), Device(7, 1.0, "b")), links=make_links(within_host=3.0))
    [problem, *_], _, _ = draw_policy_problems(POOL, MODEL.setting, FEW, 0, like)
    assert [(d.speed, d.host) for d in problem.topology.devices] == [(2.0, "a"), (1.0, "b")]
    assert problem.topology.links == like.links and problem.topology.devices[0].memory_bytes > 7
    assert PreparedProblem(problem, MODEL).cache.speed.tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"plans_each": 1}, "policy config has plans_each 1; it needs 2 to"),
        ({"learning_rate": 0.0}, "learning_rate 0.0; it needs more than 0 to less than 1"),
        ({"rounds": 0}, "policy config has rounds 0; it needs 1 to"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change, message):
    with pytest.raises(ShardCoreError, match=message):
        PolicyConfig(**change)


def test_too_few_tables_and_unknown_names_are_refused():
    with pytest.raises(ShardCoreError, match="half of the pool is for training.*the pool has . tables"):
        draw_policy_problems(POOL[:10], MODEL.setting, FEW, 0)
    with pytest.raises(ShardCoreError, match="there is no policy 'alphashard'; known are dreamshard"):
        make_policy("alphashard", POOL, MODEL, FEW)
    with pytest.raises(ShardCoreError, match="training got 0 problems and 0 for validation"):
        train_policy("autoshard", [], [], MODEL)


@pytest.mark.parametrize("name", NETS)
def test_plans_that_do_not_fit_teach_no_cost(name):
    """Tables that must stay whole and hardly fit: most random plans find no device for some."""
    tables = tuple(replace(t, rows=1000, dim=16) for t in POOL[:7])
    whole = Constraints(unsplit=tuple(t.name for t in tables))
    topology = Topology((Device(3 * 120_000),) * 3)
    problem = with_room(Problem("tight", tables, topology, 48, constraints=whole))
    trained = train_policy(name, [problem], [problem], MODEL, QUICK)
    assert all(np.isfinite(v) for row in trained.curves for v in row.values())
