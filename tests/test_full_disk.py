"""A disk that is full while a part is written: a limit of the file's size, at which the kernel refuses to
write."""

import contextlib
import os
import resource

import pytest
from laws import SETTING, compute_samples, linear_law, pool

from shardcore import files
from shardcore.errors import ShardCoreError
from shardcore.samples import dataset


@contextlib.contextmanager
def room_for(size):
    """Only so many bytes in any file of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1, 4096, 9999])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, size):
    path = tmp_path / "plans/plan.json"
    files.write_atomic(path, b"of before")
    with room_for(size), pytest.raises(ShardCoreError, match=rf"^cannot write {path}: File too large$"):
        files.write_atomic(path, bytes(10_000))
    assert path.read_bytes() == b"of before" and os.listdir(path.parent) == ["plan.json"]
    with room_for(10_000):
        files.write_atomic(path, bytes(10_000))
    assert path.read_bytes() == bytes(10_000)


def test_a_part_that_finds_no_room_loses_nothing_that_was_there(tmp_path):
    samples = list({s.id: s for s in compute_samples(linear_law, 40)}.values())
    name = dataset.write_pool(tmp_path, pool())
    dataset.write_compute(tmp_path, samples[:20], name)
    there = sorted(os.listdir(tmp_path))
    with room_for(2000), pytest.raises(ShardCoreError,
                                       match=r"^cannot write \S+/compute-\S+: File too large$"):
        dataset.write_compute(tmp_path, samples[20:], name)
    assert sorted(os.listdir(tmp_path)) == there
    assert {s.id for s in dataset.read_compute(tmp_path, SETTING)} == {s.id for s in samples[:20]}
    dataset.write_compute(tmp_path, samples[20:], name)
    assert {s.id for s in dataset.read_compute(tmp_path, SETTING)} == {s.id for s in samples}
