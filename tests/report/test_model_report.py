"""Figures and card of a cost model, from data alone."""

import dataclasses
import re

import numpy as np
import pytest
from laws import SETTING, cache_law, comm_samples, compute_samples

from shardcore.cost import fit, replay_metrics
from shardcore.cost.study import LearningCurve
from shardcore.report import model_report

CURVE = LearningCurve(((100, 11.0), (200, 8.0), (400, 6.0)), 1.0, 100.0, 0.5)
RNG = np.random.default_rng(0)
MEASURED = np.exp(RNG.normal(0, 1, 300))
PREDICTED = MEASURED * np.exp(0.1 * RNG.normal(size=300))


def model(comm):
    trained = fit.train(compute_samples(cache_law, 60), comm, SETTING, fit.FitConfig(epochs=1)).model
    return dataclasses.replace(
        trained,
        meta={
            **trained.meta,
            "provenance": {
                "data_version": "md5-of-the-data",
                "git_commit": "abc",
                "lent": {
                    "datasets/x": {"hardware": "other", "digest": "of-x", "words": "lends ops their shape"}
                },
            },
        },
    )


STUDIED = model_report.StudyResults(
    {
        "train": {"compute_mape": 4.0, "n_compute": 48.0},
        "test": {"compute_mape": 5.25, "n_compute": 6.0, "compute_coverage_90": 88.0, "repeatability": 3.125},
    },
    7.5,
    3.125,
    CURVE,
)


REPLAYS = [
    replay_metrics.PlanReplay(f"p{i}", name, name, ms, ms * by, 0.1)
    for i, ms in enumerate((10.0, 30.0))
    for name, by in ((replay_metrics.OURS, 1.0), ("random", 1.5), ("torchrec", 1.2))
]


def texts(figure):
    from matplotlib.text import Text

    return " | ".join(t.get_text() for t in figure.findobj(Text))


FIGURES = {
    "predictions": (
        lambda: model_report.prediction_scatter_figure(MEASURED, PREDICTED, "title"),
        "300 groups",
    ),
    "replays": (lambda: model_report.replay_scatter_figure(REPLAYS, "title"), "6 plans of 2 problems"),
    "replays of one plan": (
        lambda: model_report.replay_scatter_figure(REPLAYS[:1], "title"),
        "regret 0.0%",
    ),
}


def test_figures_say_their_errors():
    found = texts(
        model_report.prediction_scatter_figure(np.array([1.0, 2.0, 4.0]), np.array([1.1, 1.8, 4.4]), "title")
    )
    assert "3 groups\nmean absolute error 10.0%\nKendall tau 1.000" in found
    found = texts(model_report.replay_scatter_figure(REPLAYS, "title"))  # too little by none, 1/3 and 1/6
    assert "mean absolute error 16.7%\nKendall tau within problems 0.00\nregret 0.0%" in found


@pytest.mark.parametrize("make, said", FIGURES.values(), ids=FIGURES)
def test_figures_draw_and_say_what_they_show(make, said, tmp_path):
    figure = make()
    figure.savefig(tmp_path / "f.png", dpi=50)
    assert (tmp_path / "f.png").stat().st_size > 3000 and said in texts(figure) and "title" in texts(figure)


def test_doubling_says_the_gain_beside_the_floor():
    gain = "Twice the groups (800 instead of 400) would take 1.5 points off the learning curve's held-out error of 6.0%"
    gain += ", of own groups alone"
    assert model_report.doubling_gain_sentence(CURVE, 3.125) == f"{gain}; a timing itself is off by 3.1%."
    assert model_report.doubling_gain_sentence(CURVE, None) == f"{gain}."


def test_the_card_says_what_it_was_trained_on_where_to_trust_it_how_good_it_is_and_how_to_use_it():
    card = model_report.model_card(model(comm_samples(20)), STUDIED, "shardcore-cost-law")
    for said in (
        "Valid for (law, batch 256, fp32, exact_sgd)",
        "| measurements, DVC version | md5-of-the-data |",
        "| datasets/x (other), version of-x | lends ops their shape |",
        "| groups: train / validation / test | ",
        "- a shard is 4 to 64 columns wide",
        "- a device runs 1 to 8 shards in one op",
        "- a job has 2 to 4 devices",
        "| error of a group's ms | 4.0% | 5.2% |",
        "| within their 90% interval | - | 88% |",
        "On groups of tables kept aside a model trained without them errs by 7.5%",
        "The test split is held out",
        "Own groups are those of train and validation",
        "off by 3.1%",
        "Twice the groups",
        "models:/shardcore-cost-law@champion",
        '"batch": 256',
        "links between hosts, as those of other levels",
    ):
        assert said in card, said
    assert len(card) < 5000 and "NAME" not in card


def test_the_card_says_what_exchanges_take_in_steps():
    told = model(comm_samples(20))
    weights = {
        **told.weights,
        "exchange_in_step_all_to_all_forward": np.array([1.4]),
        "exchange_in_step_reduce_scatter_backward": np.array([0.75]),
    }
    card = model_report.model_card(
        dataclasses.replace(told, weights=weights, meta={**told.meta, "steps": 1200}), STUDIED, "m"
    )
    assert "of what they take alone | 1,200: all-to-all forward 1.40, reduce-scatter backward 0.75 |" in card


def test_the_card_of_little_data_leaves_out_what_nobody_knows():
    card = model_report.model_card(model([]), model_report.StudyResults({"test": {"compute_mape": 5.0}}), "m")
    assert "all exchanges, from the links' bandwidth" in card and "None" not in card and "Twice" not in card
    assert not re.search(r"a job has [^.]* devices", card)


def test_all_figures_have_a_name_each():
    flat = STUDIED.flat_metrics()
    assert (
        flat["test/compute_mape"] == 5.25
        and flat["test/unseen_tables_compute_mape"] == 7.5
        and flat["test/repeatability"] == 3.125
    )
    assert flat["learning_curve/gain"] == pytest.approx(100 / 20 - 100 / 800**0.5)
    assert set(model_report.StudyResults({"test": {}}).flat_metrics()) == set()
