"""The generated pool meets the published statistics, on its streams too; files and lists are read or refused with a reason."""

import gzip

import numpy as np
import pytest
import torch

from shardcore import streams
from shardcore.__main__ import main
from shardcore.tables import (
    DEFAULT_ACCESS,
    PoolConfig,
    dlrm_datasets_pool,
    generate_pool,
    pool_statistics,
    public_pool,
    public_pools,
    published,
)
from shardcore.types import Reuse, ShardCoreError, Zipf

BATCH = 65536


@pytest.fixture(scope="module")
def pool():
    return generate_pool(PoolConfig())


def test_pool_meets_the_published_statistics(pool):
    found, wanted = pool_statistics(pool), published()
    for name, value in wanted.items():
        if name.startswith("unique row share"):  # published with three decimals
            assert found[name] == pytest.approx(value, rel=0.05, abs=0.0005), name
        else:
            assert found[name] == pytest.approx(value, rel=0.02), name


def test_pool_is_plausible(pool):
    assert len(pool) == 856 and len({t.name for t in pool}) == 856
    assert sum(t.pooling == 0 for t in pool) == 36
    assert all(sum(t.access.bins) == 0 and t.rows == 1 for t in pool if t.pooling == 0)
    assert all(t.rows >= len(streams.reference_counts(t)) for t in pool)
    assert min(t.rows for t in pool if t.pooling) <= 4 and max(t.rows for t in pool) < 60_000_000
    assert max(t.pooling for t in pool) < 400


def test_bins_are_whole_rows(pool):
    for table in pool[::4]:
        counts = streams.reference_counts(table)
        bins = np.bincount(streams.reuse_bin(counts), minlength=17) / max(len(counts), 1)
        assert np.abs(bins - table.access.bins).max() < 1e-9, table.name
        assert counts.sum() == table.pooling * BATCH


def test_streams_of_a_sample_have_their_tables_histograms(pool):
    ordered = sorted(pool, key=lambda t: t.pooling)
    for table in ordered[:: len(pool) // 8]:
        ids, _ = streams.stream(table, BATCH, seed=1)
        assert len(ids) == table.pooling * BATCH
        assert streams.reuse_of(ids, BATCH).bins == pytest.approx(table.access.bins, abs=1e-9), table.name


def test_streams_of_a_whole_pool_meet_the_published_statistics():
    """All streams of a small pool, whose own calibration is as tight as so few tables allow."""
    small = generate_pool(PoolConfig(tables=16, seed=3))

    def measured(table):
        return np.unique(streams.stream(table, BATCH)[0], return_counts=True)[1]

    assert pool_statistics(small, measured) == pytest.approx(pool_statistics(small))


def test_same_config_same_pool():
    config = PoolConfig(tables=60, seed=4, dim=32)
    assert generate_pool(config) == generate_pool(config)
    assert {t.dim for t in generate_pool(config)} == {32}
    assert generate_pool(config) != generate_pool(PoolConfig(tables=60, seed=5, dim=32))


@pytest.mark.parametrize("tables", [1, 2, 8, 24, 100])
def test_small_pools(tables):
    pool = generate_pool(PoolConfig(tables=tables))
    assert len(pool) == tables
    assert sum(t.pooling == 0 for t in pool) == round(tables * 36 / 856)


@pytest.mark.parametrize(("fields", "match"), [({"tables": 0}, "tables 0"), ({"seed": -1}, "seed -1")])
def test_bad_pool_config(fields, match):
    with pytest.raises(ShardCoreError, match=match):
        PoolConfig(**fields)


# --- files of dlrm_datasets


LENGTHS = torch.tensor([[2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
INDICES = torch.tensor([7, 7, 7, 9, 2, 0, 5, 5, 5, 5])
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.flatten().cumsum(0)])


@pytest.fixture
def save(tmp_path):
    def write(content, name="fbgemm_t3_bs4.pt.gz"):
        path = tmp_path / name
        with (gzip.open(path, "wb") if name.endswith(".gz") else path.open("wb")) as file:
            torch.save(content, file)
        return path
    return write


@pytest.mark.parametrize("name", ["fbgemm_t3_bs4.pt.gz", "fbgemm_t3_bs4.pt"])
def test_reads_a_file_of_the_release(save, name):
    first, empty, last = dlrm_datasets_pool(save((INDICES, OFFSETS, LENGTHS), name), dim=8)
    assert (first.name, first.rows, first.dim, first.pooling) == ("t000", 10, 8, 6 / 4)
    assert first.access == Reuse((0.75, 0, 0.25) + (0,) * 14, batch=4)
    assert (empty.rows, empty.pooling, sum(empty.access.bins)) == (1, 0, 0)
    assert (last.rows, last.pooling, last.access.bins[2]) == (6, 1, 1)


def test_a_generated_pool_comes_back_from_a_file_of_the_release(save):
    pool = generate_pool(PoolConfig(tables=12, seed=2))
    pool = tuple(t for t in pool if t.pooling < 8)
    parts = [streams.stream(t, BATCH) for t in pool]
    lengths = torch.tensor(np.stack([np.diff(offsets) for _, offsets in parts]))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    path = save((torch.tensor(np.concatenate([ids for ids, _ in parts])), offsets, lengths), "batch.pt")
    for found, table in zip(dlrm_datasets_pool(path), pool, strict=True):
        assert found.pooling == table.pooling and found.rows <= table.rows
        assert found.access.bins == pytest.approx(table.access.bins, abs=1e-9)


@pytest.mark.parametrize("content", [
    {"weights": INDICES}, (INDICES, OFFSETS), (INDICES, OFFSETS, LENGTHS.float()), (INDICES[:-1], OFFSETS, LENGTHS),
    (INDICES, OFFSETS[:-1], LENGTHS), (INDICES, OFFSETS, LENGTHS.flatten()), (INDICES, OFFSETS, LENGTHS.flip(0)),
    (INDICES - 1, OFFSETS, LENGTHS), (INDICES, OFFSETS + 1, LENGTHS), "text"])
def test_refuses_a_foreign_file(save, content):
    with pytest.raises(ShardCoreError, match="dlrm_datasets file .* needs to be the torch.save of"):
        dlrm_datasets_pool(save(content))


def test_refuses_a_file_that_is_no_torch_file_or_missing(tmp_path):
    for name, content in (("a.pt", b"rows,dim\n3,4\n"), ("b.pt.gz", gzip.compress(b"rows,dim\n3,4\n")), ("c.pt", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ShardCoreError, match=name):
            dlrm_datasets_pool(tmp_path / name)
    with pytest.raises(ShardCoreError, match="does not exist"):
        dlrm_datasets_pool(tmp_path / "missing.pt.gz")
    with pytest.raises(ShardCoreError, match="folder"):
        dlrm_datasets_pool(tmp_path)


@pytest.mark.parametrize("name", ["batch.pt.gz", "batch.pt"])
@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
def test_refuses_a_file_cut_short(save, name, kept):
    path = save((INDICES, OFFSETS, LENGTHS), name)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(ShardCoreError, match="cut short"):
        dlrm_datasets_pool(path)


def test_a_file_cannot_run_code(save, tmp_path):
    class Touch:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    with pytest.raises(ShardCoreError, match="cannot be read"):
        dlrm_datasets_pool(save(Touch()))
    assert not (tmp_path / "touched").exists()


# --- public lists


@pytest.mark.parametrize(("name", "tables", "gib"), [("mlperf-dlrm-dcnv2", 26, 97), ("hugectr-180", 177, None)])
def test_public_lists(name, tables, gib):
    pool = public_pool(name)
    assert len(pool) == tables and len({t.name for t in pool}) == tables
    assert pool[0].access == (Zipf(1.1) if name.startswith("hugectr") else DEFAULT_ACCESS)
    assert gib is None or sum(t.bytes for t in pool) / 2**30 == pytest.approx(gib, abs=1)


def test_every_public_list_can_be_read():
    assert all(public_pool(name) for name in public_pools())
    assert [t.name for t in public_pool("criteo-kaggle")][:2] == ["c00", "c01"]


def test_unknown_list_names_the_known():
    with pytest.raises(ShardCoreError, match="'criteo'; known are mlperf-dlrm-dcnv2, criteo-1tb-uncapped"):
        public_pool("criteo")


@pytest.mark.parametrize("devices", ["65537", "1000000000000"])
def test_a_problem_of_more_devices_than_there_are_is_one_line(tmp_path, capsys, devices):
    made = ["problem", "mlperf-dlrm-dcnv2", "--devices", devices, "--out", str(tmp_path / "p.json")]
    assert main(made) == 1
    assert capsys.readouterr().err == f"error: problem has devices {devices}; it needs 1 to 65,536\n"
