"""Streams have the statistics of their table's specification, and the expectations given for them hold."""

import dataclasses
import hashlib
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_streams import shard_stream

from shardcore.core.access_statistics import REUSE_BINS, Reuse, RowShares, Zipf
from shardcore.core.types import Shard, Table
from shardcore.step import access
from shardcore.step.kinds import even_row_ranges
from shardcore.tables import streams

BATCH = 4096


def reuse_table(rows_in_bin, batch=BATCH, rows=None, ordered=False, name="t"):
    """A table with whole rows in each bin, at the bins' mean counts."""
    n = np.zeros(REUSE_BINS)
    n[: len(rows_in_bin)] = rows_in_bin
    lookups = round(float(n @ access.BIN_MEAN))
    reuse = Reuse(tuple(n / n.sum()), batch)
    return Table(name, rows or int(3 * n.sum()), 16, lookups / batch, reuse, ordered=ordered)


@st.composite
def whole_bins(draw):
    return draw(st.lists(st.integers(0, 60), min_size=1, max_size=REUSE_BINS).filter(any))


@given(whole_bins())
@settings(max_examples=60)
def test_reference_counts_are_the_specified_bins(rows_in_bin):
    table = reuse_table(rows_in_bin)
    counts = access.reference_row_counts(table)
    assert counts.sum() == access.lookup_count(table, BATCH)
    assert np.all(np.diff(counts) <= 0)
    found = np.bincount(access.reuse_bin_index(counts), minlength=REUSE_BINS)
    assert found[: len(rows_in_bin)].tolist() == rows_in_bin


@given(
    bins=st.lists(st.floats(0, 1), min_size=REUSE_BINS, max_size=REUSE_BINS).filter(lambda b: sum(b) > 0.1),
    lookups=st.integers(1, 200_000),
    rows=st.integers(1, 100_000),
)
@settings(max_examples=60)
def test_any_histogram_gives_counts_that_add_up(bins, lookups, rows):
    """Also one that the lookups or the rows cannot hold, or that is not of whole rows."""
    table = Table("t", rows, 16, lookups / BATCH, Reuse(tuple(np.array(bins) / sum(bins)), BATCH))
    counts = access.reference_row_counts(table)
    assert counts.sum() == lookups
    assert counts.min() >= 1
    assert len(counts) <= rows


def test_reuse_bin_edges():
    counts = np.array([1, 2, 3, 4, 5, 8, 9, 32768, 32769, 10**9])
    assert access.reuse_bin_index(counts).tolist() == [0, 1, 2, 2, 3, 3, 4, 15, 16, 16]


@given(whole_bins(), st.booleans(), st.integers(0, 3))
@settings(max_examples=20)
def test_stream_at_the_reference_batch_has_the_histogram_exactly(rows_in_bin, ordered, seed):
    table = reuse_table(rows_in_bin[:12] if any(rows_in_bin[:12]) else [1], ordered=ordered)
    ids, offsets = streams.draw_lookups(table, BATCH, seed)
    assert access.reuse_from_ids(ids, BATCH).bins == pytest.approx(table.access.bins, abs=1e-12)
    assert len(ids) == access.lookup_count(table, BATCH) == offsets[-1]
    assert offsets[0] == 0 and len(offsets) == BATCH + 1 and np.all(np.diff(offsets) >= 0)
    assert ids.dtype == offsets.dtype == np.int64
    assert ids.min() >= 0 and ids.max() < table.rows


MIXED = [4000, 1500, 1200, 800, 500, 200, 80, 30, 12, 5, 2, 1]


@pytest.mark.parametrize("keep", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("ordered", [False, True])
def test_smaller_batches_touch_the_expected_rows(keep, ordered):
    table, batch = reuse_table(MIXED, ordered=ordered), round(BATCH * keep)
    whole = Shard.whole(table)
    measured = [len(np.unique(streams.draw_lookups(table, batch, seed)[0])) for seed in range(5)]
    assert np.mean(measured) == pytest.approx(access.unique_rows(whole, batch), rel=0.04)
    lookups = np.mean([len(streams.draw_lookups(table, batch, seed)[0]) for seed in range(5)])
    assert lookups == pytest.approx(access.lookup_count(table, batch), rel=0.05)


@pytest.mark.parametrize("factor", [1.3, 2, 3.5])
def test_larger_batches_have_their_lookups_and_no_new_rows(factor):
    table, batch = reuse_table(MIXED), round(BATCH * factor)
    ids, _ = streams.draw_lookups(table, batch)
    assert len(ids) == pytest.approx(access.lookup_count(table, batch), rel=0.01)
    assert len(np.unique(ids)) == access.unique_rows(Shard.whole(table), batch) == sum(MIXED)


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0, 1.05, 1.5])
@pytest.mark.parametrize("rows", [7, 1000, 2_000_000])
def test_zipf_streams_touch_the_expected_rows(alpha, rows):
    table = Table("z", rows, 16, 8, Zipf(alpha))
    ids, offsets = streams.draw_lookups(table, BATCH, seed=1)
    assert np.all(np.diff(offsets) == 8)
    assert ids.min() >= 0 and ids.max() < rows
    expected = access.unique_rows(Shard.whole(table), BATCH)
    assert len(np.unique(ids)) == pytest.approx(expected, rel=0.03, abs=1)


def test_zipf_with_fractional_pooling_spreads_over_the_samples():
    ids, offsets = streams.draw_lookups(Table("z", 100, 16, 0.3, Zipf(1.05)), BATCH)
    assert len(ids) == offsets[-1] == round(0.3 * BATCH)
    assert set(np.diff(offsets)) >= {0, 1}


TABLES = [
    reuse_table(MIXED),
    reuse_table(MIXED, ordered=True, name="o"),
    Table("z", 5000, 16, 4, Zipf(1.05)),
    Table("y", 5000, 16, 4, Zipf(1.05), ordered=True),
]


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
@given(cut=st.floats(0.01, 0.99), batch=st.sampled_from([512, BATCH]))
@settings(max_examples=8)
def test_row_ranges_partition_the_stream(table, cut, batch):
    at = max(1, int(cut * table.rows))
    low, high = Shard(table, 0, at, 0, table.dim), Shard(table, at, table.rows, 0, table.dim)
    ids, offsets = streams.draw_lookups(table, batch)
    (low_ids, low_offsets), (high_ids, high_offsets) = (shard_stream(s, batch) for s in (low, high))
    assert np.array_equal(low_offsets + high_offsets, offsets)
    assert np.array_equal(np.sort(np.concatenate([low_ids, high_ids + at])), np.sort(ids))
    assert low_ids.max(initial=0) < low.rows and high_ids.max(initial=0) < high.rows
    assert access.access_share(low) + access.access_share(high) == pytest.approx(1)
    parts = access.unique_rows(low, batch) + access.unique_rows(high, batch)
    assert parts == pytest.approx(access.unique_rows(Shard.whole(table), batch), rel=1e-6)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_a_row_range_serves_its_expected_share(table):
    shard = Shard(table, 0, table.rows // 4, 0, table.dim)
    ids, _ = shard_stream(shard, BATCH)
    share = len(ids) / access.lookup_count(table, BATCH)
    # Hashed: a few hot rows fall to one side.
    assert share == pytest.approx(access.access_share(shard), abs=0.06)
    assert len(np.unique(ids)) == pytest.approx(access.unique_rows(shard, BATCH), rel=0.05)
    expected = access.access_share(shard)
    assert expected > 0.7 if table.ordered else expected == pytest.approx(0.25, abs=0.001)


def test_column_shards_see_the_whole_stream():
    table = TABLES[0]
    ids, offsets = streams.draw_lookups(table, BATCH)
    part_ids, part_offsets = shard_stream(Shard(table, 0, table.rows, 4, 8), BATCH)
    assert np.array_equal(ids, part_ids) and np.array_equal(offsets, part_offsets)
    assert access.access_share(Shard(table, 0, table.rows, 4, 8)) == 1


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_streams_follow_from_table_batch_and_seed(table):
    ids, offsets = streams.draw_lookups(table, BATCH, seed=5)
    again, offsets_again = streams.draw_lookups(table, BATCH, seed=5)
    other, _ = streams.draw_lookups(table, BATCH, seed=6)
    assert np.array_equal(ids, again) and np.array_equal(offsets, offsets_again)
    assert not np.array_equal(ids, other)


def test_streams_are_those_of_earlier_versions(tables):
    """Or timings would mean something else than before: raise dataset_parts.MEASUREMENT_VERSIONS where this
    should fail."""
    found = {}
    for table in tables[:4]:
        content = hashlib.sha256()
        for batch in (64, 256, 400):
            for part in streams.draw_lookups(table, batch, 2):
                content.update(part.tobytes())
        found[table.name] = content.hexdigest()[:16]
    assert found == {
        "cold": "e51614a316f69b0c",
        "hot": "2585a6e094739ecc",
        "wide": "dacbd2795aaed348",
        "zipf": "ff831d69eca1e4b9",
    }


def test_unique_rows_by_hand():
    """A batch of a share p sees a row that the reference batch looks up n times with probability 1 - (1 - p)^n."""
    table = reuse_table([10, 4])
    for batch, expected in (
        (BATCH, 14),
        (2 * BATCH, 14),
        (BATCH // 2, 10 / 2 + 4 * 3 / 4),
        (BATCH // 4, 10 / 4 + 4 * 7 / 16),
    ):
        assert access.unique_rows(Shard.whole(table), batch) == pytest.approx(expected)
        half = Shard(table, 0, table.rows // 2, 0, 4)  # rows are scattered
        assert access.unique_rows(half, batch) == pytest.approx(expected / 2)
    uniform = Table("u", 1000, 16, 2.5, Zipf(0.0))
    assert access.unique_rows(Shard.whole(uniform), 200) == pytest.approx(1000 * (1 - np.exp(-0.5)), rel=1e-3)


def test_access_shares_by_hand():
    ordered = reuse_table(
        [10, 4], ordered=True
    )  # 18 lookups, of which the four most popular rows have two each
    for hi, share in ((4, 8 / 18), (2, 4 / 18), (9, 13 / 18), (14, 1), (42, 1)):
        assert access.access_share(Shard(ordered, 0, hi, 0, 16)) == pytest.approx(share)
    assert access.access_share(Shard(ordered, 3, 5, 0, 16)) == pytest.approx(3 / 18)
    zipf, flat = (Table("z", 99, 16, 1, Zipf(alpha), ordered=True) for alpha in (1.0, 0.0))
    assert access.access_share(Shard(zipf, 0, 9, 0, 16)) == pytest.approx(0.5)  # log 10 of log 100
    assert access.access_share(Shard(flat, 9, 42, 0, 16)) == pytest.approx(1 / 3)


def test_empty_tables_have_empty_streams():
    for accessed in (Reuse((0.0,) * REUSE_BINS, BATCH), Zipf(1.05)):
        table = Table("e", 10, 16, 0, accessed)
        ids, offsets = streams.draw_lookups(table, 64)
        assert len(ids) == 0 and offsets.tolist() == [0] * 65
        assert access.unique_rows(Shard.whole(table), 64) == 0
        assert access.reuse_from_ids(ids, 64).bins == (0.0,) * REUSE_BINS
    assert len(access.reference_row_counts(Table("e", 10, 16, 0, Reuse((0.0,) * REUSE_BINS, BATCH)))) == 0


def test_many_shards_at_once_are_each_what_it_is_alone():
    """Equal to the last bit, as other shards in a call must not change a plan."""
    rng = np.random.default_rng(0)
    shards = []
    for i in range(60):
        rows, ordered = int(10 ** rng.uniform(0.5, 6)), bool(i % 2)
        bins = rng.random(REUSE_BINS) * (rng.random(REUSE_BINS) < 0.5) + np.eye(REUSE_BINS)[0]
        accesses = [
            Reuse(tuple(bins / bins.sum()), int(rng.choice([512, 4096]))),
            Zipf([0.0, 0.5, 1.0, rng.uniform(0, 2)][i % 4]),
        ]
        pooling = float(rng.choice([0.0, 0.0001, 3.7, 40.0]))
        table = Table(f"t{i}", rows, 16, pooling, accesses[i % 3 > 0], ordered=ordered)
        lo = int(rng.integers(0, rows))
        shards += [Shard.whole(table), Shard(table, lo, int(rng.integers(lo, rows)) + 1, 0, 8)]
    for batch in (512, 4096):
        together = access.unique_rows_of_shards(shards, batch)
        access._KNOWN.clear()
        np.testing.assert_array_equal(together, [access.unique_rows(s, batch) for s in shards])
    assert all(0 <= u <= s.rows for s, u in zip(shards, together, strict=True))
    assert access.unique_rows_of_shards([], 64).shape == (0,)


def test_rows_of_a_table_that_no_lookup_hits_serve_their_share():
    table = Table("cold", 100, 16, 0.0, Reuse((0.0,) * REUSE_BINS, BATCH), ordered=True)
    assert access.access_share(Shard(table, 0, 25, 0, 16)) == 0.25
    assert access.unique_rows(Shard(table, 0, 25, 0, 16), BATCH) == 0


@pytest.mark.parametrize("of", [Zipf(0.8), Reuse((0.8, 0.15, 0.05) + (0.0,) * 14, 256)])
@pytest.mark.parametrize("dedup", [1.5, 4.0, 100.0])
def test_a_deduplicated_stream_has_fewer_values_of_the_same_rows(of, dedup):
    table = Table("t", 2_000, 16, 10.0, of, features=3)
    all_ids, _ = streams.draw_lookups(table, 256)
    ids, offsets = streams.draw_lookups(dataclasses.replace(table, dedup=dedup), 256)
    assert len(offsets) == round(256 * 3 / dedup) + 1 and offsets[-1] == len(ids) == round(2560 / dedup)
    found, every = np.unique(ids), np.unique(all_ids)
    assert set(found) <= set(every) and len(found) == min(len(every), len(ids))


# --- measured places ----------------------------------------------------------------------------------------

ROWS, LOOKUPS, BATCH = 1_000_000, 60_000, 4096


def ids_of(case: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    ranks = streams.draw_lookups(Table("z", ROWS, 4, LOOKUPS / BATCH, Zipf(1.2)), BATCH)[0]
    in_order = streams.draw_lookups(Table("z", ROWS, 4, LOOKUPS / BATCH, Zipf(1.2), ordered=True), BATCH)[0]
    return {
        "uniform": rng.integers(0, ROWS, LOOKUPS),
        "zipf hashed": ranks,
        "zipf in order": in_order,
        "first eighth": rng.integers(0, ROWS // 8, LOOKUPS),
        "new ids": np.maximum(ROWS - 1 - rng.exponential(ROWS / 20, LOOKUPS).astype(int), 0),
        "two kinds": np.concatenate(
            [
                rng.integers(0, ROWS // 2, LOOKUPS // 4),
                rng.integers(ROWS // 2, ROWS // 2 + 500, 3 * LOOKUPS // 4),
            ]
        ),
    }[case]


def parts_of(ids: np.ndarray, rows: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """[n] shares of lookups, and unique rows, of the devices that rows are divided over."""
    at = ids // -(-rows // n)
    return np.bincount(at, minlength=n) / len(ids), np.bincount(np.unique(ids) // -(-rows // n), minlength=n)


@pytest.mark.parametrize("n", [2, 8, 96])
@pytest.mark.parametrize("case", ["zipf in order", "first eighth", "new ids", "two kinds"])
def test_each_device_has_the_share_of_its_row_range(case, n):
    ids = ids_of(case)
    table = Table(
        "t",
        ROWS,
        8,
        LOOKUPS / BATCH,
        access.reuse_from_ids(ids, BATCH),
        ordered=True,
        row_shares=access.row_shares_from_ids(ids, ROWS, n),
    )
    ranges = [Shard(table, lo, hi, 0, 8) for lo, hi in even_row_ranges(ROWS, n)]
    lookups, unique = parts_of(ids, ROWS, n)
    assert [access.access_share(s) for s in ranges] == pytest.approx(lookups, abs=0.03)
    total = access.unique_rows(Shard.whole(table), BATCH)
    assert access.unique_rows_of_shards(ranges, BATCH) == pytest.approx(
        unique * total / unique.sum(), abs=0.02 * total
    )
    # The stream that is measured and replayed lies there too.
    drawn, offsets = streams.draw_lookups(table, BATCH)
    assert 0 <= drawn.min() <= drawn.max() < ROWS and offsets[-1] == len(drawn)
    drawn_lookups, drawn_unique = parts_of(drawn, ROWS, n)
    assert drawn_lookups == pytest.approx(lookups, abs=0.12)
    assert drawn_unique.sum() == pytest.approx(total) and drawn_unique == pytest.approx(
        unique * total / unique.sum(), abs=0.02 * total
    )


def test_ids_that_lie_as_if_hashed_have_no_shares():
    for case, n in product(("uniform", "zipf hashed"), (2, 8, 96)):
        assert access.row_shares_from_ids(ids_of(case), ROWS, n) is None
    assert access.row_shares_from_ids(ids_of("first eighth"), ROWS, 1) is None
    assert access.row_shares_from_ids(np.zeros(0, dtype=int), ROWS, 8) is None
    hot = np.concatenate([np.full(LOOKUPS, 7), ids_of("uniform")])  # a hot row is hot wherever it lies
    assert access.row_shares_from_ids(hot, ROWS, 8) is None


def test_row_shares_of_few_rows_are_of_each_row():
    ids = np.repeat(np.arange(25), [3, *[1] * 24])
    assert access.row_shares_from_ids(ids, 50, 2) == RowShares(
        (round(3 / 27, 9), *[round(1 / 27, 9)] * 24, *[0] * 25), (*[1 / 25] * 25, *[0] * 25)
    )
