"""Samples are kept as they come, whatever ends the measuring. What is lacking is wanted, and no more."""

import itertools

import pytest

from shardcore.stages import measure as run


def alone(sample):
    return [sample]


def test_what_is_lacking_is_wanted_and_has_no_sample_or_is_asked_for_again():
    wanted = [(key, key.upper()) for key in "abcde"]
    assert list(run.requests_to_measure(wanted, {"a", "b", "d"})) == ["C", "E"]
    assert list(run.requests_to_measure(wanted, {"a", "b", "d"}, again=2)) == ["A", "B", "C", "E"]
    endless = run.requests_to_measure(((str(i), i) for i in itertools.count()), {"0"})
    assert next(endless) == 1


def test_what_has_finished_is_written_though_no_part_is_full(monkeypatch):
    monkeypatch.setattr(run, "KEEP_EVERY_S", -1)
    written, told = [], []

    def write(some):
        written.append(list(some))

    run.write_in_chunks(iter((1, 2, 3)), alone, 100, write, told.append)
    assert written == [[1], [2], [3]] and told == [1, 2, 3]
    written.clear()
    monkeypatch.setattr(run, "KEEP_EVERY_S", 60)
    run.write_in_chunks(iter(range(5)), alone, 2, write, told.append)
    assert written == [[0, 1], [2, 3], [4]]


def test_what_was_measured_before_an_error_is_written():
    def samples():
        yield 1
        raise KeyError("a rank died")

    written = []
    with pytest.raises(KeyError):
        run.write_in_chunks(samples(), alone, 100, written.extend, lambda sample: None)
    assert written == [1]


def test_a_part_that_cannot_be_written_ends_the_measuring(monkeypatch):
    monkeypatch.setattr(run, "KEEP_EVERY_S", -1)

    def write(some):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run.write_in_chunks(itertools.count(), alone, 10**9, write, lambda sample: None)
