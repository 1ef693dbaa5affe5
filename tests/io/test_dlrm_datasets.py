"""Files of dlrm_datasets are read, or refused with a reason."""

import gzip
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from shardcore.core.access_statistics import Reuse
from shardcore.core.errors import ShardCoreError
from shardcore.io.dlrm_datasets import read_dlrm_datasets_pool
from shardcore.tables import streams
from shardcore.tables.generate import PoolConfig, generate_pool

BATCH = 65536
LENGTHS = torch.tensor([[2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
INDICES = torch.tensor([7, 7, 7, 9, 2, 0, 5, 5, 5, 5])
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.flatten().cumsum(0)])


@pytest.fixture
def save(tmp_path):
    def write(content, name="fbgemm_t3_bs4.pt.gz"):
        path = tmp_path / name
        with gzip.open(path, "wb") if name.endswith(".gz") else path.open("wb") as file:
            torch.save(content, file)
        return path

    return write


@pytest.mark.parametrize("name", ["fbgemm_t3_bs4.pt.gz", "fbgemm_t3_bs4.pt"])
def test_reads_a_file_of_the_release(save, name):
    first, empty, last = read_dlrm_datasets_pool(save((INDICES, OFFSETS, LENGTHS), name), dim=8)
    assert (first.name, first.rows, first.dim, first.pooling) == ("t000", 10, 8, 6 / 4)
    assert first.access == Reuse((0.75, 0, 0.25) + (0,) * 14, batch=4)
    assert (empty.rows, empty.pooling, sum(empty.access.bins)) == (1, 0, 0)
    assert (last.rows, last.pooling, last.access.bins[2]) == (6, 1, 1)


def test_a_generated_pool_comes_back_from_a_file_of_the_release(save):
    pool = generate_pool(PoolConfig(tables=12, seed=2))
    pool = tuple(t for t in pool if t.pooling < 8)
    parts = [streams.draw_lookups(t, BATCH) for t in pool]
    lengths = torch.tensor(np.stack([np.diff(offsets) for _, offsets in parts]))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    path = save((torch.tensor(np.concatenate([ids for ids, _ in parts])), offsets, lengths), "batch.pt")
    for found, table in zip(read_dlrm_datasets_pool(path), pool, strict=True):
        assert found.pooling == table.pooling and found.rows <= table.rows
        assert found.access.bins == pytest.approx(table.access.bins, abs=1e-9)


@pytest.mark.parametrize(
    "content",
    [
        {"weights": INDICES},
        (INDICES, OFFSETS),
        (INDICES, OFFSETS, LENGTHS.float()),
        (INDICES[:-1], OFFSETS, LENGTHS),
        (INDICES, OFFSETS[:-1], LENGTHS),
        (INDICES, OFFSETS, LENGTHS.flatten()),
        (INDICES, OFFSETS, LENGTHS.flip(0)),
        (INDICES - 1, OFFSETS, LENGTHS),
        (INDICES, OFFSETS + 1, LENGTHS),
        "text",
    ],
)
def test_refuses_a_foreign_file(save, content):
    with pytest.raises(ShardCoreError, match="dlrm_datasets file .* needs to be the torch.save of"):
        read_dlrm_datasets_pool(save(content))


def test_refuses_a_file_that_is_no_torch_file_or_missing(tmp_path):
    for name, content in (
        ("a.pt", b"rows,dim\n3,4\n"),
        ("b.pt.gz", gzip.compress(b"rows,dim\n3,4\n")),
        ("c.pt", b""),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ShardCoreError, match=name):
            read_dlrm_datasets_pool(tmp_path / name)
    with pytest.raises(ShardCoreError, match="does not exist"):
        read_dlrm_datasets_pool(tmp_path / "missing.pt.gz")
    with pytest.raises(ShardCoreError, match="folder"):
        read_dlrm_datasets_pool(tmp_path)


@pytest.mark.parametrize("name", ["batch.pt.gz", "batch.pt"])
@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
def test_refuses_a_file_cut_short(save, name, kept):
    path = save((INDICES, OFFSETS, LENGTHS), name)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(ShardCoreError, match="cut short"):
        read_dlrm_datasets_pool(path)


@pytest.mark.parametrize("name", ["zeros.pt.gz", "zeros.pt"])
def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused_unread(save, tmp_path, name, monkeypatch):
    """300 MB of zeros pack to 0.3 MB."""
    path = save((torch.zeros(1 << 23, dtype=torch.int64), OFFSETS, LENGTHS), name)
    if name.endswith(".pt"):
        with zipfile.ZipFile(path) as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w") as packed:
            for entry in plain.infolist():
                packed.writestr(entry.filename, plain.read(entry), zipfile.ZIP_DEFLATED)
        path = tmp_path / "packed.pt"
    assert path.stat().st_size < 1 << 18
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(ShardCoreError, match=r"unpacks to more than [\d,]+ bytes|has packed or overlapping"):
        read_dlrm_datasets_pool(path)


@pytest.mark.parametrize(
    "content",
    [
        (INDICES[:1].expand(1 << 40), OFFSETS, LENGTHS),
        (INDICES, OFFSETS, LENGTHS[:1, :1].expand(1 << 20, 1 << 20)),
        (INDICES.to_sparse(), OFFSETS, LENGTHS),
        (INDICES.to("meta"), OFFSETS, LENGTHS),
        (torch.zeros(0, dtype=torch.int64), torch.tensor([0, 1, 0]), torch.tensor([[1, -1]])),
    ],
)
def test_tensors_that_are_larger_than_their_file_or_no_batch_are_refused(save, content):
    with pytest.raises(ShardCoreError, match="dlrm_datasets file"):
        read_dlrm_datasets_pool(save(content))


def test_a_pipe_or_a_device_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "batch.pt")
    for path in (tmp_path / "batch.pt", Path("/dev/zero")):
        with pytest.raises(ShardCoreError, match="it is no file"):
            read_dlrm_datasets_pool(path)


def test_a_file_cannot_run_code(save, tmp_path):
    class Touch:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    with pytest.raises(ShardCoreError, match="cannot be read"):
        read_dlrm_datasets_pool(save(Touch()))
    assert not (tmp_path / "touched").exists()
