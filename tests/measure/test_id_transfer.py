"""Input distribution among real processes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shapes import column, host_row, on_hosts, replica, row

from shardcore.core.job import Job
from shardcore.core.types import Plan, Problem, Table
from shardcore.io.measurements import CollectiveRequest
from shardcore.measure import id_transfer, local_ranks
from shardcore.step.collectives import collective_by_name
from shardcore.step.lower import lower

FEATURES, IDS, LOCAL = [2, 0, 1], [7, 0, 4], 3
A, B, C = (Table(name, rows, 16, 2.0) for name, rows in (("a", 100), ("b", 60), ("c", 10)))


def _exchange(rank, init_method, send):
    dist.init_process_group("gloo", init_method, rank=rank, world_size=3)
    transfer = id_transfer.IdTransfer(FEATURES, IDS, LOCAL, rank, job=Job(id_bytes=4, length_bytes=8))
    transfer.ids += 100 * rank  # tells where they come from
    with torch.profiler.profile() as profiler:
        lengths, ids = transfer.run()
    again = transfer.run()
    names = [e.key for e in profiler.key_averages() if "gloo:" in e.key]
    send((lengths.tolist(), ids.tolist(), str(ids.dtype), [x.tolist() for x in again], names))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def three():
    last = dict(local_ranks.run_ranks("test", _exchange, 3, (), 60.0))
    return [last[rank] for rank in range(3)]


def test_each_rank_gets_the_ids_of_its_features_from_all_ranks(three):
    """Two features for rank 0, of which each rank sends 7 ids; one for rank 2, of 4 ids; none for rank 1."""
    sent = [np.arange(11) + 100 * rank for rank in range(3)]
    lengths, ids, kind, again, _ = three[0]
    # 7 ids over two features of 3 samples: 2, 1, 1 and 1, 1, 1; feature by feature, rank by rank.
    assert lengths == [[2, 1, 1]] * 3 + [[1, 1, 1]] * 3
    assert ids == [*np.concatenate([s[:4] for s in sent]), *np.concatenate([s[4:7] for s in sent])]
    assert kind == "torch.int32" and again == [lengths, ids]
    assert three[1][:2] == ([], [])
    assert three[2][:2] == ([[2, 1, 1]] * 3, list(np.concatenate([s[7:] for s in sent])))


def test_it_takes_three_all_to_alls(three):
    assert all(names == ["gloo:all_to_all"] for *_, names in three)


@pytest.mark.parametrize("widths", [(8, 12, 0), (256, 4, 64)])
def test_a_drawn_exchange_has_the_bytes_of_its_columns(widths):
    request = CollectiveRequest(widths, 96, (0.0,) * 3, "all_to_all_ids")
    features, ids = id_transfer.feature_and_id_counts(request)
    n_bytes = [3 * (4 * 32 * f + 8 * n) for f, n in zip(features, ids, strict=True)]
    assert n_bytes == pytest.approx([96 * 4 * w for w in widths])


def test_a_replayed_step_sends_as_many_ids_as_its_workload_says():
    """Columns of a table on a device are one feature; replicas get no ids."""
    where = on_hosts("aabb")
    problem = Problem("p", (A, B, C), where, 64)
    plan = Plan(
        (column(A, 0, 0, 4), column(A, 0, 4, 8), column(A, 3, 8, 16), host_row(B, (2, 3)), replica(C, where))
    )
    workload = lower(plan, problem)
    columns, divided = id_transfer.make_step_transfers(workload, 3)
    assert (columns._lengths_to, columns._ids_to) == ([16, 0, 0, 16], [32, 0, 0, 32])
    assert (divided._lengths_to, divided._ids_to) == ([0, 0, 16, 16], [0, 0, 16, 16])
    many = Table("many", 100, 16, 6.0, features=3)
    of_three = lower(Plan((column(many, 1, 0, 8), column(many, 1, 8, 16))), Problem("p", (many,), where, 64))
    [one] = id_transfer.make_step_transfers(of_three, 0)
    assert (one._lengths_to, one._ids_to) == ([0, 48, 0, 0], [0, 96, 0, 0])
    both = lower(Plan((row(A, where), replica(B, where), replica(C, where))), problem)
    [one] = id_transfer.make_step_transfers(both, 0)
    assert one._ids_to == [8] * 4
    nothing = lower(Plan(tuple(replica(t, where) for t in (A, B, C))), problem)
    assert id_transfer.make_step_transfers(nothing, 0) == []


BUCKETS = {
    "one group": ([2, 2, 2], [9, 3, 5], [(0, 1, 2)]),
    "two groups": ([2, 2, 1, 1], [9, 3, 5, 2], [(0, 1), (2, 3)]),
}


def _bucketized(rank, init_method, send, features, ids, groups):
    dist.init_process_group("gloo", init_method, rank=rank, world_size=len(features))
    transfer = id_transfer.IdTransfer(
        features, ids, LOCAL, rank, groups=groups, work=collective_by_name("all_to_all_ids_bucketized").work
    )
    given = transfer.lengths.tolist(), transfer.ids.tolist()
    send((given, *(x.tolist() for x in transfer.run())))
    dist.destroy_process_group()


@pytest.mark.parametrize("of", BUCKETS)
def test_ids_in_buckets_arrive_at_the_rank_that_has_their_rows(of):
    features, ids, groups = BUCKETS[of]
    n, found = (
        len(features),
        dict(local_ranks.run_ranks("test", _bucketized, len(features), BUCKETS[of], 60.0)),
    )
    for group in groups:
        for bucket, rank in enumerate(group):
            (sent_lengths, sent), lengths, arrived = found[rank]
            assert len(arrived) == n * ids[rank]
            # All ranks send the same ids, feature by feature of the groups.
            first = sum(features[g[0]] for g in groups[: groups.index(group)])
            ends = np.cumsum([0, *sent_lengths])
            expected = []
            for f in range(first, first + features[rank]):
                for _ in range(n):
                    for b in range(LOCAL):
                        bag = sent[ends[f * LOCAL + b] : ends[f * LOCAL + b + 1]]
                        expected.append([i % 2**20 for i in bag if i // 2**20 == bucket])
            assert [len(bag) for bag in expected] == [x for row in lengths for x in row]
            assert [i for bag in expected for i in bag] == arrived


def test_drawn_ids_in_buckets_have_lengths_on_all_ranks():
    request = CollectiveRequest((256, 128, 200), 96, (0.0,) * 3, "all_to_all_ids_bucketized")
    features, ids = id_transfer.feature_and_id_counts(request)
    assert features == [4] * 3
    n_bytes = [3 * (4 * 32 * f + 8 * n) for f, n in zip(features, ids, strict=True)]
    assert n_bytes == pytest.approx([96 * 4 * w for w in request.widths])
