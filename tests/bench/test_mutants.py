"""The defects that bench.mutants lists are defects of the code as it is."""

import dataclasses

import pytest

from bench import mutants


def test_each_listed_defect_is_one_of_the_code_as_it_is():
    assert not mutants.refused(mutants.listed())


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"old": "as it was before"}, "'as it was before' occurs 0 times"),
        ({"old": "def "}, "it has to occur once"),
        ({"new": "def listed"}, "is not changed"),
        ({"file": "bench/gone.py"}, "bench/gone.py"),
        ({"tests": ("tests/bench/test_gone.py",)}, "there is no tests/bench/test_gone.py"),
        (
            {"tests": ("tests/bench/test_mutants.py::test_gone",)},
            "there is no tests/bench/test_mutants.py::test",
        ),
    ],
    ids=str,
)
def test_one_that_cannot_be_applied_or_noticed_is_named(changed, said):
    defect = mutants.Defect(
        "bench/mutants.py",
        "def listed",
        "def unlisted",
        ("tests/bench/test_mutants.py",),
        "it has another name",
    )
    [line] = mutants.refused([dataclasses.replace(defect, **changed)])
    assert said in line and not mutants.refused([defect])
