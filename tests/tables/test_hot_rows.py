"""Sequence tables as two: which rows are hot, and what each part is looked up. Hot ids on disk."""

from dataclasses import replace

import numpy as np
import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.io.hot_ids import HotIds, read_hot_ids, write_hot_ids
from shardcore.step import access
from shardcore.tables.heat import heat_of_tables
from shardcore.tables.hot_rows import hot_row_counts, split_hot_and_cold, with_hot_rows
from shardcore.tables.streams import draw_lookups

BATCH = 2048
TABLE = Table("t", 50_000, 32, 8.0, Zipf(1.1), sequence=True, ordered=True, collection="ec")
SEEN = replace(TABLE, name="u", access=access.reuse_from_ids(draw_lookups(TABLE, BATCH)[0], BATCH))


def problem(*tables: Table, **asked) -> Problem:
    return Problem("p", tables, Topology((Device(1 << 30),) * 4), BATCH, constraints=Constraints(**asked))


@pytest.mark.parametrize("table", [TABLE, SEEN])
@pytest.mark.parametrize("rows", [10, 200, 3000])
def test_parts_are_looked_up_as_in_the_whole_table(table, rows):
    ids = draw_lookups(table, BATCH, seed=5)[0]
    hot, cold = split_hot_and_cold(table, rows, BATCH)
    assert (hot.rows, hot.rows + cold.rows) == (rows, table.rows)
    assert hot.pooling + cold.pooling == pytest.approx(table.pooling)
    assert access.lookup_count(hot, BATCH) == pytest.approx(np.count_nonzero(ids < rows), rel=0.05)
    for part, found in ((hot, ids[ids < rows]), (cold, ids[ids >= rows])):
        assert heat_of_tables([part], BATCH)[0].unique_rows == pytest.approx(len(np.unique(found)), rel=0.1)


def test_hot_rows_are_whole_in_device_memory_also_of_a_table_in_host_memory():
    hot, cold = split_hot_and_cold(replace(TABLE, load_factor=0.2), 200, BATCH)
    assert (hot.load_factor, cold.load_factor) == (1.0, 0.2)


def test_rows_are_hot_from_a_number_of_lookups_on():
    found = hot_row_counts(problem(TABLE, replace(TABLE, name="pooled", sequence=False)), 4.0)
    # What one batch sees four times may be looked up less on average: so of many batches.
    ids = np.concatenate([draw_lookups(TABLE, BATCH, seed)[0] for seed in range(50)])
    assert list(found) == ["t"]
    assert found["t"] == pytest.approx(np.count_nonzero(np.bincount(ids) >= 4 * 50), rel=0.1)
    assert hot_row_counts(problem(TABLE), 1e9) == {}


def test_a_problem_runs_hot_rows_on_every_device():
    whole = problem(TABLE, SEEN, unsplit=("t",))
    found = with_hot_rows(whole, {"t": 100})
    assert [(t.name, t.rows, t.collection) for t in found.tables] == [
        ("t_hot", 100, "ec"),
        ("t_cold", 49_900, "ec.cold"),
        ("u", 50_000, "ec.cold"),
    ]
    assert found.constraints == Constraints(unsplit=("t_cold",), kinds=(("t_hot", ("data_parallel",)),))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: with_hot_rows(problem(replace(TABLE, sequence=False)), {"t": 3}), "which pools its lookups"),
        (lambda: with_hot_rows(problem(TABLE), {"t": 50_000}), "asked for 50000 hot rows; .* so 1 to 49999"),
        (lambda: with_hot_rows(problem(TABLE), {"absent": 3}), "'absent', which problem 'p' does not have"),
        (
            lambda: hot_row_counts(problem(TABLE), 0.0),
            "from 0.0 lookups a batch on; it needs a number above 0",
        ),
        (
            lambda: hot_row_counts(problem(replace(SEEN, access=replace(SEEN.access, batch=100))), 4.0),
            "reuse histogram of batch 100",
        ),
        (lambda: HotIds("t", 10, np.array([3, 3])), "needs different ones of 0 to 9, rising"),
        (lambda: HotIds("t", 10, np.array([3, 10])), "hot ids 3 to 10"),
        (lambda: HotIds.from_counts("t", np.ones(4), 4), "asked for 4 hot rows; it has 4 rows, so 1 to 3"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ShardCoreError, match=message):
        make()


def test_the_hottest_ids_are_hot_and_every_other_has_a_cold_row():
    counts = np.random.default_rng(0).integers(0, 1000, 500)
    hot = HotIds.from_counts("t", counts, 37)
    cold = np.setdiff1d(np.arange(500), hot.ids)
    assert counts[hot.ids].min() >= counts[cold].max()
    assert np.array_equal(hot.cold_ids(0, hot.cold_rows), cold)
    assert np.array_equal(hot.cold_ids(100, 110), cold[100:110])


def test_files_come_back_and_changed_ones_are_refused(tmp_path):
    path, hot = tmp_path / "hot.safetensors", HotIds("t", 500, np.array([1, 5, 9]))
    write_hot_ids(path, [hot, replace(hot, table="u")])
    found = read_hot_ids(path)
    assert list(found) == ["t", "u"]
    assert found["t"].digest == hot.digest != found["u"].digest
    data = path.read_bytes()
    path.write_bytes(data.replace((5).to_bytes(8, "little"), (6).to_bytes(8, "little")))
    with pytest.raises(ShardCoreError, match="tensors that do not match their digests"):
        read_hot_ids(path)
    path.write_bytes(data[:60])
    with pytest.raises(ShardCoreError, match="is not safetensors"):
        read_hot_ids(path)
