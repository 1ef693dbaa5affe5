"""Seconds that each stage of a refresh usually takes, for the time left of all.

The rates are those of one `make run` on two cores of an AMD EPYC (Zen 5) beside other work, 26 November 2026, commit
49e2cd87. `tasks.refresh.left_s` corrects them by the stages that have ended.
"""

from __future__ import annotations

from shardcore.stages.measure import USUAL_S, MeasureConfig
from tasks import params, paths
from tasks.evaluate import EvaluateConfig
from tasks.train import TrainConfig

START_S = 12.0
"""Start of a Ray cluster and its actors."""
EPOCHS_S = 0.2
"""An epoch on this run's samples."""
SHIPPED_S = 1.0
"""An epoch on these and a shipped dataset."""
COMPARED_S, REPLAYED_S, PUBLISHED_S = 3.5, 10.0, 10.0
"""A problem whose sharders are compared, whose plans are replayed, and for which a plan is published."""


def usual_s() -> dict[str, float]:
    """Seconds by stage, with the parameters of params.yaml and nothing done before."""
    measure = params.section("measure", MeasureConfig)
    train = params.section("train", TrainConfig)
    evaluate = params.section("evaluate", EvaluateConfig)
    samples = {
        "compute": measure.compute_samples,
        "comm": measure.comm_samples,
        "steps": measure.step_samples,
    }
    return {
        "tables": 7.0,
        "measure": START_S + sum(USUAL_S[kind] * n for kind, n in samples.items()),
        "train": 7.0 + train.epochs * (SHIPPED_S if train.datasets else EPOCHS_S),
        "train_policy": 120.0,
        "evaluate": START_S + COMPARED_S * evaluate.problems + REPLAYED_S * evaluate.replay_problems,
        "promote": 5.0,
        "publish": PUBLISHED_S * len(list(paths.PROBLEMS.glob("*.json"))),
    }
