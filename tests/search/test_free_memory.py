"""FreeMemory: a shard fits where its last byte does, and nowhere else."""

import pytest
from shardcore.search.free_memory import FreeMemory

from shardcore.constraints import Constraints
from shardcore.layouts import WHOLE_ROWS
from shardcore.memory import bytes_as
from shardcore.topology import Device, Topology
from shardcore.types import Problem, Shard, Table


def problem(**constraints) -> Problem:
    tables = tuple(Table(name, 100_000, 64, 4.0) for name in "abc")
    return Problem("p", tables, Topology((Device(2**40), Device(2**40))), 64,
                   constraints=Constraints(**constraints))


def needed(given: Problem, *tables: Table) -> int:
    return sum(bytes_as(WHOLE_ROWS, Shard.whole(t), given) for t in tables)


@pytest.mark.parametrize("together", [False, True])
def test_a_shard_fits_to_the_byte(together):
    """By itself, and as the first of a group that is kept together, for which all of it needs memory."""
    given = problem(together=(("a", "b"),) if together else ())
    a, b, _ = given.tables
    exact = needed(given, a, b) if together else needed(given, a)
    assert FreeMemory(given, [exact, exact - 1]).fits(Shard.whole(a)).tolist() == [True, False]


def test_the_rest_of_a_group_follows_its_first_table():
    given = problem(together=(("a", "b"),))
    a, b, c = map(Shard.whole, given.tables)
    free = FreeMemory(given, [needed(given, *given.tables)] * 2)
    free.put(a, 1)
    assert free.fits(b).tolist() == [False, True]
    assert free.extra_bytes(b).tolist() == [0, 0]
    free.put(b, 1)
    assert free.left.tolist() == [needed(given, *given.tables), needed(given, given.tables[2])]
    assert free.fits(c).tolist() == [True, True]


def test_a_wider_shard_fits_to_the_byte():
    """Columns beside columns of the same table take the optimizer's state of their rows only once."""
    given = Problem("p", (Table("a", 100_000, 64, 4.0),), Topology((Device(2**40),)), 64, "rowwise_adagrad")
    table = given.tables[0]
    left, right = Shard(table, 0, table.rows, 0, 32), Shard(table, 0, table.rows, 32, 64)
    for spare, fits in ((0, True), (-1, False)):
        free = FreeMemory(given, [needed(given, table) + spare])
        free.put(left, 0)
        assert free.fits(right).tolist() == [fits]
