"""Heat of a table against streams that are drawn from it, and against a cache that is simulated on these."""

import numpy as np
import pytest
from lru import cache_misses

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Shard, Table
from shardcore.step import access
from shardcore.tables import streams
from shardcore.tables.heat import TableHeat, count_row_lookups, heat_of_tables

BATCH = 256
HALVES = (0.2, 0.2, 0.2, 0.2, 0.1, 0.1) + (0.0,) * 11


def zipf(alpha=1.05, rows=2_000, pooling=5.0, **fields):
    return Table(f"z{alpha}", rows, 16, pooling, Zipf(alpha), **fields)


def reuse(batch=8 * BATCH, rows=8_000, pooling=4.0):
    return Table("r", rows, 16, pooling, Reuse(HALVES, batch))


TABLES = [zipf(0.0), zipf(0.8), zipf(1.05), zipf(1.4), reuse(), reuse(rows=1_500)]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_heat_adds_up(table):
    (heat,) = heat_of_tables([table], BATCH)
    assert heat.rows.sum() == pytest.approx(table.rows)
    assert heat.hottest_lookups(table.rows) == pytest.approx(access.lookup_count(table, BATCH), rel=0.01)
    assert heat.unique_rows == pytest.approx(access.unique_rows(Shard.whole(table), BATCH), rel=1e-6)
    assert np.all(np.diff(heat.lookups) <= 1e-9)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_hottest_rows_have_their_expected_lookups_in_streams(table):
    (heat,) = heat_of_tables([table], BATCH)
    drawn = [count_row_lookups(table, streams.draw_lookups(table, BATCH, seed)[0]) for seed in range(60)]
    # A stream's hottest rows are known from its table: they are those of the lowest ranks.
    order = (
        np.arange(table.rows) if table.ordered else streams._scatter_ranks(np.arange(table.rows), table.rows)
    )
    mean = np.mean(drawn, axis=0)[order]
    # Counts within a bin of a histogram differ, which classes do not tell.
    for rows in (20, 200, 1000) if isinstance(table.access, Zipf) else (500, 1000):
        assert mean[:rows].sum() == pytest.approx(heat.hottest_lookups(rows), rel=0.1)


@pytest.mark.parametrize("table", TABLES, ids=str)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_misses_are_those_of_a_simulated_cache(table, share):
    (heat,) = heat_of_tables([table], BATCH)
    # Whole sets, as FBGEMM allocates them.
    rows = int(share * table.rows) // 32 * 32
    seen, missed = cache_misses(
        (streams.draw_lookups(table, BATCH, seed)[0] for seed in range(150)), table.rows, rows, warm=100
    )
    assert heat.missed_rows(rows) / heat.unique_rows == pytest.approx(missed.sum() / seen.sum(), abs=0.015)


def test_misses_fall_with_the_cache_and_end_at_none():
    for heat in heat_of_tables(TABLES, BATCH):
        sizes = np.linspace(0, heat.table_rows, 200)
        misses = heat.missed_rows(sizes)
        assert misses[0] == pytest.approx(heat.unique_rows)
        assert misses[-1] == 0
        assert np.all(np.diff(misses) <= 1e-6)


def test_heat_of_data_is_near_that_of_its_law():
    table = zipf(1.2)
    ids = np.concatenate([streams.draw_lookups(table, BATCH, seed)[0] for seed in range(50)])
    (law,), mean = heat_of_tables([table], BATCH), np.sort(count_row_lookups(table, ids) / 50)[::-1]
    # Each row is a class of its own, and its lookups in a batch are taken to be Poisson.
    data = TableHeat(table.name, BATCH, np.ones(len(mean)), mean, -np.expm1(-mean))
    assert data.unique_rows == pytest.approx(law.unique_rows, rel=0.02)
    ratios = [heat.missed_rows(500) / heat.unique_rows for heat in (data, law)]
    assert ratios[0] == pytest.approx(ratios[1], abs=0.05)


@pytest.mark.parametrize(
    "do, words",
    [
        (lambda: heat_of_tables([zipf(pooling=0.0)], BATCH), "has no access statistics: its pooling of 0"),
        (lambda: heat_of_tables([reuse(batch=BATCH // 2)], BATCH), "needs one of 256 samples or more"),
        (
            lambda: count_row_lookups(zipf(rows=5), np.array([1, 5, -1])),
            "given id 5, one of 2 outside it; it has 5",
        ),
        (
            lambda: heat_of_tables([zipf(rows=5)], BATCH)[0].missed_rows(6),
            "was asked for 6 cached rows; it has 5 rows",
        ),
        (
            lambda: heat_of_tables([zipf(rows=5)], BATCH)[0].hottest_lookups(np.nan),
            "asked for nan hottest rows",
        ),
    ],
)
def test_what_cannot_be_said_is_refused(do, words):
    with pytest.raises(ShardCoreError, match=words):
        do()


@pytest.mark.parametrize("alpha", [0.7, 1.1, 1.3])
@pytest.mark.parametrize("batches, within", [(1, 0.1), (8, 0.05)])
def test_rows_that_a_histogram_never_saw_are_missed_as_in_data(alpha, batches, within):
    """A histogram of some batches of a power law tells what a cache misses in others."""
    law = zipf(alpha, rows=5_000)
    ids = np.concatenate([streams.draw_lookups(law, BATCH, 999 + i)[0] for i in range(batches)])
    table = Table("r", 5_000, 16, 5.0, access.reuse_from_ids(ids, batches * BATCH))
    blind, told = (heat_of_tables([table], BATCH, unseen)[0] for unseen in (False, True))
    assert told.lookups @ told.rows == pytest.approx(blind.lookups @ blind.rows)
    assert np.all(np.diff(told.lookups) <= 0)
    for rows in (512, 1024, 2016):
        seen, missed = cache_misses(
            (streams.draw_lookups(law, BATCH, seed)[0] for seed in range(150)), law.rows, rows, warm=100
        )
        ratio = missed.sum() / seen.sum()
        off, blind_off = (abs(heat.missed_rows(rows) / heat.unique_rows - ratio) for heat in (told, blind))
        assert off < min(within, blind_off + 0.01)
