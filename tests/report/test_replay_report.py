"""Replayed plans in words: measured against predicted, and each device."""

import pytest

from shardcore.core.step_cost import StepCost
from shardcore.io.measurements import StepSample, TimingSpread
from shardcore.report.replay_report import replay_text
from shardcore.report.text import MOST_DEVICES

MEASURED = StepSample(
    (1.0, 2.0),
    (1.0, 2.0),
    (0.5, 0.5),
    (0.5, 0.5),
    (2.0, 0.0),
    step=TimingSpread(5.5, 5.25, 6.0, 9),
    oversubscribed=False,
)
PREDICTED = StepCost((1.0, 1.5), (1.0, 1.5), (0.5, 0.5), (0.5, 0.5), (1.0, 0.0))


def lines(text):
    return [line.split() for line in text.splitlines()]


def test_each_plan_stands_with_what_was_measured_and_predicted_and_each_of_its_devices():
    found = lines(replay_text(["a.json", "b.json"], [MEASURED, MEASURED], [PREDICTED, PREDICTED]))
    for name in ("a.json", "b.json"):
        assert [name, "5.000", "4.000", "-20.0%", "5.250", "to", "6.000", "0"] in found
    rows = [line for line in found if line and line[0] in ("0", "1")]
    assert rows[:2] == [
        ["0", "2.000", "2.000", "0.500", "0.500", "0.000", "5.000", "2.000", "4.000"],
        ["1", "4.000", "0.000", "0.500", "0.500", "0.000", "5.000", "3.000", "4.000"],
    ]


def test_without_a_model_nothing_is_predicted():
    text = replay_text(["a.json"], [MEASURED])
    assert "predicted" not in text and "error" not in text and "5.250 to 6.000" in text


@pytest.mark.parametrize("n", [MOST_DEVICES, MOST_DEVICES + 3])
def test_of_many_devices_the_slowest_are_shown(n):
    ms = tuple(float(d) for d in range(n))
    many = StepSample(ms, ms, ms, ms, ms, step=TimingSpread(5.5, 5.25, 6.0, 9), oversubscribed=False)
    text = replay_text(["a.json"], [many])
    shown = [int(line[0]) for line in lines(text) if line and line[0].isdigit()]
    assert shown == list(range(n - MOST_DEVICES, n))
    assert ("and 3 more devices" in text) == (n > MOST_DEVICES)
