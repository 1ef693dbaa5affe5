"""Work on several problems, of which some fail without ending the others."""

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.measure.transport import NoRoom
from shardcore.stages.measure import Failures


def raising(error):
    def work():
        raise error

    return work


@pytest.fixture
def said():
    return []


@pytest.fixture
def failures(said):
    return Failures(lambda text, *values, **more: said.append((text % values, more)))


@pytest.mark.parametrize(
    "error, shown", [(ShardCoreError("rank 1 died"), "a: rank 1 died"), (KeyError("x"), "a: KeyError('x')")]
)
def test_a_failure_is_its_problems_and_the_others_go_on(failures, said, error, shown):
    assert not failures.attempt("a", raising(error))
    assert failures.attempt("b", lambda: None)
    [(text, more)] = said
    assert text == shown and more["extra"] == {"problem": "a"}
    assert (more["exc_info"] is None) == isinstance(error, ShardCoreError)
    with pytest.raises(ShardCoreError) as raised:
        failures.raise_if_any()
    assert str(raised.value) == f"1 problems could not be replayed: {shown}"


def test_all_that_failed_are_counted(failures):
    for name in "ab":
        failures.attempt(name, raising(ShardCoreError("it does not fit")))
    with pytest.raises(
        ShardCoreError, match=r"2 problems .*: a: it does not fit \(and 1 more, which the log"
    ):
        failures.raise_if_any()


def test_a_lack_of_devices_ends_all(failures):
    with pytest.raises(NoRoom, match="^2 ranks found no room$"):
        failures.attempt("a", raising(NoRoom("2 ranks found no room")))
    failures.raise_if_any()
