"""Samples that are done, in words."""

import pytest

from shardcore.core.progress import report, report_to_listener
from shardcore.measure import tally as tallies
from shardcore.measure.tally import Tally, duration_text, progress_text
from shardcore.stages.progress import StageWork


@pytest.mark.parametrize(
    "seconds, message", [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_durations_are_said_in_a_unit_that_one_can_feel(seconds, message):
    assert duration_text(seconds) == message


def test_a_pace_says_what_is_left_where_the_number_is_known():
    assert progress_text(0, 400, 3.0) == "0 of 400" and progress_text(0, None, 3.0) == "0"
    assert progress_text(160, 400, 16.0) == "160 of 400, 10.0 a second, 24 s left"
    assert progress_text(3, None, 60.0) == "3, 3.0 a minute"


def test_a_tally_counts_by_device_and_says_the_share_of_time_in_kernels():
    now = [0.0]
    tally = Tally("compute", 10, clock=lambda: now[0])
    now[0] = 10.0
    tally.add("device 0", 3, kernel_s=8.0)
    tally.add("device 1", 2, kernel_s=6.0)
    tally.failed = 1
    assert (tally.done_share, tally.samples_per_s, tally.remaining_s) == (0.5, 0.5, 10.0)
    assert tally.by_device == {"device 0": 3, "device 1": 2}
    assert (
        tally.progress_line
        == "groups: 5 of 10, 0.5 a second, 10 s left (1 failed), 70% of the time in kernels"
    )
    again = Tally("compute", None, again=True, clock=lambda: now[0])
    assert (
        again.progress_line == "groups that were disturbed: 0"
        and again.done_share == 0
        and again.remaining_s is None
    )


class Shown:
    """A stage's progress: (share, line) of each report."""

    def __init__(self):
        self.lines = []

    def show(self, tally):
        self.lines.append((tally.done_share, tally.progress_line))


def test_no_work_is_done_at_once():
    """A folder without problems is published, too."""
    StageWork(progress := Shown(), "problems", 0)
    assert progress.lines == [(1.0, "problems: 0 of 0")]


def test_work_says_how_far_it_is_and_what_its_present_part_reports(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tallies.Tally.__init__, "__defaults__", (False, lambda: now[0]))
    work = StageWork(progress := Shown(), "problems", 4)
    with report_to_listener(work.show_phase):
        report("annealing", 2.5)
    report("not heard")
    now[0] = 30.0
    work.show_done(1)
    assert progress.lines == [
        (0.0, "problems: 0 of 4"),
        (0.0, "problems: 0 of 4; annealing, best 2.500 ms"),
        (0.25, "problems: 1 of 4, 2.0 a minute, 2 min left"),
    ]
