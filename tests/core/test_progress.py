"""Reports reach the listener, with the parts of the work that they come from."""

from types import SimpleNamespace

import pytest

from shardcore.core import progress
from shardcore.core.progress import (
    OutOfTime,
    deadline,
    iterate_with_progress,
    prefixed_phases,
    report,
    report_to_listener,
    tick,
)


def test_a_report_without_a_listener_does_nothing():
    report("searching", 1.0)


def test_phases_carry_the_names_of_the_parts_around_them():
    heard = []
    with report_to_listener(lambda *of: heard.append(of)):
        with prefixed_phases("2 hosts"), prefixed_phases("anneal"):
            report("annealing", 3.0, 9.0)
        report("writing")
    assert heard == [
        ("2 hosts: begins", None, None),
        ("2 hosts: anneal: begins", None, None),
        ("2 hosts: anneal: annealing", 3.0, 9.0),
        ("writing", None, None),
    ]


def test_a_part_that_fails_ends_too():
    heard = []
    with report_to_listener(lambda *of: heard.append(of)):
        with pytest.raises(ValueError), prefixed_phases("2 hosts"):
            raise ValueError
        report("writing")
    assert heard[-1] == ("writing", None, None)


@pytest.fixture
def clock(monkeypatch):
    """A clock that shows `now`."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "_stopped_s", 0.0)  # other tests may have compiled functions
    return clock


def test_a_tick_makes_the_last_report_again_once_it_is_old(clock):
    heard = []
    with report_to_listener(lambda *of: heard.append(of)):
        tick()  # nothing was reported yet
        report("encoding", 3.0, 9.0)
        tick()
        clock.now += 2
        tick()
        tick()
        report("encoding", 2.0)
        clock.now += 2
        tick()
    assert heard == [
        ("encoding", 3.0, 9.0),
        ("encoding", 3.0, 7.0),
        ("encoding", 2.0, None),
        ("encoding", 2.0, None),
    ]


def test_the_report_of_one_listener_is_not_made_again_to_another(clock):
    heard = []
    report("before")
    with report_to_listener(lambda *of: heard.append(of)):
        clock.now += 2
        tick()
    assert heard == []


def test_long_loops_end_when_their_time_is_over(clock):
    done = []
    with pytest.raises(OutOfTime), deadline(10.0), deadline(20.0):  # the earlier end counts
        for item in iterate_with_progress(range(1000)):
            done.append(item)
            clock.now += 0.02
    assert 500 <= len(done) < 1000
    assert list(iterate_with_progress("abc")) == ["a", "b", "c"]
