"""The rest of a budget: evaluations, seconds, and reports of them."""

import math
import time
from contextlib import nullcontext

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.progress import OutOfTime, clock, report_to_listener, stopped_clock, tick
from shardcore.search import budget as budgets
from shardcore.search.budget import Budget, Meter


def used(budget: Budget, evals: int = 0, seconds: float = 0.0) -> Meter:
    """A meter that was started so long ago."""
    return Meter(budget, clock() - seconds, evals)


def test_evaluations_are_counted_down_in_units_of_work():
    meter = used(Budget(evals=100), evals=40)
    assert [
        meter.affordable_repeats(9, 20),
        meter.affordable_repeats(2, 20),
        meter.affordable_repeats(9, 61),
    ] == [3, 2, 0]
    assert meter.share_used() == 0.4 and meter.has_budget_left()
    assert (
        used(Budget(evals=100), 99).has_budget_left() and not used(Budget(evals=100), 100).has_budget_left()
    )
    over = used(Budget(evals=100), 150)
    assert over.share_used() == 1.0 and over.affordable_repeats(5, 10) == 0


def test_seconds_end_it_whatever_is_left_of_evaluations():
    assert used(Budget(evals=100, seconds=50.0), seconds=51).affordable_repeats(5, 1) == 0
    assert not used(Budget(seconds=50.0), seconds=51).has_budget_left()
    half = used(Budget(evals=100, seconds=1000.0), evals=10, seconds=500)
    assert (
        0.5 <= half.share_used() < 0.6
        and half.affordable_repeats(5, 1) == 5
        and 500 <= half.elapsed_s() < 600
    )
    nearer_evals = used(Budget(evals=100, seconds=1000.0), evals=90, seconds=500)
    assert nearer_evals.share_used() == 0.9


def test_what_takes_longer_than_there_is_time_left_is_not_begun():
    half = used(Budget(seconds=1000.0), seconds=500)
    repeats = [
        half.affordable_repeats(wanted, 1, each_s) for wanted, each_s in ((9, 100.0), (9, 501.0), (3, 1.0))
    ]
    assert repeats == [4, 0, 3]
    assert half.has_time(400) and not half.has_time(501)
    assert used(Budget(evals=100), evals=100).has_time(10**9)  # evaluations take no time


def test_time_left_follows_the_limit_that_ends_first():
    half = used(Budget(evals=100, seconds=1000.0), evals=10, seconds=500)
    assert 499 <= half.remaining_s() <= 500
    assert used(Budget(seconds=50.0), seconds=51).remaining_s() == 0
    assert (
        used(Budget(evals=100), seconds=5).remaining_s() is None and used(Budget(), 3).remaining_s() is None
    )


def test_a_search_that_ends_by_its_gains_does_not_know_when():
    meter = used(Budget(evals=1000, within=0.01), evals=500, seconds=50)
    meter.counted_from = (0.0, 1)
    assert meter.remaining_s() is None
    assert 949 <= used(Budget(seconds=1000.0, within=0.01), seconds=50).remaining_s() <= 950


def test_only_a_budget_without_an_end_gets_one():
    for given in (Budget(evals=5), Budget(seconds=5.0), Budget(evals=5, within=0.2)):
        assert given.with_default_end() is given
    ended = Budget(threads=2).with_default_end()
    assert (ended.evals, ended.within, ended.threads) == (budgets.MOST_EVALS, budgets.WITHIN, 2)
    assert Budget(within=0.2).with_default_end().within == 0.2
    with pytest.raises(ShardCoreError, match="within 1.5; it needs 0 to 1"):
        Budget(within=1.5)


def test_the_rate_of_evaluations_leaves_out_what_came_before_them_and_is_unknown_at_first():
    meter = used(Budget(evals=1000), evals=0, seconds=500)
    assert meter.remaining_s() is None
    meter.evals = 1  # after 500 s of other work
    assert meter.remaining_s() is None
    meter.evals, meter.started_s = 51, meter.started_s - 5
    assert meter.remaining_s() is None  # too few to know their rate
    meter.evals, meter.started_s = 401, meter.started_s - 35
    assert 59 <= meter.remaining_s() <= 61  # 400 took 40 s
    meter.evals = 1200
    assert meter.remaining_s() == 0


def test_seconds_while_the_clock_is_stopped_are_not_counted():
    began_s, meter = time.monotonic(), used(Budget(seconds=50.0))
    with stopped_clock():
        time.sleep(0.05)
    assert meter.elapsed_s() <= time.monotonic() - began_s - 0.05


def test_a_meter_reports_to_who_listens_and_to_no_other():
    heard, meter = [], used(Budget(evals=100, seconds=1000.0), evals=10, seconds=500)
    with report_to_listener(lambda *report: heard.append(report)):
        meter.report_progress("annealing", 2.5)
        with report_to_listener(None):
            meter.report_progress("not heard")
    meter.report_progress("not heard")
    [(phase, best_ms, left_s)] = heard
    assert (phase, best_ms) == ("annealing", 2.5) and 499 <= left_s <= 500


def test_work_ends_with_the_seconds_of_a_budget_but_for_some_to_spare():
    for meter, ends in (
        (used(Budget(seconds=50.0), seconds=51), True),
        (used(Budget(seconds=50.0), seconds=40), False),
        (used(Budget(evals=1), 5), False),
    ):
        with pytest.raises(OutOfTime) if ends else nullcontext(), meter.enforced_deadline():
            tick()
    with pytest.raises(OutOfTime), used(Budget(seconds=50.0), seconds=40).enforced_deadline(20.0):
        tick()


def test_without_limits_there_is_always_more():
    meter = used(Budget(), evals=10**12, seconds=10**6)
    assert meter.share_used() == 0.0 and meter.has_budget_left() and meter.affordable_repeats(7, 10**9) == 7
    before = clock()
    started = Budget(evals=3).start()
    assert before <= started.started_s <= clock() and started.evals == 0


@pytest.mark.parametrize(
    "given, field",
    [
        ({"evals": 0}, "evals 0"),
        ({"seconds": -1.0}, "seconds -1.0"),
        ({"seconds": math.inf}, "seconds inf"),
        ({"seconds": math.nan}, "seconds nan"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(given, field):
    with pytest.raises(ShardCoreError, match=f"budget has {field}; it needs "):
        Budget(**given)


@pytest.mark.parametrize(
    "text, most", [("150000 100000", 2), ("1 100000", 1), ("max 100000", 1 << 20), ("", 1 << 20)]
)
def test_a_container_with_a_quota_has_as_many_cores(text, most, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(budgets, "Path", lambda _: tmp_path / "cpu.max")
    monkeypatch.setattr(budgets.os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr(budgets.sys, "platform", "linux")
    assert Budget().max_threads == min(64, most) and Budget(threads=3).max_threads == 3


def test_work_that_has_begun_is_not_given_to_other_work():
    meter = used(Budget(evals=100), evals=40)
    meter.reserved = 50
    assert meter.affordable_repeats(9, 5) == 2 and meter.share_used() == 0.4
