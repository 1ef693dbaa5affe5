"""Tables that differ in the precision of their weights: an op of each, priced by its own model."""

import dataclasses

import pytest
from laws import by_hand, pool
from shapes import column

import shardcore
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Shard
from shardcore.cost import composite, neural
from shardcore.cost.composite import Composite
from shardcore.cost.model import group_op_ms, price
from shardcore.io import model_files
from shardcore.search import SHARDERS, Budget
from shardcore.search.bound.lower_bound import prove_lower_bound
from shardcore.step.lower import lower

LONG = tuple(pool()[:6])
SHORT = tuple(dataclasses.replace(t, name=f"h{t.name}", precision="fp16") for t in pool()[6:12])
FOUR = Topology((Device(1 << 30),) * 4)


def of_precision(model, precision, times=1.0):
    weights = {**model.weights, **{name: times * model.weights[name] for name in ("rates", "launch")}}
    return dataclasses.replace(
        model, weights=weights, setting=dataclasses.replace(model.setting, precision=precision)
    )


@pytest.fixture(scope="module")
def both(model):
    """FP16 takes half of the time of FP32."""
    return Composite((of_precision(model, "fp16", 0.5), of_precision(model, "fp32")))


def problem(*tables, topology=FOUR):
    return Problem("p", tables, topology, 256)


def whole(tables):
    return [Shard.whole(t) for t in tables]


def test_an_op_of_each_precision_runs_with_a_launch_of_its_own(both):
    half, full = both.models
    together = group_op_ms([whole(LONG + SHORT), whole(LONG), whole(SHORT), []], both)
    assert together[1:3] == pytest.approx(
        [group_op_ms([whole(LONG)], full)[0], group_op_ms([whole(SHORT)], half)[0]]
    )
    assert together[0] == pytest.approx(together[1] + together[2]) and together[3] == 0


def test_forward_and_a_quantile_are_those_of_the_ops(both):
    half, full = both.models
    sums = both.encode(whole(LONG + SHORT)).sum(0)
    of_half, of_full = half.encode(whole(SHORT)).sum(0), full.encode(whole(LONG)).sum(0)
    parts = ((half, of_half), (full, of_full))
    assert both.op_part_ms(sums) == pytest.approx(sum(model.op_part_ms(own) for model, own in parts))
    sure = both.at_confidence(0.9)
    assert sure.op_ms(sums) == pytest.approx(sum(model.at_confidence(0.9).op_ms(own) for model, own in parts))
    only = both.encode(whole(LONG)).sum(0)
    assert sure.op_ms(only) == pytest.approx(full.at_confidence(0.9).op_ms(of_full))
    assert (
        full.at_confidence(0.9).bounding_model.confidence is None
        and full.at_confidence(0.05).bounding_model is None
    )


@pytest.mark.parametrize("name", ["anneal_columns", "anneal", "neuroshard", "size_greedy"])
def test_searches_place_tables_of_both(both, name):
    given = problem(*LONG, *SHORT)
    model = both.for_problem(given)
    given.require_setting(model.setting)
    plan = SHARDERS[name](given, model, seed=0, budget=Budget(evals=2000))
    assert plan.provenance["predicted_ms"] == pytest.approx(price(lower(plan, given), model).total_ms)
    one = Plan(tuple(column(t, 0) for t in given.tables))
    assert plan.provenance["predicted_ms"] < price(lower(one, given), model).total_ms


def test_no_plan_costs_less_than_the_bound(both):
    """An op may have one precision only, so the least launch of all counts."""
    given = problem(*LONG, *SHORT)
    plan = SHARDERS["anneal_columns"](given, both, seed=0, budget=Budget(evals=5000))
    assert 0.5 < prove_lower_bound(given, both, shared=()).proved_ms / plan.provenance["predicted_ms"] <= 1
    assert both.at_confidence(0.05).bounding_model is None


def test_a_problem_of_one_precision_has_that_ones_model(both):
    assert both.for_problem(problem(*SHORT)).setting.precision == "fp16"
    assert both.for_problem(problem(*LONG)).setting.precision == "fp32"
    assert both.for_problem(problem(*LONG, *SHORT)).setting.precision == "fp16+fp32"
    three = Composite((of_precision(both.models[0], "bf16"), *both.models))
    assert three.for_problem(problem(*LONG, *SHORT)).setting.precision == "fp16+fp32"
    with pytest.raises(
        SettingMismatch,
        match=r"has another setting than the cost model: precision: fp16\+fp32 against fp32; "
        r"give a model of each precision .*promote.also of params",
    ):
        problem(*LONG, *SHORT).require_setting(both.models[1].setting)


def test_one_folder_or_several_load(both, tmp_path):
    for model in both.models:
        neural.save(model, tmp_path / model.setting.precision)
    folders = [tmp_path / "fp32", tmp_path / "fp16"]
    assert shardcore.load_model(folders).setting == both.setting
    for one in (folders[0], str(folders[0]), folders[:1]):
        assert shardcore.load_model(one).setting == both.models[1].setting
    assert shardcore.load_model(tmp_path).setting == both.setting  # a subfolder for each precision
    assert model_files.model_digest(tmp_path) == "+".join(
        model_files.model_digest(tmp_path / name) for name in ("fp16", "fp32")
    )
    with pytest.raises(
        ShardCoreError, match="nothing holds no model.json; give the folder of a trained model by --model"
    ):
        shardcore.load_model(tmp_path / "nothing")


def test_what_is_beyond_the_measured_is_that_of_its_own_model(both):
    half, full = both.models
    ranges = {**half.meta["ranges"], "shard_rows": [1, 2]}
    narrow = dataclasses.replace(half, meta={**half.meta, "ranges": ranges})
    model = Composite((narrow, full))
    given = problem(*LONG, *SHORT, topology=Topology((Device(1 << 30),)))
    beyond = model.out_of_range(lower(Plan(tuple(column(t, 0) for t in given.tables)), given))
    assert [s for s in beyond if "rows" in s and s.startswith("table 'ht")] and not [
        s for s in beyond if "rows" in s and s.startswith("table 't")
    ]


def test_exchanges_are_priced_by_the_model_that_measured_them(both):
    half, full = both.models
    alone = {k: v for k, v in half.weights.items() if not k.startswith("exchange")}
    model = Composite((dataclasses.replace(half, weights=alone), full))
    given = problem(*LONG, *SHORT)
    workload = lower(Plan(tuple(column(t, i % 4) for i, t in enumerate(given.tables))), given)
    assert price(workload, model) == price(workload, both)
    assert model.out_of_range(workload) == both.out_of_range(workload)


def test_models_that_cannot_be_mixed_are_named(both, tmp_path):
    half, full = both.models
    with pytest.raises(SettingMismatch, match="models for fp32 and fp32 weights cannot be mixed"):
        Composite((full, full))
    adam = dataclasses.replace(full, setting=dataclasses.replace(full.setting, optimizer="adam"))
    with pytest.raises(
        SettingMismatch,
        match=r"models of two settings cannot be mixed \(optimizer: exact_sgd against adam\); they need the same",
    ):
        Composite((half, adam))
    for name, model in (("a", full), ("b", half)):
        neural.save(model, tmp_path / name)
    assert composite.load_models([tmp_path / "a"]).setting == full.setting
    assert composite.load_models([tmp_path / "a", tmp_path / "b"]).setting.precision == "fp16+fp32"
    assert model_files.model_digest(tmp_path / "a") != model_files.model_digest(tmp_path / "b")
    assert by_hand().setting == full.setting
