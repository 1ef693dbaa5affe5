"""Input distribution: which ids and lengths devices send each other before a step."""

from dataclasses import replace

import numpy as np
import pytest
from given_ids import input_bytes
from shapes import arriving, column, host_row, on_hosts, replica, row

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.job import Job
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.step import memory
from shardcore.step.id_bytes import received_id_bytes
from shardcore.step.kinds import BUCKETIZED_IDS, IDS, Channel
from shardcore.step.lower import lower
from shardcore.tables import streams

TABLE = Table("t", 1000, 64, 5.0)


def problem(*tables: Table, hosts: str = "aabb", job: Job | None = None) -> Problem:
    return Problem("p", tables or (TABLE,), on_hosts(hosts), 8 * len(hosts), job=job or Job())


def received(plan: Plan, given: Problem, channel: Channel) -> np.ndarray:
    """[D] bytes by a channel. Nothing may arrive by others."""
    found = {run.ids: of for run, of in arriving(plan, given).items()}
    assert not any(n_bytes.any() for other, n_bytes in found.items() if other != channel)
    return found[channel]


def test_a_whole_table_gets_all_its_ids():
    assert received(Plan((column(TABLE, 1),)), problem(), IDS).tolist() == [0, 32 * (5 * 8 + 4), 0, 0]


def test_a_table_cut_by_columns_gets_its_ids_on_each_device():
    halves = Plan((column(TABLE, 0, 0, 32), column(TABLE, 2, 32, 64)))
    assert received(halves, problem(), IDS).tolist() == [32 * (5 * 8 + 4), 0, 32 * (5 * 8 + 4), 0]
    on_one = Plan((column(TABLE, 0, 0, 32), column(TABLE, 0, 32, 64)))
    assert received(on_one, problem(), IDS).tolist() == [32 * (5 * 8 + 4), 0, 0, 0]


def test_row_ranges_share_the_ids_but_each_has_all_lengths():
    given = problem()
    of_all = received(Plan((row(TABLE, given.topology),)), given, BUCKETIZED_IDS)
    assert of_all == pytest.approx([32 * (5 * 8 / 4 + 4)] * 4)
    of_host = received(Plan((host_row(TABLE, (2, 3)),)), given, BUCKETIZED_IDS)
    assert of_host == pytest.approx([0, 0, 32 * (5 * 8 / 2 + 4), 32 * (5 * 8 / 2 + 4)])


def test_popular_rows_come_first_in_an_ordered_table():
    table = Table("t", 1000, 64, 5.0, Zipf(1.2), ordered=True)
    given = problem(table)
    ids = received(Plan((row(table, given.topology),)), given, BUCKETIZED_IDS) - 32 * 4
    assert ids.sum() == pytest.approx(32 * 5 * 8, abs=2)
    assert ids[0] > 3 * ids[1] > 3 * ids[3]


def test_a_replica_needs_nothing_of_others():
    given = problem()
    assert not arriving(Plan((replica(TABLE, given.topology),)), given)


def test_ids_of_a_given_batch_are_counted():
    given = problem(hosts="aa", job=Job(id_bytes=4, length_bytes=8))
    lookups = {(0, 500): np.array([3, 4]), (500, 1000): np.array([1, 0])}
    sent, received = input_bytes(
        Plan((row(TABLE, given.topology),)), given, lambda shard: lookups[shard.row_lo, shard.row_hi]
    )
    assert sent.tolist() == [4 * 4 + 2 * 8 * 8, 4 * 4 + 2 * 8 * 8]
    assert received.tolist() == [7 * 4 + 16 * 8, 1 * 4 + 16 * 8]


@pytest.mark.parametrize(
    "shard", [Shard.whole(TABLE), Shard(TABLE, 0, 1000, 8, 16), Shard(TABLE, 250, 500, 0, 64)]
)
def test_a_shard_receives_the_same_in_searches_as_in_plans(shard):
    given = problem(job=Job(id_bytes=4))
    of_shard = {(0, 1000): 5.0, (250, 500): 1.25}[shard.row_lo, shard.row_hi]
    assert received_id_bytes(shard, given) == pytest.approx(32 * (4 * of_shard + 4))


@pytest.mark.parametrize(
    "access", [Zipf(1.05), Zipf(0.0), Reuse((0.5, 0.2, 0.2, 0.1) + (0.0,) * 13, 1 << 14)]
)
def test_what_statistics_make_us_expect_is_near_what_drawn_batches_have(access):
    """Within 2%, on each device of a plan with all kinds."""
    ordered = isinstance(access, Zipf)
    whole, host = (Table(name, 40_000, 16, pooling, access) for name, pooling in (("a", 20.0), ("c", 2.0)))
    rows = Table("b", 40_000, 16, 7.3, access, ordered=ordered)
    where = on_hosts("aabb")
    given = Problem("p", (whole, rows, host), where, 1 << 14)
    plan = Plan((column(whole, 0, 0, 8), column(whole, 3, 8, 16), row(rows, where), host_row(host, (2, 3))))
    local = given.local_batch

    def lookups(shard: Shard) -> np.ndarray:
        ids, offsets = streams.draw_lookups(shard.table, given.global_batch, seed=3)
        return np.array(
            [
                np.count_nonzero((mine >= shard.row_lo) & (mine < shard.row_hi))
                for mine in (ids[offsets[d * local] : offsets[(d + 1) * local]] for d in range(4))
            ]
        )

    _, arrived = input_bytes(plan, given, lookups)
    assert sum(arriving(plan, given).values()) == pytest.approx(arrived, rel=0.02)


def test_values_of_deduplicated_tables_travel_once():
    table = Table("t", 100, 8, 6.0, features=2)
    once = replace(table, dedup=3.0)
    plain, found = (Problem("p", (t,), Topology((Device(1 << 30),) * 2), 96) for t in (table, once))
    assert 3 * received_id_bytes(Shard.whole(once), found) == received_id_bytes(Shard.whole(table), plain)
    plans = [Plan((Placement("column", Shard.whole(t), (0,)),)) for t in (table, once)]
    traffic = [lower(plan, given).traffic for plan, given in zip(plans, (plain, found), strict=True)]
    assert (3 * traffic[1] == traffic[0]).all() and traffic[0].any()
    used = [memory.used_bytes(plan, given)[0] for plan, given in zip(plans, (plain, found), strict=True)]
    assert used[1] < used[0]
