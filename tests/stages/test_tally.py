"""Samples that are done, in words."""

import pytest

from shardcore.measure.tally import Tally, duration, pace


@pytest.mark.parametrize(
    "seconds, message", [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_durations_are_said_in_a_unit_that_one_can_feel(seconds, message):
    assert duration(seconds) == message


def test_a_pace_says_what_is_left_where_the_number_is_known():
    assert pace(0, 400, 3.0) == "0 of 400" and pace(0, None, 3.0) == "0"
    assert pace(160, 400, 16.0) == "160 of 400, 10.0 a second, 24 s left"
    assert pace(3, None, 60.0) == "3, 3.0 a minute"


def test_a_tally_counts_by_device_and_says_the_share_of_time_in_kernels():
    now = [0.0]
    tally = Tally("compute", 10, clock=lambda: now[0])
    now[0] = 10.0
    tally.add("device 0", 3, kernel_s=8.0)
    tally.add("device 1", 2, kernel_s=6.0)
    tally.failed = 1
    assert (tally.share, tally.rate, tally.left_s) == (0.5, 0.5, 10.0)
    assert tally.by_device == {"device 0": 3, "device 1": 2}
    assert tally.line == "groups: 5 of 10, 0.5 a second, 10 s left (1 failed), 70% of the time in kernels"
    again = Tally("compute", None, again=True, clock=lambda: now[0])
    assert again.line == "groups that were disturbed: 0" and again.share == 0 and again.left_s is None
