"""Replays of several problems, of which some fail without ending the others."""

from contextlib import contextmanager

import pytest
from prefect.logging import disable_run_logger

from shardcore.core.errors import ShardCoreError
from tasks.replay import EachProblem


@pytest.fixture
def gangs():
    """Events of the gangs that were started."""
    return []


@pytest.fixture
def begin(gangs):
    @contextmanager
    def one():
        gangs.append("runs")
        yield lambda workloads: [f"gang {len(gangs)} of {w}" for w in workloads]
        gangs[-1] = "ended"

    return one


def test_one_gang_serves_all_and_begins_when_it_is_needed(begin, gangs):
    output = []
    with EachProblem(begin) as each:
        assert each.run("kept", lambda run: None) and gangs == []
        for name in "ab":
            assert each.run(name, lambda run, n=name: output.extend(run([n])))
        assert gangs == ["runs"]
    assert output == ["gang 1 of a", "gang 1 of b"] and gangs == ["ended"] and each.failed == {}


@pytest.mark.parametrize(
    "error, shown", [(ShardCoreError("rank 1 died"), "a: rank 1 died"), (KeyError("x"), "a: KeyError('x')")]
)
def test_a_failure_is_its_problems_and_the_next_has_another_gang(begin, gangs, error, shown):
    def fails(run):
        run([])
        raise error

    output = []
    with disable_run_logger(), pytest.raises(ShardCoreError) as raised, EachProblem(begin) as each:
        assert not each.run("a", fails)
        assert gangs == ["ended"]
        assert each.run("b", lambda run: output.extend(run(["b"])))
    assert str(raised.value) == f"1 of 2 problems could not be replayed: {shown}"
    assert output == ["gang 2 of b"] and gangs == ["ended"] * 2


def test_all_that_failed_are_counted_and_a_failure_before_a_gang_is_a_problems_too(begin, gangs):
    def fails(run):
        raise ShardCoreError("it does not fit")

    with (
        disable_run_logger(),
        pytest.raises(ShardCoreError, match=r"2 of 2 .*: a: it does not fit \(and 1 more, which the log"),
    ):
        with EachProblem(begin) as each:
            each.run("a", fails), each.run("b", fails)
    assert gangs == []


def test_where_no_gang_can_begin_none_is_tried_again():
    begun = []

    @contextmanager
    def begin():
        begun.append(1)
        raise ShardCoreError("2 ranks found no room")
        yield

    with pytest.raises(ShardCoreError, match="^2 ranks found no room$"), EachProblem(begin) as each:
        each.run("a", lambda run: run([]))
    assert begun == [1]
