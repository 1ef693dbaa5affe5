"""Replayed steps tell how many times as long as alone ops and exchanges take in them."""

import dataclasses

import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool

from shardcore.cost import accuracy, exchange, neural, steps
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.search import SHARDERS
from shardcore.search.pieces import even_rows
from shardcore.types import Device, Placement, Plan, Problem, Shard, StepCost, Topology
from shardcore.workload import lower

ANALYTIC = AnalyticModel(SETTING)
FACTORS = {("all_to_all", "forward"): 1.4, ("reduce_scatter", "forward"): 2.0, ("reduce_scatter", "backward"): 1.5,
           ("all_reduce", "backward"): 1.25}


@pytest.fixture(scope="module")
def model(model):
    """With rates of all collectives."""
    samples = [s for c in exchange.WAYS for s in comm_samples(collective=c)]
    law = exchange.fit(samples, [], lambda *_: None)
    return dataclasses.replace(model, weights={**model.weights, **law})


def workloads(kind, n=steps.FEWEST_STEPS, topology=None):
    """Random plans of which some tables are cut by rows, or replicated."""
    found, topology = [], topology or Topology((Device(1 << 30),) * 2)
    for seed in range(n):
        tables = tuple(np.random.default_rng(seed).choice(pool(), 8, replace=False))
        problem = Problem("p", tables, topology, SETTING.batch)
        plan = SHARDERS["random"](problem, ANALYTIC, seed=seed)
        first, others = tables[0], [p for p in plan.placements if p.shard.table != tables[0]]
        cut = {"columns": [p for p in plan.placements if p.shard.table == first],
               "rows": [Placement(Shard(first, *rows, 0, first.dim), (d,)) for d, rows in enumerate(even_rows(first.rows, 2))],
               "replicated": [Placement(Shard.whole(first), (0, 1))]}[kind]
        found.append(lower(Plan((*others, *cut)), problem))
    return found


def replayed(model, workload, factors=FACTORS, compute=(1.0, 1.0), pace=1.0) -> StepCost:
    """What a machine of this pace takes, on which ops take `compute` as long as the model says, forward and backward, and
    exchanges `factors` as long."""
    said = price(workload, model)
    computed = [tuple(pace * k * ms for ms in part)
                for k, part in zip(compute, (said.forward_compute_ms, said.backward_compute_ms), strict=True)]
    alone = model.collectives(workload.traffic, np.sum(computed, 0), workload.topology)
    comm = {way: tuple(sum(pace * factors.get((c, way), 1.0) * both[i] for c, both in alone.items()))
            for i, way in enumerate(("forward", "backward"))}
    return StepCost(*computed, comm["forward"], comm["backward"], said.waiting_ms)


def found_factors(model):
    return {(c, way): exchange.in_step(model.weights, c, way) for c, ways in exchange.WAYS.items() for way in ways}


@pytest.mark.parametrize("compute, pace", [((1.0, 1.0), 1.0), ((1.0, 1.0), 1.3), ((1.1, 1.4), 1.0)])
def test_factors_are_found_and_prices_have_them(model, compute, pace):
    seen = [w for kind in ("columns", "rows", "replicated") for w in workloads(kind)]
    fitted = steps.fit(model, [(w, replayed(model, w, compute=compute, pace=pace)) for w in seen])
    assert steps.compute_factors(fitted.weights) == pytest.approx(np.multiply(compute, pace))
    assert found_factors(fitted) == pytest.approx({(c, w): pace * FACTORS.get((c, w), 1.0) for c, ways in exchange.WAYS.items()
                                                   for w in ways}, rel=1e-2)
    assert fitted.meta["steps"] == len(seen)
    took, said = replayed(model, seen[-1], compute=compute, pace=pace), price(seen[-1], fitted)
    for part in ("forward_compute_ms", "backward_compute_ms", "forward_comm_ms", "backward_comm_ms"):
        assert getattr(said, part) == pytest.approx(getattr(took, part), rel=1e-2)
    groups, comm = compute_samples(linear_law, 40), comm_samples()
    assert accuracy.evaluate(fitted, groups, comm) == pytest.approx(accuracy.evaluate(model, groups, comm))
    sums = model.encode([Shard.whole(t) for t in pool()])
    ratio = fitted.quantile(fitted.encode([Shard.whole(t) for t in pool()]), 0.9) / model.quantile(sums, 0.9)
    assert (ratio > min(compute) * pace * 0.99).all() and (ratio < max(compute) * pace * 1.01).all()


def test_what_is_alone_is_what_it_was(model):
    fitted = steps.fit(model, [(w, replayed(model, w, compute=(1.1, 1.9))) for w in workloads("columns")])
    again = steps.alone(fitted)
    assert set(again.weights) == set(model.weights) and "steps" not in again.meta
    assert all(np.allclose(again.weights[k], v) for k, v in model.weights.items())
    sums = fitted.encode([Shard.whole(t) for t in pool()])
    for level in (None, 0.9):
        compiled = fitted.compiled(level)
        found = [compiled.head(np.ascontiguousarray(row), compiled.parameters) for row in sums]
        assert found == pytest.approx(fitted.head(sums) if level is None else fitted.quantile(sums, level))


def test_exchanges_between_hosts_alone_learn_nothing_from_steps_within_one(model):
    weights = {name: v.copy() for name, v in model.weights.items()}
    for rates in (v for name, v in weights.items() if name.startswith("exchange_")):
        rates[exchange.FAR], rates[exchange.NEAR] = rates[exchange.NEAR].sum(), 0
    between = dataclasses.replace(model, weights=weights)
    assert exchange.measured_links(between.weights, "all_to_all") == {"between"}
    fitted = steps.fit(between, [(w, replayed(between, w, compute=(1.2, 1.2))) for w in workloads("columns")])
    assert steps.compute_factors(fitted.weights) == pytest.approx([1.2, 1.2]) and found_factors(fitted) == found_factors(between)


def test_a_slow_step_among_others_says_nothing_of_exchanges(model):
    seen = [w for kind in ("columns", "rows", "replicated") for w in workloads(kind)]
    fitted = steps.fit(model, [(w, replayed(model, w, pace=3.0 if i % 5 == 0 else 1.0)) for i, w in enumerate(seen)])
    assert steps.compute_factors(fitted.weights) == pytest.approx([1, 1], abs=0.05)
    assert found_factors(fitted) == pytest.approx({(c, w): FACTORS.get((c, w), 1.0) for c, w in found_factors(model)}, rel=0.05)


def test_a_collective_of_few_steps_has_the_all_to_all_s_factor_and_no_steps_change_nothing(model):
    columns, rows = workloads("columns"), workloads("rows", n=steps.FEWEST_STEPS - 1)
    fitted = steps.fit(model, [(w, replayed(model, w)) for w in [*columns, *rows]])
    assert found_factors(fitted) == pytest.approx({(c, way): 1.4 if way == "forward" else 1.0 for c, way in found_factors(model)},
                                                  rel=1e-3)
    assert fitted.meta["steps"] == len(columns) + len(rows)
    for few in ([], [(w, replayed(model, w)) for w in rows]):
        assert steps.fit(model, few) is model


def test_a_second_fit_is_of_what_is_alone_again_and_given_links_tell_nothing(model, tmp_path):
    told = [(w, replayed(model, w)) for w in workloads("columns")]
    once = steps.fit(model, told)
    assert found_factors(steps.fit(once, told)) == pytest.approx(found_factors(once))
    neural.save(once, tmp_path)
    assert found_factors(neural.load(tmp_path)) == found_factors(once)
    given = Topology((Device(1 << 30),) * 2, within_host_gbps=10.0, latency_ms=0.1)
    assert steps.fit(model, [(w, replayed(model, w)) for w in workloads("columns", topology=given)]) is model
    linked, = workloads("columns", 1, given)
    for part in ("forward_comm_ms", "backward_comm_ms"):
        assert getattr(price(linked, once), part) == pytest.approx(getattr(price(linked, model), part))


def test_a_model_without_exchanges_learns_nothing_from_steps(model):
    told = [(w, replayed(model, w)) for w in workloads("columns")]
    bare = dataclasses.replace(model, weights={k: v for k, v in model.weights.items() if not k.startswith("exchange")})
    assert steps.fit(bare, told) is bare
