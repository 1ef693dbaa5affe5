"""Hash tables: where raw ids go."""

import numpy as np
import pytest

from shardcore.core.access_statistics import ManagedCollision, RowShares
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Problem, Shard, Table
from shardcore.report.heat_report import heat_table
from shardcore.step.access import access_share
from shardcore.step.kinds import shards_by_device
from shardcore.tables import hash_tables

IDS = np.array([0, 1, 5, 130, 250, 999, 1000, 1001, 1003, 123457])


@pytest.mark.parametrize(
    "input_size, buckets, n", [(0, 8, 4), (0, 4, 4), (1000, 8, 4), (1000, 4, 2), (999, 8, 2)]
)
def test_raw_ids_go_where_fbgemm_sends_them(input_size, buckets, n):
    torch = pytest.importorskip("torch")
    pytest.importorskip("fbgemm_gpu")
    lengths, sent, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths=torch.tensor([len(IDS)]),
        indices=torch.from_numpy(IDS),
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([-(-input_size // buckets)]),
        my_size=n,
        total_num_blocks=torch.tensor([buckets]),
        keep_orig_idx=True,
    )
    theirs = [part.tolist() for part in sent.split(lengths.tolist())]
    routing = "contiguous" if input_size else "round_robin"
    collision = ManagedCollision(8, buckets=buckets, routing=routing, input_size=input_size)
    device = hash_tables.buckets_of_ids(IDS, collision, n) * n // buckets
    assert [IDS[device == d].tolist() for d in range(n)] == theirs


def test_ids_that_share_a_factor_with_the_ranks_leave_most_of_them_idle():
    ids = 4 * np.arange(1000)
    shares = {
        routing: hash_tables.routed_row_shares(ids, ManagedCollision(8, routing=routing, input_size=4000), 4)
        for routing in ("round_robin", "contiguous", "hashed")
    }
    assert shares["round_robin"] == RowShares((1.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0))
    assert shares["contiguous"].lookups == (0.25,) * 4
    assert max(shares["hashed"].lookups) < 0.3
    table = Table("t", 4000, 8, 1.0, ordered=True, row_shares=shares["round_robin"])
    assert hash_tables.row_division_imbalance(table, 4) == pytest.approx(4.0)
    assert hash_tables.row_division_imbalance(table, 2) == pytest.approx(2.0)
    # The same shares are priced: all lookups are those of the first device's rows.
    placement = Placement("row", Shard.whole(table), (0, 1, 2, 3))
    assert [access_share(s) for _, s in shards_by_device(placement)] == pytest.approx([1, 0, 0, 0])
    problem = Problem("p", (table,), Topology((Device(1 << 30),) * 4), 8)
    assert "4.00x" in heat_table(problem, 0.1) and "busiest of 4 ranges" in heat_table(problem, 0.1)


def test_buckets_that_devices_do_not_divide_are_refused_with_the_next_number():
    def problem(buckets, rows=60, n=4):
        table = Table("t", rows, 8, 1.0, managed_collision=ManagedCollision(8, buckets=buckets))
        return Problem("p", (table,), Topology((Device(1 << 30),) * n), 2 * n)

    assert problem(12).tables[0].managed_collision.buckets == 12
    with pytest.raises(
        ShardCoreError, match="'p' has table 't' of 10 buckets, which 4 devices do not .* as 12"
    ):
        problem(10)
    with pytest.raises(ShardCoreError, match="'t' has 60 rows in 8 buckets of equal size; .* such as 64"):
        problem(8)
