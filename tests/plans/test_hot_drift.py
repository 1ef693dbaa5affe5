"""Drift of hot rows, and the savings and moves of other hot ids."""

from dataclasses import replace

import numpy as np
import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.io.hot_ids import HotIds
from shardcore.io.model_files import write_tensors
from shardcore.io.row_counts import RowCounts, read_row_counts, write_row_counts
from shardcore.plans.hot_drift import hot_row_drifts
from shardcore.tables.hot_rows import with_hot_rows

PLAIN = Problem(
    "p",
    (Table("a", 8, 4, 2.0, Zipf(1.0), sequence=True), Table("b", 6, 8, 1.0, sequence=True)),
    Topology((Device(1 << 20),) * 4),
    64,
)
HOT = with_hot_rows(PLAIN, {"a": 2})
IDS = {"a": HotIds("a", 8, [1, 5])}


def drift(*counts: int, samples: int = 32, of: Problem = HOT, ids=IDS):
    return hot_row_drifts(of, ids, RowCounts(samples, {"a": np.array(counts)}))[0]


def test_nothing_moves_while_the_same_rows_are_hottest():
    same = drift(1, 9, 1, 1, 1, 7, 0, 0)
    assert (same.still_hot, same.share, same.best_share) == (1.0, 16 / 20, 16 / 20)
    assert (same.entering, same.saved_bytes, same.moved_bytes) == (0, 0.0, 0)
    assert list(same.new.ids) == [1, 5]
    planned = {t.name: t.pooling for t in HOT.tables}
    assert same.planned_share == pytest.approx(planned["a_hot"] / 2.0)


def test_what_turned_cold_leaves():
    """Row 6 is hotter than row 5 now, by 4 lookups of 20, in 32 samples."""
    some = drift(1, 8, 1, 1, 1, 2, 6, 0)
    assert (some.still_hot, some.share, some.best_share) == (0.5, 10 / 20, 14 / 20)
    assert list(some.new.ids) == [1, 6] and some.entering == 1
    # A row to four devices, and one to one. It has 4 columns of FP32.
    assert some.moved_bytes == 5 * 16
    # Twice as many samples in a batch. 3 of 4 lookups are of another device. An id has 8 bytes.
    assert some.saved_bytes == pytest.approx(8 * (8 + 2 * 16) * 3 / 4)
    half = replace(HOT, job=replace(HOT.job, forward_payload="fp16", backward_payload="bf16"))
    assert drift(1, 8, 1, 1, 1, 2, 6, 0, of=half).saved_bytes == pytest.approx(8 * (8 + 16) * 3 / 4)


def test_equally_hot_rows_stay():
    assert list(drift(3, 3, 3, 3, 3, 3, 3, 3).new.ids) == [1, 5]
    assert drift(3, 3, 3, 3, 3, 3, 3, 3).still_hot == 1.0


def test_counts_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "counts.safetensors"
    write_row_counts(path, RowCounts(7, {"a": np.arange(8), "b": np.zeros(6, np.int64)}))
    found = read_row_counts(path)
    assert found.samples == 7 and list(found.table_counts("a", 8)) == list(range(8))
    content = path.read_bytes()
    one_more = content[:-8] + (1).to_bytes(8, "little")
    for damaged, said in (
        (content[:-3], "is not safetensors"),
        (b"", "is not safetensors"),
        (one_more, "tensors that do not match their digests"),
        (content.replace(b'samples\\": 7', b'samples\\": 9'), "does not match its digest"),
    ):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(ShardCoreError, match=said):
            read_row_counts(path)


def test_counts_whose_sum_would_overflow_are_refused(tmp_path):
    """Near 2^62 four of them add up to nothing."""
    huge = {"a": np.full(4, 1 << 62)}
    with pytest.raises(ShardCoreError, match="row counts of table 'a' are 1.84e[+]19 together"):
        RowCounts(7, huge)
    write_tensors(tmp_path / "counts.safetensors", "row-counts", {"samples": 7}, huge)
    with pytest.raises(ShardCoreError, match="counts.safetensors: row counts of table 'a' are"):
        read_row_counts(tmp_path / "counts.safetensors")


@pytest.mark.parametrize(
    "do, words",
    [
        (lambda: drift(1, 2, of=HOT), "has 8 rows, its row counts 2"),
        (lambda: drift(*[0] * 8), "has no access statistics: its row counts are all 0"),
        (lambda: drift(*[1] * 8, of=PLAIN), "has no tables NAME_hot and NAME_cold"),
        (lambda: drift(*[1] * 8, ids={}), "no hot ids of table 'a', which has hot rows in problem 'p'"),
        (lambda: drift(*[1] * 8, ids={"a": HotIds("a", 8, [1])}), "given 1 hot ids of 8 rows; problem 'p'"),
        (lambda: drift(*[1] * 8, ids={"a": HotIds("a", 9, [1, 2])}), "2 hot ids of 9 rows; .* another table"),
        (
            lambda: drift(*[1] * 8, ids={**IDS, "b": HotIds("b", 6, [1])}),
            "hot ids of table 'b', which has no hot rows",
        ),
        (
            lambda: hot_row_drifts(HOT, IDS, RowCounts(1, {"b": np.ones(6, np.int64)})),
            "no row counts of table 'a'",
        ),
        (lambda: RowCounts(0, {}), "samples 0; it needs"),
        (lambda: RowCounts(1, {"a": np.array([-1])}), "row counts of table 'a' are int64"),
        (lambda: RowCounts(1, {"a": np.array([1.5])}), "row counts of table 'a' are float64"),
    ],
)
def test_what_cannot_be_told_is_refused(do, words):
    with pytest.raises(ShardCoreError, match=words):
        do()
