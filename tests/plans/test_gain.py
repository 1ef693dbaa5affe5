"""The interval of a gain: what plans have in common is no reason to doubt their difference."""

import itertools
from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from shapes import column, replica, row

from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.known_errors import USUAL_ERRORS, known_model_errors
from shardcore.cost.model import price_plan
from shardcore.plans import gain

MODEL = AnalyticModel(Setting("made-up", 256))


@pytest.fixture
def problem() -> Problem:
    tables = tuple(Table(f"t{i}", 4000, 16, 5.0) for i in range(8))
    return Problem("gain", tables, Topology((Device(8 << 20),) * 4), 256)


def of(plan: Plan, problem: Problem, model=MODEL):
    return price_plan(plan, problem, model)


def spread(problem: Problem, by: int = 0) -> Plan:
    return Plan(tuple(column(t, (i + by) % 4) for i, t in enumerate(problem.tables)))


def margin(old: Plan, new: Plan, problem: Problem, model=MODEL) -> float:
    return gain.plan_gain(of(old, problem, model), of(new, problem, model), problem, model).margin_ms


def test_the_same_plan_is_surely_no_better(problem):
    found = gain.plan_gain(of(spread(problem), problem), of(spread(problem), problem), problem, MODEL)
    assert found.ms == found.margin_ms == 0 and not found.exceeds_margin()


def test_the_more_moves_the_less_is_known_of_the_difference(problem):
    old, margins = spread(problem), []
    for n in range(1, 9):
        new = Plan((*spread(problem, 1).placements[:n], *old.placements[n:]))
        margins.append(margin(old, new, problem))
    assert margins == sorted(margins) and margins[0] > 0
    assert margins[-1] == pytest.approx(independent(old, new, problem))


def independent(old: Plan, new: Plan, problem: Problem) -> float:
    """The margin of two plans that have nothing in common."""
    variance = 0.0
    for cost in (of(old, problem).cost, of(new, problem).cost):
        compute = max(cost.compute_ms)
        for error, ms in zip(USUAL_ERRORS, (compute, cost.total_ms - compute), strict=True):
            variance += (error * ms) ** 2
    return gain.CALIBRATION * sqrt(variance)


def test_another_kind_on_the_same_devices_is_another_op(problem):
    old = spread(problem)
    for other in (row(problem.tables[0], problem.topology), replica(problem.tables[0], problem.topology)):
        assert margin(old, Plan((other, *old.placements[1:])), problem) > 0
    alone = replace(problem, tables=problem.tables[:1])
    divided, copied = (Plan((make(alone.tables[0], alone.topology),)) for make in (row, replica))
    assert margin(divided, copied, alone) == pytest.approx(independent(divided, copied, alone))
    wide = replace(problem, tables=(Table("w", 4000, 32, 5.0),))
    halves = [
        Plan((column(wide.tables[0], 0, *a), column(wide.tables[0], 1, *b)))
        for a, b in (((0, 16), (16, 32)), ((16, 32), (0, 16)))
    ]
    assert margin(*halves, wide) == 0  # which columns it has does not change what a device does


def test_a_model_that_errs_more_is_less_sure(problem):
    class Erring(AnalyticModel):
        meta = {"metrics": {"compute_mape": 10.0, "forward_comm_mape": 20.0, "backward_comm_mape": 60.0}}

    class Both(AnalyticModel):
        models = (MODEL, Erring(MODEL.setting))

    erring, both = Erring(MODEL.setting), Both(MODEL.setting)
    assert known_model_errors(MODEL) == USUAL_ERRORS
    assert known_model_errors(erring) == known_model_errors(both) == (0.1, 0.4)
    assert margin(spread(problem), spread(problem, 1), problem, erring) > margin(
        spread(problem), spread(problem, 1), problem
    )


def test_a_gain_has_to_exceed_its_margin_and_what_was_asked():
    found = gain.PlanGain(3.0, 2.0, 100.0)
    assert str(found) == "gain 3.0% ± 2.0%"
    assert found.exceeds_margin() and found.exceeds_margin(0.02) and not found.exceeds_margin(0.03)
    assert (
        not gain.PlanGain(2.0, 2.0, 100.0).exceeds_margin()
        and not gain.PlanGain(-3.0, 2.0, 100.0).exceeds_margin()
    )


@pytest.mark.long
def test_of_replayed_plans_that_replace_others_nine_in_ten_are_faster():
    """Compute hardly counts in these replays, so a short training is enough."""
    from bench import box_replays
    from shardcore.cost import drift_correction, fit, step_factors
    from shardcore.io import replays
    from shardcore.step.lower import lower

    setting = Setting("cpu-amd-epyc", 2048)
    known = drift_correction.read_measurements("datasets/cpu-amd-epyc", setting)
    model = fit.train(known.compute[:1500], known.comm, setting, fit.FitConfig(epochs=5)).model
    box = Path("bench/emulated-hosts")
    alone, pairs = box_replays.with_box_rates(model, box, pods=True), []
    kept = replays.read_all_replays(box / "steps", replace(setting, hardware="cpu-intel-xeon"))
    for one in kept:  # what exchanges take in steps is fitted without the problem that is judged
        others = [
            (lower(x.plans[name], x.problem, fits=False), cost.at_usual_speed())
            for x in kept
            if x is not one
            for name, cost in x.costs.items()
        ]
        own = step_factors.fit_step_factors(alone, others).for_problem(one.problem)
        plans = [
            (price_plan(plan, one.problem, own, fits=False), one.costs[name].total_ms)
            for name, plan in one.plans.items()
        ]
        plans.sort(key=lambda x: -x[0].cost.total_ms)
        pairs += [
            (gain.plan_gain(old, new, one.problem, own), old_ms - new_ms)
            for (old, old_ms), (new, new_ms) in itertools.combinations(plans, 2)
        ]
    real_ms = [ms for found, ms in pairs if found.ms > found.margin_ms]
    assert len(pairs) == 105 and len(real_ms) >= 60
    assert sum(ms > 0 for ms in real_ms) >= 0.9 * len(real_ms)
    # Errors of the difference over its standard deviation without calibration.
    scores = [abs(ms - found.ms) * gain.CALIBRATION / found.margin_ms for found, ms in pairs]
    # 0.39 of these. The calibration is the larger one of pairs that differ less (searched plans).
    assert 0.3 < np.quantile(scores, gain.CONFIDENCE) < gain.CALIBRATION
