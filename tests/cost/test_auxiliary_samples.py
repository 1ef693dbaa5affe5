"""Samples of other machines lend the shape of costs, and this machine's give the level."""

import dataclasses
import math
import re

import numpy as np
import pytest
from laws import COLD, SETTING, cache_law, comm_samples, compute_samples, linear_law, spread

from shardcore.core.types import Shard, Table
from shardcore.cost import accuracy, auxiliary_samples, collective_fit, fit, known_errors
from shardcore.cost.drift_correction import AuxiliarySamples, Measurements, rescale_sample
from shardcore.cost.metrics import mape
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample

CONFIG = fit.FitConfig(epochs=4, hidden=(4,))
QUICK = dataclasses.replace(CONFIG, epochs=1)  # where exchanges matter and ops do not
OTHER = dataclasses.replace(SETTING, hardware="other")


def measurements(compute, comm=()):
    return Measurements(dataset.most_precise_samples(compute), list(comm), [])


def auxiliary(compute, comm=(), name="datasets/x"):
    return AuxiliarySamples(name, "other", measurements(compute, comm))


def machine(small: float, large: float, samples):
    """The samples on a machine that takes so many times as long for the smallest and the largest ops."""
    ms = np.log([s.total_ms for s in samples])
    share = (ms - ms.min()) / np.ptp(ms)
    factors = np.exp((1 - share) * math.log(small) + share * math.log(large)).tolist()
    return [rescale_sample(s, by, by) for s, by in zip(samples, factors, strict=True)]


@pytest.fixture(scope="module")
def theirs():
    return compute_samples(cache_law, 200, OTHER, noise=0.03)


@pytest.fixture(scope="module")
def here():
    """Groups that the auxiliary machine does not have."""
    samples = {s.id: s for s in compute_samples(cache_law, 400, noise=0.03)}
    return list(samples.values())[200:]


def error(model, samples) -> float:
    return mape(accuracy.predict_op_ms(model, samples), np.array([s.total_ms for s in samples]))


@pytest.mark.parametrize(
    "small, large", [(1.2, 1.7), *(pytest.param(by, by, marks=pytest.mark.long) for by in (0.4, 2.5))]
)
def test_few_own_groups_bring_a_lenders_shape_to_their_level(theirs, here, small, large):
    mine = machine(small, large, here)
    own, test = measurements(mine[:60]), mine[60:]
    trained, _, words = auxiliary_samples.train_with_auxiliary_samples(
        own, SETTING, [auxiliary(theirs)], CONFIG, None
    )
    assert re.fullmatch(
        r"lends ops their shape: own groups err by .*% with it, .*% without \(cross-validation\)",
        words["datasets/x"],
    )
    alone = fit.train(own.compute, [], SETTING, CONFIG).model
    assert error(trained.model, test) < min(15, error(alone, test))
    # The error that the model states is one on own groups, and so are its intervals.
    stated = trained.model.meta["metrics"]
    assert stated["n_compute"] == (n := sum(dataset.split_of_sample(s.id) != "test" for s in own.compute))
    judged_by = trained.model.meta["judged_by"]
    assert judged_by == {"ops": f"in cross-validation over {n} own groups"}
    assert 0.5 < stated["compute_mape"] / error(trained.model, test) < 2
    low, high = accuracy.confidence_intervals(trained.model, test, 0.9)
    inside = [x <= s.total_ms <= y for s, x, y in zip(test, low, high, strict=True)]
    assert np.mean(inside) > 0.75


def test_a_machine_that_differs_by_one_factor_gets_it_and_nothing_else(theirs, here):
    mine = machine(0.5, 0.5, here)
    _, shape, _ = auxiliary_samples.train_with_auxiliary_samples(
        measurements(mine[:30]), SETTING, [auxiliary(theirs)], CONFIG, None
    )
    law = auxiliary_samples._AuxiliaryLaw("x", shape.law, theirs)
    again = law.scaled_shape(measurements(mine[:30]).compute)
    assert again.is_final and 0.9 < law.level_factor(mine) / law.level_factor(mine[:30]) < 1.1
    kept = fit.train(mine[:60], [], SETTING, CONFIG, start=again).model
    assert all(
        (kept.weights[name] == again.law.weights[name]).all() for name in ("network.0.weight", "rates")
    )


def test_a_lender_whose_timings_mean_nothing_lends_nothing(theirs, here):
    shuffled = np.random.default_rng(0).permutation(len(theirs))
    noise = [
        dataclasses.replace(s, forward=theirs[i].forward, backward=theirs[i].backward)
        for s, i in zip(theirs, shuffled, strict=True)
    ]
    own = measurements(here[:70])
    trained, shape, words = auxiliary_samples.train_with_auxiliary_samples(
        own, SETTING, [auxiliary(noise), auxiliary(theirs, name="datasets/y")], CONFIG, None
    )
    assert words["datasets/x"].startswith("lends ops nothing: own groups err by ")
    assert words["datasets/y"].startswith("lends ops their shape: own groups err by ")
    assert shape.law is not None
    assert error(trained.model, here[70:]) < 15


def test_without_own_groups_the_level_is_unknown_and_intervals_say_so(theirs, here):
    trained, _, words = auxiliary_samples.train_with_auxiliary_samples(
        measurements([]), SETTING, [auxiliary(theirs)], CONFIG, None
    )
    assert words["datasets/x"] == "lends ops their shape; 0 own groups tell the level"
    model = trained.model
    assert error(model, here) < 15 and model.meta["metrics"]["compute_mape"] > 30
    [said] = known_errors.error_warnings(model)
    assert re.match("Ops err by .*% with 0 own groups to tell this machine's level, .* times ", said)
    for times in (0.5, 1.0, 2.0):
        slower = machine(times, times, here)
        low, high = accuracy.confidence_intervals(model, slower, 0.9)
        assert np.mean([x <= s.total_ms <= y for s, x, y in zip(slower, low, high, strict=True)]) > 0.9
    # The auxiliary machine's law at the own level, no worse and no better.
    law = fit.train_op_model(measurements(theirs).compute, SETTING, dataclasses.replace(CONFIG, epochs=2))
    assert error(model, here) == pytest.approx(error(law, here))
    few = machine(2.0, 2.0, here)[:10]
    told = auxiliary_samples.train_with_auxiliary_samples(
        measurements(few), SETTING, [auxiliary(theirs)], CONFIG, None
    )[0].model
    assert error(told, machine(2.0, 2.0, here)) < 20
    low, high = (accuracy.confidence_intervals(m, here[:1], 0.9) for m in (told, model))
    assert low[1] / low[0] < high[1] / high[0] / 2


def sequence_group(rows: int, pooling: float, setting, batch: int = 256) -> ComputeSample:
    """A sequence that takes 20 times as long backward as its pooled op, and 0.5 ms more once."""
    table = Table("s", rows, 16, pooling, COLD, sequence=True)
    request = ComputeRequest((Shard.whole(table),), batch)
    forward, backward = linear_law(request.shards, batch)
    return ComputeSample(
        dataset.compute_id(setting, request),
        setting,
        request,
        spread(forward),
        spread(20 * backward + 0.5),
        0.0,
    )


@pytest.mark.parametrize("few", [0, 2])
def test_few_small_sequences_do_not_tell_what_large_ones_take_on_a_cpu(few):
    def ratio(hardware: str) -> float:
        setting = dataclasses.replace(SETTING, hardware=hardware)
        small = [sequence_group(rows, 0.2, setting, 64) for rows in (40_000, 50_000)]
        large = [sequence_group(rows, 40.0, setting) for rows in (60_000, 90_000)]
        own = [*compute_samples(linear_law, 60, setting), *small[:few]]
        model = fit.train_op_model(own, setting, CONFIG)
        return float(np.mean(accuracy.predict_op_ms(model, large) / [s.total_ms for s in large]))

    # Elsewhere nothing is known of them but what they took here, or what pooled ops do.
    assert 1 / 3 < ratio("cpu-x") < 3 and not 1 / 3 < ratio("x") < 3


def test_sequences_that_were_measured_often_take_what_they_took():
    setting = dataclasses.replace(SETTING, hardware="cpu-x")
    seen = [sequence_group(10_000 * i, 2.0 * i, setting) for i in range(1, 9)]
    for direction in (1.0, 0.1):
        known = [dataclasses.replace(s, backward=spread(direction * s.backward.median_ms)) for s in seen]
        model = fit.train_op_model([*compute_samples(linear_law, 60, setting), *known], setting, CONFIG)
        assert error(model, known) < 20


def scaled(samples, by: float):
    """Exchanges that take so many times as long."""

    def times(spreads):
        return spreads and tuple(x.scaled_by(by) for x in spreads)

    return [dataclasses.replace(s, forward=times(s.forward), backward=times(s.backward)) for s in samples]


def test_exchanges_of_a_kind_that_is_rare_here_join_at_its_level(here):
    kinds = {kind: comm_samples(60, collective=kind) for kind in ("all_to_all", "reduce_scatter")}
    theirs = [s for kind in kinds.values() for s in scaled(kind, 1.25)]
    own = [*kinds["all_to_all"][:20], *kinds["reduce_scatter"][:3]]
    test = kinds["reduce_scatter"][40:]
    compute = here[:60]
    found = auxiliary_samples.train_with_auxiliary_samples(
        measurements(compute, own), SETTING, [auxiliary([], theirs)], QUICK, None
    )[0].model
    predicted, measured = collective_fit.predicted_and_measured_ms(found.weights, test, "forward")
    assert mape(predicted, measured) < 10
    alone = collective_fit.predicted_and_measured_ms(collective_fit.fit_exchange_rates(own), test, "forward")[
        0
    ]
    assert mape(predicted, measured) < mape(alone, measured)


@pytest.mark.parametrize(
    "missing, measured", [("all_to_all", "reduce_scatter"), ("reduce_scatter", "all_to_all")]
)
def test_a_kind_of_exchange_that_was_not_measured_here_joins_at_the_level_of_the_others(missing, measured):
    theirs = [s for kind in (missing, measured) for s in scaled(comm_samples(60, collective=kind), 2.5)]
    weights = collective_fit.fit_exchange_rates(comm_samples(40, collective=measured), theirs)
    predicted, truth = collective_fit.predicted_and_measured_ms(
        weights, comm_samples(60, collective=missing)[40:], "forward"
    )
    assert mape(predicted, truth) < 10


def test_exchanges_that_mean_nothing_do_not_join(here):
    own = comm_samples(40)
    wrong = scaled(comm_samples(60)[::-1], 1.0)
    noise = [
        dataclasses.replace(s, forward=scaled([s], by)[0].forward)
        for s, by in zip(wrong, np.geomspace(0.05, 20, len(wrong)).tolist(), strict=True)
    ]
    _, shape, _ = auxiliary_samples.train_with_auxiliary_samples(
        measurements(here[:60], own), SETTING, [auxiliary([], noise)], QUICK, None
    )
    assert shape.comm == []


def test_few_groups_without_a_lender_of_ops_are_too_few(theirs):
    with pytest.raises(Exception, match="there are 29 measured groups.*needs at least 50"):
        auxiliary_samples.train_with_auxiliary_samples(
            measurements(compute_samples(linear_law, 30)), SETTING, [auxiliary(theirs[:9])], CONFIG, None
        )
