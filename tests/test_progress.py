"""Reports reach the listener, with the parts of the work that they come from."""

import pytest

from shardcore.progress import listening, part, report


def test_a_report_without_a_listener_does_nothing():
    report("searching", 1.0)


def test_phases_carry_the_names_of_the_parts_around_them():
    heard = []
    with listening(lambda *of: heard.append(of)):
        with part("2 hosts"), part("anneal"):
            report("annealing", 3.0, 9.0)
        report("writing")
    assert heard == [("2 hosts: begins", None, None), ("2 hosts: anneal: begins", None, None),
                     ("2 hosts: anneal: annealing", 3.0, 9.0), ("writing", None, None)]


def test_a_part_that_fails_ends_too():
    heard = []
    with listening(lambda *of: heard.append(of)):
        with pytest.raises(ValueError), part("2 hosts"):
            raise ValueError
        report("writing")
    assert heard[-1] == ("writing", None, None)
