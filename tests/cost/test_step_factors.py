"""Replayed steps tell how many times as long as alone exchanges take in them, whatever the machine's slowdown
was."""

import dataclasses

import numpy as np
import pytest
from laws import SETTING, comm_samples, pool
from shapes import ACROSS, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WITHIN, host_row, on_hosts, replica, row

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.core.step_cost import PARTS, StepCost
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem
from shardcore.cost import collective_fit, collective_model, neural, step_factors
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.collective_model import EXCHANGE_TERMS
from shardcore.cost.model import price
from shardcore.search import SHARDERS
from shardcore.step.collectives import COLLECTIVES
from shardcore.step.exchanges import channel_transfer_ms
from shardcore.step.kinds import BUCKETIZED_IDS, CHANNELS, ID_CHANNELS, IDS, Channel
from shardcore.step.lower import lower

ANALYTIC = AnalyticModel(SETTING)
FACTORS = {
    (ALL_TO_ALL, "forward"): 1.4,
    (REDUCE_SCATTER, "forward"): 2.0,
    (REDUCE_SCATTER, "backward"): 1.5,
    (ALL_REDUCE, "backward"): 1.25,
    (IDS, "forward"): 1.6,
    (BUCKETIZED_IDS, "forward"): 1.9,
}
ALONE = {(c, direction): 1.0 for c in CHANNELS for direction in COLLECTIVES[c.collective].directions}


@pytest.fixture(scope="module")
def model(model):
    """With rates of all collectives."""
    samples = [s for c in COLLECTIVES for s in comm_samples(collective=c)]
    law = collective_fit.fit_exchange_rates(samples)
    return dataclasses.replace(model, weights={**model.weights, **law})


def workloads(kind, n=step_factors.FEWEST_STEPS, topology=None):
    """Random plans of which some tables are cut by rows, or replicated."""
    found, topology = [], topology or Topology((Device(1 << 30),) * 2)
    for seed in range(n):
        tables = tuple(np.random.default_rng(seed).choice(pool(), 8, replace=False))
        problem = Problem("p", tables, topology, SETTING.batch)
        plan = SHARDERS["random"](problem, ANALYTIC, seed=seed)
        first, others = tables[0], [p for p in plan.placements if p.shard.table != tables[0]]
        cut = {
            "columns": [p for p in plan.placements if p.shard.table == first],
            "rows": [row(first, topology)],
            "replicated": [replica(first, topology)],
            "host rows": [host_row(first, (0, 1))],
        }[kind]
        found.append(lower(Plan((*others, *cut)), problem))
    return found


def replayed(model, workload, factors=FACTORS, slowdown=1.0) -> StepCost:
    """The step on a machine of this slowdown, whose exchanges take `factors` times the model's ms."""
    said = price(workload, model)
    alone = channel_transfer_ms(model, workload.traffic, np.array(said.compute_ms), workload.topology)
    comm = {
        direction: tuple(
            sum(
                slowdown * factors.get((c, direction), 1.0) * both[direction]
                for c, both in alone.items()
                if c not in ID_CHANNELS
            )
        )
        for direction in ("forward", "backward")
    }
    compute = (
        tuple(slowdown * ms for ms in part) for part in (said.forward_compute_ms, said.backward_compute_ms)
    )
    ids = tuple(sum(slowdown * factors.get((c, "forward"), 1.0) * alone[c]["forward"] for c in ID_CHANNELS))
    return StepCost(*compute, comm["forward"], comm["backward"], said.waiting_ms, input_ms=ids)


def found_factors(model):
    return {
        (c, direction): collective_model.step_factor(model.weights, c, direction) for c, direction in ALONE
    }


@pytest.mark.parametrize("slowdown", [pytest.param(1.0, marks=pytest.mark.long), 1.3])
def test_factors_are_found_whatever_the_slowdown_and_prices_have_them(model, slowdown):
    seen = [w for kind in ("columns", "rows", "replicated") for w in workloads(kind)]
    fitted = step_factors.fit_step_factors(model, [(w, replayed(model, w, slowdown=slowdown)) for w in seen])
    # within a host, and across them
    lent = {(c, direction): FACTORS.get((Channel(c.collective), direction), 1.0) for c, direction in ALONE}
    assert found_factors(fitted) == pytest.approx(lent, rel=1e-3)
    assert fitted.meta["steps"] == len(seen)
    took, said = replayed(model, seen[-1]), price(seen[-1], fitted)
    for direction in ("forward_comm_ms", "backward_comm_ms"):
        assert getattr(said, direction) == pytest.approx(getattr(took, direction), rel=1e-3)
    samples = comm_samples()
    assert collective_fit.exchange_errors(fitted.weights, samples) == collective_fit.exchange_errors(
        model.weights, samples
    )


def test_a_collective_of_few_steps_has_the_all_to_all_s_factor_and_no_steps_change_nothing(model):
    columns, rows = workloads("columns"), workloads("rows", n=step_factors.FEWEST_STEPS - 1)
    fitted = step_factors.fit_step_factors(model, [(w, replayed(model, w)) for w in [*columns, *rows]])
    assert found_factors(fitted) == pytest.approx(
        {
            (c, direction): 1.6 if c in ID_CHANNELS else 1.4 if direction == "forward" else 1.0
            for c, direction in found_factors(model)
        },
        rel=1e-3,
    )
    assert fitted.meta["steps"] == len(columns)
    for few in ([], [(w, replayed(model, w)) for w in rows]):
        assert step_factors.fit_step_factors(model, few) is model


def test_sums_of_steps_over_several_hosts_tell_a_factor_of_each_collective(model):
    """However time is told apart within a step."""
    uplink = np.arange(len(EXCHANGE_TERMS)) == EXCHANGE_TERMS.index("uplink_bytes")
    model = dataclasses.replace(
        model,
        weights={
            n: v + v[collective_model.NEAR].sum() * uplink if n.startswith("exchange_") else v
            for n, v in model.weights.items()
        },
    )
    own = {ALL_TO_ALL: 1.3, ALL_REDUCE: 8.0, WITHIN: 1.8, ACROSS: 2.5, IDS: 1.5, BUCKETIZED_IDS: 1.5}
    of_directions = {(c, direction): own.get(c, 1.0) for c, direction in ALONE}
    seen = [
        w
        for kind in ("columns", "host rows", "replicated")
        for w in workloads(kind, n=12, topology=on_hosts("aabb"))
    ]
    steps = [(w, overlapping(replayed(model, w, of_directions))) for w in seen]
    fitted = step_factors.fit_step_factors(model, steps)
    told = found_factors(fitted)
    assert {c: told[c, COLLECTIVES[c.collective].directions[-1]] for c in own} == pytest.approx(own, rel=1e-2)
    assert {c: told[c, COLLECTIVES[c.collective].directions[0]] for c in own} == pytest.approx(own, rel=1e-2)
    assert fitted.meta["steps"] == len(seen)


def overlapping(cost):
    """A step of devices like the last one, in which gradients travel before all ids are there."""
    last = int(np.argmin(cost.waiting_ms))
    parts = {part: (getattr(cost, part)[last],) * len(cost.waiting_ms) for part in PARTS}
    early_ms = 0.4 * parts["backward_comm_ms"][0]
    parts["backward_comm_ms"] = tuple(ms - early_ms for ms in parts["backward_comm_ms"])
    parts["input_ms"] = tuple(ms + early_ms for ms in parts["input_ms"])
    parts["waiting_ms"] = tuple(1e-3 * (d != last) for d in range(len(cost.waiting_ms)))
    return StepCost(**parts)


def test_a_second_fit_is_of_what_is_alone_again_and_given_links_tell_nothing(model, tmp_path):
    told = [(w, replayed(model, w)) for w in workloads("columns")]
    once = step_factors.fit_step_factors(model, told)
    assert found_factors(step_factors.fit_step_factors(once, told)) == found_factors(once)
    neural.save(once, tmp_path)
    assert found_factors(neural.load(tmp_path)) == found_factors(once)
    given = Topology((Device(1 << 30),) * 2, links=make_links(within_host=10.0, latency_ms=0.1))
    assert (
        step_factors.fit_step_factors(
            model, [(w, replayed(model, w)) for w in workloads("columns", topology=given)]
        )
        is model
    )
    apart = dataclasses.replace(on_hosts("aabb"), links=make_links(between_hosts=1.0, shared=True))
    assert (
        step_factors.fit_step_factors(
            model, [(w, replayed(model, w)) for w in workloads("columns", topology=apart)]
        )
        is model
    )
    (linked,) = workloads("columns", 1, given)
    assert price(linked, once) == price(linked, model)


def test_exchanges_between_hosts_alone_learn_nothing_from_steps_within_one(model):
    weights = {name: v.copy() for name, v in model.weights.items()}
    for rates in (v for name, v in weights.items() if name.startswith("exchange_")):
        rates[collective_model.FAR], rates[collective_model.NEAR] = rates[collective_model.NEAR].sum(), 0
    between = dataclasses.replace(model, weights=weights)
    assert collective_model.measured_link_levels(between.weights, ALL_TO_ALL) == {"between_hosts"}
    # And those within hosts, nothing of steps over several.
    apart = [(w, replayed(model, w)) for w in workloads("columns", topology=on_hosts("aabb"))]
    assert collective_model.measured_link_levels(model.weights, ALL_TO_ALL) == {"within_host"}
    assert step_factors.fit_step_factors(model, apart) is model
    with pytest.raises(ShardCoreError, match="8 steps ran on one host and 8 over several; a model has one"):
        step_factors.fit_step_factors(
            model, [*apart, *((w, replayed(model, w)) for w in workloads("columns"))]
        )
    fitted = step_factors.fit_step_factors(between, [(w, replayed(between, w)) for w in workloads("columns")])
    assert fitted is between and "tell nothing" in step_factors.fit_summary(between, fitted, 8)


def test_a_model_without_exchanges_learns_nothing_from_steps(model):
    told = [(w, replayed(model, w)) for w in workloads("columns")]
    bare = dataclasses.replace(
        model, weights={k: v for k, v in model.weights.items() if not k.startswith("exchange")}
    )
    assert step_factors.fit_step_factors(bare, told) is bare


def test_steps_of_earlier_versions_tell_nothing_of_ids(model):
    """In those no ids travelled."""
    of_today = [(w, replayed(model, w)) for w in workloads("columns", n=step_factors.FEWEST_STEPS - 1)]
    before = [
        (w, dataclasses.replace(took, input_ms=()))
        for w, took in [(w, replayed(model, w)) for w in workloads("rows")]
    ]
    fitted = step_factors.fit_step_factors(model, [*of_today, *before])
    assert collective_model.step_factor_name(IDS, "forward") not in fitted.weights
    assert fitted.meta["steps"] > 0


def test_steps_whose_dense_part_hides_ids_tell_nothing_of_them(model):
    """Only the work of ids is left, and no transfer."""
    job = Job(dense_forward_ms=100.0, dense_backward_ms=100.0)
    hidden = [
        (dataclasses.replace(w, job=job), dataclasses.replace(replayed(model, w), input_ms=(0.1, 0.1)))
        for w in workloads("columns")
    ]
    fitted = step_factors.fit_step_factors(model, hidden)
    assert collective_model.step_factor_name(IDS, "forward") not in fitted.weights
    assert fitted.meta["steps"] == len(hidden)
