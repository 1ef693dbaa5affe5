"""Samples are kept as they come, whatever ends the measuring. What is lacking is wanted, and no more."""

import itertools
import threading

import pytest

from shardcore.measure import run


def alone(sample):
    return [sample]


def test_what_is_lacking_is_wanted_and_has_no_sample_or_is_asked_for_again():
    wanted = [(key, key.upper()) for key in "abcde"]
    assert list(run.lacking(wanted, {"a", "b", "d"})) == ["C", "E"]
    assert list(run.lacking(wanted, {"a", "b", "d"}, again=2)) == ["A", "B", "C", "E"]
    endless = run.lacking(((str(i), i) for i in itertools.count()), {"0"})
    assert next(endless) == 1


def test_what_has_finished_is_written_though_no_part_is_full(monkeypatch):
    monkeypatch.setattr(run, "KEEP_EVERY_S", 0.01)
    written, wrote = [], threading.Event()

    def write(some):
        written.append(list(some))
        wrote.set()

    def samples():
        yield from (1, 2)
        assert wrote.wait(60)
        yield 3

    told = []
    run.keep(samples(), alone, 100, write, told.append)
    assert sum(written, []) == told == [1, 2, 3] and len(written) >= 2
    written.clear()
    monkeypatch.setattr(run, "KEEP_EVERY_S", 60)
    run.keep(iter(range(5)), alone, 2, write, told.append)
    assert written == [[0, 1], [2, 3], [4]]


def test_a_part_that_cannot_be_written_ends_the_measuring(monkeypatch):
    monkeypatch.setattr(run, "KEEP_EVERY_S", 0.01)
    tried = threading.Event()

    def write(some):
        tried.set()
        raise OSError("no space left")

    def samples():
        yield 1
        assert tried.wait(60)
        yield from itertools.count()

    with pytest.raises(OSError, match="no space left"):
        run.keep(samples(), alone, 10**9, write, lambda sample: None)
