"""The generated pool meets the published statistics, on its streams too."""

import numpy as np
import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.step import access
from shardcore.tables import streams
from shardcore.tables.generate import PoolConfig, generate_pool
from shardcore.tables.statistics import pool_statistics, published_statistics

BATCH = 65536


@pytest.fixture(scope="module")
def pool():
    return generate_pool(PoolConfig())


@pytest.mark.long
def test_pool_meets_the_published_statistics(pool):
    found, wanted = pool_statistics(pool), published_statistics()
    for name, value in wanted.items():
        if name.startswith("unique row share"):  # published with three decimals
            assert found[name] == pytest.approx(value, rel=0.05, abs=0.0005), name
        else:
            assert found[name] == pytest.approx(value, rel=0.02), name


@pytest.mark.long
def test_pool_is_plausible(pool):
    assert len(pool) == 856 and len({t.name for t in pool}) == 856
    assert sum(t.pooling == 0 for t in pool) == 36
    assert all(sum(t.access.bins) == 0 and t.rows == 1 for t in pool if t.pooling == 0)
    assert all(t.rows >= len(access.reference_row_counts(t)) for t in pool)
    assert min(t.rows for t in pool if t.pooling) <= 4 and max(t.rows for t in pool) < 60_000_000
    assert max(t.pooling for t in pool) < 400


@pytest.mark.long
def test_bins_are_whole_rows(pool):
    for table in pool[::4]:
        counts = access.reference_row_counts(table)
        bins = np.bincount(access.reuse_bin_index(counts), minlength=17) / max(len(counts), 1)
        assert np.abs(bins - table.access.bins).max() < 1e-9, table.name
        assert counts.sum() == table.pooling * BATCH


@pytest.mark.long
def test_streams_of_a_sample_have_their_tables_histograms(pool):
    ordered = sorted(pool, key=lambda t: t.pooling)
    for table in ordered[:: len(pool) // 8]:
        ids, _ = streams.draw_lookups(table, BATCH, seed=1)
        assert len(ids) == table.pooling * BATCH
        assert access.reuse_from_ids(ids, BATCH).bins == pytest.approx(table.access.bins, abs=1e-9), (
            table.name
        )


@pytest.mark.long
def test_streams_of_a_whole_pool_meet_the_published_statistics():
    """All streams of a small pool, whose own calibration is as tight as so few tables allow."""
    small = generate_pool(PoolConfig(tables=16, seed=3))

    def measured(table):
        return np.unique(streams.draw_lookups(table, BATCH)[0], return_counts=True)[1]

    assert pool_statistics(small, measured) == pytest.approx(pool_statistics(small))


def test_same_config_same_pool():
    config = PoolConfig(tables=60, seed=4, dim=32)
    pool = generate_pool(config)
    assert pool == generate_pool(config) and {t.dim for t in pool} == {32}
    assert pool != generate_pool(PoolConfig(tables=60, seed=5, dim=32))


@pytest.mark.parametrize("tables", [1, 2, 8, 24, 100])
def test_small_pools(tables):
    pool = generate_pool(PoolConfig(tables=tables))
    assert len(pool) == tables
    assert sum(t.pooling == 0 for t in pool) == round(tables * 36 / 856)


@pytest.mark.parametrize("fields, match", [({"tables": 0}, "tables 0"), ({"seed": -1}, "seed -1")])
def test_bad_pool_config(fields, match):
    with pytest.raises(ShardCoreError, match=match):
        PoolConfig(**fields)
