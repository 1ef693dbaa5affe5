import pytest

from shardcore.core.access_statistics import MOST_RANGES, ManagedCollision, RowShares
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Table


@pytest.mark.parametrize(
    "lookups, unique, said",
    [
        ((), (), "have 0 lookups"),
        ((1.0,), (0.5, 0.5), "have 1 lookups and 2 unique; they need as many of each"),
        ((0.5, 0.6), (0.5, 0.5), "lookups that sum to 1.1; they need to be fractions that sum to 1"),
        ((0.5, 0.5), (1.5, -0.5), "unique that sum to 1; they need to be fractions"),
        ((float("nan"), 1.0), (0.5, 0.5), "lookups that sum to nan"),
        ((1 / (MOST_RANGES + 1),) * (MOST_RANGES + 1), (1.0,), "have 4097 lookups"),
    ],
)
def test_row_shares_that_are_none_are_refused(lookups, unique, said):
    with pytest.raises(ShardCoreError, match=said):
        RowShares(lookups, unique)


def test_only_ordered_tables_have_row_shares():
    shares = RowShares((0.25, 0.75), (0.5, 0.5))
    assert Table("t", 10, 4, 1.0, ordered=True, row_shares=shares).row_shares == shares
    with pytest.raises(ShardCoreError, match="table 't' has row_shares and ordered false; it needs ordered"):
        Table("t", 10, 4, 1.0, row_shares=shares)


def test_collision_bytes_that_are_none_are_refused():
    assert ManagedCollision(32).lookup_bytes == 0
    with pytest.raises(ShardCoreError, match="managed collision has row_bytes -1; it needs 0 to 1,048,576"):
        ManagedCollision(-1)
    with pytest.raises(ShardCoreError, match="managed collision has lookup_bytes 1048577"):
        ManagedCollision(32, (1 << 20) + 1)
