"""Splits and metrics on samples."""

import dataclasses
import math

import pytest
from laws import SETTING, by_hand, comm_samples, spread

from shardcore.core.types import Shard, Table
from shardcore.cost import accuracy, collective_fit
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest, ComputeSample

SHARD = Shard.whole(Table("t", 1000, 32, 1.0))
ONE, TWO = (1.4 + 0.256, 2.1 + 0.768), (2.4 + 0.512, 4.1 + 1.536)
"""ms of one and two of these in an op by `by_hand`, forward and backward."""
SIDES = {"0000": "train", "0001": "train", "0002": "validation", "0014": "test"}


def sample(n: int, forward: float, backward: float, **fields) -> ComputeSample:
    """An op of n shards that took so many ms."""
    return ComputeSample(
        "id",
        SETTING,
        ComputeRequest((SHARD,) * n, SETTING.batch),
        spread(forward),
        spread(backward),
        0.0,
        **fields,
    )


def test_split_is_by_id_alone():
    sides = [dataset.split_of_sample(f"{i:016x}") for i in range(5000)]
    assert {s: round(sides.count(s) / 5000, 1) for s in set(sides)} == {
        "train": 0.8,
        "validation": 0.1,
        "test": 0.1,
    }
    # As it ever was, or what was held out of a model's training would be trained on by the next.
    assert {i: dataset.split_of_sample(i) for i in SIDES} == SIDES
    samples = [dataclasses.replace(sample(1, 1.0, 1.0), id=i) for i in SIDES]
    assert [s.id for s in accuracy.held_out_samples(samples)] == [
        i for i, side in SIDES.items() if side == "test"
    ]


def test_predict_is_forward_and_backward_together():
    samples = [sample(1, 1.0, 1.0), sample(2, 1.0, 1.0)]
    assert accuracy.predict_op_ms(by_hand(), samples) == pytest.approx([sum(ONE), sum(TWO)])
    assert accuracy.predict_op_ms(by_hand(), []).shape == (0,)
    low, high = accuracy.confidence_intervals(by_hand(), samples, 0.8)
    assert low == pytest.approx([sum(ONE) * math.exp(-0.4), sum(TWO) * math.exp(-0.4)])
    assert high == pytest.approx([sum(ONE) * math.exp(0.4), sum(TWO) * math.exp(0.4)])


def test_metrics_by_hand():
    """Failures count for nothing."""
    measured = [
        sample(1, ONE[0], ONE[1] / 2),
        sample(2, TWO[0] * 2.5, TWO[1]),
        sample(3, 1.0, 1.0, error="out of memory"),
    ]
    found = accuracy.evaluate_accuracy(by_hand(), measured, [])
    total = [ONE[0] + ONE[1] / 2, TWO[0] * 2.5 + TWO[1]]
    off = [sum(ONE) - total[0], sum(TWO) - total[1]]
    mean = 50 * (off[0] / total[0] - off[1] / total[1])
    # The 97.5% quantile of one degree of freedom, times the deviation of two values over √2.
    half = 12.7062 * 50 * abs(off[0] / total[0] + off[1] / total[1])
    # Measured are e^-0.38 and e^0.41 times as much as predicted; 80% lie within e^±0.4, 90% within e^±0.45.
    assert found == pytest.approx(
        {
            "n_compute": 2,
            "n_comm": 0,
            "forward_compute_mape": 30,
            "backward_compute_mape": 50,
            "compute_mape": mean,
            "compute_mape_low": 0,
            "compute_mape_high": mean + half,
            "compute_mse_ms2": (off[0] ** 2 + off[1] ** 2) / 2,
            "compute_kendall_tau": 1,
            "compute_coverage_50": 0,
            "compute_coverage_80": 50,
            "compute_coverage_90": 100,
            "compute_coverage_95": 100,
        }
    )
    comm = comm_samples(3, collective="all_reduce", payload="bf16")
    assert accuracy.evaluate_accuracy(by_hand(), [], comm) == {"n_compute": 0, "n_comm": 0}
    found = accuracy.evaluate_accuracy(by_hand(), [], comm_samples(3))
    directions = collective_fit.exchange_errors(
        by_hand().weights, comm_samples(3)
    ) | collective_fit.sample_counts(comm_samples(3))
    of_all = {k: v for k, v in found.items() if "all_to_all" in k}
    assert (
        found == {"n_compute": 0, "n_comm": 3, **of_all, **directions} and directions["n_forward_comm"] == 3
    )
    assert found["n_all_to_all"] == 3 and found["all_to_all_mape"] == pytest.approx(100)


def test_errors_in_words_have_the_number_of_samples_and_their_interval():
    found = {"n_compute": 31.0, "compute_mape": 5.73, "compute_mape_low": 4.2, "compute_mape_high": 7.26}
    assert accuracy.describe_error(found) == "5.7% (4.2 to 7.3%) on 31 groups"
    # Too few for a figure.
    assert (
        accuracy.describe_error({**found, "n_compute": 9.0}) == "4.2 to 7.3%, as only 9 groups are held out"
    )
    assert (
        accuracy.describe_error({"n_compute": 1.0, "compute_mape": 3.0})
        == "unknown, as 1 groups are held out"
    )
    assert accuracy.describe_error({"n_compute": 0.0}) == "unknown, as no groups are held out"
    assert accuracy.accuracy_summary({**found, "repeatability": 6.74}) == (
        "error on this machine's held-out samples: ops 5.7% (4.2 to 7.3%) on 31 groups, exchanges unknown, as no "
        "all-to-alls are held out; a timing itself is off by 6.7%"
    )
