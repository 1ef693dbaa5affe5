"""Training recovers known laws, leaves the test split alone, and refuses what it cannot use."""

import dataclasses
import math

import numpy as np
import pytest
from laws import SETTING, cache_law, comm_samples, compute_samples, linear_law, spread
from shapes import sends

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting, Shard, Table
from shardcore.cost import accuracy, collective_model, fit, quantiles
from shardcore.cost.profile import load_profile
from shardcore.cost.profile_model import ProfileModel
from shardcore.io import dataset, schema
from shardcore.io.measurements import CollectiveRequest, CollectiveSample, ComputeRequest, ComputeSample
from shardcore.step.access import access_share

QUICK = fit.FitConfig(epochs=3)
PROFILE = load_profile("nvidia-h100-sxm")


def test_linear_law_is_recovered():
    compute, comm = compute_samples(linear_law), comm_samples()
    model = fit.train(compute, comm, SETTING, fit.FitConfig(epochs=10)).model
    metrics = accuracy.evaluate_accuracy(
        model, accuracy.held_out_samples(compute), accuracy.held_out_samples(comm)
    )
    assert (
        metrics["compute_mape"] < 1
        and metrics["forward_compute_mape"] < 1
        and metrics["backward_compute_mape"] < 1
    )
    assert metrics["compute_kendall_tau"] > 0.99
    assert metrics["forward_comm_mape"] < 0.5 and metrics["backward_comm_mape"] < 0.5
    assert metrics["n_compute"] == len(accuracy.held_out_samples(compute))


def test_correction_learns_what_the_baseline_lacks():
    compute = compute_samples(cache_law, 300)
    trained = fit.train(compute, comm_samples(20), SETTING, fit.FitConfig(epochs=30))
    errors = [r["validation_mape"] for r in trained.curves if r["model"] == "compute"]
    assert errors[0] > 10  # epoch 0: the baseline
    assert (
        accuracy.evaluate_accuracy(trained.model, accuracy.held_out_samples(compute), [])["compute_mape"]
        < errors[0] / 3
    )
    assert trained.model.meta["metrics"]["compute_mape"] == pytest.approx(
        min(errors)
    )  # the best epoch's, not the last's


def split(samples, side):
    return [s for s in samples if dataset.split_of_sample(s.id) == side]


def test_the_band_is_of_samples_left_out_of_training():
    compute = compute_samples(linear_law, 300, noise=0.1)
    model = fit.train(compute, [], SETTING, QUICK).model
    unseen = split(compute, "validation")
    expected = quantiles.fit_error_quantiles(
        accuracy.predict_op_ms(model, unseen), np.array([s.total_ms for s in unseen])
    )
    # Encodings are rounded to 24 bits, those of the training are not.
    assert expected and all(
        model.weights[name] == pytest.approx(value, abs=1e-6) for name, value in expected.items()
    )


def test_few_groups_are_all_trained_on_in_the_end(monkeypatch):
    """Three or so of 60 groups would decide when to stop."""
    compute, fresh = compute_samples(cache_law, 60, noise=0.05), compute_samples(cache_law, 160)[60:]
    config = fit.FitConfig(epochs=20)
    both = fit.train(compute, [], SETTING, config).model
    seen = [s for s in compute if dataset.split_of_sample(s.id) != "test"]
    assert both.meta["ranges"]["op_bytes"] == fit.measured_ranges(seen, [])["op_bytes"]
    monkeypatch.setattr(fit, "_FEWEST_UNSEEN", 0)
    first = fit.train(compute, [], SETTING, config).model
    errors = [accuracy.evaluate_accuracy(model, fresh, [])["compute_mape"] for model in (both, first)]
    assert errors[0] < errors[1]
    assert both.meta["metrics"] == first.meta["metrics"]
    assert all(np.array_equal(both.weights[k], v) for k, v in first.weights.items() if k.startswith("band."))


def test_training_stops_when_it_no_longer_helps():
    """The law is the baseline's own: nothing helps, so the baseline is kept."""
    compute = compute_samples(linear_law, 100)
    trained = fit.train(compute, [], SETTING, fit.FitConfig(epochs=20, patience=3, learning_rate=0.5))
    errors = [r["validation_mape"] for r in trained.curves]
    assert len(errors) == 3 + 1 + int(np.argmin(errors)) < 20
    assert trained.model.meta["metrics"]["compute_mape"] == pytest.approx(min(errors))


@pytest.mark.parametrize("steps", [9, 10, 11])
def test_a_training_of_few_steps_ends(steps, monkeypatch):
    """The rate rises for a tenth of the steps: of 10, for none."""
    monkeypatch.setattr(fit, "_LEAST_STEPS", steps - 1)
    compute = compute_samples(linear_law, 60)
    trained = fit.train(compute, [], SETTING, fit.FitConfig(epochs=1))
    assert len(trained.curves) == 2


def test_ranges_are_the_smallest_and_largest_of_what_was_trained_on():
    a, b = Table("a", 100, 8, 2.0), Table("b", 1000, 64, 5.0, ordered=True)
    requests = [
        ComputeRequest((Shard.whole(a), Shard(b, 0, 500, 0, 16)), 64),
        ComputeRequest((Shard.whole(a),), 256),
    ]
    compute = [ComputeSample("id", SETTING, r, spread(1.0), spread(1.0), 0.0) for r in requests]
    comm = [
        CollectiveSample(
            "id",
            SETTING,
            CollectiveRequest(w, 252, (0.0,) * len(w)),
            *((spread(1.0),) * len(w),) * 2,
            (0.0,) * len(w),
            0.0,
        )
        for w in ((4, 8), (12, 0, 4))
    ]
    assert fit.measured_ranges(compute, comm) == {
        "shard_bytes": [3200, 32000],
        "shard_rows": [100, 500],
        "shard_width": [8, 16],
        "shard_features": [1, 1],
        "shard_pooling": [2, pytest.approx(5 * access_share(Shard(b, 0, 500, 0, 16)))],
        "op_shards": [1, 2],
        "op_bytes": [3200, 35200],
        "op_batch": [64, 256],
        "batch": [256, 256],
        "devices": [2, 3],
        "exchange_bytes": [0, 12 * 252 * 4],
    }
    assert "devices" not in fit.measured_ranges(compute, [])


def test_a_batch_was_measured_where_large_shards_ran_over_it_in_several_groups():
    """Replicas of small tables run over a device's share of the batch. That tells nothing of large tables."""
    small, large = Table("small", 100, 8, 2.0), Table("large", 1000, 8, 2.0)

    def groups(table, batch, n):
        request = ComputeRequest((Shard.whole(table),), batch)
        return [
            ComputeSample(f"{table.name} {batch} {i}", SETTING, request, spread(1.0), spread(1.0), 0.0)
            for i in range(n)
        ]

    whole = groups(large, 256, 1) + groups(small, 32, 20) + groups(large, 64, 7)
    assert fit.measured_ranges(whole, [])["batch"] == [256, 256]
    more = whole + groups(large, 128, 8) + groups(small, 64, 20)
    assert fit.measured_ranges(more, [])["batch"] == [64, 256]


@pytest.mark.long
def test_same_seed_same_model():
    compute, comm = compute_samples(cache_law, 80), comm_samples(20)
    a, b = (fit.train(c, comm, SETTING, QUICK).model for c in (compute, compute[::-1]))
    assert all(np.array_equal(a.weights[k], b.weights[k]) for k in a.weights)
    assert a.meta == b.meta


def test_test_split_is_not_looked_at():
    compute, comm = compute_samples(cache_law, 80), comm_samples(30)
    test = accuracy.held_out_samples(compute)
    wrong = [
        dataclasses.replace(s, forward=s.backward, backward=s.forward) if s in test else s for s in compute
    ]
    a, b = (fit.train(c, comm, SETTING, QUICK).model for c in (compute, wrong))
    assert all(np.array_equal(a.weights[k], b.weights[k]) for k in a.weights)


def test_curves_and_progress_agree():
    seen = []
    trained = fit.train(
        compute_samples(cache_law, 80),
        comm_samples(20),
        SETTING,
        QUICK,
        lambda model, epoch, values: seen.append({"model": model, "epoch": epoch, **values}),
    )
    assert seen == trained.curves
    assert [r["epoch"] for r in seen if r["model"] == "compute"] == [0, 1, 2, 3]
    assert all(math.isfinite(r["train_loss"]) and math.isfinite(r["validation_mape"]) for r in seen)


def test_failed_samples_are_skipped():
    compute, comm = compute_samples(linear_law, 80), comm_samples(20)
    failed = dataclasses.replace(compute[0], id="failed", forward=None, backward=None, error="out of memory")
    model = fit.train([*compute, failed], comm, SETTING, QUICK).model
    assert accuracy.evaluate_accuracy(model, [failed, compute[1]], comm[:1])["n_compute"] == 1


def test_too_few_samples():
    with pytest.raises(
        ShardCoreError, match="there are 9 measured groups for .*; training needs at least 50"
    ):
        fit.train(compute_samples(linear_law, 9), comm_samples(20), SETTING)
    with pytest.raises(ShardCoreError, match="there are 4 measured exchanges .*; training needs at least 10"):
        fit.train(compute_samples(linear_law, 60), comm_samples(4), SETTING)
    failed = [dataclasses.replace(s, error="x") for s in compute_samples(linear_law, 60)]
    with pytest.raises(ShardCoreError, match=r"there are 0 measured groups \(60 more failed\)"):
        fit.train(failed, comm_samples(20), SETTING)


def test_without_exchanges_a_model_prices_only_topologies_that_give_their_links():
    model = fit.train(compute_samples(linear_law, 60), [], SETTING, QUICK).model
    traffic, compute_ms = sends(all_to_all=[4096.0, 8192.0]), np.ones(2)
    with pytest.raises(ShardCoreError, match="give the topology's links .of level 'within_host'"):
        model.comm_cost(traffic, compute_ms, Topology((Device(1),) * 2))
    assert (
        model.comm_cost(
            traffic, compute_ms, Topology((Device(1),) * 2, links=make_links(within_host=1.0))
        ).forward_ms
        > 0
    ).all()


def test_samples_of_another_setting():
    other = Setting("law", 512)
    with pytest.raises(ShardCoreError, match="has another setting than the model: batch: 512 against 256$"):
        fit.train(compute_samples(linear_law, 60, other), comm_samples(20), SETTING)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"epochs": 0}, "epochs 0"),
        ({"learning_rate": 2.0}, "learning_rate 2.0"),
        ({"hidden": [0]}, r"hidden \(0,\)"),
        ({"lr": 0.1}, "unknown key 'lr'"),
        ({"epochs": "ten"}, "epochs is 'ten'"),
    ],
)
def test_bad_config(params, message):
    with pytest.raises(ShardCoreError, match=message):
        schema.build_record(fit.FitConfig, params, "train")


@pytest.mark.long
def test_shards_that_contend_are_learned():
    def contended(shards, batch):
        forward, backward = linear_law(shards, batch)
        return forward, backward * (1 + 0.05 * len(shards))

    compute = compute_samples(contended, 400)
    model = fit.train(compute, [], SETTING, fit.FitConfig(epochs=30)).model
    assert accuracy.evaluate_accuracy(model, accuracy.held_out_samples(compute), [])["compute_mape"] < 2


def exchanges(model):
    return {k: v for k, v in model.weights.items() if k.startswith("exchange")}


@pytest.fixture(scope="module")
def known():
    """A model to fine-tune."""
    return fit.train(compute_samples(cache_law, 200), comm_samples(), SETTING, fit.FitConfig(epochs=30)).model


@pytest.mark.long
def test_ops_that_are_slower_for_one_wide_shard_are_learned():
    """On GPUs, the widest table of an op decides which kernel runs."""

    def widest_law(shards, batch: int) -> tuple[float, float]:
        slower = 1.5 if max(s.width for s in shards) > 32 else 1.0
        return tuple(slower * ms for ms in linear_law(shards, batch))

    samples = compute_samples(widest_law, 1600)
    model = fit.train(samples, [], SETTING, fit.FitConfig(epochs=60, hidden=(16,))).model
    # 2.0% without counts of wide shards, 1.0% with them.
    assert accuracy.evaluate_accuracy(model, accuracy.held_out_samples(samples), [])["compute_mape"] < 1.5


@pytest.mark.long
def test_fine_tuning_begins_with_the_model_and_keeps_positive_what_is():
    """Shards that cost less the more there are pull contention below 0, where an op would cost less for a
    shard more."""
    known = fit.train(compute_samples(linear_law, 80), [], SETTING, QUICK).model
    same = fit.train(compute_samples(linear_law, 60), [], SETTING, QUICK, start=known)
    assert same.curves[0]["validation_mape"] < 1  # before the first step
    assert same.model.meta["config"]["hidden"] == [64, 64] and "start" in same.model.meta["provenance"]

    def sharing(shards, batch):
        return tuple(ms / len(shards) for ms in linear_law(shards, batch))

    for start in (None, known):
        trained = fit.train(compute_samples(sharing, 80), [], SETTING, fit.FitConfig(epochs=6), start=start)
        model, errors = trained.model, [r["validation_mape"] for r in trained.curves]
        assert np.argmin(errors) > 0  # it was moved
        for name in ("launch", "contention.0.weight", "contention.1.weight"):
            assert (model.weights[name] > 0).all(), name
        assert (model.weights["rates"] >= 0).all()


def test_fine_tuning_without_exchanges_keeps_all_that_is_known_of_them():
    known = fit.train(compute_samples(linear_law, 60), comm_samples(20), SETTING, QUICK).model
    of_ids = {name: np.array([0.05, 2e-6]) for name in collective_model.OWN_WORK}
    known = dataclasses.replace(known, weights={**known.weights, **of_ids})
    tuned = fit.train(compute_samples(linear_law, 60), [], SETTING, QUICK, start=known).model
    assert set(known.weights) == set(tuned.weights)
    for name in (*of_ids, *(k for k in known.weights if k.startswith("exchange"))):
        assert np.array_equal(tuned.weights[name], known.weights[name]), name


def test_fine_tuning_widens_what_is_known():
    known = fit.train(compute_samples(linear_law, 80), [], SETTING, QUICK).model
    few = [s for s in compute_samples(linear_law, 400) if s.request.batch == 64]
    tuned = fit.train(few, [], SETTING, fit.FitConfig(epochs=1), start=known).model
    assert (tuned.weights["condition_low"] <= known.weights["condition_low"]).all()
    assert (tuned.weights["condition_high"] >= known.weights["condition_high"]).all()
    for name in ("condition_mean", "condition_sd", "load_typical"):
        assert np.array_equal(tuned.weights[name], known.weights[name])


def profile_law(shards, batch):
    """A machine whose backward takes twice what the profile says."""
    model = ProfileModel(PROFILE, Setting(PROFILE.name, batch))
    sums = model.encode(shards).sum(0, keepdims=True)
    forward, backward, _ = model.op_part_ms(sums)[0].tolist()
    return forward, 2 * backward


def test_a_profile_is_a_start_for_few_samples():
    few, judged = compute_samples(profile_law, 24), compute_samples(profile_law, 200)[24:]
    model = fit.train(few, [], SETTING, QUICK, start=PROFILE).model
    assert accuracy.evaluate_accuracy(model, judged, [])["compute_mape"] < 5
    wanted = {
        "profile_digest": PROFILE.digest,
        "profile": "profile: published measurements, not of your machine",
    }
    assert wanted.items() <= model.meta["provenance"]["start"].items()
    assert model.setting == SETTING and "devices" not in model.meta["ranges"]
    with pytest.raises(ShardCoreError, match="there are 19 measured groups .* training needs at least 20"):
        fit.train(few[:19], [], SETTING, QUICK, start=PROFILE)


@pytest.mark.long
def test_fine_tuning_needs_fewer_samples(known):
    def slower(shards, batch):  # another machine: a third of the slowdown, and backward costs more again
        forward, backward = cache_law(shards, batch)
        return 3 * forward, 4 * backward

    machine = Setting("slower", 256)
    few, judged = compute_samples(slower, 60, machine), compute_samples(slower, 300, machine)[60:]
    tuned, alone = (
        fit.train(few, [], machine, fit.FitConfig(epochs=20), start=start).model for start in (known, None)
    )
    errors = [accuracy.evaluate_accuracy(m, judged, [])["compute_mape"] for m in (tuned, alone)]
    assert errors[0] < 0.7 * errors[1] and errors[0] < 5
    assert not any(v.any() for v in exchanges(tuned).values())  # another machine's say nothing
    again = exchanges(fit.train(compute_samples(cache_law, 60), [], SETTING, QUICK, start=known).model)
    assert again and all(np.array_equal(v, again[k]) for k, v in exchanges(known).items())
    told = dataclasses.replace(known, meta={**known.meta, "steps": 9})
    kept = fit.train(
        compute_samples(cache_law, 60), [], SETTING, fit.FitConfig(epochs=1), start=told
    ).model.meta
    assert kept["steps"] == 9 and kept["ranges"]["devices"] == known.meta["ranges"]["devices"] == [2, 4]
    others = fit.train(few, [], machine, fit.FitConfig(epochs=1), start=told).model.meta
    assert "steps" not in others and "devices" not in others["ranges"]
