"""Traced steps in training: what is held out, when they correct a model, and what is on record then."""

import dataclasses
import json

import numpy as np
import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool
from traced_jobs import by_columns, factors_of, sample

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost import fit, traced_training, training
from shardcore.io import dataset, replays, traced_samples

CONFIG = fit.FitConfig(epochs=1, hidden=(4,))


def true_machine(model, compute=1.5, exchange=2.0):
    return model.corrected_by(factors_of(compute, exchange))


def others(given):
    return by_columns(given, 1)


def test_the_newest_step_of_a_job_is_held_out_and_of_a_job_with_one_every_second_rank(model):
    steps = [sample(model, number) for number in (3000, 1000, 2000)]
    alone = sample(model, 500, job="other")
    found = traced_training.split_samples([*steps, alone])
    assert [s.name for s in found.learned] == ["dlrm-00001000", "dlrm-00002000", "other-00000500"]
    assert [s.name for s in found.held_out] == ["dlrm-00003000", "other-00000500"]
    ranks = [[rank.rank for rank in s.steps[0].ranks] for s in (found.learned[-1], found.held_out[-1])]
    assert ranks == [[0], [1]]


@pytest.mark.parametrize("numbers", [(1000,), (1000, 2000)], ids=["ranks", "steps"])
def test_a_correction_saves_error_on_what_is_held_out_and_names_what_it_saw(model, numbers):
    truth = true_machine(model)
    steps = [sample(truth, n, plan) for n, plan in zip(numbers, (by_columns, others), strict=False)]
    found = traced_training.correct_model(model, steps)
    before, after = found.errors
    assert before > 25 and after < before / 4 and found.error_reduction == before - after
    assert traced_training.mean_percent_error(
        found.model, traced_training.split_samples(steps).held_out
    ) == pytest.approx(after)
    lineage = found.model.meta["provenance"]["job"]
    assert lineage["job"] == "dlrm" and lineage["traces"] == {"dlrm-00001000": {"0": "a", "1": "b"}}
    assert lineage["held_out_errors"] == [before, after] and "lookups forward" in lineage["factors"]


def test_traces_with_what_tracing_takes_count_as_without(model):
    """Steps of a machine as the model knows it, which tracing slows: nothing to correct."""
    found = traced_training.correct_model(model, [sample(model), sample(model, 2000)])
    assert found.errors[0] == pytest.approx(0, abs=0.5)


def test_a_model_is_left_as_it_is_where_its_correction_errs_more(model):
    steps = [sample(true_machine(model), 1000), sample(model, 2000)]
    found = traced_training.correct_model(model, steps)
    assert found.model is model and found.error_reduction == 0 and "left as it is" in found.words


def test_one_rank_alone_corrects_and_nothing_judges_it(model):
    one = sample(true_machine(model))
    step = dataclasses.replace(one.steps[0], ranks=one.steps[0].ranks[:1])
    found = traced_training.correct_model(model, [dataclasses.replace(one, steps=(step,))])
    assert found.errors is None and found.error_reduction == 0 and "no step is held out" in found.words


def test_a_step_corrects_a_model_once(model):
    steps = [sample(true_machine(model), n) for n in (1000, 2000)]
    once = traced_training.correct_model(model, steps)
    again = traced_training.correct_model(once.model, steps)
    assert again.model is once.model and again.error_reduction == 0 and again.errors[0] == once.errors[1]
    more = traced_training.correct_model(once.model, [*steps, sample(true_machine(model), 3000)])
    assert more.model.meta["provenance"]["job"]["steps"] == ["dlrm-00001000", "dlrm-00002000"]


def test_traces_without_lookups_leave_the_model_as_it_is(model):
    one = sample(model)
    ranks = tuple(
        dataclasses.replace(r, ms={k: v for k, v in r.ms.items() if not k.startswith("lookup")})
        for r in one.steps[0].ranks
    )
    step = dataclasses.replace(one.steps[0], ranks=ranks)
    found = traced_training.correct_model(model, [dataclasses.replace(one, steps=(step,))])
    assert found.model is model and "tell nothing of lookups" in found.words


def test_training_joins_traced_with_measured_samples(tmp_path):
    compute, comm = compute_samples(linear_law, 80), comm_samples(40)
    dataset.write_compute_samples(tmp_path, compute, dataset.write_pool(tmp_path, pool()))
    dataset.write_collective_samples(tmp_path, comm)
    measured = training.train(training.read_training_data(tmp_path, SETTING), CONFIG)
    digest = replays.dataset_digest(tmp_path)
    truth = true_machine(measured.model)
    for number, plan in ((1000, by_columns), (2000, others), (2000, others)):  # read twice: kept once
        traced_samples.add_traced_sample(tmp_path, sample(truth, number, plan))
    data = training.read_training_data(tmp_path, SETTING)
    assert len(data.traced) == 2 and "2 traced steps" in str(data)
    joined = training.train(data, CONFIG)
    before, after = joined.traced_errors
    assert after < before / 3 and "error on held-out traces" in joined.of_traces
    assert np.allclose(joined.model.weights["rates"], 1.5 * measured.model.weights["rates"], rtol=0.1)
    assert joined.model.meta["provenance"]["job"]["steps"] == ["dlrm-00001000"]
    assert joined.model.meta["provenance"]["data"] != digest
    assert replays.dataset_digest(tmp_path) != digest


def test_samples_of_another_setting_do_not_join(model, tmp_path):
    traced_samples.add_traced_sample(tmp_path, sample(model))
    other = Setting("other", SETTING.batch)
    assert traced_samples.traced_settings(tmp_path) == [SETTING]
    assert not traced_samples.read_traced_samples([tmp_path], other)
    [one] = traced_samples.read_traced_samples([tmp_path], SETTING)
    assert one == sample(model)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c | {"step_ms": 3.0}, "does not match its digest"),
        (lambda c: c | {"version": 9}, "version 9"),
        (lambda c: {k: v for k, v in c.items() if k != "digest"}, "digest"),
    ],
)
def test_an_edited_sample_is_refused_by_name(model, tmp_path, change, words):
    path = traced_samples.add_traced_sample(tmp_path, sample(model)) / "traced.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ShardCoreError, match=words) as error:
        traced_samples.read_traced_samples([tmp_path])
    assert "traced.json" in str(error.value)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: dataclasses.replace(s, steps=()), "no steps"),
        (lambda s: dataclasses.replace(s, step_ms=0.0), "step_ms 0.0"),
        (lambda s: with_rank(s, rank=7), "rank 7; its problem has 2 devices"),
        (lambda s: with_rank(s, ms={"odd": 1.0}), "part .*odd"),
        (lambda s: with_rank(s, ms={"ids": -1.0}), "times of"),
    ],
)
def test_what_is_no_step_is_refused(model, change, words):
    with pytest.raises(ShardCoreError, match=words):
        change(sample(model))


def with_rank(one, **changes):
    ranks = (dataclasses.replace(one.steps[0].ranks[0], **changes),)
    return dataclasses.replace(one, steps=(dataclasses.replace(one.steps[0], ranks=ranks),))
