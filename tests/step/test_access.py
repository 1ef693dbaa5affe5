"""Outputs of a shard."""

import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.types import Shard, Table
from shardcore.step.access import output_bytes, output_rows


def test_a_pooled_table_has_an_output_for_each_sample_and_feature():
    shard = Shard(Table("t", 10, 16, 1.5, features=3), 0, 5, 4, 16)
    assert output_rows(shard, 100) == 300 and output_bytes(shard, 100) == 300 * 12 * 4


@pytest.mark.parametrize("rows, expected", [((0, 1000), 150), ((0, 500), 75), ((999, 1000), 1)])
def test_a_sequence_has_an_output_for_each_lookup_of_its_rows(rows, expected):
    """And at least one, so that its op is never taken for none."""
    table = Table("t", 1000, 16, 1.5, Zipf(0.0), features=3, sequence=True)
    shard = Shard(table, *rows, 0, 8)
    assert output_rows(shard, 100) == expected and output_bytes(shard, 100) == expected * 8 * 4
