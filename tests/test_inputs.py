"""Input distribution: which ids and lengths devices send each other before a step."""

import numpy as np
import pytest
from shapes import column, host_row, on_hosts, replica, row

from shardcore.inputs import InputTypes, input_bytes
from shardcore.types import Plan, Problem, Table, Zipf

TABLE = Table("t", 1000, 64, 5.0)


def problem(*tables: Table, hosts: str = "aabb") -> Problem:
    return Problem("p", tables or (TABLE,), on_hosts(hosts), 8 * len(hosts))


def test_a_whole_table_gets_all_its_ids():
    sent, received = input_bytes(Plan((column(TABLE, 1),)), problem())
    assert sent.tolist() == [8 * (5 * 8 + 4)] * 4
    assert received.tolist() == [0, 32 * (5 * 8 + 4), 0, 0]


def test_a_table_cut_by_columns_sends_its_ids_to_each_device():
    halves = Plan((column(TABLE, 0, 0, 32), column(TABLE, 2, 32, 64)))
    sent, received = input_bytes(halves, problem())
    assert sent.tolist() == [2 * 8 * (5 * 8 + 4)] * 4
    assert received.tolist() == [32 * (5 * 8 + 4), 0, 32 * (5 * 8 + 4), 0]
    on_one = Plan((column(TABLE, 0, 0, 32), column(TABLE, 0, 32, 64)))
    assert input_bytes(on_one, problem())[0].tolist() == [8 * (5 * 8 + 4)] * 4


def test_row_ranges_share_the_ids_but_each_has_all_lengths():
    given = problem()
    sent, received = input_bytes(Plan((row(TABLE, given.topology),)), given)
    assert sent == pytest.approx([8 * (5 * 8 + 4 * 4)] * 4)
    assert received == pytest.approx([32 * (5 * 8 / 4 + 4)] * 4)
    sent, received = input_bytes(Plan((host_row(TABLE, (2, 3)),)), given)
    assert sent == pytest.approx([8 * (5 * 8 + 2 * 4)] * 4)
    assert received == pytest.approx([0, 0, 32 * (5 * 8 / 2 + 4), 32 * (5 * 8 / 2 + 4)])


def test_popular_rows_come_first_in_an_ordered_table():
    table = Table("t", 1000, 64, 5.0, Zipf(1.2), ordered=True)
    given = problem(table)
    _, received = input_bytes(Plan((row(table, given.topology),)), given, InputTypes(length_bytes=0))
    assert received.sum() == pytest.approx(32 * 5 * 8)
    assert received[0] > 3 * received[1] > 3 * received[3]


def test_a_replica_needs_nothing_of_others():
    given = problem()
    assert not input_bytes(Plan((replica(TABLE, given.topology),)), given).any()


def test_ids_of_a_given_batch_are_counted():
    given = problem(hosts="aa")
    lookups = {(0, 500): np.array([3, 4]), (500, 1000): np.array([1, 0])}
    sent, received = input_bytes(Plan((row(TABLE, given.topology),)), given, InputTypes(4, 8),
                                 lambda shard: lookups[shard.row_lo, shard.row_hi])
    assert sent.tolist() == [4 * 4 + 2 * 8 * 8, 4 * 4 + 2 * 8 * 8]
    assert received.tolist() == [7 * 4 + 16 * 8, 1 * 4 + 16 * 8]
