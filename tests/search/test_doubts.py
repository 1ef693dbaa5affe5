"""Doubts about a plan: which measurement could change it, and by how much."""

import dataclasses

import numpy as np
import pytest

from shardcore.core.types import Problem
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import predicted_total_ms, price_plan
from shardcore.cost.profile import MEASUREMENTS, NETWORK_RATES, RATES, SPEC, load_profile
from shardcore.search import SHARDERS, Budget
from shardcore.search.doubts import plan_doubts
from shardcore.step.lower import lower
from shardcore.testing.problems import draw_random_tables

CARD = load_profile("nvidia-h100-sxm")


@pytest.fixture(scope="module")
def asked():
    tables = draw_random_tables(np.random.default_rng(7), 12)
    problem = Problem("asked", tables, CARD.topology(2, 2), 8192)
    return problem, CARD.cost_model().for_problem(problem)


def search(problem, model):
    return SHARDERS["portfolio"](problem, model, budget=Budget(evals=2000))


def test_each_rate_is_shown_by_one_measurement_but_for_data_sheets():
    shown = [name for rates, _ in MEASUREMENTS.values() for name in rates]
    assert len(shown) == len(set(shown)) and set(shown) == set(RATES) - set(SPEC)
    assert set(MEASUREMENTS["collectives"][0]) == set(NETWORK_RATES) - set(SPEC)


def test_the_bands_of_all_measurements_make_up_that_of_the_step(asked):
    problem, model = asked
    priced = price_plan(search(problem, model), problem, model)
    doubts = plan_doubts(priced, problem, model, search)
    assert [d.measured for d in doubts] == list(MEASUREMENTS)
    whole = model.embeddings_error_band(priced.workload)
    assert sum(d.band**2 for d in doubts) == pytest.approx(whole**2)
    assert all(0 <= d.regret < 0.5 for d in doubts)


def test_a_plan_that_exchanges_too_much_has_a_regret_where_links_may_be_slower(asked):
    """A plan that is best where links cost nothing costs more than another one where they are a standard error slow."""
    problem, model = asked
    free = {name: 1e9 for name in RATES if name.endswith("_hosts_gbps")}
    rates = {n: dataclasses.replace(CARD.rates[n], value=v) for n, v in free.items()}
    blind = dataclasses.replace(CARD, rates={**CARD.rates, **rates}).cost_model().for_problem(problem)
    plan = search(problem, blind)
    [ops, links] = plan_doubts(price_plan(plan, problem, model), problem, model, search)
    names, _ = MEASUREMENTS["collectives"]
    slow = model.with_rates_off(names, 1)
    other = search(problem, slow)
    saved = 1 - predicted_total_ms(lower(other, problem), slow) / predicted_total_ms(
        lower(plan, problem), slow
    )
    assert links.regret >= saved - 1e-12 and links.band > 0 and ops.band > 0


def test_slower_rates_make_a_step_longer_and_faster_ones_shorter(asked):
    problem, model = asked
    workload = lower(search(problem, model), problem)
    for names, _ in MEASUREMENTS.values():
        slow, same, fast = (
            predicted_total_ms(workload, model.with_rates_off(names, by)) for by in (1, 0, -1)
        )
        assert same == pytest.approx(predicted_total_ms(workload, model)) and slow > same > fast


def test_a_trained_model_has_no_doubts_of_a_profile(asked):
    problem, _ = asked
    model = AnalyticModel(problem.setting(CARD.name))
    assert plan_doubts(price_plan(search(problem, model), problem, model), problem, model, search) == ()
