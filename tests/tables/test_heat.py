"""Heat of rows, against streams that are drawn and a cache that is simulated."""

from dataclasses import replace

import numpy as np
import pytest

from bench.heat import miss_ratio
from shardcore.errors import ShardCoreError
from shardcore.tables import access
from shardcore.tables.heat import heat_of, still_hot
from shardcore.tables.streams import stream
from shardcore.types import Reuse, Shard, Table, Zipf

BATCH = 256
TABLE = Table("t", 8000, 16, 6.0, Zipf(1.0))


def drawn(table, n):
    return [stream(table, BATCH, seed)[0] for seed in range(n)]


def test_the_hottest_rows_have_the_lookups_that_are_drawn():
    heat = heat_of(TABLE)
    counts = -np.sort(-np.bincount(np.concatenate(drawn(TABLE, 200)), minlength=TABLE.rows))
    for rows in (10, 100, 1000):
        assert heat.of_hottest(rows) == pytest.approx(counts[:rows].sum() / 200 / BATCH, rel=0.03)
    assert heat.of_hottest(TABLE.rows) == pytest.approx(TABLE.pooling)
    assert heat.of_hottest(np.array([0.0, 5.0])).tolist() == [0.0, heat.of_hottest(5.0)]
    hot = heat.rows_above(1 / BATCH)
    assert heat.of_hottest(hot + 1) - heat.of_hottest(hot) <= 1 / BATCH * (1 + 1e-9)


@pytest.mark.parametrize("table", [TABLE, replace(TABLE, access=Zipf(0.0))], ids=["skewed", "even"])
def test_a_batch_touches_as_many_rows_as_the_law_says_elsewhere(table):
    expected = access.unique_rows(Shard.whole(table), BATCH)
    assert heat_of(table).touched(BATCH) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.7, 1.2])
@pytest.mark.parametrize("share", [0.03, 0.1, 0.4])
def test_a_cache_misses_what_is_predicted(alpha, share):
    """One that holds less than a batch's rows, and larger ones; from the law, and from histograms."""
    table = replace(TABLE, access=Zipf(alpha))
    batches, rows = drawn(table, 80), int(share * table.rows)
    found = miss_ratio(batches, rows)
    for seen, within in ((None, 0.012), (8, 0.06), (1, 0.1)):
        if seen:
            table = replace(TABLE, access=access.reuse_of(np.concatenate(batches[:seen]), seen * BATCH))
        heat = heat_of(table)
        assert heat.missed(rows, BATCH) / heat.touched(BATCH) == pytest.approx(found, abs=within)


def test_a_cache_of_less_than_what_all_batches_look_up_misses_the_rest():
    heat = heat_of(Table("hot", 10, 16, 100.0, Zipf(0.5)))
    assert heat.missed(4, BATCH) == pytest.approx(6) and heat.missed(0, BATCH) == pytest.approx(10)


def test_nothing_is_missed_where_all_rows_that_are_looked_up_fit():
    seen = Table("seen", 100, 16, 2.0, Reuse((0.0, 1.0) + (0.0,) * 15, 64))  # 64 rows, each seen twice
    heat = heat_of(seen)
    assert heat.missed(64, 64) == 0.0 and heat.of_hottest(64) == pytest.approx(2.0)
    assert heat.of_hottest(100) == pytest.approx(2.0) and heat.missed(30, 64) > 0
    never = heat_of(replace(seen, pooling=0.0, access=Reuse((0.0,) * 17, 64)))
    assert never.touched(64) == never.missed(0, 64) == never.of_hottest(100) == 0


def test_all_rows_may_have_been_seen_once():
    heat = heat_of(Table("once", 5000, 16, 1.0, Reuse((1.0,) + (0.0,) * 16, 500)))
    assert heat.rows.sum() == 5000 and heat.of_hottest(5000) == pytest.approx(1.0)
    assert heat.touched(500) <= 500


def test_more_rows_than_there_are_and_no_samples_are_refused():
    heat = heat_of(TABLE)
    for asked in (lambda: heat.missed(8001, BATCH), lambda: heat.of_hottest(np.array([1, 8001]))):
        with pytest.raises(ShardCoreError, match="8001 rows were asked for; the table has 8000"):
            asked()
    with pytest.raises(ShardCoreError, match="a batch has 0 samples; it needs more than 0"):
        heat.touched(0)


def test_what_was_hot_is_still_hot_or_not():
    before = np.array([5, 1, 0, 9])
    assert still_hot(before, before, 2) == 1 and still_hot(before, np.array([9, 1, 0, 1]), 2) == 1
    assert still_hot(before, np.array([1, 3, 4, 0]), 2) == pytest.approx(1 / 7)
    assert still_hot(before, np.array([0, 3, 4, 0]), 2) == 0 and still_hot(before, 0 * before, 2) == 1
    with pytest.raises(ShardCoreError, match=r"counted for \[4\] rows before and \[3\] now"):
        still_hot(before, before[:3], 2)
    with pytest.raises(ShardCoreError, match="5 rows count as hot; the table has 4"):
        still_hot(before, before, 5)
