"""Metrics of replays, for a model and for sharders, on figures worked out by hand."""

import math
import re

import numpy as np
import pytest

from shardcore.cost import replay_metrics
from shardcore.cost.replay_metrics import PlanReplay
from shardcore.io.measurements import TimingSpread


def problem(name, ms, predicted=None, noise_ms=0.0):
    """Rows of one problem from algorithm -> replayed ms; plans are named after algorithms."""
    return [PlanReplay(name, a, a, (predicted or ms)[a], value, noise_ms) for a, value in ms.items()]


TWO = [
    *problem(
        "a",
        {"portfolio": 10.0, "random": 15.0, "torchrec": 12.0, "dim_greedy": 20.0},
        {"portfolio": 9.0, "random": 15.0, "torchrec": 12.0, "dim_greedy": 16.0},
    ),
    *problem(
        "b",
        {"portfolio": 11.0, "random": 30.0, "torchrec": 10.0, "dim_greedy": 20.0},
        {"portfolio": 9.9, "random": 33.0, "torchrec": 12.0, "dim_greedy": 20.0},
    ),
]


def test_errors_and_bias_of_all_plans():
    found = replay_metrics.flat_metrics(TWO)
    assert found["mape"] == pytest.approx((10 + 0 + 0 + 20 + 10 + 10 + 20 + 0) / 8)
    assert found["bias"] == pytest.approx((-10 - 20 - 10 + 10 + 20) / 8)
    assert found["problems"] == 2 and found["plans"] == 8


def test_regret_and_rank_correlation_are_within_problems():
    found = replay_metrics.quality_by_problem(TWO)
    assert found["regret"] == pytest.approx([0, 10]) and found["ours_regret"] == pytest.approx([0, 10])
    assert found["kendall_tau"] == pytest.approx([1, 2 / 3 * 1])
    assert found["error"] == pytest.approx([(10 + 20) / 4, (10 + 10 + 20) / 4])


def test_a_plan_that_several_algorithms_found_is_judged_once():
    rows = [PlanReplay("a", name, "same", 10.0, 20.0, 0.0) for name in ("portfolio", "neuroshard", "random")]
    rows.append(PlanReplay("a", "dim_greedy", "other", 40.0, 40.0, 0.0))
    assert len(replay_metrics.distinct_plans(rows)) == 2
    found = replay_metrics.flat_metrics(rows)
    assert (
        found["mape"] == pytest.approx(25) and found["plans"] == 2 and found["neuroshard_relative_cost"] == 1
    )


def test_a_problem_with_one_plan_has_no_rank_correlation():
    found = replay_metrics.quality_by_problem([PlanReplay("a", "portfolio", "p", 1.0, 2.0, 0.0)])
    assert math.isnan(found["kendall_tau"][0]) and found["regret"] == [0]
    assert "kendall_tau" not in replay_metrics.flat_metrics(
        [PlanReplay("a", "portfolio", "p", 1.0, 2.0, 0.0)]
    )


def test_pairs_within_noise_count_for_nothing():
    rows = problem("a", {"x": 10.0, "y": 10.5, "z": 20.0}, {"x": 10.5, "y": 10.0, "z": 20.0}, noise_ms=1.0)
    found = replay_metrics.quality_by_problem(rows)
    assert found["tau_beyond_noise"] == [1] and found["kendall_tau"] == pytest.approx([1 / 3])


def test_rivals_cost_and_losses():
    found = replay_metrics.compare_sharders(TWO)
    assert found["torchrec"].predicted == pytest.approx((12 / 9 + 12 / 9.9) / 2)
    assert found["torchrec"].cost.mean == pytest.approx((1.2 + 10 / 11) / 2)
    assert found["torchrec"].losses == pytest.approx({"b": 0.1})
    assert not found["dim_greedy"].losses and found["portfolio"].cost.mean == 1
    noisy = replay_metrics.compare_sharders(
        [*problem("a", {"portfolio": 11.0, "torchrec": 10.0}, noise_ms=1.0)]
    )["torchrec"]
    assert noisy.losses == {} and noisy.cost.low == -math.inf  # one problem says nothing of others
    for noise, lost in (
        (0.70, {"a": pytest.approx(0.1)}),
        (0.72, {}),
    ):  # both are uncertain: √2 × 0.71 ms is what differs
        rows = [*problem("a", {"portfolio": 11.0, "torchrec": 10.0}, noise_ms=noise)]
        assert replay_metrics.compare_sharders(rows)["torchrec"].losses == lost


def test_several_plans_of_an_algorithm_count_as_their_mean():
    rows = [PlanReplay("a", "portfolio", "p", 1.0, 10.0, 0.0)]
    rows += [PlanReplay("a", "random", str(ms), 1.0, ms, 0.0) for ms in (20.0, 40.0)]
    assert replay_metrics.compare_sharders(rows)["random"].cost.mean == 3


def test_noise_by_hand():
    assert replay_metrics.median_noise_ms(TimingSpread(20.0, 19.0, 21.0, 16)) == pytest.approx(
        1.96 * 1.2533 / 1.349 * 2 / 4
    )


def test_noise_is_half_the_interval_of_the_median():
    rng, medians, noises = np.random.default_rng(2), [], []
    for _ in range(500):
        ms = rng.normal(20, 1, 40)
        q1, median, q3 = np.percentile(ms, [25, 50, 75])
        medians.append(median)
        noises.append(replay_metrics.median_noise_ms(TimingSpread(median, q1, q3, 40)))
    assert np.mean(np.abs(np.array(medians) - 20) < noises) == pytest.approx(0.95, abs=0.03)


PLANS = {"portfolio": 10.0, "torchrec": 11.0, "dim_greedy": 15.0, "random": 20.0}
BLIND = {"portfolio": 20.0, "torchrec": 15.0, "dim_greedy": 11.0, "random": 10.0}
FLAT = {"portfolio": 10.0, "torchrec": 11.0, "dim_greedy": 20.0, "random": 15.0}


def many(predicted, n=6):
    return [row for i in range(n) for row in problem(f"p{i}", PLANS, predicted)]


@pytest.mark.parametrize(
    "challenger, said",
    [
        (
            BLIND,
            r"regret of 100.0% against 0.0% on the same replays of 6 problems \(worse by 100.0% to 100.0%",
        ),
        (FLAT, "Kendall tau of 0.667 against 1.000"),
    ],
    ids=["regret", "ranks"],
)
def test_a_model_that_chooses_worse_is_refused_by_name(challenger, said):
    assert re.match(said, replay_metrics.challenger_rejection(many(challenger), many(PLANS)))
    assert (
        replay_metrics.challenger_rejection(many(PLANS), many(challenger)) is None
        and replay_metrics.challenger_rejection(many(PLANS), many(PLANS)) is None
    )


def test_few_problems_or_a_difference_by_chance_refuse_nobody():
    assert replay_metrics.challenger_rejection(
        many(BLIND, 4), many(PLANS, 4)
    ) is None and replay_metrics.challenger_rejection(many(BLIND, 5), many(PLANS, 5))
    mixed = [row for i in range(6) for row in problem(f"p{i}", PLANS, FLAT if i == 0 else PLANS)]
    assert replay_metrics.challenger_rejection(mixed, many(PLANS)) is None


def off_by(percent, problems, explained=0.07, noise=0.04):
    """Figures of four plans of each problem that a model predicts too dear by some percent, or cheap."""
    rows = [
        PlanReplay(f"p{i}", f"a{k}", f"a{k}", ms * (1 + percent[k] / 100), ms, noise * ms, explained * ms)
        for i in range(problems)
        for k, ms in enumerate((10.0, 12.0, 15.0, 20.0))
    ]
    return replay_metrics.flat_metrics(rows)


def test_what_errors_of_ops_and_exchanges_the_noise_and_chance_explain_is_known():
    found = off_by((40, 40, 40, 40), 5)
    usual = math.hypot(7.0, 4.0 * 0.8 / 1.96)
    assert found["explained_mape"] == pytest.approx(usual * (1 + 1.96 * 0.755 / 5**0.5))
    assert found["explained_bias"] == pytest.approx(usual * math.hypot(1, 1.96 * 1.25 / 5**0.5))
    assert replay_metrics.unexplained_error(found) == pytest.approx(40 - found["explained_bias"])
    # Noise and few problems explain more.
    assert off_by((9,) * 4, 5, noise=0.2)["explained_mape"] > found["explained_mape"]
    assert off_by((9,) * 4, 1)["explained_mape"] > found["explained_mape"]


@pytest.mark.parametrize(
    "percent, problems, beyond, said",
    [
        (
            (41, 39, 40, 40),
            5,
            True,
            "ops ran slower when they were measured than they do in steps: move data/meas",
        ),
        ((-41, -39, -40, -40), 5, True, "ops ran faster when they were measured"),
        ((30, -30, 30, -30), 5, True, "raise measure.step_samples in params.yaml, and `make run` again"),
        ((40, 40, 40, 40), 1, True, "on 4 plans of 1 problems, beyond what is expected: the model's"),
        ((6, -3, 5, -2), 5, False, "within what is expected: the model's errors on single ops and exchanges"),
        ((15, 14, 15, 16), 5, True, "beyond what is expected"),
        ((15, 14, 15, 16), 1, False, "within what is expected"),
    ],
    ids=["dear", "cheap", "scattered", "one problem", "usual", "bias", "bias of one problem"],
)
def test_the_verdict_says_error_bias_noise_and_what_to_do(percent, problems, beyond, said):
    found = off_by(percent, problems)
    words = replay_metrics.describe_accuracy(found)
    assert (
        said in words
        and bool(replay_metrics.unexplained_error(found)) is beyond
        and ("make run" in words) is beyond
    )
    assert words.startswith(f"error {found['mape']:.1f}% (bias {found['bias']:+.1f}%, noise 4.0%)")
    explained = "an error of up to {explained_mape:.1f}% and a bias of up to ±{explained_bias:.1f}%".format(
        **found
    )
    assert f"errors on single ops and exchanges, noise and chance explain {explained}" in words


def test_a_challenger_that_surely_errs_more_is_refused():
    near, far = ({name: by * ms for name, ms in PLANS.items()} for by in (1.02, 1.1))
    assert re.match(
        "error of 10.0% against 2.0% on the same", replay_metrics.challenger_rejection(many(far), many(near))
    )
    assert replay_metrics.challenger_rejection(many(near), many(far)) is None
