"""Models that err more than usual say so, and models of one setting have different names."""

from dataclasses import replace

import pytest
from laws import SETTING, trained

from shardcore import load_model
from shardcore.core.job import Job
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost import known_errors, neural
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.composite import Composite
from shardcore.cost.model import at_confidence, price
from shardcore.cost.profile import load_profile
from shardcore.step.lower import lower


@pytest.fixture(scope="module")
def model():
    return trained()


def erring(model, compute: float, forward: float, backward: float):
    return replace(
        model,
        meta={
            **model.meta,
            "metrics": {
                "compute_mape": compute,
                "forward_comm_mape": forward,
                "backward_comm_mape": backward,
            },
        },
    )


def test_a_model_that_errs_much_more_than_usual_says_so(model):
    assert known_errors.error_warnings(erring(model, 5.0, 14.0, 11.0)) == []
    assert known_errors.known_model_errors(erring(model, 5.0, 51.0, 44.0)) == (0.05, 0.475)
    [said] = known_errors.error_warnings(erring(model, 5.0, 51.0, 44.0))
    assert said.startswith("Exchanges err by 48% on the validation split, 3.7 times the 13% of a model of ")
    [said] = known_errors.error_warnings(erring(model, 12.0, 14.0, 11.0))
    assert said.startswith("Ops err by 12% on the validation split, 2.4 times the 5% of a model of ")
    # The samples are those of the error that is said.
    folds = "in cross-validation over 40 own groups"
    lent = erring(model, 12.0, 51.0, 44.0)
    lent = replace(lent, meta={**lent.meta, "judged_by": {"ops": folds}})
    ops, exchanges = known_errors.error_warnings(lent)
    assert ops.startswith(f"Ops err by 12% {folds}, 2.4 times ") and "on the validation split" in exchanges
    worst = replace(erring(model, 20.0, 14.0, 11.0), setting=replace(SETTING, precision="fp16"))
    [said] = known_errors.error_warnings(Composite((worst, lent)))[:1]
    assert said.startswith("Ops err by 20% on the validation split")
    assert known_errors.error_warnings(AnalyticModel(SETTING)) == []


def test_only_a_profile_s_steps_have_bands(model):
    profile = load_profile("nvidia-h100-sxm")
    given = Problem(
        "p", (Table("a", 100, 16, 2.0),), profile.topology(1, 1), 256, job=Job(dense_mflops=32.06)
    )
    workload = lower(Plan((Placement("column", Shard.whole(given.tables[0]), (0,)),)), given)
    by_profile = profile.cost_model().for_problem(given)
    whole, embeddings = known_errors.error_bands(by_profile, workload) or (0, 0)
    cost = price(workload, by_profile)
    assert known_errors.error_bands_text(by_profile, workload) == (
        f" ±{whole:.0%}, of which the embeddings take {cost.total_ms - cost.dense_ms:.3f} ms ±{embeddings:.0%}"
    )
    assert known_errors.error_bands(model, workload) is None
    assert known_errors.error_bands_text(model, workload) == ""


def test_models_of_one_setting_are_told_apart_by_their_data(model):
    first, second = (
        replace(model, meta={**model.meta, "provenance": {"data": 4 * digits}})
        for digits in ("01234567", "89abcdef")
    )
    assert known_errors.model_label(first) == f"{SETTING}, data 01234567"
    assert known_errors.model_label(second) == f"{SETTING}, data 89abcdef"
    assert known_errors.model_label(AnalyticModel(SETTING)) == f"{SETTING}, data unknown"


def test_errors_and_names_are_those_of_the_trained_models_whatever_they_are_part_of(model, tmp_path):
    for precision, error in (("fp16", 40.0), ("fp32", 10.0)):
        neural.save(
            replace(erring(model, error, 13.0, 13.0), setting=replace(SETTING, precision=precision)),
            tmp_path / precision,
        )
    tables = Table("a", 100, 16, 2.0), Table("b", 100, 16, 2.0, precision="fp16")
    mixed = load_model(tmp_path)
    cached = Problem(
        "p",
        (replace(tables[0], load_factor=0.5), tables[1]),
        Topology((Device(1 << 30),) * 2, memory=(Memory("host", 1 << 40, 10.0),)),
        SETTING.batch,
    )
    for whole in (mixed, mixed.for_problem(cached), at_confidence(mixed, 0.9)):
        assert known_errors.known_model_errors(whole) == pytest.approx((0.4, 0.13))
        assert "fp16+fp32" in known_errors.model_label(whole)
    alone = replace(cached, tables=cached.tables[:1])
    assert known_errors.known_model_errors(mixed.for_problem(alone)) == pytest.approx((0.1, 0.13))
