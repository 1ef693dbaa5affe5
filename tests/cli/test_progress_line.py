"""Progress of a command: silent at first, then a line that is rewritten, or one every few seconds."""

import io
import time

import pytest

from shardcore.cli.progress_line import COMPILING_S, report_text, showing_progress
from shardcore.core.progress import COMPILING, report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def until_shown(out: io.StringIO, text: str) -> None:
    until = time.monotonic() + 60
    while text not in out.getvalue() and time.monotonic() < until:
        time.sleep(0.01)


def test_short_work_shows_nothing():
    out = io.StringIO()
    with showing_progress(out=out, silent_s=3600):
        report("searching", 2.5, 10.0)
    assert out.getvalue() == ""


def test_long_work_shows_its_phase_best_cost_and_time_left():
    out = io.StringIO()
    with showing_progress(out=out, silent_s=0.05):
        report("annealing", 2.5, 3600.0)
        until_shown(out, "\n")
    line, *_ = out.getvalue().splitlines()
    assert line.startswith("0 s: annealing, best 2.500 ms, 3") and line.endswith(" s left")


def test_a_terminal_has_one_line_that_is_rewritten_and_taken_away_at_the_end():
    out = Terminal()
    with showing_progress(out=out, silent_s=0.0) as line:
        report("annealing")
        until_shown(out, "annealing")
        line.print_line("groups of 8: no plan")
        report("writing")
        until_shown(out, "writing")
    *_, last = out.getvalue().split("\r")
    assert last == "\x1b[K" and out.getvalue().count("\n") == 1
    assert "\rgroups of 8: no plan\x1b[K\n" in out.getvalue()


def test_compiling_is_announced_before_it_begins():
    out = io.StringIO()
    with showing_progress(out=out, silent_s=3600):
        report(COMPILING)
        report(COMPILING)
    assert out.getvalue() == (
        f"0 s: compiling the search, once in this installation, about {COMPILING_S} s of one core\n"
    )


def test_compiling_is_announced_once_in_all_parts_of_a_command():
    out = io.StringIO()
    for silent_s in (3600, 0.0):
        with showing_progress(out=out, silent_s=silent_s):
            for _ in range(3):
                report(COMPILING)
                time.sleep(0.02)
                report("annealing")
            report(COMPILING)
            time.sleep(0.02)
    assert out.getvalue().count(COMPILING) == 1


def test_a_failure_ends_it():
    out = Terminal()
    with pytest.raises(ValueError), showing_progress(out=out, silent_s=3600):
        raise ValueError
    assert out.getvalue() == "\r\x1b[K"


def test_time_left_goes_on_since_the_report_and_ends_at_0():
    assert report_text("annealing", None, 10.0, 7.0, 4.0) == "7 s: annealing, 6 s left"
    assert report_text("annealing", 1.0, 10.0, 70.0, 40.0) == "70 s: annealing, best 1.000 ms, 0 s left"
