"""Models that err more than usual say so, and models of one setting have different names."""

from dataclasses import replace

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law

from shardcore.cost import fit, known_errors
from shardcore.cost.analytic import AnalyticModel


@pytest.fixture(scope="module")
def model():
    return fit.train(compute_samples(linear_law, 60), comm_samples(20), SETTING,
                     fit.FitConfig(epochs=1)).model


def erring(model, compute: float, forward: float, backward: float):
    return replace(model, meta={**model.meta, "metrics": {
        "compute_mape": compute, "forward_comm_mape": forward, "backward_comm_mape": backward}})


def test_a_model_that_errs_much_more_than_usual_says_so(model):
    assert known_errors.worse_than_usual(erring(model, 5.0, 14.0, 11.0)) == []
    assert known_errors.errors_of(erring(model, 5.0, 51.0, 44.0)) == (0.05, 0.475)
    [said] = known_errors.worse_than_usual(erring(model, 5.0, 51.0, 44.0))
    assert said.startswith("Exchanges err by 48% on samples that the model was not trained on, 3.7 times ")
    [said] = known_errors.worse_than_usual(erring(model, 12.0, 14.0, 11.0))
    assert said.startswith("Ops err by 12%")
    assert known_errors.worse_than_usual(AnalyticModel(SETTING)) == []


def test_models_of_one_setting_are_told_apart_by_their_data(model):
    first, second = (replace(model, meta={**model.meta, "provenance": {"data": 4 * digits}})
                     for digits in ("01234567", "89abcdef"))
    assert known_errors.label(first) == f"{SETTING}, data 01234567"
    assert known_errors.label(second) == f"{SETTING}, data 89abcdef"
    assert known_errors.label(AnalyticModel(SETTING)) == f"{SETTING}, data unknown"
